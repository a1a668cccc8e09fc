//! The CUDA driver and NCCL, both loaded at run time: as much of them as NCCL's operations and a kernel need. Where
//! either is missing the error is an [`Absent`].

mod mapped;

use std::ffi::{CStr, CString, OsStr, c_char, c_int, c_void};
use std::fmt;
use std::mem::ManuallyDrop;
use std::os::fd::{FromRawFd as _, OwnedFd};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use cudarc::driver::sys::{self as cuda, CUresult};

use crate::abi::Region;

/// What `--nccl` is tried as when it is not given.
const NCCL_NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// This machine has not got what is needed; nothing is known about right or wrong.
#[derive(Debug)]
pub(crate) struct Absent(pub(crate) String);

impl fmt::Display for Absent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Absent {}

fn cu(call: &str, result: CUresult) -> anyhow::Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        error => bail!("{call}: {error:?}"),
    }
}

/// A GPU with its primary context current on this thread, and a stream.
#[derive(Debug)]
pub(crate) struct Gpu {
    device: cuda::CUdevice,
    stream: cuda::CUstream,
}

impl Gpu {
    /// The name of the GPU with this index, if CUDA finds it.
    pub(crate) fn probe(index: i32) -> anyhow::Result<String> {
        let device = Self::device(index)?;
        let mut name = [0_u8; 256];
        // SAFETY: room for 255 characters and a NUL.
        let result = unsafe { cuda::cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), 255, device) };
        cu("cuDeviceGetName", result)?;
        Ok(CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned()).unwrap_or_default())
    }

    fn device(index: i32) -> anyhow::Result<cuda::CUdevice> {
        // SAFETY: only tries to load the driver library.
        if !unsafe { cuda::is_culib_present() } {
            bail!(Absent("no GPU: libcuda.so.1 cannot be loaded, so there is no NVIDIA driver here".to_owned()));
        }
        // SAFETY: the library is there; 0 is the only value allowed.
        cu("cuInit", unsafe { cuda::cuInit(0) }).map_err(|e| Absent(format!("no usable GPU: {e}")))?;
        let mut device = 0;
        // SAFETY: one device number to write.
        let result = unsafe { cuda::cuDeviceGet(&raw mut device, index) };
        cu("cuDeviceGet", result).map_err(|e| Absent(format!("no GPU with index {index}: {e}")))?;
        Ok(device)
    }

    pub(crate) fn open(index: i32) -> anyhow::Result<Self> {
        let device = Self::device(index)?;
        let mut context = ptr::null_mut();
        // SAFETY: a device of this driver; one pointer to write. The context is kept until the process ends.
        cu("cuDevicePrimaryCtxRetain", unsafe { cuda::cuDevicePrimaryCtxRetain(&raw mut context, device) })?;
        // SAFETY: the context was retained by the line above.
        cu("cuCtxSetCurrent", unsafe { cuda::cuCtxSetCurrent(context) })?;
        let mut stream = ptr::null_mut();
        let flags = cuda::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; one pointer to write.
        cu("cuStreamCreate", unsafe { cuda::cuStreamCreate(&raw mut stream, flags) })?;
        Ok(Self { device, stream })
    }

    pub(crate) fn alloc(&self, bytes: usize) -> anyhow::Result<DeviceMemory> {
        let mut address = 0;
        // SAFETY: a context is current; one address to write.
        let result = unsafe { cuda::cuMemAlloc_v2(&raw mut address, bytes.max(256)) };
        cu("cuMemAlloc", result).with_context(|| format!("{bytes} bytes of GPU memory"))?;
        Ok(DeviceMemory { address, bytes, mapped: None })
    }

    /// Where the GPU sits, as `0000:1b:00.0`.
    pub(crate) fn bus_id(index: i32) -> anyhow::Result<String> {
        let device = Self::device(index)?;
        let mut id = [0_u8; 32];
        // SAFETY: room for 31 characters and a NUL.
        let result = unsafe { cuda::cuDeviceGetPCIBusId(id.as_mut_ptr().cast::<c_char>(), 31, device) };
        cu("cuDeviceGetPCIBusId", result)?;
        Ok(CStr::from_bytes_until_nul(&id)?.to_string_lossy().to_lowercase())
    }

    /// Whether the driver hands out descriptors of GPU memory (dma-bufs).
    pub(crate) fn has_dmabuf(index: i32) -> anyhow::Result<bool> {
        Self::attribute(index, cuda::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED).map(|has| has == 1)
    }

    /// Major and minor number.
    pub(crate) fn compute_capability(index: i32) -> anyhow::Result<(c_int, c_int)> {
        use cuda::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
        };
        Ok((Self::attribute(index, MAJOR)?, Self::attribute(index, MINOR)?))
    }

    /// Whether NCCL flushes what this GPU receives: it does before Hopper.
    pub(crate) fn needs_flush(index: i32) -> anyhow::Result<bool> {
        Self::compute_capability(index).map(|(major, _)| major < 9)
    }

    fn attribute(index: i32, attribute: cuda::CUdevice_attribute) -> anyhow::Result<c_int> {
        let device = Self::device(index)?;
        let mut value = 0;
        // SAFETY: a device of this driver; one int to write.
        let result = unsafe { cuda::cuDeviceGetAttribute(&raw mut value, attribute, device) };
        cu("cuDeviceGetAttribute", result).map(|()| value)
    }

    pub(crate) fn upload<'a>(&self, to: impl Into<Place<'a>>, from: &[u8]) -> anyhow::Result<()> {
        let to = to.into().address(from.len());
        // SAFETY: the device memory is at least as large as the slice, which outlives the wait below.
        let result = unsafe { cuda::cuMemcpyHtoDAsync_v2(to, from.as_ptr().cast(), from.len(), self.stream) };
        cu("cuMemcpyHtoDAsync", result)?;
        self.synchronize()
    }

    /// From pinned memory, hence by a copy engine.
    pub(crate) fn copy_in(&self, to: &DeviceMemory, from: &HostMemory, bytes: usize) -> anyhow::Result<()> {
        ensure!(bytes <= to.bytes && bytes <= size_of_val(from.words()), "a copy of {bytes} bytes is past the end");
        // SAFETY: both are at least as large, and outlive the wait below.
        let result =
            unsafe { cuda::cuMemcpyHtoDAsync_v2(to.address, from.words().as_ptr().cast(), bytes, self.stream) };
        cu("cuMemcpyHtoDAsync", result)?;
        self.synchronize()
    }

    pub(crate) fn download<'a>(&self, to: &mut [u8], from: impl Into<Place<'a>>) -> anyhow::Result<()> {
        let from = from.into().address(to.len());
        // SAFETY: the device memory is at least as large as the slice, which outlives the wait below.
        let result = unsafe { cuda::cuMemcpyDtoHAsync_v2(to.as_mut_ptr().cast(), from, to.len(), self.stream) };
        cu("cuMemcpyDtoHAsync", result)?;
        self.synchronize()
    }

    /// Writes the same byte everywhere.
    pub(crate) fn wipe(&self, memory: &DeviceMemory, byte: u8) -> anyhow::Result<()> {
        // SAFETY: all of a live allocation; the wait below ends before it can.
        let result = unsafe { cuda::cuMemsetD8Async(memory.address, byte, memory.bytes, self.stream) };
        cu("cuMemsetD8Async", result)?;
        self.synchronize()
    }

    fn synchronize(&self) -> anyhow::Result<()> {
        // SAFETY: a stream of the current context.
        cu("cuStreamSynchronize", unsafe { cuda::cuStreamSynchronize(self.stream) })
    }

    /// Host memory that the GPU reaches as well.
    pub(crate) fn alloc_host(&self, bytes: usize) -> anyhow::Result<HostMemory> {
        let words = bytes.div_ceil(8).max(1);
        let mut place = ptr::null_mut();
        // SAFETY: a context is current; one pointer to write.
        let result = unsafe { cuda::cuMemHostAlloc(&raw mut place, words * 8, cuda::CU_MEMHOSTALLOC_DEVICEMAP) };
        cu("cuMemHostAlloc", result).with_context(|| format!("{bytes} bytes of host memory"))?;
        let mut memory =
            HostMemory { place: NonNull::new(place.cast()).context("cuMemHostAlloc: NULL")?, words, address: 0 };
        // SAFETY: memory that was allocated to be mapped; one address to write.
        let result = unsafe { cuda::cuMemHostGetDevicePointer_v2(&raw mut memory.address, place, 0) };
        cu("cuMemHostGetDevicePointer", result)?;
        memory.fill(0);
        Ok(memory)
    }

    /// A kernel of this name in PTX.
    pub(crate) fn load(&self, ptx: &str, name: &CStr) -> anyhow::Result<Kernel> {
        let image = CString::new(ptx)?;
        let mut module = ptr::null_mut();
        // SAFETY: a context is current; PTX that ends in NUL. The module stays until the process ends.
        let result = unsafe { cuda::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) };
        cu("cuModuleLoadData", result)?;
        let mut function = ptr::null_mut();
        // SAFETY: the module was loaded by the line above; a C string.
        let result = unsafe { cuda::cuModuleGetFunction(&raw mut function, module, name.as_ptr()) };
        cu("cuModuleGetFunction", result)?;
        Ok(Kernel(function))
    }

    /// Starts a kernel and returns. Of each argument the driver takes as many bytes as the kernel says, the low ones.
    ///
    /// # Safety
    /// The arguments are those of the kernel in number, size and order, and the memory that they name stays until the
    /// kernel has ended.
    pub(crate) unsafe fn launch(
        &self,
        kernel: &Kernel,
        blocks: u32,
        threads: u32,
        arguments: &mut [u64],
    ) -> anyhow::Result<()> {
        let mut pointers: Vec<_> = arguments.iter_mut().map(|argument| ptr::from_mut(argument).cast()).collect();
        let (list, none) = (pointers.as_mut_ptr(), ptr::null_mut());
        // SAFETY: the caller promises the arguments, which are copied by the call.
        let result = unsafe { cuda::cuLaunchKernel(kernel.0, blocks, 1, 1, threads, 1, 1, 0, self.stream, list, none) };
        cu("cuLaunchKernel", result)
    }

    /// What `body` queues on the stream, as a graph instead of being done.
    pub(crate) fn capture(&self, body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<Graph> {
        let mode = cuda::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of the current context that captures nothing yet.
        cu("cuStreamBeginCapture", unsafe { cuda::cuStreamBeginCapture_v2(self.stream, mode) })?;
        let queued = body();
        let mut graph = ptr::null_mut();
        // SAFETY: ends what was begun above, on the same thread; one pointer to write.
        let ended = cu("cuStreamEndCapture", unsafe { cuda::cuStreamEndCapture(self.stream, &raw mut graph) });
        queued.and(ended)?;
        let mut runnable = ptr::null_mut();
        // SAFETY: the graph of the capture; one pointer to write.
        let made = unsafe { cuda::cuGraphInstantiateWithFlags(&raw mut runnable, graph, 0) };
        // SAFETY: not used again; what was made of it stands for itself.
        let destroyed = cu("cuGraphDestroy", unsafe { cuda::cuGraphDestroy(graph) });
        cu("cuGraphInstantiate", made).and(destroyed)?;
        Ok(Graph(runnable))
    }

    /// Queues a graph.
    pub(crate) fn replay(&self, graph: &Graph) -> anyhow::Result<()> {
        // SAFETY: a live graph; the memory in it lives until the stream has been waited for.
        cu("cuGraphLaunch", unsafe { cuda::cuGraphLaunch(graph.0, self.stream) })
    }

    /// Waits for the stream, but not for ever.
    pub(crate) fn wait(&self, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        while !self.idle()? {
            if Instant::now() > deadline {
                bail!("the GPU is not done after {patience:?}");
            }
            yield_now();
        }
        Ok(())
    }

    /// Whether everything on the stream is done.
    fn idle(&self) -> anyhow::Result<bool> {
        // SAFETY: a stream of the current context.
        match unsafe { cuda::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => cu("cuStreamQuery", result).map(|()| true),
        }
    }
}

/// A stream that waits for another, and then copies from the GPU and back.
#[derive(Debug)]
pub(crate) struct Follower {
    own: Gpu,
    event: cuda::CUevent,
    gpu: DeviceMemory,
    host: HostMemory,
}

impl Gpu {
    pub(crate) fn follower(&self) -> anyhow::Result<Follower> {
        let mut stream = ptr::null_mut();
        let flags = cuda::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: a context is current; one pointer to write. The stream stays until the process ends.
        cu("cuStreamCreate", unsafe { cuda::cuStreamCreate(&raw mut stream, flags) })?;
        let mut event = ptr::null_mut();
        let flags = cuda::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: as above.
        cu("cuEventCreate", unsafe { cuda::cuEventCreate(&raw mut event, flags) })?;
        let own = Self { device: self.device, stream };
        Ok(Follower { own, event, gpu: self.alloc(Follower::BYTES)?, host: self.alloc_host(Follower::BYTES)? })
    }
}

impl Follower {
    const BYTES: usize = 64 << 10;

    /// Queues the copies behind all that `leader` has by now.
    pub(crate) fn follow(&self, leader: &Gpu) -> anyhow::Result<()> {
        let stream = self.own.stream;
        // SAFETY: an event and a stream of the current context.
        cu("cuEventRecord", unsafe { cuda::cuEventRecord(self.event, leader.stream) })?;
        // SAFETY: as above.
        cu("cuStreamWaitEvent", unsafe { cuda::cuStreamWaitEvent(stream, self.event, 0) })?;
        let host = self.host.words().as_ptr().cast_mut().cast();
        // SAFETY: live memory of this size, which nothing else looks at.
        let result = unsafe { cuda::cuMemcpyDtoHAsync_v2(host, self.gpu.address, Self::BYTES, stream) };
        cu("cuMemcpyDtoHAsync", result)?;
        // SAFETY: as above.
        let result = unsafe { cuda::cuMemcpyHtoDAsync_v2(self.gpu.address, host, Self::BYTES, stream) };
        cu("cuMemcpyHtoDAsync", result)
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        // Its memory goes next. A failure was seen by whoever waited for the leader.
        let _ = self.own.synchronize();
    }
}

/// Operations that can be queued again and again.
#[derive(Debug)]
pub(crate) struct Graph(cuda::CUgraphExec);

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: every launch of it has been waited for. A failure leaks, no more.
        let _ = unsafe { cuda::cuGraphExecDestroy(self.0) };
    }
}

/// GPU memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    address: cuda::CUdeviceptr,
    bytes: usize,
    /// What is mapped there, if it was not simply allocated.
    mapped: Option<cuda::CUmemGenericAllocationHandle>,
}

impl DeviceMemory {
    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl DeviceMemory {
    /// A descriptor of all of it; it begins and ends at pages.
    pub(crate) fn export(&self) -> anyhow::Result<OwnedFd> {
        let mut fd: c_int = -1;
        let kind = cuda::CUmemRangeHandleType::CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
        let place = (&raw mut fd).cast();
        // SAFETY: a live allocation; one descriptor to write.
        let result = unsafe { cuda::cuMemGetHandleForAddressRange(place, self.address, self.bytes, kind, 0) };
        cu("cuMemGetHandleForAddressRange", result)?;
        // SAFETY: made by the line above, for its caller to close.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Region for DeviceMemory {
    fn base(&self) -> *mut u8 {
        ptr::with_exposed_provenance_mut(usize::try_from(self.address).unwrap_or(0))
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

/// Some of it, from an offset in bytes to the end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    memory: &'a DeviceMemory,
    offset: usize,
}

impl<'a> From<&'a DeviceMemory> for Place<'a> {
    fn from(memory: &'a DeviceMemory) -> Self {
        Self { memory, offset: 0 }
    }
}

impl Place<'_> {
    pub(crate) fn skip(self, bytes: usize) -> Self {
        Self { offset: self.offset + bytes, ..self }
    }

    /// Where at least so many bytes are.
    fn address(self, bytes: usize) -> cuda::CUdeviceptr {
        assert!(self.offset + bytes <= self.memory.bytes, "{bytes} bytes at {self:?}");
        self.memory.address + u64::try_from(self.offset).unwrap_or(0)
    }

    fn pointer(self, bytes: usize) -> *mut c_void {
        let address = usize::try_from(self.address(bytes)).unwrap_or(0);
        ptr::with_exposed_provenance_mut(address)
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Some(handle) = self.mapped {
            return mapped::free(self.address, self.bytes, handle);
        }
        // SAFETY: allocated by cuMemAlloc; every operation on it has been waited for. A failure leaks, no more.
        let _ = unsafe { cuda::cuMemFree_v2(self.address) };
    }
}

/// Page-locked host memory that the GPU reaches as well, in words that host, GPU and adapters may touch at any time.
#[derive(Debug)]
pub(crate) struct HostMemory {
    place: NonNull<AtomicU64>,
    words: usize,
    address: cuda::CUdeviceptr,
}

impl HostMemory {
    /// For the GPU.
    pub(crate) fn device_address(&self) -> u64 {
        self.address
    }

    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: as many words were allocated, set to 0, and live as long as self.
        unsafe { std::slice::from_raw_parts(self.place.as_ptr(), self.words) }
    }

    pub(crate) fn fill(&self, value: u64) {
        self.words().iter().for_each(|word| word.store(value, Ordering::Relaxed));
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: allocated by cuMemHostAlloc, freed once. A failure leaks, no more.
        let _ = unsafe { cuda::cuMemFreeHost(self.place.as_ptr().cast()) };
    }
}

/// Code for the GPU.
#[derive(Debug)]
pub(crate) struct Kernel(cuda::CUfunction);

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([u8; 128]);

/// Element types of NCCL.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize, clap::ValueEnum)]
#[value(rename_all = "lower")]
pub(crate) enum Kind {
    Int8,
    Uint8,
    Int32,
    Uint32,
    Int64,
    Uint64,
    Half,
    Float,
    Double,
    Bfloat16,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
            Self::Int32 => "int32",
            Self::Uint32 => "uint32",
            Self::Int64 => "int64",
            Self::Uint64 => "uint64",
            Self::Half => "half",
            Self::Float => "float",
            Self::Double => "double",
            Self::Bfloat16 => "bfloat16",
        }
    }

    /// Bytes of an element.
    pub(crate) fn size(self) -> usize {
        match self {
            Self::Int8 | Self::Uint8 => 1,
            Self::Half | Self::Bfloat16 => 2,
            Self::Int32 | Self::Uint32 | Self::Float => 4,
            Self::Int64 | Self::Uint64 | Self::Double => 8,
        }
    }

    /// NCCL's number (ncclDataType_t).
    fn number(self) -> c_int {
        match self {
            Self::Int8 => 0,
            Self::Uint8 => 1,
            Self::Int32 => 2,
            Self::Uint32 => 3,
            Self::Int64 => 4,
            Self::Uint64 => 5,
            Self::Half => 6,
            Self::Float => 7,
            Self::Double => 8,
            Self::Bfloat16 => 9,
        }
    }
}

const SUM: c_int = 0;

type Comm = *mut c_void;
type Give = *const c_void;
type Take = *mut c_void;
type Stream = cuda::CUstream;

/// NCCL's library. cudarc can only load it by its usual names; here it may be any file.
pub(crate) struct Nccl {
    get_version: unsafe extern "C" fn(*mut c_int) -> c_int,
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    init_rank: unsafe extern "C" fn(*mut Comm, c_int, UniqueId, c_int) -> c_int,
    all_reduce: unsafe extern "C" fn(Give, Take, usize, c_int, c_int, Comm, Stream) -> c_int,
    all_gather: unsafe extern "C" fn(Give, Take, usize, c_int, Comm, Stream) -> c_int,
    reduce_scatter: unsafe extern "C" fn(Give, Take, usize, c_int, c_int, Comm, Stream) -> c_int,
    broadcast: unsafe extern "C" fn(Give, Take, usize, c_int, c_int, Comm, Stream) -> c_int,
    reduce: unsafe extern "C" fn(Give, Take, usize, c_int, c_int, c_int, Comm, Stream) -> c_int,
    send: unsafe extern "C" fn(Give, usize, c_int, c_int, Comm, Stream) -> c_int,
    recv: unsafe extern "C" fn(Take, usize, c_int, c_int, Comm, Stream) -> c_int,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    async_error: unsafe extern "C" fn(Comm, *mut c_int) -> c_int,
    abort: unsafe extern "C" fn(Comm) -> c_int,
    destroy: unsafe extern "C" fn(Comm) -> c_int,
    /// From NCCL 2.19 on.
    register: Option<unsafe extern "C" fn(Comm, Take, usize, *mut Take) -> c_int>,
    deregister: Option<unsafe extern "C" fn(Comm, Take) -> c_int>,
    error_string: unsafe extern "C" fn(c_int) -> *const c_char,
}

impl fmt::Debug for Nccl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nccl").finish_non_exhaustive()
    }
}

fn symbol<T: Copy>(library: &libloading::Library, name: &CStr) -> anyhow::Result<T> {
    // SAFETY: the caller's type is that of NCCL's nccl.h for this name.
    let symbol = unsafe { library.get::<T>(name.to_bytes_with_nul()) };
    Ok(*symbol.with_context(|| format!("NCCL has no {name:?}"))?)
}

impl Nccl {
    pub(crate) fn load(path: Option<&Path>) -> anyhow::Result<Self> {
        let names = path.map_or_else(|| NCCL_NAMES.map(OsStr::new).to_vec(), |path| vec![path.as_os_str()]);
        let mut reasons = Vec::new();
        let library = names.into_iter().find_map(|name| {
            // SAFETY: running the constructors of NCCL is what this command is for.
            let opened = unsafe { libloading::Library::new(name) };
            opened.map_err(|error| reasons.push(format!("{:#}", anyhow::Error::new(error)))).ok()
        });
        let Some(library) = library else {
            bail!(Absent(format!("no NCCL ({}); name the file with --nccl", reasons.join("; "))));
        };
        // NCCL has threads of its own; it is never unloaded.
        let library = ManuallyDrop::new(library);
        Ok(Self {
            get_version: symbol(&library, c"ncclGetVersion")?,
            get_unique_id: symbol(&library, c"ncclGetUniqueId")?,
            init_rank: symbol(&library, c"ncclCommInitRank")?,
            all_reduce: symbol(&library, c"ncclAllReduce")?,
            all_gather: symbol(&library, c"ncclAllGather")?,
            reduce_scatter: symbol(&library, c"ncclReduceScatter")?,
            broadcast: symbol(&library, c"ncclBroadcast")?,
            reduce: symbol(&library, c"ncclReduce")?,
            send: symbol(&library, c"ncclSend")?,
            recv: symbol(&library, c"ncclRecv")?,
            group_start: symbol(&library, c"ncclGroupStart")?,
            group_end: symbol(&library, c"ncclGroupEnd")?,
            async_error: symbol(&library, c"ncclCommGetAsyncError")?,
            abort: symbol(&library, c"ncclCommAbort")?,
            destroy: symbol(&library, c"ncclCommDestroy")?,
            register: symbol(&library, c"ncclCommRegister").ok(),
            deregister: symbol(&library, c"ncclCommDeregister").ok(),
            error_string: symbol(&library, c"ncclGetErrorString")?,
        })
    }

    fn check(&self, call: &str, code: c_int) -> anyhow::Result<()> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: NCCL returns a constant C string for every code.
        let text = unsafe { (self.error_string)(code) };
        if text.is_null() {
            bail!("{call} returned {code}");
        }
        // SAFETY: as above.
        let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
        bail!("{call} returned {code}: {text}")
    }

    /// For example 2.28.3.
    pub(crate) fn version(&self) -> anyhow::Result<String> {
        let mut version = 0;
        // SAFETY: one int to write.
        self.check("ncclGetVersion", unsafe { (self.get_version)(&raw mut version) })?;
        Ok(format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100))
    }

    pub(crate) fn unique_id(&self) -> anyhow::Result<[u8; 128]> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: 128 bytes to write.
        self.check("ncclGetUniqueId", unsafe { (self.get_unique_id)(&raw mut id) })?;
        Ok(id.0)
    }

    /// Joins the communicator; waits for the other ranks.
    pub(crate) fn join(&self, id: &[u8], rank: usize, ranks: usize) -> anyhow::Result<Communicator<'_>> {
        let id = UniqueId(id.try_into().context("a unique id of another length")?);
        let mut comm = ptr::null_mut();
        let (rank, ranks) = (c_int::try_from(rank)?, c_int::try_from(ranks)?);
        // SAFETY: a context is current; one pointer to write.
        let code = unsafe { (self.init_rank)(&raw mut comm, ranks, id, rank) };
        self.check("ncclCommInitRank", code)?;
        Ok(Communicator { nccl: self, comm })
    }
}

/// A user's buffer that a communicator knows.
#[derive(Debug)]
pub(crate) struct UserBuffer(Take);

/// A rank's communicator; aborted unless it is destroyed in peace.
#[derive(Debug)]
pub(crate) struct Communicator<'a> {
    nccl: &'a Nccl,
    comm: Comm,
}

impl Communicator<'_> {
    /// Queues the sum over all ranks of `count` elements.
    pub(crate) fn all_reduce(
        &self,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
        count: usize,
        kind: Kind,
    ) -> anyhow::Result<()> {
        let (from, to) = (from.pointer(count * kind.size()), to.pointer(count * kind.size()));
        // SAFETY: both are device memory of enough bytes, which lives until the stream has been waited for.
        let code = unsafe { (self.nccl.all_reduce)(from, to, count, kind.number(), SUM, self.comm, gpu.stream) };
        self.nccl.check("ncclAllReduce", code)
    }

    /// Queues the collection of `count` elements of each rank.
    pub(crate) fn all_gather(
        &self,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
        count: usize,
        ranks: usize,
        kind: Kind,
    ) -> anyhow::Result<()> {
        let (from, to) = (from.pointer(count * kind.size()), to.pointer(count * ranks * kind.size()));
        // SAFETY: as in all_reduce.
        let code = unsafe { (self.nccl.all_gather)(from, to, count, kind.number(), self.comm, gpu.stream) };
        self.nccl.check("ncclAllGather", code)
    }

    /// Queues the sum over all ranks, of which each takes `count` elements.
    pub(crate) fn reduce_scatter(
        &self,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
        count: usize,
        ranks: usize,
        kind: Kind,
    ) -> anyhow::Result<()> {
        let (from, to) = (from.pointer(count * ranks * kind.size()), to.pointer(count * kind.size()));
        // SAFETY: as in all_reduce.
        let code = unsafe { (self.nccl.reduce_scatter)(from, to, count, kind.number(), SUM, self.comm, gpu.stream) };
        self.nccl.check("ncclReduceScatter", code)
    }

    /// Queues the root's `count` elements for all.
    pub(crate) fn broadcast(
        &self,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
        count: usize,
        kind: Kind,
        root: usize,
    ) -> anyhow::Result<()> {
        let (from, to, root) =
            (from.pointer(count * kind.size()), to.pointer(count * kind.size()), c_int::try_from(root)?);
        // SAFETY: as in all_reduce.
        let code = unsafe { (self.nccl.broadcast)(from, to, count, kind.number(), root, self.comm, gpu.stream) };
        self.nccl.check("ncclBroadcast", code)
    }

    /// Queues the sum over all ranks for the root.
    pub(crate) fn reduce(
        &self,
        gpu: &Gpu,
        from: Place<'_>,
        to: Place<'_>,
        count: usize,
        kind: Kind,
        root: usize,
    ) -> anyhow::Result<()> {
        let (from, to, root) =
            (from.pointer(count * kind.size()), to.pointer(count * kind.size()), c_int::try_from(root)?);
        // SAFETY: as in all_reduce.
        let code = unsafe { (self.nccl.reduce)(from, to, count, kind.number(), SUM, root, self.comm, gpu.stream) };
        self.nccl.check("ncclReduce", code)
    }

    /// Queues `count` elements for a peer.
    pub(crate) fn send(&self, gpu: &Gpu, from: Place<'_>, count: usize, kind: Kind, peer: usize) -> anyhow::Result<()> {
        let (from, peer) = (from.pointer(count * kind.size()), c_int::try_from(peer)?);
        // SAFETY: device memory of enough bytes, which lives until the stream has been waited for.
        let code = unsafe { (self.nccl.send)(from, count, kind.number(), peer, self.comm, gpu.stream) };
        self.nccl.check("ncclSend", code)
    }

    /// Queues the arrival of `count` elements from a peer.
    pub(crate) fn recv(&self, gpu: &Gpu, to: Place<'_>, count: usize, kind: Kind, peer: usize) -> anyhow::Result<()> {
        let (to, peer) = (to.pointer(count * kind.size()), c_int::try_from(peer)?);
        // SAFETY: as in send.
        let code = unsafe { (self.nccl.recv)(to, count, kind.number(), peer, self.comm, gpu.stream) };
        self.nccl.check("ncclRecv", code)
    }

    /// What `body` queues begins together.
    pub(crate) fn group(&self, body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
        // SAFETY: no arguments; ended below, on the same thread.
        self.nccl.check("ncclGroupStart", unsafe { (self.nccl.group_start)() })?;
        let queued = body();
        // SAFETY: as above.
        let ended = self.nccl.check("ncclGroupEnd", unsafe { (self.nccl.group_end)() });
        queued.and(ended)
    }

    /// Makes memory known to the communicator, until it is given back.
    pub(crate) fn register(&self, memory: &DeviceMemory) -> anyhow::Result<UserBuffer> {
        let register = self.nccl.register.context("this NCCL has no ncclCommRegister (2.19 and newer have)")?;
        let place = Place::from(memory).pointer(memory.bytes);
        let mut handle = ptr::null_mut();
        // SAFETY: a live communicator; live device memory; one pointer to write.
        let code = unsafe { register(self.comm, place, memory.bytes, &raw mut handle) };
        self.nccl.check("ncclCommRegister", code)?;
        Ok(UserBuffer(handle))
    }

    pub(crate) fn deregister(&self, buffer: UserBuffer) -> anyhow::Result<()> {
        let deregister = self.nccl.deregister.context("this NCCL has no ncclCommDeregister")?;
        // SAFETY: a live communicator, and what it gave for a buffer, once.
        self.nccl.check("ncclCommDeregister", unsafe { deregister(self.comm, buffer.0) })
    }

    /// Waits for the stream; an error of NCCL or too long a wait ends it.
    pub(crate) fn wait(&self, gpu: &Gpu, patience: Duration) -> anyhow::Result<()> {
        let deadline = Instant::now() + patience;
        while !gpu.idle()? {
            let mut error = 0;
            // SAFETY: a live communicator; one int to write.
            let code = unsafe { (self.nccl.async_error)(self.comm, &raw mut error) };
            self.nccl.check("ncclCommGetAsyncError", code)?;
            self.nccl.check("the operation", error)?;
            if Instant::now() > deadline {
                bail!("the operation is not done after {patience:?}");
            }
            yield_now();
        }
        Ok(())
    }

    pub(crate) fn destroy(mut self) -> anyhow::Result<()> {
        let comm = std::mem::replace(&mut self.comm, ptr::null_mut());
        // SAFETY: a live communicator that is not used again.
        self.nccl.check("ncclCommDestroy", unsafe { (self.nccl.destroy)(comm) })
    }
}

impl Drop for Communicator<'_> {
    fn drop(&mut self) {
        if !self.comm.is_null() {
            // SAFETY: a live communicator that is not used again. The error that led here is the one to tell.
            let _ = unsafe { (self.nccl.abort)(self.comm) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_nccl_is_absent_not_wrong() {
        let error = Nccl::load(Some(Path::new("/nonexistent/libnccl.so.2"))).unwrap_err();
        assert!(error.downcast_ref::<Absent>().is_some());
        assert!(error.to_string().contains("/nonexistent/libnccl.so.2"), "{error}");
    }

    #[test]
    fn a_file_that_is_not_nccl_is_named() {
        // Any library will do; the C library is always there.
        let error = Nccl::load(Some(Path::new("libc.so.6"))).unwrap_err();
        assert!(error.to_string().contains("ncclGetVersion"), "{error}");
    }
}
