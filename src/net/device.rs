//! Devices as NCCL is told of them: each a port, or a group of ports that one connection uses together (rails).

use std::collections::HashSet;
use std::ffi::{CString, c_int};
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use crate::config::Config;
use crate::memory::Registrar;
use crate::memory::path::{self, Neighbour};
use crate::rendezvous::{FdHandle, Watcher};
use crate::topology::function::Function;
use crate::topology::gid::{self, Gid, GidEntry, GidKind, GidPolicy};
use crate::topology::port::{self, LinkLayer};
use crate::topology::{hca, pci, rails};
use crate::transfer::{MAX_RAILS, largest_message};
use crate::verbs::{Context, DeviceAttr, Library, Pd, PortAttr};

use super::events::{DeviceEvents, EventReader};
use super::gpu::GpuMemory;
use super::survey::{self, Survey};
use super::{Code, NetError};

/// One port of an opened device.
pub(super) struct Port {
    pub(super) name: String,
    pub(super) num: u8,
    pub(super) attr: PortAttr,
    /// Mb/s.
    pub(super) speed: u32,
    pub(super) pkey_index: u16,
    pub(super) pkey: u16,
    pub(super) events: Arc<DeviceEvents>,
    /// The GID in use, and the GID_CHANGE count at which it was chosen.
    gid: Mutex<(u64, gid::Choice)>,
    /// Warnings that are not repeated with every connection.
    told: Mutex<HashSet<String>>,
    pub(super) registrar: Arc<Registrar>,
    pub(super) gpu: GpuMemory,
    pub(super) context: Arc<Context>,
}

impl fmt::Debug for Port {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.name, self.num)
    }
}

impl Port {
    pub(super) fn link_layer(&self) -> LinkLayer {
        link_layer(&self.attr)
    }

    /// Prints a warning, once: what stands before its first semicolon tells it from others.
    pub(super) fn warn_once(&self, text: String) {
        /// More different warnings than this say nothing new, and are not remembered.
        const REMEMBERED: usize = 256;
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let reason = text.split("; ").next().unwrap_or_default();
        if told.contains(reason) || told.len() == REMEMBERED {
            tracing::info!(target: "init", "{text}");
        } else {
            tracing::warn!(target: "init", "{text}");
            told.insert(reason.to_owned());
        }
    }

    /// The GID for a new connection: chosen anew after the table changed.
    pub(super) fn gid(&self, config: &Config) -> Result<gid::Choice, NetError> {
        let epoch = self.events.gid_epoch(self.num);
        let mut known = self.gid.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != epoch {
            let choice = choose_gid(&self.context, &self.name, self.num, &self.attr, config)
                .map_err(|e| NetError::new(Code::System, format!("{}:{}: {e}", self.name, self.num)))?;
            if choice.index != known.1.index {
                tracing::warn!(target: "init", "{}:{}: GID index {} instead of {}: {}", self.name, self.num, choice.index, known.1.index, choice.why);
            }
            *known = (epoch, choice);
        }
        Ok(known.1.clone())
    }
}

fn link_layer(attr: &PortAttr) -> LinkLayer {
    LinkLayer::from_code(attr.link_layer)
}

fn choose_gid(
    context: &Context,
    name: &str,
    num: u8,
    attr: &PortAttr,
    config: &Config,
) -> Result<gid::Choice, gid::GidError> {
    let link_layer = link_layer(attr);
    let entries: Vec<GidEntry> = context
        .gids(num, attr.gid_tbl_len)
        .into_iter()
        .map(|g| GidEntry {
            index: g.index,
            gid: Gid(g.raw),
            kind: g.kind.map_or_else(
                || pci::gid_kind(&config.sysroot, name, num, g.index),
                |k| match k {
                    0 => GidKind::Ib,
                    1 => GidKind::RoceV1,
                    2 => GidKind::RoceV2,
                    _ => GidKind::Unknown,
                },
            ),
            netdev: interface_name(g.ifindex),
        })
        .collect();
    let policy = GidPolicy {
        index: config.ib_gid_index,
        version: config.ib_roce_version,
        family: config.ib_addr_family,
        range: config.ib_addr_range,
    };
    gid::choose(&entries, link_layer, &policy)
}

fn interface_name(ifindex: u32) -> Option<String> {
    let mut name = [0u8; libc::IF_NAMESIZE];
    if ifindex == 0 {
        return None;
    }
    // SAFETY: room for a name of the size that the call asks for.
    let found = unsafe { libc::if_indextoname(ifindex, name.as_mut_ptr().cast()) };
    if found.is_null() {
        return None;
    }
    std::ffi::CStr::from_bytes_until_nul(&name).ok()?.to_str().ok().map(str::to_owned)
}

/// A device as NCCL is told of it.
#[derive(Debug)]
pub struct Device {
    /// Unique; of several rails joined by "+".
    pub name: CString,
    pub pci_path: Option<CString>,
    pub guid: u64,
    /// Number of the port that NCCL is told; two ports of one chip differ.
    pub port: c_int,
    /// Mb/s, of all rails together.
    pub speed: u32,
    /// µs.
    pub latency: f32,
    pub max_comms: c_int,
    /// What `NCCL_IB_HCA` says of its place in the fabric.
    pub rail: Option<i16>,
    pub plane: Option<i16>,
    /// The devices that it is fused of, by NCCL's index; empty where it is one of its own.
    pub parts: Vec<c_int>,
    /// Ways to GPU memory that all rails have, and what was chosen, as NCCL was told.
    pub(super) gpu: Arc<GpuMemory>,
    /// The GPUs, as its rails see them together.
    near: Arc<[Neighbour]>,
    pub(super) rails: Vec<Arc<Port>>,
}

/// Set in the plane of a device that has ports in several planes; the other bits say in which.
const PLANES: i16 = 1 << 14;

/// The rail or plane that all have, if they have one.
fn same(ids: impl IntoIterator<Item = Option<i16>>) -> Option<i16> {
    ids.into_iter().reduce(|a, b| a.filter(|_| a == b)).flatten()
}

/// The plane of what has ports in these: theirs if it is one, else an id of the set.
fn plane_of(ids: &[Option<i16>]) -> Option<i16> {
    same(ids.iter().copied()).or_else(|| {
        ids.iter().try_fold(PLANES, |set, id| match *id {
            Some(id) if id & PLANES != 0 => Some(set | id),
            Some(id @ 0..14) => Some(set | 1 << id),
            _ => None,
        })
    })
}

/// The name of [`Device::unusable`].
pub const STAND_IN: &str = "no-usable-device";

impl Device {
    /// Stands in for the devices that the user insists on and that are not there.
    pub(super) fn unusable() -> Self {
        Self {
            name: CString::new(STAND_IN).unwrap_or_default(),
            pci_path: None,
            guid: 0,
            port: 1,
            speed: 10_000,
            latency: 0.0,
            max_comms: 1,
            rail: None,
            plane: None,
            parts: Vec::new(),
            gpu: Arc::new(GpuMemory::none("there is no device")),
            near: Arc::default(),
            rails: Vec::new(),
        }
    }

    /// One device of several, given with their indices; or why not.
    pub(super) fn fused(parts: &[(c_int, Arc<Self>)]) -> Result<Self, String> {
        let Some((_, first)) = parts.first() else { return Err("there are none".to_owned()) };
        let rails: Vec<Arc<Port>> = parts.iter().flat_map(|(_, d)| &d.rails).map(Arc::clone).collect();
        if rails.len() > MAX_RAILS {
            return Err(format!("they have {} ports, and {MAX_RAILS} are the most", rails.len()));
        }
        for (i, rail) in rails.iter().enumerate() {
            let (own, other) = (rails[0].link_layer(), rail.link_layer());
            if rails[..i].iter().any(|r| Arc::ptr_eq(r, rail)) {
                return Err(format!("{rail:?} is named twice"));
            }
            if own != other {
                return Err(format!("{:?} is {own} and {rail:?} is {other}", rails[0]));
            }
        }
        let name = parts.iter().map(|(_, d)| d.name.to_string_lossy()).collect::<Vec<_>>().join("+");
        let near = path::together(parts.iter().map(|(_, d)| &*d.near));
        Ok(Self {
            name: CString::new(name).map_err(|e| e.to_string())?,
            pci_path: first.pci_path.clone(),
            guid: first.guid,
            port: first.port,
            speed: parts.iter().map(|(_, d)| d.speed).sum(),
            latency: first.latency,
            max_comms: parts.iter().map(|(_, d)| d.max_comms).min().unwrap_or(1),
            rail: same(parts.iter().map(|(_, d)| d.rail)),
            plane: plane_of(&parts.iter().map(|(_, d)| d.plane).collect::<Vec<_>>()),
            parts: parts.iter().map(|&(dev, _)| dev).collect(),
            gpu: Arc::new(GpuMemory::common(parts.iter().map(|(_, d)| &*d.gpu), &near)),
            near,
            rails,
        })
    }

    /// Most bytes of one message, between ports like its own.
    pub fn max_message(&self) -> usize {
        let each = self.rails.iter().map(|rail| largest_message(rail.attr.max_msg_sz));
        each.min().and_then(|most| usize::try_from(most).ok()).unwrap_or(1)
    }

    /// Kinds of memory that a connection of this device may use: bits NCCL_PTR_*.
    pub fn ptr_support(&self) -> c_int {
        self.gpu.ptr_support()
    }

    /// GPU data go through host memory although a peer memory driver is there.
    pub(super) fn stages_by_surprise(&self, config: &Config) -> bool {
        self.gpu.is_a_surprise(config)
    }

    /// The same in words, with what opens the ways that are closed.
    pub fn memory(&self) -> impl fmt::Display {
        &*self.gpu
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} Gb/s", self.name.to_string_lossy(), f64::from(self.speed) / 1000.0)?;
        if let Some(path) = &self.pci_path {
            write!(f, ", PCI {}", path.to_string_lossy().rsplit('/').next().unwrap_or(""))?;
        }
        write!(f, ")")?;
        for rail in &self.rails {
            let gid = rail.gid.lock().unwrap_or_else(PoisonError::into_inner).1.clone();
            write!(
                f,
                "; {}:{} {} MTU {}, GID {} (index {}, {}{}): {}",
                rail.name,
                rail.num,
                rail.link_layer(),
                port::mtu_bytes(rail.attr.active_mtu),
                gid.gid,
                gid.index,
                gid.kind,
                gid.netdev.map_or(String::new(), |n| format!(", {n}")),
                gid.why,
            )?;
        }
        Ok(())
    }
}

/// A device or port that NCCL is not told of, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    /// device, or device:port.
    pub name: String,
    pub why: String,
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.name, self.why)
    }
}

/// What a look at the machine found.
#[derive(Debug)]
pub struct Discovery {
    pub devices: Vec<Device>,
    pub left_out: Vec<LeftOut>,
    /// For people: things that are probably not as they meant them.
    pub warnings: Vec<String>,
    pub survey: Survey,
}

/// A port that is usable, before rails are formed.
struct Candidate {
    port: Arc<Port>,
    attr: DeviceAttr,
    pci_path: Option<String>,
    rail: Option<i16>,
    plane: Option<i16>,
}

const NOT_SELECTED: &str = "not selected by NCCL_IB_HCA";

/// NCCL keeps a fixed array of this many.
pub(super) const MAX_DEVICES: usize = 128;

/// Looks at every port of every device, and says of each that is left out why.
pub fn discover(config: &Config) -> Discovery {
    let survey = Survey::begin(config);
    let mut found = Discovery { devices: Vec::new(), left_out: Vec::new(), warnings: Vec::new(), survey };
    let candidates = look(config, &mut found);
    found.survey.end();
    found.warnings.extend(found.survey.refused.clone());
    for port in candidates.iter().map(|c| &c.port) {
        let near = found.survey.neighbours(&port.name);
        found.survey.describe(&port.name, &port.gpu.clone().near(&near));
    }
    form_devices(candidates, config, &mut found);
    found
}

/// The usable ports, in the order in which NCCL sees them.
fn look(config: &Config, found: &mut Discovery) -> Vec<Candidate> {
    let library = match Library::load(config.ibverbs_lib.as_deref()) {
        Ok(library) => library,
        Err(e) => {
            found.left_out.push(LeftOut { name: "all devices".into(), why: e.to_string() });
            return Vec::new();
        }
    };
    if let (Some(wish), false) = (&config.ibverbs_lib, library.passed_over.is_empty()) {
        found.warnings.push(format!(
            "NCCL_IBVERBS_LIB={} could not be loaded ({}); {} is used",
            wish.display(),
            library.passed_over,
            library.name
        ));
    }
    let list = match library.devices() {
        Ok(list) => list,
        Err(e) => {
            found.left_out.push(LeftOut { name: "all devices".into(), why: e.to_string() });
            return Vec::new();
        }
    };
    if list.is_empty() {
        found
            .left_out
            .push(LeftOut { name: "all devices".into(), why: pci::why_no_device(&config.sysroot, &library.name) });
    }
    let (filter, warnings) = hca::Filter::parse(config.ib_hca.as_deref().unwrap_or(""));
    found.warnings.extend(warnings.iter().map(ToString::to_string));

    let mut seen = Vec::new();
    let mut candidates = Vec::new();
    for i in 0..list.len() {
        let name = list.name(i);
        if !filter.accepts_device(&name) {
            // Its ports stay unknown; it has a first one.
            seen.push((name.clone(), 1));
            found.left_out.push(LeftOut { name, why: NOT_SELECTED.into() });
            continue;
        }
        let context = match Context::open(&list, i) {
            Ok(context) => context,
            Err(e) => {
                let why = match e.errno {
                    libc::EPERM | libc::EACCES => {
                        format!("{e}: not permitted to this process or container (device cgroup, /dev/infiniband)")
                    }
                    _ => e.to_string(),
                };
                found.warnings.push(format!("{name} is left out: {why}"));
                seen.push((name.clone(), 1));
                found.left_out.push(LeftOut { name, why });
                continue;
            }
        };
        look_at(&context, &library, &filter, config, &mut seen, &mut candidates, found);
    }
    let ports: Vec<(&str, u8)> = seen.iter().map(|(n, p)| (n.as_str(), *p)).collect();
    found.warnings.extend(filter.audit(&ports).iter().map(ToString::to_string));
    if config.ib_device_pci_order {
        candidates.sort_by_cached_key(|c| {
            (pci::order(c.pci_path.as_deref()), c.port.name.len(), c.port.name.clone(), c.port.num)
        });
    }
    candidates
}

/// Looks at the ports of one device.
fn look_at(
    context: &Arc<Context>,
    library: &Library,
    filter: &hca::Filter,
    config: &Config,
    seen: &mut Vec<(String, u8)>,
    candidates: &mut Vec<Candidate>,
    found: &mut Discovery,
) {
    let name = context.name().to_owned();
    let Discovery { left_out, warnings, survey, .. } = found;
    let mut leave = |name: String, why: String, loud: bool| {
        if loud {
            warnings.push(format!("{name} is left out: {why}"));
        }
        left_out.push(LeftOut { name, why });
    };
    let attr = match context.query() {
        Ok(attr) => attr,
        Err(e) => return leave(name, e.to_string(), true),
    };
    // Made once a port is taken.
    let mut parts: Option<(Arc<Registrar>, Arc<DeviceEvents>, GpuMemory)> = None;
    for num in 1..=attr.ports {
        let full = format!("{name}:{num}");
        seen.push((name.clone(), num));
        let verdict = filter.accepts(&name, num);
        if !verdict.accepted {
            leave(full, NOT_SELECTED.into(), false);
            continue;
        }
        let port_attr = match context.query_port(num) {
            Ok(attr) => attr,
            Err(e) => {
                leave(full, e.to_string(), true);
                continue;
            }
        };
        if let Some(why) = port::why_left_out(port_attr.state, port_attr.phys_state, port_attr.link_layer) {
            leave(full, why, false);
            continue;
        }
        let gid = match choose_gid(context, &name, num, &port_attr, config) {
            Ok(gid) => gid,
            Err(e) => {
                leave(full, e.to_string(), true);
                continue;
            }
        };
        let pkey = match context.pkey(num, config.ib_pkey) {
            Ok(pkey) => pkey,
            Err(e) if link_layer(&port_attr) == LinkLayer::InfiniBand => {
                leave(
                    full,
                    format!(
                        "{e}; NCCL_IB_PKEY is the index of a key in the port's table of {}",
                        port_attr.pkey_tbl_len
                    ),
                    true,
                );
                continue;
            }
            Err(_) => 0xffff,
        };
        if parts.is_none() {
            match Pd::alloc(context) {
                Ok(pd) => {
                    let relaxed = config.ib_pci_relaxed_ordering != 0 && library.has_relaxed_ordering();
                    let events = Arc::new(DeviceEvents::default());
                    watch_events(context, &events, config);
                    let path = pci::function_path(&config.sysroot, context.ibdev_path());
                    let place = path.and_then(|path| Function::at(&config.sysroot, &path));
                    let gpu = GpuMemory::probe(&pd, config);
                    survey.add(survey::nic(&name, &attr, &gpu, place));
                    parts = Some((Registrar::new(&pd, relaxed), events, gpu));
                }
                Err(e) => {
                    leave(full, e.to_string(), true);
                    continue;
                }
            }
        }
        let Some((registrar, events, gpu)) = &parts else { continue };
        let speed = port_attr
            .speed_mbps
            .and_then(|s| u32::try_from(s).ok())
            .unwrap_or_else(|| port::speed_mbps(port_attr.active_speed, port_attr.active_width));
        survey.add_port(f64::from(speed) / 1000.0);
        candidates.push(Candidate {
            pci_path: pci::pci_path(&config.sysroot, context.ibdev_path(), config.ib_merge_vfs),
            attr: attr.clone(),
            rail: verdict.rail,
            plane: verdict.plane,
            port: Arc::new(Port {
                name: name.clone(),
                num,
                attr: port_attr,
                speed,
                pkey_index: config.ib_pkey,
                pkey,
                events: Arc::clone(events),
                gid: Mutex::new((0, gid)),
                told: Mutex::default(),
                registrar: Arc::clone(registrar),
                gpu: gpu.clone(),
                context: Arc::clone(context),
            }),
        });
    }
}

/// Has the background thread read the device's events, for as long as the process lives.
fn watch_events(context: &Arc<Context>, events: &Arc<DeviceEvents>, config: &Config) {
    let reader = EventReader {
        context: Arc::clone(context),
        events: Arc::clone(events),
        fatal_ends: config.ib_return_async_events,
    };
    let watched = context
        .event_fd()
        .map_err(|e| e.to_string())
        .and_then(|fd| Watcher::global().and_then(|w| w.watch_fd(fd, Arc::new(reader))).map_err(|e| e.to_string()));
    match watched {
        // Devices stay open until the process ends, and so does the watch.
        Ok(handle) => std::mem::forget::<FdHandle>(handle),
        Err(e) => {
            tracing::warn!(target: "init", "{}: its events can't be read ({e}): link and device failures show only in completions", context.name())
        }
    }
}

/// Groups ports into what NCCL is told of.
fn form_devices(candidates: Vec<Candidate>, config: &Config, found: &mut Discovery) {
    let available: Vec<rails::Available<'_>> = candidates
        .iter()
        .map(|c| rails::Available { name: &c.port.name, port: c.port.num, speed: c.port.speed })
        .collect();
    let (groups, warnings) = rails::group(config.rails.as_deref().unwrap_or(""), &available);
    found.warnings.extend(warnings.iter().map(ToString::to_string));
    let mut numbers = pci::PortNumbers::default();
    for group in groups {
        let members: Vec<&Candidate> = group.members.iter().map(|&i| &candidates[i]).collect();
        let Some(first) = members.first() else { continue };
        if found.devices.len() == MAX_DEVICES {
            found.left_out.push(LeftOut { name: group.name, why: format!("NCCL takes {MAX_DEVICES} devices") });
            continue;
        }
        let Ok(name) = CString::new(group.name) else { continue };
        let port = c_int::from(first.port.num) + numbers.next(first.pci_path.as_deref());
        let views: Vec<_> = members.iter().map(|m| found.survey.neighbours(&m.port.name)).collect();
        let near = path::together(views.iter().map(|view| &**view));
        let max_qp = members.iter().map(|m| m.attr.max_qp).min().unwrap_or(0);
        found.devices.push(Device {
            name,
            pci_path: first.pci_path.as_deref().and_then(|p| CString::new(p).ok()),
            guid: first.attr.sys_image_guid,
            port,
            speed: group.speed,
            latency: 0.0,
            max_comms: c_int::try_from(max_qp).unwrap_or(c_int::MAX).max(1),
            rail: same(members.iter().map(|m| m.rail)),
            plane: plane_of(&members.iter().map(|m| m.plane).collect::<Vec<_>>()),
            parts: Vec::new(),
            gpu: Arc::new(GpuMemory::common(members.iter().map(|m| &m.port.gpu), &near)),
            near,
            rails: members.iter().map(|m| Arc::clone(&m.port)).collect(),
        });
    }
}
