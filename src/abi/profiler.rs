//! NCCL's profiler (from v10 on), told of work requests as NCCL's own transport tells it, so that what reads those reads
//! these too.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use crate::transfer::profile::{Event, Operation, Posted};
use crate::transfer::{Parent, Profiler};

use super::types::{ncclProfilerCallback_t, ncclResult_t};

/// Steps of an event (`ncclProfilerNetEvent*` of NCCL's nccl_common.h).
const START: c_int = 0;
const STOP: c_int = 1;
/// The kind of plugin, InfiniBand (`NCCL_PROFILER_NET_TYPE_IB`), and the version of [`Descriptor`].
const PLUGIN_ID: i64 = (1 << 16) | 1;
/// The kind of event (`ncclProfileQp`).
const QP: u8 = 1;

/// `ncclProfilerNetIbDescr_v1_t` of NCCL's net_ib_v1.h.
#[repr(C)]
struct Descriptor {
    kind: u8,
    qp: Qp,
}

#[repr(C)]
struct Qp {
    device: c_int,
    wr_id: u64,
    opcode: c_int,
    qp_num: c_int,
    length: usize,
}

// As a C compiler lays out NCCL's.
const _: () = assert!(size_of::<Descriptor>() == 40);
const _: () = assert!(std::mem::offset_of!(Descriptor, qp.device) == 8);
const _: () = assert!(std::mem::offset_of!(Descriptor, qp.wr_id) == 16);
const _: () = assert!(std::mem::offset_of!(Descriptor, qp.opcode) == 24);
const _: () = assert!(std::mem::offset_of!(Descriptor, qp.qp_num) == 28);
const _: () = assert!(std::mem::offset_of!(Descriptor, qp.length) == 32);

/// NCCL's callback, by which it takes events for whatever profiler is loaded, if any.
struct Callback(unsafe extern "C" fn(*mut *mut c_void, c_int, *mut c_void, i64, *mut c_void) -> ncclResult_t);

impl fmt::Debug for Callback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NCCL's profiler callback")
    }
}

/// The profiler behind NCCL's callback; None where NCCL gives none.
pub(super) fn of(callback: ncclProfilerCallback_t) -> Option<Arc<dyn Profiler>> {
    Some(Arc::new(Callback(callback?)))
}

impl Profiler for Callback {
    fn begin(&self, parent: Parent, posted: &Posted) -> Event {
        let opcode = match posted.operation {
            Operation::Write => ibverbs_sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE,
            Operation::WriteWithImm => ibverbs_sys::ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
            Operation::Receive => ibverbs_sys::ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
        };
        let mut descriptor = Descriptor {
            kind: QP,
            qp: Qp {
                device: c_int::try_from(posted.rail).unwrap_or(c_int::MAX),
                wr_id: posted.wr_id,
                opcode: opcode.cast_signed(),
                qp_num: posted.qp_num.cast_signed(),
                length: usize::try_from(posted.bytes).unwrap_or(usize::MAX),
            },
        };
        let mut event = ptr::null_mut();
        // SAFETY: NCCL's own function, and the name that it gave to a transfer that is still under way. What it returns
        // changes nothing: a transfer does not fail because it can't be profiled.
        unsafe { (self.0)(&raw mut event, START, parent.0, PLUGIN_ID, (&raw mut descriptor).cast()) };
        NonNull::new(event)
    }

    fn end(&self, event: NonNull<c_void>) {
        let mut event = event.as_ptr();
        // SAFETY: NCCL's own function, and an event that it began.
        unsafe { (self.0)(&raw mut event, STOP, ptr::null_mut(), 0, ptr::null_mut()) };
    }
}
