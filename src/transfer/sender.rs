//! The sending side of a connection.
#![expect(
    clippy::cast_possible_truncation,
    reason = "indices stay below this room's constants (256 at most), lengths at most max_write; checks would cost per message"
)]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::verbs::{Completion, Failure, WcBatch, WriteWr};

use super::credit::{Credit, CreditRing, low16};
use super::hint::{self, Ledger};
use super::imm::Imm;
use super::split::{self, Portion};
use super::staging::{Copying, Outbox, Piece};
use super::wire::{Fault, Keys, Lanes, Owed, Post};
use super::wr_id::{Kind, WrId};
use super::{MAX_GROUP, MAX_PORTIONS, MAX_RAILS, RING, SEND_REQUESTS, SEND_WRS};

/// What a sender is made from.
#[derive(Debug)]
pub struct SenderParts<P> {
    pub post: P,
    /// Filled by the peer.
    pub credits: CreditRing,
    pub lanes: Lanes,
    /// Speed of each rail, in one unit.
    pub speed: [u32; MAX_RAILS],
    /// Bytes up to which a message goes over one QP.
    pub split_threshold: u64,
    /// QPs of a rail that a larger message is cut over.
    pub spread: usize,
    /// Largest write, as agreed with the peer; not 0.
    pub max_write: u32,
    /// Bytes of a portion where either end stages; not 0.
    pub chunk: u64,
    /// The way of the count of hinted receives; None: there are none.
    pub count: Option<CountPath>,
}

/// How the count of hinted receives ([`super::hint`]) goes to the peer, over the first QP.
#[derive(Debug)]
pub struct CountPath {
    /// Registered memory of our own, alive as long as the sender.
    pub word: NonNull<AtomicU64>,
    pub lkey: u32,
    /// The receiver's word.
    pub address: u64,
    pub rkey: u32,
    /// Whether it may be carried inside the request.
    pub inline: bool,
}

/// How a send stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendProgress {
    Pending,
    Done { size: u64 },
}

#[derive(Debug, Clone, Copy)]
struct Request {
    keys: Option<NonNull<Keys>>,
    size: u64,
    /// Ring position of the credit that it answers.
    position: u32,
    writes_left: u8,
    generation: u8,
    /// Answers a hinted receive, or is the count's own.
    hinted: bool,
}

/// The request of the count: behind those of sends.
const COUNT: u8 = SEND_REQUESTS as u8;

/// A message of the largest size, and a shorter write at the end of each portion.
const _: () = assert!(SEND_WRS as usize + MAX_PORTIONS <= u8::MAX as usize);

/// The sending side: matches sends to credits and posts them.
#[derive(Debug)]
pub struct Sender<P> {
    credits: CreditRing,
    /// Ring position of the group at the head.
    head: u32,
    /// Members of the group at the head that a send was matched to; bit per member.
    matched: u8,
    /// Requests free, a stack so that the last used is used next.
    free: [u8; SEND_REQUESTS],
    free_len: usize,
    lanes: Lanes,
    spread: usize,
    split_threshold: u64,
    max_write: u64,
    chunk: u64,
    speed: [u32; MAX_RAILS],
    next_qp: usize,
    next_lane: usize,
    /// Bytes posted and not completed, by rail.
    bytes_out: [u64; MAX_RAILS],
    /// Work requests posted and not completed, by rail: a rail that owes nothing is not polled.
    wrs_out: [u32; MAX_RAILS],
    /// Room in each QP's send queue.
    room: Box<[u32]>,
    requests: Box<[Request; SEND_REQUESTS + 1]>,
    ledger: Ledger<RING, { RING as u32 / 4 }>,
    count: Option<CountPath>,
    /// The count is due, and waits for room or for the one before it.
    overdue: bool,
    /// What is staged; None until the first is.
    outbox: Option<Box<Outbox>>,
    fault: Option<Box<Fault>>,
    /// Completions of no open request: dropped, counted.
    stale: u64,
    post: P,
}

// SAFETY: the pointers to keys are followed under isend's contract only, that to the count's word as a shared atomic, from
// whichever thread runs the data path.
unsafe impl<P: Send> Send for Sender<P> {}

impl<P: Post> Sender<P> {
    pub fn new(parts: SenderParts<P>) -> Self {
        let empty = Request { keys: None, size: 0, position: 0, writes_left: 0, generation: 0, hinted: false };
        Self {
            credits: parts.credits,
            head: 0,
            matched: 0,
            free: std::array::from_fn(|i| u8::try_from(i).unwrap_or(0)),
            free_len: SEND_REQUESTS,
            lanes: parts.lanes,
            spread: parts.spread.clamp(1, parts.lanes.qps.min(MAX_PORTIONS / parts.lanes.rails)),
            split_threshold: parts.split_threshold,
            max_write: u64::from(parts.max_write),
            chunk: parts.chunk.max(1),
            speed: parts.speed,
            next_qp: 0,
            next_lane: 0,
            bytes_out: [0; MAX_RAILS],
            wrs_out: [0; MAX_RAILS],
            room: vec![SEND_WRS; parts.lanes.total()].into_boxed_slice(),
            requests: Box::new([empty; SEND_REQUESTS + 1]),
            ledger: Ledger::default(),
            count: parts.count,
            overdue: false,
            outbox: None,
            fault: None,
            stale: 0,
            post: parts.post,
        }
    }

    pub fn post(&self) -> &P {
        &self.post
    }

    /// The request that the next send would be.
    #[inline]
    pub fn next(&self) -> Option<u8> {
        self.free_len.checked_sub(1).map(|last| self.free[last])
    }

    /// Requests not yet reported as done.
    pub fn open(&self) -> usize {
        SEND_REQUESTS - self.free_len
    }

    /// Requests that the NIC has not finished.
    pub fn in_flight(&self) -> usize {
        self.requests[..SEND_REQUESTS].iter().filter(|r| r.writes_left > 0).count()
    }

    /// Completions that belonged to no open request.
    pub fn stale(&self) -> u64 {
        self.stale
    }

    /// What the peer's NIC owes: not what is still being copied, for which room is taken.
    pub fn owed(&self) -> Owed {
        let copied: u64 = self.pieces().map(|piece| piece.portion.length).sum();
        Owed {
            mark: u64::from(self.head) << 8 | u64::from(self.matched),
            requests: self.wrs_out.iter().sum(),
            bytes: self.bytes_out.iter().sum::<u64>() - copied,
        }
    }

    /// Whether the peer's NIC owes something on QP `qp`.
    pub fn owes(&self, qp: usize) -> bool {
        let copied: u32 = self.pieces().filter(|piece| piece.portion.qp == qp).map(|piece| piece.portion.writes).sum();
        self.room[qp] + copied < SEND_WRS
    }

    fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.outbox.iter().flat_map(|outbox| outbox.pieces())
    }

    /// Copies that are under way.
    #[cold]
    pub fn copying(&self) -> Copying {
        self.outbox.as_ref().map(|outbox| outbox.copying()).unwrap_or_default()
    }

    /// Room in the send queue of QP `qp`.
    #[cfg(test)]
    pub(super) fn room(&self, qp: usize) -> u32 {
        self.room[qp]
    }

    /// Starts a send; None is "again": no credit yet, none with this tag in the group at the head, or no room.
    ///
    /// # Safety
    /// `data` is `size` bytes registered under `keys`, which stays alive until the request is done, until
    /// [`Keys::in_flight`] is 0, or until this sender is dropped; the bytes stay in place as long.
    #[inline(always)] // with the comm's
    pub unsafe fn isend(&mut self, data: u64, size: u64, tag: u32, keys: NonNull<Keys>) -> Result<Option<u8>, Fault> {
        // Once the first member is matched, its entry may hold a credit of the next lap already.
        if self.matched & 1 == 0 && !self.credits.ready(self.head) {
            if self.overdue {
                self.catch_up()?;
            }
            return Ok(None);
        }
        if let Some(fault) = &self.fault {
            return Err((**fault).clone());
        }
        let Some((position, credit)) = self.match_tag(tag) else { return Ok(None) };
        let size = size.min(credit.size);
        // SAFETY: alive by this function's contract.
        let registration = unsafe { keys.as_ref() };
        let hinted = credit.hinted;
        let undivided = if hinted {
            size > 0 && self.count.is_some()
        } else {
            size <= self.split_threshold || self.lanes.total() == 1
        };
        if !undivided || size > self.max_write || credit.pieces.wanted() || registration.staged(size).is_some() {
            // SAFETY: this function's contract.
            return unsafe { self.isend_portions(data, size, keys, position) };
        }
        // One write, as nearly all messages are.
        let portion = self.whole(size);
        if !self.reserve_one(&portion) {
            self.poll()?;
            if !self.reserve_one(&portion) {
                // Or tries in vain would leave all that comes to every other QP.
                self.next_qp = portion.qp;
                return Ok(None);
            }
        }
        let (request, generation) = self.open_request(keys, size, position, hinted, 1);
        let imm = Imm { sequence: low16(position), portion: 0, portions: 1, plain: 0 };
        let piece = Piece {
            portion,
            local: data,
            remote: credit.address,
            lkey: registration.lkeys[portion.rail()],
            rkey: self.credits.rkey(position, portion.rail()),
            imm: (!hinted).then(|| imm.pack()),
            request,
            generation,
        };
        self.post_piece(&piece)?;
        self.matched(request, position, credit.n, hinted)?;
        Ok(Some(request))
    }

    /// Takes a free request for a send that goes in so many writes: its index and generation.
    #[inline(always)]
    fn open_request(&mut self, keys: NonNull<Keys>, size: u64, position: u32, hinted: bool, writes: u32) -> (u8, u8) {
        self.free_len -= 1;
        let index = self.free[self.free_len];
        let request = &mut self.requests[usize::from(index)];
        let generation = request.generation.wrapping_add(1);
        *request = Request { keys: Some(keys), size, position, writes_left: writes as u8, generation, hinted };
        // SAFETY: alive by isend's contract.
        unsafe { keys.as_ref() }.enter();
        (index, generation)
    }

    /// A send was matched to a member of the group at the head.
    #[inline(always)]
    fn matched(&mut self, index: u8, position: u32, n: u8, hinted: bool) -> Result<(), Fault> {
        self.take(position, n);
        if hinted {
            self.answered(index, position);
        }
        if self.ledger.owes() {
            self.tell()?;
            if self.overdue {
                self.catch_up()?;
            }
        }
        Ok(())
    }

    /// A send that is not one write, or of which one of the ends stages: its portions are posted now, or, of memory that has a
    /// shadow, as they are copied.
    ///
    /// # Safety
    /// As [`Self::isend`].
    #[inline(never)] // off the path of what is one write
    unsafe fn isend_portions(
        &mut self,
        data: u64,
        size: u64,
        keys: NonNull<Keys>,
        position: u32,
    ) -> Result<Option<u8>, Fault> {
        // Read once more rather than handed over: that would cost those that don't come here.
        let Some(credit) = self.credits.read(position) else { return Ok(None) };
        let size = size.min(credit.size);
        // SAFETY: alive by this function's contract.
        let registration = unsafe { keys.as_ref() };
        let shadow = registration.staged(size);
        if self.outbox.is_none()
            && let Some(shadow) = shadow
        {
            self.outbox = Some(Outbox::new(&shadow.copier));
        }
        let mut portions = [Portion::default(); MAX_PORTIONS];
        let count = if credit.hinted {
            portions[0] = self.one_way(size)?;
            1
        } else if shadow.is_some() || credit.pieces.wanted() {
            self.chunks(size, credit.pieces.most(), &mut portions)?
        } else {
            self.cut(size, &mut portions)?
        };
        let portions = &portions[..count];
        if !self.reserve(portions, shadow.is_some()) {
            self.poll()?;
            if !self.reserve(portions, shadow.is_some()) {
                return Ok(None);
            }
        }
        let writes = portions.iter().map(|p| p.writes).sum();
        let (request, generation) = self.open_request(keys, size, position, credit.hinted, writes);

        let sequence = low16(position);
        let (local, lkeys) = shadow.map_or((data, &registration.lkeys), |s| (s.host(data), &s.lkeys));
        let mut offset = 0;
        let mut piece = |credits: &CreditRing, i: usize| {
            let portion = portions[i];
            let plain = portion.writes.saturating_sub(1) as u8;
            let imm = Imm { sequence, portion: i as u8, portions: count as u8, plain };
            let piece = Piece {
                portion,
                local: local.wrapping_add(offset),
                remote: credit.address.wrapping_add(offset),
                lkey: lkeys[portion.rail()],
                rkey: credits.rkey(position, portion.rail()),
                imm: (!credit.hinted).then(|| imm.pack()),
                request,
                generation,
            };
            offset += portion.length;
            piece
        };
        if let Some(shadow) = shadow {
            let mut pieces = [Piece::default(); MAX_PORTIONS];
            for (i, place) in pieces[..count].iter_mut().enumerate() {
                *place = piece(&self.credits, i);
            }
            let started = self.outbox.as_mut().map_or(Ok(()), |outbox| {
                // SAFETY: the data are GPU memory that the shadow stands for; both stay until the request is done.
                unsafe { outbox.start(&pieces[..count], shadow.offset) }
            });
            started.map_err(|fault| self.stop(fault))?;
        } else {
            for i in 0..count {
                let piece = piece(&self.credits, i);
                self.post_piece(&piece)?;
            }
        }
        self.matched(request, position, credit.n, credit.hinted)?;
        if self.outbox.is_some() {
            // Those of other sends may be ready.
            self.post_copied()?;
        }
        Ok(Some(request))
    }

    /// Cuts a message into chunks, each for the rail that would have it first, at most `most` over one QP; how many.
    fn chunks(&mut self, size: u64, most: usize, portions: &mut [Portion; MAX_PORTIONS]) -> Result<usize, Fault> {
        if size > self.largest() {
            return Err(self.too_large(size));
        }
        let piece = split::piece(size, self.chunk, self.max_write, most * self.lanes.total());
        let mut out = self.bytes_out;
        let (mut left, mut count) = (size, 0);
        loop {
            let length = left.min(piece);
            let free = |&qp: &usize| portions[..count].iter().filter(|p| p.qp == qp).count() < most;
            // The QP whose turn it is decides between equals.
            let turn = self.next_qp / self.lanes.qps;
            let qps = (0..self.lanes.rails).filter_map(|i| {
                let rail = (turn + i) % self.lanes.rails;
                let lanes = (0..self.lanes.qps).map(|i| (self.next_qp + i) % self.lanes.qps);
                lanes.map(|lane| rail * self.lanes.qps + lane).find(free)
            });
            let rail = |qp: usize| qp / self.lanes.qps;
            let finish =
                |&qp: &usize| u128::from(out[rail(qp)] + length) * 1000 / u128::from(self.speed[rail(qp)].max(1));
            // There is one: the pieces are no more than fit all QPs.
            let qp = qps.min_by_key(finish).unwrap_or(0);
            out[rail(qp)] += length;
            self.next_qp = (self.next_qp + 1) % self.lanes.total();
            let writes = split::writes(length, self.max_write) as u32;
            portions[count] = Portion::new(qp, rail(qp), length, writes);
            left -= length;
            count += 1;
            if left == 0 {
                return Ok(count);
            }
        }
    }

    /// Whether there is a request; takes the room of its only portion.
    #[inline(always)]
    fn reserve_one(&mut self, portion: &Portion) -> bool {
        self.free_len > 0 && self.take_room(portion)
    }

    /// As [`Self::reserve_one`]: of all portions and their copies, or of none.
    fn reserve(&mut self, portions: &[Portion], copied: bool) -> bool {
        if self.free_len == 0 || copied && self.outbox.as_ref().is_some_and(|o| !o.has_room(portions.len())) {
            return false;
        }
        for (i, portion) in portions.iter().enumerate() {
            // Several may be on one QP.
            if !self.take_room(portion) {
                portions[..i].iter().for_each(|p| self.give_back(p));
                return false;
            }
        }
        true
    }

    #[inline(always)]
    fn take_room(&mut self, portion: &Portion) -> bool {
        let room = &mut self.room[portion.qp];
        if *room < portion.writes {
            return false;
        }
        *room -= portion.writes;
        self.bytes_out[portion.rail()] += portion.length;
        true
    }

    fn give_back(&mut self, portion: &Portion) {
        self.room[portion.qp] += portion.writes;
        self.bytes_out[portion.rail()] -= portion.length;
    }

    /// Posts the writes of a portion whose room was taken. Each is retired by its own completion: there are few, and shares
    /// count what is still outstanding.
    #[inline(always)]
    fn post_piece(&mut self, piece: &Piece) -> Result<(), Fault> {
        let (qp, rail) = (piece.portion.qp, piece.portion.rail());
        let mut offset = 0;
        for i in 0..piece.portion.writes {
            let last = i + 1 == piece.portion.writes;
            let length = if last { piece.portion.length - offset } else { self.max_write };
            let id = WrId {
                kind: Kind::Data,
                qp: qp as u8,
                request: piece.request,
                generation: piece.generation,
                count: length as u32,
            };
            let w = WriteWr {
                wr_id: id.pack(),
                local: piece.local.wrapping_add(offset),
                lkey: piece.lkey,
                length: length as u32,
                remote: piece.remote.wrapping_add(offset),
                rkey: piece.rkey,
                imm: piece.imm.filter(|_| last),
                signaled: true,
                inline: false,
            };
            // SAFETY: the range is registered and stays until the request is done, by isend's contract.
            if let Err(e) = unsafe { self.post.write(qp, &w) } {
                return Err(self.stop(Fault::Verb(e)));
            }
            self.wrs_out[rail] += 1;
            offset += length;
        }
        Ok(())
    }

    /// Posts what has been copied.
    #[inline(never)]
    fn post_copied(&mut self) -> Result<(), Fault> {
        while let Some(piece) = self.outbox.as_mut().and_then(|outbox| outbox.copied()) {
            let request = &self.requests[usize::from(piece.request)];
            if self.fault.is_some() || request.generation != piece.generation || request.writes_left == 0 {
                self.give_back(&piece.portion);
                continue;
            }
            self.post_piece(&piece)?;
        }
        Ok(())
    }

    /// Whether copies can get done. Off the data path.
    #[cold]
    pub fn check_copies(&mut self) -> Result<(), Fault> {
        let Some(outbox) = &self.outbox else { return Ok(()) };
        outbox.copier.check().map_err(|why| self.stop(Fault::Copy(why)))
    }

    /// A hinted receive has its send: one QP, so that the bytes land in ascending order, and nothing at all for nothing.
    fn one_way(&mut self, size: u64) -> Result<Portion, Fault> {
        if self.count.is_none() {
            return Err(
                self.stop(Fault::Protocol("the peer sent a hinted credit although none were agreed".to_owned()))
            );
        }
        if size > self.largest() {
            return Err(self.too_large(size));
        }
        let writes = size.div_ceil(self.max_write) as u32;
        let whole = self.whole(size);
        Ok(Portion::new(whole.qp, whole.rail(), size, writes))
    }

    fn answered(&mut self, index: u8, position: u32) {
        let request = &mut self.requests[usize::from(index)];
        self.ledger.matched(position, request.writes_left > 0);
        if request.writes_left == 0 {
            Self::release(request);
        }
    }

    /// Sends the count if it is due and can be.
    fn tell(&mut self) -> Result<(), Fault> {
        self.overdue = false;
        let (Some(count), Some(path)) = (self.ledger.due(self.head), &self.count) else { return Ok(()) };
        // One at a time: its word may not change while the NIC may read it.
        if self.requests[usize::from(COUNT)].writes_left > 0 || self.room[0] == 0 {
            self.overdue = true;
            return Ok(());
        }
        // SAFETY: alive as long as this sender.
        unsafe { path.word.as_ref() }.store(hint::pack(count), Ordering::Relaxed);
        self.write_count(8)?;
        self.ledger.told(self.head);
        Ok(())
    }

    /// A hinted receive waits for its send.
    pub fn awaited(&self) -> bool {
        self.matched == 0
            && self.credits.ready(self.head)
            && self.credits.read(self.head).is_some_and(|credit| credit.hinted)
    }

    /// The first fault, which stays.
    pub fn fault(&self) -> Option<&Fault> {
        self.fault.as_deref()
    }

    /// Asks the peer's NIC for a sign of life while no credit comes: by a write of nothing on the QP of the credits. For what
    /// is hinted only: else the receiving side asks, whose NCCL calls for its open receives, but after a hinted one does not.
    #[cold]
    pub fn probe(&mut self) -> Result<(), Fault> {
        let waiting = self.requests[usize::from(COUNT)].writes_left > 0;
        if self.count.is_none() || waiting || self.room[0] == 0 || self.fault.is_some() {
            return Ok(());
        }
        self.write_count(0)
    }

    /// Writes the count's word, or as much of it as `length` says, to the peer. Its request is free and QP 0 has room.
    fn write_count(&mut self, length: u32) -> Result<(), Fault> {
        let Some(path) = &self.count else { return Ok(()) };
        let request = &mut self.requests[usize::from(COUNT)];
        request.generation = request.generation.wrapping_add(1);
        request.writes_left = 1;
        request.hinted = true;
        let id = WrId { kind: Kind::Data, qp: 0, request: COUNT, generation: request.generation, count: length };
        let w = WriteWr {
            wr_id: id.pack(),
            local: path.word.as_ptr() as u64,
            lkey: path.lkey,
            length,
            remote: path.address,
            rkey: path.rkey,
            imm: None,
            signaled: true,
            inline: path.inline && length > 0,
        };
        // SAFETY: the word is registered and outlives the QPs.
        if let Err(e) = unsafe { self.post.write(0, &w) } {
            return Err(self.stop(Fault::Verb(e)));
        }
        self.room[0] -= 1;
        self.wrs_out[0] += 1;
        self.bytes_out[0] += u64::from(length);
        Ok(())
    }

    /// There may be no request left whose test would take what the count waits for.
    #[cold]
    fn catch_up(&mut self) -> Result<(), Fault> {
        if self.fault.is_some() {
            return Ok(());
        }
        self.poll()?;
        self.tell()
    }

    /// A request that is hinted has completed.
    fn acknowledged(&mut self, index: u8) -> Result<(), Fault> {
        if index != COUNT {
            self.ledger.acknowledged(self.requests[usize::from(index)].position);
        }
        self.tell()
    }

    /// The first unmatched member of the group at the head whose tag this is.
    #[inline(always)]
    fn match_tag(&self, tag: u32) -> Option<(u32, Credit)> {
        if self.matched & 1 == 0 {
            let credit = self.credits.read(self.head)?;
            if credit.tag == tag {
                return Some((self.head, credit));
            }
            if credit.n == 1 {
                return None;
            }
            self.match_later(tag, credit.n)
        } else {
            // The first member is gone, and its entry may hold a later credit by now; the others tell n.
            self.match_later(tag, MAX_GROUP as u8)
        }
    }

    /// As [`Self::match_tag`], of the members behind the first, which are `n` at most.
    #[inline(never)] // off the path of those alone
    fn match_later(&self, tag: u32, mut n: u8) -> Option<(u32, Credit)> {
        let mut member = 1;
        while member < n {
            let position = self.head.wrapping_add(u32::from(member));
            if self.matched >> member & 1 == 0 {
                if !self.credits.ready(position) {
                    return None;
                }
                let credit = self.credits.read(position)?;
                n = credit.n;
                if credit.tag == tag {
                    return Some((position, credit));
                }
            }
            member += 1;
        }
        None
    }

    /// Marks a member of the group at the head as matched, and goes to the next group after the last.
    #[inline]
    fn take(&mut self, position: u32, n: u8) {
        if n == 1 {
            self.head = self.head.wrapping_add(1);
            return;
        }
        self.matched |= 1 << (position.wrapping_sub(self.head) & 7);
        if self.matched.count_ones() == u32::from(n) {
            self.matched = 0;
            self.head = self.head.wrapping_add(u32::from(n));
        }
    }

    /// A message on one QP; the QPs take turns.
    #[inline]
    fn whole(&mut self, size: u64) -> Portion {
        let qp = self.next_qp;
        self.next_qp += 1;
        if self.next_qp == self.room.len() {
            self.next_qp = 0;
        }
        let rail = if self.lanes.qps == 1 { qp } else { qp / self.lanes.qps };
        Portion::new(qp, rail, size, 1)
    }

    /// Cuts a message into portions; returns how many.
    #[inline]
    fn cut(&mut self, size: u64, portions: &mut [Portion; MAX_PORTIONS]) -> Result<usize, Fault> {
        if size > self.largest() {
            return Err(self.too_large(size));
        }
        let shares = split::shares(size, self.lanes.rails, &self.speed, &self.bytes_out);
        let first = self.next_lane;
        // At most once around, without a division.
        self.next_lane += self.spread;
        if self.next_lane >= self.lanes.qps {
            self.next_lane -= self.lanes.qps;
        }
        let mut count = 0;
        for (rail, &share) in shares.iter().enumerate().take(self.lanes.rails) {
            // Equal shares of the rail's share over its QPs, whole lines: at most as many as there are QPs.
            let even = share.div_ceil(self.spread as u64).next_multiple_of(split::ALIGN);
            let mut left = share;
            let mut lane = first;
            while left > 0 {
                let length = left.min(even);
                let writes = split::writes(length, self.max_write) as u32;
                portions[count] = Portion::new(rail * self.lanes.qps + lane, rail, length, writes);
                lane += 1;
                if lane == self.lanes.qps {
                    lane = 0;
                }
                count += 1;
                left -= length;
            }
        }
        if count == 0 {
            portions[0] = Portion::new(first, 0, 0, 1);
            count = 1;
        }
        Ok(count)
    }

    #[inline]
    fn largest(&self) -> u64 {
        self.max_write * u64::from(SEND_WRS)
    }

    #[cold]
    fn too_large(&mut self, size: u64) -> Fault {
        self.stop(Fault::Protocol(format!(
            "a message of {size} bytes does not fit the send queue: between these ports a message has at most {} ({SEND_WRS} \
             writes of {} bytes, the smallest max_msg_sz of both ends)",
            self.largest(),
            self.max_write
        )))
    }

    /// How a send stands. Done frees the request.
    #[inline(always)] // with the comm's
    pub fn test(&mut self, index: u8) -> Result<SendProgress, Fault> {
        if self.requests[usize::from(index)].writes_left > 0 {
            if let Some(fault) = &self.fault {
                return Err((**fault).clone());
            }
            self.poll_in_place()?;
        }
        let request = &mut self.requests[usize::from(index)];
        if request.writes_left > 0 {
            return Ok(SendProgress::Pending);
        }
        let size = request.size;
        self.free[self.free_len] = index;
        self.free_len += 1;
        Ok(SendProgress::Done { size })
    }

    /// Takes what has completed on the rails that owe something.
    pub fn poll(&mut self) -> Result<(), Fault> {
        self.poll_in_place()
    }

    #[inline(always)] // into the test of a send
    fn poll_in_place(&mut self) -> Result<(), Fault> {
        if self.outbox.is_some() {
            self.post_copied()?;
        }
        for rail in 0..self.lanes.rails {
            while self.wrs_out[rail] > 0 {
                let mut batch = WcBatch::default();
                let completions = match self.post.poll(rail, &mut batch) {
                    Ok(c) => c,
                    Err(e) => return Err(self.stop(Fault::Verb(e))),
                };
                let taken = completions.len();
                for wc in completions {
                    match wc.read() {
                        Completion::Sent { wr_id } => {
                            let id = WrId::unpack(wr_id);
                            self.room[usize::from(id.qp)] += 1;
                            self.wrs_out[rail] -= 1;
                            self.bytes_out[rail] -= u64::from(id.count);
                            let request = &mut self.requests[usize::from(id.request)];
                            if request.generation != id.generation || request.writes_left == 0 {
                                self.stale += 1;
                                continue;
                            }
                            request.writes_left -= 1;
                            if request.writes_left == 0 {
                                Self::release(request);
                                if request.hinted {
                                    self.acknowledged(id.request)?;
                                }
                            }
                        }
                        Completion::Failed(failure) => return Err(self.failed(failure)),
                        Completion::Arrived(_) => self.stale += 1,
                    }
                }
                if taken < WcBatch::LEN {
                    break;
                }
            }
        }
        Ok(())
    }

    #[inline]
    fn release(request: &mut Request) {
        if let Some(keys) = request.keys.take() {
            // SAFETY: alive while its request is open, by isend's contract.
            unsafe { keys.as_ref() }.leave();
        }
    }

    /// After the peer said that it closed in good order, having received every position before `received`: the sends that
    /// it has are done, whether or not their acknowledgement still came. False where a send remains that it lacks; None: again,
    /// copies are under way, which may still read what NCCL frees when its request is done.
    pub fn settle(&mut self, received: u32) -> Option<bool> {
        if self.outbox.as_ref().is_some_and(|outbox| !outbox.is_settled()) {
            return None;
        }
        let mut all = true;
        for request in self.requests[..SEND_REQUESTS].iter_mut().filter(|r| r.writes_left > 0) {
            // Positions before `received`, on a circle.
            if request.position.wrapping_sub(received) > u32::MAX / 2 {
                request.writes_left = 0;
                Self::release(request);
            } else {
                all = false;
            }
        }
        if all {
            self.fault = None;
        }
        Some(all)
    }

    /// A send for a receive that the peer, closed in good order, took for done without it: a hinted one, as all before
    /// `received` that are still to be matched. None: there are no more of these; Some(None): again, all requests are open.
    pub fn skip(&mut self, size: u64, received: u32) -> Option<Option<u8>> {
        if self.head.wrapping_sub(received) <= u32::MAX / 2 {
            return None;
        }
        if self.free_len == 0 {
            return Some(None);
        }
        self.head = self.head.wrapping_add(1);
        self.free_len -= 1;
        let index = self.free[self.free_len];
        let request = &mut self.requests[usize::from(index)];
        request.size = size;
        request.writes_left = 0;
        Some(Some(index))
    }

    /// A send on a connection that has ended; it is never done. None: all requests are open.
    #[cold]
    pub fn refuse(&mut self, size: u64) -> Option<u8> {
        self.free_len = self.free_len.checked_sub(1)?;
        let index = self.free[self.free_len];
        let request = &mut self.requests[usize::from(index)];
        request.generation = request.generation.wrapping_add(1);
        (request.keys, request.size, request.hinted) = (None, size, false);
        request.writes_left = 1;
        Some(index)
    }

    #[cold]
    fn failed(&mut self, failure: Failure) -> Fault {
        let id = WrId::unpack(failure.wr_id);
        let (operation, bytes) = match id.request {
            COUNT => ("count of receives (RDMA WRITE)", 8),
            request => ("send (RDMA WRITE)", self.requests.get(usize::from(request)).map_or(0, |r| r.size)),
        };
        self.stop(Fault::Completion { failure, qp: usize::from(id.qp), operation, bytes })
    }

    /// The first fault stays; every later call returns it.
    #[cold]
    fn stop(&mut self, fault: Fault) -> Fault {
        (**self.fault.get_or_insert_with(|| Box::new(fault))).clone()
    }
}
