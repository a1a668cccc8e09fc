//! Where the processes of one machine meet: a directory with a file per process (its *slot*, which is the upper part of its
//! QP numbers) and a file per ordered pair of them that talk (a ring). A slot is alive while its owner holds a lock on it;
//! the kernel drops that lock when the process ends, however it ends.
use crate::qp::Address;
use crate::shm::{DATA, Mapping, Ring};
use crate::wire::SEGMENT;
use std::fs::{self, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError};

pub(crate) const SLOTS: u32 = 1 << 10;
const MAGIC: u64 = u64::from_le_bytes(*b"softhca2");

// Layout of a slot file; `shm` has the sleep word at 20.
const GENERATION: usize = 8;
const PID: usize = 16;
const KNOCKS: usize = 24;
const ADDRESSES: usize = 28;
const DOORS: usize = 64;
const TABLE: usize = 256;
const TABLE_LEN: usize = 240;
const SLOT_BYTES: usize = 4096;

/// Of a ring file: the generations of writer and reader.
const FROM_GENERATION: usize = 8;
const TO_GENERATION: usize = 16;

/// The descriptor that holds this process's lock, for the fork handler; -1 if none.
static HELD: AtomicI32 = AtomicI32::new(-1);

/// A child of fork shares the lock's open file: it must let go, or the parent would look alive after its death.
pub(crate) fn let_go_in_child() {
    let fd: RawFd = HELD.swap(-1, Ordering::Relaxed);
    if fd >= 0 {
        // SAFETY: async-signal-safe; the child never uses it otherwise.
        unsafe { libc::close(fd) };
    }
}

pub(crate) struct Registry {
    dir: PathBuf,
    slot: u32,
    generation: u64,
    memory: Arc<Mapping>,
    /// Held, not used.
    _lock: File,
    ring_bytes: usize,
    knocks_seen: u32,
    pid: u32,
}

/// Another process's slot.
#[derive(Debug)]
pub(crate) struct Neighbour {
    file: File,
    pub(crate) memory: Arc<Mapping>,
    generation: u64,
}

impl Neighbour {
    pub(crate) fn pid(&self) -> u32 {
        self.memory.word32(PID).load(Ordering::Relaxed)
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.memory.word64(GENERATION).load(Ordering::Acquire) == self.generation && is_locked(&self.file)
    }
}

pub(crate) fn default_dir() -> PathBuf {
    // SAFETY: never fails.
    let uid = unsafe { libc::getuid() };
    PathBuf::from(format!("/dev/shm/soft-hca-{uid}"))
}

impl Registry {
    /// Takes a free slot and announces `addresses` on it.
    pub(crate) fn join(dir: &Path, addresses: &[[u8; 16]], ring_bytes: usize) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(dir)?;
        // SAFETY: never fails.
        if fs::metadata(dir)?.uid() != unsafe { libc::geteuid() } {
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, "it belongs to another user"));
        }
        sweep(dir);
        for slot in 1..SLOTS {
            if let Some(lock) = claim(&slot_path(dir, slot))? {
                forget_links(dir, slot);
                return Self::announce(dir, slot, lock, addresses, ring_bytes);
            }
        }
        Err(io::Error::new(io::ErrorKind::AddrInUse, "all 1023 slots are taken"))
    }

    fn announce(dir: &Path, slot: u32, lock: File, addresses: &[[u8; 16]], ring_bytes: usize) -> io::Result<Self> {
        lock.set_len(0)?;
        allocate(&lock, SLOT_BYTES)?;
        let memory = Arc::new(Mapping::of_file(&lock, SLOT_BYTES)?);
        let generation = RandomState::new().hash_one(slot) | 1;
        let addresses = &addresses[..addresses.len().min(TABLE_LEN)];
        for (i, address) in addresses.iter().enumerate() {
            let [low, high] = halves(address);
            memory.word64(TABLE + 16 * i).store(low, Ordering::Relaxed);
            memory.word64(TABLE + 16 * i + 8).store(high, Ordering::Relaxed);
        }
        memory.word32(PID).store(std::process::id(), Ordering::Relaxed);
        memory.word32(ADDRESSES).store(u32::try_from(addresses.len()).unwrap_or(0), Ordering::Relaxed);
        memory.word64(GENERATION).store(generation, Ordering::Relaxed);
        memory.word64(0).store(MAGIC, Ordering::Release);
        HELD.store(lock.as_raw_fd(), Ordering::Relaxed);
        static AT_EXIT: Once = Once::new();
        AT_EXIT.call_once(|| {
            // SAFETY: the handler stays: this code is not unloaded.
            unsafe { libc::atexit(leave_at_exit) };
        });
        PRESENT.lock().unwrap_or_else(PoisonError::into_inner).push((dir.to_owned(), slot));
        let (dir, pid) = (dir.to_owned(), std::process::id());
        Ok(Self { dir, slot, generation, memory, _lock: lock, ring_bytes, knocks_seen: 0, pid })
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn memory(&self) -> Arc<Mapping> {
        Arc::clone(&self.memory)
    }

    /// The process in `slot`, if one lives there and has the address.
    pub(crate) fn neighbour(&self, slot: u32, address: Option<&Address>) -> Option<Neighbour> {
        if slot == self.slot {
            return None;
        }
        let file = OpenOptions::new().read(true).write(true).open(slot_path(&self.dir, slot)).ok()?;
        if file.metadata().ok()?.len() < SLOT_BYTES as u64 || !is_locked(&file) {
            return None;
        }
        let memory = Arc::new(Mapping::of_file(&file, SLOT_BYTES).ok()?);
        if memory.word64(0).load(Ordering::Acquire) != MAGIC {
            return None;
        }
        let generation = memory.word64(GENERATION).load(Ordering::Relaxed);
        let count = (memory.word32(ADDRESSES).load(Ordering::Relaxed) as usize).min(TABLE_LEN);
        let has = |wanted: [u64; 2]| {
            (0..count).map(|i| TABLE + 16 * i).any(|at| {
                [memory.word64(at).load(Ordering::Relaxed), memory.word64(at + 8).load(Ordering::Relaxed)] == wanted
            })
        };
        if address.is_some_and(|address| !has(halves(&key(address)))) {
            return None;
        }
        Some(Neighbour { file, memory, generation })
    }

    /// Makes the ring towards a neighbour and tells it.
    pub(crate) fn open_ring(&self, to: u32, neighbour: &Neighbour) -> io::Result<Ring> {
        let path = link_path(&self.dir, self.slot, to);
        let _ = fs::remove_file(&path);
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        let bytes = self.ring_bytes;
        allocate(&file, DATA + bytes).inspect_err(|_| drop(fs::remove_file(&path)))?;
        let memory = Arc::new(Mapping::of_file(&file, DATA + bytes)?);
        memory.word64(FROM_GENERATION).store(self.generation, Ordering::Relaxed);
        memory.word64(TO_GENERATION).store(neighbour.generation, Ordering::Relaxed);
        memory.word64(0).store(MAGIC, Ordering::Release);
        let door = &neighbour.memory;
        door.word64(DOORS + 8 * (self.slot as usize >> 6)).fetch_or(1 << (self.slot & 63), Ordering::SeqCst);
        door.word32(KNOCKS).fetch_add(1, Ordering::SeqCst);
        door.wake();
        Ring::new(memory, bytes).ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))
    }

    pub(crate) fn has_knocks(&self) -> bool {
        self.memory.word32(KNOCKS).load(Ordering::SeqCst) != self.knocks_seen
    }

    /// Slots that opened a ring towards this one since the last call.
    pub(crate) fn knocks(&mut self) -> Vec<u32> {
        let knocks = self.memory.word32(KNOCKS).load(Ordering::SeqCst);
        if knocks == self.knocks_seen {
            return Vec::new();
        }
        self.knocks_seen = knocks;
        (0..SLOTS)
            .filter(|slot| {
                let word = self.memory.word64(DOORS + 8 * (*slot as usize >> 6));
                word.fetch_and(!(1 << (slot & 63)), Ordering::SeqCst) >> (slot & 63) & 1 == 1
            })
            .collect()
    }

    /// The ring that a slot opened towards this one. Its file is not needed any more then, and its owner may have left
    /// already: what it wrote before still counts.
    pub(crate) fn accept(&self, from: u32) -> Option<(Ring, Option<Neighbour>)> {
        let path = link_path(&self.dir, from, self.slot);
        let file = OpenOptions::new().read(true).write(true).open(&path).ok()?;
        let _ = fs::remove_file(&path);
        let len = usize::try_from(file.metadata().ok()?.len()).ok()?;
        let memory = Arc::new(Mapping::of_file(&file, len).ok().filter(|_| len > DATA)?);
        let ours = memory.word64(0).load(Ordering::Acquire) == MAGIC
            && memory.word64(TO_GENERATION).load(Ordering::Relaxed) == self.generation;
        let writer = memory.word64(FROM_GENERATION).load(Ordering::Relaxed);
        let neighbour = self.neighbour(from, None).filter(|neighbour| neighbour.generation == writer);
        Ring::new(memory, len - DATA).filter(|_| ours).map(|ring| (ring, neighbour))
    }

    /// The other side is gone, perhaps before it took the ring.
    pub(crate) fn close_ring(&self, to: u32) {
        let _ = fs::remove_file(link_path(&self.dir, self.slot, to));
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        if std::process::id() != self.pid {
            return; // a forked child: the files are its parent's
        }
        HELD.store(-1, Ordering::Relaxed);
        PRESENT.lock().unwrap_or_else(PoisonError::into_inner).retain(|at| *at != (self.dir.clone(), self.slot));
        self.memory.word64(0).store(0, Ordering::Release);
        // While the lock is still held, so that the files can't be another process's by now.
        leave(&self.dir, self.slot);
    }
}

/// Where this process has a slot, for when it ends without closing its devices.
static PRESENT: Mutex<Vec<(PathBuf, u32)>> = Mutex::new(Vec::new());

extern "C" fn leave_at_exit() {
    if !crate::adapter::in_forked_child() {
        // Not waited for: a thread that is being ended may hold it.
        if let Ok(present) = PRESENT.try_lock() {
            present.iter().for_each(|(dir, slot)| leave(dir, *slot));
        }
    }
}

/// Removes a slot. Rings from it stay for readers that have yet to take them; the slot's next owner removes the rest.
fn leave(dir: &Path, slot: u32) {
    remove_links(dir, |_, to| to == slot);
    let _ = fs::remove_file(slot_path(dir, slot));
}

fn slot_path(dir: &Path, slot: u32) -> PathBuf {
    dir.join(format!("slot-{slot}"))
}

fn link_path(dir: &Path, from: u32, to: u32) -> PathBuf {
    dir.join(format!("ring-{from}-{to}"))
}

/// How an address is told apart: the GID, or a LID as something that is no GID.
pub(crate) fn key(address: &Address) -> [u8; 16] {
    if address.global { address.dgid } else { lid_key(address.dlid) }
}

pub(crate) fn lid_key(lid: u16) -> [u8; 16] {
    let mut key = *b"\x01LID------------";
    key[14..].copy_from_slice(&lid.to_be_bytes());
    key
}

fn halves(key: &[u8; 16]) -> [u64; 2] {
    let (low, high) = key.split_at(8);
    [low, high].map(|half| half.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
}

/// The file, locked, if nobody else has it.
fn claim(path: &Path) -> io::Result<Option<File>> {
    for _ in 0..16 {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
        if !lock(&file) {
            return Ok(None);
        }
        // Its last owner may have removed it between our open and lock.
        match fs::metadata(path) {
            Ok(now) if now.ino() == file.metadata()?.ino() => return Ok(Some(file)),
            _ => {}
        }
    }
    Ok(None)
}

/// Open-file locks: they belong to this opening of the file, not to the process, so two copies of this library in one
/// process keep out of each other's slots as well.
fn lock_op(file: &File, op: libc::c_int) -> Option<libc::flock> {
    // SAFETY: all zeroes is a valid flock.
    let mut range: libc::flock = unsafe { std::mem::zeroed() };
    range.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap_or(1);
    // SAFETY: a valid descriptor and a writable flock.
    (unsafe { libc::fcntl(file.as_raw_fd(), op, &raw mut range) } == 0).then_some(range)
}

fn lock(file: &File) -> bool {
    lock_op(file, libc::F_OFD_SETLK).is_some()
}

fn is_locked(file: &File) -> bool {
    lock_op(file, libc::F_OFD_GETLK).is_some_and(|range| i32::from(range.l_type) != libc::F_UNLCK)
}

/// Removes what dead processes left; a slot that is alive is locked.
fn sweep(dir: &Path) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    let slots = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.strip_prefix("slot-")?.parse().ok());
    for slot in slots.collect::<Vec<u32>>() {
        if let Ok(Some(_lock)) = claim(&slot_path(dir, slot)) {
            forget_links(dir, slot);
            let _ = fs::remove_file(slot_path(dir, slot));
        }
    }
}

/// Removes rings from and to a slot whose last owner is gone.
fn forget_links(dir: &Path, slot: u32) {
    remove_links(dir, |from, to| from == slot || to == slot);
}

fn remove_links(dir: &Path, gone: impl Fn(u32, u32) -> bool) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let Some(ends) = name.to_str().and_then(|name| name.strip_prefix("ring-")?.split_once('-')) else { continue };
        if let (Ok(from), Ok(to)) = (ends.0.parse(), ends.1.parse())
            && gone(from, to)
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Real memory, now: a full file system is an error here and not a SIGBUS later.
fn allocate(file: &File, len: usize) -> io::Result<()> {
    let len = libc::off_t::try_from(len).map_err(io::Error::other)?;
    // SAFETY: no pointers.
    match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, len) } {
        0 => Ok(()),
        errno => Err(io::Error::from_raw_os_error(errno)),
    }
}

/// A ring's size in bytes from the fabric file's KiB.
pub(crate) fn ring_bytes(kib: Option<u32>) -> usize {
    let bytes = (kib.unwrap_or(1024) as usize) << 10;
    bytes.next_power_of_two().clamp(2 * SEGMENT, 64 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gid(last: u8) -> Address {
        Address { global: true, dgid: [last; 16], ..Address::default() }
    }

    #[test]
    fn slots_are_taken_found_and_left() {
        let dir = tempfile::tempdir().unwrap();
        let join = |last| Registry::join(dir.path(), &[[last; 16], lid_key(u16::from(last))], 1 << 18).unwrap();
        let (a, mut b) = (join(1), join(2));
        assert_eq!((a.slot(), b.slot()), (1, 2));
        assert!(a.neighbour(1, None).is_none(), "oneself is no neighbour");
        assert!(a.neighbour(2, Some(&gid(9))).is_none(), "nobody with that address");
        assert!(a.neighbour(2, Some(&Address { dlid: 2, ..Address::default() })).is_some());
        let to_b = a.neighbour(2, Some(&gid(2))).unwrap();
        assert!(to_b.is_alive());
        let mut ring = a.open_ring(2, &to_b).unwrap();
        assert_eq!(b.knocks(), [1]);
        assert!(b.knocks().is_empty());
        let (inbound, _) = b.accept(1).unwrap();
        let frame = crate::wire::Frame::decode(&{
            let mut header = [0; 64];
            header[..3].copy_from_slice(&[0x48, 0x53, 7]);
            header
        });
        assert!(ring.write(&frame.unwrap(), &crate::rc::Pieces::none()));
        assert!(inbound.read().unwrap().is_some());
        // What is written before leaving arrives, even if it is the first that the other side hears.
        let to_a = b.neighbour(1, None).unwrap();
        let mut back = b.open_ring(1, &to_a).unwrap();
        assert!(back.write(&frame.unwrap(), &crate::rc::Pieces::none()));
        drop(b);
        let mut a = a;
        assert_eq!(a.knocks(), [2]);
        let (left, nobody) = a.accept(2).unwrap();
        assert!(left.read().unwrap().is_some() && nobody.is_none());
        assert!(!to_b.is_alive());
        assert!(a.neighbour(2, None).is_none());
        let again = join(3);
        assert_eq!(again.slot(), 2, "the slot is free again");
        assert!(!to_b.is_alive(), "but it is not the old neighbour");
        drop((a, again));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left behind");
    }
}
