//! Version 12 of the plugin ABI: as version 11; up to 8 devices are fused, and a device has a rail and a plane.

use std::ffi::c_int;

use super::entries::{self, MAX_MESSAGE, Parts as _, REG_IS_GLOBAL, Table, communicator, fusion, properties, table};
use super::types::{
    NCCL_NET_ID_UNDEF, ncclNet_v12_t, ncclNetAttr_v12_t, ncclNetCommAttr_v12_t, ncclNetCommConfig_v12_t,
    ncclNetDeviceHandle_v12_t, ncclNetDeviceType, ncclNetProperties_v12_t, ncclNetVDeviceProps_v12_t,
};

/// Not known.
#[expect(clippy::cast_possible_truncation, reason = "it is -1")]
const ID_UNDEF: i16 = NCCL_NET_ID_UNDEF as i16;

communicator!(ncclNetCommConfig_v12_t, ncclNetAttr_v12_t, ncclNetCommAttr_v12_t);

fusion!(ncclNetVDeviceProps_v12_t);

properties!(ncclNetProperties_v12_t, |index, device, config| {
    regIsGlobal: REG_IS_GLOBAL,
    forceFlush: c_int::from(config.force_flush),
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
    vProps: ncclNetVDeviceProps_v12_t::of(index, device),
    maxP2pBytes: device.max_message(),
    // No CollNet, but no value may be 0.
    maxCollBytes: MAX_MESSAGE,
    maxMultiRequestSize: 1,
    railId: device.rail.unwrap_or(ID_UNDEF),
    planeId: device.plane.unwrap_or(ID_UNDEF),
});

table!(ncclNet_v12_t {
    init: Some(entries::open::<12, ncclNetCommConfig_v12_t>),
    listen: Some(entries::listen_in),
    connect: Some(entries::connect_in::<ncclNetDeviceHandle_v12_t>),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend_profiled),
    irecv: Some(entries::irecv_profiled),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: Some(entries::make_v_device::<ncclNetVDeviceProps_v12_t>),
    finalize: Some(entries::finalize),
    setNetAttr: Some(entries::set_net_attr::<ncclNetAttr_v12_t>),
});
