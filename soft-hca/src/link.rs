//! Links to other processes: who is behind an address, and the rings towards and from them.
use crate::adapter::Adapter;
use crate::qp::{Address, INDEX_BITS};
use crate::rc::Pieces;
use crate::registry::{self, Neighbour, Registry};
use crate::shm::{Mapping, Ring};
use crate::tcp::{Tcp, Wire};
use crate::wire::Frame;
use std::io;
use std::sync::Arc;

/// Who is at the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Peer {
    Local,
    /// A process of this machine, by its slot.
    Slot(u32),
    /// A process of another host of the fabric file, by that host's place in it and the slot there.
    Host(usize, u32),
}

pub(crate) enum Sent {
    Yes,
    /// The reader has to make room first.
    Full,
    /// Nobody is there.
    Gone,
}

/// What is at the far end of a ring.
pub(crate) enum End {
    Process(Neighbour),
    Wire(Wire),
    /// A process that has left since it wrote.
    Nobody,
}

impl End {
    fn wake(&self) {
        match self {
            Self::Process(neighbour) => neighbour.memory.wake(),
            Self::Wire(wire) => wire.wake(),
            Self::Nobody => {}
        }
    }

    fn is_alive(&self) -> bool {
        match self {
            Self::Process(neighbour) => neighbour.is_alive(),
            Self::Wire(wire) => wire.is_alive(),
            Self::Nobody => false,
        }
    }
}

pub(crate) struct Link {
    pub(crate) peer: Peer,
    pub(crate) ring: Ring,
    pub(crate) end: End,
    /// The peer can't reach GPU memory of this process.
    pub(crate) bytes_only: bool,
}

pub(crate) struct Links {
    own: Arc<Mapping>,
    slot: u32,
    registry: Option<Registry>,
    tcp: Option<Tcp>,
    outgoing: Vec<Link>,
    incoming: Vec<Link>,
    /// Slots whose process is found gone, or another one.
    departed: Vec<u32>,
}

impl Links {
    /// Joins the other processes; without a place to meet them, peers in this process still work.
    pub(crate) fn open(adapter: &Adapter) -> io::Result<Self> {
        let mut links = Self {
            own: Arc::new(Mapping::anonymous(4096)?),
            slot: 1,
            registry: None,
            tcp: None,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            departed: Vec::new(),
        };
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
        links.tcp = Tcp::open(adapter, links.slot, Arc::clone(&links.own))
            .inspect_err(|error| eprintln!("soft-hca: other hosts can't be reached: {error}"))
            .unwrap_or(None);
        Ok(links)
    }

    pub(crate) fn own_memory(&self) -> Arc<Mapping> {
        Arc::clone(&self.own)
    }

    pub(crate) fn slot(&self) -> u32 {
        self.slot
    }

    pub(crate) fn locate(&self, address: &Address, dest: u32) -> Peer {
        let slot = dest >> INDEX_BITS;
        if let Some(host) = self.tcp.as_ref().and_then(|tcp| tcp.host_of(address)) {
            return Peer::Host(host, slot);
        }
        if slot == self.slot { Peer::Local } else { Peer::Slot(slot) }
    }

    pub(crate) fn send(&mut self, peer: Peer, address: &Address, frame: &Frame, payload: &Pieces) -> Sent {
        let at = match self.outgoing.iter().position(|link| link.peer == peer) {
            Some(at) => at,
            None => match self.connect(peer, address) {
                Some(at) => at,
                None => return Sent::Gone,
            },
        };
        let link = &mut self.outgoing[at];
        if link.ring.write(frame, payload) {
            link.end.wake();
            return Sent::Yes;
        }
        if link.end.is_alive() {
            return Sent::Full;
        }
        self.forget(peer);
        Sent::Gone
    }

    fn connect(&mut self, peer: Peer, address: &Address) -> Option<usize> {
        let (ring, end) = match peer {
            Peer::Local => return None,
            Peer::Slot(slot) => {
                let registry = self.registry.as_ref()?;
                let neighbour = registry.neighbour(slot, Some(address))?;
                (registry.open_ring(slot, &neighbour), End::Process(neighbour))
            }
            Peer::Host(host, slot) => {
                let (ring, wire) = self.tcp.as_ref()?.connect(host, slot)?;
                (Ok(ring), End::Wire(wire))
            }
        };
        let ring = ring.inspect_err(|error| eprintln!("soft-hca: no shared memory for {peer:?}: {error}")).ok()?;
        self.outgoing.push(Link { peer, ring, end, bytes_only: false });
        Some(self.outgoing.len() - 1)
    }

    /// Tells a process something that is of no queue pair, if there is a link to it.
    pub(crate) fn tell(&mut self, slot: u32, frame: &Frame) -> Sent {
        let Some(link) = self.outgoing.iter_mut().find(|link| link.peer == Peer::Slot(slot)) else { return Sent::Gone };
        if link.ring.write(frame, &Pieces::none()) {
            link.end.wake();
            return Sent::Yes;
        }
        if link.end.is_alive() { Sent::Full } else { Sent::Gone }
    }

    pub(crate) fn takes_references(&self, peer: Peer) -> bool {
        !self.outgoing.iter().any(|link| link.peer == peer && link.bytes_only)
    }

    pub(crate) fn refuses_references(&mut self, peer: Peer) {
        for link in self.outgoing.iter_mut().filter(|link| link.peer == peer) {
            link.bytes_only = true;
        }
    }

    /// The process that writes from a slot.
    pub(crate) fn process(&self, slot: u32) -> Option<u32> {
        let link = self.incoming.iter().find(|link| link.peer == Peer::Slot(slot))?;
        match &link.end {
            End::Process(neighbour) => Some(neighbour.pid()),
            _ => None,
        }
    }

    fn forget(&mut self, peer: Peer) {
        self.outgoing.retain(|link| link.peer != peer);
        if let (Peer::Slot(slot), Some(registry)) = (peer, &self.registry) {
            self.departed.push(slot);
            registry.close_ring(slot);
        }
    }

    /// Is the peer alive, with frames of ours still to read?
    pub(crate) fn is_behind(&mut self, peer: Peer) -> bool {
        let Some(link) = self.outgoing.iter().find(|link| link.peer == peer) else { return false };
        if !link.end.is_alive() {
            self.forget(peer);
            return false;
        }
        !link.ring.is_drained()
    }

    /// Takes in rings that others opened. True if there was one.
    pub(crate) fn accept(&mut self) -> bool {
        let mut new = self.tcp.as_ref().map_or_else(Vec::new, Tcp::accepted);
        if let Some(registry) = self.registry.as_mut() {
            for slot in registry.knocks() {
                let found = registry.accept(slot);
                new.extend(found.map(|(ring, neighbour)| {
                    let end = neighbour.map_or(End::Nobody, End::Process);
                    Link { peer: Peer::Slot(slot), ring, end, bytes_only: false }
                }));
            }
        }
        if new.is_empty() {
            return false;
        }
        let departed = &mut self.departed;
        let mut keep = |link: &Link, keep: bool| {
            if let (false, Peer::Slot(slot)) = (keep, link.peer) {
                departed.push(slot);
            }
            keep
        };
        self.incoming.retain(|link| keep(link, link.ring.has_input() || link.end.is_alive()));
        for link in new {
            self.incoming.retain(|old| keep(old, old.peer != link.peer));
            self.incoming.push(link);
        }
        true
    }

    /// Slots whose process was found gone since the last call.
    pub(crate) fn departed(&mut self) -> Vec<u32> {
        std::mem::take(&mut self.departed)
    }

    /// Has the process in a slot yet to read what was sent to it?
    pub(crate) fn owes(&self, slot: u32) -> bool {
        let link = self.outgoing.iter().find(|link| link.peer == Peer::Slot(slot));
        link.is_some_and(|link| !link.ring.is_drained() && link.end.is_alive())
    }

    pub(crate) fn inbound(&self) -> usize {
        self.incoming.len()
    }

    pub(crate) fn has_input(&self) -> bool {
        self.registry.as_ref().is_some_and(Registry::has_knocks)
            || self.tcp.as_ref().is_some_and(Tcp::has_accepted)
            || self.incoming.iter().any(|link| link.ring.has_input())
    }

    /// The next frame of an inbound link. What breaks the rules is cut off.
    pub(crate) fn receive(&mut self, at: usize) -> Option<(Peer, Frame, Pieces)> {
        let link = self.incoming.get(at)?;
        let slot = match link.peer {
            Peer::Local => self.slot,
            Peer::Slot(slot) | Peer::Host(_, slot) => slot,
        };
        match link.ring.read() {
            Ok(None) => None,
            Ok(Some((frame, data))) if frame.src >> INDEX_BITS == slot => Some((link.peer, frame, data)),
            _ => {
                eprintln!("soft-hca: {:?} sent what is no frame; it is cut off", link.peer);
                self.incoming.remove(at);
                None
            }
        }
    }

    pub(crate) fn consumed(&mut self, at: usize, frame: &Frame) {
        if let Some(link) = self.incoming.get_mut(at)
            && link.ring.consume(frame)
        {
            link.end.wake();
        }
    }
}
