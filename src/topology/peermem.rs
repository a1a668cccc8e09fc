//! Whether the kernel can hand GPU memory to NICs as if it were the process's own (a peer memory driver).

use std::fs;
use std::path::Path;

use serde::Serialize;

/// How the driver stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerDriver {
    Absent,
    /// The module is there, but the RDMA stack knows nothing of it: registrations of GPU memory fail.
    NotRegistered,
    Registered,
}

/// Modules that bring a peer memory driver.
const MODULES: [&str; 2] = ["nvidia_peermem", "nv_peer_mem"];
/// Names under which they register.
const CLIENTS: [&str; 2] = ["nv_mem", "nv_mem_nc"];

/// What sysfs and procfs under `root` say.
pub fn find(root: &Path) -> PeerDriver {
    let clients = root.join("sys/kernel/mm/memory_peers");
    if CLIENTS.iter().any(|client| clients.join(client).join("version").exists()) {
        return PeerDriver::Registered;
    }
    let listed = fs::read_to_string(root.join("proc/modules")).unwrap_or_default();
    let loaded = |module: &&str| {
        root.join("sys/module").join(module).exists()
            || listed.lines().any(|line| line.split_whitespace().next() == Some(module))
    };
    if MODULES.iter().any(loaded) { PeerDriver::NotRegistered } else { PeerDriver::Absent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_module_alone_is_not_enough() {
        let root = tempfile::tempdir().expect("a directory");
        let put = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a parent")).expect("directories");
            fs::write(path, text).expect("a file");
        };
        assert_eq!(find(root.path()), PeerDriver::Absent);
        put("proc/modules", "nvidia_peermem_helper 1 0 - Live\nnvidia 2 1 nvidia_peermem, Live\n");
        assert_eq!(find(root.path()), PeerDriver::Absent);
        put("proc/modules", "nvidia 2 1 nvidia_peermem, Live\nnvidia_peermem 16384 0 - Live 0x0\n");
        assert_eq!(find(root.path()), PeerDriver::NotRegistered);
        put("proc/modules", "");
        put("sys/module/nvidia_peermem/version", "580.0");
        assert_eq!(find(root.path()), PeerDriver::NotRegistered);
        put("sys/kernel/mm/memory_peers/nv_mem_nc/version", "580.0");
        assert_eq!(find(root.path()), PeerDriver::Registered);
    }
}
