//! GPUs through the CUDA driver, as far as the program has loaded it: where it has not, no pointer is a GPU's. The copies are a
//! kernel of our own on a stream of the highest priority; no call here waits for the program's kernels, and none is refused
//! while a thread of the program captures a graph.
//!
//! The stream is in a context of our own where the GPU has MPS. A context's hardware work queues are shared by its streams, and
//! a program with several that wait for a collective (any training) blocks them all: a kernel of ours behind them never
//! starts, and the collective never ends. PyTorch's DistributedDataParallel hung so on an H200 and does not any more. Kernels
//! of this context reach all memory of the process there, whoever allocated it. Without MPS the contexts of a process take
//! turns, some milliseconds each, so there it is the program's primary context, with that danger.
use super::copier::{ITEMS, POOL};
use super::share::{Allocation, Handle};
use super::{Item, Reference};
use cudarc::driver::sys::{self as cu, CUresult};
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Made from copy.cu beside it, which says how.
const KERNEL: &str = concat!(include_str!("copy.ptx"), "\0");

/// As copy.cu has them.
const THREADS: u32 = 256;
const TILE: u64 = 16 << 10;
/// Enough to saturate the memory bus of the largest GPUs with copies; few enough to leave the program its GPU.
const MAX_BLOCKS: u64 = 32;

/// What one block copies as fast as several would, counted in tiles: such a batch may go by mail.
const SMALL: u64 = 4;

/// `Batch` of copy.cu.
#[repr(C)]
struct Batch {
    items: [Item; ITEMS],
    ticket: u64,
    done: u64,
    left: u64,
    abandoned: u64,
    mails: u64,
    blocks_done: u64,
    count: u32,
}

/// `Mail` of copy.cu, as words: the tickets are in the second and the fourth, and each is written after the word before it.
type Mail = [AtomicU64; 4];
const PLACES: u64 = 4;
const END: u32 = u32::MAX;

/// Pinned: the pool, the mailbox, and two words that the kernel writes, on lines of their own.
const MAILS: usize = POOL;
const DONE: usize = MAILS + 4 * ITEMS * size_of::<Mail>();
const LEFT: usize = DONE + 128;
/// A word that the kernel reads: not 0 if it is to end at once.
const ABANDONED: usize = LEFT + 128;
const PINNED: usize = ABANDONED + 128;

const _: () = assert!(ITEMS == 64 && size_of::<Batch>() == 1592 && size_of::<Item>() == 24 && PLACES == 4);

fn check(call: &str, result: CUresult) -> Result<(), String> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{call}: {result:?}")) }
}

/// Has this process loaded the driver?
fn is_loaded() -> bool {
    // SAFETY: looks, does not load.
    let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
    if handle.is_null() {
        return false;
    }
    // SAFETY: opened above; the program's own reference remains.
    unsafe { libc::dlclose(handle) };
    // SAFETY: finds the library that is loaded already.
    unsafe { cu::is_culib_present() }
}

fn attribute<T: Default>(attribute: cu::CUpointer_attribute, addr: u64) -> Option<T> {
    let mut value = T::default();
    // SAFETY: the callers name a type of the attribute's size.
    let result = unsafe { cu::cuPointerGetAttribute((&raw mut value).cast(), attribute, addr) };
    (result == CUresult::CUDA_SUCCESS).then_some(value)
}

/// The ordinal of the GPU that holds an address. Host and managed memory are the CPU's.
pub(super) fn locate(addr: u64) -> Option<c_int> {
    use cu::CUpointer_attribute as Of;
    if !is_loaded() {
        return None;
    }
    let kind: u32 = attribute(Of::CU_POINTER_ATTRIBUTE_MEMORY_TYPE, addr)?;
    if kind != cu::CUmemorytype::CU_MEMORYTYPE_DEVICE as u32 {
        return None;
    }
    if attribute::<u32>(Of::CU_POINTER_ATTRIBUTE_IS_MANAGED, addr).unwrap_or(0) != 0 {
        return None;
    }
    attribute(Of::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, addr)
}

/// While it lives the context is current on this thread and stream captures of other threads don't concern it.
struct Entered {
    mode: cu::CUstreamCaptureMode,
}

impl Entered {
    fn enter(context: cu::CUcontext) -> Result<Self, String> {
        // SAFETY: a retained context.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(context) })?;
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: one mode to read and write.
        let result = unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        let entered = Self { mode };
        check("cuThreadExchangeStreamCaptureMode", result).map(|()| entered)
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // SAFETY: gives the thread its own mode back.
        unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut self.mode) };
        let mut context = ptr::null_mut();
        // SAFETY: pops what `enter` pushed.
        unsafe { cu::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

fn tiles(items: &[Item]) -> u64 {
    items.iter().map(|item| item.len.div_ceil(TILE)).sum()
}

pub(super) struct Device {
    ordinal: c_int,
    context: cu::CUcontext,
    stream: cu::CUstream,
    kernel: cu::CUfunction,
    pinned: *mut u8,
    blocks_done: cu::CUdeviceptr,
    /// The last batch handed over, and the first of the last kernel: it has ended when `LEFT` is no less.
    handed: u64,
    first: u64,
}

// SAFETY: CUDA's handles may be used from any thread; the engine's lock sees to one at a time.
unsafe impl Send for Device {}

impl Device {
    pub(super) fn open(ordinal: c_int) -> Result<Self, String> {
        let (context, own) = Self::context(ordinal)?;
        Self::open_in(context, ordinal).inspect_err(|_| {
            if own {
                // SAFETY: made above, and nothing of it is in use. The error has no one to be told to.
                unsafe { cu::cuCtxDestroy_v2(context) };
            }
        })
    }

    fn open_in(context: cu::CUcontext, ordinal: c_int) -> Result<Self, String> {
        let _entered = Entered::enter(context)?;
        let mut device = Self {
            ordinal,
            context,
            stream: ptr::null_mut(),
            kernel: ptr::null_mut(),
            pinned: ptr::null_mut(),
            blocks_done: 0,
            handed: 0,
            first: 0,
        };
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two ints to write.
        let result = unsafe { cu::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", result)?;
        let flags = cu::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: one pointer to write.
        let result = unsafe { cu::cuStreamCreateWithPriority(&raw mut device.stream, flags, greatest) };
        check("cuStreamCreateWithPriority", result)?;
        let mut module = ptr::null_mut();
        // SAFETY: PTX text that ends with NUL.
        let result = unsafe { cu::cuModuleLoadData(&raw mut module, KERNEL.as_ptr().cast()) };
        check("cuModuleLoadData", result)?;
        // SAFETY: a loaded module and the name of its kernel.
        let result = unsafe { cu::cuModuleGetFunction(&raw mut device.kernel, module, c"soft_hca_copy".as_ptr()) };
        check("cuModuleGetFunction", result)?;
        let mut pinned: *mut c_void = ptr::null_mut();
        // SAFETY: one pointer to write.
        let result = unsafe { cu::cuMemHostAlloc(&raw mut pinned, PINNED, cu::CU_MEMHOSTALLOC_PORTABLE) };
        check("cuMemHostAlloc", result)?;
        device.pinned = pinned.cast();
        // SAFETY: one address to write.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&raw mut device.blocks_done, 256) })?;
        // SAFETY: inside the allocation above.
        check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(device.blocks_done, 0, 256, device.stream) })?;
        for at in (MAILS..PINNED).step_by(8) {
            device.word(at).store(0, Ordering::Release);
        }
        // The first launch loads the kernel, which may wait for others; so not later, while a collective waits for us.
        super::Device::launch(&mut device, &[], 1)?;
        let start = std::time::Instant::now();
        while super::Device::done(&device) != 1 {
            super::Device::check(&device)?;
            if start.elapsed().as_secs() > 20 {
                return Err("the first kernel is not done after 20 s".into());
            }
        }
        Ok(device)
    }

    /// The context to copy in, and whether it is our own; see the top. Kept until the process ends.
    fn context(ordinal: c_int) -> Result<(cu::CUcontext, bool), String> {
        let mut context = ptr::null_mut();
        let (mut shared, of) = (0, cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MPS_ENABLED);
        // SAFETY: an ordinal is the device's number; one int to write. A driver that does not know the attribute refuses.
        let asked = unsafe { cu::cuDeviceGetAttribute(&raw mut shared, of, ordinal) };
        if asked != CUresult::CUDA_SUCCESS || shared == 0 {
            // SAFETY: as above; one pointer to write.
            let result = unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, ordinal) };
            return check("cuDevicePrimaryCtxRetain", result).map(|()| (context, false));
        }
        // SAFETY: as above.
        check("cuCtxCreate", unsafe { cu::cuCtxCreate_v2(&raw mut context, 0, ordinal) })?;
        let mut popped = ptr::null_mut();
        // SAFETY: pops the context that was just made.
        check("cuCtxPopCurrent", unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) })?;
        Ok((context, true))
    }

    /// A word behind the pool.
    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!((MAILS..PINNED).contains(&offset) && offset.is_multiple_of(8));
        let at: *mut u64 = self.pinned.wrapping_add(offset).cast();
        // SAFETY: inside an allocation that stays, aligned, and only reached as an atomic.
        unsafe { AtomicU64::from_ptr(at) }
    }

    fn mail(&self, ticket: u64, item: usize) -> [&AtomicU64; 4] {
        let place = usize::try_from(ticket % PLACES).unwrap_or(0);
        let at = MAILS + (place * ITEMS + item) * size_of::<Mail>();
        [0, 8, 16, 24].map(|word| self.word(at + word))
    }

    /// Puts a batch into the mailbox, its first item last: the kernel may be waiting for that.
    fn post(&self, items: &[Item], ticket: u64, count: u32) {
        let short = ticket & 0xffff_ffff;
        let nothing = [Item::default()];
        let items = if items.is_empty() { &nothing } else { items };
        for (i, item) in items.iter().enumerate().rev() {
            let [dst, head, src, tail] = self.mail(ticket, i);
            src.store(item.src, Ordering::Release);
            tail.store(item.len & 0xffff_ffff | short << 32, Ordering::Release);
            dst.store(item.dst, Ordering::Release);
            head.store(short | u64::from(count) << 32, Ordering::Release);
        }
        fence(Ordering::SeqCst);
    }

    /// What was posted under a ticket.
    fn posted(&self, ticket: u64) -> Vec<Item> {
        let count = self.mail(ticket, 0)[1].load(Ordering::Relaxed) >> 32;
        (0..usize::try_from(count).unwrap_or(0).min(ITEMS))
            .map(|i| {
                let [dst, _, src, tail] = self.mail(ticket, i).map(|word| word.load(Ordering::Relaxed));
                Item { dst, src, len: tail & 0xffff_ffff }
            })
            .collect()
    }

    fn has_ended(&self) -> bool {
        self.word(LEFT).load(Ordering::Acquire) >= self.first
    }

    fn start(&mut self, items: &[Item], ticket: u64, blocks: u64) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        let at = |offset| self.word(offset).as_ptr().expose_provenance() as u64;
        let mut batch = Batch {
            items: [Item::default(); ITEMS],
            ticket,
            done: at(DONE),
            left: at(LEFT),
            abandoned: at(ABANDONED),
            mails: at(MAILS),
            blocks_done: self.blocks_done,
            count: u32::try_from(items.len()).unwrap_or(0),
        };
        batch.items[..items.len()].copy_from_slice(items);
        let mut parameters: [*mut c_void; 1] = [(&raw mut batch).cast()];
        let blocks = u32::try_from(blocks).unwrap_or(1);
        // What the CPU put into the pool is there before the GPU hears of it.
        fence(Ordering::SeqCst);
        // SAFETY: a loaded kernel with this one parameter; the ranges stay until the ticket is done.
        let result = unsafe {
            cu::cuLaunchKernel(
                self.kernel,
                blocks,
                1,
                1,
                THREADS,
                1,
                1,
                0,
                self.stream,
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        self.first = ticket;
        check("cuLaunchKernel", result)
    }
}

impl super::Device for Device {
    /// A large batch needs a kernel of its own, behind everything else.
    fn accepts(&self, items: &[Item]) -> bool {
        tiles(items) <= SMALL || self.done() == self.handed
    }

    fn launch(&mut self, items: &[Item], ticket: u64) -> Result<(), String> {
        let tiles = tiles(items);
        self.handed = ticket;
        if tiles <= SMALL {
            self.post(items, ticket, u32::try_from(items.len()).unwrap_or(0));
            return self.poll();
        }
        // If a kernel is still there it ends now, and the new one runs behind it.
        self.post(&[], ticket, END);
        self.start(items, ticket, tiles.min(MAX_BLOCKS))
    }

    /// Starts a kernel for what the last one did not wait for.
    fn poll(&mut self) -> Result<(), String> {
        if !self.has_ended() {
            return Ok(());
        }
        let next = self.word(LEFT).load(Ordering::Acquire) + 1;
        if next > self.handed {
            return Ok(());
        }
        let items = self.posted(next);
        self.start(&items, next, 1)
    }

    fn done(&self) -> u64 {
        self.word(DONE).load(Ordering::Acquire)
    }

    fn check(&self) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        // SAFETY: a stream of ours.
        match unsafe { cu::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            result => check("cuStreamQuery", result),
        }
    }

    fn abandon(&self) {
        self.word(ABANDONED).store(1, Ordering::SeqCst);
    }

    fn pool(&self) -> *mut u8 {
        self.pinned
    }

    fn export(&self, addr: u64, len: u64, _: Option<(BorrowedFd<'_>, u64)>) -> Option<Allocation> {
        let _entered = Entered::enter(self.context).ok()?;
        let (mut base, mut size) = (0, 0);
        // SAFETY: an address of GPU memory; two values to write.
        let result = unsafe { cu::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, addr) };
        check("", result).ok()?;
        let size = size as u64;
        // A range over several allocations has no one handle.
        if addr.checked_add(len)? > base.checked_add(size)? {
            return None;
        }
        let identity = attribute(cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID, addr)?;
        let mut ipc = cu::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: a base of GPU memory.
        if unsafe { cu::cuIpcGetMemHandle(&raw mut ipc, base) } == CUresult::CUDA_SUCCESS {
            return Some(Allocation { base, size, identity, handle: Handle::Ipc(ipc.reserved.map(i8::cast_unsigned)) });
        }
        let mut handle = 0;
        let at = ptr::with_exposed_provenance_mut(usize::try_from(base).ok()?);
        // SAFETY: one handle to write; given back below.
        check("", unsafe { cu::cuMemRetainAllocationHandle(&raw mut handle, at) }).ok()?;
        let (mut fd, kind) = (-1, cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        // SAFETY: one descriptor to write, which is what this type of handle is.
        let result = unsafe { cu::cuMemExportToShareableHandle((&raw mut fd).cast(), handle, kind, 0) };
        // SAFETY: retained above.
        unsafe { cu::cuMemRelease(handle) };
        check("", result).ok()?;
        // SAFETY: a new descriptor, ours.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Some(Allocation { base, size, identity, handle: Handle::Fd(fd) })
    }

    fn import(&self, owner: u32, reference: &Reference) -> Result<u64, String> {
        let _entered = Entered::enter(self.context)?;
        let mut at = 0;
        if reference.fd < 0 {
            let handle = cu::CUipcMemHandle { reserved: reference.ipc.map(u8::cast_signed) };
            // SAFETY: a handle from another process; the driver checks it.
            let result = unsafe { cu::cuIpcOpenMemHandle_v2(&raw mut at, handle, 1) };
            return check("cuIpcOpenMemHandle", result).map(|()| at);
        }
        let fd = super::take_fd(owner, reference.fd)?;
        let (mut handle, kind) = (0, cu::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        let value = ptr::without_provenance_mut(usize::try_from(fd.as_raw_fd()).unwrap_or(0));
        // SAFETY: for this type of handle the descriptor is passed as the pointer's value.
        let result = unsafe { cu::cuMemImportFromShareableHandle(&raw mut handle, value, kind) };
        check("cuMemImportFromShareableHandle", result)?;
        let size = usize::try_from(reference.size).map_err(|error| error.to_string())?;
        let mapped = self.map(handle, size);
        // SAFETY: the mapping, if there is one, keeps the memory.
        unsafe { cu::cuMemRelease(handle) };
        mapped
    }

    /// The driver closes an IPC handle once all kernels have ended, and starts none before; a collective's kernel that waits
    /// for us would never end. It unmaps an exported handle at once. (Both seen with driver 580 on an H200.)
    fn release_waits(&self, reference: &Reference) -> bool {
        reference.fd < 0
    }

    fn release(&self, reference: &Reference, at: u64) -> Box<dyn FnOnce() + Send> {
        let (ipc, size) = (reference.fd < 0, usize::try_from(reference.size).unwrap_or(0));
        let context = self.context.expose_provenance();
        Box::new(move || {
            // An error has no one to be told to, and what it leaves is address space.
            let Ok(_entered) = Entered::enter(ptr::with_exposed_provenance_mut(context)) else { return };
            if ipc {
                // SAFETY: opened by `import`, and nothing copies from it any more.
                unsafe { cu::cuIpcCloseMemHandle(at) };
            } else {
                // SAFETY: as above.
                unsafe { cu::cuMemUnmap(at, size) };
                // SAFETY: reserved by `map`.
                unsafe { cu::cuMemAddressFree(at, size) };
            }
        })
    }
}

impl Device {
    fn map(&self, handle: cu::CUmemGenericAllocationHandle, size: usize) -> Result<u64, String> {
        let mut at = 0;
        // SAFETY: one address to write.
        check("cuMemAddressReserve", unsafe { cu::cuMemAddressReserve(&raw mut at, size, 0, 0, 0) })?;
        // SAFETY: a fresh range of the handle's size.
        let mut result = check("cuMemMap", unsafe { cu::cuMemMap(at, size, 0, handle, 0) });
        if result.is_ok() {
            // SAFETY: all zeroes is a valid description.
            let mut access: cu::CUmemAccessDesc = unsafe { std::mem::zeroed() };
            access.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
            access.location.id = self.ordinal;
            access.flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
            // SAFETY: the range that was just mapped, and one description.
            result = check("cuMemSetAccess", unsafe { cu::cuMemSetAccess(at, size, &raw const access, 1) });
            if result.is_err() {
                // SAFETY: mapped above.
                unsafe { cu::cuMemUnmap(at, size) };
            }
        }
        if result.is_err() {
            // SAFETY: reserved above.
            unsafe { cu::cuMemAddressFree(at, size) };
        }
        result.map(|()| at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::process::Command;

    #[test]
    fn the_ptx_is_that_of_the_source() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("copy.ptx");
        let args = "-x cuda -nocudainc -nocudalib --cuda-device-only --cuda-gpu-arch=sm_70 -O3 -S";
        let made = Command::new("clang-14")
            .args(args.split(' '))
            .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/gpu/copy.cu"))
            .arg("-o")
            .arg(&out)
            .status();
        match made {
            Ok(status) => {
                assert!(status.success());
                assert_eq!(std::fs::read_to_string(out).unwrap() + "\0", KERNEL);
            }
            // Not by println, which a test that passes keeps to itself.
            Err(error) => std::io::stderr().write_all(format!("skipped: clang-14: {error}\n").as_bytes()).unwrap(),
        }
        assert!(KERNEL.contains(".visible .entry soft_hca_copy("));
    }
}
