//! The connecting side's set-up: dial, offer, take QPs to RTS with the answer, say ready. A send comm comes out.

use std::cell::UnsafeCell;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::memory::Pages;
use crate::rendezvous::{Channel, Connector, Handle, Watcher};
use crate::transfer::credit::{CreditRing, Stride};
use crate::transfer::{CountPath, MAX_RAILS, Profiled, Profiler, QpSet, Sender, SenderParts};
use crate::verbs::{Access, Mr};

use super::alert::Alert;
use super::comm::{Base, Comm, SendComm};
use super::context::Wishes;
use super::device::{Device, Port};
use super::endpoint::{COUNT_BYTES, Draft, Role, max_write};
use super::hello::{Hello, HelloRail, Who, kind};
use super::registration::Paths;
use super::stall::{self, Vigil};
use super::{Code, NetError, control, fork};

/// How long a listener may be out of reach: it was there before its handle was.
const DIAL: Duration = Duration::from_secs(60);
/// How long our own failure may wait for the peer to be told of it.
const TELL: Duration = Duration::from_secs(5);

/// A connect that NCCL polls.
#[derive(Debug)]
pub(super) struct Connecting {
    id: u64,
    deadline: Instant,
    stage: Stage,
}

/// What the connecting side holds while it waits.
#[derive(Debug)]
struct Side {
    draft: Draft,
    /// With the word of the count at the end.
    ring: (Vec<Mr>, Pages),
    device: Arc<Device>,
    hints: bool,
    profiler: Option<Arc<dyn Profiler>>,
}

/// What the word of the count takes: it shares no cache line with the ring.
pub(super) const COUNT_LINE: usize = 64;

#[derive(Debug)]
enum Stage {
    Dialing(Connector, Side),
    /// This side can't. The peer, which waits for it, is told first.
    Declining(Connector, NetError),
    Offered(Channel, Side),
    Raising(Channel, Side, Box<Hello>),
}

/// The outcome of a step.
pub(super) enum Step {
    Again(Box<Connecting>),
    Done(Box<Comm>),
}

/// This process, for the peer's messages.
pub(super) fn ourselves() -> Who {
    let mut name = [0u8; 256];
    // SAFETY: room for a name and its size.
    let rc = unsafe { libc::gethostname(name.as_mut_ptr().cast(), name.len() - 1) };
    let host = if rc == 0 {
        let end = name.iter().position(|&b| b == 0).unwrap_or(0);
        String::from_utf8_lossy(&name[..end]).into_owned()
    } else {
        "unknown host".to_owned()
    };
    Who { version: env!("CARGO_PKG_VERSION").to_owned(), host, pid: std::process::id() }
}

/// What is said of a set-up that ran out of time.
pub(super) fn too_late(what: &str, peer: &str, limit: Duration) -> NetError {
    NetError::new(
        Code::Remote,
        format!(
            "connection set-up with {peer} did not finish in {} s (waiting {what}): is the peer's process alive and its log free of \
             errors? NCCL_NET_RDMA_CONNECT_TIMEOUT sets the limit",
            limit.as_secs()
        ),
    )
}

impl Side {
    fn make(device: &Arc<Device>, wishes: Wishes, config: &Config) -> Result<Self, NetError> {
        let Wishes { class, profiler } = wishes;
        if device.rails.is_empty() {
            return Err(NetError::new(Code::System, "no RDMA device can be used and NCCL_NET_RDMA_STRICT is set"));
        }
        // The ring for as many rails as the two sides can agree on, on each of them.
        let pages = Pages::map(Stride::for_rails(device.rails.len()).ring_bytes() + COUNT_LINE)
            .map_err(|e| NetError::new(Code::System, format!("memory for the credit ring: {e}")))?;
        let mut mrs = Vec::with_capacity(device.rails.len());
        for rail in &device.rails {
            mrs.push(register_own(rail, &pages, 0..pages.len(), Access::LOCAL_WRITE | Access::REMOTE_WRITE)?);
        }
        let draft = Draft::create(Role::Send, &device.rails, config.ib_qps_per_connection, 0, class, config)?;
        let device = Arc::clone(device);
        Ok(Self { draft, ring: (mrs, pages), device, hints: config.recv_hint, profiler })
    }
}

impl Connecting {
    pub(super) fn start(device: &Arc<Device>, handle: &Handle, wishes: Wishes, config: &Config, now: Instant) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let deadline = now + config.connect_timeout;
        let stage = match Side::make(device, wishes, config) {
            Ok(side) => Stage::Dialing(Connector::new(handle, None, now, deadline).reach_by(now + DIAL), side),
            Err(e) => Stage::Declining(Connector::new(handle, None, now, deadline.min(now + TELL)), e),
        };
        Self { id: NEXT.fetch_add(1, Ordering::Relaxed), deadline, stage }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    /// NCCL has stopped polling it.
    pub(super) fn abandoned(&self, now: Instant) -> bool {
        now > self.deadline + Duration::from_secs(60)
    }

    /// Goes as far as it can now.
    pub(super) fn step(self, config: &Config, now: Instant) -> Result<Step, NetError> {
        let (id, deadline) = (self.id, self.deadline);
        let mut stage = self.stage;
        let limit = config.connect_timeout;
        loop {
            let again = |stage| Ok(Step::Again(Box::new(Self { id, deadline, stage })));
            stage = match stage {
                Stage::Dialing(mut connector, side) => match connector.poll(now) {
                    Poll::Pending => return again(Stage::Dialing(connector, side)),
                    Poll::Ready(Err(e)) => return Err(NetError::new(Code::Remote, e.to_string())),
                    Poll::Ready(Ok(mut channel)) => {
                        let rkeys: Vec<u32> = side.ring.0.iter().map(Mr::rkey).collect();
                        let offer = Hello {
                            who: ourselves(),
                            class: side.draft.class(),
                            ring_address: side.ring.1.address(),
                            max_write: 0,
                            hints: side.hints,
                            count_address: 0,
                            count_rkey: 0,
                            rails: side.draft.describe(&rkeys),
                            pairs: Vec::new(),
                        };
                        channel.send(kind::OFFER, &offer.encode()).map_err(|e| lost(&channel, &e.to_string()))?;
                        Stage::Offered(channel, side)
                    }
                },
                Stage::Declining(mut connector, error) => match connector.poll(now) {
                    Poll::Pending => return again(Stage::Declining(connector, error)),
                    Poll::Ready(Err(_)) => return Err(error),
                    Poll::Ready(Ok(mut channel)) => return Err(refuse_with(&mut channel, error)),
                },
                Stage::Offered(mut channel, side) => match receive(&mut channel)? {
                    None if now > deadline => {
                        return Err(too_late("for its answer", &channel.peer_addr().to_string(), limit));
                    }
                    None => return again(Stage::Offered(channel, side)),
                    Some((kind::ANSWER, body)) => {
                        let answer = Hello::decode(&body).map_err(|e| refuse(&mut channel, e.to_string()))?;
                        let side = agree(side, &answer).map_err(|e| refuse(&mut channel, e))?;
                        Stage::Raising(channel, side, Box::new(answer))
                    }
                    Some((kind, _)) => return Err(refuse(&mut channel, format!("unexpected message {kind}"))),
                },
                Stage::Raising(mut channel, mut side, answer) => {
                    if let Some((kind, _)) = receive(&mut channel)? {
                        return Err(refuse(&mut channel, format!("unexpected message {kind}")));
                    }
                    match side.draft.raise(&answer.rails, 0, |_| 0, config, now) {
                        Poll::Pending if now > deadline => {
                            return Err(refuse_with(
                                &mut channel,
                                too_late("for the NIC to resolve the peer's address", &answer.who.to_string(), limit),
                            ));
                        }
                        Poll::Pending => return again(Stage::Raising(channel, side, answer)),
                        Poll::Ready(Err(e)) => return Err(refuse_with(&mut channel, e)),
                        Poll::Ready(Ok(())) => {
                            let terms = control::keep_alive(config).map_or_else(Vec::new, |k| k.encode().to_vec());
                            channel.send(kind::READY, &terms).map_err(|e| lost(&channel, &e.to_string()))?;
                            return finish(channel, side, &answer, config).map(Step::Done);
                        }
                    }
                }
            };
        }
    }
}

/// Memory of our own for a rail's device.
pub(super) fn register_own(port: &Port, pages: &Pages, part: Range<usize>, access: Access) -> Result<Mr, NetError> {
    debug_assert!(part.end <= pages.len());
    // SAFETY: the comm drops the region before the pages.
    unsafe { Mr::register(port.registrar.pd(), pages.address() + part.start as u64, part.len(), access) }
        .map_err(|e| NetError::new(Code::System, e.to_string()))
}

/// A message, or the failure that the peer or the socket reports.
pub(super) fn receive(channel: &mut Channel) -> Result<Option<(u8, Vec<u8>)>, NetError> {
    match channel.recv() {
        Poll::Pending => Ok(None),
        Poll::Ready(Ok(frame)) if frame.kind == kind::FAILED => Err(NetError::new(
            Code::Remote,
            format!(
                "the peer at {} gave up the connection set-up: {}",
                channel.peer_addr(),
                String::from_utf8_lossy(&frame.body)
            ),
        )),
        Poll::Ready(Ok(frame)) => Ok(Some((frame.kind, frame.body))),
        Poll::Ready(Err(e)) => Err(lost(channel, &e.to_string())),
    }
}

pub(super) fn lost(channel: &Channel, why: &str) -> NetError {
    NetError::new(
        Code::Remote,
        format!(
            "the connection set-up with {} broke off: {why}; its process may have ended, see its log",
            channel.peer_addr()
        ),
    )
}

/// Tells the peer why, so that both logs name one cause.
pub(super) fn refuse(channel: &mut Channel, why: String) -> NetError {
    let text = format!("{why}; in the connection set-up with {}", channel.peer_addr());
    refuse_with(channel, NetError::new(Code::Remote, text))
}

pub(super) fn refuse_with(channel: &mut Channel, error: NetError) -> NetError {
    // The peer may be gone; our own line says what is needed.
    let _ = channel.send(kind::FAILED, error.text.as_bytes());
    error
}

/// Checks the answer against what was offered, and keeps the rails and QPs that both agreed on.
fn agree(mut side: Side, answer: &Hello) -> Result<Side, String> {
    if answer.pairs.is_empty() || answer.pairs.len() != answer.rails.len() {
        return Err("the answer pairs no rails".to_owned());
    }
    let own: Vec<usize> = answer.pairs.iter().map(|&(a, _)| usize::from(a)).collect();
    let mut sorted = own.clone();
    sorted.sort_unstable();
    sorted.dedup();
    if sorted.len() != own.len() || sorted.last().is_some_and(|&i| i >= side.ring.0.len()) {
        return Err("the answer pairs rails that were not offered".to_owned());
    }
    if answer.hints && !side.hints {
        return Err("the answer has hinted receives although none were offered".to_owned());
    }
    let qps = answer.rails[0].qps.len();
    if qps == 0 || answer.rails.iter().any(|r| r.qps.len() != qps) {
        return Err("the answer's rails differ in their QPs".to_owned());
    }
    side.draft.keep(&own, qps);
    let largest = max_write(&side.draft.ports(), &answer.rails);
    if answer.max_write != largest || largest == 0 {
        return Err(format!("the answer says writes of {} bytes where the ports take {largest}", answer.max_write));
    }
    // The ring's keys follow the rails; those of rails that stay unused are given up.
    let mut keys: Vec<Option<Mr>> = side.ring.0.drain(..).map(Some).collect();
    side.ring.0 = own.iter().filter_map(|&i| keys[i].take()).collect();
    Ok(side)
}

/// Speeds of the pairs: a rail is as fast as its slower end.
fn speeds(ports: &[Arc<Port>], peer: &[HelloRail]) -> [u32; MAX_RAILS] {
    let mut speed = [1; MAX_RAILS];
    for (place, (own, far)) in speed.iter_mut().zip(ports.iter().zip(peer)) {
        *place = own.speed.min(far.speed).max(1);
    }
    speed
}

/// What both directions say when a connection stands; of an MTU that differs once a peer, as it may have hundreds of them.
pub(super) fn announce(what: &str, device: &Device, qps: &QpSet, ports: &[Arc<Port>], peer: &Hello, routes: &[String]) {
    for (port, far) in ports.iter().zip(&peer.rails) {
        let (own, theirs) = (port.attr.active_mtu, u32::from(far.mtu));
        if own != theirs {
            port.warn_once(format!(
                "{}:{} has MTU {} and {}:{} of peer {} has {}: connections use the smaller",
                port.name,
                port.num,
                crate::topology::port::mtu_bytes(own),
                far.device,
                far.port,
                peer.who,
                crate::topology::port::mtu_bytes(theirs),
            ));
        }
    }
    if tracing::enabled!(target: "init", tracing::Level::INFO) {
        let lanes = qps.lanes();
        let mtu = ports
            .iter()
            .zip(&peer.rails)
            .map(|(p, f)| crate::topology::port::mtu_bytes(p.attr.active_mtu.min(u32::from(f.mtu))).to_string())
            .collect::<Vec<_>>()
            .join("/");
        tracing::info!(
            target: "init",
            "{what} on {} with peer {}: {} rail(s) x {} QP(s), MTU {mtu}, takes {} ({}); {}",
            device.name.to_string_lossy(),
            peer.who,
            lanes.rails,
            lanes.qps,
            device.gpu.ways(),
            device.gpu.choice().rule,
            routes.join("; "),
        );
    }
}

fn finish(channel: Channel, side: Side, answer: &Hello, config: &Config) -> Result<Box<Comm>, NetError> {
    let Side { draft, ring, device, profiler, .. } = side;
    let inline = draft.max_inline() >= COUNT_BYTES;
    let ports = draft.ports();
    let routes = draft.routes(&answer.rails);
    let qps = Arc::new(draft.finish(|_| None)?);
    announce("sending", &device, &qps, &ports, answer, &routes);
    // SAFETY: the pages are mapped, page aligned, large enough for the rails agreed on (no more than offered), and dropped
    // after the sender.
    let credits = unsafe { CreditRing::new(ring.1.base(), Stride::for_rails(ports.len())) };
    // SAFETY: inside the pages, behind the ring.
    let word = unsafe { ring.1.base().add(ring.1.len() - COUNT_LINE) }.cast();
    let sender = Sender::new(SenderParts {
        post: Profiled::new(Arc::clone(&qps), profiler, qps.lanes(), |qp| qps.qp_num(qp)),
        credits,
        lanes: qps.lanes(),
        speed: speeds(&ports, &answer.rails),
        split_threshold: config.split_threshold,
        spread: if config.ib_split_data_on_qps { qps.lanes().qps } else { 1 },
        max_write: answer.max_write,
        chunk: config.staging_chunk,
        count: answer.hints.then(|| CountPath {
            word,
            lkey: ring.0[0].lkey(),
            address: answer.count_address,
            rkey: answer.count_rkey,
            inline,
        }),
    });
    let base = base(channel, &device, qps, ports, routes, answer.who.clone(), config)?;
    Ok(Box::new(Comm::Send(SendComm { hot: UnsafeCell::new(sender), told: AtomicBool::new(false), base, _ring: ring })))
}

/// What both directions need beside their data path.
pub(super) fn base(
    channel: Channel,
    device: &Device,
    qps: Arc<QpSet>,
    ports: Vec<Arc<Port>>,
    routes: Vec<String>,
    peer: Who,
    config: &Config,
) -> Result<Base, NetError> {
    let alert = Arc::new(Alert::default());
    // Devices number their QPs each for itself.
    for (rail, port) in ports.iter().enumerate() {
        port.events.remember(port.num, qps.qp_nums(rail), &alert);
    }
    let events = Arc::new(control::Events::new(&alert, &peer, &routes[0]));
    let control = Watcher::global().and_then(|w| w.adopt(channel, events)).map_err(|e| {
        NetError::new(Code::System, format!("the control channel to peer {peer} can't be watched: {e}"))
    })?;
    alert.stands(control);
    fork::enroll(&alert);
    let nic_patience = match config.ib_timeout {
        0 => f64::INFINITY,
        t => 4.096e-6 * 2f64.powi(i32::from(t)) * f64::from(u32::from(config.ib_retry_cnt) + 1),
    };
    let limit = stall::limit(config, nic_patience);
    if let Some(limit) = limit {
        alert.watch(Vigil::new(limit));
        stall::enroll(&alert)
            .map_err(|e| NetError::new(Code::System, format!("the connection to peer {peer} can't be watched: {e}")))?;
    }
    Ok(Base {
        _connected: ports.iter().map(|port| port.registrar.connected()).collect(),
        paths: Paths::new(&device.gpu, config, stall::copies_limit(config, limit)),
        alert,
        qps,
        ports,
        routes,
        peer,
        nic_patience,
        graveyard: Mutex::new(Vec::new()),
        fenced: Mutex::new(false),
        retired: AtomicBool::new(false),
    })
}
