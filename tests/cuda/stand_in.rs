//! A `libcuda.so.1` for tests of staging where there is no GPU: the calls of the driver that staging makes, with a thread for
//! each stream that copies late, beside all that the program does meanwhile. A copy to the GPU writes the second half of a line of
//! 128 bytes before the first, one of rows the last row first.
//!
//! "GPU memory" is a file that is mapped twice: the address that a program gets may not be touched, and [`stand_in_view`] is
//! where tests look at the same bytes. What the driver is strict about, and easily forgotten, is refused: memory pinned while the
//! thread minds stream captures. A copy of host memory that is not pinned, or of GPU memory that is not there or was freed, ends
//! the process, at its start, when it is carried out and at its end: it would have spoilt someone's memory. A stream
//! of the primary context never runs, as in a program whose other streams wait for NCCL's kernel; but for those of
//! cuStreamCreate, which are the program's own and may copy from and to any host memory. A stream takes so many operations; who
//! brings more waits for room, as whoever lets go of pinned memory or of a context waits for its streams.
//!
//! Tests break it as they go: [`stand_in_fail`], [`stand_in_rest`], [`stand_in_hang`], [`stand_in_break`].
//!
//! | variable | |
//! |---|---|
//! | `CUDA_STAND_IN_DELAY` | rest before a copy: at most so many µs, at least half of it; in the midst and at the end of one to the GPU a quarter each |
//! | `CUDA_STAND_IN_SEED` | of these rests; without it they differ from process to process |
//! | `CUDA_STAND_IN_LACKS` | a call that answers `CUDA_ERROR_NOT_SUPPORTED`; dma-buf: its memory is not exported |
#![allow(non_snake_case, reason = "the driver's names")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

type CUresult = c_int;
const SUCCESS: CUresult = 0;
const INVALID_VALUE: CUresult = 1;
const INVALID_CONTEXT: CUresult = 201;
const NOT_READY: CUresult = 600;
const ILLEGAL_ADDRESS: CUresult = 700;
const NOT_SUPPORTED: CUresult = 801;
const CAPTURE_UNSUPPORTED: CUresult = 900;

const RELAXED: c_int = 2;

/// Bytes of the GPU, of which those count that are touched.
const MEMORY: u64 = 64 << 30;

/// A range by its length; where the program may look at it, and whether it is of cuMemCreate.
#[derive(Clone, Copy)]
struct Range {
    length: u64,
    view: u64,
    vmm: bool,
    /// Of pinned memory: for which it is.
    context: usize,
}

#[derive(Default)]
struct State {
    device: BTreeMap<u64, Range>,
    pinned: BTreeMap<u64, Range>,
}

static STATE: Mutex<State> = Mutex::new(State { device: BTreeMap::new(), pinned: BTreeMap::new() });

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The range that holds all of these bytes, and how far inside they begin.
fn find(ranges: &BTreeMap<u64, Range>, address: u64, length: u64) -> Option<(Range, u64)> {
    let (&start, &range) = ranges.range(..=address).next_back()?;
    let offset = address - start;
    (offset.checked_add(length)? <= range.length && offset < range.length).then_some((range, offset))
}

thread_local! {
    static MODE: Cell<c_int> = const { Cell::new(0) };
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// What a call does before all else.
#[derive(Clone, Copy)]
enum Trick {
    /// Answers so.
    Fail(CUresult),
    /// Takes so long, with no lock held.
    Rest(Duration),
}

/// By call, and for how many calls.
static TRICKS: Mutex<Vec<(String, Trick, c_int)>> = Mutex::new(Vec::new());

/// # Safety
/// The name is a C string.
unsafe fn play(call: *const c_char, trick: Trick, times: c_int) {
    // SAFETY: the caller's promise.
    let call = unsafe { std::ffi::CStr::from_ptr(call) }.to_string_lossy().into_owned();
    TRICKS.lock().unwrap_or_else(PoisonError::into_inner).push((call, trick, times));
}

/// The next calls of this name, so many, answer so.
///
/// # Safety
/// The name is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_fail(call: *const c_char, result: c_int, times: c_int) {
    // SAFETY: the caller's promise.
    unsafe { play(call, Trick::Fail(result), times) };
}

/// The next calls of this name, so many, rest for so many milliseconds.
///
/// # Safety
/// The name is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_rest(call: *const c_char, ms: c_int, times: c_int) {
    let rest = Duration::from_millis(u64::try_from(ms).unwrap_or(0));
    // SAFETY: the caller's promise.
    unsafe { play(call, Trick::Rest(rest), times) };
}

/// Contexts up to this one have failed.
static BROKEN: AtomicUsize = AtomicUsize::new(0);

/// All contexts fail that there are: what is in their streams is not carried out, and each call is refused.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_break() {
    BROKEN.store(handle(), Ordering::Release);
}

fn is_broken(context: usize) -> bool {
    context > PRIMARY && context <= BROKEN.load(Ordering::Acquire)
}

/// What this call answers without looking further.
fn refusal(call: &str) -> Option<CUresult> {
    if std::env::var("CUDA_STAND_IN_LACKS").is_ok_and(|lacks| lacks == call) {
        return Some(NOT_SUPPORTED);
    }
    let trick = {
        let mut tricks = TRICKS.lock().unwrap_or_else(PoisonError::into_inner);
        let found = tricks.iter_mut().find(|(name, _, times)| name == call && *times > 0);
        found.map(|(_, trick, times)| {
            *times -= 1;
            *trick
        })
    };
    match trick {
        Some(Trick::Fail(result)) => return Some(result),
        Some(Trick::Rest(time)) => std::thread::sleep(time),
        None => {}
    }
    let of_context = ["cuMemHost", "cuMemcpy", "cuStream"].iter().any(|start| call.starts_with(start));
    (of_context && current().is_some_and(is_broken)).then_some(ILLEGAL_ADDRESS)
}

/// `CUDA_MEMCPY2D`, of which what is not from host to GPU memory is not looked at.
#[repr(C)]
#[derive(Debug)]
pub struct Copy2d {
    src_x: usize,
    src_y: usize,
    src_type: c_int,
    src_host: *const c_void,
    src_device: u64,
    src_array: *mut c_void,
    src_pitch: usize,
    dst_x: usize,
    dst_y: usize,
    dst_type: c_int,
    dst_host: *mut c_void,
    dst_device: u64,
    dst_array: *mut c_void,
    dst_pitch: usize,
    width: usize,
    height: usize,
}

/// Contexts that were made, that there are, and that there were at most.
static MADE: AtomicU64 = AtomicU64::new(0);
static LIVE: AtomicU64 = AtomicU64::new(0);
static PEAK: AtomicU64 = AtomicU64::new(0);
/// Operations that a stream takes.
const QUEUE: u64 = 1024;
/// As many were in a stream at most.
static LONGEST: AtomicU64 = AtomicU64::new(0);
const PRIMARY: usize = 1;
/// In the place of its context, for a stream of the program.
const PROGRAM: usize = 0;

fn current() -> Option<usize> {
    CONTEXTS.with_borrow(|all| all.last().copied())
}

enum Work {
    Copy {
        device: u64,
        host: u64,
        length: u64,
        to_device: bool,
    },
    /// To the device: `height` times `width` bytes, with this pitch on both sides.
    Rows {
        device: u64,
        host: u64,
        pitch: u64,
        width: u64,
        height: u64,
    },
    Write {
        address: u64,
        value: u32,
    },
}

struct Stream {
    context: usize,
    work: Sender<Work>,
    left: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

/// By handle; they end with their context.
static STREAMS: Mutex<BTreeMap<usize, Stream>> = Mutex::new(BTreeMap::new());

fn streams() -> MutexGuard<'static, BTreeMap<usize, Stream>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the driver tells apart: contexts and streams.
fn handle() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(16);
    NEXT.fetch_add(16, Ordering::Relaxed)
}

/// xorshift: a seed is a schedule, as far as threads let it be one.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

fn start(context: usize) -> Stream {
    let (work, todo) = channel();
    let left = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&left);
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let delay = number("CUDA_STAND_IN_DELAY").unwrap_or(0);
    let seed = number("CUDA_STAND_IN_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let thread = std::thread::spawn(move || {
        let mut random = 0x9e37_79b9_7f4a_7c15 ^ seed;
        let mut rest = || {
            if delay > 0 {
                std::thread::sleep(Duration::from_micros(delay / 2 + next(&mut random) % delay.div_ceil(2)));
            }
        };
        let pause = || std::thread::sleep(Duration::from_micros(delay / 4));
        if context == PRIMARY {
            loop {
                std::thread::park();
            }
        }
        for item in todo {
            while HANGS.load(Ordering::Relaxed) && !is_broken(context) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if is_broken(context) {
                count.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            match item {
                Work::Copy { device, host, length, to_device } => {
                    rest();
                    let view = state().copied(context, device, host, length);
                    let (from, to) = if to_device { (host, view) } else { (view, host) };
                    let (from, to) = (from as *const u8, to as *mut u8);
                    let size = usize::try_from(length).unwrap_or(0);
                    if to_device {
                        // As a copy engine may: second halves of lines before the first, though not so late.
                        for half in [1, 0] {
                            for at in (half * 64..size).step_by(128) {
                                let (from, to) = (from.wrapping_add(at), to.wrapping_add(at));
                                // SAFETY: both ranges were looked up just now; that they went since is found below.
                                unsafe { ptr::copy_nonoverlapping(from, to, (size - at).min(64)) };
                            }
                            pause();
                        }
                    } else {
                        // SAFETY: as above.
                        unsafe { ptr::copy_nonoverlapping(from, to, size) };
                    }
                    state().copied(context, device, host, length);
                }
                Work::Rows { device, host, pitch, width, height } => {
                    rest();
                    let length = pitch * (height - 1) + width;
                    let view = state().copied(context, device, host, length);
                    for row in (0..height).rev() {
                        let (from, to) = ((host + row * pitch) as *const u8, (view + row * pitch) as *mut u8);
                        // SAFETY: both ranges were looked up just now; that they went since is found below.
                        unsafe { ptr::copy_nonoverlapping(from, to, usize::try_from(width).unwrap_or(0)) };
                        if row == height / 2 || row == 0 {
                            pause();
                        }
                    }
                    state().copied(context, device, host, length);
                }
                Work::Write { address, value } => {
                    // SAFETY: inside pinned memory.
                    unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value, Ordering::Release);
                }
            }
            count.fetch_sub(1, Ordering::AcqRel);
        }
    });
    Stream { context, work, left, thread }
}

impl State {
    /// Where the GPU memory of a copy is.
    fn copied(&self, context: usize, device: u64, host: u64, length: u64) -> u64 {
        if context != PROGRAM && find(&self.pinned, host, length).is_none() {
            never(&format!("a copy of {length} bytes at {host:#x}, which are not pinned"));
        }
        let Some((range, offset)) = find(&self.device, device, length) else {
            never(&format!("a copy of {length} bytes of GPU memory at {device:#x}, where there is none"));
        };
        range.view + offset
    }
}

fn never(what: &str) -> ! {
    eprintln!("stand-in for CUDA: {what}");
    std::process::abort();
}

fn copy(handle: usize, device: u64, host: u64, length: u64, to_device: bool) -> CUresult {
    let Some(context) = streams().get(&handle).map(|stream| stream.context) else { return INVALID_VALUE };
    state().copied(context, device, host, length);
    submit(handle, Work::Copy { device, host, length, to_device })
}

fn submit(handle: usize, work: Work) -> CUresult {
    let (left, work_of) = match streams().get(&handle) {
        Some(stream) => (Arc::clone(&stream.left), stream.work.clone()),
        None => return INVALID_VALUE,
    };
    while left.load(Ordering::Acquire) >= QUEUE {
        std::thread::yield_now();
    }
    LONGEST.fetch_max(left.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
    if work_of.send(work).is_ok() { SUCCESS } else { INVALID_VALUE }
}

/// The streams of a context are idle.
fn settled(context: usize) {
    let busy = |stream: &Stream| stream.context == context && stream.left.load(Ordering::Acquire) > 0;
    while streams().values().any(busy) {
        std::thread::sleep(Duration::from_millis(1));
    }
}

macro_rules! write {
    ($place:expr, $value:expr) => {{
        // SAFETY: the caller's place for one value.
        unsafe { $place.write($value) };
        SUCCESS
    }};
}

/// All GPU memory, of which none is given back: its address on the "GPU", and where it can be looked at.
fn memory() -> Option<(u64, u64)> {
    static BOTH: OnceLock<Option<(u64, u64)>> = OnceLock::new();
    *BOTH.get_or_init(|| {
        // SAFETY: a name.
        let fd = unsafe { libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC) };
        // SAFETY: a new file, or none.
        if unsafe { libc::ftruncate(fd, libc::off_t::try_from(MEMORY).ok()?) } != 0 {
            return None;
        }
        let map = |prot| {
            let length = usize::try_from(MEMORY).unwrap_or(0);
            // SAFETY: a new mapping of a new file.
            unsafe { libc::mmap(ptr::null_mut(), length, prot, libc::MAP_SHARED | libc::MAP_NORESERVE, fd, 0) }
        };
        let (device, view) = (map(libc::PROT_NONE), map(libc::PROT_READ | libc::PROT_WRITE));
        // SAFETY: the mappings keep the file.
        unsafe { libc::close(fd) };
        (device != libc::MAP_FAILED && view != libc::MAP_FAILED).then_some((device as u64, view as u64))
    })
}

/// GPU memory; `vmm`: as of cuMemCreate. 0 where there is none.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_alloc(length: usize, vmm: c_int) -> u64 {
    static USED: AtomicU64 = AtomicU64::new(0);
    let length = length.max(1).next_multiple_of(4096) as u64;
    // A page between two allocations.
    let offset = USED.fetch_add(length + 4096, Ordering::Relaxed);
    let Some((device, view)) = memory().filter(|_| offset + length <= MEMORY) else { return 0 };
    state().device.insert(device + offset, Range { length, view: view + offset, vmm: vmm != 0, context: 0 });
    device + offset
}

/// Gives GPU memory back.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_free(address: u64) {
    state().device.remove(&address);
}

/// Where tests look at GPU memory.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_view(address: u64) -> *mut u8 {
    find(&state().device, address, 1).map_or(0, |(range, offset)| range.view + offset) as *mut u8
}

/// Bytes of host memory that are pinned.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_pinned() -> u64 {
    state().pinned.values().map(|range| range.length).sum()
}

/// Whether copies hang: those that did not begin go on when they don't any more.
static HANGS: AtomicBool = AtomicBool::new(false);

/// Has copies hang, or go on.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_hang(hang: c_int) {
    HANGS.store(hang != 0, Ordering::Relaxed);
}

/// Contexts that were made so far.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_contexts() -> u64 {
    MADE.load(Ordering::Relaxed)
}

/// Contexts that there were at once, at most.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_contexts_at_once() -> u64 {
    PEAK.load(Ordering::Relaxed)
}

/// Operations that were in a stream at once, at most.
///
/// # Safety
/// None is needed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stand_in_longest() -> u64 {
    LONGEST.load(Ordering::Relaxed)
}

macro_rules! driver {
    ($($(#[$attribute:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block)*) => { $(
        $(#[$attribute])*
        /// # Safety
        /// As the driver's.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            if let Some(refusal) = refusal(stringify!($name)) {
                return refusal;
            }
            $body
        }
    )* };
}

driver! {
    fn cuInit(_flags: c_uint) {
        SUCCESS
    }

    fn cuDeviceGetCount(count: *mut c_int) {
        write!(count, 1)
    }

    fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        if ordinal == 0 { write!(device, 0) } else { INVALID_VALUE }
    }

    fn cuDeviceGetName(name: *mut c_char, length: c_int, _device: c_int) {
        let text = c"Stand-in";
        if usize::try_from(length).unwrap_or(0) < text.count_bytes() + 1 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller has as much room as it says.
        unsafe { ptr::copy_nonoverlapping(text.as_ptr(), name, text.count_bytes() + 1) };
        SUCCESS
    }

    fn cuDeviceGetPCIBusId(text: *mut c_char, length: c_int, _device: c_int) {
        let bus_id = c"0000:83:00.0";
        if usize::try_from(length).unwrap_or(0) < bus_id.count_bytes() + 1 {
            return INVALID_VALUE;
        }
        // SAFETY: the caller has as much room as it says.
        unsafe { ptr::copy_nonoverlapping(bus_id.as_ptr(), text, bus_id.count_bytes() + 1) };
        SUCCESS
    }

    fn cuDevicePrimaryCtxRetain(context: *mut usize, _device: c_int) {
        write!(context, PRIMARY)
    }

    fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, _device: c_int) {
        if MODE.get() != RELAXED {
            return CAPTURE_UNSUPPORTED;
        }
        let new = handle();
        MADE.fetch_add(1, Ordering::Relaxed);
        PEAK.fetch_max(LIVE.fetch_add(1, Ordering::AcqRel) + 1, Ordering::AcqRel);
        CONTEXTS.with_borrow_mut(|all| all.push(new));
        write!(context, new)
    }

    fn cuCtxDestroy_v2(context: usize) {
        if context <= PRIMARY {
            return INVALID_CONTEXT;
        }
        let mut all = streams();
        let ended: Vec<usize> = all.iter().filter(|(_, stream)| stream.context == context).map(|(&h, _)| h).collect();
        let ended: Vec<Stream> = ended.iter().filter_map(|handle| all.remove(handle)).collect();
        drop(all);
        for stream in ended {
            drop(stream.work);
            let _ = stream.thread.join();
        }
        state().pinned.retain(|_, range| range.context != context);
        LIVE.fetch_sub(1, Ordering::AcqRel);
        SUCCESS
    }

    fn cuCtxSetLimit(_limit: c_int, _value: usize) {
        if current().is_some() { SUCCESS } else { INVALID_CONTEXT }
    }

    fn cuCtxPushCurrent_v2(context: usize) {
        if context == 0 {
            return INVALID_CONTEXT;
        }
        CONTEXTS.with_borrow_mut(|all| all.push(context));
        SUCCESS
    }

    fn cuCtxPopCurrent_v2(context: *mut usize) {
        match CONTEXTS.with_borrow_mut(Vec::pop) {
            Some(old) => write!(context, old),
            None => INVALID_CONTEXT,
        }
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) {
        // SAFETY: the caller's mode.
        let new = unsafe { mode.read() };
        write!(mode, MODE.replace(new))
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        write!(least, 0);
        write!(greatest, -5)
    }

    fn cuStreamCreateWithPriority(stream: *mut usize, _flags: c_uint, _priority: c_int) {
        let Some(context) = current() else { return INVALID_CONTEXT };
        let new = handle();
        streams().insert(new, start(context));
        write!(stream, new)
    }

    fn cuStreamCreate(stream: *mut usize, _flags: c_uint) {
        let new = handle();
        streams().insert(new, start(PROGRAM));
        write!(stream, new)
    }

    fn cuStreamSynchronize(handle: usize) {
        let Some(left) = streams().get(&handle).map(|stream| Arc::clone(&stream.left)) else { return INVALID_VALUE };
        while left.load(Ordering::Acquire) > 0 {
            std::thread::yield_now();
        }
        SUCCESS
    }

    fn cuCtxSetCurrent(context: usize) {
        CONTEXTS.set(vec![context]);
        SUCCESS
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, _properties: *const c_void, _option: c_int) {
        write!(granularity, 2 << 20)
    }

    fn cuMemCreate(memory: *mut u64, _length: usize, _properties: *const c_void, _flags: u64) {
        write!(memory, handle() as u64)
    }

    fn cuMemAddressReserve(address: *mut u64, length: usize, _alignment: usize, _wish: u64, _flags: u64) {
        // SAFETY: asks for nothing but memory.
        let memory = unsafe { stand_in_alloc(length, 1) };
        write!(address, memory)
    }

    fn cuMemMap(_address: u64, _length: usize, _offset: usize, _memory: u64, _flags: u64) {
        SUCCESS
    }

    fn cuMemSetAccess(_address: u64, _length: usize, _descriptions: *const c_void, _count: usize) {
        SUCCESS
    }

    fn cuMemUnmap(address: u64, _length: usize) {
        if state().device.remove(&address).is_some() { SUCCESS } else { INVALID_VALUE }
    }

    fn cuMemAddressFree(_address: u64, _length: usize) {
        SUCCESS
    }

    fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, _device: c_int) {
        // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, _DMA_BUF_SUPPORTED; of all others
        // it has none.
        write!(value, match attribute {
            75 => 9,
            102 => 1,
            124 => c_int::from(std::env::var("CUDA_STAND_IN_LACKS").as_deref() != Ok("dma-buf")),
            _ => 0,
        })
    }

    fn cuStreamQuery(handle: usize) {
        match streams().get(&handle) {
            Some(stream) if stream.left.load(Ordering::Acquire) == 0 => SUCCESS,
            Some(_) => NOT_READY,
            None => INVALID_VALUE,
        }
    }

    fn cuMemHostRegister_v2(address: *mut c_void, length: usize, _flags: c_uint) {
        if MODE.get() != RELAXED {
            return CAPTURE_UNSUPPORTED;
        }
        let Some(context) = current() else { return INVALID_CONTEXT };
        let address = address as u64;
        state().pinned.insert(address, Range { length: length as u64, view: address, vmm: false, context });
        SUCCESS
    }

    fn cuMemHostUnregister(address: *mut c_void) {
        if let Some(context) = current() {
            settled(context);
        }
        if state().pinned.remove(&(address as u64)).is_some() { SUCCESS } else { INVALID_VALUE }
    }

    fn cuMemHostGetDevicePointer_v2(device: *mut u64, address: *mut c_void, _flags: c_uint) {
        if find(&state().pinned, address as u64, 1).is_some() { write!(device, address as u64) } else { INVALID_VALUE }
    }

    fn cuMemRetainAllocationHandle(handle: *mut u64, address: *mut c_void) {
        match find(&state().device, address as u64, 1) {
            Some((range, _)) if range.vmm => write!(handle, range.view),
            _ => INVALID_VALUE,
        }
    }

    fn cuMemRelease(_handle: u64) {
        SUCCESS
    }

    fn cuPointerGetAttribute(value: *mut c_void, attribute: c_int, address: u64) {
        let state = state();
        let on_device = find(&state.device, address, 1).is_some();
        if !on_device && find(&state.pinned, address, 1).is_none() {
            return INVALID_VALUE;
        }
        match attribute {
            // CU_POINTER_ATTRIBUTE_MEMORY_TYPE: device or host.
            2 => write!(value.cast::<c_uint>(), if on_device { 2 } else { 1 }),
            // CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL.
            8 | 9 => write!(value.cast::<c_uint>(), 0),
            _ => INVALID_VALUE,
        }
    }

    fn cuMemcpyDtoHAsync_v2(host: *mut c_void, device: u64, length: usize, handle: usize) {
        copy(handle, device, host as u64, length as u64, false)
    }

    fn cuMemcpyHtoDAsync_v2(device: u64, host: *const c_void, length: usize, handle: usize) {
        copy(handle, device, host as u64, length as u64, true)
    }

    fn cuMemcpy2DAsync_v2(copy: *const Copy2d, handle: usize) {
        // SAFETY: the caller's description, read by this call alone.
        let c = unsafe { &*copy };
        let (device, host) = (c.dst_device + c.dst_x as u64, c.src_host as u64 + c.src_x as u64);
        let Some(context) = streams().get(&handle).map(|stream| stream.context) else { return INVALID_VALUE };
        let (pitch, width, height) = (c.src_pitch as u64, c.width as u64, c.height as u64);
        if c.src_pitch != c.dst_pitch || height == 0 || width > pitch {
            return INVALID_VALUE;
        }
        state().copied(context, device, host, pitch * (height - 1) + width);
        submit(handle, Work::Rows { device, host, pitch, width, height })
    }

    fn cuStreamWriteValue32_v2(handle: usize, address: u64, value: c_uint, _flags: c_uint) {
        if find(&state().pinned, address, 4).is_none() {
            return INVALID_VALUE;
        }
        submit(handle, Work::Write { address, value })
    }
}
