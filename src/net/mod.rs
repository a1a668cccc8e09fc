//! The engine: devices, listeners, connections. It knows nothing of NCCL's C structs.
//!
//! [`Engine`] is the process's one instance; [`Accepting`] a listener, [`Comm`] a connection. Nothing here waits: connect and
//! accept are polled, and a `None` means "call again".

mod alert;
mod comm;
mod connect;
mod context;
mod control;
mod device;
mod endpoint;
mod events;
pub(crate) mod fork;
mod fusion;
mod gpu;
mod hello;
mod listen;
mod registration;
mod stall;
mod survey;
#[cfg(test)]
pub(crate) mod tests;

use std::ffi::{CStr, c_int};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Instant;

use dashmap::DashMap;

use crate::abi::types::ncclDebugLogger_t;
use crate::config::Config;
use crate::observe;
use crate::rendezvous::{Handle, SPARE_BYTES};
use crate::topology::report::Severity;
use crate::transfer::Profiler;

use connect::Connecting;
use fusion::Devices;

pub use crate::rendezvous::HANDLE_BYTES;
pub use comm::{Buffers, Comm, Request, Tested};
pub use context::{Attributes, CommContext, Wishes};
pub use device::{Device, LeftOut, STAND_IN, discover};
pub use listen::Accepting;
pub use registration::MrHandle;
pub use survey::{Chosen, Shown, Survey};

/// What NCCL_NET selects; no other plugin's name, so that a silent fallback shows.
pub const NAME: &CStr = c"RDMA";

/// Kinds of failure, as NCCL tells them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    /// The operating system, libibverbs or the device.
    System,
    /// A defect of this plugin.
    Internal,
    InvalidArgument,
    InvalidUsage,
    /// The peer or the way to it.
    Remote,
}

/// A failure; whoever made it has printed it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct NetError {
    pub code: Code,
    pub text: String,
}

impl NetError {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }

    /// NCCL called in a way that its contract excludes: printed here.
    #[cold]
    pub fn misuse(text: &str) -> Self {
        tracing::warn!(target: "init", "called in a way that NCCL's plugin interface does not allow: {text}");
        Self::new(Code::InvalidArgument, text)
    }

    /// Prints the line that a person acts on.
    fn printed(self) -> Self {
        tracing::warn!(target: "init", "{}", self.text);
        self
    }
}

/// The process's one engine.
#[derive(Debug)]
pub struct Engine {
    config: Config,
    devices: Devices,
    /// Connects under way, by the number in NCCL's copy of the handle.
    connecting: DashMap<u64, Connecting>,
}

/// Never taken down: NCCL unloads plugins without a call, and the library stays mapped.
static ENGINE: RwLock<Option<Arc<Engine>>> = RwLock::new(None);
/// Communicators of one process may start at once.
static INIT: Mutex<()> = Mutex::new(());

impl Engine {
    /// Starts the engine, or, when it runs already, only takes the new logger. Without devices it succeeds: NCCL asks for
    /// their number next and goes on to another transport. `abi` is the version of the plugin ABI that NCCL chose.
    pub fn init(logger: ncclDebugLogger_t, abi: u8) -> Result<(), NetError> {
        let _one_at_a_time = INIT.lock().unwrap_or_else(PoisonError::into_inner);
        Self::start(logger, abi)
    }

    /// As [`Self::init`], for one communicator: `id` is NCCL's own, `class` the traffic class that it asks for, `profiler` is
    /// told of its work requests.
    pub fn open(
        logger: ncclDebugLogger_t,
        abi: u8,
        id: u64,
        class: impl FnOnce() -> Result<Option<u8>, NetError>,
        profiler: Option<Arc<dyn Profiler>>,
    ) -> Result<Box<CommContext>, NetError> {
        let _one_at_a_time = INIT.lock().unwrap_or_else(PoisonError::into_inner);
        Self::start(logger, abi)?;
        Ok(Box::new(CommContext::open(id, class(), profiler)))
    }

    fn start(logger: ncclDebugLogger_t, abi: u8) -> Result<(), NetError> {
        if let Ok(engine) = Self::get() {
            observe::install(logger, engine.config.nccl_debug.as_deref());
            // Up to v10 NCCL starts the plugin once in its life with it, from v11 on for every communicator.
            if !CommContext::any_open() {
                engine.devices.begin();
            }
            return Ok(());
        }
        let (mut config, warnings) = Config::from_process();
        observe::install(logger, config.nccl_debug.as_deref());
        config.tells_flags &= abi >= 9;
        tracing::info!(
            target: "init",
            "nccl-net-rdma {} (commit {}), plugin ABI v{abi}",
            env!("CARGO_PKG_VERSION"),
            option_env!("NCCL_NET_RDMA_COMMIT").unwrap_or("unknown")
        );
        for warning in &warnings {
            tracing::warn!(target: "env", "{warning}");
        }
        if config.ib_disable {
            // As with NCCL's own transport nobody need be warned of what was asked for, unless the job ends of it.
            let own = NAME.to_string_lossy();
            let then = config.without_devices(&own);
            if config.insists_on(&own).is_some() {
                tracing::warn!(target: "init", "NCCL_IB_DISABLE is set: no devices; {then}");
            } else {
                tracing::info!(target: "init", "NCCL_IB_DISABLE is set: no devices; {then}");
            }
            return Err(NetError::new(Code::Internal, "NCCL_IB_DISABLE is set"));
        }
        fork::watch();
        let found = discover(&config);
        for line in &found.warnings {
            tracing::warn!(target: "init", "{line}");
        }
        for left in &found.left_out {
            tracing::info!(target: "init", "left out {left}");
        }
        // Of one cause there is one warning, however many devices have it.
        let mut surprises: Vec<(String, Vec<String>)> = Vec::new();
        for (i, device) in found.devices.iter().enumerate() {
            tracing::info!(target: "init", "device {i}: {device}");
            let memory = device.memory().to_string();
            if !device.stages_by_surprise(&config) {
                tracing::info!(target: "init", "device {i} takes {memory}");
            } else if let Some((_, devices)) = surprises.iter_mut().find(|(text, _)| *text == memory) {
                devices.push(i.to_string());
            } else {
                surprises.push((memory, vec![i.to_string()]));
            }
        }
        for (memory, devices) in surprises {
            let (s, takes) = if devices.len() == 1 { ("", "takes") } else { ("s", "take") };
            tracing::warn!(target: "init", "device{s} {} {takes} {memory}", devices.join(", "));
        }
        if found.devices.is_empty() {
            let reasons: Vec<String> = found.left_out.iter().map(ToString::to_string).collect();
            let why = if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join("; ")) };
            let then = if config.strict {
                "NCCL_NET_RDMA_STRICT is set: the job stops instead of falling back".to_owned()
            } else {
                config.without_devices(&NAME.to_string_lossy())
            };
            tracing::warn!(target: "init", "no RDMA device can be used{why}; {then}");
        }
        if tracing::enabled!(target: "init", tracing::Level::INFO) {
            for line in found.survey.lines() {
                tracing::info!(target: "init", "{line}");
            }
        }
        if tracing::enabled!(target: "init", tracing::Level::WARN) {
            for finding in found.survey.findings() {
                match finding.severity {
                    Severity::Warning => tracing::warn!(target: "init", "{finding}"),
                    Severity::Note => tracing::info!(target: "init", "{finding}"),
                }
            }
        }
        let mut devices = found.devices;
        if config.strict && devices.is_empty() {
            // 0 devices or an error from here would only make NCCL fall back; a device that can't listen stops the job.
            devices.push(Device::unusable());
        }
        let engine = Self { config, devices: Devices::new(devices), connecting: DashMap::with_shard_amount(4) };
        *ENGINE.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(engine));
        Ok(())
    }

    /// The running engine.
    pub fn get() -> Result<Arc<Self>, NetError> {
        ENGINE
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
            .ok_or_else(|| NetError::new(Code::InvalidUsage, "called before init"))
    }

    /// Devices that NCCL knows of: those found, and what it fused.
    pub fn device_count(&self) -> usize {
        self.devices.count()
    }

    pub fn config(&self) -> &Config {
        &self.config
    }

    /// A device by NCCL's index.
    pub fn device(&self, dev: c_int) -> Result<Arc<Device>, NetError> {
        self.devices.get(dev)
    }

    /// Makes one device of several that were found, of which a connection then uses all ports; its index.
    pub fn fuse(&self, members: &[c_int]) -> Result<usize, NetError> {
        if members.len() > 1 && !self.config.ib_merge_nics {
            // NCCL asks for every group that it sees, and goes on without.
            tracing::info!(target: "init", "devices {members:?} are not fused: NCCL_IB_MERGE_NICS=0");
            return Err(NetError::new(Code::InvalidUsage, "NCCL_IB_MERGE_NICS=0"));
        }
        self.devices.fuse(members).map_err(NetError::printed)
    }

    /// Listens for one or more peers; the handle goes to them by NCCL's own ways.
    pub fn listen(
        &self,
        dev: c_int,
        profiler: Option<Arc<dyn Profiler>>,
    ) -> Result<(Box<Accepting>, [u8; HANDLE_BYTES]), NetError> {
        let device = self.device(dev)?;
        Accepting::listen(&device, profiler, &self.config).map_err(NetError::printed)
    }

    /// Takes one step of a connect; `handle` is NCCL's own copy and remembers the connect between calls. `wishes` are
    /// the communicator's.
    pub fn connect(
        &self,
        dev: c_int,
        handle: &mut [u8; HANDLE_BYTES],
        wishes: Wishes,
    ) -> Result<Option<Box<Comm>>, NetError> {
        let now = Instant::now();
        let spare = Handle::spare(handle);
        let id = match u64::from_le_bytes(*spare.first_chunk().unwrap_or(&[0; 8])) {
            id if id != 0 && self.connecting.contains_key(&id) => id,
            _ => {
                let device = self.device(dev)?;
                let parsed = Handle::decode(handle)
                    .map_err(|e| NetError::new(Code::InvalidArgument, e.to_string()).printed())?;
                let connecting = Connecting::start(&device, &parsed, wishes, &self.config, now);
                self.reap(now);
                let id = connecting.id();
                let mut spare = [0; SPARE_BYTES];
                spare[..8].copy_from_slice(&id.to_le_bytes());
                Handle::set_spare(handle, spare);
                self.connecting.insert(id, connecting);
                id
            }
        };
        let Some((_, connecting)) = self.connecting.remove(&id) else {
            return Err(NetError::new(Code::Internal, "a connect was called from two threads at once").printed());
        };
        match connecting.step(&self.config, now) {
            Ok(connect::Step::Again(connecting)) => {
                self.connecting.insert(id, *connecting);
                Ok(None)
            }
            Ok(connect::Step::Done(comm)) => Ok(Some(comm)),
            Err(e) => Err(e.printed()),
        }
    }

    /// NCCL drops connects without a word when it aborts: those long past their time go with the next one.
    fn reap(&self, now: Instant) {
        self.connecting.retain(|_, c| !c.abandoned(now));
    }

    /// Takes one step of an accept.
    pub fn accept(&self, listener: &mut Accepting) -> Result<Option<Box<Comm>>, NetError> {
        listener.step(&self.config, Instant::now()).map_err(NetError::printed)
    }
}
