//! The reliable connection: what a requester and a responder do, one segment at a time, under the engine's lock. Time and
//! frames are inputs. The same responder serves a peer in this process (no frame, one copy) and one behind a link. Host
//! memory is copied on the spot; what GPU memory takes part in is in `landing` meanwhile.
mod landing;

use crate::abi::{access, send_flag};
use crate::adapter::Adapter;
use crate::copy;
use crate::faults::NEVER;
use crate::gpu::{Copied, Gpus, Mem, REFERENCE, Reference, Ticket};
use crate::link::{Links, Peer, Sent};
use crate::qp::{Attr, NUM_MASK, Op, Qp, RecvWqe, SendWqe, Sge, State, status, vendor_code};
use crate::queue::{Cq, Cqe};
use crate::wire::{Frame, Kind, SEGMENT};
use ibverbs_sys as ffi;
use landing::Landing;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering::{self, Relaxed};
use std::sync::atomic::fence;
use std::time::{Duration, Instant};

/// Replies a responder keeps for a requester that does not take them; further requests are dropped and come again.
const MAX_REPLIES: usize = 64;

/// Where bytes lie: up to one piece a scatter-gather entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pieces {
    count: usize,
    list: [(*mut u8, usize, Mem); crate::qp::MAX_SGE],
}

/// A range that is in one piece of a source and in one of a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    pub(crate) src: *mut u8,
    pub(crate) src_mem: Mem,
    pub(crate) dst: *mut u8,
    dst_mem: Mem,
    pub(crate) len: usize,
}

impl Part {
    /// One side is in host memory, the other on a GPU.
    pub(crate) fn is_mixed(&self) -> bool {
        (self.src_mem == Mem::Host) != (self.dst_mem == Mem::Host)
    }
}

impl Pieces {
    pub(crate) fn none() -> Self {
        Self { count: 0, list: [(std::ptr::null_mut(), 0, Mem::Host); crate::qp::MAX_SGE] }
    }

    /// In host memory.
    pub(crate) fn one(at: *mut u8, len: usize) -> Self {
        let mut pieces = Self::none();
        pieces.add(at, len);
        pieces
    }

    pub(crate) fn add(&mut self, at: *mut u8, len: usize) {
        self.add_in(Mem::Host, at, len);
    }

    pub(crate) fn add_in(&mut self, mem: Mem, at: *mut u8, len: usize) {
        if let Some(entry) = self.list.get_mut(self.count).filter(|_| len > 0) {
            *entry = (at, len, mem);
            self.count += 1;
        }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (*mut u8, usize, Mem)> + '_ {
        self.list[..self.count].iter().copied()
    }

    fn is_empty(&self) -> bool {
        self.count == 0
    }

    fn is_host(&self) -> bool {
        self.iter().all(|(_, _, mem)| mem == Mem::Host)
    }

    /// What to copy from where to where, as much as both have room for.
    pub(crate) fn pairs<'a>(&'a self, to: &'a Self) -> impl Iterator<Item = Part> + 'a {
        let (mut from, mut into) = (self.iter(), to.iter());
        let (mut a, mut b) = (from.next(), into.next());
        std::iter::from_fn(move || {
            let ((src, have, src_mem), (dst, room, dst_mem)) = (a?, b?);
            let len = have.min(room);
            a = if have > len { Some((src.wrapping_add(len), have - len, src_mem)) } else { from.next() };
            b = if room > len { Some((dst.wrapping_add(len), room - len, dst_mem)) } else { into.next() };
            Some(Part { src, src_mem, dst, dst_mem, len })
        })
    }

    /// Copies as much as both have room for, as a NIC writes. Both are in host memory.
    ///
    /// # Safety
    /// All pieces of both are checked against regions that stay registered meanwhile, or are this engine's own memory.
    pub(crate) unsafe fn copy_to(&self, to: &Self) {
        for part in self.pairs(to) {
            // A loopback onto itself has nothing to copy, and a racing one is the program's own affair.
            if part.dst != part.src {
                // SAFETY: len bytes of either are the caller's to vouch for.
                unsafe { copy::visible(part.dst, part.src, part.len) };
            }
        }
    }
}

/// The pieces of `sges` that hold bytes `offset..offset + len` of the message; None if a key does not allow `want`.
fn gather(adapter: &Adapter, pd: u32, sges: &[Sge], mut offset: u64, len: u64, want: u32) -> Option<Pieces> {
    let (mut pieces, mut left) = (Pieces::none(), len);
    for sge in sges.iter().filter(|sge| sge.len > 0) {
        let at = adapter.regions.check(sge.lkey, pd, sge.addr, u64::from(sge.len), want)?;
        let skip = offset.min(u64::from(sge.len));
        let take = left.min(u64::from(sge.len) - skip);
        pieces.add_in(at.mem, at.ptr.wrapping_add(usize::try_from(skip).ok()?), usize::try_from(take).ok()?);
        (offset, left) = (offset - skip, left - take);
    }
    (left == 0).then_some(pieces)
}

/// What a responder made of a segment.
enum Verdict {
    Taken,
    /// Taken, and done once a copy has landed.
    Landing(Landing),
    /// Not now: the copy, or one before it, needs time. Nothing has changed.
    Busy,
    /// The bytes that a READ asks for.
    Data(Pieces),
    Dropped,
    /// The code of the RNR timer.
    NotReady(u8),
    Refused(u32),
}

enum Reply {
    Frame { kind: Kind, syndrome: u8, psn: u32 },
    Read { psn: u32, raddr: u64, rkey: u32, total: u64, offset: u64 },
}

/// The engine's side of a queue pair.
pub(crate) struct Conn {
    pub(crate) qp: Arc<Qp>,
    pub(crate) attr: Attr,
    peer: Option<Peer>,
    // Requester. Work request i carries PSN sq_psn + i; una..next are sent and not acknowledged.
    una: u32,
    next: u32,
    offset: u64,
    reads: u8,
    read_offset: u64,
    /// Nothing is sent until the deadline: the peer did not take it, or is not ready.
    lost: bool,
    paused: Option<Instant>,
    deadline: Option<Instant>,
    /// The earliest entry of the timer queue.
    timer: Option<Instant>,
    retries: u8,
    rnr_retries: u8,
    /// With latency: requests up to this index may leave at this time.
    gates: VecDeque<(u32, Instant)>,
    gated: u32,
    // Responder.
    expected: u32,
    received: u32,
    progress: u64,
    replies: VecDeque<Reply>,
    active: bool,
    /// Copies under way that this queue pair waits for, and the last of them.
    landing: u32,
    last_ticket: Option<Ticket>,
    /// The peer was sent references that it has not acknowledged: it may still read the memory.
    lent: bool,
}

impl Conn {
    fn new(qp: Arc<Qp>) -> Self {
        Self {
            qp,
            attr: Attr::default(),
            peer: None,
            una: 0,
            next: 0,
            offset: 0,
            reads: 0,
            read_offset: 0,
            lost: false,
            paused: None,
            deadline: None,
            timer: None,
            retries: 0,
            rnr_retries: 0,
            gates: VecDeque::new(),
            gated: 0,
            expected: 0,
            received: 0,
            progress: 0,
            replies: VecDeque::new(),
            active: false,
            landing: 0,
            last_ticket: None,
            lent: false,
        }
    }

    fn psn(&self, index: u32) -> u32 {
        self.attr.sq_psn.wrapping_add(index) & NUM_MASK
    }

    /// The work request that a PSN stands for, if it is in flight.
    fn in_flight(&self, psn: u32) -> Option<u32> {
        let ahead = psn.wrapping_sub(self.psn(self.una)) & NUM_MASK;
        (ahead < self.next.wrapping_sub(self.una)).then(|| self.una.wrapping_add(ahead))
    }

    fn rewind(&mut self) {
        (self.next, self.offset, self.reads, self.read_offset) = (self.una, 0, 0, 0);
    }

    /// 4.096 µs · 2^timeout; 0 is for ever.
    fn timeout(&self) -> Option<Duration> {
        (self.attr.timeout > 0).then(|| Duration::from_nanos(4096 << self.attr.timeout))
    }

    fn answered(&mut self) {
        (self.retries, self.rnr_retries) = (self.attr.retry_cnt, self.attr.rnr_retry);
    }

    /// Queues an acknowledgement; one for a later message stands for those before it. Of those that ask for bytes in place
    /// of references one is enough.
    fn reply(&mut self, kind: Kind, syndrome: u8, psn: u32) {
        let is_asked = |reply: &Reply| matches!(reply, Reply::Frame { kind: Kind::NoReference, syndrome: queued, .. } if *queued == syndrome);
        if kind == Kind::NoReference && self.replies.iter().any(is_asked) {
            return;
        }
        if kind == Kind::Ack
            && let Some(Reply::Frame { kind: Kind::Ack, psn: last, .. }) = self.replies.back_mut()
        {
            *last = psn;
            return;
        }
        self.replies.push_back(Reply::Frame { kind, syndrome, psn });
    }
}

/// All queue pairs of the process and the links to other processes.
pub(crate) struct World {
    pub(crate) adapter: &'static Adapter,
    conns: Vec<Option<Box<Conn>>>,
    last_index: usize,
    active: VecDeque<u32>,
    blocked: Vec<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Per device and port: when the port's rate allows the next segment.
    pace: Vec<Vec<Instant>>,
    landings: VecDeque<Landing>,
    pub(crate) gpu: Gpus,
    /// Processes that are still to be told that a share is gone.
    forgotten: Vec<(u32, u32)>,
    /// Processes that may still read memory which this one has asked back.
    awaited: Vec<u32>,
    pub(crate) links: Links,
}

impl World {
    pub(crate) fn new(adapter: &'static Adapter, links: Links) -> Self {
        let now = Instant::now();
        Self {
            adapter,
            conns: Vec::new(),
            last_index: 0,
            active: VecDeque::new(),
            blocked: Vec::new(),
            timers: BinaryHeap::new(),
            pace: adapter.devices().iter().map(|device| vec![now; device.ports.len()]).collect(),
            landings: VecDeque::new(),
            gpu: Gpus::default(),
            forgotten: Vec::new(),
            awaited: Vec::new(),
            links,
        }
    }

    /// A QP number that has not been in use for as long as possible.
    pub(crate) fn free_number(&mut self) -> Option<u32> {
        const TABLE: usize = 1 << crate::qp::INDEX_BITS;
        let found = (1..=TABLE)
            .map(|i| (self.last_index + i) % TABLE)
            .find(|&i| self.conns.get(i).is_none_or(|conn| conn.is_none()))?;
        self.last_index = found;
        Some(self.links.slot() << crate::qp::INDEX_BITS | u32::try_from(found).ok()?)
    }

    pub(crate) fn insert(&mut self, qp: Arc<Qp>) {
        let index = qp.index as usize;
        if self.conns.len() <= index {
            self.conns.resize_with(index + 1, || None);
        }
        self.conns[index] = Some(Box::new(Conn::new(qp)));
    }

    pub(crate) fn remove(&mut self, index: u32) {
        self.settle_for(index);
        self.ask_back(index);
        // What it owes has been earned: the peer's last request must not look lost.
        self.send_replies(index);
        if let Some(conn) = self.conns.get_mut(index as usize).and_then(Option::take) {
            conn.qp.set_state(State::Err);
            conn.qp.send_cq.forget(index);
            conn.qp.recv_cq.forget(index);
        }
    }

    pub(crate) fn conn(&self, index: u32) -> Option<&Conn> {
        self.conns.get(index as usize)?.as_deref()
    }

    fn conn_mut(&mut self, index: u32) -> Option<&mut Conn> {
        self.conns.get_mut(index as usize)?.as_deref_mut()
    }

    pub(crate) fn count(&self, device: usize) -> usize {
        self.conns.iter().flatten().filter(|conn| conn.qp.device == device).count()
    }

    /// Brings a queue pair to a state with attributes that ibv_modify_qp found right.
    pub(crate) fn enter(&mut self, index: u32, to: State, attr: Attr) {
        if matches!(to, State::Reset | State::Err) {
            self.settle_for(index);
            self.ask_back(index);
        }
        let peer = (to == State::Rtr).then(|| self.links.locate(&attr.address, attr.dest));
        let Some(conn) = self.conn_mut(index) else { return };
        let from = conn.qp.state();
        conn.attr = attr;
        conn.qp.dest.store(attr.dest, Relaxed);
        conn.qp.access.store(attr.access, Relaxed);
        match to {
            State::Reset => {
                self.send_replies(index);
                let Some(conn) = self.conn_mut(index) else { return };
                let qp = Arc::clone(&conn.qp);
                *conn = Conn::new(Arc::clone(&qp));
                qp.set_state(to);
                let _send = qp.sq.producer.lock();
                let _receive = qp.rq.producer.lock();
                qp.sq.reset();
                qp.rq.reset();
                qp.rq_next.store(0, Relaxed);
                qp.send_cq.forget(index);
                qp.recv_cq.forget(index);
            }
            State::Err => self.fail_all(index),
            State::Rtr if from != to => {
                conn.peer = peer;
                (conn.expected, conn.received, conn.progress) = (attr.rq_psn, 0, 0);
                conn.qp.set_state(to);
            }
            _ => {
                if from != to {
                    conn.answered();
                }
                conn.qp.set_state(to);
            }
        }
    }

    /// What was lent to the peer of a queue pair by reference goes back to the program.
    fn ask_back(&mut self, index: u32) {
        if let Some(conn) = self.conn_mut(index)
            && std::mem::take(&mut conn.lent)
            && conn.una != conn.next
            && let Some(Peer::Slot(slot)) = conn.peer
        {
            // No share has this number: the peer finishes what it copies, and forgets nothing.
            self.forgotten.push((slot, 0));
            self.awaited.push(slot);
            self.tell_forgotten();
        }
    }

    /// Who may still read memory that was asked back. To be waited for without the lock.
    pub(crate) fn awaited(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.awaited)
    }

    pub(crate) fn owes(&self, slot: u32) -> bool {
        self.links.owes(slot) || self.forgotten.iter().any(|&(to, _)| to == slot)
    }

    // ---- scheduling ----

    pub(crate) fn activate(&mut self, index: u32) {
        if let Some(conn) = self.conn_mut(index).filter(|conn| !conn.active) {
            conn.active = true;
            self.active.push_back(index);
        }
    }

    /// Some work: received frames, a segment of each of a few queue pairs, due timers. False if there was none.
    pub(crate) fn round(&mut self, now: Instant) -> bool {
        let mut busy = self.land() | self.receive_some();
        for index in std::mem::take(&mut self.blocked) {
            self.activate(index);
        }
        for _ in 0..self.active.len().min(8) {
            let Some(index) = self.active.pop_front() else { break };
            if let Some(conn) = self.conn_mut(index) {
                conn.active = false;
            }
            let again = self.send_replies(index) | self.transmit(index, now);
            if again {
                self.activate(index);
            }
            busy = true;
        }
        while let Some(&Reverse((due, index))) = self.timers.peek() {
            if due > now {
                break;
            }
            self.timers.pop();
            self.timer(index, now);
            busy = true;
        }
        self.gpu.submit();
        self.tell_forgotten();
        // If all that is left waits for room in a link, there is nothing to do but wait.
        busy && (self.blocked.is_empty() || !self.active.is_empty()) || !self.landings.is_empty()
    }

    pub(crate) fn is_idle(&mut self) -> bool {
        self.active.is_empty() && self.landings.is_empty() && !self.links.has_input()
    }

    /// How long the engine may sleep.
    pub(crate) fn next_due(&self) -> Option<Instant> {
        // A full link rings when it has room; should its reader die, this looks again.
        let retry = (!self.blocked.is_empty()).then(|| Instant::now() + Duration::from_millis(1));
        let timer = self.timers.peek().map(|Reverse((due, _))| *due);
        retry.into_iter().chain(timer).min()
    }

    /// Has `timer` look at the queue pair then, or before.
    fn wake_at(&mut self, index: u32, due: Instant) {
        let Some(conn) = self.conn_mut(index) else { return };
        if conn.timer.is_none_or(|queued| queued > due) {
            conn.timer = Some(due);
            self.timers.push(Reverse((due, index)));
        }
    }

    fn set_deadline(&mut self, index: u32, now: Instant) {
        let Some(conn) = self.conn_mut(index) else { return };
        conn.deadline = conn.timeout().map(|timeout| now + timeout);
        if let Some(due) = conn.deadline {
            self.wake_at(index, due);
        }
    }

    fn timer(&mut self, index: u32, now: Instant) {
        let Some(conn) = self.conn_mut(index) else { return };
        conn.timer = None;
        if conn.paused.is_some_and(|until| until <= now) {
            conn.paused = None;
            self.activate(index);
        }
        let Some(conn) = self.conn_mut(index) else { return };
        if conn.deadline.is_some_and(|due| due <= now) {
            conn.deadline = None;
            self.timed_out(index, now);
        }
        let Some(conn) = self.conn_mut(index) else { return };
        if let Some(due) = conn.paused.into_iter().chain(conn.deadline).min() {
            self.wake_at(index, due);
        }
    }

    fn timed_out(&mut self, index: u32, now: Instant) {
        let Some(conn) = self.conn_mut(index) else { return };
        if conn.qp.state() != State::Rts || (conn.una == conn.next && !conn.lost) {
            return;
        }
        if conn.landing > 0 {
            // The answer is here, its bytes are on their way.
            self.set_deadline(index, now);
            return;
        }
        // On a wire the packets would have arrived by now. Here a live peer has merely not been given a core yet.
        if !conn.lost
            && let Some(peer) = conn.peer.filter(|&peer| peer != Peer::Local)
            && self.links.is_behind(peer)
        {
            self.set_deadline(index, now);
            return;
        }
        let Some(conn) = self.conn_mut(index) else { return };
        conn.lost = false;
        if conn.retries == 0 {
            self.fail_send(index, status::RETRY_EXC, vendor_code(status::RETRY_EXC));
            return;
        }
        conn.retries -= 1;
        conn.rewind();
        self.activate(index);
    }

    // ---- completions and errors ----

    fn push(&mut self, cq: &Arc<Cq>, cqe: &Cqe, solicited: bool) {
        // SAFETY: the engine's lock is held, so this is the only producer.
        if unsafe { cq.push(cqe, solicited) } {
            return;
        }
        let hit: Vec<u32> = self
            .conns
            .iter()
            .flatten()
            .filter(|conn| Arc::ptr_eq(&conn.qp.send_cq, cq) || Arc::ptr_eq(&conn.qp.recv_cq, cq))
            .map(|conn| conn.qp.index)
            .collect();
        for index in hit {
            self.fail_all(index);
        }
    }

    /// The oldest send request is done.
    fn complete_send(&mut self, index: u32) {
        let Some(conn) = self.conn_mut(index) else { return };
        let (qp, at) = (Arc::clone(&conn.qp), conn.una);
        // SAFETY: una is posted and not completed.
        let wqe = unsafe { qp.sq.get(at) };
        conn.una = at.wrapping_add(1);
        if wqe.op == Op::Read {
            (conn.reads, conn.read_offset) = (conn.reads.saturating_sub(1), 0);
        }
        conn.answered();
        if let Some(cqe) = qp.send_cqe(at, wqe, status::SUCCESS, 0) {
            self.push(&qp.send_cq, &cqe, false);
        }
    }

    /// The oldest send request failed: it says so, and everything else is flushed.
    fn fail_send(&mut self, index: u32, code: u32, vendor: u32) {
        self.settle_for(index);
        let Some(conn) = self.conn_mut(index) else { return };
        let (qp, at) = (Arc::clone(&conn.qp), conn.una);
        if qp.state() == State::Err || at == qp.sq.head() {
            return;
        }
        conn.una = at.wrapping_add(1);
        qp.set_state(State::Err);
        // SAFETY: una is posted and not completed.
        let wqe = unsafe { qp.sq.get(at) };
        if let Some(cqe) = qp.send_cqe(at, wqe, code, vendor) {
            self.push(&qp.send_cq, &cqe, false);
        }
        self.fail_all(index);
    }

    /// To ERR: every outstanding request of both queues is flushed. Also for requests posted in ERR.
    fn fail_all(&mut self, index: u32) {
        let threaded = self.adapter.is_threaded();
        self.settle_for(index);
        let Some(conn) = self.conn_mut(index) else { return };
        let qp = Arc::clone(&conn.qp);
        qp.set_state(State::Err);
        // Against a receive being posted: it is seen below, or its poster sees ERR and rings.
        fence(Ordering::SeqCst);
        let to = qp.sq.head();
        // The null engine leaves nothing outstanding in a send queue.
        let from = if threaded { conn.una } else { to };
        (conn.una, conn.next, conn.offset) = (to, to, 0);
        (conn.lost, conn.paused, conn.deadline) = (false, None, None);
        conn.replies.retain(|reply| matches!(reply, Reply::Frame { .. }));
        conn.gates.clear();
        for at in (0..to.wrapping_sub(from)).map(|i| from.wrapping_add(i)) {
            // SAFETY: between una and head: posted and not completed.
            let wqe = unsafe { qp.sq.get(at) };
            if let Some(cqe) = qp.send_cqe(at, wqe, status::FLUSH, vendor_code(status::FLUSH)) {
                self.push(&qp.send_cq, &cqe, false);
            }
        }
        while qp.receives_left() > 0 {
            self.fail_receive(&qp, status::FLUSH);
        }
    }

    fn fail_receive(&mut self, qp: &Arc<Qp>, code: u32) {
        let at = qp.rq_next.load(Relaxed);
        // SAFETY: the caller saw that a request is left.
        let wr_id = unsafe { qp.recv_wr_id(at) };
        qp.rq_next.store(at.wrapping_add(1), Relaxed);
        self.push(&qp.recv_cq, &qp.recv_failed_cqe(at, wr_id, code), true);
    }

    // ---- requester ----

    /// Sends one segment. True if there is more to send right away.
    fn transmit(&mut self, index: u32, now: Instant) -> bool {
        let Some(conn) = self.conn_mut(index) else { return false };
        let qp = Arc::clone(&conn.qp);
        match qp.state() {
            State::Rts => {}
            State::Err => {
                if conn.una != qp.sq.head() || qp.receives_left() > 0 {
                    self.fail_all(index);
                }
                return false;
            }
            _ => return false,
        }
        let head = qp.sq.head();
        let port = usize::from(conn.attr.port).saturating_sub(1);
        let latency = self.adapter.latency(qp.device, port, qp.num, head);
        let Some(conn) = self.conn_mut(index) else { return false };
        if !latency.is_zero() && head != conn.gated {
            conn.gates.push_back((head, now + latency));
            conn.gated = head;
        }
        if conn.lost || conn.paused.is_some_and(|until| until > now) || conn.next == head {
            return false;
        }
        while let Some(&(up_to, due)) = conn.gates.front() {
            if due > now {
                conn.paused = Some(due);
                self.wake_at(index, due);
                return false;
            }
            if up_to != conn.next {
                break;
            }
            conn.gates.pop_front();
        }
        let (at, offset) = (conn.next, conn.offset);
        // SAFETY: next is posted and not completed.
        let wqe = unsafe { qp.sq.get(at) };
        if offset == 0
            && let Some((code, vendor)) = self.refusal(wqe, &qp)
        {
            if code == NEVER {
                return false;
            }
            // Failures are reported in order: those sent before have to be answered first.
            let Some(conn) = self.conn_mut(index) else { return false };
            if conn.una == at {
                self.fail_send(index, code, vendor);
            }
            return false;
        }
        let Some(conn) = self.conn_mut(index) else { return false };
        if wqe.op == Op::Read && offset == 0 {
            if conn.attr.max_rd == 0 {
                if conn.una == at {
                    self.fail_send(index, status::LOC_QP_OP, vendor_code(status::LOC_QP_OP));
                }
                return false;
            }
            if conn.reads >= conn.attr.max_rd {
                return false; // goes on when a response completes one
            }
        }
        if wqe.flags & send_flag::FENCE != 0 && conn.reads > 0 && conn.una != at {
            return false;
        }
        let len = (wqe.len - offset).min(SEGMENT as u64);
        if self.paced(index, qp.device, port, len, now) {
            return false;
        }
        self.send_segment(index, at, wqe, offset, len, now)
    }

    /// What makes a request fail before anything is sent.
    fn refusal(&self, wqe: &SendWqe, qp: &Qp) -> Option<(u32, u32)> {
        let code = |code| Some((code, vendor_code(code)));
        if wqe.fault.is_some() {
            return wqe.fault;
        }
        if wqe.len > qp.max_msg {
            return code(status::LOC_LEN);
        }
        let want = if wqe.op == Op::Read { access::LOCAL_WRITE } else { 0 };
        if wqe.flags & send_flag::INLINE == 0
            && gather(self.adapter, qp.pd, &wqe.sges[..wqe.sge_count], 0, wqe.len, want).is_none()
        {
            return code(status::LOC_PROT);
        }
        None
    }

    /// The port's rate: true if the segment has to wait.
    fn paced(&mut self, index: u32, device: usize, port: usize, len: u64, now: Instant) -> bool {
        let Some(rate) = self.adapter.rate(device, port) else { return false };
        let Some(free) = self.pace.get_mut(device).and_then(|ports| ports.get_mut(port)) else { return false };
        if *free > now {
            let due = *free;
            if let Some(conn) = self.conn_mut(index) {
                conn.paused = Some(due);
            }
            self.wake_at(index, due);
            return true;
        }
        *free = now + rate * u32::try_from(len + 64).unwrap_or(u32::MAX);
        false
    }

    fn send_segment(&mut self, index: u32, at: u32, wqe: &SendWqe, offset: u64, len: u64, now: Instant) -> bool {
        let Some(conn) = self.conn(index) else { return false };
        let (qp, attr, peer) = (Arc::clone(&conn.qp), conn.attr, conn.peer);
        let want = if wqe.op == Op::Read { access::LOCAL_WRITE } else { 0 };
        let local = if wqe.flags & send_flag::INLINE != 0 {
            Some(Pieces::one(wqe.inline.as_ptr().cast_mut(), usize::try_from(len).unwrap_or(0)))
        } else {
            gather(self.adapter, qp.pd, &wqe.sges[..wqe.sge_count], offset, len, want)
        };
        let Some(local) = local else {
            // Deregistered half-way.
            if self.conn(index).is_some_and(|conn| conn.una == at) {
                self.fail_send(index, status::LOC_PROT, vendor_code(status::LOC_PROT));
            }
            return false;
        };
        let mut frame = Frame {
            kind: match wqe.op {
                Op::Write => Kind::Write,
                Op::WriteImm => Kind::WriteImm,
                Op::Send => Kind::Send,
                Op::SendImm => Kind::SendImm,
                Op::Read => Kind::ReadRequest,
            },
            syndrome: 0,
            mtu: u8::try_from(attr.mtu).unwrap_or(0),
            solicited: wqe.flags & send_flag::SOLICITED != 0,
            by_reference: false,
            src: qp.num,
            dst: attr.dest,
            psn: conn.psn(at),
            imm: wqe.imm,
            rkey: wqe.rkey,
            len: u32::try_from(len).unwrap_or(0),
            total: wqe.len,
            offset,
            raddr: wqe.raddr,
        };
        let port = usize::from(attr.port).saturating_sub(1);
        let up = self.adapter.port_is_up(qp.device, port);
        match peer.filter(|_| up) {
            Some(Peer::Local) => {
                let verdict = if self.is_addressed(&attr, attr.dest) {
                    self.respond(Peer::Local, &frame, &local)
                } else {
                    Verdict::Dropped
                };
                self.local_verdict(index, verdict, len, now)
            }
            Some(peer) => {
                let whole = wqe.op == Op::Read;
                let mut room = [0; REFERENCE];
                let payload = if whole {
                    frame.len = 0;
                    Pieces::none()
                } else {
                    let Some(payload) = self.payload(peer, &local, &mut frame, &mut room) else {
                        if self.conn(index).is_some_and(|conn| conn.una == at) {
                            self.fail_send(index, status::LOC_QP_OP, vendor_code(status::LOC_QP_OP));
                        }
                        return false;
                    };
                    payload
                };
                match self.links.send(peer, &attr.address, &frame, &payload) {
                    Sent::Full => {
                        self.blocked.push(index);
                        false
                    }
                    Sent::Gone => self.lose(index, now),
                    Sent::Yes => self.advance(index, if whole { wqe.len } else { len }, now),
                }
            }
            None => self.lose(index, now),
        }
    }

    /// What goes behind a frame: the source's bytes or, if it is GPU memory that the peer can reach, a reference to it in
    /// `room`. None if the GPU failed.
    fn payload(
        &mut self,
        peer: Peer,
        source: &Pieces,
        frame: &mut Frame,
        room: &mut [u8; REFERENCE],
    ) -> Option<Pieces> {
        if source.is_host() {
            return Some(*source);
        }
        if let Peer::Slot(slot) = peer
            && self.links.takes_references(peer)
            && let Some(reference) = self.gpu.refer(slot, source)
        {
            *room = reference.encode();
            frame.by_reference = true;
            if let Some(conn) = self.conn_mut(frame.src & crate::qp::INDEX_MASK) {
                conn.lent = true;
            }
            return Some(Pieces::one(room.as_mut_ptr(), REFERENCE));
        }
        self.gpu.stage(source)
    }

    /// Is the QP `dest` of this process behind the address that `attr` names?
    fn is_addressed(&self, attr: &Attr, dest: u32) -> bool {
        let Some(conn) = self.conn(dest & crate::qp::INDEX_MASK).filter(|conn| conn.qp.num == dest) else {
            return false;
        };
        self.adapter.port_has(conn.qp.device, usize::from(conn.attr.port).saturating_sub(1), &attr.address)
    }

    fn lose(&mut self, index: u32, now: Instant) -> bool {
        if let Some(conn) = self.conn_mut(index) {
            conn.lost = true;
        }
        self.set_deadline(index, now);
        false
    }

    /// A segment is on its way to another process.
    fn advance(&mut self, index: u32, len: u64, now: Instant) -> bool {
        let Some(conn) = self.conn_mut(index) else { return false };
        let qp = Arc::clone(&conn.qp);
        // SAFETY: next is posted and not completed.
        let wqe = unsafe { qp.sq.get(conn.next) };
        conn.offset += len;
        if conn.offset >= wqe.len {
            conn.next = conn.next.wrapping_add(1);
            conn.offset = 0;
            conn.reads += u8::from(wqe.op == Op::Read);
        }
        let more = conn.offset > 0 || conn.next != qp.sq.head();
        self.set_deadline(index, now);
        more
    }

    /// A peer in this process answers at once, though what it took may have yet to land.
    fn local_verdict(&mut self, index: u32, verdict: Verdict, len: u64, now: Instant) -> bool {
        let mut landing = match verdict {
            Verdict::Taken => None,
            Verdict::Landing(landing) => Some(landing),
            Verdict::Busy => return true,
            Verdict::Dropped | Verdict::Data(_) => {
                self.settle_for(index);
                return self.lose(index, now);
            }
            Verdict::NotReady(code) => {
                self.settle_for(index);
                return self.not_ready(index, code, now);
            }
            Verdict::Refused(code) => {
                self.fail_send(index, code, vendor_code(code));
                return false;
            }
        };
        // A connection to itself may have failed in the responder's part.
        let running = self.conn_mut(index).filter(|conn| conn.qp.state() == State::Rts);
        let mut complete = false;
        if let Some(conn) = running {
            let qp = Arc::clone(&conn.qp);
            // SAFETY: next is posted and not completed.
            let wqe = unsafe { qp.sq.get(conn.next) };
            conn.offset += len;
            if conn.offset >= wqe.len {
                conn.next = conn.next.wrapping_add(1);
                (conn.offset, conn.deadline) = (0, None);
                conn.reads += u8::from(wqe.op == Op::Read);
                complete = true;
            }
            if let Some(landing) = &mut landing {
                let at = conn.next.wrapping_sub(u32::from(complete));
                (landing.requester, landing.sent) = (Some(qp.num), complete.then_some(at));
            }
        }
        match landing {
            Some(landing) => self.queue(landing),
            None if complete => self.complete_send(index),
            None => {}
        }
        self.conn(index)
            .is_some_and(|conn| conn.qp.state() == State::Rts && (conn.offset > 0 || conn.next != conn.qp.sq.head()))
    }

    /// The oldest unanswered request met no receive request.
    fn not_ready(&mut self, index: u32, code: u8, now: Instant) -> bool {
        let Some(conn) = self.conn_mut(index) else { return false };
        if conn.rnr_retries == 0 {
            self.fail_send(index, status::RNR_RETRY_EXC, vendor_code(status::RNR_RETRY_EXC));
            return false;
        }
        // 7 is for ever.
        if conn.attr.rnr_retry != 7 {
            conn.rnr_retries -= 1;
        }
        let until = now + rnr_delay(code);
        conn.rewind();
        (conn.paused, conn.deadline) = (Some(until), None);
        self.wake_at(index, until);
        false
    }

    // ---- responder ----

    /// Takes a request's segment, whose payload is `data`.
    fn respond(&mut self, from: Peer, frame: &Frame, data: &Pieces) -> Verdict {
        let index = frame.dst & crate::qp::INDEX_MASK;
        let adapter = self.adapter;
        let Some(conn) = self.conn_mut(index).filter(|conn| conn.qp.num == frame.dst) else { return Verdict::Dropped };
        let qp = Arc::clone(&conn.qp);
        let ready = matches!(qp.state(), State::Rtr | State::Rts)
            && conn.attr.dest == frame.src
            && conn.peer == Some(from)
            && adapter.port_is_up(qp.device, usize::from(conn.attr.port).saturating_sub(1))
            && conn.replies.len() < MAX_REPLIES;
        if !ready {
            return Verdict::Dropped;
        }
        if frame.psn != conn.expected {
            let behind = conn.expected.wrapping_sub(frame.psn) & NUM_MASK;
            // A duplicate is acknowledged again, a READ given again; anything else is not of this connection.
            if behind > conn.received {
                return Verdict::Dropped;
            }
            if conn.landing > 0 {
                return Verdict::Busy; // an acknowledgement would be for what has not landed, too
            }
            if frame.kind == Kind::ReadRequest {
                return self.read(&qp, frame);
            }
            let last = conn.expected.wrapping_sub(1) & NUM_MASK;
            conn.reply(Kind::Ack, 0, last);
            self.activate(index);
            return Verdict::Dropped;
        }
        if frame.offset == 0 {
            conn.progress = 0;
        }
        if frame.offset != conn.progress {
            return Verdict::Dropped;
        }
        let op = match frame.kind {
            Kind::Write => Op::Write,
            Kind::WriteImm => Op::WriteImm,
            Kind::Send => Op::Send,
            Kind::SendImm => Op::SendImm,
            Kind::ReadRequest => Op::Read,
            _ => return Verdict::Dropped,
        };
        let packet = 128u64 << conn.attr.mtu.min(5).min(u32::from(frame.mtu));
        if u32::from(frame.mtu) != conn.attr.mtu && frame.total > packet || frame.total > qp.max_msg {
            return self.refuse(&qp, op.receives().then_some(status::LOC_LEN), status::REM_INV_REQ);
        }
        // A message that will need a receive request waits for it before its first byte and takes it after its last.
        if op.receives() && qp.receives_left() == 0 {
            let code = conn.attr.min_rnr;
            return if conn.landing > 0 { Verdict::Busy } else { Verdict::NotReady(code) };
        }
        let mut verdict = match op {
            // What was written before is there when it is read.
            Op::Read if frame.offset == 0 && conn.landing > 0 => Verdict::Busy,
            Op::Read if from == Peer::Local => match self.read(&qp, frame) {
                Verdict::Data(remote) => self.take(&qp, frame, &remote, data),
                refused => refused,
            },
            Op::Read => self.read(&qp, frame),
            Op::Write | Op::WriteImm => self.write(&qp, frame, data),
            Op::Send | Op::SendImm => self.scatter(&qp, frame, data),
        };
        if !matches!(verdict, Verdict::Taken | Verdict::Landing(_) | Verdict::Data(_)) {
            return verdict;
        }
        // A READ request of another process is one frame for the whole message.
        let step = if op == Op::Read && from != Peer::Local { frame.total } else { u64::from(frame.len) };
        let Some(conn) = self.conn_mut(index) else { return Verdict::Dropped };
        conn.progress += step;
        if conn.progress >= frame.total {
            conn.progress = 0;
            conn.expected = conn.expected.wrapping_add(1) & NUM_MASK;
            conn.received = conn.received.saturating_add(1).min(NUM_MASK >> 1);
            if op.receives() {
                let at = qp.rq_next.load(Relaxed);
                // SAFETY: a receive request is left, and only this lock's holder takes one.
                let wr_id = unsafe { qp.recv_wr_id(at) };
                qp.rq_next.store(at.wrapping_add(1), Relaxed);
                let cqe = qp.recv_cqe(at, wr_id, op, frame.total, frame.imm);
                match &mut verdict {
                    Verdict::Landing(landing) => landing.receive = Some((cqe, frame.solicited)),
                    _ => self.push(&qp.recv_cq, &cqe, frame.solicited),
                }
            }
        }
        verdict
    }

    /// The responder can't go on: its queue pair fails, and the requester is told `remote`.
    fn refuse(&mut self, qp: &Arc<Qp>, receive: Option<u32>, remote: u32) -> Verdict {
        self.settle_for(qp.index);
        if let Some(code) = receive.filter(|_| qp.receives_left() > 0) {
            qp.set_state(State::Err);
            self.fail_receive(qp, code);
        }
        let event = if remote == status::REM_ACCESS { ffi::IBV_EVENT_QP_ACCESS_ERR } else { ffi::IBV_EVENT_QP_REQ_ERR };
        qp.event(event);
        self.fail_all(qp.index);
        Verdict::Refused(remote)
    }

    /// Brings a segment's bytes to their place.
    fn take(&mut self, qp: &Arc<Qp>, frame: &Frame, from: &Pieces, to: &Pieces) -> Verdict {
        match self.carry(qp.index, from, to, frame.offset == 0) {
            Copied::Now => Verdict::Taken,
            Copied::Later(ticket, unload) => {
                let mut landing = Landing::new(ticket, unload);
                landing.responder = Some(qp.num);
                Verdict::Landing(landing)
            }
            Copied::Busy => Verdict::Busy,
            Copied::Failed => self.refuse(qp, None, status::REM_OP),
        }
    }

    fn write(&mut self, qp: &Arc<Qp>, frame: &Frame, data: &Pieces) -> Verdict {
        let mut target = Pieces::none();
        if frame.total > 0 {
            let allowed = qp.access.load(Relaxed) & access::REMOTE_WRITE != 0;
            let at = self.adapter.regions.check(frame.rkey, qp.pd, frame.raddr, frame.total, access::REMOTE_WRITE);
            let (Some(at), Ok(offset)) = (at.filter(|_| allowed), usize::try_from(frame.offset)) else {
                return self.refuse(qp, None, status::REM_ACCESS);
            };
            // The region holds the whole message, and decoding and cutting keep offset + len within it.
            target.add_in(at.mem, at.ptr.wrapping_add(offset), frame.len as usize);
        }
        self.take(qp, frame, data, &target)
    }

    fn scatter(&mut self, qp: &Arc<Qp>, frame: &Frame, data: &Pieces) -> Verdict {
        let at = qp.rq_next.load(Relaxed);
        // SAFETY: a receive request is left.
        let wqe: &RecvWqe = unsafe { qp.rq.get(at) };
        let sges = &wqe.sges[..wqe.sge_count];
        if frame.total > sges.iter().map(|sge| u64::from(sge.len)).sum() {
            return self.refuse(qp, Some(status::LOC_LEN), status::REM_INV_REQ);
        }
        let len = u64::from(frame.len);
        let Some(target) = gather(self.adapter, qp.pd, sges, frame.offset, len, access::LOCAL_WRITE) else {
            return self.refuse(qp, Some(status::LOC_PROT), status::REM_OP);
        };
        self.take(qp, frame, data, &target)
    }

    fn read(&mut self, qp: &Arc<Qp>, frame: &Frame) -> Verdict {
        if self.conn(qp.index).is_some_and(|conn| conn.attr.max_dest_rd == 0) {
            return self.refuse(qp, None, status::REM_INV_REQ);
        }
        if frame.total == 0 {
            return Verdict::Data(Pieces::none());
        }
        let allowed = qp.access.load(Relaxed) & access::REMOTE_READ != 0;
        let at = self.adapter.regions.check(frame.rkey, qp.pd, frame.raddr, frame.total, access::REMOTE_READ);
        let (Some(at), Ok(offset)) = (at.filter(|_| allowed), usize::try_from(frame.offset)) else {
            return self.refuse(qp, None, status::REM_ACCESS);
        };
        let mut data = Pieces::none();
        data.add_in(at.mem, at.ptr.wrapping_add(offset), frame.len as usize);
        Verdict::Data(data)
    }

    // ---- frames ----

    /// Works off some frames of every inbound link.
    fn receive_some(&mut self) -> bool {
        let mut busy = self.links.accept();
        for slot in self.links.departed() {
            self.settle();
            self.gpu.forget_owner(slot);
        }
        for link in 0..self.links.inbound() {
            for _ in 0..16 {
                let Some((peer, frame, data)) = self.links.receive(link) else { break };
                if !self.frame(peer, &frame, &data) {
                    break;
                }
                busy = true;
                // Only now: until then the sender sees that we are behind, and does not time out.
                self.links.consumed(link, &frame);
            }
        }
        busy
    }

    /// Works off a frame. False if it has to wait; then it comes again.
    fn frame(&mut self, peer: Peer, frame: &Frame, data: &Pieces) -> bool {
        let index = frame.dst & crate::qp::INDEX_MASK;
        if frame.kind == Kind::Forget {
            if let Peer::Slot(slot) = peer {
                self.settle();
                self.gpu.forget(slot, frame.rkey);
            }
            return true;
        }
        let reached;
        let data = if frame.by_reference {
            let Some(pieces) = self.resolve(peer, frame, data) else {
                let response = u8::from(frame.kind == Kind::ReadResponse);
                self.settle_for(index);
                let conn = self.conn_mut(index).filter(|conn| conn.qp.num == frame.dst && conn.peer == Some(peer));
                if let Some(conn) = conn {
                    conn.reply(Kind::NoReference, response, frame.psn);
                    if response == 1 {
                        conn.rewind();
                    }
                    self.activate(index);
                }
                return true;
            };
            reached = pieces;
            &reached
        } else {
            data
        };
        match frame.kind {
            Kind::Ack | Kind::Nak | Kind::Rnr | Kind::ReadResponse => return self.answer(peer, frame, data),
            Kind::NoReference => {
                self.links.refuses_references(peer);
                self.settle_for(index);
                let conn = self.conn_mut(index).filter(|conn| conn.qp.num == frame.dst && conn.peer == Some(peer));
                if let Some(conn) = conn.filter(|conn| frame.syndrome == 0 && conn.in_flight(frame.psn).is_some()) {
                    conn.rewind();
                    self.activate(index);
                }
                return true;
            }
            _ => {}
        }
        let verdict = self.respond(peer, frame, data);
        let Some(conn) = self.conn_mut(index) else { return true };
        let is_last = frame.offset + u64::from(frame.len) >= frame.total;
        match verdict {
            Verdict::Dropped => return true,
            Verdict::Busy => return false,
            Verdict::Taken if !is_last => return true,
            Verdict::Taken => conn.reply(Kind::Ack, 0, frame.psn),
            Verdict::Landing(mut landing) => {
                landing.ack = is_last.then_some(frame.psn);
                self.queue(landing);
                return true;
            }
            Verdict::Data(_) => {
                let (psn, raddr, rkey, total) = (frame.psn, frame.raddr, frame.rkey, frame.total);
                conn.replies.push_back(Reply::Read { psn, raddr, rkey, total, offset: 0 });
            }
            Verdict::NotReady(code) => conn.reply(Kind::Rnr, code, frame.psn),
            Verdict::Refused(code) => conn.reply(Kind::Nak, u8::try_from(code).unwrap_or(0), frame.psn),
        }
        self.activate(index);
        true
    }

    /// The memory that a frame refers to, as it is mapped here.
    fn resolve(&mut self, peer: Peer, frame: &Frame, data: &Pieces) -> Option<Pieces> {
        let Peer::Slot(slot) = peer else { return None };
        let mut bytes = [0; REFERENCE];
        // SAFETY: the frame is not consumed yet, and the array is ours.
        unsafe { data.copy_to(&Pieces::one(bytes.as_mut_ptr(), REFERENCE)) };
        if self.adapter.faults.verb("gpu_import").is_some() {
            return None;
        }
        let gpu = self.target_gpu(frame);
        let owner = self.links.process(slot);
        self.gpu.resolve(slot, owner, gpu, &Reference::decode(&bytes), frame.len)
    }

    /// The GPU on which a frame's bytes belong, as far as it has a target on one.
    fn target_gpu(&self, frame: &Frame) -> Option<u8> {
        let regions = &self.adapter.regions;
        let first = |sges: &[Sge]| regions.mem(sges.iter().find(|sge| sge.len > 0)?.lkey).gpu();
        let conn = self.conn(frame.dst & crate::qp::INDEX_MASK).filter(|conn| conn.qp.num == frame.dst)?;
        match frame.kind {
            Kind::Write | Kind::WriteImm => regions.mem(frame.rkey).gpu(),
            Kind::Send | Kind::SendImm if conn.qp.receives_left() > 0 => {
                // SAFETY: a receive request is left.
                let wqe: &RecvWqe = unsafe { conn.qp.rq.get(conn.qp.rq_next.load(Relaxed)) };
                first(&wqe.sges[..wqe.sge_count])
            }
            Kind::ReadResponse => {
                // SAFETY: in flight.
                let wqe = unsafe { conn.qp.sq.get(conn.in_flight(frame.psn)?) };
                first(&wqe.sges[..wqe.sge_count])
            }
            _ => None,
        }
    }

    /// Takes a region out of the table; nothing is under way to or from it then.
    pub(crate) fn deregister(&mut self, key: u32) {
        self.settle();
        let mem = self.adapter.regions.mem(key);
        if self.adapter.regions.remove(key) {
            for slot in self.gpu.leave(mem) {
                if let Mem::Gpu { share, .. } = mem {
                    self.forgotten.push((slot, share));
                    self.awaited.push(slot);
                }
            }
        }
        self.tell_forgotten();
    }

    fn tell_forgotten(&mut self) {
        let src = self.links.slot() << crate::qp::INDEX_BITS;
        let links = &mut self.links;
        self.forgotten.retain(|&(slot, share)| matches!(links.tell(slot, &Frame::forget(src, share)), Sent::Full));
    }

    /// Sends what the responder owes. True if something is left that could be sent right away.
    fn send_replies(&mut self, index: u32) -> bool {
        for _ in 0..8 {
            let Some(conn) = self.conn(index) else { return false };
            let (Some(reply), Some(peer)) = (conn.replies.front(), conn.peer) else { return false };
            let qp = Arc::clone(&conn.qp);
            let attr = conn.attr;
            let mut frame = Frame {
                kind: Kind::ReadResponse,
                syndrome: 0,
                mtu: u8::try_from(attr.mtu).unwrap_or(0),
                solicited: false,
                by_reference: false,
                src: qp.num,
                dst: attr.dest,
                psn: 0,
                imm: 0,
                rkey: 0,
                len: 0,
                total: 0,
                offset: 0,
                raddr: 0,
            };
            let mut data = Pieces::none();
            match *reply {
                Reply::Frame { kind, syndrome, psn } => {
                    (frame.kind, frame.syndrome, frame.psn) = (kind, syndrome, psn);
                }
                Reply::Read { psn, raddr, rkey, total, offset } => {
                    let len = (total - offset).min(SEGMENT as u64);
                    (frame.psn, frame.total, frame.offset, frame.len) =
                        (psn, total, offset, u32::try_from(len).unwrap_or(0));
                    let at = self.adapter.regions.check(rkey, qp.pd, raddr, total, access::REMOTE_READ);
                    match (at, usize::try_from(offset)) {
                        (Some(at), Ok(offset)) => data.add_in(at.mem, at.ptr.wrapping_add(offset), frame.len as usize),
                        _ if total == 0 => {}
                        _ => {
                            // Deregistered since the request came.
                            self.refuse(&qp, None, status::REM_ACCESS);
                            let Some(conn) = self.conn_mut(index) else { return false };
                            conn.reply(Kind::Nak, 10, psn);
                            continue;
                        }
                    }
                }
            }
            let mut room = [0; REFERENCE];
            let Some(payload) = self.payload(peer, &data, &mut frame, &mut room) else {
                let psn = frame.psn;
                self.refuse(&qp, None, status::REM_OP);
                let Some(conn) = self.conn_mut(index) else { return false };
                conn.reply(Kind::Nak, u8::try_from(status::REM_OP).unwrap_or(0), psn);
                continue;
            };
            match self.links.send(peer, &attr.address, &frame, &payload) {
                Sent::Full => {
                    self.blocked.push(index);
                    return false;
                }
                Sent::Gone => {
                    if let Some(conn) = self.conn_mut(index) {
                        conn.replies.clear();
                    }
                    return false;
                }
                Sent::Yes => {}
            }
            let Some(conn) = self.conn_mut(index) else { return false };
            match conn.replies.front_mut() {
                Some(Reply::Read { total, offset, .. }) if *offset + u64::from(frame.len) < *total => {
                    *offset += u64::from(frame.len);
                }
                _ => {
                    conn.replies.pop_front();
                }
            }
        }
        self.conn(index).is_some_and(|conn| !conn.replies.is_empty())
    }

    /// An answer to the requester. False if it has to wait for a READ's bytes to land.
    fn answer(&mut self, peer: Peer, frame: &Frame, data: &Pieces) -> bool {
        let now = Instant::now();
        let index = frame.dst & crate::qp::INDEX_MASK;
        let Some(conn) = self.conn_mut(index).filter(|conn| conn.qp.num == frame.dst) else { return true };
        if conn.qp.state() != State::Rts || conn.peer != Some(peer) || conn.attr.dest != frame.src {
            return true;
        }
        let qp = Arc::clone(&conn.qp);
        if !self.adapter.port_is_up(qp.device, usize::from(conn_port(self.conn(index)))) {
            return true;
        }
        let Some(at) = self.conn(index).and_then(|conn| conn.in_flight(frame.psn)) else { return true };
        // Requests before this one are done; a READ is only done by its own data.
        while let Some(conn) = self.conn(index).filter(|conn| conn.una != at) {
            // SAFETY: una is posted and not completed.
            if unsafe { qp.sq.get(conn.una) }.op == Op::Read {
                return conn.landing == 0;
            }
            self.complete_send(index);
        }
        // SAFETY: in flight.
        let wqe = unsafe { qp.sq.get(at) };
        match frame.kind {
            Kind::Ack if wqe.op != Op::Read => self.complete_send(index),
            Kind::Nak => {
                let code = u32::from(frame.syndrome);
                let code = if (status::LOC_LEN..=21).contains(&code) { code } else { status::REM_OP };
                self.fail_send(index, code, vendor_code(code));
                return true;
            }
            Kind::Rnr => {
                self.not_ready(index, frame.syndrome & 31, now);
                return true;
            }
            Kind::ReadResponse if wqe.op == Op::Read => {
                let Some(conn) = self.conn_mut(index) else { return true };
                if frame.offset != conn.read_offset || frame.total != wqe.len {
                    return true;
                }
                let sges = &wqe.sges[..wqe.sge_count];
                let len = u64::from(frame.len);
                let Some(target) = gather(self.adapter, qp.pd, sges, frame.offset, len, access::LOCAL_WRITE) else {
                    self.fail_send(index, status::LOC_PROT, vendor_code(status::LOC_PROT));
                    return true;
                };
                let is_last = frame.offset + len >= wqe.len;
                match self.carry(index, data, &target, frame.offset == 0) {
                    Copied::Now => {}
                    Copied::Later(ticket, unload) => {
                        let mut landing = Landing::new(ticket, unload);
                        (landing.requester, landing.sent) = (Some(qp.num), is_last.then_some(at));
                        self.queue(landing);
                        if let Some(conn) = self.conn_mut(index) {
                            conn.read_offset += len;
                        }
                        self.set_deadline(index, now);
                        return true;
                    }
                    Copied::Busy => return false,
                    Copied::Failed => {
                        self.fail_send(index, status::LOC_QP_OP, vendor_code(status::LOC_QP_OP));
                        return true;
                    }
                }
                let Some(conn) = self.conn_mut(index) else { return true };
                conn.read_offset += len;
                if is_last {
                    self.complete_send(index);
                    self.activate(index);
                }
            }
            _ => return true,
        }
        // Progress: the clock starts anew, or stops.
        let Some(conn) = self.conn_mut(index) else { return true };
        let (all, part) = (conn.una == conn.next, conn.offset > 0);
        if all && !part {
            (conn.deadline, conn.lent) = (None, false);
        } else {
            self.set_deadline(index, now);
        }
        if all && self.conn(index).is_some_and(|conn| qp.sq.head() != conn.next) {
            self.activate(index); // a fence, a READ too many or a refusal waited for this
        }
        true
    }
}

fn conn_port(conn: Option<&Conn>) -> u8 {
    conn.map_or(0, |conn| conn.attr.port.saturating_sub(1))
}

/// The RNR timer by its code, in units of 10 µs (InfiniBand specification, table 45).
fn rnr_delay(code: u8) -> Duration {
    const UNITS: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072,
        4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * UNITS[usize::from(code & 31)]
}
