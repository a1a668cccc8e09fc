//! The handshake as two state machines without sockets or clocks: frames in, frames out. The table is in the room's own
//! documentation.

use std::task::Poll;
use std::time::Instant;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::{Decoder, FrameError, MAX_BODY, MAX_KIND, Outbox};
use super::handle::Key;
use super::{RendezvousError, VERSION};

const NONCE: usize = 32;
const PROOF: usize = 32;
/// Longest body before a peer has proved itself.
const MAX_GREETING: usize = NONCE + PROOF;

/// Connector: its nonce.
const HELLO: u8 = MAX_KIND + 1;
/// Listener: its nonce and proof.
const ANSWER: u8 = MAX_KIND + 2;
/// Connector: its proof.
const CONFIRM: u8 = MAX_KIND + 3;
/// Listener: says its version, in the header, to a peer of another one.
const REFUSE: u8 = MAX_KIND + 4;

/// Never used twice.
#[derive(Debug, Clone, Copy)]
pub(super) struct Nonce([u8; NONCE]);

impl Nonce {
    pub(super) fn random() -> Result<Self, RendezvousError> {
        let mut bytes = [0; NONCE];
        getrandom::fill(&mut bytes).map_err(|e| RendezvousError::system("no random numbers")(e.into()))?;
        Ok(Self(bytes))
    }
}

/// Why the other side is turned away.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Refusal {
    Garbage,
    Version(u16),
    Proof,
    Deadline,
}

impl From<FrameError> for Refusal {
    fn from(e: FrameError) -> Self {
        match e {
            FrameError::Garbage | FrameError::Oversize => Self::Garbage,
            FrameError::Version(v) => Self::Version(v),
        }
    }
}

/// Whose proof.
#[derive(Debug, Clone, Copy)]
enum Role {
    Connector,
    Listener,
}

fn mac(key: &Key, role: Role, connector: &Nonce, listener: &Nonce) -> Hmac<Sha256> {
    // HMAC pads a short key with zeros to the hash's block itself; a whole block can't be of a wrong length.
    let mut block = [0u8; 64];
    block[..key.secret.len()].copy_from_slice(&key.secret);
    let mut mac = Hmac::<Sha256>::new(&block.into());
    mac.update(b"nccl-net-rdma rendezvous");
    mac.update(&VERSION.to_le_bytes());
    mac.update(match role {
        Role::Connector => b"C",
        Role::Listener => b"L",
    });
    mac.update(&key.listener.to_le_bytes());
    mac.update(&connector.0);
    mac.update(&listener.0);
    mac
}

fn verify(proof: &[u8], mac: Hmac<Sha256>) -> Result<(), Refusal> {
    // Takes the same time whichever byte is wrong.
    mac.verify_slice(proof).map_err(|_| Refusal::Proof)
}

/// A decoder for a peer that has not proved itself.
pub(super) fn decoder() -> Decoder {
    Decoder::new(MAX_GREETING)
}

/// The connecting side.
#[derive(Debug)]
pub(super) struct Initiator {
    key: Key,
    nonce: Nonce,
}

impl Initiator {
    /// Puts the first frame into `out`.
    pub(super) fn new(key: Key, nonce: Nonce, out: &mut Outbox) -> Self {
        out.push(HELLO, &nonce.0);
        Self { key, nonce }
    }

    /// Ready when the listener has proved itself; `out` then holds our proof, which the first body may follow.
    pub(super) fn advance(&self, input: &mut Decoder, out: &mut Outbox) -> Poll<Result<(), Refusal>> {
        let Some(frame) = input.next()? else { return Poll::Pending };
        if frame.kind != ANSWER || frame.body.len() != NONCE + PROOF {
            return Poll::Ready(Err(Refusal::Garbage));
        }
        let Some((theirs, proof)) = frame.body.split_first_chunk() else {
            return Poll::Ready(Err(Refusal::Garbage));
        };
        let theirs = Nonce(*theirs);
        verify(proof, mac(&self.key, Role::Listener, &self.nonce, &theirs))?;
        out.push(CONFIRM, &mac(&self.key, Role::Connector, &self.nonce, &theirs).finalize().into_bytes());
        input.set_max_body(MAX_BODY);
        Poll::Ready(Ok(()))
    }
}

/// The listening side, one for each peer that dials.
#[derive(Debug)]
pub(super) struct Responder {
    key: Key,
    nonce: Nonce,
    deadline: Instant,
    theirs: Option<Nonce>,
}

impl Responder {
    pub(super) fn new(key: Key, nonce: Nonce, deadline: Instant) -> Self {
        Self { key, nonce, deadline, theirs: None }
    }

    /// Ready when the peer has proved itself; what else is in `input` are its first bodies. Judged by what has come before
    /// it is judged by the time, since the caller may itself be late.
    pub(super) fn advance(&mut self, now: Instant, input: &mut Decoder, out: &mut Outbox) -> Poll<Result<(), Refusal>> {
        loop {
            let frame = match input.next() {
                Ok(Some(frame)) => frame,
                Ok(None) if now >= self.deadline => return Poll::Ready(Err(Refusal::Deadline)),
                Ok(None) => return Poll::Pending,
                Err(e) => {
                    if let FrameError::Version(_) = e {
                        out.push(REFUSE, &[]);
                    }
                    return Poll::Ready(Err(e.into()));
                }
            };
            match (self.theirs, frame.kind) {
                (None, HELLO) => {
                    let theirs = Nonce(frame.body.try_into().map_err(|_| Refusal::Garbage)?);
                    let mut answer = [0; NONCE + PROOF];
                    answer[..NONCE].copy_from_slice(&self.nonce.0);
                    let proof = mac(&self.key, Role::Listener, &theirs, &self.nonce).finalize().into_bytes();
                    answer[NONCE..].copy_from_slice(&proof);
                    out.push(ANSWER, &answer);
                    self.theirs = Some(theirs);
                }
                (Some(theirs), CONFIRM) => {
                    verify(&frame.body, mac(&self.key, Role::Connector, &theirs, &self.nonce))?;
                    input.set_max_body(MAX_BODY);
                    return Poll::Ready(Ok(()));
                }
                _ => return Poll::Ready(Err(Refusal::Garbage)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::rendezvous::Frame;

    const KEY: Key = Key { listener: 7, secret: [3; 16] };

    fn key(listener: u64, secret: u8) -> Key {
        Key { listener, secret: [secret; 16] }
    }

    fn nonce(byte: u8) -> Nonce {
        Nonce([byte; NONCE])
    }

    fn bytes(out: &mut Outbox) -> Vec<u8> {
        let mut bytes = Vec::new();
        out.flush(&mut bytes).unwrap();
        bytes
    }

    fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
        let mut out = Outbox::default();
        out.push(kind, body);
        bytes(&mut out)
    }

    /// One end with what it has received and will send.
    struct End<M> {
        machine: M,
        input: Decoder,
        out: Outbox,
        result: Poll<Result<(), Refusal>>,
    }

    impl<M> End<M> {
        fn new(machine: M, out: Outbox) -> Self {
            Self { machine, input: decoder(), out, result: Poll::Pending }
        }

        fn take(&mut self) -> Vec<u8> {
            bytes(&mut self.out)
        }
    }

    impl End<Initiator> {
        fn feed(&mut self, bytes: &[u8]) {
            self.input.push(bytes);
            if self.result.is_pending() {
                self.result = self.machine.advance(&mut self.input, &mut self.out);
            }
        }
    }

    impl End<Responder> {
        fn feed(&mut self, bytes: &[u8], now: Instant) {
            self.input.push(bytes);
            if self.result.is_pending() {
                self.result = self.machine.advance(now, &mut self.input, &mut self.out);
            }
        }
    }

    /// Both ends, joined by the test.
    struct Pair {
        connector: End<Initiator>,
        listener: End<Responder>,
        start: Instant,
    }

    const PATIENCE: Duration = Duration::from_secs(10);

    impl Pair {
        fn new(connector: Key, listener: Key) -> Self {
            let start = Instant::now();
            let mut out = Outbox::default();
            let initiator = Initiator::new(connector, nonce(1), &mut out);
            Self {
                connector: End::new(initiator, out),
                listener: End::new(Responder::new(listener, nonce(2), start + PATIENCE), Outbox::default()),
                start,
            }
        }

        /// Carries bytes both ways, in pieces of `piece` bytes, until neither end has more to say.
        fn run(&mut self, piece: usize) {
            loop {
                let (there, back) = (self.connector.take(), self.listener.take());
                if there.is_empty() && back.is_empty() {
                    return;
                }
                there.chunks(piece).for_each(|c| self.listener.feed(c, self.start));
                back.chunks(piece).for_each(|c| self.connector.feed(c));
            }
        }
    }

    #[test]
    fn both_get_there_whatever_the_pieces() {
        for piece in 1..=200 {
            let mut pair = Pair::new(KEY, KEY);
            pair.run(piece);
            assert_eq!(pair.connector.result, Poll::Ready(Ok(())), "pieces of {piece}");
            assert_eq!(pair.listener.result, Poll::Ready(Ok(())), "pieces of {piece}");
        }
    }

    #[test]
    fn one_round_trip_and_the_first_body_rides_with_the_proof() {
        let mut pair = Pair::new(KEY, KEY);
        let hello = pair.connector.take();
        pair.listener.feed(&hello, pair.start);
        let answer = pair.listener.take();
        pair.connector.feed(&answer);
        assert_eq!(pair.connector.result, Poll::Ready(Ok(())));
        let body = vec![5; MAX_BODY];
        pair.connector.out.push(4, &body);
        let last = pair.connector.take();
        pair.listener.feed(&last, pair.start);
        assert_eq!(pair.listener.result, Poll::Ready(Ok(())));
        assert_eq!(pair.listener.input.next(), Ok(Some(Frame { kind: 4, body })));
    }

    #[test]
    fn a_side_lost_after_any_byte_leaves_the_other_waiting_until_its_deadline() {
        let whole = {
            let mut pair = Pair::new(KEY, KEY);
            let hello = pair.connector.take();
            pair.listener.feed(&hello, pair.start);
            let answer = pair.listener.take();
            pair.connector.feed(&answer);
            [hello, pair.connector.take()].concat()
        };
        for cut in 0..whole.len() {
            let mut pair = Pair::new(KEY, KEY);
            pair.listener.feed(&whole[..cut], pair.start);
            assert_eq!(pair.listener.result, Poll::Pending, "after {cut} bytes");
            let almost = pair.start + PATIENCE - Duration::from_nanos(1);
            pair.listener.feed(&[], almost);
            assert_eq!(pair.listener.result, Poll::Pending, "after {cut} bytes");
            pair.listener.feed(&[], pair.start + PATIENCE);
            assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Deadline)), "after {cut} bytes");
        }
        // All that came counts, however late it is looked at.
        let mut pair = Pair::new(KEY, KEY);
        pair.listener.feed(&whole, pair.start + PATIENCE * 2);
        assert_eq!(pair.listener.result, Poll::Ready(Ok(())));
    }

    #[test]
    fn an_answer_cut_anywhere_is_not_taken() {
        let mut pair = Pair::new(KEY, KEY);
        let hello = pair.connector.take();
        pair.listener.feed(&hello, pair.start);
        let answer = pair.listener.take();
        for cut in 0..answer.len() {
            let mut pair = Pair::new(KEY, KEY);
            pair.connector.take();
            pair.connector.feed(&answer[..cut]);
            assert_eq!(pair.connector.result, Poll::Pending, "after {cut} bytes");
            assert!(pair.connector.take().is_empty(), "gave its proof after {cut} bytes");
        }
    }

    #[test]
    fn another_secret_or_listener_is_noticed_by_the_connector_which_gives_nothing_away() {
        for other in [key(7, 4), key(8, 3)] {
            let mut pair = Pair::new(KEY, other);
            pair.run(1000);
            assert_eq!(pair.connector.result, Poll::Ready(Err(Refusal::Proof)));
            assert_eq!(pair.listener.result, Poll::Pending);
        }
    }

    #[test]
    fn a_connector_without_the_secret_is_refused() {
        for body in [vec![0; PROOF], vec![], vec![0; PROOF - 1], vec![0; MAX_GREETING]] {
            let mut pair = Pair::new(KEY, KEY);
            pair.listener.feed(&frame(HELLO, &[9; NONCE]), pair.start);
            pair.listener.feed(&frame(CONFIRM, &body), pair.start);
            assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Proof)));
        }
    }

    #[test]
    fn the_listeners_own_proof_reflected_is_refused() {
        let mut pair = Pair::new(KEY, KEY);
        // Even with both nonces equal only the role differs, and that is enough.
        pair.listener.feed(&frame(HELLO, &nonce(2).0), pair.start);
        let answer = pair.listener.take();
        let proof = &answer[answer.len() - PROOF..];
        pair.listener.feed(&frame(CONFIRM, proof), pair.start);
        assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Proof)));
    }

    #[test]
    fn an_echo_of_the_connectors_own_bytes_is_refused() {
        let mut pair = Pair::new(KEY, KEY);
        let hello = pair.connector.take();
        pair.connector.feed(&hello);
        assert_eq!(pair.connector.result, Poll::Ready(Err(Refusal::Garbage)));

        let mut pair = Pair::new(KEY, KEY);
        let challenge = pair.connector.take();
        let challenge = &challenge[challenge.len() - NONCE..];
        pair.connector.feed(&frame(ANSWER, &[challenge, challenge].concat()));
        assert_eq!(pair.connector.result, Poll::Ready(Err(Refusal::Proof)));
    }

    #[test]
    fn a_recorded_handshake_replayed_is_refused() {
        let mut pair = Pair::new(KEY, KEY);
        let hello = pair.connector.take();
        pair.listener.feed(&hello, pair.start);
        let answer = pair.listener.take();
        pair.connector.feed(&answer);
        let confirm = pair.connector.take();

        // To a listener: its nonce is another one the next time.
        let mut listener = End::new(Responder::new(KEY, nonce(5), pair.start + PATIENCE), Outbox::default());
        listener.feed(&[hello, confirm].concat(), pair.start);
        assert_eq!(listener.result, Poll::Ready(Err(Refusal::Proof)));

        // To a connector likewise.
        let mut out = Outbox::default();
        let mut connector = End::new(Initiator::new(KEY, nonce(6), &mut out), out);
        connector.feed(&answer);
        assert_eq!(connector.result, Poll::Ready(Err(Refusal::Proof)));
    }

    #[test]
    fn frames_out_of_place_are_refused() {
        let cases: [&[u8]; 5] = [
            &frame(CONFIRM, &[0; PROOF]),
            &frame(ANSWER, &[0; NONCE + PROOF]),
            &frame(1, b"body before its time"),
            &frame(HELLO, &[0; NONCE - 1]),
            &[frame(HELLO, &[0; NONCE]), frame(HELLO, &[0; NONCE])].concat(),
        ];
        for case in cases {
            let mut pair = Pair::new(KEY, KEY);
            pair.listener.feed(case, pair.start);
            assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Garbage)));
        }
    }

    #[test]
    fn long_frames_are_refused_before_the_proof() {
        let mut pair = Pair::new(KEY, KEY);
        pair.listener.feed(&frame(HELLO, &[0; MAX_GREETING + 1])[..12], pair.start);
        assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Garbage)));
    }

    #[test]
    fn another_version_is_named_to_both() {
        let mut pair = Pair::new(KEY, KEY);
        let mut hello = pair.connector.take();
        hello[4] = 2;
        pair.listener.feed(&hello, pair.start);
        assert_eq!(pair.listener.result, Poll::Ready(Err(Refusal::Version(2))));
        let mut refusal = pair.listener.take();
        refusal[4] = 3;
        pair.connector.feed(&refusal);
        assert_eq!(pair.connector.result, Poll::Ready(Err(Refusal::Version(3))));
    }
}
