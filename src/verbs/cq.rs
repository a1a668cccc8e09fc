//! Completion queues.

use std::ffi::c_int;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs_sys as ib;

use super::completion::{Wc, WcBatch};
use super::context::Context;
use super::error::VerbsError;

type PollCq = unsafe extern "C" fn(*mut ib::ibv_cq, c_int, *mut ib::ibv_wc) -> c_int;

/// A completion queue, polled; it has no completion channel.
pub struct Cq {
    raw: NonNull<ib::ibv_cq>,
    /// From the context's table, so that a poll costs one indirect call and no look-up.
    poll: PollCq,
    context: Arc<Context>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cq").field("device", &self.context.name()).finish_non_exhaustive()
    }
}

impl Cq {
    /// `entries` must cover every request that can be outstanding on its queue pairs, since all of them complete when a
    /// queue pair fails.
    pub fn create(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>, VerbsError> {
        let Some(poll) = context.ops().poll_cq else {
            return Err(VerbsError::new("ibv_poll_cq", context.name(), libc::ENOSYS));
        };
        let cqe = c_int::try_from(entries).unwrap_or(c_int::MAX);
        // SAFETY: a live context; no channel.
        let raw = unsafe { (context.library.api.create_cq)(context.raw(), cqe, ptr::null_mut(), ptr::null_mut(), 0) };
        let raw = NonNull::new(raw)
            .ok_or_else(|| VerbsError::last("ibv_create_cq", context.name()).with(format_args!("{entries} entries")))?;
        Ok(Arc::new(Self { raw, poll, context: Arc::clone(context) }))
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_cq {
        self.raw.as_ptr()
    }

    /// Takes what has completed, at most a batch.
    #[inline(always)] // a message's cost
    pub fn poll<'a>(&self, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
        const LEN: c_int = 16;
        const { assert!(WcBatch::LEN == 16) };
        let room = batch.room.as_mut_ptr().cast::<ib::ibv_wc>();
        // SAFETY: a live queue and room for LEN completions of the layout asserted in completion.rs.
        let n = unsafe { (self.poll)(self.raw.as_ptr(), LEN, room) };
        let Ok(n) = usize::try_from(n) else { return Err(self.poll_failed()) };
        // SAFETY: the device filled the first n, at most LEN.
        Ok(unsafe { std::slice::from_raw_parts(batch.room.as_ptr().cast::<Wc>(), n.min(WcBatch::LEN)) })
    }

    #[cold]
    fn poll_failed(&self) -> VerbsError {
        VerbsError::last("ibv_poll_cq", self.context.name())
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once, after its queue pairs (they hold this object).
        unsafe { (self.context.library.api.destroy_cq)(self.raw.as_ptr()) };
    }
}
