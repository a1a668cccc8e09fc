//! What the verbs ABI fixes and `ibverbs-sys` does not say: the work completion, whose fields are private there, and the
//! padding behind a device. Types only: calling a function of `ibverbs-sys` would need the real libibverbs.
use ibverbs_sys as ffi;
use std::mem::{offset_of, size_of};

/// `struct ibv_wc`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    pub imm_data: u32,
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

/// The part of `struct ibv_send_wr` that is read here: callers built against older headers have a shorter one than today's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendWr {
    pub(crate) wr_id: u64,
    pub(crate) next: *mut Self,
    pub(crate) sg_list: *mut ffi::ibv_sge,
    pub(crate) num_sge: i32,
    pub(crate) opcode: u32,
    pub(crate) send_flags: u32,
    pub(crate) imm_data: u32,
    /// Of the union's `rdma` member; for a SEND these two mean nothing.
    pub(crate) remote_addr: u64,
    pub(crate) rkey: u32,
}

const _: () = {
    assert!(offset_of!(SendWr, send_flags) == offset_of!(ffi::ibv_send_wr, send_flags));
    assert!(offset_of!(SendWr, imm_data) == offset_of!(ffi::ibv_send_wr, __bindgen_anon_1));
    assert!(offset_of!(SendWr, remote_addr) == offset_of!(ffi::ibv_send_wr, wr));
    assert!(size_of::<Wc>() == size_of::<ffi::ibv_wc>() && size_of::<Wc>() == 48);
    assert!(offset_of!(Wc, imm_data) == offset_of!(ffi::ibv_wc, imm_data));
    assert!(offset_of!(Wc, qp_num) == offset_of!(ffi::ibv_wc, qp_num));
    assert!(offset_of!(Wc, dlid_path_bits) == offset_of!(ffi::ibv_wc, dlid_path_bits));
    // Inline functions of verbs.h reach the data path through these offsets.
    assert!(offset_of!(ffi::ibv_context, ops) == 8);
    assert!(offset_of!(ffi::ibv_context, ops) + offset_of!(ffi::ibv_context_ops, poll_cq) == 96);
    assert!(offset_of!(ffi::ibv_context, ops) + offset_of!(ffi::ibv_context_ops, post_send) == 208);
    assert!(offset_of!(ffi::ibv_context, ops) + offset_of!(ffi::ibv_context_ops, post_recv) == 216);
    assert!(offset_of!(ffi::ibv_context, abi_compat) == 320);
    assert!(offset_of!(ffi::ibv_qp, qp_num) == 52 && offset_of!(ffi::ibv_qp, qp_type) == 60);
    assert!(size_of::<ffi::ibv_device>() == 664);
};

/// Bytes of `ibv_port_attr` that every caller's version has; newer ones have `active_speed_ex` behind them.
pub(crate) const PORT_ATTR_COMMON: usize = offset_of!(ffi::ibv_port_attr, active_speed_ex);
const _: () = assert!(PORT_ATTR_COMMON == 52);

/// A device as handed out. libmlx5 compares a pointer just behind `ibv_device` to tell its own devices: it finds null.
#[repr(C)]
pub(crate) struct DeviceHandle {
    pub(crate) ibv: ffi::ibv_device,
    pub(crate) behind: [u64; 4],
    pub(crate) index: usize,
}

/// `IBV_ACCESS_*`, as plain bits.
pub mod access {
    pub const LOCAL_WRITE: u32 = 1;
    pub const REMOTE_WRITE: u32 = 1 << 1;
    pub const REMOTE_READ: u32 = 1 << 2;
    pub const REMOTE_ATOMIC: u32 = 1 << 3;
    /// Bits from here on are hints that a provider may ignore.
    pub const OPTIONAL: u32 = 0x3ff0_0000;
    /// What this adapter knows: the four above, MW_BIND, ON_DEMAND is not offered, HUGETLB.
    pub const KNOWN: u32 = 0xf | 1 << 4 | 1 << 7 | OPTIONAL;
}

/// `IBV_SEND_*`, as plain bits.
pub mod send_flag {
    pub const FENCE: u32 = 1;
    pub const SIGNALED: u32 = 1 << 1;
    pub const SOLICITED: u32 = 1 << 2;
    pub const INLINE: u32 = 1 << 3;
}

/// `IBV_QP_*` mask bits of `ibv_modify_qp`.
pub mod mask {
    pub const STATE: u32 = 1;
    pub const CUR_STATE: u32 = 1 << 1;
    pub const EN_SQD: u32 = 1 << 2;
    pub const ACCESS: u32 = 1 << 3;
    pub const PKEY_INDEX: u32 = 1 << 4;
    pub const PORT: u32 = 1 << 5;
    pub const QKEY: u32 = 1 << 6;
    pub const AV: u32 = 1 << 7;
    pub const PATH_MTU: u32 = 1 << 8;
    pub const TIMEOUT: u32 = 1 << 9;
    pub const RETRY_CNT: u32 = 1 << 10;
    pub const RNR_RETRY: u32 = 1 << 11;
    pub const RQ_PSN: u32 = 1 << 12;
    pub const MAX_RD: u32 = 1 << 13;
    pub const ALT_PATH: u32 = 1 << 14;
    pub const MIN_RNR: u32 = 1 << 15;
    pub const SQ_PSN: u32 = 1 << 16;
    pub const MAX_DEST_RD: u32 = 1 << 17;
    pub const PATH_MIG: u32 = 1 << 18;
    pub const CAP: u32 = 1 << 19;
    pub const DEST_QPN: u32 = 1 << 20;
}
