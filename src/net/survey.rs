//! What this machine offers to GPU data: what was found of its NICs and GPUs, the profile that was measured on it, and the
//! way that is chosen for each pair.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Serialize;

use crate::config::{Config, GpuPath};
use crate::memory::path::{Choice, Choices, Neighbour};
use crate::memory::profile::{self, Adapter, Profile};
use crate::topology::function::Function;
use crate::topology::report::{Finding, Nic, Pair, Report, Severity, Use};
use crate::verbs::DeviceAttr;

use super::gpu::GpuMemory;

/// soft-hca names itself so in the place of its firmware.
const SOFT_HCA: &str = "soft-hca";

#[derive(Debug)]
pub struct Survey {
    pub report: Report,
    wish: GpuPath,
    relaxed_ordering: bool,
    profile: Option<(PathBuf, Profile)>,
    /// Why the profile that the user names is not used.
    pub refused: Option<String>,
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
        open: gpu.open(),
        memory: gpu.to_string(),
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
            profile,
            refused,
        }
    }

    /// Adds a NIC; the GPUs as it sees them.
    pub(super) fn add(&mut self, nic: Nic) -> Arc<[Neighbour]> {
        let name = nic.name.clone();
        self.report.add(nic);
        self.neighbours(&name)
    }

    /// Adds a usable port to the NIC that was added last.
    pub(super) fn add_port(&mut self, gbps: f64) {
        if let Some(nic) = self.report.nics.last_mut() {
            nic.port_gbps += gbps;
        }
    }

    /// All NICs were added.
    pub(super) fn end(&mut self) {
        let fits = |pair: &Pair| self.neighbours(&pair.nic).iter().any(|n| n.profile.is_some());
        let Some((file, profile)) = &self.profile else { return };
        if !self.report.pairs.iter().any(fits) {
            self.refused = Some(not_of_here(file, profile, &self.report));
            self.profile = None;
        }
    }

    fn neighbours(&self, nic: &str) -> Arc<[Neighbour]> {
        let Some(found) = self.report.nic(nic) else { return Arc::default() };
        let measured = |pair: &Pair, gpu: &str| {
            let (file, profile) = self.profile.as_ref().filter(|(_, p)| p.adapter == adapter(found))?;
            Some(Arc::new((file.clone(), profile.pair(&found.model, gpu, pair.distance)?.clone())))
        };
        self.report
            .pairs_of(nic)
            .map(|(pair, gpu)| Neighbour {
                bus_id: gpu.bus_id.clone(),
                distance: pair.distance,
                profile: measured(pair, &gpu.name),
            })
            .collect()
    }

    fn of_pair(&self, pair: &Pair) -> Choice {
        let open = self.report.nic(&pair.nic).map_or(&[][..], |nic| &nic.open);
        Choices::decide(self.wish, open, &self.neighbours(&pair.nic)).gpu(&pair.gpu).clone()
    }

    /// What a person should know.
    pub fn findings(&self) -> Vec<Finding> {
        let forced = self.wish == GpuPath::Gdr;
        let how = Use { gdr: |p: &Pair| self.of_pair(p).gdr, forced, relaxed_ordering: self.relaxed_ordering };
        let mut all = self.report.findings(&how);
        let mut add = |severity, about: &str, text| all.push(Finding { severity, about: about.to_owned(), text });
        for nic in self.report.nics.iter().filter(|nic| forced && nic.open.is_empty()) {
            let text = format!("NCCL_NET_RDMA_GPU_PATH=gdr is set, and GPUDirect is not open: {}", nic.memory);
            add(Severity::Warning, &nic.name, text);
        }
        for nic in &self.report.nics {
            for neighbour in self.neighbours(&nic.name).iter() {
                if let Some(told) = neighbour.profile.as_ref().and_then(|p| p.1.not_followed()) {
                    add(Severity::Note, &format!("{} and GPU {}", nic.name, neighbour.bus_id), told);
                }
            }
        }
        all
    }

    /// For `nccl-rdma devices --json`.
    pub fn shown(&self) -> Shown<'_> {
        let chosen =
            |pair: &Pair| Chosen { nic: pair.nic.clone(), gpu: pair.gpu.clone(), path: self.of_pair(pair).to_string() };
        Shown {
            report: &self.report,
            paths: self.report.pairs.iter().map(chosen).collect(),
            profile_refused: self.refused.as_deref(),
            findings: self.findings(),
        }
    }

    /// For people: NICs, GPUs, and each pair with its way.
    pub fn lines(&self) -> Vec<String> {
        let driver = self.report.gpu_driver.iter().map(|d| format!("GPU driver: {}", d.version));
        let nics = self.report.nics.iter().map(ToString::to_string);
        let gpus = self.report.gpus.iter().map(ToString::to_string);
        let pairs = self.report.pairs.iter().map(|pair| format!("{pair}: {}", self.of_pair(pair)));
        nics.chain(driver).chain(gpus).chain(pairs).collect()
    }
}

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
            port_gbps: 200.0,
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
        survey.add(nic);
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
        survey.of_pair(pair).to_string()
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
}
