//! The listen handle: the 128 bytes that tell another process where a listener is and how to prove that it may connect.
//!
//! Little-endian, fixed places, so that hosts of any kind read each other's:
//!
//! | Bytes | Content |
//! |---|---|
//! | 0..4 | magic `NRDH` |
//! | 4..6 | version |
//! | 6 | address family: 4 or 6 |
//! | 8..10 | port |
//! | 12..16 | scope id of an IPv6 link-local address, as the listening host numbers it |
//! | 16..32 | IP address; IPv4 uses the first four |
//! | 32..40 | id of the listener |
//! | 40..56 | secret |
//! | 112..128 | spare: the connecting side's own, see [`Handle::spare`] |
//!
//! All other bytes are zero and are ignored when read.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use super::{RendezvousError, VERSION};

/// Size of an encoded handle.
pub const HANDLE_BYTES: usize = 128;
/// Bytes at the end of an encoded handle that belong to the connecting side.
pub const SPARE_BYTES: usize = 16;

const MAGIC: [u8; 4] = *b"NRDH";
const SPARE: usize = HANDLE_BYTES - SPARE_BYTES;

/// What a connecting process must know of a listener.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Handle {
    addr: SocketAddr,
    key: Key,
}

/// What a proof is made with.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Key {
    pub(super) listener: u64,
    pub(super) secret: [u8; 16],
}

impl Key {
    /// Of a new listener.
    pub(super) fn random() -> Result<Self, getrandom::Error> {
        let mut secret = [0; 16];
        getrandom::fill(&mut secret)?;
        Ok(Self { listener: getrandom::u64()?, secret })
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({:016x})", self.listener)
    }
}

/// Without the secret: handles end up in logs.
impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("addr", &self.addr).field("key", &self.key).finish()
    }
}

impl Handle {
    pub(super) fn new(addr: SocketAddr, key: Key) -> Self {
        Self { addr, key }
    }

    /// Where the listener is.
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// The listener's id, random.
    pub fn listener_id(&self) -> u64 {
        self.key.listener
    }

    pub(super) fn key(&self) -> Key {
        self.key
    }

    /// The bytes for the other side; the spare ones are zero.
    pub fn encode(&self) -> [u8; HANDLE_BYTES] {
        let mut bytes = [0; HANDLE_BYTES];
        let (family, scope) = match self.addr {
            SocketAddr::V4(v4) => {
                bytes[16..20].copy_from_slice(&v4.ip().octets());
                (4, 0)
            }
            SocketAddr::V6(v6) => {
                bytes[16..32].copy_from_slice(&v6.ip().octets());
                (6, v6.scope_id())
            }
        };
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = family;
        bytes[8..10].copy_from_slice(&self.addr.port().to_le_bytes());
        bytes[12..16].copy_from_slice(&scope.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.key.listener.to_le_bytes());
        bytes[40..56].copy_from_slice(&self.key.secret);
        bytes
    }

    /// Reads what [`Self::encode`] wrote, maybe in another process. The spare bytes may be anything.
    pub fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<Self, RendezvousError> {
        if bytes[0..4] != MAGIC {
            return Err(RendezvousError::Handle("it does not begin with NRDH; do all ranks load the same plugin?"));
        }
        let version = u16::from_le_bytes(field(bytes, 4));
        let port = u16::from_le_bytes(field(bytes, 8));
        let scope = u32::from_le_bytes(field(bytes, 12));
        let addr: SocketAddr = match bytes[6] {
            4 => (IpAddr::V4(Ipv4Addr::from(field(bytes, 16))), port).into(),
            6 => SocketAddrV6::new(Ipv6Addr::from(field::<16>(bytes, 16)), port, 0, scope).into(),
            _ => return Err(RendezvousError::Handle("its address family is neither 4 nor 6")),
        };
        if version != VERSION {
            return Err(RendezvousError::Version { peer: addr, theirs: version });
        }
        if port == 0 || addr.ip().is_unspecified() || addr.ip().is_multicast() {
            return Err(RendezvousError::Handle("its address is not one that can be connected to"));
        }
        let key = Key { listener: u64::from_le_bytes(field(bytes, 32)), secret: field(bytes, 40) };
        Ok(Self { addr, key })
    }

    /// The connecting side's own bytes in its copy of a handle: zero at first, kept by NCCL from one call to the next.
    /// They came from another process, so what is found there is not to be trusted.
    pub fn spare(bytes: &[u8; HANDLE_BYTES]) -> [u8; SPARE_BYTES] {
        field(bytes, SPARE)
    }

    /// Writes the bytes that [`Self::spare`] reads.
    pub fn set_spare(bytes: &mut [u8; HANDLE_BYTES], spare: [u8; SPARE_BYTES]) {
        bytes[SPARE..].copy_from_slice(&spare);
    }
}

fn field<const N: usize>(bytes: &[u8; HANDLE_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn handle(addr: &str) -> Handle {
        Handle::new(addr.parse().unwrap(), Key { listener: 0x0102_0304_0506_0708, secret: [0xA5; 16] })
    }

    #[test]
    fn bytes_are_in_their_places() {
        let bytes = handle("10.1.2.3:258").encode();
        assert_eq!(bytes[..20], [b'N', b'R', b'D', b'H', 1, 0, 4, 0, 2, 1, 0, 0, 0, 0, 0, 0, 10, 1, 2, 3]);
        assert_eq!(bytes[32..40], [8, 7, 6, 5, 4, 3, 2, 1]);
        assert_eq!(bytes[40..56], [0xA5; 16]);
        assert_eq!(bytes[56..], [0; 72]);
    }

    #[test]
    fn scope_id_survives() {
        let h = handle("[fe80::1%7]:9");
        assert_eq!(Handle::decode(&h.encode()).unwrap(), h);
        assert!(matches!(h.addr(), SocketAddr::V6(a) if a.scope_id() == 7));
    }

    #[test]
    fn spare_bytes_are_the_connecting_sides_own() {
        let h = handle("10.1.2.3:4");
        let mut bytes = h.encode();
        assert_eq!(Handle::spare(&bytes), [0; SPARE_BYTES]);
        Handle::set_spare(&mut bytes, [7; SPARE_BYTES]);
        assert_eq!(Handle::spare(&bytes), [7; SPARE_BYTES]);
        assert_eq!(Handle::decode(&bytes).unwrap(), h);
    }

    #[test]
    fn refuses_what_is_no_handle() {
        let good = handle("10.1.2.3:4").encode();
        let spoilt = |at: usize, value: u8| {
            let mut bytes = good;
            bytes[at] = value;
            Handle::decode(&bytes).unwrap_err().to_string()
        };
        assert!(spoilt(0, b'X').contains("same plugin"));
        assert!(spoilt(4, 9).contains("version 9"));
        assert!(spoilt(6, 5).contains("family"));
        assert!(spoilt(8, 0).contains("address"));
        assert!(spoilt(16, 224).contains("address"));
        assert!(Handle::decode(&[0; HANDLE_BYTES]).is_err());
    }

    #[test]
    fn debug_hides_the_secret() {
        let text = format!("{:?}", handle("10.1.2.3:4"));
        assert!(text.contains("10.1.2.3") && !text.contains("165") && !text.to_lowercase().contains("a5"), "{text}");
    }

    proptest! {
        #[test]
        fn round_trip(ip: IpAddr, port in 1u16.., listener: u64, secret: [u8; 16]) {
            prop_assume!(!ip.is_unspecified() && !ip.is_multicast());
            let h = Handle::new((ip, port).into(), Key { listener, secret });
            prop_assert_eq!(Handle::decode(&h.encode()).unwrap(), h);
        }

        #[test]
        fn any_bytes_are_taken_or_refused(tail in prop::collection::vec(any::<u8>(), HANDLE_BYTES), magic: bool, version: bool) {
            let mut bytes: [u8; HANDLE_BYTES] = tail.try_into().unwrap();
            if magic { bytes[0..4].copy_from_slice(&MAGIC); }
            if version { bytes[4..6].copy_from_slice(&VERSION.to_le_bytes()); }
            if let Ok(h) = Handle::decode(&bytes) {
                prop_assert!(h.addr().port() != 0);
                prop_assert_eq!(Handle::decode(&h.encode()).unwrap(), h);
            }
        }
    }
}
