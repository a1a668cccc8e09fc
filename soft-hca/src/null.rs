//! The null engine: a transfer happens inside the call that posts it. Both ends live in one process and are used by one
//! thread, which is what makes plain table look-ups and unlocked rings right. Cost is measured on it: no lock, no
//! allocation, no system call, no hashing.
use crate::abi::{SendWr, access, send_flag};
use crate::adapter::Adapter;
use crate::qp::{INDEX_MASK, MAX_SGE, Op, Qp, RecvWqe, Sge, State, status, vendor_code};
use crate::queue::{Cqe, Freed};
use crate::table;
use ibverbs_sys as ffi;
use std::ptr;
use std::sync::atomic::Ordering::Relaxed;

/// # Safety
/// No queue pair is destroyed while the result is in use.
#[inline]
unsafe fn find(number: u32) -> Option<&'static Qp> {
    // SAFETY: entered by its owner, and not left yet.
    unsafe { table::find(number & INDEX_MASK) }.filter(|qp| qp.num == number)
}

/// # Safety
/// The caller is the only thread that uses the adapter; `wr` is as verbs(3) has it.
#[inline]
pub(crate) unsafe fn send(adapter: &Adapter, qp: &Qp, wr: &SendWr) -> Result<(), i32> {
    let state = qp.state();
    let op = Op::from_code(wr.opcode).ok_or(libc::EINVAL)?;
    let count = usize::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
    if !matches!(state, State::Rts | State::Err) || count > qp.send_sge as usize || count > MAX_SGE {
        return Err(libc::EINVAL);
    }
    if qp.sq.is_full() {
        return Err(libc::ENOMEM);
    }
    let sges = if count == 0 {
        &[][..]
    } else {
        // SAFETY: num_sge entries, says the caller.
        unsafe { std::slice::from_raw_parts(wr.sg_list, count) }
    };
    let outcome = if state == State::Err {
        Err(status::FLUSH)
    } else if let Some((code, _)) = adapter.faults.send() {
        Err(code)
    } else {
        // SAFETY: the caller's.
        unsafe { transfer(adapter, qp, op, wr, sges) }
    };
    let at = qp.sq.commit();
    let frees = Freed { qp: qp.index, up_to: at, receive: false };
    match outcome {
        Ok(len) if qp.signals(wr.send_flags) => {
            let cqe = Cqe { wc: qp.send_wc(wr.wr_id, op, len), frees };
            // SAFETY: the only thread.
            unsafe { qp.send_cq.push(&cqe, false) };
        }
        Ok(_) => {}
        Err(code) => fail(qp, wr.wr_id, code, frees),
    }
    Ok(())
}

/// Moves the bytes and completes the receive. `Err` is the requester's status.
#[inline]
unsafe fn transfer(adapter: &Adapter, qp: &Qp, op: Op, wr: &SendWr, sges: &[ffi::ibv_sge]) -> Result<u64, u32> {
    // SAFETY: nothing is destroyed inside this call.
    let peer = unsafe { find(qp.dest.load(Relaxed)) }
        .filter(|peer| matches!(peer.state(), State::Rtr | State::Rts) && peer.dest.load(Relaxed) == qp.num)
        .ok_or(status::RETRY_EXC)?;
    let len = sges.iter().map(|sge| u64::from(sge.length)).sum::<u64>();
    if len > qp.max_msg {
        return Err(status::LOC_LEN);
    }
    let (raddr, rkey, imm) = (wr.remote_addr, wr.rkey, wr.imm_data);
    let at = peer.rq_next.load(Relaxed);
    if op.receives() && peer.receives_left() == 0 {
        return Err(status::RNR_RETRY_EXC);
    }
    let inline = wr.send_flags & send_flag::INLINE != 0;
    match op {
        Op::Write | Op::WriteImm | Op::Read if len > 0 => {
            let right = if op == Op::Read { access::REMOTE_READ } else { access::REMOTE_WRITE };
            let mut remote = adapter
                .regions
                .check(rkey, peer.pd, raddr, len, right)
                .filter(|_| peer.access.load(Relaxed) & right != 0)
                .ok_or_else(|| refuse(peer, None, status::REM_ACCESS))?
                .ptr;
            let want = if op == Op::Read { access::LOCAL_WRITE } else { 0 };
            for sge in sges {
                let size = sge.length as usize;
                let local = if inline {
                    ptr::with_exposed_provenance_mut(usize::try_from(sge.addr).unwrap_or(0))
                } else {
                    adapter
                        .regions
                        .check(sge.lkey, qp.pd, sge.addr, sge.length.into(), want)
                        .ok_or(status::LOC_PROT)?
                        .ptr
                };
                let (to, from) = if op == Op::Read { (local, remote) } else { (remote, local) };
                // SAFETY: both ranges were checked. They may overlap: a queue pair can write onto its own source.
                unsafe { ptr::copy(from, to, size) };
                remote = remote.wrapping_add(size);
            }
        }
        // SAFETY: a receive is there; the caller's contract for the rest.
        Op::Send | Op::SendImm => unsafe { scatter(adapter, qp, peer, at, sges, inline)? },
        _ => {}
    }
    if op.receives() {
        peer.rq_next.store(at.wrapping_add(1), Relaxed);
        // SAFETY: a receive is left.
        let wr_id = unsafe { peer.recv_wr_id(at) };
        // SAFETY: the only thread.
        unsafe {
            peer.recv_cq.push(&peer.recv_cqe(at, wr_id, op, len, imm), wr.send_flags & send_flag::SOLICITED != 0)
        };
    }
    Ok(len)
}

/// Bytes of a SEND into the receive request at `at`.
unsafe fn scatter(
    adapter: &Adapter,
    qp: &Qp,
    peer: &Qp,
    at: u32,
    sges: &[ffi::ibv_sge],
    inline: bool,
) -> Result<(), u32> {
    let wqe = peer.rq.at(at);
    // SAFETY: posted, so count and that many entries are written.
    let count = unsafe { RecvWqe::sge_count_at(wqe).read() };
    let mut targets = [Sge::default(); MAX_SGE];
    for (i, target) in targets.iter_mut().enumerate().take(count) {
        // SAFETY: as above.
        *target = unsafe { RecvWqe::sge_at(wqe, i).read() };
    }
    let room = targets.iter().map(|sge| u64::from(sge.len)).sum::<u64>();
    if sges.iter().map(|sge| u64::from(sge.length)).sum::<u64>() > room {
        return Err(refuse(peer, Some(status::LOC_LEN), status::REM_INV_REQ));
    }
    let mut targets = targets.iter().filter(|sge| sge.len > 0);
    let (mut into, mut used) = (targets.next(), 0u32);
    for sge in sges {
        let mut done = 0u32;
        while done < sge.length {
            let Some(target) = into else { return Err(status::REM_OP) };
            let size = (sge.length - done).min(target.len - used);
            let to = adapter
                .regions
                .check(target.lkey, peer.pd, target.addr + u64::from(used), size.into(), access::LOCAL_WRITE)
                .ok_or_else(|| refuse(peer, Some(status::LOC_PROT), status::REM_OP))?
                .ptr;
            let at = sge.addr + u64::from(done);
            let from = if inline {
                ptr::with_exposed_provenance_mut(usize::try_from(at).unwrap_or(0))
            } else {
                adapter.regions.check(sge.lkey, qp.pd, at, size.into(), 0).ok_or(status::LOC_PROT)?.ptr
            };
            // SAFETY: both ranges were checked.
            unsafe { ptr::copy(from, to, size as usize) };
            (done, used) = (done + size, used + size);
            if used == target.len {
                (into, used) = (targets.next(), 0);
            }
        }
    }
    Ok(())
}

/// # Safety
/// As [`send`].
#[inline]
pub(crate) unsafe fn receive(qp: &Qp, wr: &ffi::ibv_recv_wr) -> Result<(), i32> {
    let state = qp.state();
    let count = usize::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
    if state == State::Reset || count > qp.recv_sge as usize || count > MAX_SGE {
        return Err(libc::EINVAL);
    }
    if qp.rq.is_full() {
        return Err(libc::ENOMEM);
    }
    let slot: *mut RecvWqe = qp.rq.at(qp.rq.head());
    // SAFETY: the ring has room and this is its only producer.
    unsafe { RecvWqe::wr_id_at(slot).write(wr.wr_id) };
    // SAFETY: as above.
    unsafe { RecvWqe::sge_count_at(slot).write(count) };
    for i in 0..count {
        // SAFETY: num_sge entries, says the caller.
        let sge = unsafe { wr.sg_list.wrapping_add(i).read() };
        // SAFETY: as above.
        unsafe { RecvWqe::sge_at(slot, i).write(Sge { addr: sge.addr, len: sge.length, lkey: sge.lkey }) };
    }
    qp.rq.commit();
    if state == State::Err {
        flush_receives(qp);
    }
    Ok(())
}

#[cold]
fn fail(qp: &Qp, wr_id: u64, code: u32, frees: Freed) {
    qp.set_state(State::Err);
    let wqe = crate::qp::failed(wr_id, code, vendor_code(code), qp.num);
    // SAFETY: the only thread.
    unsafe { qp.send_cq.push(&Cqe { wc: wqe, frees }, false) };
    flush_receives(qp);
}

/// The responder fails; the result is what the requester is told.
#[cold]
fn refuse(peer: &Qp, receive: Option<u32>, remote: u32) -> u32 {
    peer.set_state(State::Err);
    if let Some(code) = receive {
        fail_receive(peer, code);
    }
    let access = remote == status::REM_ACCESS;
    peer.event(if access { ffi::IBV_EVENT_QP_ACCESS_ERR } else { ffi::IBV_EVENT_QP_REQ_ERR });
    flush_receives(peer);
    remote
}

fn flush_receives(qp: &Qp) {
    while qp.receives_left() > 0 {
        fail_receive(qp, status::FLUSH);
    }
}

fn fail_receive(qp: &Qp, code: u32) {
    let at = qp.rq_next.load(Relaxed);
    // SAFETY: the callers saw that a receive is left.
    let wr_id = unsafe { qp.recv_wr_id(at) };
    qp.rq_next.store(at.wrapping_add(1), Relaxed);
    // SAFETY: the only thread.
    unsafe { qp.recv_cq.push(&qp.recv_failed_cqe(at, wr_id, code), true) };
}
