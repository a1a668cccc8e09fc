//! Sender and receiver over a wire in memory that keeps the order inside a QP and nothing else.
#![expect(clippy::cast_possible_truncation, reason = "the tests' sizes are small")]

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use proptest::prelude::*;

use super::credit::Stride;
use super::credit::tests::{RingMemory, memory};
use super::imm::Imm;
use super::staging::{Copier, CopyWr, Shadow};
use super::*;
use crate::verbs::{Completion, VerbsError, Wc, WcBatch, WriteWr};

/// xorshift64*: the tests' own randomness, so that a seed is a schedule.
#[derive(Debug)]
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n
    }
}

/// One direction of one QP, and what the device holds of it.
#[derive(Debug, Default)]
struct Side {
    /// Requests under way, by QP.
    wires: Vec<VecDeque<WriteWr>>,
    /// Completions, by rail.
    cqs: Vec<VecDeque<Wc>>,
    /// Receives posted, by QP.
    recvs: Vec<VecDeque<u64>>,
    posts: u64,
}

#[derive(Debug)]
struct Net {
    /// 0 sender, 1 receiver.
    sides: [Side; 2],
    qps_per_rail: usize,
    max_write: u32,
}

#[derive(Debug, Clone)]
struct End {
    net: Rc<RefCell<Net>>,
    side: usize,
}

impl Post for End {
    unsafe fn write(&self, qp: usize, w: &WriteWr) -> Result<(), VerbsError> {
        let mut net = self.net.borrow_mut();
        assert!(w.length <= net.max_write, "the port takes {} bytes, not {}", net.max_write, w.length);
        let side = &mut net.sides[self.side];
        side.posts += 1;
        side.wires[qp].push_back(*w);
        assert!(side.wires[qp].len() <= SEND_WRS as usize, "the send queue of QP {qp} is full");
        Ok(())
    }

    fn recvs(&self, qp: usize, wr_id: u64, count: usize) -> Result<(), VerbsError> {
        self.net.borrow_mut().sides[self.side].recvs[qp].extend(std::iter::repeat_n(wr_id, count));
        Ok(())
    }

    unsafe fn flush(&self, rail: usize, wr_id: u64, _: u64, _: u32) -> Result<(), VerbsError> {
        self.net.borrow_mut().sides[self.side].cqs[rail].push_back(Wc::sent(wr_id));
        Ok(())
    }

    fn poll<'a>(&self, rail: usize, batch: &'a mut WcBatch) -> Result<&'a [Wc], VerbsError> {
        Ok(batch.fill(&mut self.net.borrow_mut().sides[self.side].cqs[rail]))
    }
}

impl Net {
    /// Carries out the oldest request of one QP, chosen by chance; false where none is under way.
    fn step(&mut self, rng: &mut Rng) -> bool {
        let busy: Vec<(usize, usize)> = (0..2)
            .flat_map(|s| (0..self.sides[s].wires.len()).map(move |q| (s, q)))
            .filter(|&(s, q)| !self.sides[s].wires[q].is_empty())
            .collect();
        if busy.is_empty() {
            return false;
        }
        let (s, q) = busy[rng.below(busy.len())];
        let w = self.sides[s].wires[q].pop_front().expect("busy");
        let rail = q / self.qps_per_rail;
        // SAFETY: the tests' buffers and rings are alive and as long as the request says.
        unsafe { std::ptr::copy(w.local as *const u8, w.remote as *mut u8, w.length as usize) };
        if let Some(imm) = w.imm {
            let peer = &mut self.sides[1 - s];
            let wr_id = peer.recvs[q].pop_front().expect("a receive is always posted");
            peer.cqs[rail].push_back(Wc::arrived(wr_id, w.length, imm));
        }
        if w.signaled {
            self.sides[s].cqs[rail].push_back(Wc::sent(w.wr_id));
        }
        true
    }
}

struct Pair {
    net: Rc<RefCell<Net>>,
    sender: Sender<End>,
    receiver: Receiver<End>,
    lanes: Lanes,
    rings: [Box<RingMemory>; 2],
    /// The count at the sender, and at the receiver.
    words: [Box<AtomicU64>; 2],
}

fn pair(rails: usize, qps: usize, spread: usize, threshold: u64) -> Pair {
    pair_of(rails, qps, spread, threshold, 1 << 31)
}

fn pair_of(rails: usize, qps: usize, spread: usize, threshold: u64, max_write: u32) -> Pair {
    let lanes = Lanes { rails, qps };
    let side = || Side {
        wires: vec![VecDeque::new(); lanes.total()],
        cqs: vec![VecDeque::new(); rails],
        recvs: vec![VecDeque::new(); lanes.total()],
        posts: 0,
    };
    let net = Rc::new(RefCell::new(Net { sides: [side(), side()], qps_per_rail: qps, max_write }));
    let stride = Stride::for_rails(rails);
    let mut rings = [memory(), memory()];
    let credits = rings[0].ring(stride);
    let ring_address = credits.address(0);
    let shadow = rings[1].ring(stride);
    let receiver_end = End { net: Rc::clone(&net), side: 1 };
    for qp in 0..lanes.total() {
        receiver_end.recvs(qp, Receiver::<End>::recv_wr_id(qp), Receiver::<End>::RQ_DEPTH).expect("in memory");
    }
    let words = [(); 2].map(|()| Box::new(AtomicU64::new(0)));
    let path = CountPath {
        word: NonNull::from(&*words[0]),
        lkey: 1,
        address: std::ptr::from_ref(&*words[1]) as u64,
        rkey: 2,
        inline: false,
    };
    let sender = Sender::new(SenderParts {
        post: End { net: Rc::clone(&net), side: 0 },
        credits,
        lanes,
        speed: [100; MAX_RAILS],
        split_threshold: threshold,
        spread,
        max_write,
        chunk: 1024,
        count: Some(path),
    });
    let receiver = Receiver::new(ReceiverParts {
        post: receiver_end,
        shadow,
        shadow_lkey: 1,
        ring_address,
        ring_rkey: 2,
        lanes,
        max_inline: 0,
        max_write,
        count: Some(NonNull::from(&*words[1])),
        can_flush: true,
    });
    Pair { net, sender, receiver, lanes, rings, words }
}

fn keys() -> Box<Keys> {
    Box::new(Keys::new([1; MAX_RAILS], [2; MAX_RAILS], true))
}

/// Copies when it is told to.
#[derive(Debug, Default)]
struct Late {
    to_gpu: bool,
    queue: Mutex<VecDeque<CopyWr>>,
    reached: AtomicU32,
    bytes: AtomicU64,
    /// Others have taken all room.
    full: AtomicBool,
}

impl Copier for Late {
    fn has_room(&self, _: usize) -> bool {
        !self.full.load(Ordering::Relaxed)
    }

    unsafe fn start(&self, copies: &[CopyWr]) -> Result<(), String> {
        self.queue.lock().expect("no panic").extend(copies);
        Ok(())
    }

    fn reached(&self) -> u32 {
        self.reached.load(Ordering::Relaxed)
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// An end of a GPU that has failed.
#[derive(Debug)]
struct Broken;

impl Copier for Broken {
    fn has_room(&self, _: usize) -> bool {
        true
    }

    unsafe fn start(&self, _: &[CopyWr]) -> Result<(), String> {
        Err("no such GPU".to_owned())
    }

    fn reached(&self) -> u32 {
        0
    }

    fn check(&self) -> Result<(), String> {
        Err("no such GPU".to_owned())
    }
}

impl Late {
    fn new(to_gpu: bool) -> Arc<Self> {
        Arc::new(Self { to_gpu, ..Self::default() })
    }

    /// The oldest copy; false where there is none.
    fn step(&self) -> bool {
        let Some(copy) = self.queue.lock().expect("no panic").pop_front() else { return false };
        let (from, to) = if self.to_gpu { (copy.host, copy.gpu) } else { (copy.gpu, copy.host) };
        // SAFETY: the tests' memory is alive until the copy's request is done.
        unsafe { std::ptr::copy(from as *const u8, to as *mut u8, copy.length as usize) };
        self.bytes.fetch_add(copy.length, Ordering::Relaxed);
        if let Some(mark) = copy.mark {
            self.reached.store(mark, Ordering::Relaxed);
        }
        true
    }
}

/// "GPU" memory, its shadow, and its keys.
#[derive(Debug)]
struct Memory {
    bytes: Vec<u8>,
    _shadow: Vec<u8>,
    keys: Box<Keys>,
}

impl Memory {
    /// Staged in messages of these sizes, if by anyone.
    fn new(bytes: Vec<u8>, copier: Option<&Arc<Late>>, sizes: std::ops::Range<u64>) -> Self {
        let shadow = vec![0xDDu8; bytes.len()];
        let mut keys = Keys::new([1; MAX_RAILS], [2; MAX_RAILS], true);
        if let Some(copier) = copier {
            keys = keys.staged_by(Shadow {
                offset: (shadow.as_ptr() as u64).wrapping_sub(bytes.as_ptr() as u64),
                lkeys: [3; MAX_RAILS],
                rkeys: [4; MAX_RAILS],
                sizes,
                mixed: false,
                copier: Arc::<Late>::clone(copier),
            });
        }
        Self { bytes, _shadow: shadow, keys: Box::new(keys) }
    }

    fn keys(&self) -> NonNull<Keys> {
        NonNull::from(&*self.keys)
    }
}

fn byte(message: usize, offset: usize) -> u8 {
    (message.wrapping_mul(131) ^ offset.wrapping_mul(7) ^ offset >> 8) as u8
}

/// What stages: the sizes, at the sender and at the receiver.
type Stages = [Option<std::ops::Range<u64>>; 2];

/// Random groups of random sizes, sends in random order inside a window, random progress: every byte in its place, guard
/// bytes untouched, sizes exact.
fn play(seed: u64, mut p: Pair, groups: usize, hints: bool, stages: &Stages) {
    let mut rng = Rng(seed | 1);
    let copiers = [Late::new(false), Late::new(true)];
    // Bytes that each end has to copy.
    let mut due = [0; 2];
    let memory = |side: usize, bytes: Vec<u8>| {
        let sizes = stages[side].clone();
        Memory::new(bytes, sizes.as_ref().map(|_| &copiers[side]), sizes.unwrap_or_default())
    };
    let staged = |side: usize, size: usize| stages[side].as_ref().is_some_and(|sizes| sizes.contains(&(size as u64)));
    struct Open {
        request: u8,
        first: usize,
        buffers: Vec<Memory>,
        posted: Vec<usize>,
    }
    impl Open {
        fn check(&self, sizes: &[usize]) {
            for (m, Memory { bytes: buffer, .. }) in self.buffers.iter().enumerate() {
                let message = self.first + m;
                for o in 0..sizes[message] {
                    assert_eq!(buffer[16 + o], byte(message, o), "message {message} byte {o}");
                }
                assert!(buffer[..16].iter().all(|&b| b == 0xEE), "bytes before the buffer");
                assert!(buffer[16 + sizes[message]..].iter().all(|&b| b == 0xEE), "bytes past the payload");
                assert!(self.posted[m] >= sizes[message]);
            }
        }
    }
    let mut next_message = 0;
    let mut posted_groups = 0;
    let mut open: Vec<Open> = Vec::new();
    // Hinted: nobody tells when their data are there.
    let mut blind: Vec<Open> = Vec::new();
    // What remains to be sent: (message, tag, bytes).
    let mut to_send: VecDeque<(usize, u32, Memory)> = VecDeque::new();
    let mut sending: Vec<(u8, Memory, usize)> = Vec::new();
    let mut sizes: Vec<usize> = Vec::new();
    let mut idle = 0;
    while posted_groups < groups || !open.is_empty() || !to_send.is_empty() || !sending.is_empty() {
        idle += 1;
        assert!(idle < 200_000, "stuck: {posted_groups} posted, {} open, {} to send", open.len(), to_send.len());
        match rng.below(4) {
            0 if posted_groups < groups && to_send.len() < 40 => {
                let n = if hints && rng.below(8) > 0 { 1 } else { 1 + rng.below(MAX_GROUP) };
                let mut buffers = Vec::new();
                let mut posted = Vec::new();
                let mut sends = Vec::new();
                for member in 0..n {
                    let size = [0, 1, 7, 8, 100, 640, 3000, 9000][rng.below(8)];
                    // Sends may be shorter or longer than the receive.
                    let sent = match rng.below(4) {
                        0 => size / 2,
                        1 => size + rng.below(50),
                        _ => size,
                    };
                    buffers.push(memory(1, vec![0xEEu8; size + 32]));
                    posted.push(size);
                    let message = next_message + member;
                    sizes.push(sent.min(size));
                    let data = (0..sent).map(|o| byte(message, o)).collect::<Vec<u8>>();
                    sends.push((message, (member % 3) as u32, memory(0, data)));
                }
                let b: Vec<Buffer> = (0..n)
                    .map(|m| Buffer {
                        address: buffers[m].bytes.as_mut_ptr() as u64 + 16,
                        size: posted[m] as u64,
                        tag: (m % 3) as u32,
                        keys: buffers[m].keys(),
                    })
                    .collect();
                let hinted = n == 1 && hints && rng.below(4) > 0;
                let request = match hinted {
                    // SAFETY: the buffers live in `open` or `hinted` until the receive is done, or the connection gone.
                    true => unsafe { p.receiver.irecv_hinted(&b[0]) },
                    // SAFETY: as above.
                    false => unsafe { p.receiver.irecv(&b) },
                };
                if let Some(request) = request.expect("no fault") {
                    let group = Open { request, first: next_message, buffers, posted };
                    for m in 0..n {
                        if staged(1, group.posted[m]) {
                            due[1] += sizes[next_message + m];
                        }
                    }
                    if hinted && !staged(1, group.posted[0]) {
                        let sizes = &[group.posted[0] as u64][..];
                        assert_eq!(p.receiver.test(request).expect("no fault"), RecvProgress::Done { sizes });
                        blind.push(group);
                    } else {
                        open.push(group);
                    }
                    next_message += n;
                    posted_groups += 1;
                    to_send.extend(sends);
                } else {
                    sizes.truncate(next_message);
                }
            }
            1 => {
                // One of the next few: out of order inside a group, and interleaved with the next.
                if !to_send.is_empty() {
                    let pick = rng.below(to_send.len().min(10));
                    // Among equal tags order counts: take the first of that tag in the window.
                    let tag = to_send[pick].1;
                    let pick = to_send.iter().position(|s| s.1 == tag).expect("there is one");
                    let (message, tag, data) = &to_send[pick];
                    let (address, size) = (data.bytes.as_ptr() as u64, data.bytes.len() as u64);
                    // SAFETY: the data live in `sending` until the send is done.
                    let sent = unsafe { p.sender.isend(address, size, *tag, data.keys()) };
                    if let Some(request) = sent.expect("no fault") {
                        let message = *message;
                        if staged(0, sizes[message]) {
                            due[0] += sizes[message];
                        }
                        let (_, _, data) = to_send.remove(pick).expect("picked");
                        sending.push((request, data, message));
                        idle = 0;
                    }
                }
            }
            2 => {
                p.net.borrow_mut().step(&mut rng);
                // The copy engines are as slow as the wire, more or less.
                copiers[rng.below(2)].step();
            }
            _ => {
                if !sending.is_empty() {
                    let i = rng.below(sending.len());
                    if let SendProgress::Done { size } = p.sender.test(sending[i].0).expect("no fault") {
                        let (_, data, message) = sending.swap_remove(i);
                        assert_eq!((size as usize, data.keys.in_flight()), (sizes[message], 0));
                    }
                }
                if !open.is_empty() {
                    let i = rng.below(open.len());
                    if let RecvProgress::Done { sizes: got } = p.receiver.test(open[i].request).expect("no fault") {
                        let group = open.swap_remove(i);
                        assert_eq!(got.len(), group.buffers.len());
                        for (m, &got) in got.iter().enumerate() {
                            assert_eq!(got as usize, sizes[group.first + m], "size of member {m}");
                            assert_eq!(group.buffers[m].keys.in_flight(), 0);
                        }
                        group.check(&sizes);
                        idle = 0;
                    }
                }
            }
        }
    }
    // Every send is acknowledged, so their bytes are there.
    blind.iter().for_each(|group| group.check(&sizes));
    assert_eq!(blind.iter().map(|group| group.buffers[0].keys.in_flight()).sum::<u32>(), 0);
    let hinted: u32 = blind.iter().map(|group| group.buffers[0].keys.hinted_in_flight()).sum();
    assert!((hinted > 0) <= hints && hinted <= RING as u32);
    assert_eq!(p.sender.stale(), 0);
    assert_eq!((p.sender.open(), p.receiver.open()), (0, 0));
    assert_eq!(copiers.map(|copier| copier.bytes.load(Ordering::Relaxed) as usize), due);
    for (qp, lanes) in (0..p.lanes.total()).map(|qp| (qp, p.lanes)) {
        assert!(p.sender.room(qp) >= SEND_WRS - 1, "room of QP {qp} of {lanes:?} is given back, but for a count's");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_arrives_once(
        seed: u64,
        rails in 1usize..=8,
        qps in 1usize..=4,
        split: bool,
        threshold in prop::sample::select(vec![0u64, 256, 4096]),
        max_write in prop::sample::select(vec![512u32, 1024, 4096, 1 << 31]),
    ) {
        play(seed, pair_of(rails, qps, if split { qps } else { 1 }, threshold, max_write), 60, false, &[None, None]);
    }

    #[test]
    fn hinted_and_plain_receives_mix(
        seed: u64,
        rails in 1usize..=3,
        qps in 1usize..=2,
        max_write in prop::sample::select(vec![512u32, 1 << 31]),
    ) {
        play(seed, pair_of(rails, qps, qps, 4096, max_write), 700, true, &[None, None]);
    }

    /// Either end or both, all messages or some, copies late and out of step with the wire.
    #[test]
    fn staged_and_other_messages_mix(
        seed: u64,
        rails in 1usize..=3,
        qps in 1usize..=4,
        threshold in prop::sample::select(vec![256u64, 4096]),
        max_write in prop::sample::select(vec![512u32, 1 << 31]),
        sizes in prop::sample::select(vec![(1u64, u64::MAX), (640, u64::MAX), (1, 640), (100, 3001)]),
        which in 1usize..4,
        hints: bool,
    ) {
        let stages = [0, 1].map(|side| (which >> side & 1 == 1).then_some(sizes.0..sizes.1));
        play(seed, pair_of(rails, qps, 1, threshold, max_write), if hints { 700 } else { 80 }, hints, &stages);
    }
}

fn buffer(target: &mut [u8], keys: &Keys) -> Buffer {
    Buffer { address: target.as_mut_ptr() as u64, size: target.len() as u64, tag: 0, keys: NonNull::from(keys) }
}

/// NCCL may post hinted receives as fast as it likes.
#[test]
fn hinted_receives_wait_for_the_count() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let (data, mut target) = ([7u8; 8], [0u8; 8]);
    let b = buffer(&mut target, &keys);
    let mut rng = Rng(5);
    let mut sent = 0;
    for round in 0..1000 {
        let mut posted = 0;
        // SAFETY: the arrays outlive the test.
        while let Some(request) = unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault") {
            assert!(matches!(p.receiver.test(request).expect("no fault"), RecvProgress::Done { sizes: &[8] }));
            posted += 1;
            while p.net.borrow_mut().step(&mut rng) {}
        }
        assert_eq!(posted, if round == 0 { RING } else { RING / 4 }, "round {round}");
        assert_eq!(keys.hinted_in_flight(), RING as u32);
        for _ in 0..RING / 4 {
            // SAFETY: as above.
            let request = unsafe { p.sender.isend(data.as_ptr() as u64, 8, 0, NonNull::from(&*keys)) };
            let request = request.expect("no fault").expect("a credit");
            while p.net.borrow_mut().step(&mut rng) {}
            assert_eq!(p.sender.test(request).expect("no fault"), SendProgress::Done { size: 8 });
            sent += 1;
        }
        while p.net.borrow_mut().step(&mut rng) {}
    }
    assert_eq!(target, data);
    let side = |s: usize| p.net.borrow().sides[s].posts;
    assert_eq!((side(0), side(1)), (sent + sent / (RING as u64 / 4), sent + RING as u64 * 3 / 4), "one count in 64");
}

/// Nothing is posted for nothing, also where the application sends nothing else and so never polls.
#[test]
fn empty_hinted_sends_are_counted_and_cost_nothing() {
    let mut p = pair(2, 1, 1, 1 << 14);
    let keys = keys();
    let mut target = [0u8; 8];
    let b = buffer(&mut target, &keys);
    let mut rng = Rng(5);
    let mut sent = 0;
    for _ in 0..6000 {
        // SAFETY: the array outlives the test.
        if let Some(request) = unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault") {
            assert!(matches!(p.receiver.test(request), Ok(RecvProgress::Done { .. })));
        }
        while p.net.borrow_mut().step(&mut rng) {}
        // SAFETY: as above.
        if let Some(request) = unsafe { p.sender.isend(64, 0, 0, NonNull::from(&*keys)) }.expect("no fault") {
            assert_eq!(p.sender.test(request).expect("no fault"), SendProgress::Done { size: 0 });
            sent += 1;
        }
    }
    assert_eq!(sent, 6000, "nothing ever waited");
    assert_eq!(keys.in_flight(), 0);
    assert_eq!(p.net.borrow().sides[0].posts, 6000 / 64, "only counts");
}

#[test]
fn hints_that_break_the_rules_are_refused() {
    let keys = keys();
    let mut target = [0u8; 8];
    let b = buffer(&mut target, &keys);
    let mut rng = Rng(5);
    // An immediate for a hinted receive.
    let mut p = pair(1, 1, 1, 1 << 14);
    // SAFETY: the array outlives the test.
    unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault").expect("room");
    // SAFETY: as above.
    let r = unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    let imm = Imm { sequence: 1, portion: 0, portions: 1, plain: 0 }.pack();
    p.net.borrow_mut().sides[1].cqs[0].push_back(Wc::arrived(Receiver::<End>::recv_wr_id(0), 8, imm));
    assert!(matches!(p.receiver.test(r), Err(Fault::Protocol(_))));
    // A count of what was never posted.
    let mut p = pair(1, 1, 1, 1 << 14);
    for _ in 0..RING {
        // SAFETY: as above.
        unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault").map(|r| p.receiver.test(r).map(|_| ()));
        while p.net.borrow_mut().step(&mut rng) {}
    }
    p.words[1].store(hint::pack(RING as u32 + 1), Ordering::Relaxed);
    // SAFETY: as above.
    let fault = unsafe { p.receiver.irecv_hinted(&b) }.expect_err("257 of 256").to_string();
    assert!(fault.contains("257") && fault.contains("256"), "{fault}");
    // A hinted credit where none were agreed.
    let mut p = pair(1, 1, 1, 1 << 14);
    p.sender = Sender::new(SenderParts {
        post: End { net: Rc::clone(&p.net), side: 0 },
        credits: p.rings[0].ring(Stride::Narrow),
        lanes: Lanes { rails: 1, qps: 1 },
        speed: [1; MAX_RAILS],
        split_threshold: 1 << 14,
        spread: 1,
        max_write: 4096,
        chunk: 1024,
        count: None,
    });
    // SAFETY: as above.
    unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault").expect("room");
    while p.net.borrow_mut().step(&mut rng) {}
    // SAFETY: as above.
    assert!(matches!(unsafe { p.sender.isend(64, 8, 0, NonNull::from(&*keys)) }, Err(Fault::Protocol(_))));
}

/// What was posted for one message: a NIC that carries it all out, on paper, since no test has such memory.
fn on_paper(p: &mut Pair, keys: &Keys, size: u64) -> Result<u64, Fault> {
    const FROM: u64 = 1 << 44;
    const TO: u64 = 1 << 45;
    let max_write = u64::from(p.net.borrow().max_write);
    let k = NonNull::from(keys);
    let b = Buffer { address: TO, size: 1 << 47, tag: 0, keys: k };
    // SAFETY: nothing is copied below.
    let receive = unsafe { p.receiver.irecv(&[b]) }?.expect("room");
    while p.net.borrow_mut().step(&mut Rng(5)) {}
    // SAFETY: as above.
    let send = unsafe { p.sender.isend(FROM, size, 0, k) }?.expect("a credit and room");
    let mut covered = Vec::new();
    let mut net = p.net.borrow_mut();
    for qp in 0..net.sides[0].wires.len() {
        let writes: Vec<WriteWr> = net.sides[0].wires[qp].drain(..).collect();
        let rail = qp / net.qps_per_rail;
        let Some((last, plain)) = writes.split_last() else { continue };
        assert!(plain.iter().all(|w| w.imm.is_none() && u64::from(w.length) == max_write));
        assert!(size == 0 || (1..=max_write).contains(&u64::from(last.length)));
        assert_eq!(Imm::unpack(last.imm.expect("of the last")).map(|i| usize::from(i.plain)), Some(plain.len()));
        for w in &writes {
            assert_eq!(w.local - FROM, w.remote - TO);
            covered.push((w.local - FROM, u64::from(w.length)));
            net.sides[0].cqs[rail].push_back(Wc::sent(w.wr_id));
        }
        let wr_id = net.sides[1].recvs[qp].pop_front().expect("a receive is always posted");
        net.sides[1].cqs[rail].push_back(Wc::arrived(wr_id, last.length, last.imm.expect("as above")));
    }
    drop(net);
    covered.sort_unstable();
    let mut end = 0;
    for (offset, length) in covered {
        assert_eq!(offset, end, "contiguous, none twice");
        end += length;
    }
    assert_eq!(p.sender.test(send)?, SendProgress::Done { size });
    let RecvProgress::Done { sizes: &[got] } = p.receiver.test(receive)? else { panic!("everything has arrived") };
    assert_eq!(keys.in_flight(), 0);
    Ok(got.max(end))
}

#[test]
fn a_message_of_any_size_up_to_the_send_queue_is_cut_and_counted() {
    for max_write in [512, 4096, 8 << 20, 1 << 30, 1 << 31] {
        let most = largest_message(max_write);
        let p = u64::from(max_write);
        assert_eq!(most, 128 * p);
        for (rails, qps, spread) in [(1, 1, 1), (1, 4, 4), (2, 1, 1), (3, 2, 2), (8, 2, 2)] {
            let mut pair = pair_of(rails, qps, spread, 1 << 14, max_write);
            let keys = keys();
            for k in [1, 2, 3, 64, 127, 128] {
                for size in [k * p - 1, k * p, (k * p + 1).min(most)] {
                    assert_eq!(on_paper(&mut pair, &keys, size).expect("no fault"), size);
                }
            }
            for size in [0, 1, most - p, most - p + 1] {
                assert_eq!(on_paper(&mut pair, &keys, size).expect("no fault"), size);
            }
        }
    }
}

/// However uneven the rails: one may get all of a message.
#[test]
fn the_largest_message_fits_whatever_the_shares() {
    for speeds in [[1, 1_000_000], [1_000_000, 1], [3, 5]] {
        let mut pair = pair_of(2, 1, 1, 1 << 14, 4096);
        pair.sender = Sender::new(SenderParts {
            post: End { net: Rc::clone(&pair.net), side: 0 },
            credits: pair.rings[0].ring(Stride::Narrow),
            lanes: Lanes { rails: 2, qps: 1 },
            speed: std::array::from_fn(|i| speeds[i % 2]),
            split_threshold: 1 << 14,
            spread: 1,
            max_write: 4096,
            chunk: 1024,
            count: None,
        });
        let (keys, most) = (keys(), largest_message(4096));
        assert_eq!(on_paper(&mut pair, &keys, most).expect("no fault"), most);
    }
}

/// Never an endless "again".
#[test]
fn a_message_that_can_never_fit_is_refused_in_words() {
    let mut pair = pair_of(2, 1, 1, 1 << 14, 4096);
    let fault = on_paper(&mut pair, &keys(), largest_message(4096) + 1).expect_err("too large").to_string();
    assert!(fault.contains("524289 bytes") && fault.contains("524288") && fault.contains("max_msg_sz"), "{fault}");
}

/// All of a portion's writes or none: with half of them posted, the rest would wait behind other messages.
#[test]
fn a_portion_waits_until_all_its_writes_fit() {
    let mut p = pair_of(1, 1, 1, 1 << 14, 128);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let data = vec![7u8; 128 * 128];
    let mut target = vec![0u8; 128 * 128];
    for size in [128 * 100, 128 * 29, 128] {
        let b = Buffer { address: target.as_mut_ptr() as u64, size, tag: 0, keys: k };
        // SAFETY: the vectors outlive the test.
        unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    }
    let mut rng = Rng(5);
    while p.net.borrow_mut().step(&mut rng) {}
    // SAFETY: as above.
    let send = |p: &mut Pair, size| unsafe { p.sender.isend(data.as_ptr() as u64, size, 0, k) }.expect("no fault");
    assert!(send(&mut p, 128 * 100).is_some());
    assert_eq!(send(&mut p, 128 * 29), None, "28 are left");
    assert_eq!(p.net.borrow().sides[0].wires[0].len(), 100);
    p.net.borrow_mut().step(&mut rng);
    assert!(send(&mut p, 128 * 29).is_some(), "one has completed");
}

#[test]
fn a_plain_write_that_fails_ends_the_connection() {
    let mut p = pair_of(1, 1, 1, 1 << 14, 128);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let (data, mut target) = ([7u8; 300], [0u8; 300]);
    let b = Buffer { address: target.as_mut_ptr() as u64, size: 300, tag: 0, keys: k };
    // SAFETY: the arrays outlive the test.
    unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    while p.net.borrow_mut().step(&mut Rng(5)) {}
    // SAFETY: as above.
    let send = unsafe { p.sender.isend(data.as_ptr() as u64, 300, 0, k) }.expect("no fault").expect("a credit");
    let ids: Vec<u64> = p.net.borrow().sides[0].wires[0].iter().map(|w| w.wr_id).collect();
    let failures = [Wc::sent(ids[0]), Wc::failed(ids[1], 10, 0), Wc::failed(ids[2], 5, 249)];
    p.net.borrow_mut().sides[0].cqs[0].extend(failures);
    let fault = p.sender.test(send).expect_err("the second write failed").to_string();
    assert!(fault.contains("300 bytes ended with REM_ACCESS_ERR (10)"), "{fault}");
    assert_eq!(keys.in_flight(), 2, "the NIC may still use both");
}

/// The immediate is the peer's word: it can't count more than was asked for.
#[test]
fn plain_writes_that_cannot_be_are_refused() {
    for (plain, bytes) in [(255, u32::MAX), (1, 1), (2, 0), (255, 0)] {
        let mut p = pair_of(1, 1, 1, 1 << 14, 1 << 31);
        let keys = keys();
        let b = Buffer { address: 1 << 44, size: 1 << 31, tag: 0, keys: NonNull::from(&*keys) };
        // SAFETY: nothing is written there.
        let r = unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
        let imm = Imm { sequence: 1, portion: 0, portions: 1, plain }.pack();
        p.net.borrow_mut().sides[1].cqs[0].push_back(Wc::arrived(Receiver::<End>::recv_wr_id(0), bytes, imm));
        assert!(matches!(p.receiver.test(r), Err(Fault::Protocol(_))), "{plain} and {bytes} bytes");
    }
}

/// More than a lap of the ring, and of the 16-bit sequence in the immediate.
#[test]
fn the_ring_and_the_sequence_wrap() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut rng = Rng(9);
    let source = [7u8; 8];
    let mut target = [0u8; 8];
    for i in 0..70_000u32 {
        let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: i, keys: k };
        // SAFETY: the arrays outlive the test.
        let r = unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
        while p.net.borrow_mut().step(&mut rng) {}
        // SAFETY: as above.
        let s = unsafe { p.sender.isend(source.as_ptr() as u64, 8, i, k) }.expect("no fault").expect("a credit");
        while p.net.borrow_mut().step(&mut rng) {}
        assert_eq!(p.sender.test(s).expect("no fault"), SendProgress::Done { size: 8 });
        assert!(matches!(p.receiver.test(r).expect("no fault"), RecvProgress::Done { sizes: [_] }));
    }
}

#[test]
fn a_send_waits_for_its_tag() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut target = [0u8; 8];
    let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 5, keys: k };
    // SAFETY: the arrays outlive the test.
    unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    let data = [1u8; 8];
    // SAFETY: as above.
    let send = |p: &mut Pair, tag| unsafe { p.sender.isend(data.as_ptr() as u64, 8, tag, k) }.expect("no fault");
    assert_eq!(send(&mut p, 5), None, "no credit yet");
    let mut rng = Rng(3);
    while p.net.borrow_mut().step(&mut rng) {}
    assert_eq!(send(&mut p, 6), None, "another tag");
    assert!(send(&mut p, 5).is_some());
    assert_eq!(send(&mut p, 5), None, "the credit is used");
}

#[test]
fn more_receives_than_fit_are_put_off() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut target = [0u8; 8];
    let b = [Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 0, keys: k }; MAX_GROUP];
    let mut posted = 0;
    // SAFETY: the array outlives the test.
    while unsafe { p.receiver.irecv(&b) }.expect("no fault").is_some() {
        posted += 1;
        while p.net.borrow_mut().step(&mut Rng(5)) {}
    }
    assert_eq!(posted, RING / MAX_GROUP, "32 groups of 8, as NCCL may have outstanding");
    assert_eq!(p.receiver.received(), 0);
}

#[test]
fn the_first_fault_stays_and_speaks_of_our_own_record() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut target = vec![0u8; 1 << 20];
    let mut rng = Rng(5);
    for _ in 0..4 {
        let b = Buffer { address: target.as_mut_ptr() as u64, size: 1 << 20, tag: 0, keys: k };
        // SAFETY: the vector outlives the test.
        unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
        while p.net.borrow_mut().step(&mut rng) {}
    }
    let data = vec![1u8; 1 << 20];
    let requests: Vec<u8> = (0..4)
        // SAFETY: as above.
        .map(|_| unsafe { p.sender.isend(data.as_ptr() as u64, 1 << 20, 0, k) }.expect("no fault").expect("a credit"))
        .collect();
    // The first never completes, the second fails, the others flush.
    let ids: Vec<u64> = p.net.borrow().sides[0].wires[0].iter().map(|w| w.wr_id).collect();
    let failures = [Wc::failed(ids[1], 12, 129), Wc::failed(ids[2], 5, 249), Wc::failed(ids[3], 5, 249)];
    p.net.borrow_mut().sides[0].cqs[0].extend(failures);
    for request in requests {
        let fault = p.sender.test(request).expect_err("every request fails");
        let Fault::Completion { failure, bytes, .. } = &fault else { panic!("{fault}") };
        assert_eq!((failure.status, failure.vendor_err, *bytes), (12, 129, 1 << 20));
        let text = fault.to_string();
        assert!(text.contains("1048576 bytes") && text.contains("RETRY_EXC_ERR (12)"), "{text}");
    }
}

#[test]
fn what_no_sender_writes_is_refused() {
    for imm in [0xffff_ffff, Imm { sequence: 2, portion: 0, portions: 1, plain: 0 }.pack()] {
        let mut p = pair(1, 1, 1, 1 << 14);
        let keys = keys();
        let mut target = [0u8; 8];
        let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 0, keys: NonNull::from(&*keys) };
        // SAFETY: the array outlives the test.
        let r = unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
        p.net.borrow_mut().sides[1].cqs[0].push_back(Wc::arrived(Receiver::<End>::recv_wr_id(0), 8, imm));
        assert!(matches!(p.receiver.test(r), Err(Fault::Protocol(_))), "immediate {imm:#x}");
    }
}

#[test]
fn a_portion_counts_once_and_never_past_the_buffer() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let mut target = [0u8; 8];
    let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 0, keys: NonNull::from(&*keys) };
    // SAFETY: the array outlives the test.
    let r = unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    let portion = |i| Imm { sequence: 1, portion: i, portions: 3, plain: 0 }.pack();
    let wr_id = Receiver::<End>::recv_wr_id(0);
    p.net.borrow_mut().sides[1].cqs[0].extend([Wc::arrived(wr_id, 4, portion(0)), Wc::arrived(wr_id, 4, portion(2))]);
    assert_eq!(p.receiver.test(r).expect("no fault"), RecvProgress::Pending);
    p.net.borrow_mut().sides[1].cqs[0].push_back(Wc::arrived(wr_id, 1, portion(1)));
    assert!(p.receiver.test(r).is_err(), "9 bytes for a receive of 8");
}

/// A watch over progress must not take one for the other: nothing owed, owed still, owed anew.
#[test]
fn what_is_owed_changes_with_whatever_moves() {
    let mut p = pair(1, 1, 1, 1 << 20);
    let keys = keys();
    let (mut buffer, data) = ([0u8; 64], [1u8; 64]);
    let mut receive = |p: &mut Pair| {
        let b = Buffer { address: buffer.as_mut_ptr() as u64, size: 64, tag: 0, keys: NonNull::from(&*keys) };
        // SAFETY: the buffer and its keys outlive the pair's use of them.
        unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room")
    };
    let send = |p: &mut Pair| {
        // SAFETY: as above.
        unsafe { p.sender.isend(data.as_ptr() as u64, 64, 0, NonNull::from(&*keys)) }
            .expect("no fault")
            .expect("a credit")
    };
    let mut rng = Rng(1);
    let idle = p.sender.owed();
    assert_eq!((idle.requests, p.receiver.owed().requests), (0, 0));
    receive(&mut p);
    receive(&mut p);
    while p.net.borrow_mut().step(&mut rng) {}
    send(&mut p);
    let one = p.sender.owed();
    assert_eq!((one.requests, one.bytes, p.sender.room(0)), (1, 64, SEND_REQUESTS as u32 - 1));
    p.sender.poll().expect("no fault");
    assert_eq!(p.sender.owed(), one, "nothing has moved");
    while p.net.borrow_mut().step(&mut rng) {}
    send(&mut p);
    p.sender.poll().expect("no fault");
    let another = p.sender.owed();
    assert!(another.requests == 1 && another != one, "one has completed and another was posted");
    // The receiving side: what arrives shows.
    let before = p.receiver.owed();
    p.receiver.poll().expect("no fault");
    assert_ne!(p.receiver.owed(), before);
}

/// Credits ask for an acknowledgement now and then only: one that is lost would be missed by nobody.
#[test]
fn credits_are_asked_after_when_no_answer_comes() {
    let mut p = pair(1, 1, 1, 1 << 20);
    let keys = keys();
    let mut buffer = [0u8; 64];
    let posts = |p: &Pair| p.net.borrow().sides[1].posts;
    p.receiver.probe().expect("no fault");
    assert_eq!(posts(&p), 0, "no credit is out");
    let b = Buffer { address: buffer.as_mut_ptr() as u64, size: 64, tag: 0, keys: NonNull::from(&*keys) };
    // SAFETY: as above.
    unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    assert_eq!((posts(&p), p.receiver.owed().requests), (1, 0));
    for _ in 0..3 {
        p.receiver.probe().expect("no fault");
        assert_eq!((posts(&p), p.receiver.owed().requests), (2, 2), "once");
    }
    let mut rng = Rng(1);
    while p.net.borrow_mut().step(&mut rng) {}
    p.receiver.poll().expect("no fault");
    assert_eq!(p.receiver.owed().requests, 0);
    p.receiver.probe().expect("no fault");
    assert_eq!(posts(&p), 2, "they are there");
}

#[test]
fn flushes_do_not_run_out() {
    let mut p = pair(2, 1, 1, 1 << 14);
    let keys = keys();
    let b = Buffer { address: 64, size: 0, tag: 0, keys: NonNull::from(&*keys) };
    let mut held = Vec::new();
    for _ in 0..FLUSHES {
        // SAFETY: nothing is read: the wire of the tests completes the flush at once.
        held.push(unsafe { p.receiver.iflush(&[b]) }.expect("no fault").expect("a flush"));
    }
    for index in held {
        assert!(p.receiver.test_flush(index).expect("no fault"));
    }
}

#[test]
fn a_flush_counts_as_a_use_of_the_memory_until_it_is_done() {
    let mut p = pair(2, 1, 1, 1 << 14);
    let (keys, not_flushed) = (keys(), Keys::new([1; MAX_RAILS], [2; MAX_RAILS], false));
    let buffer = |keys| Buffer { address: 64, size: 0, tag: 0, keys: NonNull::from(keys) };
    // SAFETY: nothing is read: the wire of the tests completes the flush at once.
    let index = unsafe { p.receiver.iflush(&[buffer(&*keys), buffer(&not_flushed), buffer(&*keys)]) };
    let index = index.expect("no fault").expect("a flush");
    assert_eq!((keys.in_flight(), not_flushed.in_flight()), (2, 0));
    assert!(p.receiver.test_flush(index).expect("no fault"));
    assert_eq!(keys.in_flight(), 0);
    // SAFETY: as above.
    assert_eq!(unsafe { p.receiver.iflush(&[buffer(&not_flushed)]) }.expect("no fault"), None);
}

/// NULL would mean "done", and waiting would never end: only NCCL's own test frees a flush.
#[test]
fn more_flushes_than_there_can_be_is_an_error() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let b = Buffer { address: 64, size: 0, tag: 0, keys: NonNull::from(&*keys) };
    for _ in 0..FLUSHES {
        // SAFETY: as above.
        unsafe { p.receiver.iflush(&[b]) }.expect("no fault").expect("a flush");
    }
    // SAFETY: as above.
    assert!(unsafe { p.receiver.iflush(&[b]) }.is_err());
}

#[test]
fn a_peer_that_closed_in_good_order_has_what_it_received() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut target = [0u8; 8];
    let mut rng = Rng(5);
    for _ in 0..3 {
        let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 0, keys: k };
        // SAFETY: the array outlives the test.
        unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
        while p.net.borrow_mut().step(&mut rng) {}
    }
    let data = [1u8; 8];
    let requests: Vec<u8> = (0..3)
        // SAFETY: as above.
        .map(|_| unsafe { p.sender.isend(data.as_ptr() as u64, 8, 0, k) }.expect("no fault").expect("a credit"))
        .collect();
    assert_eq!(p.sender.settle(2), Some(false), "the third is missing there");
    assert_eq!(p.sender.test(requests[0]).expect("no fault"), SendProgress::Done { size: 8 });
    assert_eq!(p.sender.test(requests[2]).expect("no fault"), SendProgress::Pending);
    assert_eq!(p.sender.settle(3), Some(true));
    assert_eq!(p.sender.test(requests[2]).expect("no fault"), SendProgress::Done { size: 8 });
    assert_eq!(keys.in_flight(), 3, "the receiver's own");
}

/// A send that was settled is acknowledged late, when its request is another's already.
#[test]
fn a_late_completion_ends_no_later_send() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let (data, mut target, mut rng) = ([1u8; 8], [0u8; 8], Rng(5));
    for _ in 0..2 {
        let b = Buffer { address: target.as_mut_ptr() as u64, size: 8, tag: 0, keys: k };
        // SAFETY: the arrays outlive the test.
        unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room");
    }
    while p.net.borrow_mut().step(&mut rng) {}
    let send = |p: &mut Pair| {
        // SAFETY: as above.
        unsafe { p.sender.isend(data.as_ptr() as u64, 8, 0, k) }.expect("no fault").expect("a credit")
    };
    let first = send(&mut p);
    assert_eq!(p.sender.settle(1), Some(true));
    assert_eq!(p.sender.test(first).expect("no fault"), SendProgress::Done { size: 8 });
    let second = send(&mut p);
    assert_eq!(second, first, "the same request");
    assert!(p.net.borrow_mut().step(&mut rng), "the first write is acknowledged");
    assert_eq!(p.sender.test(second).expect("no fault"), SendProgress::Pending);
    assert_eq!(p.sender.stale(), 1);
    assert!(p.net.borrow_mut().step(&mut rng));
    assert_eq!(p.sender.test(second).expect("no fault"), SendProgress::Done { size: 8 });
    assert_eq!((p.sender.stale(), p.sender.room(0)), (1, SEND_WRS), "either has given its room back");
}

#[test]
fn a_late_completion_ends_no_later_flush() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let b = Buffer { address: 64, size: 0, tag: 0, keys: NonNull::from(&*keys) };
    // SAFETY: nothing is read: the wire of the tests completes the flush at once.
    let flush = |p: &mut Pair| unsafe { p.receiver.iflush(&[b]) }.expect("no fault").expect("a flush");
    let completion = |p: &Pair| p.net.borrow_mut().sides[1].cqs[0].pop_back().expect("one");
    let arrives = |p: &Pair, wc| p.net.borrow_mut().sides[1].cqs[0].push_back(wc);
    // One more is under way throughout, so that the queue is owed something.
    flush(&mut p);
    completion(&p);
    let first = flush(&mut p);
    let late = completion(&p);
    arrives(&p, late);
    assert!(p.receiver.test_flush(first).expect("no fault"));
    let second = flush(&mut p);
    assert_eq!(second, first, "the same flush");
    let own = completion(&p);
    arrives(&p, late);
    assert!(!p.receiver.test_flush(second).expect("no fault"));
    arrives(&p, own);
    assert!(p.receiver.test_flush(second).expect("no fault"));
}

/// With the ring full, the entry of a member that has arrived holds a credit of the next lap while the rest of its group
/// still waits for sends.
#[test]
fn a_group_whose_first_entry_was_reused_is_still_matched() {
    let mut p = pair(1, 1, 1, 1 << 14);
    let keys = keys();
    let k = NonNull::from(&*keys);
    let mut target = [0u8; 8];
    let data = [1u8; 8];
    let mut rng = Rng(5);
    let buffer = |tag| Buffer { address: target.as_mut_ptr() as u64, size: 8, tag, keys: k };
    let group: Vec<Buffer> = (0..MAX_GROUP as u32).map(buffer).collect();
    // SAFETY: the arrays outlive the test.
    let first = unsafe { p.receiver.irecv(&group) }.expect("no fault").expect("room");
    for _ in 1..RING / MAX_GROUP {
        // SAFETY: as above.
        unsafe { p.receiver.irecv(&group) }.expect("no fault").expect("room");
    }
    while p.net.borrow_mut().step(&mut rng) {}
    // SAFETY: as above.
    let send = |p: &mut Pair, tag| unsafe { p.sender.isend(data.as_ptr() as u64, 8, tag, k) }.expect("no fault");
    assert!(send(&mut p, 0).is_some());
    while p.net.borrow_mut().step(&mut rng) {}
    assert_eq!(p.receiver.test(first).expect("no fault"), RecvProgress::Pending);
    // SAFETY: as above.
    unsafe { p.receiver.irecv(&group[..1]) }.expect("no fault").expect("the first entry is free");
    while p.net.borrow_mut().step(&mut rng) {}
    for tag in 1..MAX_GROUP as u32 {
        assert!(send(&mut p, tag).is_some(), "member {tag}");
    }
    while p.net.borrow_mut().step(&mut rng) {}
    let done = p.receiver.test(first).expect("no fault");
    assert!(matches!(done, RecvProgress::Done { sizes } if sizes.len() == 8));
}

fn receive(p: &mut Pair, memory: &mut Memory) -> u8 {
    let (address, size) = (memory.bytes.as_mut_ptr() as u64, memory.bytes.len() as u64);
    let b = Buffer { address, size, tag: 0, keys: memory.keys() };
    // SAFETY: the tests keep the memory.
    unsafe { p.receiver.irecv(&[b]) }.expect("no fault").expect("room")
}

fn send(p: &mut Pair, memory: &Memory) -> Result<Option<u8>, Fault> {
    // SAFETY: the tests keep the memory.
    unsafe { p.sender.isend(memory.bytes.as_ptr() as u64, memory.bytes.len() as u64, 0, memory.keys()) }
}

/// A refused isend is tried again and again, and what comes of it may not hang on how often.
#[test]
fn tries_in_vain_leave_the_qps_in_turn() {
    let mut p = pair(1, 2, 1, 1 << 20);
    let (from, mut to) = (Memory::new(vec![7; 8], None, 0..0), Memory::new(vec![0; 8], None, 0..0));
    for _ in 0..3 {
        receive(&mut p, &mut to);
    }
    let mut rng = Rng(5);
    while p.net.borrow_mut().step(&mut rng) {}
    // All requests but two are open.
    (2..SEND_REQUESTS).for_each(|_| assert!(p.sender.refuse(8).is_some()));
    let sent = [(); 2].map(|()| send(&mut p, &from).expect("no fault").expect("room"));
    assert_eq!([0, 1].map(|qp| p.sender.room(qp)), [SEND_WRS - 1; 2]);
    assert_eq!(send(&mut p, &from).expect("no fault"), None);
    while p.net.borrow_mut().step(&mut rng) {}
    assert!(sent.iter().all(|&s| matches!(p.sender.test(s), Ok(SendProgress::Done { .. }))));
    send(&mut p, &from).expect("no fault").expect("room");
    assert_eq!([0, 1].map(|qp| p.sender.room(qp)), [SEND_WRS - 1, SEND_WRS], "the first QP's turn");
}

/// The copy of the first part and the sending of the rest overlap at both ends, whoever stages.
#[test]
fn a_receiver_that_stages_gets_portions_from_any_sender() {
    let copier = Late::new(true);
    let mut p = pair(1, 1, 1, 1 << 20);
    let from = Memory::new(vec![7; 5000], None, 0..0);
    let mut to = Memory::new(vec![0; 5000], Some(&copier), 1..u64::MAX);
    let mut rng = Rng(5);
    let r = receive(&mut p, &mut to);
    while p.net.borrow_mut().step(&mut rng) {}
    let s = send(&mut p, &from).expect("no fault").expect("a credit");
    assert_eq!(p.net.borrow().sides[0].wires[0].len(), 5, "chunks of 1024");
    p.net.borrow_mut().step(&mut rng);
    p.net.borrow_mut().step(&mut rng);
    assert_eq!(p.receiver.test(r).expect("no fault"), RecvProgress::Pending);
    assert!(p.receiver.awaits(r));
    while copier.step() {}
    assert_eq!(to.bytes.iter().filter(|&&b| b == 7).count(), 2048, "what is there is copied");
    while p.net.borrow_mut().step(&mut rng) {}
    assert_eq!(p.receiver.test(r).expect("no fault"), RecvProgress::Pending, "all is in the shadow");
    assert_eq!((p.receiver.open(), to.keys.in_flight()), (0, 1), "the ring entry is free, the memory is not");
    assert!(!p.receiver.awaits(r), "the peer has done its part");
    assert_eq!(p.receiver.copying(), Copying { reached: 0, copies: 1, bytes: 5000 });
    while copier.step() {}
    assert_eq!(p.receiver.test(r).expect("no fault"), RecvProgress::Done { sizes: &[5000] });
    assert_eq!(to.bytes, from.bytes);
    assert_eq!(p.sender.test(s).expect("no fault"), SendProgress::Done { size: 5000 });
}

/// All credits that can be open are answered with as much as they allow before the receiver looks, which has seen a batch but
/// for one receive before. `Net::step` finds a receive for each.
#[test]
fn receives_do_not_run_out_however_late_the_receiver_looks() {
    let copier = Late::new(true);
    let mut p = pair(1, 1, 1, 1 << 20);
    let (mut rng, most) = (Rng(5), 16 << 10);
    let (small, mut there) = (Memory::new(vec![1], None, 0..0), Memory::new(vec![0], None, 0..0));
    for _ in 1..RECV_BATCH {
        let r = receive(&mut p, &mut there);
        while p.net.borrow_mut().step(&mut rng) {}
        let s = send(&mut p, &small).expect("no fault").expect("a credit");
        while p.net.borrow_mut().step(&mut rng) {}
        assert!(matches!(p.sender.test(s), Ok(SendProgress::Done { .. })));
        assert!(matches!(p.receiver.test(r), Ok(RecvProgress::Done { .. })));
    }
    let from = Memory::new(vec![7; most], None, 0..0);
    let mut to = Memory::new(vec![0; most], Some(&copier), 1..u64::MAX);
    let group = [(); MAX_GROUP].map(|()| buffer(&mut to.bytes, &to.keys));
    let mut receives = Vec::new();
    // SAFETY: the memory stays until the end of this test.
    while let Some(request) = unsafe { p.receiver.irecv(&group) }.expect("no fault") {
        receives.push(request);
    }
    assert_eq!(receives.len() * MAX_GROUP, RING);
    let mut open = VecDeque::new();
    let mut sent = 0;
    while sent < RING || !open.is_empty() {
        while p.net.borrow_mut().step(&mut rng) {}
        if sent < RING
            && let Some(request) = send(&mut p, &from).expect("no fault")
        {
            open.push_back(request);
            sent += 1;
        }
        open.retain(|&s| p.sender.test(s).expect("no fault") == SendProgress::Pending);
    }
    let portions =
        p.net.borrow().sides[1].cqs[0].iter().filter(|wc| matches!(wc.read(), Completion::Arrived(_))).count();
    assert!((RING + EXTRA_RECVS * 3 / 4..=RING + EXTRA_RECVS).contains(&portions), "{portions} of {RING} messages");
    for request in receives {
        while p.receiver.test(request).expect("no fault") == RecvProgress::Pending {
            while copier.step() {}
        }
    }
    assert_eq!(to.bytes, from.bytes);
}

/// However late the copies: what was taken can be posted, the rest waits.
#[test]
fn a_sender_whose_copies_are_late_answers_again() {
    let copier = Late::new(false);
    let mut p = pair(2, 2, 1, 1 << 20);
    let from = Memory::new(vec![7; 16 << 10], Some(&copier), 1..u64::MAX);
    let mut to = Memory::new(vec![0; 16 << 10], None, 0..0);
    let mut rng = Rng(5);
    let receives: Vec<u8> = (0..RECV_REQUESTS).map(|_| receive(&mut p, &mut to)).collect();
    while p.net.borrow_mut().step(&mut rng) {}
    let mut sends = Vec::new();
    while let Some(request) = send(&mut p, &from).expect("no fault") {
        sends.push(request);
    }
    // One portion for each QP: the receiver does not ask for more.
    assert_eq!(sends.len(), 256 / 4);
    assert!(p.net.borrow().sides[0].wires.iter().all(VecDeque::is_empty), "nothing is copied");
    while sends.len() < receives.len() {
        copier.step();
        sends.extend(send(&mut p, &from).expect("no fault"));
        p.net.borrow_mut().step(&mut rng);
    }
    while copier.step() {}
    for request in sends {
        while p.sender.test(request).expect("no fault") == SendProgress::Pending {
            p.net.borrow_mut().step(&mut rng);
        }
    }
    assert_eq!((from.keys.in_flight(), p.sender.owed().bytes), (0, 0));
    for request in receives {
        assert_eq!(p.receiver.test(request).expect("no fault"), RecvProgress::Done { sizes: &[16 << 10] });
    }
}

/// NCCL posts the size of its slot for 8 bytes of LL, too: by that they would all be staged, and wait for a completion.
#[test]
fn what_is_hinted_is_staged_only_where_all_is() {
    let copier = Late::new(true);
    for mixed in [false, true] {
        let mut p = pair(1, 1, 1, 1 << 20);
        let mut to = Memory::new(vec![0; 5000], None, 0..0);
        let shadow = Shadow {
            offset: 64,
            lkeys: [3; MAX_RAILS],
            rkeys: [4; MAX_RAILS],
            sizes: 4096..u64::MAX,
            mixed,
            copier: Arc::<Late>::clone(&copier),
        };
        *to.keys = Keys::new([1; MAX_RAILS], [2; MAX_RAILS], false).staged_by(shadow);
        let b = buffer(&mut to.bytes, &to.keys);
        // SAFETY: nothing is sent.
        let hinted = unsafe { p.receiver.irecv_hinted(&b) }.expect("no fault").expect("room");
        let done = p.receiver.test(hinted).expect("no fault") == RecvProgress::Done { sizes: &[5000] };
        assert_eq!((done, to.keys.hinted_in_flight()), (mixed, u32::from(mixed)));
        let other = receive(&mut p, &mut to);
        assert_eq!(p.receiver.test(other).expect("no fault"), RecvProgress::Pending, "by the size that is posted");
    }
}

/// A GPU's streams are those of all connections: where they are full, the driver would block.
#[test]
fn copies_that_find_no_room_are_started_later() {
    let copiers = [Late::new(false), Late::new(true)];
    let mut p = pair(1, 1, 1, 1 << 20);
    let from = Memory::new((0..5000).map(|i| byte(1, i)).collect(), Some(&copiers[0]), 1..u64::MAX);
    let mut to = [(); 3].map(|()| Memory::new(vec![0; 5000], Some(&copiers[1]), 1..u64::MAX));
    let mut rng = Rng(5);
    let full = |end: usize, full| copiers[end].full.store(full, Ordering::Relaxed);
    let receives: Vec<u8> = to.iter_mut().map(|to| receive(&mut p, to)).collect();
    while p.net.borrow_mut().step(&mut rng) {}
    full(0, true);
    assert_eq!(send(&mut p, &from).expect("no fault"), None);
    assert_eq!((p.sender.owed().bytes, p.sender.owes(0), from.keys.in_flight()), (0, false, 0), "nothing was taken");
    full(0, false);
    full(1, true);
    let sends: Vec<u8> = to.iter().map(|_| send(&mut p, &from).expect("no fault").expect("room")).collect();
    while copiers[0].step() {}
    for s in sends {
        while p.sender.test(s).expect("no fault") == SendProgress::Pending {
            p.net.borrow_mut().step(&mut rng);
        }
    }
    while p.net.borrow_mut().step(&mut rng) {}
    for &r in &receives {
        assert_eq!(p.receiver.test(r).expect("no fault"), RecvProgress::Pending);
    }
    assert!(!copiers[1].step() && p.receiver.open() == 0, "all is there, nothing is copied");
    assert_eq!(p.receiver.copying(), Copying { reached: 0, copies: 3, bytes: 15_000 });
    // The ring entries are used again meanwhile.
    let mut later = Memory::new(vec![0; 5000], Some(&copiers[1]), 1..u64::MAX);
    let group = [(); MAX_GROUP].map(|()| buffer(&mut later.bytes, &later.keys));
    for _ in 0..RING / MAX_GROUP {
        // SAFETY: the memory stays until the end of this test.
        unsafe { p.receiver.irecv(&group) }.expect("no fault").expect("room");
    }
    full(1, false);
    for (&r, to) in receives.iter().zip(&to) {
        while p.receiver.test(r).expect("no fault") == RecvProgress::Pending {
            copiers[1].step();
        }
        assert_eq!((&to.bytes, to.keys.in_flight()), (&from.bytes, 0));
    }
}

/// NCCL frees what a send that is done was sent from.
#[test]
fn a_send_that_the_closed_peer_does_not_need_is_done_when_its_copy_is() {
    let copier = Late::new(false);
    let mut p = pair(1, 1, 1, 1 << 20);
    let from = Memory::new(vec![7; 3000], Some(&copier), 1..u64::MAX);
    let mut to = Memory::new(vec![0; 3000], None, 0..0);
    receive(&mut p, &mut to);
    while p.net.borrow_mut().step(&mut Rng(5)) {}
    let s = send(&mut p, &from).expect("no fault").expect("a credit");
    assert_eq!(p.sender.copying(), Copying { reached: 0, copies: 1, bytes: 3000 });
    assert_eq!((p.sender.owed().bytes, p.sender.owes(0)), (0, false), "room is taken, nothing is posted");
    assert_eq!(p.sender.settle(1), None, "nobody waits for it");
    assert_eq!(p.sender.test(s).expect("no fault"), SendProgress::Pending);
    while copier.step() {}
    assert_eq!(p.sender.settle(1), Some(true));
    assert_eq!(p.sender.test(s).expect("no fault"), SendProgress::Done { size: 3000 });
    p.sender.poll().expect("no fault");
    assert_eq!((p.net.borrow().sides[0].posts, p.sender.room(0)), (0, SEND_WRS), "and is not posted any more");
}

#[test]
fn a_copy_that_is_refused_ends_the_connection() {
    let shadow = || Shadow {
        offset: 64,
        lkeys: [3; MAX_RAILS],
        rkeys: [4; MAX_RAILS],
        sizes: 1..u64::MAX,
        mixed: false,
        copier: Arc::new(Broken),
    };
    let broken = |bytes| {
        let mut memory = Memory::new(bytes, None, 0..0);
        memory.keys = Box::new(Keys::new([1; MAX_RAILS], [2; MAX_RAILS], false).staged_by(shadow()));
        memory
    };
    let (mut p, mut to) = (pair(1, 1, 1, 1 << 20), Memory::new(vec![0; 8], None, 0..0));
    receive(&mut p, &mut to);
    while p.net.borrow_mut().step(&mut Rng(5)) {}
    let from = broken(vec![7; 8]);
    let fault = send(&mut p, &from).expect_err("no GPU").to_string();
    assert!(fault.contains("staging: no such GPU"), "{fault}");
    assert!(send(&mut p, &from).is_err() || p.sender.fault().is_some(), "it stays");
    // The receiving side is told by the look that the watch asks for, or by the first portion.
    let (mut p, mut to) = (pair(1, 1, 1, 1 << 20), broken(vec![0; 8]));
    let r = receive(&mut p, &mut to);
    assert!(p.receiver.check_copies().is_err());
    assert!(matches!(p.receiver.test(r), Err(Fault::Copy(_))));
}

/// The immediate is the peer's word.
#[test]
fn portions_with_a_gap_are_refused() {
    let copier = Late::new(true);
    let (plain, staged) =
        (Memory::new(vec![0; 100], None, 0..0), Memory::new(vec![0; 100], Some(&copier), 1..u64::MAX));
    for mut to in [plain, staged] {
        let mut p = pair(1, 1, 1, 1 << 20);
        let r = receive(&mut p, &mut to);
        let wr_id = Receiver::<End>::recv_wr_id(0);
        let imm = |portion, portions| Imm { sequence: 1, portion, portions, plain: 0 }.pack();
        p.net.borrow_mut().sides[1].cqs[0].extend([Wc::arrived(wr_id, 8, imm(5, 6)), Wc::arrived(wr_id, 8, imm(0, 2))]);
        let fault = p.receiver.test(r).expect_err("portion 1 never came").to_string();
        assert!(fault.contains("gaps"), "{fault}");
    }
}
