//! What a profile says of the hardware, as the plugin itself finds it.

use std::fmt;
use std::path::Path;

use nccl_net_rdma::config::Config;
use nccl_net_rdma::memory::profile::{self, Adapter, Nic};
use nccl_net_rdma::net;
use nccl_net_rdma::topology::{distance::Distance, report};
use serde::{Deserialize, Serialize};

/// A NIC, and how it lies to a GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Machine {
    pub(super) nic: Nic,
    pub(super) adapter: Adapter,
    /// The kernel has the NIC on a bus: soft-hca is unknown to the kernel, Soft-RoCE is on no bus.
    pub(super) on_bus: bool,
    /// As the kernel's module names it, which is how the plugin will find it again.
    pub(super) gpu_name: Option<String>,
    pub(super) distance: Distance,
    /// The PCIe links in words.
    pub(super) link: String,
}

impl Machine {
    /// Of a device as the plugin names it (`mlx5_0`, `mlx5_0:2`, or several with `+` between them, of which the first
    /// counts), and the GPU with this bus id.
    pub(super) fn look(device: &str, gpu: Option<&str>) -> Self {
        let found = net::discover(&Config::from_process().0);
        let report = &found.survey.report;
        let first = first(device);
        let nic = report.nic(first);
        let pair = report.pairs_of(first).find(|(pair, _)| gpu.is_some_and(|gpu| gpu.eq_ignore_ascii_case(&pair.gpu)));
        let link = profile::links(nic.and_then(|nic| nic.link), pair.and_then(|(_, gpu)| gpu.link));
        let firmware = nic.map_or_else(String::new, |nic| nic.firmware.clone());
        Self {
            nic: Nic {
                name: device.to_owned(),
                model: nic.map_or_else(String::new, |nic| nic.model.clone()),
                port_gbps: nic.map_or(0.0, report::Nic::gbps_of_a_port),
                // So soft-hca says who it is.
                firmware: firmware.clone(),
            },
            adapter: if firmware.starts_with("soft-hca") { Adapter::SoftHca } else { Adapter::Hardware },
            on_bus: is_on_bus(Path::new("/sys/class/infiniband"), first),
            gpu_name: pair.map(|(_, gpu)| gpu.name.clone()),
            distance: pair.map_or(Distance::Unknown, |(pair, _)| pair.distance),
            link,
        }
    }
}

impl Machine {
    /// Why the plugin will not know this pair for the one that was measured.
    pub(super) fn not_found_again(&self) -> Option<&'static str> {
        if self.nic.model.is_empty() {
            return Some("it does not know the NIC");
        }
        if self.gpu_name.is_none() {
            return Some("it does not see the GPU in sysfs");
        }
        (self.adapter == Adapter::Hardware && self.distance == Distance::Unknown)
            .then_some("it can't be seen how far apart NIC and GPU are")
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Nic { name, model, firmware, port_gbps } = &self.nic;
        write!(f, "NIC {name} ({model}, firmware {firmware}, {port_gbps} Gb/s)")?;
        match &self.gpu_name {
            Some(gpu) => {
                let link = if self.link.is_empty() { "not shown by this machine" } else { &self.link };
                write!(f, "; {gpu}; distance {}; links: {link}", self.distance)
            }
            None => Ok(()),
        }
    }
}

/// The first part of a device.
fn first(device: &str) -> &str {
    device.split(['+', ':']).next().unwrap_or(device)
}

fn is_on_bus(class: &Path, device: &str) -> bool {
    class.join(device).join("device").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pair_that_is_not_found_again_is_told() {
        let machine = |adapter, gpu_name: Option<&str>, distance| Machine {
            nic: Nic { name: "n".into(), model: "m".into(), firmware: "f".into(), port_gbps: 400.0 },
            adapter,
            on_bus: true,
            gpu_name: gpu_name.map(str::to_owned),
            distance,
            link: String::new(),
        };
        let (hardware, gpu) = (Adapter::Hardware, Some("NVIDIA H200"));
        assert_eq!(machine(hardware, gpu, Distance::Pix).not_found_again(), None);
        assert_eq!(machine(Adapter::SoftHca, gpu, Distance::Unknown).not_found_again(), None);
        assert!(machine(hardware, gpu, Distance::Unknown).not_found_again().is_some());
        assert!(machine(hardware, None, Distance::Pix).not_found_again().is_some());
    }

    #[test]
    fn only_devices_on_a_bus_are_hardware() {
        let class = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(class.path().join("mlx5_0/device")).unwrap();
        std::fs::create_dir_all(class.path().join("rxe0")).unwrap();
        assert!(is_on_bus(class.path(), first("mlx5_0:1+mlx5_1:1")));
        assert!(!is_on_bus(class.path(), "rxe0") && !is_on_bus(class.path(), "soft_gpu0"));
    }
}
