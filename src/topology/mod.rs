//! What the machine looks like, as decisions over plain data: which ports to use, by which GID, at which speed and place,
//! in which groups, and which interface serves connection set-up.
//!
//! Nothing here calls verbs; the engine asks libibverbs and passes what it said.

pub mod distance;
pub mod gid;
pub mod hca;
pub mod ifaces;
pub mod names;
pub mod pci;
pub mod peermem;
pub mod port;
pub mod rails;
