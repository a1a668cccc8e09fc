//! What this machine offers to GPU data: what was found of its NICs and GPUs, the profile that was measured on it, and the
//! way that is chosen for each pair.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::config::{Config, GpuPath};
use crate::memory;
use crate::memory::path::{Choice, Choices, DMABUF, Known, Neighbour, Sizes};
use crate::memory::profile::{self, Adapter, Profile};
use crate::topology::distance::Distance;
use crate::topology::function::Function;
use crate::topology::report::{Finding, Gpu, Nic, Pair, Report, Severity, Use};
use crate::verbs::DeviceAttr;

use super::gpu::{self, GpuMemory};

/// soft-hca names itself so in the place of its firmware.
const SOFT_HCA: &str = "soft-hca";

#[derive(Debug)]
pub struct Survey {
    pub report: Report,
    wish: GpuPath,
    relaxed_ordering: bool,
    /// `NCCL_NET_GDR_LEVEL`
    gdr_level: Option<String>,
    profile: Option<(PathBuf, Profile)>,
    /// Why the profile that the user names is not used.
    pub refused: Option<String>,
    /// Whether memory of the GPU at a bus id can be staged; or why not.
    staging: fn(&str) -> Result<(), String>,
    /// Whether the driver exports memory of the GPU at a bus id as dma-bufs; None: CUDA can't be asked.
    exports: fn(&str) -> Option<bool>,
}

/// A NIC, the GPUs as it sees them, and their ways.
struct Seen<'a> {
    nic: &'a Nic,
    near: Arc<[Neighbour]>,
    choices: Choices,
}

/// The way of a pair, as JSON.
#[derive(Debug, Serialize)]
pub struct Chosen {
    pub nic: String,
    pub gpu: String,
    pub path: String,
}

/// All of it, as JSON.
#[derive(Debug, Serialize)]
pub struct Shown<'a> {
    #[serde(flatten)]
    pub report: &'a Report,
    pub paths: Vec<Chosen>,
    pub profile_refused: Option<&'a str>,
    pub findings: Vec<Finding>,
}

/// What libibverbs says of a NIC, and sysfs of its place.
pub(super) fn nic(name: &str, attr: &DeviceAttr, gpu: &GpuMemory, place: Option<Function>) -> Nic {
    Nic {
        name: name.to_owned(),
        model: profile::nic_model(attr.vendor_id, attr.vendor_part_id),
        firmware: attr.firmware.clone(),
        port_gbps: 0.0,
        ports: 0,
        open: gpu.open(),
        memory: String::new(),
        bus_id: None,
        numa_node: None,
        link: None,
        relaxed_ordering: None,
        function: None,
    }
    .located(place)
}

fn adapter(nic: &Nic) -> Adapter {
    if nic.firmware.starts_with(SOFT_HCA) { Adapter::SoftHca } else { Adapter::Hardware }
}

impl Survey {
    /// The machine so far without NICs, and the profile.
    pub(super) fn begin(config: &Config) -> Self {
        let (mut profile, mut refused) = (None, None);
        if let Some(file) = &config.profile {
            match usable(file, config.gpu_path) {
                Ok(whole) => profile = Some((file.clone(), whole)),
                Err(why) => refused = Some(why),
            }
        }
        Self {
            report: Report::look(&config.sysroot),
            wish: config.gpu_path,
            relaxed_ordering: config.ib_pci_relaxed_ordering != 0,
            gdr_level: config.gdr_level.clone(),
            profile,
            refused,
            staging: if config.tells_flags { memory::gpu::available_at } else { |_| Err(gpu::NO_FLAGS.to_owned()) },
            exports: memory::gpu::exports_dmabuf,
        }
    }

    pub(super) fn add(&mut self, nic: Nic) {
        self.report.add(nic);
    }

    /// Adds a usable port to the NIC that was added last.
    pub(super) fn add_port(&mut self, gbps: f64) {
        if let Some(nic) = self.report.nics.last_mut() {
            nic.port_gbps += gbps;
            nic.ports += 1;
        }
    }

    /// All NICs and ports were added.
    pub(super) fn end(&mut self) {
        let Some((file, profile)) = &self.profile else { return };
        let known =
            |nic: &Nic| self.report.pairs_of(&nic.name).any(|(pair, gpu)| self.measured(nic, pair, gpu).is_some());
        if !self.report.nics.iter().any(known) {
            self.refused = Some(not_of_here(file, profile, &self.report));
            self.profile = None;
        }
    }

    /// Says by which ways a NIC takes GPU memory.
    pub(super) fn describe(&mut self, nic: &str, memory: &GpuMemory) {
        if let Some(nic) = self.report.nics.iter_mut().find(|n| n.name == nic) {
            nic.memory = memory.to_string();
        }
    }

    /// What a profile says of such a pair, or why it is not meant. None: it says nothing.
    fn measured(&self, nic: &Nic, pair: &Pair, gpu: &Gpu) -> Option<Result<&profile::Pair, String>> {
        let (_, profile) = self.profile.as_ref().filter(|(_, p)| p.adapter == adapter(nic))?;
        let there = profile.pair(&nic.model, &gpu.name, pair.distance)?;
        let speed = nic.gbps_of_a_port();
        let link = profile::links(nic.link, gpu.link);
        Some(match &there.nic.port_gbps {
            _ if pair.distance == Distance::Unknown && profile.adapter == Adapter::Hardware => {
                Err("it can't be seen how far apart they are, so nothing that was measured can be meant".to_owned())
            }
            gbps if (gbps - speed).abs() > speed * 0.05 => {
                Err(format!("it was measured with a port of {gbps} Gb/s, and this one has {speed}"))
            }
            _ if !there.link.is_empty() && !link.is_empty() && there.link != link => {
                Err(format!("it was measured over other links ({}; here {link})", profile::shown(&there.link)))
            }
            _ => Ok(there),
        })
    }

    /// The GPUs as a NIC sees them.
    pub(super) fn neighbours(&self, nic: &str) -> Arc<[Neighbour]> {
        let Some(nic) = self.report.nic(nic) else { return Arc::default() };
        let neighbour = |(pair, gpu): (&Pair, &Gpu)| {
            let measured = self.measured(nic, pair, gpu).and_then(Result::ok);
            let staged = measured.is_some_and(|p| p.staged() != Sizes::NONE) && !gpu.hidden;
            // The kernel modules tell what there can't be; CUDA is asked where it matters, as who measured asked it.
            let closed = self.report.gpu_driver.as_ref().is_some_and(|driver| !driver.open);
            let asked = || measured.filter(|_| !gpu.hidden).and_then(|_| (self.exports)(&gpu.bus_id));
            let file = self.profile.as_ref().map(|(file, _)| file);
            Neighbour {
                bus_id: gpu.bus_id.clone(),
                model: gpu.name.clone(),
                hidden: gpu.hidden,
                distance: pair.distance,
                exports: !closed && asked() != Some(false),
                profile: file.zip(measured).map(|(file, pair)| Arc::new((file.clone(), pair.clone()))),
                staging: if staged { (self.staging)(&gpu.bus_id) } else { Ok(()) },
            }
        };
        self.report.pairs_of(&nic.name).map(neighbour).collect()
    }

    fn seen<'a>(&'a self) -> Vec<Seen<'a>> {
        let seen = |nic: &'a Nic| {
            let near = self.neighbours(&nic.name);
            Seen { nic, choices: Choices::decide(self.wish, &nic.open, &near), near }
        };
        self.report.nics.iter().map(seen).collect()
    }

    /// What a person should know, a cause at a time.
    pub fn findings(&self) -> Vec<Finding> {
        let seen = self.seen();
        let gdr = |p: &Pair| of_pair(&seen, p).is_some_and(|choice| choice.gdr);
        let mut all = self.report.findings(&Use { gdr, relaxed_ordering: self.relaxed_ordering });
        all.extend(seen.iter().filter_map(|seen| self.no_dmabuf(seen)));
        let mut add = |severity, about: &str, text| all.push(Finding { severity, about: about.to_owned(), text });
        for nic in self.report.nics.iter().filter(|nic| self.wish == GpuPath::Gdr && nic.open.is_empty()) {
            let text = format!("NCCL_NET_RDMA_GPU_PATH=gdr is set, and GPUDirect is not open: {}", nic.memory);
            add(Severity::Warning, &nic.name, text);
        }
        for Seen { nic, near, .. } in &seen {
            for ((pair, gpu), neighbour) in self.report.pairs_of(&nic.name).zip(near.iter()).filter(|(_, n)| !n.hidden)
            {
                let about = format!("{} and GPU {}", nic.name, gpu.bus_id);
                if let Some(Err(why)) = self.measured(nic, pair, gpu) {
                    add(Severity::Warning, &about, format!("the profile is not followed: {why}"));
                }
                if let Some(why) = neighbour.known(&nic.open).differs_from_profile() {
                    add(Severity::Warning, &about, format!("the profile is not followed: {why}"));
                }
                if let Some(told) = neighbour.profile.as_ref().and_then(|p| p.1.not_followed()) {
                    add(Severity::Note, &about, told);
                }
            }
        }
        for gpu in self.report.gpus.iter().filter(|gpu| !gpu.hidden) {
            if let Some(text) = self.beyond_the_level(&seen, gpu) {
                add(Severity::Warning, &format!("GPU {}", gpu.bus_id), text);
            }
        }
        merged(all)
    }

    /// A NIC has nothing but dma-bufs open, would use them, and the GPUs' driver gives none.
    fn no_dmabuf(&self, Seen { nic, near, .. }: &Seen<'_>) -> Option<Finding> {
        let driver = self.report.gpu_driver.as_ref()?;
        let would = |n: &Neighbour| Choice::decide(self.wish, &Known { exports: true, ..n.known(&nic.open) }).gdr;
        // Who measured without knew it.
        let known = |n: &Neighbour| n.profile.as_ref().is_some_and(|p| !p.1.measured_gdr());
        if nic.open != [DMABUF] || !near.iter().any(|n| !n.exports && !n.hidden && would(n) && !known(n)) {
            return None;
        }
        let text = format!(
            "it takes GPU memory by dma-buf alone, and the GPU driver exports none ({}): that takes NVIDIA's open kernel \
             modules, or else nvidia_peermem; without either NCCL copies through host memory",
            driver.version
        );
        Some(Finding { severity: Severity::Warning, about: nic.name.clone(), text })
    }

    /// A way of GPU memory is forced for a GPU whose NICs are all further away than where NCCL uses one, or than is good.
    fn beyond_the_level(&self, seen: &[Seen<'_>], gpu: &Gpu) -> Option<String> {
        let pairs = || self.report.pairs.iter().filter(|p| p.gpu == gpu.bus_id);
        let nearest = pairs().map(|p| p.distance).min().filter(|distance| !distance.is_near())?;
        let (set, way) = match self.wish {
            GpuPath::Gdr => ("gdr", "GPUDirect"),
            GpuPath::Staging => ("staging", "staging"),
            GpuPath::Auto | GpuPath::Host => return None,
        };
        if !pairs().any(|p| of_pair(seen, p).is_some_and(|choice| choice.gpu_memory)) {
            return None;
        }
        let level = self.gdr_level.as_deref();
        if !reaches(level, nearest) {
            let level =
                level.map_or_else(|| "by default".to_owned(), |level| format!("with NCCL_NET_GDR_LEVEL={level}"));
            return Some(format!(
                "its nearest NIC is {nearest} apart and NCCL_NET_RDMA_GPU_PATH={set} is set, but {level} NCCL gives a NIC no GPU \
                 memory from so far: NCCL_NET_GDR_LEVEL=SYS lets it"
            ));
        }
        (self.wish == GpuPath::Gdr && nearest == Distance::Sys).then(|| {
            format!(
                "its nearest NIC is SYS apart and NCCL_NET_RDMA_GPU_PATH={set} is set: what goes between CPUs is often slower by \
                 {way} than through host memory"
            )
        })
    }

    /// For `nccl-rdma devices --json`.
    pub fn shown(&self) -> Shown<'_> {
        let seen = self.seen();
        let path = |pair: &Pair| of_pair(&seen, pair).map(ToString::to_string).unwrap_or_default();
        let chosen = |pair: &Pair| Chosen { nic: pair.nic.clone(), gpu: pair.gpu.clone(), path: path(pair) };
        Shown {
            report: &self.report,
            paths: self.report.pairs.iter().map(chosen).collect(),
            profile_refused: self.refused.as_deref(),
            findings: self.findings(),
        }
    }

    /// For people: NICs, GPUs, and each pair with its way.
    pub fn lines(&self) -> Vec<String> {
        let seen = self.seen();
        let driver = self.report.gpu_driver.iter().map(|d| format!("GPU driver: {}", d.version));
        let none = self.report.gpus.is_empty().then(|| "no GPU is visible in sysfs".to_owned());
        let nics = self.report.nics.iter().map(ToString::to_string);
        let gpus = self.report.gpus.iter().map(ToString::to_string);
        let pair = |pair| Some(format!("{pair}: {}", of_pair(&seen, pair)?));
        nics.chain(driver).chain(none).chain(gpus).chain(self.report.pairs.iter().filter_map(pair)).collect()
    }
}

fn of_pair<'a>(seen: &'a [Seen<'_>], pair: &Pair) -> Option<&'a Choice> {
    Some(seen.iter().find(|s| s.nic.name == pair.nic)?.choices.gpu(&pair.gpu))
}

/// Whether NCCL gives a NIC memory of GPUs so far away, with this value of `NCCL_NET_GDR_LEVEL`: a word, or the numbers of old.
fn reaches(level: Option<&str>, distance: Distance) -> bool {
    let most = match level {
        Some("SYS" | "4" | "5") => Distance::Unknown,
        // To NCCL the host bridges of one CPU are one.
        Some("PHB" | "3") => Distance::Node,
        Some("PIX" | "1") => Distance::Pix,
        Some("LOC" | "0") => return false,
        _ => Distance::Pxb,
    };
    distance <= most
}

/// Findings with the same text, once, with all whom they are about.
fn merged(all: Vec<Finding>) -> Vec<Finding> {
    let mut once: Vec<(Finding, usize)> = Vec::new();
    for finding in all {
        match once.iter_mut().find(|(f, _)| f.severity == finding.severity && f.text == finding.text) {
            Some((first, more)) if *more < NAMED => {
                first.about = format!("{}, {}", first.about, finding.about);
                *more += 1;
            }
            Some((_, more)) => *more += 1,
            None => once.push((finding, 1)),
        }
    }
    let count = |(finding, total): (Finding, usize)| match total.checked_sub(NAMED) {
        Some(more @ 1..) => Finding { about: format!("{} and {more} more", finding.about), ..finding },
        _ => finding,
    };
    once.into_iter().map(count).collect()
}

/// As many are named in a line, the others counted.
const NAMED: usize = 16;
const UNUSED: &str = "NCCL_NET_RDMA_PROFILE is not used";
const THEN: &str = "auto goes on by its defaults";

/// The profile, if it is whole.
fn usable(file: &Path, wish: GpuPath) -> Result<Profile, String> {
    if wish != GpuPath::Auto {
        return Err(format!("{UNUSED}: NCCL_NET_RDMA_GPU_PATH decides"));
    }
    Profile::load(file).map_err(|e| format!("{UNUSED}: {e}; {THEN}"))
}

/// Why a profile says nothing of this machine.
#[cold]
fn not_of_here(file: &Path, profile: &Profile, report: &Report) -> String {
    let file = file.display();
    let name = |adapter| match adapter {
        Adapter::Hardware => "a NIC",
        Adapter::SoftHca => "soft-hca",
    };
    if let Some(nic) = report.nics.first()
        && report.nics.iter().all(|nic| adapter(nic) != profile.adapter)
    {
        let (there, here) = (name(profile.adapter), name(adapter(nic)));
        return format!("{UNUSED}: {file} was measured over {there}, and this is {here}; {THEN}");
    }
    let mut here: Vec<String> = Vec::new();
    for nic in &report.nics {
        here.extend(
            report.pairs_of(&nic.name).map(|(p, g)| format!("{} with {} at {}", nic.model, g.name, p.distance)),
        );
    }
    here.sort();
    here.dedup();
    let here = if here.is_empty() { "no NIC with a GPU".to_owned() } else { here.join(", ") };
    format!("{UNUSED}: {file} is of other hardware: {}; this machine shows {here}; {THEN}", profile.hardware())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::profile::{Figures, Gpu, Measured, Rule, VERSION, Way};
    use crate::topology::distance::Distance;
    use crate::topology::fake::Fake;

    const NIC: &str = "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:01.0/0000:84:00.0";
    const NEAR: &str = "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:00.0/0000:83:00.0";
    const FAR: &str = "pci0000:c0/0000:c0:01.0/0000:c1:00.0";

    /// A NIC, a GPU below the same switch and one at the other CPU.
    fn machine() -> Fake {
        let fake = Fake::new();
        fake.nic(NIC, "0\n").gpu(NEAR, "0\n").gpu(FAR, "1\n");
        fake
    }

    fn survey(fake: &Fake, env: &[(&str, &str)], open: bool) -> Survey {
        let root = fake.root().to_string_lossy().into_owned();
        let find = |name: &str| match name {
            "NCCL_NET_RDMA_SYSROOT" => Some(root.clone()),
            _ => env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()),
        };
        let (config, warnings) = Config::load(&find, std::iter::empty());
        assert_eq!(warnings, []);
        let nic = Nic {
            name: "mlx5_0".into(),
            model: profile::nic_model(0x2c9, 4129),
            firmware: "28.39.1002".into(),
            port_gbps: 0.0,
            ports: 0,
            open: if open { vec!["dma-buf"] } else { Vec::new() },
            memory: "the words of the probe".into(),
            bus_id: None,
            numa_node: None,
            link: None,
            relaxed_ordering: None,
            function: None,
        }
        .located(Function::at(fake.root(), &format!("/sys/devices/{NIC}")));
        let mut survey = Survey::begin(&config);
        survey.staging = |_| Ok(());
        survey.exports = |_| None;
        survey.add(nic);
        survey.add_port(200.0);
        survey.end();
        survey
    }

    /// Of the near pair: staging from 64 bytes on.
    fn measured() -> Profile {
        let figures = Some(Figures { latency_us: 1.0, gb_s: 1.0, cpu_share: 0.1, pcie_bytes_per_byte: 1.0 });
        Profile {
            version: VERSION,
            made_by: "a test".into(),
            adapter: Adapter::Hardware,
            pairs: vec![profile::Pair {
                nic: profile::Nic {
                    name: "mlx5_7".into(),
                    model: "0x02c9:4129".into(),
                    firmware: "28.38".into(),
                    port_gbps: 200.0,
                },
                gpu: Gpu { name: "NVIDIA H200".into(), compute_capability: None, bus_id: "0000:aa:00.0".into() },
                distance: Distance::Pix,
                link: String::new(),
                sizes: vec![Measured { bytes: 64, gdr: figures, staging: figures, host: None }],
                rules: vec![
                    Rule { from: 0, to: Some(64), path: Way::Gdr },
                    Rule { from: 64, to: None, path: Way::Staging },
                ],
            }],
        }
    }

    fn with_profile(fake: &Fake, profile: &str, env: &[(&str, &str)]) -> Survey {
        fake.put("profile.json", profile);
        let file = fake.root().join("profile.json").to_string_lossy().into_owned();
        let env: Vec<_> = env.iter().copied().chain([("NCCL_NET_RDMA_PROFILE", file.as_str())]).collect();
        survey(fake, &env, true)
    }

    fn path(survey: &Survey, gpu: &str) -> String {
        let pair = survey.report.pairs.iter().find(|p| p.gpu == gpu).expect("a pair");
        of_pair(&survey.seen(), pair).expect("a way").to_string()
    }

    #[test]
    fn each_pair_says_which_rule_decided() {
        let fake = machine();
        let found = survey(&fake, &[], true);
        assert_eq!(path(&found, "0000:83:00.0"), "GPUDirect (rule: GPUDirect is open (dma-buf), distance PIX)");
        assert!(path(&found, "0000:c1:00.0").contains("SYS apart"));
        assert!(
            path(&survey(&fake, &[], false), "0000:83:00.0").starts_with("host memory (rule: GPUDirect is not open")
        );
        let lines = found.lines();
        assert_eq!(lines.len(), 5, "{lines:?}");
        assert!(lines[3].starts_with("mlx5_0 and GPU 0000:83:00.0: PIX, bridge "), "{lines:?}");
        let json = serde_json::to_value(found.shown()).expect("JSON");
        assert_eq!(json["paths"][0]["path"], path(&found, "0000:83:00.0"));
        assert_eq!((&json["nics"][0]["name"], &json["profile_refused"]), (&"mlx5_0".into(), &serde_json::Value::Null));
    }

    #[test]
    fn a_profile_decides_for_hardware_like_that_which_was_measured() {
        let fake = machine();
        let found = with_profile(&fake, &measured().to_json(), &[]);
        assert_eq!(found.refused, None);
        let near = path(&found, "0000:83:00.0");
        assert!(near.starts_with("GPUDirect, staging from 64 bytes on (rule: profile /"), "{near}");
        assert!(near.contains("profile.json: staging is best from 64 bytes on"), "{near}");
        // Nothing was measured of this distance.
        assert!(path(&found, "0000:c1:00.0").contains("SYS apart"));
    }

    /// Each as the user meets it: one line with the file and the reason, and the defaults.
    #[test]
    fn a_profile_that_does_not_fit_is_refused() {
        let fake = machine();
        let good = measured();
        let mut other_gpu = good.clone();
        other_gpu.pairs[0].gpu.name = "NVIDIA A100-SXM4-80GB".into();
        let mut soft = good.clone();
        soft.adapter = Adapter::SoftHca;
        let newer = good.to_json().replace("\"version\": 1", "\"version\": 9");
        for (text, words) in [
            (good.to_json()[..100].to_owned(), "damaged, or no profile"),
            (newer, "version 9 of the format, and this build knows 1"),
            (soft.to_json(), "was measured over soft-hca, and this is a NIC"),
            (
                other_gpu.to_json(),
                "of other hardware: 0x02c9:4129 with NVIDIA A100-SXM4-80GB at PIX; this machine shows 0x02c9:4129 with NVIDIA \
                 H200 at PIX, 0x02c9:4129 with NVIDIA H200 at SYS",
            ),
        ] {
            let found = with_profile(&fake, &text, &[]);
            let why = found.refused.clone().expect("refused");
            assert!(why.starts_with("NCCL_NET_RDMA_PROFILE is not used: /") && why.contains(words), "{why}");
            assert!(why.ends_with("auto goes on by its defaults"), "{why}");
            assert!(path(&found, "0000:83:00.0").contains("GPUDirect is open"), "{why}");
        }
        let decided = with_profile(&fake, &good.to_json(), &[("NCCL_NET_RDMA_GPU_PATH", "gdr")]);
        assert!(decided.refused.is_some_and(|why| why.contains("NCCL_NET_RDMA_GPU_PATH decides")));
        let empty = survey(&Fake::new(), &[("NCCL_NET_RDMA_PROFILE", "/nonexistent")], true);
        assert!(empty.refused.is_some_and(|why| why.contains("No such file")));
    }

    #[test]
    fn gpudirect_that_is_forced_and_closed_is_a_warning() {
        let warned = |open| {
            let found = survey(&machine(), &[("NCCL_NET_RDMA_GPU_PATH", "gdr")], open).findings();
            let warnings = found.into_iter().filter(|f| f.severity == Severity::Warning);
            warnings.map(|f| f.to_string()).collect::<Vec<_>>()
        };
        let [closed] = &warned(false)[..] else { panic!("{:?}", warned(false)) };
        assert!(
            closed.starts_with("mlx5_0: NCCL_NET_RDMA_GPU_PATH=gdr is set")
                && closed.ends_with("the words of the probe")
        );
        let [far] = &warned(true)[..] else { panic!("{:?}", warned(true)) };
        assert!(far.starts_with("GPU 0000:c1:00.0: its nearest NIC is SYS apart"), "{far}");
    }

    fn warnings(survey: &Survey) -> Vec<String> {
        let warnings = survey.findings().into_iter().filter(|f| f.severity == Severity::Warning);
        warnings.map(|f| f.to_string()).collect()
    }

    /// On a machine with many NICs and GPUs, and a job of many processes.
    #[test]
    fn one_cause_is_one_warning() {
        let fake = Fake::new();
        let classic = "0x0 0x0 0x0\n0xd0000000 0xdfffffff 0x14220c\n";
        for bus in ["0000:c1:00.0", "0000:c2:00.0"] {
            let gpu = format!("pci0000:c0/0000:c0:01.0/{bus}");
            fake.gpu(&gpu, "1\n").function(&gpu, &[("resource", classic)]);
        }
        fake.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module 535\n");
        let mut found = survey(&fake, &[], true);
        found.report.nics[0].function = None;
        let second = Nic { name: "mlx5_1".into(), ..found.report.nics[0].clone() };
        found.add(second);
        let told = warnings(&found);
        let [closed] = &told[..] else { panic!("{told:#?}") };
        assert!(closed.starts_with("mlx5_0, mlx5_1: it takes GPU memory by dma-buf alone"), "{closed}");
        found.report.gpu_driver = None;
        let told = warnings(&found);
        let [bar] = &told[..] else { panic!("{told:#?}") };
        assert!(bar.starts_with("GPU 0000:c1:00.0, GPU 0000:c2:00.0: BAR1 has 256 MiB"), "{bar}");
        // Those of other processes are none of ours.
        std::fs::remove_dir_all(fake.root().join("proc/driver/nvidia/gpus/0000:c2:00.0")).expect("a folder");
        fake.put("proc/driver/nvidia/version", "");
        let told = warnings(&survey(&fake, &[], true));
        assert!(told.iter().any(|t| t.starts_with("GPU 0000:c1:00.0: BAR1 has")), "{told:#?}");
        let many = (0..20).map(|i| Finding { severity: Severity::Note, about: format!("n{i}"), text: "x".into() });
        let [one] = &merged(many.collect())[..] else { panic!("several") };
        assert!(one.to_string().ends_with(", n15 and 4 more: x"), "{one}");
    }

    /// N48, N56.
    #[test]
    fn a_driver_that_exports_no_dma_buf_is_a_warning_where_nothing_else_is_open() {
        let fake = machine();
        let warns = |version: &str, ways: &[&'static str], wish| {
            fake.put("proc/driver/nvidia/version", format!("NVRM version: {version}\n"));
            let mut found = survey(&fake, &[("NCCL_NET_RDMA_GPU_PATH", wish)], true);
            found.report.nics[0].open = ways.to_vec();
            warnings(&found).iter().any(|told| told.contains("exports none (NVIDIA"))
        };
        let (open, closed) = ("NVIDIA UNIX Open Kernel Module for x86_64 580", "NVIDIA UNIX x86_64 Kernel Module 535");
        assert!(warns(closed, &["dma-buf"], "auto") && warns(closed, &["dma-buf"], "gdr"));
        assert!(!warns(closed, &["dma-buf", "nvidia_peermem"], "auto") && !warns(open, &["dma-buf"], "auto"));
        assert!(!warns(closed, &["dma-buf"], "staging") && !warns(closed, &["dma-buf"], "host"));
    }

    #[test]
    fn a_forced_way_that_nccl_would_not_take_is_a_warning() {
        let fake = Fake::new();
        fake.nic(NIC, "0\n").gpu(FAR, "1\n");
        let warned = |path, level| {
            let env = [("NCCL_NET_RDMA_GPU_PATH", path), ("NCCL_NET_GDR_LEVEL", level)];
            warnings(&survey(&fake, &env, true)).join("\n")
        };
        for (path, level, words) in [
            ("gdr", "", "by default NCCL gives a NIC no GPU memory from so far: NCCL_NET_GDR_LEVEL=SYS lets it"),
            ("staging", "PHB", "with NCCL_NET_GDR_LEVEL=PHB NCCL gives"),
            ("gdr", "SYS", "often slower by GPUDirect"),
        ] {
            let told = warned(path, level);
            assert!(
                told.starts_with("GPU 0000:c1:00.0: its nearest NIC is SYS apart") && told.contains(words),
                "{told}"
            );
        }
        assert_eq!([warned("staging", "4"), warned("host", ""), warned("auto", "")], [""; 3]);
        let (phb, node) = (Distance::Phb, Distance::Node);
        assert!(reaches(Some("PHB"), node) && reaches(Some("3"), phb) && !reaches(None, phb));
        assert!(!reaches(Some("PHB"), Distance::Unknown) && reaches(Some("SYS"), Distance::Unknown));
    }

    /// Of another speed, over another link, or nobody knows how far away.
    #[test]
    fn a_pair_that_was_measured_otherwise_is_not_followed() {
        let fake = machine();
        let with = |change: &dyn Fn(&mut profile::Pair)| {
            let mut profile = measured();
            change(&mut profile.pairs[0]);
            let found = with_profile(&fake, &profile.to_json(), &[]);
            assert_eq!(found.refused, None);
            (path(&found, "0000:83:00.0"), warnings(&found).join("\n"))
        };
        for (change, words) in [
            ((|p| p.nic.port_gbps = 400.0) as fn(&mut profile::Pair), "with a port of 400 Gb/s, and this one has 200"),
            (|p| p.link = "NIC PCIe 16 GT/s x8".into(), "other links (NIC PCIe 16 GT/s x8; here NIC PCIe 16 GT/s x16)"),
        ] {
            let (path, told) = with(&change);
            assert!(path.contains("GPUDirect is open") && told.contains(words), "{path} {told}");
        }
        let (path, told) = with(&|p| p.link = "NIC PCIe 16 GT/s x16".into());
        assert!(path.contains("staging from 64") && told.is_empty(), "{path} {told}");
        let unknown = Fake::new();
        unknown.nic(NIC, "-1\n").gpu(FAR, "-1\n");
        let mut profile = measured();
        profile.pairs[0].distance = Distance::Unknown;
        let found = with_profile(&unknown, &profile.to_json(), &[]);
        assert!(warnings(&found).join("").contains("can't be seen how far apart"), "{:?}", warnings(&found));
    }

    #[test]
    fn a_profile_that_is_not_followed_is_a_warning() {
        let fake = machine();
        let mut found = with_profile(&fake, &measured().to_json(), &[]);
        found.staging = |_| Err("there is no CUDA driver".into());
        let told = warnings(&found);
        let [why] = &told[..] else { panic!("{told:?}") };
        assert!(why.contains("staging is best, and can't be had: there is no CUDA driver"), "{why}");
        assert!(path(&found, "0000:83:00.0").starts_with("GPUDirect (rule: "), "{}", path(&found, "0000:83:00.0"));
        let mut without = measured();
        without.pairs[0].sizes[0].gdr = None;
        without.pairs[0].rules = vec![Rule { from: 0, to: None, path: Way::Staging }];
        let told = warnings(&with_profile(&fake, &without.to_json(), &[])).join("\n");
        assert!(told.contains("measured without GPUDirect, which is open now"), "{told}");
    }

    /// On any newer kernel the NIC's part of a dma-buf is open; `bench paths` asked the GPU, too.
    #[test]
    fn a_profile_measured_without_gpudirect_is_followed_where_the_gpu_gives_no_dma_buf() {
        let mut without = measured();
        without.pairs[0].sizes[0].gdr = None;
        without.pairs[0].rules = vec![Rule { from: 0, to: None, path: Way::Staging }];
        let follows = |found: &Survey| {
            let (near, told) = (path(found, "0000:83:00.0"), warnings(found).join("\n"));
            assert!(
                near.starts_with("staging (rule: profile /") && !told.contains("GPU 0000:83:00.0"),
                "{near} {told}"
            );
        };
        let closed = machine();
        closed.put("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module 535\n");
        follows(&with_profile(&closed, &without.to_json(), &[]));
        let fake = machine();
        let mut asked = with_profile(&fake, &without.to_json(), &[]);
        asked.exports = |_| Some(false);
        follows(&asked);
        asked.exports = |_| Some(true);
        assert!(path(&asked, "0000:83:00.0").starts_with("GPUDirect (rule: "), "{}", path(&asked, "0000:83:00.0"));
    }
}
