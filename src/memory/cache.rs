//! The registration cache of a protection domain.
//!
//! A registration costs 50–100 µs and NCCL registers one pool once per connection, so ranges are shared: keyed by pages,
//! kind of memory and access rights, counted, gone with the last use. What is registered is the page-rounded range that the
//! key names, so two buffers in one page can never get each other's bounds. A dma-buf is registered anew each time: its
//! descriptor says nothing about what memory it stands for.

use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;

use crate::verbs::{Access, Mr, Pd, VerbsError};

/// Granule of keys. The smallest page of any supported machine: a larger one is made of whole granules.
const GRANULE: u64 = 4096;

/// Whose memory a pointer means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Memory {
    Host,
    Gpu,
}

/// Bytes of GPU memory that the process has registered: each range once for each NIC, a dma-buf for each connection.
static GPU_BYTES: AtomicU64 = AtomicU64::new(0);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    start: u64,
    len: u64,
    memory: Memory,
    access: Access,
}

impl Key {
    fn covering(address: u64, length: usize, memory: Memory, access: Access) -> Option<Self> {
        let start = address / GRANULE * GRANULE;
        let end = address.checked_add(length as u64)?.checked_next_multiple_of(GRANULE)?;
        Some(Self { start, len: end.checked_sub(start)?.max(GRANULE), memory, access })
    }
}

/// A memory region that counts as long as it is there.
#[derive(Debug)]
struct Region {
    mr: Mr,
    gpu_bytes: u64,
}

impl Region {
    fn new(mr: Mr, memory: Memory, bytes: u64) -> Arc<Self> {
        let gpu_bytes = if memory == Memory::Gpu { bytes } else { 0 };
        GPU_BYTES.fetch_add(gpu_bytes, Ordering::Relaxed);
        Arc::new(Self { mr, gpu_bytes })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        GPU_BYTES.fetch_sub(self.gpu_bytes, Ordering::Relaxed);
    }
}

#[derive(Debug)]
struct Shared {
    region: Arc<Region>,
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
        memory: Memory,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        let access = self.bulk(access);
        let Some(key) = Key::covering(address, length, memory, access) else {
            return Err(VerbsError {
                verb: "ibv_reg_mr",
                device: self.pd.context().name().to_owned(),
                errno: libc::EINVAL,
                detail: format!("{length} bytes at {address:#x} wrap around the address space"),
            });
        };
        let region = match self.map.entry(key) {
            Entry::Occupied(mut shared) => {
                shared.get_mut().users += 1;
                self.hits.fetch_add(1, Ordering::Relaxed);
                Arc::clone(&shared.get().region)
            }
            Entry::Vacant(place) => {
                let begin = std::time::Instant::now();
                let len = usize::try_from(key.len).unwrap_or(usize::MAX);
                // SAFETY: the caller promises the range; its pages are mapped as a whole.
                let mr = unsafe { Mr::register(&self.pd, key.start, len, access) }.map_err(|e| explain(e, memory))?;
                self.spent(begin);
                let region = Region::new(mr, memory, key.len);
                place.insert(Shared { region: Arc::clone(&region), users: 1 });
                region
            }
        };
        Ok(Registration { region, cached: Some((Arc::clone(self), key)) })
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
        // Exactly what was asked for: the descriptor need not cover a byte more.
        let begin = std::time::Instant::now();
        let mr = Mr::register_dmabuf(&self.pd, fd, offset, address, length, self.bulk(access)).map_err(|e| {
            explain_dmabuf(e.with(format_args!("from offset {offset:#x} of the dma-buf on")), offset, address)
        })?;
        self.spent(begin);
        Ok(Registration { region: Region::new(mr, Memory::Gpu, length as u64), cached: None })
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

/// What a refused registration usually means, and what helps.
#[cold]
fn explain(e: VerbsError, memory: Memory) -> VerbsError {
    match (e.errno, memory) {
        (libc::EFAULT, Memory::Host) => e.with("these pages are not mapped in this process; GPU memory is NCCL_PTR_CUDA"),
        (libc::EFAULT | libc::EINVAL, Memory::Gpu) => e.with(
            "nvidia_peermem can't map this address: is the module loaded and registered (ls \
             /sys/kernel/mm/memory_peers)? Memory of cuMemCreate and of expandable segments needs dma-buf, and some GPUs \
             have no GPUDirect; NCCL_NET_RDMA_PEERMEM=off does without",
        ),
        (libc::ENOMEM, Memory::Gpu) => bar1(e),
        _ => e,
    }
}

#[cold]
fn explain_dmabuf(e: VerbsError, offset: u64, address: u64) -> VerbsError {
    match e.errno {
        libc::EINVAL if offset % page_size() != address % page_size() => {
            e.with("offset and address must lie at the same place in a page")
        }
        libc::EINVAL => e.with("the dma-buf is shorter than that, or the device can't reach the GPU"),
        libc::EBADF => e.with("the descriptor is closed or no dma-buf"),
        libc::EOPNOTSUPP => e.with("the device can't take this dma-buf"),
        libc::ENOMEM => bar1(e),
        _ => e,
    }
    .with("NCCL_DMABUF_ENABLE=0 goes by nvidia_peermem where that is open, else through host memory")
}

fn page_size() -> u64 {
    // SAFETY: sysconf has no preconditions.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(GRANULE)
}

fn bar1(e: VerbsError) -> VerbsError {
    let bytes = GPU_BYTES.load(Ordering::Relaxed);
    e.with(format_args!(
        "all registered GPU memory must fit the GPU's BAR1 (nvidia-smi -q -d MEMORY); this process has registered {bytes} \
         bytes, counted once for each NIC and, with dma-buf, each connection"
    ))
}

/// The use of a registration; the last drop deregisters.
#[derive(Debug)]
pub struct Registration {
    region: Arc<Region>,
    cached: Option<(Arc<Registrar>, Key)>,
}

impl Registration {
    pub fn lkey(&self) -> u32 {
        self.region.mr.lkey()
    }

    pub fn rkey(&self) -> u32 {
        self.region.mr.rkey()
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
        let key = |a, l| Key::covering(a, l, Memory::Host, Access::LOCAL_WRITE).map(|k| (k.start, k.len));
        assert_eq!(key(0x10_0000, 4096), Some((0x10_0000, 4096)));
        assert_eq!(key(0x10_0100, 256), Some((0x10_0000, 4096)));
        assert_eq!(key(0x10_0fff, 2), Some((0x10_0000, 8192)));
        assert_eq!(key(0x10_0000, 0), Some((0x10_0000, 4096)));
        assert_eq!(key(u64::MAX - 10, 100), None);
    }

    #[test]
    fn rights_and_kind_of_memory_are_part_of_the_key() {
        let key = |memory, access| Key::covering(0, 1, memory, access);
        let plain = key(Memory::Host, Access::LOCAL_WRITE);
        assert_ne!(plain, key(Memory::Host, Access::LOCAL_WRITE | Access::REMOTE_WRITE));
        assert_ne!(plain, key(Memory::Gpu, Access::LOCAL_WRITE));
    }

    #[test]
    fn what_is_refused_says_what_helps() {
        let refused = |errno| VerbsError { verb: "v", device: String::new(), errno, detail: String::new() };
        let text = |errno, memory| explain(refused(errno), memory).to_string();
        assert!(text(libc::EFAULT, Memory::Gpu).contains("registered (ls /sys/kernel/mm/memory_peers)"));
        assert!(text(libc::EFAULT, Memory::Host).contains("not mapped in this process"));
        assert!(text(libc::ENOMEM, Memory::Gpu).contains("BAR1"));
        assert!(!text(libc::ENOMEM, Memory::Host).contains("BAR1"));
        let dmabuf = |offset| explain_dmabuf(refused(libc::EINVAL), offset, 0x10_0000).to_string();
        assert!(dmabuf(8).contains("same place in a page") && dmabuf(4096).contains("shorter"));
    }
}
