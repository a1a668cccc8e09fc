//! Out of band: how two processes find each other over TCP and prove that they belong together, and the control channel
//! that stays open between them afterwards.
//!
//! The room carries opaque bodies for the layer above and knows nothing of what they mean. In order of use:
//!
//! 1. [`Listener::bind`] opens a port and fills a [`Handle`]: address, port, a random secret, the listener's id. The
//!    handle reaches the other process by a way of its own (NCCL's bootstrap).
//! 2. [`Connector::poll`] there and [`Listener::poll`] here dial, accept and run the handshake. Every call returns at
//!    once; the caller brings the time and calls again.
//! 3. Both get a [`Channel`]: frames of a kind and a body, in order, without blocking.
//! 4. [`Watcher::adopt`] gives the channel to the background thread, which calls back with frames and the end of the
//!    channel (the peer's death is an end of stream, long before a NIC gives up), and, where both sides agreed on a
//!    [`KeepAlive`], of a peer that is silent although its connection is open.
//!
//! # The handshake
//!
//! A challenge and a response each way, HMAC-SHA256 keyed with the secret of the handle over the version, the prover's
//! role, the listener's id and both nonces. The secret itself is never sent. The roles keep a proof from being reflected
//! to the side that made it, the nonces from being replayed. It proves who connects; it does not encrypt or sign what
//! follows.
//!
//! | Side | State | Input | Output | Next |
//! |---|---|---|---|---|
//! | connector | waiting | its time to dial comes | SYN | dialing |
//! | connector | dialing | connected | hello (nonce) | greeting |
//! | connector | dialing | refused, unreachable, reset, timed out | | waiting, twice as long |
//! | connector | greeting | hello (nonce, proof), proof right | proof | **channel**; the first body rides along |
//! | connector | greeting | reset, end of stream | | waiting, twice as long |
//! | connector | greeting | proof wrong, garbage, another version | | **error**: somebody else answers there |
//! | connector | any | deadline | | **error** with the history |
//! | listener | hello | hello (nonce) | hello (nonce, proof) | proof |
//! | listener | proof | proof, right | | **channel**; bytes that came along are its first frames |
//! | listener | hello, proof | garbage, oversize, wrong proof, end of stream, deadline | | dropped and counted |
//! | listener | hello, proof | frame of another version | refusal (own version) | dropped and counted, one warning |
//! | listener | hello, proof | too many others that are younger | | dropped and counted |
//!
//! # Limits
//!
//! A child made by fork without exec keeps copies of the sockets, so a parent killed while such a child lives on is not
//! seen as an end of stream, only by the keep-alive. An orderly close is seen in any case, since it shuts the connection down.

mod alive;
mod channel;
mod connector;
mod control;
mod error;
mod frame;
mod handle;
mod handshake;
mod listener;
mod socket;
#[cfg(test)]
mod tests;

pub use alive::KeepAlive;
pub use channel::Channel;
pub use connector::{Connector, Stage};
pub use control::{ControlEvents, ControlHandle, FdEvents, FdHandle, TimerHandle, Watcher};
pub use error::{Closed, ConnectFailure, RendezvousError};
pub use frame::{Frame, MAX_BODY, MAX_KIND};
pub use handle::{HANDLE_BYTES, Handle, SPARE_BYTES};
pub use listener::{Limits, Listener, Rejected};

/// Version of the handle, the frames and the handshake. Both ends must have the same.
pub const VERSION: u16 = 1;
