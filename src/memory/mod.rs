//! Memory: the plugin's own registered pages, the registration cache for NCCL's buffers, and what staging needs: the GPU's
//! copy engines and pinned shadows.

mod cache;
pub mod gpu;
mod pages;
pub mod path;
pub mod profile;
mod shadow;

pub use cache::{CacheStats, Connected, Memory, Registrar, Registration};
pub use pages::Pages;
pub use shadow::Shadow;
