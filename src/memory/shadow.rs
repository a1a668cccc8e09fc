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

/// Those of this process.
#[derive(Debug, Default)]
struct Shadows {
    all: HashMap<Range, Weak<Shadow>>,
    /// Bytes that they pin.
    bytes: u64,
}

static SHADOWS: LazyLock<Mutex<Shadows>> = LazyLock::new(Mutex::default);

/// What lies at one place in a page lies at the same in the shadow's.
const PAGE: u64 = 4096;

impl Shadow {
    /// The shadow of this range of the stager's GPU; `most`: bytes that all of them may have.
    pub fn of(address: u64, length: usize, stager: &Arc<Stager>, most: u64) -> Result<Arc<Self>, String> {
        let mut shadows = SHADOWS.lock().unwrap_or_else(PoisonError::into_inner);
        let range = (address, length);
        if let Some(shadow) = shadows.all.get(&range).and_then(Weak::upgrade) {
            return Ok(shadow);
        }
        if shadows.bytes.saturating_add(length as u64) > most {
            return Err(format!(
                "this process stages as much as NCCL_NET_RDMA_STAGING_TOTAL allows, {most} bytes; {} are in use",
                shadows.bytes
            ));
        }
        let skew = usize::try_from(address % PAGE).unwrap_or(0);
        let pages = Pages::map(length + skew).map_err(|e| format!("{length} bytes of host memory: {e}"))?;
        stager.pin(&pages)?;
        let shadow = Arc::new(Self { range, pages, stager: Arc::clone(stager) });
        shadows.all.insert(range, Arc::downgrade(&shadow));
        shadows.bytes += length as u64;
        Ok(shadow)
    }

    /// Where the range's first byte lies.
    pub fn address(&self) -> u64 {
        self.pages.address() + self.range.0 % PAGE
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        let mut shadows = SHADOWS.lock().unwrap_or_else(PoisonError::into_inner);
        shadows.bytes -= self.range.1 as u64;
        // Another may have been made since the last use of this one.
        if shadows.all.get(&self.range).is_some_and(|shadow| shadow.strong_count() == 0) {
            shadows.all.remove(&self.range);
        }
        drop(shadows);
        self.stager.unpin(&self.pages);
    }
}
