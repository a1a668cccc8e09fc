//! What the background thread does with the words of the peer after the set-up.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::rendezvous::{Closed, ControlEvents, KeepAlive};

use super::alert::Alert;
use super::hello::{Bye, Who, kind};
use super::{Code, NetError};

/// What this side wants of a connection's keep-alive; None: none.
pub(super) fn keep_alive(config: &Config) -> Option<KeepAlive> {
    KeepAlive::new(config.keepalive_interval, config.keepalive_timeout)
}

/// What a peer process does to its connections, all of them one after the other: there may be hundreds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum News {
    /// It died or is silent.
    Dead,
    /// It told of a failure.
    Failed,
    /// It closed before all was done.
    Left,
}

/// News of one process within this time have one cause.
const ONE_CAUSE: Duration = Duration::from_secs(60);

/// What was told of peers, and how often it came again since.
#[derive(Debug, Default)]
struct Told(HashMap<(Who, News), (Instant, u32)>);

impl Told {
    /// Some: it is to be told, with how many were not since the last time.
    fn again(&mut self, peer: &Who, news: News, now: Instant) -> Option<u32> {
        let recent = |told: Instant| now.saturating_duration_since(told) < ONE_CAUSE;
        self.0.retain(|_, (told, untold)| *untold > 0 || recent(*told));
        match self.0.entry((peer.clone(), news)) {
            Entry::Occupied(mut known) if recent(known.get().0) => {
                known.get_mut().1 += 1;
                None
            }
            Entry::Occupied(mut known) => Some(known.insert((now, 0)).1),
            Entry::Vacant(new) => {
                new.insert((now, 0));
                Some(0)
            }
        }
    }
}

/// Prints what ended a connection to a peer: a warning for the first, and a line at INFO for each that follows.
pub(super) fn warn(peer: &Who, news: News, text: &str) {
    static TOLD: LazyLock<Mutex<Told>> = LazyLock::new(Mutex::default);
    let again = TOLD.lock().unwrap_or_else(PoisonError::into_inner).again(peer, news, Instant::now());
    match again {
        Some(0) => tracing::warn!(target: "init", "{text}"),
        Some(untold) => tracing::warn!(
            target: "init",
            "{text} ({untold} more connections to this process ended so since its last warning, told at INFO)"
        ),
        None => tracing::info!(target: "init", "{text}"),
    }
}

/// The control channel of one connection.
#[derive(Debug)]
pub(super) struct Events {
    alert: Weak<Alert>,
    peer: Who,
    /// For messages: device:port, GID and QP number of both ends, of the first QP.
    route: String,
}

impl Events {
    pub(super) fn new(alert: &Arc<Alert>, peer: &Who, route: &str) -> Self {
        Self { alert: Arc::downgrade(alert), peer: peer.clone(), route: route.to_owned() }
    }

    /// The connection ends.
    fn end(&self, news: News, text: String) {
        if let Some(alert) = self.alert.upgrade() {
            alert.fail(NetError::new(Code::Remote, text), |e| warn(&self.peer, news, &e.text));
        }
    }
}

impl ControlEvents for Events {
    fn on_frame(&self, kind: u8, body: &[u8]) {
        match kind {
            kind::FAILED => {
                self.end(News::Failed, format!("peer {} failed: {}", self.peer, String::from_utf8_lossy(body)));
            }
            kind::BYE => match Bye::decode(body) {
                Some(Bye { complete: true, received }) => {
                    if let Some(alert) = self.alert.upgrade() {
                        alert.peer_closed(received);
                    }
                }
                Some(_) => self.end(
                    News::Left,
                    format!("peer {} closed the connection with transfers under way (aborted)", self.peer),
                ),
                None => self.end(News::Failed, format!("peer {} sent a damaged last word", self.peer)),
            },
            _ => self.end(News::Failed, format!("peer {} sent an unknown control message {kind}", self.peer)),
        }
    }

    fn on_silent(&self, silence: Duration, limit: Duration) {
        let Some(alert) = self.alert.upgrade() else { return };
        // After a last word in good order it has nothing to say.
        if alert.has_closed() || alert.has_failed() {
            return;
        }
        self.end(News::Dead, format!(
            "peer {} has been silent for {:.1} s, the keep-alive limit is {:.1} s (NCCL_NET_RDMA_KEEPALIVE_TIMEOUT), with {} \
             transfer(s) under way on {}: its process is stopped (a debugger, SIGSTOP), its host hangs or is down, or the \
             network between is cut; look at that process and host",
            self.peer,
            silence.as_secs_f64(),
            limit.as_secs_f64(),
            alert.under_way(),
            self.route,
        ));
        // It may hear although it does not speak.
        alert.tell(&format!(
            "it heard nothing from this process for {:.1} s and counts it as dead; was this process stopped?",
            silence.as_secs_f64()
        ));
    }

    fn on_closed(&self, why: Closed) {
        // After a last word in good order the end of the channel is expected.
        if self.alert.upgrade().is_none_or(|a| a.has_closed() || a.has_failed()) {
            return;
        }
        self.end(News::Dead, format!(
            "peer {} is gone ({why}): its process ended or its host is unreachable; look at that rank's own log and exit status",
            self.peer
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_cause_is_told_once_and_counted() {
        let who = |pid| Who { version: "1".to_owned(), host: "a".to_owned(), pid };
        let start = Instant::now();
        let mut told = Told::default();
        let mut at = |pid, news, seconds| told.again(&who(pid), news, start + Duration::from_secs(seconds));
        assert_eq!(at(1, News::Failed, 0), Some(0));
        assert_eq!((at(1, News::Failed, 0), at(1, News::Failed, 59)), (None, None));
        // Other news, and news of others, are not the same.
        assert_eq!((at(1, News::Left, 1), at(1, News::Dead, 1), at(2, News::Failed, 1)), (Some(0), Some(0), Some(0)));
        // What comes again does not put off the next warning.
        assert_eq!((at(1, News::Failed, 60), at(1, News::Failed, 61)), (Some(2), None));
        assert_eq!((at(2, News::Failed, 61), at(1, News::Failed, 120)), (Some(0), Some(1)));
        // What has nothing left to tell is forgotten.
        at(3, News::Dead, 500);
        assert_eq!(told.0.len(), 1);
    }
}
