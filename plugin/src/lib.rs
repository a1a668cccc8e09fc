//! The symbols that NCCL looks up. Everything behind them is in the engine crate.
