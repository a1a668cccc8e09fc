//! Staging: GPU memory that the NIC doesn't reach, or reaches slower, goes through host memory.
//!
//! A GPU range that may be staged has a *shadow*: pinned host memory of the same size, registered with the NIC, so that the
//! byte at GPU address a lies at a + offset. A staged message is copied between the two by the GPU's copy engine and
//! travels between shadows (or a shadow and whatever the other end has: each end decides for itself, by size).
//!
//! Why not a ring of chunks: it would need an allocator, a bound on messages, and a rule for groups, whose members arrive in
//! any order; a message could wait for room that only a later one frees. The shadow has none of that, and takes as much as
//! NCCL itself pins where it keeps its buffers in host memory. One shadow serves every connection on which the range
//! (the same address and length) is registered: NCCL never has two transfers on the same bytes of which one is a receive
//! (they would spoil each other without a shadow, too), and two sends of the same bytes copy equal bytes.
//!
//! * *Sender*: a message is cut into chunks, all copies start at once, and each chunk is a portion that is posted when its
//!   copy is done. A receiver that does not stage takes one portion a QP: there are no receives for more. The room in the
//!   send queues is taken at the start, so that what was copied can always be posted. A hinted message is one portion: its
//!   bytes must land in ascending order.
//! * *Receiver*: its credit asks for portions ("piecewise"), also of a sender that does not stage. Their lengths are known as
//!   they come, so what is contiguous from the start is copied as it grows. The ring entry is free when all is in the shadow,
//!   the receive done when all is in GPU memory. So there are no hinted receives here: who would copy? And no flush: the
//!   GPU's own copy engine wrote the data, in order with the mark that tells of it. By size means the size that is posted, which
//!   is that of NCCL's slot (1 MiB with Simple, 600 KiB with LL128), whatever comes: the sender alone knows that. Where some
//!   sizes are not staged, what is hinted never is: its latency counts, and it needs no completion.
//! * A connection that stages has 16 KiB more at the sender, 42 KiB at the receiver, from its first staged message on.
//! * *Flags*: what needs no completion (a hinted receive) is of LL128 here, whose reader looks for a flag at the end of each
//!   line of 128 bytes and takes the line for whole then. Nobody promises that a copy engine writes lines whole: it reads host
//!   memory in completions of PCIe, which are whole to 64 bytes only. An H200's was watched, and none was torn in 8.9e9 looks;
//!   but there are others, and no difference in time was measured. So such data are copied in two passes, flags last. Which
//!   receives these are, NCCL says from version 9 of the interface on only, so there is no staging below.
//! * *Marks*: behind a copy the stream writes its ticket into a word of host memory. To ask how far the copies are is one
//!   load.

use std::collections::VecDeque;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use super::split::Portion;
use super::wire::{Fault, Keys};
use super::{MAX_GROUP, MAX_PORTIONS, MAX_RAILS, RECV_REQUESTS, RING};

/// Chunks of a sender that are being copied; above that isend answers "again".
const COPIES: usize = 256;
/// Largest message that is staged: lengths of portions are kept in 32 bits.
pub const LARGEST: u64 = u32::MAX as u64;

/// One copy; the copier knows the direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyWr {
    pub gpu: u64,
    pub host: u64,
    /// 0: nothing but the mark.
    pub length: u64,
    /// In two passes: the last 8 bytes of each line of 128 are written when all others are there.
    pub flagged: bool,
    /// What [`Copier::reached`] tells once this copy, and all before it, are done.
    pub mark: Option<u32>,
}

/// What moves bytes between GPU and host memory for one connection, in one direction; the engine's is a CUDA stream, tests
/// bring their own.
pub trait Copier: Send + Sync + std::fmt::Debug {
    /// Whether so many copies may be started. What many connections share has its bounds: who starts more may have to wait.
    fn has_room(&self, copies: usize) -> bool;
    /// Starts copies, which are carried out in order.
    ///
    /// # Safety
    /// The ranges stay in place until the copies are done.
    unsafe fn start(&self, copies: &[CopyWr]) -> Result<(), String>;
    /// The mark of the last copy that is done; 0 at first.
    fn reached(&self) -> u32;
    /// Whether copies can still get done: an error of the GPU shows nowhere else. Off the data path.
    fn check(&self) -> Result<(), String>;
}

/// Copies of a connection that are under way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Copying {
    /// The last mark that was reached.
    pub reached: u32,
    /// Those with a mark.
    pub copies: usize,
    /// Of the messages, or parts of them, that wait for these.
    pub bytes: u64,
}

/// The host memory that stands for a GPU range.
#[derive(Debug)]
pub struct Shadow {
    /// Host address less GPU address.
    pub offset: u64,
    pub lkeys: [u32; MAX_RAILS],
    pub rkeys: [u32; MAX_RAILS],
    /// Messages that are staged, by bytes.
    pub sizes: Range<u64>,
    /// The others go without a copy, and so does what is hinted, whatever its size.
    pub mixed: bool,
    /// The connection's one.
    pub copier: Arc<dyn Copier>,
}

impl Shadow {
    /// Whether a message goes this way. One of no bytes needs none.
    #[inline]
    pub(super) fn takes(&self, size: u64) -> bool {
        size > 0 && self.sizes.contains(&size)
    }

    /// The same of a hinted receive.
    pub(super) fn takes_hinted(&self, size: u64) -> bool {
        !self.mixed && self.takes(size)
    }

    #[inline]
    pub(super) fn host(&self, gpu: u64) -> u64 {
        gpu.wrapping_add(self.offset)
    }
}

/// Tickets are on a circle.
#[inline]
fn is_reached(ticket: u32, reached: u32) -> bool {
    reached.wrapping_sub(ticket) <= u32::MAX / 2
}

/// A portion with all that its writes need.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Piece {
    pub(super) portion: Portion,
    pub(super) local: u64,
    pub(super) remote: u64,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
    pub(super) imm: Option<u32>,
    pub(super) request: u8,
    pub(super) generation: u8,
}

/// The sender's part: pieces whose copy is under way, in the order of their copies.
#[derive(Debug)]
pub(super) struct Outbox {
    pub(super) copier: Arc<dyn Copier>,
    /// Of the last copy.
    ticket: u32,
    pieces: VecDeque<Piece>,
}

impl Outbox {
    /// Made with the first staged message: registrations come from another thread than that of the data path.
    #[cold]
    pub(super) fn new(copier: &Arc<dyn Copier>) -> Box<Self> {
        Box::new(Self { copier: Arc::clone(copier), ticket: 0, pieces: VecDeque::with_capacity(COPIES) })
    }

    pub(super) fn has_room(&self, pieces: usize) -> bool {
        self.pieces.len() + pieces <= COPIES && self.copier.has_room(pieces)
    }

    /// Starts the copies of these pieces from GPU memory.
    ///
    /// # Safety
    /// As [`Copier::start`].
    pub(super) unsafe fn start(&mut self, pieces: &[Piece], offset: u64) -> Result<(), Fault> {
        // The stream's own room may have gone to another connection since it was looked at.
        debug_assert!(self.pieces.len() + pieces.len() <= COPIES && pieces.len() <= MAX_PORTIONS);
        let mut copies = [CopyWr { gpu: 0, host: 0, length: 0, flagged: false, mark: None }; MAX_PORTIONS];
        for (copy, piece) in copies.iter_mut().zip(pieces) {
            self.ticket = self.ticket.wrapping_add(1);
            *copy = CopyWr {
                gpu: piece.local.wrapping_sub(offset),
                host: piece.local,
                length: piece.portion.length,
                flagged: false,
                mark: Some(self.ticket),
            };
        }
        self.pieces.extend(pieces);
        // SAFETY: the caller's promise.
        unsafe { self.copier.start(&copies[..pieces.len()]) }.map_err(Fault::Copy)
    }

    /// The next piece whose copy is done.
    #[inline]
    pub(super) fn copied(&mut self) -> Option<Piece> {
        // At most COPIES.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let first = self.ticket.wrapping_sub(self.pieces.len() as u32).wrapping_add(1);
        if self.pieces.is_empty() || !is_reached(first, self.copier.reached()) {
            return None;
        }
        self.pieces.pop_front()
    }

    /// Whether no copy is under way.
    #[cold]
    pub(super) fn is_settled(&self) -> bool {
        self.pieces.is_empty() || is_reached(self.ticket, self.copier.reached())
    }

    /// Those whose copy is under way, or that are not yet posted.
    pub(super) fn pieces(&self) -> impl Iterator<Item = &Piece> {
        self.pieces.iter()
    }

    #[cold]
    pub(super) fn copying(&self) -> Copying {
        let bytes = self.pieces.iter().map(|piece| piece.portion.length).sum();
        Copying { reached: self.copier.reached(), copies: self.pieces.len(), bytes }
    }
}

/// What has come of a staged message.
#[derive(Debug, Clone, Copy, Default)]
struct Assembly {
    gpu: u64,
    offset: u64,
    /// Bytes from the start on whose copy was started.
    copied: u64,
    /// Bytes from the start on that are there, and the first portion that is not among them.
    prefix: u64,
    next: u8,
    /// Its reader looks at flags in the data.
    flagged: bool,
    lengths: [u32; MAX_PORTIONS],
}

/// A buffer whose last copy is under way, or waits for room.
#[derive(Debug, Clone, Copy)]
pub(super) struct Landing {
    pub(super) request: u8,
    pub(super) keys: NonNull<Keys>,
    /// That copy.
    gpu: u64,
    host: u64,
    /// At most [`LARGEST`].
    length: u32,
    flagged: bool,
}

/// The receiver's part.
#[derive(Debug)]
pub(super) struct Inbox {
    pub(super) copier: Arc<dyn Copier>,
    /// Of the last copy that has a mark.
    ticket: u32,
    /// By ring entry.
    parts: Box<[Assembly; RING]>,
    /// In the order of their copies, of which so many at the end are not started.
    landings: VecDeque<Landing>,
    waiting: usize,
}

impl Inbox {
    /// As [`Outbox::new`].
    #[cold]
    pub(super) fn new(copier: &Arc<dyn Copier>) -> Box<Self> {
        Box::new(Self {
            copier: Arc::clone(copier),
            ticket: 0,
            parts: Box::new([Assembly::default(); RING]),
            landings: VecDeque::with_capacity(RECV_REQUESTS * MAX_GROUP),
            waiting: 0,
        })
    }

    /// A receive is posted at a ring entry.
    pub(super) fn open(&mut self, place: usize, gpu: u64, shadow: &Shadow) {
        self.parts[place] = Assembly { gpu, offset: shadow.offset, ..Assembly::default() };
    }

    /// The receive at this entry is one whose reader needs no completion.
    pub(super) fn is_flagged(&mut self, place: usize) {
        self.parts[place].flagged = true;
    }

    /// A portion has arrived of a message of which `seen` are there; copies what is contiguous now, if there is room. With the
    /// last one, of which the receive is told by [`Self::landed`], all `bytes` must be.
    ///
    /// # Safety
    /// As [`Copier::start`].
    pub(super) unsafe fn arrived(
        &mut self,
        place: usize,
        (portion, length): (u8, u32),
        seen: u16,
        last: Option<(u8, NonNull<Keys>, u64)>,
    ) -> Result<(), Fault> {
        let part = &mut self.parts[place];
        part.lengths[usize::from(portion)] = length;
        while usize::from(part.next) < MAX_PORTIONS && seen >> part.next & 1 == 1 {
            part.prefix += u64::from(part.lengths[usize::from(part.next)]);
            part.next += 1;
        }
        let gpu = part.gpu.wrapping_add(part.copied);
        let (host, length, flagged) = (gpu.wrapping_add(part.offset), part.prefix - part.copied, part.flagged);
        if let Some((request, keys, bytes)) = last {
            if part.prefix != bytes {
                return Err(Fault::Protocol(format!("the peer sent portions with gaps ({seen:#b})")));
            }
            // The ring entry may be used again at once, so all that the copy takes is here.
            let length = u32::try_from(length).unwrap_or(u32::MAX);
            self.landings.push_back(Landing { request, keys, gpu, host, length, flagged });
            self.waiting += 1;
            // SAFETY: the caller's promise.
            return unsafe { self.go_on() };
        }
        // Without room it goes with a later one. Those that wait are whole, and older.
        if length == 0 || self.waiting > 0 || !self.copier.has_room(1) {
            return Ok(());
        }
        part.copied = part.prefix;
        let copy = CopyWr { gpu, host, length, flagged, mark: None };
        // SAFETY: the caller's promise.
        unsafe { self.copier.start(&[copy]) }.map_err(Fault::Copy)
    }

    /// Starts the copies that wait for room, as far as there is some.
    ///
    /// # Safety
    /// As [`Copier::start`].
    pub(super) unsafe fn go_on(&mut self) -> Result<(), Fault> {
        while self.waiting > 0 && self.copier.has_room(1) {
            let Landing { gpu, host, length, flagged, .. } = self.landings[self.landings.len() - self.waiting];
            self.waiting -= 1;
            self.ticket = self.ticket.wrapping_add(1);
            let copy = CopyWr { gpu, host, length: length.into(), flagged, mark: Some(self.ticket) };
            // SAFETY: the caller's promise.
            unsafe { self.copier.start(&[copy]) }.map_err(Fault::Copy)?;
        }
        Ok(())
    }

    /// Buffers whose last copy is under way, or waits for room.
    pub(super) fn landings(&self) -> impl ExactSizeIterator<Item = &Landing> {
        self.landings.iter()
    }

    /// The next buffer that has landed.
    #[inline]
    pub(super) fn landed(&mut self) -> Option<Landing> {
        // At most as many as there are receives.
        #[expect(clippy::cast_possible_truncation, reason = "see above")]
        let started = (self.landings.len() - self.waiting) as u32;
        let first = self.ticket.wrapping_sub(started).wrapping_add(1);
        if started == 0 || !is_reached(first, self.copier.reached()) {
            return None;
        }
        self.landings.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_takes_no_more_than_is_told() {
        assert!(COPIES * size_of::<Piece>() <= 16 << 10);
        assert!(RING * size_of::<Assembly>() + RECV_REQUESTS * MAX_GROUP * size_of::<Landing>() <= 42 << 10);
    }

    #[test]
    fn tickets_go_round() {
        assert!(is_reached(1, 1) && is_reached(1, 2) && !is_reached(2, 1));
        assert!(is_reached(u32::MAX, 0) && !is_reached(0, u32::MAX) && is_reached(0, 0));
    }
}
