//! Frames on the wire: a header of magic, version, kind and length, then the body. Bytes in, frames out, and back; no
//! sockets here.
//!
//! | Bytes | Content |
//! |---|---|
//! | 0..4 | magic `NRDF` |
//! | 4..6 | version, little-endian |
//! | 6 | kind |
//! | 7 | zero |
//! | 8..12 | length of the body, little-endian |

use std::io::{self, Write};

use super::VERSION;

/// Longest body.
pub const MAX_BODY: usize = 16 << 10;
/// Highest kind that the layer above may use; those beyond are this room's.
pub const MAX_KIND: u8 = 0xEF;

const MAGIC: [u8; 4] = *b"NRDF";
const HEADER: usize = 12;
/// An empty buffer larger than this is given back: a channel is idle nearly always.
const KEEP: usize = 1 << 10;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    /// What the body is.
    pub kind: u8,
    /// The message.
    pub body: Vec<u8>,
}

/// Why bytes are not a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FrameError {
    Garbage,
    Oversize,
    Version(u16),
}

/// Takes bytes as they come and gives whole frames.
#[derive(Debug)]
pub(super) struct Decoder {
    bytes: Vec<u8>,
    /// Bytes before this are used up.
    at: usize,
    max_body: usize,
}

impl Decoder {
    /// Bodies up to `max_body` are taken.
    pub(super) fn new(max_body: usize) -> Self {
        Self { bytes: Vec::new(), at: 0, max_body }
    }

    pub(super) fn set_max_body(&mut self, max_body: usize) {
        self.max_body = max_body;
    }

    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.drain(..self.at);
        self.at = 0;
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether bytes wait that no frame has used.
    pub(super) fn is_empty(&self) -> bool {
        self.at == self.bytes.len()
    }

    /// The next whole frame. A wrong header is refused as soon as its first wrong byte is there.
    pub(super) fn next(&mut self) -> Result<Option<Frame>, FrameError> {
        let bytes = &self.bytes[self.at..];
        let common = bytes.len().min(MAGIC.len());
        if bytes[..common] != MAGIC[..common] {
            return Err(FrameError::Garbage);
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else { return Ok(None) };
        let version = u16::from_le_bytes([header[4], header[5]]);
        if version != VERSION {
            return Err(FrameError::Version(version));
        }
        if header[7] != 0 {
            return Err(FrameError::Garbage);
        }
        let length = u32::from_le_bytes([header[8], header[9], header[10], header[11]]);
        let length = usize::try_from(length).unwrap_or(usize::MAX);
        if length > self.max_body {
            return Err(FrameError::Oversize);
        }
        let Some(body) = rest.get(..length) else { return Ok(None) };
        let frame = Frame { kind: header[6], body: body.to_vec() };
        self.at += HEADER + length;
        if self.is_empty() {
            self.at = 0;
            reset(&mut self.bytes);
        }
        Ok(Some(frame))
    }
}

/// Frames on their way out.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    bytes: Vec<u8>,
    sent: usize,
}

impl Outbox {
    /// The caller bounds `body` by [`MAX_BODY`].
    pub(super) fn push(&mut self, kind: u8, body: &[u8]) {
        debug_assert!(body.len() <= MAX_BODY);
        let length = u32::try_from(body.len()).unwrap_or(u32::MAX);
        self.bytes.drain(..self.sent);
        self.sent = 0;
        self.bytes.extend_from_slice(&MAGIC);
        self.bytes.extend_from_slice(&VERSION.to_le_bytes());
        self.bytes.extend_from_slice(&[kind, 0]);
        self.bytes.extend_from_slice(&length.to_le_bytes());
        self.bytes.extend_from_slice(body);
    }

    /// Bytes not written yet.
    pub(super) fn len(&self) -> usize {
        self.bytes.len() - self.sent
    }

    /// Writes what the stream takes. `WouldBlock` where something is left.
    pub(super) fn flush(&mut self, stream: &mut impl Write) -> io::Result<()> {
        while self.len() > 0 {
            match stream.write(&self.bytes[self.sent..]) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        self.sent = 0;
        reset(&mut self.bytes);
        Ok(())
    }
}

fn reset(bytes: &mut Vec<u8>) {
    bytes.clear();
    bytes.shrink_to(KEEP);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn encode(frames: &[Frame]) -> Vec<u8> {
        let mut outbox = Outbox::default();
        for f in frames {
            outbox.push(f.kind, &f.body);
        }
        let mut bytes = Vec::new();
        outbox.flush(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn header_is_as_documented() {
        let bytes = encode(&[Frame { kind: 3, body: vec![9; 258] }]);
        assert_eq!(bytes[..13], [b'N', b'R', b'D', b'F', 1, 0, 3, 0, 2, 1, 0, 0, 9]);
    }

    #[test]
    fn garbage_is_refused_at_its_first_byte() {
        let mut d = Decoder::new(MAX_BODY);
        d.push(b"NRX");
        assert_eq!(d.next(), Err(FrameError::Garbage));
        let mut d = Decoder::new(MAX_BODY);
        d.push(b"NRD");
        assert_eq!(d.next(), Ok(None));
    }

    #[test]
    fn length_is_refused_before_the_body_comes() {
        let bytes = encode(&[Frame { kind: 1, body: vec![0; 65] }]);
        let mut d = Decoder::new(64);
        d.push(&bytes[..HEADER]);
        assert_eq!(d.next(), Err(FrameError::Oversize));
    }

    #[test]
    fn other_versions_are_named() {
        let mut bytes = encode(&[Frame { kind: 1, body: vec![] }]);
        bytes[4..6].copy_from_slice(&513u16.to_le_bytes());
        let mut d = Decoder::new(64);
        d.push(&bytes);
        assert_eq!(d.next(), Err(FrameError::Version(513)));
    }

    #[test]
    fn a_stream_that_takes_little_loses_nothing() {
        struct Narrow(Vec<u8>, usize);
        impl Write for Narrow {
            fn write(&mut self, b: &[u8]) -> io::Result<usize> {
                if self.1 == 0 {
                    self.1 = 5;
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                let n = b.len().min(self.1);
                self.1 -= n;
                self.0.extend_from_slice(&b[..n]);
                Ok(n)
            }
            fn flush(&mut self) -> io::Result<()> {
                Ok(())
            }
        }
        let frames = [Frame { kind: 1, body: vec![1; 30] }, Frame { kind: 2, body: vec![2; 7] }];
        let mut outbox = Outbox::default();
        let mut narrow = Narrow(Vec::new(), 5);
        outbox.push(1, &frames[0].body);
        assert!(outbox.flush(&mut narrow).is_err());
        outbox.push(2, &frames[1].body);
        while outbox.flush(&mut narrow).is_err() {}
        assert_eq!(narrow.0, encode(&frames));
    }

    #[test]
    fn idle_buffers_are_given_back() {
        let mut d = Decoder::new(MAX_BODY);
        d.push(&encode(&[Frame { kind: 1, body: vec![0; MAX_BODY] }]));
        assert!(d.next().unwrap().is_some());
        assert!(d.bytes.capacity() <= KEEP);
    }

    fn frames() -> impl Strategy<Value = Vec<Frame>> {
        let frame =
            (any::<u8>(), prop::collection::vec(any::<u8>(), 0..300)).prop_map(|(kind, body)| Frame { kind, body });
        prop::collection::vec(frame, 0..6)
    }

    proptest! {
        #[test]
        fn any_split_gives_the_same_frames(sent in frames(), cuts in prop::collection::vec(1usize..40, 1..20)) {
            let bytes = encode(&sent);
            let mut decoder = Decoder::new(MAX_BODY);
            let mut got = Vec::new();
            let mut rest = &bytes[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() { break }
                let (now, later) = rest.split_at((*cut).min(rest.len()));
                decoder.push(now);
                rest = later;
                while let Some(f) = decoder.next().unwrap() { got.push(f); }
            }
            prop_assert!(decoder.is_empty());
            prop_assert_eq!(got, sent);
        }

        #[test]
        fn any_bytes_are_bounded(chunks in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..64), 0..8), at in 0usize..12) {
            let mut decoder = Decoder::new(64);
            let mut good = encode(&[Frame { kind: 1, body: vec![] }]);
            good.truncate(at);
            decoder.push(&good);
            for chunk in chunks {
                decoder.push(&chunk);
                loop {
                    match decoder.next() {
                        Ok(Some(f)) => prop_assert!(f.body.len() <= 64),
                        Ok(None) => break,
                        Err(_) => return Ok(()),
                    }
                }
                prop_assert!(decoder.bytes.len() - decoder.at < HEADER + 64);
            }
        }
    }
}
