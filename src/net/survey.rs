//! What this machine offers to GPU data: what was found of its NICs and GPUs, the profile that was measured on it, and the
//! way that is chosen for each pair.

use std::path::PathBuf;

use serde::Serialize;

use crate::config::{Config, GpuPath};
use crate::memory::path::{Choice, Choices, Known};
use crate::memory::profile::{self, Adapter, Profile};
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

/// What libibverbs says of a NIC, for [`Survey::new`]; where it is comes from sysfs.
pub(super) fn nic(name: &str, attr: &DeviceAttr, port_gbps: f64, gpu: &GpuMemory) -> Nic {
    Nic {
        name: name.to_owned(),
        model: profile::nic_model(attr.vendor_id, attr.vendor_part_id),
        firmware: attr.firmware.clone(),
        port_gbps,
        open: open(gpu),
        memory: gpu.to_string(),
        bus_id: None,
        numa_node: None,
        link: None,
        relaxed_ordering: None,
        function: None,
    }
}

/// The open ways by name, in the order in which NCCL tries them.
fn open(gpu: &GpuMemory) -> Vec<&'static str> {
    let ways = [("dma-buf", gpu.dmabuf.is_ok()), ("nvidia_peermem", gpu.peermem.is_ok())];
    ways.into_iter().filter(|(_, open)| *open).map(|(name, _)| name).collect()
}

impl Survey {
    pub(super) fn new(nics: Vec<Nic>, config: &Config) -> Self {
        let report = Report::look(&config.sysroot, nics);
        let (profile, refused) = match &config.profile {
            Some(file) => match usable_profile(file.clone(), &report, config.gpu_path) {
                Ok(profile) => (Some((file.clone(), profile)), None),
                Err(why) => (None, Some(format!("NCCL_NET_RDMA_PROFILE is not used: {why}"))),
            },
            None => (None, None),
        };
        let relaxed_ordering = config.ib_pci_relaxed_ordering != 0;
        Self { report, wish: config.gpu_path, relaxed_ordering, profile, refused }
    }

    /// What is chosen for a device whose first NIC this is and that has these ways.
    pub(super) fn choices(&self, nic: &str, gpu: &GpuMemory) -> Choices {
        self.choose(nic, &open(gpu))
    }

    fn choose(&self, nic: &str, open: &[&'static str]) -> Choices {
        let unknown = Choice::decide(self.wish, &Known { open, distance: None, profile: None });
        let Some(found) = self.report.nic(nic) else { return Choices::new(unknown, Vec::new()) };
        let chosen = self.report.pairs_of(nic).map(|(pair, gpu)| {
            let profile = self.profile.as_ref().and_then(|(file, profile)| {
                Some((file.as_path(), profile.pair(&found.model, &gpu.name, pair.distance)?))
            });
            (gpu.bus_id.clone(), Choice::decide(self.wish, &Known { open, distance: Some(pair.distance), profile }))
        });
        Choices::new(unknown, chosen.collect())
    }

    fn of_pair(&self, pair: &Pair) -> Choice {
        let open = self.report.nic(&pair.nic).map_or(&[][..], |nic| &nic.open);
        self.choose(&pair.nic, open).gpu(&pair.gpu).clone()
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
        for nic in self.report.nics.iter() {
            for (pair, gpu) in self.report.pairs_of(&nic.name) {
                let measured = self.profile.as_ref().and_then(|(_, p)| p.pair(&nic.model, &gpu.name, pair.distance));
                if let Some(told) = measured.and_then(profile::Pair::not_followed) {
                    add(Severity::Note, &format!("{} and GPU {}", nic.name, gpu.bus_id), told);
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
        let nics = self.report.nics.iter().map(ToString::to_string);
        let gpus = self.report.gpus.iter().map(ToString::to_string);
        let pairs = self.report.pairs.iter().map(|pair| format!("{pair}: {}", self.of_pair(pair)));
        nics.chain(gpus).chain(pairs).collect()
    }
}

/// The profile, if it is whole and of this machine.
fn usable_profile(file: PathBuf, report: &Report, wish: GpuPath) -> Result<Profile, String> {
    if wish != GpuPath::Auto {
        return Err("NCCL_NET_RDMA_GPU_PATH decides".to_owned());
    }
    let then = "auto goes on by its defaults";
    let profile = Profile::load(&file).map_err(|e| format!("{e}; {then}"))?;
    let soft = |nic: &Nic| nic.firmware.starts_with(SOFT_HCA);
    let adapter = match report.nics.first() {
        Some(nic) if soft(nic) => Adapter::SoftHca,
        _ => Adapter::Hardware,
    };
    if profile.adapter != adapter {
        let name = |adapter| match adapter {
            Adapter::Hardware => "a NIC",
            Adapter::SoftHca => "soft-hca",
        };
        return Err(format!(
            "{} was measured over {}, and this is {}; {then}",
            file.display(),
            name(profile.adapter),
            name(adapter)
        ));
    }
    let known = report.nics.iter().any(|nic| {
        report.pairs_of(&nic.name).any(|(pair, gpu)| profile.pair(&nic.model, &gpu.name, pair.distance).is_some())
    });
    if !known {
        let mut here: Vec<String> = Vec::new();
        for nic in &report.nics {
            here.extend(
                report.pairs_of(&nic.name).map(|(p, g)| format!("{} with {} at {}", nic.model, g.name, p.distance)),
            );
        }
        here.sort();
        here.dedup();
        let here = if here.is_empty() { "no NIC with a GPU".to_owned() } else { here.join(", ") };
        return Err(format!(
            "{} is of other hardware: {}; this machine shows {here}; {then}",
            file.display(),
            profile.hardware()
        ));
    }
    Ok(profile)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::profile::{Figures, Gpu, Measured, Rule, VERSION, Way};
    use crate::topology::distance::Distance;
    use crate::topology::fake::Fake;
    use crate::topology::function::Function;

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
        Survey::new(vec![nic], &config)
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
        let words = Survey::new(Vec::new(), &Config::load(&|_| None, std::iter::empty()).0);
        assert!(words.lines().iter().all(|l| l.starts_with("GPU ")), "{:?}", words.lines());
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
