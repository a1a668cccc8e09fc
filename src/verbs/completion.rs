//! Work completions. One that failed exposes only what verbs define for it: wr_id, status, qp_num, vendor_err
//! (`man ibv_poll_cq`); the rest of it is garbage and can't be reached.

use std::mem::MaybeUninit;

use ibverbs_sys as ib;

/// A work completion as the device wrote it. Own declaration, since `ibv_wc` of ibverbs-sys has private fields.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Wc {
    wr_id: u64,
    status: u32,
    opcode: u32,
    vendor_err: u32,
    byte_len: u32,
    imm_data: u32,
    qp_num: u32,
    src_qp: u32,
    wc_flags: u32,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
}
const _: () = assert!(size_of::<Wc>() == size_of::<ib::ibv_wc>());
const _: () = assert!(align_of::<Wc>() == align_of::<ib::ibv_wc>());
const _: () = assert!(std::mem::offset_of!(Wc, imm_data) == std::mem::offset_of!(ib::ibv_wc, imm_data));
const _: () = assert!(std::mem::offset_of!(Wc, qp_num) == std::mem::offset_of!(ib::ibv_wc, qp_num));
const _: () = assert!(std::mem::offset_of!(Wc, wc_flags) == std::mem::offset_of!(ib::ibv_wc, wc_flags));
const _: () = assert!(std::mem::offset_of!(Wc, dlid_path_bits) == std::mem::offset_of!(ib::ibv_wc, dlid_path_bits));

impl std::fmt::Debug for Wc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.read().fmt(f)
    }
}

/// A completion, read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Completion {
    /// A request of the send queue is done.
    Sent {
        wr_id: u64,
    },
    /// A receive was consumed.
    Arrived(Arrived),
    Failed(Failure),
}

/// A message that consumed a receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    pub wr_id: u64,
    pub bytes: u32,
    /// Host byte order.
    pub imm: Option<u32>,
}

/// Everything that is defined of a completion that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Failure {
    pub wr_id: u64,
    /// IBV_WC_* status, not 0.
    pub status: u32,
    pub qp_num: u32,
    pub vendor_err: u32,
}

impl Failure {
    /// The request was still outstanding when its queue pair went to the error state: never the first cause.
    pub fn is_flush(&self) -> bool {
        self.status == ib::ibv_wc_status::IBV_WC_WR_FLUSH_ERR
    }

    /// The status by its name in `<infiniband/verbs.h>`, without IBV_WC_.
    pub fn name(&self) -> &'static str {
        use ib::ibv_wc_status as s;
        match self.status {
            s::IBV_WC_LOC_LEN_ERR => "LOC_LEN_ERR",
            s::IBV_WC_LOC_QP_OP_ERR => "LOC_QP_OP_ERR",
            s::IBV_WC_LOC_PROT_ERR => "LOC_PROT_ERR",
            s::IBV_WC_WR_FLUSH_ERR => "WR_FLUSH_ERR",
            s::IBV_WC_MW_BIND_ERR => "MW_BIND_ERR",
            s::IBV_WC_BAD_RESP_ERR => "BAD_RESP_ERR",
            s::IBV_WC_LOC_ACCESS_ERR => "LOC_ACCESS_ERR",
            s::IBV_WC_REM_INV_REQ_ERR => "REM_INV_REQ_ERR",
            s::IBV_WC_REM_ACCESS_ERR => "REM_ACCESS_ERR",
            s::IBV_WC_REM_OP_ERR => "REM_OP_ERR",
            s::IBV_WC_RETRY_EXC_ERR => "RETRY_EXC_ERR",
            s::IBV_WC_RNR_RETRY_EXC_ERR => "RNR_RETRY_EXC_ERR",
            s::IBV_WC_REM_ABORT_ERR => "REM_ABORT_ERR",
            s::IBV_WC_FATAL_ERR => "FATAL_ERR",
            s::IBV_WC_RESP_TIMEOUT_ERR => "RESP_TIMEOUT_ERR",
            s::IBV_WC_GENERAL_ERR => "GENERAL_ERR",
            _ => "unknown status",
        }
    }

    /// What usually lies behind the status, and the next step.
    pub fn hint(&self) -> &'static str {
        use ib::ibv_wc_status as s;
        match self.status {
            s::IBV_WC_RETRY_EXC_ERR => {
                "the peer's NIC stopped answering: look at the peer host and process, the link and switch counters of both \
                 ports, and whether the GIDs above can reach each other; NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT set how long \
                 the NIC tries"
            }
            s::IBV_WC_RNR_RETRY_EXC_ERR => "the peer posted no receive: a defect of the plugin, please report it",
            s::IBV_WC_LOC_PROT_ERR => {
                "the NIC may not read the local buffer: with GPU memory look at ACS on the PCI bridges and the IOMMU, else \
                 the buffer was deregistered while in use"
            }
            s::IBV_WC_REM_ACCESS_ERR => {
                "the peer's NIC refused the address or key: the peer deregistered the buffer while in use, or with GPU \
                 memory its peer memory driver failed"
            }
            s::IBV_WC_REM_INV_REQ_ERR => {
                "the peer's NIC refused the request: compare MTU and NIC settings of both hosts"
            }
            s::IBV_WC_REM_OP_ERR => {
                "the peer's NIC could not carry out the request: with GPU memory look at ACS and the IOMMU of the peer host"
            }
            s::IBV_WC_LOC_QP_OP_ERR => {
                "the local NIC could not carry out the request: with RoCE see whether its interface is up and still has the \
                 address of the GID above"
            }
            s::IBV_WC_LOC_LEN_ERR => "a message was longer than the port allows, or the path MTUs of both ends differ",
            s::IBV_WC_WR_FLUSH_ERR => {
                "the queue pair was moved to the error state; an event or the peer's log has the cause"
            }
            _ => "look at the NIC's log and counters on both hosts",
        }
    }
}

impl Wc {
    /// Sorts the completion by what may be read of it.
    #[inline]
    pub fn read(&self) -> Completion {
        if self.status != ib::ibv_wc_status::IBV_WC_SUCCESS {
            return Completion::Failed(Failure {
                wr_id: self.wr_id,
                status: self.status,
                qp_num: self.qp_num,
                vendor_err: self.vendor_err,
            });
        }
        if self.opcode & ib::ibv_wc_opcode::IBV_WC_RECV == 0 {
            return Completion::Sent { wr_id: self.wr_id };
        }
        let with_imm = self.wc_flags & ib::ibv_wc_flags::IBV_WC_WITH_IMM.0 != 0;
        Completion::Arrived(Arrived {
            wr_id: self.wr_id,
            bytes: self.byte_len,
            imm: with_imm.then_some(u32::from_be(self.imm_data)),
        })
    }
}

/// Room for one poll, on the caller's stack.
pub struct WcBatch {
    pub(super) room: [MaybeUninit<Wc>; Self::LEN],
}

impl std::fmt::Debug for WcBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WcBatch")
    }
}

impl Default for WcBatch {
    #[inline]
    fn default() -> Self {
        Self { room: [MaybeUninit::uninit(); Self::LEN] }
    }
}

impl WcBatch {
    /// Completions taken in one poll.
    pub const LEN: usize = 16;
}

/// Completions for the tests of other rooms.
#[cfg(test)]
impl Wc {
    const BLANK: Self = Self {
        wr_id: 0,
        status: ib::ibv_wc_status::IBV_WC_SUCCESS,
        opcode: ib::ibv_wc_opcode::IBV_WC_RDMA_WRITE,
        vendor_err: 0,
        byte_len: 0,
        imm_data: 0,
        qp_num: 0,
        src_qp: 0,
        wc_flags: 0,
        pkey_index: 0,
        slid: 0,
        sl: 0,
        dlid_path_bits: 0,
    };

    pub(crate) fn sent(wr_id: u64) -> Self {
        Self { wr_id, ..Self::BLANK }
    }

    pub(crate) fn arrived(wr_id: u64, byte_len: u32, imm: u32) -> Self {
        let opcode = ib::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM;
        let wc_flags = ib::ibv_wc_flags::IBV_WC_WITH_IMM.0;
        Self { wr_id, opcode, byte_len, imm_data: imm.to_be(), wc_flags, ..Self::BLANK }
    }

    pub(crate) fn failed(wr_id: u64, status: u32, vendor_err: u32) -> Self {
        Self { wr_id, status, vendor_err, byte_len: 32549, opcode: 32616, ..Self::BLANK }
    }
}

#[cfg(test)]
impl WcBatch {
    /// What a device does in a poll: takes at most a batch from the queue.
    pub(crate) fn fill(&mut self, queue: &mut std::collections::VecDeque<Wc>) -> &[Wc] {
        let n = queue.len().min(Self::LEN);
        for room in &mut self.room[..n] {
            room.write(queue.pop_front().expect("n of them"));
        }
        // SAFETY: the first n were written above.
        unsafe { std::slice::from_raw_parts(self.room.as_ptr().cast::<Wc>(), n) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn garbage(status: u32, opcode: u32) -> Wc {
        Wc {
            wr_id: 77,
            status,
            opcode,
            vendor_err: 129,
            byte_len: 32549,
            imm_data: 0x0102_0304_u32.to_be(),
            qp_num: 5,
            src_qp: 9,
            wc_flags: ib::ibv_wc_flags::IBV_WC_WITH_IMM.0,
            pkey_index: 0,
            slid: 0,
            sl: 0,
            dlid_path_bits: 0,
        }
    }

    #[test]
    fn a_failed_completion_shows_four_fields_only() {
        let wc = garbage(ib::ibv_wc_status::IBV_WC_RETRY_EXC_ERR, 32616);
        let Completion::Failed(f) = wc.read() else { panic!("failed completion") };
        assert_eq!((f.wr_id, f.status, f.qp_num, f.vendor_err), (77, 12, 5, 129));
        assert_eq!(f.name(), "RETRY_EXC_ERR");
        let text = format!("{wc:?}");
        assert!(!text.contains("32549") && !text.contains("32616"), "{text}");
    }

    #[test]
    fn send_and_receive_are_told_apart() {
        let ok = ib::ibv_wc_status::IBV_WC_SUCCESS;
        assert_eq!(garbage(ok, ib::ibv_wc_opcode::IBV_WC_RDMA_WRITE).read(), Completion::Sent { wr_id: 77 });
        assert_eq!(garbage(ok, ib::ibv_wc_opcode::IBV_WC_RDMA_READ).read(), Completion::Sent { wr_id: 77 });
        assert_eq!(
            garbage(ok, ib::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM).read(),
            Completion::Arrived(Arrived { wr_id: 77, bytes: 32549, imm: Some(0x0102_0304) })
        );
    }
}
