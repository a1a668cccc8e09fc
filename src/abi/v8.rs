//! Version 8 of the plugin ABI over the engine.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::memory::Memory;
use crate::net::{self, Accepting, Comm, Engine, HANDLE_BYTES, MrHandle, NetError, Tested};
use crate::transfer::MAX_GROUP;

use super::guard::call;
use super::types::{
    NCCL_NET_HANDLE_MAXSIZE, NCCL_PTR_CUDA, NCCL_PTR_HOST, ncclDebugLogger_t, ncclNet_v8_t, ncclNetDeviceHandle_v8_t,
    ncclNetDeviceType, ncclNetProperties_v8_t, ncclResult_t,
};

const _: () = assert!(HANDLE_BYTES == NCCL_NET_HANDLE_MAXSIZE as usize);

/// Largest n of irecv.
const MAX_RECVS: c_int = 8;
const _: () = assert!(MAX_GROUP == 8);

/// The table that NCCL reads, before init too.
#[repr(transparent)]
#[derive(Debug)]
pub struct Table(ncclNet_v8_t);

// SAFETY: constants and function pointers; nobody writes it.
unsafe impl Sync for Table {}

/// The exported table.
pub const TABLE: Table = Table(ncclNet_v8_t {
    name: net::NAME.as_ptr(),
    init: Some(init),
    devices: Some(devices),
    getProperties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    accept: Some(accept),
    regMr: Some(reg_mr),
    regMrDmaBuf: Some(reg_mr_dma_buf),
    deregMr: Some(dereg_mr),
    isend: Some(isend),
    irecv: Some(irecv),
    iflush: Some(iflush),
    test: Some(test),
    closeSend: Some(close_send),
    closeRecv: Some(close_recv),
    closeListen: Some(close_listen),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
});

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

unsafe extern "C" fn init(logger: ncclDebugLogger_t) -> ncclResult_t {
    call("init", || Engine::init(logger))
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> ncclResult_t {
    call("devices", || {
        let ndev = given(ndev, "ndev")?;
        let count = c_int::try_from(Engine::get()?.devices().len()).unwrap_or(c_int::MAX);
        // SAFETY: NCCL passes a place for one int.
        unsafe { ndev.write(count) };
        Ok(())
    })
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut ncclNetProperties_v8_t) -> ncclResult_t {
    call("getProperties", || {
        let props = given(props, "props")?;
        let engine = Engine::get()?;
        let device = engine.device(dev)?;
        let properties = ncclNetProperties_v8_t {
            name: device.name.as_ptr().cast_mut(),
            pciPath: device.pci_path.as_ref().map_or(ptr::null_mut(), |p| p.as_ptr().cast_mut()),
            guid: device.guid,
            ptrSupport: device.ptr_support(),
            // Rights differ between the directions, so a registration is of its comm.
            regIsGlobal: 0,
            speed: c_int::try_from(device.speed).unwrap_or(c_int::MAX),
            port: device.port,
            latency: device.latency,
            maxComms: device.max_comms,
            maxRecvs: MAX_RECVS,
            netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
            netDeviceVersion: 0,
        };
        // SAFETY: NCCL passes a place for the properties.
        unsafe { props.write(properties) };
        Ok(())
    })
}

unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> ncclResult_t {
    call("listen", || {
        let out = given(listen_comm, "listenComm")?;
        let handle = given(handle, "handle")?.cast::<[u8; HANDLE_BYTES]>();
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let (listener, bytes) = Engine::get()?.listen(dev)?;
        // SAFETY: NCCL passes a buffer of NCCL_NET_HANDLE_MAXSIZE bytes.
        unsafe { handle.write(bytes) };
        // SAFETY: as above.
        unsafe { out.write(Box::into_raw(listener).cast()) };
        Ok(())
    })
}

unsafe extern "C" fn connect(
    dev: c_int,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut ncclNetDeviceHandle_v8_t,
) -> ncclResult_t {
    call("connect", || {
        let out = given(send_comm, "sendComm")?;
        // Never an error and a comm: NCCL would close it, and once more at the end.
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let mut handle = given(handle, "handle")?.cast::<[u8; HANDLE_BYTES]>();
        // SAFETY: NCCL passes its own copy of the handle, which only this call touches.
        let handle = unsafe { handle.as_mut() };
        if let Some(comm) = Engine::get()?.connect(dev, handle)? {
            // SAFETY: as above.
            unsafe { out.write(Box::into_raw(comm).cast()) };
        }
        Ok(())
    })
}

unsafe extern "C" fn accept(
    listen_comm: *mut c_void,
    recv_comm: *mut *mut c_void,
    _recv_dev_comm: *mut *mut ncclNetDeviceHandle_v8_t,
) -> ncclResult_t {
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

/// What NCCL says of memory that it registers; not a bit mask.
fn memory(kind: c_int) -> Result<Memory, NetError> {
    match u32::try_from(kind) {
        Ok(NCCL_PTR_HOST) => Ok(Memory::Host),
        Ok(NCCL_PTR_CUDA) => Ok(Memory::Gpu),
        _ => Err(NetError::misuse(&format!("memory type {kind}; NCCL_PTR_HOST (1) and NCCL_PTR_CUDA (2) exist"))),
    }
}

unsafe extern "C" fn reg_mr(
    comm_: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    mhandle: *mut *mut c_void,
) -> ncclResult_t {
    call("regMr", || {
        let out = given(mhandle, "mhandle")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let memory = memory(kind)?;
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(comm_) }?;
        // SAFETY: NCCL keeps the range mapped until deregMr.
        let handle = unsafe { comm.register(data as u64, size, memory) }?;
        // SAFETY: as above.
        unsafe { out.write(Arc::into_raw(handle).cast_mut().cast()) };
        Ok(())
    })
}

unsafe extern "C" fn reg_mr_dma_buf(
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

unsafe extern "C" fn dereg_mr(comm_: *mut c_void, mhandle: *mut c_void) -> ncclResult_t {
    call("deregMr", || {
        let Some(handle) = NonNull::new(mhandle.cast::<MrHandle>()) else { return Ok(()) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(comm_) }?;
        // SAFETY: from regMr, given back once.
        comm.deregister(unsafe { Arc::from_raw(handle.as_ptr()) });
        Ok(())
    })
}

unsafe extern "C" fn isend(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: c_int,
    tag: c_int,
    mhandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call("isend", || {
        let out = given(request, "request")?;
        // The place may hold an older request: NCCL would take it for the new one.
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        let Ok(size) = u64::try_from(size) else { return Err(NetError::misuse("isend of a negative size")) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(send_comm) }?;
        // SAFETY: NCCL passes a registration of this comm.
        let mr = unsafe { registration(mhandle) }?;
        // SAFETY: NCCL makes one data path call on a comm at a time and keeps the data until test says done.
        let posted = unsafe { comm.isend(data as u64, size, tag.cast_unsigned(), mr) }?;
        // SAFETY: as above.
        unsafe { out.write(request_pointer(posted)) };
        Ok(())
    })
}

unsafe extern "C" fn irecv(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call("irecv", || {
        let out = given(request, "request")?;
        // SAFETY: NCCL passes a place for one pointer.
        unsafe { out.write(ptr::null_mut()) };
        // SAFETY: NCCL passes a comm of ours.
        let comm = unsafe { comm(recv_comm) }?;
        let n = group(n)?;
        let (data, sizes) = (given(data, "data")?, given(sizes, "sizes")?);
        let (tags, mhandles) = (given(tags, "tags")?, given(mhandles, "mhandles")?);
        let mut buffers = net::Buffers::new();
        for i in 0..n {
            // SAFETY: NCCL passes n entries in each array; this is one of them.
            let address = unsafe { entry(data, i) } as u64;
            // SAFETY: as above.
            let size = unsafe { entry(sizes, i) };
            // SAFETY: as above.
            let tag = unsafe { entry(tags, i) };
            // SAFETY: as above.
            let handle = unsafe { entry(mhandles, i) };
            let Ok(size) = u64::try_from(size) else { return Err(NetError::misuse("irecv of a negative size")) };
            // SAFETY: NCCL passes registrations of this comm.
            buffers.push(address, size, tag.cast_unsigned(), unsafe { registration(handle) }?);
        }
        // SAFETY: NCCL makes one data path call on a comm at a time and keeps the memory until test says done.
        let posted = unsafe { comm.irecv(&buffers) }?;
        // SAFETY: as above.
        unsafe { out.write(request_pointer(posted)) };
        Ok(())
    })
}

#[inline]
fn group(n: c_int) -> Result<usize, NetError> {
    match usize::try_from(n) {
        Ok(n) if (1..=MAX_GROUP).contains(&n) => Ok(n),
        _ => Err(NetError::misuse(&format!("a group of {n}; maxRecvs is {MAX_GROUP}"))),
    }
}

unsafe extern "C" fn iflush(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut c_int,
    mhandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    call("iflush", || {
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
        }
        Ok(())
    })
}

unsafe extern "C" fn test(request: *mut c_void, done: *mut c_int, sizes: *mut c_int) -> ncclResult_t {
    call("test", || {
        let done = given(done, "done")?;
        // NCCL's own variable is not initialised.
        // SAFETY: NCCL passes a place for one int.
        unsafe { done.write(0) };
        let request = given(request, "the request")?;
        // SAFETY: NCCL tests requests that are open, from the thread of their comm.
        let reported = match unsafe { Comm::test(request) }? {
            Tested::Pending => return Ok(()),
            Tested::Sent { size } => &[size][..],
            Tested::Received { sizes } => sizes,
            Tested::Flushed => &[],
        };
        if let Some(sizes) = NonNull::new(sizes) {
            for (i, &size) in reported.iter().enumerate() {
                // SAFETY: NCCL passes one int for a send, and one for each buffer of a receive.
                let place = unsafe { sizes.add(i) };
                // SAFETY: as above.
                unsafe { place.write(narrow(size)) };
            }
        }
        // SAFETY: as above.
        unsafe { done.write(1) };
        Ok(())
    })
}

/// Sizes are ints up to v8; what was posted was an int, so this loses nothing.
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

unsafe extern "C" fn close_send(send_comm: *mut c_void) -> ncclResult_t {
    call("closeSend", || {
        // SAFETY: NCCL passes a comm of ours, once.
        unsafe { close(send_comm) };
        Ok(())
    })
}

unsafe extern "C" fn close_recv(recv_comm: *mut c_void) -> ncclResult_t {
    call("closeRecv", || {
        // SAFETY: NCCL passes a comm of ours, once.
        unsafe { close(recv_comm) };
        Ok(())
    })
}

unsafe extern "C" fn close_listen(listen_comm: *mut c_void) -> ncclResult_t {
    call("closeListen", || {
        if let Some(listener) = NonNull::new(listen_comm.cast::<Accepting>()) {
            // SAFETY: from listen, closed once.
            drop(unsafe { Box::from_raw(listener.as_ptr()) });
        }
        Ok(())
    })
}
