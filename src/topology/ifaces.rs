//! Which IP interface serves connection set-up.
//!
//! NCCL_SOCKET_IFNAME decides where it is set: the grammar of [`super::names`], or an IP address. Else the interfaces are
//! ranked, best first: names that begin with `ib`; the subnet of NCCL_COMM_ID; any other; then those that rarely lead to
//! other hosts: bridges and tunnels of containers and hypervisors, link-local addresses, and last the loopback. Of a list
//! the first item that has an interface counts, and in it the interface of just that name before longer ones.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

use ipnet::IpNet;

use crate::config::{AddrFamily, Config, Warning};

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
    pub why: &'static str,
    /// The others, each with why it is not the one.
    pub rejected: Vec<Rejected>,
    /// What is wrong with NCCL_SOCKET_IFNAME though an interface was found.
    pub warnings: Vec<Warning>,
}

/// An interface that is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rejected {
    pub name: String,
    pub addr: IpAddr,
    pub why: &'static str,
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} ({})", self.name, self.addr, self.why)
    }
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

/// What an interface is, as far as the choice goes; the better comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Standing {
    Ib,
    RootSubnet,
    Plain,
    GlobalOnLoopback,
    Tunnel,
    Docker,
    Virbr,
    LinkLocal,
    Loopback,
}

impl Standing {
    fn of(i: &Iface, root: Option<IpAddr>) -> Self {
        let in_subnet =
            root.is_some_and(|h| i.prefix > 0 && IpNet::new(i.addr, i.prefix).is_ok_and(|net| net.contains(&h)));
        let begins = |names: &[&str]| names.iter().any(|n| i.name.starts_with(n));
        match () {
            () if i.addr.is_loopback() => Self::Loopback,
            () if is_link_local(i.addr) => Self::LinkLocal,
            () if begins(&["ib"]) => Self::Ib,
            () if in_subnet => Self::RootSubnet,
            () if begins(&["virbr"]) => Self::Virbr,
            () if begins(&["docker"]) => Self::Docker,
            () if begins(&["veth", "br-", "cni", "flannel", "cali", "tun", "kube", "cilium", "vxlan", "tap"]) => {
                Self::Tunnel
            }
            // A global address may sit on lo where routing runs down to the host.
            () if i.loopback => Self::GlobalOnLoopback,
            () => Self::Plain,
        }
    }

    fn words(self) -> &'static str {
        match self {
            Self::Ib => "its name begins with ib",
            Self::RootSubnet => "in the subnet of NCCL_COMM_ID",
            Self::Plain => "neither virtual nor link-local",
            Self::GlobalOnLoopback => "a global address on the loopback interface",
            Self::Tunnel => "a bridge or tunnel of containers",
            Self::Docker => "docker's bridge",
            Self::Virbr => "a bridge of virtual machines",
            Self::LinkLocal => "link-local",
            Self::Loopback => "loopback: reaches this host only",
        }
    }
}

/// What NCCL_SOCKET_IFNAME asks for.
enum Wish {
    Nothing,
    Address(IpAddr),
    Names(NameList),
}

impl Wish {
    fn parse(text: Option<&str>) -> (Self, Vec<Warning>) {
        let Some(text) = text else { return (Self::Nothing, Vec::new()) };
        if let Ok(addr) = text.trim().parse() {
            return (Self::Address(addr), Vec::new());
        }
        let (names, warnings) = NameList::parse(VARIABLE, text);
        // Without a name in it NCCL takes it as unset.
        let unset = names.items.is_empty() && warnings.is_empty();
        (if unset { Self::Nothing } else { Self::Names(names) }, warnings)
    }

    /// Where an interface stands in the list, and whether only as a longer name than was given; None if it is left out.
    fn place(&self, i: &Iface) -> Option<(usize, bool)> {
        match self {
            Self::Nothing => Some((0, false)),
            Self::Address(addr) => (*addr == i.addr).then_some((0, false)),
            Self::Names(list) => {
                let at = list.items.iter().position(|item| list.names(item, &i.name));
                match (at, list.exclude) {
                    (None, true) => Some((0, false)),
                    (Some(at), false) => Some((at, list.items[at] != i.name)),
                    _ => None,
                }
            }
        }
    }
}

const VARIABLE: &str = "NCCL_SOCKET_IFNAME";

/// Why an interface can't be used whatever its name; None if it can.
fn unusable(i: &Iface, family: Option<AddrFamily>) -> Option<&'static str> {
    match (i.addr, family) {
        _ if !i.running => Some("not running"),
        (IpAddr::V4(_), Some(AddrFamily::V6)) | (IpAddr::V6(_), Some(AddrFamily::V4)) => {
            Some("not of the family in NCCL_SOCKET_FAMILY")
        }
        // It means nothing to the peer without the peer's own name of the link.
        (IpAddr::V6(_), _) if is_link_local(i.addr) => Some("IPv6 link-local"),
        _ => None,
    }
}

/// Chooses the interface; `config` brings NCCL_SOCKET_IFNAME, NCCL_SOCKET_FAMILY and NCCL_COMM_ID.
pub fn choose(all: &[Iface], config: &Config) -> Result<Choice, NoIface> {
    let (wish, warnings) = Wish::parse(config.socket_ifname.as_deref());
    let root = config.comm_id.as_deref().and_then(|id| id.parse::<SocketAddr>().ok()).map(|a| a.ip());
    let judge = |i: &Iface| match (unusable(i, config.socket_family), wish.place(i)) {
        (Some(why), _) => Err(why),
        (None, None) => Err("not selected by NCCL_SOCKET_IFNAME"),
        (None, Some(place)) => Ok((place, Standing::of(i, root), i.addr.is_ipv6())),
    };
    let rejected = |taken: Option<usize>| -> Vec<Rejected> {
        let others = all.iter().enumerate().filter(|(n, _)| Some(*n) != taken);
        let why = |i| judge(i).map_or_else(|why| why, |(_, standing, _)| standing.words());
        others.map(|(_, i)| Rejected { name: i.name.clone(), addr: i.addr, why: why(i) }).collect()
    };
    let best =
        all.iter().enumerate().filter_map(|(n, i)| Some((judge(i).ok()?, n, i))).min_by_key(|(rank, n, _)| (*rank, *n));
    let Some(((_, standing, _), n, i)) = best else {
        let set = config.socket_ifname.as_deref().map_or_else(String::new, |wish| format!("{VARIABLE}={wish}; "));
        let seen: Vec<String> = rejected(None).iter().map(ToString::to_string).collect();
        let seen = if seen.is_empty() { "no interface has an address".to_owned() } else { seen.join(", ") };
        let wrong: String = warnings.iter().map(|w| format!("; {w}")).collect();
        return Err(NoIface(format!("none can be used: {set}{seen}{wrong}")));
    };
    let why = match wish {
        Wish::Nothing => standing.words(),
        Wish::Address(_) | Wish::Names(NameList { exclude: false, .. }) => "named by NCCL_SOCKET_IFNAME",
        Wish::Names(_) => "best of what NCCL_SOCKET_IFNAME leaves",
    };
    Ok(Choice { name: i.name.clone(), addr: i.addr, why, rejected: rejected(Some(n)), warnings })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    /// A prefix takes bond0.2973 for bond0; the one that was written comes first, wherever the kernel lists it.
    #[test]
    fn the_name_itself_comes_before_longer_ones() {
        let m = [iface("bond0.2973", "10.2.0.5"), iface("bond0", "10.1.0.5")];
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "bond0")]).expect("one").0, "bond0");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "^bond0")]).ok(), None);
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "^=bond0")]).expect("one").0, "bond0.2973");
        assert_eq!(pick(&m, &[("NCCL_SOCKET_IFNAME", "=")]), pick(&m, &[]));
    }

    #[test]
    fn the_choice_says_why_and_what_else_there_was() {
        let mut m = machine();
        m.push(Iface { running: false, ..iface("eth9", "10.4.0.1") });
        m.push(iface("eth8", "fe80::8"));
        let choice = |set: &[(&str, &str)]| {
            let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
            choose(&m, &Config::load(&find, std::iter::empty()).0)
        };
        let free = choice(&[]).expect("one");
        assert_eq!((free.name.as_str(), free.why), ("bond0", "neither virtual nor link-local"));
        assert_eq!(free.rejected.len(), m.len() - 1);
        let why = |name: &str| free.rejected.iter().find(|r| r.name == name).map(|r| r.why);
        assert_eq!(why("lo"), Some("loopback: reaches this host only"));
        assert_eq!(why("veth0"), Some("link-local"));
        assert_eq!(why("docker0"), Some("docker's bridge"));
        assert_eq!(why("eth9"), Some("not running"));
        assert_eq!(why("eth8"), Some("IPv6 link-local"));

        let told = choice(&[("NCCL_SOCKET_IFNAME", "^=docker0,^=bond0")]).expect("one");
        assert_eq!((told.name.as_str(), told.warnings.len()), ("bond0", 1));
        assert!(told.warnings[0].0.contains("^=bond0"), "{:?}", told.warnings);
        let text = choice(&[("NCCL_SOCKET_IFNAME", "==bond0")]).expect_err("nothing readable").to_string();
        assert!(text.contains("in front of the whole list"), "{text}");
    }

    /// A machine without a network still has IPv6 link-local addresses; no peer can call them, so the loopback serves.
    #[test]
    fn an_ipv6_link_local_address_is_never_used() {
        let m = [iface("lo", "127.0.0.1"), iface("eth0", "fe80::1")];
        assert_eq!(pick(&m, &[]).expect("one").0, "lo");
        assert!(pick(&m, &[("NCCL_SOCKET_IFNAME", "eth0")]).expect_err("none").to_string().contains("IPv6 link-local"));
    }

    proptest! {
        #[test]
        fn no_text_panics(wish in ".{0,40}", root in ".{0,30}") {
            let _ = pick(&machine(), &[("NCCL_SOCKET_IFNAME", &wish), ("NCCL_COMM_ID", &root)]);
        }

        /// Whatever the list, what it includes and what it excludes are two halves.
        #[test]
        fn a_list_and_its_exclusion_share_no_interface(wish in "=?[a-z0]{1,5}(,[a-z0.]{1,8}){0,3}") {
            let chosen = pick(&machine(), &[("NCCL_SOCKET_IFNAME", &wish)]).ok();
            let other = pick(&machine(), &[("NCCL_SOCKET_IFNAME", &format!("^{wish}"))]).ok();
            prop_assert!(chosen.is_some() || other.is_some());
            prop_assert_ne!(chosen, other);
        }
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
