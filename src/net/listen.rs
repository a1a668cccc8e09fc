//! The accepting side: a listener, and for each peer that proved itself the set-up of a recv comm.

use std::cell::UnsafeCell;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use crate::config::Config;
use crate::memory::Pages;
use crate::rendezvous::{Channel, HANDLE_BYTES, KeepAlive, Limits, Listener};
use crate::topology::{ifaces, rails};
use crate::transfer::credit::{CreditRing, Stride};
use crate::transfer::{Profiler, QpSet, Receiver, ReceiverParts};
use crate::verbs::{Access, Mr, Qp, Rts};

use super::comm::{Comm, RecvComm};
use super::connect::{
    COUNT_LINE, announce, base, lost, ourselves, receive, refuse, refuse_with, register_own, too_late,
};
use super::device::{Device, Port};
use super::endpoint::{COUNT_BYTES, Draft, Role, max_write};
use super::hello::{Hello, kind};
use super::{Code, NetError, control};

type Rx = Receiver<Arc<QpSet>>;
/// (rail of the connecting side, rail of this side).
type Pairs = Vec<(u8, u8)>;

/// A listener, and the peers whose set-up is under way.
#[derive(Debug)]
pub struct Accepting {
    listener: Listener,
    rails: Vec<Arc<Port>>,
    device: Arc<Device>,
    profiler: Option<Arc<dyn Profiler>>,
    peers: Vec<Pending>,
}

#[derive(Debug)]
struct Pending {
    channel: Channel,
    since: Instant,
    stage: Stage,
}

#[derive(Debug)]
enum Stage {
    /// Waiting for the offer.
    Greeted,
    /// Taking QPs to RTS.
    Raising(Draft, Box<Hello>, Pairs),
    /// Answered, waiting for the peer's word that it can receive.
    Answered(Draft, Box<Hello>, Ground),
}

/// Memory of our own that a recv comm needs: had before the answer, after which the peer takes the connection for made.
#[derive(Debug)]
struct Ground {
    /// QPs of flushes by rail, and what they read into.
    loopbacks: Vec<Option<(Qp<Rts>, u64, u32)>>,
    landing: Option<(Vec<Mr>, Pages)>,
    /// The word behind the shadow that the peer writes; None: no hinted receives. Given up before the pages that it is in.
    count: Option<Mr>,
    shadow: (Mr, Pages),
}

/// Which interface serves connection set-up is the same for every listener: told with the first.
fn say_once(choice: &ifaces::Choice) {
    static SAID: std::sync::Once = std::sync::Once::new();
    SAID.call_once(|| {
        for warning in &choice.warnings {
            tracing::warn!(target: "init", "{warning}");
        }
        let rejected: Vec<String> =
            choice.rejected.iter().map(|r| format!("{} {} ({})", r.name, r.addr, r.why)).collect();
        let rest = if rejected.is_empty() { String::new() } else { format!("; not {}", rejected.join(", ")) };
        tracing::info!(target: "init", "connection set-up over {} {}: {}{rest}", choice.name, choice.addr, choice.why);
    });
}

enum Step {
    Again(Box<Pending>),
    Done(Box<Comm>),
}

impl Accepting {
    pub(super) fn listen(
        device: &Arc<Device>,
        profiler: Option<Arc<dyn Profiler>>,
        config: &Config,
    ) -> Result<(Box<Self>, [u8; HANDLE_BYTES]), NetError> {
        if device.rails.is_empty() {
            return Err(NetError::new(Code::System, "no RDMA device can be used and NCCL_NET_RDMA_STRICT is set"));
        }
        let choice = ifaces::choose(&ifaces::list(), config)
            .map_err(|e| NetError::new(Code::System, format!("no interface for connection set-up: {e}")))?;
        say_once(&choice);
        let address = SocketAddr::new(choice.addr, 0);
        let (listener, handle) = Listener::bind(address, config.port_range.clone(), Limits::default())
            .map_err(|e| NetError::new(Code::System, format!("{e}; on interface {}", choice.name)))?;
        let accepting =
            Self { listener, rails: device.rails.clone(), device: Arc::clone(device), profiler, peers: Vec::new() };
        Ok((Box::new(accepting), handle.encode()))
    }

    /// Goes as far as it can now.
    pub(super) fn step(&mut self, config: &Config, now: Instant) -> Result<Option<Box<Comm>>, NetError> {
        while let Poll::Ready(accepted) = self.listener.poll(now) {
            match accepted {
                Ok(channel) => self.peers.push(Pending { channel, since: now, stage: Stage::Greeted }),
                Err(e) => return Err(NetError::new(Code::System, e.to_string())),
            }
        }
        self.tell_of_strangers();
        let mut i = 0;
        while i < self.peers.len() {
            match self.peers.swap_remove(i).step(&self.rails, &self.device, config, now)? {
                Step::Done(mut comm) => {
                    comm.profile(self.profiler.clone());
                    return Ok(Some(comm));
                }
                Step::Again(pending) => {
                    self.peers.push(*pending);
                    let last = self.peers.len() - 1;
                    self.peers.swap(i, last);
                    i += 1;
                }
            }
        }
        Ok(None)
    }

    /// A peer with another version of this plugin would look like a hang.
    fn tell_of_strangers(&mut self) {
        if let Some(text) = self.listener.take_warning() {
            tracing::warn!(target: "init", "{text}");
        }
    }
}

impl Pending {
    fn step(mut self, rails: &[Arc<Port>], device: &Device, config: &Config, now: Instant) -> Result<Step, NetError> {
        let late = now.saturating_duration_since(self.since) > config.connect_timeout;
        let give_up = |channel: &mut Channel, what: &str| {
            let peer = channel.peer_addr().to_string();
            refuse_with(channel, too_late(what, &peer, config.connect_timeout))
        };
        loop {
            self.stage = match self.stage {
                Stage::Greeted => match receive(&mut self.channel)? {
                    None if late => return Err(give_up(&mut self.channel, "for its offer")),
                    None => return Ok(Step::Again(Box::new(Self { stage: Stage::Greeted, ..self }))),
                    Some((kind::OFFER, body)) => {
                        let offer = Hello::decode(&body).map_err(|e| refuse(&mut self.channel, e.to_string()))?;
                        let (draft, offer, pairs) =
                            agree(rails, offer, config).map_err(|e| refuse_with(&mut self.channel, e))?;
                        Stage::Raising(draft, Box::new(offer), pairs)
                    }
                    Some((kind, _)) => return Err(refuse(&mut self.channel, format!("unexpected message {kind}"))),
                },
                Stage::Raising(mut draft, offer, pairs) => {
                    match draft.raise(&offer.rails, Rx::RQ_DEPTH, Rx::recv_wr_id, config, now) {
                        Poll::Pending if late => {
                            return Err(give_up(&mut self.channel, "for the NIC to resolve the peer's address"));
                        }
                        Poll::Pending => {
                            return Ok(Step::Again(Box::new(Self {
                                stage: Stage::Raising(draft, offer, pairs),
                                ..self
                            })));
                        }
                        Poll::Ready(Err(e)) => return Err(refuse_with(&mut self.channel, e)),
                        Poll::Ready(Ok(())) => {
                            let ground =
                                Ground::lay(&draft, device.gpu.choice().gdr, offer.hints && config.recv_hint, config)
                                    .map_err(|e| refuse_with(&mut self.channel, e))?;
                            let answer = Hello {
                                who: ourselves(),
                                class: offer.class,
                                ring_address: 0,
                                max_write: max_write(&draft.ports(), &offer.rails),
                                hints: ground.count.is_some(),
                                count_address: ground.count_address(),
                                count_rkey: ground.count.as_ref().map_or(0, Mr::rkey),
                                rails: draft.describe(&[]),
                                pairs,
                            };
                            self.channel
                                .send(kind::ANSWER, &answer.encode())
                                .map_err(|e| lost(&self.channel, &e.to_string()))?;
                            Stage::Answered(draft, offer, ground)
                        }
                    }
                }
                Stage::Answered(draft, offer, ground) => match receive(&mut self.channel)? {
                    None if late => return Err(give_up(&mut self.channel, "for its QPs")),
                    None => {
                        return Ok(Step::Again(Box::new(Self {
                            stage: Stage::Answered(draft, offer, ground),
                            ..self
                        })));
                    }
                    Some((kind::READY, body)) => {
                        if let (Some(ours), Some(theirs)) = (control::keep_alive(config), KeepAlive::decode(&body)) {
                            self.channel.keep_alive(ours.agree(theirs));
                        }
                        return finish(self.channel, draft, ground, &offer, device, config).map(Step::Done);
                    }
                    Some((kind, _)) => return Err(refuse(&mut self.channel, format!("unexpected message {kind}"))),
                },
            };
        }
    }
}

/// Pairs the rails of both ends and makes this side's QPs; in the offer only what was agreed stays, in the agreed order.
fn agree(rails: &[Arc<Port>], mut offer: Hello, config: &Config) -> Result<(Draft, Hello, Pairs), NetError> {
    let mismatch = |text: String| NetError::new(Code::Remote, format!("{text}; peer {}", offer.who));
    let own: Vec<rails::RailAddr> = rails
        .iter()
        .map(|p| p.gid(config).map(|g| rails::RailAddr { link_layer: p.link_layer(), gid: g.gid, lid: p.attr.lid }))
        .collect::<Result<_, _>>()?;
    let far: Vec<rails::RailAddr> = offer
        .rails
        .iter()
        .map(|r| rails::RailAddr {
            link_layer: crate::topology::port::LinkLayer::from_code(r.link_layer),
            gid: crate::topology::gid::Gid(r.gid),
            lid: r.lid,
        })
        .collect();
    let pairs = rails::pair(&far, &own);
    if pairs.is_empty() {
        return Err(mismatch("the two ends have no rails in common".to_owned()));
    }
    for &(theirs, ours) in &pairs {
        let (near, remote) = (&rails[ours], &offer.rails[theirs]);
        if near.attr.link_layer != remote.link_layer {
            return Err(mismatch(format!(
                "{near:?} is {} and {}:{} of the peer is {}: they can't talk; choose devices with NCCL_IB_HCA",
                near.link_layer(),
                remote.device,
                remote.port,
                crate::topology::port::LinkLayer::from_code(remote.link_layer),
            )));
        }
        // The top bit is membership, not part of the key.
        if near.pkey & 0x7fff != remote.pkey & 0x7fff {
            return Err(mismatch(format!(
                "{near:?} uses P_Key {:#06x} and {}:{} of the peer {:#06x}: set NCCL_IB_PKEY to the index of a common key on each \
                 host",
                near.pkey, remote.device, remote.port, remote.pkey
            )));
        }
    }
    let qps = pairs
        .iter()
        .map(|&(theirs, _)| offer.rails[theirs].qps.len())
        .chain([config.ib_qps_per_connection])
        .min()
        .unwrap_or(0);
    if qps == 0 {
        return Err(mismatch("the offer has no QPs".to_owned()));
    }
    let ports: Vec<Arc<Port>> = pairs.iter().map(|&(_, ours)| Arc::clone(&rails[ours])).collect();
    let draft = Draft::create(Role::Recv, &ports, qps, Rx::RECV_QUEUE, offer.class, config)?;
    let mut all: Vec<_> = offer.rails.drain(..).map(Some).collect();
    offer.rails = pairs.iter().filter_map(|&(theirs, _)| all[theirs].take()).collect();
    for rail in &mut offer.rails {
        rail.qps.truncate(qps);
    }
    if max_write(&ports, &offer.rails) == 0 {
        return Err(NetError::new(
            Code::System,
            format!("a rail of {ports:?} or of peer {} takes no write", offer.who),
        ));
    }
    let pairs = pairs.iter().map(|&(theirs, ours)| (small(theirs), small(ours))).collect();
    Ok((draft, offer, pairs))
}

/// A rail's index; there are at most 8.
fn small(rail: usize) -> u8 {
    u8::try_from(rail).unwrap_or(u8::MAX)
}

impl Ground {
    /// With `gdr` a NIC may write to GPU memory.
    fn lay(draft: &Draft, gdr: bool, hints: bool, config: &Config) -> Result<Self, NetError> {
        let ports = draft.ports();
        let pages =
            |bytes| Pages::map(bytes).map_err(|e| NetError::new(Code::System, format!("memory for a connection: {e}")));
        let ring = Stride::for_rails(ports.len()).ring_bytes();
        let shadow = pages(ring + COUNT_LINE)?;
        let shadow_mr = register_own(&ports[0], &shadow, 0..ring, Access::LOCAL_WRITE)?;
        let word = shadow.len() - COUNT_LINE;
        let count = hints.then(|| {
            let part = word..word + COUNT_BYTES as usize;
            register_own(&ports[0], &shadow, part, Access::LOCAL_WRITE | Access::REMOTE_WRITE)
        });
        let count = count.transpose()?;
        let mut loopbacks = Vec::new();
        let mut landing = None;
        // Where no NIC writes to GPU memory, nothing needs a flush.
        if (gdr || config.force_flush) && !config.gdr_flush_disable {
            let page = pages(64)?;
            let mut mrs = Vec::with_capacity(ports.len());
            for (rail, port) in ports.iter().enumerate() {
                let mr = register_own(port, &page, 0..page.len(), Access::LOCAL_WRITE)?;
                let qp = draft.loopback(rail, config).map_err(|e| {
                    let without = "QP for flushes of GPU memory (NCCL_GDR_FLUSH_DISABLE=1 does without)";
                    NetError::new(e.code, format!("{without}: {}", e.text))
                })?;
                loopbacks.push(Some((qp, page.address(), mr.lkey())));
                mrs.push(mr);
            }
            landing = Some((mrs, page));
        }
        Ok(Self { shadow: (shadow_mr, shadow), count, landing, loopbacks })
    }

    fn count_address(&self) -> u64 {
        self.shadow.1.address() + (self.shadow.1.len() - COUNT_LINE) as u64
    }
}

fn finish(
    channel: Channel,
    draft: Draft,
    ground: Ground,
    offer: &Hello,
    device: &Device,
    config: &Config,
) -> Result<Box<Comm>, NetError> {
    let Ground { shadow, count, landing, mut loopbacks } = ground;
    let ports = draft.ports();
    let routes = draft.routes(&offer.rails);
    let max_inline = draft.max_inline();
    let qps = draft.finish(|rail| loopbacks.get_mut(rail).and_then(Option::take))?;
    let qps = Arc::new(qps);
    announce("receiving", device, &qps, &ports, offer, &routes);
    // SAFETY: the pages are mapped, page aligned, and dropped after the receiver.
    let ring = unsafe { CreditRing::new(shadow.1.base(), Stride::for_rails(ports.len())) };
    // SAFETY: inside the pages, behind the ring.
    let word = unsafe { shadow.1.base().add(shadow.1.len() - COUNT_LINE) }.cast();
    let receiver = Receiver::new(ReceiverParts {
        post: Arc::clone(&qps),
        shadow: ring,
        shadow_lkey: shadow.0.lkey(),
        ring_address: offer.ring_address,
        ring_rkey: offer.rails[0].ring_rkey,
        lanes: qps.lanes(),
        max_inline,
        max_write: max_write(&ports, &offer.rails),
        count: count.as_ref().map(|_| word),
        can_flush: landing.is_some(),
    });
    let base = base(channel, device, qps, ports, routes, offer.who.clone(), config)?;
    Ok(Box::new(Comm::Recv(RecvComm {
        hot: UnsafeCell::new(receiver),
        profile: UnsafeCell::new(None),
        base,
        _count: count,
        _shadow: shadow,
        landing,
        flush_all: config.force_flush,
    })))
}

#[cfg(test)]
mod tests {
    use crate::net::Wishes;
    use crate::net::tests::{engine, until};

    #[test]
    fn a_listener_that_closes_ends_the_connect() {
        let engine = engine(&[]);
        let (mut listener, mut handle) = engine.listen(0, None).expect("a listener");
        until("a peer that has proved itself", || {
            assert!(engine.connect(0, &mut handle, Wishes::default()).expect("connect").is_none());
            assert!(engine.accept(&mut listener).expect("accept").is_none());
            (!listener.peers.is_empty()).then_some(())
        });
        drop(listener);
        until("the error", || engine.connect(0, &mut handle, Wishes::default()).err());
        assert!(engine.connecting.is_empty());
    }
}
