//! Failures of a connection that stands: completions, peers that die or leave, memory taken away, strangers at the door.

use std::io::{Read as _, Write as _};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::plugin::{Comm, Plugin, forget_lines, infos, pattern, warnings, warnings_come_to};
use crate::rig::{MAIN, Room, Setting, alone, host, roce, until};

const TWO_HOSTS: [(&str, &str, &str); 2] = [("a", "soft_a", "10.0.0.1"), ("b", "soft_b", "10.0.0.2")];

fn two_hosts() -> String {
    TWO_HOSTS.iter().map(|(h, dev, ip)| host(h, &[roce(dev, ip, "", "")])).collect()
}

const ON_A: &[(&str, &str)] = &[("SOFT_HCA_HOST", "a")];
const ON_B: &[(&str, &str)] = &[("SOFT_HCA_HOST", "b")];

/// The peer's half of a connection from this process: the sending end.
fn connect(room: &Room, plugin: &Plugin) -> Comm {
    let mut handle: [u8; 128] = room.get("handle").try_into().unwrap();
    until("connect", || plugin.connect(0, &mut handle).unwrap())
}

/// The receiving end.
fn accept(room: &Room, plugin: &Plugin) -> Comm {
    let (listener, handle) = plugin.listen(0).unwrap();
    room.put("handle", &handle);
    let comm = until("accept", || plugin.accept(listener).unwrap());
    plugin.close_listen(listener);
    comm
}

/// The longest until an error that the other end or the adapter knows of has to show.
const SECONDS: Duration = Duration::from_secs(3);

fn soon(start: Instant) {
    assert!(start.elapsed() < SECONDS, "took {:?}", start.elapsed());
}

/// One line tells of a failed completion all that a person needs, and both ends fail.
#[test]
fn a_failed_completion_is_told_in_full() {
    let env = [("SOFT_HCA_HOST", "a"), ("SOFT_HCA_FAIL", "send_wr:1:RETRY_EXC_ERR/129")];
    alone(&Setting { fabric: Some(&two_hosts()), env: &env }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(1 << 20);
        if room.role() == MAIN {
            let mut other = room.start("b", &[("SOFT_HCA_HOST", "b"), ("SOFT_HCA_FAIL", "")]);
            let send = connect(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            plugin.finish(request).unwrap_err();
            let told = warnings_come_to(1);
            let parts = [
                "RETRY_EXC",
                "status 12",
                "129",
                "0x81",
                "1048576 bytes",
                "10.0.0.1",
                "10.0.0.2",
                "soft_a:1",
                "soft_b:1",
                "send",
                " s of retries",
                "NCCL_IB_TIMEOUT",
            ];
            for part in parts {
                assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
            }
            // QP numbers of both ends, as the line that announced the connection has them.
            let stands = infos().into_iter().find(|l| l.contains("with peer")).unwrap();
            let route = stands.rsplit("; ").next().unwrap();
            assert_eq!(route.matches(" QP 0x").count(), 2, "{route}");
            assert!(told[0].contains(route), "{route} is missing: {}", told[0]);
            // The cause stays, and is told no more.
            for _ in 0..3 {
                plugin.isend(send, &data, 0, memory).unwrap_err();
            }
            warnings_come_to(1);
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
            other.expect_success();
        } else {
            let recv = accept(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            let request = until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
            plugin.finish(request).unwrap_err();
            plugin.irecv(recv, &mut data, 0, memory).unwrap_err();
            let told = warnings_come_to(1);
            for part in ["RETRY_EXC", "129", "pid "] {
                assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
            }
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
        }
    });
}

/// Four sends, the second of which fails: what flushes behind it is no cause.
#[test]
fn the_first_cause_is_told_and_the_rest_is_not() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")]);
    let env = [("SOFT_HCA_FAIL", "send_wr:6:REM_ACCESS_ERR/137")];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |_| {
        let plugin = Plugin::started();
        let other = plugin.pair(1, 0);
        let (send, recv) = plugin.pair(0, 1);
        let data = pattern(64 * 1024);
        let mut to = vec![0u8; 4 * data.len()];
        let (from_mr, to_mr) = (plugin.reg_mr(send, &data).unwrap(), plugin.reg_mr(recv, &to).unwrap());
        // Send requests 1 to 4 are the credits, 5 to 8 the data.
        let receives: Vec<Comm> = to
            .chunks_mut(data.len())
            .map(|chunk| until("irecv", || plugin.irecv(recv, chunk, 0, to_mr).unwrap()))
            .collect();
        // As NCCL does it: more is sent as credits allow, and what is under way is tested meanwhile. The credits behind the
        // failure may never come, so fewer than four may start.
        let start = Instant::now();
        let mut sends = Vec::new();
        until("the failure", || {
            if sends.len() < 4 {
                match plugin.isend(send, &data, 0, from_mr) {
                    Ok(request) => sends.extend(request),
                    Err(_) => return Some(()),
                }
            }
            let failed = |&request| plugin.test(request).inspect(|done| assert_eq!(*done, None)).is_err();
            sends.iter().skip(1).any(failed).then_some(())
        });
        // The first was acknowledged before the second failed; from that one on all fail, now and later.
        for &request in sends.iter().skip(1) {
            plugin.finish(request).unwrap_err();
        }
        plugin.isend(send, &data, 0, from_mr).unwrap_err();
        for &request in &receives[1..] {
            plugin.finish(request).unwrap_err();
        }
        soon(start);
        let told = warnings_come_to(2);
        assert!(told.iter().all(|w| w.contains("REM_ACCESS_ERR") && w.contains("137 = 0x89")), "{told:#?}");
        plugin.dereg_mr(send, from_mr);
        plugin.dereg_mr(recv, to_mr);
        // Other connections of the same devices go on.
        plugin.carry(other, &data);
        plugin.close((send, recv));
        plugin.carry(other, &data);
        plugin.close(other);
        warnings_come_to(2);
    });
}

/// A peer that is killed, with a transfer open and without: one line, and every call fails.
#[test]
fn a_peer_that_is_killed_ends_its_connections() {
    alone(&Setting { fabric: Some(&two_hosts()), env: ON_A }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(1 << 20);
        if room.role() == MAIN {
            let mut other = room.start("b", ON_B);
            let recv = accept(room, &plugin);
            let memory = plugin.reg_mr(recv, &data).unwrap();
            let request = until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
            room.get("ready");
            other.kill();
            let start = Instant::now();
            plugin.finish(request).unwrap_err();
            plugin.irecv(recv, &mut data, 0, memory).unwrap_err();
            soon(start);
            let told = warnings_come_to(1);
            assert!(told[0].contains("is gone") && told[0].contains("pid "), "{told:#?}");
            plugin.dereg_mr(recv, memory);
            plugin.close_recv(recv);
        } else {
            let _send = connect(room, &plugin);
            room.put("ready", b"");
            std::thread::sleep(Duration::from_secs(60));
        }
    });
}

/// The sender dies: it has no receive open here, but this end has sends open at a peer that never asked for them.
#[test]
fn a_receiver_that_is_killed_fails_the_sends() {
    alone(&Setting { fabric: Some(&two_hosts()), env: ON_A }, |room| {
        let plugin = Plugin::started();
        let data = pattern(1 << 20);
        if room.role() == MAIN {
            let mut other = room.start("b", ON_B);
            let send = connect(room, &plugin);
            let memory = plugin.reg_mr(send, &data).unwrap();
            room.get("ready");
            other.kill();
            let start = Instant::now();
            until("isend to fail", || plugin.isend(send, &data, 0, memory).err());
            soon(start);
            let told = warnings_come_to(1);
            assert!(told[0].contains("is gone"), "{told:#?}");
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
        } else {
            let _recv = accept(room, &plugin);
            room.put("ready", b"");
            std::thread::sleep(Duration::from_secs(60));
        }
    });
}

/// The peer closes in good order before this end does: no failure, no line.
#[test]
fn a_peer_that_closes_in_good_order_is_no_failure() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        for sender_first in [true, false] {
            let (send, recv) = plugin.pair(0, 1);
            plugin.carry((send, recv), &pattern(100_000));
            if sender_first {
                plugin.close_send(send)
            } else {
                plugin.close_recv(recv)
            }
            std::thread::sleep(Duration::from_millis(100));
            if sender_first { plugin.close_recv(recv) } else { plugin.close_send(send) }
        }
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// The receiving end closes with a receive open: the sender is told, and its sends fail instead of waiting.
#[test]
fn a_peer_that_aborts_fails_the_other_end() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let (send, recv) = plugin.pair(0, 1);
        let mut data = pattern(100_000);
        let memory = plugin.reg_mr(recv, &data).unwrap();
        let from = plugin.reg_mr(send, &data).unwrap();
        let _open = until("irecv", || plugin.irecv(recv, &mut data, 0, memory).unwrap());
        plugin.close_recv(recv);
        let start = Instant::now();
        until("isend to fail", || match plugin.isend(send, &data, 0, from) {
            Ok(Some(request)) => plugin.finish(request).err(),
            Ok(None) => None,
            Err(e) => Some(e),
        });
        soon(start);
        let told = warnings_come_to(1);
        assert!(told[0].contains("aborted"), "{told:#?}");
        plugin.dereg_mr(send, from);
        plugin.close_send(send);
    });
}

/// NCCL aborts so: memory is deregistered and freed with a receive open. The peer still sends; nothing lands.
#[test]
fn nothing_lands_in_memory_that_was_deregistered() {
    alone(&Setting { fabric: Some(&two_hosts()), env: ON_A }, |room| {
        let plugin = Plugin::started();
        let len = 8 << 20;
        if room.role() == MAIN {
            let mut other = room.start("b", ON_B);
            let recv = accept(room, &plugin);
            let mut to = vec![0u8; len];
            let memory = plugin.reg_mr(recv, &to).unwrap();
            // A second registration of the same pages keeps the region itself alive in the cache.
            let again = plugin.reg_mr(recv, &to).unwrap();
            let _open = until("irecv", || plugin.irecv(recv, &mut to, 0, memory).unwrap());
            room.put("go", b"");
            until("the first bytes", || to_has_begun(&to).then_some(()));
            plugin.dereg_mr(recv, memory);
            to.fill(0xe5);
            room.get("sent");
            std::thread::sleep(Duration::from_millis(50));
            assert!(to.iter().all(|&b| b == 0xe5), "a byte landed after deregistration");
            plugin.dereg_mr(recv, again);
            plugin.close_recv(recv);
            other.expect_success();
        } else {
            let send = connect(room, &plugin);
            let data = vec![0x77u8; len];
            let memory = plugin.reg_mr(send, &data).unwrap();
            room.get("go");
            let request = until("isend", || plugin.isend(send, &data, 0, memory).unwrap());
            // Done or failed, as the race has it; in the end it does not hang.
            let _ = plugin.finish(request);
            room.put("sent", b"");
            plugin.dereg_mr(send, memory);
            plugin.close_send(send);
        }
    });
}

fn to_has_begun(to: &[u8]) -> bool {
    // SAFETY: the first byte of a live slice; another process's adapter writes it, hence volatile.
    unsafe { to.as_ptr().read_volatile() != 0 }
}

/// Where a handle leads: the port that it names on this machine.
fn door(handle: &[u8; 128]) -> SocketAddr {
    let listening: Vec<u16> = std::fs::read_to_string("/proc/self/net/tcp")
        .unwrap()
        .lines()
        .skip(1)
        .filter_map(|line| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            // State 0A is LISTEN.
            (fields[3] == "0A").then(|| u16::from_str_radix(fields[1].split(':').nth(1).unwrap(), 16).unwrap())
        })
        .collect();
    let port = listening
        .into_iter()
        .find(|p| {
            let (big, little) = (p.to_be_bytes(), p.to_le_bytes());
            handle.windows(2).any(|w| w == big || w == little)
        })
        .expect("the handle names a port on which this machine listens");
    SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port)
}

/// Connections that come to nothing: closed at once, cut short, of another protocol, silent, garbage.
fn strangers(door: SocketAddr) -> Vec<TcpStream> {
    let mut kept = Vec::new();
    for text in [&b""[..], b"abc", b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096]] {
        for close in [true, false] {
            let mut stream = TcpStream::connect(door).unwrap();
            // The listener may have closed it by then.
            let _ = stream.write_all(text);
            if !close {
                kept.push(stream);
            }
        }
    }
    kept
}

fn cpu_time() -> Duration {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: room for the answer.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr()) }, 0);
    // SAFETY: zero is valid, and the call filled it.
    let usage = unsafe { usage.assume_init() };
    let of = |t: libc::timeval| {
        Duration::from_secs(t.tv_sec.unsigned_abs()) + Duration::from_micros(t.tv_usec.unsigned_abs())
    };
    of(usage.ru_utime) + of(usage.ru_stime)
}

#[test]
fn strangers_at_the_door_do_not_keep_the_peer_out() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let (listener, mut handle) = plugin.listen(1).unwrap();
        let mut kept = strangers(door(&handle));
        // NCCL polls now and then.
        let before = cpu_time();
        for _ in 0..100 {
            assert_eq!(plugin.accept(listener).unwrap(), None);
            std::thread::sleep(Duration::from_millis(1));
        }
        let used = cpu_time() - before;
        assert!(used < Duration::from_millis(50), "strangers cost {used:?} of CPU time");
        let start = Instant::now();
        let (mut send, mut recv) = (None, None);
        until("the true peer", || {
            send = send.take().or_else(|| plugin.connect(0, &mut handle).unwrap());
            recv = recv.take().or_else(|| plugin.accept(listener).unwrap());
            (send.is_some() && recv.is_some()).then_some(())
        });
        assert!(start.elapsed() < Duration::from_secs(1), "the true peer waited {:?}", start.elapsed());
        let pair = (send.unwrap(), recv.unwrap());
        plugin.carry(pair, &pattern(100_000));
        plugin.close(pair);
        plugin.close_listen(listener);
        // Nothing of the secret was given to them: at most the listener's greeting.
        for stream in &mut kept {
            stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            let mut heard = Vec::new();
            let _ = stream.read_to_end(&mut heard);
            assert!(!heard.windows(16).any(|w| handle.windows(16).any(|h| h == w && w.iter().any(|&b| b != 0))));
        }
    });
}

/// A registration that fails for want of lockable memory says so, and the connection goes on.
#[test]
fn a_registration_without_memory_names_the_limit() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "max_pinned_bytes = 1000000", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let limit = libc::rlimit { rlim_cur: 65536, rlim_max: 65536 };
        // SAFETY: lowers a limit of this process.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) }, 0);
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let large = vec![0u8; 2_000_000];
        plugin.reg_mr(pair.0, &large).unwrap_err();
        let told = warnings_come_to(1);
        for part in ["memlock", "65536", "ibv_reg_mr", " bytes at 0x", "soft0", "CAP_IPC_LOCK"] {
            assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
        }
        forget_lines();
        plugin.carry(pair, &pattern(100_000));
        plugin.close(pair);
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

const MANY: usize = 24;

/// Each end of [`MANY`] connections between two processes, and memory on each.
fn many<'a>(room: &Room, plugin: &Plugin, data: &'a mut [u8]) -> (Vec<(Comm, Comm)>, &'a mut [u8]) {
    let on = |comm| (comm, plugin.reg_mr(comm, data).unwrap());
    let comms = if room.role() == MAIN {
        let (listener, handle) = plugin.listen(0).unwrap();
        room.put("handle", &handle);
        let comms = (0..MANY).map(|_| on(until("accept", || plugin.accept(listener).unwrap()))).collect();
        plugin.close_listen(listener);
        comms
    } else {
        let handle: [u8; 128] = room.get("handle").try_into().unwrap();
        let one = |mut handle| until("connect", || plugin.connect(0, &mut handle).unwrap());
        (0..MANY).map(|_| on(one(handle))).collect()
    };
    (comms, data)
}

/// One process aborts all that it has with another one: that tells it once, and every connection fails.
#[test]
fn a_peer_that_aborts_many_connections_is_told_of_once() {
    alone(&Setting { fabric: Some(&two_hosts()), env: ON_A }, |room| {
        let plugin = Plugin::started();
        let mut data = pattern(4096);
        if room.role() == MAIN {
            let mut other = room.start("b", ON_B);
            let (recvs, data) = many(room, &plugin, &mut data);
            for &(recv, memory) in &recvs {
                until("irecv", || plugin.irecv(recv, data, 0, memory).unwrap());
            }
            room.get("ready");
            // Half as NCCL aborts, the memory first; half with a receive open.
            for (i, &(recv, memory)) in recvs.iter().enumerate() {
                if i % 2 == 0 {
                    plugin.dereg_mr(recv, memory);
                    plugin.close_recv(recv);
                } else {
                    plugin.close_recv(recv);
                }
            }
            other.expect_success();
            assert_eq!(warnings(), Vec::<String>::new());
        } else {
            let (sends, data) = many(room, &plugin, &mut data);
            room.put("ready", b"");
            let all = || warnings().iter().chain(&infos()).filter(|l| l.contains("aborted")).count();
            until("the end of all connections", || (all() == MANY).then_some(()));
            for &(send, memory) in &sends {
                let request = plugin.isend(send, data, 0, memory).unwrap().expect("no credit is waited for");
                plugin.finish(request).unwrap_err();
                plugin.isend(send, data, 0, memory).unwrap_err();
            }
            let told = warnings_come_to(2);
            for part in ["aborted by the application", "with transfers under way (aborted)"] {
                assert_eq!(told.iter().filter(|w| w.contains(part)).count(), 1, "{part}: {told:#?}");
                let shown = infos().iter().filter(|i| i.contains(part)).count();
                assert_eq!(shown, MANY / 2 - 1, "{part}: {:#?}", infos());
            }
            for (send, memory) in sends {
                plugin.dereg_mr(send, memory);
                plugin.close_send(send);
            }
        }
    });
}
