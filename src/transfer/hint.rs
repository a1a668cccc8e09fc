//! The window of hinted receives: those that NCCL takes for done when they are posted (LL and LL128, whose data tell by
//! flags when they are there). No immediate answers them, so nothing that arrives tells the receiver that a ring entry may
//! be used again; the sender says so itself, by its *count*.
//!
//! The count is a ring position: every position before it has been matched to a send, and those of hinted receives have
//! been acknowledged by the receiver's NIC, too. The second half is for deregistration: what was acknowledged is not on its
//! way any more. The sender writes the count into the receiver's memory whenever it has moved by a quarter of the ring and
//! there was a hinted receive in between; an entry that a hinted receive has is used again once the count is past it.
//!
//! Both ends are plain state here, the ring's size a parameter, so that `model` can look at all that may happen.

/// A count as it lies in memory: twice, the second time inverted, so that half a write is not taken for one. Memory that
/// was never written holds none.
#[inline]
pub(super) fn pack(count: u32) -> u64 {
    u64::from(count) | u64::from(!count) << 32
}

/// None while it is not whole.
#[inline]
fn unpack(raw: u64) -> Option<u32> {
    let [a, b, c, d, e, f, g, h] = raw.to_le_bytes();
    let count = u32::from_le_bytes([a, b, c, d]);
    (u32::from_le_bytes([e, f, g, h]) == !count).then_some(count)
}

/// The sender's end; the count is sent when it has moved by `STEP`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Ledger<const RING: usize, const STEP: u32> {
    /// Hinted positions whose write was not acknowledged; bit per ring entry.
    outstanding: [u64; 4],
    /// Every position before it is matched, and acknowledged if hinted. Only kept while `owes`.
    done: u32,
    /// The last count that was sent.
    told: u32,
    /// A hinted receive was matched that no count covers yet.
    owes: bool,
}

impl<const RING: usize, const STEP: u32> Ledger<RING, STEP> {
    #[inline]
    fn place(position: u32) -> (usize, u64) {
        const { assert!(RING.is_power_of_two() && RING <= 256 && STEP as usize <= RING / 2) };
        let slot = position as usize & (RING - 1);
        (slot / 64, 1 << (slot % 64))
    }

    /// Whether [`Self::due`] may say something.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        self.owes
    }

    /// A send was matched to the hinted receive at the head; `posted`: its write is under way.
    #[inline]
    pub(super) fn matched(&mut self, position: u32, posted: bool) {
        if !self.owes {
            // All before it are matched, and nothing before it concerns the count.
            (self.owes, self.done, self.told) = (true, position, position);
        }
        if posted {
            let (word, bit) = Self::place(position);
            self.outstanding[word] |= bit;
        }
    }

    /// The write for a hinted receive was acknowledged.
    #[inline]
    pub(super) fn acknowledged(&mut self, position: u32) {
        let (word, bit) = Self::place(position);
        self.outstanding[word] &= !bit;
    }

    /// The count that is to be sent now, if one is; every position before `head` is matched.
    #[inline]
    pub(super) fn due(&mut self, head: u32) -> Option<u32> {
        while self.done != head {
            let (word, bit) = Self::place(self.done);
            if self.outstanding[word] & bit != 0 {
                break;
            }
            self.done = self.done.wrapping_add(1);
        }
        (self.owes && self.done.wrapping_sub(self.told) >= STEP).then_some(self.done)
    }

    /// The count that was due is on its way.
    #[inline]
    pub(super) fn told(&mut self, head: u32) {
        self.told = self.done;
        self.owes = self.done != head;
    }
}

/// The receiver's end.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub(super) struct Horizon {
    /// The last count taken in, or the position of the first hinted receive after there was none open.
    count: u32,
    /// What was last seen in memory.
    seen: u64,
    /// Hinted receives that no count covers.
    open: u32,
}

impl Horizon {
    #[inline]
    pub(super) fn open(&self) -> u32 {
        self.open
    }

    /// A hinted receive was posted.
    #[inline]
    pub(super) fn posted(&mut self, position: u32) {
        if self.open == 0 {
            self.count = position;
        }
        self.open += 1;
    }

    /// A hinted receive that the count has passed.
    #[inline]
    pub(super) fn passed(&mut self) {
        self.open = self.open.saturating_sub(1);
    }

    /// Takes in what the peer wrote: the positions that the count has passed since, or, where it tells of positions that
    /// were never posted, the count. It only goes forward.
    pub(super) fn learn(&mut self, raw: u64, tail: u32) -> Result<Positions, u32> {
        let from = self.count;
        if raw == self.seen {
            return Ok(Positions { next: from, end: from });
        }
        let Some(count) = unpack(raw) else { return Ok(Positions { next: from, end: from }) };
        if count.wrapping_sub(from) > tail.wrapping_sub(from) {
            return Err(count);
        }
        (self.seen, self.count) = (raw, count);
        Ok(Positions { next: from, end: count })
    }
}

/// Ring positions, on a circle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Positions {
    next: u32,
    end: u32,
}

impl Iterator for Positions {
    type Item = u32;

    #[inline]
    fn next(&mut self) -> Option<u32> {
        let position = self.next;
        (position != self.end).then(|| {
            self.next = position.wrapping_add(1);
            position
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_count_is_none() {
        for (old, new) in [(0u64, pack(64)), (pack(64), pack(128)), (pack(0xffff), pack(0x1_0000))] {
            for bytes in 1..8 {
                let mask = (1u64 << (8 * bytes)) - 1;
                let torn = new & mask | old & !mask;
                assert!(torn == new || unpack(torn).is_none(), "{old:x} {new:x} {bytes}");
            }
        }
        assert_eq!((unpack(0), unpack(pack(u32::MAX))), (None, Some(u32::MAX)));
    }

    #[test]
    fn only_forward_and_never_past_what_was_posted() {
        let mut horizon = Horizon::default();
        horizon.posted(u32::MAX - 1);
        horizon.posted(u32::MAX);
        assert_eq!(horizon.learn(0, 0), Ok(Positions { next: u32::MAX - 1, end: u32::MAX - 1 }));
        assert_eq!(horizon.clone().learn(pack(1), 0), Err(1), "past what was posted");
        assert_eq!(horizon.clone().learn(pack(5), 0), Err(5));
        assert_eq!(horizon.clone().learn(pack(u32::MAX - 2), 0), Err(u32::MAX - 2), "backward");
        assert!(horizon.learn(pack(u32::MAX), 0).expect("forward").eq([u32::MAX - 1]));
        assert!(horizon.learn(pack(0), 0).expect("across the wrap").eq([u32::MAX]));
        assert!(horizon.learn(pack(u32::MAX), 0).is_err(), "backward");
    }

    /// However long there were none in between.
    #[test]
    fn the_first_hinted_receive_after_none_begins_anew() {
        let mut horizon = Horizon::default();
        horizon.posted(0);
        assert!(horizon.learn(pack(1), 1).expect("forward").eq([0]));
        horizon.passed();
        horizon.posted(3_000_000_000);
        assert_eq!(horizon.learn(pack(1), 3_000_000_001).expect("seen before").count(), 0);
        assert!(horizon.learn(pack(3_000_000_001), 3_000_000_001).expect("forward").eq([3_000_000_000]));
    }

    #[test]
    fn the_count_stops_at_what_is_outstanding() {
        let mut ledger = Ledger::<256, 64>::default();
        ledger.matched(1000, true);
        assert_eq!(ledger.due(1200), None, "the first is outstanding");
        ledger.acknowledged(1000);
        assert_eq!(ledger.due(1063), None, "less than a quarter");
        assert_eq!(ledger.due(1064), Some(1064));
        ledger.matched(1064, true);
        ledger.matched(1065, false);
        assert_eq!(ledger.due(1066), Some(1064));
        ledger.told(1066);
        assert!(ledger.owes());
        ledger.acknowledged(1064);
        assert_eq!(ledger.due(1128), Some(1128));
        ledger.told(1128);
        assert!(!ledger.owes());
        assert_eq!(ledger.due(5000), None, "nobody waits for it");
    }
}
