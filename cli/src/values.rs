//! Elements to send and to sum. Each is a hash of whose it is, where it lies and which round it is of: no shift of the data, and
//! nothing left of another operation, looks like what must be there.

/// An element of a rank at a position in a round: a whole number below 2^20, so that a float has the sum of 16 exactly.
pub(crate) fn value(rank: usize, i: usize, round: usize) -> i32 {
    let word = |n: usize| u64::try_from(n).unwrap_or(0);
    let start = (word(round) << 8 | word(rank)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    i32::try_from(mix(start.wrapping_add(word(i))) >> 44).unwrap_or(0)
}

/// Operations that are done again and again take turns at places of one input. No element is the same in two of them, so that
/// what was left by any of the last ones can't pass for another's result. Prime, as what slots are counted by is not.
pub(crate) const TURNS: usize = 61;
/// Bytes from one place to the next, which leaves all as well aligned as the first.
const STRIDE: usize = 4096;
/// Bytes that the input needs for it.
pub(crate) const SLACK: usize = TURNS * STRIDE;

/// Where the input of the n-th operation begins, in bytes.
pub(crate) fn turn(n: usize) -> usize {
    n % TURNS * STRIDE
}

/// The last step of splitmix64: every bit of the result depends on every bit of `x`.
pub(crate) fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neither_a_shift_nor_another_round_looks_the_same() {
        // The few bits that small types have.
        let elements =
            |rank, from: usize, round| (from..from + 64).map(|i| value(rank, i, round) % 16).collect::<Vec<_>>();
        let here = elements(0, 0, 0);
        assert!((1..5000).all(|shift| elements(0, shift, 0) != here));
        assert!((1..5000).all(|round| elements(0, 0, round) != here));
        assert!((1..64).all(|rank| elements(rank, 0, 0) != here));
        assert!((0..5000).all(|i| (0..1 << 20).contains(&value(7, i, i))));
    }
}
