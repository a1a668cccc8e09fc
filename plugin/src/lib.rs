//! The symbols that NCCL looks up. Everything behind them is in the engine crate.
#![allow(non_upper_case_globals, reason = "the names are NCCL's")]

use nccl_net_rdma::abi::v8;

/// NCCL 2.20.3 and newer.
#[unsafe(no_mangle)]
pub static ncclNetPlugin_v8: v8::Table = v8::TABLE;
