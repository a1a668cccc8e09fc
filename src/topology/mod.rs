//! What the machine looks like, as decisions over plain data: which ports to use, by which GID, at which speed and place,
//! in which groups, which interface serves connection set-up, and what lies between a NIC and a GPU.
//!
//! Nothing here calls verbs; the engine asks libibverbs and passes what it said. All looks at /sys and /proc go through a
//! root, so that tests bring their own.

pub mod config_space;
pub mod distance;
#[cfg(test)]
pub(crate) mod fake;
pub mod function;
pub mod gid;
pub mod gpus;
pub mod hca;
pub mod ifaces;
pub mod link;
pub mod names;
pub mod pci;
pub mod peermem;
pub mod port;
pub mod rails;
pub mod report;
