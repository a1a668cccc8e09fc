//! What a dump of a function's configuration space says (PCI Express Base Specification, 7.5 and 7.7.11). Without
//! privileges the kernel shows its first 64 bytes, and no capability is among them.

use std::fmt;

use serde::{Serialize, Serializer};

/// Where the list of capabilities begins.
const FIRST: usize = 0x34;
/// Where that of the extended ones begins.
const FIRST_EXTENDED: usize = 0x100;
/// Ids of capabilities: PCI Express; and extended: Access Control Services.
const EXPRESS: u8 = 0x10;
const ACS: u16 = 0x000d;
/// Offsets of control registers in them.
const DEVICE_CONTROL: usize = 0x08;
const ACS_CONTROL: usize = 0x06;
/// Device Control: the function may ask for relaxed ordering.
const RELAXED_ORDERING: u16 = 1 << 4;
/// A list that comes back to itself ends here.
const MOST: usize = 64;

/// Names of the bits of ACS Control, from bit 0 on.
const ACS_BITS: [&str; 7] =
    ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];
/// Requests or completions between functions below the same switch take the way over the root complex, or none.
const REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 5;

/// Access Control Services of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Acs {
    /// The configuration space could not be read so far.
    Unknown,
    /// The bridge has none.
    None,
    /// Its control register.
    Control(u16),
}

impl Acs {
    /// It keeps what goes from function to function off the direct way.
    pub fn redirects(self) -> bool {
        matches!(self, Self::Control(bits) if bits & REDIRECTS != 0)
    }
}

impl fmt::Display for Acs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown => f.write_str("ACS unknown"),
            Self::None => f.write_str("no ACS"),
            Self::Control(bits) => {
                write!(f, "ACS {bits:#06x}")?;
                let set = ACS_BITS.iter().enumerate().filter(|(i, _)| bits >> i & 1 != 0).map(|(_, name)| *name);
                let set: Vec<&str> = set.collect();
                if set.is_empty() { Ok(()) } else { write!(f, " ({})", set.join(" ")) }
            }
        }
    }
}

impl Serialize for Acs {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

/// A dump, as long as it could be read.
#[derive(Debug, Clone, Default)]
pub struct ConfigSpace(pub Vec<u8>);

impl ConfigSpace {
    fn byte(&self, at: usize) -> Option<u8> {
        self.0.get(at).copied()
    }

    fn word(&self, at: usize) -> Option<u16> {
        Some(u16::from_le_bytes([self.byte(at)?, self.byte(at + 1)?]))
    }

    /// Where a capability lies. None: there is none, or it can't be read.
    fn capability(&self, id: u8) -> Option<usize> {
        let mut at = usize::from(self.byte(FIRST)?);
        for _ in 0..MOST {
            // The lowest two bits are reserved; below are registers of every function.
            at &= !3;
            if at < 0x40 {
                break;
            }
            if self.byte(at)? == id {
                return Some(at);
            }
            at = usize::from(self.byte(at + 1)?);
        }
        None
    }

    /// As [`Self::capability`], of the extended ones; the outer None: it can't be read.
    fn extended(&self, id: u16) -> Option<Option<usize>> {
        let mut at = FIRST_EXTENDED;
        for _ in 0..MOST {
            let (found, next) = (self.word(at)?, self.word(at + 2)? >> 4);
            if found == id {
                return Some(Some(at));
            }
            at = usize::from(next) & !3;
            if at < FIRST_EXTENDED {
                break;
            }
        }
        Some(None)
    }

    pub fn acs(&self) -> Acs {
        match self.extended(ACS) {
            None => Acs::Unknown,
            Some(None) => Acs::None,
            Some(Some(at)) => self.word(at + ACS_CONTROL).map_or(Acs::Unknown, Acs::Control),
        }
    }

    /// Whether the function may ask for relaxed ordering; None: unknown.
    pub fn relaxed_ordering(&self) -> Option<bool> {
        let at = self.capability(EXPRESS)?;
        self.word(at + DEVICE_CONTROL).map(|control| control & RELAXED_ORDERING != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fake;
    use proptest::prelude::*;

    /// V18.
    #[test]
    fn the_control_register_decides() {
        let redirecting = ConfigSpace(fake::config_space(Some(0x001d), false)).acs();
        assert_eq!(redirecting, Acs::Control(0x1d));
        assert!(redirecting.redirects());
        assert_eq!(redirecting.to_string(), "ACS 0x001d (SrcValid ReqRedir CmpltRedir UpstreamFwd)");
        let off = ConfigSpace(fake::config_space(Some(0), false)).acs();
        assert_eq!((off, off.redirects()), (Acs::Control(0), false));
        assert!(!Acs::Control(0x11).redirects(), "source validation and forwarding alone redirect nothing");
        let none = ConfigSpace(fake::config_space(None, false)).acs();
        assert_eq!((none, none.redirects()), (Acs::None, false));
    }

    #[test]
    fn what_cannot_be_read_is_unknown_and_not_fine() {
        let whole = fake::config_space(Some(0x1d), true);
        for len in [0, 64, 256, 0x102] {
            assert_eq!(ConfigSpace(whole[..len].to_vec()).acs(), Acs::Unknown, "{len}");
        }
        assert_eq!(ConfigSpace(whole[..64].to_vec()).relaxed_ordering(), None);
        assert_eq!(ConfigSpace(whole[..256].to_vec()).relaxed_ordering(), Some(true));
    }

    #[test]
    fn relaxed_ordering_is_a_bit_of_device_control() {
        for set in [false, true] {
            assert_eq!(ConfigSpace(fake::config_space(None, set)).relaxed_ordering(), Some(set));
        }
    }

    proptest! {
        #[test]
        fn no_dump_loops_or_panics(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let space = ConfigSpace(bytes);
            let _ = (space.acs(), space.relaxed_ordering());
        }
    }
}
