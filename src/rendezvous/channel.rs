//! A connection between two sides that have proved themselves: frames both ways, nothing blocks.

use std::io;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::task::Poll;

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
}

impl Channel {
    pub(super) fn new(stream: TcpStream, peer: SocketAddr, input: Decoder, out: Outbox) -> io::Result<Self> {
        socket::settle(&stream)?;
        let local = stream.local_addr()?;
        Ok(Self { stream, input, out, peer, local, broken: None })
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
        self.out.push(kind, body);
        match self.poll_flush() {
            Poll::Ready(result) => result,
            Poll::Pending => Ok(()),
        }
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
        self.next().map_err(|why| self.closed(why))
    }

    /// [`Self::recv`] with the bare reason.
    pub(super) fn next(&mut self) -> Poll<Result<Frame, Closed>> {
        if self.out.len() > 0 {
            // A failure to write shows itself when the last frame is read.
            let _ = self.poll_flush();
        }
        loop {
            match self.input.next() {
                Ok(Some(frame)) if frame.kind <= MAX_KIND => return Poll::Ready(Ok(frame)),
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
                Poll::Ready(Ok(_)) => continue,
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
