//! Profiles: what `nccl-rdma bench paths` measured of each way of GPU data on a machine, and the rules that follow from it.
//!
//! A profile is JSON. Its entries are found again by what the hardware is (model of the NIC, model of the GPU, distance
//! between them), never by what a reboot changes. What is damaged, of a newer version, or from other hardware is refused as
//! a whole, with a text that says what is wrong: half a profile would decide by accident.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::topology::distance::Distance;
use crate::topology::link::{Lanes, Link};

use super::path::Sizes;

/// Version of the format that this build reads and writes.
pub const VERSION: u32 = 1;
/// A way must be better than the one in use by this factor to take its place: less is noise of the measurement.
pub const MARGIN: f64 = 1.05;
/// From this size on ways are compared by bandwidth, below by latency.
pub const BULK: u64 = 64 << 10;
/// More is no profile.
const MAX_BYTES: u64 = 4 << 20;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    pub version: u32,
    /// Program, version and date, for people.
    pub made_by: String,
    pub adapter: Adapter,
    pub pairs: Vec<Pair>,
}

/// What moved the bytes. Over soft-hca every way is a copy, so its thresholds mean nothing on hardware.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Adapter {
    Hardware,
    SoftHca,
}

/// A NIC and a GPU.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pair {
    pub nic: Nic,
    pub gpu: Gpu,
    pub distance: Distance,
    /// The PCIe links in words.
    pub link: String,
    /// What was measured, by rising size.
    pub sizes: Vec<Measured>,
    /// What follows from it: intervals without gaps, from 0 to the end.
    pub rules: Vec<Rule>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Nic {
    /// For people.
    pub name: String,
    /// Of which kind it is, see [`nic_model`]. The key.
    pub model: String,
    pub firmware: String,
    pub port_gbps: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gpu {
    /// As the driver calls its kind (`NVIDIA H200`). The key.
    pub name: String,
    /// `9.0`
    pub compute_capability: Option<String>,
    /// For people.
    pub bus_id: String,
}

/// A way of GPU data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Way {
    /// The NIC reads and writes GPU memory.
    Gdr,
    /// The plugin copies through pinned host memory.
    Staging,
    /// NCCL's kernels write to and read from host memory.
    Host,
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Gdr => "gdr",
            Self::Staging => "staging",
            Self::Host => "host",
        })
    }
}

/// Messages of one size, by each way that could be measured.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    pub bytes: u64,
    pub gdr: Option<Figures>,
    pub staging: Option<Figures>,
    pub host: Option<Figures>,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Figures {
    /// One way.
    pub latency_us: f64,
    /// 10^9 bytes a second, many messages under way.
    pub gb_s: f64,
    /// Part of one core.
    pub cpu_share: f64,
    /// Bytes over PCIe for each byte of the message, on one side.
    pub pcie_bytes_per_byte: f64,
}

/// The way of messages from `from` up to below `to` bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Rule {
    pub from: u64,
    /// None: no end.
    pub to: Option<u64>,
    pub path: Way,
}

/// Why a profile is not used.
#[derive(Debug, thiserror::Error)]
pub enum ProfileError {
    #[error("{path}: {why}", path = path.display())]
    Unreadable { path: PathBuf, why: io::Error },
    #[error("{path}: more than {MAX_BYTES} bytes: this is no profile", path = path.display())]
    TooLong { path: PathBuf },
    #[error("{path}: damaged, or no profile: {why}; make it anew with `nccl-rdma bench paths`", path = path.display())]
    Damaged { path: PathBuf, why: String },
    #[error("{path}: version {found} of the format, and this build knows {VERSION}", path = path.display())]
    Version { path: PathBuf, found: u64 },
}

/// The kind of a NIC, from what ibv_query_device says: as ibv_devinfo prints the two numbers.
pub fn nic_model(vendor_id: u32, vendor_part_id: u32) -> String {
    format!("0x{vendor_id:04x}:{vendor_part_id}")
}

/// The links of a NIC and a GPU, as a profile has them; empty where none is shown. A GPU at rest lowers its link's speed by
/// itself, so what it can counts.
pub fn links(nic: Option<Link>, gpu: Option<Link>) -> String {
    let nic = nic.map(|link| format!("NIC PCIe {}", link.now));
    let gpu = gpu.map(|link| format!("GPU PCIe {}", Lanes { gt_s: link.most.gt_s, ..link.now }));
    nic.into_iter().chain(gpu).collect::<Vec<_>>().join(", ")
}

/// Text of a file, fit for a line of a log.
pub fn shown(text: &str) -> String {
    const MOST: usize = 200;
    let cut = if text.chars().nth(MOST).is_some() { "..." } else { "" };
    text.chars().take(MOST).flat_map(char::escape_debug).chain(cut.chars()).collect()
}

impl Profile {
    pub fn load(path: &Path) -> Result<Self, ProfileError> {
        let unreadable = |why| ProfileError::Unreadable { path: path.to_owned(), why };
        // A FIFO would hold NCCL up.
        if !fs::metadata(path).map_err(unreadable)?.is_file() {
            return Err(unreadable(io::Error::other("this is no regular file")));
        }
        let mut text = Vec::new();
        File::open(path).and_then(|f| f.take(MAX_BYTES + 1).read_to_end(&mut text)).map_err(unreadable)?;
        if text.len() as u64 > MAX_BYTES {
            return Err(ProfileError::TooLong { path: path.to_owned() });
        }
        Self::parse(&text, path)
    }

    /// `path` is named in errors.
    pub fn parse(text: &[u8], path: &Path) -> Result<Self, ProfileError> {
        let damaged = |why: String| ProfileError::Damaged { path: path.to_owned(), why };
        // A newer version is told as one, not as the first field that is unknown here.
        let value: serde_json::Value = serde_json::from_slice(text).map_err(|e| damaged(shown(&e.to_string())))?;
        match value.get("version").and_then(serde_json::Value::as_u64) {
            None => return Err(damaged("it states no version".to_owned())),
            Some(found) if found != u64::from(VERSION) => {
                return Err(ProfileError::Version { path: path.to_owned(), found });
            }
            Some(_) => {}
        }
        // From the text again: errors then name line and column.
        let profile: Self = serde_json::from_slice(text).map_err(|e| damaged(shown(&e.to_string())))?;
        profile.check().map_err(damaged)?;
        Ok(profile)
    }

    pub fn to_json(&self) -> String {
        // Maps with keys that are no text are what can fail, and there is none.
        serde_json::to_string_pretty(self).unwrap_or_default() + "\n"
    }

    fn check(&self) -> Result<(), String> {
        if self.pairs.is_empty() {
            return Err("it has no pair of a NIC and a GPU".to_owned());
        }
        for (i, pair) in self.pairs.iter().enumerate() {
            let names = || format!("pair {i} ({} and {})", shown(&pair.nic.name), shown(&pair.gpu.name));
            pair.check().map_err(|why| format!("{}: {why}", names()))?;
            let key = |p: &Pair| (p.nic.model.clone(), p.gpu.name.clone(), p.distance);
            if self.pairs[..i].iter().any(|other| key(other) == key(pair)) {
                return Err(format!("{}: there is another of the same kinds and distance", names()));
            }
        }
        Ok(())
    }

    /// What was measured of such hardware.
    pub fn pair(&self, nic_model: &str, gpu_name: &str, distance: Distance) -> Option<&Pair> {
        self.pairs.iter().find(|p| p.nic.model == nic_model && p.gpu.name == gpu_name && p.distance == distance)
    }

    /// The hardware that it is of, for people.
    pub fn hardware(&self) -> String {
        let names = |p: &Pair| format!("{} with {} at {}", shown(&p.nic.model), shown(&p.gpu.name), p.distance);
        let mut all: Vec<String> = self.pairs.iter().map(names).collect();
        all.sort();
        all.dedup();
        all.join(", ")
    }
}

impl Pair {
    fn check(&self) -> Result<(), String> {
        for pair in self.sizes.windows(2) {
            if pair[0].bytes >= pair[1].bytes {
                return Err(format!("size {} comes after {}", pair[1].bytes, pair[0].bytes));
            }
        }
        for size in &self.sizes {
            for figures in [size.gdr, size.staging, size.host].into_iter().flatten() {
                figures.check().map_err(|why| format!("size {}: {why}", size.bytes))?;
            }
        }
        let (Some(first), Some(last)) = (self.rules.first(), self.rules.last()) else {
            return Err("it has no rule".to_owned());
        };
        if first.from != 0 || last.to.is_some() {
            return Err("its rules do not reach from 0 to the end".to_owned());
        }
        for pair in self.rules.windows(2) {
            if pair[0].to != Some(pair[1].from) || pair[0].from >= pair[1].from {
                return Err(format!("its rules do not join at {}", pair[1].from));
            }
        }
        if self.rules.len() > 1 && self.rules.iter().any(|r| r.path == Way::Host) {
            return Err("host is for all sizes or for none".to_owned());
        }
        Ok(())
    }

    /// As if GPUDirect had not been measured, with the rules that follow then.
    pub fn without_gdr(&self) -> Self {
        let sizes: Vec<Measured> = self.sizes.iter().map(|s| Measured { gdr: None, ..s.clone() }).collect();
        Self { rules: derive_rules(&sizes), sizes, ..self.clone() }
    }

    /// As [`Self::without_gdr`], of staging. Host memory was measured at its best, which displaces no GPUDirect.
    pub fn without_staging(&self) -> Self {
        let gdr = self.measured_gdr();
        let left = |s: &Measured| Measured { staging: None, host: s.host.filter(|_| !gdr), ..s.clone() };
        let sizes: Vec<Measured> = self.sizes.iter().map(left).collect();
        Self { rules: derive_rules(&sizes), sizes, ..self.clone() }
    }

    /// GPUDirect was weighed.
    pub fn measured_gdr(&self) -> bool {
        self.gdr() || self.sizes.iter().any(|s| s.gdr.is_some())
    }

    /// The way of all sizes is through host memory, by NCCL's own kernels.
    pub fn host(&self) -> bool {
        self.rules.iter().all(|r| r.path == Way::Host)
    }

    /// The GPU's memory is registered with the NIC for some sizes.
    pub fn gdr(&self) -> bool {
        self.rules.iter().any(|r| r.path == Way::Gdr)
    }

    /// The sizes that are staged. The plugin follows one interval: of several the one in which most sizes were measured,
    /// of equal ones that of the larger messages.
    pub fn staged(&self) -> Sizes {
        self.intervals().map_or(Sizes::NONE, |(chosen, _)| chosen)
    }

    /// What the plugin does not follow, for people.
    pub fn not_followed(&self) -> Option<String> {
        let (chosen, others) = self.intervals()?;
        (!others.is_empty()).then(|| {
            let others = others.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            format!("one interval of sizes is staged, {chosen}; staging was also best {others}")
        })
    }

    fn intervals(&self) -> Option<(Sizes, Vec<Sizes>)> {
        let staged = self.rules.iter().filter(|r| r.path == Way::Staging);
        let mut all: Vec<Sizes> = staged.map(|r| Sizes { from: r.from, to: r.to.unwrap_or(u64::MAX) }).collect();
        let measured = |s: &Sizes| self.sizes.iter().filter(|m| s.contains(m.bytes)).count();
        let best = all.iter().enumerate().max_by_key(|(_, s)| (measured(s), s.from)).map(|(i, _)| i)?;
        Some((all.remove(best), all))
    }
}

impl Figures {
    fn check(&self) -> Result<(), String> {
        let named = [("latency_us", self.latency_us), ("gb_s", self.gb_s)];
        if let Some((name, value)) = named.into_iter().find(|(_, v)| !(v.is_finite() && *v > 0.0)) {
            return Err(format!("{name} is {value}"));
        }
        let named = [("cpu_share", self.cpu_share), ("pcie_bytes_per_byte", self.pcie_bytes_per_byte)];
        match named.into_iter().find(|(_, v)| !(v.is_finite() && *v >= 0.0)) {
            Some((name, value)) => Err(format!("{name} is {value}")),
            None => Ok(()),
        }
    }
}

impl Measured {
    fn of(&self, way: Way) -> Option<Figures> {
        match way {
            Way::Gdr => self.gdr,
            Way::Staging => self.staging,
            Way::Host => self.host,
        }
    }

    /// What a message of this size costs by a way; only to be compared with the same size by another.
    fn cost(&self, way: Way) -> Option<f64> {
        self.of(way).map(|f| if self.bytes < BULK { f.latency_us } else { 1.0 / f.gb_s })
    }
}

/// The rules that follow from measurements by rising size. Each holds from the size at which it was measured up to the next.
///
/// GPUDirect and staging are chosen by size: GPUDirect to begin with where it was measured, and a change only to what is
/// better by more than [`MARGIN`] at a size. Host is for all sizes or for none, since NCCL asks once where its buffers
/// should lie: it is taken where it is better by more than the margin on average (geometric mean over the sizes, each
/// counts alike), and where GPUDirect was not measured it is what must be beaten by as much.
pub fn derive_rules(sizes: &[Measured]) -> Vec<Rule> {
    let whole = |path| vec![Rule { from: 0, to: None, path }];
    let open = sizes.iter().any(|s| s.gdr.is_some());
    let mut rules: Vec<Rule> = Vec::new();
    // Sum of ln(cost by size / cost through host).
    let (mut gain, mut compared) = (0.0, 0.0);
    for size in sizes {
        let current = rules.last().map_or(if open { Way::Gdr } else { Way::Staging }, |r| r.path);
        let other = if current == Way::Gdr { Way::Staging } else { Way::Gdr };
        let (path, cost) = match (size.cost(current), size.cost(other)) {
            (Some(kept), Some(new)) if kept > new * MARGIN => (other, new),
            (Some(kept), _) => (current, kept),
            (None, Some(new)) => (other, new),
            (None, None) => continue,
        };
        if let Some(host) = size.cost(Way::Host) {
            gain += (cost / host).ln();
            compared += 1.0;
        }
        match rules.last_mut() {
            Some(last) if last.path == path => {}
            Some(last) => {
                last.to = Some(size.bytes);
                rules.push(Rule { from: size.bytes, to: None, path });
            }
            None => rules.push(Rule { from: 0, to: None, path }),
        }
    }
    if rules.is_empty() {
        return whole(Way::Host);
    }
    let ratio = if compared > 0.0 { f64::exp(gain / compared) } else { 1.0 };
    let host_was_measured = compared > 0.0;
    let host = host_was_measured && if open { ratio > MARGIN } else { ratio * MARGIN >= 1.0 };
    if host { whole(Way::Host) } else { rules }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn figures(latency_us: f64, gb_s: f64) -> Option<Figures> {
        Some(Figures { latency_us, gb_s, cpu_share: 0.5, pcie_bytes_per_byte: 1.0 })
    }

    /// Sizes with the cost of each way; 0 is not measured.
    fn measured(rows: &[(u64, f64, f64, f64)]) -> Vec<Measured> {
        let of = |cost: f64| if cost == 0.0 { None } else { figures(cost, 1.0 / cost) };
        rows.iter()
            .map(|&(bytes, gdr, staging, host)| Measured { bytes, gdr: of(gdr), staging: of(staging), host: of(host) })
            .collect()
    }

    fn derived(rows: &[(u64, f64, f64, f64)]) -> Vec<(u64, Option<u64>, Way)> {
        derive_rules(&measured(rows)).into_iter().map(|r| (r.from, r.to, r.path)).collect()
    }

    fn pair(rows: &[(u64, f64, f64, f64)]) -> Pair {
        let sizes = measured(rows);
        Pair {
            nic: Nic {
                name: "mlx5_0".into(),
                model: nic_model(0x2c9, 4129),
                firmware: "28.39".into(),
                port_gbps: 400.0,
            },
            gpu: Gpu {
                name: "NVIDIA H200".into(),
                compute_capability: Some("9.0".into()),
                bus_id: "0000:1b:00.0".into(),
            },
            distance: Distance::Pix,
            link: "32 GT/s x16".into(),
            rules: derive_rules(&sizes),
            sizes,
        }
    }

    fn profile() -> Profile {
        let rows = [(8, 2.0, 9.0, 3.0), (1 << 20, 2.0, 1.0, 4.0)];
        Profile { version: VERSION, made_by: "a test".into(), adapter: Adapter::Hardware, pairs: vec![pair(&rows)] }
    }

    fn refused(text: &str) -> String {
        Profile::parse(text.as_bytes(), Path::new("p.json")).expect_err("refused").to_string()
    }

    use Way::{Gdr, Host, Staging};

    #[test]
    fn the_better_way_by_size() {
        let rows = [(8, 2.0, 9.0, 9.0), (4096, 2.0, 3.0, 9.0), (1 << 20, 2.0, 1.0, 9.0), (4 << 20, 2.0, 1.0, 9.0)];
        assert_eq!(derived(&rows), [(0, Some(1 << 20), Gdr), (1 << 20, None, Staging)]);
        let staged = pair(&rows).staged();
        assert!(!staged.contains((1 << 20) - 1) && staged.contains(1 << 20) && staged.contains(u64::MAX - 1));
    }

    #[test]
    fn a_change_takes_more_than_the_margin() {
        let rows = [(8, 1.04, 1.0, 0.0), (16, 1.0, 1.04, 0.0)];
        assert_eq!(derived(&rows), [(0, None, Gdr)]);
        // Once staged, it stays so while GPUDirect is not better by as much.
        let rows = [(8, 1.0, 2.0, 0.0), (16, 1.1, 1.0, 0.0), (32, 1.0, 1.04, 0.0), (64, 1.0, 1.06, 0.0)];
        assert_eq!(derived(&rows), [(0, Some(16), Gdr), (16, Some(64), Staging), (64, None, Gdr)]);
    }

    #[test]
    fn small_messages_go_by_latency_and_large_ones_by_bandwidth() {
        let at = |bytes| Measured { bytes, gdr: figures(1.0, 1.0), staging: figures(2.0, 2.0), host: None };
        assert_eq!(derive_rules(&[at(BULK - 1)])[0].path, Gdr);
        assert_eq!(derive_rules(&[at(BULK)])[0].path, Staging);
    }

    #[test]
    fn host_is_for_all_sizes_or_for_none() {
        assert_eq!(derived(&[(8, 2.0, 3.0, 1.0), (64, 2.0, 2.0, 1.9)]), [(0, None, Host)]);
        // Better at one size, worse by as much at another.
        assert_eq!(derived(&[(8, 2.0, 3.0, 1.0), (64, 1.0, 2.0, 2.0)]), [(0, None, Gdr)]);
        assert_eq!(derived(&[(8, 1.04, 0.0, 1.0)]), [(0, None, Gdr)]);
        // Without GPUDirect staging must beat it.
        assert_eq!(derived(&[(8, 0.0, 1.0, 1.0)]), [(0, None, Host)]);
        assert_eq!(derived(&[(8, 0.0, 1.0, 1.04)]), [(0, None, Host)]);
        assert_eq!(derived(&[(8, 0.0, 1.0, 1.06)]), [(0, None, Staging)]);
    }

    #[test]
    fn what_was_not_measured_is_not_chosen() {
        assert_eq!(derived(&[]), [(0, None, Host)]);
        assert_eq!(derived(&[(8, 0.0, 0.0, 1.0)]), [(0, None, Host)]);
        assert_eq!(derived(&[(8, 0.0, 1.0, 0.0)]), [(0, None, Staging)]);
        // GPUDirect failed above a size.
        assert_eq!(derived(&[(8, 1.0, 9.0, 0.0), (64, 0.0, 9.0, 0.0)]), [(0, Some(64), Gdr), (64, None, Staging)]);
    }

    #[test]
    fn of_several_intervals_one_is_followed_and_the_others_are_told() {
        let p = pair(&[
            (8, 2.0, 1.0, 0.0),
            (16, 1.0, 2.0, 0.0),
            (32, 2.0, 1.0, 0.0),
            (64, 2.0, 1.0, 0.0),
            (128, 1.0, 2.0, 0.0),
        ]);
        assert_eq!(p.staged(), Sizes { from: 32, to: 128 });
        let told = p.not_followed().expect("another interval");
        assert!(told.contains("staged, from 32 to below 128 bytes") && told.ends_with("below 16 bytes"), "{told}");
        let one = pair(&[(8, 2.0, 1.0, 0.0)]);
        assert_eq!((one.staged(), one.not_followed()), (Sizes::ALL, None));
        let none = pair(&[(8, 1.0, 2.0, 0.0)]);
        assert_eq!((none.staged(), none.not_followed()), (Sizes::NONE, None));
    }

    #[test]
    fn what_is_written_reads_back() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("profile.json");
        fs::write(&file, profile().to_json()).expect("written");
        let read = Profile::load(&file).expect("a profile");
        assert_eq!(read, profile());
        let found = read.pair("0x02c9:4129", "NVIDIA H200", Distance::Pix).expect("the pair");
        assert!(found.gdr() && !found.host());
        assert!(read.pair("0x02c9:4129", "NVIDIA H200", Distance::Sys).is_none());
        assert!(read.pair("0x02c9:4131", "NVIDIA H200", Distance::Pix).is_none());
        assert!(read.pair("0x02c9:4129", "NVIDIA H100", Distance::Pix).is_none());
    }

    #[test]
    fn a_damaged_profile_is_refused_with_what_is_wrong() {
        let good = profile().to_json();
        for (what, text, why) in [
            ("cut", good[..good.len() / 2].to_owned(), "line"),
            ("empty", String::new(), "damaged"),
            ("no profile", "[1]".to_owned(), "states no version"),
            ("newer", good.replace("\"version\": 1", "\"version\": 2"), "version 2"),
            ("unknown field", good.replace("\"made_by\"", "\"made_bye\""), "made_bye"),
            ("negative", good.replace("\"latency_us\": 9.0", "\"latency_us\": -1.0"), "size 8: latency_us is -1"),
            ("gap", good.replace("\"from\": 1048576", "\"from\": 2097152"), "do not join at 2097152"),
            ("start", good.replace("\"from\": 0", "\"from\": 1"), "from 0 to the end"),
            ("host", good.replace("\"path\": \"staging\"", "\"path\": \"host\""), "for all sizes or for none"),
            ("order", good.replace("\"bytes\": 8", "\"bytes\": 9999999"), "size 1048576 comes after"),
        ] {
            assert_ne!(text, good, "{what}");
            let told = refused(&text);
            assert!(told.starts_with("p.json: ") && told.contains(why), "{what}: {told}");
        }
        let twice = Profile { pairs: [profile().pairs, profile().pairs].concat(), ..profile() };
        assert!(refused(&twice.to_json()).contains("another of the same kinds"));
        let long = refused(&good.replace("\"made_by\"", &format!("\"{}\\n\"", "x".repeat(9000))));
        assert!(long.len() < 500 && !long.contains('\n'), "{long}");
        let empty = Profile { pairs: Vec::new(), ..profile() };
        assert!(refused(&empty.to_json()).contains("no pair"));
        let absent = Profile::load(Path::new("/nonexistent/p.json")).expect_err("absent").to_string();
        assert!(absent.contains("/nonexistent/p.json") && absent.contains("No such file"), "{absent}");
        let device = Profile::load(Path::new("/dev/zero")).expect_err("no file").to_string();
        assert!(device.contains("no regular file"), "{device}");
        let dir = tempfile::tempdir().expect("a directory");
        let long = dir.path().join("long.json");
        File::create(&long).and_then(|f| f.set_len(MAX_BYTES + 1)).expect("a file");
        assert!(Profile::load(&long).expect_err("long").to_string().contains("no profile"));
    }

    proptest! {
        #[test]
        fn what_is_derived_is_valid(rows in prop::collection::vec((0f64..3.0, 0f64..3.0, 0f64..3.0), 0..12)) {
            let costs = |c: f64| if c < 1.0 { 0.0 } else { c };
            let rows: Vec<_> =
                rows.iter().enumerate().map(|(i, r)| (8 << i, costs(r.0), costs(r.1), costs(r.2))).collect();
            prop_assert_eq!(pair(&rows).check(), Ok(()));
        }

        #[test]
        fn no_text_panics(text in ".{0,200}", cut in 0usize..2000) {
            let _ = Profile::parse(text.as_bytes(), Path::new("p"));
            let good = profile().to_json();
            let _ = Profile::parse(&good.as_bytes()[..cut.min(good.len())], Path::new("p"));
        }
    }
}
