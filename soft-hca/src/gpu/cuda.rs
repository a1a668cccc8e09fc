//! GPUs through the CUDA driver, as far as the program has loaded it: where it has not, no pointer is a GPU's. The copies are a
//! kernel of our own on a stream of the highest priority, in the program's primary context; no call here waits for the
//! program's kernels, and none is refused while a thread of the program captures a graph.
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

/// `Batch` of copy.cu.
#[repr(C)]
struct Batch {
    items: [Item; ITEMS],
    ticket: u64,
    done: u64,
    blocks_done: u64,
    count: u32,
}

const _: () = assert!(ITEMS == 64 && size_of::<Batch>() == 1568 && size_of::<Item>() == 24);

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

pub(super) struct Device {
    ordinal: c_int,
    context: cu::CUcontext,
    stream: cu::CUstream,
    kernel: cu::CUfunction,
    /// Pinned: the pool, and behind it the word that the kernel writes.
    pinned: *mut u8,
    blocks_done: cu::CUdeviceptr,
}

// SAFETY: CUDA's handles may be used from any thread; the engine's lock sees to one at a time.
unsafe impl Send for Device {}

impl Device {
    pub(super) fn open(ordinal: c_int) -> Result<Self, String> {
        let mut context = ptr::null_mut();
        // SAFETY: an ordinal is the device's number; one pointer to write. Kept until the process ends.
        check("cuDevicePrimaryCtxRetain", unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, ordinal) })?;
        let _entered = Entered::enter(context)?;
        let mut device = Self {
            ordinal,
            context,
            stream: ptr::null_mut(),
            kernel: ptr::null_mut(),
            pinned: ptr::null_mut(),
            blocks_done: 0,
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
        let result = unsafe { cu::cuMemHostAlloc(&raw mut pinned, POOL + 64, cu::CU_MEMHOSTALLOC_PORTABLE) };
        check("cuMemHostAlloc", result)?;
        device.pinned = pinned.cast();
        // SAFETY: one address to write.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&raw mut device.blocks_done, 256) })?;
        // SAFETY: inside the allocation above.
        check("cuMemsetD8Async", unsafe { cu::cuMemsetD8Async(device.blocks_done, 0, 256, device.stream) })?;
        device.word().store(0, Ordering::Release);
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

    fn word(&self) -> &AtomicU64 {
        let at: *mut u64 = self.pinned.wrapping_add(POOL).cast();
        // SAFETY: behind the pool, aligned, in an allocation that stays.
        unsafe { AtomicU64::from_ptr(at) }
    }
}

impl super::Device for Device {
    fn launch(&mut self, items: &[Item], ticket: u64) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        let tiles: u64 = items.iter().map(|item| item.len.div_ceil(TILE)).sum();
        let blocks = u32::try_from(tiles.clamp(1, MAX_BLOCKS)).unwrap_or(1);
        let mut batch = Batch {
            items: [Item::default(); ITEMS],
            ticket,
            done: self.word().as_ptr().expose_provenance() as u64,
            blocks_done: self.blocks_done,
            count: u32::try_from(items.len()).unwrap_or(0),
        };
        batch.items[..items.len()].copy_from_slice(items);
        let mut parameters: [*mut c_void; 1] = [(&raw mut batch).cast()];
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
        check("cuLaunchKernel", result)
    }

    fn done(&self) -> u64 {
        self.word().load(Ordering::Acquire)
    }

    fn check(&self) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        // SAFETY: a stream of ours.
        match unsafe { cu::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(()),
            result => check("cuStreamQuery", result),
        }
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
