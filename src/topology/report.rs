//! What was found of NICs, GPUs and the ways between them: for people, and as JSON.

use std::fmt;
use std::path::Path;

use serde::Serialize;

use super::config_space::Acs;
use super::distance::{self, Distance};
use super::function::Function;
use super::gpus::{self, Driver, Generation};
use super::link::Link;
use super::peermem::{self, PeerDriver};

/// Windows into GPU memory smaller than this hold no more than a few of NCCL's buffers. The classic size is 256 MiB.
const SMALL_BAR1: u64 = 1 << 30;

/// A NIC, all its usable ports together.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Nic {
    pub name: String,
    /// Its kind, and the version of its firmware, as libibverbs says.
    pub model: String,
    pub firmware: String,
    /// Of all ports together.
    pub port_gbps: f64,
    /// How many there are.
    pub ports: u32,
    /// The ways to GPU memory without a copy that are open.
    pub open: Vec<&'static str>,
    /// The same in words, with what opens the others.
    pub memory: String,
    pub bus_id: Option<String>,
    pub numa_node: Option<u32>,
    pub link: Option<Link>,
    /// PCIe relaxed ordering is enabled in its configuration space; None: can't be read.
    pub relaxed_ordering: Option<bool>,
    #[serde(skip)]
    pub function: Option<Function>,
}

impl Nic {
    /// What profiles know a NIC by: of one of its ports, the mean where they differ.
    pub fn gbps_of_a_port(&self) -> f64 {
        self.port_gbps / f64::from(self.ports.max(1))
    }

    /// Adds what sysfs says of its function.
    pub fn located(self, function: Option<Function>) -> Self {
        Self {
            bus_id: function.as_ref().map(|f| f.bus_id().to_owned()),
            numa_node: function.as_ref().and_then(Function::numa_node),
            link: function.as_ref().and_then(Link::read),
            relaxed_ordering: function.as_ref().and_then(Function::relaxed_ordering),
            function,
            ..self
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Gpu {
    pub bus_id: String,
    pub name: String,
    /// The driver keeps it from this process (a container): sysfs alone has it.
    pub hidden: bool,
    pub generation: Option<Generation>,
    pub bar1_bytes: Option<u64>,
    pub numa_node: Option<u32>,
    pub link: Option<Link>,
    #[serde(skip)]
    function: Function,
}

/// A bridge that stands between a NIC and a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Bridge {
    pub bus_id: String,
    pub acs: Acs,
}

/// A NIC and a GPU.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Pair {
    pub nic: String,
    /// Bus id.
    pub gpu: String,
    pub distance: Distance,
    pub bridges: Vec<Bridge>,
}

/// How much a finding matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Severity {
    /// Slower than the machine could be, or an error to come.
    Warning,
    Note,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    pub severity: Severity,
    /// Whom it is about.
    pub about: String,
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.about, self.text)
    }
}

/// The machine.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub peer_memory: PeerDriver,
    pub gpu_driver: Option<Driver>,
    pub numa_nodes: usize,
    pub nics: Vec<Nic>,
    pub gpus: Vec<Gpu>,
    pub pairs: Vec<Pair>,
    /// All that stand between pairs.
    #[serde(skip)]
    bridges: Vec<Bridge>,
}

/// What findings depend on besides the machine.
#[derive(Debug, Clone, Copy)]
pub struct Use<F> {
    /// Whether a pair's data go by GPUDirect.
    pub gdr: F,
    /// Relaxed ordering is asked for.
    pub relaxed_ordering: bool,
}

impl Report {
    /// The machine under `root`, so far without NICs.
    pub fn look(root: &Path) -> Self {
        let gpu = |gpu: gpus::Gpu| Gpu {
            bus_id: gpu.function.bus_id().to_owned(),
            numa_node: gpu.function.numa_node(),
            link: Link::read(&gpu.function),
            hidden: gpu.hidden,
            name: gpu.name,
            generation: gpu.generation,
            bar1_bytes: gpu.bar1_bytes,
            function: gpu.function,
        };
        Self {
            peer_memory: peermem::find(root),
            gpu_driver: gpus::driver(root),
            numa_nodes: distance::numa_nodes(root),
            nics: Vec::new(),
            gpus: gpus::find(root).into_iter().map(gpu).collect(),
            pairs: Vec::new(),
            bridges: Vec::new(),
        }
    }

    /// Adds a NIC, with each GPU.
    pub fn add(&mut self, nic: Nic) {
        // Each is read once, however many pairs it stands between.
        let known = &mut self.bridges;
        let mut bridge = |f: Function| match known.iter().find(|b| b.bus_id == f.bus_id()) {
            Some(bridge) => bridge.clone(),
            None => {
                let bridge = Bridge { acs: f.config_space().acs(), bus_id: f.bus_id().to_owned() };
                known.push(bridge.clone());
                bridge
            }
        };
        for gpu in &self.gpus {
            let (distance, bridges) = match &nic.function {
                Some(function) => (
                    Distance::between(function, &gpu.function, self.numa_nodes),
                    distance::bridges(function, &gpu.function).into_iter().map(&mut bridge).collect(),
                ),
                None => (Distance::Unknown, Vec::new()),
            };
            self.pairs.push(Pair { nic: nic.name.clone(), gpu: gpu.bus_id.clone(), distance, bridges });
        }
        self.nics.push(nic);
    }

    pub fn nic(&self, name: &str) -> Option<&Nic> {
        self.nics.iter().find(|nic| nic.name == name)
    }

    /// The pairs of a NIC, each with its GPU.
    pub fn pairs_of(&self, nic: &str) -> impl Iterator<Item = (&Pair, &Gpu)> {
        self.pairs.iter().zip(self.gpus.iter().cycle()).filter(move |(pair, _)| pair.nic == nic)
    }

    /// What a person should know of it.
    pub fn findings(&self, how: &Use<impl Fn(&Pair) -> bool>) -> Vec<Finding> {
        let mut all = Vec::new();
        let mut add = |severity, about: &str, text| all.push(Finding { severity, about: about.to_owned(), text });
        for nic in &self.nics {
            if let Some(link) = &nic.link
                && let Some((severity, text)) = slow_link(link, nic.port_gbps)
            {
                add(severity, &nic.name, text);
            }
            if how.relaxed_ordering && nic.relaxed_ordering == Some(false) {
                add(
                    Severity::Note,
                    &nic.name,
                    "PCIe relaxed ordering is disabled in its configuration space, so asking for it has no effect; on some \
                     CPUs that costs much bandwidth"
                        .to_owned(),
                );
            }
        }
        for gpu in self.gpus.iter().filter(|gpu| !gpu.hidden) {
            let about = format!("GPU {}", gpu.bus_id);
            let pairs = || self.pairs.iter().filter(|p| p.gpu == gpu.bus_id);
            if let Some(link) = gpu.link.filter(Link::trained_narrow) {
                add(Severity::Warning, &about, format!("{link}: lanes are missing"));
            }
            if let Some(bytes) = gpu.bar1_bytes.filter(|b| *b < SMALL_BAR1)
                && pairs().any(&how.gdr)
            {
                let text = format!(
                    "BAR1 has {}, and all GPU memory that is registered with NICs must fit it: Resizable BAR or Above 4G \
                     Decoding in the firmware's setup may enlarge it; NCCL_NET_GDR_LEVEL=LOC does without",
                    size(bytes)
                );
                add(Severity::Warning, &about, text);
            }
        }
        let hidden = |bus: &str| self.gpus.iter().any(|gpu| gpu.hidden && gpu.bus_id == bus);
        let near = |p: &&Pair| p.distance.is_near() && (how.gdr)(p) && !hidden(&p.gpu);
        for (about, redirecting) in self.between(near, Acs::redirects) {
            let text = format!(
                "ACS redirects what goes between them over the root complex: {redirecting}. GPUDirect is then slow, or fails \
                 with local protection errors (status 4); turn it off on these bridges (setpci, or the firmware's setup) \
                 where no virtual machine needs it"
            );
            add(Severity::Warning, &about, text);
        }
        for (about, redirecting) in self.between(near, Acs::redirects_untranslated) {
            let text = format!(
                "ACS redirects what goes between them over the root complex, except where address translation services (ATS) \
                 have cleared it: {redirecting}"
            );
            add(Severity::Note, &about, text);
        }
        for (about, unseen) in self.between(near, |acs| acs == Acs::Unknown) {
            let text =
                format!("whether ACS redirects what goes between them can't be seen (without CAP_SYS_ADMIN): {unseen}");
            add(Severity::Note, &about, text);
        }
        all
    }

    /// The bridges with such ACS between pairs, each list once, with the first of the pairs and how many more there are.
    fn between(
        &self,
        which: impl Fn(&&Pair) -> bool,
        acs: impl Fn(Acs) -> bool,
    ) -> impl Iterator<Item = (String, String)> {
        let mut found: Vec<(String, Vec<&Bridge>, usize)> = Vec::new();
        for pair in self.pairs.iter().filter(which) {
            let bridges: Vec<&Bridge> = pair.bridges.iter().filter(|b| acs(b.acs)).collect();
            match found.first_mut() {
                _ if bridges.is_empty() => {}
                Some((_, all, more)) => {
                    *more += 1;
                    all.extend(bridges);
                }
                None => found.push((format!("{} and GPU {}", pair.nic, pair.gpu), bridges, 0)),
            }
        }
        found.into_iter().map(|(first, mut bridges, more)| {
            bridges.sort_by(|a, b| a.bus_id.cmp(&b.bus_id));
            bridges.dedup();
            let about = if more == 0 { first } else { format!("{first}, and {more} more pairs") };
            (about, bridges.iter().map(|b| format!("{}: {}", b.bus_id, b.acs)).collect::<Vec<_>>().join(", "))
        })
    }
}

/// What there is to say of a link below a port of that speed.
fn slow_link(link: &Link, port_gbps: f64) -> Option<(Severity, String)> {
    let limit =
        link.limits(port_gbps).map(|gbps| format!("PCIe limits to about {gbps:.0} Gb/s, the port has {port_gbps}"));
    match (limit, link.trained_low()) {
        (Some(limit), true) => Some((
            Severity::Warning,
            format!(
                "{link}: {limit}; the link was trained low: look at the slot, the riser and the kernel's log of PCIe errors"
            ),
        )),
        (Some(limit), false) => Some((Severity::Note, format!("{link}: {limit}"))),
        (None, true) => Some((Severity::Note, format!("{link}: trained low, which limits no port"))),
        (None, false) => None,
    }
}

/// Bytes in the largest unit of which they are a whole number.
fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.into_iter().find(|(shift, _)| bytes >> shift << shift == bytes && bytes > 0) {
        Some((shift, unit)) => format!("{} {unit}", bytes >> shift),
        None => format!("{bytes} bytes"),
    }
}

struct Node(Option<u32>);

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(node) => write!(f, "NUMA node {node}"),
            None => f.write_str("NUMA node unknown"),
        }
    }
}

impl fmt::Display for Nic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}, firmware {}, {} Gb/s)", self.name, self.model, self.firmware, self.port_gbps)?;
        match &self.bus_id {
            Some(bus) => write!(f, " at {bus}, {}", Node(self.numa_node))?,
            None => f.write_str(", on no PCI bus that is shown")?,
        }
        if let Some(link) = &self.link {
            write!(f, ", {link}")?;
        }
        match self.relaxed_ordering {
            Some(true) => f.write_str(", relaxed ordering enabled"),
            Some(false) => f.write_str(", relaxed ordering disabled"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} ({}", self.bus_id, self.name)?;
        if let Some(generation) = self.generation {
            write!(f, ", {generation}")?;
        }
        write!(f, "), {}", Node(self.numa_node))?;
        if self.hidden {
            f.write_str(", hidden from this process")?;
        }
        if let Some(bytes) = self.bar1_bytes {
            write!(f, ", BAR1 {}", size(bytes))?;
        }
        match &self.link {
            Some(link) => write!(f, ", {link}"),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Pair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} and GPU {}: {}", self.nic, self.gpu, self.distance)?;
        for bridge in &self.bridges {
            write!(f, ", bridge {} {}", bridge.bus_id, bridge.acs)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fake::{self, Fake};

    const SWITCH: &str = "pci0000:80/0000:80:01.1/0000:81:00.0";

    fn nic(name: &str, fake: &Fake, path: &str, gbps: f64) -> Nic {
        Nic {
            name: name.into(),
            model: "0x02c9:4129".into(),
            firmware: "28.39.1002".into(),
            port_gbps: gbps,
            ports: 1,
            open: vec!["dma-buf"],
            memory: "host memory, GPU memory by dma-buf".into(),
            bus_id: None,
            numa_node: None,
            link: None,
            relaxed_ordering: None,
            function: None,
        }
        .located(Function::at(fake.root(), &format!("/sys/devices/{path}")))
    }

    /// A NIC and a GPU below one switch, and a GPU of the other CPU.
    fn machine(fake: &Fake, gbps: f64) -> Report {
        let path = format!("{SWITCH}/0000:82:01.0/0000:84:00.0");
        fake.gpu(&format!("{SWITCH}/0000:82:00.0/0000:83:00.0"), "0\n").nic(&path, "0\n");
        fake.gpu("pci0000:c0/0000:c0:01.0/0000:c1:00.0", "1\n");
        machine_again(fake, gbps)
    }

    fn found(report: &Report, gdr: bool) -> Vec<(Severity, String)> {
        let how = Use { gdr: |_: &Pair| gdr, relaxed_ordering: true };
        report.findings(&how).into_iter().map(|f| (f.severity, f.to_string())).collect()
    }

    #[test]
    fn pairs_are_all_nics_with_all_gpus() {
        let fake = Fake::new();
        let report = machine(&fake, 200.0);
        let seen: Vec<_> =
            report.pairs_of("mlx5_0").map(|(p, g)| (p.gpu.as_str(), g.bus_id.as_str(), p.distance)).collect();
        assert_eq!(
            seen,
            [("0000:83:00.0", "0000:83:00.0", Distance::Pix), ("0000:c1:00.0", "0000:c1:00.0", Distance::Sys),]
        );
        let json = serde_json::to_value(&report).expect("JSON");
        assert_eq!(json["pairs"][0]["distance"], "PIX");
        let unknown = serde_json::json!({"text": "ACS unknown", "control": null});
        assert_eq!(json["pairs"][0]["bridges"][0]["acs"], unknown);
        assert_eq!(json["gpus"][0]["bar1_bytes"], 128u64 << 30);
        assert_eq!(json["peer_memory"], "absent");
    }

    /// V17.
    #[test]
    fn a_link_that_was_trained_low_is_a_warning_where_it_limits() {
        let fake = Fake::new();
        machine(&fake, 200.0);
        let path = format!("{SWITCH}/0000:82:01.0/0000:84:00.0");
        fake.function(&path, &[("current_link_width", "8\n")]);
        for (gbps, severity, words) in [
            (200.0, Severity::Warning, "PCIe limits to about 126 Gb/s"),
            (100.0, Severity::Note, "trained low, which limits no port"),
        ] {
            let found = found(&machine_again(&fake, gbps), false);
            assert!(found.iter().any(|(s, t)| *s == severity && t.contains(words)), "{found:?}");
        }
        fake.function(&path, &[("current_link_width", "16\n")]);
        let found = found(&machine_again(&fake, 400.0), false);
        assert!(found.iter().any(|(s, t)| *s == Severity::Note && t.contains("about 252 Gb/s")), "{found:?}");
        assert!(found.iter().all(|(s, _)| *s == Severity::Note), "{found:?}");
    }

    fn machine_again(fake: &Fake, gbps: f64) -> Report {
        let path = format!("{SWITCH}/0000:82:01.0/0000:84:00.0");
        let mut report = Report::look(fake.root());
        report.add(nic("mlx5_0", fake, &path, gbps));
        report
    }

    /// V18.
    #[test]
    fn acs_between_a_near_pair_is_a_warning_that_names_the_bridge() {
        let fake = Fake::new();
        machine(&fake, 200.0);
        let bridge = |control, readable: usize| {
            let config = &fake::config_space(Some(control), false)[..readable];
            fake.put(&format!("sys/devices/{SWITCH}/0000:82:00.0/config"), config);
            let fine = fake::config_space(Some(0), false);
            fake.put(&format!("sys/devices/{SWITCH}/0000:82:01.0/config"), fine);
            machine_again(&fake, 200.0)
        };
        let redirecting = bridge(0x1d, 4096);
        let told = found(&redirecting, true);
        let [(Severity::Warning, text)] = &told[..] else { panic!("{told:?}") };
        assert!(text.starts_with("mlx5_0 and GPU 0000:83:00.0: ACS redirects"), "{text}");
        assert!(text.contains("0000:82:00.0: ACS 0x001d (SrcValid ReqRedir") && !text.contains("82:01.0"), "{text}");
        assert_eq!(found(&redirecting, false), [], "nothing goes that way");
        assert_eq!(found(&bridge(0, 4096), true), []);
        let told = found(&bridge(0x5d, 4096), true);
        assert!(matches!(&told[..], [(Severity::Note, text)] if text.contains("(ATS)")), "{told:?}");
        let told = found(&bridge(0x1d, 64), true);
        let [(Severity::Note, text)] = &told[..] else { panic!("{told:?}") };
        assert!(text.contains("can't be seen (without CAP_SYS_ADMIN): 0000:82:00.0: ACS unknown"), "{text}");
    }

    #[test]
    fn a_small_bar1_is_a_warning_where_gpudirect_is_in_use() {
        let fake = Fake::new();
        machine(&fake, 200.0);
        let classic = "0x0 0x0 0x0\n0x00000000d0000000 0x00000000dfffffff 0x000000000014220c\n";
        fake.function("pci0000:c0/0000:c0:01.0/0000:c1:00.0", &[("resource", classic)]);
        let report = machine_again(&fake, 200.0);
        let small = |gdr| {
            let all = found(&report, gdr);
            all.into_iter().find(|(s, t)| *s == Severity::Warning && t.contains("BAR1")).map(|(_, t)| t)
        };
        assert!(small(true).is_some_and(|t| t.starts_with("GPU 0000:c1:00.0: BAR1 has 256 MiB")));
        assert_eq!(small(false), None);
    }

    #[test]
    fn relaxed_ordering_that_is_disabled_is_told() {
        let fake = Fake::new();
        machine(&fake, 200.0);
        let path = format!("sys/devices/{SWITCH}/0000:82:01.0/0000:84:00.0/config");
        for (enabled, notes) in [(false, 1), (true, 0)] {
            fake.put(&path, fake::config_space(None, enabled));
            assert_eq!(found(&machine_again(&fake, 200.0), false).len(), notes);
        }
    }

    #[test]
    fn people_read_it() {
        let fake = Fake::new();
        let report = machine(&fake, 200.0);
        assert_eq!(
            report.nics[0].to_string(),
            "mlx5_0 (0x02c9:4129, firmware 28.39.1002, 200 Gb/s) at 0000:84:00.0, NUMA node 0, PCIe 16 GT/s x16"
        );
        assert_eq!(report.gpus[0].to_string(), "GPU 0000:83:00.0 (NVIDIA H200, Hopper), NUMA node 0, BAR1 128 GiB");
        assert_eq!(
            report.pairs[0].to_string(),
            "mlx5_0 and GPU 0000:83:00.0: PIX, bridge 0000:82:01.0 ACS unknown, bridge 0000:82:00.0 ACS unknown"
        );
        assert_eq!((size(1 << 30), size(3 << 20), size(100)), ("1 GiB".into(), "3 MiB".into(), "100 bytes".into()));
    }
}
