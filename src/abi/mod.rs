//! NCCL's plugin ABI: C types made from `nccl-headers/`, and one thin adapter per version over the engine.
//!
//! No logic lives here: arguments are checked and turned into the engine's own types, results into ncclResult_t. Every
//! entry goes through [`guard`], so nothing unwinds out of here.
//!
//! A new version is a header in `nccl-headers/` that `build.rs` names, its structs in the layout table, a file beside
//! `v12.rs` with what it has and no other version, and a symbol in `plugin/`; the rest is in `entries`.

mod entries;
mod guard;
mod profiler;
pub mod types;
pub mod v10;
pub mod v11;
pub mod v12;
pub mod v6;
pub mod v7;
pub mod v8;
pub mod v9;

pub use entries::Table;
