//! Which IP interface serves connection set-up.
//!
//! NCCL_SOCKET_IFNAME decides where it is set: the grammar of [`super::names`], or an IP address. Else the interfaces are
//! ranked, best first: names that begin with `ib`; the subnet of NCCL_COMM_ID; any other; then those that rarely lead to
//! other hosts: bridges and tunnels of containers and hypervisors, link-local addresses, and last the loopback.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::config::{AddrFamily, Config};

use super::names::NameList;

/// An address of an interface.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Iface {
    pub name: String,
    pub addr: IpAddr,
    pub prefix: u8,
    /// IFF_UP and IFF_RUNNING.
    pub running: bool,
    pub loopback: bool,
}

/// The interface to use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    pub name: String,
    pub addr: IpAddr,
}

/// Why there is none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NoIface(String);

impl fmt::Display for NoIface {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The machine's interfaces with IPv4 or IPv6 addresses.
pub fn list() -> Vec<Iface> {
    use nix::net::if_::InterfaceFlags;
    let Ok(all) = nix::ifaddrs::getifaddrs() else { return Vec::new() };
    all.filter_map(|i| {
        let address = i.address?;
        let addr = match (address.as_sockaddr_in(), address.as_sockaddr_in6()) {
            (Some(v4), _) => IpAddr::V4(v4.ip()),
            (None, Some(v6)) => IpAddr::V6(v6.ip()),
            (None, None) => return None,
        };
        let mask = i.netmask.and_then(|m| match (m.as_sockaddr_in(), m.as_sockaddr_in6()) {
            (Some(v4), _) => Some(v4.ip().to_bits().leading_ones()),
            (None, Some(v6)) => Some(v6.ip().to_bits().leading_ones()),
            (None, None) => None,
        });
        Some(Iface {
            name: i.interface_name,
            addr,
            prefix: u8::try_from(mask.unwrap_or(0)).unwrap_or(0),
            running: i.flags.contains(InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING),
            loopback: i.flags.contains(InterfaceFlags::IFF_LOOPBACK),
        })
    })
    .collect()
}

fn is_link_local(addr: IpAddr) -> bool {
    match addr {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.segments()[0] & 0xffc0 == 0xfe80,
    }
}

/// How good an address is without a word from the user; smaller is better.
fn rank(i: &Iface, hint: Option<IpAddr>) -> u8 {
    let in_hint = hint.is_some_and(|h| IpNet::new(i.addr, i.prefix).is_ok_and(|net| i.prefix > 0 && net.contains(&h)));
    let begins = |names: &[&str]| names.iter().any(|n| i.name.starts_with(n));
    if i.addr.is_loopback() {
        return 8;
    }
    if is_link_local(i.addr) {
        return 7;
    }
    match () {
        () if begins(&["ib"]) => 0,
        () if in_hint => 1,
        () if begins(&["virbr"]) => 6,
        () if begins(&["docker"]) => 5,
        () if begins(&["veth", "br-", "cni", "flannel", "cali", "tunl", "kube", "cilium", "vxlan", "tun", "tap"]) => 4,
        // A global address may sit on lo where routing runs down to the host.
        () if i.loopback => 3,
        () => 2,
    }
}

/// Chooses the interface; `config` brings NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY and NCCL_COMM_ID.
pub fn choose(all: &[Iface], config: &Config) -> Result<Choice, NoIface> {
    let family = |a: IpAddr| match config.socket_family {
        None => true,
        Some(AddrFamily::V4) => a.is_ipv4(),
        Some(AddrFamily::V6) => a.is_ipv6(),
    };
    let found = |i: &Iface| Choice { name: i.name.clone(), addr: i.addr };
    let seen = || {
        let list: Vec<String> = all
            .iter()
            .map(|i| format!("{} {}{}", i.name, i.addr, if i.running { "" } else { " (not running)" }))
            .collect();
        if list.is_empty() {
            "no interface has an address".to_owned()
        } else {
            format!("there are {}", list.join(", "))
        }
    };
    let usable: Vec<&Iface> = all.iter().filter(|i| i.running && family(i.addr)).collect();
    let hint = config.comm_id.as_deref().and_then(|id| id.parse::<SocketAddr>().ok()).map(|a| a.ip());
    let best = |among: &[&Iface]| {
        among.iter().enumerate().min_by_key(|(n, i)| (rank(i, hint), i.addr.is_ipv6(), *n)).map(|(_, i)| found(i))
    };
    if let Some(wish) = &config.socket_ifname {
        if let Ok(addr) = wish.trim().parse::<IpAddr>() {
            return usable.iter().find(|i| i.addr == addr).map(|i| found(i)).ok_or_else(|| {
                NoIface(format!("NCCL_SOCKET_IFNAME={wish} is no running interface's address; {}", seen()))
            });
        }
        let (names, _) = NameList::parse("NCCL_SOCKET_IFNAME", wish);
        if names.exclude {
            let left: Vec<&Iface> =
                usable.iter().copied().filter(|i| !names.items.iter().any(|n| names.names(n, &i.name))).collect();
            return best(&left)
                .ok_or_else(|| NoIface(format!("NCCL_SOCKET_IFNAME={wish} leaves no interface; {}", seen())));
        }
        // The order of the list counts.
        for item in &names.items {
            let named: Vec<&Iface> = usable.iter().copied().filter(|i| names.names(item, &i.name)).collect();
            if let Some(choice) = best(&named) {
                return Ok(choice);
            }
        }
        return Err(NoIface(format!("NCCL_SOCKET_IFNAME={wish} matches no running interface; {}", seen())));
    }
    best(&usable).ok_or_else(|| NoIface(format!("none is up and running; {}", seen())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn iface(name: &str, addr: &str) -> Iface {
        let addr: IpAddr = addr.parse().expect("an address");
        Iface { name: name.into(), addr, prefix: 24, running: true, loopback: name == "lo" }
    }

    fn pick(all: &[Iface], set: &[(&str, &str)]) -> Result<(String, String), NoIface> {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let (config, _) = Config::load(&find, std::iter::empty());
        choose(all, &config).map(|c| (c.name, c.addr.to_string()))
    }

    fn machine() -> Vec<Iface> {
        vec![
            iface("lo", "127.0.0.1"),
            iface("veth0", "169.254.3.1"),
            iface("docker0", "172.17.0.1"),
            iface("bond0", "10.1.0.5"),
            iface("bond0.2973", "10.2.0.5"),
            iface("virbr0", "192.168.122.1"),
        ]
    }

    #[test]
    fn virtual_and_link_local_interfaces_come_last() {
        assert_eq!(pick(&machine(), &[]).expect("one").0, "bond0");
        assert_eq!(pick(&machine()[..3], &[]).expect("one").0, "docker0");
        assert_eq!(pick(&machine()[..2], &[]).expect("one").0, "veth0");
        assert_eq!(pick(&machine()[..1], &[]).expect("one").0, "lo");
        let mut with_ib = machine();
        with_ib.push(iface("ib0", "10.9.0.1"));
        assert_eq!(pick(&with_ib, &[]).expect("one").0, "ib0");
    }

    #[test]
    fn the_users_word_decides() {
        let m = machine();
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "=bond0.2973")]).expect("one").0, "bond0.2973");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "bond0")]).expect("one").0, "bond0");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "^bond,lo")]).expect("one").0, "docker0");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "eth,docker")]).expect("one").0, "docker0");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "10.2.0.5")]).expect("one").0, "bond0.2973");
        let text = pick(&m, &[("NCCL_SOCKET_IFNAME", "=eth0")]).expect_err("none").to_string();
        assert!(text.contains("=eth0") && text.contains("bond0 10.1.0.5"), "{text}");
    }

    #[test]
    fn the_roots_subnet_is_a_hint_and_the_family_a_condition() {
        let m = machine();
        assert_eq!(pick(&m, &[("NCCL_COMM_ID", "10.2.0.77:5000")]).expect("one").0, "bond0.2973");
        assert!(pick(&m, &[("NCCL_SOCKET_FAMILY", "AF_INET6")]).is_err());
        let down = [Iface { running: false, ..iface("eth0", "10.0.0.1") }];
        assert!(pick(&down, &[]).expect_err("none").to_string().contains("not running"));
    }

    /// Routing down to the host: the only usable address sits on lo beside 127.0.0.1.
    #[test]
    fn a_global_address_on_lo_is_used() {
        let m = [iface("lo", "127.0.0.1"), iface("lo", "10.255.0.7")];
        assert_eq!(pick(&m, &[]).expect("one").1, "10.255.0.7");
    }

    #[test]
    fn this_machine_has_a_loopback() {
        assert!(list().iter().any(|i| i.loopback && i.addr.is_loopback()));
    }
}
