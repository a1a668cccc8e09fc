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

use super::alive::BEAT;
use super::{Channel, Closed, RendezvousError};

const THREAD: &str = "nccl-rdma-watch";
const WAKE: Token = Token(0);
/// Most frames of one channel before the others have their turn.
const BURST: usize = 64;

/// What a control channel tells.
pub trait ControlEvents: Send + Sync {
    /// A frame has come.
    fn on_frame(&self, kind: u8, body: &[u8]);
    /// Nothing has come for so long, which is more than the keep-alive agreed on allows. At most once; the channel stays
    /// open, as the peer may still hear. Never called without a keep-alive.
    fn on_silent(&self, _silence: Duration, _limit: Duration) {}
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
        // When to look after the channels with a keep-alive; None: there is none.
        let mut look: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let timer = self.until_next_timer(now).into_iter();
            let idle = timer.chain(look.map(|at| at.saturating_duration_since(now))).min();
            let timeout = if work.is_empty() { idle } else { Some(Duration::ZERO) };
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
                entry.is_some_and(|entry| {
                    let more = self.tend(&entry);
                    // Its keep-alive may just have begun.
                    let first = entry.period().map(|period| Instant::now() + period);
                    look = look.into_iter().chain(first).min();
                    more
                })
            });
            self.tick(Instant::now());
            if look.is_some_and(|at| at <= Instant::now()) {
                look = self.look_after_all().map(|period| Instant::now() + period);
            }
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

    /// Keeps every channel with a keep-alive alive; the shortest of their periods.
    fn look_after_all(&self) -> Option<Duration> {
        // Writing to sockets with the map locked would hold up those who set connections up.
        let entries: Vec<Arc<Entry>> = self.entries.iter().map(|e| e.clone()).collect();
        entries.into_iter().filter_map(|entry| self.look_after(&entry)).min()
    }

    fn look_after(&self, entry: &Entry) -> Option<Duration> {
        let Source::Channel(channel) = &entry.source else { return None };
        let dead = || lock(channel).as_mut().and_then(|channel| channel.look(Instant::now()));
        // What has come by now speaks for the peer, even if this thread was held up and has not read it yet.
        if dead().is_some() {
            if self.tend(entry) {
                self.kick(entry.token);
            }
            if let Some((silence, limit)) = dead() {
                if let Some(channel) = lock(channel).as_mut() {
                    channel.end_keep_alive();
                }
                entry.call(|callback| {
                    if let Callback::Control(events) = callback {
                        events.on_silent(silence, limit);
                    }
                });
            }
        }
        entry.period()
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
                        Poll::Ready(Ok(frame)) if frame.kind == BEAT => {}
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
                                // It was the last.
                                entry.closed.store(true, Ordering::Release);
                            });
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
    /// How often it is to be looked after; None: it has no keep-alive.
    fn period(&self) -> Option<Duration> {
        match &self.source {
            Source::Channel(channel) => lock(channel).as_ref().and_then(Channel::period),
            Source::Fd(_) | Source::Timer { .. } => None,
        }
    }

    /// Runs the callback, unless it was closed. A panic of it is not the end of the thread.
    fn call(&self, f: impl FnOnce(&Callback)) {
        let mut callback = lock(&self.callback);
        if let Some(callback) = &*callback
            && !self.closed.load(Ordering::Acquire)
            && catch_unwind(AssertUnwindSafe(|| f(callback))).is_err()
        {
            tracing::error!(target: "init", "a callback of the background thread panicked");
        }
        // Closed meanwhile, or by the callback itself. What it holds may in turn hold the handle, so it goes; under the
        // lock, so that whoever waits in `Watch::close` waits for the destructor, too. That may close the handle, which on
        // this thread does not wait for the lock.
        if self.closed.load(Ordering::Acquire) {
            *callback = None;
        }
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
        let callback = if self.shared.is_this_thread() {
            // A callback of this entry that runs is our caller, and is let go of when it returns.
            self.entry.callback.try_lock().ok().and_then(|mut callback| callback.take())
        } else {
            lock(&self.entry.callback).take()
        };
        // Outside the lock: its destructor may come back here.
        drop(callback);
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

    /// Keep-alive frames sent so far.
    pub fn beats(&self) -> u64 {
        match &self.0.entry.source {
            Source::Channel(channel) => lock(channel).as_ref().map_or(0, Channel::beats),
            Source::Fd(_) | Source::Timer { .. } => 0,
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

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
    use std::sync::{Condvar, Weak};

    use super::*;
    use crate::rendezvous::tests::{pair, recv};
    use crate::rendezvous::{Frame, KeepAlive, MAX_BODY};

    const LONG: Duration = Duration::from_secs(20);
    const SHORT: Duration = Duration::from_millis(50);

    #[derive(Debug, PartialEq, Eq)]
    enum Told {
        Frame(u8, Vec<u8>),
        Silent,
        Closed(Closed),
    }

    /// Passes on what it is told.
    struct Tell(Sender<Told>);

    impl ControlEvents for Tell {
        fn on_frame(&self, kind: u8, body: &[u8]) {
            let _ = self.0.send(Told::Frame(kind, body.to_vec()));
        }

        fn on_silent(&self, silence: Duration, limit: Duration) {
            assert!(silence > limit);
            let _ = self.0.send(Told::Silent);
        }

        fn on_closed(&self, why: Closed) {
            let _ = self.0.send(Told::Closed(why));
        }
    }

    fn adopt(far: Channel) -> (ControlHandle, Receiver<Told>) {
        let (tx, rx) = channel();
        (Watcher::global().unwrap().adopt(far, Arc::new(Tell(tx))).unwrap(), rx)
    }

    fn told(rx: &Receiver<Told>) -> Told {
        rx.recv_timeout(LONG).unwrap()
    }

    /// A gate for tests: set once, waited for with a bound.
    #[derive(Default)]
    struct Flag(Mutex<bool>, Condvar);

    impl Flag {
        fn set(&self) {
            *lock(&self.0) = true;
            self.1.notify_all();
        }

        fn wait(&self) {
            let (set, _) = self.1.wait_timeout_while(lock(&self.0), LONG, |set| !*set).unwrap();
            assert!(*set, "timed out");
        }
    }

    #[test]
    fn frames_come_in_order_and_the_end_after_the_last() {
        let (near, far) = pair();
        let (near, near_told) = adopt(near);
        let (far, far_told) = adopt(far);
        for i in 0..200u8 {
            assert!(near.send(i, &[i; 100]));
        }
        assert!(far.send(9, b"other way"));
        assert_eq!(told(&near_told), Told::Frame(9, b"other way".to_vec()));
        near.close();
        assert!(!near.send(1, &[]));
        for i in 0..200 {
            assert_eq!(told(&far_told), Told::Frame(i, vec![i; 100]));
        }
        assert_eq!(told(&far_told), Told::Closed(Closed::Eof));
        // Both let go of what was told.
        assert_eq!(far_told.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
        assert_eq!(near_told.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
        assert!(!far.send(1, &[]));
    }

    #[test]
    fn what_the_channel_has_read_already_is_told_without_an_event() {
        let (near, mut far) = pair();
        // Both come with one read.
        let header = |kind| [b'N', b'R', b'D', b'F', 1, 0, kind, 0, 0, 0, 0, 0];
        let mut raw = TcpStream::from(near.as_fd().try_clone_to_owned().unwrap());
        raw.write_all(&[header(1), header(2)].concat()).unwrap();
        assert_eq!(recv(&mut far).unwrap().kind, 1);
        // Neither readable nor writable: the socket has nothing to say.
        while far.send(3, &[0; MAX_BODY]).is_ok() {}
        let (_far, rx) = adopt(far);
        assert_eq!(told(&rx), Told::Frame(2, vec![]));
    }

    #[test]
    fn the_last_word_arrives_when_both_close_at_once() {
        for _ in 0..50 {
            let (near, mut far) = pair();
            // Unread bytes at the side that closes must not cost the peer what was said.
            far.send(1, &[0; MAX_BODY]).unwrap();
            let (near, _told) = adopt(near);
            assert!(near.send(5, b"bye"));
            near.close();
            // These meet a closed socket.
            for _ in 0..3 {
                let _ = far.send(5, b"bye");
            }
            assert_eq!(recv(&mut far).unwrap(), Frame { kind: 5, body: b"bye".to_vec() });
        }
    }

    #[test]
    fn much_is_sent_without_blocking_and_all_of_it_arrives() {
        let (near, mut far) = pair();
        let (near, _rx) = adopt(near);
        let body = vec![1; MAX_BODY];
        let mut sent = 0u32;
        while near.send(1, &body) {
            sent += 1;
            assert!(sent < 10_000, "never full");
        }
        // Only the watcher writes from here on.
        for _ in 0..sent {
            assert_eq!(recv(&mut far).unwrap().body.len(), MAX_BODY);
        }
    }

    #[test]
    fn a_reset_and_garbage_are_told_apart_from_an_end() {
        let (near, far) = pair();
        let (_far, rx) = adopt(far);
        socket2::SockRef::from(&near).set_linger(Some(Duration::ZERO)).unwrap();
        drop(near);
        assert_eq!(told(&rx), Told::Closed(Closed::Reset(libc::ECONNRESET)));

        let (near, far) = pair();
        let (_far, rx) = adopt(far);
        TcpStream::from(near.as_fd().try_clone_to_owned().unwrap()).write_all(b"GET /").unwrap();
        assert_eq!(told(&rx), Told::Closed(Closed::Garbage));
    }

    struct Slow {
        entered: Flag,
        leave: Flag,
        left: AtomicBool,
    }

    impl ControlEvents for Slow {
        fn on_frame(&self, _: u8, _: &[u8]) {
            self.entered.set();
            self.leave.wait();
            self.left.store(true, Ordering::Release);
        }

        fn on_closed(&self, _: Closed) {}
    }

    /// A watcher of the test's own: a callback of it that waits keeps no other test waiting.
    fn own() -> Watcher {
        Watcher::start().unwrap()
    }

    #[test]
    fn close_waits_for_a_callback_that_runs() {
        let (mut near, far) = pair();
        let slow = Arc::new(Slow { entered: Flag::default(), leave: Flag::default(), left: AtomicBool::new(false) });
        let handle = own().adopt(far, slow.clone()).unwrap();
        near.send(1, &[]).unwrap();
        near.send(1, &[]).unwrap();
        slow.entered.wait();
        thread::scope(|scope| {
            let closing = scope.spawn(|| {
                handle.close();
                slow.left.load(Ordering::Acquire)
            });
            thread::sleep(SHORT);
            assert!(!closing.is_finished());
            slow.leave.set();
            assert!(closing.join().unwrap());
        });
        // The watcher has let go, although the second frame had come.
        drop(handle);
        assert_eq!(Arc::strong_count(&slow), 1);
    }

    struct Strict {
        closed: AtomicBool,
        late: AtomicUsize,
        calls: AtomicUsize,
    }

    impl Strict {
        fn called(&self) {
            self.calls.fetch_add(1, Ordering::Relaxed);
            if self.closed.load(Ordering::SeqCst) {
                self.late.fetch_add(1, Ordering::SeqCst);
            }
        }
    }

    impl ControlEvents for Strict {
        fn on_frame(&self, _: u8, _: &[u8]) {
            self.called();
        }

        fn on_closed(&self, _: Closed) {
            self.called();
        }
    }

    impl FdEvents for Strict {
        fn on_readable(&self) {
            self.called();
        }
    }

    #[test]
    fn nothing_is_told_after_close_whenever_it_comes() {
        let mut calls = 0;
        for round in 0..300 {
            let (mut near, far) = pair();
            let strict = Arc::new(Strict {
                closed: AtomicBool::new(false),
                late: AtomicUsize::new(0),
                calls: AtomicUsize::new(0),
            });
            let handle = Watcher::global().unwrap().adopt(far, strict.clone()).unwrap();
            for _ in 0..20 {
                near.send(1, b"x").unwrap();
            }
            if round % 2 == 0 {
                drop(near);
            }
            for _ in 0..round % 50 {
                thread::yield_now();
            }
            drop(handle);
            strict.closed.store(true, Ordering::SeqCst);
            thread::yield_now();
            assert_eq!(strict.late.load(Ordering::SeqCst), 0);
            calls += strict.calls.load(Ordering::Relaxed);
        }
        assert!(calls > 0, "no close met a callback");
    }

    /// Holds its own handle, as a connection does.
    struct Selfish {
        handle: Mutex<Option<ControlHandle>>,
        told: Sender<Told>,
        me: Weak<Self>,
    }

    impl ControlEvents for Selfish {
        fn on_frame(&self, kind: u8, body: &[u8]) {
            let _ = self.told.send(Told::Frame(kind, body.to_vec()));
            // Dropped on the thread that calls: must neither wait for itself nor be called again.
            let handle = lock(&self.handle).take();
            drop(handle);
            assert!(self.me.upgrade().is_some());
        }

        fn on_closed(&self, why: Closed) {
            let _ = self.told.send(Told::Closed(why));
        }
    }

    #[test]
    fn a_callback_may_close_its_own_handle() {
        let (mut near, far) = pair();
        let (tx, rx) = channel();
        let selfish = Arc::new_cyclic(|me| Selfish { handle: Mutex::default(), told: tx, me: me.clone() });
        let handle = Watcher::global().unwrap().adopt(far, selfish.clone()).unwrap();
        *lock(&selfish.handle) = Some(handle);
        near.send(1, b"one").unwrap();
        assert_eq!(told(&rx), Told::Frame(1, b"one".to_vec()));
        assert!(recv(&mut near).is_err(), "the socket was closed");
        drop(selfish);
        // The last owner was the watcher, and it has let go.
        assert_eq!(rx.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn the_end_of_a_channel_breaks_the_circle_of_owners() {
        let (near, far) = pair();
        let (tx, rx) = channel();
        let selfish = Arc::new_cyclic(|me| Selfish { handle: Mutex::default(), told: tx, me: me.clone() });
        let handle = Watcher::global().unwrap().adopt(far, selfish.clone()).unwrap();
        *lock(&selfish.handle) = Some(handle);
        drop(selfish);
        drop(near);
        assert_eq!(told(&rx), Told::Closed(Closed::Eof));
        assert_eq!(rx.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_peer_that_says_nothing_is_told_of_once_and_can_still_hear() {
        let (mut near, mut far) = pair();
        let start = Instant::now();
        far.keep_alive(KeepAlive::new(20, 60).unwrap());
        let (handle, rx) = adopt(far);
        assert_eq!(told(&rx), Told::Silent);
        assert!(start.elapsed() > Duration::from_millis(60));
        assert!(handle.send(1, b"why"));
        // The beats before it are not the caller's; the terms in the first one make this side beat.
        assert_eq!(recv(&mut near).unwrap(), Frame { kind: 1, body: b"why".to_vec() });
        assert_eq!(near.beats(), 1);
        near.send(2, b"late").unwrap();
        assert_eq!(told(&rx), Told::Frame(2, b"late".to_vec()));
        assert_eq!(rx.recv_timeout(SHORT * 4), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn two_watched_ends_keep_each_other_alive() {
        let (near, mut far) = pair();
        far.keep_alive(KeepAlive::new(20, 300).unwrap());
        let ((near, near_rx), (far, far_rx)) = (adopt(near), adopt(far));
        let start = Instant::now();
        assert_eq!(near_rx.recv_timeout(Duration::from_secs(1)), Err(RecvTimeoutError::Timeout));
        assert_eq!(far_rx.try_iter().count(), 0);
        for end in [&near, &far] {
            let (beats, most) = (end.beats(), 1 + start.elapsed().as_millis() / 20);
            assert!(beats > 3 && u128::from(beats) <= most, "{beats} beats, at most {most}");
        }
    }

    struct Panics(Sender<u8>);

    impl ControlEvents for Panics {
        fn on_frame(&self, kind: u8, _: &[u8]) {
            let _ = self.0.send(kind);
            assert_ne!(kind, 1, "this panic is part of the test");
        }

        fn on_closed(&self, _: Closed) {}
    }

    #[test]
    fn a_callback_that_panics_is_not_the_end_of_the_thread() {
        let (mut near, far) = pair();
        let (tx, rx) = channel();
        let _handle = own().adopt(far, Arc::new(Panics(tx))).unwrap();
        near.send(1, &[]).unwrap();
        near.send(2, &[]).unwrap();
        assert_eq!(rx.recv_timeout(LONG), Ok(1));
        assert_eq!(rx.recv_timeout(LONG), Ok(2));
    }

    /// Reads all there is, as one must.
    struct Drain(UnixStream, Sender<Vec<u8>>);

    impl FdEvents for Drain {
        fn on_readable(&self) {
            let mut bytes = Vec::new();
            let _ = (&self.0).read_to_end(&mut bytes);
            if !bytes.is_empty() {
                let _ = self.1.send(bytes);
            }
        }
    }

    #[test]
    fn a_descriptor_is_told_of_until_it_is_let_go() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        let fd = theirs.as_raw_fd();
        let (tx, rx) = channel();
        ours.write_all(b"before").unwrap();
        let drain = Arc::new(Drain(theirs, tx));
        let handle = Watcher::global().unwrap().watch_fd(fd, drain.clone()).unwrap();
        assert_eq!(rx.recv_timeout(LONG).unwrap(), b"before");
        ours.write_all(b"after").unwrap();
        assert_eq!(rx.recv_timeout(LONG).unwrap(), b"after");
        handle.close();
        ours.write_all(b"late").unwrap();
        assert_eq!(rx.recv_timeout(SHORT), Err(RecvTimeoutError::Timeout));
        assert_eq!(Arc::strong_count(&drain), 1);
        // The same descriptor can be watched again.
        let _handle = Watcher::global().unwrap().watch_fd(fd, drain).unwrap();
        assert_eq!(rx.recv_timeout(LONG).unwrap(), b"late");
    }

    #[test]
    fn what_cannot_be_watched_is_an_error() {
        let file = tempfile::tempfile().unwrap();
        let (tx, _rx) = channel();
        let (_ours, theirs) = UnixStream::pair().unwrap();
        let drain = Arc::new(Drain(theirs, tx));
        assert!(Watcher::global().unwrap().watch_fd(file.as_raw_fd(), drain.clone()).is_err());
        assert_eq!(Arc::strong_count(&drain), 1);
    }

    #[test]
    fn a_period_comes_again_until_it_is_closed() {
        let (tx, rx) = channel();
        let start = Instant::now();
        let tick = Arc::new(move || {
            let _ = tx.send(Instant::now());
        });
        let timer = Watcher::global().unwrap().every(Duration::from_millis(20), tick);
        for n in 1..=3 {
            let at = rx.recv_timeout(LONG).unwrap();
            assert!(at - start >= Duration::from_millis(20) * n, "tick {n} after {:?}", at - start);
        }
        timer.close();
        rx.try_iter().count();
        assert_eq!(rx.recv_timeout(LONG), Err(RecvTimeoutError::Disconnected));
    }

    /// A field of the watcher thread's status in /proc.
    fn status(tid: i32, field: &str) -> String {
        let status = std::fs::read_to_string(format!("/proc/self/task/{tid}/status")).unwrap();
        let line = status.lines().find_map(|l| l.strip_prefix(field)?.strip_prefix(':')).unwrap();
        line.trim().to_owned()
    }

    #[test]
    fn the_thread_has_its_name_blocks_signals_and_sleeps_while_nothing_happens() {
        let watcher = own();
        let (tx, rx) = channel();
        let timer = watcher.every(Duration::from_millis(1), {
            Arc::new(move || {
                // SAFETY: takes nothing and cannot fail.
                let _ = tx.send(unsafe { libc::gettid() });
            })
        });
        let tid = rx.recv_timeout(LONG).unwrap();
        timer.close();
        assert_eq!(status(tid, "Name"), THREAD);
        let blocked = u64::from_str_radix(&status(tid, "SigBlk"), 16).unwrap();
        for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGCHLD, libc::SIGPROF, libc::SIGALRM] {
            assert_ne!(blocked & (1 << (signal - 1)), 0, "signal {signal}");
        }
        // The thread that started it keeps its own.
        assert!(!SigSet::thread_get_mask().unwrap().contains(nix::sys::signal::SIGTERM));

        let (_near, far) = pair();
        let (tx, _rx) = channel();
        let _handle = watcher.adopt(far, Arc::new(Tell(tx))).unwrap();
        // Asleep at both ends of a while without having gone to sleep in between: it slept all through. On a busy machine
        // it may still be on its way to the first sleep, hence more than one try.
        let asleep = || (status(tid, "State"), status(tid, "voluntary_ctxt_switches"));
        let slept_through = (0..20).any(|_| {
            let before = asleep();
            thread::sleep(SHORT * 2);
            before.0.starts_with('S') && before == asleep()
        });
        assert!(slept_through);
    }

    #[test]
    fn a_forked_child_leaves_the_parents_channels_alone() {
        let (mut near, far) = pair();
        let watcher = own();
        let (tx, rx) = channel();
        let handle = watcher.adopt(far, Arc::new(Tell(tx))).unwrap();
        // SAFETY: the child calls only what is under test and _exit.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // SAFETY: takes and returns integers; bounds the child's life should it hang.
            unsafe { libc::alarm(10) };
            let silent = !handle.send(1, b"from the child");
            handle.close();
            drop(handle);
            drop(watcher);
            // SAFETY: ends the child without the parent's exit handlers.
            unsafe { libc::_exit(if silent { 0 } else { 1 }) };
        }
        let mut status = -1;
        // SAFETY: the pointer is to an int of ours; the child was made above.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, status), (child, 0));

        near.send(2, b"still there").unwrap();
        assert_eq!(told(&rx), Told::Frame(2, b"still there".to_vec()));
        assert!(handle.send(3, b"answer"));
        assert_eq!(recv(&mut near).unwrap(), Frame { kind: 3, body: b"answer".to_vec() });
    }

    /// A child with a copy of the socket must not hide the end.
    #[test]
    fn an_orderly_close_is_seen_although_a_copy_of_the_socket_is_open() {
        let (near, far) = pair();
        let copy = near.as_fd().try_clone_to_owned().unwrap();
        let (near, _rx) = adopt(near);
        let (_far, rx) = adopt(far);
        drop(near);
        assert_eq!(told(&rx), Told::Closed(Closed::Eof));
        drop(copy);
    }

    #[test]
    fn one_thread_serves_the_process() {
        let (a, b) = (Watcher::global().unwrap(), Watcher::global().unwrap());
        assert!(Arc::ptr_eq(&a.shared, &b.shared));
    }
}
