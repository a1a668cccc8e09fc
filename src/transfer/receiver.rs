//! The receiving side of a connection.
#![expect(
    clippy::cast_possible_truncation,
    reason = "indices stay below this room's constants (256 at most), lengths at most max_write; checks would cost per message"
)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::verbs::{Arrived, Completion, Failure, WcBatch, WriteWr};

use super::credit::{Credit, CreditRing, Pieces, low16, slot};
use super::hint::Horizon;
use super::imm::Imm;
use super::split;
use super::staging::{Copying, Inbox, Shadow};
use super::wire::{Fault, Keys, Lanes, Owed, Post};
use super::wr_id::{Kind, WrId};
use super::{
    CREDIT_WRS, EXTRA_RECVS, FLUSH_WRS, FLUSHES, MAX_GROUP, MAX_PORTIONS, MAX_RAILS, RECV_BATCH, RECV_REQUESTS, RING,
};

/// What a receiver is made from.
#[derive(Debug)]
pub struct ReceiverParts<P> {
    pub post: P,
    /// Our copy of the peer's ring, registered for the write that carries it.
    pub shadow: CreditRing,
    pub shadow_lkey: u32,
    /// The peer's ring.
    pub ring_address: u64,
    pub ring_rkey: u32,
    pub lanes: Lanes,
    /// Bytes that a credit write may carry inside its request.
    pub max_inline: u32,
    /// Largest write, as agreed with the peer.
    pub max_write: u32,
    /// Where the peer writes its count; None: it does not know hinted receives. Alive as long as the receiver.
    pub count: Option<NonNull<AtomicU64>>,
    /// Whether every rail has a loopback QP for flushes.
    pub can_flush: bool,
}

/// One buffer of an irecv.
#[derive(Debug, Clone, Copy)]
pub struct Buffer {
    pub address: u64,
    pub size: u64,
    pub tag: u32,
    pub keys: NonNull<Keys>,
}

/// How a receive stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecvProgress<'a> {
    Pending,
    /// Sizes in the order of the irecv.
    Done {
        sizes: &'a [u64],
    },
}

/// What was posted at a ring position and has not arrived yet.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    size: u64,
    bytes: u64,
    sequence: u16,
    /// Portions that arrived; bit per portion.
    seen: u16,
    keys: Option<NonNull<Keys>>,
    request: u8,
    member: u8,
    /// Portions of it that may go over one QP; 0 and 1 are the same.
    pieces: u8,
    state: Entry,
}

impl Slot {
    /// Whether all portions have arrived, of as many as the last one says.
    #[inline]
    fn is_whole(&self, imm: Imm) -> bool {
        (u32::from(self.seen) + 1) >> imm.portions != 0
    }
}

/// What a ring entry is used for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Entry {
    #[default]
    Free,
    /// Its message has not arrived.
    Open,
    /// As open, of a message that is staged.
    Staged,
    /// A hinted receive that the peer's count has not passed.
    Hinted,
}

#[derive(Debug, Clone, Copy)]
struct Request {
    sizes: [u64; MAX_GROUP],
    n: u8,
    /// Members that have not arrived.
    left: u8,
}

#[derive(Debug, Clone, Copy, Default)]
struct Flush {
    keys: [Option<NonNull<Keys>>; MAX_GROUP],
    /// Reads under way.
    left: u8,
    generation: u8,
}

/// The ring entry that an immediate names: by the low byte, since its sequence is the position + 1.
#[inline]
fn place(sequence: u16) -> usize {
    usize::from(sequence.wrapping_sub(1)) & (RING - 1)
}

/// Reads of the NIC's own GPU memory take microseconds.
const FLUSH_PATIENCE: Duration = Duration::from_secs(10);

/// The receiving side: hands out credits and counts what arrives.
#[derive(Debug)]
pub struct Receiver<P> {
    shadow: CreditRing,
    shadow_lkey: u32,
    ring_rkey: u32,
    ring_address: u64,
    max_inline: u32,
    /// Ring position of the next credit.
    tail: u32,
    /// Most buffers of one irecv so far.
    largest: u8,
    /// Positions whose message has not arrived.
    open: u32,
    /// Portions that these may have on one QP beyond one each: at most [`EXTRA_RECVS`].
    extra: u32,
    lanes: Lanes,
    max_write: u32,
    can_flush: bool,
    /// Room in the credit QP's send queue, and credit writes since the last that asks for a completion.
    credit_room: u32,
    credit_unsignaled: u32,
    free_len: usize,
    free: [u8; RECV_REQUESTS],
    flush_free_len: usize,
    flush_free: [u8; FLUSHES],
    flush_out: [u32; MAX_RAILS],
    /// Receives consumed on each QP since the last batch was posted.
    consumed: Box<[u32]>,
    slots: Box<[Slot; RING]>,
    horizon: Horizon,
    count: Option<NonNull<AtomicU64>>,
    requests: Box<[Request; RECV_REQUESTS]>,
    flushes: Box<[Flush; FLUSHES]>,
    /// What is staged; None until the first is.
    inbox: Option<Box<Inbox>>,
    fault: Option<Box<Fault>>,
    post: P,
}

// SAFETY: the pointers to keys are followed under irecv's contract only, that to the count as a shared atomic, from
// whichever thread runs the data path.
unsafe impl<P: Send> Send for Receiver<P> {}

impl<P: Post> Receiver<P> {
    /// Receives that each QP needs: one for every credit that can be open, those that messages in portions take beyond, and a
    /// batch on top.
    pub const RQ_DEPTH: usize = RING + EXTRA_RECVS + RECV_BATCH;
    /// The same, as verbs count.
    pub const RECV_QUEUE: u32 = Self::RQ_DEPTH as u32;

    /// The QPs must have [`Self::RQ_DEPTH`] receives posted already.
    pub fn new(parts: ReceiverParts<P>) -> Self {
        let empty = Request { sizes: [0; MAX_GROUP], n: 0, left: 0 };
        Self {
            shadow: parts.shadow,
            shadow_lkey: parts.shadow_lkey,
            ring_rkey: parts.ring_rkey,
            ring_address: parts.ring_address,
            max_inline: parts.max_inline,
            tail: 0,
            largest: 0,
            open: 0,
            extra: 0,
            lanes: parts.lanes,
            max_write: parts.max_write,
            can_flush: parts.can_flush,
            credit_room: CREDIT_WRS as u32,
            credit_unsignaled: 0,
            free_len: RECV_REQUESTS,
            free: std::array::from_fn(|i| u8::try_from(i).unwrap_or(0)),
            flush_free_len: FLUSHES,
            flush_free: std::array::from_fn(|i| u8::try_from(i).unwrap_or(0)),
            flush_out: [0; MAX_RAILS],
            consumed: vec![0; parts.lanes.total()].into_boxed_slice(),
            slots: Box::new([Slot::default(); RING]),
            horizon: Horizon::default(),
            count: parts.count,
            requests: Box::new([empty; RECV_REQUESTS]),
            flushes: Box::new([Flush::default(); FLUSHES]),
            inbox: None,
            fault: None,
            post: parts.post,
        }
    }

    /// The id under which the receives of QP `qp` are posted.
    pub fn recv_wr_id(qp: usize) -> u64 {
        WrId { kind: Kind::Recv, qp: qp as u8, request: 0, generation: 0, count: 0 }.pack()
    }

    pub fn post(&self) -> &P {
        &self.post
    }

    /// Most buffers of one irecv so far.
    pub fn largest(&self) -> u8 {
        self.largest
    }

    /// Every position before this one has arrived, or was hinted: such a receive is done when it is posted.
    pub fn received(&self) -> u32 {
        let mut position = self.tail;
        let mut received = self.tail;
        let mut left = self.open;
        while left > 0 {
            position = position.wrapping_sub(1);
            if matches!(self.slots[slot(position)].state, Entry::Open | Entry::Staged) {
                received = position;
                left -= 1;
            }
        }
        received
    }

    /// Positions whose message has not arrived.
    pub fn open(&self) -> u32 {
        self.open
    }

    /// Whether a receive waits for the peer, rather than for copies of what has come.
    #[cold]
    pub fn awaits(&self, index: u8) -> bool {
        let open = |slot: &Slot| matches!(slot.state, Entry::Open | Entry::Staged) && slot.request == index;
        self.slots.iter().any(open)
    }

    /// Copies that are under way; their bytes are those of the receives that wait for them.
    #[cold]
    pub fn copying(&self) -> Copying {
        let Some(inbox) = &self.inbox else { return Copying::default() };
        let waiting = |&(index, _): &(usize, &Request)| inbox.landings().any(|l| usize::from(l.request) == index);
        let requests = self.requests.iter().enumerate().filter(waiting);
        let bytes = requests.flat_map(|(_, request)| &request.sizes[..usize::from(request.n)]).sum();
        Copying { reached: inbox.copier.reached(), copies: inbox.landings().len(), bytes }
    }

    /// What the peer's NIC owes: acknowledgements of credits, as far as they were asked for.
    pub fn owed(&self) -> Owed {
        let requests = CREDIT_WRS as u32 - self.credit_unsignaled - self.credit_room;
        Owed {
            mark: u64::from(self.tail) << 32 | u64::from(self.open) << 16 | u64::from(self.credit_unsignaled),
            requests,
            bytes: u64::from(requests) * self.shadow.stride().bytes() as u64,
        }
    }

    /// Asks for an acknowledgement of the credits that receives still wait for an answer to, where none was asked for: by a
    /// write of nothing behind them.
    #[cold]
    pub fn probe(&mut self) -> Result<(), Fault> {
        if self.open == 0 || self.credit_unsignaled == 0 || self.credit_room == 0 || self.fault.is_some() {
            return Ok(());
        }
        let id = WrId { kind: Kind::Credit, qp: 0, request: 0, generation: 0, count: self.credit_unsignaled + 1 };
        self.credit_unsignaled = 0;
        self.credit_room -= 1;
        let nothing = WriteWr {
            wr_id: id.pack(),
            local: self.shadow.address(0),
            lkey: self.shadow_lkey,
            length: 0,
            remote: self.ring_address,
            rkey: self.ring_rkey,
            imm: None,
            signaled: true,
            inline: false,
        };
        // SAFETY: it has no local range.
        unsafe { self.post.write(0, &nothing) }.map_err(|e| self.stop(Fault::Verb(e)))
    }

    /// Posts a receive of 1 to [`MAX_GROUP`] buffers; None is "again": no room.
    ///
    /// # Safety
    /// Each buffer is registered for remote writes under its keys, which stay alive until the request is done, until
    /// [`Keys::in_flight`] is 0, or until this receiver is dropped; the memory stays in place as long.
    #[inline(always)] // with the comm's
    pub unsafe fn irecv(&mut self, buffers: &[Buffer]) -> Result<Option<u8>, Fault> {
        debug_assert!((1..=MAX_GROUP).contains(&buffers.len()));
        if let Some(fault) = &self.fault {
            return Err((**fault).clone());
        }
        let n = buffers.len();
        if !self.has_room(n) {
            self.make_room()?;
            if !self.has_room(n) {
                return Ok(None);
            }
        }
        self.free_len -= 1;
        let index = self.free[self.free_len];
        let first = self.tail;
        let request = &mut self.requests[usize::from(index)];
        request.n = n as u8;
        request.left = n as u8;
        for (member, buffer) in buffers.iter().enumerate() {
            let position = first.wrapping_add(member as u32);
            // SAFETY: alive by this function's contract.
            let keys = unsafe { buffer.keys.as_ref() };
            keys.enter();
            if let Some(shadow) = keys.staged(buffer.size) {
                self.stage(position, buffer, shadow, (index, member as u8, n as u8));
                continue;
            }
            self.slots[slot(position)] = Slot {
                size: buffer.size,
                bytes: 0,
                sequence: low16(position),
                seen: 0,
                keys: Some(buffer.keys),
                request: index,
                member: member as u8,
                pieces: 1,
                state: Entry::Open,
            };
            let credit = Credit {
                address: buffer.address,
                size: buffer.size,
                n: n as u8,
                hinted: false,
                pieces: Pieces::FEW,
                tag: buffer.tag,
            };
            self.shadow.write(position, &credit, &keys.rkeys);
        }
        self.open += n as u32;
        self.largest = self.largest.max(n as u8);
        self.tail = first.wrapping_add(n as u32);
        let before_wrap = (RING - slot(first)).min(n);
        self.write_credits(slot(first), before_wrap)?;
        if before_wrap < n {
            self.write_credits(0, n - before_wrap)?;
        }
        Ok(Some(index))
    }

    /// As irecv's loop does, for a buffer that is staged.
    #[inline(never)] // off the path of what is not
    fn stage(&mut self, position: u32, buffer: &Buffer, shadow: &Shadow, (request, member, n): (u8, u8, u8)) {
        self.inbox.get_or_insert_with(|| Inbox::new(&shadow.copier)).open(slot(position), buffer.address, shadow);
        let pieces = self.pieces(buffer.size);
        self.extra += u32::from(pieces) - 1;
        self.slots[slot(position)] = Slot {
            size: buffer.size,
            bytes: 0,
            sequence: low16(position),
            seen: 0,
            keys: Some(buffer.keys),
            request,
            member,
            pieces,
            state: Entry::Staged,
        };
        let credit = Credit {
            address: shadow.host(buffer.address),
            size: buffer.size,
            n,
            hinted: false,
            pieces: Pieces::up_to(pieces),
            tag: buffer.tag,
        };
        self.shadow.write(position, &credit, &shadow.rkeys);
    }

    /// How many portions of a staged message may go over one QP: a share of the receives that are left, and of no use beyond
    /// the lines of a message.
    fn pieces(&self, size: u64) -> u8 {
        let share = (EXTRA_RECVS as u32 - self.extra) / 4;
        let most = size.div_ceil(split::ALIGN).clamp(1, MAX_PORTIONS as u64) as u32;
        1 << most.min(share + 1).ilog2()
    }

    /// Whether the peer knows hinted receives.
    #[inline]
    pub fn takes_hints(&self) -> bool {
        self.count.is_some()
    }

    /// Posts a receive of one buffer that is done at its first test, with the posted size, whether data came or not; None
    /// is "again". No receive is consumed, nothing completes here. Where the peer knows no such, or the buffer is staged, it
    /// is a receive like others.
    ///
    /// # Safety
    /// As [`Self::irecv`], but the memory stays in place until [`Keys::hinted_in_flight`] is 0, or until the QPs are in the
    /// error state or gone.
    pub unsafe fn irecv_hinted(&mut self, buffer: &Buffer) -> Result<Option<u8>, Fault> {
        // SAFETY: alive by this function's contract.
        let shadow = unsafe { buffer.keys.as_ref() }.staged(buffer.size);
        if shadow.is_some_and(|shadow| shadow.takes_hinted(buffer.size)) || !self.takes_hints() {
            // What arrives is to be copied, or the peer tells of it.
            // SAFETY: this function's contract says more.
            let posted = unsafe { self.irecv(std::slice::from_ref(buffer)) }?;
            if let (Some(_), Some(_), Some(inbox)) = (shadow, posted, &mut self.inbox) {
                inbox.is_flagged(slot(self.tail.wrapping_sub(1)));
            }
            return Ok(posted);
        }
        if let Some(fault) = &self.fault {
            return Err((**fault).clone());
        }
        if !self.has_room(1) {
            self.make_room()?;
            if !self.has_room(1) {
                return Ok(None);
            }
        }
        self.free_len -= 1;
        let index = self.free[self.free_len];
        let request = &mut self.requests[usize::from(index)];
        request.n = 1;
        request.left = 0;
        request.sizes[0] = buffer.size;
        let position = self.tail;
        // SAFETY: alive by this function's contract.
        let keys = unsafe { buffer.keys.as_ref() };
        keys.enter_hinted();
        self.horizon.posted(position);
        self.slots[slot(position)] =
            Slot { sequence: low16(position), keys: Some(buffer.keys), state: Entry::Hinted, ..Slot::default() };
        let credit = Credit {
            address: buffer.address,
            size: buffer.size,
            n: 1,
            hinted: true,
            pieces: Pieces::FEW,
            tag: buffer.tag,
        };
        self.shadow.write(position, &credit, &keys.rkeys);
        self.largest = self.largest.max(1);
        self.tail = position.wrapping_add(1);
        self.write_credits(slot(position), 1)?;
        Ok(Some(index))
    }

    /// Takes what gives room: completions, and the peer's count.
    #[cold]
    fn make_room(&mut self) -> Result<(), Fault> {
        self.poll()?;
        let Some(count) = self.count.filter(|_| self.horizon.open() > 0) else { return Ok(()) };
        // SAFETY: alive as long as this receiver.
        let raw = unsafe { count.as_ref() }.load(Ordering::Acquire);
        let passed = match self.horizon.learn(raw, self.tail) {
            Ok(passed) => passed,
            Err(count) => {
                let tail = self.tail;
                return Err(self.refuse(format_args!("a count of {count}; receives were posted up to {tail}")));
            }
        };
        for position in passed {
            let slot = &mut self.slots[slot(position)];
            // The entry may have a later receive by now.
            if slot.state == Entry::Hinted && slot.sequence == low16(position) {
                slot.state = Entry::Free;
                self.horizon.passed();
                if let Some(keys) = slot.keys.take() {
                    // SAFETY: alive while hinted receives use it, by irecv_hinted's contract.
                    unsafe { keys.as_ref() }.leave_hinted();
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn has_room(&self, n: usize) -> bool {
        self.free_len > 0
            && self.credit_room >= 2
            && (0..n).all(|i| self.slots[slot(self.tail.wrapping_add(i as u32))].state == Entry::Free)
    }

    /// Writes `n` entries of the shadow into the peer's ring.
    #[inline(always)]
    fn write_credits(&mut self, first: usize, n: usize) -> Result<(), Fault> {
        let stride = self.shadow.stride().bytes();
        let length = (n * stride) as u32;
        self.credit_unsignaled += 1;
        self.credit_room -= 1;
        let signaled = self.credit_unsignaled as usize >= CREDIT_WRS / 4;
        let id = WrId { kind: Kind::Credit, qp: 0, request: 0, generation: 0, count: self.credit_unsignaled };
        if signaled {
            self.credit_unsignaled = 0;
        }
        let w = WriteWr {
            wr_id: id.pack(),
            local: self.shadow.address(first),
            lkey: self.shadow_lkey,
            length,
            remote: self.ring_address + (first * stride) as u64,
            rkey: self.ring_rkey,
            imm: None,
            signaled,
            inline: length <= self.max_inline,
        };
        // SAFETY: the shadow is registered and lives as long as the connection; a slot is written again only after its
        // credit was answered, hence after this write was carried out.
        unsafe { self.post.write(0, &w) }.map_err(|e| self.stop(Fault::Verb(e)))
    }

    /// How a receive stands. Done frees the request.
    #[inline(always)] // with the comm's
    pub fn test(&mut self, index: u8) -> Result<RecvProgress<'_>, Fault> {
        if self.requests[usize::from(index)].left > 0 {
            if let Some(fault) = &self.fault {
                return Err((**fault).clone());
            }
            self.poll_in_place()?;
        }
        let request = &self.requests[usize::from(index)];
        if request.left > 0 {
            return Ok(RecvProgress::Pending);
        }
        self.free[self.free_len] = index;
        self.free_len += 1;
        Ok(RecvProgress::Done { sizes: &request.sizes[..usize::from(request.n)] })
    }

    /// Takes what has arrived.
    pub fn poll(&mut self) -> Result<(), Fault> {
        self.poll_in_place()
    }

    #[inline(always)] // into the test of a receive
    fn poll_in_place(&mut self) -> Result<(), Fault> {
        for rail in 0..self.lanes.rails {
            // Any rail may bring a portion of an open message.
            while self.open > 0
                || self.flush_out[rail] > 0
                || (rail == 0 && self.credit_room < CREDIT_WRS as u32 - self.credit_unsignaled)
            {
                let mut batch = WcBatch::default();
                let completions = match self.post.poll(rail, &mut batch) {
                    Ok(c) => c,
                    Err(e) => return Err(self.stop(Fault::Verb(e))),
                };
                let taken = completions.len();
                for wc in completions {
                    match wc.read() {
                        Completion::Arrived(arrived) => self.arrived(&arrived)?,
                        Completion::Sent { wr_id } => self.sent(rail, WrId::unpack(wr_id)),
                        Completion::Failed(failure) => return Err(self.failed(failure)),
                    }
                }
                if taken < WcBatch::LEN {
                    break;
                }
            }
        }
        if self.inbox.is_some() {
            self.land()?;
        }
        Ok(())
    }

    /// Counts what has been copied into GPU memory, and goes on with what waits to be.
    #[inline(never)]
    fn land(&mut self) -> Result<(), Fault> {
        while let Some(landing) = self.inbox.as_mut().and_then(|inbox| inbox.landed()) {
            self.requests[usize::from(landing.request)].left -= 1;
            // SAFETY: alive while its request is open, by irecv's contract.
            unsafe { landing.keys.as_ref() }.leave();
        }
        let Some(inbox) = &mut self.inbox else { return Ok(()) };
        // SAFETY: as in arrived_staged.
        unsafe { inbox.go_on() }.map_err(|fault| self.stop(fault))
    }

    /// Whether copies can get done. Off the data path.
    #[cold]
    pub fn check_copies(&mut self) -> Result<(), Fault> {
        let Some(inbox) = &self.inbox else { return Ok(()) };
        inbox.copier.check().map_err(|why| self.stop(Fault::Copy(why)))
    }

    #[inline]
    fn sent(&mut self, rail: usize, id: WrId) {
        match id.kind {
            Kind::Credit => self.credit_room += id.count,
            Kind::Flush => {
                self.flush_out[rail] -= 1;
                let flush = &mut self.flushes[usize::from(id.request)];
                if flush.generation == id.generation && flush.left > 0 {
                    flush.left -= 1;
                    if flush.left == 0 {
                        for keys in flush.keys.iter_mut().filter_map(Option::take) {
                            // SAFETY: alive while the flush is open, by iflush's contract.
                            unsafe { keys.as_ref() }.leave();
                        }
                    }
                }
            }
            Kind::Data | Kind::Recv => {}
        }
    }

    #[inline(always)] // into the test of a receive
    fn arrived(&mut self, a: &Arrived) -> Result<(), Fault> {
        let qp = usize::from(WrId::unpack(a.wr_id).qp);
        let consumed = &mut self.consumed[qp];
        *consumed += 1;
        if *consumed as usize == RECV_BATCH {
            self.replace(qp)?;
        }
        // One write, as nearly all messages are.
        if let Some(sequence) = a.imm.and_then(Imm::of_one_write) {
            let place = place(sequence);
            let slot = &mut self.slots[place];
            if slot.state == Entry::Open
                && slot.sequence == sequence
                && slot.seen == 0
                && u64::from(a.bytes) <= slot.size
            {
                slot.bytes = u64::from(a.bytes);
                self.complete(place);
                return Ok(());
            }
        }
        self.arrived_in_part(a.imm, a.bytes)
    }

    /// Posts receives for those that were consumed on a QP.
    #[inline(never)] // off the path of a message
    fn replace(&mut self, qp: usize) -> Result<(), Fault> {
        self.consumed[qp] = 0;
        self.post.recvs(qp, Self::recv_wr_id(qp), RECV_BATCH).map_err(|e| self.stop(Fault::Verb(e)))
    }

    /// A portion of a message that has several, or one that is refused.
    #[inline(never)] // off the path of what is one write
    fn arrived_in_part(&mut self, imm: Option<u32>, bytes: u32) -> Result<(), Fault> {
        let Some(imm) = imm.and_then(Imm::unpack) else {
            return Err(self.refuse(format_args!("a message with the immediate {imm:?}")));
        };
        let place = place(imm.sequence);
        let slot = &mut self.slots[place];
        if slot.state != Entry::Open || slot.sequence != imm.sequence || slot.seen >> imm.portion & 1 == 1 {
            return self.arrived_otherwise(place, imm, bytes);
        }
        slot.seen |= 1 << imm.portion;
        // At most 16 times 255 writes of 2 GiB.
        slot.bytes += u64::from(imm.plain) * u64::from(self.max_write) + u64::from(bytes);
        if slot.bytes > slot.size {
            return Err(self.refuse_bytes(place));
        }
        if !slot.is_whole(imm) {
            return Ok(());
        }
        if u32::from(slot.seen) + 1 != 1 << imm.portions {
            let seen = slot.seen;
            return Err(self.refuse(format_args!("portions with gaps ({seen:#b})")));
        }
        self.complete(place);
        Ok(())
    }

    /// The message of a ring entry has arrived.
    #[inline(always)]
    fn complete(&mut self, place: usize) {
        let slot = &mut self.slots[place];
        slot.state = Entry::Free;
        self.open -= 1;
        let request = &mut self.requests[usize::from(slot.request)];
        request.sizes[usize::from(slot.member)] = slot.bytes;
        request.left -= 1;
        if let Some(keys) = slot.keys.take() {
            // SAFETY: alive while its request is open, by irecv's contract.
            unsafe { keys.as_ref() }.leave();
        }
    }

    /// A portion that is for no receive like others: of a message that is staged, it is in the shadow.
    #[inline(never)] // off the path of what is not
    fn arrived_otherwise(&mut self, place: usize, imm: Imm, bytes: u32) -> Result<(), Fault> {
        let slot = &self.slots[place];
        if slot.state != Entry::Staged || slot.sequence != imm.sequence || slot.seen >> imm.portion & 1 == 1 {
            return Err(self.refuse(format_args!("a portion for no open receive ({imm:?})")));
        }
        let slot = &mut self.slots[place];
        let length = u64::from(imm.plain) * u64::from(self.max_write) + u64::from(bytes);
        slot.seen |= 1 << imm.portion;
        slot.bytes += length;
        if slot.bytes > slot.size {
            return Err(self.refuse_bytes(place));
        }
        let seen = slot.seen;
        let mut last = None;
        if slot.is_whole(imm) {
            slot.state = Entry::Free;
            self.open -= 1;
            self.extra -= u32::from(slot.pieces) - 1;
            self.requests[usize::from(slot.request)].sizes[usize::from(slot.member)] = slot.bytes;
            last = slot.keys.take().map(|keys| (slot.request, keys, slot.bytes));
        }
        let Some(inbox) = &mut self.inbox else { return Ok(()) };
        // SAFETY: GPU memory and shadow stay in place while the receive is open, by irecv's contract; no longer than that,
        // as staged messages are no longer than 32 bits say.
        let copied = unsafe { inbox.arrived(place, (imm.portion, length as u32), seen, last) };
        copied.map_err(|fault| self.stop(fault))
    }

    /// Makes what arrived in `buffers` visible to the GPU, by a read on every rail (any may have brought a part). None:
    /// nothing needs to be done.
    ///
    /// # Safety
    /// As [`Self::irecv`]; buffers whose keys say "flushed" are registered for remote reads.
    pub unsafe fn iflush(&mut self, buffers: &[Buffer]) -> Result<Option<u8>, Fault> {
        debug_assert!(buffers.len() <= MAX_GROUP);
        // SAFETY: alive by this function's contract.
        let flushed = |buffer: &&Buffer| unsafe { buffer.keys.as_ref() }.flushed;
        let count = buffers.iter().filter(flushed).count();
        if !self.can_flush || count == 0 {
            return Ok(None);
        }
        if let Some(fault) = &self.fault {
            return Err((**fault).clone());
        }
        if self.flush_free_len == 0 {
            // There is one for every receive that can be open and as many again. NULL would tell NCCL that the data are
            // visible, and to wait would be in vain: only its own test frees a flush.
            return Err(self.stop(Fault::Protocol(format!("NCCL has {FLUSHES} flushes open and wants another"))));
        }
        if !self.flush_room(count) {
            self.await_flush_room(count)?;
        }
        self.flush_free_len -= 1;
        let index = self.flush_free[self.flush_free_len];
        let flush = &mut self.flushes[usize::from(index)];
        flush.generation = flush.generation.wrapping_add(1);
        let generation = flush.generation;
        flush.left = (count * self.lanes.rails) as u8;
        for (buffer, place) in buffers.iter().filter(flushed).zip(&mut flush.keys) {
            // SAFETY: alive by this function's contract.
            let keys = unsafe { buffer.keys.as_ref() };
            keys.enter();
            *place = Some(buffer.keys);
            for (rail, out) in self.flush_out.iter_mut().enumerate().take(self.lanes.rails) {
                let id = WrId { kind: Kind::Flush, qp: rail as u8, request: index, generation, count: 1 };
                // SAFETY: registered by this function's contract.
                if let Err(e) = unsafe { self.post.flush(rail, id.pack(), buffer.address, keys.rkeys[rail]) } {
                    return Err(self.stop(Fault::Verb(e)));
                }
                *out += 1;
            }
        }
        Ok(Some(index))
    }

    /// Whether every loopback QP has room for so many reads.
    fn flush_room(&self, count: usize) -> bool {
        self.flush_out.iter().all(|&out| out as usize + count <= FLUSH_WRS)
    }

    /// Waits inside: NCCL takes a NULL request for "done", so there is no "again".
    #[cold]
    fn await_flush_room(&mut self, count: usize) -> Result<(), Fault> {
        let begin = Instant::now();
        while !self.flush_room(count) {
            self.poll()?;
            if begin.elapsed() > FLUSH_PATIENCE {
                let stuck: Vec<_> = (0..self.lanes.rails).filter(|&rail| self.flush_out[rail] > 0).collect();
                let text = format!(
                    "reads of GPU memory on the NIC itself (flushes) did not end in {FLUSH_PATIENCE:?} on rail {stuck:?}; \
                     NCCL_GDR_FLUSH_DISABLE=1 does without"
                );
                return Err(self.stop(Fault::Protocol(text)));
            }
        }
        Ok(())
    }

    /// Whether a flush is done. Done frees it.
    pub fn test_flush(&mut self, index: u8) -> Result<bool, Fault> {
        if self.flushes[usize::from(index)].left > 0 {
            if let Some(fault) = &self.fault {
                return Err((**fault).clone());
            }
            self.poll()?;
        }
        if self.flushes[usize::from(index)].left > 0 {
            return Ok(false);
        }
        self.flush_free[self.flush_free_len] = index;
        self.flush_free_len += 1;
        Ok(true)
    }

    #[cold]
    fn failed(&mut self, failure: Failure) -> Fault {
        let id = WrId::unpack(failure.wr_id);
        let (operation, bytes) = match id.kind {
            Kind::Credit => ("credit (RDMA WRITE)", self.shadow.stride().bytes() as u64 * u64::from(id.count)),
            Kind::Flush => ("flush (RDMA READ)", 1),
            Kind::Recv | Kind::Data => ("receive", 0),
        };
        // A flush knows its rail only: the rail's first QP has the same route.
        let qp = usize::from(id.qp) * if id.kind == Kind::Flush { self.lanes.qps } else { 1 };
        self.stop(Fault::Completion { failure, qp, operation, bytes })
    }

    #[cold]
    fn refuse_bytes(&mut self, place: usize) -> Fault {
        let Slot { bytes, size, .. } = self.slots[place];
        self.refuse(format_args!("{bytes} bytes for a receive of {size}"))
    }

    #[cold]
    fn refuse(&mut self, what: std::fmt::Arguments<'_>) -> Fault {
        self.stop(Fault::Protocol(format!("the peer sent {what}")))
    }

    /// The first fault stays; every later call returns it.
    #[cold]
    fn stop(&mut self, fault: Fault) -> Fault {
        (**self.fault.get_or_insert_with(|| Box::new(fault))).clone()
    }
}
