//! Version 7 of the plugin ABI: as version 6, and a device may do the transport's work (this one's do not).

use std::ffi::c_int;

use super::entries::{self, Table, properties, table};
use super::types::{ncclNet_v7_t, ncclNetDeviceType, ncclNetProperties_v7_t};

properties!(ncclNetProperties_v7_t, |_, _, _| {
    netDeviceType: ncclNetDeviceType::NCCL_NET_DEVICE_HOST,
    netDeviceVersion: 0,
});

table!(ncclNet_v7_t {
    init: Some(entries::init::<7>),
    listen: Some(entries::listen),
    connect: Some(entries::connect_device),
    accept: Some(entries::accept_device),
    isend: Some(entries::isend),
    irecv: Some(entries::irecv),
    // No device offload: NCCL checks both for NULL.
    getDeviceMr: None,
    irecvConsumed: None,
});
