//! Version 10 of the plugin ABI: as version 9; a communicator has a traffic class, and NCCL a profiler.

use std::ffi::{c_int, c_void};
use std::sync::{Arc, PoisonError, RwLock};

use crate::net::{NetError, Wishes};
use crate::transfer::Profiler;

use super::entries::{self, MAX_MESSAGE, Parts as _, REG_IS_GLOBAL, Table, fusion, properties, table};
use super::profiler;
use super::types::{
    ncclDebugLogger_t, ncclNet_v10_t, ncclNetCommConfig_v10_t, ncclNetDeviceHandle_v10_t, ncclNetDeviceType,
    ncclNetProperties_v10_t, ncclNetVDeviceProps_v10_t, ncclProfilerCallback_t, ncclResult_t,
};

/// Of NCCL's one init.
static PROFILER: RwLock<Option<Arc<dyn Profiler>>> = RwLock::new(None);

fn known() -> Result<Option<Arc<dyn Profiler>>, NetError> {
    Ok(PROFILER.read().unwrap_or_else(PoisonError::into_inner).clone())
}

unsafe extern "C" fn init(logger: ncclDebugLogger_t, profiler: ncclProfilerCallback_t) -> ncclResult_t {
    *PROFILER.write().unwrap_or_else(PoisonError::into_inner) = profiler::of(profiler);
    // SAFETY: NCCL's call.
    unsafe { entries::init::<10>(logger) }
}

unsafe extern "C" fn listen(dev: c_int, handle: *mut c_void, listen_comm: *mut *mut c_void) -> ncclResult_t {
    // SAFETY: NCCL's call.
    unsafe { entries::listen_with(dev, handle, listen_comm, known) }
}

unsafe extern "C" fn connect(
    dev: c_int,
    config: *mut ncclNetCommConfig_v10_t,
    handle: *mut c_void,
    send_comm: *mut *mut c_void,
    _send_dev_comm: *mut *mut ncclNetDeviceHandle_v10_t,
) -> ncclResult_t {
    let wishes = || {
        // NCCL's probe for GPU memory connects without a configuration.
        // SAFETY: NULL or NCCL's configuration of the communicator.
        let class = match unsafe { config.as_ref() } {
            Some(config) => entries::traffic_class(config.trafficClass)?,
            None => None,
        };
        Ok(Wishes { class, profiler: known()? })
    };
    // SAFETY: NCCL's call.
    unsafe { entries::connect_with(dev, handle, send_comm, wishes) }
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
    listen: Some(listen),
    connect: Some(connect),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend_profiled),
    irecv: Some(entries::irecv_profiled),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: Some(entries::make_v_device::<ncclNetVDeviceProps_v10_t>),
});
