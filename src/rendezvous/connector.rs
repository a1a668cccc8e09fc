//! The connecting side: dials until it is connected to the listener of a handle or its deadline passes.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::task::Poll;
use std::time::{Duration, Instant};

use super::frame::{Decoder, Outbox};
use super::handshake::{self, Initiator, Nonce, Refusal};
use super::{Channel, ConnectFailure, Handle, RendezvousError, socket};

const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// A connection on its way.
#[derive(Debug)]
pub struct Connector {
    handle: Handle,
    local: Option<SocketAddr>,
    started: Instant,
    deadline: Instant,
    /// When to give up on a listener that is out of reach.
    reach: Instant,
    attempts: u32,
    /// Address of this side in the last attempt.
    used: Option<SocketAddr>,
    last: Option<io::Error>,
    state: State,
}

#[derive(Debug)]
enum State {
    Waiting { until: Instant },
    Dialing(TcpStream),
    Greeting(Box<Greeting>),
    Finished,
}

#[derive(Debug)]
struct Greeting {
    stream: TcpStream,
    initiator: Initiator,
    input: Decoder,
    out: Outbox,
}

/// What a connection is waiting for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// The time of the next attempt.
    Waiting,
    /// The peer's host to take the connection.
    Dialing,
    /// The listener's proof: its process must accept.
    Greeting,
    /// Nothing; it was handed out or failed.
    Finished,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Waiting => "its next attempt",
            Self::Dialing => "the peer's host to take the connection",
            Self::Greeting => "the peer's process to accept it",
            Self::Finished => "nothing",
        })
    }
}

/// What one step came to.
enum Step {
    Next(State),
    Pending(State),
    Connected(Channel),
}

/// Why an attempt ends.
enum Failure {
    /// Another may do better.
    Again(io::Error),
    /// No other can.
    Final(RendezvousError),
}

impl From<io::Error> for Failure {
    fn from(e: io::Error) -> Self {
        Self::Again(e)
    }
}

impl Connector {
    /// A connection to the listener of a handle. `local` is the address that this side uses, its port is ignored; the
    /// system chooses where it is `None`. Nothing is done before the first poll.
    pub fn new(handle: &Handle, local: Option<SocketAddr>, now: Instant, deadline: Instant) -> Self {
        let state = State::Waiting { until: now };
        Self {
            handle: *handle,
            local,
            started: now,
            deadline,
            reach: deadline,
            attempts: 0,
            used: local,
            last: None,
            state,
        }
    }

    /// Gives up sooner on a listener that is out of reach. One whose host has taken the connection is waited for until the
    /// deadline: its process may be slow to accept.
    #[must_use]
    pub fn reach_by(mut self, reach: Instant) -> Self {
        self.reach = reach.min(self.deadline);
        self
    }

    /// What it is waiting for.
    pub fn stage(&self) -> Stage {
        match self.state {
            State::Waiting { .. } => Stage::Waiting,
            State::Dialing(_) => Stage::Dialing,
            State::Greeting(_) => Stage::Greeting,
            State::Finished => Stage::Finished,
        }
    }

    /// Times it has dialed.
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// The last failure of an attempt.
    pub fn last_failure(&self) -> Option<&io::Error> {
        self.last.as_ref()
    }

    /// Goes as far as it can without waiting. The channel's first frame should be sent or received soon: this side's
    /// proof leaves with it.
    pub fn poll(&mut self, now: Instant) -> Poll<Result<Channel, RendezvousError>> {
        loop {
            let stage = self.stage();
            // A failed attempt drops its socket.
            match self.step(now) {
                Ok(Step::Next(state)) => self.state = state,
                Ok(Step::Connected(channel)) => return Poll::Ready(Ok(channel)),
                Ok(Step::Pending(state)) if now < self.patience(&state) => {
                    self.state = state;
                    return Poll::Pending;
                }
                Ok(Step::Pending(_)) => return Poll::Ready(Err(self.failure(now, stage))),
                Err(Failure::Again(e)) if socket::is_transient(&e) && now < self.reach => self.back_off(now, e),
                Err(Failure::Again(e)) => {
                    self.last = Some(e);
                    return Poll::Ready(Err(self.failure(now, stage)));
                }
                Err(Failure::Final(e)) => return Poll::Ready(Err(e)),
            }
        }
    }

    fn patience(&self, state: &State) -> Instant {
        match state {
            State::Greeting(_) => self.deadline,
            State::Waiting { .. } | State::Dialing(_) | State::Finished => self.reach,
        }
    }

    fn step(&mut self, now: Instant) -> Result<Step, Failure> {
        match std::mem::replace(&mut self.state, State::Finished) {
            State::Waiting { until } if now < until || now >= self.reach => Ok(Step::Pending(State::Waiting { until })),
            State::Waiting { .. } => {
                self.attempts += 1;
                let stream = socket::dial(self.handle.addr(), self.local)?;
                self.used = stream.local_addr().ok().or(self.used);
                Ok(Step::Next(State::Dialing(stream)))
            }
            State::Dialing(stream) => match socket::connected(&stream) {
                Poll::Pending => Ok(Step::Pending(State::Dialing(stream))),
                Poll::Ready(Err(e)) => Err(e.into()),
                Poll::Ready(Ok(())) => Ok(Step::Next(State::Greeting(Box::new(Greeting::new(&self.handle, stream)?)))),
            },
            State::Greeting(mut greeting) => match greeting.advance(self.handle.addr())? {
                Poll::Pending => Ok(Step::Pending(State::Greeting(greeting))),
                Poll::Ready(()) => {
                    let Greeting { stream, input, out, .. } = *greeting;
                    Ok(Step::Connected(Channel::new(stream, self.handle.addr(), input, out)?))
                }
            },
            State::Finished => Err(Failure::Final(RendezvousError::Finished)),
        }
    }

    /// A new socket a little later: longer each time, and not at the same time as everybody else.
    fn back_off(&mut self, now: Instant, e: io::Error) {
        let wait = FIRST_WAIT.saturating_mul(1 << (self.attempts.clamp(1, 16) - 1)).min(LONGEST_WAIT);
        let random = f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX);
        let wait = wait.mul_f64(0.5 + random / 2.0);
        if self.last.is_none() {
            let left = self.reach.saturating_duration_since(now).as_secs();
            tracing::info!(target: "init", "connection to {}: {e}; tried again for up to {left} s", self.handle.addr());
        }
        self.last = Some(e);
        self.state = State::Waiting { until: now + wait };
    }

    fn failure(&mut self, now: Instant, stage: Stage) -> RendezvousError {
        Box::new(ConnectFailure {
            peer: self.handle.addr(),
            local: self.used,
            attempts: self.attempts,
            elapsed: now.saturating_duration_since(self.started),
            stage,
            last: self.last.take(),
        })
        .into()
    }
}

impl Greeting {
    fn new(handle: &Handle, stream: TcpStream) -> Result<Self, Failure> {
        // With no listener there, a socket can by chance be given the very port that it dials, and meet itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(Failure::Again(io::Error::from_raw_os_error(libc::ECONNREFUSED)));
        }
        let mut out = Outbox::default();
        let initiator = Initiator::new(handle.key(), Nonce::random().map_err(Failure::Final)?, &mut out);
        Ok(Self { stream, initiator, input: handshake::decoder(), out })
    }

    fn advance(&mut self, peer: SocketAddr) -> Result<Poll<()>, Failure> {
        match self.out.flush(&mut self.stream) {
            Err(e) if e.kind() != io::ErrorKind::WouldBlock => return Err(e.into()),
            _ => {}
        }
        loop {
            match self.initiator.advance(&mut self.input, &mut self.out) {
                Poll::Ready(Ok(())) => break,
                Poll::Ready(Err(refusal)) => return Err(stranger(peer, refusal)),
                Poll::Pending => {}
            }
            match socket::read(&mut self.stream, &mut self.input)? {
                Poll::Pending => return Ok(Poll::Pending),
                Poll::Ready(0) => return Err(gone()),
                Poll::Ready(_) => {}
            }
        }
        // A listener that lost patience with a slow caller has closed by now. Better noticed here, where it can be tried
        // again, than by whoever gets the channel. It has nothing to say before it has our proof.
        let more = match socket::read(&mut self.stream, &mut self.input)? {
            Poll::Ready(0) => return Err(gone()),
            Poll::Ready(_) => true,
            Poll::Pending => !self.input.is_empty(),
        };
        if more { Err(stranger(peer, Refusal::Garbage)) } else { Ok(Poll::Ready(())) }
    }
}

/// The listener closed before it answered: it was crowded, or its process ended.
fn gone() -> Failure {
    Failure::Again(io::Error::from_raw_os_error(libc::ECONNRESET))
}

fn stranger(peer: SocketAddr, refusal: Refusal) -> Failure {
    let reason = match refusal {
        Refusal::Version(theirs) => return Failure::Final(RendezvousError::Version { peer, theirs }),
        Refusal::Proof => "it does not know the secret",
        Refusal::Garbage | Refusal::Deadline => "it speaks another protocol",
    };
    Failure::Final(RendezvousError::Stranger { peer, reason })
}
