//! The data path: credits, send and receive rings, striping over rails and QPs, completions, flush.
//!
//! In steady state nothing here allocates, locks, calls the system or looks anything up, and the cost of a call does not
//! grow with idle connections, requests in flight or devices. What is staged calls the CUDA driver, which may do all of these,
//! once for each copy.
//!
//! # Protocol
//! A *connection* carries one direction. The receiver says where each receive wants its bytes by writing a *credit*
//! ([`credit`]) into the sender's credit ring; the sender answers with RDMA WRITE WITH IMMEDIATE, one per *portion*, and the
//! immediate ([`imm`]) names the credit. Nothing is copied (but what is staged) and nothing is asked for: without a credit the sender's
//! `isend` answers "again".
//!
//! * An irecv of n buffers takes n consecutive ring entries and posts them in one write (two where they wrap). All credits
//!   of a connection travel over one QP at a time: over several, a late older credit could overwrite a newer one in a
//!   reused entry.
//! * Receives are matched by tag inside the group at the head of the ring, also for n = 1: several local ranks may feed one
//!   connection. Sends for the next group wait until this one is matched.
//! * A message up to the split threshold goes over one QP (QPs take turns); a larger one in 128-byte aligned portions, sized
//!   so that the rails finish together ([`split`]).
//! * A portion longer than the agreed largest write (the least max_msg_sz of all ports of both ends) is several writes on
//!   its one QP: plain ones of just that size, and the last, which carries the immediate and tells how many they were. A QP
//!   keeps their order, so the immediate is last; and still one receive is consumed for each portion.
//! * The size of a message is the sum of its portions' bytes: what the receiver's own NIC counted for the writes with an
//!   immediate, and as many times the largest write as these say.
//! * Receives (empty ones, consumed by the immediates) are posted ahead in batches, and a sender never finds none. Of those
//!   that a QP has ([`Receiver::RQ_DEPTH`]) some were consumed and not posted again: fewer than a batch that this side has
//!   seen, and what it has not seen, which belongs to open credits. An open credit is answered with one portion on a QP, or
//!   with as many as it says itself where the message is wanted in portions. The receiver keeps account of what it says:
//!   beyond one each, the open credits together never say more than [`EXTRA_RECVS`]. So RING + `EXTRA_RECVS` +
//!   [`RECV_BATCH`] are one more than can be gone, in whatever order and however late both sides look.
//!
//! # Hinted receives
//! NCCL says of receives of LL and LL128 (ABI v9 and newer) that it needs no completion: flags in the data tell when they are
//! there. Such a credit has a flag; the sender answers it with plain writes on one QP (the data land in ascending order; QPs
//! and so rails take turns by message), and with nothing where it sends nothing. irecv's request is done at its first test. The
//! receiver can't know what was sent, so its size is the one that was posted, an upper bound; of these protocols NCCL uses
//! sizes for its profiler only. No receive is consumed and nothing completes on this side, hence nothing tells that a ring
//! entry was read: the sender returns a count, and irecv answers "again" where the count is not past the entry ([`hint`]).
//!
//! A hinted receive counts as a use of its memory until the count has passed it. NCCL gives the memory back without having
//! to know that: then the QPs are stopped first, and the connection closes in good order all the same, since what NCCL
//! took for done is done.
//!
//! # Staging
//! GPU memory that the NIC does not reach is copied through pinned host memory on the way, in portions, at either end or both:
//! see [`staging`].
//!
//! Everything that a peer can write (credits, immediates, counts) is checked against what is open before it is used.

pub mod credit;
mod hint;
pub mod imm;
#[cfg(test)]
mod model;
pub mod profile;
mod receiver;
mod sender;
pub mod split;
pub mod staging;
#[cfg(test)]
mod tests;
mod wire;
mod wr_id;

pub use profile::{Arrivals, Parent, Profiled, Profiler};
pub use receiver::{Buffer, Receiver, ReceiverParts, RecvProgress};
pub use sender::{CountPath, SendProgress, Sender, SenderParts};
pub use split::largest_message;
pub use staging::Copying;
pub use wire::{Fault, Flight, Keys, Lanes, Owed, Post, QpSet, RailLink};

/// Entries of a credit ring; a power of two, and at least `NCCL_NET_MAX_REQUESTS` groups of [`MAX_GROUP`].
pub const RING: usize = 256;
/// Largest n of an irecv.
pub const MAX_GROUP: usize = 8;
/// Rails of a connection.
pub const MAX_RAILS: usize = 8;
/// Portions of a message.
pub const MAX_PORTIONS: usize = 16;
/// Send requests that can be outstanding on a connection; above that isend answers "again".
pub const SEND_REQUESTS: usize = 128;
/// Work requests that a sending QP takes.
pub const SEND_WRS: u32 = 128;
/// Receive requests that can be outstanding on a connection; NCCL wants 32.
pub const RECV_REQUESTS: usize = 64;
/// Flushes that can be outstanding: one for every receive that may be open, and as many for those just completed.
pub const FLUSHES: usize = 2 * RECV_REQUESTS;
/// Receives are posted in batches of this many.
pub const RECV_BATCH: usize = 64;
/// Receives for messages that go in several portions over one QP: as many as make the queue a power of two, as NICs round it.
pub const EXTRA_RECVS: usize = 192;
/// Credit writes that can be outstanding on the credit QP.
pub const CREDIT_WRS: usize = 128;
/// Reads that can be outstanding on a rail's loopback QP.
pub const FLUSH_WRS: usize = 2 * FLUSHES;
