//! Memory: the plugin's own registered pages, and the registration cache for NCCL's buffers.

mod cache;
mod pages;
pub mod path;
pub mod profile;

pub use cache::{CacheStats, Connected, Memory, Registrar, Registration};
pub use pages::Pages;
