//! What the background thread does with the words of the peer after the set-up.

use std::sync::{Arc, Weak};

use crate::rendezvous::{Closed, ControlEvents};

use super::alert::Alert;
use super::hello::{Bye, Who, kind};
use super::{Code, NetError};

/// The control channel of one connection.
#[derive(Debug)]
pub(super) struct Events {
    alert: Weak<Alert>,
    peer: Who,
}

impl Events {
    pub(super) fn new(alert: &Arc<Alert>, peer: &Who) -> Self {
        Self { alert: Arc::downgrade(alert), peer: peer.clone() }
    }

    fn fail(&self, text: String) {
        if let Some(alert) = self.alert.upgrade()
            && alert.fail(NetError::new(Code::Remote, text.as_str()))
        {
            tracing::warn!(target: "init", "{text}");
        }
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

    fn on_closed(&self, why: Closed) {
        // After a last word in good order the end of the channel is expected.
        if self.alert.upgrade().is_none_or(|a| a.has_closed() || a.has_failed()) {
            return;
        }
        self.fail(format!(
            "peer {} is gone ({why}): its process ended or its host is unreachable; look at that rank's own log and exit status",
            self.peer
        ));
    }
}
