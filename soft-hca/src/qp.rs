//! A queue pair as its owner sees it: number, queues, and the state machine of ibv_modify_qp(3) with its masks.
use crate::abi::mask;
use crate::events::{AsyncEvent, EventQueue};
use crate::queue::{Cq, Cqe, Freed, WorkRing};
use crate::{abi::Wc, engine::Bell};
use ibverbs_sys as ffi;
use std::mem::offset_of;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicUsize, Ordering};

pub(crate) const MAX_SGE: usize = 8;
pub(crate) const MAX_INLINE: usize = 256;
/// What a responder or requester can have outstanding in READs.
pub(crate) const MAX_READS: u8 = 16;

pub(crate) mod status {
    pub(crate) const SUCCESS: u32 = 0;
    pub(crate) const LOC_LEN: u32 = 1;
    pub(crate) const LOC_QP_OP: u32 = 2;
    pub(crate) const LOC_PROT: u32 = 4;
    pub(crate) const FLUSH: u32 = 5;
    pub(crate) const REM_INV_REQ: u32 = 9;
    pub(crate) const REM_ACCESS: u32 = 10;
    pub(crate) const REM_OP: u32 = 11;
    pub(crate) const RETRY_EXC: u32 = 12;
    pub(crate) const RNR_RETRY_EXC: u32 = 13;
}

/// The vendor code that mlx5 devices give with a status; people search for these numbers.
pub(crate) fn vendor_code(code: u32) -> u32 {
    match code {
        status::FLUSH => 249,
        status::REM_INV_REQ => 0x8a,
        status::REM_ACCESS => 0x88,
        status::REM_OP => 0x89,
        status::RETRY_EXC => 129,
        status::RNR_RETRY_EXC => 0x87,
        status::LOC_PROT => 0x51,
        status::LOC_QP_OP => 0x68,
        _ => 0x50,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    Reset = 0,
    Init = 1,
    Rtr = 2,
    Rts = 3,
    Err = 6,
}

impl State {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Reset => "RESET",
            Self::Init => "INIT",
            Self::Rtr => "RTR",
            Self::Rts => "RTS",
            Self::Err => "ERR",
        }
    }

    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::Reset, Self::Init, Self::Rtr, Self::Rts, Self::Err].into_iter().find(|&state| state as u32 == code)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Sge {
    pub(crate) addr: u64,
    pub(crate) len: u32,
    pub(crate) lkey: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Op {
    Write,
    WriteImm,
    Send,
    SendImm,
    Read,
}

impl Op {
    pub(crate) fn from_code(code: u32) -> Option<Self> {
        [Self::Write, Self::WriteImm, Self::Send, Self::SendImm, Self::Read].get(code as usize).copied()
    }
    /// Takes a receive work request at the responder.
    pub(crate) fn receives(self) -> bool {
        matches!(self, Self::WriteImm | Self::Send | Self::SendImm)
    }
    pub(crate) fn has_imm(self) -> bool {
        matches!(self, Self::WriteImm | Self::SendImm)
    }
    fn wc_opcode(self) -> u32 {
        match self {
            Self::Write | Self::WriteImm => 1,
            Self::Send | Self::SendImm => 0,
            Self::Read => 2,
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWqe {
    pub(crate) wr_id: u64,
    pub(crate) raddr: u64,
    pub(crate) len: u64,
    pub(crate) rkey: u32,
    pub(crate) imm: u32,
    pub(crate) op: Op,
    pub(crate) flags: u32,
    /// Status and vendor code to complete with, when a fault was ordered.
    pub(crate) fault: Option<(u32, u32)>,
    pub(crate) sge_count: usize,
    pub(crate) sges: [Sge; MAX_SGE],
    pub(crate) inline: [u8; MAX_INLINE],
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RecvWqe {
    pub(crate) wr_id: u64,
    pub(crate) sge_count: usize,
    pub(crate) sges: [Sge; MAX_SGE],
}

/// Single fields of a request in a ring slot, which need not be written as a whole.
impl RecvWqe {
    #[inline]
    pub(crate) fn wr_id_at(slot: *mut Self) -> *mut u64 {
        slot.wrapping_byte_add(offset_of!(Self, wr_id)).cast()
    }
    #[inline]
    pub(crate) fn sge_count_at(slot: *mut Self) -> *mut usize {
        slot.wrapping_byte_add(offset_of!(Self, sge_count)).cast()
    }
    #[inline]
    pub(crate) fn sge_at(slot: *mut Self, index: usize) -> *mut Sge {
        slot.wrapping_byte_add(offset_of!(Self, sges)).cast::<Sge>().wrapping_add(index)
    }
}

pub(crate) struct Caps {
    pub(crate) send_wr: u32,
    pub(crate) recv_wr: u32,
    pub(crate) send_sge: u32,
    pub(crate) recv_sge: u32,
    pub(crate) inline: u32,
}

#[derive(Debug)]
pub(crate) struct Qp {
    pub(crate) num: u32,
    /// Place in the process's table: the low bits of the number.
    pub(crate) index: u32,
    pub(crate) pd: u32,
    pub(crate) device: usize,
    pub(crate) sig_all: bool,
    pub(crate) send_sge: u32,
    pub(crate) recv_sge: u32,
    pub(crate) inline: u32,
    pub(crate) max_msg: u64,
    state: AtomicU8,
    pub(crate) dest: AtomicU32,
    pub(crate) access: AtomicU32,
    pub(crate) sq: WorkRing<SendWqe>,
    pub(crate) rq: WorkRing<RecvWqe>,
    /// The next receive request that a message will take.
    pub(crate) rq_next: AtomicU32,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) events: Arc<EventQueue<AsyncEvent>>,
    /// The address of the `ibv_qp`, for events.
    pub(crate) handle: AtomicUsize,
    pub(crate) bell: Arc<Bell>,
}

pub(crate) struct NewQp {
    pub(crate) num: u32,
    pub(crate) pd: u32,
    pub(crate) device: usize,
    pub(crate) sig_all: bool,
    pub(crate) caps: Caps,
    pub(crate) max_msg: u64,
    pub(crate) send_cq: Arc<Cq>,
    pub(crate) recv_cq: Arc<Cq>,
    pub(crate) events: Arc<EventQueue<AsyncEvent>>,
    pub(crate) bell: Arc<Bell>,
}

impl Qp {
    pub(crate) fn new(new: NewQp) -> Self {
        Self {
            num: new.num,
            index: new.num & INDEX_MASK,
            pd: new.pd,
            device: new.device,
            sig_all: new.sig_all,
            send_sge: new.caps.send_sge,
            recv_sge: new.caps.recv_sge,
            inline: new.caps.inline,
            max_msg: new.max_msg,
            state: AtomicU8::new(State::Reset as u8),
            dest: AtomicU32::new(0),
            access: AtomicU32::new(0),
            sq: WorkRing::new(new.caps.send_wr),
            rq: WorkRing::new(new.caps.recv_wr),
            rq_next: AtomicU32::new(0),
            send_cq: new.send_cq,
            recv_cq: new.recv_cq,
            events: new.events,
            handle: AtomicUsize::new(0),
            bell: new.bell,
        }
    }

    #[inline]
    pub(crate) fn state(&self) -> State {
        match self.state.load(Ordering::Acquire) {
            0 => State::Reset,
            1 => State::Init,
            2 => State::Rtr,
            3 => State::Rts,
            _ => State::Err,
        }
    }

    /// Under the engine's lock.
    pub(crate) fn set_state(&self, state: State) {
        self.state.store(state as u8, Ordering::Release);
    }

    pub(crate) fn event(&self, kind: u32) {
        self.events.push(AsyncEvent { kind, element: self.handle.load(Ordering::Relaxed) });
    }

    /// Receive requests that no message has taken yet.
    #[inline]
    pub(crate) fn receives_left(&self) -> u32 {
        self.rq.head().wrapping_sub(self.rq_next.load(Ordering::Relaxed))
    }

    /// The wr_id of a receive request, whose other fields need not all be written.
    ///
    /// # Safety
    /// The request at `index` was posted and is not completed.
    #[inline]
    pub(crate) unsafe fn recv_wr_id(&self, index: u32) -> u64 {
        let wqe = self.rq.at(index);
        // SAFETY: posted, so wr_id is written.
        unsafe { RecvWqe::wr_id_at(wqe).read() }
    }

    /// The completion of the send request at `index`, if there is one to be given.
    #[inline]
    pub(crate) fn send_cqe(&self, index: u32, wqe: &SendWqe, code: u32, vendor: u32) -> Option<Cqe> {
        let frees = Freed { qp: self.index, up_to: index.wrapping_add(1), receive: false };
        if code != status::SUCCESS {
            return Some(Cqe { wc: failed(wqe.wr_id, code, vendor, self.num), frees });
        }
        self.signals(wqe.flags).then(|| Cqe { wc: self.send_wc(wqe.wr_id, wqe.op, wqe.len), frees })
    }

    #[inline]
    pub(crate) fn signals(&self, flags: u32) -> bool {
        self.sig_all || flags & crate::abi::send_flag::SIGNALED != 0
    }

    #[inline]
    pub(crate) fn send_wc(&self, wr_id: u64, op: Op, len: u64) -> Wc {
        Wc { wr_id, opcode: op.wc_opcode(), byte_len: low32(len), qp_num: self.num, ..Wc::default() }
    }

    /// The completion of the receive request at `index` by a message.
    #[inline]
    pub(crate) fn recv_cqe(&self, index: u32, wr_id: u64, op: Op, len: u64, imm: u32) -> Cqe {
        let wc = Wc {
            wr_id,
            opcode: if op == Op::WriteImm { 129 } else { 128 },
            byte_len: low32(len),
            imm_data: imm,
            qp_num: self.num,
            src_qp: self.dest.load(Ordering::Relaxed),
            wc_flags: if op.has_imm() { 2 } else { 0 },
            ..Wc::default()
        };
        Cqe { wc, frees: Freed { qp: self.index, up_to: index.wrapping_add(1), receive: true } }
    }

    pub(crate) fn recv_failed_cqe(&self, index: u32, wr_id: u64, code: u32) -> Cqe {
        Cqe {
            wc: failed(wr_id, code, vendor_code(code), self.num),
            frees: Freed { qp: self.index, up_to: index.wrapping_add(1), receive: true },
        }
    }
}

/// On a failed completion only wr_id, status, qp_num and vendor_err mean anything. The rest is rubbish on purpose, so
/// that a program which reads it is found out here.
pub(crate) fn failed(wr_id: u64, code: u32, vendor_err: u32, qp_num: u32) -> Wc {
    Wc {
        wr_id,
        status: code,
        vendor_err,
        qp_num,
        opcode: 0xdead_beef,
        byte_len: 0xdead_beef,
        imm_data: 0xdead_beef,
        src_qp: 0xdead_beef,
        wc_flags: 0xdead_beef,
        pkey_index: 0xdead,
        slid: 0xdead,
        sl: 0xde,
        dlid_path_bits: 0xde,
    }
}

#[expect(clippy::cast_possible_truncation, reason = "byte_len has 32 bits; messages are at most 2 GiB")]
fn low32(len: u64) -> u32 {
    len as u32
}

/// A QP number is 10 bits of process slot over 14 bits of index.
pub(crate) const INDEX_BITS: u32 = 14;
pub(crate) const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;
pub(crate) const NUM_MASK: u32 = 0xff_ffff;

/// What a QP was told about its connection.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Attr {
    pub(crate) port: u8,
    pub(crate) pkey_index: u16,
    pub(crate) access: u32,
    pub(crate) mtu: u32,
    pub(crate) dest: u32,
    pub(crate) rq_psn: u32,
    pub(crate) sq_psn: u32,
    pub(crate) max_dest_rd: u8,
    pub(crate) max_rd: u8,
    pub(crate) min_rnr: u8,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) address: Address,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    pub(crate) global: bool,
    pub(crate) dgid: [u8; 16],
    pub(crate) sgid_index: u8,
    pub(crate) dlid: u16,
    pub(crate) sl: u8,
    pub(crate) traffic_class: u8,
    pub(crate) flow_label: u32,
    pub(crate) hop_limit: u8,
}

/// What the state machine needs to know about a port.
#[derive(Clone, Debug)]
pub(crate) struct PortView {
    pub(crate) ethernet: bool,
    pub(crate) pkeys: usize,
    pub(crate) active_mtu: u32,
    /// By index; None where the table has no entry.
    pub(crate) gids: Vec<Option<[u8; 16]>>,
}

/// Attributes that a transition requires, and those that it allows besides.
fn masks(from: State, to: State) -> Option<(u32, u32)> {
    use mask::*;
    Some(match (from, to) {
        (_, State::Reset | State::Err) => (0, 0),
        (State::Reset, State::Init) => (PKEY_INDEX | PORT | ACCESS, 0),
        (State::Init, State::Init) => (0, PKEY_INDEX | PORT | ACCESS),
        (State::Init, State::Rtr) => {
            (AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD | MIN_RNR, ALT_PATH | ACCESS | PKEY_INDEX)
        }
        (State::Rtr, State::Rts) => {
            (SQ_PSN | TIMEOUT | RETRY_CNT | RNR_RETRY | MAX_RD, ALT_PATH | ACCESS | MIN_RNR | PATH_MIG)
        }
        (State::Rts, State::Rts) => (0, ACCESS | ALT_PATH | PATH_MIG | MIN_RNR),
        _ => return None,
    })
}

/// The state after ibv_modify_qp and the attributes then in force, or an errno.
pub(crate) fn modify(
    from: State,
    attr: &Attr,
    new: &ffi::ibv_qp_attr,
    given: u32,
    ports: &[PortView],
) -> Result<(State, Attr), i32> {
    let to = if given & mask::STATE != 0 { State::from_code(new.qp_state).ok_or(libc::EINVAL)? } else { from };
    if given & mask::CUR_STATE != 0 && new.cur_qp_state != from as u32 {
        return Err(libc::EINVAL);
    }
    let (required, optional) = masks(from, to).ok_or(libc::EINVAL)?;
    let rest = given & !(mask::STATE | mask::CUR_STATE);
    if rest & required != required || rest & !(required | optional) != 0 {
        return Err(libc::EINVAL);
    }
    let has = |bit| given & bit != 0;
    let within = |value: u32, max: u32| if value <= max { Ok(value) } else { Err(libc::EINVAL) };
    let small = |value: u8, max: u8| if value <= max { Ok(value) } else { Err(libc::EINVAL) };
    let mut next = *attr;
    if has(mask::PORT) {
        next.port = new.port_num;
    }
    if to == State::Reset {
        return Ok((to, Attr::default()));
    }
    if to == State::Err {
        return Ok((to, next));
    }
    let port = usize::from(next.port).checked_sub(1).and_then(|i| ports.get(i)).ok_or(libc::EINVAL)?;
    if has(mask::PKEY_INDEX) {
        next.pkey_index = new.pkey_index;
        if usize::from(new.pkey_index) >= port.pkeys {
            return Err(libc::EINVAL);
        }
    }
    if has(mask::ACCESS) {
        next.access = within(new.qp_access_flags, 0xf)?;
    }
    if has(mask::PATH_MTU) {
        next.mtu = new.path_mtu;
        if !(1..=port.active_mtu).contains(&next.mtu) {
            return Err(libc::EINVAL);
        }
    }
    if has(mask::DEST_QPN) {
        next.dest = within(new.dest_qp_num, NUM_MASK)?;
    }
    if has(mask::RQ_PSN) {
        next.rq_psn = new.rq_psn & NUM_MASK;
    }
    if has(mask::SQ_PSN) {
        next.sq_psn = new.sq_psn & NUM_MASK;
    }
    if has(mask::MAX_DEST_RD) {
        next.max_dest_rd = small(new.max_dest_rd_atomic, MAX_READS)?;
    }
    if has(mask::MAX_RD) {
        next.max_rd = small(new.max_rd_atomic, MAX_READS)?;
    }
    if has(mask::MIN_RNR) {
        next.min_rnr = small(new.min_rnr_timer, 31)?;
    }
    if has(mask::TIMEOUT) {
        next.timeout = small(new.timeout, 31)?;
    }
    if has(mask::RETRY_CNT) {
        next.retry_cnt = small(new.retry_cnt, 7)?;
    }
    if has(mask::RNR_RETRY) {
        next.rnr_retry = small(new.rnr_retry, 7)?;
    }
    if has(mask::AV) {
        next.address = address(&new.ah_attr, port, next.port)?;
    }
    Ok((to, next))
}

/// Address resolution, with the errors that kernels give.
fn address(av: &ffi::ibv_ah_attr, port: &PortView, number: u8) -> Result<Address, i32> {
    if av.port_num != number || (port.ethernet && av.is_global == 0) {
        return Err(libc::EINVAL);
    }
    // SAFETY: both views of the union are plain bytes.
    let dgid = unsafe { av.grh.dgid.raw };
    let address = Address {
        global: av.is_global != 0,
        dgid,
        sgid_index: av.grh.sgid_index,
        dlid: av.dlid,
        sl: av.sl,
        traffic_class: av.grh.traffic_class,
        flow_label: av.grh.flow_label,
        hop_limit: av.grh.hop_limit,
    };
    if address.global {
        if dgid == [0; 16] {
            return Err(libc::EINVAL);
        }
        let entry = port.gids.get(usize::from(address.sgid_index)).ok_or(libc::EINVAL)?;
        let sgid = entry.ok_or(libc::ENODEV)?;
        let link_local = |gid: &[u8; 16]| gid[0] == 0xfe && gid[1] & 0xc0 == 0x80;
        if port.ethernet && link_local(&sgid) && !link_local(&dgid) {
            return Err(libc::ETIMEDOUT);
        }
    } else if address.dlid == 0 {
        return Err(libc::EINVAL);
    }
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;
    use mask::*;
    use proptest::prelude::*;

    const LOCAL: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];
    const ROUTED: [u8; 16] = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 0, 1];
    const TO_RTR: u32 = STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD | MIN_RNR;

    fn port(ethernet: bool) -> PortView {
        PortView { ethernet, pkeys: 1, active_mtu: 4, gids: vec![Some(LOCAL), None, Some(ROUTED)] }
    }

    fn good() -> ffi::ibv_qp_attr {
        let mut attr = ffi::ibv_qp_attr {
            port_num: 1,
            path_mtu: 4,
            dest_qp_num: 7,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            ..Default::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.sgid_index = 2;
        attr.ah_attr.grh.dgid.raw = ROUTED;
        attr
    }

    fn to_rtr(change: impl Fn(&mut ffi::ibv_qp_attr), ethernet: bool) -> Result<State, i32> {
        let mut attr = good();
        attr.qp_state = 2;
        change(&mut attr);
        let before = Attr { port: 1, ..Attr::default() };
        modify(State::Init, &before, &attr, TO_RTR, &[port(ethernet)]).map(|(state, _)| state)
    }

    #[test]
    fn addresses_are_resolved_as_kernels_do() {
        assert_eq!(to_rtr(|_| (), true), Ok(State::Rtr));
        assert_eq!(to_rtr(|a| a.ah_attr.is_global = 0, true), Err(libc::EINVAL), "RoCE without GRH");
        assert_eq!(to_rtr(|a| a.ah_attr.grh.sgid_index = 0, true), Err(libc::ETIMEDOUT), "link-local to routed");
        assert_eq!(to_rtr(|a| a.ah_attr.grh.sgid_index = 1, true), Err(libc::ENODEV), "empty entry");
        assert_eq!(to_rtr(|a| a.ah_attr.grh.sgid_index = 3, true), Err(libc::EINVAL), "outside the table");
        assert_eq!(to_rtr(|a| a.ah_attr.grh.dgid.raw = [0; 16], true), Err(libc::EINVAL));
        assert_eq!(to_rtr(|a| a.path_mtu = 5, true), Err(libc::EINVAL), "above active_mtu");
        assert_eq!(to_rtr(|a| a.ah_attr.port_num = 2, true), Err(libc::EINVAL));
        assert_eq!(to_rtr(|a| a.dest_qp_num = 1 << 24, true), Err(libc::EINVAL));
        let no_grh = |lid| {
            move |a: &mut ffi::ibv_qp_attr| {
                a.ah_attr.is_global = 0;
                a.ah_attr.dlid = lid;
            }
        };
        assert_eq!(to_rtr(no_grh(3), false), Ok(State::Rtr), "InfiniBand by LID");
        assert_eq!(to_rtr(no_grh(0), false), Err(libc::EINVAL));
    }

    /// The required attributes again, as the manual page lists them for RC.
    const MANUAL: [(u32, u32, u32, u32); 5] = [
        (0, 1, PKEY_INDEX | PORT | ACCESS, 0),
        (1, 1, 0, PKEY_INDEX | PORT | ACCESS),
        (1, 2, AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD | MIN_RNR, PKEY_INDEX | ALT_PATH | ACCESS),
        (2, 3, TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_RD, ALT_PATH | MIN_RNR | PATH_MIG | ACCESS),
        (3, 3, 0, ACCESS | ALT_PATH | PATH_MIG | MIN_RNR),
    ];

    proptest! {
        #[test]
        fn exactly_the_transitions_of_the_manual(
            from in prop::sample::select(vec![0u32, 1, 2, 3, 6]),
            to in 0u32..8,
            base in 0usize..5,
            noise in prop::collection::vec(0u32..21, 0..3),
        ) {
            // Masks near a right one: noise alone would hardly ever be accepted.
            let given = noise.iter().fold(MANUAL[base].2 | STATE, |m, bit| m ^ (1 << bit)) & !CUR_STATE;
            let to = if given & STATE != 0 { to } else { from };
            let rest = given & !STATE;
            let right = match to {
                0 | 6 => rest == 0,
                _ => MANUAL.iter().any(|&(f, t, required, optional)| {
                    f == from && t == to && rest & required == required && rest & !(required | optional) == 0
                }),
            };
            let mut attr = good();
            attr.qp_state = to;
            let before = Attr { port: 1, ..Attr::default() };
            let got = modify(State::from_code(from).unwrap(), &before, &attr, given, &[port(true)]);
            match got {
                Ok((state, _)) => prop_assert!(right && state as u32 == to),
                Err(errno) => { prop_assert!(!right); prop_assert_eq!(errno, libc::EINVAL); }
            }
        }
    }
}
