//! One side of a connection while it is set up: completion queues and QPs on every rail, taken from Reset to Init when the
//! side is described to the peer, and through RTR to RTS once the peer's description is there.
//!
//! Each rail of each connection has a completion queue of its own, not one with the communicator's other connections. NCCL
//! asks connection by connection (`test`), and only after requests that are open, so a queue of its own holds just what is
//! asked for, and a completion needs no search for its connection. Which is cheaper depends on what has completed between two
//! calls of `test` (`ci/bench queues`; the table is in docs/proof.md): a shared queue where it is one message of each of several
//! connections, by 31 to 44 instructions a message; queues of their own where it is several of one connection, or of one alone
//! (11 to 18), and in each test that finds nothing (4). Neither is much beside the rest of a message. What decides is that a
//! shared queue takes a guard in every poll, since NCCL closes connections and registers memory from another thread than the
//! one that polls, and has to keep completions from a connection that has gone; an own queue goes with its connection.
//! The price is a queue more in the NIC for each connection and rail (`max_cq` of `ibv_query_device` tells how many there can
//! be).

use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::topology::gid;
use crate::topology::port::LinkLayer;
use crate::transfer::{CREDIT_WRS, FLUSH_WRS, QpSet, RailLink, SEND_WRS, split};
use crate::verbs::{Access, AddressVector, Cq, Ece, Init, Qp, QpCaps, Rtr, RtrAttr, Rts, RtsAttr, VerbsError};

use super::device::Port;
use super::hello::{HelloQp, HelloRail};
use super::{Code, NetError};

/// Code of the wait that a sender is told when no receive is posted: 0.64 ms.
const MIN_RNR_TIMER: u8 = 12;
/// Receives are always posted before a credit is given, so this never runs out; finite, so that a defect shows itself.
const RNR_RETRY: u8 = 6;
/// Bytes that a credit write may carry inside its request: two narrow entries or one wide.
const MAX_INLINE: u32 = 64;

/// Bytes of the count of hinted receives.
pub(super) const COUNT_BYTES: u32 = 8;
/// Credit writes that the credit QP takes.
const CREDIT_QUEUE: u32 = 128;
const _: () = assert!(CREDIT_QUEUE as usize == CREDIT_WRS);
/// Reads that a loopback QP takes.
const FLUSH_QUEUE: u32 = 256;
const _: () = assert!(FLUSH_QUEUE as usize == FLUSH_WRS);

/// Which end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Send,
    Recv,
}

/// A QP on its way.
#[derive(Debug)]
enum Stage {
    Init(Qp<Init>),
    Rtr(Qp<Rtr>),
    Rts(Qp<Rts>),
    /// Only inside a step.
    Moving,
}

#[derive(Debug)]
struct DraftQp {
    stage: Stage,
    num: u32,
    psn: u32,
    flow_label: u32,
}

#[derive(Debug)]
struct DraftRail {
    qps: Vec<DraftQp>,
    cq: Arc<Cq>,
    port: Arc<Port>,
    gid: gid::Choice,
    service: Service,
}

/// One side of a connection that is being set up.
#[derive(Debug)]
pub(super) struct Draft {
    role: Role,
    class: Option<u8>,
    rails: Vec<DraftRail>,
    attempts: u32,
    not_before: Option<Instant>,
}

/// Unpredictable 24 bits: late packets of a dead connection must not match a new one.
fn random24() -> u32 {
    let mut bytes = [0; 4];
    // Without randomness a fixed start is what other transports use; nothing breaks.
    let _ = getrandom::fill(&mut bytes);
    u32::from_le_bytes(bytes) & 0xff_ffff
}

impl Role {
    fn caps(self, first: bool, recvs: u32) -> QpCaps {
        match self {
            // The count of hinted receives goes over the first QP.
            Self::Send => {
                QpCaps { max_send_wr: SEND_WRS, max_recv_wr: 1, max_inline: if first { COUNT_BYTES } else { 0 } }
            }
            // Credits go over the first QP of a rail.
            Self::Recv => QpCaps {
                max_send_wr: if first { CREDIT_QUEUE } else { 1 },
                max_recv_wr: recvs,
                max_inline: if first { MAX_INLINE } else { 0 },
            },
        }
    }
}

impl Draft {
    /// Makes `qps` QPs on each port and takes them to Init. `class` is the traffic class that the communicator asks for.
    pub(super) fn create(
        role: Role,
        ports: &[Arc<Port>],
        qps: usize,
        recvs: u32,
        class: Option<u8>,
        config: &Config,
    ) -> Result<Self, NetError> {
        let mut rails = Vec::with_capacity(ports.len());
        for port in ports {
            let service = Service::of(role, port.link_layer(), class, config)
                .map_err(|why| NetError::new(Code::InvalidArgument, format!("{}:{}: {why}", port.name, port.num)))?;
            let gid = port.gid(config)?;
            let entries: u32 = (0..qps)
                .map(|q| {
                    let caps = role.caps(q == 0, recvs);
                    caps.max_send_wr + caps.max_recv_wr
                })
                .sum();
            let flush = if role == Role::Recv { FLUSH_QUEUE + 1 } else { 0 };
            let cq = Cq::create(&port.context, entries + flush).map_err(|e| verbs(port, e))?;
            // The peer writes credits into the sender's ring, or data into the receiver's buffers.
            let access = Access::REMOTE_WRITE;
            let mut list = Vec::with_capacity(qps);
            for q in 0..qps {
                let qp = Qp::create(port.registrar.pd(), &cq, &cq, role.caps(q == 0, recvs))
                    .map_err(|e| verbs(port, e))?
                    .init(port.num, port.pkey_index, access)
                    .map_err(|r| verbs(port, r.error))?;
                list.push(DraftQp { num: qp.num(), stage: Stage::Init(qp), psn: random24(), flow_label: random24() });
            }
            rails.push(DraftRail { qps: list, cq, port: Arc::clone(port), gid, service });
        }
        Ok(Self { role, class, rails, attempts: 0, not_before: None })
    }

    pub(super) fn class(&self) -> Option<u8> {
        self.class
    }

    /// Describes this side to the peer; `ring_rkeys` by rail.
    pub(super) fn describe(&self, ring_rkeys: &[u32]) -> Vec<HelloRail> {
        self.rails
            .iter()
            .enumerate()
            .map(|(i, rail)| HelloRail {
                device: rail.port.name.clone(),
                port: rail.port.num,
                link_layer: rail.port.attr.link_layer,
                lid: rail.port.attr.lid,
                gid: rail.gid.gid.0,
                grh_required: rail.port.attr.grh_required,
                mtu: u8::try_from(rail.port.attr.active_mtu).unwrap_or(0),
                max_msg_sz: rail.port.attr.max_msg_sz,
                pkey: rail.port.pkey,
                speed: rail.port.speed,
                ring_rkey: ring_rkeys.get(i).copied().unwrap_or(0),
                qps: rail.qps.iter().map(|qp| HelloQp { num: qp.num, psn: qp.psn, ece: qp.ece() }).collect(),
            })
            .collect()
    }

    /// Keeps these rails, in this order, with so many QPs each; the others are destroyed.
    pub(super) fn keep(&mut self, rails: &[usize], qps: usize) {
        let mut all: Vec<Option<DraftRail>> = self.rails.drain(..).map(Some).collect();
        self.rails = rails.iter().filter_map(|&i| all.get_mut(i).and_then(Option::take)).collect();
        for rail in &mut self.rails {
            rail.qps.truncate(qps);
        }
    }

    pub(super) fn ports(&self) -> Vec<Arc<Port>> {
        self.rails.iter().map(|r| Arc::clone(&r.port)).collect()
    }

    /// Device:port, GIDs and QP numbers of both ends, by QP, for messages.
    pub(super) fn routes(&self, peer: &[HelloRail]) -> Vec<String> {
        self.rails
            .iter()
            .zip(peer)
            .flat_map(|(rail, far)| {
                rail.qps.iter().zip(&far.qps).map(move |(qp, far_qp)| {
                    format!(
                        "{}:{} QP {:#x} GID {} -> {}:{} QP {:#x} GID {}",
                        rail.port.name,
                        rail.port.num,
                        qp.num,
                        rail.gid.gid,
                        far.device,
                        far.port,
                        far_qp.num,
                        gid::Gid(far.gid)
                    )
                })
            })
            .collect()
    }

    /// Takes every QP as far as RTS, as far as it goes now. A step that the device refuses for the moment (address
    /// resolution timed out) is tried again later, without waiting here.
    pub(super) fn raise(
        &mut self,
        peer: &[HelloRail],
        recvs: usize,
        recv_wr_id: impl Fn(usize) -> u64,
        config: &Config,
        now: Instant,
    ) -> Poll<Result<(), NetError>> {
        if self.not_before.is_some_and(|t| now < t) {
            return Poll::Pending;
        }
        let role = self.role;
        let mut index = 0;
        for (rail, far) in self.rails.iter_mut().zip(peer) {
            let mtu = rail.port.attr.active_mtu.min(u32::from(far.mtu));
            for (qp, far_qp) in rail.qps.iter_mut().zip(&far.qps) {
                let rtr = RtrAttr {
                    address: address(&rail.port, &rail.gid, far, qp.flow_label, rail.service.class),
                    service_level: rail.service.level,
                    port: rail.port.num,
                    dest_qp_num: far_qp.num,
                    rq_psn: far_qp.psn,
                    path_mtu: mtu,
                    min_rnr_timer: MIN_RNR_TIMER,
                };
                let rts = RtsAttr {
                    sq_psn: qp.psn,
                    timeout: config.ib_timeout,
                    retry_cnt: config.ib_retry_cnt,
                    rnr_retry: RNR_RETRY,
                };
                let recvs = if role == Role::Recv { recvs } else { 0 };
                if let Err(e) = qp.raise(&rtr, &rts, far_qp.ece, recvs, recv_wr_id(index)) {
                    return self.put_off(e, peer, config, now);
                }
                index += 1;
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Decides whether a refused step is worth another try.
    #[cold]
    fn put_off(
        &mut self,
        e: VerbsError,
        peer: &[HelloRail],
        config: &Config,
        now: Instant,
    ) -> Poll<Result<(), NetError>> {
        let Some((rail, far)) = self.rails.iter().zip(peer).find(|(r, _)| r.qps.iter().any(|q| !q.ready())) else {
            return Poll::Ready(Err(NetError::new(Code::System, e.to_string())));
        };
        let way = format!(
            "{}:{} GID {} (index {}, {}) to {}:{} GID {}",
            rail.port.name,
            rail.port.num,
            rail.gid.gid,
            rail.gid.index,
            rail.gid.kind,
            far.device,
            far.port,
            gid::Gid(far.gid)
        );
        let retry = (e.errno == libc::ETIMEDOUT || config.ib_mqp_retry_all) && self.attempts < config.ib_mqp_retry_cnt;
        if retry {
            self.attempts += 1;
            if self.attempts == 1 {
                tracing::warn!(target: "init", "{e}; {way}; trying again, up to {} times: is there a route and a neighbour entry \
                    from this GID's interface to the peer's address?", config.ib_mqp_retry_cnt);
            }
            self.not_before = Some(now + Duration::from_millis(config.ib_mqp_retry_sleep_msec) * self.attempts);
            return Poll::Pending;
        }
        let hint = match e.errno {
            libc::ETIMEDOUT => "the peer's address could not be resolved: check route, neighbour (ARP/ND) and rail",
            libc::ENETUNREACH | libc::EHOSTUNREACH => {
                "there is no route from this GID's interface to the peer's address"
            }
            libc::ENODEV => "the GID index is empty now: the address moved or belongs to another network namespace",
            libc::EINVAL => "the device refused the attributes: compare GID types, MTU and P_Key of both ends",
            _ => "see the device's own log",
        };
        Poll::Ready(Err(NetError::new(Code::System, format!("{e}; {way}; {hint}"))))
    }

    /// Bytes that a write on the first QP may carry inside its request.
    pub(super) fn max_inline(&self) -> u32 {
        match self.rails.first().and_then(|r| r.qps.first()).map(|q| &q.stage) {
            Some(Stage::Rts(qp)) => qp.caps().max_inline,
            _ => 0,
        }
    }

    /// The finished QPs. Every one is at RTS: call after [`Draft::raise`] was ready.
    pub(super) fn finish(self, mut flush: impl FnMut(usize) -> Option<(Qp<Rts>, u64, u32)>) -> Result<QpSet, NetError> {
        let mut links = Vec::with_capacity(self.rails.len());
        for (i, rail) in self.rails.into_iter().enumerate() {
            let mut qps = Vec::with_capacity(rail.qps.len());
            for qp in rail.qps {
                let Stage::Rts(qp) = qp.stage else {
                    return Err(NetError::new(Code::Internal, "a QP was taken before it could send".to_owned()));
                };
                qps.push(qp);
            }
            links.push(RailLink { qps, cq: rail.cq, flush: flush(i) });
        }
        Ok(QpSet::new(links))
    }

    /// A QP on `rail`, connected to itself, whose reads push the NIC's earlier writes into the GPU.
    pub(super) fn loopback(&self, rail: usize, config: &Config) -> Result<Qp<Rts>, NetError> {
        let DraftRail { cq, port, gid, service, .. } = &self.rails[rail];
        let caps = QpCaps { max_send_wr: FLUSH_QUEUE, max_recv_wr: 1, max_inline: 0 };
        let qp = Qp::create(port.registrar.pd(), cq, cq, caps)
            .map_err(|e| verbs(port, e))?
            .init(port.num, port.pkey_index, Access::REMOTE_READ)
            .map_err(|r| verbs(port, r.error))?;
        let psn = random24();
        let own = self.describe(&[]).swap_remove(rail);
        let rtr = RtrAttr {
            address: address(port, gid, &own, 0, 0),
            service_level: service.level,
            port: port.num,
            dest_qp_num: qp.num(),
            rq_psn: psn,
            path_mtu: port.attr.active_mtu,
            min_rnr_timer: MIN_RNR_TIMER,
        };
        let rts =
            RtsAttr { sq_psn: psn, timeout: config.ib_timeout, retry_cnt: config.ib_retry_cnt, rnr_retry: RNR_RETRY };
        qp.rtr(&rtr).map_err(|r| verbs(port, r.error))?.rts(&rts).map_err(|r| verbs(port, r.error))
    }
}

impl DraftQp {
    fn ready(&self) -> bool {
        matches!(self.stage, Stage::Rts(_))
    }

    fn ece(&self) -> Option<Ece> {
        match &self.stage {
            Stage::Init(qp) => qp.ece(),
            Stage::Rtr(qp) => qp.ece(),
            Stage::Rts(qp) => qp.ece(),
            Stage::Moving => None,
        }
    }

    fn raise(
        &mut self,
        rtr: &RtrAttr,
        rts: &RtsAttr,
        ece: Option<Ece>,
        recvs: usize,
        recv_wr_id: u64,
    ) -> Result<(), VerbsError> {
        loop {
            let (next, done) = match std::mem::replace(&mut self.stage, Stage::Moving) {
                Stage::Init(qp) => {
                    if let Some(ece) = ece {
                        qp.set_ece(ece);
                    }
                    match qp.rtr(rtr) {
                        Ok(qp) => (Stage::Rtr(qp), Ok(false)),
                        Err(refused) => (Stage::Init(refused.qp), Err(refused.error)),
                    }
                }
                Stage::Rtr(qp) => match qp.rts(rts) {
                    Ok(qp) => {
                        let posted = if recvs > 0 { qp.post_empty_recvs(recv_wr_id, recvs) } else { Ok(()) };
                        (Stage::Rts(qp), posted.map(|()| true))
                    }
                    Err(refused) => (Stage::Rtr(refused.qp), Err(refused.error)),
                },
                done @ (Stage::Rts(_) | Stage::Moving) => (done, Ok(true)),
            };
            self.stage = next;
            if done? {
                return Ok(());
            }
        }
    }
}

/// How the fabric treats what this side of a rail sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Service {
    /// Traffic class of the GRH; with RoCE the type of service, DSCP in the upper 6 bits.
    class: u8,
    level: u8,
}

impl Service {
    /// `asked` is the communicator's traffic class: with RoCE the type of service, with InfiniBand the service level. What
    /// the environment says goes before it.
    fn of(role: Role, layer: LinkLayer, asked: Option<u8>, config: &Config) -> Result<Self, String> {
        let (roce, ib) = if layer == LinkLayer::InfiniBand { (None, asked) } else { (asked, None) };
        // Data go from the sending side, credits from the receiving side.
        let fifo = if role == Role::Recv { config.ib_fifo_tc } else { None };
        let class = fifo.or(config.ib_tc).or(roce).unwrap_or(0);
        let level = config.ib_sl.or(ib).unwrap_or(0);
        if level > 15 {
            return Err(format!(
                "the communicator asks for traffic class {level}, which on InfiniBand is the service level, 0 to 15: ask for one \
                 of these, or set NCCL_IB_SL on every host"
            ));
        }
        Ok(Self { class, level })
    }
}

/// How to address the peer's rail from ours.
fn address(port: &Port, gid: &gid::Choice, far: &HelloRail, flow_label: u32, traffic_class: u8) -> AddressVector {
    let ethernet = port.link_layer() == LinkLayer::Ethernet;
    let same_subnet = gid.gid.0[..8] == far.gid[..8];
    if !ethernet && same_subnet && !port.attr.grh_required && !far.grh_required {
        return AddressVector::Lid { dlid: far.lid };
    }
    AddressVector::Gid {
        dgid: far.gid,
        sgid_index: gid.index,
        dlid: if ethernet { 0 } else { far.lid },
        // Distinct labels spread QPs over ECMP paths (RoCE v2 makes its UDP source port from it).
        flow_label: if ethernet { flow_label & 0xf_ffff } else { 0 },
        hop_limit: 255,
        traffic_class,
    }
}

/// Largest write that all these rails and the peer's take; 0: there is none.
pub(super) fn max_write(ports: &[Arc<Port>], peer: &[HelloRail]) -> u32 {
    let least = |(own, far): (&Arc<Port>, &HelloRail)| {
        split::max_write(own.attr.max_msg_sz).min(split::max_write(far.max_msg_sz))
    };
    ports.iter().zip(peer).map(least).min().unwrap_or(0)
}

fn verbs(port: &Port, e: VerbsError) -> NetError {
    NetError::new(Code::System, e.with(format_args!("port {}", port.num)).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn service(role: Role, layer: LinkLayer, asked: Option<u8>, set: &[(&str, &str)]) -> Result<(u8, u8), String> {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let (config, _) = Config::load(&find, std::iter::empty());
        Service::of(role, layer, asked, &config).map(|s| (s.class, s.level))
    }

    #[test]
    fn traffic_class_is_type_of_service_with_roce_and_service_level_with_infiniband() {
        use LinkLayer::{Ethernet, InfiniBand};
        for role in [Role::Send, Role::Recv] {
            assert_eq!(service(role, Ethernet, None, &[]), Ok((0, 0)));
            assert_eq!(service(role, Ethernet, Some(106), &[]), Ok((106, 0)));
            assert_eq!(service(role, InfiniBand, Some(3), &[]), Ok((0, 3)));
            let refused = service(role, InfiniBand, Some(106), &[]).expect_err("there is no such level");
            assert!(refused.contains("106") && refused.contains("NCCL_IB_SL"), "{refused}");
        }
    }

    #[test]
    fn the_environment_goes_before_the_communicator() {
        use LinkLayer::{Ethernet, InfiniBand};
        let set = [("NCCL_IB_TC", "40"), ("NCCL_IB_FIFO_TC", "8"), ("NCCL_IB_SL", "2")];
        assert_eq!(service(Role::Send, Ethernet, Some(106), &set), Ok((40, 2)));
        assert_eq!(service(Role::Recv, Ethernet, Some(106), &set), Ok((8, 2)));
        assert_eq!(service(Role::Send, InfiniBand, Some(106), &set), Ok((40, 2)));
    }
}
