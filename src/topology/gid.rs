//! GIDs and which one of a port's table to use.
//!
//! On InfiniBand that is index 0. On RoCE the table holds an entry for each address of the interface in each RoCE version;
//! the right one is a routable address of the wanted family and version. The rule, best first:
//!
//! 1. the wanted address family and RoCE version, inside NCCL_IB_ADDR_RANGE;
//! 2. the same without the family, since an all-IPv6 fabric has no IPv4 address to prefer;
//! 3. those whose version can't be read, which may be the wanted one; then those of another. Each time the wanted family
//!    comes first;
//! 4. last of all addresses that do not leave the link: 169.254/16, then fe80::/10.
//!
//! Private ranges are normal fabric addresses. Among equals the lowest index wins. Entries that are all zero are empty, or
//! belong to another network namespace, and are passed over.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;

use crate::config::{AddrFamily, RoceVersion};

use super::port::LinkLayer;

/// A global identifier, network byte order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address that it holds; an IPv4-mapped one as IPv4.
    pub fn address(self) -> IpAddr {
        let v6 = Ipv6Addr::from(self.0);
        v6.to_ipv4_mapped().map_or(IpAddr::V6(v6), IpAddr::V4)
    }

    pub fn family(self) -> AddrFamily {
        if self.address().is_ipv4() { AddrFamily::V4 } else { AddrFamily::V6 }
    }

    pub fn is_zero(self) -> bool {
        self.0 == [0; 16]
    }

    /// The address never leaves the link: fe80::/10 or 169.254/16.
    pub fn is_link_local(self) -> bool {
        match self.address() {
            IpAddr::V4(a) => a.is_link_local(),
            IpAddr::V6(a) => a.segments()[0] & 0xffc0 == 0xfe80,
        }
    }
}

impl From<Ipv4Addr> for Gid {
    fn from(a: Ipv4Addr) -> Self {
        Self(a.to_ipv6_mapped().octets())
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address().fmt(f)
    }
}

/// What kind of address an entry holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GidKind {
    Ib,
    RoceV1,
    RoceV2,
    /// The type could not be read.
    Unknown,
}

impl fmt::Display for GidKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ib => "InfiniBand",
            Self::RoceV1 => "RoCE v1",
            Self::RoceV2 => "RoCE v2",
            Self::Unknown => "type unknown",
        })
    }
}

/// A filled entry of a table. An address vector has 8 bits for the index, so an entry behind 255 can't be used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GidEntry {
    pub index: u32,
    pub gid: Gid,
    pub kind: GidKind,
    pub netdev: Option<String>,
}

/// What the user asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidPolicy {
    pub index: Option<u8>,
    pub version: RoceVersion,
    pub family: AddrFamily,
    pub range: Option<IpNet>,
}

/// The entry to use, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub index: u8,
    pub gid: Gid,
    pub kind: GidKind,
    pub netdev: Option<String>,
    pub why: String,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum GidError {
    #[error("its GID table is empty: the interface has no address, or belongs to another network namespace")]
    Empty,
    #[error("GID index {index} (NCCL_IB_GID_INDEX) is empty; filled are {filled}; unset it to have {usable} chosen")]
    IndexEmpty { index: u8, filled: String, usable: String },
    #[error("all its GIDs lie behind index 255, which is the last that a connection can name: {filled}")]
    OutOfReach { filled: String },
    #[error("no GID lies in {range} (NCCL_IB_ADDR_RANGE); the table has {table}")]
    OutOfRange { range: IpNet, table: String },
}

fn listing(entries: &[GidEntry]) -> String {
    entries.iter().map(|e| format!("{} ({}, {})", e.index, e.gid, e.kind)).collect::<Vec<_>>().join(", ")
}

/// How far an address reaches; the better comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    Routable,
    LinkV4,
    LinkV6,
}

/// How an entry's RoCE version stands to the wanted one; the better comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Version {
    Wanted,
    Unread,
    Other,
}

/// How good an entry is; smaller is better. The last is whether the address family is not the wanted one.
fn rank(entry: &GidEntry, policy: &GidPolicy) -> (Reach, Version, bool) {
    let reach = match entry.gid.address() {
        _ if !entry.gid.is_link_local() => Reach::Routable,
        IpAddr::V4(_) => Reach::LinkV4,
        IpAddr::V6(_) => Reach::LinkV6,
    };
    let version = match (entry.kind, policy.version) {
        (GidKind::RoceV1, RoceVersion::V1) | (GidKind::RoceV2, RoceVersion::V2) => Version::Wanted,
        (GidKind::Unknown, _) => Version::Unread,
        _ => Version::Other,
    };
    (reach, version, entry.gid.family() != policy.family)
}

/// The GID to use of a table (empty entries may be left out of it).
pub fn choose(entries: &[GidEntry], link_layer: LinkLayer, policy: &GidPolicy) -> Result<Choice, GidError> {
    let filled: Vec<GidEntry> = entries.iter().filter(|e| !e.gid.is_zero()).cloned().collect();
    let (filled, beyond): (Vec<_>, Vec<_>) = filled.into_iter().partition(|e| u8::try_from(e.index).is_ok());
    if filled.is_empty() && !beyond.is_empty() {
        return Err(GidError::OutOfReach { filled: listing(&beyond) });
    }
    let made = |entry: &GidEntry, why: String| Choice {
        // Those that do not fit were left out.
        index: u8::try_from(entry.index).unwrap_or(u8::MAX),
        gid: entry.gid,
        kind: entry.kind,
        netdev: entry.netdev.clone(),
        why,
    };
    if link_layer != LinkLayer::Ethernet {
        let first = filled.iter().min_by_key(|e| e.index).ok_or(GidError::Empty)?;
        return Ok(made(first, "InfiniBand uses the first".to_owned()));
    }
    let best = |among: &[&GidEntry]| among.iter().min_by_key(|e| (rank(e, policy), e.index)).map(|e| (*e).clone());
    let everything: Vec<&GidEntry> = filled.iter().collect();
    let Some(automatic) = best(&everything) else { return Err(GidError::Empty) };
    if let Some(index) = policy.index {
        let Some(entry) = filled.iter().find(|e| e.index == u32::from(index)) else {
            return Err(GidError::IndexEmpty {
                index,
                filled: listing(&filled),
                usable: format!("index {}", automatic.index),
            });
        };
        let mut why = "set by NCCL_IB_GID_INDEX".to_owned();
        if rank(entry, policy).0 > rank(&automatic, policy).0 {
            why += &format!("; it is link-local, index {} ({}) is not", automatic.index, automatic.gid);
        }
        return Ok(made(entry, why));
    }
    if let Some(range) = policy.range {
        let inside: Vec<&GidEntry> = everything.iter().copied().filter(|e| range.contains(&e.gid.address())).collect();
        let Some(entry) = best(&inside) else {
            return Err(GidError::OutOfRange { range, table: listing(&filled) });
        };
        return Ok(made(&entry, format!("best in NCCL_IB_ADDR_RANGE {range}")));
    }
    let why = match rank(&automatic, policy) {
        (Reach::LinkV4 | Reach::LinkV6, ..) => "only link-local addresses: it reaches no further than the link",
        (_, Version::Wanted, false) => "wanted family and RoCE version",
        (_, Version::Wanted, true) => "no address of the wanted family, wanted RoCE version",
        (_, Version::Unread, _) => "its RoCE version can't be read",
        (_, Version::Other, _) => "no address in the wanted RoCE version",
    };
    Ok(made(&automatic, why.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const AUTO: GidPolicy = GidPolicy { index: None, version: RoceVersion::V2, family: AddrFamily::V4, range: None };

    fn table(rows: &[(u32, &str, GidKind)]) -> Vec<GidEntry> {
        rows.iter()
            .map(|&(index, address, kind)| {
                let gid = match address.parse::<IpAddr>().expect("an address") {
                    IpAddr::V4(a) => Gid::from(a),
                    IpAddr::V6(a) => Gid(a.octets()),
                };
                GidEntry { index, gid, kind, netdev: Some("eth0".into()) }
            })
            .collect()
    }

    fn pick(rows: &[(u32, &str, GidKind)], policy: &GidPolicy) -> Result<u32, GidError> {
        choose(&table(rows), LinkLayer::Ethernet, policy).map(|c| u32::from(c.index))
    }

    use GidKind::{RoceV1, RoceV2, Unknown};

    const POD: [(u32, &str, GidKind); 8] = [
        (0, "::", Unknown),
        (1, "::", Unknown),
        (2, "::", Unknown),
        (3, "::", Unknown),
        (4, "fe80::1", RoceV1),
        (5, "fe80::1", RoceV2),
        (6, "10.152.0.12", RoceV1),
        (7, "10.152.0.12", RoceV2),
    ];

    #[test]
    fn the_usual_table_gives_the_routable_v2_address() {
        let rows = [(0, "fe80::1", RoceV1), (1, "fe80::1", RoceV2), (2, "10.0.0.1", RoceV1), (3, "10.0.0.1", RoceV2)];
        assert_eq!(pick(&rows, &AUTO), Ok(3));
        let choice = choose(&table(&rows), LinkLayer::Ethernet, &AUTO).expect("one");
        assert_eq!((choice.gid.to_string().as_str(), choice.netdev.as_deref()), ("10.0.0.1", Some("eth0")));
    }

    #[test]
    fn entries_of_other_namespaces_are_passed_over() {
        assert_eq!(pick(&POD, &AUTO), Ok(7));
    }

    #[test]
    fn a_forced_index_that_is_empty_names_the_usable_ones() {
        let text = pick(&POD, &GidPolicy { index: Some(3), ..AUTO }).expect_err("empty").to_string();
        assert!(text.contains("index 3"), "{text}");
        for index in ["4 (", "5 (", "6 (", "7 (", "index 7"] {
            assert!(text.contains(index), "{text}");
        }
        assert_eq!(pick(&POD, &GidPolicy { index: Some(6), ..AUTO }), Ok(6));
    }

    #[test]
    fn an_all_ipv6_table_needs_no_setting() {
        let rows = [(0, "fe80::1", RoceV1), (1, "fe80::1", RoceV2), (2, "fd93::5", RoceV1), (3, "fd93::5", RoceV2)];
        assert_eq!(pick(&rows, &AUTO), Ok(3));
    }

    #[test]
    fn private_ranges_are_fabric_addresses() {
        for address in ["10.1.2.3", "172.16.9.1", "192.168.7.1", "100.64.1.1", "200.0.209.6"] {
            assert_eq!(pick(&[(1, "fe80::2", RoceV2), (3, address, RoceV2)], &AUTO), Ok(3), "{address}");
        }
    }

    #[test]
    fn an_index_that_does_not_fit_an_address_vector_is_left_out() {
        assert_eq!(pick(&[(255, "fe80::1", RoceV2), (256, "10.0.0.1", RoceV2)], &AUTO), Ok(255));
        let text = pick(&[(256, "10.0.0.1", RoceV2), (300, "10.0.0.2", RoceV1)], &AUTO).expect_err("none").to_string();
        assert!(text.contains("behind index 255") && text.contains("256 (10.0.0.1, RoCE v2)"), "{text}");
        let infiniband = choose(&table(&[(256, "fe80::2:c903:1", GidKind::Ib)]), LinkLayer::InfiniBand, &AUTO);
        assert!(matches!(infiniband, Err(GidError::OutOfReach { .. })), "{infiniband:?}");
    }

    #[test]
    fn link_local_comes_last_and_says_so() {
        assert_eq!(pick(&[(1, "169.254.3.4", RoceV2), (2, "fd00::1", RoceV1)], &AUTO), Ok(2));
        assert_eq!(pick(&[(0, "fe80::1", RoceV2), (1, "169.254.3.4", RoceV2)], &AUTO), Ok(1));
        let only = choose(&table(&[(0, "fe80::1", RoceV2)]), LinkLayer::Ethernet, &AUTO).expect("one");
        assert!(only.why.contains("link-local"), "{}", only.why);
    }

    /// Where sysfs does not show the types, an address may still be of the wanted version; one known not to be comes after.
    #[test]
    fn an_unread_version_may_be_the_wanted_one() {
        assert_eq!(pick(&[(0, "10.0.0.1", RoceV1), (1, "10.0.0.1", Unknown)], &AUTO), Ok(1));
        assert_eq!(pick(&[(0, "10.0.0.1", Unknown), (1, "fd00::1", RoceV2)], &AUTO), Ok(1));
        assert_eq!(pick(&[(3, "10.0.0.2", RoceV2), (2, "10.0.0.1", RoceV2)], &AUTO), Ok(2));
    }

    #[test]
    fn a_forced_link_local_index_is_taken_and_told() {
        let choice = choose(&table(&POD), LinkLayer::Ethernet, &GidPolicy { index: Some(5), ..AUTO }).expect("filled");
        assert_eq!(choice.index, 5);
        assert!(choice.why.contains("link-local") && choice.why.contains("index 7"), "{}", choice.why);
    }

    #[test]
    fn wishes_are_followed() {
        let rows = [(0, "10.0.0.1", RoceV1), (1, "10.0.0.1", RoceV2), (2, "fd00::1", RoceV2), (3, "10.9.0.1", RoceV2)];
        assert_eq!(pick(&rows, &GidPolicy { version: RoceVersion::V1, ..AUTO }), Ok(0));
        assert_eq!(pick(&rows, &GidPolicy { family: AddrFamily::V6, ..AUTO }), Ok(2));
        assert_eq!(pick(&rows, &GidPolicy { range: "10.9.0.0/16".parse().ok(), ..AUTO }), Ok(3));
        let text = pick(&rows, &GidPolicy { range: "11.0.0.0/8".parse().ok(), ..AUTO }).expect_err("none").to_string();
        assert!(text.contains("11.0.0.0/8") && text.contains("10.9.0.1"), "{text}");
    }

    #[test]
    fn infiniband_takes_the_first_whatever_the_lid() {
        let entries = table(&[(0, "fe80::2:c903:1", GidKind::Ib)]);
        assert_eq!(choose(&entries, LinkLayer::InfiniBand, &AUTO).map(|c| c.index), Ok(0));
        let two = table(&[(1, "fd00::1", GidKind::Ib), (0, "fe80::2:c903:1", GidKind::Ib)]);
        let forced = GidPolicy { index: Some(1), ..AUTO };
        assert_eq!(choose(&two, LinkLayer::InfiniBand, &forced).map(|c| c.index), Ok(0));
        assert_eq!(choose(&[], LinkLayer::Ethernet, &AUTO), Err(GidError::Empty));
    }
}
