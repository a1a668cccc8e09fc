//! What the fabric file and the environment decide: limits, link layers, rates, failures on order, and what happens to the
//! hardware meanwhile.
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
    use soft_hca::Control;
    use soft_hca::fabric::{Fabric, GidKind};
    use soft_hca::verbs as v;
    use std::path::Path;
    use std::process::Command;
    use std::sync::OnceLock;
    use std::time::{Duration, Instant};

    const TEXT: &str = r#"
[[host]]
name = "a"
[[host.device]] # 0: InfiniBand, small
name = "ib0"
node_guid = 0x0102030405060708
max_qp = 3
max_pinned_bytes = 10000
[[host.device.port]]
link_layer = "InfiniBand"
lid = 7
active_mtu = 2048
rate_gbps = 400
pkeys = [0xffff, 0x8001]
gids = [{ index = 0, gid = "fe80::1", type = "IB" }]
[[host.device]] # 1: slow
name = "slow0"
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.0.1", type = "RoCE v2" }]
rate = 1.0
latency_us = 3000
[[host.device]] # 2: not for us
name = "locked0"
open_errno = "EPERM"
[[host.device.port]]
link_layer = "Ethernet"
[[host.device]] # 3: its cable is pulled
name = "cut0"
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.1.1", type = "RoCE v2" }]
[[host.device]] # 4: uneven
name = "uneven0"
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.2.1", type = "RoCE v2" }]
jitter_us = 2000
"#;

    fn nic(index: usize) -> Nic {
        static INSTALLED: OnceLock<()> = OnceLock::new();
        INSTALLED.get_or_init(|| {
            let mut fabric = Fabric::parse(TEXT, Path::new("test")).unwrap();
            fabric.registry = Some(scratch().to_owned());
            assert!(soft_hca::install(fabric, 0));
        });
        Nic::open(index)
    }

    fn errno() -> Option<i32> {
        std::io::Error::last_os_error().raw_os_error()
    }

    #[test]
    fn infiniband_is_reached_by_lid_and_has_limits() {
        let nic = nic(0);
        let mut attr = ffi::ibv_port_attr { active_speed_ex: 0xffff_ffff, ..Default::default() };
        assert_eq!(unsafe { v::query_port(nic.ctx, 1, &mut attr) }, 0);
        assert_eq!((attr.state, attr.link_layer, attr.lid, attr.active_mtu, attr.phys_state), (4, 1, 7, 4, 5));
        assert_eq!((attr.active_speed, attr.active_width, attr.gid_tbl_len, attr.pkey_tbl_len), (128, 2, 1, 2));
        assert_eq!(attr.active_speed_ex, 0xffff_ffff, "not written: older callers have no room for it");
        assert_eq!(unsafe { v::query_port(nic.ctx, 2, &mut attr) }, libc::EINVAL);
        let mut pkey = 0;
        assert_eq!((unsafe { v::query_pkey(nic.ctx, 1, 1, &mut pkey) }, pkey), (0, 0x8001u16.to_be()));
        let mut speed = 0;
        assert_eq!((unsafe { v::query_port_speed(nic.ctx, 1, &mut speed) }, speed), (0, 4000));
        let mut entry: ffi::ibv_gid_entry = unsafe { std::mem::zeroed() };
        assert_eq!(unsafe { v::query_gid_ex(nic.ctx, 1, 0, &mut entry, 0, size_of_val(&entry)) }, 0);
        assert_eq!((entry.gid_type, entry.port_num, unsafe { entry.gid.raw[15] }), (0, 1, 1));

        let (a, b) = (nic.qp(), nic.qp());
        for (qp, other) in [(a, b), (b, a)] {
            let mut attr = Qp::attr(&Link { mtu: 4, ..Link::to(&nic, other.num()) });
            attr.ah_attr.is_global = 0;
            attr.ah_attr.dlid = 7;
            assert_eq!(qp.modify(attr, 1, INIT), 0);
            assert_eq!(qp.modify(ffi::ibv_qp_attr { path_mtu: 5, ..attr }, 2, RTR), libc::EINVAL, "above active_mtu");
            assert_eq!((qp.modify(attr, 2, RTR), qp.modify(attr, 3, RTS)), (0, 0));
        }
        assert_eq!(b.recv(1, &[]), 0);
        assert_eq!(a.send(wr(1, 1, &[], 0, 0, 3)), 0);
        assert_eq!((a.one().status, b.one().status), (0, 0));

        let c = nic.qp();
        let mut init = ffi::ibv_qp_init_attr { send_cq: a.cq, recv_cq: a.cq, qp_type: 2, ..Default::default() };
        assert!(unsafe { v::create_qp(nic.pd, &mut init) }.is_null());
        assert_eq!(errno(), Some(libc::ENOMEM), "max_qp is 3");
        init.qp_type = ffi::ibv_qp_type::IBV_QPT_UD;
        assert!(unsafe { v::create_qp(nic.pd, &mut init) }.is_null());
        assert_eq!(errno(), Some(libc::EOPNOTSUPP));
        c.destroy();

        let mut buf = vec![0u8; 8000];
        let first = nic.mr(&mut buf, 1);
        assert!(unsafe { v::reg_mr(nic.pd, buf.as_mut_ptr().cast(), 8000, 1) }.is_null());
        assert_eq!(errno(), Some(libc::ENOMEM), "more than may be pinned");
        assert_eq!(unsafe { v::dereg_mr(first) }, 0);
        nic.mr(&mut buf, 1);
    }

    #[test]
    fn rate_and_latency_take_their_time() {
        let nic = nic(1);
        let (a, _b) = pair(&nic);
        let mut buf = vec![0u8; 1 << 20];
        let mr = nic.mr(&mut buf, RIGHTS);
        let start = Instant::now();
        a.write(1, &[], 0, 0, None);
        assert_eq!(a.one().status, 0);
        assert!(start.elapsed() >= Duration::from_millis(3), "{:?}", start.elapsed());
        let start = Instant::now();
        for id in 0..2 {
            a.write(id, &[sge(&buf[..512 << 10], mr)], addr(&buf[512 << 10..]), rkey(mr), None);
        }
        assert!(a.wait(2).iter().all(|wc| wc.status == 0));
        // 1 MiB at 1 Gb/s is 8.4 ms; the last segment's time is not waited for.
        let took = start.elapsed();
        assert!(took >= Duration::from_millis(10) && took < Duration::from_secs(2), "{took:?}");
    }

    #[test]
    fn jitter_differs_from_message_to_message_and_queue_pair_to_queue_pair() {
        let nic = nic(4);
        let pairs: Vec<_> = (0..2).map(|_| pair(&nic)).collect();
        let mut took: Vec<u128> = Vec::new();
        let mut first = [0; 2];
        for id in 0..40 {
            let start = Instant::now();
            pairs.iter().for_each(|(a, _)| a.write(id, &[], 0, 0, None));
            let mut waiting = [true; 2];
            while waiting.contains(&true) {
                for (qp, (a, _)) in pairs.iter().enumerate() {
                    if waiting[qp] && !a.poll().is_empty() {
                        first[qp] += usize::from(waiting == [true; 2]);
                        waiting[qp] = false;
                        took.push(start.elapsed().as_micros());
                    }
                }
            }
        }
        let (least, most) = (took.iter().min().unwrap(), took.iter().max().unwrap());
        assert!(*least < 700 && *most > 1300, "{least} to {most} us of up to 2000");
        assert!(first.iter().all(|&count| count > 5), "either overtakes the other: {first:?}");
    }

    #[test]
    fn a_device_that_is_not_for_us_says_so() {
        nic(0);
        unsafe {
            let mut num = 0;
            let list = v::get_device_list(&mut num);
            assert_eq!(num, 5);
            assert!(v::open_device(*list.add(2)).is_null());
            assert_eq!(errno(), Some(libc::EPERM));
            assert_eq!(v::get_device_guid(*list).to_be(), 0x0102_0304_0506_0708);
            v::free_device_list(list);
        }
    }

    #[test]
    fn a_cut_cable_is_an_event_and_silence() {
        let nic = nic(3);
        let (a, _b) = pair_with(&nic, |link| (link.timeout, link.retry_cnt) = (13, 7), |_| ());
        let event = || {
            let event = async_event(nic.ctx, LIMIT).unwrap();
            (event.event_type, unsafe { event.element.port_num })
        };
        Control::set_port(3, 0, false);
        assert_eq!(event(), (ffi::IBV_EVENT_PORT_ERR, 1));
        let mut attr = ffi::ibv_port_attr::default();
        assert_eq!(unsafe { v::query_port(nic.ctx, 1, &mut attr) }, 0);
        assert_eq!((attr.state, attr.phys_state), (1, 2));
        a.write(1, &[], 0, 0, None);
        std::thread::sleep(Duration::from_millis(6));
        assert!(a.poll().is_empty());
        Control::set_port(3, 0, true);
        assert_eq!(event(), (ffi::IBV_EVENT_PORT_ACTIVE, 1));
        assert_eq!(a.one().status, 0, "a retry gets through");
        let other = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 0, 1, 9];
        Control::set_gid(3, 0, 0, Some((other, GidKind::RoceV2)));
        assert_eq!(event(), (ffi::IBV_EVENT_GID_CHANGE, 1));
        let mut gid = ffi::ibv_gid::default();
        assert_eq!(unsafe { v::query_gid(nic.ctx, 1, 0, &mut gid) }, 0);
        assert_eq!(unsafe { gid.raw }, other);
        a.write(2, &[], 0, 0, None);
        assert_eq!(a.one().status, 12, "nobody has the old address any more");
        Control::set_gid(3, 0, 0, None);
        let mut attr = Qp::attr(&Link::to(&nic, 1));
        attr.ah_attr.grh.sgid_index = 0;
        let qp = nic.qp();
        assert_eq!((qp.modify(attr, 1, INIT), qp.modify(attr, 2, RTR)), (0, libc::ENODEV));
    }

    #[test]
    fn a_forked_child_has_no_adapter_and_takes_nothing_with_it() {
        let nic = nic(1);
        let status = unsafe {
            let child = libc::fork();
            if child == 0 {
                let mut attr = ffi::ibv_port_attr::default();
                let wrong = v::query_port(nic.ctx, 1, &mut attr) == 0
                    || v::close_device(nic.ctx) == 0
                    || !v::alloc_pd(nic.ctx).is_null();
                libc::_exit(i32::from(wrong));
            }
            let mut status = 0;
            assert_eq!(libc::waitpid(child, &mut status, 0), child);
            status
        };
        assert_eq!(status, 0);
        let (a, _b) = pair(&nic);
        a.write(1, &[], 0, 0, None);
        assert_eq!(a.one().status, 0);
    }

    fn again(test: &str, vars: &[(&str, &str)]) -> std::process::Output {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--ignored", "--nocapture"])
            .envs(vars.iter().copied())
            .output()
            .unwrap()
    }

    #[test]
    fn failures_come_when_they_were_ordered() {
        let fail = "create_qp:2:ENOMEM,alloc_pd:2+:EPERM,send_wr:2:REM_OP_ERR/137";
        let out = again("tests::with_failures_ordered", &[("SOFT_HCA_FAIL", fail), ("ORDERED", "1")]);
        assert!(out.status.success(), "{out:?}");
    }

    #[test]
    #[ignore = "run by the test above, in a process of its own"]
    fn with_failures_ordered() {
        if std::env::var_os("ORDERED").is_none() {
            return;
        }
        let nic = nic(0);
        assert!(unsafe { v::alloc_pd(nic.ctx) }.is_null() && errno() == Some(libc::EPERM));
        assert!(unsafe { v::alloc_pd(nic.ctx) }.is_null());
        let a = nic.qp();
        let mut init = ffi::ibv_qp_init_attr { send_cq: a.cq, recv_cq: a.cq, qp_type: 2, ..Default::default() };
        assert!(unsafe { v::create_qp(nic.pd, &mut init) }.is_null() && errno() == Some(libc::ENOMEM));
        a.connect(&Link { mtu: 4, ..Link::to(&nic, a.num()) });
        for id in 1..=3 {
            a.write(id, &[], 0, 0, None);
        }
        let got: Vec<_> = a.wait(3).iter().map(|wc| (wc.wr_id, wc.status, wc.vendor_err)).collect();
        assert_eq!((got[0].1, &got[1..]), (0, &[(2, 11, 137), (3, 5, 249)][..]));
    }

    #[test]
    fn a_host_that_is_not_in_the_file_has_no_devices() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("fabric.toml");
        std::fs::write(&file, TEXT).unwrap();
        let out = again(
            "tests::without_devices",
            &[("SOFT_HCA_FABRIC", file.to_str().unwrap()), ("SOFT_HCA_HOST", "nobody"), ("ORDERED", "1")],
        );
        let said = String::from_utf8_lossy(&out.stderr);
        assert!(out.status.success() && said.contains("SOFT_HCA_HOST=nobody"), "{out:?}");
        assert_eq!(said.matches("no devices").count(), 1, "said once");
    }

    #[test]
    #[ignore = "run by the test above, in a process of its own"]
    fn without_devices() {
        if std::env::var_os("ORDERED").is_none() {
            return;
        }
        for _ in 0..2 {
            let mut num = 7;
            let list = unsafe { v::get_device_list(&mut num) };
            assert!(num == 0 && unsafe { *list }.is_null());
        }
    }

    fn held() -> (usize, usize, usize) {
        let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        (count("/proc/self/task"), count("/proc/self/fd"), maps.lines().filter(|line| line.contains("slot-")).count())
    }

    #[test]
    fn nothing_is_left_when_devices_are_closed() {
        let out = again("tests::open_and_close", &[("ORDERED", "1")]);
        assert!(out.status.success(), "{out:?}");
    }

    #[test]
    #[ignore = "run by the test above, in a process of its own"]
    fn open_and_close() {
        if std::env::var_os("ORDERED").is_none() {
            return;
        }
        let round = || {
            let nic = nic(1);
            let (a, b) = pair(&nic);
            let mut buf = vec![0u8; 4096];
            let mr = nic.mr(&mut buf, RIGHTS);
            a.write(1, &[], addr(&buf), rkey(mr), None);
            assert_eq!(a.one().status, 0);
            assert_eq!(unsafe { v::close_device(nic.ctx) }, libc::EBUSY);
            a.destroy();
            b.destroy();
            unsafe {
                assert_eq!((v::dereg_mr(mr), v::dealloc_pd(nic.pd), v::close_device(nic.ctx)), (0, 0, 0));
            }
        };
        round();
        let before = held();
        for _ in 0..50 {
            round();
        }
        assert_eq!(held(), before);
        assert_eq!(before.2, 0, "the slot is unmapped");
    }
}
