//! The credit: where one receive wants its bytes. The receiver writes it into the sender's ring by RDMA.
//!
//! An entry has 32 bytes for up to 2 rails and 64 for up to 8, and never crosses a cache line. Little-endian:
//!
//! | offset | field |
//! |---|---|
//! | 0 | address (8) |
//! | 8 | size (48 bits), then 16 bits: n − 1 (3), hinted (1, with n = 1), piecewise (1), pieces (3, with piecewise), lap (8) |
//! | 16 | rkey of each rail (4 each) |
//! | stride − 8 | tag (4) |
//! | stride − 4 | sequence (4): ring position + 1 |
//!
//! Of a message that is wanted piecewise 2^pieces portions may go over one QP, of all others one: there are receives for so many.
//!
//! The sequence is written last and read first. The lap of the ring (bits 8–15 of the sequence; the low byte is the same
//! in every lap) stands in the entry a second time, so that a device that copies bytewise or out of order can't show half
//! of an entry and half of the one before it.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{MAX_GROUP, MAX_PORTIONS, MAX_RAILS, RING};

/// Offset of the first rail's key.
const RKEYS: usize = 16;

/// Size of a ring's entries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stride {
    /// Up to 2 rails.
    Narrow,
    /// Up to 8 rails.
    Wide,
}

impl Stride {
    pub fn for_rails(rails: usize) -> Self {
        if rails <= 2 { Self::Narrow } else { Self::Wide }
    }

    #[inline]
    pub const fn bytes(self) -> usize {
        match self {
            Self::Narrow => 32,
            Self::Wide => 64,
        }
    }

    /// Bytes of a whole ring.
    pub fn ring_bytes(self) -> usize {
        RING * self.bytes()
    }

    #[inline]
    fn rails(self) -> usize {
        match self {
            Self::Narrow => 2,
            Self::Wide => MAX_RAILS,
        }
    }

    /// Offset of the tag; the sequence follows it.
    #[inline]
    fn tail(self) -> usize {
        self.bytes() - 8
    }
}

/// A credit, unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credit {
    pub address: u64,
    /// Most bytes that the receive takes.
    pub size: u64,
    /// Members of the group.
    pub n: u8,
    /// No immediate answers it ([`super::hint`]); n is 1.
    pub hinted: bool,
    pub pieces: Pieces,
    pub tag: u32,
}

/// The bit of a hinted receive.
const HINTED: u64 = 8;
/// The bit of a message that is wanted in portions.
const PIECEWISE: u8 = 16;
/// The logarithm of the portions for a QP, in three bits.
const PIECES: u32 = 5;
/// More than any message has are refused.
const MOST_PIECES: u64 = MAX_PORTIONS.ilog2() as u64;

/// How a message is wanted, as it stands in the credit: few are wanted in portions, and only those pay for reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pieces(u8);

impl Pieces {
    /// In as few portions as it takes, one over a QP.
    pub const FEW: Self = Self(0);

    /// The receiver copies what arrives ([`super::staging`]): it wants at most so many over one QP, a power of two.
    pub fn up_to(most: u8) -> Self {
        debug_assert!(most.is_power_of_two() && usize::from(most) <= MAX_PORTIONS);
        let [logarithm, ..] = most.trailing_zeros().to_le_bytes();
        Self(PIECEWISE | logarithm << PIECES)
    }

    /// Whether it is wanted in portions.
    #[inline]
    pub fn wanted(self) -> bool {
        self.0 != 0
    }

    /// Portions that may go over one QP.
    pub fn most(self) -> usize {
        1 << (self.0 >> PIECES)
    }
}

/// The sequence number of a ring position; never confused with an older lap of the ring.
#[inline]
pub fn sequence(position: u32) -> u32 {
    position.wrapping_add(1)
}

/// Its low bits, as an immediate carries them.
#[inline]
pub(super) fn low16(position: u32) -> u16 {
    let [low, high, ..] = sequence(position).to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// The lap of the ring, modulo 256.
#[inline]
fn lap(position: u32) -> u64 {
    const { assert!(RING == 256) };
    u64::from(sequence(position) >> 8 & 0xff)
}

/// Two neighbouring 32-bit fields of an entry as one word.
#[inline]
fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// The entry of a ring position.
#[inline]
pub fn slot(position: u32) -> usize {
    position as usize & (RING - 1)
}

/// A ring of credits in memory that the peer's NIC (sender's side) or ours (receiver's shadow) reads and writes.
#[derive(Debug)]
pub struct CreditRing {
    base: NonNull<u8>,
    stride: Stride,
}

// SAFETY: the memory is reached through atomics only.
unsafe impl Send for CreditRing {}

impl CreditRing {
    /// # Safety
    /// `base` points to `stride.ring_bytes()` bytes, aligned to 64, that outlive the ring and that this process touches
    /// only through it.
    pub unsafe fn new(base: NonNull<u8>, stride: Stride) -> Self {
        Self { base, stride }
    }

    #[inline]
    pub fn stride(&self) -> Stride {
        self.stride
    }

    /// Address of a slot.
    #[inline]
    pub fn address(&self, slot: usize) -> u64 {
        (self.base.as_ptr() as usize + slot * self.stride.bytes()) as u64
    }

    #[inline]
    fn word64(&self, slot: usize, offset: usize) -> &AtomicU64 {
        debug_assert!(slot < RING && offset + 8 <= self.stride.bytes());
        // SAFETY: inside the ring by the line above (slot() masks, offsets are constants).
        let p = unsafe { self.base.as_ptr().add(slot * self.stride.bytes() + offset) };
        // SAFETY: aligned, alive, and shared only as atomics.
        unsafe { AtomicU64::from_ptr(p.cast()) }
    }

    #[inline]
    fn word32(&self, slot: usize, offset: usize) -> &AtomicU32 {
        debug_assert!(slot < RING && offset + 4 <= self.stride.bytes());
        // SAFETY: as in word64.
        let p = unsafe { self.base.as_ptr().add(slot * self.stride.bytes() + offset) };
        // SAFETY: as in word64.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    /// Whether the credit of this position has arrived: one load.
    #[inline]
    pub fn ready(&self, position: u32) -> bool {
        self.word32(slot(position), self.stride.tail() + 4).load(Ordering::Acquire) == sequence(position)
    }

    /// The tag of a ready position.
    #[inline]
    pub fn tag(&self, position: u32) -> u32 {
        self.word32(slot(position), self.stride.tail()).load(Ordering::Relaxed)
    }

    /// Reads a ready position; None while the entry is not whole, or where a peer wrote what no receiver writes.
    #[inline]
    pub fn read(&self, position: u32) -> Option<Credit> {
        let slot = slot(position);
        let word = self.word64(slot, 8).load(Ordering::Relaxed);
        let meta = word >> 48;
        // A hinted receive is alone.
        if meta >> 8 != lap(position) || meta & 0xff > HINTED && !Self::is_piecewise(meta & 0xff) {
            return None;
        }
        Some(Credit {
            address: self.word64(slot, 0).load(Ordering::Relaxed),
            size: word & ((1 << 48) - 1),
            n: (meta & 7) as u8 + 1,
            hinted: meta & HINTED != 0,
            pieces: Pieces((meta & 0xf0) as u8),
            tag: self.tag(position),
        })
    }

    /// Flags beyond those of what goes in one piece.
    #[cold]
    fn is_piecewise(flags: u64) -> bool {
        let piecewise = u64::from(PIECEWISE);
        flags & piecewise != 0 && flags & (piecewise - 1) <= HINTED && flags >> PIECES <= MOST_PIECES
    }

    /// The key of one rail at a position that was read.
    #[inline]
    pub fn rkey(&self, position: u32, rail: usize) -> u32 {
        debug_assert!(rail < self.stride.rails());
        self.word32(slot(position), RKEYS + 4 * rail).load(Ordering::Relaxed)
    }

    /// Writes the credit of a position, with the keys of the buffer by rail.
    #[inline]
    pub fn write(&self, position: u32, credit: &Credit, rkeys: &[u32; MAX_RAILS]) {
        debug_assert!(credit.size < 1 << 48 && (1..=MAX_GROUP).contains(&usize::from(credit.n)));
        debug_assert!(!credit.hinted || credit.n == 1);
        let slot = slot(position);
        let hinted = if credit.hinted { HINTED } else { 0 };
        let meta = u64::from(credit.n - 1) | hinted | u64::from(credit.pieces.0) | lap(position) << 8;
        self.word64(slot, 0).store(credit.address, Ordering::Relaxed);
        self.word64(slot, 8).store(credit.size | meta << 48, Ordering::Relaxed);
        for rail in (0..self.stride.rails()).step_by(2) {
            self.word64(slot, RKEYS + 4 * rail).store(pair(rkeys[rail], rkeys[rail + 1]), Ordering::Relaxed);
        }
        self.word64(slot, self.stride.tail()).store(pair(credit.tag, sequence(position)), Ordering::Release);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Memory for a ring, aligned as a page would be.
    #[repr(C, align(64))]
    #[derive(Debug)]
    pub(crate) struct RingMemory([u8; RING * 64]);

    pub(crate) fn memory() -> Box<RingMemory> {
        Box::new(RingMemory([0; RING * 64]))
    }

    impl RingMemory {
        pub(crate) fn ring(&mut self, stride: Stride) -> CreditRing {
            // SAFETY: the tests keep the memory alive and touch it through the ring only.
            unsafe { CreditRing::new(NonNull::from(&mut self.0).cast(), stride) }
        }
    }

    proptest! {
        #[test]
        fn round_trip(position: u32, address: u64, size in 0u64..1 << 48, n in 1u8..=8, tag: u32, keys: [u32; 8], wide: bool, hint: bool, pieces in 0u8..6) {
            let stride = if wide { Stride::Wide } else { Stride::Narrow };
            let mut memory = memory();
            let ring = memory.ring(stride);
            // 1, 2, 4, 8, 16 or none.
            let pieces = if pieces > 4 { Pieces::FEW } else { Pieces::up_to(1 << pieces) };
            let credit = Credit { address, size, n, hinted: hint && n == 1, pieces, tag };
            prop_assert!(position == u32::MAX || !ring.ready(position));
            ring.write(position, &credit, &keys);
            prop_assert!(ring.ready(position));
            prop_assert!(!ring.ready(position.wrapping_add(256)) && !ring.ready(position.wrapping_sub(256)));
            prop_assert_eq!(ring.read(position), Some(credit));
            for (rail, &key) in keys.iter().enumerate().take(stride.rails()) {
                prop_assert_eq!(ring.rkey(position, rail), key);
            }
        }
    }

    #[test]
    fn a_torn_entry_is_not_read() {
        let mut memory = memory();
        let ring = memory.ring(Stride::Narrow);
        ring.write(7, &Credit { address: 1, size: 2, n: 1, hinted: false, pieces: Pieces::FEW, tag: 3 }, &[4; 8]);
        // The sequence of the next lap is there, the rest is still of this one.
        ring.word32(7, 28).store(sequence(7 + 256), Ordering::Relaxed);
        assert!(ring.ready(7 + 256));
        assert_eq!(ring.read(7 + 256), None);
    }

    #[test]
    fn unknown_flags_are_refused() {
        let mut memory = memory();
        let ring = memory.ring(Stride::Wide);
        ring.write(0, &Credit { address: 1, size: 2, n: 1, hinted: false, pieces: Pieces::FEW, tag: 3 }, &[4; 8]);
        for bit in 5..8 {
            ring.word64(0, 8).fetch_xor(1 << (48 + bit), Ordering::Relaxed);
            assert_eq!(ring.read(0), None);
            ring.word64(0, 8).fetch_xor(1 << (48 + bit), Ordering::Relaxed);
        }
        ring.word64(0, 8).fetch_or((HINTED | 1) << 48, Ordering::Relaxed);
        assert_eq!(ring.read(0), None, "a group is never hinted");
        let pieces = Pieces::up_to(16);
        ring.write(0, &Credit { address: 1, size: 2, n: 1, hinted: false, pieces, tag: 3 }, &[4; 8]);
        assert!(ring.read(0).is_some());
        ring.word64(0, 8).fetch_or(1 << (48 + PIECES), Ordering::Relaxed);
        assert_eq!(ring.read(0), None, "32 portions");
    }

    #[test]
    fn entries_stay_inside_a_cache_line() {
        for stride in [Stride::Narrow, Stride::Wide] {
            for slot in 0..RING {
                assert_eq!(slot * stride.bytes() / 64, (slot * stride.bytes() + stride.bytes() - 1) / 64);
            }
        }
    }
}
