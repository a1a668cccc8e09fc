//! A connection between two sides that have proved themselves: frames both ways, nothing blocks.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::alive::{BEAT, Due, KeepAlive, Pulse};
use super::frame::{Decoder, Frame, MAX_BODY, MAX_KIND, Outbox};
use super::{Closed, RendezvousError, socket};

/// Most bytes that wait for a peer that does not read.
const MAX_QUEUED: usize = 256 << 10;
/// Most reads spent on what a peer sends to a side that closes.
const MAX_DRAIN: usize = 64;

/// Frames to and from one peer.
#[derive(Debug)]
pub struct Channel {
    stream: TcpStream,
    input: Decoder,
    out: Outbox,
    peer: SocketAddr,
    local: SocketAddr,
    /// Why writing failed: reading goes on, since the peer's last words may still be there.
    broken: Option<i32>,
    /// Where a keep-alive is agreed on and the peer not yet given up.
    pulse: Option<Box<Pulse>>,
}

impl Channel {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, input: Decoder, out: Outbox) -> io::Result<Self> {
        socket::settle(&stream)?;
        let local = stream.local_addr()?;
        Ok(Self { stream, input, out, peer, local, broken: None, pulse: None })
    }

    /// Address of the other side.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Address of this side.
    pub fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Queues a frame and writes what the socket takes.
    pub fn send(&mut self, kind: u8, body: &[u8]) -> Result<(), RendezvousError> {
        if kind > MAX_KIND {
            return Err(RendezvousError::Kind(kind));
        }
        if body.len() > MAX_BODY {
            return Err(RendezvousError::TooLong(body.len()));
        }
        if self.out.len() + body.len() > MAX_QUEUED {
            return Err(RendezvousError::Backlog { peer: self.peer, queued: self.out.len() });
        }
        self.push(kind, body)
    }

    fn push(&mut self, kind: u8, body: &[u8]) -> Result<(), RendezvousError> {
        self.out.push(kind, body);
        if let Some(pulse) = &mut self.pulse {
            pulse.sent(Instant::now());
        }
        match self.poll_flush() {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
    }

    /// Begins a keep-alive on the terms agreed on, which the peer is told of. The accepting side's part; the connecting
    /// side begins by itself when it is told.
    pub fn keep_alive(&mut self, terms: KeepAlive) {
        self.pulse = Some(Box::new(Pulse::new(terms, Instant::now())));
        self.beat(&terms.encode());
    }

    fn beat(&mut self, body: &[u8]) {
        if let Some(pulse) = &mut self.pulse {
            pulse.count();
        }
        // A failure to write shows itself when the last frame is read.
        let _ = self.push(BEAT, body);
    }

    /// Beats sent so far.
    pub(super) fn beats(&self) -> u64 {
        self.pulse.as_ref().map_or(0, |pulse| pulse.beats())
    }

    /// Sends a beat if it is time to; the silence of a peer that is dead, and the limit that it exceeds.
    pub(super) fn look(&mut self, now: Instant) -> Option<(Duration, Duration)> {
        let pulse = self.pulse.as_mut()?;
        match pulse.look(now) {
            Due::Nothing => None,
            // The peer does not even take what waits already.
            Due::Beat if self.out.len() > 0 => {
                let _ = self.poll_flush();
                None
            }
            Due::Beat => {
                self.beat(&[]);
                None
            }
            Due::Dead(silence) => Some((silence, pulse.terms().limit())),
        }
    }

    /// How often to [`Self::look`]; None: there is no keep-alive.
    pub(super) fn period(&self) -> Option<Duration> {
        self.pulse.as_ref().map(|pulse| pulse.period())
    }

    /// The peer was given up: it is neither listened for nor told that this side lives.
    pub(super) fn end_keep_alive(&mut self) {
        self.pulse = None;
    }

    /// Writes what is queued; pending while the socket does not take all of it.
    pub fn poll_flush(&mut self) -> Poll<Result<(), RendezvousError>> {
        if let Some(errno) = self.broken {
            return Poll::Ready(Err(self.closed(Closed::Reset(errno))));
        }
        match self.out.flush(&mut self.stream) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Poll::Pending,
            Err(e) => {
                let errno = errno(&e);
                self.broken = Some(errno);
                Poll::Ready(Err(self.closed(Closed::Reset(errno))))
            }
        }
    }

    /// The next frame. Writes first what is still queued, so that a side that only waits has said what it had to say.
    /// Pending means that everything that has come was read.
    pub fn recv(&mut self) -> Poll<Result<Frame, RendezvousError>> {
        loop {
            match self.next() {
                Poll::Ready(Ok(frame)) if frame.kind == BEAT => {}
                other => return other.map_err(|why| self.closed(why)),
            }
        }
    }

    /// [`Self::recv`] with the bare reason, and with beats, which are dealt with: the caller only counts them.
    pub(super) fn next(&mut self) -> Poll<Result<Frame, Closed>> {
        if self.out.len() > 0 {
            // A failure to write shows itself when the last frame is read.
            let _ = self.poll_flush();
        }
        loop {
            match self.input.next() {
                Ok(Some(frame)) if frame.kind <= MAX_KIND => return Poll::Ready(Ok(frame)),
                Ok(Some(frame)) if frame.kind == BEAT => {
                    if self.pulse.is_none()
                        && let Some(terms) = KeepAlive::decode(&frame.body)
                    {
                        self.pulse = Some(Box::new(Pulse::new(terms, Instant::now())));
                        self.beat(&[]);
                    }
                    return Poll::Ready(Ok(frame));
                }
                Ok(None) => {}
                _ => return Poll::Ready(Err(Closed::Garbage)),
            }
            let why = match socket::read(&mut self.stream, &mut self.input) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(0)) => match self.broken {
                    // The write took the socket's error; only the end is left to be read.
                    Some(errno) if errno != libc::EPIPE => Closed::Reset(errno),
                    _ => Closed::Eof,
                },
                Poll::Ready(Ok(_)) => {
                    if let Some(pulse) = &mut self.pulse {
                        pulse.heard(Instant::now());
                    }
                    continue;
                }
                Poll::Ready(Err(e)) => Closed::Reset(errno(&e)),
            };
            return Poll::Ready(Err(why));
        }
    }

    /// Ends the connection so that the peer can read all that was sent: what the socket still takes is written; what has
    /// come is read, since closing on unread bytes would reset the connection; and the end is sent even where a forked
    /// child holds a copy of the socket.
    pub(super) fn finish(mut self) {
        let _ = self.poll_flush();
        for _ in 0..MAX_DRAIN {
            let mut ignored = Decoder::new(0);
            if !matches!(socket::read(&mut self.stream, &mut ignored), Poll::Ready(Ok(n)) if n > 0) {
                break;
            }
        }
        // Fails only on a connection that is already over.
        let _ = self.stream.shutdown(Shutdown::Write);
    }

    fn closed(&self, why: Closed) -> RendezvousError {
        RendezvousError::Closed { peer: self.peer, why }
    }
}

fn errno(e: &io::Error) -> i32 {
    e.raw_os_error().unwrap_or(libc::EIO)
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }
}

impl AsRawFd for Channel {
    fn as_raw_fd(&self) -> RawFd {
        self.stream.as_raw_fd()
    }
}
