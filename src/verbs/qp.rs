//! Reliable connected queue pairs with their state in the type (`man ibv_modify_qp`; InfiniBand specification 10.3.1).
//!
//! | from | to | by | may then |
//! |---|---|---|---|
//! | – | Reset | [`Qp::create`] | |
//! | Reset | Init | [`Qp::init`] | post receives |
//! | Init | Rtr | [`Qp::rtr`] | receive |
//! | Rtr | Rts | [`Qp::rts`] | post sends |
//! | any | error | [`Qp::fail`], or the device | flush what is outstanding |
#![expect(clippy::result_large_err, reason = "a refused queue pair is handed back, off the data path")]

use std::ffi::c_int;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ib::ibv_qp_attr_mask as Mask;
use ibverbs_sys as ib;

use super::context::Pd;
use super::cq::Cq;
use super::error::VerbsError;
use super::library::Ece;
use super::memory::Access;

/// State of a queue pair just made.
#[derive(Debug, Clone, Copy)]
pub enum Reset {}
/// State in which receives may be posted.
#[derive(Debug, Clone, Copy)]
pub enum Init {}
/// Ready to receive.
#[derive(Debug, Clone, Copy)]
pub enum Rtr {}
/// Ready to send.
#[derive(Debug, Clone, Copy)]
pub enum Rts {}

/// States in which receives may be posted.
pub trait Receives {}
impl Receives for Init {}
impl Receives for Rtr {}
impl Receives for Rts {}

/// Sizes of a queue pair's queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QpCaps {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    /// Bytes that a send may carry inside its request; what was granted may be more or less than asked for.
    pub max_inline: u32,
}

/// Where the peer is (`man ibv_modify_qp`, ah_attr).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressVector {
    /// Inside an InfiniBand subnet, by LID.
    Lid { dlid: u16 },
    /// By GID: RoCE always, InfiniBand where a router or the port asks for it (dlid then names the first hop).
    Gid { dgid: [u8; 16], sgid_index: u8, dlid: u16, flow_label: u32, hop_limit: u8, traffic_class: u8 },
}

/// What a queue pair needs to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtrAttr {
    pub address: AddressVector,
    pub service_level: u8,
    /// Of this side.
    pub port: u8,
    pub dest_qp_num: u32,
    /// The peer's first packet number, 24 bits.
    pub rq_psn: u32,
    /// IBV_MTU_* code; both ends must agree.
    pub path_mtu: u32,
    /// Code of the wait that a sender is told when no receive is posted (12 is 0.64 ms).
    pub min_rnr_timer: u8,
}

/// What a queue pair needs to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RtsAttr {
    /// Our first packet number, 24 bits.
    pub sq_psn: u32,
    /// Wait for an acknowledgement: 4.096 µs · 2^timeout.
    pub timeout: u8,
    pub retry_cnt: u8,
    /// 7 is for ever.
    pub rnr_retry: u8,
}

/// A transition that failed gives the queue pair back as it was, for another try or a teardown.
pub struct Refused<S> {
    pub qp: Qp<S>,
    pub error: VerbsError,
}

impl<S> std::fmt::Debug for Refused<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.error.fmt(f)
    }
}

/// One RDMA WRITE of contiguous memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WriteWr {
    pub wr_id: u64,
    pub local: u64,
    pub lkey: u32,
    pub length: u32,
    pub remote: u64,
    pub rkey: u32,
    /// Host byte order; None is a write that the peer's receive queue does not see.
    pub imm: Option<u32>,
    /// Whether success yields a completion.
    pub signaled: bool,
    /// The bytes are copied into the request; at most max_inline of them.
    pub inline: bool,
}

type PostSend = unsafe extern "C" fn(*mut ib::ibv_qp, *mut ib::ibv_send_wr, *mut *mut ib::ibv_send_wr) -> c_int;
type PostRecv = unsafe extern "C" fn(*mut ib::ibv_qp, *mut ib::ibv_recv_wr, *mut *mut ib::ibv_recv_wr) -> c_int;

/// What a queue pair is whatever its state.
struct Raw {
    qp: NonNull<ib::ibv_qp>,
    post_send: PostSend,
    post_recv: PostRecv,
    num: u32,
    caps: QpCaps,
    pd: Arc<Pd>,
    /// Held so that they outlive the queue pair.
    _cqs: [Arc<Cq>; 2],
}

impl Drop for Raw {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once; returns when the device no longer touches memory through it.
        unsafe { (self.pd.context.library.api.destroy_qp)(self.qp.as_ptr()) };
    }
}

/// A reliable connected queue pair in state `S`.
pub struct Qp<S> {
    raw: Raw,
    state: PhantomData<fn() -> S>,
}

// SAFETY: verbs objects may be used from any thread.
unsafe impl<S> Send for Qp<S> {}
// SAFETY: as above.
unsafe impl<S> Sync for Qp<S> {}

impl<S> std::fmt::Debug for Qp<S> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qp").field("num", &self.raw.num).finish_non_exhaustive()
    }
}

impl<S> Qp<S> {
    /// Its number, 24 bits.
    #[inline]
    pub fn num(&self) -> u32 {
        self.raw.num
    }

    /// What the device granted.
    pub fn caps(&self) -> QpCaps {
        self.raw.caps
    }

    /// Moves the queue pair to the error state: what is outstanding flushes, nothing more is sent or received. For
    /// teardown; callable while another thread posts.
    pub fn fail(&self) -> Result<(), VerbsError> {
        let mut attr = zeroed_attr();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_ERR;
        self.modify(&mut attr, Mask::IBV_QP_STATE)
    }

    fn modify(&self, attr: &mut ib::ibv_qp_attr, mask: Mask) -> Result<(), VerbsError> {
        // SAFETY: a live queue pair and attributes that the mask names.
        let rc =
            unsafe { (self.raw.pd.context.library.api.modify_qp)(self.raw.qp.as_ptr(), attr, mask.0.cast_signed()) };
        if rc == 0 { Ok(()) } else { Err(VerbsError::new("ibv_modify_qp", self.raw.pd.context.name(), rc)) }
    }

    fn step<T>(self, attr: &mut ib::ibv_qp_attr, mask: Mask, to: &str) -> Result<Qp<T>, Refused<S>> {
        match self.modify(attr, mask) {
            Ok(()) => Ok(Qp { raw: self.raw, state: PhantomData }),
            Err(error) => Err(Refused { qp: self, error: error.with(format_args!("to {to}")) }),
        }
    }

    /// ECE options of the queue pair; None where the library or the device has none.
    pub fn ece(&self) -> Option<Ece> {
        let query = self.raw.pd.context.library.api.query_ece?;
        let mut ece = Ece::default();
        // SAFETY: a live queue pair and a place to write.
        (unsafe { query(self.raw.qp.as_ptr(), &raw mut ece) } == 0).then_some(ece)
    }

    /// Asks for ECE options before the step to RTR; false where they are not to be had.
    pub fn set_ece(&self, mut ece: Ece) -> bool {
        let Some(set) = self.raw.pd.context.library.api.set_ece else { return false };
        // SAFETY: a live queue pair and options.
        unsafe { set(self.raw.qp.as_ptr(), &raw mut ece) == 0 }
    }
}

fn zeroed_attr() -> ib::ibv_qp_attr {
    // SAFETY: plain integers and unions of integers, for which all-zero is valid.
    unsafe { MaybeUninit::<ib::ibv_qp_attr>::zeroed().assume_init() }
}

impl Qp<Reset> {
    pub fn create(pd: &Arc<Pd>, send_cq: &Arc<Cq>, recv_cq: &Arc<Cq>, caps: QpCaps) -> Result<Self, VerbsError> {
        let ops = pd.context.ops();
        let (Some(post_send), Some(post_recv)) = (ops.post_send, ops.post_recv) else {
            return Err(VerbsError::new("ibv_post_send", pd.context.name(), libc::ENOSYS));
        };
        let mut attr = ib::ibv_qp_init_attr {
            qp_context: ptr::null_mut(),
            send_cq: send_cq.raw(),
            recv_cq: recv_cq.raw(),
            srq: ptr::null_mut(),
            cap: ib::ibv_qp_cap {
                max_send_wr: caps.max_send_wr,
                max_recv_wr: caps.max_recv_wr,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: caps.max_inline,
            },
            qp_type: ib::ibv_qp_type::IBV_QPT_RC,
            sq_sig_all: 0,
        };
        let api = &pd.context.library.api;
        // SAFETY: live parents; the attributes are filled.
        let mut qp = unsafe { (api.create_qp)(pd.raw(), &raw mut attr) };
        if qp.is_null() && caps.max_inline > 0 {
            // Some providers refuse inline sizes instead of lowering them; without inline data all still works.
            attr.cap.max_inline_data = 0;
            // SAFETY: as above.
            qp = unsafe { (api.create_qp)(pd.raw(), &raw mut attr) };
        }
        let qp = NonNull::new(qp).ok_or_else(|| {
            VerbsError::last("ibv_create_qp", pd.context.name())
                .with(format_args!("{} send and {} receive requests", caps.max_send_wr, caps.max_recv_wr))
        })?;
        let granted = QpCaps {
            max_send_wr: attr.cap.max_send_wr,
            max_recv_wr: attr.cap.max_recv_wr,
            max_inline: attr.cap.max_inline_data,
        };
        // SAFETY: the queue pair is alive.
        let num = unsafe { (*qp.as_ptr()).qp_num };
        let cqs = [Arc::clone(send_cq), Arc::clone(recv_cq)];
        let raw = Raw { qp, post_send, post_recv, num, caps: granted, pd: Arc::clone(pd), _cqs: cqs };
        Ok(Self { raw, state: PhantomData })
    }

    /// To Init. `access` is what the peer may do through this queue pair.
    pub fn init(self, port: u8, pkey_index: u16, access: Access) -> Result<Qp<Init>, Refused<Reset>> {
        let mut attr = zeroed_attr();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_INIT;
        attr.port_num = port;
        attr.pkey_index = pkey_index;
        attr.qp_access_flags = access.bits();
        let mask = Mask::IBV_QP_STATE | Mask::IBV_QP_PKEY_INDEX | Mask::IBV_QP_PORT | Mask::IBV_QP_ACCESS_FLAGS;
        self.step(&mut attr, mask, "INIT")
    }
}

impl Qp<Init> {
    pub fn rtr(self, to: &RtrAttr) -> Result<Qp<Rtr>, Refused<Init>> {
        let mut attr = zeroed_attr();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_RTR;
        attr.path_mtu = to.path_mtu;
        attr.dest_qp_num = to.dest_qp_num;
        attr.rq_psn = to.rq_psn & 0xff_ffff;
        attr.max_dest_rd_atomic = 1;
        attr.min_rnr_timer = to.min_rnr_timer;
        attr.ah_attr.sl = to.service_level;
        attr.ah_attr.port_num = to.port;
        match to.address {
            AddressVector::Lid { dlid } => attr.ah_attr.dlid = dlid,
            AddressVector::Gid { dgid, sgid_index, dlid, flow_label, hop_limit, traffic_class } => {
                attr.ah_attr.is_global = 1;
                attr.ah_attr.dlid = dlid;
                attr.ah_attr.grh.dgid = ib::ibv_gid { raw: dgid };
                attr.ah_attr.grh.sgid_index = sgid_index;
                attr.ah_attr.grh.flow_label = flow_label & 0xf_ffff;
                attr.ah_attr.grh.hop_limit = hop_limit;
                attr.ah_attr.grh.traffic_class = traffic_class;
            }
        }
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_AV
            | Mask::IBV_QP_PATH_MTU
            | Mask::IBV_QP_DEST_QPN
            | Mask::IBV_QP_RQ_PSN
            | Mask::IBV_QP_MAX_DEST_RD_ATOMIC
            | Mask::IBV_QP_MIN_RNR_TIMER;
        self.step(&mut attr, mask, "RTR")
    }
}

impl Qp<Rtr> {
    pub fn rts(self, to: &RtsAttr) -> Result<Qp<Rts>, Refused<Rtr>> {
        let mut attr = zeroed_attr();
        attr.qp_state = ib::ibv_qp_state::IBV_QPS_RTS;
        attr.sq_psn = to.sq_psn & 0xff_ffff;
        attr.timeout = to.timeout;
        attr.retry_cnt = to.retry_cnt;
        attr.rnr_retry = to.rnr_retry;
        attr.max_rd_atomic = 1;
        let mask = Mask::IBV_QP_STATE
            | Mask::IBV_QP_SQ_PSN
            | Mask::IBV_QP_TIMEOUT
            | Mask::IBV_QP_RETRY_CNT
            | Mask::IBV_QP_RNR_RETRY
            | Mask::IBV_QP_MAX_QP_RD_ATOMIC;
        self.step(&mut attr, mask, "RTS")
    }
}

impl<S: Receives> Qp<S> {
    /// Posts `count` receives without memory, as WRITE WITH IMMEDIATE consumes them, in one call.
    pub fn post_empty_recvs(&self, wr_id: u64, count: usize) -> Result<(), VerbsError> {
        const CHAIN: usize = 64;
        let mut left = count;
        while left > 0 {
            let n = left.min(CHAIN);
            let empty = ib::ibv_recv_wr { wr_id, next: ptr::null_mut(), sg_list: ptr::null_mut(), num_sge: 0 };
            let mut chain = [empty; CHAIN];
            let first = chain.as_mut_ptr();
            for i in 1..n {
                // SAFETY: i < n <= CHAIN, inside the array.
                let next = unsafe { first.add(i) };
                chain[i - 1].next = next;
            }
            let mut bad = ptr::null_mut();
            // SAFETY: a live queue pair and a chain that ends in NULL, alive during the call.
            let rc = unsafe { (self.raw.post_recv)(self.raw.qp.as_ptr(), chain.as_mut_ptr(), &raw mut bad) };
            if rc != 0 {
                return Err(VerbsError::new("ibv_post_recv", self.raw.pd.context.name(), rc));
            }
            left -= n;
        }
        Ok(())
    }
}

impl Qp<Rts> {
    /// Posts one RDMA WRITE.
    ///
    /// # Safety
    /// The local range must be registered under `lkey` and stay so until the request has completed (or, inline, until this
    /// call returns).
    #[inline(always)] // a message's cost
    pub unsafe fn post_write(&self, w: &WriteWr) -> Result<(), VerbsError> {
        let opcode = match w.imm {
            Some(_) => ib::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            None => ib::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
        };
        let mut flags = 0;
        if w.signaled {
            flags |= ib::ibv_send_flags::IBV_SEND_SIGNALED.0;
        }
        if w.inline {
            flags |= ib::ibv_send_flags::IBV_SEND_INLINE.0;
        }
        let sge = Segment { local: w.local, lkey: w.lkey, length: w.length, remote: w.remote, rkey: w.rkey };
        // SAFETY: the caller promises the local range.
        unsafe { self.post(w.wr_id, opcode, flags, w.imm.map_or(0, u32::to_be), &sge) }
    }

    /// Posts one RDMA READ of `length` bytes at `remote` into `local`, signalled.
    ///
    /// # Safety
    /// The local range must be registered for LOCAL_WRITE under `lkey` and stay so until the request has completed.
    #[inline]
    pub unsafe fn post_read(
        &self,
        wr_id: u64,
        local: u64,
        lkey: u32,
        length: u32,
        remote: u64,
        rkey: u32,
    ) -> Result<(), VerbsError> {
        let flags = ib::ibv_send_flags::IBV_SEND_SIGNALED.0;
        let sge = Segment { local, lkey, length, remote, rkey };
        // SAFETY: the caller promises the local range.
        unsafe { self.post(wr_id, ib::ibv_wr_opcode::IBV_WR_RDMA_READ, flags, 0, &sge) }
    }

    #[inline(always)]
    unsafe fn post(
        &self,
        wr_id: u64,
        opcode: ib::ibv_wr_opcode::Type,
        flags: u32,
        imm_be: u32,
        s: &Segment,
    ) -> Result<(), VerbsError> {
        let mut sge = ib::ibv_sge { addr: s.local, length: s.length, lkey: s.lkey };
        // SAFETY: integers, pointers and unions of them, for which all-zero is valid.
        let mut wr = unsafe { MaybeUninit::<ib::ibv_send_wr>::zeroed().assume_init() };
        wr.wr_id = wr_id;
        wr.opcode = opcode;
        wr.send_flags = flags;
        wr.__bindgen_anon_1.imm_data = imm_be;
        wr.wr.rdma.remote_addr = s.remote;
        wr.wr.rdma.rkey = s.rkey;
        if s.length > 0 {
            wr.sg_list = &raw mut sge;
            wr.num_sge = 1;
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a live queue pair; the request and its segment live through the call, which copies them.
        let rc = unsafe { (self.raw.post_send)(self.raw.qp.as_ptr(), &raw mut wr, &raw mut bad) };
        if rc == 0 { Ok(()) } else { Err(self.post_failed(rc)) }
    }

    #[cold]
    fn post_failed(&self, rc: c_int) -> VerbsError {
        VerbsError::new("ibv_post_send", self.raw.pd.context.name(), rc).with(format_args!("QP {:#x}", self.raw.num))
    }
}

struct Segment {
    local: u64,
    lkey: u32,
    length: u32,
    remote: u64,
    rkey: u32,
}
