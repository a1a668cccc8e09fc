//! Frames between processes and hosts. Everything in one is untrusted until checked by the responder.

/// Payload of a frame at most; messages are cut into these, so that queue pairs take turns.
pub(crate) const SEGMENT: usize = 64 << 10;
pub(crate) const HEADER: usize = 64;
const MAGIC: u16 = 0x5348;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Write = 1,
    WriteImm,
    Send,
    SendImm,
    ReadRequest,
    ReadResponse,
    Ack,
    /// `syndrome` is the requester's completion status.
    Nak,
    /// `syndrome` is the code of the responder's RNR timer.
    Rnr,
    /// The memory that a frame referred to can't be reached: send its bytes. `syndrome` is 1 for a READ's response.
    NoReference,
    /// The share `rkey` is gone. Of no queue pair.
    Forget,
}

impl Kind {
    fn from_code(code: u8) -> Option<Self> {
        use Kind::*;
        [Write, WriteImm, Send, SendImm, ReadRequest, ReadResponse, Ack, Nak, Rnr, NoReference, Forget]
            .into_iter()
            .find(|&kind| kind as u8 == code)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) kind: Kind,
    pub(crate) syndrome: u8,
    pub(crate) mtu: u8,
    pub(crate) solicited: bool,
    /// The payload is a reference to where the bytes are.
    pub(crate) by_reference: bool,
    pub(crate) src: u32,
    pub(crate) dst: u32,
    /// Counts messages, not packets.
    pub(crate) psn: u32,
    pub(crate) imm: u32,
    pub(crate) rkey: u32,
    /// Bytes of the message in this frame: behind this header, or where the reference says.
    pub(crate) len: u32,
    /// Bytes of the message, and where in it the payload belongs.
    pub(crate) total: u64,
    pub(crate) offset: u64,
    pub(crate) raddr: u64,
}

impl Frame {
    /// Of no queue pair: `src` holds no more than the sender's slot.
    pub(crate) fn forget(src: u32, share: u32) -> Self {
        let kind = Kind::Forget;
        let (syndrome, mtu, solicited, by_reference) = (0, 0, false, false);
        let (dst, psn, imm, len, total, offset, raddr) = (0, 0, 0, 0, 0, 0, 0);
        let rkey = share;
        Self { kind, syndrome, mtu, solicited, by_reference, src, dst, psn, imm, rkey, len, total, offset, raddr }
    }

    /// Bytes behind the header.
    pub(crate) fn payload(&self) -> u32 {
        if self.by_reference { crate::gpu::REFERENCE as u32 } else { self.len }
    }

    pub(crate) fn encode(&self) -> [u8; HEADER] {
        let mut out = [0; HEADER];
        out[..2].copy_from_slice(&MAGIC.to_le_bytes());
        out[2..6].copy_from_slice(&[
            self.kind as u8,
            self.syndrome,
            self.mtu,
            u8::from(self.solicited) | u8::from(self.by_reference) << 1,
        ]);
        for (i, word) in [self.src, self.dst, self.psn, self.imm, self.rkey, self.len].into_iter().enumerate() {
            out[8 + 4 * i..12 + 4 * i].copy_from_slice(&word.to_le_bytes());
        }
        for (i, word) in [self.total, self.offset, self.raddr].into_iter().enumerate() {
            out[32 + 8 * i..40 + 8 * i].copy_from_slice(&word.to_le_bytes());
        }
        out
    }

    /// None for what can't be a frame: wrong magic or kind, a payload that is too long or lies outside its message.
    pub(crate) fn decode(bytes: &[u8; HEADER]) -> Option<Self> {
        let word = |i: usize| u32::from_le_bytes([bytes[i], bytes[i + 1], bytes[i + 2], bytes[i + 3]]);
        let long = |i: usize| u64::from(word(i)) | u64::from(word(i + 4)) << 32;
        let frame = Self {
            kind: Kind::from_code(bytes[2])?,
            syndrome: bytes[3],
            mtu: bytes[4],
            solicited: bytes[5] & 1 != 0,
            by_reference: bytes[5] & 2 != 0,
            src: word(8),
            dst: word(12),
            psn: word(16),
            imm: word(20),
            rkey: word(24),
            len: word(28),
            total: long(32),
            offset: long(40),
            raddr: long(48),
        };
        let end = frame.offset.checked_add(u64::from(frame.len))?;
        let sound = u16::from_le_bytes([bytes[0], bytes[1]]) == MAGIC
            && frame.len as usize <= SEGMENT
            && end <= frame.total
            && (frame.src | frame.dst | frame.psn) <= crate::qp::NUM_MASK;
        sound.then_some(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn what_was_sent_arrives(kind in 1u8..12, words in prop::array::uniform6(0u32..0xff_ffff), len in 0u32..65536) {
            let frame = Frame {
                kind: Kind::from_code(kind).unwrap(), syndrome: 7, mtu: 5, solicited: true, by_reference: kind % 2 == 0,
                src: words[0], dst: words[1], psn: words[2], imm: words[3], rkey: words[4], len,
                total: u64::from(words[5]) + u64::from(len), offset: u64::from(words[5]), raddr: u64::MAX - 5,
            };
            prop_assert_eq!(Frame::decode(&frame.encode()), Some(frame));
        }

        #[test]
        fn rubbish_is_refused_or_within_bounds(bytes in prop::array::uniform32(any::<u8>()), fix in any::<bool>()) {
            let mut header = [0; HEADER];
            header[..32].copy_from_slice(&bytes);
            header[32..].copy_from_slice(&bytes);
            if fix {
                header[..3].copy_from_slice(&[0x48, 0x53, 1]);
            }
            if let Some(frame) = Frame::decode(&header) {
                prop_assert!(frame.len as usize <= SEGMENT && frame.offset + u64::from(frame.len) <= frame.total);
            }
        }
    }
}
