//! What NCCL registers on a connection: host memory, and GPU memory by whichever way is chosen and open.
//!
//! | registration | tried in turn |
//! |---|---|
//! | by a dma-buf | the dma-buf; nvidia_peermem, if it is open; staging |
//! | by address | nvidia_peermem; staging |
//! | either, where all sizes are better staged | staging; the row above |
//!
//! Each step along a row is told once a device and reason, and is an error with `NCCL_NET_RDMA_STRICT=1`. Where the user asked
//! for staging there is that only; for GPUDirect, no staging. Both may be had of one registration, where some sizes are better
//! staged.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use crate::config::Config;
use crate::memory::gpu::{self, CudaError, Direction, Lane, Stager};
use crate::memory::path::{Choice, Choices, Sizes};
use crate::memory::{Memory, Registration, Shadow};
use crate::transfer::staging;
use crate::transfer::{Keys, MAX_RAILS};
use crate::verbs::Access;

use super::comm::{Base, Comm};
use super::device::Port;
use super::gpu::GpuMemory;
use super::stall::{self, Calls, Vigil};
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
    /// Most bytes that are staged in this process.
    total: u64,
    /// How long copies may not go on.
    patience: Option<Duration>,
    /// Made with the first registration that is staged: of one GPU, as NCCL's connections are.
    lane: Mutex<Option<Arc<Lane>>>,
    told: Once,
}

impl Paths {
    pub(super) fn new(gpu: &GpuMemory, config: &Config, patience: Option<Duration>) -> Self {
        Self {
            choices: Arc::clone(gpu.choices()),
            strict: config.strict,
            most: config.staging_max.min(staging::LARGEST),
            total: config.staging_total,
            patience,
            lane: Mutex::default(),
            told: Once::new(),
        }
    }

    /// For the GPU that has this memory.
    fn choice(&self, address: u64) -> &Choice {
        let gpu = if self.choices.differ() { gpu::bus_id(address) } else { None };
        gpu.map_or_else(|| self.choices.nic(), |bus| self.choices.gpu(&bus))
    }

    /// The connection's lane; from its first one on the watch looks after its copies.
    fn lane(&self, stager: &Arc<Stager>, direction: Direction, base: &Base) -> Result<Arc<Lane>, String> {
        let lane = match self.open_lane() {
            Some(lane) => lane,
            None => {
                // With no lock held: who ends the connection doesn't wait for the driver.
                let new = Arc::new(Lane::open(stager, direction)?);
                stall::enroll(&base.alert).map_err(|e| format!("copies can't be watched: {e}"))?;
                let lane = {
                    let mut lane = self.lane.lock().unwrap_or_else(PoisonError::into_inner);
                    Arc::clone(lane.get_or_insert(new))
                };
                if let Some(limit) = self.patience {
                    base.alert.watch_copies(Vigil::new(limit), Calls::of(&lane, base.peer.to_string(), limit));
                }
                lane
            }
        };
        if Arc::ptr_eq(lane.stager(), stager) {
            return Ok(lane);
        }
        let (new, old) = (stager.describe(), lane.stager().describe());
        if new == old {
            return Err(format!("the connection's copies on {old} have failed"));
        }
        Err(format!(
            "memory of {new} on a connection that stages memory of {old}; a connection serves one GPU: register the buffers of each \
             GPU with a communicator of its own"
        ))
    }

    /// The GPU that has the memory of this connection, for people.
    pub(super) fn gpu(&self) -> String {
        self.open_lane().map_or_else(|| "a GPU".to_owned(), |lane| lane.stager().describe())
    }

    fn open_lane(&self) -> Option<Arc<Lane>> {
        self.lane.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// No copy of this connection is started from here on, unless the driver keeps the call; [`Self::settle`] tells.
    pub(super) fn close(&self) {
        if let Some(lane) = self.open_lane() {
            let _ = lane.close();
        }
    }

    /// The same, and waits, not for ever, until none is under way. An error: some may still be carried out.
    pub(super) fn settle(&self) -> Result<(), CudaError> {
        match self.open_lane().map_or(Ok(()), |lane| lane.settle()) {
            // The data path has told, if any copy was under way.
            Err(failed) if !failed.is_late() => {
                tracing::info!(target: "net", "nothing is copied any more: {failed}");
                Ok(())
            }
            settled => settled,
        }
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
    shadow: Option<Shadow>,
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

/// GPU memory on every rail without a copy, and which way that is.
type Direct = (Rails, &'static str);

/// GPU memory that is copied: its shadow, that on every rail, and what copies.
#[derive(Debug)]
struct Staged {
    rails: Rails,
    shadow: Shadow,
    lane: Arc<Lane>,
}

/// A registration that failed, and on which port. What stands before the first semicolon of its text is the reason; what is of
/// this memory only stands behind.
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
        self.port.warn_once(format!("GPU memory goes by {way} instead: {cause}"));
        tracing::info!(target: "init", "{}", self.error.text);
    }

    fn by_strict(self) -> Self {
        self.and("NCCL_NET_RDMA_STRICT is set")
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
        let paths = &self.base().paths;
        let choice = paths.choice(address);
        let staged = if choice.gpu_memory { choice.staged } else { Sizes::NONE };
        if staged == Sizes::ALL || staged != Sizes::NONE && !choice.gdr {
            let refused = match self.shadow(address, length) {
                Ok(shadow) => return Ok(self.hand_out(address, None, Some((shadow, Sizes::ALL)))),
                Err(refused) => refused,
            };
            if !choice.gdr {
                return Err(refused.told());
            }
            return self.instead(
                refused,
                || self.direct(address, length, dmabuf),
                |refused, (rails, way)| {
                    refused.gives_way_to(way);
                    self.hand_out(address, Some((rails, way)), None)
                },
            );
        }
        let direct = match self.direct(address, length, dmabuf) {
            Ok(direct) => direct,
            Err(refused) if choice.gpu_memory && !choice.fall_back => return Err(refused.told()),
            Err(refused) => {
                return self.instead(
                    refused,
                    || self.shadow(address, length),
                    |refused, shadow| {
                        refused.gives_way_to("staging");
                        self.hand_out(address, None, Some((shadow, Sizes::ALL)))
                    },
                );
            }
        };
        if staged == Sizes::NONE {
            return Ok(self.hand_out(address, Some(direct), None));
        }
        match self.shadow(address, length) {
            Ok(shadow) => Ok(self.hand_out(address, Some(direct), Some((shadow, staged)))),
            Err(refused) if paths.strict => Err(refused.by_strict().told()),
            // Only slower.
            Err(refused) => {
                refused.gives_way_to(&format!("{} whatever its size", direct.1));
                Ok(self.hand_out(address, Some(direct), None))
            }
        }
    }

    /// Another way where one was refused, if there may be one.
    fn instead<'a, T>(
        &'a self,
        refused: Refused<'a>,
        other: impl FnOnce() -> Result<T, Refused<'a>>,
        take: impl FnOnce(Refused<'a>, T) -> Arc<MrHandle>,
    ) -> Result<Arc<MrHandle>, NetError> {
        if self.base().paths.strict {
            return Err(refused.by_strict().told());
        }
        match other() {
            Ok(other) => Ok(take(refused, other)),
            Err(why) => Err(refused.and(&format!("and there is no {}", why.error.text)).told()),
        }
    }

    /// What was had goes to NCCL: rails without a copy, and a shadow for messages of some sizes; one of the two at least.
    fn hand_out(&self, address: u64, direct: Option<Direct>, staged: Option<(Staged, Sizes)>) -> Arc<MrHandle> {
        let base = self.base();
        let (mut rails, way, flushed) = match (direct, &staged) {
            (Some((rails, _)), Some(_)) => (rails, "GPUDirect and staging, by size", self.flushes(Memory::Gpu)),
            (Some((rails, way)), None) => (rails, way, self.flushes(Memory::Gpu)),
            (None, _) => (Rails::default(), "staging", false),
        };
        base.announce(address, way);
        let Some((Staged { rails: mut host, shadow, lane }, sizes)) = staged else {
            let keys = Keys::new(rails.lkeys, rails.rkeys, flushed);
            return base.hand_out(keys, Held { _registrations: rails.registrations, shadow: None });
        };
        let mixed = !rails.registrations.is_empty();
        if !mixed {
            // Messages of no bytes have these keys.
            (rails.lkeys, rails.rkeys) = (host.lkeys, host.rkeys);
        }
        let staging = staging::Shadow {
            offset: shadow.address().wrapping_sub(address),
            lkeys: host.lkeys,
            rkeys: host.rkeys,
            sizes: sizes.from..sizes.to.min(staging::LARGEST + 1),
            mixed,
            copier: lane,
        };
        rails.registrations.append(&mut host.registrations);
        let keys = Keys::new(rails.lkeys, rails.rkeys, flushed).staged_by(staging);
        base.hand_out(keys, Held { _registrations: rails.registrations, shadow: Some(shadow) })
    }

    /// Without a copy.
    fn direct(&self, address: u64, length: usize, dmabuf: Option<DmaBuf<'_>>) -> Result<Direct, Refused<'_>> {
        let base = self.base();
        let choice = base.paths.choice(address);
        if !choice.gpu_memory && base.ports.iter().any(|port| port.gpu.any()) {
            let port = &base.ports[0];
            // It was told that the NIC takes host memory, but from 2.30 on it takes its own IB code's word, and would end the job.
            let why = format!(
                "{} (NCCL asks nevertheless: from 2.30 on it goes by its own IB code, unless NCCL_NET_GDR_LEVEL=LOC on this rank \
                 has it use host memory)",
                choice.rule
            );
            return Err(Refused { port, error: cannot(port, "GPU memory", &why) });
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
                // Both are GPUDirect.
                Err(refused) if !base.paths.strict && peermem() => refused.gives_way_to("nvidia_peermem"),
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

    /// With a copy.
    fn shadow(&self, address: u64, length: usize) -> Result<Staged, Refused<'_>> {
        let base = self.base();
        let paths = &base.paths;
        let port: &Port = &base.ports[0];
        let refused = |code, why: String| {
            let gpu = gpu::describe(address).unwrap_or_else(|| "GPU memory".to_owned());
            let text = format!(
                "staging: {why}; {length} bytes at {address:#x} of {gpu}, by {port:?}, for peer {}; \
                 NCCL_NET_GDR_LEVEL=LOC does without staging",
                base.peer
            );
            Refused { port, error: NetError::new(code, text) }
        };
        if let Err(why) = port.gpu.can_stage() {
            return Err(refused(Code::InvalidUsage, why.clone()));
        }
        if length as u64 > paths.most {
            let why = format!(
                "a registration is larger than NCCL_NET_RDMA_STAGING_MAX, {} bytes; NCCL does without registration of the \
                 program's own buffers",
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
            Ok((Shadow::of(address, length, &stager, paths.total)?, stager))
        };
        let (shadow, stager) = ground().map_err(|why| refused(Code::System, why))?;
        let access = self.access(false);
        let rails = base.rails(|port| {
            // SAFETY: the handle gives the shadow up after this registration.
            unsafe { port.registrar.register(shadow.address(), length, Memory::Host, access) }
                .map_err(|e| NetError::new(Code::System, e.with("while registering pinned host memory").to_string()))
        })?;
        // Last: it stays with the connection, and the stager with it.
        let lane = paths.lane(&stager, direction, base).map_err(|why| refused(Code::System, why))?;
        Ok(Staged { rails, shadow, lane })
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
        // The fence let no copy start after it.
        if open
            && held.shadow.is_some()
            && let Err(why) = base.paths.settle()
        {
            base.copies_hang(&why, "memory was deregistered: its shadow stays pinned");
            if let Some(shadow) = held.shadow.take() {
                shadow.abandon();
            }
        }
    }
}
