//! An opened device, its attributes, ports, GIDs and events, and its protection domain.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ib;

use super::error::VerbsError;
use super::library::{DeviceList, Library};

/// Bit of ibv_port_attr.flags (`<infiniband/verbs.h>`).
const IBV_QPF_GRH_REQUIRED: u32 = 1;

/// What the engine needs to know of a device (`man ibv_query_device`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceAttr {
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    /// Version, as the vendor writes it.
    pub firmware: String,
    /// In host byte order.
    pub node_guid: u64,
    /// In host byte order; shared by the functions of one chip.
    pub sys_image_guid: u64,
    pub ports: u8,
    pub max_qp: u32,
    pub max_qp_wr: u32,
    pub max_cqe: u32,
    pub max_mr: u32,
}

/// What the engine needs to know of a port (`man ibv_query_port`), codes as verbs give them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PortAttr {
    pub state: u32,
    pub phys_state: u8,
    pub link_layer: u8,
    /// IBV_MTU_* code.
    pub active_mtu: u32,
    /// Of the extended field where the library fills it (XDR does not fit 8 bits), else the classic one.
    pub active_speed: u32,
    pub active_width: u8,
    pub lid: u16,
    pub gid_tbl_len: u32,
    pub pkey_tbl_len: u16,
    /// Largest message, bytes.
    pub max_msg_sz: u32,
    /// A GRH is needed even inside the subnet.
    pub grh_required: bool,
    /// Mb/s, from ibv_query_port_speed where it exists.
    pub speed_mbps: Option<u64>,
}

/// A filled entry of a GID table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GidRecord {
    pub index: u32,
    pub raw: [u8; 16],
    /// IBV_GID_TYPE_*: 0 IB, 1 RoCE v1, 2 RoCE v2; None where the library can't tell.
    pub kind: Option<u32>,
    /// Network interface index; 0 unknown.
    pub ifindex: u32,
}

/// An asynchronous event (`man ibv_get_async_event`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AsyncEvent {
    /// About a port of the device.
    Port { kind: u32, port: u8 },
    /// About a queue pair.
    Qp { kind: u32, qp_num: u32 },
    /// About a completion queue.
    Cq { kind: u32 },
    /// About the whole device.
    Device { kind: u32 },
    /// Nothing that concerns RC queue pairs.
    Other { kind: u32 },
}

/// An opened device.
pub struct Context {
    raw: NonNull<ib::ibv_context>,
    pub(super) library: Arc<Library>,
    name: String,
    ibdev_path: String,
}

// SAFETY: verbs objects may be used from any thread (`man ibv_open_device` and the verbs' contract of thread safety).
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Context {
    /// Opens device `i` of the list.
    pub fn open(list: &DeviceList, i: usize) -> Result<Arc<Self>, VerbsError> {
        let name = list.name(i);
        // SAFETY: the device is alive while the list is.
        let raw = unsafe { (list.library.api.open_device)(list.get(i).as_ptr()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_open_device", &name))?;
        Ok(Arc::new(Self { raw, library: Arc::clone(&list.library), name, ibdev_path: list.ibdev_path(i) }))
    }

    /// The device's name, for example `mlx5_0`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Where the device is in sysfs; empty where libibverbs does not say.
    pub fn ibdev_path(&self) -> &str {
        &self.ibdev_path
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_context {
        self.raw.as_ptr()
    }

    /// The context's function table: the data path of libibverbs.
    pub(super) fn ops(&self) -> &ib::ibv_context_ops {
        // SAFETY: the context is alive and its ops do not change after open.
        unsafe { &(*self.raw.as_ptr()).ops }
    }

    pub fn query(&self) -> Result<DeviceAttr, VerbsError> {
        let mut attr = MaybeUninit::<ib::ibv_device_attr>::zeroed();
        // SAFETY: a live context and room for the attributes.
        let rc = unsafe { (self.library.api.query_device)(self.raw(), attr.as_mut_ptr()) };
        if rc != 0 {
            return Err(VerbsError::new("ibv_query_device", &self.name, rc));
        }
        // SAFETY: all-zero is a valid value and the call filled it.
        let attr = unsafe { attr.assume_init() };
        let unsigned = |v: c_int| u32::try_from(v).unwrap_or(0);
        let firmware: Vec<u8> = attr.fw_ver.iter().map(|c| c.cast_unsigned()).take_while(|c| *c != 0).collect();
        Ok(DeviceAttr {
            vendor_id: attr.vendor_id,
            vendor_part_id: attr.vendor_part_id,
            firmware: String::from_utf8_lossy(&firmware).into_owned(),
            node_guid: u64::from_be(attr.node_guid),
            sys_image_guid: u64::from_be(attr.sys_image_guid),
            ports: attr.phys_port_cnt,
            max_qp: unsigned(attr.max_qp),
            max_qp_wr: unsigned(attr.max_qp_wr),
            max_cqe: unsigned(attr.max_cqe),
            max_mr: unsigned(attr.max_mr),
        })
    }

    pub fn query_port(&self, port: u8) -> Result<PortAttr, VerbsError> {
        // Zeroed, since older libraries know a shorter struct and leave the tail alone.
        let mut attr = MaybeUninit::<ib::ibv_port_attr>::zeroed();
        // SAFETY: a live context and room for the attributes of the newest library.
        let rc = unsafe { (self.library.api.query_port)(self.raw(), port, attr.as_mut_ptr()) };
        if rc != 0 {
            return Err(VerbsError::new("ibv_query_port", &self.name, rc).with(format_args!("port {port}")));
        }
        // SAFETY: all-zero is a valid value and the call filled it.
        let attr = unsafe { attr.assume_init() };
        Ok(PortAttr {
            state: attr.state,
            phys_state: attr.phys_state,
            link_layer: attr.link_layer,
            active_mtu: attr.active_mtu,
            active_speed: if attr.active_speed_ex == 0 { u32::from(attr.active_speed) } else { attr.active_speed_ex },
            active_width: attr.active_width,
            lid: attr.lid,
            gid_tbl_len: u32::try_from(attr.gid_tbl_len).unwrap_or(0),
            pkey_tbl_len: attr.pkey_tbl_len,
            max_msg_sz: attr.max_msg_sz,
            grh_required: u32::from(attr.flags) & IBV_QPF_GRH_REQUIRED != 0,
            speed_mbps: self.port_speed(port),
        })
    }

    /// ibv_query_port_speed gives 100 Mb/s units.
    fn port_speed(&self, port: u8) -> Option<u64> {
        let query = self.library.api.query_port_speed?;
        let mut speed = 0u64;
        // SAFETY: a live context and a place to write.
        let rc = unsafe { query(self.raw(), u32::from(port), &raw mut speed) };
        (rc == 0 && speed > 0).then_some(speed * 100)
    }

    /// The GID table of a port without its empty entries. Entries that can't be read (of another network namespace) count
    /// as empty.
    pub fn gids(&self, port: u8, table_len: u32) -> Vec<GidRecord> {
        (0..table_len).filter_map(|index| self.gid(port, index)).filter(|g| g.raw != [0; 16]).collect()
    }

    fn gid(&self, port: u8, index: u32) -> Option<GidRecord> {
        if let Some(query) = self.library.api.query_gid_ex {
            let mut entry = MaybeUninit::<ib::ibv_gid_entry>::zeroed();
            let size = size_of::<ib::ibv_gid_entry>();
            // SAFETY: a live context, room for one entry, its size told.
            let rc = unsafe { query(self.raw(), u32::from(port), index, entry.as_mut_ptr(), 0, size) };
            if rc == 0 {
                // SAFETY: all-zero is a valid value and the call filled it.
                let entry = unsafe { entry.assume_init() };
                // SAFETY: every bit pattern is a valid raw GID.
                let raw = unsafe { entry.gid.raw };
                return Some(GidRecord { index, raw, kind: Some(entry.gid_type), ifindex: entry.ndev_ifindex });
            }
            if rc != libc::EOPNOTSUPP && rc != libc::ENOSYS {
                return None;
            }
        }
        let mut gid = MaybeUninit::<ib::ibv_gid>::zeroed();
        let index_c = c_int::try_from(index).ok()?;
        // SAFETY: a live context and room for the GID.
        if unsafe { (self.library.api.query_gid)(self.raw(), port, index_c, gid.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: all-zero is a valid value and the call filled it.
        let gid = unsafe { gid.assume_init() };
        // SAFETY: every bit pattern is a valid raw GID.
        Some(GidRecord { index, raw: unsafe { gid.raw }, kind: None, ifindex: 0 })
    }

    /// The P_Key at a table index, host byte order.
    pub fn pkey(&self, port: u8, index: u16) -> Result<u16, VerbsError> {
        let mut pkey = 0u16;
        // SAFETY: a live context and a place to write.
        let rc = unsafe { (self.library.api.query_pkey)(self.raw(), port, c_int::from(index), &raw mut pkey) };
        if rc != 0 {
            return Err(VerbsError::last("ibv_query_pkey", &self.name).with(format_args!("port {port} index {index}")));
        }
        Ok(u16::from_be(pkey))
    }

    /// The descriptor that becomes readable when an event waits. Made non-blocking here, so that
    /// [`Context::next_event`] never waits.
    pub fn event_fd(&self) -> std::io::Result<RawFd> {
        // SAFETY: the context is alive.
        let fd = unsafe { (*self.raw()).async_fd };
        // SAFETY: fcntl on a descriptor that the context owns.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        if flags < 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: as above.
        if unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
            return Err(std::io::Error::last_os_error());
        }
        Ok(fd)
    }

    /// The next event that waits, acknowledged. Call [`Context::event_fd`] first.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        let mut event = MaybeUninit::<ib::ibv_async_event>::zeroed();
        // SAFETY: a live context and room for the event.
        if unsafe { (self.library.api.get_async_event)(self.raw(), event.as_mut_ptr()) } != 0 {
            return None;
        }
        // SAFETY: all-zero is a valid value and the call filled it.
        let mut event = unsafe { event.assume_init() };
        let kind = event.event_type;
        let read = match kind {
            ib::IBV_EVENT_PORT_ACTIVE
            | ib::IBV_EVENT_PORT_ERR
            | ib::IBV_EVENT_LID_CHANGE
            | ib::IBV_EVENT_PKEY_CHANGE
            | ib::IBV_EVENT_SM_CHANGE
            | ib::IBV_EVENT_CLIENT_REREGISTER
            | ib::IBV_EVENT_GID_CHANGE => {
                // SAFETY: port events carry a port number.
                let port = unsafe { event.element.port_num };
                AsyncEvent::Port { kind, port: u8::try_from(port).unwrap_or(0) }
            }
            ib::IBV_EVENT_QP_FATAL
            | ib::IBV_EVENT_QP_REQ_ERR
            | ib::IBV_EVENT_QP_ACCESS_ERR
            | ib::IBV_EVENT_COMM_EST
            | ib::IBV_EVENT_SQ_DRAINED
            | ib::IBV_EVENT_PATH_MIG
            | ib::IBV_EVENT_PATH_MIG_ERR
            | ib::IBV_EVENT_QP_LAST_WQE_REACHED => {
                // SAFETY: queue pair events carry the queue pair.
                let qp = unsafe { event.element.qp };
                // SAFETY: it can't be destroyed before the acknowledgement below.
                let qp_num = unsafe { (*qp).qp_num };
                AsyncEvent::Qp { kind, qp_num }
            }
            ib::IBV_EVENT_CQ_ERR => AsyncEvent::Cq { kind },
            ib::IBV_EVENT_DEVICE_FATAL => AsyncEvent::Device { kind },
            _ => AsyncEvent::Other { kind },
        };
        // SAFETY: the event came from ibv_get_async_event and is acknowledged once.
        unsafe { (self.library.api.ack_async_event)(&raw mut event) };
        Some(read)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: opened by us, closed once, after everything made on it (they hold this object).
        unsafe { (self.library.api.close_device)(self.raw.as_ptr()) };
    }
}

/// A protection domain.
pub struct Pd {
    raw: NonNull<ib::ibv_pd>,
    pub(super) context: Arc<Context>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Pd {}
// SAFETY: as above.
unsafe impl Sync for Pd {}

impl std::fmt::Debug for Pd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pd").field("device", &self.context.name).finish_non_exhaustive()
    }
}

impl Pd {
    pub fn alloc(context: &Arc<Context>) -> Result<Arc<Self>, VerbsError> {
        // SAFETY: a live context.
        let raw = unsafe { (context.library.api.alloc_pd)(context.raw()) };
        let raw = NonNull::new(raw).ok_or_else(|| VerbsError::last("ibv_alloc_pd", context.name()))?;
        Ok(Arc::new(Self { raw, context: Arc::clone(context) }))
    }

    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn raw(&self) -> *mut ib::ibv_pd {
        self.raw.as_ptr()
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: allocated by us, freed once, after its MRs and QPs (they hold this object).
        unsafe { (self.context.library.api.dealloc_pd)(self.raw.as_ptr()) };
    }
}
