//! What NCCL's profiler is told: each work request of a send, from its post to its completion, on the QP that it goes over.
//!
//! A QP completes its requests in order, so their events are a queue by QP. The sender knows nothing of it: its way to the
//! QPs is wrapped. NCCL has a callback whether or not there is a profiler, so until one wants an event of a connection it is
//! asked at one work request of [`EVERY`] only: it may miss as many less one at its first.

use std::cell::Cell;
use std::ffi::c_void;
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::verbs::{Completion, VerbsError, Wc, WcBatch, WriteWr};

use super::wire::Post;
use super::wr_id::{Kind, WrId};
use super::{Buffer, Lanes, MAX_GROUP, RECV_REQUESTS, SEND_REQUESTS, SEND_WRS};

/// NCCL's own name of a transfer, of which the events are parts; never followed here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(transparent)]
pub struct Parent(pub *mut c_void);

impl Parent {
    /// Of a version of the interface that has no profiler.
    pub const NONE: Self = Self(ptr::null_mut());
}

/// An event that has begun; None: the profiler does not want it.
pub type Event = Option<NonNull<c_void>>;

/// A work request as the profiler is told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Posted {
    /// Number of the rail.
    pub rail: usize,
    pub wr_id: u64,
    pub operation: Operation,
    pub qp_num: u32,
    pub bytes: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operation {
    Write,
    WriteWithImm,
    /// The answer to a credit.
    Receive,
}

/// Who wants to know. Called on the data path.
pub trait Profiler: fmt::Debug + Send + Sync {
    fn begin(&self, parent: Parent, posted: &Posted) -> Event;
    fn end(&self, event: NonNull<c_void>);
}

/// An event with the work request that ends it.
#[derive(Debug, Clone, Copy)]
struct Begun {
    wr_id: u64,
    event: NonNull<c_void>,
}

/// The events of a QP, oldest first.
#[derive(Debug)]
struct Lane {
    rail: usize,
    qp_num: u32,
    events: [Cell<Option<Begun>>; SEND_WRS as usize],
    first: Cell<usize>,
    len: Cell<usize>,
}

impl Lane {
    fn new(rail: usize, qp_num: u32) -> Self {
        let events = [const { Cell::new(None) }; SEND_WRS as usize];
        Self { rail, qp_num, events, first: Cell::new(0), len: Cell::new(0) }
    }

    fn push(&self, begun: Begun) {
        self.events[(self.first.get() + self.len.get()) % self.events.len()].set(Some(begun));
        self.len.set(self.len.get() + 1);
    }

    fn pop(&self) -> Event {
        let first = self.first.get();
        let begun = self.events[first].take()?;
        self.first.set((first + 1) % self.events.len());
        self.len.set(self.len.get() - 1);
        Some(begun.event)
    }

    fn is_next(&self, wr_id: u64) -> bool {
        self.events[self.first.get()].get().is_some_and(|begun| begun.wr_id == wr_id)
    }
}

/// Work requests of a connection of which one is offered while none is wanted.
const EVERY: u8 = 16;

/// Whether to ask the profiler.
#[derive(Debug, Default)]
struct Interest {
    wanted: Cell<bool>,
    /// Offers to make until the next that is made.
    silent: Cell<u8>,
}

impl Interest {
    #[inline]
    fn asks(&self) -> bool {
        if self.wanted.get() {
            return true;
        }
        let silent = self.silent.get();
        self.silent.set(if silent == 0 { EVERY - 1 } else { silent - 1 });
        silent == 0
    }
}

#[derive(Debug)]
struct Log {
    profiler: Arc<dyn Profiler>,
    interest: Interest,
    /// By request.
    parents: [Cell<Parent>; SEND_REQUESTS],
    lanes: Box<[Lane]>,
    /// Events that have begun and not ended.
    open: Cell<usize>,
}

impl Log {
    #[inline]
    fn begin(&self, qp: usize, w: &WriteWr) {
        if self.interest.asks() {
            self.ask(qp, w.wr_id, w.length, w.imm.is_some());
        }
    }

    /// By value: what is handed over by reference is kept in memory, for those that are not asked for, too.
    #[cold]
    fn ask(&self, qp: usize, wr_id: u64, length: u32, with_imm: bool) {
        // What is not of a send (a count of hinted receives) has no parent.
        let parent = self.parents.get(usize::from(WrId::unpack(wr_id).request)).map_or(Parent::NONE, Cell::get);
        if parent == Parent::NONE {
            self.interest.silent.set(0);
            return;
        }
        let lane = &self.lanes[qp];
        let operation = if with_imm { Operation::WriteWithImm } else { Operation::Write };
        let bytes = u64::from(length);
        let posted = Posted { rail: lane.rail, wr_id, operation, qp_num: lane.qp_num, bytes };
        if let Some(event) = self.profiler.begin(parent, &posted) {
            self.interest.wanted.set(true);
            lane.push(Begun { wr_id, event });
            self.open.set(self.open.get() + 1);
        }
    }

    #[cold]
    fn end(&self, completions: &[Wc]) {
        for wc in completions {
            let wr_id = match wc.read() {
                Completion::Sent { wr_id } => wr_id,
                Completion::Failed(failure) => failure.wr_id,
                Completion::Arrived(_) => continue,
            };
            let id = WrId::unpack(wr_id);
            if let (Kind::Data, Some(lane)) = (id.kind, self.lanes.get(usize::from(id.qp)))
                && lane.is_next(wr_id)
            {
                self.end_oldest(lane);
            }
        }
    }

    fn end_oldest(&self, lane: &Lane) {
        if let Some(event) = lane.pop() {
            self.open.set(self.open.get() - 1);
            self.profiler.end(event);
        }
    }
}

/// A sender's way to its QPs, watched by a profiler if there is one.
#[derive(Debug)]
pub struct Profiled<P> {
    post: P,
    log: Option<Box<Log>>,
}

// SAFETY: parents and events are names that only the profiler follows, from whichever thread runs the data path.
unsafe impl<P: Send> Send for Profiled<P> {}

impl<P> Profiled<P> {
    /// `qp_nums` by QP of the connection.
    pub fn new(post: P, profiler: Option<Arc<dyn Profiler>>, lanes: Lanes, qp_nums: impl Fn(usize) -> u32) -> Self {
        let log = profiler.map(|profiler| {
            Box::new(Log {
                profiler,
                interest: Interest::default(),
                parents: [const { Cell::new(Parent::NONE) }; SEND_REQUESTS],
                lanes: (0..lanes.total()).map(|qp| Lane::new(qp / lanes.qps, qp_nums(qp))).collect(),
                open: Cell::new(0),
            })
        });
        Self { post, log }
    }

    /// The writes of this request, from now on, are parts of `parent`.
    #[inline]
    pub fn adopt(&self, request: Option<u8>, parent: Parent) {
        if let (Some(log), Some(request)) = (&self.log, request) {
            log.parents[usize::from(request)].set(parent);
        }
    }

    /// Ends every event: what is still under way is done, and its completions may never come.
    pub fn settle(&self) {
        if let Some(log) = &self.log {
            for lane in &log.lanes {
                while lane.len.get() > 0 {
                    log.end_oldest(lane);
                }
            }
        }
    }
}

impl<P: Post> Post for Profiled<P> {
    #[inline(always)] // as QpSet's
    unsafe fn write(&self, qp: usize, w: &WriteWr) -> Result<(), VerbsError> {
        if let Some(log) = &self.log {
            log.begin(qp, w);
        }
        // SAFETY: the caller's promise. One that is refused ends the connection; its event stays open, as what it was part of.
        unsafe { self.post.write(qp, w) }
    }

    fn recvs(&self, qp: usize, wr_id: u64, count: usize) -> Result<(), VerbsError> {
        self.post.recvs(qp, wr_id, count)
    }

    unsafe fn flush(&self, rail: usize, wr_id: u64, remote: u64, rkey: u32) -> Result<(), VerbsError> {
        // SAFETY: the caller's promise.
        unsafe { self.post.flush(rail, wr_id, remote, rkey) }
    }

    #[inline(always)]
    fn poll<'a>(&self, rail: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
        let completions = self.post.poll(rail, batch)?;
        if let Some(log) = self.log.as_ref().filter(|log| log.open.get() > 0) {
            log.end(completions);
        }
        Ok(completions)
    }
}

/// The events of a receiver: one for each buffer, from its credit to its last byte, or, of a
/// hinted receive, to its first test. Which QPs bring it shows only when it
/// has come, so the first stands for all.
#[derive(Debug)]
pub struct Arrivals {
    profiler: Arc<dyn Profiler>,
    interest: Interest,
    qp_num: u32,
    events: Box<[[Event; MAX_GROUP]; RECV_REQUESTS]>,
    /// Of all requests.
    open: usize,
}

impl Arrivals {
    pub fn new(profiler: Arc<dyn Profiler>, qp_num: u32) -> Self {
        let events = Box::new([[None; MAX_GROUP]; RECV_REQUESTS]);
        Self { profiler, interest: Interest::default(), qp_num, events, open: 0 }
    }

    /// A receive of these buffers is posted, each a part of its parent.
    #[inline]
    pub fn begin(&mut self, request: usize, buffers: &[Buffer], parents: &[Parent]) {
        if self.interest.asks() {
            self.ask(request, buffers, parents);
        }
    }

    #[cold]
    fn ask(&mut self, request: usize, buffers: &[Buffer], parents: &[Parent]) {
        for ((place, buffer), &parent) in self.events[request].iter_mut().zip(buffers).zip(parents) {
            if parent == Parent::NONE {
                continue;
            }
            let (wr_id, operation) = (request as u64, Operation::Receive);
            let posted = Posted { rail: 0, wr_id, operation, qp_num: self.qp_num, bytes: buffer.size };
            if let Some(event) = self.profiler.begin(parent, &posted) {
                self.interest.wanted.set(true);
                *place = Some(event);
                self.open += 1;
            }
        }
    }

    /// It is done.
    #[inline]
    pub fn end(&mut self, request: usize) {
        if self.open > 0 {
            self.end_all(request);
        }
    }

    #[cold]
    fn end_all(&mut self, request: usize) {
        for event in self.events[request].iter_mut().filter_map(Option::take) {
            self.open -= 1;
            self.profiler.end(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::VecDeque;
    use std::sync::Mutex;

    const LANES: Lanes = Lanes { rails: 2, qps: 2 };

    /// A parent of which no event is wanted.
    const UNWANTED: usize = 1000;

    /// What it was told, as text; events are numbered from 1.
    #[derive(Debug, Default)]
    struct Notes(Mutex<(usize, Vec<String>)>);

    impl Notes {
        fn take(&self) -> Vec<String> {
            std::mem::take(&mut self.0.lock().expect("no panic").1)
        }
    }

    impl Profiler for Notes {
        fn begin(&self, parent: Parent, p: &Posted) -> Event {
            if parent == self::parent(UNWANTED) {
                return None;
            }
            let mut notes = self.0.lock().expect("no panic");
            notes.0 += 1;
            let event = notes.0;
            notes.1.push(format!(
                "{event} begins in {}: {:?} of {} on rail {} QP {}",
                parent.0.addr(),
                p.operation,
                p.bytes,
                p.rail,
                p.qp_num
            ));
            NonNull::new(ptr::without_provenance_mut(event))
        }

        fn end(&self, event: NonNull<c_void>) {
            self.0.lock().expect("no panic").1.push(format!("{} ends", event.addr()));
        }
    }

    /// Completes what the test says.
    #[derive(Debug, Default)]
    struct Wire(RefCell<VecDeque<Wc>>);

    impl Post for Wire {
        unsafe fn write(&self, _: usize, _: &WriteWr) -> Result<(), VerbsError> {
            Ok(())
        }

        fn recvs(&self, _: usize, _: u64, _: usize) -> Result<(), VerbsError> {
            Ok(())
        }

        unsafe fn flush(&self, _: usize, _: u64, _: u64, _: u32) -> Result<(), VerbsError> {
            Ok(())
        }

        fn poll<'a>(&self, _: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
            Ok(batch.fill(&mut self.0.borrow_mut()))
        }
    }

    fn parent(name: usize) -> Parent {
        Parent(ptr::without_provenance_mut(name))
    }

    fn id(request: u8, qp: u8) -> u64 {
        WrId { kind: Kind::Data, qp, request, generation: 1, count: 8 }.pack()
    }

    fn write(way: &Profiled<Wire>, request: u8, qp: u8, imm: Option<u32>) {
        let (local, lkey, remote, rkey) = (0, 0, 0, 0);
        let w = WriteWr {
            wr_id: id(request, qp),
            local,
            lkey,
            length: 8,
            remote,
            rkey,
            imm,
            signaled: true,
            inline: false,
        };
        // SAFETY: the wire looks at nothing.
        unsafe { way.write(usize::from(qp), &w) }.expect("no refusal");
    }

    fn complete(way: &Profiled<Wire>, ids: &[u64]) {
        way.post.0.borrow_mut().extend(ids.iter().map(|&id| Wc::sent(id)));
        way.poll(0, &mut WcBatch::default()).expect("no refusal");
    }

    #[test]
    fn an_event_is_a_work_request_from_post_to_completion() {
        let notes = Arc::new(Notes::default());
        let profiler: Arc<dyn Profiler> = Arc::clone(&notes) as Arc<dyn Profiler>;
        let way = Profiled::new(Wire::default(), Some(profiler), LANES, |qp| 100 + u32::try_from(qp).expect("small"));
        way.adopt(Some(5), parent(77));
        way.adopt(Some(6), parent(88));
        write(&way, 5, 3, None);
        write(&way, 6, 3, Some(1));
        write(&way, 5, 0, Some(1));
        // A count of hinted receives is part of nothing, and in its QP's order all the same.
        write(&way, u8::try_from(SEND_REQUESTS).expect("small"), 0, None);
        write(&way, 6, 0, Some(1));
        assert_eq!(
            notes.take(),
            [
                "1 begins in 77: Write of 8 on rail 1 QP 103",
                "2 begins in 88: WriteWithImm of 8 on rail 1 QP 103",
                "3 begins in 77: WriteWithImm of 8 on rail 0 QP 100",
                "4 begins in 88: WriteWithImm of 8 on rail 0 QP 100",
            ]
        );
        complete(&way, &[id(5, 0), id(5, 3)]);
        assert_eq!(notes.take(), ["3 ends", "1 ends"]);
        complete(&way, &[id(u8::try_from(SEND_REQUESTS).expect("small"), 0)]);
        assert_eq!(notes.take(), [] as [String; 0]);
        complete(&way, &[id(6, 0), id(6, 3)]);
        assert_eq!(notes.take(), ["4 ends", "2 ends"]);
        // The peer, which has closed, said that it has these.
        write(&way, 6, 0, None);
        write(&way, 5, 3, None);
        way.settle();
        assert_eq!(notes.take()[2..], ["5 ends", "6 ends"]);
        complete(&way, &[id(6, 0)]);
        assert_eq!(notes.take(), [] as [String; 0]);
    }

    #[test]
    fn a_transfer_without_a_name_is_told_to_nobody() {
        let notes = Arc::new(Notes::default());
        let profiler: Arc<dyn Profiler> = Arc::clone(&notes) as Arc<dyn Profiler>;
        let way = Profiled::new(Wire::default(), Some(profiler), LANES, |_| 0);
        way.adopt(Some(0), parent(7));
        way.adopt(Some(0), Parent::NONE);
        way.adopt(None, parent(9));
        write(&way, 0, 1, None);
        complete(&way, &[id(0, 1)]);
        assert_eq!(notes.take(), [] as [String; 0]);
    }

    #[test]
    fn what_a_profiler_did_not_want_ends_nothing() {
        let notes = Arc::new(Notes::default());
        let profiler: Arc<dyn Profiler> = Arc::clone(&notes) as Arc<dyn Profiler>;
        let way = Profiled::new(Wire::default(), Some(profiler), LANES, |_| 0);
        for (request, name) in [(1, 11), (2, UNWANTED), (3, 33), (4, UNWANTED)] {
            way.adopt(Some(request), parent(name));
            write(&way, request, 0, None);
        }
        notes.take();
        for (request, told) in [(1, Some("1 ends")), (2, None), (3, Some("2 ends")), (4, None)] {
            complete(&way, &[id(request, 0)]);
            assert_eq!(notes.take(), Vec::from_iter(told));
        }
    }

    #[test]
    fn who_wants_nothing_is_asked_now_and_then() {
        let notes = Arc::new(Notes::default());
        let profiler: Arc<dyn Profiler> = Arc::clone(&notes) as Arc<dyn Profiler>;
        let way = Profiled::new(Wire::default(), Some(Arc::clone(&profiler)), LANES, |_| 0);
        let mut arrivals = Arrivals::new(profiler, 42);
        let buffer = Buffer { address: 0, size: 10, tag: 0, keys: NonNull::dangling() };
        let mut told = |name| {
            way.adopt(Some(1), parent(name));
            write(&way, 1, 0, None);
            arrivals.begin(1, &[buffer], &[parent(name)]);
            notes.take().len()
        };
        assert_eq!(told(UNWANTED), 0);
        assert_eq!((1..EVERY).map(|_| told(7)).sum::<usize>(), 0, "not asked");
        // From its first on it misses none.
        assert_eq!([told(7), told(UNWANTED), told(7), told(7)], [2, 0, 2, 2]);
    }

    #[test]
    fn a_receive_is_an_event_for_each_buffer() {
        let notes = Arc::new(Notes::default());
        let mut arrivals = Arrivals::new(Arc::clone(&notes) as Arc<dyn Profiler>, 42);
        let keys = NonNull::dangling();
        let buffers = [10, 20, 30].map(|size| Buffer { address: 0, size, tag: 0, keys });
        arrivals.begin(3, &buffers, &[parent(1), Parent::NONE, parent(3)]);
        assert_eq!(
            notes.take(),
            ["1 begins in 1: Receive of 10 on rail 0 QP 42", "2 begins in 3: Receive of 30 on rail 0 QP 42"]
        );
        arrivals.end(3);
        assert_eq!(notes.take(), ["1 ends", "2 ends"]);
        arrivals.end(3);
        assert_eq!(notes.take(), [] as [String; 0]);
    }
}
