//! What this machine offers to GPU data: what was found of its NICs and GPUs, the profile that was measured on it, and the
//! way that is chosen for each pair.

use std::path::PathBuf;

use serde::Serialize;

use crate::config::{Config, GpuPath};
use crate::memory::path::{Choice, Known, Paths};
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
    pub(super) fn paths(&self, nic: &str, gpu: &GpuMemory) -> Paths {
        self.choose(nic, &open(gpu))
    }

    fn choose(&self, nic: &str, open: &[&'static str]) -> Paths {
        let unknown = Choice::decide(self.wish, &Known { open, distance: None, profile: None });
        let Some(found) = self.report.nic(nic) else { return Paths::new(unknown, Vec::new()) };
        let chosen = self.report.pairs_of(nic).map(|(pair, gpu)| {
            let profile = self.profile.as_ref().and_then(|(file, profile)| {
                Some((file.as_path(), profile.pair(&found.model, &gpu.name, pair.distance)?))
            });
            (gpu.bus_id.clone(), Choice::decide(self.wish, &Known { open, distance: Some(pair.distance), profile }))
        });
        Paths::new(unknown, chosen.collect())
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
