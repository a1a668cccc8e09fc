//! The null engine: everything happens inside the call.
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::cast_possible_truncation,
    reason = "the verbs are called as C programs call them, on small numbers"
)]
mod rig;

#[cfg(test)]
mod tests {
    use crate::rig::*;
    use soft_hca::fabric::{EngineKind, Fabric};
    use soft_hca::verbs as v;
    use std::sync::{Mutex, MutexGuard, PoisonError};

    /// One thread at a time is the engine's contract.
    fn alone() -> MutexGuard<'static, ()> {
        static ALONE: Mutex<()> = Mutex::new(());
        let guard = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let mut fabric = Fabric::default_for("here");
        fabric.engine = EngineKind::Null;
        soft_hca::install(fabric, 0);
        guard
    }

    fn threads() -> usize {
        std::fs::read_dir("/proc/self/task")
            .unwrap()
            .filter(|task| {
                let name = std::fs::read_to_string(task.as_ref().unwrap().path().join("comm")).unwrap_or_default();
                name.trim() == "soft-hca"
            })
            .count()
    }

    #[test]
    fn every_operation_is_done_when_the_call_returns() {
        let _alone = alone();
        let nic = Nic::open(0);
        assert_eq!(threads(), 0, "no engine thread");
        let (a, b) = pair(&nic);
        let (mut src, mut dst) = (pattern(5000, 1), vec![0u8; 5000]);
        let (src_mr, dst_mr) = (nic.mr(&mut src, RIGHTS), nic.mr(&mut dst, RIGHTS));
        assert_eq!(b.recv(7, &[]), 0);
        let parts = [sge(&src[..33], src_mr), sge(&src[33..], src_mr)];
        a.write(1, &parts, addr(&dst), rkey(dst_mr), Some(99));
        assert_eq!(dst, src);
        let (sent, got) = (a.poll(), b.poll());
        assert_eq!((sent.len(), sent[0].status, sent[0].opcode), (1, 0, 1));
        assert_eq!((got[0].wr_id, got[0].opcode, got[0].byte_len, u32::from_be(got[0].imm_data)), (7, 129, 5000, 99));
        dst.fill(0);
        assert_eq!(b.recv(8, &[sge(&dst[4000..], dst_mr), sge(&dst[..500], dst_mr)]), 0);
        assert_eq!(a.send(wr(2, 2, &[sge(&src[..1300], src_mr)], 0, 0, 0)), 0);
        assert_eq!(([&dst[4000..], &dst[..300]].concat(), b.poll()[0].byte_len), (src[..1300].to_vec(), 1300));
        dst.fill(0);
        assert_eq!(a.send(wr(3, 4, &[sge(&dst, dst_mr)], addr(&src), rkey(src_mr), 0)), 0);
        assert_eq!(dst, src);
        let mut small = wr(4, 0, &[sge(&[5; 24], std::ptr::null_mut())], addr(&dst), rkey(dst_mr), 0);
        small.send_flags = 8;
        assert_eq!(a.send(small), 0);
        assert_eq!((dst[23], dst[24] == src[24]), (5, true));
        assert_eq!(a.poll().iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [2, 3], "the last was not signalled");
    }

    #[test]
    fn errors_and_flushes() {
        let _alone = alone();
        let nic = Nic::open(0);
        let (mut src, mut dst) = (pattern(64, 1), vec![0u8; 64]);
        let (src_mr, dst_mr) = (nic.mr(&mut src, 0), nic.mr(&mut dst, RIGHTS));
        let (a, b) = pair(&nic);
        assert_eq!(b.recv(7, &[]), 0);
        a.write(1, &[sge(&src, src_mr)], addr(&dst) + 1, rkey(dst_mr), None);
        a.write(2, &[], 0, 0, None);
        let failed: Vec<_> = a.poll().iter().map(|wc| (wc.wr_id, wc.status, wc.vendor_err)).collect();
        assert_eq!(failed, [(1, 10, 0x88), (2, 5, 249)]);
        assert_eq!(b.recv(8, &[]), 0);
        assert_eq!(b.poll().iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(), [(7, 5), (8, 5)]);
        let (a, _b) = pair(&nic);
        a.write(1, &[], 0, 0, Some(1));
        assert_eq!(a.poll()[0].status, 13, "nobody could post a receive meanwhile");
        let (a, b) = pair(&nic);
        b.to_err();
        a.write(1, &[], 0, 0, None);
        assert_eq!(a.poll()[0].status, 12);
        let (a, _b) = pair(&nic);
        assert_eq!(a.recv(1, &[]), 0);
        a.to_err();
        assert_eq!(a.poll().iter().map(|wc| (wc.wr_id, wc.status)).collect::<Vec<_>>(), [(1, 5)]);
        assert_eq!(unsafe { v::dereg_mr(dst_mr) }, 0);
    }

    #[test]
    fn queues_fill_and_empty() {
        let _alone = alone();
        let nic = Nic::open(0);
        let (a, _b) = pair(&nic);
        for i in 0..64 {
            a.write(i, &[], 0, 0, None);
        }
        assert_eq!(a.send(wr(64, 0, &[], 0, 0, 0)), libc::ENOMEM);
        assert_eq!((a.poll().len(), a.poll().len()), (32, 32));
        assert_eq!(a.send(wr(64, 0, &[], 0, 0, 0)), 0);
        for _ in 0..64 {
            assert_eq!(a.recv(1, &[]), 0);
        }
        assert_eq!(a.recv(1, &[]), libc::ENOMEM);
    }

    /// One message: receive posted, 8 bytes written with immediate, both completions polled. For callgrind, which counts
    /// from and to this function: --toggle-collect='*null_message*'.
    #[inline(never)]
    fn null_message(a: &Qp, b: &Qp, list: &[ibverbs_sys::ibv_sge], raddr: u64, rkey: u32) -> u32 {
        let posted = b.recv(1, &[]);
        let sent = a.send(wr(1, 1, list, raddr, rkey, 7));
        let mut wc = soft_hca::abi::Wc::default();
        let mut take = |cq: *mut ibverbs_sys::ibv_cq| {
            let poll = unsafe { (*(*cq).context).ops.poll_cq.unwrap() };
            unsafe { poll(cq, 1, (&raw mut wc).cast()) }
        };
        u32::from(posted == 0 && sent == 0 && take(a.cq) == 1 && take(b.cq) == 1)
    }

    #[test]
    fn a_message_costs_no_system_call() {
        let _alone = alone();
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut buf = vec![1u8; 64];
        let mr = nic.mr(&mut buf, RIGHTS);
        let list = [sge(&buf[..8], mr)];
        let (target, key) = (addr(&buf[32..]), rkey(mr));
        // In a child under strict seccomp, where every call but read, write and exit is death.
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT);
                let done: u32 = (0..10_000).map(|_| null_message(&a, &b, &list, target, key)).sum();
                libc::syscall(libc::SYS_exit, if done == 10_000 { 0 } else { 1 });
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "{status:#x}");
    }

    /// Under callgrind this is what a message costs here, caller included: a tenth of a thousandth of the collected count.
    #[test]
    #[ignore = "a measurement"]
    fn cost() {
        let _alone = alone();
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut buf = vec![1u8; 64];
        let mr = nic.mr(&mut buf, RIGHTS);
        let list = [sge(&buf[..8], mr)];
        let (target, key) = (addr(&buf[32..]), rkey(mr));
        assert_eq!((0..10_000).map(|_| null_message(&a, &b, &list, target, key)).sum::<u32>(), 10_000);
    }
}
