//! Version 10 of the plugin ABI: as version 9; a communicator has a traffic class, and NCCL a profiler (not told of
//! anything).

use std::ffi::{c_int, c_void};

use super::entries::{self, MAX_MESSAGE, Parts as _, REG_IS_GLOBAL, Table, fusion, properties, table};
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

fusion!(ncclNetVDeviceProps_v10_t);

properties!(ncclNetProperties_v10_t, |index, device, config| {
    regIsGlobal: REG_IS_GLOBAL,
    forceFlush: c_int::from(config.force_flush),
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
    vProps: ncclNetVDeviceProps_v10_t::of(index, device),
    maxP2pBytes: device.max_message(),
    // No CollNet, but no value may be 0.
    maxCollBytes: MAX_MESSAGE,
});

table!(ncclNet_v10_t {
    init: Some(init),
    listen: Some(entries::listen),
    connect: Some(connect),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend_profiled),
    irecv: Some(entries::irecv_profiled),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: Some(entries::make_v_device::<ncclNetVDeviceProps_v10_t>),
});
