//! Other hosts: one TCP connection for one direction between two processes. A thread at either end moves whole frames
//! between the socket and a ring like that of shared memory, so the engine knows no difference. Who may connect is for the
//! network to say: this is for test beds.
use crate::adapter::Adapter;
use crate::engine::{spawn, wait_while_one};
use crate::fabric::Host;
use crate::link::{End, Link, Peer};
use crate::qp::Address;
use crate::rc::Pieces;
use crate::registry::{SLOTS, ring_bytes};
use crate::shm::{DATA, Mapping, Ring};
use crate::wire::{Frame, HEADER, SEGMENT};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// For connecting, for the first bytes, and for the last ones on the way out.
const PATIENCE: Duration = Duration::from_secs(2);
const MAGIC: [u8; 8] = *b"softhcaT";
/// Magic, the fabric's name for the host (as a hash), slot.
const HELLO: usize = 20;
/// Connections that wait for their first bytes or carry frames; more are refused.
const MAX_INBOUND: usize = 1024;

pub(crate) struct Tcp {
    hosts: Vec<Host>,
    host: usize,
    slot: u32,
    ring_bytes: usize,
    own: Arc<Mapping>,
    inbox: Arc<Inbox>,
    listener: TcpListener,
    thread: Option<JoinHandle<()>>,
}

/// What the listener's threads hand to the engine.
struct Inbox {
    hosts: Vec<Host>,
    ring_bytes: usize,
    own: Arc<Mapping>,
    stop: AtomicBool,
    links: Mutex<Vec<Link>>,
    readers: Mutex<Vec<(TcpStream, JoinHandle<()>)>>,
}

/// The state of a connection and the ring whose thread sleeps on it.
pub(crate) struct Wire {
    ring: Arc<Mapping>,
    state: Arc<State>,
    /// The writing thread; a reading one is the listener's.
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    dead: AtomicBool,
    stop: AtomicBool,
}

impl Wire {
    pub(crate) fn wake(&self) {
        self.ring.wake();
    }

    pub(crate) fn is_alive(&self) -> bool {
        !self.state.dead.load(Ordering::Acquire)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.state.stop.store(true, Ordering::SeqCst);
        self.ring.wake();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join(); // at most PATIENCE: it only writes out what is there
        }
    }
}

fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
}

fn new_ring(bytes: usize) -> Option<(Ring, Ring)> {
    let memory = Arc::new(Mapping::anonymous(DATA + bytes).ok()?);
    Some((Ring::new(Arc::clone(&memory), bytes)?, Ring::new(memory, bytes)?))
}

/// Sleeps until the ring's other end rings, unless there is cause not to.
fn sleep_unless(ring: &Ring, awake: impl Fn(&Ring) -> bool) {
    let word = ring.memory().sleep_word();
    word.store(1, Ordering::SeqCst);
    if !awake(ring) {
        wait_while_one(word, Some(Duration::from_millis(100)));
    }
    word.store(0, Ordering::SeqCst);
}

impl Tcp {
    /// Listens, if the fabric file gives this host an address.
    pub(crate) fn open(adapter: &Adapter, slot: u32, own: Arc<Mapping>) -> io::Result<Option<Self>> {
        let hosts = adapter.fabric().hosts.clone();
        let Some(address) = hosts.get(adapter.host()).and_then(|host| process_address(host, slot)) else {
            return Ok(None);
        };
        let listener = TcpListener::bind(address)
            .map_err(|error| io::Error::new(error.kind(), format!("listening at {address}: {error}")))?;
        let ring_bytes = ring_bytes(adapter.fabric().ring_kib);
        let inbox = Arc::new(Inbox {
            hosts: hosts.clone(),
            ring_bytes,
            own: Arc::clone(&own),
            stop: AtomicBool::new(false),
            links: Mutex::default(),
            readers: Mutex::default(),
        });
        let (accepting, shared) = (listener.try_clone()?, Arc::clone(&inbox));
        let thread = spawn("soft-hca-listen", move || shared.listen(&accepting))?;
        Ok(Some(Self { hosts, host: adapter.host(), slot, ring_bytes, own, inbox, listener, thread: Some(thread) }))
    }

    /// The other host that has the address, if it is reached over TCP.
    pub(crate) fn host_of(&self, address: &Address) -> Option<usize> {
        let has = |port: &crate::fabric::Port| {
            if address.global {
                port.gids.iter().any(|gid| gid.gid.octets() == address.dgid)
            } else {
                port.lid == address.dlid
            }
        };
        let found = self.hosts.iter().position(|host| host.devices.iter().flat_map(|d| &d.ports).any(has))?;
        (found != self.host && self.hosts[found].tcp.is_some()).then_some(found)
    }

    /// A ring that leads to a process of another host; what is written meanwhile waits for the connection.
    pub(crate) fn connect(&self, host: usize, slot: u32) -> Option<(Ring, Wire)> {
        let address = process_address(self.hosts.get(host)?, slot)?;
        let (near, far) = new_ring(self.ring_bytes)?;
        let mut hello = [0; HELLO];
        hello[..8].copy_from_slice(&MAGIC);
        hello[8..16].copy_from_slice(&name_hash(&self.hosts[self.host].name).to_le_bytes());
        hello[16..].copy_from_slice(&self.slot.to_le_bytes());
        let state = Arc::new(State::default());
        let (shared, own) = (Arc::clone(&state), Arc::clone(&self.own));
        let body = move || {
            // Any error is the same to the requester: silence.
            let _ = write_frames(address, &hello, far, &shared, &own);
            shared.dead.store(true, Ordering::Release);
            own.wake();
        };
        let thread = spawn("soft-hca-tcp", body).ok()?;
        let ring = Arc::clone(near.memory());
        Some((near, Wire { ring, state, thread: Some(thread) }))
    }

    pub(crate) fn has_accepted(&self) -> bool {
        !self.inbox.links.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    pub(crate) fn accepted(&self) -> Vec<Link> {
        std::mem::take(&mut self.inbox.links.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.inbox.stop.store(true, Ordering::SeqCst);
        // SAFETY: a valid descriptor. It makes the accept under way return.
        unsafe { libc::shutdown(self.listener.as_raw_fd(), libc::SHUT_RDWR) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let readers = std::mem::take(&mut *self.inbox.readers.lock().unwrap_or_else(PoisonError::into_inner));
        for (stream, _) in &readers {
            let _ = stream.shutdown(Shutdown::Both);
        }
        for (_, thread) in readers {
            let _ = thread.join();
        }
    }
}

/// The first process of a host listens at its address, the others one port above each other.
fn process_address(host: &Host, slot: u32) -> Option<SocketAddr> {
    let mut address = host.tcp?;
    let offset = u16::try_from(slot.checked_sub(1).filter(|_| slot < SLOTS)?).ok()?;
    address.set_port(address.port().checked_add(offset)?);
    Some(address)
}

fn write_frames(to: SocketAddr, hello: &[u8], mut ring: Ring, state: &State, own: &Mapping) -> io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&to, PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(hello)?;
    let mut buffer = vec![0u8; HEADER + SEGMENT];
    loop {
        let Ok(next) = ring.read() else { return Err(io::ErrorKind::InvalidData.into()) };
        let Some((frame, data)) = next else {
            if state.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            sleep_unless(&ring, |ring| ring.has_input() || state.stop.load(Ordering::SeqCst));
            continue;
        };
        buffer[..HEADER].copy_from_slice(&frame.encode());
        let payload = &mut buffer[HEADER..HEADER + frame.len as usize];
        // SAFETY: the frame is not consumed yet; the payload is ours.
        unsafe { data.copy_to(&Pieces::one(payload.as_mut_ptr(), payload.len())) };
        stream.write_all(&buffer[..HEADER + frame.len as usize])?;
        if ring.consume(&frame) {
            own.wake();
        }
    }
}

impl Inbox {
    fn listen(self: &Arc<Self>, listener: &TcpListener) {
        while !self.stop.load(Ordering::SeqCst) {
            let Ok((stream, _)) = listener.accept() else {
                std::thread::sleep(Duration::from_millis(10)); // out of descriptors, or stopped
                continue;
            };
            let mut readers = self.readers.lock().unwrap_or_else(PoisonError::into_inner);
            readers.retain(|(_, thread)| !thread.is_finished());
            if readers.len() >= MAX_INBOUND || stream.set_read_timeout(Some(PATIENCE)).is_err() {
                continue;
            }
            let Ok(kept) = stream.try_clone() else { continue };
            let shared = Arc::clone(self);
            if let Ok(thread) = spawn("soft-hca-tcp", move || drop(shared.read_frames(stream))) {
                readers.push((kept, thread));
            }
        }
    }

    /// One inbound connection, until it ends or breaks the rules.
    fn read_frames(&self, mut stream: TcpStream) -> io::Result<()> {
        let refuse = || io::Error::from(io::ErrorKind::InvalidData);
        let mut hello = [0; HELLO];
        stream.read_exact(&mut hello)?;
        let (magic, rest) = hello.split_at(8);
        let (name, slot) = rest.split_at(8);
        let known = |host: &Host| name_hash(&host.name).to_le_bytes() == name;
        let host = self.hosts.iter().position(known).filter(|_| magic == MAGIC).ok_or_else(refuse)?;
        let slot = u32::from_le_bytes(slot.try_into().map_err(|_| refuse())?);
        stream.set_read_timeout(None)?;
        let (mut near, far) = new_ring(self.ring_bytes).ok_or_else(refuse)?;
        let state = Arc::new(State::default());
        let wire = Wire { ring: Arc::clone(near.memory()), state: Arc::clone(&state), thread: None };
        let link = Link { peer: Peer::Host(host, slot), ring: far, end: End::Wire(wire), bytes_only: true };
        self.links.lock().unwrap_or_else(PoisonError::into_inner).push(link);
        self.own.wake();
        let result = self.pump(&mut stream, &mut near, &state);
        state.dead.store(true, Ordering::Release);
        let _ = stream.shutdown(Shutdown::Both);
        result
    }

    fn pump(&self, stream: &mut TcpStream, ring: &mut Ring, state: &State) -> io::Result<()> {
        let mut buffer = vec![0u8; SEGMENT];
        let mut header = [0; HEADER];
        loop {
            stream.read_exact(&mut header)?;
            let frame = Frame::decode(&header).ok_or(io::ErrorKind::InvalidData)?;
            let payload = &mut buffer[..frame.len as usize];
            stream.read_exact(payload)?;
            let payload = Pieces::one(payload.as_mut_ptr(), payload.len());
            while !ring.write(&frame, &payload) {
                // Dropped by the engine, or the whole process is on its way out.
                if state.stop.load(Ordering::SeqCst) || self.stop.load(Ordering::SeqCst) {
                    return Ok(());
                }
                sleep_unless(ring, |ring| ring.is_drained());
            }
            self.own.wake();
        }
    }
}
