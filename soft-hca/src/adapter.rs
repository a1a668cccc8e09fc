//! What a process has of the adapter: its host's devices and ports, the table of regions, and the engine while a device is
//! open. One a process; a forked child has none.
use crate::engine::Running;
use crate::events::{AsyncEvent, EventQueue};
use crate::fabric::{Device, EngineKind, Fabric, GidKind, LinkLayer, PortState};
use crate::faults::Faults;
use crate::memory::Regions;
use crate::qp::{Address, Attr, PortView, State};
use crate::registry;
use crate::trace::Trace;
use ibverbs_sys as ffi;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;

static ADAPTER: OnceLock<Option<Adapter>> = OnceLock::new();
static FORKED: AtomicBool = AtomicBool::new(false);

/// The process's adapter; None in a forked child, or where the environment is wrong (said once on stderr).
pub(crate) fn get() -> Option<&'static Adapter> {
    if in_forked_child() {
        return None;
    }
    ADAPTER
        .get_or_init(|| match Fabric::from_env() {
            Ok((fabric, host)) => Some(Adapter::new(fabric, host, Faults::from_env())),
            Err(error) => {
                eprintln!("soft-hca: no devices: {error}");
                None
            }
        })
        .as_ref()
}

/// For programs that link this crate: the adapter of a given fabric instead of the environment's. False if one exists.
pub fn install(fabric: Fabric, host: usize) -> bool {
    ADAPTER.set(Some(Adapter::new(fabric, host, Faults::from_env()))).is_ok()
}

#[inline]
pub(crate) fn in_forked_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// This process is a child of fork and called a verb of its parent's.
pub(crate) fn trace_refusal() {
    if let Some(adapter) = ADAPTER.get().and_then(Option::as_ref) {
        adapter.trace.refused(adapter.host_name());
    }
}

extern "C" fn after_fork_in_child() {
    FORKED.store(true, Ordering::Relaxed);
    registry::let_go_in_child();
}

pub(crate) struct Adapter {
    fabric: Fabric,
    host: usize,
    pub(crate) regions: Regions,
    pub(crate) faults: Faults,
    pub(crate) trace: Trace,
    /// By device and port.
    ports: Vec<Vec<Port>>,
    pinned: Vec<AtomicU64>,
    open: Mutex<Vec<(usize, Weak<EventQueue<AsyncEvent>>)>>,
    running: Mutex<Weak<Running>>,
}

/// By index; None where the table has no entry.
pub(crate) type GidTable = Vec<Option<([u8; 16], GidKind)>>;

struct Port {
    state: RwLock<PortState>,
    gids: RwLock<GidTable>,
    rate: Option<Duration>,
    latency: Duration,
    jitter: Duration,
}

/// The finisher of splitmix64: neighbouring numbers become unrelated ones.
fn scramble(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

impl Adapter {
    fn new(fabric: Fabric, host: usize, faults: Faults) -> Self {
        // SAFETY: the handler only stores to atomics and closes a descriptor.
        unsafe { libc::pthread_atfork(None, None, Some(after_fork_in_child)) };
        let devices = fabric.hosts.get(host).map_or(&[][..], |host| &host.devices);
        let port = |port: &crate::fabric::Port| {
            let mut gids = vec![None; usize::from(port.gid_table_len())];
            for gid in &port.gids {
                if let Some(entry) = gids.get_mut(usize::from(gid.index)) {
                    *entry = Some((gid.gid.octets(), gid.kind));
                }
            }
            Port {
                state: RwLock::new(port.state),
                gids: RwLock::new(gids),
                // Per byte: 8 ns at 1 Gb/s.
                rate: port.rate.map(|gbps| Duration::from_secs_f64(8e-9 / gbps)),
                latency: Duration::from_micros(port.latency_us.into()),
                jitter: Duration::from_micros(port.jitter_us.into()),
            }
        };
        let regions = devices.iter().map(|device| device.max_mr).sum::<u32>().max(1);
        Self {
            ports: devices.iter().map(|device| device.ports.iter().map(port).collect()).collect(),
            pinned: devices.iter().map(|_| AtomicU64::new(0)).collect(),
            regions: Regions::new(regions),
            faults,
            trace: Trace::from_env(),
            open: Mutex::default(),
            running: Mutex::default(),
            fabric,
            host,
        }
    }

    pub(crate) fn fabric(&self) -> &Fabric {
        &self.fabric
    }

    /// This process's host, by its place in the fabric.
    pub(crate) fn host(&self) -> usize {
        self.host
    }

    pub(crate) fn host_name(&self) -> &str {
        self.fabric.hosts.get(self.host).map_or("", |host| &host.name)
    }

    pub(crate) fn devices(&self) -> &[Device] {
        self.fabric.hosts.get(self.host).map_or(&[], |host| &host.devices)
    }

    /// After a change of a queue pair.
    pub(crate) fn traced(&self, device: usize, qp: u32, state: State, attr: &Attr) {
        let device = self.devices().get(device).map_or("", |device| &device.name);
        self.trace.modified(self.host_name(), device, qp, state, attr);
    }

    pub(crate) fn is_threaded(&self) -> bool {
        self.fabric.engine == EngineKind::Thread
    }

    /// The engine, started if no device is open yet.
    pub(crate) fn running(&'static self) -> io::Result<Arc<Running>> {
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = running.upgrade() {
            return Ok(running);
        }
        let started = Arc::new(Running::start(self)?);
        *running = Arc::downgrade(&started);
        Ok(started)
    }

    /// Whom to tell about the ports of a device.
    pub(crate) fn watch(&self, device: usize, events: &Arc<EventQueue<AsyncEvent>>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.retain(|(_, events)| events.strong_count() > 0);
        open.push((device, Arc::downgrade(events)));
    }

    fn tell(&self, device: usize, kind: u32, port: usize) {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        for events in open.iter().filter(|(of, _)| *of == device).filter_map(|(_, events)| events.upgrade()) {
            events.push(AsyncEvent { kind, element: port + 1 });
        }
    }

    fn port(&self, device: usize, port: usize) -> Option<&Port> {
        self.ports.get(device)?.get(port)
    }

    pub(crate) fn port_state(&self, device: usize, port: usize) -> PortState {
        self.port(device, port)
            .map_or(PortState::Down, |port| *port.state.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn port_is_up(&self, device: usize, port: usize) -> bool {
        self.port_state(device, port) == PortState::Active
    }

    pub(crate) fn rate(&self, device: usize, port: usize) -> Option<Duration> {
        self.port(device, port)?.rate
    }

    /// How long a message of queue pair `qp` waits before it leaves; `index` tells the messages of a queue pair apart.
    pub(crate) fn latency(&self, device: usize, port: usize, qp: u32, index: u32) -> Duration {
        let Some(port) = self.port(device, port) else { return Duration::ZERO };
        if port.jitter.is_zero() {
            return port.latency;
        }
        let part = scramble(self.fabric.seed ^ u64::from(qp) << 32 ^ u64::from(index)) % 1024;
        port.latency + port.jitter * u32::try_from(part).unwrap_or(0) / 1024
    }

    pub(crate) fn gids(&self, device: usize, port: usize) -> GidTable {
        self.port(device, port)
            .map_or_else(Vec::new, |port| port.gids.read().unwrap_or_else(PoisonError::into_inner).clone())
    }

    /// Does the address lead to this port?
    pub(crate) fn port_has(&self, device: usize, port: usize, address: &Address) -> bool {
        if address.global {
            let gids = self.port(device, port).map(|port| port.gids.read().unwrap_or_else(PoisonError::into_inner));
            return gids.is_some_and(|gids| gids.iter().flatten().any(|(gid, _)| *gid == address.dgid));
        }
        self.devices().get(device).and_then(|d| d.ports.get(port)).is_some_and(|port| port.lid == address.dlid)
    }

    pub(crate) fn port_views(&self, device: usize) -> Vec<PortView> {
        let Some(described) = self.devices().get(device) else { return Vec::new() };
        let view = |(i, port): (usize, &crate::fabric::Port)| PortView {
            ethernet: port.link_layer == LinkLayer::Ethernet,
            pkeys: port.pkeys.len(),
            active_mtu: crate::fabric::mtu_code(port.active_mtu).unwrap_or(0),
            gids: self.gids(device, i).into_iter().map(|entry| entry.map(|(gid, _)| gid)).collect(),
        };
        described.ports.iter().enumerate().map(view).collect()
    }

    /// Every GID and LID of this host, as the registry keeps them.
    pub(crate) fn addresses(&self) -> Vec<[u8; 16]> {
        let mut all = Vec::new();
        for (device, described) in self.devices().iter().enumerate() {
            for (i, port) in described.ports.iter().enumerate() {
                all.extend(self.gids(device, i).into_iter().flatten().map(|(gid, _)| gid));
                if port.lid != 0 {
                    all.push(registry::lid_key(port.lid));
                }
            }
        }
        all
    }

    /// Pins memory, up to what the fabric file allows a device.
    pub(crate) fn pin(&self, device: usize, bytes: u64) -> bool {
        let limit = self.devices().get(device).and_then(|device| device.max_pinned_bytes).unwrap_or(u64::MAX);
        let Some(pinned) = self.pinned.get(device) else { return false };
        pinned
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                now.checked_add(bytes).filter(|&total| total <= limit)
            })
            .is_ok()
    }

    pub(crate) fn unpin(&self, device: usize, bytes: u64) {
        if let Some(pinned) = self.pinned.get(device) {
            pinned.fetch_sub(bytes, Ordering::Relaxed);
        }
    }

    fn wake_all(&self) {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner).upgrade();
        if let Some(running) = running {
            // Under the lock: when this returns nothing of before is under way.
            drop(running.engine.lock());
        }
    }
}

/// What happens to the hardware, for tests that link this crate. Devices and ports count from 0.
#[derive(Clone, Copy, Debug)]
pub struct Control;

impl Control {
    /// Pulls or plugs the cable.
    pub fn set_port(device: usize, port: usize, up: bool) {
        let Some(adapter) = get() else { return };
        if let Some(entry) = adapter.port(device, port) {
            let state = if up { PortState::Active } else { PortState::Down };
            *entry.state.write().unwrap_or_else(PoisonError::into_inner) = state;
            adapter.wake_all();
            adapter.tell(device, if up { ffi::IBV_EVENT_PORT_ACTIVE } else { ffi::IBV_EVENT_PORT_ERR }, port);
        }
    }

    /// Changes or empties an entry of a GID table.
    pub fn set_gid(device: usize, port: usize, index: usize, gid: Option<([u8; 16], GidKind)>) {
        let Some(adapter) = get() else { return };
        if let Some(entry) = adapter.port(device, port) {
            if let Some(slot) = entry.gids.write().unwrap_or_else(PoisonError::into_inner).get_mut(index) {
                *slot = gid;
            }
            adapter.tell(device, ffi::IBV_EVENT_GID_CHANGE, port);
        }
    }
}
