//! Where a device sits: its PCI path as NCCL needs it, and what sysfs says where libibverbs is silent.
//!
//! NCCL takes the last component of the path as the bus id, so it must be the resolved path of a PCI function
//! (`dddd:bb:dd.f`). Every look goes through a root, so that tests bring their own sysfs.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::gid::GidKind;

pub(super) fn under(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Whether a path component is a PCI function's address.
pub(super) fn is_bus_id(text: &str) -> bool {
    let shape = b"hhhh:hh:hh.h";
    text.len() == shape.len()
        && text.bytes().zip(shape).all(|(c, s)| if *s == b'h' { c.is_ascii_hexdigit() } else { c == *s })
}

/// `path` with its links resolved, as seen from `root`.
pub(super) fn resolve(root: &Path, path: &str) -> Option<String> {
    let resolved = fs::canonicalize(under(root, path)).ok()?;
    let path = resolved.to_str()?.to_owned();
    if root == Path::new("/") {
        return Some(path);
    }
    let root = fs::canonicalize(root).ok()?;
    Some(format!("/{}", resolved.strip_prefix(&root).ok()?.to_str()?))
}

/// The resolved /sys path of a device's PCI function; None for a device that is not on a PCI bus. `place` is where
/// libibverbs says that the device is (ibv_device.ibdev_path, `/sys/class/infiniband/mlx5_0`), or, of a software adapter that
/// stands in for a NIC, the PCI function itself.
pub fn function_path(root: &Path, place: &str) -> Option<String> {
    let itself = is_bus_id(place.rsplit('/').next()?);
    let path = resolve(root, &if itself { place.to_owned() } else { format!("{place}/device") })?;
    is_bus_id(path.rsplit('/').next()?).then_some(path)
}

/// The path that NCCL is told. Functions of one card look alike (function 0), and with `merge_vfs` its virtual functions
/// too, as in NCCL's own transport: NCCL then sees one NIC.
pub fn pci_path(root: &Path, place: &str, merge_vfs: bool) -> Option<String> {
    let mut path = function_path(root, place)?;
    let len = path.len();
    path.replace_range(len - 1.., "0");
    if merge_vfs {
        path.replace_range(len - 4..len - 2, "00");
    }
    Some(path)
}

/// Key for the order of devices: by bus id, those without one last.
pub fn order(path: Option<&str>) -> (bool, String) {
    match path.and_then(|p| p.rsplit('/').next()) {
        Some(bus) => (false, bus.to_owned()),
        None => (true, String::new()),
    }
}

/// Makes the port numbers of several functions of one card differ: NCCL tells NICs of one chip apart by port.
#[derive(Debug, Default)]
pub struct PortNumbers(HashMap<String, i32>);

impl PortNumbers {
    /// How many devices before this one have the same path.
    pub fn next(&mut self, path: Option<&str>) -> i32 {
        let Some(path) = path else { return 0 };
        let seen = self.0.entry(path.to_owned()).or_insert(0);
        *seen += 1;
        *seen - 1
    }
}

/// The type of a GID from sysfs, for libraries without ibv_query_gid_ex. An entry of another network namespace can't be
/// read.
pub fn gid_kind(root: &Path, device: &str, port: u8, index: u32) -> GidKind {
    let path = under(root, &format!("/sys/class/infiniband/{device}/ports/{port}/gid_attrs/types/{index}"));
    match fs::read_to_string(path).as_deref().map(str::trim) {
        Ok("RoCE v2") => GidKind::RoceV2,
        Ok("RoCE v1") => GidKind::RoceV1,
        // The kernel's text for both InfiniBand and RoCE v1.
        Ok("IB/RoCE v1") => GidKind::RoceV1,
        _ => GidKind::Unknown,
    }
}

/// Why libibverbs shows no device.
pub fn why_no_device(root: &Path, library: &str) -> String {
    let names: Vec<String> = fs::read_dir(under(root, "/sys/class/infiniband"))
        .map(|d| d.filter_map(|e| e.ok()?.file_name().into_string().ok()).collect())
        .unwrap_or_default();
    if names.is_empty() {
        return format!(
            "{library} lists no device and /sys/class/infiniband is empty: this host has no RDMA device, or its driver (mlx5_ib, \
             irdma, bnxt_re, ...) is not loaded"
        );
    }
    let names = names.join(", ");
    if !under(root, "/dev/infiniband").exists() {
        return format!(
            "/sys/class/infiniband has {names}, but the device nodes are missing: /dev/infiniband is not in this container (docker: \
             --device=/dev/infiniband; Kubernetes: the RDMA device plugin)"
        );
    }
    format!(
        "/sys/class/infiniband has {names}, but {library} lists none: the provider library is missing or of another rdma-core \
         (Debian, Ubuntu: ibverbs-providers)"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("a directory");
        let function = root.path().join("sys/devices/pci0000:80/0000:80:01.1/0000:81:03.2");
        fs::create_dir_all(&function).expect("sysfs");
        let class = root.path().join("sys/class/infiniband/mlx5_0");
        fs::create_dir_all(class.join("ports/1/gid_attrs/types")).expect("sysfs");
        symlink("../../../devices/pci0000:80/0000:80:01.1/0000:81:03.2", class.join("device")).expect("link");
        fs::write(class.join("ports/1/gid_attrs/types/3"), "RoCE v2\n").expect("type");
        let soft = root.path().join("sys/class/infiniband/rxe0");
        fs::create_dir_all(&soft).expect("sysfs");
        let virt = root.path().join("sys/devices/virtual/net/eth0");
        fs::create_dir_all(&virt).expect("sysfs");
        symlink("../../../devices/virtual/net/eth0", soft.join("device")).expect("link");
        root
    }

    #[test]
    fn the_path_ends_in_a_bus_id_of_16_bytes() {
        let root = machine();
        let path = pci_path(root.path(), "/sys/class/infiniband/mlx5_0", false).expect("a PCI device");
        assert_eq!(path, "/sys/devices/pci0000:80/0000:80:01.1/0000:81:03.0");
        assert_eq!(
            pci_path(root.path(), "/sys/class/infiniband/mlx5_0", true).as_deref(),
            Some("/sys/devices/pci0000:80/0000:80:01.1/0000:81:00.0")
        );
        assert_eq!(
            function_path(root.path(), "/sys/class/infiniband/mlx5_0").as_deref(),
            Some("/sys/devices/pci0000:80/0000:80:01.1/0000:81:03.2")
        );
        assert_eq!(pci_path(root.path(), "/sys/class/infiniband/rxe0", true), None);
        let function = "/sys/devices/pci0000:80/0000:80:01.1/0000:81:03.2";
        assert_eq!(
            pci_path(root.path(), function, false).as_deref(),
            Some("/sys/devices/pci0000:80/0000:80:01.1/0000:81:03.0")
        );
        assert_eq!(pci_path(root.path(), "/sys/class/infiniband/absent", true), None);
        assert_eq!(pci_path(root.path(), "", true), None);
    }

    #[test]
    fn types_come_from_sysfs_where_they_can_be_read() {
        let root = machine();
        assert_eq!(gid_kind(root.path(), "mlx5_0", 1, 3), GidKind::RoceV2);
        assert_eq!(gid_kind(root.path(), "mlx5_0", 1, 0), GidKind::Unknown);
    }

    #[test]
    fn missing_device_nodes_are_named() {
        let root = machine();
        let why = why_no_device(root.path(), "libibverbs.so.1");
        assert!(why.contains("device nodes are missing") && why.contains("mlx5_0"), "{why}");
        fs::create_dir_all(root.path().join("dev/infiniband")).expect("dev");
        assert!(why_no_device(root.path(), "libibverbs.so.1").contains("provider library"));
        let empty = tempfile::tempdir().expect("a directory");
        assert!(why_no_device(empty.path(), "libibverbs.so.1").contains("no RDMA device"));
    }

    #[test]
    fn functions_of_one_card_get_port_numbers() {
        let mut numbers = PortNumbers::default();
        assert_eq!([Some("a"), Some("a"), Some("b"), None, None].map(|p| numbers.next(p)), [0, 1, 0, 0, 0]);
    }
}
