//! Memory regions and the keys that name them. One table a process, looked up by index, so that a check costs a few loads.
use crate::abi::access;
use crate::gpu::Mem;
use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};

/// A key is 16 bits of table index under 16 bits of tag that change with every use of the entry.
const INDEX_BITS: u32 = 16;

/// Where a checked range is in this process.
#[derive(Clone, Copy, Debug)]
pub struct At {
    pub ptr: *mut u8,
    pub(crate) mem: Mem,
}

/// The table. Entries are read under the engine's lock (or by the null engine's only thread), and changed under it, so
/// that nothing lands in a region whose deregistration has returned.
#[derive(Debug)]
pub struct Regions {
    entries: Box<[Entry]>,
    free: Mutex<VecDeque<u32>>,
}

#[derive(Debug, Default)]
struct Entry {
    /// 0: not in use.
    key: AtomicU32,
    pd: AtomicU32,
    access: AtomicU32,
    /// The next tag.
    tag: AtomicU32,
    /// What the peer calls the first byte; `delta` leads from there to the address in this process.
    iova: AtomicU64,
    len: AtomicU64,
    delta: AtomicU64,
    /// [`Mem`].
    mem: AtomicU64,
}

impl Regions {
    pub fn new(entries: u32) -> Self {
        let entries = entries.min(1 << INDEX_BITS);
        let seed = RandomState::new();
        Self {
            entries: (0..entries)
                .map(|i| Entry { tag: AtomicU32::new(low16(seed.hash_one(i))), ..Entry::default() })
                .collect(),
            free: Mutex::new((0..entries).collect()),
        }
    }

    /// Enters a region and returns its key, or None when the table is full.
    pub fn insert(&self, pd: u32, addr: u64, len: u64, iova: u64, access: u32) -> Option<u32> {
        self.insert_in(Mem::Host, pd, addr, len, iova, access)
    }

    pub(crate) fn insert_in(&self, mem: Mem, pd: u32, addr: u64, len: u64, iova: u64, access: u32) -> Option<u32> {
        let index = self.free.lock().ok()?.pop_front()?;
        let entry = self.entries.get(usize::try_from(index).ok()?)?;
        let tag = match (entry.tag.load(Relaxed) + 1) & 0xffff {
            0 => 1,
            tag => tag,
        };
        entry.tag.store(tag, Relaxed);
        let key = tag << INDEX_BITS | index;
        entry.pd.store(pd, Relaxed);
        entry.access.store(access, Relaxed);
        entry.iova.store(iova, Relaxed);
        entry.len.store(len, Relaxed);
        entry.delta.store(addr.wrapping_sub(iova), Relaxed);
        entry.mem.store(mem.pack(), Relaxed);
        entry.key.store(key, Relaxed);
        Some(key)
    }

    /// What kind of memory a key in use stands for.
    pub(crate) fn mem(&self, key: u32) -> Mem {
        let entry = self.entries.get((key & ((1 << INDEX_BITS) - 1)) as usize);
        entry
            .filter(|entry| entry.key.load(Relaxed) == key)
            .map_or(Mem::Host, |entry| Mem::unpack(entry.mem.load(Relaxed)))
    }

    pub fn remove(&self, key: u32) -> bool {
        let index = key & ((1 << INDEX_BITS) - 1);
        let Some(entry) = self.entries.get(index as usize) else { return false };
        if key == 0 || entry.key.load(Relaxed) != key {
            return false;
        }
        entry.key.store(0, Relaxed);
        if let Ok(mut free) = self.free.lock() {
            // To the far end, so that a stale key meets an empty entry for as long as possible.
            free.push_back(index);
        }
        true
    }

    /// The address in this process of `len` bytes at `iova`, if `key` allows `want` there to protection domain `pd`.
    #[inline]
    pub fn check(&self, key: u32, pd: u32, iova: u64, len: u64, want: u32) -> Option<At> {
        let entry = self.entries.get((key & ((1 << INDEX_BITS) - 1)) as usize)?;
        let start = iova.wrapping_sub(entry.iova.load(Relaxed));
        let size = entry.len.load(Relaxed);
        if key == 0
            || entry.key.load(Relaxed) != key
            || entry.pd.load(Relaxed) != pd
            || want & !entry.access.load(Relaxed) != 0
            || len > size
            || start > size - len
        {
            return None;
        }
        let addr = usize::try_from(iova.wrapping_add(entry.delta.load(Relaxed))).ok()?;
        Some(At { ptr: std::ptr::with_exposed_provenance_mut(addr), mem: Mem::unpack(entry.mem.load(Relaxed)) })
    }

    pub fn in_use(&self) -> usize {
        self.free.lock().map_or(0, |free| self.entries.len() - free.len())
    }
}

fn low16(value: u64) -> u32 {
    u32::from(u16::from_ne_bytes([value.to_ne_bytes()[0], value.to_ne_bytes()[1]]))
}

/// Remote writing needs local writing (man ibv_reg_mr), and unknown bits that are not hints are refused.
pub fn access_is_valid(flags: u32) -> bool {
    let remote = flags & (access::REMOTE_WRITE | access::REMOTE_ATOMIC) != 0;
    flags & !access::KNOWN == 0 && (!remote || flags & access::LOCAL_WRITE != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_opens_its_own_range_and_no_more() {
        let regions = Regions::new(8);
        let key = regions.insert(3, 0x1000, 0x100, 0x1000, access::LOCAL_WRITE | access::REMOTE_WRITE).unwrap();
        assert_ne!(key, 0);
        let at = |k, pd, a, l, w| regions.check(k, pd, a, l, w).map(|at| at.ptr.addr());
        assert_eq!(at(key, 3, 0x1010, 0x10, access::REMOTE_WRITE), Some(0x1010));
        assert_eq!(at(key, 3, 0x1100, 0, 0), Some(0x1100));
        assert_eq!(at(key, 3, 0x10ff, 2, 0), None, "past the end");
        assert_eq!(at(key, 3, 0xfff, 1, 0), None, "before the start");
        assert_eq!(at(key, 3, 0x1000, u64::MAX, 0), None);
        assert_eq!(at(key, 4, 0x1010, 1, 0), None, "another protection domain");
        assert_eq!(at(key, 3, 0x1010, 1, access::REMOTE_READ), None);
        assert!(regions.remove(key) && !regions.remove(key));
        assert_eq!(at(key, 3, 0x1010, 1, 0), None, "stale");
        for _ in 0..100 {
            let next = regions.insert(3, 0x1000, 0x100, 0, 0).unwrap();
            assert_ne!(next, key);
            assert_eq!(at(next, 3, 4, 4, 0), Some(0x1004), "iova 0");
            assert!(regions.remove(next));
        }
    }

    #[test]
    fn a_full_table_says_so() {
        let regions = Regions::new(2);
        assert!(regions.insert(1, 0, 1, 0, 0).is_some() && regions.insert(1, 0, 1, 0, 0).is_some());
        assert_eq!(regions.insert(1, 0, 1, 0, 0), None);
        assert_eq!(regions.in_use(), 2);
    }

    #[test]
    fn access_flags() {
        assert!(access_is_valid(0) && access_is_valid(access::LOCAL_WRITE | access::REMOTE_WRITE | 1 << 20));
        assert!(!access_is_valid(access::REMOTE_WRITE) && !access_is_valid(1 << 12));
    }
}
