//! Set-up through the plugin: failures on either end.

use std::time::Duration;

use crate::plugin::{Plugin, SetUp, forget_lines, infos, pattern, warnings, warnings_with};
use crate::rig::{MAIN, PATIENCE, Setting, alone, host, infiniband, roce, until};

/// Two devices in one subnet: this process is both ends.
fn two() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")])
}

/// How long the other end may take to hear of a failure.
const SECONDS: Duration = Duration::from_secs(3);

/// The set-up fails on both ends, for one reason that both name; nothing is left in the way of the next one.
fn fails_on_both_ends(plugin: &Plugin, parts: &[&str]) {
    let up: SetUp = plugin.set_up(0, 1, SECONDS);
    assert!(matches!(up.connect, Some(Err(_))), "the connecting end: {up:?}");
    assert!(matches!(up.accept, Some(Err(_))), "the accepting end: {up:?}");
    assert!(up.slowest_call < Duration::from_millis(50), "a call took {:?}", up.slowest_call);
    let told = warnings();
    assert_eq!(told.len(), 2, "one line for each end: {told:#?}");
    for part in parts {
        assert!(told.iter().all(|w| w.contains(part)), "{part} is missing: {told:#?}");
    }
    // With the reason gone all works.
    let pair = plugin.pair(0, 1);
    plugin.carry(pair, &pattern(100_000));
    plugin.close(pair);
}

/// The nth call of a verb fails during the first set-up.
macro_rules! set_up_failures {
    ($($name:ident: $plan:literal, $parts:expr;)*) => { $(
        #[test]
        fn $name() {
            alone(&Setting { fabric: Some(&two()), env: &[("SOFT_HCA_FAIL", $plan)] }, |_| {
                fails_on_both_ends(&Plugin::started(), &$parts);
            });
        }
    )* };
}

set_up_failures! {
    connect_fails_to_register_its_ring: "reg_mr:1:ENOMEM", ["ibv_reg_mr on soft0", "Cannot allocate memory"];
    connect_fails_to_create_a_cq: "create_cq:1:ENOMEM", ["ibv_create_cq on soft0", "Cannot allocate memory", "memlock limit"];
    connect_fails_to_create_a_qp: "create_qp:1:EINVAL,create_qp:2:EINVAL", ["ibv_create_qp on soft0", "Invalid argument"];
    connect_fails_to_take_its_qp_to_init: "modify_qp:1:EIO", ["ibv_modify_qp on soft0", "to INIT"];
    accept_fails_to_create_a_cq: "create_cq:2:ENOMEM", ["ibv_create_cq on soft1", "Cannot allocate memory"];
    accept_fails_to_create_a_qp: "create_qp:2:EINVAL,create_qp:3:EINVAL", ["ibv_create_qp on soft1", "Invalid argument"];
    accept_fails_to_take_its_qp_to_init: "modify_qp:2:EIO", ["ibv_modify_qp on soft1", "to INIT"];
    accept_fails_to_take_its_qp_to_rtr: "modify_qp:3:ENETUNREACH", ["to RTR", "GID 10.0.0.2", "GID 10.0.0.1", "no route"];
    accept_fails_to_take_its_qp_to_rts: "modify_qp:4:EINVAL", ["to RTS", "soft1:1"];
    connect_fails_to_take_its_qp_to_rtr: "modify_qp:5:ENODEV", ["to RTR", "soft0:1", "GID index is empty"];
    connect_fails_to_take_its_qp_to_rts: "modify_qp:6:EIO", ["to RTS", "soft0:1"];
    accept_fails_to_register_its_ring: "reg_mr:2:ENOMEM", ["ibv_reg_mr on soft1", "Cannot allocate memory"];
}

/// Half-way through two rails, on either end: what was made for the first is given back.
#[test]
fn a_failure_on_the_second_rail_leaves_nothing_of_the_first() {
    // Room for one connection: 2 QPs a device, of which one end uses one.
    let tight = "max_qp = 1";
    let fabric = host(
        "a",
        &[
            roce("a0", "10.0.0.1", tight, ""),
            roce("a1", "10.0.1.1", tight, ""),
            roce("b0", "10.0.0.2", tight, ""),
            roce("b1", "10.0.1.2", tight, ""),
        ],
    );
    // In order: connecting a0, a1, accepting b0, b1; a refused one is tried again without inline. First connect fails at a1,
    // then accept at b1.
    let env = [
        ("SOFT_HCA_FAIL", "create_qp:2:EINVAL,create_qp:3:EINVAL,create_qp:7:EINVAL,create_qp:8:EINVAL"),
        ("NCCL_NET_RDMA_RAILS", "a0+a1,b0+b1"),
    ];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |_| {
        let plugin = Plugin::started();
        let (from, to) = (plugin.find("a0+a1"), plugin.find("b0+b1"));
        for device in ["a1", "b1"] {
            forget_lines();
            let up = plugin.set_up(from, to, SECONDS);
            assert!(matches!(up.connect, Some(Err(_))) && matches!(up.accept, Some(Err(_))), "{up:?}");
            assert_eq!(warnings_with(&format!("ibv_create_qp on {device}")).len(), 2, "{:#?}", warnings());
        }
        let pair = plugin.pair(from, to);
        plugin.carry(pair, &pattern(3_000_001));
        plugin.close(pair);
    });
}

/// The QPs for flushes come last on the accepting end.
#[test]
fn accept_fails_to_create_its_flush_qp() {
    let env = [("SOFT_HCA_FAIL", "create_qp:3:EINVAL,modify_qp:9:EIO"), ("NCCL_NET_RDMA_FORCE_FLUSH", "1")];
    alone(&Setting { fabric: Some(&two()), env: &env }, |_| {
        let plugin = Plugin::started();
        for verb in ["ibv_create_qp on soft1", "ibv_modify_qp on soft1"] {
            forget_lines();
            let up = plugin.set_up(0, 1, SECONDS);
            assert!(matches!(up.connect, Some(Err(_))) && matches!(up.accept, Some(Err(_))), "{up:?}");
            assert_eq!(warnings_with(verb).len(), 2, "{:#?}", warnings());
        }
        let pair = plugin.pair(0, 1);
        plugin.carry(pair, &pattern(100_000));
        plugin.close(pair);
    });
}

#[test]
fn a_listener_that_is_gone_fails_the_connect_in_time() {
    alone(&Setting { fabric: Some(&two()), env: &[("NCCL_NET_RDMA_CONNECT_TIMEOUT", "1")] }, |_| {
        let plugin = Plugin::started();
        let (listener, mut handle) = plugin.listen(1).unwrap();
        plugin.close_listen(listener);
        let start = std::time::Instant::now();
        until("connect to fail", || plugin.connect(0, &mut handle).err());
        assert!(start.elapsed() < SECONDS, "{:?}", start.elapsed());
        let told = warnings();
        assert_eq!(told.len(), 1, "{told:#?}");
        assert!(told[0].contains("127.0.0.1:"), "{told:#?}");
    });
}

/// The peer never calls accept: neither does the connect wait for ever, nor does the listener choke on it later.
#[test]
fn a_peer_that_does_not_accept_fails_the_connect_in_time() {
    alone(&Setting { fabric: Some(&two()), env: &[("NCCL_NET_RDMA_CONNECT_TIMEOUT", "1")] }, |_| {
        let plugin = Plugin::started();
        let (listener, handle) = plugin.listen(1).unwrap();
        let start = std::time::Instant::now();
        let mut copy = handle;
        until("connect to fail", || plugin.connect(0, &mut copy).err());
        assert!(start.elapsed() < SECONDS, "{:?}", start.elapsed());
        assert_eq!(warnings().len(), 1, "{:#?}", warnings());
        plugin.close_listen(listener);
    });
}

/// The connecting process dies in the middle of the set-up: its address never resolves, so it stays there.
#[test]
fn a_peer_that_dies_during_set_up_fails_the_accept() {
    let fabric = [host("a", &[roce("a0", "10.0.0.1", "", "")]), host("b", &[roce("b0", "10.0.0.2", "", "")])].concat();
    alone(&Setting { fabric: Some(&fabric), env: &[("SOFT_HCA_HOST", "a")] }, |room| {
        let plugin = Plugin::started();
        if room.role() == MAIN {
            let mut other = room.start("b", &[("SOFT_HCA_HOST", "b"), ("SOFT_HCA_FAIL", "modify_qp:2+:ETIMEDOUT")]);
            let (listener, handle) = plugin.listen(0).unwrap();
            room.put("handle", &handle);
            until("the peer to be stuck", || {
                assert_eq!(plugin.accept(listener).unwrap(), None);
                room.path("stuck").exists().then_some(())
            });
            other.kill();
            let start = std::time::Instant::now();
            until("accept to fail", || plugin.accept(listener).err());
            assert!(start.elapsed() < SECONDS, "{:?}", start.elapsed());
            let told = warnings();
            assert_eq!(told.len(), 1, "{told:#?}");
            assert!(told[0].contains("its process may have ended"), "{told:#?}");
            plugin.close_listen(listener);
        } else {
            let mut handle: [u8; 128] = room.get("handle").try_into().unwrap();
            until("the first refusal", || {
                assert_eq!(plugin.connect(0, &mut handle).unwrap(), None);
                (!warnings_with("trying again").is_empty()).then_some(())
            });
            room.put("stuck", b"");
            std::thread::sleep(Duration::from_secs(60));
        }
    });
}

#[test]
fn an_address_that_resolves_late_is_waited_for_without_sleeping() {
    // Calls 1 and 2 are INIT on both ends; the next two are RTR of the accepting end.
    let env = [
        ("SOFT_HCA_FAIL", "modify_qp:3:ETIMEDOUT,modify_qp:4:ETIMEDOUT,modify_qp:7:ETIMEDOUT"),
        ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "60"),
    ];
    alone(&Setting { fabric: Some(&two()), env: &env }, |_| {
        let plugin = Plugin::started();
        let start = std::time::Instant::now();
        let up = plugin.set_up(0, 1, PATIENCE);
        assert!(up.slowest_call < Duration::from_millis(50), "a call took {:?}", up.slowest_call);
        // 60 and 120 ms on one end, 60 ms on the other.
        assert!(start.elapsed() > Duration::from_millis(240), "{:?}", start.elapsed());
        let pair = up.comms();
        plugin.carry(pair, &pattern(100_000));
        plugin.close(pair);
        let told = warnings();
        assert_eq!(told.len(), 2, "one line for each end that waits: {told:#?}");
        assert!(told.iter().all(|w| w.contains("trying again")), "{told:#?}");
    });
}

#[test]
fn an_address_that_never_resolves_fails_on_both_ends() {
    let env = [
        ("SOFT_HCA_FAIL", "modify_qp:3+:ETIMEDOUT"),
        ("NCCL_IB_MQP_RETRY_SLEEP_MSEC", "5"),
        ("NCCL_IB_MQP_RETRY_CNT", "3"),
    ];
    alone(&Setting { fabric: Some(&two()), env: &env }, |_| {
        let plugin = Plugin::started();
        let up = plugin.set_up(0, 1, SECONDS);
        assert!(matches!(up.connect, Some(Err(_))) && matches!(up.accept, Some(Err(_))), "{up:?}");
        assert_eq!(warnings_with("could not be resolved").len(), 2, "{:#?}", warnings());
    });
}

#[test]
fn the_smaller_mtu_is_used_with_one_peer_and_not_with_the_next() {
    let fabric = host(
        "a",
        &[
            roce("big0", "10.0.0.1", "", "active_mtu = 4096"),
            roce("small0", "10.0.0.2", "", "active_mtu = 1024"),
            roce("big1", "10.0.0.3", "", "active_mtu = 4096"),
        ],
    );
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let [small, from, to] = ["small0", "big0", "big1"].map(|n| plugin.find(n));
        // soft-hca refuses packets of another MTU, so that data arrive at all is part of the proof.
        for (from, to, mtu) in [(from, small, "MTU 1024"), (small, from, "MTU 1024"), (from, to, "MTU 4096")] {
            forget_lines();
            let pair = plugin.pair(from, to);
            let stands: Vec<String> = infos().into_iter().filter(|l| l.contains("with peer")).collect();
            assert_eq!(stands.len(), 2, "{stands:#?}");
            assert!(stands.iter().all(|l| l.contains(mtu)), "{stands:#?}");
            plugin.carry(pair, &pattern(100_000));
            plugin.close(pair);
        }
    });
}

#[test]
fn an_mtu_that_differs_is_told_once_a_peer() {
    let fabric = host(
        "a",
        &[roce("big0", "10.0.0.1", "", "active_mtu = 4096"), roce("small0", "10.0.0.2", "", "active_mtu = 1024")],
    );
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let pairs: Vec<_> = (0..3).map(|_| plugin.pair(0, 1)).collect();
        let told = warnings();
        // This process is both ends, and each end has its line.
        assert_eq!(told.len(), 2, "{told:#?}");
        assert!(told[0] != told[1] && told.iter().all(|w| w.contains("1024") && w.contains("4096")), "{told:#?}");
        pairs.into_iter().for_each(|p| plugin.close(p));
    });
}

/// The set-up fails on both ends, whose lines all hold `parts`.
fn refused(from: &str, to: &str, parts: &[&str]) {
    let plugin = Plugin::started();
    let up = plugin.set_up(plugin.find(from), plugin.find(to), SECONDS);
    assert!(matches!(up.connect, Some(Err(_))) && matches!(up.accept, Some(Err(_))), "{up:?}");
    let told = warnings();
    assert_eq!(told.len(), 2, "{told:#?}");
    for part in parts {
        assert!(told.iter().all(|w| w.contains(part)), "{part} is missing: {told:#?}");
    }
}

#[test]
fn partitions_that_differ_are_named() {
    let fabric = host("a", &[infiniband("ib0", 1, "[0xffff]"), infiniband("ib1", 2, "[0x8123]")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        refused("ib0", "ib1", &["0xffff", "0x8123", "ib0:1", "ib1:1", "NCCL_IB_PKEY"]);
    });
}

#[test]
fn link_layers_that_differ_are_named() {
    let fabric = host("a", &[infiniband("ib0", 1, "[0xffff]"), roce("eth0", "10.0.0.1", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        refused("ib0", "eth0", &["InfiniBand", "RoCE", "ib0:1", "eth0:1"]);
    });
}

#[test]
fn infiniband_carries_data_by_lid() {
    let fabric = host("a", &[infiniband("ib0", 1, "[0xffff]"), infiniband("ib1", 2, "[0x7fff]")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 1);
        plugin.carry(pair, &pattern(100_000));
        plugin.close(pair);
    });
}

/// Rails of one side by subnet 0, 1; of the other by subnet 1, 0.
#[test]
fn rails_pair_by_subnet() {
    let fabric = host(
        "a",
        &[
            roce("a0", "10.0.0.1", "", ""),
            roce("a1", "10.0.1.1", "", ""),
            roce("b0", "10.0.1.2", "", ""),
            roce("b1", "10.0.0.2", "", ""),
        ],
    );
    alone(&Setting { fabric: Some(&fabric), env: &[("NCCL_NET_RDMA_RAILS", "a0+a1,b0+b1")] }, |_| {
        let plugin = Plugin::started();
        let (from, to) = (plugin.find("a0+a1"), plugin.find("b0+b1"));
        for (from, to) in [(from, to), (to, from)] {
            let pair = plugin.pair(from, to);
            plugin.carry(pair, &pattern(3_000_001));
            plugin.close(pair);
        }
        let stands: Vec<String> = infos().into_iter().filter(|l| l.contains("with peer")).collect();
        assert_eq!(stands.len(), 4, "{stands:#?}");
        for line in &stands {
            assert!(line.contains("2 rail(s)"), "{line}");
            for route in line.split("; ").filter(|r| r.contains(" -> ")) {
                let subnets = ["10.0.0.", "10.0.1."].map(|s| route.matches(s).count());
                assert!(subnets == [2, 0] || subnets == [0, 2], "{route}");
            }
        }
    });
}

/// One end has two rails and the other one.
#[test]
fn the_smaller_number_of_rails_is_used() {
    let fabric =
        host("a", &[roce("a0", "10.0.0.1", "", ""), roce("a1", "10.0.1.1", "", ""), roce("b0", "10.0.1.2", "", "")]);
    alone(&Setting { fabric: Some(&fabric), env: &[("NCCL_NET_RDMA_RAILS", "a0+a1")] }, |_| {
        let plugin = Plugin::started();
        let (two, one) = (plugin.find("a0+a1"), plugin.find("b0"));
        for (from, to) in [(two, one), (one, two)] {
            let pair = plugin.pair(from, to);
            plugin.carry(pair, &pattern(3_000_001));
            plugin.close(pair);
        }
        let stands: Vec<String> = infos().into_iter().filter(|l| l.contains("with peer")).collect();
        assert!(
            stands.iter().all(|l| l.contains("1 rail(s)") && l.contains("a1:1") && !l.contains("a0:1")),
            "{stands:#?}"
        );
    });
}

/// One end asks for four QPs and the other for two: a process each, since a setting holds for a process.
#[test]
fn the_smaller_number_of_qps_is_used() {
    let fabric = [host("a", &[roce("a0", "10.0.0.1", "", "")]), host("b", &[roce("b0", "10.0.0.2", "", "")])].concat();
    let env = [("SOFT_HCA_HOST", "a"), ("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |room| {
        let plugin = Plugin::started();
        let data = pattern(1 << 20);
        if room.role() == MAIN {
            let mut other = room.start("b", &[("SOFT_HCA_HOST", "b"), ("NCCL_IB_QPS_PER_CONNECTION", "2")]);
            let mut handle: [u8; 128] = room.get("handle").try_into().unwrap();
            let send = until("connect", || plugin.connect(0, &mut handle).unwrap());
            let memory = plugin.reg_mr(send, &data).unwrap();
            for _ in 0..4 {
                let request = until("isend", || plugin.isend(send, &data, 1, memory).unwrap());
                plugin.finish(request).unwrap();
            }
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
            other.expect_success();
        } else {
            let (listener, handle) = plugin.listen(0).unwrap();
            room.put("handle", &handle);
            let recv = until("accept", || plugin.accept(listener).unwrap());
            let mut to = vec![0; data.len()];
            let memory = plugin.reg_mr(recv, &to).unwrap();
            for _ in 0..4 {
                to.fill(0);
                let request = until("irecv", || plugin.irecv(recv, &mut to, 1, memory).unwrap());
                plugin.finish(request).unwrap();
                assert!(to == data);
            }
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
            plugin.close_listen(listener);
        }
        assert!(infos().iter().any(|l| l.contains("1 rail(s) x 2 QP(s)")), "{:#?}", infos());
        assert_eq!(warnings(), Vec::<String>::new());
    });
}
