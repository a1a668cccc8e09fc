//! Rings between the caller and the engine: work requests one way, completions the other. Neither side takes a system call.
use crate::abi::Wc;
use crate::events::{AsyncEvent, Channel, CqHandle, EventQueue};
use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicUsize, Ordering};

/// For sections of a few dozen instructions.
#[derive(Debug, Default)]
pub(crate) struct SpinLock(AtomicBool);

pub(crate) struct SpinGuard<'a>(&'a AtomicBool);

impl SpinLock {
    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_> {
        let mut turns = 0u32;
        while self.0.swap(true, Ordering::Acquire) {
            turns += 1;
            if turns.is_multiple_of(64) {
                std::thread::yield_now(); // the holder may have lost its core
            }
            std::hint::spin_loop();
        }
        SpinGuard(&self.0)
    }
}

impl Drop for SpinGuard<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Slots indexed by a counter that wraps. Who may touch which slot is the caller's business.
struct Slots<T>(Box<[UnsafeCell<MaybeUninit<T>>]>);

impl<T> Slots<T> {
    fn new(at_least: u32) -> Self {
        let len = at_least.max(1).next_power_of_two();
        Self((0..len).map(|_| UnsafeCell::new(MaybeUninit::uninit())).collect())
    }
    #[inline]
    fn at(&self, index: u32) -> *mut T {
        self.0[index as usize & (self.0.len() - 1)].get().cast()
    }
}

// SAFETY: the rings below order every access to a slot by their counters.
unsafe impl<T: Send> Sync for Slots<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Slots<T> {}

/// Work requests from callers to the engine. A slot is taken at posting and free again when the caller has *polled* the
/// completion that covers it, as on hardware: an unsignalled request holds its slot until a later completion is polled.
pub(crate) struct WorkRing<T> {
    slots: Slots<T>,
    capacity: u32,
    head: AtomicU32,
    freed: AtomicU32,
    pub(crate) producer: SpinLock,
}

impl<T: Copy> WorkRing<T> {
    pub(crate) fn new(capacity: u32) -> Self {
        Self {
            slots: Slots::new(capacity),
            capacity,
            head: AtomicU32::new(0),
            freed: AtomicU32::new(0),
            producer: SpinLock::default(),
        }
    }

    /// One past the newest request.
    #[inline]
    pub(crate) fn head(&self) -> u32 {
        self.head.load(Ordering::Acquire)
    }

    #[inline]
    pub(crate) fn is_full(&self) -> bool {
        self.head.load(Ordering::Relaxed).wrapping_sub(self.freed.load(Ordering::Acquire)) >= self.capacity
    }

    /// Takes the next slot, which the caller has written as far as it will be read. For the only producer.
    #[inline]
    pub(crate) fn commit(&self) -> u32 {
        let next = self.head.load(Ordering::Relaxed).wrapping_add(1);
        self.head.store(next, Ordering::Relaxed);
        next
    }

    /// # Safety
    /// The caller holds `producer` (or is the only thread), and the ring is not full.
    #[inline]
    pub(crate) unsafe fn push(&self, item: &T) {
        let head = self.head.load(Ordering::Relaxed);
        // SAFETY: not full, so the engine is done with this slot, and no other producer is here.
        unsafe { self.slots.at(head).write(*item) };
        self.head.store(head.wrapping_add(1), Ordering::Release);
    }

    /// # Safety
    /// `index` was pushed and its completion has not been handed to the caller yet.
    #[inline]
    pub(crate) unsafe fn get(&self, index: u32) -> &T {
        // SAFETY: pushed, hence initialised; not freed, hence not written.
        unsafe { &*self.slots.at(index) }
    }

    /// The slot of a request, for those who write or read single fields of it.
    #[inline]
    pub(crate) fn at(&self, index: u32) -> *mut T {
        self.slots.at(index)
    }

    #[inline]
    pub(crate) fn free_up_to(&self, index: u32) {
        self.freed.store(index, Ordering::Release);
    }

    /// Empties the ring; the caller holds `producer` and the engine's lock.
    pub(crate) fn reset(&self) {
        self.head.store(0, Ordering::Relaxed);
        self.freed.store(0, Ordering::Release);
    }
}

impl<T> std::fmt::Debug for WorkRing<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "WorkRing({}/{})", self.head.load(Ordering::Relaxed), self.capacity)
    }
}

/// A completion and the work-ring slots that polling it frees.
#[derive(Clone, Copy)]
pub(crate) struct Cqe {
    pub(crate) wc: Wc,
    pub(crate) frees: Freed,
}

/// `receive` of the QP at `qp` is free up to `up_to`.
#[derive(Clone, Copy)]
pub(crate) struct Freed {
    pub(crate) qp: u32,
    pub(crate) up_to: u32,
    pub(crate) receive: bool,
}

/// A completion queue. Pushed to under the engine's lock, polled by callers.
pub(crate) struct Cq {
    slots: Slots<Cqe>,
    capacity: u32,
    head: AtomicU32,
    tail: AtomicU32,
    consumer: SpinLock,
    /// 0 no notification asked for, 1 for any completion, 2 for solicited (or failed) ones.
    armed: AtomicU8,
    broken: AtomicBool,
    notify: Option<Arc<Channel>>,
    errors: Option<Arc<EventQueue<AsyncEvent>>>,
    /// The address of the `ibv_cq`, for events.
    pub(crate) handle: AtomicUsize,
}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Cq({}..{}/{})", self.tail.load(Ordering::Relaxed), self.head.load(Ordering::Relaxed), self.capacity)
    }
}

impl Cq {
    pub(crate) fn new(
        capacity: u32,
        notify: Option<Arc<Channel>>,
        errors: Option<Arc<EventQueue<AsyncEvent>>>,
    ) -> Self {
        Self {
            slots: Slots::new(capacity),
            capacity,
            head: AtomicU32::new(0),
            tail: AtomicU32::new(0),
            consumer: SpinLock::default(),
            armed: AtomicU8::new(0),
            broken: AtomicBool::new(false),
            notify,
            errors,
            handle: AtomicUsize::new(0),
        }
    }

    /// False when the queue had no room: it is broken from then on, and the caller reports that once.
    ///
    /// # Safety
    /// The caller is the only producer: it holds the engine's lock, or is the null engine's only thread.
    #[inline]
    pub(crate) unsafe fn push(&self, cqe: &Cqe, solicited: bool) -> bool {
        let head = self.head.load(Ordering::Relaxed);
        if head.wrapping_sub(self.tail.load(Ordering::Acquire)) >= self.capacity || self.is_broken() {
            return self.overflow();
        }
        // SAFETY: there is room, so no consumer reads this slot; there is one producer.
        unsafe { self.slots.at(head).write(*cqe) };
        // Whatever the transfer wrote is visible before its completion.
        self.head.store(head.wrapping_add(1), Ordering::Release);
        if self.notify.is_some() {
            self.wake(solicited || cqe.wc.status != 0);
        }
        true
    }

    #[cold]
    fn wake(&self, solicited: bool) {
        // Against the caller's "arm, then poll once more": its poll or this load sees the other's store.
        std::sync::atomic::fence(Ordering::SeqCst);
        let armed = self.armed.load(Ordering::Relaxed);
        if (armed == 1 || armed == 2 && solicited)
            && self.armed.swap(0, Ordering::SeqCst) != 0
            && let Some(channel) = &self.notify
        {
            let cq: CqHandle = self.handle.load(Ordering::Relaxed);
            channel.push(cq);
        }
    }

    #[cold]
    fn overflow(&self) -> bool {
        let known = self.broken.swap(true, Ordering::Relaxed);
        if let Some(errors) = self.errors.as_ref().filter(|_| !known) {
            let element = self.handle.load(Ordering::Relaxed);
            errors.push(AsyncEvent { kind: ibverbs_sys::IBV_EVENT_CQ_ERR, element });
        }
        known
    }

    pub(crate) fn arm(&self, solicited_only: bool) {
        self.armed.store(if solicited_only { 2 } else { 1 }, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Hands up to `count` completions to `out` and tells `freed` which work-ring slots they free.
    #[inline]
    pub(crate) fn poll(&self, count: u32, out: impl FnMut(u32, &Wc), freed: impl FnMut(Freed)) -> u32 {
        if self.head.load(Ordering::Acquire) == self.tail.load(Ordering::Relaxed) {
            return 0;
        }
        let _guard = self.consumer.lock();
        // SAFETY: the guard makes this the only consumer.
        unsafe { self.poll_alone(count, out, freed) }
    }

    /// # Safety
    /// Nobody else polls this queue meanwhile.
    #[inline]
    pub(crate) unsafe fn poll_alone(
        &self,
        count: u32,
        mut out: impl FnMut(u32, &Wc),
        mut freed: impl FnMut(Freed),
    ) -> u32 {
        let tail = self.tail.load(Ordering::Relaxed);
        let found = self.head.load(Ordering::Acquire).wrapping_sub(tail).min(count);
        for i in 0..found {
            // SAFETY: between tail and head: written, and not written again before tail moves.
            let cqe = unsafe { &*self.slots.at(tail.wrapping_add(i)) };
            freed(cqe.frees);
            out(i, &cqe.wc);
        }
        self.tail.store(tail.wrapping_add(found), Ordering::Release);
        found
    }

    /// Drops what a QP left behind, as drivers do when it is destroyed or reset. The engine's lock is held.
    pub(crate) fn forget(&self, qp: u32) {
        let _guard = self.consumer.lock();
        let tail = self.tail.load(Ordering::Relaxed);
        let head = self.head.load(Ordering::Relaxed);
        let mut keep = head;
        for i in (0..head.wrapping_sub(tail)).rev() {
            // SAFETY: between tail and head; the guard and the engine's lock keep both ends away.
            let cqe = unsafe { *self.slots.at(tail.wrapping_add(i)) };
            if cqe.frees.qp != qp {
                keep = keep.wrapping_sub(1);
                // SAFETY: as above; keep never falls below the entry just read.
                unsafe { self.slots.at(keep).write(cqe) };
            }
        }
        self.tail.store(keep, Ordering::Release);
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cqe(qp: u32, id: u64) -> Cqe {
        Cqe { wc: Wc { wr_id: id, ..Wc::default() }, frees: Freed { qp, up_to: 0, receive: false } }
    }

    fn drain(cq: &Cq) -> Vec<u64> {
        let mut ids = Vec::new();
        cq.poll(100, |_, wc| ids.push(wc.wr_id), |_| ());
        ids
    }

    #[test]
    fn overflow_breaks_the_queue_once() {
        let cq = Cq::new(3, None, None);
        // SAFETY: this thread is alone.
        let push = |id| unsafe { cq.push(&cqe(1, id), false) };
        assert!(push(1) && push(2) && push(3));
        assert!(!push(4), "reported");
        assert!(push(5), "and only once");
        assert_eq!(drain(&cq), [1, 2, 3]);
    }

    #[test]
    fn forgetting_keeps_the_order_of_the_others() {
        let cq = Cq::new(8, None, None);
        for id in 0..8u64 {
            // SAFETY: this thread is alone.
            assert!(unsafe { cq.push(&cqe(u32::from(id % 3 == 0), id), false) });
        }
        cq.forget(1);
        assert_eq!(drain(&cq), [1, 2, 4, 5, 7]);
    }

    #[test]
    fn a_slot_is_free_when_its_completion_was_polled() {
        let ring = WorkRing::new(2);
        for item in [7u64, 8] {
            assert!(!ring.is_full());
            // SAFETY: alone, and not full.
            unsafe { ring.push(&item) };
        }
        assert!(ring.is_full());
        // SAFETY: pushed and not freed.
        assert_eq!(unsafe { *ring.get(1) }, 8);
        ring.free_up_to(1);
        assert!(!ring.is_full());
    }
}
