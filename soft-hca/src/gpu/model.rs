//! A GPU in name: memory that a memfd stands for, copied by a thread that takes its time, so that what is special about
//! GPU memory can be tested without one. Within a batch it copies backwards: nothing may rely on the order there.
use super::share::{Allocation, Handle};
use super::{Item, Reference, copier::POOL};
use crate::shm::Mapping;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

pub(super) struct Device {
    work: Sender<(Vec<Item>, u64)>,
    done: Arc<AtomicU64>,
    pool: Mapping,
}

impl Device {
    pub(super) fn new() -> Self {
        let (work, queue) = channel::<(Vec<Item>, u64)>();
        let done = Arc::new(AtomicU64::new(0));
        let finished = Arc::clone(&done);
        let pool = Mapping::anonymous(POOL).expect("memory for the model of a GPU");
        let body = move || {
            for (items, ticket) in queue {
                std::thread::sleep(Duration::from_micros(20));
                for item in items.iter().rev() {
                    let [dst, src] = [item.dst, item.src].map(|at| usize::try_from(at).unwrap_or(0));
                    let len = usize::try_from(item.len).unwrap_or(0);
                    let (dst, src) = (
                        std::ptr::with_exposed_provenance_mut::<u8>(dst),
                        std::ptr::with_exposed_provenance::<u8>(src),
                    );
                    // SAFETY: who gave the item keeps both ranges until the ticket is done.
                    unsafe { crate::copy::visible(dst, src, len) };
                }
                finished.store(ticket, Ordering::Release);
            }
        };
        crate::engine::spawn("soft-hca-model", body).expect("a thread for the model of a GPU");
        Self { work, done, pool }
    }
}

impl super::Device for Device {
    fn launch(&mut self, items: &[Item], ticket: u64) -> Result<(), String> {
        self.work.send((items.to_vec(), ticket)).map_err(|error| error.to_string())
    }

    fn done(&self) -> u64 {
        self.done.load(Ordering::Acquire)
    }

    fn check(&self) -> Result<(), String> {
        Ok(())
    }

    fn pool(&self) -> *mut u8 {
        self.pool.base()
    }

    fn export(&self, addr: u64, len: u64, dmabuf: Option<(BorrowedFd<'_>, u64)>) -> Option<Allocation> {
        let (fd, offset) = dmabuf?;
        let fd = fd.try_clone_to_owned().ok()?;
        Some(Allocation { base: addr - offset, size: len + offset, identity: 0, handle: Handle::Fd(fd) })
    }

    fn import(&self, owner: u32, reference: &Reference) -> Result<u64, String> {
        let fd = super::take_fd(owner, reference.fd)?;
        let len = usize::try_from(reference.size).map_err(|error| error.to_string())?;
        let mapping = Mapping::of_file(&File::from(fd), len).map_err(|error| error.to_string())?;
        let at = mapping.base().expose_provenance() as u64;
        // Until `release`.
        std::mem::forget(mapping);
        Ok(at)
    }

    fn release(&self, reference: &Reference, at: u64) -> Box<dyn FnOnce() + Send> {
        let (at, len) = (usize::try_from(at).unwrap_or(0), usize::try_from(reference.size).unwrap_or(0));
        Box::new(move || {
            // SAFETY: mapped by `import`; nothing copies from it any more.
            unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(at), len) };
        })
    }
}
