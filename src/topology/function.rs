//! A PCI function as sysfs shows it.

use std::fs;
use std::path::{Path, PathBuf};

use super::config_space::ConfigSpace;
use super::pci::{is_bus_id, resolve, under};

/// Bits of the third column of a function's `resource` (`linux/ioport.h`).
const IORESOURCE_MEM: u64 = 0x200;
const IORESOURCE_PREFETCH: u64 = 0x2000;
/// BARs; behind them come the ROM and the windows of bridges.
const BARS: usize = 6;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    root: PathBuf,
    path: String,
}

impl Function {
    /// The function at a path, which may hold links. None: nothing is there, or no PCI function.
    pub fn at(root: &Path, path: &str) -> Option<Self> {
        let path = resolve(root, path)?;
        is_bus_id(path.rsplit('/').next()?).then(|| Self { root: root.to_owned(), path })
    }

    /// Resolved: `/sys/devices/pci0000:80/0000:80:01.1/0000:81:00.0`.
    pub fn path(&self) -> &str {
        &self.path
    }

    pub fn bus_id(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or_default()
    }

    /// From the host bridge down to the function itself.
    pub fn way(&self) -> Vec<&str> {
        self.path.split('/').skip_while(|place| !place.starts_with("pci")).collect()
    }

    /// The bridge above; None below a host bridge.
    pub fn parent(&self) -> Option<Self> {
        let (path, _) = self.path.rsplit_once('/')?;
        is_bus_id(path.rsplit('/').next()?).then(|| Self { root: self.root.clone(), path: path.to_owned() })
    }

    /// A bridge above, by its bus id.
    pub fn above(&self, bus_id: &str) -> Option<Self> {
        std::iter::successors(self.parent(), Self::parent).find(|f| f.bus_id() == bus_id)
    }

    /// A file's one line.
    pub fn text(&self, file: &str) -> Option<String> {
        let text = fs::read_to_string(under(&self.root, &self.path).join(file)).ok()?;
        Some(text.trim().to_owned())
    }

    fn hex(&self, file: &str) -> Option<u32> {
        u32::from_str_radix(self.text(file)?.strip_prefix("0x")?, 16).ok()
    }

    pub fn vendor(&self) -> Option<u32> {
        self.hex("vendor")
    }

    pub fn device(&self) -> Option<u32> {
        self.hex("device")
    }

    pub fn class(&self) -> Option<u32> {
        self.hex("class")
    }

    /// None where the firmware does not say.
    pub fn numa_node(&self) -> Option<u32> {
        self.text("numa_node")?.parse().ok()
    }

    /// Bytes of the largest window into its memory (of a GPU: BAR1).
    pub fn largest_window(&self) -> Option<u64> {
        let resource = self.text("resource")?;
        let size = |line: &str| {
            let mut columns = line.split_whitespace().map(|c| u64::from_str_radix(c.trim_start_matches("0x"), 16));
            let (first, last, flags) = (columns.next()?.ok()?, columns.next()?.ok()?, columns.next()?.ok()?);
            let window = IORESOURCE_MEM | IORESOURCE_PREFETCH;
            (flags & window == window && last > first).then(|| (last - first).saturating_add(1))
        };
        resource.lines().take(BARS).filter_map(size).max()
    }

    pub fn config_space(&self) -> ConfigSpace {
        fs::File::open(under(&self.root, &self.path).join("config")).map_or(ConfigSpace::Closed, ConfigSpace::of)
    }

    /// Whether it may ask for relaxed ordering; a virtual function does as its physical one. None: unknown.
    pub fn relaxed_ordering(&self) -> Option<bool> {
        let physical = Self::at(&self.root, &format!("{}/physfn", self.path));
        physical.as_ref().unwrap_or(self).config_space().relaxed_ordering()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::config_space::Acs;
    use crate::topology::fake::{self, Fake};

    const GPU: &str = "pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:01.0/0000:83:00.0";

    #[test]
    fn what_is_there_is_read() {
        let fake = Fake::new();
        fake.gpu(GPU, "1\n").put(&format!("sys/devices/{GPU}/config"), fake::config_space(Some(4), true));
        let gpu = Function::at(fake.root(), "/sys/bus/pci/devices/0000:83:00.0").expect("there");
        assert_eq!(gpu.path(), format!("/sys/devices/{GPU}"));
        assert_eq!(gpu.way(), GPU.split('/').collect::<Vec<_>>());
        assert_eq!((gpu.vendor(), gpu.class(), gpu.numa_node()), (Some(0x10de), Some(0x030200), Some(1)));
        assert_eq!(gpu.largest_window(), Some(128 << 30));
        assert_eq!((gpu.config_space().acs(), gpu.config_space().relaxed_ordering()), (Acs::Control(4), Some(true)));
        assert_eq!(gpu.parent().map(|p| p.bus_id().to_owned()).as_deref(), Some("0000:82:01.0"));
        assert!(gpu.above("0000:80:01.1").is_some_and(|root| root.parent().is_none()));
        assert!(gpu.above("0000:90:00.0").is_none());
    }

    /// The bit of a virtual function is reserved, and 0.
    #[test]
    fn a_virtual_function_orders_as_its_physical_one() {
        let fake = Fake::new();
        let (physical, virtual_) = ("pci0000:80/0000:80:01.0/0000:81:00.0", "pci0000:80/0000:80:01.0/0000:81:00.2");
        fake.nic(physical, "0").nic(virtual_, "0");
        fake.put(&format!("sys/devices/{physical}/config"), fake::config_space(None, true));
        fake.put(&format!("sys/devices/{virtual_}/config"), fake::config_space(None, false));
        let at = || Function::at(fake.root(), &format!("/sys/devices/{virtual_}")).expect("there");
        assert_eq!(at().relaxed_ordering(), Some(false));
        let link = fake.root().join(format!("sys/devices/{virtual_}/physfn"));
        std::os::unix::fs::symlink("../0000:81:00.0", link).expect("a link");
        assert_eq!(at().relaxed_ordering(), Some(true));
    }

    #[test]
    fn what_is_not_there_is_unknown() {
        let fake = Fake::new();
        fake.function("pci0000:80/0000:81:00.0", &[("numa_node", "-1\n"), ("resource", "rubbish\n0x1\n")]);
        let bare = Function::at(fake.root(), "/sys/devices/pci0000:80/0000:81:00.0").expect("there");
        assert_eq!((bare.numa_node(), bare.vendor(), bare.largest_window()), (None, None, None));
        assert_eq!(bare.config_space().acs(), Acs::Unknown);
        assert!(bare.parent().is_none());
        assert_eq!(Function::at(fake.root(), "/sys/devices/pci0000:80"), None);
        assert_eq!(Function::at(fake.root(), "/sys/devices/pci0000:99/0000:99:00.0"), None);
    }
}
