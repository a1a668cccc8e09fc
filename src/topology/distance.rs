//! How far two PCI functions are from one another, in the words of NCCL and nvidia-smi.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::function::Function;
use super::pci::under;

/// What lies between two functions; the nearer comes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Distance {
    /// One bridge or switch.
    #[serde(rename = "PIX")]
    Pix,
    /// Several bridges, no host bridge.
    #[serde(rename = "PXB")]
    Pxb,
    /// A host bridge.
    #[serde(rename = "PHB")]
    Phb,
    /// Two host bridges of one NUMA node.
    #[serde(rename = "NODE")]
    Node,
    /// The link between NUMA nodes.
    #[serde(rename = "SYS")]
    Sys,
    /// The machine does not show it.
    #[serde(rename = "unknown")]
    Unknown,
}

impl Distance {
    /// Between two functions; `nodes` is how many NUMA nodes the machine has.
    pub fn between(a: &Function, b: &Function, nodes: usize) -> Self {
        let (first, second) = (a.way(), b.way());
        let common = common(&first, &second);
        match (first.len() - common, second.len() - common) {
            _ if common == 0 => match (a.numa_node(), b.numa_node()) {
                (Some(one), Some(other)) if one != other => Self::Sys,
                (Some(_), Some(_)) => Self::Node,
                _ if nodes == 1 => Self::Node,
                _ => Self::Unknown,
            },
            _ if common == 1 => Self::Phb,
            // Below a switch each has a port of its own, or they share a bus.
            (0..=2, 0..=2) => Self::Pix,
            _ => Self::Pxb,
        }
    }

    /// What goes from one to the other meets no CPU.
    pub fn is_near(self) -> bool {
        self <= Self::Pxb
    }
}

/// How many places two ways share from the host bridge on.
fn common(a: &[&str], b: &[&str]) -> usize {
    a.iter().zip(b).take_while(|(x, y)| x == y).count()
}

/// The bridges that only one of the two ways has: those between which ACS would stand.
pub fn bridges(a: &Function, b: &Function) -> Vec<Function> {
    let (first, second) = (a.way(), b.way());
    let common = common(&first, &second);
    let own = |function: &Function, way: &[&str]| -> Vec<Function> {
        let last = way.len().saturating_sub(1);
        way.get(common..last).unwrap_or_default().iter().filter_map(|bus| function.above(bus)).collect()
    };
    let mut all = own(a, &first);
    all.extend(own(b, &second).into_iter().rev());
    all
}

/// How many NUMA nodes the machine has; 0 where it does not say.
pub fn numa_nodes(root: &Path) -> usize {
    let Ok(entries) = fs::read_dir(under(root, "/sys/devices/system/node")) else { return 0 };
    let node = |name: &str| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    entries.filter_map(Result::ok).filter(|e| e.file_name().to_str().is_some_and(node)).count()
}

impl fmt::Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Pix => "PIX",
            Self::Pxb => "PXB",
            Self::Phb => "PHB",
            Self::Node => "NODE",
            Self::Sys => "SYS",
            Self::Unknown => "unknown",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fake::Fake;

    const SWITCH: &str = "pci0000:80/0000:80:01.1/0000:81:00.0";

    fn between(a: (&str, &str), b: (&str, &str), nodes: usize) -> (Distance, Vec<String>) {
        let fake = Fake::new();
        fake.gpu(a.0, a.1).nic(b.0, b.1);
        let at = |path: &str| Function::at(fake.root(), &format!("/sys/devices/{path}")).expect("there");
        let (a, b) = (at(a.0), at(b.0));
        assert_eq!(Distance::between(&a, &b, nodes), Distance::between(&b, &a, nodes));
        let bridges = bridges(&a, &b).iter().map(|f| f.bus_id().to_owned()).collect();
        (Distance::between(&a, &b, nodes), bridges)
    }

    #[test]
    fn one_switch_is_pix() {
        let gpu = format!("{SWITCH}/0000:82:00.0/0000:83:00.0");
        let nic = format!("{SWITCH}/0000:82:01.0/0000:84:00.0");
        let (distance, bridges) = between((&gpu, "0"), (&nic, "0"), 2);
        assert_eq!((distance, bridges), (Distance::Pix, vec!["0000:82:00.0".to_owned(), "0000:82:01.0".to_owned()]));
        assert!(distance.is_near());
        // On one bus.
        let pair = [format!("{SWITCH}/0000:82:00.0"), format!("{SWITCH}/0000:82:01.0")];
        assert_eq!(between((&pair[0], "0"), (&pair[1], "0"), 1), (Distance::Pix, vec![]));
    }

    #[test]
    fn a_switch_below_a_switch_is_pxb() {
        let gpu = format!("{SWITCH}/0000:82:00.0/0000:83:00.0");
        let nic = format!("{SWITCH}/0000:82:01.0/0000:84:00.0/0000:85:00.0/0000:86:00.0");
        let (distance, bridges) = between((&gpu, "0"), (&nic, "0"), 2);
        assert_eq!(distance, Distance::Pxb);
        assert_eq!(bridges, ["0000:82:00.0", "0000:85:00.0", "0000:84:00.0", "0000:82:01.0"]);
    }

    #[test]
    fn over_the_cpu() {
        let gpu = format!("{SWITCH}/0000:82:00.0/0000:83:00.0");
        let same_root = ("pci0000:80/0000:80:03.1/0000:90:00.0", "0");
        assert_eq!(between((&gpu, "0"), same_root, 2).0, Distance::Phb);
        let other_root = "pci0000:c0/0000:c0:01.0/0000:c1:00.0";
        for (nodes, node, distance) in
            [(2, "0", Distance::Node), (2, "1", Distance::Sys), (2, "-1", Distance::Unknown), (1, "-1", Distance::Node)]
        {
            assert_eq!(between((&gpu, "0"), (other_root, node), nodes).0, distance, "{node} of {nodes}");
        }
        assert!(!Distance::Phb.is_near() && !Distance::Unknown.is_near());
    }

    /// N64.
    #[test]
    fn a_flat_tree_of_a_virtual_machine() {
        let flat = [("pci0000:00/0000:00:05.0", "-1"), ("pci0000:00/0000:00:06.0", "-1")];
        assert_eq!(between(flat[0], flat[1], 1), (Distance::Phb, vec![]));
    }

    #[test]
    fn nodes_are_counted() {
        let fake = Fake::new();
        assert_eq!(numa_nodes(fake.root()), 0);
        for file in ["node0/cpulist", "node1/cpulist", "has_cpu", "nodes/x"] {
            fake.put(&format!("sys/devices/system/node/{file}"), "0");
        }
        assert_eq!(numa_nodes(fake.root()), 2);
    }
}
