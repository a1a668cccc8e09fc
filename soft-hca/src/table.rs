//! The process's queue pairs by index, for look-ups that take no lock: returning slots when a completion is polled, and
//! finding the peer in the null engine.
use crate::qp::{INDEX_MASK, Qp};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

static QPS: [AtomicPtr<Qp>; INDEX_MASK as usize + 1] =
    [const { AtomicPtr::new(ptr::null_mut()) }; INDEX_MASK as usize + 1];

pub(crate) fn enter(qp: &Qp) {
    QPS[(qp.index & INDEX_MASK) as usize].store(ptr::from_ref(qp).cast_mut(), Ordering::Release);
}

pub(crate) fn leave(qp: &Qp) {
    QPS[(qp.index & INDEX_MASK) as usize].store(ptr::null_mut(), Ordering::Release);
}

/// # Safety
/// The queue pair is not destroyed while the result is in use.
#[inline]
pub(crate) unsafe fn find(index: u32) -> Option<&'static Qp> {
    // SAFETY: null, or entered by its owner and not left yet.
    unsafe { QPS[(index & INDEX_MASK) as usize].load(Ordering::Acquire).as_ref() }
}
