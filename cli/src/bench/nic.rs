//! What a profile says of a NIC, from verbs and sysfs.

use std::path::Path;

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Nic {
    pub(super) name: String,
    pub(super) model: String,
    pub(super) firmware: String,
    pub(super) speed_mbps: i32,
    pub(super) pci_path: Option<String>,
    /// The kernel has it as a device on a bus: soft-hca is unknown to the kernel, Soft-RoCE is on no bus.
    pub(super) hardware: bool,
}

impl Nic {
    /// A device as the plugin names it: `mlx5_0`, `mlx5_0:2`, or several with `+` between them, of which the first counts.
    pub(super) fn look(name: &str, speed_mbps: i32, pci_path: Option<&str>) -> Self {
        let first = name.split(['+', ':']).next().unwrap_or(name);
        Self {
            name: name.to_owned(),
            model: String::new(),
            firmware: String::new(),
            speed_mbps,
            pci_path: pci_path.map(str::to_owned),
            hardware: is_hardware(Path::new("/sys/class/infiniband"), first),
        }
    }
}

fn is_hardware(class: &Path, device: &str) -> bool {
    class.join(device).join("device").exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_devices_on_a_bus_are_hardware() {
        let class = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(class.path().join("mlx5_0/device")).unwrap();
        std::fs::create_dir_all(class.path().join("rxe0")).unwrap();
        assert!(is_hardware(class.path(), "mlx5_0"));
        assert!(!is_hardware(class.path(), "rxe0") && !is_hardware(class.path(), "soft_gpu0"));
    }
}
