//! The registration cache of a protection domain.
//!
//! A registration costs 50–100 µs and NCCL registers one pool once per connection, so ranges are shared: keyed by pages and
//! access rights, counted, gone with the last use. What is registered is the page-rounded range that the key names, so two
//! buffers in one page can never get each other's bounds. A dma-buf is registered anew each time: its descriptor says
//! nothing about what memory it stands for.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use crate::verbs::{Access, Mr, Pd, VerbsError};

/// Granule of keys. The smallest page of any supported machine: a larger one is made of whole granules.
const GRANULE: u64 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    start: u64,
    len: u64,
    access: Access,
}

impl Key {
    fn covering(address: u64, length: usize, access: Access) -> Option<Self> {
        let start = address / GRANULE * GRANULE;
        let end = address.checked_add(length as u64)?.checked_next_multiple_of(GRANULE)?;
        Some(Self { start, len: end.checked_sub(start)?.max(GRANULE), access })
    }
}

#[derive(Debug)]
struct Shared {
    mr: Arc<Mr>,
    users: usize,
}

/// What the cache did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    pub hits: u64,
    pub misses: u64,
    /// Time spent in registration verbs, ns.
    pub busy_ns: u64,
    /// Ranges registered now.
    pub live: usize,
}

/// Registers memory on one protection domain.
#[derive(Debug)]
pub struct Registrar {
    pd: Arc<Pd>,
    /// Added to the access of bulk data where the library can and the user does not object.
    relaxed: bool,
    map: DashMap<Key, Shared>,
    hits: AtomicU64,
    misses: AtomicU64,
    busy_ns: AtomicU64,
}

impl Registrar {
    pub fn new(pd: &Arc<Pd>, relaxed: bool) -> Arc<Self> {
        Arc::new(Self {
            pd: Arc::clone(pd),
            relaxed,
            // Few shards: this map is off the data path and there is one for each device.
            map: DashMap::with_shard_amount(4),
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            busy_ns: AtomicU64::new(0),
        })
    }

    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    pub fn stats(&self) -> CacheStats {
        CacheStats {
            hits: self.hits.load(Ordering::Relaxed),
            misses: self.misses.load(Ordering::Relaxed),
            busy_ns: self.busy_ns.load(Ordering::Relaxed),
            live: self.map.len(),
        }
    }

    fn bulk(&self, access: Access) -> Access {
        if self.relaxed { access | Access::RELAXED_ORDERING } else { access }
    }

    /// Registers the pages of a range for bulk data, or shares an earlier registration of the same pages and rights.
    ///
    /// # Safety
    /// The range must stay mapped until the registration is dropped.
    pub unsafe fn register(
        self: &Arc<Self>,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        let access = self.bulk(access);
        let Some(key) = Key::covering(address, length, access) else {
            return Err(VerbsError {
                verb: "ibv_reg_mr",
                device: self.pd.context().name().to_owned(),
                errno: libc::EINVAL,
                detail: format!("{length} bytes at {address:#x} wrap around the address space"),
            });
        };
        let mr = match self.map.entry(key) {
            Entry::Occupied(mut shared) => {
                shared.get_mut().users += 1;
                self.hits.fetch_add(1, Ordering::Relaxed);
                Arc::clone(&shared.get().mr)
            }
            Entry::Vacant(place) => {
                let begin = std::time::Instant::now();
                let len = usize::try_from(key.len).unwrap_or(usize::MAX);
                // SAFETY: the caller promises the range; its pages are mapped as a whole.
                let mr = Arc::new(unsafe { Mr::register(&self.pd, key.start, len, access) }?);
                self.spent(begin);
                place.insert(Shared { mr: Arc::clone(&mr), users: 1 });
                mr
            }
        };
        Ok(Registration { mr, cached: Some((Arc::clone(self), key)) })
    }

    /// Registers `length` bytes of a dma-buf for bulk data, from `offset` on, under the addresses from `address` on.
    pub fn register_dmabuf(
        &self,
        fd: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        // Whole pages, as the descriptor covers; the address keeps its place in its page.
        let within = offset % GRANULE;
        let length = (length + usize::try_from(within).unwrap_or(0)).next_multiple_of(4096);
        let begin = std::time::Instant::now();
        let mr = Mr::register_dmabuf(
            &self.pd,
            fd,
            offset - within,
            address.wrapping_sub(within),
            length,
            self.bulk(access),
        )?;
        self.spent(begin);
        Ok(Registration { mr: Arc::new(mr), cached: None })
    }

    fn spent(&self, begin: std::time::Instant) {
        self.misses.fetch_add(1, Ordering::Relaxed);
        self.busy_ns.fetch_add(u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn release(&self, key: Key) {
        if let Entry::Occupied(mut shared) = self.map.entry(key) {
            shared.get_mut().users -= 1;
            if shared.get().users == 0 {
                shared.remove();
            }
        }
    }
}

/// The use of a registration; the last drop deregisters.
#[derive(Debug)]
pub struct Registration {
    mr: Arc<Mr>,
    cached: Option<(Arc<Registrar>, Key)>,
}

impl Registration {
    pub fn lkey(&self) -> u32 {
        self.mr.lkey()
    }

    pub fn rkey(&self) -> u32 {
        self.mr.rkey()
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        if let Some((registrar, key)) = self.cached.take() {
            registrar.release(key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_covers_the_pages_of_its_range() {
        let key = |a, l| Key::covering(a, l, Access::LOCAL_WRITE).map(|k| (k.start, k.len));
        assert_eq!(key(0x10_0000, 4096), Some((0x10_0000, 4096)));
        assert_eq!(key(0x10_0100, 256), Some((0x10_0000, 4096)));
        assert_eq!(key(0x10_0fff, 2), Some((0x10_0000, 8192)));
        assert_eq!(key(0x10_0000, 0), Some((0x10_0000, 4096)));
        assert_eq!(key(u64::MAX - 10, 100), None);
    }

    #[test]
    fn rights_are_part_of_the_key() {
        assert_ne!(
            Key::covering(0, 1, Access::LOCAL_WRITE),
            Key::covering(0, 1, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        );
    }
}
