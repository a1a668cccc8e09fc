//! engine

pub mod rendezvous;
