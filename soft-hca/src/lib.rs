//! soft-hca: an RDMA adapter in software, for development, CI and demonstrations.
//!
//! Reliable-connected queue pairs behind the verbs ABI, strict where hardware is strict. `verbs` is the border to C;
//! `adapter` is what a process has; `qp`, `queue`, `memory`, `events` are the objects; `engine` and `rc` move data, over
//! `link`, `registry`, `shm`, `tcp` and `wire` where the peer is another process. `null` moves it inside the posting call. `trace`
//! shows what queue pairs were told.
//! `soft-hca-verbs` gives `verbs` the names and versions of `libibverbs.so.1`; `compat` is what it exports beside verbs(3).
pub mod abi;
mod adapter;
pub mod compat;
pub mod copy;
mod engine;
mod events;
pub mod fabric;
pub mod faults;
mod gpu;
mod link;
pub mod memory;
pub mod names;
mod null;
mod qp;
mod queue;
mod rc;
mod registry;
mod shm;
mod table;
mod tcp;
mod trace;
pub mod verbs;
mod wire;

pub use adapter::{Control, install};
pub use trace::TRACE_VAR;
