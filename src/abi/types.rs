//! The C types of the plugin ABI, made by bindgen from `nccl-headers/`.
//!
//! Layouts are held against `tests/data/nccl-net-layout.json` at compile time (see `build.rs`).
#![allow(non_camel_case_types, non_snake_case, non_upper_case_globals, missing_debug_implementations)]
#![allow(clippy::use_self, reason = "generated code")]

include!(concat!(env!("OUT_DIR"), "/nccl_net.rs"));
include!(concat!(env!("OUT_DIR"), "/nccl_net_layout.rs"));
