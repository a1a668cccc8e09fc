//! Rails: groups of ports that one connection uses together, and which rail of this side talks to which of the peer's.

use crate::config::Warning;
use crate::transfer::MAX_RAILS;

use super::gid::Gid;
use super::port::LinkLayer;

/// A port that is usable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Available<'a> {
    pub name: &'a str,
    pub port: u8,
    /// Mb/s.
    pub speed: u32,
}

/// What NCCL is told of as one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Names joined by "+".
    pub name: String,
    /// Mb/s, of all members.
    pub speed: u32,
    /// Indices of the available ports.
    pub members: Vec<usize>,
}

const VARIABLE: &str = "NCCL_NET_RDMA_RAILS";

/// Forms the groups of `NCCL_NET_RDMA_RAILS` (`a+b,c:1+d:1`); every port that is not named is a group of its own. The order
/// is that of the ports.
pub fn group(text: &str, available: &[Available<'_>]) -> (Vec<Group>, Vec<Warning>) {
    let mut warnings = Vec::new();
    let mut taken = vec![false; available.len()];
    let mut groups = Vec::new();
    for item in text.split(',').map(str::trim).filter(|i| !i.is_empty()) {
        match one_group(item, available, &taken) {
            Ok(members) => {
                for &i in &members {
                    taken[i] = true;
                }
                groups.push(members);
            }
            Err(why) => warnings.push(Warning(format!("{VARIABLE}={text}: the group {item:?} is ignored: {why}"))),
        }
    }
    groups.extend((0..available.len()).filter(|&i| !taken[i]).map(|i| vec![i]));
    groups.sort_by_key(|members| members.iter().min().copied());
    let mut named: Vec<Group> = groups
        .into_iter()
        .map(|members| Group {
            name: members.iter().map(|&i| available[i].name).collect::<Vec<_>>().join("+"),
            speed: members.iter().map(|&i| available[i].speed).sum(),
            members,
        })
        .collect();
    // NCCL folds devices of one name into one; two ports of a device are told apart by number.
    for i in 0..named.len() {
        if named.iter().filter(|g| g.name == named[i].name).count() > 1 {
            for j in (i..named.len()).rev() {
                if j == i || named[j].name == named[i].name {
                    let ports =
                        named[j].members.iter().map(|&m| format!("{}:{}", available[m].name, available[m].port));
                    let full = ports.collect::<Vec<_>>().join("+");
                    named[j].name = full;
                }
            }
        }
    }
    (named, warnings)
}

fn one_group(item: &str, available: &[Available<'_>], taken: &[bool]) -> Result<Vec<usize>, String> {
    let mut members = Vec::new();
    for rail in item.split('+').map(str::trim) {
        let (name, port) = match rail.split_once(':') {
            None => (rail, None),
            Some((name, port)) => {
                let digits = port.bytes().all(|b| b.is_ascii_digit());
                let port = port.parse::<u8>().ok().filter(|_| digits);
                (name, Some(port.ok_or_else(|| format!("{rail:?} has no port number"))?))
            }
        };
        let found = available.iter().position(|a| a.name == name && port.is_none_or(|p| p == a.port));
        let Some(i) = found else {
            let have: Vec<String> = available.iter().map(|a| format!("{}:{}", a.name, a.port)).collect();
            return Err(format!("{rail:?} is not a usable port; there are {}", have.join(", ")));
        };
        if taken[i] || members.contains(&i) {
            return Err(format!("{rail:?} is named twice"));
        }
        members.push(i);
    }
    if members.len() > MAX_RAILS {
        return Err(format!("it has {} rails, and {MAX_RAILS} are the most", members.len()));
    }
    Ok(members)
}

/// Where a rail is in its fabric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RailAddr {
    pub link_layer: LinkLayer,
    pub gid: Gid,
    pub lid: u16,
}

impl RailAddr {
    /// Addresses with equal subnets reach each other without a router: IPv4 /24, else the upper 64 bits.
    /// InfiniBand and RoCE never do, though both may have the prefix fe80::.
    fn subnet(&self) -> (LinkLayer, [u8; 15]) {
        let mut subnet = [0; 15];
        let keep = if self.gid.address().is_ipv4() { 15 } else { 8 };
        subnet[..keep].copy_from_slice(&self.gid.0[..keep]);
        (self.link_layer, subnet)
    }
}

/// Pairs the rails of two sides: those of one subnet first, in order, then what is left by position. As many pairs as the
/// side with fewer rails has; each rail at most once. Both sides come to the same pairs.
pub fn pair(a: &[RailAddr], b: &[RailAddr]) -> Vec<(usize, usize)> {
    let mut free_a: Vec<usize> = (0..a.len()).collect();
    let mut free_b: Vec<usize> = (0..b.len()).collect();
    let mut pairs = Vec::new();
    for (i, rail) in a.iter().enumerate() {
        if let Some(at) = free_b.iter().position(|&j| rail.subnet() == b[j].subnet()) {
            pairs.push((i, free_b.remove(at)));
            free_a.retain(|&x| x != i);
        }
    }
    pairs.extend(free_a.into_iter().zip(free_b));
    pairs.sort_unstable();
    pairs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::net::Ipv4Addr;

    const PORTS: [Available<'static>; 4] = [
        Available { name: "mlx5_0", port: 1, speed: 400_000 },
        Available { name: "mlx5_1", port: 1, speed: 400_000 },
        Available { name: "mlx5_2", port: 1, speed: 200_000 },
        Available { name: "mlx5_3", port: 1, speed: 200_000 },
    ];

    fn names(text: &str) -> (Vec<(String, u32)>, usize) {
        let (groups, warnings) = group(text, &PORTS);
        (groups.into_iter().map(|g| (g.name, g.speed)).collect(), warnings.len())
    }

    #[test]
    fn unset_each_port_is_a_device() {
        let (groups, warnings) = names("");
        assert_eq!(groups.iter().map(|g| g.0.as_str()).collect::<Vec<_>>(), ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3"]);
        assert_eq!(warnings, 0);
    }

    #[test]
    fn groups_join_names_and_add_speeds() {
        let (groups, warnings) = names("mlx5_0+mlx5_1, mlx5_2:1+mlx5_3");
        assert_eq!(groups, [("mlx5_0+mlx5_1".to_owned(), 800_000), ("mlx5_2+mlx5_3".to_owned(), 400_000)]);
        assert_eq!(warnings, 0);
    }

    #[test]
    fn a_wrong_group_is_told_and_its_ports_stay() {
        for text in ["mlx5_0+mlx5_9", "mlx5_0+mlx5_0", "mlx5_0:2+mlx5_1", "mlx5_0:x", "mlx5_0:+1", "mlx5_0+"] {
            assert_eq!(names(text).0.len(), 4, "{text}");
            assert_eq!(names(text).1, 1, "{text}");
        }
    }

    #[test]
    fn two_ports_of_a_device_have_names_of_their_own() {
        let ports = [
            Available { name: "mlx4_0", port: 1, speed: 1 },
            Available { name: "mlx4_0", port: 2, speed: 1 },
            Available { name: "mlx4_1", port: 1, speed: 1 },
        ];
        let (groups, _) = group("", &ports);
        assert_eq!(groups.iter().map(|g| g.name.as_str()).collect::<Vec<_>>(), ["mlx4_0:1", "mlx4_0:2", "mlx4_1"]);
    }

    fn at(address: [u8; 4]) -> RailAddr {
        RailAddr { link_layer: LinkLayer::Ethernet, gid: Gid::from(Ipv4Addr::from(address)), lid: 0 }
    }

    #[test]
    fn rails_pair_by_subnet_then_by_position() {
        let a = [at([10, 0, 1, 1]), at([10, 0, 2, 1])];
        let crossed = [at([10, 0, 2, 2]), at([10, 0, 1, 2])];
        assert_eq!(pair(&a, &crossed), [(0, 1), (1, 0)]);
        let elsewhere = [at([10, 9, 1, 2]), at([10, 9, 2, 2])];
        assert_eq!(pair(&a, &elsewhere), [(0, 0), (1, 1)]);
        assert_eq!(pair(&a, &crossed[..1]), [(1, 0)]);
        assert_eq!(pair(&[], &a), []);
    }

    /// Both have the prefix that ports have before anyone gives them another.
    #[test]
    fn infiniband_and_roce_are_no_subnet() {
        let link_local = |link_layer, last| {
            let mut gid = [0; 16];
            (gid[0], gid[1], gid[15]) = (0xfe, 0x80, last);
            RailAddr { link_layer, gid: Gid(gid), lid: 0 }
        };
        let a = [link_local(LinkLayer::Ethernet, 1), link_local(LinkLayer::InfiniBand, 2)];
        let b = [link_local(LinkLayer::InfiniBand, 3), link_local(LinkLayer::Ethernet, 4)];
        assert_eq!(pair(&a, &b), [(0, 1), (1, 0)]);
    }

    fn rails() -> impl Strategy<Value = Vec<RailAddr>> {
        prop::collection::vec((0u8..3, 1u8..9).prop_map(|(net, host)| at([10, 0, net, host])), 0..=8)
    }

    proptest! {
        #[test]
        fn both_sides_come_to_the_same_pairs(a in rails(), b in rails()) {
            let pairs = pair(&a, &b);
            prop_assert_eq!(pairs.len(), a.len().min(b.len()));
            let mut mirrored: Vec<_> = pair(&b, &a).into_iter().map(|(x, y)| (y, x)).collect();
            mirrored.sort_unstable();
            prop_assert_eq!(&pairs, &mirrored);
            let once = |mut side: Vec<usize>| { side.sort_unstable(); side.windows(2).all(|w| w[0] != w[1]) };
            prop_assert!(once(pairs.iter().map(|p| p.0).collect()) && once(pairs.iter().map(|p| p.1).collect()));
        }

        #[test]
        fn every_port_is_in_one_group(text in "(mlx5_[0-4](:[0-2])?[+,]?){0,6}|.{0,40}") {
            let (groups, _) = group(&text, &PORTS);
            let mut members: Vec<usize> = groups.iter().flat_map(|g| g.members.clone()).collect();
            members.sort_unstable();
            prop_assert_eq!(members, (0..PORTS.len()).collect::<Vec<_>>());
        }
    }
}
