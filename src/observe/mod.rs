//! What users see: `tracing` events become lines of NCCL's own logger.
//!
//! An event's `target` names NCCL's subsystem: `init` (INIT and NET: shown by NCCL_DEBUG=INFO alone), `net`, `env`, `reg`.
//! Nothing is formatted when the level is off. The plugin is a cdylib with a private copy of `tracing`, so its subscriber
//! never meets the application's.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong};
use std::fmt::{self, Write as _};
use std::sync::atomic::{AtomicPtr, Ordering};

use tracing::field::{Field, Visit};
use tracing::metadata::LevelFilter;
use tracing::{Event, Level, Metadata, span};

use crate::abi::types::{ncclDebugLogLevel, ncclDebugLogger_t};

/// The logger's C type: printf's arguments after the format.
type LogFn = unsafe extern "C" fn(ncclDebugLogLevel, c_ulong, *const c_char, c_int, *const c_char, ...);

static LOGGER: AtomicPtr<()> = AtomicPtr::new(std::ptr::null_mut());

/// Sends events to NCCL's logger from now on. May be called again: NCCL hands out its logger at every init.
pub fn install(logger: ncclDebugLogger_t, nccl_debug: Option<&str>) {
    if let Some(logger) = logger {
        LOGGER.store(logger as *mut (), Ordering::Release);
    }
    // A second call finds the subscriber in place, which is right: the level of the first init stays.
    let _ = tracing::subscriber::set_global_default(ToNccl { level: level(nccl_debug) });
}

/// What NCCL will show. WARN always goes to NCCL: it keeps the text for ncclGetLastError even when it prints nothing.
fn level(nccl_debug: Option<&str>) -> LevelFilter {
    match nccl_debug.map(str::trim).map(str::to_ascii_uppercase).as_deref() {
        Some("INFO" | "ABORT") => LevelFilter::INFO,
        Some("TRACE") => LevelFilter::TRACE,
        _ => LevelFilter::WARN,
    }
}

struct ToNccl {
    level: LevelFilter,
}

impl tracing::Subscriber for ToNccl {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= self.level
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(self.level)
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(String::with_capacity(160));
        line.0.push_str("NET/RDMA : ");
        event.record(&mut line);
        let metadata = event.metadata();
        emit(metadata.level(), flags(metadata.target()), metadata.file().unwrap_or(""), metadata.line(), line.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// NCCL's subsystem bits of a target.
fn flags(target: &str) -> c_ulong {
    use crate::abi::types::ncclDebugLogSubSys as s;
    let bits = match target {
        "init" => s::NCCL_INIT.0 | s::NCCL_NET.0,
        "env" => s::NCCL_ENV.0 | s::NCCL_INIT.0,
        "reg" => s::NCCL_REG.0,
        _ => s::NCCL_NET.0,
    };
    c_ulong::from(bits)
}

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String cannot fail.
        let _ = if field.name() == "message" {
            write!(self.0, "{value:?}")
        } else {
            write!(self.0, " {} {value:?}", field.name())
        };
    }
}

fn emit(level: &Level, flags: c_ulong, file: &str, line: Option<u32>, text: String) {
    let logger = LOGGER.load(Ordering::Acquire);
    if logger.is_null() {
        return;
    }
    let level = match *level {
        Level::ERROR | Level::WARN => ncclDebugLogLevel::NCCL_LOG_WARN,
        Level::INFO => ncclDebugLogLevel::NCCL_LOG_INFO,
        Level::DEBUG | Level::TRACE => ncclDebugLogLevel::NCCL_LOG_TRACE,
    };
    // A NUL inside can't come from us, but names come from outside.
    let text = CString::new(text.replace('\0', "?")).unwrap_or_default();
    let file = CString::new(file).unwrap_or_default();
    const FORMAT: &CStr = c"%s";
    // SAFETY: install stored a logger of this type and nothing else.
    let logger = unsafe { std::mem::transmute::<*mut (), LogFn>(logger) };
    let line = c_int::try_from(line.unwrap_or(0)).unwrap_or(0);
    // SAFETY: NCCL's logger is callable from any thread; "%s" takes the one string that follows.
    unsafe { logger(level, flags, file.as_ptr(), line, FORMAT.as_ptr(), text.as_ptr()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_follow_nccl_debug() {
        assert_eq!(level(None), LevelFilter::WARN);
        assert_eq!(level(Some("WARN")), LevelFilter::WARN);
        assert_eq!(level(Some("info")), LevelFilter::INFO);
        assert_eq!(level(Some("TRACE")), LevelFilter::TRACE);
    }

    #[test]
    fn targets_are_subsystems() {
        assert_eq!(flags("init"), 0x11);
        assert_eq!(flags("reg"), 0x2000);
        assert_eq!(flags("nccl_net_rdma::net"), 0x10);
    }
}
