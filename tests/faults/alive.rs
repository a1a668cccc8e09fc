//! Peers that stop without an end of stream: noticed by the keep-alive, in its time and not before.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use crate::plugin::{Comm, Plugin, infos, pattern, warnings, warnings_come_to};
use crate::rig::{Helper, MAIN, Room, Setting, alone, host, roce, until};

const LIMIT: Duration = Duration::from_millis(1000);
const INTERVAL: Duration = Duration::from_millis(200);

pub(crate) fn two_hosts() -> String {
    [("a", "soft_a", "10.0.0.1"), ("b", "soft_b", "10.0.0.2")]
        .map(|(h, dev, ip)| host(h, &[roce(dev, ip, "", "")]))
        .concat()
}

macro_rules! on {
    ($host:literal, $limit:literal) => {
        &[
            ("SOFT_HCA_HOST", $host),
            ("NCCL_NET_RDMA_KEEPALIVE_INTERVAL", "200"),
            ("NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", $limit),
        ]
    };
}

/// Two connections of this process with the other one: one out, one in.
pub(crate) fn connections(room: &Room, plugin: &Plugin) -> (Comm, Comm) {
    let (own, other) = if room.role() == MAIN { ("to main", "to b") } else { ("to b", "to main") };
    let (listener, handle) = plugin.listen(0).unwrap();
    room.put(own, &handle);
    let mut handle: [u8; 128] = room.get(other).try_into().unwrap();
    let (mut send, mut recv) = (None, None);
    until("both connections", || {
        send = send.take().or_else(|| plugin.connect(0, &mut handle).unwrap());
        recv = recv.take().or_else(|| plugin.accept(listener).unwrap());
        (send.is_some() && recv.is_some()).then_some(())
    });
    plugin.close_listen(listener);
    (send.unwrap(), recv.unwrap())
}

/// Bytes to the other process and from it, which does the same.
pub(crate) fn exchange(plugin: &Plugin, (send, recv): (Comm, Comm)) {
    let (data, mut to) = (pattern(100_000), vec![0; 100_000]);
    let (from_mr, to_mr) = (plugin.reg_mr(send, &data).unwrap(), plugin.reg_mr(recv, &to).unwrap());
    let receive = until("irecv", || plugin.irecv(recv, &mut to, 0, to_mr).unwrap());
    let sent = until("isend", || plugin.isend(send, &data, 0, from_mr).unwrap());
    plugin.finish(sent).unwrap();
    plugin.finish(receive).unwrap();
    assert!(to == data, "the bytes differ");
    plugin.dereg_mr(send, from_mr);
    plugin.dereg_mr(recv, to_mr);
}

/// The peer's part where all goes well: both ends exchange twice and part.
fn goes_on(room: &Room, plugin: &Plugin) {
    let ends = connections(room, plugin);
    exchange(plugin, ends);
    room.put("ready", b"");
    room.get("go on");
    exchange(plugin, ends);
    room.put("done", b"");
    room.get("part");
    plugin.close(ends);
    assert_eq!(warnings(), Vec::<String>::new());
}

/// Our part: between the two exchanges something happens to the peer.
fn goes_on_after(room: &Room, env: &[(&str, &str)], what: impl FnOnce(&Helper)) {
    let plugin = Plugin::started();
    let mut other = room.start("b", env);
    let ends = connections(room, &plugin);
    exchange(&plugin, ends);
    room.get("ready");
    what(&other);
    // Time enough to take it amiss.
    std::thread::sleep(INTERVAL * 2);
    room.put("go on", b"");
    exchange(&plugin, ends);
    room.get("done");
    room.put("part", b"");
    plugin.close(ends);
    other.expect_success();
    assert_eq!(warnings(), Vec::<String>::new());
}

/// Both connections report it, the one with a receive under way and the one that only asks; the peer is told why when it
/// wakes.
#[test]
fn a_peer_that_is_stopped_is_noticed() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "1000") }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(100_000);
        if room.role() == MAIN {
            let mut other = room.start("b", on!("b", "1000"));
            let ends = connections(room, &plugin);
            let (send, recv) = ends;
            exchange(&plugin, ends);
            let to_mr = plugin.reg_mr(recv, &data).unwrap();
            let from_mr = plugin.reg_mr(send, &data).unwrap();
            let receive = until("irecv", || plugin.irecv(recv, &mut data, 0, to_mr).unwrap());
            room.get("ready");
            // Idle for longer than the limit, which is no silence.
            std::thread::sleep(LIMIT * 2);
            assert_eq!(plugin.test(receive).unwrap(), None);
            let start = Instant::now();
            other.signal(Signal::SIGSTOP);
            let mut after = [None, None];
            until("both ends to fail", || {
                after[0] = after[0].or_else(|| plugin.test(receive).is_err().then(|| start.elapsed()));
                after[1] = after[1].or_else(|| plugin.isend(send, &data, 0, from_mr).is_err().then(|| start.elapsed()));
                after.iter().all(Option::is_some).then_some(())
            });
            for after in after.into_iter().flatten() {
                // The last sign of life may have been an interval old, and a look at the clock late.
                assert!(after + INTERVAL * 2 >= LIMIT && after < Duration::from_secs(3), "reported after {after:?}");
            }
            // One line for the process, the errors of both connections for NCCL.
            let told = warnings_come_to(1).remove(0);
            let also = infos().into_iter().filter(|i| i.contains("has been silent for"));
            let all: Vec<String> = also.chain([told]).collect();
            assert_eq!(all.len(), 2, "{all:#?}");
            let pid = format!("pid {}", other.id());
            for part in ["has been silent for", &pid, "limit is 1.0 s", "soft_a:1", "SIGSTOP"] {
                assert!(all.iter().all(|w| w.contains(part)), "{part} is missing: {all:#?}");
            }
            for count in 0..2 {
                let part = format!("with {count} transfer(s) under way");
                assert_eq!(all.iter().filter(|w| w.contains(&part)).count(), 1, "{part}: {all:#?}");
            }
            other.signal(Signal::SIGCONT);
            plugin.dereg_mr(recv, to_mr);
            plugin.dereg_mr(send, from_mr);
            other.expect_success();
            plugin.close(ends);
        } else {
            let ends = connections(room, &plugin);
            exchange(&plugin, ends);
            let memory = plugin.reg_mr(ends.1, &data).unwrap();
            room.put("ready", b"");
            // Of both connections; one line is enough for the process.
            let also = || infos().into_iter().filter(|i| i.contains("was this process stopped?")).count();
            until("the last words", || (also() == 1).then_some(()));
            let told = warnings_come_to(1);
            assert!(told[0].contains("was this process stopped?"), "{told:#?}");
            plugin.irecv(ends.1, &mut data, 0, memory).unwrap_err();
            plugin.dereg_mr(ends.1, memory);
            plugin.close(ends);
        }
    });
}

#[test]
fn a_peer_that_goes_on_before_the_limit_is_not_reported() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "2500") }, |room| {
        if room.role() != MAIN {
            return goes_on(room, &Plugin::started());
        }
        goes_on_after(room, on!("b", "2500"), |other| {
            other.signal(Signal::SIGSTOP);
            std::thread::sleep(LIMIT);
            other.signal(Signal::SIGCONT);
        });
    });
}

/// As a scheduler does it to make room for another job: nobody is to blame.
#[test]
fn a_job_that_is_suspended_as_a_whole_goes_on() {
    alone(&Setting { fabric: Some(&two_hosts()), env: on!("a", "1000") }, |room| {
        let role = room.role();
        if role == "keeper" {
            let pid = |name| String::from_utf8(room.get(name)).unwrap().parse().unwrap();
            let job: [i32; 2] = [pid("pid of main"), pid("pid of b")];
            let all = |signal| {
                job.iter().for_each(|&p| nix::sys::signal::kill(nix::unistd::Pid::from_raw(p), signal).unwrap())
            };
            all(Signal::SIGSTOP);
            std::thread::sleep(LIMIT * 3);
            all(Signal::SIGCONT);
            return room.put("resumed", b"");
        }
        if role != MAIN {
            return goes_on(room, &Plugin::started());
        }
        goes_on_after(room, on!("b", "1000"), |other| {
            let mut keeper = room.start("keeper", &[]);
            room.put("pid of main", std::process::id().to_string().as_bytes());
            room.put("pid of b", other.id().to_string().as_bytes());
            room.get("resumed");
            keeper.expect_success();
            std::thread::sleep(LIMIT * 2);
        });
    });
}

/// One side wants none: the other one's limit passes, and nobody minds.
#[test]
fn without_keep_alive_a_stopped_peer_is_waited_for() {
    let off = [("SOFT_HCA_HOST", "a"), ("NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", "0")];
    alone(&Setting { fabric: Some(&two_hosts()), env: &off }, |room| {
        if room.role() != MAIN {
            return goes_on(room, &Plugin::started());
        }
        goes_on_after(room, on!("b", "500"), |other| {
            other.signal(Signal::SIGSTOP);
            std::thread::sleep(LIMIT);
            other.signal(Signal::SIGCONT);
        });
    });
}
