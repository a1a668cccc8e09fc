//! The registration cache of a protection domain.
//!
//! A registration costs 50–100 µs and NCCL registers one pool once per connection, so ranges are shared: keyed by pages,
//! kind of memory and access rights, counted, gone with the last use. What is registered is the page-rounded range that the
//! key names, so two buffers in one page can never get each other's bounds. So the cache holds what NCCL holds, and no more.
//!
//! A dma-buf is keyed by exactly what was asked for (offset, length, address) and by what it is: the inode behind its
//! descriptor, of which each dma-buf has its own in every kernel that can register one, and which stays taken while the
//! region holds the dma-buf. One descriptor, or copies of it, that are registered again are shared so. NCCL exports its
//! buffer anew for each connection, and each export is a dma-buf of its own: these are registered each. Sharing them would
//! take another identity, and none is as sure: an address alone may have come to mean other memory if its owner freed it
//! too early, and the GPU driver's id of a buffer (CU_POINTER_ATTRIBUTE_BUFFER_ID) is stated for allocations, not for
//! memory that was mapped piece by piece (cuMemMap), which is what NCCL itself uses.
//!
//! The verbs run under a lock of their key alone: registering one range never holds up another.

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

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

/// Bytes of GPU memory that the process has registered: each range once for each NIC, a dma-buf once for each export.
static GPU_BYTES: AtomicU64 = AtomicU64::new(0);

/// What a range of a dma-buf is part of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DmaBuf {
    dev: u64,
    inode: u64,
    offset: u64,
}

impl DmaBuf {
    fn of(fd: BorrowedFd<'_>, offset: u64) -> std::io::Result<Self> {
        let mut stat = std::mem::MaybeUninit::<libc::stat>::zeroed();
        // SAFETY: an open descriptor and room for the answer.
        let rc = unsafe { libc::fstat(fd.as_raw_fd(), stat.as_mut_ptr()) };
        if rc != 0 {
            return Err(std::io::Error::last_os_error());
        }
        // SAFETY: all-zero is a valid value and the call filled it.
        let stat = unsafe { stat.assume_init() };
        Ok(Self { dev: stat.st_dev, inode: stat.st_ino, offset })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    start: u64,
    len: u64,
    memory: Memory,
    dmabuf: Option<DmaBuf>,
    access: Access,
}

impl Key {
    fn covering(address: u64, length: usize, memory: Memory, access: Access) -> Option<Self> {
        let start = address / GRANULE * GRANULE;
        let end = address.checked_add(length as u64)?.checked_next_multiple_of(GRANULE)?;
        Some(Self { start, len: end.checked_sub(start)?.max(GRANULE), memory, dmabuf: None, access })
    }

    fn length(&self) -> usize {
        usize::try_from(self.len).unwrap_or(usize::MAX)
    }
}

/// What the cache did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CacheStats {
    /// Registrations that shared an earlier one.
    pub hits: u64,
    /// Those that took a verb.
    pub misses: u64,
    /// Those that the device refused.
    pub refused: u64,
    /// Time spent in verbs, ns: registering and giving back.
    pub busy_ns: u64,
    /// Memory regions now, and most at once.
    pub live: usize,
    pub peak: usize,
    /// Their bytes now.
    pub bytes: u64,
}

impl std::fmt::Display for CacheStats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { hits, misses, refused, busy_ns, live, peak, bytes } = *self;
        let busy = std::time::Duration::from_nanos(busy_ns);
        write!(f, "{misses} memory regions registered, {hits} times shared, {refused} refused, {busy:.1?} in verbs; ")?;
        write!(f, "at most {peak} at once, {live} of {bytes} bytes now")
    }
}

#[derive(Debug, Default)]
struct Counters {
    hits: AtomicU64,
    misses: AtomicU64,
    refused: AtomicU64,
    busy_ns: AtomicU64,
    live: AtomicUsize,
    peak: AtomicUsize,
    bytes: AtomicU64,
}

impl Counters {
    fn spent(&self, begin: Instant) {
        let ns = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.busy_ns.fetch_add(ns, Ordering::Relaxed);
    }
}

/// A memory region that counts as long as it is there.
#[derive(Debug)]
struct Region {
    /// None only while it is dropped.
    mr: Option<Mr>,
    keys: (u32, u32),
    memory: Memory,
    bytes: u64,
    counters: Arc<Counters>,
}

impl Region {
    fn new(mr: Mr, key: &Key, counters: &Arc<Counters>) -> Arc<Self> {
        if key.memory == Memory::Gpu {
            GPU_BYTES.fetch_add(key.len, Ordering::Relaxed);
        }
        counters.misses.fetch_add(1, Ordering::Relaxed);
        counters.bytes.fetch_add(key.len, Ordering::Relaxed);
        let live = counters.live.fetch_add(1, Ordering::Relaxed) + 1;
        counters.peak.fetch_max(live, Ordering::Relaxed);
        let keys = (mr.lkey(), mr.rkey());
        Arc::new(Self { mr: Some(mr), keys, memory: key.memory, bytes: key.len, counters: Arc::clone(counters) })
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let begin = Instant::now();
        drop(self.mr.take());
        self.counters.spent(begin);
        if self.memory == Memory::Gpu {
            GPU_BYTES.fetch_sub(self.bytes, Ordering::Relaxed);
        }
        self.counters.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        self.counters.live.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Where the region of a key is, or is being made.
type Place = Arc<Mutex<Option<Arc<Region>>>>;

#[derive(Debug, Default)]
struct Shared {
    place: Place,
    /// Registrations, those under way too.
    users: usize,
}

/// Registers memory on one protection domain.
#[derive(Debug)]
pub struct Registrar {
    pd: Arc<Pd>,
    /// Added to the access of bulk data where the library can and the user does not object.
    relaxed: bool,
    map: DashMap<Key, Shared>,
    counters: Arc<Counters>,
    connections: AtomicUsize,
}

/// A connection whose memory is registered here; with the last one what was done is logged.
#[derive(Debug)]
pub struct Connected(Arc<Registrar>);

impl Drop for Connected {
    fn drop(&mut self) {
        if self.0.connections.fetch_sub(1, Ordering::AcqRel) == 1 {
            let device = self.0.pd.context().name();
            tracing::info!(target: "init", "{device}: last connection closed: {}", self.0.stats());
        }
    }
}

impl Registrar {
    pub fn new(pd: &Arc<Pd>, relaxed: bool) -> Arc<Self> {
        Arc::new(Self {
            pd: Arc::clone(pd),
            relaxed,
            // Few shards: this map is off the data path and there is one for each device.
            map: DashMap::with_shard_amount(4),
            counters: Arc::default(),
            connections: AtomicUsize::new(0),
        })
    }

    pub fn pd(&self) -> &Arc<Pd> {
        &self.pd
    }

    /// Counts a connection, for as long as what it returns is kept.
    pub fn connected(self: &Arc<Self>) -> Connected {
        self.connections.fetch_add(1, Ordering::AcqRel);
        Connected(Arc::clone(self))
    }

    pub fn stats(&self) -> CacheStats {
        let c = &self.counters;
        CacheStats {
            hits: c.hits.load(Ordering::Relaxed),
            misses: c.misses.load(Ordering::Relaxed),
            refused: c.refused.load(Ordering::Relaxed),
            busy_ns: c.busy_ns.load(Ordering::Relaxed),
            live: c.live.load(Ordering::Relaxed),
            peak: c.peak.load(Ordering::Relaxed),
            bytes: c.bytes.load(Ordering::Relaxed),
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
        let Some(key) = Key::covering(address, length, memory, self.bulk(access)) else {
            let wraps = format!("{length} bytes at {address:#x} wrap around the address space");
            return Err(self.error("ibv_reg_mr", libc::EINVAL).with(wraps));
        };
        self.share(key, || {
            // SAFETY: the caller promises the range; its pages are mapped as a whole.
            unsafe { Mr::register(&self.pd, key.start, key.length(), key.access) }.map_err(|e| self.explain(e, memory))
        })
    }

    /// Registers `length` bytes of a dma-buf for bulk data, from `offset` on, under the addresses from `address` on; or
    /// shares an earlier registration of just these.
    pub fn register_dmabuf(
        self: &Arc<Self>,
        fd: BorrowedFd<'_>,
        offset: u64,
        address: u64,
        length: usize,
        access: Access,
    ) -> Result<Registration, VerbsError> {
        let dmabuf = DmaBuf::of(fd, offset)
            .map_err(|e| explain_dmabuf(self.error("fstat", e.raw_os_error().unwrap_or(0)), offset, address))?;
        // Exactly what was asked for: the descriptor need not cover a byte more.
        let key = Key {
            start: address,
            len: length as u64,
            memory: Memory::Gpu,
            dmabuf: Some(dmabuf),
            access: self.bulk(access),
        };
        self.share(key, || {
            Mr::register_dmabuf(&self.pd, fd, offset, address, length, key.access).map_err(|e| {
                let e = e.with(format_args!("from offset {offset:#x} of the dma-buf on"));
                let e = if e.errno == libc::ENOMEM { self.explain_enomem(e, Memory::Gpu) } else { e };
                explain_dmabuf(e, offset, address)
            })
        })
    }

    fn error(&self, verb: &'static str, errno: i32) -> VerbsError {
        VerbsError::new(verb, self.pd.context().name(), errno)
    }

    fn share(
        self: &Arc<Self>,
        key: Key,
        make: impl FnOnce() -> Result<Mr, VerbsError>,
    ) -> Result<Registration, VerbsError> {
        let place = {
            let mut shared = self.map.entry(key).or_default();
            shared.users += 1;
            Arc::clone(&shared.place)
        };
        // From here on whatever happens gives the place back.
        let mut registration = Registration { region: None, registrar: Arc::clone(self), key };
        let mut region = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = &*region {
            self.counters.hits.fetch_add(1, Ordering::Relaxed);
            registration.region = Some(Arc::clone(region));
            return Ok(registration);
        }
        let begin = Instant::now();
        let made = make();
        self.counters.spent(begin);
        let mr = made.inspect_err(|_| {
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
        })?;
        let new = Region::new(mr, &key, &self.counters);
        *region = Some(Arc::clone(&new));
        registration.region = Some(new);
        Ok(registration)
    }

    fn release(&self, key: Key) {
        let gone = match self.map.entry(key) {
            Entry::Occupied(mut shared) => {
                shared.get_mut().users -= 1;
                (shared.get().users == 0).then(|| shared.remove())
            }
            Entry::Vacant(_) => None,
        };
        // Its region is given back with no lock of the map held.
        drop(gone);
    }

    /// What a refused registration usually means, and what helps.
    #[cold]
    fn explain(&self, e: VerbsError, memory: Memory) -> VerbsError {
        match e.errno {
            libc::ENOMEM => self.explain_enomem(e, memory),
            errno => match hint(errno, memory) {
                Some(text) => e.with(text),
                None => e,
            },
        }
    }

    /// The limits that may have been met, each with how much of it is in use. That of locked memory is in every such error.
    #[cold]
    fn explain_enomem(&self, e: VerbsError, memory: Memory) -> VerbsError {
        let stats = self.stats();
        let most = self.pd.context().query().map_or_else(|_| "unknown".to_owned(), |attr| attr.max_mr.to_string());
        let e = e.with(format_args!(
            "this process has {} memory regions of {} bytes for NCCL on the device, which takes {most} (max_mr) of all \
             processes",
            stats.live, stats.bytes
        ));
        if memory == Memory::Gpu { bar1(e) } else { e }
    }
}

fn hint(errno: i32, memory: Memory) -> Option<&'static str> {
    match (errno, memory) {
        (libc::EFAULT, Memory::Host) => Some("these pages are not mapped in this process; GPU memory is NCCL_PTR_CUDA"),
        (libc::EFAULT | libc::EINVAL, Memory::Gpu) => Some(
            "nvidia_peermem can't map this address: is the module loaded and registered (ls \
             /sys/kernel/mm/memory_peers)? Memory of cuMemCreate and of expandable segments needs dma-buf, and some GPUs \
             have no GPUDirect; NCCL_NET_RDMA_PEERMEM=off does without",
        ),
        _ => None,
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
        "all registered GPU memory must fit the GPU's BAR1 (its size: nccl-rdma devices); this process has registered \
         {bytes} bytes, counted once for each NIC and, with dma-buf, each connection"
    ))
}

/// The use of a registration; the last drop deregisters.
#[derive(Debug)]
pub struct Registration {
    /// None only while it is made.
    region: Option<Arc<Region>>,
    registrar: Arc<Registrar>,
    key: Key,
}

impl Registration {
    pub fn lkey(&self) -> u32 {
        self.region.as_ref().map_or(0, |region| region.keys.0)
    }

    pub fn rkey(&self) -> u32 {
        self.region.as_ref().map_or(0, |region| region.keys.1)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        // First out of the map, then given back: who comes in between registers anew.
        self.registrar.release(self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;
    use crate::memory::Pages;
    use crate::net::tests::library;
    use crate::verbs::{Context, Library};

    const RIGHTS: Access = Access::LOCAL_WRITE;

    /// On a device of soft-hca.
    fn registrar() -> Arc<Registrar> {
        let library = Library::load(Some(library().as_ref())).expect("the adapter");
        let list = library.devices().expect("devices");
        let pd = Pd::alloc(&Context::open(&list, 0).expect("a device")).expect("a domain");
        Registrar::new(&pd, false)
    }

    fn register(registrar: &Arc<Registrar>, address: u64, length: usize) -> Registration {
        // SAFETY: the callers' pages outlive the registration, or nothing is ever transferred there.
        unsafe { registrar.register(address, length, Memory::Host, RIGHTS) }.expect("registered")
    }

    fn counts(registrar: &Registrar) -> (u64, u64, u64, usize, usize) {
        let s = registrar.stats();
        (s.hits, s.misses, s.refused, s.live, registrar.map.len())
    }

    #[test]
    fn what_was_done_is_counted() {
        let (registrar, pages) = (registrar(), Pages::map(3 * 4096).expect("memory"));
        let first = register(&registrar, pages.address(), 100);
        let same = register(&registrar, pages.address() + 200, 100);
        let other = register(&registrar, pages.address(), 2 * 4096);
        assert_eq!((first.lkey(), first.rkey()), (same.lkey(), same.rkey()));
        assert_ne!(first.lkey(), other.lkey());
        assert_eq!(counts(&registrar), (1, 2, 0, 2, 2));
        assert_eq!((registrar.stats().bytes, registrar.stats().peak), (3 * 4096, 2));
        drop(first);
        assert_eq!(counts(&registrar), (1, 2, 0, 2, 2), "it is still in use");
        drop((same, other));
        assert_eq!(counts(&registrar), (1, 2, 0, 0, 0));
        let stats = registrar.stats();
        assert_eq!((stats.bytes, stats.peak), (0, 2));
        assert!(stats.busy_ns > 0);
        let text = stats.to_string();
        assert!(text.starts_with("2 memory regions registered, 1 times shared, 0 refused, "), "{text}");
        assert!(text.ends_with("at most 2 at once, 0 of 0 bytes now"), "{text}");
    }

    #[test]
    fn many_registrations_leave_nothing() {
        let (registrar, pages) = (registrar(), Pages::map(64 * 4096).expect("memory"));
        for i in 0..10_000 {
            let held = register(&registrar, pages.address() + i % 64 * 4096, 4096);
            drop((register(&registrar, pages.address() + i % 64 * 4096, 10), held));
        }
        assert_eq!(counts(&registrar), (10_000, 10_000, 0, 0, 0));
        assert_eq!(registrar.stats().peak, 1);
    }

    #[test]
    fn a_slow_registration_holds_up_no_other() {
        let (registrar, pages) = (registrar(), Pages::map(128 * 4096).expect("memory"));
        let address = pages.address();
        let key = Key::covering(address, 4096, Memory::Host, RIGHTS).expect("a key");
        let (entered, is_in) = mpsc::channel();
        let (go, gone_on) = mpsc::channel::<()>();
        let slow = std::thread::spawn({
            let registrar = Arc::clone(&registrar);
            move || {
                let make = || {
                    entered.send(()).expect("the test waits");
                    gone_on.recv().expect("the test says when");
                    // SAFETY: the pages outlive the thread.
                    unsafe { Mr::register(&registrar.pd, key.start, key.length(), key.access) }
                };
                registrar.share(key, make).expect("registered")
            }
        });
        is_in.recv().expect("the thread");
        let (done, others) = mpsc::channel();
        let quick = std::thread::spawn({
            let registrar = Arc::clone(&registrar);
            move || {
                // Enough that each part of the map gets some.
                let all: Vec<_> = (1..128).map(|i| register(&registrar, address + i * 4096, 4096)).collect();
                drop(all);
                done.send(()).expect("the test waits");
                // The one under way is waited for, and shared.
                register(&registrar, address, 4096)
            }
        });
        let answer = others.recv_timeout(Duration::from_secs(10));
        go.send(()).expect("the thread");
        answer.expect("registrations of other ranges went on");
        let (slow, quick) = (slow.join().expect("no panic"), quick.join().expect("no panic"));
        assert_eq!(slow.lkey(), quick.lkey());
        drop((slow, quick));
        assert_eq!(counts(&registrar), (1, 128, 0, 0, 0));
    }

    #[test]
    fn a_refused_registration_leaves_no_entry_and_is_tried_again() {
        let (registrar, pages) = (registrar(), Pages::map(4096).expect("memory"));
        let key = Key::covering(pages.address(), 4096, Memory::Host, RIGHTS).expect("a key");
        let refused = registrar.share(key, || Err(registrar.error("v", libc::EIO)));
        assert_eq!(refused.expect_err("refused").errno, libc::EIO);
        assert_eq!(counts(&registrar), (0, 0, 1, 0, 0));
        drop(register(&registrar, pages.address(), 4096));
        assert_eq!(counts(&registrar), (0, 1, 1, 0, 0));
    }

    /// N42, N44: a limit that was met is named with what is in use of it.
    #[test]
    fn a_want_of_memory_names_the_limits() {
        let (registrar, pages) = (registrar(), Pages::map(4096).expect("memory"));
        let held = register(&registrar, pages.address(), 4096);
        let text = |memory| registrar.explain(registrar.error("ibv_reg_mr", libc::ENOMEM), memory).to_string();
        let host = text(Memory::Host);
        assert!(host.contains("1 memory regions of 4096 bytes") && host.contains("(max_mr)"), "{host}");
        assert!(host.contains("memlock limit soft") && !host.contains("BAR1"), "{host}");
        assert!(text(Memory::Gpu).contains("must fit the GPU's BAR1"));
        drop(held);
    }

    #[test]
    fn a_dma_buf_is_known_by_its_inode() {
        use std::os::fd::AsFd as _;
        let dir = tempfile::tempdir().expect("a directory");
        let file = |name: &str| std::fs::File::create(dir.path().join(name)).expect("a file");
        let (one, other) = (file("one"), file("other"));
        let copy = one.try_clone().expect("a copy");
        let of = |file: &std::fs::File, offset| DmaBuf::of(file.as_fd(), offset).expect("an open descriptor");
        assert_eq!(of(&one, 0), of(&copy, 0));
        assert_ne!(of(&one, 0), of(&other, 0));
        assert_ne!(of(&one, 0), of(&one, 4096));
    }

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
        let text = |errno, memory| hint(errno, memory).expect("a hint");
        assert!(text(libc::EFAULT, Memory::Gpu).contains("registered (ls /sys/kernel/mm/memory_peers)"));
        assert!(text(libc::EFAULT, Memory::Host).contains("not mapped in this process"));
        assert_eq!(hint(libc::EPERM, Memory::Host), None);
        assert!(bar1(refused(libc::ENOMEM)).to_string().contains("BAR1"));
        let dmabuf = |offset| explain_dmabuf(refused(libc::EINVAL), offset, 0x10_0000).to_string();
        assert!(dmabuf(8).contains("same place in a page") && dmabuf(4096).contains("shorter"));
    }
}
