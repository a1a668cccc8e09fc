//! NCCL's plugin ABI: C types made from `nccl-headers/`, and one thin adapter per version over the engine.
//!
//! No logic lives here. Nothing unwinds out of here.

pub mod types;
