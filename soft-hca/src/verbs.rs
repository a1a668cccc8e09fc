//! The border to C: every function of libibverbs that the adapter offers, with the contract of its manual page in verbs(3).
//! Nothing unwinds out of here; errors are errno values as the manual has them, and errno is set as well.
#![expect(clippy::missing_safety_doc, reason = "the contract of each function is its page of verbs(3)")]
use crate::abi::{DeviceHandle, PORT_ATTR_COMMON, SendWr, Wc, send_flag};
use crate::adapter::{self, Adapter};
use crate::engine::Running;
use crate::events::{AsyncEvent, Channel, EventQueue};
use crate::fabric::{Device, LinkLayer, PortState, mtu_code};
use crate::gpu::{self, Mem};
use crate::memory::access_is_valid;
use crate::null;
use crate::qp::{self, Caps, MAX_INLINE, MAX_READS, MAX_SGE, NewQp, Op, Qp, RecvWqe, SendWqe, Sge, State};
use crate::queue::{Cq, Freed};
use crate::rc::World;
use crate::table;
use ibverbs_sys as ffi;
use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

#[repr(C)]
struct Context {
    ibv: ffi::ibv_context,
    adapter: &'static Adapter,
    device: usize,
    events: Arc<EventQueue<AsyncEvent>>,
    running: Arc<Running>,
    pds: AtomicU32,
    /// Completion queues and channels.
    users: AtomicU32,
}

#[repr(C)]
struct Pd {
    ibv: ffi::ibv_pd,
    users: AtomicU32,
}

#[repr(C)]
struct Mr {
    ibv: ffi::ibv_mr,
    /// Bytes of it that count as pinned.
    pinned: u64,
}

#[repr(C)]
struct ChannelObject {
    ibv: ffi::ibv_comp_channel,
    events: Arc<Channel>,
    users: AtomicU32,
}

#[repr(C)]
struct CqObject {
    ibv: ffi::ibv_cq,
    core: Arc<Cq>,
    users: AtomicU32,
}

#[repr(C)]
struct QpObject {
    ibv: ffi::ibv_qp,
    core: Arc<Qp>,
    adapter: &'static Adapter,
    caps: ffi::ibv_qp_cap,
}

/// PD numbers are of the process: an MR of one device can't be used through another.
static NEXT_PD: AtomicU32 = AtomicU32::new(1);

impl Context {
    fn described(&self) -> Option<&'static Device> {
        self.adapter.devices().get(self.device)
    }

    fn world(&self) -> std::sync::MutexGuard<'_, World> {
        self.running.engine.lock()
    }

    /// Waits until no other process reads memory that this one has asked back, though not for one that is stuck.
    fn await_readers(&self) {
        let slots = self.world().awaited();
        let deadline = Instant::now() + Duration::from_secs(1);
        while slots.iter().any(|&slot| self.world().owes(slot)) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}

fn guard<T>(otherwise: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(otherwise)
}

fn set_errno(code: c_int) {
    // SAFETY: no preconditions.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: this thread's errno.
    unsafe { errno.write(code) };
}

fn pointer<T>(body: impl FnOnce() -> Result<*mut T, c_int>) -> *mut T {
    guard(Err(libc::EIO), body).unwrap_or_else(|code| {
        set_errno(code);
        ptr::null_mut()
    })
}

fn code(body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    match guard(Err(libc::EIO), body) {
        Ok(()) => 0,
        Err(code) => {
            set_errno(code);
            code
        }
    }
}

/// For the few verbs that answer -1.
fn minus_one(body: impl FnOnce() -> Result<(), c_int>) -> c_int {
    if code(body) == 0 { 0 } else { -1 }
}

/// With real verbs a child of fork works on what its parent has.
#[cold]
fn refused_in_child() -> c_int {
    adapter::trace_refusal();
    libc::EIO
}

/// # Safety
/// `at` is null or an object of type `T` that this module handed out.
unsafe fn object<'a, T>(at: *mut impl Sized) -> Result<&'a T, c_int> {
    if adapter::in_forked_child() {
        return Err(refused_in_child());
    }
    // SAFETY: the caller's.
    unsafe { at.cast::<T>().as_ref() }.ok_or(libc::EINVAL)
}

/// # Safety
/// `at` is null or writable.
unsafe fn output<'a, T>(at: *mut T) -> Result<&'a mut T, c_int> {
    // SAFETY: the caller's.
    unsafe { at.as_mut() }.ok_or(libc::EINVAL)
}

/// # Safety
/// `at` came from `Box::into_raw` as a `T`, and nobody uses it any more.
unsafe fn release<T>(at: *const T) {
    // SAFETY: the caller's.
    drop(unsafe { Box::from_raw(at.cast_mut()) });
}

fn ordered(adapter: &Adapter, verb: &str) -> Result<(), c_int> {
    adapter.faults.verb(verb).map_or(Ok(()), Err)
}

fn count(users: &AtomicU32) -> Result<(), c_int> {
    if users.load(Ordering::Relaxed) == 0 { Ok(()) } else { Err(libc::EBUSY) }
}

fn int(value: u32) -> c_int {
    c_int::try_from(value).unwrap_or(c_int::MAX)
}

// ---- devices ----

pub unsafe extern "C" fn get_device_list(num: *mut c_int) -> *mut *mut ffi::ibv_device {
    pointer(|| {
        let mut list: Vec<*mut ffi::ibv_device> = Vec::new();
        if let Some(adapter) = adapter::get() {
            ordered(adapter, "get_device_list")?;
            list.extend(adapter.devices().iter().enumerate().map(|(i, device)| handle(i, device)));
        }
        // SAFETY: null or writable, says the caller.
        if let Ok(num) = unsafe { output(num) } {
            *num = c_int::try_from(list.len()).unwrap_or(0);
        }
        list.push(ptr::null_mut());
        Ok(Box::into_raw(list.into_boxed_slice()).cast())
    })
}

/// Devices live as long as the process: programs keep using them after the list is freed while they are open.
fn handle(index: usize, described: &Device) -> *mut ffi::ibv_device {
    static HANDLES: std::sync::Mutex<Vec<usize>> = std::sync::Mutex::new(Vec::new());
    let mut handles = HANDLES.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    while handles.len() <= index {
        handles.push(0);
    }
    if handles[index] == 0 {
        // SAFETY: all zeroes is a valid ibv_device.
        let mut ibv: ffi::ibv_device = unsafe { std::mem::zeroed() };
        ibv.node_type = ffi::IBV_NODE_CA;
        ibv.transport_type = ffi::IBV_TRANSPORT_IB;
        put_str(&mut ibv.name, &described.name);
        put_str(&mut ibv.dev_name, &format!("soft-hca{index}"));
        put_str(&mut ibv.ibdev_path, described.pci_path.as_deref().unwrap_or(""));
        let made = Box::into_raw(Box::new(DeviceHandle { ibv, behind: [0; 4], index }));
        handles[index] = made.expose_provenance();
    }
    ptr::with_exposed_provenance_mut(handles[index])
}

fn put_str(out: &mut [c_char], text: &str) {
    let room = out.len().saturating_sub(1);
    for (to, from) in out.iter_mut().zip(text.bytes().take(room)) {
        *to = c_char::from_ne_bytes([from]);
    }
}

pub unsafe extern "C" fn free_device_list(list: *mut *mut ffi::ibv_device) {
    guard((), || {
        if list.is_null() {
            return;
        }
        let mut len = 1;
        // SAFETY: the list ends with null.
        while !unsafe { list.wrapping_add(len - 1).read() }.is_null() {
            len += 1;
        }
        // SAFETY: made by get_device_list with this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(list, len)) });
    });
}

pub unsafe extern "C" fn get_device_name(device: *mut ffi::ibv_device) -> *const c_char {
    // SAFETY: null or a device.
    unsafe { device.as_ref() }.map_or(ptr::null(), |device| device.name.as_ptr())
}

pub unsafe extern "C" fn get_device_guid(device: *mut ffi::ibv_device) -> u64 {
    guard(0, || {
        // SAFETY: null or a device of ours.
        let index = unsafe { object::<DeviceHandle>(device) }.map(|handle| handle.index).ok();
        let described = index.and_then(|index| adapter::get()?.devices().get(index));
        described.map_or(0, |described| described.node_guid.to_be())
    })
}

pub unsafe extern "C" fn get_device_index(device: *mut ffi::ibv_device) -> c_int {
    guard(-1, || {
        // SAFETY: null or a device of ours.
        unsafe { object::<DeviceHandle>(device) }.map_or(-1, |handle| c_int::try_from(handle.index).unwrap_or(-1))
    })
}

pub unsafe extern "C" fn open_device(device: *mut ffi::ibv_device) -> *mut ffi::ibv_context {
    pointer(|| {
        // SAFETY: a device of ours.
        let handle: &DeviceHandle = unsafe { object(device)? };
        let adapter = adapter::get().ok_or(libc::ENODEV)?;
        ordered(adapter, "open_device")?;
        let described = adapter.devices().get(handle.index).ok_or(libc::ENODEV)?;
        if let Some(errno) = described.open_errno.as_ref().and_then(crate::fabric::Errno::code) {
            return Err(errno);
        }
        let io = |error: std::io::Error| error.raw_os_error().unwrap_or(libc::EIO);
        let events = Arc::new(EventQueue::new().map_err(io)?);
        let running = adapter.running().map_err(io)?;
        adapter.watch(handle.index, &events);
        // SAFETY: all zeroes is a valid ibv_context: no operations, unlocked mutex, abi_compat null.
        let mut ibv: ffi::ibv_context = unsafe { std::mem::zeroed() };
        ibv.device = device;
        ibv.cmd_fd = -1;
        ibv.async_fd = events.fd();
        ibv.num_comp_vectors = 1;
        ibv.ops.req_notify_cq = Some(req_notify_cq);
        // SAFETY: Wc has the layout of ibv_wc.
        ibv.ops.poll_cq = Some(unsafe {
            std::mem::transmute::<PollCq, PollCqAsDeclared>(if adapter.is_threaded() { poll_cq } else { poll_cq_null })
        });
        ibv.ops.post_send = Some(if adapter.is_threaded() { post_send } else { post_send_null });
        ibv.ops.post_recv = Some(if adapter.is_threaded() { post_recv } else { post_recv_null });
        let (pds, users) = (AtomicU32::new(0), AtomicU32::new(0));
        Ok(Box::into_raw(Box::new(Context { ibv, adapter, device: handle.index, events, running, pds, users })).cast())
    })
}

type PollCq = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut Wc) -> c_int;
type PollCqAsDeclared = unsafe extern "C" fn(*mut ffi::ibv_cq, c_int, *mut ffi::ibv_wc) -> c_int;

/// Stricter than a kernel, which would clean up: a context with protection domains, and so with anything that moves bytes,
/// is not closed. Completion queues and channels are let go, as programs do (perftest's `ib_send_bw` for one): they point to
/// the context, which stays in memory for them.
pub unsafe extern "C" fn close_device(context: *mut ffi::ibv_context) -> c_int {
    code(|| {
        // SAFETY: a context of ours.
        let object: &Context = unsafe { object(context)? };
        ordered(object.adapter, "close_device")?;
        count(&object.pds)?;
        if count(&object.users).is_ok() {
            // SAFETY: made by open_device; closing is its last use.
            unsafe { release(object) };
        }
        Ok(())
    })
}

pub unsafe extern "C" fn query_device(context: *mut ffi::ibv_context, attr: *mut ffi::ibv_device_attr) -> c_int {
    code(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        ordered(context.adapter, "query_device")?;
        // SAFETY: writable.
        let attr = unsafe { output(attr)? };
        let device = context.described().ok_or(libc::ENODEV)?;
        *attr = ffi::ibv_device_attr {
            node_guid: device.node_guid.to_be(),
            sys_image_guid: device.sys_image_guid.unwrap_or(device.node_guid).to_be(),
            max_mr_size: u64::MAX,
            page_size_cap: 0xffff_f000,
            vendor_id: device.vendor_id,
            vendor_part_id: device.vendor_part_id,
            max_qp: int(device.max_qp),
            max_qp_wr: int(device.max_qp_wr),
            max_sge: c_int::try_from(MAX_SGE).unwrap_or(0),
            max_sge_rd: c_int::try_from(MAX_SGE).unwrap_or(0),
            max_cq: 1 << 16,
            max_cqe: MAX_CQE,
            max_mr: int(device.max_mr),
            max_pd: 1 << 16,
            max_qp_rd_atom: MAX_READS.into(),
            max_res_rd_atom: int(device.max_qp).saturating_mul(MAX_READS.into()),
            max_qp_init_rd_atom: MAX_READS.into(),
            atomic_cap: ffi::IBV_ATOMIC_NONE,
            max_pkeys: 128,
            local_ca_ack_delay: 16,
            phys_port_cnt: u8::try_from(device.ports.len()).unwrap_or(u8::MAX),
            ..Default::default()
        };
        // Says what it is even where a fabric file gives it the numbers of a real NIC.
        put_str(&mut attr.fw_ver, concat!("soft-hca ", env!("CARGO_PKG_VERSION")));
        Ok(())
    })
}

const MAX_CQE: c_int = (1 << 22) - 1;

/// A port by its number, which counts from 1.
fn port_of(context: &Context, number: u32) -> Result<(usize, &'static crate::fabric::Port), c_int> {
    let index = usize::try_from(number).ok().and_then(|n| n.checked_sub(1)).ok_or(libc::EINVAL)?;
    let port = context.described().and_then(|device| device.ports.get(index)).ok_or(libc::EINVAL)?;
    Ok((index, port))
}

/// Writes only what every caller's `ibv_port_attr` has; older ones end there.
pub unsafe extern "C" fn query_port(context: *mut ffi::ibv_context, number: u8, out: *mut ffi::ibv_port_attr) -> c_int {
    code(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        ordered(context.adapter, "query_port")?;
        let (index, port) = port_of(context, number.into())?;
        if out.is_null() {
            return Err(libc::EINVAL);
        }
        let state = context.adapter.port_state(context.device, index);
        let (active_speed, active_width) = port.codes();
        let ethernet = port.link_layer == LinkLayer::Ethernet;
        let link = if ethernet { ffi::IBV_LINK_LAYER_ETHERNET } else { ffi::IBV_LINK_LAYER_INFINIBAND };
        let attr = ffi::ibv_port_attr {
            state: state as u32,
            max_mtu: mtu_code(port.max_mtu).unwrap_or(0),
            active_mtu: mtu_code(port.active_mtu).unwrap_or(0),
            gid_tbl_len: port.gid_table_len().into(),
            max_msg_sz: context.described().map_or(0, |device| device.max_msg_sz),
            pkey_tbl_len: u16::try_from(port.pkeys.len()).unwrap_or(u16::MAX),
            lid: port.lid,
            sm_lid: port.sm_lid,
            max_vl_num: 1,
            active_width,
            active_speed,
            // LinkUp while it is, Polling while the cable is out.
            phys_state: match port.phys_state {
                Some(code) if state == port.state => code,
                _ if state == PortState::Down => 2,
                _ => 5,
            },
            link_layer: u8::try_from(link).unwrap_or(0),
            flags: port.flags,
            ..Default::default()
        };
        // SAFETY: every version of the structure has that many bytes.
        unsafe { ptr::copy_nonoverlapping((&raw const attr).cast::<u8>(), out.cast::<u8>(), PORT_ATTR_COMMON) };
        Ok(())
    })
}

/// In units of 100 Mb/s.
pub unsafe extern "C" fn query_port_speed(context: *mut ffi::ibv_context, number: u32, speed: *mut u64) -> c_int {
    code(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        if context.described().is_some_and(|device| device.hide.iter().any(|verb| verb == "query_port_speed")) {
            return Err(libc::EOPNOTSUPP);
        }
        let (_, port) = port_of(context, number)?;
        // SAFETY: writable.
        *unsafe { output(speed)? } = u64::from(port.rate_gbps.ok_or(libc::EOPNOTSUPP)?) * 10;
        Ok(())
    })
}

pub unsafe extern "C" fn query_gid(
    context: *mut ffi::ibv_context,
    number: u8,
    index: c_int,
    gid: *mut ffi::ibv_gid,
) -> c_int {
    minus_one(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        ordered(context.adapter, "query_gid")?;
        let (port, _) = port_of(context, number.into())?;
        let index = usize::try_from(index).map_err(|_| libc::EINVAL)?;
        let entry = *context.adapter.gids(context.device, port).get(index).ok_or(libc::EINVAL)?;
        // SAFETY: writable. An empty entry reads as zeroes.
        unsafe { output(gid)? }.raw = entry.map_or([0; 16], |(gid, _)| gid);
        Ok(())
    })
}

fn gid_entry(raw: [u8; 16], index: usize, port: u32, kind: u32) -> ffi::ibv_gid_entry {
    let gid_index = u32::try_from(index).unwrap_or(u32::MAX);
    ffi::ibv_gid_entry { gid: ffi::ibv_gid { raw }, gid_index, port_num: port, gid_type: kind, ndev_ifindex: 0 }
}

pub unsafe extern "C" fn query_gid_ex(
    context: *mut ffi::ibv_context,
    number: u32,
    index: u32,
    out: *mut ffi::ibv_gid_entry,
    flags: u32,
    size: usize,
) -> c_int {
    code(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        ordered(context.adapter, "query_gid_ex")?;
        let (port, _) = port_of(context, number)?;
        let index = index as usize;
        let entry = *context.adapter.gids(context.device, port).get(index).ok_or(libc::EINVAL)?;
        let (raw, kind) = entry.ok_or(libc::ENODATA)?;
        if flags != 0 || size != size_of::<ffi::ibv_gid_entry>() {
            return Err(libc::EINVAL);
        }
        // SAFETY: writable for `size` bytes.
        *unsafe { output(out)? } = gid_entry(raw, index, number, kind as u32);
        Ok(())
    })
}

pub unsafe extern "C" fn query_gid_table(
    context: *mut ffi::ibv_context,
    out: *mut ffi::ibv_gid_entry,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    let found = guard(Err(libc::EIO), || {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        if flags != 0 || size != size_of::<ffi::ibv_gid_entry>() || (out.is_null() && max > 0) {
            return Err(libc::EINVAL);
        }
        let ports = context.described().map_or(0, |device| device.ports.len());
        let all = (0..ports).flat_map(|port| {
            let number = u32::try_from(port + 1).unwrap_or(0);
            let gids = context.adapter.gids(context.device, port).into_iter().enumerate();
            gids.filter_map(move |(i, entry)| entry.map(|(raw, kind)| gid_entry(raw, i, number, kind as u32)))
        });
        let mut count = 0;
        for entry in all.take(max) {
            // SAFETY: room for max entries.
            unsafe { out.wrapping_add(count).write(entry) };
            count += 1;
        }
        Ok(count)
    });
    found.map_or_else(|code| -isize::try_from(code).unwrap_or(1), |count| isize::try_from(count).unwrap_or(0))
}

pub unsafe extern "C" fn query_pkey(context: *mut ffi::ibv_context, number: u8, index: c_int, pkey: *mut u16) -> c_int {
    minus_one(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        let (_, port) = port_of(context, number.into())?;
        let found = usize::try_from(index).ok().and_then(|index| port.pkeys.get(index)).ok_or(libc::EINVAL)?;
        // SAFETY: writable.
        *unsafe { output(pkey)? } = found.to_be();
        Ok(())
    })
}

pub unsafe extern "C" fn get_pkey_index(context: *mut ffi::ibv_context, number: u8, pkey: u16) -> c_int {
    guard(-1, || {
        // SAFETY: a context of ours.
        let Ok(context) = (unsafe { object::<Context>(context) }) else { return -1 };
        let found = port_of(context, number.into()).ok();
        let found = found.and_then(|(_, port)| port.pkeys.iter().position(|&key| key == u16::from_be(pkey)));
        found.and_then(|index| c_int::try_from(index).ok()).unwrap_or(-1)
    })
}

// ---- events ----

pub unsafe extern "C" fn get_async_event(context: *mut ffi::ibv_context, out: *mut ffi::ibv_async_event) -> c_int {
    minus_one(|| {
        // SAFETY: a context of ours.
        let context: &Context = unsafe { object(context)? };
        let event = context.events.take().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        // SAFETY: writable.
        let out = unsafe { output(out)? };
        out.event_type = event.kind;
        let port = (ffi::IBV_EVENT_PORT_ACTIVE..=ffi::IBV_EVENT_SM_CHANGE).contains(&event.kind)
            || event.kind == ffi::IBV_EVENT_GID_CHANGE;
        if port {
            out.element.port_num = c_int::try_from(event.element).unwrap_or(0);
        } else {
            out.element.qp = ptr::with_exposed_provenance_mut(event.element);
        }
        Ok(())
    })
}

/// Nothing waits for acknowledgements: an object's events are withdrawn when it is destroyed.
pub unsafe extern "C" fn ack_async_event(_event: *mut ffi::ibv_async_event) {}

pub unsafe extern "C" fn create_comp_channel(context: *mut ffi::ibv_context) -> *mut ffi::ibv_comp_channel {
    pointer(|| {
        // SAFETY: a context of ours.
        let owner: &Context = unsafe { object(context)? };
        ordered(owner.adapter, "create_comp_channel")?;
        let events = Channel::new().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        let ibv = ffi::ibv_comp_channel { context, fd: events.fd(), refcnt: 0 };
        owner.users.fetch_add(1, Ordering::Relaxed);
        Ok(Box::into_raw(Box::new(ChannelObject { ibv, events: Arc::new(events), users: AtomicU32::new(0) })).cast())
    })
}

pub unsafe extern "C" fn destroy_comp_channel(channel: *mut ffi::ibv_comp_channel) -> c_int {
    code(|| {
        // SAFETY: a channel of ours.
        let channel: &ChannelObject = unsafe { object(channel)? };
        count(&channel.users)?;
        // SAFETY: its context outlives it.
        unsafe { object::<Context>(channel.ibv.context)? }.users.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by create_comp_channel; its last use.
        unsafe { release(channel) };
        Ok(())
    })
}

pub unsafe extern "C" fn get_cq_event(
    channel: *mut ffi::ibv_comp_channel,
    cq: *mut *mut ffi::ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    minus_one(|| {
        // SAFETY: a channel of ours.
        let channel: &ChannelObject = unsafe { object(channel)? };
        let found = channel.events.take().map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        let found: *mut ffi::ibv_cq = ptr::with_exposed_provenance_mut(found);
        // SAFETY: events of destroyed queues are withdrawn.
        let context = unsafe { output(found)? }.cq_context;
        // SAFETY: writable.
        *unsafe { output(cq)? } = found;
        // SAFETY: writable.
        *unsafe { output(cq_context)? } = context;
        Ok(())
    })
}

/// As [`ack_async_event`].
pub unsafe extern "C" fn ack_cq_events(_cq: *mut ffi::ibv_cq, _count: u32) {}

unsafe extern "C" fn req_notify_cq(cq: *mut ffi::ibv_cq, solicited_only: c_int) -> c_int {
    code(|| {
        // SAFETY: a queue of ours.
        let cq: &CqObject = unsafe { object(cq)? };
        cq.core.arm(solicited_only != 0);
        Ok(())
    })
}

// ---- protection domains and memory ----

pub unsafe extern "C" fn alloc_pd(context: *mut ffi::ibv_context) -> *mut ffi::ibv_pd {
    pointer(|| {
        // SAFETY: a context of ours.
        let owner: &Context = unsafe { object(context)? };
        ordered(owner.adapter, "alloc_pd")?;
        owner.pds.fetch_add(1, Ordering::Relaxed);
        let ibv = ffi::ibv_pd { context, handle: NEXT_PD.fetch_add(1, Ordering::Relaxed) };
        Ok(Box::into_raw(Box::new(Pd { ibv, users: AtomicU32::new(0) })).cast())
    })
}

pub unsafe extern "C" fn dealloc_pd(pd: *mut ffi::ibv_pd) -> c_int {
    code(|| {
        // SAFETY: a PD of ours.
        let pd: &Pd = unsafe { object(pd)? };
        // SAFETY: its context outlives it.
        let owner: &Context = unsafe { object(pd.ibv.context)? };
        ordered(owner.adapter, "dealloc_pd")?;
        count(&pd.users)?;
        owner.pds.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by alloc_pd; its last use.
        unsafe { release(pd) };
        Ok(())
    })
}

/// Where a registration's bytes are, as far as the caller says.
enum Source {
    Address,
    /// A descriptor, and the range's offset in what it stands for.
    DmaBuf(c_int, u64),
}

/// The GPU whose memory is to be registered; None for host memory.
fn gpu_of(described: &Device, source: &Source, addr: usize, len: usize) -> Result<Option<u8>, c_int> {
    let (start, bytes) = (addr as u64, len as u64);
    match *source {
        Source::Address => match gpu::locate(start) {
            // All of it, as far as its last page: programs round up to pages of the CPU.
            Some(gpu) if described.gpu_peermem && gpu::locate(gpu::last_page(start, bytes)) == Some(gpu) => {
                Ok(Some(gpu))
            }
            // As the kernel finds it without nvidia-peermem: no pages of this process.
            Some(_) => Err(libc::EFAULT),
            None if is_mapped(addr, len) => Ok(None),
            None => Err(libc::EFAULT),
        },
        Source::DmaBuf(fd, offset) => Ok(Some(gpu::dmabuf(fd, offset, bytes, start, described.gpu_model)?)),
    }
}

unsafe fn register(
    pd: *mut ffi::ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
    verb: &str,
    source: &Source,
) -> *mut ffi::ibv_mr {
    pointer(|| {
        // SAFETY: a PD of ours.
        let owner: &Pd = unsafe { object(pd)? };
        let context_ptr = owner.ibv.context;
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(context_ptr)? };
        ordered(context.adapter, verb)?;
        let described = context.described().ok_or(libc::ENODEV)?;
        if let Source::DmaBuf(fd, _) = source {
            if !described.gpu_dmabuf || described.hide.iter().any(|hidden| hidden == verb) {
                return Err(libc::EOPNOTSUPP);
            }
            // Before anything else is looked at, so that programs can ask whether the verb is there.
            if *fd < 0 {
                return Err(libc::EBADF);
            }
        }
        if len == 0 || !access_is_valid(access) || addr.addr().checked_add(len).is_none() {
            return Err(libc::EINVAL);
        }
        let gpu = gpu_of(described, source, addr.addr(), len)?;
        let bytes = u64::try_from(len).map_err(|_| libc::EINVAL)?;
        let start = u64::try_from(addr.expose_provenance()).map_err(|_| libc::EINVAL)?;
        let pinned = if gpu.is_none() { bytes } else { 0 };
        if !context.adapter.pin(context.device, pinned) {
            return Err(libc::ENOMEM);
        }
        let entered = gpu.map_or(Ok(()), |gpu| open_gpu(context, gpu)).and_then(|()| {
            let mut world = context.world();
            let mem = gpu.map_or(Mem::Host, |gpu| {
                let dmabuf = if let Source::DmaBuf(fd, offset) = *source { Some((fd, offset)) } else { None };
                world.gpu.enter(gpu, start, bytes, dmabuf)
            });
            let key = context.adapter.regions.insert_in(mem, owner.ibv.handle, start, bytes, iova, access);
            if key.is_none() {
                world.gpu.leave(mem);
            }
            key.ok_or(libc::ENOMEM)
        });
        let key = entered.inspect_err(|_| context.adapter.unpin(context.device, pinned))?;
        owner.users.fetch_add(1, Ordering::Relaxed);
        // As libibverbs has it: of a dma-buf the offset.
        let addr = if let Source::DmaBuf(_, offset) = *source {
            ptr::without_provenance_mut(usize::try_from(offset).unwrap_or(0))
        } else {
            addr
        };
        let ibv = ffi::ibv_mr { context: context_ptr, pd, addr, length: len, handle: key, lkey: key, rkey: key };
        Ok(Box::into_raw(Box::new(Mr { ibv, pinned })).cast())
    })
}

/// Makes sure that the engine can copy to and from a GPU.
fn open_gpu(context: &Context, gpu: u8) -> Result<(), c_int> {
    if !context.adapter.is_threaded() {
        return Err(libc::EOPNOTSUPP);
    }
    // One at a time, or two threads would make two contexts on the GPU, of which one stays unused. Without the world's lock:
    // it takes a while.
    static OPENING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _opening = OPENING.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    if context.world().gpu.is_open(gpu) {
        return Ok(());
    }
    let copier = gpu::open(gpu).map_err(|error| {
        eprintln!("soft-hca: GPU {gpu} cannot be used: {error}");
        libc::EIO
    })?;
    context.world().gpu.add(gpu, copier);
    Ok(())
}

/// As pinning finds out: every page of the range belongs to a mapping.
fn is_mapped(addr: usize, len: usize) -> bool {
    let start = addr & !4095;
    // SAFETY: MS_ASYNC writes nothing; the call only walks the mappings.
    unsafe { libc::msync(ptr::with_exposed_provenance_mut(start), len + (addr - start), libc::MS_ASYNC) == 0 }
}

pub unsafe extern "C" fn reg_mr(
    pd: *mut ffi::ibv_pd,
    addr: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ffi::ibv_mr {
    // SAFETY: the caller's. The address is its own iova.
    unsafe { register(pd, addr, len, addr.addr() as u64, access.cast_unsigned(), "reg_mr", &Source::Address) }
}

pub unsafe extern "C" fn reg_mr_iova(
    pd: *mut ffi::ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ffi::ibv_mr {
    // SAFETY: the caller's.
    unsafe { register(pd, addr, len, iova, access.cast_unsigned(), "reg_mr_iova", &Source::Address) }
}

pub unsafe extern "C" fn reg_mr_iova2(
    pd: *mut ffi::ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ffi::ibv_mr {
    // SAFETY: the caller's.
    unsafe { register(pd, addr, len, iova, access, "reg_mr_iova2", &Source::Address) }
}

/// The memory is taken to be at `iova` in this process, which is where the program has mapped what it registers.
pub unsafe extern "C" fn reg_dmabuf_mr(
    pd: *mut ffi::ibv_pd,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut ffi::ibv_mr {
    let addr = ptr::with_exposed_provenance_mut(usize::try_from(iova).unwrap_or(0));
    // SAFETY: the caller's.
    unsafe { register(pd, addr, len, iova, access.cast_unsigned(), "reg_dmabuf_mr", &Source::DmaBuf(fd, offset)) }
}

/// When this returns, nothing reads or writes the region any more.
pub unsafe extern "C" fn dereg_mr(mr: *mut ffi::ibv_mr) -> c_int {
    code(|| {
        // SAFETY: an MR of ours.
        let mr: &Mr = unsafe { object(mr)? };
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(mr.ibv.context)? };
        ordered(context.adapter, "dereg_mr")?;
        context.world().deregister(mr.ibv.lkey);
        context.await_readers();
        context.adapter.unpin(context.device, mr.pinned);
        // SAFETY: its PD outlives it.
        unsafe { object::<Pd>(mr.ibv.pd)? }.users.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by register; its last use.
        unsafe { release(mr) };
        Ok(())
    })
}

// ---- completion queues ----

pub unsafe extern "C" fn create_cq(
    context: *mut ffi::ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ffi::ibv_comp_channel,
    vector: c_int,
) -> *mut ffi::ibv_cq {
    pointer(|| {
        // SAFETY: a context of ours.
        let owner: &Context = unsafe { object(context)? };
        ordered(owner.adapter, "create_cq")?;
        if !(1..=MAX_CQE).contains(&cqe) || vector != 0 {
            return Err(libc::EINVAL);
        }
        let notify = if channel.is_null() {
            None
        } else {
            // SAFETY: a channel of ours.
            let channel: &ChannelObject = unsafe { object(channel)? };
            channel.users.fetch_add(1, Ordering::Relaxed);
            Some(Arc::clone(&channel.events))
        };
        let capacity = u32::try_from(cqe).map_err(|_| libc::EINVAL)?;
        let core = Arc::new(Cq::new(capacity, notify, Some(Arc::clone(&owner.events))));
        // SAFETY: all zeroes is a valid ibv_cq.
        let mut ibv: ffi::ibv_cq = unsafe { std::mem::zeroed() };
        (ibv.context, ibv.channel, ibv.cq_context, ibv.cqe) = (context, channel, cq_context, cqe);
        owner.users.fetch_add(1, Ordering::Relaxed);
        let made = Box::into_raw(Box::new(CqObject { ibv, core: Arc::clone(&core), users: AtomicU32::new(0) }));
        core.handle.store(made.expose_provenance(), Ordering::Relaxed);
        Ok(made.cast())
    })
}

pub unsafe extern "C" fn destroy_cq(cq: *mut ffi::ibv_cq) -> c_int {
    code(|| {
        // SAFETY: a queue of ours.
        let object_ref: &CqObject = unsafe { object(cq)? };
        // SAFETY: its context outlives it.
        let owner: &Context = unsafe { object(object_ref.ibv.context)? };
        ordered(owner.adapter, "destroy_cq")?;
        count(&object_ref.users)?;
        let at = cq.addr();
        owner.events.withdraw(|event| event.element == at);
        if !object_ref.ibv.channel.is_null() {
            // SAFETY: its channel outlives it.
            let channel: &ChannelObject = unsafe { object(object_ref.ibv.channel)? };
            channel.events.withdraw(|&queued| queued == at);
            channel.users.fetch_sub(1, Ordering::Relaxed);
        }
        owner.users.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by create_cq; its last use.
        unsafe { release(object_ref) };
        Ok(())
    })
}

/// The queue pair's slots are free for new requests.
#[inline]
fn give_back(freed: Freed) {
    // SAFETY: a queue pair's completions are dropped from its queues before it leaves the table and goes.
    if let Some(qp) = unsafe { table::find(freed.qp) } {
        if freed.receive { qp.rq.free_up_to(freed.up_to) } else { qp.sq.free_up_to(freed.up_to) }
    }
}

unsafe extern "C" fn poll_cq(cq: *mut ffi::ibv_cq, max: c_int, out: *mut Wc) -> c_int {
    guard(-1, || {
        // SAFETY: a queue of ours.
        let Ok(cq) = (unsafe { object::<CqObject>(cq) }) else { return -1 };
        let Ok(max) = u32::try_from(max) else { return -1 };
        // SAFETY: room for max entries.
        let found = cq.core.poll(max, |i, wc| unsafe { out.wrapping_add(i as usize).write(*wc) }, give_back);
        c_int::try_from(found).unwrap_or(-1)
    })
}

unsafe extern "C" fn poll_cq_null(cq: *mut ffi::ibv_cq, max: c_int, out: *mut Wc) -> c_int {
    // SAFETY: a queue of ours.
    let Some(cq) = (unsafe { cq.cast::<CqObject>().as_ref() }) else { return -1 };
    let Ok(max) = u32::try_from(max) else { return -1 };
    // SAFETY: room for max entries.
    let write = |i: u32, wc: &Wc| unsafe { out.wrapping_add(i as usize).write(*wc) };
    // SAFETY: the null engine's only thread.
    let found = unsafe { cq.core.poll_alone(max, write, give_back) };
    found.cast_signed()
}

// ---- queue pairs ----

pub unsafe extern "C" fn create_qp(pd: *mut ffi::ibv_pd, init: *mut ffi::ibv_qp_init_attr) -> *mut ffi::ibv_qp {
    pointer(|| {
        // SAFETY: a PD of ours.
        let owner: &Pd = unsafe { object(pd)? };
        let context_ptr = owner.ibv.context;
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(context_ptr)? };
        ordered(context.adapter, "create_qp")?;
        // SAFETY: readable and writable.
        let init = unsafe { output(init)? };
        let device = context.described().ok_or(libc::ENODEV)?;
        if init.qp_type != ffi::ibv_qp_type::IBV_QPT_RC || !init.srq.is_null() {
            return Err(libc::EOPNOTSUPP);
        }
        // SAFETY: a queue of ours.
        let send_cq: &CqObject = unsafe { object(init.send_cq)? };
        // SAFETY: a queue of ours.
        let recv_cq: &CqObject = unsafe { object(init.recv_cq)? };
        let sges = u32::try_from(MAX_SGE).unwrap_or(0);
        let cap = init.cap;
        if cap.max_send_wr > device.max_qp_wr
            || cap.max_recv_wr > device.max_qp_wr
            || cap.max_send_sge.max(cap.max_recv_sge) > sges
            || cap.max_inline_data > device.max_inline
            || send_cq.ibv.context != context_ptr
            || recv_cq.ibv.context != context_ptr
        {
            return Err(libc::EINVAL);
        }
        let caps = Caps {
            send_wr: cap.max_send_wr,
            recv_wr: cap.max_recv_wr,
            send_sge: cap.max_send_sge.max(1),
            recv_sge: cap.max_recv_sge.max(1),
            inline: cap.max_inline_data.max(64),
        };
        init.cap.max_send_sge = caps.send_sge;
        init.cap.max_recv_sge = caps.recv_sge;
        init.cap.max_inline_data = caps.inline;
        let mut world = context.world();
        if world.count(context.device) >= device.max_qp as usize {
            return Err(libc::ENOMEM);
        }
        let num = world.free_number().ok_or(libc::ENOMEM)?;
        let core = Arc::new(Qp::new(NewQp {
            num,
            pd: owner.ibv.handle,
            device: context.device,
            sig_all: init.sq_sig_all != 0,
            caps,
            max_msg: device.max_msg_sz.into(),
            send_cq: Arc::clone(&send_cq.core),
            recv_cq: Arc::clone(&recv_cq.core),
            events: Arc::clone(&context.events),
            bell: Arc::clone(&context.running.engine.bell),
        }));
        // SAFETY: all zeroes is a valid ibv_qp.
        let mut ibv: ffi::ibv_qp = unsafe { std::mem::zeroed() };
        (ibv.context, ibv.qp_context, ibv.pd) = (context_ptr, init.qp_context, pd);
        (ibv.send_cq, ibv.recv_cq) = (init.send_cq, init.recv_cq);
        (ibv.handle, ibv.qp_num, ibv.qp_type) = (num, num, init.qp_type);
        let (made_core, adapter) = (Arc::clone(&core), context.adapter);
        let made = Box::into_raw(Box::new(QpObject { ibv, core: made_core, adapter, caps: init.cap }));
        core.handle.store(made.expose_provenance(), Ordering::Relaxed);
        table::enter(&core);
        for users in [&owner.users, &send_cq.users, &recv_cq.users] {
            users.fetch_add(1, Ordering::Relaxed);
        }
        world.insert(core);
        Ok(made.cast())
    })
}

pub unsafe extern "C" fn modify_qp(qp: *mut ffi::ibv_qp, attr: *mut ffi::ibv_qp_attr, mask: c_int) -> c_int {
    code(|| {
        // SAFETY: a queue pair of ours.
        let object_ref: &QpObject = unsafe { object(qp)? };
        ordered(object_ref.adapter, "modify_qp")?;
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(object_ref.ibv.context)? };
        // SAFETY: readable.
        let attr = unsafe { output(attr)? };
        let core = &object_ref.core;
        let ports = context.adapter.port_views(context.device);
        let mut world = context.world();
        let before = world.conn(core.index).ok_or(libc::EINVAL)?.attr;
        let (to, next) = qp::modify(core.state(), &before, attr, mask.cast_unsigned(), &ports)?;
        world.enter(core.index, to, next);
        drop(world);
        context.await_readers();
        // SAFETY: the caller modifies a queue pair from one thread at a time, as with any provider.
        unsafe { (*qp).state = to as u32 };
        context.adapter.traced(context.device, core.num, to, &next);
        if context.adapter.is_threaded() {
            core.bell.ring(core.index);
        }
        Ok(())
    })
}

pub unsafe extern "C" fn query_qp(
    qp: *mut ffi::ibv_qp,
    attr: *mut ffi::ibv_qp_attr,
    _mask: c_int,
    init: *mut ffi::ibv_qp_init_attr,
) -> c_int {
    code(|| {
        // SAFETY: a queue pair of ours.
        let object_ref: &QpObject = unsafe { object(qp)? };
        ordered(object_ref.adapter, "query_qp")?;
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(object_ref.ibv.context)? };
        let core = &object_ref.core;
        let known = context.world().conn(core.index).ok_or(libc::EINVAL)?.attr;
        let state = core.state() as u32;
        // SAFETY: writable.
        let attr = unsafe { output(attr)? };
        *attr = ffi::ibv_qp_attr {
            qp_state: state,
            cur_qp_state: state,
            path_mtu: known.mtu,
            rq_psn: known.rq_psn,
            sq_psn: known.sq_psn,
            dest_qp_num: known.dest,
            qp_access_flags: known.access,
            cap: object_ref.caps,
            pkey_index: known.pkey_index,
            max_rd_atomic: known.max_rd,
            max_dest_rd_atomic: known.max_dest_rd,
            min_rnr_timer: known.min_rnr,
            port_num: known.port,
            timeout: known.timeout,
            retry_cnt: known.retry_cnt,
            rnr_retry: known.rnr_retry,
            ..Default::default()
        };
        let to = &known.address;
        attr.ah_attr.dlid = to.dlid;
        attr.ah_attr.sl = to.sl;
        attr.ah_attr.is_global = u8::from(to.global);
        attr.ah_attr.port_num = known.port;
        attr.ah_attr.grh.dgid.raw = to.dgid;
        attr.ah_attr.grh.sgid_index = to.sgid_index;
        attr.ah_attr.grh.traffic_class = to.traffic_class;
        attr.ah_attr.grh.flow_label = to.flow_label;
        attr.ah_attr.grh.hop_limit = to.hop_limit;
        // SAFETY: null or writable.
        if let Ok(init) = unsafe { output(init) } {
            let ibv = &object_ref.ibv;
            *init = ffi::ibv_qp_init_attr {
                qp_context: ibv.qp_context,
                send_cq: ibv.send_cq,
                recv_cq: ibv.recv_cq,
                srq: ptr::null_mut(),
                cap: object_ref.caps,
                qp_type: ibv.qp_type,
                sq_sig_all: c_int::from(core.sig_all),
            };
        }
        Ok(())
    })
}

pub unsafe extern "C" fn destroy_qp(qp: *mut ffi::ibv_qp) -> c_int {
    code(|| {
        // SAFETY: a queue pair of ours.
        let object_ref: &QpObject = unsafe { object(qp)? };
        ordered(object_ref.adapter, "destroy_qp")?;
        // SAFETY: its context outlives it.
        let context: &Context = unsafe { object(object_ref.ibv.context)? };
        let core = &object_ref.core;
        {
            // The fence: whoever holds the lock is done with this queue pair.
            let mut world = context.world();
            world.remove(core.index);
            table::leave(core);
        }
        context.await_readers();
        let at = qp.addr();
        context.events.withdraw(|event| event.element == at);
        for cq in [object_ref.ibv.send_cq, object_ref.ibv.recv_cq] {
            // SAFETY: its queues outlive it.
            unsafe { object::<CqObject>(cq)? }.users.fetch_sub(1, Ordering::Relaxed);
        }
        // SAFETY: its PD outlives it.
        unsafe { object::<Pd>(object_ref.ibv.pd)? }.users.fetch_sub(1, Ordering::Relaxed);
        // SAFETY: made by create_qp; its last use.
        unsafe { release(object_ref) };
        Ok(())
    })
}

// ---- the data path ----

/// Walks a chain of work requests; on failure `bad` is the first that was not posted.
macro_rules! for_each_wr {
    ($first:expr, $bad:ident, $body:expr) => {{
        let (mut at, mut result) = ($first, 0);
        // SAFETY: null or a work request of the chain.
        while let Some(request) = unsafe { at.as_ref() } {
            if let Err(code) = $body(request) {
                if !$bad.is_null() {
                    // SAFETY: writable.
                    unsafe { $bad.write(at.cast()) };
                }
                set_errno(code);
                result = code;
                break;
            }
            at = request.next;
        }
        result
    }};
}

unsafe extern "C" fn post_send(
    qp: *mut ffi::ibv_qp,
    wr: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    guard(libc::EIO, || {
        // SAFETY: a queue pair of ours.
        let owner: &QpObject = match unsafe { object(qp) } {
            Ok(owner) => owner,
            Err(code) => return code,
        };
        let core = &*owner.core;
        let producer = core.sq.producer.lock();
        let result = for_each_wr!(wr.cast::<SendWr>(), bad, |request: &SendWr| {
            if !matches!(core.state(), State::Rts | State::Err) {
                return Err(libc::EINVAL);
            }
            if core.sq.is_full() {
                return Err(libc::ENOMEM);
            }
            // SAFETY: the caller's work request.
            let wqe = unsafe { send_wqe(owner, request)? };
            // SAFETY: not full, and the guard keeps other producers out.
            unsafe { core.sq.push(&wqe) };
            Ok(())
        });
        drop(producer);
        core.bell.ring(core.index);
        result
    })
}

unsafe fn send_wqe(owner: &QpObject, wr: &SendWr) -> Result<SendWqe, c_int> {
    let core = &*owner.core;
    let op = Op::from_code(wr.opcode).ok_or(libc::EINVAL)?;
    let mut wqe = SendWqe {
        wr_id: wr.wr_id,
        raddr: wr.remote_addr,
        len: 0,
        rkey: wr.rkey,
        imm: wr.imm_data,
        op,
        flags: wr.send_flags,
        fault: owner.adapter.faults.send(),
        sge_count: 0,
        sges: [Sge::default(); MAX_SGE],
        inline: [0; MAX_INLINE],
    };
    // SAFETY: the caller's list.
    wqe.sge_count = unsafe { copy_sges(wr.sg_list, wr.num_sge, core.send_sge, &mut wqe.sges)? };
    wqe.len = wqe.sges[..wqe.sge_count].iter().map(|sge| u64::from(sge.len)).sum();
    if wr.send_flags & send_flag::INLINE != 0 {
        if op == Op::Read || wqe.len > core.inline.into() {
            return Err(libc::EINVAL);
        }
        let mut at = 0;
        for sge in &wqe.sges[..wqe.sge_count] {
            let from = usize::try_from(sge.addr).map_err(|_| libc::EINVAL)?;
            let len = sge.len as usize;
            let room = wqe.inline.get_mut(at..at + len).ok_or(libc::EINVAL)?;
            if len > 0 {
                // SAFETY: the caller's bytes; the room was just measured.
                unsafe { ptr::copy_nonoverlapping(ptr::with_exposed_provenance(from), room.as_mut_ptr(), len) };
            }
            at += len;
        }
    }
    Ok(wqe)
}

/// With no entries the list may be stale and is not looked at.
unsafe fn copy_sges(list: *const ffi::ibv_sge, num: c_int, max: u32, out: &mut [Sge; MAX_SGE]) -> Result<usize, c_int> {
    let num = usize::try_from(num).map_err(|_| libc::EINVAL)?;
    if num > max as usize || num > MAX_SGE {
        return Err(libc::EINVAL);
    }
    for (i, entry) in out.iter_mut().enumerate().take(num) {
        // SAFETY: num entries.
        let sge = unsafe { list.wrapping_add(i).read() };
        *entry = Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey };
    }
    Ok(num)
}

unsafe extern "C" fn post_recv(
    qp: *mut ffi::ibv_qp,
    wr: *mut ffi::ibv_recv_wr,
    bad: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    guard(libc::EIO, || {
        // SAFETY: a queue pair of ours.
        let owner: &QpObject = match unsafe { object(qp) } {
            Ok(owner) => owner,
            Err(code) => return code,
        };
        let core = &*owner.core;
        let producer = core.rq.producer.lock();
        let result = for_each_wr!(wr, bad, |request: &ffi::ibv_recv_wr| {
            if core.state() == State::Reset {
                return Err(libc::EINVAL);
            }
            if core.rq.is_full() {
                return Err(libc::ENOMEM);
            }
            let mut wqe = RecvWqe { wr_id: request.wr_id, sge_count: 0, sges: [Sge::default(); MAX_SGE] };
            // SAFETY: the caller's list.
            wqe.sge_count = unsafe { copy_sges(request.sg_list, request.num_sge, core.recv_sge, &mut wqe.sges)? };
            // SAFETY: not full, and the guard keeps other producers out.
            unsafe { core.rq.push(&wqe) };
            Ok(())
        });
        drop(producer);
        // In ERR the engine flushes it; otherwise a message picks it up.
        fence(Ordering::SeqCst);
        if core.state() == State::Err {
            core.bell.ring(core.index);
        }
        result
    })
}

unsafe extern "C" fn post_send_null(
    qp: *mut ffi::ibv_qp,
    wr: *mut ffi::ibv_send_wr,
    bad: *mut *mut ffi::ibv_send_wr,
) -> c_int {
    // SAFETY: a queue pair of ours.
    let Some(owner) = (unsafe { qp.cast::<QpObject>().as_ref() }) else { return libc::EINVAL };
    for_each_wr!(wr.cast::<SendWr>(), bad, |request: &SendWr| {
        // SAFETY: the null engine's only thread; the caller's work request.
        unsafe { null::send(owner.adapter, &owner.core, request) }
    })
}

unsafe extern "C" fn post_recv_null(
    qp: *mut ffi::ibv_qp,
    wr: *mut ffi::ibv_recv_wr,
    bad: *mut *mut ffi::ibv_recv_wr,
) -> c_int {
    // SAFETY: a queue pair of ours.
    let Some(owner) = (unsafe { qp.cast::<QpObject>().as_ref() }) else { return libc::EINVAL };
    for_each_wr!(wr, bad, |request: &ffi::ibv_recv_wr| {
        // SAFETY: the null engine's only thread; the caller's work request.
        unsafe { null::receive(&owner.core, request) }
    })
}

// ---- what is not offered ----

/// For every verb that this adapter has no use for and that returns an errno.
pub unsafe extern "C" fn not_offered() -> c_int {
    set_errno(libc::ENOSYS);
    libc::ENOSYS
}

/// The same for verbs that return a pointer.
pub unsafe extern "C" fn none_offered() -> *mut c_void {
    set_errno(libc::ENOSYS);
    ptr::null_mut()
}

/// ECE: known, but not supported.
pub unsafe extern "C" fn ece(_qp: *mut ffi::ibv_qp, _ece: *mut ffi::ibv_ece) -> c_int {
    set_errno(libc::EOPNOTSUPP);
    libc::EOPNOTSUPP
}

/// Nothing to do: a forked child has no adapter, and no memory is locked.
pub unsafe extern "C" fn fork_init() -> c_int {
    0
}

/// IBV_FORK_UNNEEDED.
pub unsafe extern "C" fn is_fork_initialized() -> c_int {
    2
}

/// Data lands in ascending order, in whole words; that is less than the whole messages this verb asks about.
pub unsafe extern "C" fn data_in_order(_qp: *mut ffi::ibv_qp, _op: c_int, _flags: u32) -> c_int {
    0
}
