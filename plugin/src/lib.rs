//! The symbols that NCCL looks up. Everything behind them is in the engine crate.
#![allow(non_upper_case_globals, reason = "the names are NCCL's")]

use nccl_net_rdma::abi::types::{
    ncclNet_v6_t, ncclNet_v7_t, ncclNet_v8_t, ncclNet_v9_t, ncclNet_v10_t, ncclNet_v11_t, ncclNet_v12_t,
};
use nccl_net_rdma::abi::{Table, v6, v7, v8, v9, v10, v11, v12};

/// NCCL 2.13.4 and newer; each takes the highest version that it knows.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v6: Table<ncclNet_v6_t> = v6::TABLE;

/// NCCL 2.19.1 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v7: Table<ncclNet_v7_t> = v7::TABLE;

/// NCCL 2.20.3 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: Table<ncclNet_v8_t> = v8::TABLE;

/// NCCL 2.24.3 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v9: Table<ncclNet_v9_t> = v9::TABLE;

/// NCCL 2.26.2 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v10: Table<ncclNet_v10_t> = v10::TABLE;

/// NCCL 2.28.3 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v11: Table<ncclNet_v11_t> = v11::TABLE;

/// NCCL 2.30.3 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v12: Table<ncclNet_v12_t> = v12::TABLE;
