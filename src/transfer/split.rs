//! How a message is cut: contiguous shares, one for each rail, sized so that the rails finish together; and a portion that
//! is longer than a port's messages may be, into several writes.

use super::credit::Stride;
use super::{MAX_GROUP, MAX_PORTIONS, MAX_RAILS, SEND_WRS};

/// Shares are multiples of this, but for the last: LL128 lines stay whole.
pub const ALIGN: u64 = 128;

/// Longest message of a queue pair, by the InfiniBand specification (9.2).
const LONGEST: u32 = 1 << 31;
/// What a port is taken for that does not say how long its messages may be.
const UNTOLD: u32 = 1 << 30;
/// A share of a message for one QP.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Portion {
    pub(super) qp: usize,
    pub(super) length: u64,
    /// At most [`SEND_WRS`].
    pub(super) writes: u32,
    /// That QP's: known where it is cut, and a division else.
    rail: u8,
}

impl Portion {
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "MAX_RAILS is small")]
    pub(super) fn new(qp: usize, rail: usize, length: u64, writes: u32) -> Self {
        Self { qp, length, writes, rail: rail as u8 }
    }

    #[inline]
    pub(super) fn rail(&self) -> usize {
        usize::from(self.rail)
    }
}

/// NCCL's NCCL_MAX_NET_SIZE_BYTES.
pub const MAX_MESSAGE: u64 = 1 << 40;

/// The credits of a group go in one write.
const LEAST: u32 = 512;
const _: () = assert!(LEAST as usize == MAX_GROUP * Stride::Wide.bytes());

/// Longest write on a port whose messages have at most `max_msg_sz` bytes: whole lines. 0 where not even credits fit.
pub fn max_write(max_msg_sz: u32) -> u32 {
    const LINE: u32 = 128;
    const { assert!(LINE as u64 == ALIGN) };
    let longest = if max_msg_sz == 0 { UNTOLD } else { max_msg_sz.min(LONGEST) };
    if longest < LEAST { 0 } else { longest / LINE * LINE }
}

/// Largest message between ports whose messages have at most `max_msg_sz` bytes. However it is cut, each portion fits the
/// send queue of its QP.
pub fn largest_message(max_msg_sz: u32) -> u64 {
    (u64::from(max_write(max_msg_sz)) * u64::from(SEND_WRS)).min(MAX_MESSAGE)
}

/// Writes that a portion takes: all but the last have `max_write` bytes.
#[inline]
pub fn writes(length: u64, max_write: u64) -> u64 {
    // Nearly always one: no division.
    if length <= max_write { 1 } else { length.div_ceil(max_write) }
}

/// Length of the portions of a message that goes in chunks, the last being shorter: at most `most` and [`MAX_PORTIONS`], whole lines, and
/// if longer than a write, whole writes, so that all of them fit one send queue if the message does.
pub(super) fn piece(size: u64, chunk: u64, max_write: u64, most: usize) -> u64 {
    let count = size.div_ceil(chunk).clamp(1, most.clamp(1, MAX_PORTIONS) as u64);
    let length = size.div_ceil(count).next_multiple_of(ALIGN);
    if length > max_write { length.next_multiple_of(max_write) } else { length }
}

/// Shares of `size` bytes by rail. A rail of speed `w` that still has `o` bytes outstanding finishes at `(o + share) / w`;
/// the shares level these, so that an unequal or busy rail gets less, and none where it would finish last anyway.
///
/// `speed` is in any one unit and not 0. The shares add up to `size`.
#[inline]
pub fn shares(size: u64, rails: usize, speed: &[u32; MAX_RAILS], outstanding: &[u64; MAX_RAILS]) -> [u64; MAX_RAILS] {
    let mut shares = [0; MAX_RAILS];
    if rails <= 1 {
        shares[0] = size;
        return shares;
    }
    // Water filling: the level is (size + what is outstanding) / speed over the rails that take part; a rail above the
    // level leaves and the level is taken anew. At most `rails` turns.
    let mut part = [true; MAX_RAILS];
    loop {
        let mut bytes = u128::from(size);
        let mut weight = 0u128;
        for i in (0..rails).filter(|&i| part[i]) {
            bytes += u128::from(outstanding[i]);
            weight += u128::from(speed[i].max(1));
        }
        let mut settled = true;
        for i in 0..rails {
            if !part[i] {
                continue;
            }
            let target = bytes * u128::from(speed[i].max(1)) / weight;
            let own = u128::from(outstanding[i]);
            if target < own {
                part[i] = false;
                settled = false;
            } else {
                // target <= size + outstanding, so the difference fits.
                shares[i] = u64::try_from(target - own).unwrap_or(size);
            }
        }
        if settled {
            break;
        }
        shares = [0; MAX_RAILS];
    }
    // Whole lines; what the rounding left goes to the last rail that takes part.
    let mut left = size;
    let mut last = 0;
    for i in (0..rails).filter(|&i| part[i]) {
        shares[i] = (shares[i] / ALIGN * ALIGN).min(left);
        left -= shares[i];
        last = i;
    }
    shares[last] += left;
    shares
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EVEN: [u32; 8] = [100; 8];

    #[test]
    fn even_rails_get_even_shares() {
        assert_eq!(shares(1 << 20, 2, &EVEN, &[0; 8])[..3], [1 << 19, 1 << 19, 0]);
        assert_eq!(shares(1000, 1, &EVEN, &[5; 8])[0], 1000);
    }

    #[test]
    fn a_slow_rail_gets_its_part() {
        let mut speed = EVEN;
        speed[1] = 300;
        assert_eq!(shares(4 << 20, 2, &speed, &[0; 8])[..2], [1 << 20, 3 << 20]);
    }

    #[test]
    fn a_rail_that_would_finish_last_gets_nothing() {
        let mut outstanding = [0; 8];
        outstanding[0] = 10 << 20;
        assert_eq!(shares(1 << 20, 2, &EVEN, &outstanding)[..2], [0, 1 << 20]);
    }

    #[test]
    fn writes_are_whole_lines_and_a_message_fills_the_send_queue() {
        for (max_msg_sz, write) in [
            (0, 1 << 30),
            (1, 0),
            (511, 0),
            (512, 512),
            (4096, 4096),
            (4097, 4096),
            (8 << 20, 8 << 20),
            (1 << 31, 1 << 31),
        ] {
            assert_eq!(max_write(max_msg_sz), write, "{max_msg_sz}");
        }
        assert_eq!(max_write(u32::MAX), 1 << 31);
        // Soft-RoCE: what NCCL may send through ABI v8 just fits.
        assert_eq!(largest_message(8 << 20), 1 << 30);
        assert_eq!((largest_message(u32::MAX), largest_message(100)), (1 << 38, 0));
        for (length, count) in [(0, 1), (1, 1), (128, 1), (129, 2), (256, 2), (257, 3)] {
            assert_eq!(writes(length, 128), count, "{length}");
        }
    }

    proptest! {
        #[test]
        fn pieces_are_few_and_fit_a_send_queue(size in 0u64..1 << 33, chunk in 128u64..1 << 20, max_write in prop::sample::select(vec![128u64, 512, 4096, 1 << 23, 1 << 31])) {
            let size = size.min(max_write * u64::from(SEND_WRS));
            let length = piece(size, chunk, max_write, MAX_PORTIONS);
            prop_assert!(length.is_multiple_of(ALIGN) && (size == 0) == (length == 0));
            let whole = size.checked_div(length).unwrap_or(0);
            prop_assert!(whole <= MAX_PORTIONS as u64 && (size == whole * length || whole < MAX_PORTIONS as u64));
            let wrs = whole * writes(length, max_write) + writes(size - whole * length, max_write);
            prop_assert!(wrs <= u64::from(SEND_WRS) + 1);
            prop_assert!(wrs <= u64::from(SEND_WRS) || size == whole * length, "the last is not empty");
        }

        #[test]
        fn shares_add_up_and_are_aligned(size in 0u64..1 << 32, rails in 1usize..=8, speed in prop::array::uniform8(1u32..800_000), outstanding in prop::array::uniform8(0u64..1 << 34)) {
            let s = shares(size, rails, &speed, &outstanding);
            prop_assert_eq!(s.iter().sum::<u64>(), size);
            prop_assert!(s[rails..].iter().all(|&x| x == 0));
            prop_assert!(s[..rails].iter().filter(|&&x| x % ALIGN != 0).count() <= 1);
            // No rail finishes later than the slowest of even shares would, but for rounding.
            let finish = |i: usize, share: u64| (outstanding[i] + share) as f64 / f64::from(speed[i]);
            let ours = (0..rails).filter(|&i| s[i] > 0).map(|i| finish(i, s[i])).fold(0.0, f64::max);
            let even = (0..rails).map(|i| finish(i, size / rails as u64)).fold(0.0, f64::max);
            prop_assert!(ours <= even + (ALIGN * 9) as f64);
        }
    }
}
