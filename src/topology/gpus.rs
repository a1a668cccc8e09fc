//! The GPUs that the machine shows, found in sysfs: no CUDA is needed, and none is asked.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

use super::function::Function;
use super::pci::under;

const NVIDIA: u32 = 0x10de;
const DRIVERS_GPUS: &str = "/proc/driver/nvidia/gpus";
/// VGA and 3D controllers, without the programming interface.
const CLASSES: [u32; 2] = [0x0300, 0x0302];

/// NVIDIA's names of generations, the older first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum Generation {
    Pascal,
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
}

impl Generation {
    /// Of a model, as the driver names it (`NVIDIA H100 80GB HBM3`); None of one that is not known here.
    pub fn of(model: &str) -> Option<Self> {
        // The part of a model's name that tells its generation.
        const PARTS: [(Generation, &[&str]); 7] = [
            (Generation::Pascal, &["P100", "P40", "P4"]),
            (Generation::Volta, &["V100", "V100S"]),
            (Generation::Turing, &["T4", "T40"]),
            (Generation::Ampere, &["A100", "A800", "A30", "A40", "A10", "A10G", "A16", "A2", "A6000", "A5000"]),
            (Generation::Ada, &["L4", "L40", "L40S", "L20", "L2"]),
            (Generation::Hopper, &["H100", "H200", "H800", "H20", "GH200"]),
            (Generation::Blackwell, &["B100", "B200", "B300", "GB200", "GB300", "GB10"]),
        ];
        let words = || model.split(|c: char| !c.is_ascii_alphanumeric());
        PARTS.iter().find(|(_, parts)| words().any(|word| parts.contains(&word))).map(|(generation, _)| *generation)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    pub function: Function,
    /// As the driver names it; where that is hidden the PCI ids.
    pub name: String,
    pub generation: Option<Generation>,
    pub bar1_bytes: Option<u64>,
    /// The driver lists its GPUs, and not this one: it is not for this process.
    pub hidden: bool,
}

impl Gpu {
    fn new(root: &Path, function: Function) -> Self {
        let named = model(root, function.bus_id());
        let ids = || format!("{NVIDIA:04x}:{:04x}", function.device().unwrap_or(0));
        Self {
            generation: named.as_deref().and_then(Generation::of),
            bar1_bytes: function.largest_window(),
            hidden: named.is_none() && under(root, DRIVERS_GPUS).is_dir(),
            name: named.unwrap_or_else(ids),
            function,
        }
    }
}

/// The GPUs in order of bus id.
pub fn find(root: &Path) -> Vec<Gpu> {
    let Ok(entries) = fs::read_dir(under(root, "/sys/bus/pci/devices")) else { return Vec::new() };
    let is_gpu = |function: &Function| {
        function.vendor() == Some(NVIDIA) && function.class().is_some_and(|class| CLASSES.contains(&(class >> 8)))
    };
    let mut found: Vec<Gpu> = entries
        .filter_map(|e| Function::at(root, &format!("/sys/bus/pci/devices/{}", e.ok()?.file_name().to_str()?)))
        .filter(is_gpu)
        .map(|function| Gpu::new(root, function))
        .collect();
    found.sort_by(|a, b| a.function.bus_id().cmp(b.function.bus_id()));
    found
}

/// NVIDIA's kernel modules.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Driver {
    /// What they say of themselves.
    pub version: String,
    /// The open ones, which export dma-bufs; the others do not.
    pub open: bool,
}

/// The modules that are loaded, if they are.
pub fn driver(root: &Path) -> Option<Driver> {
    let text = fs::read_to_string(under(root, "/proc/driver/nvidia/version")).ok()?;
    let version = text.lines().find_map(|line| line.strip_prefix("NVRM version:"))?.trim().to_owned();
    Some(Driver { open: version.contains("Open Kernel Module"), version })
}

/// The model, as NVIDIA's kernel module names it.
fn model(root: &Path, bus_id: &str) -> Option<String> {
    let text = fs::read_to_string(under(root, &format!("{DRIVERS_GPUS}/{bus_id}/information"))).ok()?;
    let model = text.lines().find_map(|line| line.strip_prefix("Model:"))?.trim();
    (!model.is_empty()).then(|| model.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fake::Fake;

    #[test]
    fn gpus_are_found_by_class_and_vendor() {
        let fake = Fake::new();
        assert_eq!(find(fake.root()), []);
        fake.gpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0", "1").gpu("pci0000:80/0000:80:01.0/0000:81:00.0", "0");
        fake.nic("pci0000:80/0000:80:02.0/0000:82:00.0", "0");
        // An audio function, another vendor's graphics, and a GPU whose driver is not loaded.
        fake.function("pci0000:80/0000:80:01.0/0000:81:00.1", &[("vendor", "0x10de"), ("class", "0x040300")]);
        fake.function("pci0000:00/0000:00:02.0", &[("vendor", "0x8086"), ("class", "0x030000")]);
        let bare = [("vendor", "0x10de"), ("device", "0x20b0"), ("class", "0x030000")];
        fake.function("pci0000:00/0000:00:03.0", &bare);
        let found = find(fake.root());
        let seen: Vec<_> = found.iter().map(|g| (g.function.bus_id(), g.name.as_str(), g.generation)).collect();
        let hopper = Some(Generation::Hopper);
        assert_eq!(
            seen,
            [
                ("0000:00:03.0", "10de:20b0", None),
                ("0000:81:00.0", "NVIDIA H200", hopper),
                ("0000:c1:00.0", "NVIDIA H200", hopper),
            ]
        );
        assert_eq!(found.iter().map(|g| g.hidden).collect::<Vec<_>>(), [true, false, false]);
        assert_eq!((found[0].bar1_bytes, found[1].bar1_bytes), (None, Some(128 << 30)));
    }

    #[test]
    fn the_driver_says_whether_it_is_open() {
        let fake = Fake::new();
        assert_eq!(driver(fake.root()), None);
        let of = |text: &str| {
            let lines = format!("NVRM version: {text}\nGCC version:  gcc 12\n");
            driver(fake.put("proc/driver/nvidia/version", lines).root()).expect("loaded")
        };
        let open = "NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder)";
        assert_eq!(of(open), Driver { version: open.into(), open: true });
        assert!(!of("NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024").open);
    }

    #[test]
    fn models_tell_the_generation() {
        for (model, generation) in [
            ("Tesla V100-SXM2-32GB", Some(Generation::Volta)),
            ("Tesla T4", Some(Generation::Turing)),
            ("NVIDIA A100-SXM4-80GB", Some(Generation::Ampere)),
            ("NVIDIA L40S", Some(Generation::Ada)),
            ("NVIDIA H100 80GB HBM3", Some(Generation::Hopper)),
            ("NVIDIA GH200 480GB", Some(Generation::Hopper)),
            ("NVIDIA B200", Some(Generation::Blackwell)),
            ("NVIDIA X9000", None),
        ] {
            assert_eq!(Generation::of(model), generation, "{model}");
        }
    }
}
