//! A made-up machine for tests.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A root with /sys and /proc of its own.
pub(crate) struct Fake(tempfile::TempDir);

impl Fake {
    pub(crate) fn new() -> Self {
        Self(tempfile::tempdir().expect("a directory"))
    }

    pub(crate) fn root(&self) -> &Path {
        self.0.path()
    }

    pub(crate) fn put(&self, path: &str, bytes: impl AsRef<[u8]>) -> &Self {
        let path = self.root().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
        fs::write(path, bytes).expect("a file");
        self
    }

    /// A PCI function, given by its path below /sys/devices, with its files.
    pub(crate) fn function(&self, path: &str, files: &[(&str, &str)]) -> &Self {
        let dir = format!("sys/devices/{path}");
        fs::create_dir_all(self.root().join(&dir)).expect("directories");
        for (name, text) in files {
            self.put(&format!("{dir}/{name}"), text);
        }
        let bus = path.rsplit('/').next().expect("a bus id");
        let class = self.root().join("sys/bus/pci/devices");
        fs::create_dir_all(&class).expect("directories");
        let _ = symlink(format!("../../../devices/{path}"), class.join(bus));
        self
    }

    /// A GPU with 128 GiB of BAR1, model "NVIDIA H200", in that NUMA node.
    pub(crate) fn gpu(&self, path: &str, node: &str) -> &Self {
        let resource = "0x00000000f8000000 0x00000000f8ffffff 0x0000000000040200\n\
                        0x0000200000000000 0x0000201fffffffff 0x000000000014220c\n\
                        0x0000000000000000 0x0000000000000000 0x0000000000000000\n\
                        0x0000204000000000 0x0000204001ffffff 0x000000000014220c\n";
        let files = [
            ("vendor", "0x10de\n"),
            ("device", "0x2335\n"),
            ("class", "0x030200\n"),
            ("numa_node", node),
            ("resource", resource),
        ];
        let bus = path.rsplit('/').next().expect("a bus id");
        let information = "Model: \t\t NVIDIA H200\nIRQ:   \t\t 18\n";
        self.function(path, &files).put(&format!("proc/driver/nvidia/gpus/{bus}/information"), information)
    }

    /// A NIC's function: PCIe 4.0, 16 lanes.
    pub(crate) fn nic(&self, path: &str, node: &str) -> &Self {
        let files = [
            ("vendor", "0x15b3\n"),
            ("class", "0x020700\n"),
            ("numa_node", node),
            ("current_link_speed", "16.0 GT/s PCIe\n"),
            ("max_link_speed", "16.0 GT/s PCIe\n"),
            ("current_link_width", "16\n"),
            ("max_link_width", "16\n"),
        ];
        self.function(path, &files)
    }
}

/// A whole configuration space with the PCI Express capability and, behind another one, ACS with that control register.
pub(crate) fn config_space(acs: Option<u16>, relaxed_ordering: bool) -> Vec<u8> {
    let mut bytes = vec![0; 4096];
    let mut put = |at: usize, word: u16| bytes[at..at + 2].copy_from_slice(&word.to_le_bytes());
    put(0x34, 0x60);
    // Power management, then PCI Express.
    put(0x60, 0x7001);
    put(0x70, 0x0010);
    put(0x78, if relaxed_ordering { 0x2950 } else { 0x2940 });
    // Advanced error reporting, then ACS or nothing: id; version in 4 bits, next.
    put(0x100, 0x0001);
    put(0x102, if acs.is_some() { 0x1482 } else { 0x0002 });
    if let Some(control) = acs {
        put(0x148, 0x000d);
        put(0x14a, 0x0001);
        put(0x14c, 0x001f);
        put(0x14e, control);
    }
    bytes
}
