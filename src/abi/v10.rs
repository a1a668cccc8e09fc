//! Version 10 of the plugin ABI: as version 9; a communicator has a traffic class, and NCCL a profiler (not told of
//! anything).

use std::ffi::{c_int, c_void};

use super::entries::{self, MAX_MESSAGE, REG_IS_GLOBAL, Table, properties, table};
use super::types::{
    ncclDebugLogger_t, ncclNet_v10_t, ncclNetCommConfig_v10_t, ncclNetDeviceHandle_v10_t, ncclNetDeviceType,
    ncclNetProperties_v10_t, ncclNetVDeviceProps_v10_t, ncclProfilerCallback_t, ncclResult_t,
};

unsafe extern "C" fn init(logger: ncclDebugLogger_t, _profiler: ncclProfilerCallback_t) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { entries::init::<10>(logger) }
}

unsafe extern "C" fn connect(
    dev: c_int,
    config: *mut ncclNetCommConfig_v10_t,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut ncclNetDeviceHandle_v10_t,
) -> ncclResult_t {
    let class = || {
        // NCCL's probe for GPU memory connects without a configuration.
        // SAFETY: NULL or NCCL's configuration of the communicator.
        match unsafe { config.as_ref() } {
            Some(config) => entries::traffic_class(config.trafficClass),
            None => Ok(None),
        }
    };
    // SAFETY: NCCL's call.
    unsafe { entries::connect_with(dev, handle, send_comm, class) }
}

unsafe extern "C" fn isend(
    send_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    tag: c_int,
    mhandle: *mut c_void,
    _phandle: *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { entries::isend(send_comm, data, size, tag, mhandle, request) }
}

unsafe extern "C" fn irecv(
    recv_comm: *mut c_void,
    n: c_int,
    data: *mut *mut c_void,
    sizes: *mut usize,
    tags: *mut c_int,
    mhandles: *mut *mut c_void,
    _phandles: *mut *mut c_void,
    request: *mut *mut c_void,
) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { entries::irecv(recv_comm, n, data, sizes, tags, mhandles, request) }
}

properties!(ncclNetProperties_v10_t, |index, config| {
    regIsGlobal: REG_IS_GLOBAL,
    forceFlush: c_int::from(config.force_flush),
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
    vProps: ncclNetVDeviceProps_v10_t { ndevs: 1, devs: [index, 0, 0, 0] },
    maxP2pBytes: MAX_MESSAGE,
    // No CollNet, but no value may be 0.
    maxCollBytes: MAX_MESSAGE,
});

table!(ncclNet_v10_t {
    init: Some(init),
    listen: Some(entries::listen),
    connect: Some(connect),
    accept: Some(entries::accept_device),
    isend: Some(isend),
    irecv: Some(irecv),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    // NCCL checks it for NULL. NCCL_NET_RDMA_RAILS joins ports instead.
    makeVDevice: None,
});
