//! What a work request's id says, so that a completion finds its place without a search.
//!
//! | bits | field |
//! |---|---|
//! | 0–31 | bytes (data), or work requests that this completion retires (credit) |
//! | 32–39 | generation of the request |
//! | 40–47 | index of the request |
//! | 48–55 | QP of the connection |
//! | 56–57 | kind |
//!
//! The bytes are here because a completion that failed does not carry them.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Data,
    Credit,
    Recv,
    Flush,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct WrId {
    pub(super) kind: Kind,
    pub(super) qp: u8,
    pub(super) request: u8,
    pub(super) generation: u8,
    pub(super) count: u32,
}

impl WrId {
    #[inline]
    pub(super) fn pack(self) -> u64 {
        let kind = match self.kind {
            Kind::Data => 0,
            Kind::Credit => 1,
            Kind::Recv => 2,
            Kind::Flush => 3,
        };
        let [a, b, c, d] = self.count.to_le_bytes();
        u64::from_le_bytes([a, b, c, d, self.generation, self.request, self.qp, kind])
    }

    #[inline]
    pub(super) fn unpack(raw: u64) -> Self {
        let [a, b, c, d, generation, request, qp, kind] = raw.to_le_bytes();
        let kind = match kind & 3 {
            0 => Kind::Data,
            1 => Kind::Credit,
            2 => Kind::Recv,
            _ => Kind::Flush,
        };
        Self { kind, qp, request, generation, count: u32::from_le_bytes([a, b, c, d]) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        for kind in [Kind::Data, Kind::Credit, Kind::Recv, Kind::Flush] {
            let id = WrId { kind, qp: 200, request: 255, generation: 3, count: u32::MAX - 5 };
            assert_eq!(WrId::unpack(id.pack()), id);
        }
    }
}
