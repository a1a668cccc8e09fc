//! What the data path needs of the wire: QPs to post on, and what went wrong on them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::verbs::{Cq, Failure, Qp, Rts, VerbsError, Wc, WcBatch, WriteWr};

use super::MAX_RAILS;
use super::staging::Shadow;

/// The keys of one registration on every rail of a connection, and how much traffic uses it.
#[derive(Debug, Default)]
pub struct Keys {
    pub lkeys: [u32; MAX_RAILS],
    pub rkeys: [u32; MAX_RAILS],
    /// Whether what arrives there is flushed: the registration then allows remote reads.
    pub flushed: bool,
    /// Where messages that are staged go instead.
    shadow: Option<Box<Shadow>>,
    flight: Flight,
    /// Hinted receives: done for NCCL, but what the peer has not counted may still land.
    hinted: Flight,
}

impl Keys {
    pub fn new(lkeys: [u32; MAX_RAILS], rkeys: [u32; MAX_RAILS], flushed: bool) -> Self {
        Self { lkeys, rkeys, flushed, shadow: None, flight: Flight::default(), hinted: Flight::default() }
    }

    /// The same with a shadow.
    pub fn staged_by(mut self, shadow: Shadow) -> Self {
        self.shadow = Some(Box::new(shadow));
        self
    }

    pub fn may_stage(&self) -> bool {
        self.shadow.is_some()
    }

    /// The shadow, if a message of this size goes through it.
    #[inline]
    pub(super) fn staged(&self, size: u64) -> Option<&Shadow> {
        self.shadow.as_deref().filter(|shadow| shadow.takes(size))
    }

    /// Requests that use the registration now.
    pub fn in_flight(&self) -> u32 {
        self.flight.0.load(Ordering::Acquire)
    }

    /// Hinted receives that use the registration, as far as the peer has told.
    pub fn hinted_in_flight(&self) -> u32 {
        self.hinted.0.load(Ordering::Acquire)
    }

    #[inline]
    pub(super) fn enter_hinted(&self) {
        self.hinted.enter();
    }

    #[inline]
    pub(super) fn leave_hinted(&self) {
        self.hinted.leave();
    }

    #[inline]
    pub(super) fn enter(&self) {
        self.flight.enter();
    }

    #[inline]
    pub(super) fn leave(&self) {
        self.flight.leave();
    }
}

/// A counter that one thread at a time changes and any thread may read, so that no locked instruction is needed.
#[derive(Debug, Default)]
pub struct Flight(AtomicU32);

impl Flight {
    #[inline]
    fn enter(&self) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
    }

    #[inline]
    fn leave(&self) {
        self.0.store(self.0.load(Ordering::Relaxed).wrapping_sub(1), Ordering::Release);
    }
}

/// What one side waits for from the peer's NIC. Two that are equal and not empty: nothing was acknowledged in between.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Owed {
    /// Changes with what is posted and what arrives.
    pub mark: u64,
    /// Work requests posted and not acknowledged.
    pub requests: u32,
    /// Their bytes.
    pub bytes: u64,
}

/// Where the data path posts and polls; the engine's is [`QpSet`], tests bring their own.
pub trait Post {
    /// Posts one write on a QP of the connection.
    ///
    /// # Safety
    /// As [`Qp::post_write`].
    unsafe fn write(&self, qp: usize, w: &WriteWr) -> Result<(), VerbsError>;
    /// Posts `count` receives.
    fn recvs(&self, qp: usize, wr_id: u64, count: usize) -> Result<(), VerbsError>;
    /// Reads one byte of the flushed buffer on a rail's loopback QP.
    ///
    /// # Safety
    /// As [`Qp::post_read`].
    unsafe fn flush(&self, rail: usize, wr_id: u64, remote: u64, rkey: u32) -> Result<(), VerbsError>;
    /// Takes completions of a rail.
    fn poll<'a>(&self, rail: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError>;
}

/// How a connection's QPs are laid out: `qps` on each of `rails`; QP `q` of rail `r` is number `r * qps + q`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lanes {
    pub rails: usize,
    pub qps: usize,
}

impl Lanes {
    pub fn total(self) -> usize {
        self.rails * self.qps
    }
}

/// One rail of a connection: its completion queue and QPs.
#[derive(Debug)]
pub struct RailLink {
    pub qps: Vec<Qp<Rts>>,
    pub cq: Arc<Cq>,
    /// Loopback QP, with the landing place of its reads: address and lkey.
    pub flush: Option<(Qp<Rts>, u64, u32)>,
}

/// The QPs of a connection, shared between the data path, which posts, and whoever tears the connection down.
#[derive(Debug)]
pub struct QpSet {
    /// By number. Dropped before their completion queues, which they hold, too.
    qps: Box<[Qp<Rts>]>,
    rails: Box<[Rail]>,
    lanes: Lanes,
}

/// What the QPs of a rail share.
#[derive(Debug)]
struct Rail {
    flush: Option<(Qp<Rts>, u64, u32)>,
    cq: Arc<Cq>,
}

impl Rail {
    fn flush_qp(&self) -> Option<&Qp<Rts>> {
        self.flush.as_ref().map(|(qp, ..)| qp)
    }
}

impl QpSet {
    /// Every rail has the same number of QPs.
    pub fn new(rails: Vec<RailLink>) -> Self {
        let lanes = Lanes { rails: rails.len(), qps: rails.first().map_or(0, |r| r.qps.len()) };
        debug_assert!(rails.iter().all(|r| r.qps.len() == lanes.qps));
        let mut qps = Vec::with_capacity(lanes.total());
        let rails = rails.into_iter().map(|rail| {
            qps.extend(rail.qps);
            Rail { flush: rail.flush, cq: rail.cq }
        });
        let rails = rails.collect();
        Self { qps: qps.into_boxed_slice(), rails, lanes }
    }

    pub fn lanes(&self) -> Lanes {
        self.lanes
    }

    pub fn qp_num(&self, i: usize) -> u32 {
        self.qps[i].num()
    }

    /// Numbers of all QPs of a rail, the flush QP too.
    pub fn qp_nums(&self, rail: usize) -> impl Iterator<Item = u32> + '_ {
        let qps = &self.qps[rail * self.lanes.qps..][..self.lanes.qps];
        qps.iter().chain(self.rails[rail].flush_qp()).map(Qp::num)
    }

    /// Stops all traffic: every QP to the error state. The first refusal is returned, the others are tried all the same.
    pub fn fail(&self) -> Result<(), VerbsError> {
        let mut first = Ok(());
        for qp in self.qps.iter().chain(self.rails.iter().filter_map(Rail::flush_qp)) {
            let done = qp.fail();
            if first.is_ok() {
                first = done;
            }
        }
        first
    }
}

impl Post for QpSet {
    #[inline(always)] // into the two posts of a message, which fill the request in place
    unsafe fn write(&self, qp: usize, w: &WriteWr) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { self.qps[qp].post_write(w) }
    }

    fn recvs(&self, qp: usize, wr_id: u64, count: usize) -> Result<(), VerbsError> {
        self.qps[qp].post_empty_recvs(wr_id, count)
    }

    unsafe fn flush(&self, rail: usize, wr_id: u64, remote: u64, rkey: u32) -> Result<(), VerbsError> {
        let Some((qp, local, lkey)) = &self.rails[rail].flush else { return Ok(()) };
        // SAFETY: the landing place belongs to the rail and outlives its QP.
        unsafe { qp.post_read(wr_id, *local, *lkey, 1, remote, rkey) }
    }

    #[inline(always)]
    fn poll<'a>(&self, rail: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
        self.rails[rail].cq.poll(batch)
    }
}

impl<T: Post> Post for Arc<T> {
    #[inline(always)] // into the two posts of a message, which fill the request in place
    unsafe fn write(&self, qp: usize, w: &WriteWr) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { (**self).write(qp, w) }
    }

    fn recvs(&self, qp: usize, wr_id: u64, count: usize) -> Result<(), VerbsError> {
        (**self).recvs(qp, wr_id, count)
    }

    unsafe fn flush(&self, rail: usize, wr_id: u64, remote: u64, rkey: u32) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { (**self).flush(rail, wr_id, remote, rkey) }
    }

    #[inline(always)]
    fn poll<'a>(&self, rail: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
        (**self).poll(rail, batch)
    }
}

/// Why the data path of a connection stopped.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Fault {
    /// A work request failed.
    #[error("{operation} of {bytes} bytes ended with {} ({})", .failure.name(), .failure.status)]
    Completion {
        failure: Failure,
        /// QP of the connection.
        qp: usize,
        operation: &'static str,
        /// From our own record: of the whole message.
        bytes: u64,
    },
    /// A verb of the data path was refused.
    #[error("{0}")]
    Verb(#[from] VerbsError),
    /// A copy between GPU and host memory was refused.
    #[error("staging: {0}")]
    Copy(String),
    /// The peer sent what its protocol version does not allow.
    #[error("{0}")]
    Protocol(String),
}
