//! How far two PCI functions are from one another, in the words of NCCL and nvidia-smi.

use std::fmt;

use serde::{Deserialize, Serialize};

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
