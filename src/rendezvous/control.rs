//! The background thread of the process: it sleeps until a control channel or a device has something to say, or a period
//! is over, and calls back.
//!
//! One thread serves all; it starts with the first use, blocks all signals and costs nothing while nothing happens. A
//! callback must not wait for long, since all others wait for it. It may send on any channel and close any handle.
//!
//! Closing or dropping a handle from another thread waits for a callback of it that runs, and none comes afterwards;
//! hence it must not be done with a lock that the callback takes. Closed from a callback, it takes effect when that
//! callback returns. Callbacks may begin before the call that asked for them has returned its handle.
//!
//! After fork the child has no such thread, and shares the parent's epoll instance. Handles that it inherited do nothing
//! there; a watcher that it asks for itself is its own.

use std::fmt;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::task::Poll;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use dashmap::DashMap;
use mio::unix::SourceFd;
use mio::{Events, Interest, Registry, Token, Waker};
use nix::sys::signal::{SigSet, SigmaskHow};

use super::{Channel, Closed, RendezvousError};

const THREAD: &str = "nccl-rdma-watch";
const WAKE: Token = Token(0);
/// Most frames of one channel before the others have their turn.
const BURST: usize = 64;

/// What a control channel tells.
pub trait ControlEvents: Send + Sync {
    /// A frame has come.
    fn on_frame(&self, kind: u8, body: &[u8]);
    /// The channel is over. The last call.
    fn on_closed(&self, why: Closed);
}

/// What a watched descriptor tells.
pub trait FdEvents: Send + Sync {
    /// It has become readable, or failed. It is not told again before more arrives, so all of it must be read.
    fn on_readable(&self);
}

/// The thread, as others see it.
#[derive(Debug, Clone)]
pub struct Watcher {
    shared: Arc<Shared>,
}

struct Shared {
    pid: u32,
    thread: OnceLock<ThreadId>,
    registry: Registry,
    waker: Waker,
    next_token: AtomicUsize,
    entries: DashMap<Token, Arc<Entry>>,
    timers: Mutex<Vec<Arc<Entry>>>,
    /// Entries to be looked at although no event of theirs has come.
    kicked: Mutex<Vec<Token>>,
}

/// Something that is watched.
struct Entry {
    token: Token,
    closed: AtomicBool,
    source: Source,
    /// Locked while it runs, gone when it is not to run any more.
    callback: Mutex<Option<Callback>>,
}

enum Source {
    Channel(Mutex<Option<Channel>>),
    Fd(RawFd),
    Timer { period: Duration, due: Mutex<Instant> },
}

enum Callback {
    Control(Arc<dyn ControlEvents>),
    Fd(Arc<dyn FdEvents>),
    Timer(Arc<dyn Fn() + Send + Sync>),
}

impl Watcher {
    /// That of this process, started if need be.
    pub fn global() -> Result<Self, RendezvousError> {
        static GLOBAL: Mutex<Option<Watcher>> = Mutex::new(None);
        let mut global = lock(&GLOBAL);
        match &*global {
            Some(watcher) if watcher.shared.is_ours() => Ok(watcher.clone()),
            _ => {
                let watcher = Self::start().map_err(RendezvousError::system("cannot start the background thread"))?;
                Ok(global.insert(watcher).clone())
            }
        }
    }

    fn start() -> io::Result<Self> {
        let poll = mio::Poll::new()?;
        let registry = poll.registry().try_clone()?;
        let shared = Arc::new(Shared {
            pid: std::process::id(),
            thread: OnceLock::new(),
            waker: Waker::new(&registry, WAKE)?,
            registry,
            next_token: AtomicUsize::new(WAKE.0 + 1),
            entries: DashMap::new(),
            timers: Mutex::new(Vec::new()),
            kicked: Mutex::new(Vec::new()),
        });
        // The thread inherits the mask: the application's signals are delivered to the application's threads.
        let mask = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let spawned = thread::Builder::new().name(THREAD.to_owned()).spawn({
            let shared = shared.clone();
            move || shared.run(poll)
        });
        mask.thread_set_mask()?;
        spawned?;
        Ok(Self { shared })
    }

    /// Takes a channel over: frames that have come already are told, too.
    pub fn adopt(&self, channel: Channel, events: Arc<dyn ControlEvents>) -> Result<ControlHandle, RendezvousError> {
        let fd = channel.as_raw_fd();
        let source = Source::Channel(Mutex::new(Some(channel)));
        let interest = Interest::READABLE | Interest::WRITABLE;
        let watch = self.watch(source, Callback::Control(events), fd, interest)?;
        // What was read along with the handshake raises no event.
        self.shared.kick(watch.entry.token);
        Ok(ControlHandle(watch))
    }

    /// Watches a descriptor of the caller's, which must outlive the handle and must not block when it is read.
    pub fn watch_fd(&self, fd: RawFd, events: Arc<dyn FdEvents>) -> Result<FdHandle, RendezvousError> {
        self.watch(Source::Fd(fd), Callback::Fd(events), fd, Interest::READABLE).map(FdHandle)
    }

    /// Calls back after each period. Periods that were missed are not made up for.
    pub fn every(&self, period: Duration, tick: Arc<dyn Fn() + Send + Sync>) -> TimerHandle {
        // Twice as often as never would spin.
        let period = period.max(Duration::from_millis(1));
        let source = Source::Timer { period, due: Mutex::new(Instant::now() + period) };
        let entry = self.shared.entry(source, Callback::Timer(tick));
        if self.shared.is_ours() {
            lock(&self.shared.timers).push(entry.clone());
            self.shared.kick(entry.token);
        }
        TimerHandle(Watch { shared: self.shared.clone(), entry })
    }

    fn watch(
        &self,
        source: Source,
        callback: Callback,
        fd: RawFd,
        interest: Interest,
    ) -> Result<Watch, RendezvousError> {
        let entry = self.shared.entry(source, callback);
        let token = entry.token;
        // Known before its first event can come.
        self.shared.entries.insert(token, entry.clone());
        let watch = Watch { shared: self.shared.clone(), entry };
        watch
            .shared
            .registry
            .register(&mut SourceFd(&fd), token, interest)
            .map_err(RendezvousError::system("cannot watch a descriptor"))?;
        Ok(watch)
    }
}

impl Shared {
    /// Whether this is the process that has the thread.
    fn is_ours(&self) -> bool {
        self.pid == std::process::id()
    }

    fn is_this_thread(&self) -> bool {
        self.thread.get() == Some(&thread::current().id())
    }

    fn entry(&self, source: Source, callback: Callback) -> Arc<Entry> {
        let token = Token(self.next_token.fetch_add(1, Ordering::Relaxed));
        Arc::new(Entry { token, closed: AtomicBool::new(false), source, callback: Mutex::new(Some(callback)) })
    }

    /// Has the thread look at an entry.
    fn kick(&self, token: Token) {
        lock(&self.kicked).push(token);
        if let Err(e) = self.waker.wake() {
            tracing::warn!(target: "init", "cannot wake the background thread: {e}");
        }
    }

    fn run(&self, mut poll: mio::Poll) {
        // Set once, by the only thread that runs this.
        let _ = self.thread.set(thread::current().id());
        let mut events = Events::with_capacity(256);
        let mut work: Vec<Token> = Vec::new();
        loop {
            let timeout = if work.is_empty() { self.until_next_timer(Instant::now()) } else { Some(Duration::ZERO) };
            match poll.poll(&mut events, timeout) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    tracing::error!(target: "init", "the background thread ends, dead peers go unnoticed from here on: {e}");
                    return;
                }
            }
            work.extend(events.iter().map(|e| e.token()).filter(|t| *t != WAKE));
            work.append(&mut lock(&self.kicked));
            work.sort_unstable();
            work.dedup();
            work.retain(|token| {
                let entry = self.entries.get(token).map(|e| e.clone());
                entry.is_some_and(|entry| self.tend(&entry))
            });
            self.tick(Instant::now());
        }
    }

    fn until_next_timer(&self, now: Instant) -> Option<Duration> {
        let timers = lock(&self.timers);
        let due = timers.iter().filter_map(|entry| match &entry.source {
            Source::Timer { due, .. } => Some(*lock(due)),
            _ => None,
        });
        due.min().map(|due| due.saturating_duration_since(now))
    }

    fn tick(&self, now: Instant) {
        let timers = lock(&self.timers).clone();
        for entry in timers {
            let Source::Timer { period, due } = &entry.source else { continue };
            {
                let mut due = lock(due);
                if *due > now {
                    continue;
                }
                *due = (*due + *period).max(now);
            }
            entry.call(|callback| {
                if let Callback::Timer(tick) = callback {
                    tick();
                }
            });
        }
    }

    /// Does what an event asks for; true when more is to be done.
    fn tend(&self, entry: &Entry) -> bool {
        match &entry.source {
            Source::Channel(channel) => {
                for _ in 0..BURST {
                    let next = match lock(channel).as_mut() {
                        Some(channel) => channel.next(),
                        None => return false,
                    };
                    match next {
                        Poll::Pending => return false,
                        Poll::Ready(Ok(frame)) => entry.call(|callback| {
                            if let Callback::Control(events) = callback {
                                events.on_frame(frame.kind, &frame.body);
                            }
                        }),
                        Poll::Ready(Err(why)) => {
                            self.release(entry);
                            entry.call(|callback| {
                                if let Callback::Control(events) = callback {
                                    events.on_closed(why);
                                }
                            });
                            entry.retire();
                            return false;
                        }
                    }
                }
                true
            }
            Source::Fd(_) => {
                entry.call(|callback| {
                    if let Callback::Fd(events) = callback {
                        events.on_readable();
                    }
                });
                false
            }
            Source::Timer { .. } => false,
        }
    }

    /// Forgets an entry and closes its channel.
    fn release(&self, entry: &Entry) {
        self.entries.remove(&entry.token);
        match &entry.source {
            Source::Channel(channel) => {
                let Some(channel) = lock(channel).take() else { return };
                self.deregister(channel.as_raw_fd());
                channel.finish();
            }
            Source::Fd(fd) => self.deregister(*fd),
            Source::Timer { .. } => lock(&self.timers).retain(|e| e.token != entry.token),
        }
    }

    fn deregister(&self, fd: RawFd) {
        // Fails where the registration itself had failed.
        let _ = self.registry.deregister(&mut SourceFd(&fd));
    }
}

impl Entry {
    /// Runs the callback, unless it was closed. A panic of it is not the end of the thread.
    fn call(&self, f: impl FnOnce(&Callback)) {
        let mut callback = lock(&self.callback);
        if let Some(callback) = &*callback
            && !self.closed.load(Ordering::Acquire)
            && catch_unwind(AssertUnwindSafe(|| f(callback))).is_err()
        {
            tracing::error!(target: "init", "a callback of the background thread panicked");
        }
        // It may just have closed itself.
        let done = if self.closed.load(Ordering::Acquire) { callback.take() } else { None };
        // Its destructor may come back here.
        drop(callback);
        drop(done);
    }

    /// Lets go of the callback: what it holds may in turn hold the handle.
    fn retire(&self) {
        let callback = lock(&self.callback).take();
        drop(callback);
    }
}

/// A registration. Dropping it ends it.
struct Watch {
    shared: Arc<Shared>,
    entry: Arc<Entry>,
}

impl Watch {
    fn close(&self) {
        if !self.shared.is_ours() {
            return;
        }
        if !self.entry.closed.swap(true, Ordering::AcqRel) {
            self.shared.release(&self.entry);
        }
        // On the thread itself, a callback of this entry that runs is our caller, and lets go of it when we return.
        if self.shared.is_this_thread() {
            let callback = self.entry.callback.try_lock().ok().and_then(|mut callback| callback.take());
            drop(callback);
        } else {
            self.entry.retire();
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared").field("pid", &self.pid).finish_non_exhaustive()
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("token", &self.entry.token.0).finish_non_exhaustive()
    }
}

/// A control channel that the thread reads. Dropping it is [`Self::close`].
#[derive(Debug)]
pub struct ControlHandle(Watch);

impl ControlHandle {
    /// Queues a frame from any thread and writes what the socket takes. False when it will not leave: the channel is
    /// over, which is told by [`ControlEvents::on_closed`], or the frame or the queue is too long.
    pub fn send(&self, kind: u8, body: &[u8]) -> bool {
        let Watch { shared, entry } = &self.0;
        if !shared.is_ours() {
            return false;
        }
        match &entry.source {
            Source::Channel(channel) => lock(channel).as_mut().is_some_and(|c| c.send(kind, body).is_ok()),
            Source::Fd(_) | Source::Timer { .. } => false,
        }
    }

    /// Closes the channel, in order: what was sent reaches the peer if it still can. No callback comes afterwards.
    pub fn close(&self) {
        self.0.close();
    }
}

/// A descriptor that the thread watches. Dropping it is [`Self::close`].
#[derive(Debug)]
pub struct FdHandle(Watch);

impl FdHandle {
    /// Stops watching. The descriptor may be closed and no callback comes afterwards.
    pub fn close(&self) {
        self.0.close();
    }
}

/// A period that the thread keeps. Dropping it is [`Self::close`].
#[derive(Debug)]
pub struct TimerHandle(Watch);

impl TimerHandle {
    /// No callback comes afterwards.
    pub fn close(&self) {
        self.0.close();
    }
}

/// No code that can panic runs under these locks but callbacks, whose panics are caught.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
