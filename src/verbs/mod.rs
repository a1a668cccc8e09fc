//! A safe wrapper over libibverbs, which is loaded at run time: the plugin loads on machines that lack it.
//!
//! Ownership runs child-holds-parent ([`Mr`] holds [`Pd`] holds [`Context`] holds [`Library`]), so destruction runs in
//! reverse order of creation by construction, also half-way through a failed set-up. Queue pairs carry their state in
//! their type: [`Qp<Reset>`] → [`Qp<Init>`] → [`Qp<Rtr>`] → [`Qp<Rts>`], and only the last can post a send.
//!
//! Control calls go through symbols found with `dlvsym`; the data path goes through the context's own function table
//! (`ibv_context.ops`), as the inline functions of `<infiniband/verbs.h>` do. Types come from `ibverbs-sys`; none of its
//! functions is called, since that would make libibverbs a load-time need of the plugin.

mod completion;
mod context;
mod cq;
mod error;
mod library;
mod memory;
mod qp;

pub use completion::{Arrived, Completion, Failure, Wc, WcBatch};
pub use context::{AsyncEvent, Context, DeviceAttr, GidRecord, Pd, PortAttr};
pub use cq::Cq;
pub use error::VerbsError;
pub use library::{DeviceList, Ece, Library, LoadError};
pub use memory::{Access, Mr};
pub use qp::{AddressVector, Init, Qp, QpCaps, Receives, Refused, Reset, Rtr, RtrAttr, Rts, RtsAttr, WriteWr};
