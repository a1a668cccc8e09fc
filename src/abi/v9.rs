//! Version 9 of the plugin ABI: as version 8; messages have sizes of size_t, and NCCL may fuse devices.

use std::ffi::c_int;

use super::entries::{self, MAX_MESSAGE, Parts as _, REG_IS_GLOBAL, Table, fusion, properties, table};
use super::types::{ncclNet_v9_t, ncclNetDeviceType, ncclNetProperties_v9_t, ncclNetVDeviceProps_v9_t};

fusion!(ncclNetVDeviceProps_v9_t);

properties!(ncclNetProperties_v9_t, |index, device, config| {
    regIsGlobal: REG_IS_GLOBAL,
    forceFlush: c_int::from(config.force_flush),
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
    vProps: ncclNetVDeviceProps_v9_t::of(index, device),
    maxP2pBytes: device.max_message(),
    // No CollNet, but no value may be 0.
    maxCollBytes: MAX_MESSAGE,
});

table!(ncclNet_v9_t {
    init: Some(entries::init::<9>),
    listen: Some(entries::listen),
    connect: Some(entries::connect_device),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend),
    irecv: Some(entries::irecv),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
    makeVDevice: Some(entries::make_v_device::<ncclNetVDeviceProps_v9_t>),
});
