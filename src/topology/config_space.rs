//! What a function's configuration space says (PCI Express Base Specification, 7.5 and 7.7.11), read a word at a time: each
//! read goes to the hardware, and some devices answer late, or badly where nothing is. Without CAP_SYS_ADMIN the kernel shows
//! the first 64 bytes, and no capability is among them.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use serde::ser::SerializeStruct as _;
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
/// Bytes of the configuration space of a function without PCI Express.
const CONVENTIONAL: u64 = 256;
/// A list that is longer comes back to itself.
const MOST: usize = 64;

/// Names of the bits of ACS Control, from bit 0 on.
const ACS_BITS: [&str; 7] =
    ["SrcValid", "TransBlk", "ReqRedir", "CmpltRedir", "UpstreamFwd", "EgressCtrl", "DirectTrans"];
/// Requests or completions between functions below the same switch take the way over the root complex, or none.
const REDIRECTS: u16 = 1 << 2 | 1 << 3 | 1 << 5;
/// Requests whose addresses are translated already (ATS) go the direct way all the same.
const DIRECT_TRANSLATED: u16 = 1 << 6;

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
        matches!(self, Self::Control(bits) if bits & REDIRECTS != 0 && bits & DIRECT_TRANSLATED == 0)
    }

    /// All but requests with translated addresses.
    pub fn redirects_untranslated(self) -> bool {
        matches!(self, Self::Control(bits) if bits & REDIRECTS != 0 && bits & DIRECT_TRANSLATED != 0)
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

/// In words, and the register as a number.
impl Serialize for Acs {
    fn serialize<S: Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        let mut shown = s.serialize_struct("Acs", 2)?;
        shown.serialize_field("text", &self.to_string())?;
        let control = if let Self::Control(bits) = self { Some(bits) } else { None };
        shown.serialize_field("control", &control)?;
        shown.end()
    }
}

/// As much of it as this process may see.
#[derive(Debug, Default)]
pub enum ConfigSpace {
    /// Nothing.
    #[default]
    Closed,
    /// sysfs says its length whether or not all may be read.
    Open { file: File, length: u64 },
}

impl ConfigSpace {
    pub fn of(file: File) -> Self {
        match file.metadata() {
            Ok(about) => Self::Open { file, length: about.len() },
            Err(_) => Self::Closed,
        }
    }

    fn word(&self, at: usize) -> Option<u16> {
        let Self::Open { file, .. } = self else { return None };
        let mut bytes = [0; 2];
        file.read_exact_at(&mut bytes, at as u64).ok()?;
        Some(u16::from_le_bytes(bytes))
    }

    fn byte(&self, at: usize) -> Option<u8> {
        self.word(at).map(|word| word.to_le_bytes()[0])
    }

    /// Of a conventional function there is no more, and so no extended capability.
    fn is_conventional(&self) -> bool {
        matches!(self, Self::Open { length, .. } if *length == CONVENTIONAL)
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
            let [found, next] = self.word(at)?.to_le_bytes();
            if found == id {
                return Some(at);
            }
            at = usize::from(next);
        }
        None
    }

    /// As [`Self::capability`], of the extended ones; the outer None: it can't be read.
    fn extended(&self, id: u16) -> Option<Option<usize>> {
        let mut at = FIRST_EXTENDED;
        for _ in 0..MOST {
            let (found, above) = (self.word(at)?, self.word(at + 2)?);
            if found == id {
                return Some(Some(at));
            }
            // Nobody answers.
            if (found, above) == (u16::MAX, u16::MAX) {
                return None;
            }
            at = usize::from(above >> 4) & !3;
            if at < FIRST_EXTENDED {
                return Some(None);
            }
        }
        None
    }

    pub fn acs(&self) -> Acs {
        if self.is_conventional() {
            return Acs::None;
        }
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
    use std::io::Write as _;

    fn space(bytes: &[u8]) -> ConfigSpace {
        let mut file = tempfile::tempfile().expect("a file");
        file.write_all(bytes).expect("written");
        ConfigSpace::of(file)
    }

    /// V18.
    #[test]
    fn the_control_register_decides() {
        let redirecting = space(&fake::config_space(Some(0x001d), false)).acs();
        assert_eq!(redirecting, Acs::Control(0x1d));
        assert!(redirecting.redirects());
        assert_eq!(redirecting.to_string(), "ACS 0x001d (SrcValid ReqRedir CmpltRedir UpstreamFwd)");
        let off = space(&fake::config_space(Some(0), false)).acs();
        assert_eq!((off, off.redirects()), (Acs::Control(0), false));
        assert!(!Acs::Control(0x11).redirects(), "source validation and forwarding alone redirect nothing");
        let direct = Acs::Control(0x5d);
        assert!(!direct.redirects() && direct.redirects_untranslated() && !redirecting.redirects_untranslated());
        let none = space(&fake::config_space(None, false)).acs();
        assert_eq!((none, none.redirects()), (Acs::None, false));
    }

    #[test]
    fn what_cannot_be_read_is_unknown_and_not_fine() {
        let whole = fake::config_space(Some(0x1d), true);
        for len in [0, 64, 255, 0x102] {
            assert_eq!(space(&whole[..len]).acs(), Acs::Unknown, "{len}");
        }
        assert_eq!(space(&whole[..256]).acs(), Acs::None, "conventional");
        let mut dead = whole.clone();
        dead[0x100..].fill(0xff);
        assert_eq!(space(&dead).acs(), Acs::Unknown);
        let mut looping = fake::config_space(None, false);
        // Version 1, next at 0x100.
        looping[0x102..0x104].copy_from_slice(&[0x01, 0x10]);
        assert_eq!(space(&looping).acs(), Acs::Unknown);
        assert_eq!(ConfigSpace::Closed.acs(), Acs::Unknown);
        assert_eq!(space(&whole[..64]).relaxed_ordering(), None);
        assert_eq!(space(&whole[..256]).relaxed_ordering(), Some(true));
    }

    #[test]
    fn relaxed_ordering_is_a_bit_of_device_control() {
        for set in [false, true] {
            assert_eq!(space(&fake::config_space(None, set)).relaxed_ordering(), Some(set));
        }
    }

    proptest! {
        #[test]
        fn no_dump_loops_or_panics(bytes in prop::collection::vec(any::<u8>(), 0..4096)) {
            let space = space(&bytes);
            let _ = (space.acs(), space.relaxed_ordering());
        }
    }
}
