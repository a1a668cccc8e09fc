//! The engine behind `libnccl-net-rdma.so`: it carries NCCL's bytes between hosts over RDMA verbs.
//!
//! Rooms, from NCCL down to the wire; arrows go down only:
//! [`abi`] → [`net`] → [`transfer`], [`rendezvous`], [`memory`], [`topology`] → [`verbs`], beside them [`config`] and
//! [`observe`].

pub mod abi;
pub mod config;
pub mod memory;
pub mod net;
pub mod observe;
pub mod rendezvous;
pub mod topology;
pub mod transfer;
pub mod verbs;
