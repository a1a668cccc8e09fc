//! GPUs through the CUDA driver, loaded at run time: copies between GPU memory and pinned host memory for staging.
//!
//! The copies run in a *context of our own*, with two streams (from and to the GPU), not in the program's primary context.
//! The hardware work queues of a context are shared by its streams, and the program's everyday pattern (a stream that waits
//! for NCCL's kernel, and a copy or kernel behind that) blocks the queue that it is in. A copy of ours in the same queue
//! never runs, and the kernel that waits for its data never ends. Measured on an H200 with driver 580: with
//! `CUDA_DEVICE_MAX_CONNECTIONS=1` one such stream is enough, with the default of 8, eight are, whatever our stream's
//! priority; green contexts share the queues, too. In a context of its own a copy of 512 KiB took 18 to 25 µs with 40 such
//! streams, with and without MPS. It costs 265 MiB of GPU memory, once a GPU and process (525 MiB with the usual size of
//! stacks, of which copies have none), and is there while something may be staged.
//!
//! For the same reason only memory of `cuMemCreate` is staged, as NCCL's is by default: the driver carries out a copy of
//! `cuMemAlloc` memory in the context that it belongs to, 2 ms late while a kernel runs, and then blocked as above.
//!
//! A copy engine may tear lines of 128 bytes into halves: for those that have flags see `transfer::staging`.
//!
//! Calls wait for copies only, and for none of the program's kernels; those of the data path wait for nothing. All are made
//! with the thread's stream capture mode relaxed, so that none spoils a graph that another thread captures.

use std::ffi::{c_int, c_void};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self as cu, CUresult};

use super::Pages;

/// What staging calls; a driver without one of them is too old.
const CALLS: &[&str] = &[
    "cuInit",
    "cuCtxCreate_v2",
    "cuCtxSetLimit",
    "cuMemRetainAllocationHandle",
    "cuMemHostRegister_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuStreamWriteValue32_v2",
    "cuMemcpy2DAsync_v2",
];

/// Copies take microseconds; a GPU that takes longer than this for them hangs. Tests that wait in vain don't wait as long.
pub(crate) const PATIENCE: Duration = if cfg!(test) { Duration::from_millis(500) } else { Duration::from_secs(10) };
/// What is waited for one that has hung before.
const SHORT_PATIENCE: Duration = Duration::from_millis(100);

fn check(call: &str, result: CUresult) -> Result<(), String> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{call}: {result:?}")) }
}

/// An end of the process takes the contexts along: not a failure, and no one is to be told of it.
fn unless_over(result: Result<(), String>) -> Result<(), String> {
    let over =
        |why: &String| why.contains("CUDA_ERROR_DEINITIALIZED") || why.contains("CUDA_ERROR_CONTEXT_IS_DESTROYED");
    if result.as_ref().is_err_and(over) { Ok(()) } else { result }
}

/// Whether there is a driver that can; or why not.
pub fn available() -> Result<(), String> {
    static ANSWER: OnceLock<Result<(), String>> = OnceLock::new();
    ANSWER
        .get_or_init(|| {
            // SAFETY: loads the library by its usual names.
            if !unsafe { cu::is_culib_present() } {
                return Err("there is no CUDA driver (libcuda.so.1)".to_owned());
            }
            // SAFETY: it is there.
            let driver = unsafe { cu::culib() };
            for call in CALLS {
                // SAFETY: looked up only, not called.
                if unsafe { driver.get::<unsafe extern "C" fn()>(call.as_bytes()) }.is_err() {
                    return Err(format!("the CUDA driver has no {call}: staging takes one of CUDA 11.7 or newer"));
                }
            }
            // SAFETY: no arguments but flags, of which there are none.
            let result = unsafe { cu::cuInit(0) };
            check("cuInit", result).map_err(|why| match result {
                // It is looked for by the name libcuda.so, too.
                CUresult::CUDA_ERROR_STUB_LIBRARY => format!(
                    "{why}: libcuda.so is the CUDA toolkit's stub, not the driver; remove .../stubs from LD_LIBRARY_PATH"
                ),
                _ => why,
            })
        })
        .clone()
}

/// While it lives stream captures, of any thread, don't concern the calls of this one.
#[derive(Debug)]
struct Relaxed(cu::CUstreamCaptureMode);

impl Relaxed {
    fn enter() -> Result<Self, String> {
        let mut mode = cu::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: one mode to read and write.
        let result = unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut mode) };
        check("cuThreadExchangeStreamCaptureMode", result).map(|()| Self(mode))
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        // SAFETY: gives the thread its own mode back.
        unsafe { cu::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}

/// While it lives a context is current on this thread, too.
#[derive(Debug)]
struct Entered {
    _relaxed: Relaxed,
}

impl Entered {
    fn enter(context: cu::CUcontext) -> Result<Self, String> {
        let relaxed = Relaxed::enter()?;
        // SAFETY: a context of ours, alive.
        check("cuCtxPushCurrent", unsafe { cu::cuCtxPushCurrent_v2(context) })?;
        Ok(Self { _relaxed: relaxed })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: pops what `enter` pushed.
        unsafe { cu::cuCtxPopCurrent_v2(&raw mut context) };
    }
}

/// The ordinal of the GPU that holds this memory.
fn ordinal(address: u64) -> Result<c_int, String> {
    let mut ordinal: c_int = 0;
    let of = cu::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL;
    // SAFETY: one int to write, as this attribute has.
    let result = unsafe { cu::cuPointerGetAttribute((&raw mut ordinal).cast(), of, address) };
    check("cuPointerGetAttribute", result).map(|()| ordinal)
}

/// The GPU that holds this memory, for people; None where no driver knows it.
pub fn describe(address: u64) -> Option<String> {
    available().ok()?;
    let ordinal = ordinal(address).ok()?;
    Some(format!("GPU {ordinal} ({})", name(ordinal).ok()?))
}

/// Where the GPU is that holds this memory; None where no driver knows it.
pub fn bus_id(address: u64) -> Option<String> {
    available().ok()?;
    let mut device = 0;
    // SAFETY: one device to write.
    check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, ordinal(address).ok()?) }).ok()?;
    bus_id_of(device)
}

fn bus_id_of(device: cu::CUdevice) -> Option<String> {
    let mut text = [0u8; 32];
    // SAFETY: room for a text of the size that the call is told.
    check("cuDeviceGetPCIBusId", unsafe { cu::cuDeviceGetPCIBusId(text.as_mut_ptr().cast(), 31, device) }).ok()?;
    let end = text.iter().position(|&b| b == 0).unwrap_or(0);
    Some(String::from_utf8_lossy(&text[..end]).into_owned())
}

/// Whether memory of the GPU at this bus id can be staged; or why not.
pub fn available_at(bus_id: &str) -> Result<(), String> {
    available()?;
    let mut count = 0;
    // SAFETY: one int to write.
    check("cuDeviceGetCount", unsafe { cu::cuDeviceGetCount(&raw mut count) })?;
    let at = |ordinal| {
        let mut device = 0;
        // SAFETY: one device to write.
        check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, ordinal) }).ok()?;
        bus_id_of(device).filter(|bus| bus.eq_ignore_ascii_case(bus_id)).map(|_| device)
    };
    let Some(device) = (0..count).find_map(at) else {
        return Err("CUDA does not show it to this process (CUDA_VISIBLE_DEVICES)".to_owned());
    };
    let mut can = 0;
    let of = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    // SAFETY: one int to write.
    check("cuDeviceGetAttribute", unsafe { cu::cuDeviceGetAttribute(&raw mut can, of, device) })?;
    if can == 0 { Err("it has no memory of cuMemCreate".to_owned()) } else { Ok(()) }
}

fn name(ordinal: c_int) -> Result<String, String> {
    let mut device = 0;
    // SAFETY: one device to write.
    check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, ordinal) })?;
    let mut name = [0u8; 96];
    // SAFETY: room for a name of the size that the call is told.
    check("cuDeviceGetName", unsafe { cu::cuDeviceGetName(name.as_mut_ptr().cast(), 95, device) })?;
    let end = name.iter().position(|&b| b == 0).unwrap_or(0);
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

/// Only memory that belongs to no context can be copied from ours; see the top.
fn is_of_no_context(address: u64) -> bool {
    let mut handle = 0;
    let at = ptr::with_exposed_provenance_mut::<c_void>(usize::try_from(address).unwrap_or(0));
    // SAFETY: one handle to write; the driver checks the address.
    if unsafe { cu::cuMemRetainAllocationHandle(&raw mut handle, at) } != CUresult::CUDA_SUCCESS {
        return false;
    }
    // SAFETY: retained above.
    unsafe { cu::cuMemRelease(handle) };
    true
}

/// Which way copies go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    FromGpu,
    ToGpu,
}

/// Our context on one GPU, shared by all connections of the process.
#[derive(Debug)]
pub struct Stager {
    ordinal: c_int,
    name: String,
    context: cu::CUcontext,
    /// From the GPU, and to it.
    streams: [cu::CUstream; 2],
    words: Mutex<Words>,
    /// By direction: the last wait for copies was in vain, and nobody needs to wait as long for the next.
    hangs: [AtomicBool; 2],
}

// SAFETY: CUDA's handles may be used from any thread, at once too.
unsafe impl Send for Stager {}
// SAFETY: as above.
unsafe impl Sync for Stager {}

/// Pinned words for marks, a line each, so that no connection has to pin its own.
#[derive(Debug, Default)]
struct Words {
    pages: Vec<Pages>,
    free: Vec<Word>,
}

/// One line of pinned memory.
#[derive(Debug, Clone, Copy)]
struct Word {
    host: NonNull<u8>,
    /// The address under which the GPU knows it.
    gpu: u64,
}

const LINE: usize = 64;

// SAFETY: memory that is reached as atomics only.
unsafe impl Send for Word {}
// SAFETY: as above.
unsafe impl Sync for Word {}

impl Word {
    /// What the copies tell, and the waits for them.
    const MARK: usize = 0;
    const FENCE: usize = 8;

    #[inline]
    fn at(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: inside its line.
        let p = unsafe { self.host.as_ptr().add(offset) };
        // SAFETY: aligned, alive as long as its stager, and only reached as an atomic.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }
}

/// What is known of a GPU.
#[derive(Debug, Default)]
struct Place {
    /// While it is in use.
    stager: Weak<Stager>,
    /// Why there is none: NCCL asks again with each buffer and connection, and the answer is dear.
    refused: Option<String>,
}

static PLACES: Mutex<Vec<(c_int, Arc<Mutex<Place>>)>> = Mutex::new(Vec::new());

/// The place of a GPU.
fn place(ordinal: c_int) -> Arc<Mutex<Place>> {
    let mut all = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, place)) = all.iter().find(|(o, _)| *o == ordinal) {
        return Arc::clone(place);
    }
    let place = Arc::<Mutex<Place>>::default();
    all.push((ordinal, Arc::clone(&place)));
    place
}

impl Stager {
    /// The stager of the GPU that holds this range; or why it can't be staged.
    pub fn of(address: u64, length: usize) -> Result<Arc<Self>, String> {
        available()?;
        let _relaxed = Relaxed::enter()?;
        let ordinal = ordinal(address)?;
        let last = address.saturating_add(length.saturating_sub(1) as u64);
        if !is_of_no_context(address) || !is_of_no_context(last) {
            return Err(
                "the memory is not of cuMemCreate: copies of it would wait for the program's kernels; NCCL's own is \
                 with NCCL_CUMEM_ENABLE=1 (its default where the driver can). A program's own buffers stay unregistered, which must be \
                 so on all ranks or on none: where only some stage, NCCL_GRAPH_REGISTER=0 and NCCL_LOCAL_REGISTER=0 on all"
                    .to_owned(),
            );
        }
        // Who wants another GPU does not wait for this one.
        let place = place(ordinal);
        let mut place = place.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = &place.refused {
            return Err(why.clone());
        }
        if let Some(stager) = place.stager.upgrade() {
            return if stager.hangs() { Err(format!("copies on {} hang", stager.describe())) } else { Ok(stager) };
        }
        let stager = Self::open(ordinal).inspect_err(|why| place.refused = Some(why.clone()))?;
        let stager = Arc::new(stager);
        place.stager = Arc::downgrade(&stager);
        Ok(stager)
    }

    fn hangs(&self) -> bool {
        self.hangs.iter().any(|way| way.load(Ordering::Relaxed))
    }

    /// With the capture mode relaxed.
    fn open(ordinal: c_int) -> Result<Self, String> {
        let mut device = 0;
        // SAFETY: one device to write.
        check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, ordinal) })?;
        let name = name(ordinal)?;
        let mut context = ptr::null_mut();
        // SAFETY: one context to write; it is current from here on.
        let result = unsafe { cu::cuCtxCreate_v2(&raw mut context, 0, device) };
        check("cuCtxCreate", result).map_err(|why| match result {
            CUresult::CUDA_ERROR_OUT_OF_MEMORY => format!(
                "{why}: a context for copies takes 265 MiB of the memory of GPU {ordinal} ({name}); lower the fraction that the \
                 framework takes, or NCCL_NET_RDMA_GPU_PATH=host"
            ),
            _ => format!("{why} on GPU {ordinal} ({name})"),
        })?;
        let mut stager = Self {
            ordinal,
            name,
            context,
            streams: [ptr::null_mut(); 2],
            words: Mutex::default(),
            hangs: Default::default(),
        };
        let ready = stager.prepare();
        // SAFETY: pops the context that was just made.
        unsafe { cu::cuCtxPopCurrent_v2(&raw mut context) };
        ready?;
        // A first mark on each stream: does this GPU write them?
        let word = stager.take_word()?;
        stager.fence(Direction::FromGpu, word, 1)?;
        stager.fence(Direction::ToGpu, word, 2)?;
        stager.give_back(word);
        Ok(stager)
    }

    /// With the context current.
    fn prepare(&mut self) -> Result<(), String> {
        // Memory is what it costs: no kernel runs here, so none needs a stack. A driver that knows better may refuse.
        // SAFETY: a limit and its value.
        unsafe { cu::cuCtxSetLimit(cu::CUlimit::CU_LIMIT_STACK_SIZE, 16) };
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two ints to write.
        let result = unsafe { cu::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", result)?;
        let flags = cu::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        for stream in &mut self.streams {
            // SAFETY: one stream to write.
            let result = unsafe { cu::cuStreamCreateWithPriority(stream, flags, greatest) };
            check("cuStreamCreateWithPriority", result)?;
        }
        Ok(())
    }

    /// For people.
    pub fn describe(&self) -> String {
        format!("GPU {} ({})", self.ordinal, self.name)
    }

    fn stream(&self, direction: Direction) -> cu::CUstream {
        self.streams[usize::from(direction == Direction::ToGpu)]
    }

    /// Pins pages of ours; they stay until [`Self::unpin`].
    pub(super) fn pin(&self, pages: &Pages) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        let at = pages.base().as_ptr().cast();
        // For our context alone.
        let flags = cu::CU_MEMHOSTREGISTER_DEVICEMAP;
        pages.keep_from_children();
        // SAFETY: whole pages of ours.
        let result = unsafe { cu::cuMemHostRegister_v2(at, pages.len(), flags) };
        check("cuMemHostRegister", result)
    }

    pub(super) fn unpin(&self, pages: &Pages) {
        // An error has no one to be told to: the driver is on its way out.
        let Ok(_entered) = Entered::enter(self.context) else { return };
        // SAFETY: pinned by us, and nothing copies there any more.
        unsafe { cu::cuMemHostUnregister(pages.base().as_ptr().cast()) };
    }

    fn take_word(&self) -> Result<Word, String> {
        let mut words = self.words.lock().unwrap_or_else(PoisonError::into_inner);
        if words.free.is_empty() {
            let pages = Pages::map(LINE).map_err(|e| format!("memory for marks: {e}"))?;
            self.pin(&pages)?;
            let (base, len) = (pages.base(), pages.len());
            words.pages.push(pages);
            let mut gpu = 0;
            {
                let _entered = Entered::enter(self.context)?;
                // SAFETY: one address to write; pinned above.
                let result = unsafe { cu::cuMemHostGetDevicePointer_v2(&raw mut gpu, base.as_ptr().cast(), 0) };
                check("cuMemHostGetDevicePointer", result)?;
            }
            for offset in (0..len).step_by(LINE) {
                // SAFETY: inside the pages.
                let host = unsafe { base.add(offset) };
                words.free.push(Word { host, gpu: gpu + offset as u64 });
            }
        }
        let word = words.free.pop().ok_or("no memory for marks")?;
        word.at(Word::MARK).store(0, Ordering::Release);
        word.at(Word::FENCE).store(0, Ordering::Release);
        Ok(word)
    }

    fn give_back(&self, word: Word) {
        self.words.lock().unwrap_or_else(PoisonError::into_inner).free.push(word);
    }

    /// Has the stream write `value` behind all that is in it.
    fn mark(&self, direction: Direction, address: u64, value: u32) -> Result<(), String> {
        // Its default is a barrier before the write: what was copied is there when the word is.
        // SAFETY: a pinned word of ours.
        let result = unsafe { cu::cuStreamWriteValue32_v2(self.stream(direction), address, value, 0) };
        check("cuStreamWriteValue32", result)
    }

    /// Waits until all that is in the stream now is done.
    fn fence(&self, direction: Direction, word: Word, value: u32) -> Result<(), String> {
        {
            let _entered = Entered::enter(self.context)?;
            self.mark(direction, word.gpu + Word::FENCE as u64, value)?;
        }
        let hangs = &self.hangs[usize::from(direction == Direction::ToGpu)];
        let patience = if hangs.load(Ordering::Relaxed) { SHORT_PATIENCE } else { PATIENCE };
        let done = || word.at(Word::FENCE).load(Ordering::Acquire) == value;
        let begin = Instant::now();
        while !done() {
            // This thread may be what was late: the word is looked at once more.
            if begin.elapsed() > patience && !done() {
                hangs.store(true, Ordering::Relaxed);
                let way = if direction == Direction::ToGpu { "to" } else { "from" };
                return Err(format!("copies {way} {} do not end; waited for {patience:?}", self.describe()));
            }
            std::thread::yield_now();
        }
        hangs.store(false, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        let words = self.words.get_mut().unwrap_or_else(PoisonError::into_inner);
        let pages = std::mem::take(&mut words.pages);
        if self.hangs.iter().any(|way| way.load(Ordering::Relaxed)) {
            // What still runs there has its memory for ever, and to destroy the context would be to wait for it.
            std::mem::forget(pages);
            return;
        }
        pages.iter().for_each(|pages| self.unpin(pages));
        // After the driver's own end this is refused, and nothing is left of the context.
        let Ok(_relaxed) = Relaxed::enter() else { return };
        // SAFETY: ours, and everything that used it held this stager.
        unsafe { cu::cuCtxDestroy_v2(self.context) };
    }
}

/// The copies of one connection: a direction, and a word of its own for marks.
#[derive(Debug)]
pub struct Lane {
    stager: Arc<Stager>,
    direction: Direction,
    word: Word,
    /// Nothing is started any more. Held while copies are started: whoever closes knows that none comes after. Nobody else takes
    /// it, and the driver takes locks of its own for each copy.
    closed: Mutex<bool>,
    /// Waits so far.
    fences: Mutex<u32>,
}

/// A copy of a [`Lane`].
#[derive(Debug, Clone, Copy)]
pub struct Copy {
    pub gpu: u64,
    pub host: u64,
    pub length: u64,
    /// The last 8 bytes of each line are written when all others are there.
    pub flagged: bool,
    /// Written behind it.
    pub mark: Option<u32>,
}

impl Lane {
    pub fn open(stager: &Arc<Stager>, direction: Direction) -> Result<Self, String> {
        let word = stager.take_word()?;
        Ok(Self { stager: Arc::clone(stager), direction, word, closed: Mutex::new(false), fences: Mutex::new(0) })
    }

    pub fn stager(&self) -> &Arc<Stager> {
        &self.stager
    }

    /// Starts copies, in order.
    ///
    /// # Safety
    /// The host memory is pinned, and both ranges stay in place until the copies are done.
    pub unsafe fn start(&self, copies: impl Iterator<Item = Copy>) -> Result<(), String> {
        let closed = self.closed.lock().unwrap_or_else(PoisonError::into_inner);
        if *closed {
            return Err("the connection has ended, nothing is copied any more".to_owned());
        }
        // SAFETY: the caller's promise.
        unless_over(unsafe { self.start_all(copies) }).map_err(|why| format!("{why} on {}", self.stager.describe()))
    }

    /// # Safety
    /// As [`Self::start`].
    unsafe fn start_all(&self, copies: impl Iterator<Item = Copy>) -> Result<(), String> {
        let _entered = Entered::enter(self.stager.context)?;
        let stream = self.stager.stream(self.direction);
        for copy in copies {
            let length = usize::try_from(copy.length).map_err(|e| e.to_string())?;
            let host = usize::try_from(copy.host).map_err(|e| e.to_string())?;
            let host: *mut c_void = ptr::with_exposed_provenance_mut(host);
            if copy.flagged && self.direction == Direction::ToGpu {
                // SAFETY: by this function's contract.
                unsafe { self.start_flagged(copy.gpu, host, length) }?;
            } else if length > 0 {
                let result = match self.direction {
                    // SAFETY: by this function's contract.
                    Direction::FromGpu => unsafe { cu::cuMemcpyDtoHAsync_v2(host, copy.gpu, length, stream) },
                    // SAFETY: by this function's contract.
                    Direction::ToGpu => unsafe { cu::cuMemcpyHtoDAsync_v2(copy.gpu, host, length, stream) },
                };
                check("cuMemcpyAsync", result).map_err(|e| format!("{e} ({length} bytes at {:#x})", copy.gpu))?;
            }
            if let Some(mark) = copy.mark {
                self.stager.mark(self.direction, self.word.gpu + Word::MARK as u64, mark)?;
            }
        }
        Ok(())
    }

    /// Copies to the GPU the data of all lines of 128 bytes, and behind them the flags, the last 8 bytes of each. Behind the
    /// last whole line there are no flags, and none in what does not begin at a line.
    ///
    /// # Safety
    /// As [`Self::start`].
    unsafe fn start_flagged(&self, gpu: u64, host: *mut c_void, length: usize) -> Result<(), String> {
        const LINE: usize = 128;
        const FLAG: usize = 8;
        let stream = self.stager.stream(Direction::ToGpu);
        let lines = if gpu.is_multiple_of(LINE as u64) { length / LINE } else { 0 };
        let rest = length - lines * LINE;
        if rest > 0 {
            let (gpu, host) = (gpu + (lines * LINE) as u64, host.cast::<u8>().wrapping_add(lines * LINE).cast());
            // SAFETY: by this function's contract.
            let result = unsafe { cu::cuMemcpyHtoDAsync_v2(gpu, host, rest, stream) };
            check("cuMemcpyHtoDAsync", result)?;
        }
        for (first, width) in [(0, LINE - FLAG), (LINE - FLAG, FLAG)] {
            let copy = cu::CUDA_MEMCPY2D {
                srcXInBytes: first,
                srcY: 0,
                srcMemoryType: cu::CUmemorytype::CU_MEMORYTYPE_HOST,
                srcHost: host,
                srcDevice: 0,
                srcArray: ptr::null_mut(),
                srcPitch: LINE,
                dstXInBytes: first,
                dstY: 0,
                dstMemoryType: cu::CUmemorytype::CU_MEMORYTYPE_DEVICE,
                dstHost: ptr::null_mut(),
                dstDevice: gpu,
                dstArray: ptr::null_mut(),
                dstPitch: LINE,
                WidthInBytes: width,
                Height: lines,
            };
            if lines > 0 {
                // SAFETY: by this function's contract; the description is read by the call.
                let result = unsafe { cu::cuMemcpy2DAsync_v2(&raw const copy, stream) };
                check("cuMemcpy2DAsync", result).map_err(|e| format!("{e} ({lines} lines at {gpu:#x})"))?;
            }
        }
        Ok(())
    }

    /// The last mark that was written: one load.
    #[inline]
    pub fn reached(&self) -> u32 {
        self.word.at(Word::MARK).load(Ordering::Acquire)
    }

    /// An error of the GPU, after which no mark is written.
    pub fn check(&self) -> Result<(), String> {
        let query = || {
            let _entered = Entered::enter(self.stager.context)?;
            // SAFETY: a stream of ours.
            match unsafe { cu::cuStreamQuery(self.stager.stream(self.direction)) } {
                CUresult::CUDA_ERROR_NOT_READY => Ok(()),
                result => check("cuStreamQuery", result),
            }
        };
        unless_over(query()).map_err(|why| format!("{why} on {}", self.stager.describe()))
    }

    /// From its return on no copy is started. What was started before goes on, see [`Self::settle`].
    pub fn close(&self) {
        *self.closed.lock().unwrap_or_else(PoisonError::into_inner) = true;
    }

    /// Waits until all that was started is done, for 10 s at most.
    pub fn settle(&self) -> Result<(), String> {
        let mut fences = self.fences.lock().unwrap_or_else(PoisonError::into_inner);
        *fences = fences.wrapping_add(1);
        unless_over(self.stager.fence(self.direction, self.word, *fences))
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A word that may still be written is never used again.
        if self.settle().is_ok() {
            self.stager.give_back(self.word);
        }
    }
}

#[cfg(test)]
#[expect(clippy::cast_possible_truncation, reason = "a pattern of bytes")]
mod tests {
    use super::*;

    /// The program's context on the first GPU; None where there is no GPU: said aloud.
    fn primary() -> Option<Entered> {
        use std::io::Write as _;
        let skip = |why: &str| {
            // Not by println, which a test that passes keeps to itself.
            let _ = std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes());
            None
        };
        if let Err(why) = available() {
            return skip(&why);
        }
        let mut count = 0;
        // SAFETY: one int to write.
        if unsafe { cu::cuDeviceGetCount(&raw mut count) } != CUresult::CUDA_SUCCESS || count == 0 {
            return skip("no GPU");
        }
        let mut context = ptr::null_mut();
        // SAFETY: one context to write; it stays until the process ends.
        check("", unsafe { cu::cuDevicePrimaryCtxRetain(&raw mut context, 0) }).expect("a context");
        Some(Entered::enter(context).expect("current"))
    }

    /// Memory of cuMemCreate, for ever.
    fn create(length: usize) -> u64 {
        // SAFETY: all zeroes is a valid description.
        let mut kind: cu::CUmemAllocationProp = unsafe { std::mem::zeroed() };
        kind.type_ = cu::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        kind.location.type_ = cu::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
        let (mut handle, mut address) = (0, 0);
        // SAFETY: one handle to write; a description of memory.
        check("cuMemCreate", unsafe { cu::cuMemCreate(&raw mut handle, length, &raw const kind, 0) }).expect("memory");
        // SAFETY: one address to write.
        let reserved = unsafe { cu::cuMemAddressReserve(&raw mut address, length, 0, 0, 0) };
        check("cuMemAddressReserve", reserved).expect("addresses");
        // SAFETY: a fresh range of the handle's size.
        check("cuMemMap", unsafe { cu::cuMemMap(address, length, 0, handle, 0) }).expect("a mapping");
        // SAFETY: all zeroes is a valid description.
        let mut access: cu::CUmemAccessDesc = unsafe { std::mem::zeroed() };
        access.location = kind.location;
        access.flags = cu::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        // SAFETY: the range that was just mapped, and one description.
        let result = unsafe { cu::cuMemSetAccess(address, length, &raw const access, 1) };
        check("cuMemSetAccess", result).expect("access");
        address
    }

    /// On the machine's own GPU, where it has one.
    #[test]
    fn bytes_go_to_the_gpu_and_back() {
        const LEN: usize = 4 << 20;
        let Some(_entered) = primary() else { return };
        let gpu = create(LEN);
        let stager = Stager::of(gpu, LEN).expect("a stager");
        let host = Pages::map(LEN).expect("memory");
        stager.pin(&host).expect("pinned");
        let bytes = |at: usize| host.base().as_ptr().wrapping_add(at);
        for i in 0..LEN {
            // SAFETY: inside the pages.
            unsafe { bytes(i).write((((i * 7) ^ (i >> 9)) & 0xff) as u8) };
        }
        let lanes = [Direction::ToGpu, Direction::FromGpu].map(|way| Lane::open(&stager, way).expect("a lane"));
        let half = LEN as u64 / 2;
        let copy = |length, mark| Copy { gpu, host: host.address(), length, flagged: false, mark: Some(mark) };
        let mut ticket = 0;
        for length in [1, 8, 4097, half] {
            ticket += 1;
            // SAFETY: both are there until the end of this test.
            unsafe { lanes[0].start([copy(length, ticket)].into_iter()) }.expect("a copy");
            lanes[0].settle().expect("done");
            assert_eq!(lanes[0].reached(), ticket);
        }
        let back = Copy { gpu, host: host.address() + half, length: half, flagged: false, mark: Some(1) };
        // SAFETY: as above.
        unsafe { lanes[1].start([back].into_iter()) }.expect("a copy");
        let begin = Instant::now();
        while lanes[1].reached() != 1 {
            lanes[1].check().expect("no error");
            assert!(begin.elapsed() < PATIENCE);
        }
        let took = begin.elapsed();
        for i in 0..LEN / 2 {
            // SAFETY: inside the pages.
            let sent = unsafe { bytes(i).read() };
            // SAFETY: as above.
            assert_eq!(sent, unsafe { bytes(LEN / 2 + i).read() }, "byte {i}");
        }
        println!("{} came back from {} in {took:?}", LEN / 2, stager.describe());
        drop(lanes);
        stager.unpin(&host);
        let mut other = 0;
        // SAFETY: one address to write.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&raw mut other, 4096) }).expect("memory");
        let why = Stager::of(other, 4096).expect_err("of a context");
        assert!(why.contains("not of cuMemCreate"), "{why}");
    }
}
