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
//! Nobody promises that a copy engine writes lines of 128 bytes whole: for those that have flags see `transfer::staging`.
//!
//! Calls wait for copies only, and for none of the program's kernels; those of the data path wait for nothing: a stream takes
//! about 1024 operations, above which the driver blocks, so what is in one is counted and kept well below. All are made with the
//! thread's stream capture mode relaxed, so that none spoils a graph that another thread captures.
//!
//! A GPU that hangs holds up whoever waits for it, so each wait has an end. What may still be copied then is never reused: its
//! pages stay pinned. A *context* that has failed is another case: the driver carries out nothing of it any more.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
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
/// What is waited once more where that was in vain.
const SHORT_PATIENCE: Duration = Duration::from_millis(100);

/// Operations of ours in a stream above which no copy is started. Those that start at once may go a little beyond.
const MOST: u32 = 256;
/// The stream tells how far it is behind so many.
const STEP: u32 = 32;
/// Waits for a stream that may be in it at once.
const MOST_FENCES: u32 = 64;

/// What the driver refused, or did not do in time.
#[derive(Debug, Clone)]
pub struct CudaError {
    result: CUresult,
    text: String,
}

impl CudaError {
    fn late(text: String) -> Self {
        Self { result: CUresult::CUDA_ERROR_NOT_READY, text }
    }

    /// Not done in time: what was started may still be carried out. Else the context has failed, and nothing of it is.
    pub fn is_late(&self) -> bool {
        self.result == CUresult::CUDA_ERROR_NOT_READY
    }

    /// The same may go well later.
    fn may_pass(&self) -> bool {
        self.is_late()
            || matches!(
                self.result,
                CUresult::CUDA_ERROR_OUT_OF_MEMORY
                    | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
                    | CUresult::CUDA_ERROR_MPS_CONNECTION_FAILED
                    | CUresult::CUDA_ERROR_MPS_SERVER_NOT_READY
                    | CUresult::CUDA_ERROR_MPS_MAX_CLIENTS_REACHED
                    | CUresult::CUDA_ERROR_MPS_MAX_CONNECTIONS_REACHED
            )
    }

    fn on(self, whom: &str) -> Self {
        Self { text: format!("{} on {whom}", self.text), ..self }
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl From<CudaError> for String {
    fn from(error: CudaError) -> Self {
        error.text
    }
}

fn check(call: &str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        Ok(())
    } else {
        Err(CudaError { result, text: format!("{call}: {result:?}") })
    }
}

/// The driver's own end, as the process ends, takes the contexts along: not a failure, and no one is to be told of it.
fn unless_over(result: Result<(), CudaError>) -> Result<(), CudaError> {
    result.or_else(|error| if error.result == CUresult::CUDA_ERROR_DEINITIALIZED { Ok(()) } else { Err(error) })
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
                _ => why.text,
            })
        })
        .clone()
}

/// While it lives stream captures, of any thread, don't concern the calls of this one.
#[derive(Debug)]
struct Relaxed(cu::CUstreamCaptureMode);

impl Relaxed {
    fn enter() -> Result<Self, CudaError> {
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
    fn enter(context: cu::CUcontext) -> Result<Self, CudaError> {
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

/// The ordinal of the GPU that holds this memory. What asks the driver begins with it, and gets no further where that hangs.
fn ordinal(address: u64) -> Result<c_int, CudaError> {
    none_is_stuck()?;
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

/// The GPU at this bus id.
fn device_at(bus_id: &str) -> Result<cu::CUdevice, String> {
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
    (0..count).find_map(at).ok_or_else(|| "CUDA does not show it to this process (CUDA_VISIBLE_DEVICES)".to_owned())
}

fn attribute(device: cu::CUdevice, which: cu::CUdevice_attribute) -> Result<c_int, CudaError> {
    let mut value = 0;
    // SAFETY: one int to write.
    check("cuDeviceGetAttribute", unsafe { cu::cuDeviceGetAttribute(&raw mut value, which, device) }).map(|()| value)
}

/// Whether memory of the GPU at this bus id can be staged; or why not.
pub fn available_at(bus_id: &str) -> Result<(), String> {
    let of = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    match attribute(device_at(bus_id)?, of)? {
        0 => Err("it has no memory of cuMemCreate".to_owned()),
        _ => Ok(()),
    }
}

/// Whether the driver exports memory of the GPU at this bus id as dma-bufs; None: it can't be asked.
pub fn exports_dmabuf(bus_id: &str) -> Option<bool> {
    let of = cu::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
    attribute(device_at(bus_id).ok()?, of).ok().map(|has| has != 0)
}

fn name(ordinal: c_int) -> Result<String, CudaError> {
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

const BOTH: [Direction; 2] = [Direction::FromGpu, Direction::ToGpu];

/// Our context on one GPU, shared by all connections of the process.
#[derive(Debug)]
pub struct Stager {
    ordinal: c_int,
    name: String,
    context: cu::CUcontext,
    ways: [Way; 2],
    words: Mutex<Words>,
    /// Lanes of which a call that starts copies does not return; the driver may hold its locks.
    stuck: AtomicU32,
    /// Once it is known there: its end is awaited by whoever wants the next.
    place: Option<Arc<Mutex<Place>>>,
}

// SAFETY: CUDA's handles may be used from any thread, at once too.
unsafe impl Send for Stager {}
// SAFETY: as above.
unsafe impl Sync for Stager {}

/// The stream of one direction.
#[derive(Debug)]
struct Way {
    stream: cu::CUstream,
    /// Operations so far.
    started: AtomicU32,
    /// The stream writes that number here behind every [`STEP`], into one place after the other: copies are started by several
    /// threads, and one that is late with its number spoils none of another.
    done: Word,
    /// Waits so far.
    fences: Mutex<u32>,
    /// The last wait that is over.
    fenced: Word,
    /// A wait was in vain.
    hangs: AtomicBool,
    /// When the first such wait began, and the last that was over then: the wait goes on for all who come later.
    since: Mutex<Option<(u32, Instant)>>,
}

impl Way {
    fn new(stream: cu::CUstream, done: Word, fenced: Word) -> Self {
        Self {
            stream,
            started: AtomicU32::new(0),
            done,
            fences: Mutex::new(0),
            fenced,
            hangs: AtomicBool::new(false),
            since: Mutex::new(None),
        }
    }

    /// Operations that are in the stream, to within a [`STEP`].
    fn under_way(&self) -> u32 {
        let started = self.started.load(Ordering::Relaxed);
        let since = |place| started.wrapping_sub(self.done.at(place).load(Ordering::Relaxed));
        (0..Word::PLACES).map(since).min().unwrap_or(0)
    }

    fn hangs(&self) -> bool {
        self.hangs.load(Ordering::Relaxed)
    }

    /// Since when, for all that is known now, the stream stands still.
    fn still_since(&self) -> Instant {
        let fenced = self.fenced.at(0).load(Ordering::Acquire);
        let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
        since.filter(|(then, _)| *then == fenced).map_or_else(Instant::now, |(_, since)| since)
    }

    /// What a wait found.
    fn found(&self, still: Option<Instant>) {
        let fenced = self.fenced.at(0).load(Ordering::Acquire);
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = still.map(|since| (fenced, since));
        self.hangs.store(still.is_some(), Ordering::Relaxed);
    }
}

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
    const PLACES: usize = LINE / 4;

    #[inline]
    fn at(&self, place: usize) -> &AtomicU32 {
        // SAFETY: inside its line.
        let p = unsafe { self.host.as_ptr().add(place % Self::PLACES * 4) };
        // SAFETY: aligned, alive as long as its stager, and only reached as an atomic.
        unsafe { AtomicU32::from_ptr(p.cast()) }
    }

    fn gpu(&self, place: usize) -> u64 {
        self.gpu + (place % Self::PLACES * 4) as u64
    }
}

impl Words {
    /// With the context current.
    fn take(&mut self) -> Result<Word, CudaError> {
        if self.free.is_empty() {
            let none =
                |e| CudaError { result: CUresult::CUDA_ERROR_OUT_OF_MEMORY, text: format!("memory for marks: {e}") };
            let pages = Pages::map(LINE).map_err(none)?;
            pin(&pages)?;
            let (base, len) = (pages.base(), pages.len());
            self.pages.push(pages);
            let mut gpu = 0;
            // SAFETY: one address to write; pinned above.
            let result = unsafe { cu::cuMemHostGetDevicePointer_v2(&raw mut gpu, base.as_ptr().cast(), 0) };
            check("cuMemHostGetDevicePointer", result)?;
            for offset in (0..len).step_by(LINE) {
                // SAFETY: inside the pages.
                let host = unsafe { base.add(offset) };
                self.free.push(Word { host, gpu: gpu + offset as u64 });
            }
        }
        let none = || CudaError::late("no memory for marks".to_owned());
        let word = self.free.pop().ok_or_else(none)?;
        (0..Word::PLACES).for_each(|place| word.at(place).store(0, Ordering::Release));
        Ok(word)
    }
}

/// Pins pages of ours for the current context.
fn pin(pages: &Pages) -> Result<(), CudaError> {
    pages.keep_from_children();
    // For our context alone.
    let flags = cu::CU_MEMHOSTREGISTER_DEVICEMAP;
    // SAFETY: whole pages of ours.
    let result = unsafe { cu::cuMemHostRegister_v2(pages.base().as_ptr().cast(), pages.len(), flags) };
    check("cuMemHostRegister", result)
}

/// Has the stream write `value` behind all that is in it; with its context current.
fn mark(stream: cu::CUstream, address: u64, value: u32) -> Result<(), CudaError> {
    // Its default is a barrier before the write: what was copied is there when the word is.
    // SAFETY: a pinned word of ours.
    check("cuStreamWriteValue32", unsafe { cu::cuStreamWriteValue32_v2(stream, address, value, 0) })
}

/// Numbers are on a circle.
fn is_reached(number: u32, reached: u32) -> bool {
    reached.wrapping_sub(number) <= u32::MAX / 2
}

/// What is known of a GPU.
#[derive(Debug, Default)]
struct Place {
    /// Until it has ended; out of use it is a little before that.
    stager: Option<Weak<Stager>>,
    /// Why there is none and won't be: NCCL asks again with each buffer and connection, and the answer is dear.
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

/// Of all GPUs, as the driver may hold its locks for one. A place that is being opened now has none.
fn none_is_stuck() -> Result<(), CudaError> {
    let places: Vec<_> = {
        let all = PLACES.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().map(|(_, place)| Arc::clone(place)).collect()
    };
    // Any of them may end here, which takes the lock of its place.
    let stagers: Vec<_> = places.iter().filter_map(|place| place.try_lock().ok()?.stager.as_ref()?.upgrade()).collect();
    stagers.iter().try_for_each(|stager| stager.is_not_stuck())
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
        // Who wants another GPU does not wait for this one; who wants this one waits for the end of the last stager, too. That
        // takes the same lock, so none may end here while it is held.
        let own = place(ordinal);
        let known;
        let mut place = loop {
            let place = own.lock().unwrap_or_else(PoisonError::into_inner);
            let found = place.stager.as_ref().map(Weak::upgrade);
            if !matches!(found, Some(None)) {
                known = found.flatten();
                break place;
            }
            // Whoever had it last is about to take the lock, and to end it.
            drop(place);
            std::thread::yield_now();
        };
        if let Some(why) = &place.refused {
            return Err(why.clone());
        }
        if let Some(stager) = &known {
            match stager.is_well() {
                Ok(()) => return Ok(Arc::clone(stager)),
                Err(why) if why.is_late() => return Err(format!("copies on {} hang", stager.describe())),
                Err(why) if why.may_pass() => return Err(why.on(&stager.describe()).text),
                // Its context has failed: whoever has it is told by its copies.
                Err(_) => place.stager = None,
            }
        }
        let lasting = |why: CudaError, place: &mut Place| {
            if !why.may_pass() {
                place.refused = Some(why.text.clone());
            }
            why.text
        };
        let mut stager = Self::open(ordinal).map_err(|why| lasting(why, &mut place))?;
        // A first mark on each stream: does this GPU write them?
        let tried = BOTH.into_iter().try_for_each(|way| {
            // With nothing to wait for, what is refused here need not be tried for long.
            stager.put_fence(stager.way(way))?;
            stager.fence(way, PATIENCE)
        });
        if let Err(why) = tried {
            if why.is_late() {
                // Kept, or the next to ask would wait as long for another one.
                let stager = Arc::new(stager);
                place.stager = Some(Arc::downgrade(&stager));
                std::mem::forget(stager);
            }
            return Err(lasting(why, &mut place));
        }
        stager.place = Some(Arc::clone(&own));
        let stager = Arc::new(stager);
        place.stager = Some(Arc::downgrade(&stager));
        Ok(stager)
    }

    /// Whether copies are carried out, as far as can be seen; late if they were not and still aren't.
    fn is_well(&self) -> Result<(), CudaError> {
        self.is_not_stuck()?;
        BOTH.into_iter().try_for_each(|way| self.query(way).map(|_| ()))?;
        BOTH.into_iter().filter(|way| self.way(*way).hangs()).try_for_each(|way| self.fence(way, SHORT_PATIENCE))
    }

    fn is_not_stuck(&self) -> Result<(), CudaError> {
        if self.is_stuck() { Err(self.does_not_return()) } else { Ok(()) }
    }

    fn is_stuck(&self) -> bool {
        self.stuck.load(Ordering::Acquire) > 0
    }

    #[cold]
    fn does_not_return(&self) -> CudaError {
        CudaError::late(format!("the driver does not return from starting a copy on {}", self.describe()))
    }

    /// With the capture mode relaxed.
    fn open(ordinal: c_int) -> Result<Self, CudaError> {
        let mut device = 0;
        // SAFETY: one device to write.
        check("cuDeviceGet", unsafe { cu::cuDeviceGet(&raw mut device, ordinal) })?;
        let name = name(ordinal)?;
        let mut context = ptr::null_mut();
        // SAFETY: one context to write; it is current from here on.
        let result = unsafe { cu::cuCtxCreate_v2(&raw mut context, 0, device) };
        check("cuCtxCreate", result).map_err(|why| {
            let why = why.on(&format!("GPU {ordinal} ({name})"));
            let help = match result {
                CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
                    ": a context for copies takes 265 MiB of its memory; lower the fraction that the framework takes, or \
                     NCCL_NET_GDR_LEVEL=LOC"
                }
                _ => "",
            };
            CudaError { text: format!("{why}{help}"), ..why }
        })?;
        let mut words = Words::default();
        let ways = Self::prepare(&mut words);
        let mut popped = ptr::null_mut();
        // SAFETY: pops the context that was just made.
        unsafe { cu::cuCtxPopCurrent_v2(&raw mut popped) };
        let ways = ways.inspect_err(|_| {
            // SAFETY: ours, and nobody else knows it; it has copied nothing.
            unsafe { cu::cuCtxDestroy_v2(context) };
        })?;
        Ok(Self { ordinal, name, context, ways, words: Mutex::new(words), stuck: AtomicU32::new(0), place: None })
    }

    /// With the context current.
    fn prepare(words: &mut Words) -> Result<[Way; 2], CudaError> {
        // Memory is what it costs: no kernel runs here, so none needs a stack. A driver that knows better may refuse.
        // SAFETY: a limit and its value.
        unsafe { cu::cuCtxSetLimit(cu::CUlimit::CU_LIMIT_STACK_SIZE, 16) };
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: two ints to write.
        let result = unsafe { cu::cuCtxGetStreamPriorityRange(&raw mut least, &raw mut greatest) };
        check("cuCtxGetStreamPriorityRange", result)?;
        let flags = cu::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        let mut way = || {
            let mut stream = ptr::null_mut();
            // SAFETY: one stream to write.
            let result = unsafe { cu::cuStreamCreateWithPriority(&raw mut stream, flags, greatest) };
            check("cuStreamCreateWithPriority", result)?;
            Ok(Way::new(stream, words.take()?, words.take()?))
        };
        Ok([way()?, way()?])
    }

    /// For people.
    pub fn describe(&self) -> String {
        format!("GPU {} ({})", self.ordinal, self.name)
    }

    fn way(&self, direction: Direction) -> &Way {
        &self.ways[usize::from(direction == Direction::ToGpu)]
    }

    /// Pins pages of ours; they stay until [`Self::unpin`].
    pub(super) fn pin(&self, pages: &Pages) -> Result<(), String> {
        let _entered = Entered::enter(self.context)?;
        Ok(pin(pages)?)
    }

    /// Gives up pages that are not copied to or from any more. The driver may wait for all of the context when it lets go of
    /// them: where that hangs they stay, and so does the stager.
    pub(super) fn unpin(self: &Arc<Self>, pages: Pages) {
        let ends = |&way: &Direction| {
            let patience = if self.way(way).hangs() { SHORT_PATIENCE } else { PATIENCE };
            self.fence(way, patience).is_err_and(|why| why.is_late())
        };
        if BOTH.iter().any(ends) {
            std::mem::forget((pages, Arc::clone(self)));
            return;
        }
        self.let_go(pages);
    }

    /// Pages that the driver does not let go of stay where they are: it still knows them by their addresses.
    fn let_go(&self, pages: Pages) {
        let gone = Entered::enter(self.context).and_then(|_entered| {
            // SAFETY: pinned by us, and nothing copies there any more.
            check("cuMemHostUnregister", unsafe { cu::cuMemHostUnregister(pages.base().as_ptr().cast()) })
        });
        if let Err(why) = unless_over(gone) {
            tracing::debug!(target: "net", "{} bytes stay pinned: {why}", pages.len());
            std::mem::forget(pages);
        }
    }

    fn words(&self) -> MutexGuard<'_, Words> {
        self.words.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_word(&self) -> Result<Word, CudaError> {
        let _entered = Entered::enter(self.context)?;
        self.words().take()
    }

    fn give_back(&self, word: Word) {
        self.words().free.push(word);
    }

    /// Whether all that is in the stream is done. Or the error of the context, after which nothing of it is carried out.
    fn query(&self, direction: Direction) -> Result<bool, CudaError> {
        let asked = Entered::enter(self.context).and_then(|_entered| {
            // SAFETY: a stream of ours.
            check("cuStreamQuery", unsafe { cu::cuStreamQuery(self.way(direction).stream) })
        });
        match asked {
            Ok(()) => Ok(true),
            // A call that was short of memory says nothing of the context.
            Err(why) if why.is_late() || why.result == CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(false),
            Err(why) => Err(why),
        }
    }

    /// Puts a wait into the stream; None: there are as many in it as may be.
    fn put_fence(&self, way: &Way) -> Result<Option<u32>, CudaError> {
        let mut fences = way.fences.lock().unwrap_or_else(PoisonError::into_inner);
        if fences.wrapping_sub(way.fenced.at(0).load(Ordering::Acquire)) >= MOST_FENCES {
            return Ok(None);
        }
        let _entered = Entered::enter(self.context)?;
        let number = fences.wrapping_add(1);
        mark(way.stream, way.fenced.gpu(0), number)?;
        *fences = number;
        Ok(Some(number))
    }

    /// Waits until all that is in the stream now is done, but no longer than that, and shorter where others have waited in vain
    /// and nothing has moved since: connections that are aborted one after the other wait for a GPU together. That a call is
    /// refused does not mean that nothing is copied any more: only the stream's own error does, and is the only one but that it
    /// is late.
    fn fence(&self, direction: Direction, patience: Duration) -> Result<(), CudaError> {
        let way = self.way(direction);
        let mut number = None;
        let mut done = || {
            if number.is_none() {
                self.is_not_stuck()?;
                number = self.put_fence(way)?;
            }
            Ok::<_, CudaError>(
                number.is_some_and(|number| is_reached(number, way.fenced.at(0).load(Ordering::Acquire))),
            )
        };
        let since = way.still_since();
        let patience = patience.min(PATIENCE.saturating_sub(since.elapsed()).max(SHORT_PATIENCE));
        let begin = Instant::now();
        let waited = loop {
            // Before it looks: this thread may be what was late.
            let over = begin.elapsed() > patience;
            let refused = match done() {
                Ok(true) => break Ok(()),
                Ok(false) => None,
                Err(stuck) if stuck.is_late() => {
                    // That stream itself may well go on.
                    way.hangs.store(true, Ordering::Relaxed);
                    return Err(stuck);
                }
                Err(why) => Some(why),
            };
            if over || refused.is_some() {
                match self.query(direction) {
                    Ok(true) => break Ok(()),
                    Err(why) if !why.may_pass() => break unless_over(Err(why)),
                    Ok(false) | Err(_) => {}
                }
            }
            if over {
                let to = if direction == Direction::ToGpu { "to" } else { "from" };
                let why = refused.map_or_else(String::new, |why| format!(" ({why})"));
                break Err(CudaError::late(format!(
                    "copies {to} {} do not end; waited for {:.1} s{why}",
                    self.describe(),
                    since.elapsed().as_secs_f64()
                )));
            }
            std::thread::yield_now();
        };
        way.found(waited.as_ref().is_err_and(CudaError::is_late).then_some(since));
        waited
    }

    /// Keeps GPU memory that a copy may still touch, whoever frees it, from becoming someone else's. Its addresses are its
    /// owner's: where nothing is mapped there any more a copy fails, and with it our context alone; where other memory is,
    /// nothing helps.
    pub(super) fn keep(&self, address: u64, length: usize) {
        // The smallest that an allocation of cuMemCreate may be; each call keeps the whole that it finds.
        const GRANULE: usize = 2 << 20;
        if self.is_stuck() {
            // Nor would this call return: who aborts goes first.
            return;
        }
        let Ok(_relaxed) = Relaxed::enter() else { return };
        let mut handle = 0;
        for at in (0..length).step_by(GRANULE).chain(length.checked_sub(1)) {
            let at = usize::try_from(address).unwrap_or(0).wrapping_add(at);
            // SAFETY: one handle to write; the driver checks the address.
            unsafe { cu::cuMemRetainAllocationHandle(&raw mut handle, ptr::with_exposed_provenance_mut(at)) };
        }
    }
}

impl Drop for Stager {
    fn drop(&mut self) {
        let place = self.place.take();
        // Who wants the next waits: there is memory for one.
        let mut place = place.as_ref().map(|place| place.lock().unwrap_or_else(PoisonError::into_inner));
        self.end();
        if let Some(place) = &mut place
            && place.stager.as_ref().is_some_and(|stager| ptr::eq(stager.as_ptr(), self))
        {
            place.stager = None;
        }
    }
}

impl Stager {
    /// Gives all back that nothing uses.
    fn end(&mut self) {
        let pages = std::mem::take(&mut self.words().pages);
        if self.is_stuck() || self.ways.iter().any(Way::hangs) {
            // What still runs there has its memory for ever, and to destroy the context would be to wait for it.
            std::mem::forget(pages);
            return;
        }
        pages.into_iter().for_each(|pages| self.let_go(pages));
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
    starts: Starts,
    /// The last mark that was put into the stream.
    marked: AtomicU32,
    /// Copies are behind it.
    loose: AtomicBool,
    /// A wait for its copies was in vain: they have had their time.
    given_up: AtomicBool,
    /// It is one of the stager's that are stuck.
    stuck: AtomicBool,
}

/// The calls that start copies. No lock: whoever closes a lane has to know that nothing is started after, but can't wait for a
/// driver that does not return.
#[derive(Debug, Clone, Default)]
pub struct Starts(Arc<AtomicU32>);

impl Starts {
    const CLOSED: u32 = 1;
    const UNDER_WAY: u32 = 2;

    /// False where nothing is started any more. Begun it is all the same.
    fn begin(&self) -> bool {
        self.0.fetch_or(Self::UNDER_WAY, Ordering::AcqRel) & Self::CLOSED == 0
    }

    /// False where it was closed meanwhile.
    fn end(&self) -> bool {
        // Takes the bit away and counts above it.
        self.0.fetch_add(Self::UNDER_WAY, Ordering::AcqRel) & Self::CLOSED == 0
    }

    /// Whether one is under way.
    fn close(&self) -> bool {
        self.0.fetch_or(Self::CLOSED, Ordering::AcqRel) & Self::UNDER_WAY != 0
    }

    /// Asked before each operation: who closed may have given up this very call, and all that it copies with.
    fn go_on(&self) -> Result<(), CudaError> {
        if self.0.load(Ordering::Acquire) & Self::CLOSED == 0 { Ok(()) } else { Err(closed()) }
    }

    /// One is under way: a driver that does not return shows nowhere else.
    pub fn under_way(&self) -> bool {
        self.0.load(Ordering::Acquire) & Self::UNDER_WAY != 0
    }

    /// How many are over, on a circle.
    pub fn count(&self) -> u32 {
        self.0.load(Ordering::Acquire) / (2 * Self::UNDER_WAY)
    }
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
        Ok(Self {
            stager: Arc::clone(stager),
            direction,
            word: stager.take_word()?,
            starts: Starts::default(),
            marked: AtomicU32::new(0),
            loose: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            stuck: AtomicBool::new(false),
        })
    }

    pub fn stager(&self) -> &Arc<Stager> {
        &self.stager
    }

    /// Whether so many copies may be started: the driver blocks where too much is in its stream, of all connections together.
    pub fn has_room(&self, copies: usize) -> bool {
        // A copy and its mark; to the GPU it may have flags, and is three.
        let each = if self.direction == Direction::ToGpu { 4 } else { 2 };
        let operations = u32::try_from(copies).unwrap_or(u32::MAX).saturating_mul(each);
        self.stager.way(self.direction).under_way().saturating_add(operations) <= MOST
    }

    /// Starts copies, in order.
    ///
    /// # Safety
    /// The host memory is pinned, and both ranges stay in place until the copies are done. One thread at a time starts copies.
    pub unsafe fn start(&self, copies: impl Iterator<Item = Copy>) -> Result<(), String> {
        let started = if self.starts.begin() {
            // SAFETY: the caller's promise.
            unless_over(unsafe { self.start_all(copies) })
        } else {
            Err(closed())
        };
        if !self.starts.end() {
            // Someone may have given it up.
            self.set_stuck(false);
        }
        started.map_err(|why| why.on(&self.stager.describe()).text)
    }

    pub fn starts(&self) -> &Starts {
        &self.starts
    }

    /// # Safety
    /// As [`Self::start`].
    unsafe fn start_all(&self, copies: impl Iterator<Item = Copy>) -> Result<(), CudaError> {
        let _entered = Entered::enter(self.stager.context)?;
        let way = self.stager.way(self.direction);
        let mut operations = 0;
        for copy in copies {
            // Also if its mark is refused.
            self.loose.store(true, Ordering::Release);
            self.starts.go_on()?;
            // Both fit: this is a machine of 64 bits.
            let length = usize::try_from(copy.length).unwrap_or(0);
            let host: *mut c_void = ptr::with_exposed_provenance_mut(usize::try_from(copy.host).unwrap_or(0));
            if copy.flagged && self.direction == Direction::ToGpu {
                // SAFETY: by this function's contract.
                operations += unsafe { self.start_flagged(copy.gpu, host, length) }?;
            } else if length > 0 {
                let result = match self.direction {
                    // SAFETY: by this function's contract.
                    Direction::FromGpu => unsafe { cu::cuMemcpyDtoHAsync_v2(host, copy.gpu, length, way.stream) },
                    // SAFETY: by this function's contract.
                    Direction::ToGpu => unsafe { cu::cuMemcpyHtoDAsync_v2(copy.gpu, host, length, way.stream) },
                };
                check("cuMemcpyAsync", result).map_err(|e| of_copy(e, length, copy.gpu))?;
                operations += 1;
            }
            if let Some(value) = copy.mark {
                self.starts.go_on()?;
                mark(way.stream, self.word.gpu(0), value)?;
                operations += 1;
                self.marked.store(value, Ordering::Release);
            }
            self.loose.store(copy.mark.is_none(), Ordering::Release);
        }
        let before = way.started.fetch_add(operations, Ordering::Relaxed);
        let now = before.wrapping_add(operations);
        if before / STEP != now / STEP {
            let place = usize::try_from(now / STEP).unwrap_or(0);
            mark(way.stream, way.done.gpu(place), now)?;
        }
        Ok(())
    }

    /// Copies to the GPU the data of all lines of 128 bytes, and behind them the flags, the last 8 bytes of each. Behind the
    /// last whole line there are no flags, and none in what does not begin at a line. How many operations that is.
    ///
    /// # Safety
    /// As [`Self::start`].
    unsafe fn start_flagged(&self, gpu: u64, host: *mut c_void, length: usize) -> Result<u32, CudaError> {
        const LINE: usize = 128;
        const FLAG: usize = 8;
        let stream = self.stager.way(Direction::ToGpu).stream;
        let lines = if gpu.is_multiple_of(LINE as u64) { length / LINE } else { 0 };
        let rest = length - lines * LINE;
        if rest > 0 {
            let (gpu, host) = (gpu + (lines * LINE) as u64, host.cast::<u8>().wrapping_add(lines * LINE).cast());
            // SAFETY: by this function's contract.
            let result = unsafe { cu::cuMemcpyHtoDAsync_v2(gpu, host, rest, stream) };
            check("cuMemcpyHtoDAsync", result).map_err(|e| of_copy(e, rest, gpu))?;
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
                self.starts.go_on()?;
                // SAFETY: by this function's contract; the description is read by the call.
                let result = unsafe { cu::cuMemcpy2DAsync_v2(&raw const copy, stream) };
                check("cuMemcpy2DAsync", result).map_err(|e| of_copy(e, lines * LINE, gpu))?;
            }
        }
        Ok(u32::from(rest > 0) + if lines > 0 { 2 } else { 0 })
    }

    /// The last mark that was written: one load.
    #[inline]
    pub fn reached(&self) -> u32 {
        self.word.at(0).load(Ordering::Acquire)
    }

    /// An error of the GPU, after which no mark is written.
    pub fn check(&self) -> Result<(), String> {
        unless_over(self.stager.query(self.direction).map(|_| ())).map_err(|why| why.on(&self.stager.describe()).text)
    }

    fn patience(&self) -> Duration {
        let waited = self.given_up.load(Ordering::Relaxed) || self.stager.is_stuck();
        if waited { SHORT_PATIENCE } else { PATIENCE }
    }

    /// From its return on no copy is started, unless the driver does not return from starting one. What was started before
    /// goes on, see [`Self::settle`].
    pub fn close(&self) -> Result<(), CudaError> {
        self.starts.close();
        let begin = Instant::now();
        while self.starts.under_way() {
            if begin.elapsed() > self.patience() {
                self.set_stuck(true);
                // Whoever comes second sees the other: this, or the call that does return now.
                if self.starts.close() {
                    self.given_up.store(true, Ordering::Relaxed);
                    return Err(self.stager.does_not_return());
                }
                self.set_stuck(false);
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Counted once, whoever sets it and whoever clears it.
    fn set_stuck(&self, stuck: bool) {
        if self.stuck.swap(stuck, Ordering::AcqRel) == stuck {
            return;
        }
        let lanes = &self.stager.stuck;
        if stuck {
            lanes.fetch_add(1, Ordering::AcqRel);
        } else {
            // What was given up meanwhile is in the stream: nobody has it before that is done.
            self.stager.way(self.direction).hangs.store(true, Ordering::Relaxed);
            lanes.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The same, and waits until all that was started is done, for 10 s at most since its stream stands still.
    pub fn settle(&self) -> Result<(), CudaError> {
        self.close()?;
        if !self.loose.load(Ordering::Acquire) && self.reached() == self.marked.load(Ordering::Acquire) {
            return Ok(());
        }
        let settled = self.stager.fence(self.direction, self.patience());
        self.given_up.fetch_or(settled.as_ref().is_err_and(CudaError::is_late), Ordering::Relaxed);
        settled
    }
}

#[cold]
fn closed() -> CudaError {
    CudaError::late("the connection has ended, nothing is copied any more".to_owned())
}

#[cold]
fn of_copy(error: CudaError, length: usize, gpu: u64) -> CudaError {
    CudaError { text: format!("{error} ({length} bytes at {gpu:#x})"), ..error }
}

impl Drop for Lane {
    fn drop(&mut self) {
        match self.settle() {
            Ok(()) => self.stager.give_back(self.word),
            // A word that may still be written is never used again.
            Err(why) if why.is_late() => std::mem::forget(Arc::clone(&self.stager)),
            Err(_) => {}
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

    /// A context that someone has destroyed is a failure; only with the driver itself nobody is left to be told.
    #[test]
    fn an_error_is_swallowed_only_as_the_driver_ends() {
        let told = |result| unless_over(check("call", result)).err().map(String::from);
        assert_eq!(told(CUresult::CUDA_ERROR_DEINITIALIZED), None);
        assert_eq!(
            told(CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED).as_deref(),
            Some("call: CUDA_ERROR_CONTEXT_IS_DESTROYED")
        );
    }

    #[test]
    fn what_is_in_a_stream_is_counted_whoever_is_late_with_the_number() {
        let pages = Pages::map(2 * LINE).expect("memory");
        let word = |line| Word { host: pages.base().map_addr(|a| a | (line * LINE)), gpu: 0 };
        let way = Way::new(ptr::null_mut(), word(0), word(1));
        let done =
            |number: u32| way.done.at(usize::try_from(number / STEP).expect("small")).store(number, Ordering::Relaxed);
        // Round the circle, too.
        let begin = u32::MAX - 1000;
        (0..16).for_each(|place| way.done.at(place).store(begin, Ordering::Relaxed));
        way.started.store(begin.wrapping_add(100), Ordering::Relaxed);
        assert_eq!(way.under_way(), 100);
        way.started.store(begin.wrapping_add(2000), Ordering::Relaxed);
        done(begin.wrapping_add(1990));
        assert_eq!(way.under_way(), 10);
        // One of long ago.
        done(begin.wrapping_add(64));
        assert_eq!(way.under_way(), 10);
    }

    #[test]
    fn whoever_closes_knows_that_nothing_is_started_after() {
        let starts = Starts::default();
        assert!(starts.begin() && starts.under_way() && starts.end());
        assert!(!starts.under_way() && starts.count() == 1 && starts.begin());
        assert!(starts.go_on().is_ok() && starts.close());
        assert!(starts.go_on().is_err() && starts.under_way() && !starts.end() && !starts.under_way());
        assert!(!starts.close() && !starts.begin() && !starts.end() && starts.count() == 3);
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
        stager.unpin(host);
        let mut other = 0;
        // SAFETY: one address to write.
        check("cuMemAlloc", unsafe { cu::cuMemAlloc_v2(&raw mut other, 4096) }).expect("memory");
        let why = Stager::of(other, 4096).expect_err("of a context");
        assert!(why.contains("not of cuMemCreate"), "{why}");
    }
}
