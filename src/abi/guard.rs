//! The border that no panic crosses: a defect in the plugin ends a collective with an error, never the training job.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::net::{Code, NetError, fork};

use super::types::ncclResult_t;

impl From<Code> for ncclResult_t {
    fn from(code: Code) -> Self {
        match code {
            Code::System => Self::ncclSystemError,
            Code::Internal => Self::ncclInternalError,
            Code::InvalidArgument => Self::ncclInvalidArgument,
            Code::InvalidUsage => Self::ncclInvalidUsage,
            Code::Remote => Self::ncclRemoteError,
        }
    }
}

/// Runs the body of an entry. A child of fork is refused.
pub(super) fn call(entry: &'static str, body: impl FnOnce() -> Result<(), NetError>) -> ncclResult_t {
    call_data(entry, || fork::refuse_child().and_then(|()| body()))
}

/// Runs the body of an entry that gives something back: in a child of fork all is its parent's, and stays.
pub(super) fn give_back(entry: &'static str, body: impl FnOnce() -> Result<(), NetError>) -> ncclResult_t {
    if fork::is_child() { ncclResult_t::ncclSuccess } else { call_data(entry, body) }
}

/// Runs the body of an entry of the data path, where the connection itself refuses a child of fork.
#[inline]
pub(super) fn call_data(entry: &'static str, body: impl FnOnce() -> Result<(), NetError>) -> ncclResult_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ncclResult_t::ncclSuccess,
        // The room that first decided the error has said so.
        Ok(Err(e)) => e.code.into(),
        Err(panic) => panicked(entry, &*panic),
    }
}

#[cold]
fn panicked(entry: &str, panic: &(dyn std::any::Any + Send)) -> ncclResult_t {
    let what = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no text");
    // The logger is foreign code; should even this fail, the result stays.
    let _ = catch_unwind(AssertUnwindSafe(|| {
        tracing::error!(target: "init", "defect in the plugin: {entry} panicked ({what}); please report this line");
    }));
    ncclResult_t::ncclInternalError
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_an_internal_error() {
        let result = call("test", || panic!("on purpose"));
        assert_eq!(result, ncclResult_t::ncclInternalError);
    }

    #[test]
    fn errors_map_to_their_codes_and_never_to_in_progress() {
        for (code, result) in [
            (Code::System, ncclResult_t::ncclSystemError),
            (Code::Remote, ncclResult_t::ncclRemoteError),
            (Code::InvalidUsage, ncclResult_t::ncclInvalidUsage),
        ] {
            assert_eq!(call("test", || Err(NetError::new(code, "x"))), result);
        }
    }
}
