//! Which way data take between one GPU and one NIC, and by which rule.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::GpuPath;
use crate::topology::distance::Distance;

use super::profile::Pair;

/// Sizes of messages, from `from` up to below `to`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choice {
    /// NCCL is told that GPU memory can be had: else it keeps its data in host memory.
    pub gpu_memory: bool,
    /// GPU memory is registered with the NIC, by any way that is open; where that fails all sizes are staged.
    pub gdr: bool,
    /// GDR that fails may become staging.
    pub fall_back: bool,
    /// Messages of these sizes are staged though GDR works; where staging can't be had, all go by GDR. Of some sizes: receives
    /// go by the size that NCCL posts, that of its slot, and those for which it needs no completion are not staged.
    pub staged: Sizes,
    /// A profile that was measured here decided, and nothing that it would rather have is missing.
    pub as_measured: bool,
    /// The rule that decided, for people.
    pub rule: String,
}

/// What is known of a NIC and a GPU.
#[derive(Debug, Clone, Copy)]
pub struct Known<'a> {
    /// The ways to GPU memory without a copy that the NIC has open, in the order in which they are tried.
    pub open: &'a [&'static str],
    /// The GPU's driver gives dma-bufs, as far as is known.
    pub exports: bool,
    /// None: it is not known which GPU.
    pub distance: Option<Distance>,
    /// What was measured of such a pair, and in which file that is.
    pub profile: Option<(&'a Path, &'a Pair)>,
    /// Staging can be had; or why not.
    pub staging: Result<(), &'a str>,
}

/// The way that takes two: a NIC that registers dma-bufs, and a GPU whose driver exports them.
pub const DMABUF: &str = "dma-buf";

impl<'a> Known<'a> {
    /// The ways that NIC and GPU both have open.
    fn ways(&self) -> &'a [&'static str] {
        if self.exports { self.open } else { self.open.strip_prefix(&[DMABUF]).unwrap_or(self.open) }
    }

    /// Why GPUDirect can't be had, for people.
    fn not_open(&self) -> &'static str {
        if self.open.is_empty() {
            "GPUDirect is not open"
        } else {
            "GPUDirect is not open (the GPU's driver exports no dma-buf)"
        }
    }

    /// Why a profile is not followed as it is; None: it is, or there is none.
    pub fn differs_from_profile(&self) -> Option<String> {
        let (_, pair) = self.profile?;
        if pair.open_now(self) {
            return Some("measured without GPUDirect, which is open now: the defaults hold".to_owned());
        }
        match self.staging {
            Err(why) if pair.staged() != Sizes::NONE => {
                Some(format!("staging is best, and can't be had: {why}; decided without it"))
            }
            _ => None,
        }
    }
}

impl Pair {
    /// GPUDirect was not weighed when this was measured, and is open.
    fn open_now(&self, known: &Known<'_>) -> bool {
        !known.ways().is_empty() && !self.measured_gdr()
    }
}

impl Choice {
    /// What the user wishes; else, of what a profile measured, what is possible here; else GPUDirect where it is open, and
    /// NCCL's own way over host memory where it is not.
    pub fn decide(wish: GpuPath, known: &Known<'_>) -> Self {
        let open = !known.ways().is_empty();
        let set = |value| format!("NCCL_NET_RDMA_GPU_PATH={value}");
        match (wish, known.profile) {
            (GpuPath::Staging, _) => Self::staging(set("staging")),
            (GpuPath::Host, _) => Self::host(set("host")),
            (GpuPath::Gdr, _) if open => Self { fall_back: false, ..Self::direct(set("gdr")) },
            (GpuPath::Gdr, _) => Self::host(format!("{}, but {}", set("gdr"), known.not_open())),
            (GpuPath::Auto, Some((file, pair))) if pair.open_now(known) => {
                let rule = format!("{}; profile {} was measured without it", by_default(known), file.display());
                Self::direct(rule)
            }
            (GpuPath::Auto, Some((file, pair))) => Self::measured(file, pair, known),
            (GpuPath::Auto, None) if open => Self::direct(by_default(known)),
            (GpuPath::Auto, None) => Self::host(format!(
                "{}, and no profile says that staging is faster than NCCL's own way",
                known.not_open()
            )),
        }
    }

    fn measured(file: &Path, pair: &Pair, known: &Known<'_>) -> Self {
        let open = !known.ways().is_empty();
        let (mut left, mut without) = (Cow::Borrowed(pair), Vec::new());
        if left.staged() != Sizes::NONE && known.staging.is_err() {
            left = Cow::Owned(left.without_staging());
            without.push("staging, which can't be had,");
        }
        if left.gdr() && !open {
            left = Cow::Owned(left.without_gdr());
            without.push("GPUDirect, which is not open,");
        }
        let told = match &without[..] {
            [] => String::new(),
            without => format!(" of what is left without {}", without.join(" and ")),
        };
        let rule = |what: &str| format!("profile {}:{told} {what}", file.display());
        let choice = match (left.host(), left.gdr(), left.staged()) {
            (true, ..) => Self::host(rule("host memory is best")),
            // The NIC's way stays open for what can't be staged.
            (_, false, _) => Self { gdr: open, fall_back: open, ..Self::staging(rule("staging is best")) },
            (_, true, Sizes::NONE) => Self::direct(rule("GPUDirect is best")),
            (_, true, staged) => {
                Self { staged, ..Self::direct(rule(&format!("staging is best {staged}, else GPUDirect"))) }
            }
        };
        Self { as_measured: without.is_empty(), ..choice }
    }

    /// Whichever rule decided.
    fn same_way(&self, other: &Self) -> bool {
        let way = |c: &Self| (c.gpu_memory, c.gdr, c.fall_back, c.staged);
        way(self) == way(other)
    }

    fn direct(rule: String) -> Self {
        Self { gpu_memory: true, gdr: true, fall_back: true, staged: Sizes::NONE, as_measured: false, rule }
    }

    fn staging(rule: String) -> Self {
        Self { gpu_memory: true, gdr: false, fall_back: false, staged: Sizes::ALL, as_measured: false, rule }
    }

    fn host(rule: String) -> Self {
        Self { gpu_memory: false, gdr: false, fall_back: false, staged: Sizes::NONE, as_measured: false, rule }
    }
}

fn by_default(known: &Known<'_>) -> String {
    let ways = known.ways().join(", ");
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
            (_, true, Sizes::ALL) => f.write_str("staging, GPUDirect where that fails")?,
            (_, true, staged) => write!(f, "GPUDirect, staging {staged}")?,
        }
        write!(f, " (rule: {})", self.rule)
    }
}

/// A GPU as a NIC sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct Neighbour {
    pub bus_id: String,
    /// Its kind, as the driver names it.
    pub model: String,
    /// The driver shows it to others than this process.
    pub hidden: bool,
    pub distance: Distance,
    /// Its driver gives dma-bufs, as far as is known.
    pub exports: bool,
    /// What was measured of such a pair, and in which file that is.
    pub profile: Option<Arc<(PathBuf, Pair)>>,
    /// Staging can be had; or why not. Looked for where the profile wants it.
    pub staging: Result<(), String>,
}

impl Neighbour {
    pub fn known<'a>(&'a self, open: &'a [&'static str]) -> Known<'a> {
        Known {
            open,
            exports: self.exports,
            distance: Some(self.distance),
            profile: self.profile.as_ref().map(|p| (p.0.as_path(), &p.1)),
            staging: self.staging.as_ref().copied().map_err(String::as_str),
        }
    }
}

/// The GPUs as NICs see them that carry each message together: as the furthest of them does, since a message has arrived when
/// its last part has; of NICs as far away, one for which nothing was measured.
pub fn together<'a>(views: impl IntoIterator<Item = &'a [Neighbour]>) -> Arc<[Neighbour]> {
    let mut all: Vec<&Neighbour> = Vec::new();
    for neighbour in views.into_iter().flatten() {
        let binds = |n: &Neighbour| (n.distance, n.profile.is_none());
        match all.iter_mut().find(|n| n.bus_id == neighbour.bus_id) {
            Some(known) if binds(neighbour) > binds(known) => *known = neighbour,
            Some(_) => {}
            None => all.push(neighbour),
        }
    }
    all.into_iter().cloned().collect()
}

/// What was chosen for one NIC and each GPU; at first nothing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Choices {
    /// What NCCL is told, which asks once for all GPUs.
    nic: Choice,
    /// By bus id.
    gpus: Vec<(String, Choice)>,
}

impl Choices {
    pub fn decide(wish: GpuPath, open: &[&'static str], neighbours: &[Neighbour]) -> Self {
        let choose = |n: &Neighbour| (n.bus_id.clone(), Choice::decide(wish, &n.known(open)));
        // Of no GPU in particular.
        let general =
            |exports| Choice::decide(wish, &Known { open, exports, distance: None, profile: None, staging: Ok(()) });
        let chosen: Vec<_> = neighbours.iter().map(choose).collect();
        let decides = |which: &dyn Fn(&Neighbour) -> bool| -> Vec<usize> {
            neighbours.iter().enumerate().filter(|(_, n)| which(n)).map(|(i, _)| i).collect()
        };
        // Not those of other processes; not, for what was measured of one kind of GPU, its like elsewhere, of which nothing
        // was; and not those that NCCL pairs with other NICs.
        let measured = |n: &Neighbour| n.profile.is_some();
        let like_a_measured = |n: &Neighbour| neighbours.iter().any(|m| !m.hidden && measured(m) && m.model == n.model);
        let counts = |n: &Neighbour| measured(n) || n.distance.is_near() && !like_a_measured(n);
        let some = |found: Vec<usize>| (!found.is_empty()).then_some(found);
        let deciding = some(decides(&|n| !n.hidden && counts(n)))
            .or_else(|| some(decides(&|n| !n.hidden)))
            .unwrap_or_else(|| decides(&|_| true));
        let profiled = |i: usize| wish == GpuPath::Auto && neighbours.get(i).is_some_and(measured);
        // The line of a NIC names no GPU's distance.
        let rule = |i: usize| {
            let general = || general(neighbours.get(i).is_none_or(|n| n.exports)).rule;
            chosen.get(i).filter(|_| profiled(i)).map_or_else(general, |(_, choice)| choice.rule.clone())
        };
        let leader = Self::leader(&chosen, &deciding).map(|i| (i, rule(i)));
        Self::led(leader, general(true), chosen)
    }

    /// Of those at the places `deciding` the one that decides what NCCL is told.
    fn leader(gpus: &[(String, Choice)], deciding: &[usize]) -> Option<usize> {
        let find =
            |which: fn(&Choice) -> bool| deciding.iter().copied().find(|i| gpus.get(*i).is_some_and(|g| which(&g.1)));
        find(|c| c.gdr).or_else(|| find(|c| c.gpu_memory)).or_else(|| deciding.first().copied())
    }

    /// `leader`: the one that decides, and by which rule; `unknown`: where there is none.
    fn led(leader: Option<(usize, String)>, unknown: Choice, gpus: Vec<(String, Choice)>) -> Self {
        let Some((rule, (bus, leading))) = leader.and_then(|(i, rule)| Some((rule, gpus.get(i)?))) else {
            return Self { nic: unknown, gpus };
        };
        let nic = Choice { rule, ..leading.clone() };
        // NCCL is told once for all: GPU memory that is offered for one GPU comes from all of them, and none from any if not.
        let follow = |choice: &Choice| match (choice.gpu_memory, nic.gpu_memory) {
            (false, true) => choice.following(&nic, &format!("this NIC takes GPU memory, for GPU {bus}")),
            (true, false) => choice.following(&nic, &format!("this NIC takes no GPU memory, for GPU {bus}")),
            _ => choice.clone(),
        };
        let gpus = gpus.iter().map(|(bus, choice)| (bus.clone(), follow(choice))).collect();
        Self { nic, gpus }
    }

    /// The same for all.
    #[cfg(test)]
    pub(crate) fn of(nic: Choice) -> Self {
        Self { nic, gpus: Vec::new() }
    }

    /// Whether it matters which GPU it is.
    pub fn differ(&self) -> bool {
        self.gpus.iter().any(|(_, choice)| !choice.same_way(&self.nic))
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
    /// The way of another one, and why.
    fn following(&self, other: &Self, why: &str) -> Self {
        Self { rule: format!("{}, but {why}", self.rule), ..other.clone() }
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
        Choice::decide(wish, &Known { open, exports: true, distance: Some(distance), profile, staging: Ok(()) })
    }

    const OPEN: [&str; 1] = ["dma-buf"];

    #[test]
    fn nics_that_carry_a_message_together_see_a_gpu_as_the_furthest_does() {
        let measured = Arc::new((PathBuf::from("/p.json"), pair(&[(0, None, Way::Gdr)], [1, 0, 0])));
        let view = |distance, measured: Option<&Arc<(PathBuf, Pair)>>| {
            [Neighbour {
                bus_id: "0".into(),
                model: "g".into(),
                hidden: false,
                distance,
                exports: true,
                profile: measured.cloned(),
                staging: Ok(()),
            }]
        };
        let [near, far] = [view(Distance::Pix, Some(&measured)), view(Distance::Sys, None)];
        assert_eq!(*together([&near[..], &far[..]]), far);
        assert_eq!(*together([&far[..], &near[..]]), far);
        // As far away, of another model.
        let other = view(Distance::Pix, None);
        assert_eq!(*together([&near[..], &other[..]]), other);
        assert_eq!(*together([&other[..], &near[..]]), other);
        // What the furthest is like was measured.
        let far = view(Distance::Sys, Some(&measured));
        assert_eq!(*together([&other[..], &far[..], &other[..]]), far);
        assert_eq!(together(std::iter::empty::<&[Neighbour]>()).len(), 0);
    }

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

    /// What can't be staged goes by GPUDirect, not to its end.
    #[test]
    fn staging_that_was_measured_as_best_leaves_gpudirect_open() {
        let p = pair(&[(0, None, Way::Staging)], [3, 1, 5]);
        let both = decide(GpuPath::Auto, &OPEN, Distance::Pix, Some(&p));
        assert!(both.gpu_memory && both.gdr && both.fall_back && both.staged == Sizes::ALL, "{both}");
        assert!(both.to_string().starts_with("staging, GPUDirect where that fails"), "{both}");
    }

    #[test]
    fn staging_that_cannot_be_had_is_decided_without() {
        // Host memory without NCCL's kernels, which come on top.
        let p = pair(&[(0, None, Way::Staging)], [3, 1, 2]);
        let of = |open: &[&'static str]| {
            let profile = Some((Path::new("/p.json"), &p));
            let known =
                Known { open, exports: true, distance: Some(Distance::Pix), profile, staging: Err("no driver") };
            let why = known.differs_from_profile().expect("a reason");
            assert!(why.contains("can't be had: no driver"), "{why}");
            Choice::decide(GpuPath::Auto, &known)
        };
        let direct = of(&OPEN);
        assert!(direct.gdr && direct.staged == Sizes::NONE && direct.rule.contains("GPUDirect is best"), "{direct}");
        assert!(!of(&[]).gpu_memory, "{}", of(&[]));
    }

    #[test]
    fn what_was_measured_without_gpudirect_does_not_switch_it_off() {
        for way in [Way::Staging, Way::Host] {
            let p = pair(&[(0, None, way)], [0, 2, 3]);
            let profile = Some((Path::new("/p.json"), &p));
            let known = |open| Known { open, exports: true, distance: Some(Distance::Pix), profile, staging: Ok(()) };
            let open = Choice::decide(GpuPath::Auto, &known(&OPEN));
            assert!(open.gdr && open.staged == Sizes::NONE && open.rule.contains("was measured without it"), "{open}");
            assert!(known(&OPEN).differs_from_profile().is_some_and(|w| w.contains("which is open now")));
            assert_eq!(known(&[]).differs_from_profile(), None);
            assert!(!Choice::decide(GpuPath::Auto, &known(&[])).gdr);
        }
    }

    fn neighbour(bus: &str, distance: Distance, pair: Option<&Pair>) -> Neighbour {
        Neighbour {
            bus_id: bus.into(),
            model: "NVIDIA H200".into(),
            hidden: false,
            distance,
            exports: true,
            profile: pair.map(|p| Arc::new((PathBuf::from("/p.json"), p.clone()))),
            staging: Ok(()),
        }
    }

    /// A NIC takes dma-bufs on any newer kernel; closed modules of the GPU's driver give none.
    #[test]
    fn a_dma_buf_takes_a_gpu_whose_driver_exports_it() {
        let staging = pair(&[(0, None, Way::Staging)], [0, 2, 3]);
        let closed = |bus, pair| Neighbour { exports: false, ..neighbour(bus, Distance::Pix, pair) };
        let decide = |wish, open: &[&'static str], all: &[Neighbour]| Choices::decide(wish, open, all);
        // Measured without GPUDirect, and that is still so.
        let measured = closed("a", Some(&staging));
        assert_eq!(measured.known(&OPEN).differs_from_profile(), None);
        let paths = decide(GpuPath::Auto, &OPEN, std::slice::from_ref(&measured));
        assert!(paths.nic().gpu_memory && !paths.nic().gdr && paths.nic().staged == Sizes::ALL, "{}", paths.nic());
        assert_eq!(paths.nic().rule, "profile /p.json: staging is best");
        // Peer memory takes no dma-buf.
        let both = ["dma-buf", "nvidia_peermem"];
        assert!(measured.known(&both).differs_from_profile().is_some());
        let paths = decide(GpuPath::Auto, &both, &[measured]);
        assert!(paths.nic().gdr && paths.gpu("a").rule.contains("GPUDirect is open (nvidia_peermem), distance PIX"));
        let without = decide(GpuPath::Auto, &OPEN, &[closed("a", None)]);
        assert!(!without.nic().gpu_memory, "{}", without.nic());
        assert!(
            without.nic().rule.contains("(the GPU's driver exports no dma-buf), and no profile"),
            "{}",
            without.nic()
        );
        let forced = decide(GpuPath::Gdr, &OPEN, &[closed("a", None)]);
        assert!(!forced.nic().gpu_memory && forced.nic().rule.contains("=gdr, but GPUDirect is not open (the GPU's"));
    }

    #[test]
    fn a_nic_offers_what_any_gpu_takes() {
        let host = pair(&[(0, None, Way::Host)], [3, 2, 1]);
        let measured = neighbour("0000:1b:00.0", Distance::Pix, Some(&host));
        let other = Neighbour { model: "NVIDIA L40S".into(), ..neighbour("0000:c1:00.0", Distance::Pxb, None) };
        let decide = |all: &[Neighbour]| Choices::decide(GpuPath::Auto, &OPEN, all);
        let paths = decide(&[measured.clone(), other.clone()]);
        assert!(paths.nic().gpu_memory && !paths.differ());
        assert_eq!(paths.nic().rule, "GPUDirect is open (dma-buf)", "of no GPU");
        assert_eq!(paths.gpu("0000:C1:00.0").rule, "GPUDirect is open (dma-buf), distance PXB");
        let led = paths.gpu("0000:1B:00.0");
        assert!(led.gdr && led.rule.ends_with(", but this NIC takes GPU memory, for GPU 0000:c1:00.0"), "{led}");
        assert_eq!(paths.gpu("0000:ff:00.0"), paths.nic());
        let alone = decide(std::slice::from_ref(&measured));
        assert!(!alone.nic().gpu_memory && !alone.differ() && alone.nic() == alone.gpu("0000:1b:00.0"));
        // What is registered for one GPU must be offered, whichever comes first.
        let staging = pair(&[(0, None, Way::Staging)], [3, 1, 5]);
        let mixed = decide(&[neighbour("a", Distance::Pix, Some(&staging)), Neighbour { bus_id: "b".into(), ..other }]);
        assert!(mixed.differ() && mixed.gpu("a").staged == Sizes::ALL && mixed.gpu("b").staged == Sizes::NONE);
        assert!(decide(&[]).nic().gdr);
    }

    /// Far ones, those of other processes, and those of the same kind of which nothing was measured.
    #[test]
    fn gpus_that_are_not_meant_do_not_decide_what_a_nic_offers() {
        let host = pair(&[(0, None, Way::Host)], [3, 2, 1]);
        let measured = neighbour("a", Distance::Pix, Some(&host));
        let other =
            |distance, hidden, model: &str| Neighbour { hidden, model: model.into(), ..neighbour("b", distance, None) };
        for second in [
            other(Distance::Sys, false, "NVIDIA L40S"),
            other(Distance::Pix, true, "10de:2335"),
            other(Distance::Pxb, false, "NVIDIA H200"),
        ] {
            let paths = Choices::decide(GpuPath::Auto, &OPEN, &[second.clone(), measured.clone()]);
            assert!(!paths.nic().gpu_memory && !paths.differ(), "{second:?}");
            let led = paths.gpu("b");
            assert!(led.rule.ends_with(", but this NIC takes no GPU memory, for GPU a"), "{led}");
        }
        // With nothing better to go by, they do.
        let far = [other(Distance::Sys, false, "NVIDIA H200")];
        assert!(Choices::decide(GpuPath::Auto, &OPEN, &far).nic().gdr);
    }

    #[test]
    fn sizes_in_words() {
        let words =
            [Sizes::ALL, Sizes::NONE, Sizes { from: 8, to: 64 }, Sizes { from: 0, to: 64 }].map(|s| s.to_string());
        assert_eq!(words, ["all sizes", "no size", "from 8 to below 64 bytes", "below 64 bytes"]);
    }
}
