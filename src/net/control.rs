//! What the background thread does with the words of the peer after the set-up.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
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

/// The connections to a process that died fail one after the other within this time.
const ONE_DEATH: Duration = Duration::from_secs(60);

/// Whether nobody has told yet that this process died: there may be hundreds of connections to it.
fn first_of(peer: &Who) -> bool {
    static DEAD: Mutex<Option<HashMap<Who, Instant>>> = Mutex::new(None);
    let mut dead = DEAD.lock().unwrap_or_else(PoisonError::into_inner);
    let dead = dead.get_or_insert_default();
    dead.retain(|_, told| told.elapsed() < ONE_DEATH);
    dead.insert(peer.clone(), Instant::now()).is_none()
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

    fn record(&self, text: String, print: impl FnOnce(&NetError)) {
        if let Some(alert) = self.alert.upgrade() {
            alert.fail(NetError::new(Code::Remote, text), print);
        }
    }

    fn fail(&self, text: String) {
        self.record(text, |e| tracing::warn!(target: "init", "{}", e.text));
    }

    /// The process is dead, and so are its other connections: one warning is enough for all of them.
    fn fail_dead(&self, text: String) {
        self.record(text, |e| match first_of(&self.peer) {
            true => tracing::warn!(target: "init", "{}", e.text),
            false => tracing::info!(target: "init", "{}", e.text),
        });
    }
}

impl ControlEvents for Events {
    fn on_frame(&self, kind: u8, body: &[u8]) {
        match kind {
            kind::FAILED => self.fail(format!("peer {} failed: {}", self.peer, String::from_utf8_lossy(body))),
            kind::BYE => match Bye::decode(body) {
                Some(Bye { complete: true, received }) => {
                    if let Some(alert) = self.alert.upgrade() {
                        alert.peer_closed(received);
                    }
                }
                Some(_) => {
                    self.fail(format!("peer {} closed the connection with transfers under way (aborted)", self.peer))
                }
                None => self.fail(format!("peer {} sent a damaged last word", self.peer)),
            },
            _ => self.fail(format!("peer {} sent an unknown control message {kind}", self.peer)),
        }
    }

    fn on_silent(&self, silence: Duration, limit: Duration) {
        let Some(alert) = self.alert.upgrade() else { return };
        // After a last word in good order it has nothing to say.
        if alert.has_closed() || alert.has_failed() {
            return;
        }
        self.fail_dead(format!(
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
        self.fail_dead(format!(
            "peer {} is gone ({why}): its process ended or its host is unreachable; look at that rank's own log and exit status",
            self.peer
        ));
    }
}
