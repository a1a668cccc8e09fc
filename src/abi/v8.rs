//! Version 8 of the plugin ABI: as version 7, and memory of any size is registered at once.

use std::ffi::c_int;

use super::entries::{self, REG_IS_GLOBAL, Table, properties, table};
use super::types::{ncclNet_v8_t, ncclNetDeviceType, ncclNetProperties_v8_t};

properties!(ncclNetProperties_v8_t, |_, _, _| {
    regIsGlobal: REG_IS_GLOBAL,
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
});

table!(ncclNet_v8_t {
    init: Some(entries::init::<8>),
    listen: Some(entries::listen),
    connect: Some(entries::connect_device),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend),
    irecv: Some(entries::irecv),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
});
