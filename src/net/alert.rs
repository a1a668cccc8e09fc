//! The word that stops a connection: set by whoever learns first that it failed (a completion, the peer's last words, a
//! device event), loaded by every call of the data path.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::rendezvous::ControlHandle;
use crate::transfer::{Copying, Owed};

use super::NetError;
use super::hello::kind;
use super::registration::MrHandle;
use super::stall::{Calls, Found, Vigil};

const FAILED: u32 = 1;
const PEER_CLOSED: u32 = 2;
/// The connection is to look at its progress.
const LOOK: u32 = 4;

/// How long data may still surface after the peer closed in good order.
const GRACE: Duration = Duration::from_secs(2);

/// State of a connection beside its data path.
#[derive(Debug, Default)]
pub(crate) struct Alert {
    word: AtomicU32,
    cold: Mutex<Cold>,
    /// The way to the peer, once the connection stands. It is here so that the background thread can use it, too.
    control: OnceLock<ControlHandle>,
    /// What NCCL has registered: these know how much is under way.
    handles: Mutex<Living<MrHandle>>,
}

/// Things while others have them.
#[derive(Debug)]
struct Living<T> {
    all: Vec<Weak<T>>,
    /// How long the list may become until those that are gone are taken out of it.
    most: usize,
}

impl<T> Default for Living<T> {
    fn default() -> Self {
        Self { all: Vec::new(), most: 16 }
    }
}

impl<T> Living<T> {
    /// Looks at the others only as often as the list has doubled.
    fn push(&mut self, new: &Arc<T>) {
        if self.all.len() >= self.most {
            self.all.retain(|one| one.strong_count() > 0);
            self.most = (2 * self.all.len()).max(16);
        }
        self.all.push(Arc::downgrade(new));
    }

    fn iter(&self) -> impl Iterator<Item = Arc<T>> {
        self.all.iter().filter_map(Weak::upgrade)
    }
}

#[derive(Debug, Default)]
struct Cold {
    cause: Option<NetError>,
    /// Watches over progress; None: nothing is too long.
    vigil: Option<Vigil>,
    /// The same over copies between GPU and host memory.
    copies: Option<Vigil>,
    /// The same over the calls that start them.
    calls: Option<Calls>,
    /// What the peer had received when it closed in good order, and when we learnt of it.
    closed: Option<(u32, Instant)>,
}

/// What the data path must mind.
#[derive(Debug, Clone)]
pub(crate) enum Attention {
    Failed(NetError),
    /// The peer closed in good order; every position before `received` had arrived there.
    PeerClosed {
        received: u32,
        over: bool,
    },
}

impl Alert {
    fn cold(&self) -> MutexGuard<'_, Cold> {
        self.cold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One relaxed load: whether anything needs attention.
    #[inline]
    pub(crate) fn raised(&self) -> bool {
        self.word.load(Ordering::Relaxed) != 0
    }

    /// Records the first cause; true for the caller that brought it. It is printed before NCCL's threads can see it: they may
    /// end the process at once.
    pub(crate) fn fail(&self, cause: NetError, print: impl FnOnce(&NetError)) -> bool {
        let mut cold = self.cold();
        let first = cold.cause.is_none();
        if first {
            print(&cause);
            cold.cause = Some(cause);
            self.word.fetch_or(FAILED, Ordering::Release);
        }
        first
    }

    /// The connection stands. What ended it before, during its set-up, is told now.
    pub(super) fn stands(&self, control: ControlHandle) {
        // Set once, by the set-up.
        let _ = self.control.set(control);
        if let Some(Attention::Failed(cause)) = self.attention() {
            self.tell(&cause.text);
        }
    }

    pub(super) fn control(&self) -> Option<&ControlHandle> {
        self.control.get()
    }

    /// Tells the peer why this side ends the connection.
    pub(super) fn tell(&self, why: &str) {
        if let Some(control) = self.control.get() {
            control.send(kind::FAILED, why.as_bytes());
        }
    }

    fn handles(&self) -> MutexGuard<'_, Living<MrHandle>> {
        self.handles.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A registration was made.
    pub(super) fn remember(&self, handle: &Arc<MrHandle>) {
        self.handles().push(handle);
    }

    /// Transfers under way, as far as another thread than that of the data path can tell.
    pub(super) fn under_way(&self) -> u32 {
        self.handles().iter().map(|h| h.in_flight()).sum()
    }

    /// Watches over progress from now on.
    pub(super) fn watch(&self, vigil: Vigil) {
        self.cold().vigil = Some(vigil);
    }

    /// Watches over copies, too, and over the calls that start them.
    pub(super) fn watch_copies(&self, vigil: Vigil, calls: Calls) {
        let mut cold = self.cold();
        cold.copies = Some(vigil);
        cold.calls = Some(calls);
    }

    /// A look at the calls that start copies, of which the data path, that waits for one, can't tell: ends the connection where
    /// one has not returned for too long.
    #[cold]
    pub(super) fn look_at_calls(&self) {
        let Some(cause) = self.cold().calls.as_mut().and_then(Calls::look) else { return };
        if self.fail(cause.clone(), |e| tracing::warn!(target: "init", "{}", e.text)) {
            self.tell(&cause.text);
        }
    }

    /// A look at the copies: for how long they have not gone on, if that is too long.
    #[cold]
    pub(super) fn look_at_copies(&self, copying: Copying) -> Option<Duration> {
        let mut cold = self.cold();
        // What is started anew is no progress.
        let owed = Owed { mark: copying.reached.into(), requests: u32::from(copying.copies > 0), bytes: 0 };
        match cold.copies.as_mut()?.look(owed) {
            Found::Stalled(waited) => Some(waited),
            _ => None,
        }
    }

    /// Has the next call of the data path look: at its progress, or, in a child of fork, at nothing more.
    pub(super) fn ask(&self) {
        self.word.fetch_or(LOOK, Ordering::Relaxed);
    }

    /// Whether a look was asked for; once for each time that it was.
    #[cold]
    pub(super) fn asked(&self) -> bool {
        self.word.fetch_and(!LOOK, Ordering::Relaxed) & LOOK != 0
    }

    /// A look at the progress, with the limit that is kept.
    #[cold]
    pub(super) fn look(&self, owed: Owed) -> (Found, Duration) {
        let mut cold = self.cold();
        match &mut cold.vigil {
            Some(vigil) => (vigil.look(owed), vigil.limit()),
            None => (Found::Progress, Duration::MAX),
        }
    }

    /// The peer closed in good order.
    pub(crate) fn peer_closed(&self, received: u32) {
        self.cold().closed = Some((received, Instant::now()));
        self.word.fetch_or(PEER_CLOSED, Ordering::Release);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.word.load(Ordering::Acquire) & FAILED != 0
    }

    pub(crate) fn has_closed(&self) -> bool {
        self.word.load(Ordering::Acquire) & PEER_CLOSED != 0
    }

    /// What is to be minded; None if nothing is.
    #[cold]
    pub(crate) fn attention(&self) -> Option<Attention> {
        let cold = self.cold();
        if let Some(cause) = &cold.cause {
            return Some(Attention::Failed(cause.clone()));
        }
        let (received, since) = cold.closed?;
        Some(Attention::PeerClosed { received, over: since.elapsed() > GRACE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::Code;

    #[test]
    fn the_first_cause_stays() {
        let alert = Alert::default();
        assert!(!alert.raised());
        // Whoever sees the alert finds that its cause has been told.
        assert!(alert.fail(NetError::new(Code::Remote, "first"), |_| assert!(!alert.raised())));
        assert!(alert.raised());
        assert!(!alert.fail(NetError::new(Code::System, "second"), |_| panic!("told twice")));
        alert.peer_closed(3);
        assert!(alert.raised() && alert.has_failed() && alert.has_closed());
        let Some(Attention::Failed(e)) = alert.attention() else { panic!("failed") };
        assert_eq!((e.code, e.text.as_str()), (Code::Remote, "first"));
    }

    #[test]
    fn copies_that_do_not_go_on_are_found_though_others_are_started() {
        let alert = Alert::default();
        let at = |reached, copies| alert.look_at_copies(Copying { reached, copies, bytes: 1 });
        assert_eq!(at(1, 1), None, "nobody watches");
        alert.cold().copies = Some(Vigil::new(Duration::from_secs(2)));
        assert!((0..20).all(|_| at(1, 0).is_none()), "none waits");
        assert!((0..20).all(|reached| at(reached, 3).is_none()), "they go on");
        let found: Vec<_> = (0..6).map(|more| at(19, 3 + more)).collect();
        assert_eq!(found, [None, None, None, None, Some(Duration::from_secs(2)), Some(Duration::from_millis(2500))]);
    }

    /// Each registration of a connection with thousands of them looked at all others.
    #[test]
    fn those_that_live_are_looked_at_as_often_as_they_have_doubled() {
        let mut some = Living::default();
        let living: Vec<_> = (0..1000).map(Arc::new).collect();
        let mut looks = 0;
        for one in &living {
            let before = some.most;
            some.push(one);
            looks += usize::from(some.most != before);
        }
        assert!(some.iter().count() == 1000 && looks == 6, "{looks}");
        drop(living);
        for i in 0..10_000 {
            some.push(&Arc::new(i));
            assert!(some.all.len() <= 1024, "those that are gone go");
        }
        assert_eq!((some.iter().count(), some.most), (0, 16));
    }

    #[test]
    fn a_good_close_is_no_failure() {
        let alert = Alert::default();
        alert.peer_closed(7);
        assert!(!alert.has_failed());
        assert!(matches!(alert.attention(), Some(Attention::PeerClosed { received: 7, over: false })));
    }
}
