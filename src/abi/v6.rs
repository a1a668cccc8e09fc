//! Version 6 of the plugin ABI: sizes are ints, and no device handles.

use std::ffi::c_int;

use super::entries::{self, Table, properties, table};
use super::types::{ncclNet_v6_t, ncclNetProperties_v6_t};

properties!(ncclNetProperties_v6_t, |_, _, _| {});

table!(ncclNet_v6_t {
    init: Some(entries::init::<6>),
    listen: Some(entries::listen),
    connect: Some(entries::connect),
    accept: Some(entries::accept),
    isend: Some(entries::isend),
    irecv: Some(entries::irecv),
});
