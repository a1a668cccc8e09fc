//! Shadows: pinned host memory of the size of a GPU range that may be staged, one for all registrations of the range.
//!
//! NCCL registers its pools once for each connection; a shadow is shared by them, counted, and gone with the last. Why that
//! is right, see `transfer::staging`.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};

use super::Pages;
use super::gpu::Stager;

/// Host memory that stands for GPU memory.
#[derive(Debug)]
pub struct Shadow {
    range: Range,
    pages: Pages,
    stager: Arc<Stager>,
}

/// Address and length of GPU memory.
type Range = (u64, usize);

static SHADOWS: LazyLock<Mutex<HashMap<Range, Weak<Shadow>>>> = LazyLock::new(Mutex::default);

/// What lies at one place in a page lies at the same in the shadow's.
const PAGE: u64 = 4096;

impl Shadow {
    /// The shadow of this range of the stager's GPU.
    pub fn of(address: u64, length: usize, stager: &Arc<Stager>) -> Result<Arc<Self>, String> {
        let mut all = SHADOWS.lock().unwrap_or_else(PoisonError::into_inner);
        let range = (address, length);
        if let Some(shadow) = all.get(&range).and_then(Weak::upgrade) {
            return Ok(shadow);
        }
        let skew = usize::try_from(address % PAGE).unwrap_or(0);
        let pages = Pages::map(length + skew).map_err(|e| format!("{length} bytes of host memory: {e}"))?;
        stager.pin(&pages)?;
        let shadow = Arc::new(Self { range, pages, stager: Arc::clone(stager) });
        all.insert(range, Arc::downgrade(&shadow));
        Ok(shadow)
    }

    /// Where the range's first byte lies.
    pub fn address(&self) -> u64 {
        self.pages.address() + self.range.0 % PAGE
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        let mut all = SHADOWS.lock().unwrap_or_else(PoisonError::into_inner);
        // Another may have been made since the last use of this one.
        if all.get(&self.range).is_some_and(|shadow| shadow.strong_count() == 0) {
            all.remove(&self.range);
        }
        drop(all);
        self.stager.unpin(&self.pages);
    }
}
