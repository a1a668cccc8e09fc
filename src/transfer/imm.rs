//! The immediate of a portion: which credit it answers, and which portion of how many it is.
//!
//! | bits | field |
//! |---|---|
//! | 0–15 | low 16 bits of the credit's sequence number |
//! | 16–19 | index of the portion |
//! | 20–23 | number of portions, less one |
//! | 24–31 | plain writes of the portion before the one that carries this, each of the agreed largest size |

use super::MAX_PORTIONS;

/// An immediate, unpacked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Imm {
    pub sequence: u16,
    pub portion: u8,
    /// 1 to [`MAX_PORTIONS`].
    pub portions: u8,
    /// Writes without an immediate that went before on the same QP.
    pub plain: u8,
}

impl Imm {
    #[inline]
    pub fn pack(self) -> u32 {
        debug_assert!(self.portions >= 1 && usize::from(self.portions) <= MAX_PORTIONS && self.portion < self.portions);
        u32::from(self.sequence)
            | u32::from(self.portion) << 16
            | u32::from(self.portions - 1) << 20
            | u32::from(self.plain) << 24
    }

    /// The sequence number in an immediate of a message that is one write.
    #[inline]
    pub fn of_one_write(raw: u32) -> Option<u16> {
        u16::try_from(raw).ok()
    }

    /// None where a field has a value that no sender of this version writes.
    #[inline]
    pub fn unpack(raw: u32) -> Option<Self> {
        let [low, high, counts, plain] = raw.to_le_bytes();
        let portion = counts & 0xf;
        let portions = (counts >> 4) + 1;
        (portion < portions).then_some(Self { sequence: u16::from_le_bytes([low, high]), portion, portions, plain })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn round_trip(sequence: u16, portions in 1u8..=16, pick: u8, plain: u8) {
            let imm = Imm { sequence, portion: pick % portions, portions, plain };
            prop_assert_eq!(Imm::unpack(imm.pack()), Some(imm));
            prop_assert_eq!(Imm::of_one_write(imm.pack()), (portions == 1 && plain == 0).then_some(sequence));
        }

        #[test]
        fn whatever_unpacks_was_packed(raw: u32) {
            if let Some(imm) = Imm::unpack(raw) {
                prop_assert_eq!(imm.pack(), raw);
            }
        }
    }
}
