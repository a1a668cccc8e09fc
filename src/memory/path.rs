//! Which way data take between one GPU and one NIC, and by which rule.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::GpuPath;
use crate::topology::distance::Distance;

use super::profile::Pair;

/// Sizes of messages, from `from` up to below `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub from: u64,
    pub to: u64,
}

impl Sizes {
    pub const NONE: Self = Self { from: 0, to: 0 };
    pub const ALL: Self = Self { from: 0, to: u64::MAX };

    #[inline]
    pub fn contains(self, size: u64) -> bool {
        self.from <= size && size < self.to
    }
}

impl fmt::Display for Sizes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::ALL => f.write_str("all sizes"),
            s if s.from >= s.to => f.write_str("no size"),
            Self { from, to: u64::MAX } => write!(f, "from {from} bytes on"),
            Self { from: 0, to } => write!(f, "below {to} bytes"),
            Self { from, to } => write!(f, "from {from} to below {to} bytes"),
        }
    }
}

/// What was chosen for a GPU and a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// NCCL is told that GPU memory can be had: else it keeps its data in host memory.
    pub gpu_memory: bool,
    /// GPU memory is registered with the NIC, by any way that is open; where that fails all sizes are staged.
    pub gdr: bool,
    /// GDR that fails may become staging.
    pub fall_back: bool,
    /// Messages of these sizes are staged though GDR works.
    pub staged: Sizes,
    /// The rule that decided, for people.
    pub rule: String,
}

/// What is known of a NIC and a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The ways to GPU memory without a copy that are open.
    pub open: &'a [&'static str],
    /// None: it is not known which GPU.
    pub distance: Option<Distance>,
    /// What was measured of such a pair, and in which file that is.
    pub profile: Option<(&'a Path, &'a Pair)>,
}

impl Choice {
    /// What the user wishes; else, of what a profile measured, what is possible here; else GPUDirect where it is open, and
    /// NCCL's own way over host memory where it is not.
    pub fn decide(wish: GpuPath, known: &Known<'_>) -> Self {
        let open = !known.open.is_empty();
        let set = |value| format!("NCCL_NET_RDMA_GPU_PATH={value}");
        match (wish, known.profile) {
            (GpuPath::Staging, _) => Self::staging(set("staging")),
            (GpuPath::Host, _) => Self::host(set("host")),
            (GpuPath::Gdr, _) if open => Self { fall_back: false, ..Self::direct(set("gdr")) },
            (GpuPath::Gdr, _) => Self::host(format!("{}, but GPUDirect is not open", set("gdr"))),
            (GpuPath::Auto, Some((file, pair))) => Self::measured(file, pair, open),
            (GpuPath::Auto, None) if open => Self::direct(by_default(known)),
            (GpuPath::Auto, None) => Self::host(
                "GPUDirect is not open, and no profile says that staging is faster than NCCL's own way".to_owned(),
            ),
        }
    }

    fn measured(file: &Path, pair: &Pair, open: bool) -> Self {
        let without;
        let (pair, told) = if pair.gdr() && !open {
            without = pair.without_gdr();
            (&without, " of what is left without GPUDirect, which is not open,")
        } else {
            (pair, "")
        };
        let rule = |what: &str| format!("profile {}:{told} {what}", file.display());
        match (pair.host(), pair.gdr(), pair.staged()) {
            (true, ..) => Self::host(rule("host memory is best")),
            (_, false, _) => Self::staging(rule("staging is best")),
            (_, true, Sizes::NONE) => Self::direct(rule("GPUDirect is best")),
            (_, true, staged) => {
                Self { staged, ..Self::direct(rule(&format!("staging is best {staged}, else GPUDirect"))) }
            }
        }
    }

    fn direct(rule: String) -> Self {
        Self { gpu_memory: true, gdr: true, fall_back: true, staged: Sizes::NONE, rule }
    }

    fn staging(rule: String) -> Self {
        Self { gpu_memory: true, gdr: false, fall_back: false, staged: Sizes::ALL, rule }
    }

    fn host(rule: String) -> Self {
        Self { gpu_memory: false, gdr: false, fall_back: false, staged: Sizes::NONE, rule }
    }
}

fn by_default(known: &Known<'_>) -> String {
    let ways = known.open.join(", ");
    match known.distance {
        None => format!("GPUDirect is open ({ways})"),
        Some(near) if near.is_near() => format!("GPUDirect is open ({ways}), distance {near}"),
        Some(far) => {
            format!("GPUDirect is open ({ways}); NIC and GPU are {far} apart: NCCL decides by NCCL_NET_GDR_LEVEL")
        }
    }
}

/// The way in short, and the rule.
impl fmt::Display for Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.gpu_memory, self.gdr, self.staged) {
            (false, ..) => f.write_str("host memory")?,
            (_, false, _) => f.write_str("staging")?,
            (_, true, Sizes::NONE) => f.write_str("GPUDirect")?,
            (_, true, staged) => write!(f, "GPUDirect, staging {staged}")?,
        }
        write!(f, " (rule: {})", self.rule)
    }
}

/// A GPU as a NIC sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    pub bus_id: String,
    pub distance: Distance,
    /// What was measured of such a pair, and in which file that is.
    pub profile: Option<Arc<(PathBuf, Pair)>>,
}

/// What was chosen for one NIC and each GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choices {
    /// What NCCL is told, which asks once for all GPUs.
    nic: Choice,
    /// By bus id.
    gpus: Vec<(String, Choice)>,
}

impl Choices {
    pub fn decide(wish: GpuPath, open: &[&'static str], neighbours: &[Neighbour]) -> Self {
        let choose = |n: &Neighbour| {
            let profile = n.profile.as_ref().map(|p| (p.0.as_path(), &p.1));
            (n.bus_id.clone(), Choice::decide(wish, &Known { open, distance: Some(n.distance), profile }))
        };
        let unknown = Choice::decide(wish, &Known { open, distance: None, profile: None });
        Self::new(unknown, neighbours.iter().map(choose).collect())
    }

    /// `unknown` is for a GPU that is not among `gpus`.
    fn new(unknown: Choice, gpus: Vec<(String, Choice)>) -> Self {
        let offers = |which: fn(&Choice) -> bool| gpus.iter().map(|(_, c)| c).find(|c| which(c));
        let Some(offering) = offers(|c| c.gdr).or_else(|| offers(|c| c.gpu_memory)) else {
            let nic = gpus.first().map_or(unknown, |(_, first)| first.clone());
            return Self { nic, gpus };
        };
        let nic = offering.clone();
        // GPU memory that is offered for one GPU comes from all of them.
        let gpus = gpus.into_iter().map(|(bus, choice)| (bus, choice.offered(&nic))).collect();
        Self { nic, gpus }
    }

    /// Whether it matters which GPU it is.
    pub fn differ(&self) -> bool {
        self.gpus.iter().any(|(_, choice)| *choice != self.nic)
    }

    /// Whether NCCL is told that GPU memory can be had.
    pub fn nic(&self) -> &Choice {
        &self.nic
    }

    /// For the GPU at a bus id, as CUDA or sysfs writes it.
    pub fn gpu(&self, bus_id: &str) -> &Choice {
        self.gpus.iter().find(|(bus, _)| bus.eq_ignore_ascii_case(bus_id)).map_or(&self.nic, |(_, choice)| choice)
    }
}

impl Choice {
    /// As this one, where the NIC takes GPU memory in any case, for the sake of another GPU's choice.
    fn offered(self, other: &Self) -> Self {
        if self.gpu_memory {
            return self;
        }
        let rule = format!("{}; but this NIC takes GPU memory, for another GPU", self.rule);
        Self { rule, ..other.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::profile::{Profile, Way};

    /// A profile of one pair with these rules and, at 8 bytes, these latencies (0: not measured).
    fn pair(rules: &[(u64, Option<u64>, Way)], latencies: [u64; 3]) -> Pair {
        let rule = |r: &(u64, Option<u64>, Way)| serde_json::json!({"from": r.0, "to": r.1, "path": r.2});
        let figures = |latency: u64| match latency {
            0 => serde_json::Value::Null,
            us => serde_json::json!({"latency_us": us, "gb_s": 1.0, "cpu_share": 0.0, "pcie_bytes_per_byte": 1.0}),
        };
        let [gdr, staging, host] = latencies.map(figures);
        let text = serde_json::json!({
            "version": 1, "made_by": "a test", "adapter": "hardware",
            "pairs": [{
                "nic": {"name": "n", "model": "m", "firmware": "f", "port_gbps": 100.0},
                "gpu": {"name": "g", "compute_capability": null, "bus_id": "0"},
                "distance": "PIX", "link": "", "rules": rules.iter().map(rule).collect::<Vec<_>>(),
                "sizes": [{"bytes": 8, "gdr": gdr, "staging": staging, "host": host}],
            }],
        })
        .to_string();
        Profile::parse(text.as_bytes(), Path::new("p")).expect("a profile").pairs.remove(0)
    }

    fn decide(wish: GpuPath, open: &[&'static str], distance: Distance, pair: Option<&Pair>) -> Choice {
        let profile = pair.map(|p| (Path::new("/p.json"), p));
        Choice::decide(wish, &Known { open, distance: Some(distance), profile })
    }

    const OPEN: [&str; 1] = ["dma-buf"];

    #[test]
    fn without_a_profile_gpudirect_where_it_is_open() {
        let near = decide(GpuPath::Auto, &OPEN, Distance::Pix, None);
        assert!(near.gpu_memory && near.gdr && near.fall_back && near.staged == Sizes::NONE);
        assert_eq!(near.to_string(), "GPUDirect (rule: GPUDirect is open (dma-buf), distance PIX)");
        let far = decide(GpuPath::Auto, &OPEN, Distance::Sys, None);
        assert!(far.gdr && far.rule.contains("NIC and GPU are SYS apart: NCCL decides by NCCL_NET_GDR_LEVEL"));
        let closed = decide(GpuPath::Auto, &[], Distance::Pix, None);
        assert!(!closed.gpu_memory && closed.rule.contains("not open"), "{closed}");
    }

    #[test]
    fn a_wish_goes_before_a_profile() {
        let p = pair(&[(0, None, Way::Staging)], [0, 1, 2]);
        let of = |wish, open| decide(wish, open, Distance::Pix, Some(&p));
        let gdr = of(GpuPath::Gdr, &OPEN);
        assert!(gdr.gdr && !gdr.fall_back && gdr.rule == "NCCL_NET_RDMA_GPU_PATH=gdr");
        let not_open = of(GpuPath::Gdr, &[]);
        assert!(!not_open.gpu_memory && not_open.rule.contains("not open"));
        let host = of(GpuPath::Host, &OPEN);
        assert!(!host.gpu_memory && host.rule == "NCCL_NET_RDMA_GPU_PATH=host");
        let staging = of(GpuPath::Staging, &OPEN);
        assert!(staging.gpu_memory && !staging.gdr && staging.staged == Sizes::ALL);
    }

    #[test]
    fn auto_follows_what_was_measured() {
        let of = |rules: &[_], open: &[&'static str]| {
            decide(GpuPath::Auto, open, Distance::Pix, Some(&pair(rules, [1, 3, 5])))
        };
        let mixed = [(0, Some(1 << 20), Way::Gdr), (1 << 20, None, Way::Staging)];
        let both = of(&mixed, &OPEN);
        assert!(both.gpu_memory && both.gdr && both.fall_back);
        assert_eq!(both.staged, Sizes { from: 1 << 20, to: u64::MAX });
        assert_eq!(both.rule, "profile /p.json: staging is best from 1048576 bytes on, else GPUDirect");
        let direct = of(&[(0, None, Way::Gdr)], &OPEN);
        assert!(direct.gdr && direct.staged == Sizes::NONE && direct.rule == "profile /p.json: GPUDirect is best");
        let staging = of(&[(0, None, Way::Staging)], &[]);
        assert!(staging.gpu_memory && !staging.gdr && staging.staged == Sizes::ALL);
        assert!(!of(&[(0, None, Way::Host)], &OPEN).gpu_memory);
        // Measured with GPUDirect, which is not open now: the rest is weighed anew.
        let left = of(&mixed, &[]);
        assert!(left.gpu_memory && !left.gdr && left.staged == Sizes::ALL);
        assert!(left.rule.contains("without GPUDirect, which is not open, staging is best"), "{left}");
        let host = decide(GpuPath::Auto, &[], Distance::Pix, Some(&pair(&mixed, [1, 3, 2])));
        assert!(!host.gpu_memory && host.rule.contains("host memory is best"), "{host}");
    }

    #[test]
    fn a_nic_offers_what_any_gpu_takes() {
        let known = Known { open: &OPEN, distance: None, profile: None };
        let unknown = || Choice::decide(GpuPath::Auto, &known);
        let (direct, host) = (Choice::direct("near".into()), Choice::host("far".into()));
        let paths =
            Choices::new(unknown(), vec![("0000:1b:00.0".into(), host.clone()), ("0000:c1:00.0".into(), direct)]);
        assert!(paths.nic().gpu_memory && paths.differ());
        assert_eq!(paths.gpu("0000:C1:00.0").rule, "near");
        let other = paths.gpu("0000:1B:00.0");
        assert!(other.gpu_memory && other.gdr && other.rule == "far; but this NIC takes GPU memory, for another GPU");
        assert_eq!(paths.gpu("0000:ff:00.0"), paths.nic());
        let none = Choices::new(unknown(), vec![("0000:1b:00.0".into(), host.clone())]);
        assert_eq!((none.nic(), none.gpu("0000:1b:00.0"), none.differ()), (&host, &host, false));
        // What is registered for one GPU must be offered, whichever comes first.
        let staging = Choice::staging("measured".into());
        let direct = Choice::direct("near".into());
        let mixed = Choices::new(unknown(), vec![("a".into(), staging.clone()), ("b".into(), direct.clone())]);
        assert_eq!((mixed.nic(), mixed.gpu("a"), mixed.gpu("b")), (&direct, &staging, &direct));
        assert!(Choices::new(unknown(), Vec::new()).nic().gdr);
    }

    #[test]
    fn sizes_in_words() {
        let words =
            [Sizes::ALL, Sizes::NONE, Sizes { from: 8, to: 64 }, Sizes { from: 0, to: 64 }].map(|s| s.to_string());
        assert_eq!(words, ["all sizes", "no size", "from 8 to below 64 bytes", "below 64 bytes"]);
    }
}
