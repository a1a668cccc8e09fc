//! Links to other processes: who is behind an address, and the rings towards and from them.
use crate::adapter::Adapter;
use crate::qp::{Address, INDEX_BITS};
use crate::rc::Pieces;
use crate::registry::{self, Neighbour, Registry};
use crate::shm::{Mapping, Ring};
use crate::wire::Frame;
use std::io;
use std::sync::Arc;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Local,
    /// A process of this machine, by its slot.
    Slot(u32),
}

pub(crate) enum Sent {
    Yes,
    /// The reader has to make room first.
    Full,
    /// Nobody is there.
    Gone,
}

struct Link {
    slot: u32,
    ring: Ring,
    neighbour: Neighbour,
}

pub(crate) struct Links {
    own: Arc<Mapping>,
    slot: u32,
    registry: Option<Registry>,
    outgoing: Vec<Link>,
    incoming: Vec<Link>,
}

impl Links {
    /// Joins the other processes; without a place to meet them, peers in this process still work.
    pub(crate) fn open(adapter: &Adapter) -> io::Result<Self> {
        let mut links =
            Self { own: Arc::new(Mapping::anonymous(4096)?), slot: 1, registry: None, outgoing: Vec::new(), incoming: Vec::new() };
        if !adapter.is_threaded() {
            return Ok(links);
        }
        let dir = adapter.fabric().registry.clone().unwrap_or_else(registry::default_dir);
        match Registry::join(&dir, &adapter.addresses(), registry::ring_bytes(adapter.fabric().ring_kib)) {
            Ok(registry) => {
                (links.slot, links.own) = (registry.slot(), registry.memory());
                links.registry = Some(registry);
            }
            Err(error) => eprintln!("soft-hca: {}: {error}; only peers in this process can be reached", dir.display()),
        }
        Ok(links)
    }

    pub(crate) fn own_memory(&self) -> Arc<Mapping> {
        Arc::clone(&self.own)
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn locate(&self, _address: &Address, dest: u32) -> Peer {
        let slot = dest >> INDEX_BITS;
        if slot == self.slot { Peer::Local } else { Peer::Slot(slot) }
    }

    pub(crate) fn send(&mut self, peer: Peer, address: &Address, frame: &Frame, payload: &Pieces) -> Sent {
        let Peer::Slot(slot) = peer else { return Sent::Gone };
        let at = match self.outgoing.iter().position(|link| link.slot == slot) {
            Some(at) => at,
            None => match self.connect(slot, address) {
                Some(at) => at,
                None => return Sent::Gone,
            },
        };
        let link = &mut self.outgoing[at];
        if link.ring.write(frame, payload) {
            link.neighbour.memory.wake();
            return Sent::Yes;
        }
        if link.neighbour.is_alive() {
            return Sent::Full;
        }
        self.forget(slot);
        Sent::Gone
    }

    fn connect(&mut self, slot: u32, address: &Address) -> Option<usize> {
        let registry = self.registry.as_ref()?;
        let neighbour = registry.neighbour(slot, Some(address))?;
        match registry.open_ring(slot, &neighbour) {
            Ok(ring) => {
                self.outgoing.push(Link { slot, ring, neighbour });
                Some(self.outgoing.len() - 1)
            }
            Err(error) => {
                eprintln!("soft-hca: no shared memory for a peer (slot {slot}): {error}");
                None
            }
        }
    }

    fn forget(&mut self, slot: u32) {
        self.outgoing.retain(|link| link.slot != slot);
        if let Some(registry) = &self.registry {
            registry.close_ring(slot);
        }
    }

    /// Is the peer alive, with frames of ours still to read?
    pub(crate) fn is_behind(&mut self, peer: Peer) -> bool {
        let Peer::Slot(slot) = peer else { return false };
        let Some(link) = self.outgoing.iter().find(|link| link.slot == slot) else { return false };
        if !link.neighbour.is_alive() {
            self.forget(slot);
            return false;
        }
        !link.ring.is_drained()
    }

    /// Takes in rings that others opened. True if there was one.
    pub(crate) fn accept(&mut self) -> bool {
        let Some(registry) = self.registry.as_mut() else { return false };
        let knocks = registry.knocks();
        if knocks.is_empty() {
            return false;
        }
        self.incoming.retain(|link| link.ring.has_input() || link.neighbour.is_alive());
        for slot in knocks {
            if let Some((ring, neighbour)) = registry.accept(slot) {
                self.incoming.retain(|link| link.slot != slot);
                self.incoming.push(Link { slot, ring, neighbour });
            }
        }
        true
    }

    pub(crate) fn inbound(&self) -> usize {
        self.incoming.len()
    }

    pub(crate) fn has_input(&self) -> bool {
        self.registry.as_ref().is_some_and(Registry::has_knocks) || self.incoming.iter().any(|link| link.ring.has_input())
    }

    /// The next frame of an inbound link. What breaks the rules is cut off.
    pub(crate) fn receive(&mut self, at: usize) -> Option<(Peer, Frame, Pieces)> {
        let link = self.incoming.get(at)?;
        match link.ring.read() {
            Ok(None) => None,
            Ok(Some((frame, data))) if frame.src >> INDEX_BITS == link.slot => Some((Peer::Slot(link.slot), frame, data)),
            _ => {
                eprintln!("soft-hca: slot {} sent what is no frame; it is cut off", link.slot);
                self.incoming.remove(at);
                None
            }
        }
    }

    pub(crate) fn consumed(&mut self, at: usize, frame: &Frame) {
        if let Some(link) = self.incoming.get_mut(at) {
            if link.ring.consume(frame) {
                link.neighbour.memory.wake();
            }
        }
    }
}
