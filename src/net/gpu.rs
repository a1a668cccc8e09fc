//! By which ways a NIC reaches GPU memory without a copy (GPUDirect RDMA): looked for once, when its device is opened.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use crate::abi::types::{NCCL_PTR_CUDA, NCCL_PTR_DMABUF, NCCL_PTR_HOST};
use crate::config::{Config, PeerMemory};
use crate::topology::peermem::{self, PeerDriver};
use crate::verbs::{Mr, Pd};

/// An open way, or why it is closed and what opens it.
type Way = Result<(), String>;

/// The ways of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GpuMemory {
    /// A pointer is registered as it is; the kernel asks the peer memory driver for its pages.
    pub(super) peermem: Way,
    /// A descriptor of the memory is registered.
    pub(super) dmabuf: Way,
}

impl GpuMemory {
    pub(super) fn probe(pd: &Arc<Pd>, config: &Config) -> Self {
        Self { peermem: peer_memory(config), dmabuf: Mr::probe_dmabuf(pd).map_err(|e| no_dmabuf(&e.to_string())) }
    }

    pub(super) fn none(why: &str) -> Self {
        Self { peermem: Err(why.to_owned()), dmabuf: Err(why.to_owned()) }
    }

    /// What devices that are used together have in common.
    pub(super) fn common<'a>(members: impl IntoIterator<Item = &'a Self>) -> Self {
        members
            .into_iter()
            .cloned()
            .reduce(|a, b| Self { peermem: a.peermem.and(b.peermem), dmabuf: a.dmabuf.and(b.dmabuf) })
            .unwrap_or_else(|| Self::none("there is no device"))
    }

    /// A peer memory driver is there, yet every byte goes through host memory: someone expects otherwise.
    pub(super) fn is_a_surprise(&self, config: &Config) -> bool {
        let loaded = peermem::find(&config.sysroot) == PeerDriver::NotRegistered;
        !self.any() && loaded && config.peermem == PeerMemory::Auto
    }

    pub(super) fn any(&self) -> bool {
        self.peermem.is_ok() || self.dmabuf.is_ok()
    }

    /// Bits NCCL_PTR_*. To NCCL the CUDA bit alone means the peer memory driver.
    pub(super) fn ptr_support(&self) -> c_int {
        let cuda = if self.peermem.is_ok() { NCCL_PTR_CUDA } else { 0 };
        let dmabuf = if self.dmabuf.is_ok() { NCCL_PTR_DMABUF } else { 0 };
        (NCCL_PTR_HOST | cuda | dmabuf).cast_signed()
    }

    /// The open ways in short.
    pub(super) fn ways(&self) -> &'static str {
        match (&self.peermem, &self.dmabuf) {
            (Ok(()), Ok(())) => "host memory, GPU memory by dma-buf or nvidia_peermem",
            (Ok(()), Err(_)) => "host memory, GPU memory by nvidia_peermem",
            (Err(_), Ok(())) => "host memory, GPU memory by dma-buf",
            (Err(_), Err(_)) => "host memory",
        }
    }
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.ways())?;
        if !self.any() {
            f.write_str(" only: NCCL copies GPU data through it")?;
        }
        for (name, way) in [("nvidia_peermem", &self.peermem), ("dma-buf", &self.dmabuf)] {
            if let Err(why) = way {
                write!(f, "; no {name}: {why}")?;
            }
        }
        Ok(())
    }
}

fn peer_memory(config: &Config) -> Way {
    match (config.peermem, peermem::find(&config.sysroot)) {
        (PeerMemory::On, _) | (PeerMemory::Auto, PeerDriver::Registered) => Ok(()),
        (PeerMemory::Off, _) => Err("NCCL_NET_RDMA_PEERMEM=off".to_owned()),
        (PeerMemory::Auto, PeerDriver::NotRegistered) => Err("the module is loaded, not registered with the RDMA \
             stack as far as can be seen (/sys/kernel/mm/memory_peers has no nv_mem). If it was built for another stack, \
             install the GPU driver after the RDMA stack and load it anew; if the kernel keeps no such folder (newer ones \
             don't) or a container hides it, NCCL_NET_RDMA_PEERMEM=on"
            .to_owned()),
        (PeerMemory::Auto, PeerDriver::Absent) => {
            Err("the module is not loaded (modprobe nvidia_peermem)".to_owned())
        }
    }
}

fn no_dmabuf(why: &str) -> String {
    format!(
        "not supported: {why}; it takes Linux 5.12 and a NIC driver that can, and then NVIDIA's open kernel modules"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ways(peermem: bool, dmabuf: bool, name: &str) -> GpuMemory {
        let way = |open: bool| if open { Ok(()) } else { Err(name.to_owned()) };
        GpuMemory { peermem: way(peermem), dmabuf: way(dmabuf) }
    }

    #[test]
    fn what_one_member_lacks_the_group_lacks() {
        let (all, first, second) = (ways(true, true, ""), ways(true, false, "x"), ways(false, true, "y"));
        let common = |members: &[&GpuMemory]| GpuMemory::common(members.iter().copied());
        assert_eq!(common(&[&all, &all]).ptr_support(), 7);
        assert_eq!(common(&[&all, &first]).ptr_support(), 3);
        assert_eq!(common(&[&second, &all]).ptr_support(), 5);
        let none = common(&[&all, &first, &second]);
        assert_eq!(none.ptr_support(), 1);
        let text = none.to_string();
        assert!(!none.any() && text.contains("no dma-buf: x") && text.contains("no nvidia_peermem: y"), "{text}");
        assert_eq!(common(&[]).ptr_support(), 1);
    }
}
