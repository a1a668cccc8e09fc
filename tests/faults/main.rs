//! The engine and the built plugin over soft-hca: set-up and teardown, settings, failures, leaks. Each test runs in a
//! process of its own (see `rig`); those that load the plugin load dist/lib, so `ci/build` comes first.

#[cfg(test)]
mod alive;
#[cfg(test)]
mod copies;
#[cfg(test)]
#[path = "../cuda/mod.rs"]
mod cuda;
#[cfg(test)]
mod devices;
#[cfg(test)]
mod errors;
#[cfg(test)]
mod gpu;
#[cfg(test)]
mod leaks;
#[cfg(test)]
mod lifecycle;
#[cfg(test)]
mod paths;
#[cfg(test)]
mod plugin;
#[cfg(test)]
mod rig;
#[cfg(test)]
mod service;
#[cfg(test)]
mod setup;
#[cfg(test)]
mod staging;
#[cfg(test)]
mod stall;
#[cfg(test)]
mod verbs;
