//! The engine: one thread a process that moves data whether or not the program makes a call, sleeps when there is nothing
//! to do, and shares its lock with the slow verbs. Posting only rings a bell.
use crate::adapter::Adapter;
use crate::link::Links;
use crate::rc::World;
use crate::shm::Mapping;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the engine looks for work before it sleeps. Never yielding: a thread that slept gets a core at once when it is
/// woken, one that yielded to a program polling in a loop waits for that program's time slice to end. Where cores are few
/// the spin takes one from the program; where there are many it saves the wake-up, tens of microseconds.
fn spin() -> Duration {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Duration::from_micros(if cores >= 8 { 200 } else { 10 })
}

const WORDS: usize = 1 << (crate::qp::INDEX_BITS - 6);

/// Which queue pairs have something posted, and the word on which the engine sleeps.
#[derive(Debug)]
pub(crate) struct Bell {
    ready: Vec<AtomicU64>,
    summary: Vec<AtomicU64>,
    /// Holds the sleep word: the process's own registry slot, so that other processes can ring as well.
    memory: Arc<Mapping>,
}

impl Bell {
    fn new(memory: Arc<Mapping>) -> Self {
        let zeros = |n| (0..n).map(|_| AtomicU64::new(0)).collect();
        Self { ready: zeros(WORDS), summary: zeros(WORDS / 64), memory }
    }

    /// Something was posted to the queue pair at `index`.
    pub(crate) fn ring(&self, index: u32) {
        let word = (index >> 6) as usize & (WORDS - 1);
        self.ready[word].fetch_or(1 << (index & 63), Ordering::SeqCst);
        self.summary[word >> 6].fetch_or(1 << (word & 63), Ordering::SeqCst);
        self.memory.wake();
    }

    fn any(&self) -> bool {
        self.summary.iter().any(|word| word.load(Ordering::SeqCst) != 0)
    }

    fn drain(&self, mut found: impl FnMut(u32)) {
        for (i, summary) in self.summary.iter().enumerate() {
            if summary.load(Ordering::Relaxed) == 0 {
                continue;
            }
            for word in bits(summary.swap(0, Ordering::SeqCst)) {
                let word = i * 64 + word as usize;
                for bit in bits(self.ready[word].swap(0, Ordering::SeqCst)) {
                    found(u32::try_from(word).unwrap_or(0) << 6 | bit);
                }
            }
        }
    }
}

fn bits(mut word: u64) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        let bit = (word != 0).then(|| word.trailing_zeros());
        word &= word.wrapping_sub(1);
        bit
    })
}

pub(crate) struct Engine {
    world: Mutex<World>,
    /// Callers who want the lock: the engine lets them go first, which a mutex by itself would not.
    waiting: AtomicUsize,
    pub(crate) bell: Arc<Bell>,
    stop: AtomicBool,
}

/// The engine with its thread. Dropping it ends the thread and leaves the registry.
pub(crate) struct Running {
    pub(crate) engine: Arc<Engine>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    pub(crate) fn start(adapter: &'static Adapter) -> io::Result<Self> {
        let links = Links::open(adapter)?;
        let bell = Arc::new(Bell::new(links.own_memory()));
        let threaded = adapter.is_threaded();
        let engine = Arc::new(Engine {
            world: Mutex::new(World::new(adapter, links)),
            waiting: AtomicUsize::new(0),
            bell,
            stop: AtomicBool::new(false),
        });
        let body = Arc::clone(&engine);
        let thread = threaded.then(|| spawn("soft-hca", move || body.run())).transpose()?;
        Ok(Self { engine, thread })
    }
}

/// Signals are for the program's own threads: the new one inherits a mask that blocks them all.
pub(crate) fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut before = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: writable.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: one filled set, one writable.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    let thread = std::thread::Builder::new().name(name.into()).spawn(body);
    // SAFETY: filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before.as_ptr(), std::ptr::null_mut()) };
    thread
}

impl Drop for Running {
    fn drop(&mut self) {
        self.engine.stop.store(true, Ordering::SeqCst);
        self.engine.bell.memory.wake();
        if let Some(thread) = self.thread.take() {
            // A panic there has been printed; there is nobody to hand it to.
            let _ = thread.join();
        }
    }
}

impl Engine {
    /// For verbs: waits for at most the segment being copied.
    pub(crate) fn lock(&self) -> MutexGuard<'_, World> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        world
    }

    fn run(&self) {
        let spin = spin();
        let mut idle_since: Option<Instant> = None;
        while !self.stop.load(Ordering::SeqCst) {
            while self.waiting.load(Ordering::SeqCst) > 0 {
                std::thread::yield_now();
            }
            let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.drain(|index| world.activate(index));
            let now = Instant::now();
            if world.round(now) {
                idle_since = None;
                continue;
            }
            drop(world);
            if now.duration_since(*idle_since.get_or_insert(now)) < spin {
                std::hint::spin_loop();
                continue;
            }
            self.sleep();
            idle_since = None;
        }
    }

    fn sleep(&self) {
        let word = self.bell.memory.sleep_word();
        word.store(1, Ordering::SeqCst);
        let due = {
            let mut world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
            if self.bell.any() || !world.is_idle() || self.stop.load(Ordering::SeqCst) {
                word.store(0, Ordering::SeqCst);
                return;
            }
            world.next_due()
        };
        let timeout = due.map(|due| due.saturating_duration_since(Instant::now()));
        wait_while_one(word, timeout);
        word.store(0, Ordering::SeqCst);
    }
}

/// Sleeps while the word is 1. Not FUTEX_PRIVATE: other processes ring too.
pub(crate) fn wait_while_one(word: &AtomicU32, timeout: Option<Duration>) {
    let spec = timeout.map(|timeout| libc::timespec {
        tv_sec: libc::time_t::try_from(timeout.as_secs()).unwrap_or(libc::time_t::MAX),
        tv_nsec: timeout.subsec_nanos().into(),
    });
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word and the timespec outlive the call. Early returns are harmless: the caller looks again.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAIT, 1, spec) };
}
