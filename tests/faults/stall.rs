//! Work requests that the NIC neither completes nor fails, as over a cut link with a NIC that tries for ever, while TCP
//! stands: noticed by the watch over progress, in its time and not before.

use std::time::{Duration, Instant};

use crate::plugin::{Comm, Plugin, infos, pattern, warnings, warnings_come_to};
use crate::rig::{MAIN, Room, Setting, alone, host, roce, until};

const LIMIT: Duration = Duration::from_millis(1500);
/// The limit, the two periods by which the watch may be late, and a busy computer.
const LATEST: Duration = Duration::from_millis(5000);

fn two_hosts() -> String {
    [("a", "soft_a", "10.0.0.1"), ("b", "soft_b", "10.0.0.2")]
        .map(|(h, dev, ip)| host(h, &[roce(dev, ip, "", "")]))
        .concat()
}

macro_rules! on {
    ($host:literal, $plan:literal) => {
        on!($host, $plan, "1500")
    };
    ($host:literal, $plan:literal, $limit:literal) => {
        &[("SOFT_HCA_HOST", $host), ("SOFT_HCA_FAIL", $plan), ("NCCL_NET_RDMA_STALL_TIMEOUT", $limit)]
    };
}

fn sending_end(room: &Room, plugin: &Plugin) -> Comm {
    let mut handle: [u8; 128] = room.get("handle").try_into().unwrap();
    until("connect", || plugin.connect(0, &mut handle).unwrap())
}

fn receiving_end(room: &Room, plugin: &Plugin) -> Comm {
    let (listener, handle) = plugin.listen(0).unwrap();
    room.put("handle", &handle);
    let comm = until("accept", || plugin.accept(listener).unwrap());
    plugin.close_listen(listener);
    comm
}

fn in_time(start: Instant) {
    let after = start.elapsed();
    assert!(after > LIMIT && after < LATEST, "reported after {after:?}");
}

/// The line of the end that noticed; the other one repeats it.
fn told_in_full(own: &str, far: &str, operation: &str) {
    let told = warnings_come_to(1).remove(0);
    let stands = infos().into_iter().find(|l| l.contains("with peer")).unwrap();
    let route = stands.rsplit("; ").next().unwrap().to_owned();
    let parts =
        ["no progress to peer", "pid ", operation, own, far, &route, "limit is 1.5 s", "NCCL_NET_RDMA_STALL_TIMEOUT"];
    for part in parts {
        assert!(told.contains(part), "{part} is missing: {told}");
    }
}

fn told_by_the_peer() {
    let told = warnings_come_to(1).remove(0);
    assert!(told.contains(" failed: no progress to peer"), "{told}");
}

/// Time in which NCCL does not poll does not count.
#[test]
fn data_that_the_peer_never_acknowledges() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "send_wr:2+:NEVER") }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(100_000);
        if room.role() == MAIN {
            let mut other = room.start("b", on!("b", ""));
            let send = sending_end(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            let isend = || until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(isend()).unwrap();
            let request = isend();
            std::thread::sleep(LIMIT * 2);
            assert_eq!(warnings(), Vec::<String>::new());
            let start = Instant::now();
            plugin.finish(request).unwrap_err();
            in_time(start);
            plugin.isend(send, &data, 0, memory).unwrap_err();
            told_in_full("soft_a:1", "soft_b:1", "1 work request(s) of 100000 bytes");
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
            other.expect_success();
        } else {
            let recv = receiving_end(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            for end in [Ok(100_000), Err(())] {
                let request = until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
                assert_eq!(plugin.finish(request).map_err(|_| ()), end);
            }
            told_by_the_peer();
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
        }
    });
}

/// The sender has nothing on its way and only waits for a credit, which got lost: the receiving side has to notice.
#[test]
fn a_credit_that_the_peer_never_acknowledges() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "send_wr:2+:NEVER") }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(100_000);
        if room.role() == MAIN {
            let mut other = room.start("b", on!("b", ""));
            let recv = receiving_end(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            let mut irecv = || until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
            plugin.finish(irecv()).unwrap();
            let start = Instant::now();
            plugin.finish(irecv()).unwrap_err();
            in_time(start);
            told_in_full("soft_a:1", "soft_b:1", "work request(s)");
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
            other.expect_success();
        } else {
            let send = sending_end(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap();
            let request = until("the error", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap_err();
            told_by_the_peer();
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
        }
    });
}

/// The link is cut while all is quiet. After a hinted receive its NCCL makes no call by which a lost credit could be noticed,
/// and the sender has nothing on its way: it asks for a sign of life.
#[test]
fn a_credit_of_a_hinted_receive_that_never_comes() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "send_wr:2+:NEVER") }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(64);
        if room.role() == MAIN {
            let mut other = room.start("b", on!("b", "send_wr:2+:NEVER"));
            let send = sending_end(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap();
            let start = Instant::now();
            let request = until("the error", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap_err();
            in_time(start);
            told_in_full("soft_a:1", "soft_b:1", "1 work request(s) of 0 bytes");
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
            other.expect_success();
        } else {
            let recv = receiving_end(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            for _ in 0..2 {
                let request = until("irecv", || plugin.irecv_hinted(recv, &mut data, 0, memory).unwrap());
                plugin.finish(request).unwrap();
            }
            until("the peer's word", || (!warnings().is_empty()).then_some(()));
            told_by_the_peer();
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
        }
    });
}

/// A sender without a credit and a receiver without data wait as long as it takes: that is between the two of them.
#[test]
fn waiting_for_the_application_is_no_stall() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "", "500") }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(100_000);
        // Both poll all the time and come to it one after the other.
        let polling = |start: Instant, poll: &dyn Fn()| {
            while start.elapsed() < LIMIT * 2 {
                poll();
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        if room.role() == MAIN {
            let mut other = room.start("b", on!("b", "", "500"));
            let send = sending_end(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            // No credit yet.
            polling(Instant::now(), &|| assert_eq!(plugin.isend(send, &data, 0, memory).unwrap(), None));
            room.put("now receive", b"");
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap();
            // No data yet.
            room.get("waited");
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap();
            plugin.dereg_mr(send, memory);
            other.expect_success();
            plugin.close_send(send);
        } else {
            let recv = receiving_end(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            room.get("now receive");
            let mut irecv = || until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
            plugin.finish(irecv()).unwrap();
            let request = irecv();
            polling(Instant::now(), &|| assert_eq!(plugin.test(request).unwrap(), None));
            room.put("waited", b"");
            plugin.finish(request).unwrap();
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
        }
        assert_eq!(warnings(), Vec::<String>::new());
    });
}
