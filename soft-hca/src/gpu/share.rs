//! Shares: how a process reads another's GPU memory in place. The owner notes each allocation once and sends references
//! to it; the reader maps it once and keeps it mapped until the owner says that it is gone.
use super::Device;
use std::hash::{BuildHasher, RandomState};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// Bytes of a reference in a frame.
pub(crate) const REFERENCE: usize = 128;

/// An allocation that others can map.
pub(crate) struct Allocation {
    pub(super) base: u64,
    pub(super) size: u64,
    /// Differs from what was at the same addresses before.
    pub(super) identity: u64,
    pub(super) handle: Handle,
}

pub(super) enum Handle {
    /// `CUipcMemHandle`.
    Ipc([u8; 64]),
    /// A descriptor that the reader takes from the owner.
    Fd(OwnedFd),
}

/// Names a place in another process's GPU memory, and how to get there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reference {
    /// Of the owner's process, so that nobody else's shares are taken for its own.
    pub(super) token: u64,
    /// Process ids mean the same in both processes only if they share this namespace.
    pub(super) pid_namespace: u64,
    pub(super) base: u64,
    pub(super) size: u64,
    pub(super) addr: u64,
    pub(super) id: u32,
    /// The owner's descriptor, or -1 for an IPC handle.
    pub(super) fd: i32,
    pub(super) ipc: [u8; 64],
}

impl Reference {
    pub(crate) fn encode(&self) -> [u8; REFERENCE] {
        let mut out = [0; REFERENCE];
        for (i, word) in [self.token, self.pid_namespace, self.base, self.size, self.addr].into_iter().enumerate() {
            out[8 * i..8 * i + 8].copy_from_slice(&word.to_le_bytes());
        }
        out[40..44].copy_from_slice(&self.id.to_le_bytes());
        out[44..48].copy_from_slice(&self.fd.to_le_bytes());
        out[48..112].copy_from_slice(&self.ipc);
        out
    }

    pub(crate) fn decode(bytes: &[u8; REFERENCE]) -> Self {
        let mut ipc = [0; 64];
        ipc.copy_from_slice(&bytes[48..112]);
        let long = |i: usize| bytes[8 * i..8 * i + 8].iter().rev().fold(0, |word, &b| word << 8 | u64::from(b));
        Self {
            token: long(0),
            pid_namespace: long(1),
            base: long(2),
            size: long(3),
            addr: long(4),
            id: u32::from_le_bytes([bytes[40], bytes[41], bytes[42], bytes[43]]),
            fd: i32::from_le_bytes([bytes[44], bytes[45], bytes[46], bytes[47]]),
            ipc,
        }
    }
}

fn pid_namespace() -> u64 {
    std::fs::metadata("/proc/self/ns/pid").map_or(0, |found| found.ino())
}

struct Export {
    id: u32,
    allocation: Allocation,
    users: usize,
    readers: Vec<u32>,
}

pub(super) struct Exports {
    token: u64,
    pid_namespace: u64,
    last: u32,
    list: Vec<Export>,
}

impl Default for Exports {
    fn default() -> Self {
        let token = RandomState::new().hash_one(std::process::id());
        Self { token, pid_namespace: pid_namespace(), last: 0, list: Vec::new() }
    }
}

impl Exports {
    /// Notes an allocation, or one more user of a known one.
    pub(super) fn add(&mut self, allocation: Allocation) -> u32 {
        let key = |of: &Allocation| (of.base, of.size, of.identity);
        let same = |export: &&mut Export| key(&export.allocation) == key(&allocation);
        if let Some(export) = self.list.iter_mut().find(same) {
            export.users += 1;
            return export.id;
        }
        self.last = self.last.wrapping_add(1).max(1);
        self.list.push(Export { id: self.last, allocation, users: 1, readers: Vec::new() });
        self.last
    }

    /// One user less; after the last, who has read it.
    pub(super) fn drop_user(&mut self, id: u32) -> Vec<u32> {
        let Some(at) = self.list.iter().position(|export| export.id == id) else { return Vec::new() };
        self.list[at].users -= 1;
        if self.list[at].users > 0 { Vec::new() } else { self.list.swap_remove(at).readers }
    }

    pub(super) fn refer(&mut self, id: u32, slot: u32, addr: u64) -> Option<Reference> {
        let export = self.list.iter_mut().find(|export| export.id == id)?;
        if !export.readers.contains(&slot) {
            export.readers.push(slot);
        }
        let Allocation { base, size, handle, .. } = &export.allocation;
        let (fd, ipc) = match handle {
            Handle::Ipc(ipc) => (-1, *ipc),
            Handle::Fd(fd) => (fd.as_raw_fd(), [0; 64]),
        };
        let (token, pid_namespace) = (self.token, self.pid_namespace);
        Some(Reference { token, pid_namespace, base: *base, size: *size, addr, id, fd, ipc })
    }
}

pub(super) struct Import {
    slot: u32,
    gpu: u8,
    reference: Reference,
    /// Where it is here; None if it could not be mapped, which is not tried again.
    at: Option<u64>,
}

impl Import {
    /// Of the process in `slot`, and of that share if one is named.
    pub(super) fn is_of(&self, slot: u32, share: Option<u32>) -> bool {
        self.slot == slot && share.is_none_or(|share| share == self.reference.id)
    }
}

pub(super) struct Imports {
    pid_namespace: u64,
    list: Vec<Import>,
    /// Given up by their owners, and still mapped.
    kept: Vec<Import>,
}

impl Default for Imports {
    fn default() -> Self {
        Self { pid_namespace: pid_namespace(), list: Vec::new(), kept: Vec::new() }
    }
}

impl Imports {
    /// The address here of `len` bytes that the reference names.
    pub(super) fn find(
        &mut self,
        device: &dyn Device,
        gpu: u8,
        slot: u32,
        owner: Option<u32>,
        reference: &Reference,
        len: u32,
    ) -> Option<u64> {
        let known = |i: &&Import| {
            (i.slot, i.gpu, i.reference.token, i.reference.id) == (slot, gpu, reference.token, reference.id)
        };
        let import = match self.list.iter().find(known) {
            Some(import) => import,
            None => {
                let at = match owner.filter(|_| reference.pid_namespace == self.pid_namespace) {
                    Some(owner) => device
                        .import(owner, reference)
                        .inspect_err(|error| {
                            eprintln!("soft-hca: GPU memory of process {owner} cannot be mapped ({error}); its bytes go through host memory");
                        })
                        .ok(),
                    None => None,
                };
                self.list.push(Import { slot, gpu, reference: *reference, at });
                self.list.last()?
            }
        };
        let start = reference.addr.checked_sub(import.reference.base)?;
        let inside = start.checked_add(len.into()).is_some_and(|end| end <= import.reference.size);
        import.at.filter(|_| inside).map(|at| at + start)
    }

    /// Unmaps what its owner has given up. What can only be unmapped while the GPU does nothing is kept for `release_all`.
    pub(super) fn forget_where<'a>(
        &mut self,
        gone: impl Fn(&Import) -> bool,
        device: impl Fn(u8) -> Option<&'a dyn Device>,
    ) {
        let gone: Vec<_> = self.list.extract_if(.., |import| gone(import)).collect();
        let (late, now) = gone
            .into_iter()
            .partition(|import| device(import.gpu).is_some_and(|device| device.release_waits(&import.reference)));
        self.kept.extend::<Vec<_>>(late);
        release(now, device);
    }

    /// Unmaps everything: nobody waits for this engine any more.
    pub(super) fn release_all<'a>(&mut self, device: impl Fn(u8) -> Option<&'a dyn Device>) {
        let mut all = std::mem::take(&mut self.list);
        all.append(&mut self.kept);
        release(all, device);
    }
}

fn release<'a>(imports: Vec<Import>, device: impl Fn(u8) -> Option<&'a dyn Device>) {
    let work: Vec<_> = imports
        .into_iter()
        .filter_map(|import| Some(device(import.gpu)?.release(&import.reference, import.at?)))
        .collect();
    if !work.is_empty() {
        // Beside the caller, who may hold the engine's lock.
        let _ = crate::engine::spawn("soft-hca-unmap", move || work.into_iter().for_each(|release| release()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn allocation(base: u64) -> Allocation {
        Allocation { base, size: 4096, identity: 1, handle: Handle::Ipc([7; 64]) }
    }

    #[test]
    fn imports_go_by_share_or_with_their_owner() {
        let mut exports = Exports::default();
        let ids = [exports.add(allocation(0x1000)), exports.add(allocation(0x9000))];
        let mut imports = Imports::default();
        for (slot, id) in [(3, ids[0]), (3, ids[1]), (4, ids[0])] {
            let reference = exports.refer(id, slot, 0).unwrap();
            imports.list.push(Import { slot, gpu: 0, reference, at: None });
        }
        imports.forget_where(|import| import.is_of(3, Some(ids[1])), |_| None);
        assert_eq!(
            imports.list.iter().map(|i| (i.slot, i.reference.id)).collect::<Vec<_>>(),
            [(3, ids[0]), (4, ids[0])]
        );
        imports.forget_where(|import| import.is_of(3, Some(0)), |_| None);
        assert_eq!(imports.list.len(), 2, "no share has the number 0");
        imports.forget_where(|import| import.is_of(3, None), |_| None);
        assert_eq!(imports.list.iter().map(|i| i.slot).collect::<Vec<_>>(), [4]);
    }

    #[test]
    fn a_share_lasts_as_long_as_its_users() {
        let mut exports = Exports::default();
        let id = exports.add(allocation(0x1000));
        assert_eq!(exports.add(allocation(0x1000)), id);
        assert_ne!(exports.add(allocation(0x9000)), id);
        let reference = exports.refer(id, 3, 0x1040).unwrap();
        assert_eq!((reference.base, reference.addr, reference.id), (0x1000, 0x1040, id));
        exports.refer(id, 5, 0x1000).unwrap();
        assert_eq!(exports.drop_user(id), []);
        assert_eq!(exports.drop_user(id), [3, 5]);
        assert_eq!(exports.refer(id, 3, 0x1000), None);
        assert_eq!(Reference::decode(&reference.encode()), reference);
    }
}
