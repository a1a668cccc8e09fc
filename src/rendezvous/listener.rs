//! The listening side: takes any number of peers, keeps those that prove themselves, counts the others.

use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, RawFd};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::frame::{Decoder, Outbox};
use super::handle::Key;
use super::handshake::{self, Nonce, Refusal, Responder};
use super::{Channel, Handle, RendezvousError, socket};

/// Most new connections of one poll.
const ACCEPTS: usize = 16;
/// A peer that has been silent is looked at less often, but at least so often.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What peers may cost before they have proved themselves.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Time to prove itself, from being accepted.
    pub patience: Duration,
    /// Peers at a time; one more, and the oldest is dropped.
    pub peers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { patience: Duration::from_secs(10), peers: 64 }
    }
}

/// Peers turned away, by reason.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Rejected {
    /// Left without a byte, as port scanners do.
    pub empty: u64,
    /// Left in the middle.
    pub short: u64,
    /// Sent something else.
    pub garbage: u64,
    /// Spoke another version of the protocol.
    pub version: u64,
    /// Did not know the secret.
    pub proof: u64,
    /// Did not prove itself in time.
    pub silent: u64,
    /// Was the oldest when there were too many.
    pub crowded: u64,
}

impl Rejected {
    /// All of them.
    pub fn total(&self) -> u64 {
        let Self { empty, short, garbage, version, proof, silent, crowded } = *self;
        empty + short + garbage + version + proof + silent + crowded
    }
}

impl fmt::Display for Rejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { empty, short, garbage, version, proof, silent, crowded } = *self;
        write!(f, "{} turned away", self.total())?;
        let reasons = [
            (empty, "sent nothing"),
            (short, "left midway"),
            (garbage, "spoke something else"),
            (version, "of another version"),
            (proof, "without the secret"),
            (silent, "too slow"),
            (crowded, "crowded out"),
        ];
        for (count, reason) in reasons.into_iter().filter(|(count, _)| *count > 0) {
            write!(f, ", {count} {reason}")?;
        }
        Ok(())
    }
}

/// A port that peers with the handle may connect to.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    local: SocketAddr,
    key: Key,
    limits: Limits,
    peers: VecDeque<Peer>,
    /// Proved, and not handed out yet.
    ready: VecDeque<Channel>,
    rejected: Rejected,
    warning: Option<String>,
}

/// Why a peer is dropped.
enum Dropped {
    Refused(Refusal),
    /// It left, or its connection broke.
    Left,
}

impl From<io::Error> for Dropped {
    fn from(_: io::Error) -> Self {
        Self::Left
    }
}

impl Listener {
    /// Listens on an address of one interface. Without a port in it: on any, or on a free one of the range.
    pub fn bind(
        addr: SocketAddr,
        range: Option<RangeInclusive<u16>>,
        limits: Limits,
    ) -> Result<(Self, Handle), RendezvousError> {
        let key = Key::random().map_err(|e| RendezvousError::system("no random numbers")(e.into()))?;
        Self::with_key(addr, range, limits, key)
    }

    pub(super) fn with_key(
        addr: SocketAddr,
        range: Option<RangeInclusive<u16>>,
        limits: Limits,
        key: Key,
    ) -> Result<(Self, Handle), RendezvousError> {
        if addr.ip().is_unspecified() {
            // The handle carries the address, and nobody can connect to this one.
            let source = io::Error::from(io::ErrorKind::AddrNotAvailable);
            return Err(RendezvousError::Bind { ip: addr.ip(), range, source });
        }
        let socket = socket::listen(addr, range)?;
        let local = socket.local_addr().map_err(RendezvousError::system("address of the listening socket"))?;
        let listener = Self {
            socket,
            local,
            key,
            limits,
            peers: VecDeque::new(),
            ready: VecDeque::new(),
            rejected: Rejected::default(),
            warning: None,
        };
        Ok((listener, Handle::new(local, key)))
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Peers turned away so far.
    pub fn rejected(&self) -> &Rejected {
        &self.rejected
    }

    /// Peers that have not proved themselves yet.
    pub fn pending(&self) -> usize {
        self.peers.len()
    }

    /// A line about the latest peer that this plugin's other versions sent, if there was one since the last call.
    pub fn take_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// Goes as far as it can without waiting, and hands out one peer that has proved itself; others follow at the next
    /// calls. An error is one of this process, not of a peer; the listener goes on working.
    pub fn poll(&mut self, now: Instant) -> Poll<Result<Channel, RendezvousError>> {
        for _ in 0..self.peers.len() {
            // Each goes round once and keeps its place in the order of age.
            if let Some(peer) = self.peers.pop_front() {
                self.look_at(peer, now);
            }
        }
        let accepted = self.accept(now);
        if let Some(channel) = self.ready.pop_front() {
            return Poll::Ready(Ok(channel));
        }
        match accepted {
            Ok(()) => Poll::Pending,
            Err(e) => Poll::Ready(Err(e)),
        }
    }

    fn accept(&mut self, now: Instant) -> Result<(), RendezvousError> {
        for _ in 0..ACCEPTS {
            // Those that nobody fetches wait in the kernel's queue.
            if self.ready.len() >= self.limits.peers {
                break;
            }
            match self.socket.accept() {
                Ok((stream, addr)) => {
                    let nonce = Nonce::random()?;
                    if self.peers.len() >= self.limits.peers && self.peers.pop_front().is_some() {
                        self.rejected.crowded += 1;
                    }
                    let responder = Responder::new(self.key, nonce, now + self.limits.patience);
                    match Peer::new(stream, addr, responder, now) {
                        Ok(peer) => self.look_at(peer, now),
                        Err(_) => self.rejected.empty += 1,
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) if is_local(&e) => return Err(RendezvousError::Accept { local: self.local, source: e }),
                // The connection broke before it was accepted: the peer's affair.
                Err(_) => self.rejected.empty += 1,
            }
        }
        Ok(())
    }

    fn look_at(&mut self, mut peer: Peer, now: Instant) {
        match peer.advance(now) {
            Poll::Pending => self.peers.push_back(peer),
            Poll::Ready(Ok(())) => match peer.into_channel() {
                Ok(channel) => self.ready.push_back(channel),
                Err(_) => self.rejected.short += 1,
            },
            Poll::Ready(Err(why)) => {
                let count = match why {
                    Dropped::Left if peer.heard => &mut self.rejected.short,
                    Dropped::Left => &mut self.rejected.empty,
                    Dropped::Refused(Refusal::Garbage) => &mut self.rejected.garbage,
                    Dropped::Refused(Refusal::Proof) => &mut self.rejected.proof,
                    Dropped::Refused(Refusal::Deadline) => &mut self.rejected.silent,
                    Dropped::Refused(Refusal::Version(theirs)) => {
                        self.warning = Some(RendezvousError::Version { peer: peer.addr, theirs }.to_string());
                        &mut self.rejected.version
                    }
                };
                *count += 1;
                tracing::debug!(target: "net", "{} dropped {}: {}", self.local, peer.addr, self.rejected);
            }
        }
    }
}

/// Errors of accept that say something about this process or host; Linux passes those of the new connection on, too.
fn is_local(e: &io::Error) -> bool {
    const ERRNOS: [i32; 7] =
        [libc::EMFILE, libc::ENFILE, libc::ENOBUFS, libc::ENOMEM, libc::EBADF, libc::EINVAL, libc::ENOTSOCK];
    e.raw_os_error().is_some_and(|errno| ERRNOS.contains(&errno))
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

/// Someone who has dialed and not proved itself.
#[derive(Debug)]
struct Peer {
    stream: TcpStream,
    addr: SocketAddr,
    responder: Responder,
    input: Decoder,
    out: Outbox,
    /// Whether it has sent anything.
    heard: bool,
    last_heard: Instant,
    next_look: Instant,
}

impl Peer {
    fn new(stream: TcpStream, addr: SocketAddr, responder: Responder, now: Instant) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let (input, out) = (handshake::decoder(), Outbox::default());
        Ok(Self { stream, addr, responder, input, out, heard: false, last_heard: now, next_look: now })
    }

    /// Ready when it has proved itself or is to be dropped. At most one piece is read, so that no peer keeps others
    /// waiting.
    fn advance(&mut self, now: Instant) -> Poll<Result<(), Dropped>> {
        if now < self.next_look {
            return Poll::Pending;
        }
        match socket::read(&mut self.stream, &mut self.input).map_err(Dropped::from)? {
            Poll::Ready(0) => return Poll::Ready(Err(Dropped::Left)),
            Poll::Ready(_) => {
                self.heard = true;
                self.last_heard = now;
            }
            Poll::Pending => {}
        }
        let result = self.responder.advance(now, &mut self.input, &mut self.out);
        // A peer that is dropped may miss its refusal; one that breaks here is noticed by the next read.
        let _ = self.out.flush(&mut self.stream);
        let silence = now.saturating_duration_since(self.last_heard);
        self.next_look = now + (silence / 32).min(LOOK_AGAIN);
        result.map_err(Dropped::Refused)
    }

    fn into_channel(self) -> io::Result<Channel> {
        Channel::new(self.stream, self.addr, self.input, self.out)
    }
}
