//! What belongs to one communicator of NCCL (from v11 on): its traffic class and what NCCL expects of its traffic.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::transfer::Profiler;

use super::NetError;

/// What a communicator wants of its connections.
#[derive(Debug, Clone, Default)]
pub struct Wishes {
    /// Its traffic class.
    pub class: Option<u8>,
    /// Who is told of every work request.
    pub profiler: Option<Arc<dyn Profiler>>,
}

/// Communicators that are open.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// What NCCL expects of a communicator's traffic, as it said last. -1, or all bits: unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Peers at a time, and flows to each: least and most.
    pub send: [(i32, i32); 2],
    pub recv: [(i32, i32); 2],
    /// Bits of NCCL's collectives, algorithms and protocols.
    pub op: u32,
    pub algo: u32,
    pub proto: u32,
}

impl fmt::Display for Attributes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |f: &mut fmt::Formatter<'_>, what, [peers, flows]: [(i32, i32); 2]| {
            write!(f, "{what} {}..{} peers at a time, {}..{} flows each; ", peers.0, peers.1, flows.0, flows.1)
        };
        side(f, "sends to", self.send)?;
        side(f, "receives from", self.recv)?;
        write!(f, "operations {:#x}, algorithms {:#x}, protocols {:#x}", self.op, self.algo, self.proto)
    }
}

/// A communicator.
#[derive(Debug)]
pub struct CommContext {
    id: u64,
    class: Result<Option<u8>, NetError>,
    profiler: Option<Arc<dyn Profiler>>,
    attributes: Mutex<Option<Attributes>>,
}

impl CommContext {
    /// `id` is NCCL's own, the same on all ranks; `class` the traffic class that the communicator asks for.
    pub(super) fn open(id: u64, class: Result<Option<u8>, NetError>, profiler: Option<Arc<dyn Profiler>>) -> Self {
        OPEN.fetch_add(1, Ordering::Relaxed);
        match class {
            Ok(Some(class)) => tracing::info!(target: "net", "communicator {id:#x}, traffic class {class}"),
            _ => tracing::info!(target: "net", "communicator {id:#x}"),
        }
        Self { id, class, profiler, attributes: Mutex::default() }
    }

    pub(super) fn any_open() -> bool {
        OPEN.load(Ordering::Relaxed) > 0
    }

    /// What it wants of a connection that it makes; an error where that can't be had.
    pub fn wishes(&self) -> Result<Wishes, NetError> {
        Ok(Wishes { class: self.class.clone()?, profiler: self.profiler.clone() })
    }

    pub fn profiler(&self) -> Option<Arc<dyn Profiler>> {
        self.profiler.clone()
    }

    /// Keeps what NCCL expects. It decides nothing: when a connection is made NCCL says "any protocol", and what it says
    /// later, operation by operation, is of connections that stand already (a send of LL goes over one QP as it is, being
    /// small). So a connection is made for all that may come.
    pub fn record(&self, attributes: Attributes) {
        let mut known = self.attributes.lock().unwrap_or_else(PoisonError::into_inner);
        if *known == Some(attributes) {
            return;
        }
        if known.replace(attributes).is_none() {
            tracing::info!(target: "net", "communicator {:#x}: {attributes}", self.id);
        } else {
            tracing::trace!(target: "net", "communicator {:#x}: {attributes}", self.id);
        }
    }

    /// What NCCL said last.
    pub fn attributes(&self) -> Option<Attributes> {
        *self.attributes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CommContext {
    fn drop(&mut self) {
        OPEN.fetch_sub(1, Ordering::Relaxed);
        tracing::info!(target: "net", "communicator {:#x} is finished", self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_nccl_said_last_is_kept() {
        let context = CommContext::open(7, Ok(Some(106)), None);
        assert_eq!((context.wishes().map(|w| w.class), context.attributes()), (Ok(Some(106)), None));
        let side = [(1, 4), (1, 2)];
        let first = Attributes { send: side, recv: side, op: u32::MAX, algo: u32::MAX, proto: u32::MAX };
        context.record(first);
        let then = Attributes { proto: 1, ..first };
        context.record(then);
        assert_eq!(context.attributes(), Some(then));
        let text = then.to_string();
        assert!(text.contains("1..4 peers") && text.contains("protocols 0x1"), "{text}");
    }
}
