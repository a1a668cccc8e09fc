//! Reliable connections inside one process: every operation, every failure, as a program sees them through verbs.
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
    use ibverbs_sys as ffi;
    use soft_hca::abi::{access, mask};
    use soft_hca::verbs as v;
    use std::ptr;
    use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    const FLUSH: u32 = 5;

    #[test]
    fn a_large_write_arrives_whole_and_nowhere_else() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut src = pattern(300_001, 1);
        let mut dst = vec![0xEEu8; 300_001 + 64];
        let (src_mr, dst_mr) = (nic.mr(&mut src, 0), nic.mr(&mut dst, RIGHTS));
        assert_eq!(b.recv(77, &[]), 0);
        a.write(5, &[sge(&src, src_mr)], addr(&dst[32..]), rkey(dst_mr), Some(0xabcd));
        let got = b.one();
        assert_eq!((got.wr_id, got.status, got.opcode, got.wc_flags), (77, 0, 129, 2));
        assert_eq!((got.byte_len, u32::from_be(got.imm_data), got.qp_num), (300_001, 0xabcd, b.num()));
        assert_eq!(dst[32..32 + src.len()], src);
        assert!(dst[..32].iter().chain(&dst[32 + src.len()..]).all(|&b| b == 0xEE));
        let sent = a.one();
        assert_eq!((sent.wr_id, sent.status, sent.opcode, sent.qp_num), (5, 0, 1, a.num()));
        a.destroy();
        b.destroy();
    }

    #[test]
    fn sends_scatter_and_gather() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut src = pattern(100, 2);
        let mut dst = vec![0u8; 200];
        let (src_mr, dst_mr) = (nic.mr(&mut src, 0), nic.mr(&mut dst, 1));
        let into = [sge(&dst[100..130], dst_mr), sge(&dst[0..0], dst_mr), sge(&dst[..90], dst_mr)];
        assert_eq!(b.recv(1, &into), 0);
        let from = [sge(&src[..7], src_mr), sge(&src[7..60], src_mr), sge(&src[60..], src_mr)];
        assert_eq!(a.send(wr(2, 3, &from, 0, 0, 9)), 0);
        let got = b.one();
        assert_eq!((got.status, got.opcode, got.byte_len, u32::from_be(got.imm_data)), (0, 128, 100, 9));
        assert_eq!(a.one().status, 0);
        assert_eq!([&dst[100..130], &dst[..70]].concat(), src);
        assert!(dst[70..100].iter().all(|&b| b == 0));
    }

    #[test]
    fn reads_fetch_what_is_there() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut remote = pattern(200_000, 3);
        let mut local = vec![0u8; 200_000];
        let (remote_mr, local_mr) = (nic.mr(&mut remote, RIGHTS), nic.mr(&mut local, 1));
        let into = [sge(&local[..70_001], local_mr), sge(&local[70_001..], local_mr)];
        assert_eq!(a.send(wr(3, 4, &into, addr(&remote), rkey(remote_mr), 0)), 0);
        let got = a.one();
        assert_eq!((got.status, got.opcode, got.byte_len), (0, 2, 200_000));
        assert_eq!(local, remote);
        assert!(b.poll().is_empty(), "the responder sees nothing");
    }

    #[test]
    fn inline_data_can_be_overwritten_at_once() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut dst = vec![0u8; 64];
        let mr = nic.mr(&mut dst, RIGHTS);
        for round in 0..50u8 {
            let mut src = [round; 48];
            let list = [sge(&src[..20], ptr::null_mut()), sge(&src[20..], ptr::null_mut())];
            let mut request = wr(round.into(), 0, &list, addr(&dst), rkey(mr), 0);
            request.send_flags |= 8;
            assert_eq!(a.send(request), 0);
            src.fill(0xff);
            assert_eq!(a.one().status, 0);
            assert!(dst[..48].iter().all(|&b| b == round));
        }
        let mut long = wr(0, 0, &[sge(&[0; 65], ptr::null_mut())], addr(&dst), rkey(mr), 0);
        long.send_flags |= 8;
        assert_eq!(a.send(long), libc::EINVAL, "max_inline_data is 64");
        let _ = b;
    }

    #[test]
    fn nothing_can_be_sent_with_a_stale_list() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        assert_eq!(b.recv(1, &[]), 0);
        let mut request = wr(1, 1, &[], 0, 0, 7);
        request.sg_list = ptr::without_provenance_mut(8);
        assert_eq!(a.send(request), 0);
        let got = b.one();
        assert_eq!((got.status, got.byte_len, u32::from_be(got.imm_data)), (0, 0, 7));
        assert_eq!(a.one().status, 0);
    }

    #[test]
    fn unsignalled_requests_are_silent_and_hold_their_slots() {
        let nic = Nic::open(0);
        let (a, _b) = pair(&nic);
        let mut buf = vec![1u8; 64];
        let mr = nic.mr(&mut buf, RIGHTS);
        let quiet = |signal: bool| {
            let mut request = wr(9, 0, &[], 0, rkey(mr), 0);
            request.send_flags = if signal { 2 } else { 0 };
            a.send(request)
        };
        for i in 0..64 {
            assert_eq!(quiet(i == 40), 0);
        }
        assert_eq!(quiet(false), libc::ENOMEM, "the queue is full until something is polled");
        assert_eq!(a.wait(1).len(), 1);
        for _ in 0..41 {
            assert_eq!(quiet(false), 0);
        }
        assert_eq!(quiet(false), libc::ENOMEM, "41 slots were freed, and no more");
        assert!(a.poll().is_empty());
    }

    #[test]
    fn sq_sig_all_signals_all() {
        let nic = Nic::open(0);
        let a = nic.qp_with(|init| init.sq_sig_all = 1);
        a.connect(&Link::to(&nic, a.num()));
        let mut request = wr(4, 0, &[], 0, 0, 0);
        request.send_flags = 0;
        assert_eq!(a.send(request), 0);
        assert_eq!((a.one().wr_id, unsafe { (*a.qp).state }), (4, 3), "connected to itself");
    }

    #[test]
    fn a_wrong_rkey_fails_both_ends() {
        let nic = Nic::open(0);
        let mut buf = vec![0u8; 128];
        let mr = nic.mr(&mut buf, RIGHTS);
        let read_only = nic.mr(&mut buf, (access::LOCAL_WRITE | access::REMOTE_READ).cast_signed());
        let stale = nic.mr(&mut buf, RIGHTS);
        let stale_key = rkey(stale);
        assert_eq!(unsafe { v::dereg_mr(stale) }, 0);
        let target = addr(&buf);
        for (raddr, key, qp_access, what) in [
            (target, 0, ALL, "no key"),
            (target, stale_key, ALL, "stale"),
            (target, rkey(read_only), ALL, "no write right"),
            (target + 100, rkey(mr), ALL, "past the end"),
            (target - 1, rkey(mr), ALL, "before the start"),
            (target, rkey(mr), 0, "the queue pair allows nothing"),
        ] {
            let (a, b) = pair_with(&nic, |_| (), |link| link.access = qp_access);
            assert_eq!((b.recv(10, &[]), b.recv(11, &[])), (0, 0));
            let mut src = [1u8; 64];
            let src_mr = nic.mr(&mut src, 0);
            a.write(1, &[sge(&src, src_mr)], raddr, key, None);
            a.write(2, &[], target, rkey(mr), None);
            let failed = a.wait(2);
            assert_eq!((failed[0].wr_id, failed[0].status, failed[0].vendor_err), (1, 10, 0x88), "{what}");
            assert_eq!((failed[1].wr_id, failed[1].status, failed[1].vendor_err), (2, FLUSH, 249), "{what}");
            assert_ne!(failed[0].byte_len, 0, "rubbish in the other fields");
            let flushed: Vec<_> = b.wait(2).iter().map(|wc| (wc.wr_id, wc.status, wc.qp_num)).collect();
            assert_eq!(flushed, [(10, FLUSH, b.num()), (11, FLUSH, b.num())]);
            let event = async_event(nic.ctx, LIMIT).unwrap();
            assert_eq!(event.event_type, ffi::IBV_EVENT_QP_ACCESS_ERR);
            assert_eq!(unsafe { event.element.qp }, b.qp);
            assert!(buf.iter().all(|&b| b == 0), "{what}");
            a.destroy();
            b.destroy();
        }
    }

    #[test]
    fn another_protection_domain_does_not_help() {
        let nic = Nic::open(0);
        let other = Nic { pd: unsafe { v::alloc_pd(nic.ctx) }, ..nic };
        let mut buf = vec![0u8; 64];
        let (mine, others) = (nic.mr(&mut buf, RIGHTS), other.mr(&mut buf, RIGHTS));
        let (a, _b) = pair(&nic);
        a.write(1, &[sge(&buf[..8], mine)], addr(&buf), rkey(others), None);
        assert_eq!(a.one().status, 10);
        let (a, _b) = pair(&nic);
        a.write(1, &[sge(&buf[..8], others)], addr(&buf), rkey(mine), None);
        assert_eq!(a.one().status, 4, "LOC_PROT_ERR");
    }

    #[test]
    fn local_protection_errors() {
        let nic = Nic::open(0);
        let mut buf = vec![0u8; 64];
        let mr = nic.mr(&mut buf, RIGHTS);
        let mut fixed = vec![0u8; 64];
        let no_write = nic.mr(&mut fixed, 0);
        // A READ writes the local buffer.
        let (a, b) = pair(&nic);
        assert_eq!(a.send(wr(1, 4, &[sge(&fixed, no_write)], addr(&buf), rkey(mr), 0)), 0);
        assert_eq!(a.one().status, 4);
        assert_eq!(unsafe { (*b.qp).state }, 3, "the peer is not concerned");
        // So does a receive.
        let (a, b) = pair(&nic);
        assert_eq!(b.recv(6, &[sge(&fixed, no_write)]), 0);
        assert_eq!(a.send(wr(1, 2, &[sge(&buf, mr)], 0, 0, 0)), 0);
        assert_eq!((b.one().status, a.one().status), (4, 11));
    }

    #[test]
    fn a_send_that_is_too_long_is_an_invalid_request() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        let mut buf = vec![3u8; 128];
        let mr = nic.mr(&mut buf, RIGHTS);
        assert_eq!((b.recv(1, &[sge(&buf[..63], mr)]), b.recv(2, &[])), (0, 0));
        assert_eq!(a.send(wr(1, 2, &[sge(&buf[64..], mr)], 0, 0, 0)), 0);
        let failed = a.one();
        assert_eq!((failed.status, failed.vendor_err), (9, 0x8a));
        let got: Vec<_> = b.wait(2).iter().map(|wc| (wc.wr_id, wc.status)).collect();
        assert_eq!(got, [(1, 1), (2, FLUSH)]);
    }

    #[test]
    fn mtus_have_to_agree() {
        let nic = Nic::open(0);
        let (a, _b) = pair_with(&nic, |link| link.mtu = 3, |_| ());
        let mut buf = vec![3u8; 8192];
        let mr = nic.mr(&mut buf, RIGHTS);
        a.write(1, &[sge(&buf[..4096], mr)], addr(&buf[4096..]), rkey(mr), None);
        assert_eq!(a.one().status, 9);
    }

    #[test]
    fn flushes_come_in_order_on_both_queues() {
        let nic = Nic::open(0);
        let (a, b) = pair(&nic);
        for id in 0..5 {
            assert_eq!(a.recv(100 + id, &[]), 0);
        }
        // Nothing is received at b, so these wait.
        for id in 0..6 {
            let mut request = wr(id, 1, &[], 0, 0, 0);
            request.send_flags = if id % 2 == 0 { 2 } else { 0 };
            assert_eq!(a.send(request), 0);
        }
        a.to_err();
        assert_eq!(a.send(wr(6, 1, &[], 0, 0, 0)), 0, "accepted in ERR");
        assert_eq!(a.recv(105, &[]), 0, "accepted in ERR");
        let all = a.wait(13);
        assert!(all.iter().all(|wc| (wc.status, wc.vendor_err, wc.qp_num) == (FLUSH, 249, a.num())));
        let ids = |from: u64| all.iter().map(|wc| wc.wr_id).filter(|id| id / 100 == from / 100).collect::<Vec<_>>();
        assert_eq!(ids(0), [0, 1, 2, 3, 4, 5, 6], "unsignalled ones too");
        assert_eq!(ids(100), [100, 101, 102, 103, 104, 105]);
        assert_eq!(b.recv(1, &[]), 0);
    }

    #[test]
    fn receiver_not_ready_waits_and_gives_up() {
        let nic = Nic::open(0);
        // 12: 0.64 ms, tried once and three times again.
        let (a, b) = pair_with(&nic, |link| link.rnr_retry = 3, |link| link.min_rnr = 12);
        let start = Instant::now();
        assert_eq!(a.send(wr(1, 1, &[], 0, 0, 0)), 0);
        let failed = a.one();
        assert_eq!((failed.status, failed.vendor_err), (13, 0x87));
        assert!(start.elapsed() >= Duration::from_micros(3 * 640), "{:?}", start.elapsed());
        let _ = b;
        // 7 never gives up, and a late receive is enough.
        let (a, b) = pair_with(&nic, |link| link.rnr_retry = 7, |link| link.min_rnr = 12);
        assert_eq!(a.send(wr(2, 1, &[], 0, 0, 5)), 0);
        std::thread::sleep(Duration::from_millis(10));
        assert!(a.poll().is_empty());
        assert_eq!(b.recv(3, &[]), 0);
        assert_eq!((b.one().status, a.one().status), (0, 0));
    }

    #[test]
    fn nobody_there_times_out_in_the_time_configured() {
        let nic = Nic::open(0);
        let gone = nic.qp();
        let number = gone.num();
        let reset = nic.qp();
        let init = nic.qp();
        let mut link = Link { timeout: 10, retry_cnt: 2, ..Link::to(&nic, number) };
        init.init(&link);
        gone.destroy();
        for (dest, gid, what) in [
            (number, nic.gid, "destroyed"),
            (reset.num(), nic.gid, "in RESET"),
            (init.num(), nic.gid, "in INIT"),
            (0xff_0000, nic.gid, "no such process"),
            (reset.num(), [9; 16], "no such address"),
        ] {
            (link.dest, link.gid) = (dest, gid);
            let a = nic.qp();
            a.connect(&link);
            let start = Instant::now();
            assert_eq!(a.send(wr(1, 1, &[], 0, 0, 0)), 0);
            let failed = a.one();
            assert_eq!((failed.status, failed.vendor_err), (12, 129), "{what}");
            let least = Duration::from_nanos(3 * (4096 << 10));
            assert!(start.elapsed() >= least && start.elapsed() < least * 60, "{what}: {:?}", start.elapsed());
            a.destroy();
        }
    }

    #[test]
    fn a_peer_in_err_and_wrong_sequence_numbers_are_silence() {
        let nic = Nic::open(0);
        let short = |link: &mut Link| (link.timeout, link.retry_cnt) = (8, 1);
        let (a, b) = pair_with(&nic, short, |_| ());
        b.to_err();
        assert_eq!(a.send(wr(1, 0, &[], 0, 0, 0)), 0);
        assert_eq!(a.one().status, 12);
        for wrong in [0u32, 0xff_ffef, 0xff_fff1] {
            let (a, b) = pair_with(&nic, short, |link| link.rq_psn = wrong);
            assert_eq!(b.recv(1, &[]), 0);
            assert_eq!(a.send(wr(1, 1, &[], 0, 0, 0)), 0);
            assert_eq!(a.one().status, 12);
            assert!(b.poll().is_empty());
        }
    }

    #[test]
    fn a_late_peer_is_reached_by_a_retry() {
        let nic = Nic::open(0);
        let (a, b) = (nic.qp(), nic.qp());
        a.connect(&Link { timeout: 12, ..Link::to(&nic, b.num()) });
        let mut buf = vec![0u8; 64];
        let mr = nic.mr(&mut buf, RIGHTS);
        a.write(1, &[sge(&[7; 32], ptr::null_mut())][..0], addr(&buf), rkey(mr), None);
        std::thread::sleep(Duration::from_millis(2));
        b.connect(&Link::to(&nic, a.num()));
        assert_eq!(a.one().status, 0);
    }

    #[test]
    fn states_decide_what_may_be_posted() {
        let nic = Nic::open(0);
        let a = nic.qp();
        let link = Link::to(&nic, a.num());
        let request = || wr(1, 0, &[], 0, 0, 0);
        assert_eq!((a.recv(1, &[]), a.send(request())), (libc::EINVAL, libc::EINVAL), "RESET");
        a.init(&link);
        assert_eq!((a.recv(1, &[]), a.send(request())), (0, libc::EINVAL), "INIT");
        assert_eq!(a.modify(Qp::attr(&link), 3, RTS), libc::EINVAL, "INIT to RTS");
        assert_eq!(a.modify(Qp::attr(&link), 2, RTR & !mask::RQ_PSN), libc::EINVAL);
        assert_eq!(a.modify(Qp::attr(&link), 2, RTR), 0);
        assert_eq!((a.recv(2, &[]), a.send(request())), (0, libc::EINVAL), "RTR");
        assert_eq!(a.modify(Qp::attr(&link), 3, RTS), 0);
        assert_eq!(a.send(request()), 0);
        assert_eq!(a.one().status, 0);
        for i in 2..64 {
            assert_eq!(a.recv(i, &[]), 0);
        }
        assert_eq!(a.recv(65, &[]), libc::ENOMEM);
        let many = [sge(&[], ptr::null_mut()); 9];
        assert_eq!(a.send(wr(1, 0, &many, 0, 0, 0)), libc::EINVAL, "more than max_send_sge");
        // Back to RESET: both queues and their completions are gone, and it can be used again.
        a.to_err();
        assert_eq!(a.modify(ffi::ibv_qp_attr::default(), 0, mask::STATE), 0);
        assert!(a.poll().is_empty());
        a.connect(&link);
        assert_eq!(a.recv(1, &[]), 0);
        assert_eq!(a.send(wr(8, 1, &[], 0, 0, 0)), 0);
        assert_eq!(a.wait(2).iter().map(|wc| wc.status).collect::<Vec<_>>(), [0, 0]);
    }

    #[test]
    fn a_full_completion_queue_breaks_its_queue_pairs() {
        let nic = Nic::open(0);
        let (cq, a) = (nic.cq(3), std::cell::Cell::new(None));
        a.set(Some(nic.qp_with(|init| (init.send_cq, init.recv_cq) = (cq, cq))));
        let a = a.get().unwrap();
        a.connect(&Link::to(&nic, a.num()));
        for id in 0..5 {
            assert_eq!(a.send(wr(id, 0, &[], 0, 0, 0)), 0);
        }
        let event = async_event(nic.ctx, LIMIT).unwrap();
        assert_eq!((event.event_type, unsafe { event.element.cq }), (ffi::IBV_EVENT_CQ_ERR, cq));
        assert_eq!(poll(cq).iter().map(|wc| wc.wr_id).collect::<Vec<_>>(), [0, 1, 2]);
        let mut attr = ffi::ibv_qp_attr::default();
        let mut init = ffi::ibv_qp_init_attr::default();
        assert_eq!(unsafe { v::query_qp(a.qp, &mut attr, 1, &mut init) }, 0);
        assert_eq!(attr.qp_state, 6);
    }

    /// The promise a plugin relies on: after the call nothing lands any more.
    #[test]
    fn modify_to_err_destroy_and_deregister_are_fences() {
        let nic = Nic::open(0);
        let mut src = vec![0u8; 8 << 20];
        let mut dst = vec![0u8; 8 << 20];
        let src_mr = nic.mr(&mut src, 0);
        for round in 1..=12u8 {
            src.fill(round);
            dst.fill(0);
            let dst_mr = nic.mr(&mut dst, RIGHTS);
            let (a, b) = pair(&nic);
            a.write(1, &[sge(&src, src_mr)], addr(&dst), rkey(dst_mr), None);
            let first: &AtomicU64 = unsafe { AtomicU64::from_ptr(dst.as_mut_ptr().cast()) };
            let start = Instant::now();
            while first.load(Ordering::Acquire) == 0 {
                assert!(start.elapsed() < LIMIT);
                std::hint::spin_loop();
            }
            match round % 3 {
                0 => b.to_err(),
                1 => assert_eq!(unsafe { v::destroy_qp(b.qp) }, 0),
                _ => assert_eq!(unsafe { v::dereg_mr(dst_mr) }, 0),
            }
            let after = dst.clone();
            std::thread::sleep(Duration::from_millis(3));
            assert!(dst == after, "round {round}: bytes landed after the fence");
            a.to_err();
            if round % 3 != 2 {
                assert_eq!(unsafe { v::dereg_mr(dst_mr) }, 0);
            }
        }
    }

    #[test]
    fn data_lands_ascending_before_its_completion_while_the_target_sleeps() {
        let nic = Nic::open(0);
        let (a, _b) = pair(&nic);
        const WORDS: usize = 32 << 10;
        let mut src = vec![0u8; WORDS * 8];
        let mut dst = vec![0u8; WORDS * 8];
        let (src_mr, dst_mr) = (nic.mr(&mut src, 0), nic.mr(&mut dst, RIGHTS));
        let words: &[AtomicU64] = unsafe { std::slice::from_raw_parts(dst.as_ptr().cast(), WORDS) };
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let mut floor = 0;
                    for word in words.iter().rev() {
                        let seen = word.load(Ordering::Acquire);
                        assert_eq!(seen >> 32, seen & 0xffff_ffff, "torn");
                        assert!(seen >= floor, "descending");
                        floor = seen;
                    }
                }
            });
            for round in 1..=40u64 {
                let value = (round << 32 | round).to_ne_bytes();
                src.chunks_exact_mut(8).for_each(|chunk| chunk.copy_from_slice(&value));
                a.write(round, &[sge(&src, src_mr)], addr(&dst), rkey(dst_mr), None);
                assert_eq!(a.one().status, 0);
                assert_eq!(words[WORDS - 1].load(Ordering::Relaxed), round << 32 | round);
            }
            stop.store(true, Ordering::Relaxed);
        });
    }

    #[test]
    fn completion_channels_wake_a_sleeper() {
        let nic = Nic::open(0);
        unsafe {
            let channel = v::create_comp_channel(nic.ctx);
            let cq = v::create_cq(nic.ctx, 16, ptr::without_provenance_mut(0x77), channel, 0);
            let a = nic.qp_with(|init| (init.send_cq, init.recv_cq) = (cq, cq));
            a.connect(&Link::to(&nic, a.num()));
            assert_eq!((*nic.ctx).ops.req_notify_cq.unwrap()(cq, 0), 0);
            assert_eq!(a.send(wr(1, 0, &[], 0, 0, 0)), 0);
            let (mut found, mut context) = (ptr::null_mut(), ptr::null_mut());
            assert_eq!(v::get_cq_event(channel, &mut found, &mut context), 0);
            assert_eq!((found, context.addr()), (cq, 0x77));
            v::ack_cq_events(cq, 1);
            assert_eq!(wait(cq, 1)[0].wr_id, 1);
            assert_eq!(v::destroy_comp_channel(channel), libc::EBUSY);
            assert_eq!(v::destroy_cq(cq), libc::EBUSY);
            assert_eq!(v::destroy_qp(a.qp), 0);
            assert_eq!((v::destroy_cq(cq), v::destroy_comp_channel(channel)), (0, 0));
        }
    }

    /// As after a kernel's clean-up; what could still move bytes has to go first.
    #[test]
    fn a_context_closes_with_completion_queues_left() {
        let nic = Nic::open(0);
        unsafe {
            let channel = v::create_comp_channel(nic.ctx);
            let cq = v::create_cq(nic.ctx, 16, ptr::null_mut(), channel, 0);
            assert_eq!(v::close_device(nic.ctx), libc::EBUSY, "a protection domain is left");
            assert_eq!((v::dealloc_pd(nic.pd), v::close_device(nic.ctx)), (0, 0));
            assert_eq!((v::destroy_cq(cq), v::destroy_comp_channel(channel)), (0, 0));
        }
    }

    #[test]
    fn async_events_do_not_block_with_o_nonblock() {
        let nic = Nic::open(0);
        unsafe {
            assert_eq!(libc::fcntl((*nic.ctx).async_fd, libc::F_SETFL, libc::O_NONBLOCK), 0);
            let mut event = std::mem::zeroed();
            assert_eq!(v::get_async_event(nic.ctx, &mut event), -1);
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EAGAIN));
        }
    }

    #[test]
    fn registration_is_checked_as_pinning_would() {
        let nic = Nic::open(0);
        let mut buf = vec![0u8; 4096];
        unsafe {
            let at = buf.as_mut_ptr().cast();
            assert!(v::reg_mr(nic.pd, at, 0, RIGHTS).is_null());
            assert!(v::reg_mr(nic.pd, at, 64, 2).is_null(), "REMOTE_WRITE needs LOCAL_WRITE");
            assert!(v::reg_mr(nic.pd, ptr::without_provenance_mut(0x10000), 64, RIGHTS).is_null());
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EFAULT));
            assert!(v::reg_dmabuf_mr(nic.pd, 0, 0, 0, -1, 0).is_null());
            assert_eq!(std::io::Error::last_os_error().raw_os_error(), Some(libc::EOPNOTSUPP));
            let relaxed = v::reg_mr_iova2(nic.pd, at, 4096, 0, RIGHTS.cast_unsigned() | 1 << 20);
            assert!(!relaxed.is_null());
            // The peer counts from 0.
            let (a, _b) = pair(&nic);
            let mut src = [6u8; 8];
            let src_mr = nic.mr(&mut src, 0);
            a.write(1, &[sge(&src, src_mr)], 4088, rkey(relaxed), None);
            assert_eq!((a.one().status, buf[4087], buf[4095]), (0, 0, 6));
            assert_eq!(v::dealloc_pd(nic.pd), libc::EBUSY);
        }
    }
}
