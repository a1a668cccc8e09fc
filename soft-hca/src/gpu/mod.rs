//! GPU memory. The CPU cannot reach it, so every byte to or from it is moved by the GPU itself: `copier` gathers copies into
//! batches and hands them to a device, which is `cuda` (a kernel on a stream of our own, which runs beside whatever else
//! the GPU does) or `model` (a thread and shared memory, for tests where there is no GPU). `share` lets another process
//! of the machine read a source straight out of its owner's memory, so that bytes are copied once.
mod copier;
mod cuda;
mod model;
mod share;

pub(crate) use copier::{Copied, Copier, Progress, Ticket, Unload};
pub(crate) use share::{REFERENCE, Reference};

use crate::rc::Pieces;
use share::{Exports, Imports};
use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Mutex, PoisonError};

/// Where bytes are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Mem {
    #[default]
    Host,
    /// On a GPU, by its index; `share` is what other processes may know it by, 0 for nothing.
    Gpu { gpu: u8, share: u32 },
}

impl Mem {
    /// As one word, for a table of atomics; 0 is the host.
    pub(crate) fn pack(self) -> u64 {
        match self {
            Self::Host => 0,
            Self::Gpu { gpu, share } => 1 << 63 | u64::from(gpu) << 32 | u64::from(share),
        }
    }

    pub(crate) fn unpack(word: u64) -> Self {
        if word == 0 {
            return Self::Host;
        }
        let [gpu, ..] = (word >> 32).to_le_bytes();
        Self::Gpu { gpu, share: u32::try_from(word & 0xffff_ffff).unwrap_or(0) }
    }

    pub(crate) fn gpu(self) -> Option<u8> {
        match self {
            Self::Host => None,
            Self::Gpu { gpu, .. } => Some(gpu),
        }
    }
}

/// What moves bytes on one GPU.
pub(crate) trait Device: Send {
    /// Starts copying; `ticket` is what `done` answers when this batch and all before it have landed.
    fn launch(&mut self, items: &[Item], ticket: u64) -> Result<(), String>;
    fn done(&self) -> u64;
    /// Could these be started now?
    fn accepts(&self, _items: &[Item]) -> bool {
        true
    }
    /// To be called again and again while something is under way.
    fn poll(&mut self) -> Result<(), String> {
        Ok(())
    }
    /// An error that keeps batches from ever being done.
    fn check(&self) -> Result<(), String>;
    /// Nothing that has not begun is to begin any more.
    fn abandon(&self) {}
    /// Host memory that the GPU reaches, of `copier::POOL` bytes.
    fn pool(&self) -> *mut u8;
    /// What another process needs to reach the allocation around a range, if it lies in one and may be given away.
    /// `dmabuf` is the range's descriptor and its offset in there, where it was registered by one.
    fn export(&self, addr: u64, len: u64, dmabuf: Option<(BorrowedFd<'_>, u64)>) -> Option<share::Allocation>;
    /// Maps another process's allocation; its address here.
    fn import(&self, owner: u32, reference: &Reference) -> Result<u64, String>;
    /// Would giving a mapping back wait for the program's kernels, and keep ours from starting meanwhile?
    fn release_waits(&self, _reference: &Reference) -> bool {
        false
    }
    /// What gives a mapping back.
    fn release(&self, reference: &Reference, at: u64) -> Box<dyn FnOnce() + Send>;
}

/// One range to copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Item {
    pub(crate) dst: u64,
    pub(crate) src: u64,
    pub(crate) len: u64,
}

/// The index under which the model of a GPU goes.
const MODEL: u8 = u8::MAX;

/// The GPU on which an address lies. None for host memory.
pub(crate) fn locate(addr: u64) -> Option<u8> {
    cuda::locate(addr).and_then(|ordinal| u8::try_from(ordinal).ok()).filter(|&gpu| gpu < MODEL)
}

/// The GPU's page with the last byte of a range, or the range's start if that is in the same page.
pub(crate) fn last_page(start: u64, len: u64) -> u64 {
    const PAGE: u64 = 64 << 10;
    (start.saturating_add(len.saturating_sub(1)) & !(PAGE - 1)).max(start)
}

/// Finds the GPU of a dma-buf whose bytes from `offset` on are known as `iova`. `Err` is the errno.
pub(crate) fn dmabuf(fd: i32, offset: u64, len: u64, iova: u64, model: bool) -> Result<u8, i32> {
    let name = std::fs::read_link(format!("/proc/self/fd/{fd}")).map_err(|_| libc::EBADF)?;
    let name = name.to_string_lossy();
    let modelled = model && name.starts_with("/memfd:");
    if !modelled && !name.starts_with("/dmabuf:") {
        return Err(libc::EINVAL);
    }
    // SAFETY: no pointers; both kinds of file answer with their size.
    let size = unsafe { libc::lseek(fd, 0, libc::SEEK_END) };
    let end = offset.checked_add(len).ok_or(libc::EINVAL)?;
    if u64::try_from(size).is_ok_and(|size| size > 0 && end > size) {
        return Err(libc::EINVAL);
    }
    if modelled {
        return Ok(MODEL);
    }
    // The CPU cannot map a GPU's dma-buf and the driver does not take it back: the range is reached by its address.
    locate(iova).filter(|&gpu| locate(last_page(iova, len)) == Some(gpu)).ok_or(libc::EINVAL)
}

/// Devices that were open in an earlier engine of this process. They are kept: to free their memory would wait for
/// whatever runs on the GPU.
static PARKED: Mutex<Vec<(u8, Copier)>> = Mutex::new(Vec::new());

/// Opens the device for GPU `gpu`; may take a tenth of a second. `Err` says why not.
pub(crate) fn open(gpu: u8) -> Result<Copier, String> {
    let mut parked = PARKED.lock().unwrap_or_else(PoisonError::into_inner);
    // The program may have reset the GPU since.
    while let Some(at) = parked.iter().position(|(of, _)| *of == gpu) {
        let (_, copier) = parked.swap_remove(at);
        if copier.is_sound() {
            return Ok(copier);
        }
    }
    drop(parked);
    let device: Box<dyn Device> =
        if gpu == MODEL { Box::new(model::Device::new()) } else { Box::new(cuda::Device::open(gpu.into())?) };
    Ok(Copier::new(gpu, device))
}

/// The GPUs of a process, and what of their memory it shares with others.
#[derive(Default)]
pub(crate) struct Gpus {
    open: BTreeMap<u8, Copier>,
    exports: Exports,
    imports: Imports,
}

impl Drop for Gpus {
    fn drop(&mut self) {
        let open = &self.open;
        self.imports.release_all(|gpu| open.get(&gpu).map(Copier::device));
        let mut parked = PARKED.lock().unwrap_or_else(PoisonError::into_inner);
        parked.extend(std::mem::take(&mut self.open).into_iter().filter(|(_, copier)| copier.is_sound()));
    }
}

impl Gpus {
    pub(crate) fn is_open(&self, gpu: u8) -> bool {
        self.open.contains_key(&gpu)
    }

    pub(crate) fn add(&mut self, gpu: u8, copier: Copier) {
        self.open.entry(gpu).or_insert(copier);
    }

    /// Enters a range of an open GPU's memory for others to read; what to note of it.
    pub(crate) fn enter(&mut self, gpu: u8, addr: u64, len: u64, dmabuf: Option<(i32, u64)>) -> Mem {
        // SAFETY: the caller's descriptor is open during the call.
        let dmabuf = dmabuf.map(|(fd, offset)| (unsafe { BorrowedFd::borrow_raw(fd) }, offset));
        let allocation = self.open.get(&gpu).and_then(|copier| copier.device().export(addr, len, dmabuf));
        Mem::Gpu { gpu, share: allocation.map_or(0, |allocation| self.exports.add(allocation)) }
    }

    /// A range of `enter` is given up. Who is to be told to let the share go.
    pub(crate) fn leave(&mut self, mem: Mem) -> Vec<u32> {
        match mem {
            Mem::Gpu { share, .. } if share != 0 => self.exports.drop_user(share),
            _ => Vec::new(),
        }
    }

    /// How the process in `slot` reaches a source, if it is one piece that may be shared.
    pub(crate) fn refer(&mut self, slot: u32, source: &Pieces) -> Option<Reference> {
        let mut pieces = source.iter();
        match (pieces.next(), pieces.next()) {
            (Some((at, _, Mem::Gpu { share, .. })), None) if share != 0 => {
                self.exports.refer(share, slot, at.addr() as u64)
            }
            _ => None,
        }
    }

    /// The memory here that a reference from the process `owner` in `slot` means, mapped for `gpu` or, if the target is
    /// not on a GPU, for any.
    pub(crate) fn resolve(
        &mut self,
        slot: u32,
        owner: Option<u32>,
        gpu: Option<u8>,
        reference: &Reference,
        len: u32,
    ) -> Option<Pieces> {
        let (&gpu, copier) = match gpu {
            Some(gpu) => self.open.get_key_value(&gpu)?,
            None => self.open.first_key_value()?,
        };
        let at = self.imports.find(copier.device(), gpu, slot, owner, reference, len)?;
        let mut pieces = Pieces::none();
        let address = std::ptr::with_exposed_provenance_mut(usize::try_from(at).ok()?);
        pieces.add_in(Mem::Gpu { gpu, share: 0 }, address, len as usize);
        Some(pieces)
    }

    /// The owner in `slot` has given a share up. Nothing may be copying from it.
    pub(crate) fn forget(&mut self, slot: u32, share: u32) {
        let open = &self.open;
        let gone = |import: &share::Import| import.is_of(slot, Some(share));
        self.imports.forget_where(gone, |gpu| open.get(&gpu).map(Copier::device));
    }

    /// The process in `slot` is gone. Nothing may be copying from its memory.
    pub(crate) fn forget_owner(&mut self, slot: u32) {
        let open = &self.open;
        self.imports.forget_where(|import| import.is_of(slot, None), |gpu| open.get(&gpu).map(Copier::device));
    }

    /// Starts or refuses a copy in which GPU memory takes part. `not_with` is a batch it must not be in.
    pub(crate) fn copy(&mut self, from: &Pieces, to: &Pieces, not_with: Option<Ticket>) -> Copied {
        let mut gpus = from.iter().chain(to.iter()).filter_map(|(_, _, mem)| mem.gpu());
        let Some(gpu) = gpus.next() else { return Copied::Failed };
        if gpus.any(|other| other != gpu) {
            eprintln!("soft-hca: a copy from one GPU to another inside a process is not offered");
            return Copied::Failed;
        }
        self.open.get_mut(&gpu).map_or(Copied::Failed, |copier| copier.copy(from, to, not_with))
    }

    /// Copies a source to host memory and waits for it. The result stays until the next call.
    pub(crate) fn stage(&mut self, source: &Pieces) -> Option<Pieces> {
        let gpu = source.iter().find_map(|(_, _, mem)| mem.gpu())?;
        self.open.get_mut(&gpu)?.stage(source)
    }

    /// Hands gathered copies to their devices, as far as these keep up.
    pub(crate) fn submit(&mut self) {
        self.open.values_mut().for_each(Copier::submit);
    }

    pub(crate) fn progress(&mut self, ticket: Ticket) -> Progress {
        self.open.get_mut(&ticket.gpu).map_or(Progress::Failed, |copier| copier.progress(ticket.batch))
    }

    /// Brings what a landed copy left in the pool to its place, and frees the pool's part.
    ///
    /// # Safety
    /// The targets are checked host memory that is still registered.
    pub(crate) unsafe fn unload(&mut self, gpu: u8, unload: &[Unload], deliver: bool) {
        if let Some(copier) = self.open.get_mut(&gpu) {
            // SAFETY: the caller's.
            unsafe { copier.unload(unload, deliver) };
        }
    }
}

/// A descriptor of another process, duplicated into this one.
fn take_fd(owner: u32, fd: i32) -> Result<std::os::fd::OwnedFd, String> {
    use std::os::fd::FromRawFd;
    let owner = i32::try_from(owner).map_err(|error| error.to_string())?;
    let failed = || format!("pidfd_getfd: {}", std::io::Error::last_os_error());
    // SAFETY: no pointers.
    let process = unsafe { libc::syscall(libc::SYS_pidfd_open, owner, 0) };
    let process = i32::try_from(process).ok().filter(|&fd| fd >= 0).ok_or_else(failed)?;
    // SAFETY: a new descriptor of ours.
    let process = unsafe { std::os::fd::OwnedFd::from_raw_fd(process) };
    // SAFETY: no pointers.
    let taken = unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), fd, 0) };
    let taken = i32::try_from(taken).ok().filter(|&fd| fd >= 0).ok_or_else(failed)?;
    // SAFETY: a new descriptor of ours.
    Ok(unsafe { std::os::fd::OwnedFd::from_raw_fd(taken) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_fit_in_a_word() {
        for mem in [Mem::Host, Mem::Gpu { gpu: 0, share: 0 }, Mem::Gpu { gpu: 7, share: u32::MAX }] {
            assert_eq!(Mem::unpack(mem.pack()), mem);
        }
    }

    #[test]
    fn a_descriptor_that_is_no_dmabuf_is_refused() {
        assert_eq!(dmabuf(-1, 0, 1, 0, true).err(), Some(libc::EBADF));
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        assert_eq!(dmabuf(file.as_raw_fd(), 0, 1, 0, true).err(), Some(libc::EINVAL));
    }
}
