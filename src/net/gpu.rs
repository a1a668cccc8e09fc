//! By which ways GPU memory can be had: those of a NIC that reaches it without a copy (GPUDirect RDMA), looked for once, when
//! its device is opened, and staging.

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use crate::abi::types::{NCCL_PTR_CUDA, NCCL_PTR_DMABUF, NCCL_PTR_HOST};
use crate::config::{Config, GpuPath, PeerMemory};
use crate::memory::gpu::{self, Lane};
use crate::memory::path::{Choice, Choices, DMABUF, Neighbour, Sizes};
use crate::topology::peermem::{self, PeerDriver};
use crate::transfer::staging::{Copier, CopyWr};
use crate::verbs::{Mr, Pd};

/// An open way, or why it is closed and what opens it.
type Way = Result<(), String>;

/// The ways of a device.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct GpuMemory {
    /// A pointer is registered as it is; the kernel asks the peer memory driver for its pages.
    pub(super) peermem: Way,
    /// A descriptor of the memory is registered.
    pub(super) dmabuf: Way,
    /// Copies through host memory; looked for where the user wants them.
    staging: Way,
    wish: GpuPath,
    /// A way that was asked for and is closed is an error.
    strict: bool,
    /// Of each GPU, as the devices see them together.
    choices: Arc<Choices>,
}

impl GpuMemory {
    /// So far of no GPU.
    pub(super) fn probe(pd: &Arc<Pd>, config: &Config) -> Self {
        Self {
            peermem: peer_memory(config),
            dmabuf: Mr::probe_dmabuf(pd).map_err(|e| no_dmabuf(&e.to_string())),
            staging: staging(config),
            wish: config.gpu_path,
            strict: config.strict,
            choices: Arc::default(),
        }
        .near(&[])
    }

    /// With what is known of GPUs.
    pub(super) fn near(self, near: &[Neighbour]) -> Self {
        let choices = Choices::decide(self.wish, &self.open(), near);
        Self { choices: Arc::new(choices), ..self }
    }

    /// Whether memory may be staged: also where that was not chosen, but what was chosen failed.
    pub(super) fn can_stage(&self) -> &Way {
        &self.staging
    }

    pub(super) fn none(why: &str) -> Self {
        let closed = || Err(why.to_owned());
        Self {
            peermem: closed(),
            dmabuf: closed(),
            staging: closed(),
            wish: GpuPath::Auto,
            strict: false,
            choices: Arc::default(),
        }
        .near(&[])
    }

    /// What devices that are used together have in common, with the GPUs as they see them together.
    pub(super) fn common<'a>(members: impl IntoIterator<Item = &'a Self>, near: &[Neighbour]) -> Self {
        let both = |a: Self, b: Self| Self {
            peermem: a.peermem.and(b.peermem),
            dmabuf: a.dmabuf.and(b.dmabuf),
            staging: a.staging.and(b.staging),
            ..a
        };
        members.into_iter().cloned().reduce(both).unwrap_or_else(|| Self::none("there is no device")).near(near)
    }

    /// The open ways by name, in the order in which they are tried.
    pub(super) fn open(&self) -> Vec<&'static str> {
        let ways = [(DMABUF, self.dmabuf.is_ok()), ("nvidia_peermem", self.peermem.is_ok())];
        ways.into_iter().filter(|(_, open)| *open).map(|(name, _)| name).collect()
    }

    /// The way that data of each GPU take.
    pub(super) fn choices(&self) -> &Arc<Choices> {
        &self.choices
    }

    /// What NCCL is told.
    pub(super) fn choice(&self) -> &Choice {
        self.choices.nic()
    }

    /// Someone expects otherwise: a peer memory driver is there, yet every byte goes through host memory; or a way was asked
    /// for that is closed.
    pub(super) fn is_a_surprise(&self, config: &Config) -> bool {
        let loaded = || peermem::find(&config.sysroot) == PeerDriver::NotRegistered;
        match self.wish {
            GpuPath::Auto => {
                let choice = self.choice();
                let wanted = !choice.gpu_memory && !choice.as_measured;
                wanted && !self.any() && config.peermem == PeerMemory::Auto && loaded()
            }
            GpuPath::Staging => self.staging.is_err(),
            // Of what is forced and closed the survey tells.
            GpuPath::Gdr | GpuPath::Host => false,
        }
    }

    /// GPUDirect may not be done without, and is not open.
    fn must_fail(&self) -> bool {
        self.strict && self.wish == GpuPath::Gdr && !self.choice().gdr
    }

    /// Whether a NIC reaches GPU memory.
    pub(super) fn any(&self) -> bool {
        self.peermem.is_ok() || self.dmabuf.is_ok()
    }

    /// Bits NCCL_PTR_*. To NCCL the CUDA bit alone means the peer memory driver, or that the plugin copies.
    pub(super) fn ptr_support(&self) -> c_int {
        let choice = self.choice();
        let (peermem, dmabuf) = (choice.gdr && self.peermem.is_ok(), choice.gdr && self.dmabuf.is_ok());
        // What is all staged needs no dma-buf. Refused at registration, where the reason is told, if it may not be done without.
        let staged = choice.gpu_memory && choice.staged == Sizes::ALL;
        let staging = staged && (self.staging.is_ok() || self.strict && !choice.gdr);
        let cuda = if peermem || staging || self.must_fail() { NCCL_PTR_CUDA } else { 0 };
        let dmabuf = if dmabuf { NCCL_PTR_DMABUF } else { 0 };
        (NCCL_PTR_HOST | cuda | dmabuf).cast_signed()
    }

    /// The ways that are used in short.
    pub(super) fn ways(&self) -> &'static str {
        let choice = self.choice();
        match (choice.gdr && self.peermem.is_ok(), choice.gdr && self.dmabuf.is_ok()) {
            (true, true) => "host memory, GPU memory by dma-buf or nvidia_peermem",
            (true, false) => "host memory, GPU memory by nvidia_peermem",
            (false, true) => "host memory, GPU memory by dma-buf",
            (false, false) if choice.gpu_memory && self.staging.is_ok() => "host memory, GPU memory by staging",
            (false, false) => "host memory",
        }
    }
}

impl fmt::Display for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let choice = self.choice();
        let staged = choice.gpu_memory && !choice.gdr;
        f.write_str(self.ways())?;
        if staged && self.staging.is_ok() {
            return write!(f, " ({})", choice.rule);
        }
        if self.must_fail() {
            f.write_str(", and GPU memory is an error (NCCL_NET_RDMA_STRICT)")?;
        } else if !choice.gdr {
            f.write_str(" only: NCCL copies GPU data through it")?;
        }
        // Not for want of a way.
        if !choice.gpu_memory && (self.any() || self.wish == GpuPath::Host) {
            return write!(f, " ({})", choice.rule);
        }
        let ways: &[(&str, &Way)] = if staged {
            &[("staging", &self.staging)]
        } else {
            &[("nvidia_peermem", &self.peermem), ("dma-buf", &self.dmabuf)]
        };
        for (name, way) in ways {
            if let Err(why) = way {
                write!(f, "; no {name}: {why}")?;
            }
        }
        Ok(())
    }
}

impl Copier for Lane {
    unsafe fn start(&self, copies: &[CopyWr]) -> Result<(), String> {
        let copies = copies.iter().map(|c| gpu::Copy {
            gpu: c.gpu,
            host: c.host,
            length: c.length,
            flagged: c.flagged,
            mark: c.mark,
        });
        // SAFETY: the caller's promise; a shadow is pinned.
        unsafe { self.start(copies) }
    }

    fn has_room(&self, copies: usize) -> bool {
        self.has_room(copies)
    }

    #[inline]
    fn reached(&self) -> u32 {
        self.reached()
    }

    fn check(&self) -> Result<(), String> {
        self.check()
    }
}

/// Why nothing is staged for an NCCL that is too old, or was told to be silent.
pub(super) const NO_FLAGS: &str = "NCCL does not tell which receives have flags among their data, as LL128's have, of which a \
     copy may show before the data do: staging takes NCCL 2.24 or newer (version 9 of the plugin interface) without \
     NCCL_NET_OPTIONAL_RECV_COMPLETION=0";

/// Whether staging is possible, as far as can be said before it is asked for.
fn staging(config: &Config) -> Way {
    if !config.tells_flags {
        return Err(NO_FLAGS.to_owned());
    }
    if config.gpu_path == GpuPath::Staging { gpu::available() } else { Ok(()) }
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
    use crate::memory::Memory;
    use crate::net::tests::{connection, engine};

    fn ways(peermem: bool, dmabuf: bool, name: &str) -> GpuMemory {
        let way = |open: bool| if open { Ok(()) } else { Err(name.to_owned()) };
        GpuMemory {
            peermem: way(peermem),
            dmabuf: way(dmabuf),
            staging: way(true),
            wish: GpuPath::Auto,
            strict: false,
            choices: Arc::default(),
        }
        .near(&[])
    }

    /// The flags of LL128 may be copied before their data.
    #[test]
    fn nothing_is_staged_where_nccl_does_not_tell_what_has_flags() {
        let set = [("NCCL_NET_OPTIONAL_RECV_COMPLETION", "0")];
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let (config, _) = Config::load(&find, std::iter::empty());
        assert!(staging(&config).expect_err("none").contains("LL128"));
    }

    #[test]
    fn what_was_asked_for_decides() {
        let wish = |wish, staging: bool, strict| {
            GpuMemory {
                staging: if staging { Ok(()) } else { Err("no driver".to_owned()) },
                wish,
                strict,
                ..ways(true, true, "")
            }
            .near(&[])
        };
        assert_eq!(wish(GpuPath::Host, true, false).ptr_support(), 1);
        assert_eq!(wish(GpuPath::Gdr, true, false).ptr_support(), 7);
        assert_eq!(wish(GpuPath::Staging, true, false).ptr_support(), 3);
        assert_eq!(wish(GpuPath::Staging, false, false).ptr_support(), 1);
        assert_eq!(wish(GpuPath::Staging, false, true).ptr_support(), 3, "the registration says why");
        let closed = |strict| GpuMemory { wish: GpuPath::Gdr, strict, ..ways(false, false, "why") }.near(&[]);
        assert_eq!((closed(true).ptr_support(), closed(false).ptr_support()), (3, 1), "the registration says why");
        let text = closed(true).to_string();
        assert!(text.contains("is an error (NCCL_NET_RDMA_STRICT)") && text.contains("no dma-buf: why"), "{text}");
        let text = wish(GpuPath::Staging, false, false).to_string();
        assert!(text.contains("host memory only") && text.contains("no staging: no driver"), "{text}");
        let text = wish(GpuPath::Host, true, false).to_string();
        assert!(text.contains("NCCL_NET_RDMA_GPU_PATH=host"), "{text}");
    }

    /// With `NCCL_DMABUF_ENABLE=0` NCCL would go on over host memory, while the log says that all is staged.
    #[test]
    fn what_is_all_staged_needs_no_dma_buf() {
        let choice = |staged| Choice { gpu_memory: true, gdr: true, fall_back: true, staged, ..Choice::default() };
        let with = |staged, staging: Way| {
            let choices = Arc::new(Choices::of(choice(staged)));
            GpuMemory { staging, choices, ..ways(false, true, "") }.ptr_support()
        };
        assert_eq!(with(Sizes::ALL, Ok(())), 7);
        assert_eq!(with(Sizes { from: 8, to: 64 }, Ok(())), 5, "by a dma-buf only");
        assert_eq!(with(Sizes::ALL, Err(String::new())), 5);
    }

    /// Whatever the order in which the peer has its rails.
    #[test]
    fn connections_go_by_what_nccl_was_told() {
        let engine = engine(&[]);
        let (send, recv) = connection(&engine);
        let device = engine.device(0).expect("found");
        for comm in [&send, &recv] {
            assert!(Arc::ptr_eq(&comm.base().paths.choices, device.gpu.choices()));
        }
    }

    /// NCCL, which is told so, does not go on over host memory.
    #[test]
    fn gpudirect_that_is_forced_and_strict_fails_with_the_reason() {
        let engine = engine(&[("NCCL_NET_RDMA_GPU_PATH", "gdr"), ("NCCL_NET_RDMA_STRICT", "1")]);
        assert_eq!(engine.device(0).expect("found").ptr_support(), 3);
        let (send, _recv) = connection(&engine);
        // SAFETY: nothing is registered.
        let refused = unsafe { send.register(0x1000, 4096, Memory::Gpu) }.expect_err("closed").text;
        assert!(refused.contains("can't register GPU memory") && refused.contains("nvidia_peermem"), "{refused}");
    }

    #[test]
    fn what_one_member_lacks_the_group_lacks() {
        let (all, first, second) = (ways(true, true, ""), ways(true, false, "x"), ways(false, true, "y"));
        let common = |members: &[&GpuMemory]| GpuMemory::common(members.iter().copied(), &[]);
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
