//! What the two ends of a connection tell each other before the first byte: who they are, which rails and QPs they have,
//! and, in the answer, what was agreed.
//!
//! The rendezvous room carries these as opaque bodies; little-endian, strings and lists with a length in front, everything
//! bounds-checked on the way in.

use crate::transfer::MAX_RAILS;
use crate::verbs::Ece;

/// Kinds of the bodies that a channel carries.
pub(crate) mod kind {
    /// Connecting side, first: a [`super::Hello`].
    pub(crate) const OFFER: u8 = 1;
    /// Accepting side: a [`super::Hello`] with the pairs that were agreed; its QPs can receive.
    pub(crate) const ANSWER: u8 = 2;
    /// Connecting side: its QPs can receive. The body is its [`crate::rendezvous::KeepAlive`]; empty: none, as from a
    /// plugin that has none.
    pub(crate) const READY: u8 = 3;
    /// Either side, any time: the first cause of a failure, text.
    pub(crate) const FAILED: u8 = 4;
    /// Either side, last: a [`super::Bye`].
    pub(crate) const BYE: u8 = 5;
}

/// Version of these bodies; both ends must have the same.
const BODY_VERSION: u16 = 4;
/// Longest name in a body, bytes; verbs device names have at most 63.
const MAX_NAME: usize = 64;
/// Most QPs of one rail.
pub(crate) const MAX_QPS: usize = 16;

/// A body that can't be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HelloError {
    #[error(
        "the peer's plugin {peer} speaks version {theirs} of the connection set-up, this one ({own}) speaks {ours}: install the same plugin on both hosts"
    )]
    Version { peer: String, theirs: u16, own: String, ours: u16 },
    #[error("the peer's connection set-up is damaged ({0})")]
    Damaged(&'static str),
}

/// A queue pair as the peer must know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HelloQp {
    pub(crate) num: u32,
    /// First packet number that it sends.
    pub(crate) psn: u32,
    pub(crate) ece: Option<Ece>,
}

/// A rail as the peer must know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HelloRail {
    pub(crate) device: String,
    pub(crate) port: u8,
    pub(crate) link_layer: u8,
    pub(crate) lid: u16,
    pub(crate) gid: [u8; 16],
    pub(crate) grh_required: bool,
    /// IBV_MTU_* code.
    pub(crate) mtu: u8,
    pub(crate) max_msg_sz: u32,
    pub(crate) pkey: u16,
    /// Mb/s.
    pub(crate) speed: u32,
    /// Key of the credit ring on this rail; 0 from the accepting side.
    pub(crate) ring_rkey: u32,
    pub(crate) qps: Vec<HelloQp>,
}

/// Who the peer is, for every line that names it.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Who {
    pub(crate) version: String,
    pub(crate) host: String,
    pub(crate) pid: u32,
}

impl std::fmt::Display for Who {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} pid {}", self.host, self.pid)
    }
}

/// One side's description.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) who: Who,
    /// Traffic class that the connecting side's communicator asks for.
    pub(crate) class: Option<u8>,
    /// Address of the credit ring; 0 from the accepting side.
    pub(crate) ring_address: u64,
    /// Largest write between the rails that were agreed; 0 in an offer.
    pub(crate) max_write: u32,
    /// Whether the connecting side takes hinted receives; in the answer, whether there are any.
    pub(crate) hints: bool,
    /// In the answer, where there are hinted receives: the word for their count, and its key on the first rail.
    pub(crate) count_address: u64,
    pub(crate) count_rkey: u32,
    pub(crate) rails: Vec<HelloRail>,
    /// (rail of the connecting side, rail of the accepting side); empty in an offer.
    pub(crate) pairs: Vec<(u8, u8)>,
}

/// The last word of a side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bye {
    /// Nothing was under way.
    pub(crate) complete: bool,
    /// From the receiving side: every position before this one has arrived.
    pub(crate) received: u32,
}

impl Bye {
    pub(crate) fn encode(self) -> [u8; 5] {
        let [a, b, c, d] = self.received.to_le_bytes();
        [u8::from(self.complete), a, b, c, d]
    }

    pub(crate) fn decode(body: &[u8]) -> Option<Self> {
        let &[complete, a, b, c, d] = body else { return None };
        Some(Self { complete: complete == 1, received: u32::from_le_bytes([a, b, c, d]) })
    }
}

impl Hello {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut w = Writer(Vec::with_capacity(512));
        w.u16(BODY_VERSION);
        w.text(&self.who.version);
        w.text(&self.who.host);
        w.u32(self.who.pid);
        w.u8(u8::from(self.class.is_some()));
        w.u8(self.class.unwrap_or(0));
        w.u64(self.ring_address);
        w.u32(self.max_write);
        w.u8(u8::from(self.hints));
        w.u64(self.count_address);
        w.u32(self.count_rkey);
        w.count(self.rails.len());
        for rail in &self.rails {
            w.text(&rail.device);
            w.u8(rail.port);
            w.u8(rail.link_layer);
            w.u16(rail.lid);
            w.0.extend_from_slice(&rail.gid);
            w.u8(u8::from(rail.grh_required));
            w.u8(rail.mtu);
            w.u32(rail.max_msg_sz);
            w.u16(rail.pkey);
            w.u32(rail.speed);
            w.u32(rail.ring_rkey);
            w.count(rail.qps.len());
            for qp in &rail.qps {
                w.u32(qp.num);
                w.u32(qp.psn);
                match qp.ece {
                    None => w.u8(0),
                    Some(ece) => {
                        w.u8(1);
                        w.u32(ece.vendor_id);
                        w.u32(ece.options);
                        w.u32(ece.comp_mask);
                    }
                }
            }
        }
        w.count(self.pairs.len());
        for &(a, b) in &self.pairs {
            w.u8(a);
            w.u8(b);
        }
        w.0
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, HelloError> {
        let mut r = Reader(body);
        let version = r.u16()?;
        let plugin = r.text()?;
        if version != BODY_VERSION {
            return Err(HelloError::Version {
                peer: plugin,
                theirs: version,
                own: env!("CARGO_PKG_VERSION").to_owned(),
                ours: BODY_VERSION,
            });
        }
        let who = Who { version: plugin, host: r.text()?, pid: r.u32()? };
        let (asked, class) = (r.u8()? == 1, r.u8()?);
        let class = asked.then_some(class);
        let (ring_address, max_write) = (r.u64()?, r.u32()?);
        let (hints, count_address, count_rkey) = (r.u8()? == 1, r.u64()?, r.u32()?);
        let n = r.count(MAX_RAILS)?;
        let mut rails = Vec::with_capacity(n);
        for _ in 0..n {
            let device = r.text()?;
            let (port, link_layer, lid, gid) = (r.u8()?, r.u8()?, r.u16()?, r.array::<16>()?);
            let (grh_required, mtu, max_msg_sz) = (r.u8()? == 1, r.u8()?, r.u32()?);
            let (pkey, speed, ring_rkey) = (r.u16()?, r.u32()?, r.u32()?);
            let m = r.count(MAX_QPS)?;
            let mut qps = Vec::with_capacity(m);
            for _ in 0..m {
                let (num, psn) = (r.u32()?, r.u32()?);
                let ece = match r.u8()? {
                    0 => None,
                    1 => Some(Ece { vendor_id: r.u32()?, options: r.u32()?, comp_mask: r.u32()? }),
                    _ => return Err(HelloError::Damaged("ECE")),
                };
                qps.push(HelloQp { num, psn, ece });
            }
            rails.push(HelloRail {
                device,
                port,
                link_layer,
                lid,
                gid,
                grh_required,
                mtu,
                max_msg_sz,
                pkey,
                speed,
                ring_rkey,
                qps,
            });
        }
        let n = r.count(MAX_RAILS)?;
        let mut pairs = Vec::with_capacity(n);
        for _ in 0..n {
            pairs.push((r.u8()?, r.u8()?));
        }
        if !r.0.is_empty() {
            return Err(HelloError::Damaged("bytes past the end"));
        }
        if !(1..=5).contains(&rails.iter().map(|x| x.mtu).min().unwrap_or(0)) || rails.iter().any(|x| x.mtu > 5) {
            return Err(HelloError::Damaged("rails or their MTU"));
        }
        Ok(Self { who, class, ring_address, max_write, hints, count_address, count_rkey, rails, pairs })
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn u8(&mut self, v: u8) {
        self.0.push(v);
    }

    fn u16(&mut self, v: u16) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    fn u32(&mut self, v: u32) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    fn u64(&mut self, v: u64) {
        self.0.extend_from_slice(&v.to_le_bytes());
    }

    fn count(&mut self, n: usize) {
        self.u8(u8::try_from(n).unwrap_or(u8::MAX));
    }

    /// Cut at [`MAX_NAME`] bytes.
    fn text(&mut self, s: &str) {
        let mut end = s.len().min(MAX_NAME);
        while !s.is_char_boundary(end) {
            end -= 1;
        }
        self.count(end);
        self.0.extend_from_slice(&s.as_bytes()[..end]);
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], HelloError> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(HelloError::Damaged("too short"))?;
        self.0 = rest;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, HelloError> {
        Ok(self.array::<1>()?[0])
    }

    fn u16(&mut self) -> Result<u16, HelloError> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    fn u32(&mut self) -> Result<u32, HelloError> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn u64(&mut self) -> Result<u64, HelloError> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn count(&mut self, most: usize) -> Result<usize, HelloError> {
        let n = usize::from(self.u8()?);
        if n <= most { Ok(n) } else { Err(HelloError::Damaged("a list is too long")) }
    }

    fn text(&mut self) -> Result<String, HelloError> {
        let n = self.count(MAX_NAME)?;
        let (head, rest) = self.0.split_at_checked(n).ok_or(HelloError::Damaged("too short"))?;
        self.0 = rest;
        Ok(String::from_utf8_lossy(head).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample(rails: u8, qps: u32) -> Hello {
        let rail = |i: u8| HelloRail {
            device: format!("mlx5_{i}"),
            port: 1,
            link_layer: 2,
            lid: u16::from(i),
            gid: [i; 16],
            grh_required: false,
            mtu: 5,
            max_msg_sz: 1 << 30,
            pkey: 0xffff,
            speed: 400_000,
            ring_rkey: 7,
            qps: (0..qps).map(|q| HelloQp { num: q, psn: 99, ece: (q % 2 == 1).then(Ece::default) }).collect(),
        };
        Hello {
            who: Who { version: "0.1.0".into(), host: "node-a".into(), pid: 42 },
            class: (rails > 1).then_some(106),
            ring_address: 0x7000_0000,
            max_write: 8 << 20,
            hints: rails > 1,
            count_address: 0x7000_2000,
            count_rkey: 9,
            rails: (0..rails).map(rail).collect(),
            pairs: vec![(0, 1)],
        }
    }

    #[test]
    fn round_trip() {
        for (rails, qps) in [(1, 1), (2, 4), (8, 16)] {
            let hello = sample(rails, qps);
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        let bye = Bye { complete: true, received: 0xfffe_0001 };
        assert_eq!(Bye::decode(&bye.encode()), Some(bye));
    }

    #[test]
    fn one_rail_and_qp_stay_small() {
        let bytes = sample(1, 1).encode().len();
        assert!(bytes < 600, "{bytes}");
    }

    #[test]
    fn another_version_names_both() {
        let mut body = sample(1, 1).encode();
        body[0] = 9;
        let text = Hello::decode(&body).expect_err("version 9").to_string();
        assert!(text.contains('9') && text.contains("0.1.0"), "{text}");
    }

    #[test]
    fn every_cut_is_an_error() {
        let body = sample(2, 2).encode();
        for end in 0..body.len() {
            assert!(Hello::decode(&body[..end]).is_err(), "cut at {end}");
        }
    }

    proptest! {
        #[test]
        fn garbage_never_panics(body in prop::collection::vec(any::<u8>(), 0..600)) {
            let _ = Hello::decode(&body);
            let _ = Bye::decode(&body);
        }
    }
}
