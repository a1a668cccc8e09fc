//! Version 11 of the plugin ABI: as version 10; init and finalize are of one communicator, which has
//! the traffic class.

use std::ffi::c_int;

use super::entries::{self, MAX_MESSAGE, Parts as _, REG_IS_GLOBAL, Table, communicator, fusion, properties, table};
use super::types::{
    ncclNet_v11_t, ncclNetAttr_v11_t, ncclNetCommAttr_v11_t, ncclNetCommConfig_v11_t, ncclNetDeviceHandle_v11_t,
    ncclNetDeviceType, ncclNetProperties_v11_t, ncclNetVDeviceProps_v11_t,
};

communicator!(ncclNetCommConfig_v11_t, ncclNetAttr_v11_t, ncclNetCommAttr_v11_t);

fusion!(ncclNetVDeviceProps_v11_t);

properties!(ncclNetProperties_v11_t, |index, device, config| {
    regIsGlobal: REG_IS_GLOBAL,
    forceFlush: c_int::from(config.force_flush),
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
    vProps: ncclNetVDeviceProps_v11_t::of(index, device),
    maxP2pBytes: device.max_message(),
    // No CollNet, but no value may be 0.
    maxCollBytes: MAX_MESSAGE,
    maxMultiRequestSize: 1,
});

table!(ncclNet_v11_t {
    init: Some(entries::open::<11, ncclNetCommConfig_v11_t>),
    listen: Some(entries::listen_in),
    connect: Some(entries::connect_in::<ncclNetDeviceHandle_v11_t>),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend_profiled),
    irecv: Some(entries::irecv_profiled),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: Some(entries::make_v_device::<ncclNetVDeviceProps_v11_t>),
    finalize: Some(entries::finalize),
    setNetAttr: Some(entries::set_net_attr::<ncclNetAttr_v11_t>),
});
