//! Memory regions.

use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::AsRawFd as _;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;

use ibverbs_sys as ib;

use super::context::Pd;
use super::error::VerbsError;

bitflags::bitflags! {
    /// Rights of a memory region or queue pair (`man ibv_reg_mr`).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Access: u32 {
        const LOCAL_WRITE = 1;
        const REMOTE_WRITE = 1 << 1;
        const REMOTE_READ = 1 << 2;
        /// PCIe writes may overtake each other: for bulk data only.
        const RELAXED_ORDERING = 1 << 20;
    }
}

const NO_DMABUF_VERB: &str = "this libibverbs has no such function; rdma-core 34 or newer does";

/// A registered range of memory.
pub struct Mr {
    raw: NonNull<ib::ibv_mr>,
    pd: Arc<Pd>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl Send for Mr {}
// SAFETY: as above.
unsafe impl Sync for Mr {}

impl std::fmt::Debug for Mr {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mr").field("lkey", &self.lkey()).field("rkey", &self.rkey()).finish_non_exhaustive()
    }
}

impl Mr {
    /// Registers host memory, or GPU memory by way of the peer memory module.
    ///
    /// # Safety
    /// The range must stay mapped until the region is dropped: the device writes there on its own.
    pub unsafe fn register(pd: &Arc<Pd>, address: u64, length: usize, access: Access) -> Result<Self, VerbsError> {
        let api = &pd.context.library.api;
        let pointer = address as *mut c_void;
        let (verb, raw) = match api.reg_mr_iova2 {
            Some(register) if access.contains(Access::RELAXED_ORDERING) => {
                // SAFETY: a live protection domain; the caller promises the range.
                ("ibv_reg_mr_iova2", unsafe { register(pd.raw(), pointer, length, address, access.bits() as c_uint) })
            }
            _ => {
                let bits = (access - Access::RELAXED_ORDERING).bits().cast_signed();
                // SAFETY: as above.
                ("ibv_reg_mr", unsafe { (api.reg_mr)(pd.raw(), pointer, length, bits) })
            }
        };
        Self::new(pd, raw, verb, address, length)
    }

    /// Registers the dma-buf's bytes from `offset` on, under the addresses that begin at `iova`. The descriptor may be
    /// closed afterwards.
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        fd: BorrowedFd<'_>,
        offset: u64,
        iova: u64,
        length: usize,
        access: Access,
    ) -> Result<Self, VerbsError> {
        let name = pd.context.name();
        let Some(register) = pd.context.library.api.reg_dmabuf_mr else {
            return Err(VerbsError::new("ibv_reg_dmabuf_mr", name, libc::EOPNOTSUPP).with(NO_DMABUF_VERB));
        };
        let bits = access.bits().cast_signed();
        // SAFETY: a live protection domain; the kernel holds the dma-buf while the region lives.
        let raw = unsafe { register(pd.raw(), offset, length, iova, fd.as_raw_fd() as c_int, bits) };
        Self::new(pd, raw, "ibv_reg_dmabuf_mr", iova, length)
    }

    /// Whether the device takes dma-bufs, by a call with a descriptor that can't be one: a device that does looks at it
    /// first. The error of one that does not says why.
    pub fn probe_dmabuf(pd: &Arc<Pd>) -> Result<(), VerbsError> {
        let name = pd.context.name();
        let Some(register) = pd.context.library.api.reg_dmabuf_mr else {
            return Err(VerbsError::new("ibv_reg_dmabuf_mr", name, libc::EOPNOTSUPP).with(NO_DMABUF_VERB));
        };
        // The answer is in errno alone, so an older one must not stand in for it.
        // SAFETY: errno is this thread's own.
        let errno = unsafe { libc::__errno_location() };
        // SAFETY: as above.
        unsafe { errno.write(0) };
        // SAFETY: a live protection domain; no memory is named.
        let raw = unsafe { register(pd.raw(), 0, 0, 0, -1, 0) };
        match NonNull::new(raw) {
            // A region over nothing: taken, so given back.
            Some(raw) => {
                drop(Self { raw, pd: Arc::clone(pd) });
                Ok(())
            }
            None => match VerbsError::last("ibv_reg_dmabuf_mr", name) {
                e if e.errno == libc::EBADF => Ok(()),
                e => Err(e),
            },
        }
    }

    fn new(
        pd: &Arc<Pd>,
        raw: *mut ib::ibv_mr,
        verb: &'static str,
        address: u64,
        length: usize,
    ) -> Result<Self, VerbsError> {
        let raw = NonNull::new(raw).ok_or_else(|| {
            VerbsError::last(verb, pd.context.name()).with(format_args!("{length} bytes at {address:#x}"))
        })?;
        Ok(Self { raw, pd: Arc::clone(pd) })
    }

    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is alive.
        unsafe { (*self.raw.as_ptr()).lkey }
    }

    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is alive.
        unsafe { (*self.raw.as_ptr()).rkey }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered by us, released once.
        unsafe { (self.pd.context.library.api.dereg_mr)(self.raw.as_ptr()) };
    }
}
