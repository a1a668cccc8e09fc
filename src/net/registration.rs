//! What NCCL registers on a connection: host memory, and GPU memory by whichever way is chosen and open.
//!
//! | registration | tried in turn |
//! |---|---|
//! | by a dma-buf | the dma-buf; nvidia_peermem, if it is open; staging |
//! | by address | nvidia_peermem; staging |
//!
//! Each step down the row is told once a device and reason, and is an error with `NCCL_NET_RDMA_STRICT=1`. Where the user asked
//! for GPUDirect or for staging there is one way only. Both may be had of one registration, where some sizes are better staged.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Once, PoisonError};

use crate::config::Config;
use crate::memory::gpu::{self, Direction, Lane, Stager};
use crate::memory::path::{Choice, Choices, Sizes};
use crate::memory::{Memory, Registration, Shadow};
use crate::transfer::staging;
use crate::transfer::{Keys, MAX_RAILS};
use crate::verbs::Access;

use super::comm::{Base, Comm};
use super::device::Port;
use super::gpu::GpuMemory;
use super::{Code, NetError};

/// The ways of GPU memory on one connection.
#[derive(Debug)]
pub(super) struct Paths {
    /// The device's, as NCCL was told.
    pub(super) choices: Arc<Choices>,
    /// A way that is given up is an error.
    strict: bool,
    /// Most bytes of a registration that is staged.
    most: u64,
    /// Made with the first registration that is staged: of one GPU, as NCCL's connections are.
    lane: Mutex<Option<Arc<Lane>>>,
    told: Once,
}

impl Paths {
    pub(super) fn new(gpu: &GpuMemory, config: &Config) -> Self {
        Self {
            choices: Arc::clone(gpu.choices()),
            strict: config.strict,
            most: config.staging_max.min(staging::LARGEST),
            lane: Mutex::default(),
            told: Once::new(),
        }
    }

    /// For the GPU that has this memory.
    fn choice(&self, address: u64) -> &Choice {
        let gpu = if self.choices.differ() { gpu::bus_id(address) } else { None };
        gpu.map_or_else(|| self.choices.nic(), |bus| self.choices.gpu(&bus))
    }

    fn lane(&self, stager: &Arc<Stager>, direction: Direction) -> Result<Arc<Lane>, String> {
        let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
        match &*lane {
            Some(lane) if Arc::ptr_eq(lane.stager(), stager) => Ok(Arc::clone(lane)),
            Some(lane) => Err(format!(
                "memory of {} on a connection that stages memory of {}",
                stager.describe(),
                lane.stager().describe()
            )),
            None => {
                let new = Arc::new(Lane::open(stager, direction)?);
                *lane = Some(Arc::clone(&new));
                Ok(new)
            }
        }
    }

    /// Waits, not for ever, until no copy of this connection is under way.
    pub(super) fn settle(&self) -> Result<(), String> {
        let lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner).clone();
        lane.map_or(Ok(()), |lane| lane.settle())
    }
}

/// What NCCL holds of a registration.
#[derive(Debug)]
pub struct MrHandle {
    /// Given up when NCCL gives the handle back, whoever still looks at the keys.
    held: Mutex<Held>,
    keys: Keys,
}

/// Dropped in order.
#[derive(Debug, Default)]
struct Held {
    _registrations: Vec<Registration>,
    shadow: Option<Arc<Shadow>>,
}

impl MrHandle {
    #[inline]
    pub(super) fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Requests that use it now.
    pub(super) fn in_flight(&self) -> u32 {
        self.keys.in_flight()
    }

    /// Hinted receives into it that are done for NCCL, but that the peer has not counted.
    pub(super) fn hinted_in_flight(&self) -> u32 {
        self.keys.hinted_in_flight()
    }
}

/// One registration on every rail.
#[derive(Debug, Default)]
struct Rails {
    registrations: Vec<Registration>,
    lkeys: [u32; MAX_RAILS],
    rkeys: [u32; MAX_RAILS],
}

/// A registration that failed, and on which port.
struct Refused<'a> {
    port: &'a Port,
    error: NetError,
}

impl Refused<'_> {
    /// NCCL tries again with every user buffer on every connection: the same refusal is told once.
    fn told(self) -> NetError {
        self.port.warn_once(self.error.text.clone());
        self.error
    }

    /// Told once a device and reason; the rest of it, of which there is one for each memory, is for the curious.
    fn gives_way_to(&self, way: &str) {
        let cause = self.error.text.split("; ").next().unwrap_or_default();
        self.port.warn_once(format!("{cause}; GPU memory goes by {way} instead"));
        tracing::info!(target: "init", "{}", self.error.text);
    }

    /// Also because of this.
    fn and(mut self, why: &str) -> Self {
        self.error.text = format!("{}; {why}", self.error.text);
        self
    }
}

/// A kind of memory that the device was not reported for.
#[cold]
fn cannot(port: &Port, what: &str, why: &str) -> NetError {
    NetError::new(Code::InvalidUsage, format!("{port:?} can't register {what}: {why}"))
}

impl Base {
    /// Registers on every rail, or, where one refuses, on none.
    fn rails(&self, one: impl Fn(&Port) -> Result<Registration, NetError>) -> Result<Rails, Refused<'_>> {
        let mut rails = Rails::default();
        for (i, port) in self.ports.iter().enumerate() {
            // What was registered on the rails before it goes with the list.
            let registration = one(port).map_err(|error| Refused { port, error })?;
            rails.lkeys[i] = registration.lkey();
            rails.rkeys[i] = registration.rkey();
            rails.registrations.push(registration);
        }
        Ok(rails)
    }

    fn hand_out(&self, keys: Keys, held: Held) -> Arc<MrHandle> {
        let handle = Arc::new(MrHandle { held: Mutex::new(held), keys });
        self.alert.remember(&handle);
        handle
    }

    /// Of memory that is not staged. A refusal is printed.
    pub(super) fn register(
        &self,
        flushed: bool,
        one: impl Fn(&Port) -> Result<Registration, NetError>,
    ) -> Result<Arc<MrHandle>, NetError> {
        let rails = self.rails(one).map_err(Refused::told)?;
        let keys = Keys::new(rails.lkeys, rails.rkeys, flushed);
        Ok(self.hand_out(keys, Held { _registrations: rails.registrations, shadow: None }))
    }

    /// Says once which way the GPU memory of this connection takes.
    fn announce(&self, address: u64, way: &str) {
        self.paths.told.call_once(|| {
            if tracing::enabled!(target: "init", tracing::Level::INFO) {
                let gpu = gpu::describe(address).unwrap_or_else(|| "GPU memory".to_owned());
                let rule = &self.paths.choice(address).rule;
                tracing::info!(target: "init", "{gpu} with peer {}: {way}; {rule}", self.peer);
            }
        });
    }
}

/// A dma-buf as NCCL gives it, and where in it the memory begins.
type DmaBuf<'a> = (BorrowedFd<'a>, u64);

impl Comm {
    /// Whether what arrives in such memory is flushed.
    fn flushes(&self, memory: Memory) -> bool {
        match self {
            Self::Send(_) => false,
            Self::Recv(c) => c.landing.is_some() && (memory == Memory::Gpu || c.flush_all),
        }
    }

    /// Rights that traffic of this direction needs.
    fn access(&self, flushed: bool) -> Access {
        match self {
            // The NIC only reads what is sent.
            Self::Send(_) => Access::LOCAL_WRITE,
            Self::Recv(_) => {
                let flush = if flushed { Access::REMOTE_READ } else { Access::empty() };
                Access::LOCAL_WRITE | Access::REMOTE_WRITE | flush
            }
        }
    }

    /// Registers memory for this connection; that of a GPU by way of the peer memory driver, or to be staged.
    ///
    /// # Safety
    /// The range stays mapped until the handle is given back by [`Comm::deregister`].
    pub unsafe fn register(&self, address: u64, length: usize, memory: Memory) -> Result<Arc<MrHandle>, NetError> {
        if memory == Memory::Gpu {
            return self.register_gpu(address, length, None);
        }
        let flushed = self.flushes(memory);
        let access = self.access(flushed);
        self.base().register(flushed, |port| {
            // SAFETY: the caller's promise.
            unsafe { port.registrar.register(address, length, memory, access) }
                .map_err(|e| NetError::new(Code::System, e.with("while registering memory").to_string()))
        })
    }

    /// Registers GPU memory by way of a dma-buf. The descriptor may be closed afterwards.
    pub fn register_dmabuf(
        &self,
        address: u64,
        length: usize,
        offset: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<Arc<MrHandle>, NetError> {
        self.register_gpu(address, length, Some((fd, offset)))
    }

    fn register_gpu(&self, address: u64, length: usize, dmabuf: Option<DmaBuf<'_>>) -> Result<Arc<MrHandle>, NetError> {
        let base = self.base();
        let choice = base.paths.choice(address);
        let stages = choice.gpu_memory && choice.staged != Sizes::NONE;
        if !choice.gdr && stages {
            return self.staged(address, length, None, Sizes::ALL).map_err(Refused::told);
        }
        let (rails, way) = match self.direct(address, length, dmabuf) {
            Ok(direct) => direct,
            Err(refused) if !choice.fall_back => return Err(refused.told()),
            Err(refused) if base.paths.strict => return Err(refused.and("NCCL_NET_RDMA_STRICT is set").told()),
            Err(refused) => {
                return match self.staged(address, length, None, Sizes::ALL) {
                    Ok(handle) => {
                        refused.gives_way_to("staging");
                        Ok(handle)
                    }
                    Err(why) => Err(refused.and(&format!("and there is no {}", why.error.text)).told()),
                };
            }
        };
        if stages {
            match self.staged(address, length, Some(rails), choice.staged) {
                Ok(handle) => return Ok(handle),
                // Only slower.
                Err(refused) => refused.gives_way_to(&format!("{way} whatever its size")),
            }
            let (rails, _) = self.direct(address, length, dmabuf).map_err(Refused::told)?;
            return Ok(self.unstaged(address, way, rails));
        }
        Ok(self.unstaged(address, way, rails))
    }

    fn unstaged(&self, address: u64, way: &str, rails: Rails) -> Arc<MrHandle> {
        let base = self.base();
        base.announce(address, way);
        let keys = Keys::new(rails.lkeys, rails.rkeys, self.flushes(Memory::Gpu));
        base.hand_out(keys, Held { _registrations: rails.registrations, shadow: None })
    }

    /// Without a copy.
    fn direct(
        &self,
        address: u64,
        length: usize,
        dmabuf: Option<DmaBuf<'_>>,
    ) -> Result<(Rails, &'static str), Refused<'_>> {
        let base = self.base();
        let choice = base.paths.choice(address);
        if !choice.gpu_memory && base.ports.iter().any(|port| port.gpu.any()) {
            let port = &base.ports[0];
            return Err(Refused { port, error: cannot(port, "GPU memory", &choice.rule) });
        }
        let access = self.access(self.flushes(Memory::Gpu));
        if let Some((fd, offset)) = dmabuf {
            let by_descriptor = base.rails(|port| {
                if let Err(why) = &port.gpu.dmabuf {
                    return Err(cannot(port, "a dma-buf", why));
                }
                port.registrar
                    .register_dmabuf(fd, offset, address, length, access)
                    .map_err(|e| NetError::new(Code::System, e.with("while registering GPU memory").to_string()))
            });
            let peermem = || base.ports.iter().all(|port| port.gpu.peermem.is_ok());
            match by_descriptor {
                Ok(rails) => return Ok((rails, "GPUDirect by dma-buf")),
                Err(refused) if choice.fall_back && !base.paths.strict && peermem() => {
                    refused.gives_way_to("nvidia_peermem");
                }
                Err(refused) => return Err(refused),
            }
        }
        let by_address = base.rails(|port| {
            if let Err(why) = &port.gpu.peermem {
                return Err(cannot(port, "GPU memory by its address (NCCL_PTR_CUDA)", why));
            }
            // SAFETY: NCCL keeps the range until the handle is given back.
            unsafe { port.registrar.register(address, length, Memory::Gpu, access) }
                .map_err(|e| NetError::new(Code::System, e.with("while registering memory").to_string()))
        });
        by_address.map(|rails| (rails, "GPUDirect by nvidia_peermem"))
    }

    /// With a shadow for messages of `sizes`; the others go directly.
    fn staged(
        &self,
        address: u64,
        length: usize,
        direct: Option<Rails>,
        sizes: Sizes,
    ) -> Result<Arc<MrHandle>, Refused<'_>> {
        let base = self.base();
        let paths = &base.paths;
        let port: &Port = &base.ports[0];
        let refused = |code, why: String| Refused { port, error: NetError::new(code, format!("staging: {why}")) };
        if length as u64 > paths.most {
            let why = format!(
                "a registration of {length} bytes of GPU memory; at most {} are staged (NCCL_NET_RDMA_STAGING_MAX)",
                paths.most
            );
            return Err(refused(Code::InvalidUsage, why));
        }
        let direction = match self {
            Self::Send(_) => Direction::FromGpu,
            Self::Recv(_) => Direction::ToGpu,
        };
        let ground = || {
            let stager = Stager::of(address, length)?;
            Ok((Shadow::of(address, length, &stager)?, paths.lane(&stager, direction)?))
        };
        let (shadow, lane) = ground().map_err(|why| refused(Code::System, why))?;
        let access = self.access(false);
        let mut rails = base.rails(|port| {
            // SAFETY: the handle gives the shadow up after this registration.
            unsafe { port.registrar.register(shadow.address(), length, Memory::Host, access) }
                .map_err(|e| NetError::new(Code::System, e.with("while registering pinned host memory").to_string()))
        })?;
        let staging = staging::Shadow {
            offset: shadow.address().wrapping_sub(address),
            lkeys: rails.lkeys,
            rkeys: rails.rkeys,
            sizes: sizes.from..sizes.to.min(staging::LARGEST + 1),
            copier: lane,
        };
        let (way, flushed) = match direct {
            Some(mut direct) => {
                rails.registrations.append(&mut direct.registrations);
                (rails.lkeys, rails.rkeys) = (direct.lkeys, direct.rkeys);
                ("GPUDirect and staging, by size", self.flushes(Memory::Gpu))
            }
            // Messages of no bytes have these keys.
            None => ("staging", false),
        };
        base.announce(address, way);
        let keys = Keys::new(rails.lkeys, rails.rkeys, flushed).staged_by(staging);
        Ok(base.hand_out(keys, Held { _registrations: rails.registrations, shadow: Some(shadow) }))
    }

    /// Gives a registration back. With traffic on it still open (NCCL aborts so), that traffic is stopped first, so that
    /// nothing lands in memory that NCCL is about to free. Hinted receives look open until the peer has counted them, as
    /// the last ones always do at the end: then the connection is over, too, but the peer is told of no failure.
    pub fn deregister(&self, handle: Arc<MrHandle>) {
        let base = self.base();
        if handle.in_flight() > 0 {
            let aborted = NetError::new(
                Code::Remote,
                format!("the connection to peer {} was aborted: memory was deregistered with traffic open", base.peer),
            );
            let print = |_: &NetError| {
                tracing::info!(target: "net", "connection to peer {} aborted by deregistration", base.peer);
            };
            if base.alert.fail(aborted, print) {
                base.alert.tell("aborted by the application");
            }
        } else if handle.hinted_in_flight() > 0 {
            let over = NetError::new(
                Code::InvalidUsage,
                format!(
                    "memory of receives without completion was deregistered: the connection to peer {} is over, and NCCL \
                     goes on using it; NCCL_NET_RDMA_RECV_HINT=0 does without such receives",
                    base.peer
                ),
            );
            let print = |e: &NetError| tracing::debug!(target: "net", "{}", e.text);
            base.retire(over, print);
        }
        let open = handle.in_flight() + handle.hinted_in_flight() > 0;
        if open {
            base.fence();
            // The data path may still hold a pointer to the keys.
            base.graveyard.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::clone(&handle));
        }
        // The memory region goes now, whoever still looks at the keys: NCCL frees the memory next, and what is at its
        // addresses then must not find it in the cache.
        let mut held = std::mem::take(&mut *handle.held.lock().unwrap_or_else(PoisonError::into_inner));
        // NCCL makes no call of the data path while it aborts, so no copy is started after this.
        if open
            && held.shadow.is_some()
            && let Err(why) = base.paths.settle()
        {
            tracing::warn!(
                target: "init",
                "{why}; while memory was deregistered on the connection to peer {}: its shadow stays pinned",
                base.peer
            );
            std::mem::forget(held.shadow.take());
        }
    }
}
