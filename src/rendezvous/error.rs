//! What can go wrong here, said so that a person can act on it.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::time::Duration;

use super::connector::Stage;
use super::{MAX_BODY, MAX_KIND, VERSION};

/// An error of this room.
#[derive(Debug, thiserror::Error)]
pub enum RendezvousError {
    /// The bytes are not a handle.
    #[error("not a listen handle of this plugin: {0}")]
    Handle(&'static str),
    /// The peer has another version of this plugin.
    #[error(
        "{peer} speaks version {theirs} of the connection protocol, this side {VERSION}: use one plugin version everywhere"
    )]
    Version {
        /// Who, as far as known.
        peer: SocketAddr,
        /// The peer's version.
        theirs: u16,
    },
    /// No port to listen on.
    #[error("cannot listen on {ip}, {}: {source}", ports(range.as_ref()))]
    Bind {
        /// Address of the interface that was chosen.
        ip: IpAddr,
        /// Ports that were allowed; `None`: any.
        range: Option<RangeInclusive<u16>>,
        /// Error of the last port tried.
        source: io::Error,
    },
    /// Accepting fails for a reason of this process or host, such as too many open files.
    #[error("cannot accept connections on {local}: {source}")]
    Accept {
        /// Address listened on.
        local: SocketAddr,
        /// The reason.
        source: io::Error,
    },
    /// No connection by the deadline, or none possible.
    #[error(transparent)]
    Connect(#[from] Box<ConnectFailure>),
    /// Something else than the listener of the handle answers at its address.
    #[error(
        "what answers at {peer} is not the listener of this job ({reason}): its process may have ended and its port be in other use"
    )]
    Stranger {
        /// Address of the handle.
        peer: SocketAddr,
        /// What gave it away.
        reason: &'static str,
    },
    /// The connection is over.
    #[error("control connection to {peer}: {why}")]
    Closed {
        /// The peer.
        peer: SocketAddr,
        /// How it ended.
        why: Closed,
    },
    /// A body too long for a frame.
    #[error("a body of {0} bytes exceeds the {MAX_BODY} of a frame")]
    TooLong(usize),
    /// A kind that belongs to this room.
    #[error("frame kind {0} exceeds {MAX_KIND}")]
    Kind(u8),
    /// The peer does not read what it is sent.
    #[error("{peer} has left {queued} bytes of control messages unread")]
    Backlog {
        /// The peer.
        peer: SocketAddr,
        /// Bytes waiting on this side.
        queued: usize,
    },
    /// Polled again after it gave its result.
    #[error("the connection was already handed out")]
    Finished,
    /// The operating system refuses something that should always work.
    #[error("{what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The reason.
        source: io::Error,
    },
}

impl RendezvousError {
    pub(super) fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::System { what, source }
    }
}

fn ports(range: Option<&RangeInclusive<u16>>) -> String {
    range.map_or_else(|| "any port".to_owned(), |r| format!("ports {}-{}", r.start(), r.end()))
}

/// How a channel ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Closed {
    /// The peer closed it, or its process ended.
    Eof,
    /// The network or the peer's host broke it: the errno.
    Reset(i32),
    /// The peer sent what is not a frame.
    Garbage,
}

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eof => f.write_str("closed by the peer, or its process ended"),
            Self::Reset(errno) => write!(f, "broken: {}", io::Error::from_raw_os_error(*errno)),
            Self::Garbage => f.write_str("the peer sent bytes that are not a frame"),
        }
    }
}

/// The history of a connection that did not come about.
#[derive(Debug)]
pub struct ConnectFailure {
    /// Address of the handle.
    pub peer: SocketAddr,
    /// Address of this side in the last attempt.
    pub local: Option<SocketAddr>,
    /// Times it was tried.
    pub attempts: u32,
    /// Time spent.
    pub elapsed: Duration,
    /// What was being waited for.
    pub stage: Stage,
    /// The last failure of an attempt.
    pub last: Option<io::Error>,
}

impl fmt::Display for ConnectFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no connection to {}", self.peer)?;
        if let Some(local) = self.local {
            write!(f, " from {}", local.ip())?;
        }
        let seconds = self.elapsed.as_secs_f64();
        write!(f, " after {} attempts in {seconds:.1} s, waiting for {}", self.attempts, self.stage)?;
        match &self.last {
            Some(last) => write!(f, "; last failure: {last}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for ConnectFailure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.last.as_ref().map(|e| e as _)
    }
}
