//! What the entries of the table do, whatever the version: a version's own file has only its table, its properties and
//! the entries whose arguments no other version has.
//!
//! Entries are generic where versions differ in a type alone, and the table's own type picks the right one.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::config::Config;
use crate::memory::Memory;
use crate::net::{
    self, Accepting, Attributes, Comm, CommContext, Device, Engine, HANDLE_BYTES, MrHandle, NetError, Tested, Wishes,
    fork,
};
use crate::transfer::{MAX_GROUP, Parent, Profiler};

use super::guard::{call, call_data, give_back};
use super::profiler;
use super::types::{
    MAX_NET_SIZE, NCCL_NET_HANDLE_MAXSIZE, NCCL_NET_OPTIONAL_RECV_COMPLETION, NCCL_NET_TRAFFIC_CLASS_UNDEF,
    NCCL_PTR_CUDA, NCCL_PTR_HOST, ncclDebugLogger_t, ncclProfilerCallback_t, ncclResult_t,
};

const _: () = assert!(HANDLE_BYTES == NCCL_NET_HANDLE_MAXSIZE as usize);

/// Largest n of irecv.
pub(super) const MAX_RECVS: c_int = 8;
const _: () = assert!(MAX_GROUP == 8);

/// Most bytes of one message where sizes are ints (up to version 8).
pub(super) const MAX_MESSAGE: usize = MAX_NET_SIZE as usize;
/// Most bytes of one message where sizes are size_t: NCCL's own limit. A connection may have a lower one, by its ports
/// ([`crate::transfer::largest_message`]).
#[expect(clippy::cast_possible_truncation, reason = "NCCL runs on 64-bit machines only")]
const MAX_LONG_MESSAGE: usize = crate::transfer::split::MAX_MESSAGE as usize;

/// The table that NCCL reads, before init too.
#[repr(transparent)]
#[derive(Debug)]
pub struct Table<T>(T);

impl<T> Table<T> {
    pub(super) const fn new(table: T) -> Self {
        Self(table)
    }
}

// SAFETY: constants and function pointers (only this room makes tables); nobody writes it.
unsafe impl<T> Sync for Table<T> {}

/// The table of a version: what all have, and the rest as given.
macro_rules! table {
    ($table:ident { $($entry:ident: $value:expr),* $(,)? }) => {
        /// The exported table.
        pub const TABLE: Table<$table> = Table::new($table {
            name: crate::net::NAME.as_ptr(),
            devices: Some(entries::devices),
            getProperties: Some(entries::get_properties),
            regMr: Some(entries::reg_mr),
            regMrDmaBuf: Some(entries::reg_mr_dma_buf),
            deregMr: Some(entries::dereg_mr),
            iflush: Some(entries::iflush),
            test: Some(entries::test),
            closeSend: Some(entries::close_send),
            closeRecv: Some(entries::close_recv),
            closeListen: Some(entries::close_listen),
            $($entry: $value),*
        });
    };
}
pub(super) use table;

/// What a version's getProperties fills.
pub(super) trait Properties {
    fn of(index: c_int, device: &Device, config: &Config) -> Self;
}

/// The properties of a version: what all have, and the rest as given.
macro_rules! properties {
    ($properties:ident, |$index:pat_param, $device:pat_param, $config:pat_param| { $($field:ident: $value:expr),* $(,)? }) => {
        impl crate::abi::entries::Properties for $properties {
            fn of($index: c_int, device: &crate::net::Device, $config: &crate::config::Config) -> Self {
                let $device = device;
                Self {
                    name: device.name.as_ptr().cast_mut(),
                    pciPath: device.pci_path.as_ref().map_or(std::ptr::null_mut(), |p| p.as_ptr().cast_mut()),
                    guid: device.guid,
                    ptrSupport: device.ptr_support(),
                    speed: c_int::try_from(device.speed).unwrap_or(c_int::MAX),
                    port: device.port,
                    latency: device.latency,
                    maxComms: device.max_comms,
                    maxRecvs: crate::abi::entries::MAX_RECVS,
                    $($field: $value),*
                }
            }
        }
    };
}
pub(super) use properties;

/// The entries of a version's table and properties that name a fused device's parts.
macro_rules! fusion {
    ($parts:ident) => {
        impl crate::abi::entries::Parts for $parts {
            fn of(index: c_int, device: &crate::net::Device) -> Self {
                let mut own = Self { ndevs: 0, devs: Default::default() };
                let parts = if device.parts.is_empty() { &[index][..] } else { &device.parts };
                for (place, &part) in own.devs.iter_mut().zip(parts) {
                    *place = part;
                    own.ndevs += 1;
                }
                own
            }

            fn list(&self) -> Option<&[c_int]> {
                self.devs.get(..usize::try_from(self.ndevs).ok()?)
            }
        }
    };
}
pub(super) use fusion;

/// Devices that one is fused of.
pub(super) trait Parts {
    fn of(index: c_int, device: &Device) -> Self;
    /// None where there are more than the version has room for.
    fn list(&self) -> Option<&[c_int]>;
}

/// Rights differ between the directions, so a registration is of its comm.
pub(super) const REG_IS_GLOBAL: c_int = 0;

/// How a version gives sizes: int or size_t.
pub(super) trait Size: Copy + fmt::Display {
    /// Most bytes of a message.
    const MOST: usize;
    /// Whether irecv's request slot may hold a hint (version 9 and newer, as sizes of size_t).
    const HINTS: bool;
    /// As the size of a message.
    fn message(self) -> Option<u64>;
    /// As the size of memory.
    fn range(self) -> Option<usize>;
}

impl Size for c_int {
    const MOST: usize = MAX_MESSAGE;
    const HINTS: bool = false;

    #[inline]
    fn message(self) -> Option<u64> {
        // A negative size becomes one that is too large.
        let size = self.cast_unsigned() as usize;
        (size <= Self::MOST).then_some(size as u64)
    }

    fn range(self) -> Option<usize> {
        usize::try_from(self).ok()
    }
}

impl Size for usize {
    const MOST: Self = MAX_LONG_MESSAGE;
    const HINTS: bool = true;

    #[inline]
    fn message(self) -> Option<u64> {
        (self <= Self::MOST).then_some(self as u64)
    }

    fn range(self) -> Option<usize> {
        Some(self)
    }
}

#[cold]
fn no_message<S: Size>(call: &'static str, size: S) -> NetError {
    NetError::misuse(&format!("{call} of {size} bytes; a message has 0 to {}", S::MOST))
}

/// An argument that must not be NULL.
#[inline]
fn given<T>(p: *mut T, what: &'static str) -> Result<NonNull<T>, NetError> {
    NonNull::new(p).ok_or_else(|| null(what))
}

#[cold]
fn null(what: &'static str) -> NetError {
    NetError::misuse(&format!("{what} is NULL"))
}

/// # Safety
/// `comm` came from connect or accept and is not closed.
#[inline]
unsafe fn comm<'a>(comm: *mut c_void) -> Result<&'a Comm, NetError> {
    let comm = given(comm, "the comm")?.cast::<Comm>();
    // SAFETY: by this function's contract.
    Ok(unsafe { comm.as_ref() })
}

/// # Safety
/// `handle` came from regMr or regMrDmaBuf and was not given back.
#[inline]
unsafe fn registration<'a>(handle: *mut c_void) -> Result<&'a MrHandle, NetError> {
    let handle = given(handle, "the memory handle")?.cast::<MrHandle>();
    // SAFETY: by this function's contract.
    Ok(unsafe { handle.as_ref() })
}

/// Entry `i` of an array that NCCL passes.
///
/// # Safety
/// The array has more than `i` entries.
#[inline]
unsafe fn entry<T: Copy>(array: NonNull<T>, i: usize) -> T {
    // SAFETY: by this function's contract.
    let place = unsafe { array.add(i) };
    // SAFETY: as above.
    unsafe { place.read() }
}

#[inline]
fn request_pointer(request: Option<net::Request>) -> *mut c_void {
    request.map_or(ptr::null_mut(), NonNull::as_ptr)
}

pub(super) unsafe extern "C" fn init<const VERSION: u8>(logger: ncclDebugLogger_t) -> ncclResult_t {
    call("init", || Engine::init(logger, VERSION))
}

pub(super) unsafe extern "C" fn devices(ndev: *mut c_int) -> ncclResult_t {
    call("devices", || {
        let ndev = given(ndev, "ndev")?;
        let count = c_int::try_from(Engine::get()?.device_count()).unwrap_or(c_int::MAX);
        // SAFETY: NCCL passes a place for one int.
        unsafe { ndev.write(count) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn get_properties<P: Properties>(dev: c_int, props: *mut P) -> ncclResult_t {
    call("getProperties", || {
        let props = given(props, "props")?;
        let engine = Engine::get()?;
        // What it points to stays: the engine keeps every device.
        let properties = P::of(dev, &*engine.device(dev)?, engine.config());
        // SAFETY: NCCL passes a place for the properties.
        unsafe { props.write(properties) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn make_v_device<P: Parts>(index: *mut c_int, parts: *mut P) -> ncclResult_t {
    call("makeVDevice", || {
        let index = given(index, "d")?;
        let parts = given(parts, "props")?;
        // SAFETY: NCCL passes the parts that it wants fused.
        let parts = unsafe { parts.as_ref() };
        let Some(list) = parts.list() else {
            return Err(NetError::misuse(
                "makeVDevice of more devices than this version of the interface has room for",
            ));
        };
        let made = c_int::try_from(Engine::get()?.fuse(list)?).unwrap_or(c_int::MAX);
        // SAFETY: NCCL passes a place for one int.
        unsafe { index.write(made) };
        Ok(())
    })
}

/// listen; `profiler` is told of what the listener's connections receive.
///
/// # Safety
/// As NCCL calls listen.
pub(super) unsafe fn listen_with(
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
    profiler: impl FnOnce() -> Result<Option<Arc<dyn Profiler>>, NetError>,
) -> ncclResult_t {
    call("listen", || {
        let out = given(listen_comm, "listenComm")?;
        let handle = given(handle, "handle")?.cast::<[u8; HANDLE_BYTES]>();
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let (listener, bytes) = Engine::get()?.listen(dev, profiler()?)?;
        // SAFETY: NCCL passes a buffer of NCCL_NET_HANDLE_MAXSIZE bytes.
        unsafe { handle.write(bytes) };
        // SAFETY: as above.
        unsafe { out.write(Box::into_raw(listener).cast()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { listen_with(dev, handle, listen_comm, || Ok(None)) }
}

/// The traffic class that a communicator asks for.
pub(super) fn traffic_class(class: c_int) -> Result<Option<u8>, NetError> {
    match u8::try_from(class) {
        Ok(class) => Ok(Some(class)),
        Err(_) if class == NCCL_NET_TRAFFIC_CLASS_UNDEF => Ok(None),
        Err(_) => Err(NetError::misuse(&format!("trafficClass {class}; the fabrics have classes from 0 to 255"))),
    }
}

/// One step of connect; `wishes` are the communicator's.
///
/// # Safety
/// As NCCL calls connect: `handle` is its own copy of a handle, which only this call touches, `send_comm` a place for one
/// pointer.
pub(super) unsafe fn connect_with(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    wishes: impl FnOnce() -> Result<Wishes, NetError>,
) -> ncclResult_t {
    call("connect", || {
        let out = given(send_comm, "sendComm")?;
        // Never an error and a comm: NCCL would close it, and once more at the end.
        // SAFETY: by this function's contract.
        unsafe { out.write(ptr::null_mut()) };
        let mut handle = given(handle, "handle")?.cast::<[u8; HANDLE_BYTES]>();
        // SAFETY: by this function's contract.
        let handle = unsafe { handle.as_mut() };
        if let Some(comm) = Engine::get()?.connect(dev, handle, wishes()?)? {
            // SAFETY: by this function's contract.
            unsafe { out.write(Box::into_raw(comm).cast()) };
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn connect(dev: c_int, handle: *mut c_void, send_comm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { connect_with(dev, handle, send_comm, || Ok(Wishes::default())) }
}

/// With a place for the handle of a device that does the transport's work: left alone, there is none.
pub(super) unsafe extern "C" fn connect_device<H>(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut H,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { connect(dev, handle, send_comm) }
}

/// What a version says of a communicator.
pub(super) trait CommConfig {
    fn traffic_class(&self) -> c_int;
}

/// What a version says of a communicator's traffic.
pub(super) trait NetAttr {
    fn attributes(&self) -> Attributes;
}

macro_rules! communicator {
    ($config:ident, $attr:ident, $side:ident) => {
        impl crate::abi::entries::CommConfig for $config {
            fn traffic_class(&self) -> c_int {
                self.trafficClass
            }
        }

        impl crate::abi::entries::NetAttr for $attr {
            fn attributes(&self) -> crate::net::Attributes {
                let side =
                    |s: &$side| [(s.minConcurrentPeers, s.maxConcurrentPeers), (s.minFlowsPerPeer, s.maxFlowsPerPeer)];
                crate::net::Attributes {
                    send: side(&self.sendCommAttr),
                    recv: side(&self.recvCommAttr),
                    op: self.op,
                    algo: self.algo,
                    proto: self.proto,
                }
            }
        }
    };
}
pub(super) use communicator;

/// # Safety
/// `ctx` came from init and is not finalized.
unsafe fn context<'a>(ctx: *mut c_void) -> Result<&'a CommContext, NetError> {
    let ctx = given(ctx, "ctx")?.cast::<CommContext>();
    // SAFETY: by this function's contract.
    Ok(unsafe { ctx.as_ref() })
}

/// init of one communicator.
pub(super) unsafe extern "C" fn open<const VERSION: u8, C: CommConfig>(
    ctx: *mut *mut c_void,
    comm_id: u64,
    config: *mut C,
    logger: ncclDebugLogger_t,
    profiler: ncclProfilerCallback_t,
) -> ncclResult_t {
    call("init", || {
        let out = given(ctx, "ctx")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        // SAFETY: NULL or NCCL's configuration of the communicator.
        let class = unsafe { config.as_ref() }.map_or(NCCL_NET_TRAFFIC_CLASS_UNDEF, C::traffic_class);
        // A refused one fails the connections: of an init that fails NCCL only says that it goes on without the plugin.
        let context = Engine::open(logger, VERSION, comm_id, || traffic_class(class), profiler::of(profiler))?;
        // SAFETY: as above.
        unsafe { out.write(Box::into_raw(context).cast()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn finalize(ctx: *mut c_void) -> ncclResult_t {
    give_back("finalize", || {
        // NCCL finalizes after an init that failed, too.
        if let Some(ctx) = NonNull::new(ctx.cast::<CommContext>()) {
            // SAFETY: from init, finalized once.
            drop(unsafe { Box::from_raw(ctx.as_ptr()) });
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn set_net_attr<A: NetAttr>(ctx: *mut c_void, attr: *mut A) -> ncclResult_t {
    call("setNetAttr", || {
        // SAFETY: NCCL passes a context of ours.
        let context = unsafe { context(ctx) }?;
        let attr = given(attr, "attr")?;
        // SAFETY: NCCL's own structure.
        context.record(unsafe { attr.as_ref() }.attributes());
        Ok(())
    })
}

/// listen for a communicator.
pub(super) unsafe extern "C" fn listen_in(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> ncclResult_t {
    // The class comes with the offer: it is the sender's traffic.
    // SAFETY: NCCL passes a context of ours.
    let profiler = || unsafe { context(ctx) }.map(CommContext::profiler);
    // SAFETY: NCCL's call.
    unsafe { listen_with(dev, handle, listen_comm, profiler) }
}

/// connect for a communicator.
pub(super) unsafe extern "C" fn connect_in<H>(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut H,
) -> ncclResult_t {
    // SAFETY: NCCL passes a context of ours.
    let wishes = || unsafe { context(ctx) }.and_then(CommContext::wishes);
    // SAFETY: NCCL's call.
    unsafe { connect_with(dev, handle, send_comm, wishes) }
}

pub(super) unsafe extern "C" fn accept(listen_comm: *mut c_void, recv_comm: *mut *mut c_void) -> ncclResult_t {
    call("accept", || {
        let out = given(recv_comm, "recvComm")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let mut listener = given(listen_comm, "listenComm")?.cast::<Accepting>();
        // SAFETY: from listen, not closed; NCCL calls accept and closeListen of a comm from one thread.
        let listener = unsafe { listener.as_mut() };
        if let Some(comm) = Engine::get()?.accept(listener)? {
            // SAFETY: as above.
            unsafe { out.write(Box::into_raw(comm).cast()) };
        }
        Ok(())
    })
}

/// As [`connect_device`].
pub(super) unsafe extern "C" fn accept_device<H>(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _recv_dev_comm: *mut *mut H,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { accept(listen_comm, recv_comm) }
}

/// What NCCL says of memory that it registers; not a bit mask.
fn memory(kind: c_int) -> Result<Memory, NetError> {
    match u32::try_from(kind) {
        Ok(NCCL_PTR_HOST) => Ok(Memory::Host),
        Ok(NCCL_PTR_CUDA) => Ok(Memory::Gpu),
        _ => Err(NetError::misuse(&format!("memory type {kind}; NCCL_PTR_HOST (1) and NCCL_PTR_CUDA (2) exist"))),
    }
}

pub(super) unsafe extern "C" fn reg_mr<S: Size>(
    comm_: *mut c_void,
    data: *mut c_void,
    size: S,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    call("regMr", || {
        let out = given(mhandle, "mhandle")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let memory = memory(kind)?;
        let Some(size) = size.range() else { return Err(NetError::misuse("regMr of a negative size")) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(comm_) }?;
        // SAFETY: NCCL keeps the range mapped until deregMr.
        let handle = unsafe { comm.register(data as u64, size, memory) }?;
        // SAFETY: as above.
        unsafe { out.write(Arc::into_raw(handle).cast_mut().cast()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn reg_mr_dma_buf(
    comm_: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    offset: u64,
    fd: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    call("regMrDmaBuf", || {
        let out = given(mhandle, "mhandle")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        if memory(kind)? == Memory::Host {
            return Err(NetError::misuse("regMrDmaBuf for host memory"));
        }
        if fd < 0 {
            return Err(NetError::misuse(&format!("regMrDmaBuf with descriptor {fd}")));
        }
        // SAFETY: NCCL keeps the descriptor open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd) };
        // SAFETY: NCCL passes a comm of ours.
        let handle = unsafe { comm(comm_) }?.register_dmabuf(data as u64, size, offset, fd)?;
        // SAFETY: as above.
        unsafe { out.write(Arc::into_raw(handle).cast_mut().cast()) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn dereg_mr(comm_: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    give_back("deregMr", || {
        let Some(handle) = NonNull::new(mhandle.cast::<MrHandle>()) else { return Ok(()) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(comm_) }?;
        // SAFETY: from regMr, given back once.
        comm.deregister(unsafe { Arc::from_raw(handle.as_ptr()) });
        Ok(())
    })
}

/// isend; `parent` is what NCCL's profiler calls it.
///
/// # Safety
/// As NCCL calls isend.
#[inline(always)] // else only one version's entry would have it inlined
unsafe fn send<S: Size>(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    mhandle: *mut c_void,
    parent: Parent,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call_data("isend", || {
        let out = given(request, "request")?;
        // The place may hold an older request: NCCL would take it for the new one.
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let Some(size) = size.message() else { return Err(no_message("isend", size)) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(send_comm) }?;
        // SAFETY: NCCL passes a registration of this comm.
        let mr = unsafe { registration(mhandle) }?;
        // SAFETY: NCCL makes one data path call on a comm at a time and keeps the data until test says done.
        let posted = unsafe { comm.isend(data as u64, size, tag.cast_unsigned(), mr, parent) }?;
        // SAFETY: as above.
        unsafe { out.write(request_pointer(posted)) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn isend<S: Size>(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: S,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { send(send_comm, data, size, tag, mhandle, Parent::NONE, request) }
}

/// What irecv is told of each buffer.
struct Arrays<S> {
    data: NonNull<*mut c_void>,
    sizes: NonNull<S>,
    tags: NonNull<c_int>,
    mhandles: NonNull<*mut c_void>,
}

impl<S: Size> Arrays<S> {
    /// # Safety
    /// Each has `n` entries, and the handles are registrations of the comm.
    #[inline(always)] // as receive
    unsafe fn fill(&self, buffers: &mut net::Buffers, n: usize) -> Result<(), NetError> {
        for i in 0..n {
            // SAFETY: one of n, by this function's contract.
            let address = unsafe { entry(self.data, i) } as u64;
            // SAFETY: as above.
            let size = unsafe { entry(self.sizes, i) };
            // SAFETY: as above.
            let tag = unsafe { entry(self.tags, i) };
            // SAFETY: as above.
            let handle = unsafe { entry(self.mhandles, i) };
            let Some(size) = size.message() else { return Err(no_message("irecv", size)) };
            // SAFETY: by this function's contract.
            buffers.push(address, size, tag.cast_unsigned(), unsafe { registration(handle) }?);
        }
        Ok(())
    }
}

/// irecv; `parents` is NULL, or what NCCL's profiler calls each buffer.
///
/// # Safety
/// As NCCL calls irecv.
#[inline(always)] // as send
unsafe fn receive<S: Size>(
    recv_comm: *mut c_void,
    n: c_int,
    arrays: (*mut *mut c_void, *mut S, *mut c_int, *mut *mut c_void),
    parents: *const Parent,
    request: *mut *mut c_void,
) -> ncclResult_t {
    let (data, sizes, tags, mhandles) = arrays;
    call_data("irecv", || {
        let out = given(request, "request")?;
        // Up to v8 it may hold an older request.
        // SAFETY: NCCL passes a pointer in it.
        let hinted = S::HINTS && unsafe { out.read() }.addr() == NCCL_NET_OPTIONAL_RECV_COMPLETION as usize;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(recv_comm) }?;
        let n = group(n)?;
        let (data, sizes) = (given(data, "data")?, given(sizes, "sizes")?);
        let (tags, mhandles) = (given(tags, "tags")?, given(mhandles, "mhandles")?);
        let arrays = Arrays { data, sizes, tags, mhandles };
        let mut buffers = net::Buffers::new();
        buffers.named(parents);
        // One buffer, as nearly all receives have: known to the compiler, which then makes no loops.
        let posted = if n == 1 && !hinted {
            // SAFETY: NCCL passes one entry in each array.
            unsafe { arrays.fill(&mut buffers, 1) }?;
            // SAFETY: NCCL makes one data path call on a comm at a time and keeps the memory until test says done.
            unsafe { comm.irecv(&buffers) }
        } else {
            // SAFETY: NCCL passes n entries in each array.
            unsafe { arrays.fill(&mut buffers, n) }?;
            // SAFETY: as above.
            if hinted { unsafe { comm.irecv_hinted(&buffers) } } else { unsafe { comm.irecv_group(&buffers) } }
        }?;
        // SAFETY: as above.
        unsafe { out.write(request_pointer(posted)) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn irecv<S: Size>(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut S,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { receive(recv_comm, n, (data, sizes, tags, mhandles), ptr::null(), request) }
}

/// With what NCCL's profiler calls this transfer.
pub(super) unsafe extern "C" fn isend_profiled(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    phandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { send(send_comm, data, size, tag, mhandle, Parent(phandle), request) }
}

/// As [`isend_profiled`].
pub(super) unsafe extern "C" fn irecv_profiled(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { receive(recv_comm, n, (data, sizes, tags, mhandles), phandles.cast::<Parent>(), request) }
}

#[inline]
fn group(n: c_int) -> Result<usize, NetError> {
    match usize::try_from(n) {
        Ok(n) if (1..=MAX_GROUP).contains(&n) => Ok(n),
        _ => Err(NetError::misuse(&format!("a group of {n}; maxRecvs is {MAX_GROUP}"))),
    }
}

pub(super) unsafe extern "C" fn iflush(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call_data("iflush", || {
        let out = given(request, "request")?;
        // NULL means done.
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(recv_comm) }?;
        let n = group(n)?;
        let (data, sizes, mhandles) = (given(data, "data")?, given(sizes, "sizes")?, given(mhandles, "mhandles")?);
        // In ragged groups sizes and buffers may not correspond, so one that is not empty is reason enough to flush all.
        let mut any = false;
        let mut buffers = net::Buffers::new();
        for i in 0..n {
            // SAFETY: NCCL passes n entries in each array; this is one of them.
            any |= unsafe { entry(sizes, i) } > 0;
            // SAFETY: as above.
            let address = unsafe { entry(data, i) } as u64;
            // SAFETY: as above.
            let handle = unsafe { entry(mhandles, i) };
            // SAFETY: NCCL passes registrations of this comm.
            buffers.push(address, 0, 0, unsafe { registration(handle) }?);
        }
        if any {
            // SAFETY: NCCL makes one data path call on a comm at a time and keeps the memory until test says done.
            let posted = unsafe { comm.iflush(&buffers) }?;
            // SAFETY: as above.
            unsafe { out.write(request_pointer(posted)) };
        } else {
            fork::refuse_child()?;
        }
        Ok(())
    })
}

pub(super) unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> ncclResult_t {
    call_data("test", || {
        let done = given(done, "done")?;
        // NCCL's own variable is not initialised.
        // SAFETY: NCCL passes a place for one int.
        unsafe { done.write(0) };
        let request = given(request, "the request")?;
        // SAFETY: NCCL tests requests that are open, from the thread of their comm.
        match unsafe { Comm::test(request) }? {
            Tested::Pending => return Ok(()),
            // SAFETY: NCCL passes one int for a send, and one for each buffer of a receive.
            Tested::Sent { size } => unsafe { report(sizes, 0, size) },
            Tested::Received { sizes: received } => {
                for (i, &size) in received.iter().enumerate() {
                    // SAFETY: as above.
                    unsafe { report(sizes, i, size) };
                }
            }
            Tested::Flushed => {}
        }
        // SAFETY: as above.
        unsafe { done.write(1) };
        Ok(())
    })
}

/// # Safety
/// `sizes` is NULL or has more than `i` entries.
#[inline]
unsafe fn report(sizes: *mut c_int, i: usize, size: u64) {
    if let Some(sizes) = NonNull::new(sizes) {
        // SAFETY: by this function's contract.
        let place = unsafe { sizes.add(i) };
        // SAFETY: as above.
        unsafe { place.write(narrow(size)) };
    }
}

/// test has an int for a size in every version: one above that is told as the largest int. NCCL only asks whether the sum
/// is above 0 there.
#[inline]
fn narrow(size: u64) -> c_int {
    c_int::try_from(size).unwrap_or(c_int::MAX)
}

/// # Safety
/// `comm` is NULL, or came from connect or accept and is not closed.
unsafe fn close(comm: *mut c_void) {
    // NCCL closes NULL after a connection that failed half-way.
    if let Some(comm) = NonNull::new(comm.cast::<Comm>()) {
        // SAFETY: by this function's contract.
        let comm = unsafe { Box::from_raw(comm.as_ptr()) };
        // SAFETY: NCCL has joined its progress thread before it closes.
        unsafe { comm.close() };
    }
}

pub(super) unsafe extern "C" fn close_send(send_comm: *mut c_void) -> ncclResult_t {
    give_back("closeSend", || {
        // SAFETY: NCCL passes a comm of ours, once.
        unsafe { close(send_comm) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn close_recv(recv_comm: *mut c_void) -> ncclResult_t {
    give_back("closeRecv", || {
        // SAFETY: NCCL passes a comm of ours, once.
        unsafe { close(recv_comm) };
        Ok(())
    })
}

pub(super) unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> ncclResult_t {
    give_back("closeListen", || {
        if let Some(listener) = NonNull::new(listen_comm.cast::<Accepting>()) {
            // SAFETY: from listen, closed once.
            drop(unsafe { Box::from_raw(listener.as_ptr()) });
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_0_to_1_gib_where_sizes_are_ints_and_to_1_tib_where_they_are_longer() {
        assert_eq!((0.message(), 0_usize.message()), (Some(0), Some(0)));
        assert_eq!(((1 << 30).message(), ((1 << 30) + 1).message()), (Some(1 << 30), None));
        assert_eq!((MAX_LONG_MESSAGE.message(), (MAX_LONG_MESSAGE + 1).message()), (Some(1 << 40), None));
        assert_eq!(usize::MAX.message(), None);
        assert_eq!(((-1).message(), c_int::MIN.message(), c_int::MAX.message()), (None, None, None));
        assert_eq!((narrow(5), narrow(1 << 31), narrow(1 << 40)), (5, c_int::MAX, c_int::MAX));
        assert_eq!(((-1).range(), 5.range(), usize::MAX.range()), (None, Some(5), Some(usize::MAX)));
    }

    #[test]
    fn the_undefined_traffic_class_is_none_and_what_no_fabric_has_is_refused() {
        assert_eq!(traffic_class(NCCL_NET_TRAFFIC_CLASS_UNDEF), Ok(None));
        assert_eq!(traffic_class(106), Ok(Some(106)));
        for class in [-2, 256] {
            assert_eq!(traffic_class(class).map_err(|e| e.code), Err(net::Code::InvalidArgument));
        }
    }

    /// Up to v8 the slot may hold an older request, from v9 on a hint: neither may be taken for a new request.
    #[test]
    fn what_the_request_slot_held_does_not_stay() {
        let null = ptr::null_mut();
        for held in [NCCL_NET_OPTIONAL_RECV_COMPLETION as usize, 0xbeef] {
            let mut request = ptr::without_provenance_mut(held);
            // SAFETY: NULL is refused before anything else is looked at.
            let result = unsafe {
                irecv::<usize>(null, 1, null.cast(), null.cast(), null.cast(), null.cast(), &raw mut request)
            };
            assert_eq!(result, ncclResult_t::ncclInvalidArgument);
            assert!(request.is_null());
        }
    }
}
