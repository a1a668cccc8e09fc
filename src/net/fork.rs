//! Children of fork. A child shares its parent's NIC and sockets: what it did to a connection, it would do to its parent.
//! So in a child of the process that started the engine nothing is touched: what it gives back is leaked, and every other
//! call is refused.
//!
//! Calls beside the data path read a flag that fork itself sets, in the child. Those of the data path look at their
//! connection's [`Alert`] anyway, and read nothing more: in the child every connection asks for attention, and is refused
//! before it looks at anything else. Locks that other threads of the parent held stay locked in the child for ever, so none
//! is taken there; the list of connections is held across fork so that the child has it whole.
//!
//! A child that was made without libc's fork, by a bare system call, is not seen.

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::alert::Alert;
use super::{Code, NetError};

/// The process that started the engine; 0 before.
static OWNER: AtomicU32 = AtomicU32::new(0);
static IS_CHILD: AtomicBool = AtomicBool::new(false);
/// This child has been told.
static TOLD: AtomicBool = AtomicBool::new(false);

type Alerts = Vec<Weak<Alert>>;

/// Connections that stand.
static STANDING: Mutex<Alerts> = Mutex::new(Vec::new());

thread_local! {
    /// Of the thread that forks. Nothing to drop: no destructor of a thread is to be registered.
    static HELD: Cell<Option<ManuallyDrop<MutexGuard<'static, Alerts>>>> = const { Cell::new(None) };
}

fn standing() -> MutexGuard<'static, Alerts> {
    STANDING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The engine starts in this process.
pub(super) fn watch() {
    if OWNER.swap(std::process::id(), Ordering::Relaxed) != 0 {
        return;
    }
    // SAFETY: the handlers live as long as the process: the library stays mapped.
    let rc = unsafe { libc::pthread_atfork(Some(before), Some(after_in_parent), Some(after_in_child)) };
    if rc != 0 {
        tracing::warn!(target: "init", "pthread_atfork failed ({rc}): a child of fork that calls into NCCL would harm this process");
    }
}

/// A connection that NCCL gets.
pub(super) fn enroll(alert: &Arc<Alert>) {
    let mut standing = standing();
    standing.retain(|alert| alert.strong_count() > 0);
    standing.push(Arc::downgrade(alert));
}

extern "C" fn before() {
    HELD.set(Some(ManuallyDrop::new(standing())));
}

extern "C" fn after_in_parent() {
    drop(HELD.take().map(ManuallyDrop::into_inner));
}

/// Only atomics: the other threads are gone, whatever they were at.
extern "C" fn after_in_child() {
    IS_CHILD.store(true, Ordering::Relaxed);
    TOLD.store(false, Ordering::Relaxed);
    if let Some(standing) = HELD.take().map(ManuallyDrop::into_inner) {
        // Never the last reference: who owns it here will not let go.
        standing.iter().filter_map(Weak::upgrade).for_each(|alert| alert.ask());
    }
}

/// Whether this process is a child of the one that started the engine.
#[inline]
pub(crate) fn is_child() -> bool {
    IS_CHILD.load(Ordering::Relaxed)
}

/// An error in a child.
#[inline]
pub(crate) fn refuse_child() -> Result<(), NetError> {
    if is_child() { Err(refused()) } else { Ok(()) }
}

#[cold]
fn refused() -> NetError {
    let owner = OWNER.load(Ordering::Relaxed);
    let text = format!(
        "NCCL communicators do not survive fork(): this process is a child of pid {owner}, whose connections are not its own; \
         start processes that use NCCL by fork and exec (PyTorch: the start methods spawn and forkserver), or fork before NCCL \
         starts"
    );
    if !TOLD.swap(true, Ordering::Relaxed) {
        tracing::warn!(target: "init", "{text}");
    }
    NetError::new(Code::InvalidUsage, text)
}
