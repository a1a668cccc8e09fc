//! Shadows: pinned host memory of the size of a GPU range that may be staged, one for all registrations of the range.
//!
//! NCCL registers its pools once for each connection; a shadow is shared by them, counted, and gone with the last. Why that
//! is right, see `transfer::staging`. To pin takes the driver long, so it is done under a lock of the range alone.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use super::Pages;
use super::gpu::Stager;

/// The use of host memory that stands for GPU memory.
#[derive(Debug)]
pub struct Shadow {
    range: Range,
    /// None only while it is made.
    pinned: Option<Arc<Pinned>>,
}

/// GPU memory, by the stager that pins for it: what one has pinned another can't copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Range {
    stager: *const Stager,
    address: u64,
    length: usize,
}

// SAFETY: the stager is compared, not followed.
unsafe impl Send for Range {}
// SAFETY: as above.
unsafe impl Sync for Range {}

#[derive(Debug)]
struct Pinned {
    /// None only while it is dropped.
    pages: Option<Pages>,
    stager: Arc<Stager>,
}

/// Where the pages of a range are, or are being made.
type Place = Arc<Mutex<Option<Arc<Pinned>>>>;

#[derive(Debug, Default)]
struct Shared {
    place: Place,
    /// Shadows, those that are being made too.
    users: usize,
}

/// Those of this process.
#[derive(Debug, Default)]
struct Shadows {
    all: HashMap<Range, Shared>,
    /// Bytes that they pin.
    bytes: u64,
}

static SHADOWS: LazyLock<Mutex<Shadows>> = LazyLock::new(Mutex::default);

fn shadows() -> MutexGuard<'static, Shadows> {
    SHADOWS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What lies at one place in a page lies at the same in the shadow's.
const PAGE: u64 = 4096;

impl Pinned {
    fn new(range: &Range, stager: &Arc<Stager>) -> Result<Arc<Self>, String> {
        let skew = usize::try_from(range.address % PAGE).unwrap_or(0);
        let pages =
            Pages::map(range.length + skew).map_err(|e| format!("{} bytes of host memory: {e}", range.length))?;
        stager.pin(&pages)?;
        Ok(Arc::new(Self { pages: Some(pages), stager: Arc::clone(stager) }))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(pages) = self.pages.take() {
            self.stager.unpin(pages);
        }
    }
}

impl Shadow {
    /// The shadow of this range of the stager's GPU; `most`: bytes that all of them may have.
    pub fn of(address: u64, length: usize, stager: &Arc<Stager>, most: u64) -> Result<Self, String> {
        let range = Range { stager: Arc::as_ptr(stager), address, length };
        let place = {
            let mut shadows = shadows();
            if !shadows.all.contains_key(&range) {
                if shadows.bytes.saturating_add(length as u64) > most {
                    return Err(format!(
                        "this process stages as much as NCCL_NET_RDMA_STAGING_TOTAL allows, {most} bytes; {} are in use",
                        shadows.bytes
                    ));
                }
                shadows.bytes += length as u64;
            }
            let shared = shadows.all.entry(range).or_default();
            shared.users += 1;
            Arc::clone(&shared.place)
        };
        // From here on whatever happens gives the place back.
        let mut shadow = Self { range, pinned: None };
        let mut pinned = place.lock().unwrap_or_else(PoisonError::into_inner);
        if pinned.is_none() {
            *pinned = Some(Pinned::new(&range, stager)?);
        }
        shadow.pinned.clone_from(&pinned);
        Ok(shadow)
    }

    /// Where the range's first byte lies.
    pub fn address(&self) -> u64 {
        let pages = self.pinned.as_ref().and_then(|pinned| pinned.pages.as_ref());
        pages.map_or(0, Pages::address) + self.range.address % PAGE
    }

    /// Of copies that may still be carried out: it stays for ever, and so does the GPU memory.
    pub fn abandon(self) {
        if let Some(pinned) = &self.pinned {
            pinned.stager.keep(self.range.address, self.range.length);
        }
        std::mem::forget(self);
    }
}

impl Drop for Shadow {
    fn drop(&mut self) {
        let gone = {
            let mut shadows = shadows();
            let last = shadows.all.get_mut(&self.range).is_some_and(|shared| {
                shared.users -= 1;
                shared.users == 0
            });
            if last {
                shadows.bytes -= self.range.length as u64;
            }
            last.then(|| shadows.all.remove(&self.range))
        };
        // Its pages are given up with no lock held.
        drop(gone);
    }
}
