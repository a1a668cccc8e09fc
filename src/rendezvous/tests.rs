//! Listener, connector and channel over real sockets of this host. Where time matters it is the test that brings it.

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::task::Poll;
use std::thread;
use std::time::{Duration, Instant};

use super::handle::Key;
use super::{
    Channel, Closed, Connector, Frame, Handle, Limits, Listener, MAX_BODY, MAX_KIND, RendezvousError, Stage, VERSION,
};

const LOCALHOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const KEY: Key = Key { listener: 42, secret: [7; 16] };
/// Nothing here takes so long unless it hangs.
const LONG: Duration = Duration::from_secs(20);
const NAP: Duration = Duration::from_micros(100);

fn any_port(ip: IpAddr) -> SocketAddr {
    SocketAddr::new(ip, 0)
}

fn listener() -> (Listener, Handle) {
    Listener::bind(any_port(LOCALHOST), None, Limits::default()).unwrap()
}

fn connector(handle: &Handle) -> Connector {
    let now = Instant::now();
    Connector::new(handle, None, now, now + LONG)
}

/// Repeats until it gives something.
fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(result) = f() {
            return result;
        }
        assert!(start.elapsed() < LONG, "{what}: timed out");
        thread::sleep(NAP);
    }
}

/// The connecting and the accepting end.
pub(super) fn join(listener: &mut Listener, connector: &mut Connector) -> (Channel, Channel) {
    let (mut near, mut far) = (None, None);
    until("connection", || {
        if near.is_none()
            && let Poll::Ready(result) = connector.poll(Instant::now())
        {
            let mut channel: Channel = result.unwrap();
            // Takes the proof along.
            channel.send(MAX_KIND, b"first").unwrap();
            near = Some(channel);
        }
        if far.is_none()
            && let Poll::Ready(result) = listener.poll(Instant::now())
        {
            far = Some(result.unwrap());
        }
        (near.is_some() && far.is_some()).then_some(())
    });
    let mut far = far.unwrap();
    assert_eq!(recv(&mut far).unwrap(), Frame { kind: MAX_KIND, body: b"first".to_vec() });
    (near.unwrap(), far)
}

pub(super) fn pair() -> (Channel, Channel) {
    let (mut listener, handle) = listener();
    join(&mut listener, &mut connector(&handle))
}

pub(super) fn recv(channel: &mut Channel) -> Result<Frame, RendezvousError> {
    until("frame", || match channel.recv() {
        Poll::Ready(result) => Some(result),
        Poll::Pending => None,
    })
}

/// An address where nobody listens, and nobody else can: held by the socket.
fn reserved() -> (socket2::Socket, SocketAddr) {
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
    socket.set_reuse_address(true).unwrap();
    socket.bind(&any_port(LOCALHOST).into()).unwrap();
    let addr = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, addr)
}

fn poll_until(listener: &mut Listener, what: &str, mut done: impl FnMut(&Listener) -> bool) {
    until(what, || {
        assert!(listener.poll(Instant::now()).is_pending());
        done(listener).then_some(())
    });
}

fn frame(version: u16, kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len()).unwrap();
    [b"NRDF", &version.to_le_bytes()[..], &[kind, 0], &length.to_le_bytes(), body].concat()
}

#[test]
fn connects_and_carries_frames_both_ways() {
    let (mut listener, handle) = listener();
    // The handle goes through its bytes, as it would through NCCL's.
    let handle = Handle::decode(&handle.encode()).unwrap();
    let (mut near, mut far) = join(&mut listener, &mut connector(&handle));
    assert_eq!(near.peer_addr(), listener.local_addr());
    assert_eq!(near.local_addr(), far.peer_addr());
    for size in [0, 1, 100, MAX_BODY] {
        let body: Vec<u8> = (0..=255).cycle().take(size).collect();
        near.send(1, &body).unwrap();
        far.send(2, &body).unwrap();
        assert_eq!(recv(&mut far).unwrap(), Frame { kind: 1, body: body.clone() });
        assert_eq!(recv(&mut near).unwrap(), Frame { kind: 2, body });
    }
    // The channel outlives the listener, and the peer's end is told.
    drop(listener);
    drop(far);
    assert!(matches!(recv(&mut near), Err(RendezvousError::Closed { why: Closed::Eof, .. })));
}

#[test]
fn connects_over_ipv6() {
    let addr = any_port(IpAddr::V6(Ipv6Addr::LOCALHOST));
    if TcpListener::bind(addr).is_err() {
        // Not by println, which a test that passes keeps to itself.
        std::io::stderr().write_all(b"skipped: this host has no IPv6 loopback\n").unwrap();
        return;
    }
    let (mut listener, handle) = Listener::bind(addr, None, Limits::default()).unwrap();
    let (near, _far) = join(&mut listener, &mut connector(&Handle::decode(&handle.encode()).unwrap()));
    assert!(near.peer_addr().is_ipv6());
}

#[test]
fn leaves_by_the_address_that_was_asked_for() {
    let (mut listener, handle) = listener();
    let local = SocketAddr::from((Ipv4Addr::new(127, 0, 0, 2), 9));
    let now = Instant::now();
    let (_near, far) = join(&mut listener, &mut Connector::new(&handle, Some(local), now, now + LONG));
    assert_eq!(far.peer_addr().ip(), local.ip());
}

#[test]
fn an_address_of_another_host_is_an_error_at_once() {
    let (_listener, handle) = listener();
    let now = Instant::now();
    let mut connector = Connector::new(&handle, Some("192.0.2.1:0".parse().unwrap()), now, now + LONG);
    let Poll::Ready(Err(e)) = connector.poll(now) else { panic!("no error") };
    let text = e.to_string();
    assert!(text.contains("192.0.2.1") && text.contains(&handle.addr().to_string()), "{text}");
    assert_eq!(connector.stage(), Stage::Finished);
    assert!(matches!(connector.poll(now), Poll::Ready(Err(RendezvousError::Finished))));
}

/// A connect and close, three bytes, an HTTP request and a silent connection come before the true peer.
#[test]
fn strangers_do_not_keep_the_true_peer_out() {
    let (mut listener, handle) = listener();
    let dial = || TcpStream::connect(handle.addr()).unwrap();
    drop(dial());
    dial().write_all(b"abc").unwrap();
    let mut http = dial();
    http.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    let _silent = dial();

    let cpu = thread_cpu();
    poll_until(&mut listener, "strangers turned away", |l| l.rejected().total() == 3 && l.pending() == 1);
    let arrival = Instant::now();
    let _channels = join(&mut listener, &mut connector(&handle));
    assert!(arrival.elapsed() < Duration::from_secs(1), "{:?}", arrival.elapsed());
    // Waiting on goes on costing little, with the silent one still there.
    let wait = Instant::now();
    while wait.elapsed() < Duration::from_millis(200) {
        assert!(listener.poll(Instant::now()).is_pending());
        thread::sleep(NAP);
    }
    assert!(thread_cpu() - cpu < Duration::from_millis(50), "{:?}", thread_cpu() - cpu);

    let rejected = *listener.rejected();
    assert_eq!((rejected.empty, rejected.garbage, rejected.total()), (1, 2, 3), "{rejected}");
    assert_eq!(rejected.to_string(), "3 turned away, 1 sent nothing, 2 spoke something else");
    assert_eq!(listener.pending(), 1);
    // The one that sent the request was closed, not left hanging.
    http.set_read_timeout(Some(LONG)).unwrap();
    assert!(matches!(http.read(&mut [0; 16]), Ok(0) | Err(_)));
    // The silent one goes when its time is over.
    assert!(listener.poll(Instant::now() + Limits::default().patience).is_pending());
    assert_eq!((listener.rejected().silent, listener.pending()), (1, 0));
}

fn thread_cpu() -> Duration {
    let mut ts = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a timespec of ours.
    let rc = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut ts) };
    assert_eq!(rc, 0);
    Duration::new(ts.tv_sec.try_into().unwrap(), ts.tv_nsec.try_into().unwrap())
}

#[test]
fn a_silent_peer_is_not_looked_at_with_every_poll() {
    let (mut listener, handle) = listener();
    let mut peer = TcpStream::connect(handle.addr()).unwrap();
    poll_until(&mut listener, "accepted", |l| l.pending() == 1);
    let later = Instant::now() + Duration::from_secs(1);
    assert!(listener.poll(later).is_pending());
    peer.write_all(b"abc").unwrap();
    let millisecond = Duration::from_millis(1);
    thread::sleep(millisecond);
    assert!(listener.poll(later + millisecond / 2).is_pending());
    assert_eq!(listener.rejected().total(), 0);
    let mut now = later;
    until("looked at", || {
        now += millisecond;
        assert!(listener.poll(now).is_pending());
        (listener.rejected().garbage == 1).then_some(())
    });
}

#[test]
fn a_peer_that_leaves_midway_is_counted_apart() {
    let (mut listener, handle) = listener();
    TcpStream::connect(handle.addr()).unwrap().write_all(b"NRDF").unwrap();
    poll_until(&mut listener, "short peer", |l| l.rejected().short == 1);
}

#[test]
fn a_flood_crowds_out_its_oldest_and_the_true_peer_gets_in() {
    let limits = Limits { peers: 8, ..Limits::default() };
    let (mut listener, handle) = Listener::bind(any_port(LOCALHOST), None, limits).unwrap();
    let flood: Vec<_> = (0..20).map(|_| TcpStream::connect(handle.addr()).unwrap()).collect();
    let _channels = join(&mut listener, &mut connector(&handle));
    assert_eq!(listener.rejected().crowded, 13, "{}", listener.rejected());
    assert_eq!(listener.pending(), 7);
    // It was the first that had to go.
    let mut first = &flood[0];
    first.set_read_timeout(Some(LONG)).unwrap();
    assert_eq!(first.read(&mut [0]).unwrap(), 0);
}

#[test]
fn the_wrong_secret_is_refused_by_both() {
    let addr = any_port(LOCALHOST);
    let (mut listener, handle) = Listener::with_key(addr, None, Limits::default(), KEY).unwrap();
    let wrong = Handle::new(handle.addr(), Key { secret: [8; 16], ..KEY });
    let mut stranger = connector(&wrong);
    let e = until("refusal", || {
        assert!(listener.poll(Instant::now()).is_pending());
        match stranger.poll(Instant::now()) {
            Poll::Ready(result) => Some(result.unwrap_err()),
            Poll::Pending => None,
        }
    });
    assert!(matches!(e, RendezvousError::Stranger { .. }), "{e}");
    poll_until(&mut listener, "stranger gone", |l| l.rejected().short == 1);

    // One that claims to know it.
    let mut liar = TcpStream::connect(handle.addr()).unwrap();
    liar.write_all(&frame(VERSION, MAX_KIND + 1, &[1; 32])).unwrap();
    liar.write_all(&frame(VERSION, MAX_KIND + 3, &[1; 32])).unwrap();
    poll_until(&mut listener, "liar turned away", |l| l.rejected().proof == 1);
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (mut listener, handle) = listener();
    let mut peer = TcpStream::connect(handle.addr()).unwrap();
    peer.write_all(&frame(77, 1, &[])).unwrap();
    poll_until(&mut listener, "other version", |l| l.rejected().version == 1);
    let warning = listener.take_warning().unwrap();
    assert!(warning.contains("version 77") && warning.contains(&format!("side {VERSION}")), "{warning}");
    assert_eq!(listener.take_warning(), None);
    let mut refusal = [0; 12];
    peer.read_exact(&mut refusal).unwrap();
    assert_eq!(refusal[..6], frame(VERSION, 0, &[])[..6]);

    // And what a connector makes of such a refusal.
    let other = TcpListener::bind(any_port(LOCALHOST)).unwrap();
    let mut connector = connector(&Handle::new(other.local_addr().unwrap(), KEY));
    assert!(connector.poll(Instant::now()).is_pending());
    let (mut accepted, _) = other.accept().unwrap();
    accepted.write_all(&frame(77, MAX_KIND + 4, &[])).unwrap();
    let e = until("version error", || match connector.poll(Instant::now()) {
        Poll::Ready(result) => Some(result.unwrap_err()),
        Poll::Pending => None,
    });
    assert!(matches!(e, RendezvousError::Version { theirs: 77, .. }), "{e}");
}

#[test]
fn gives_up_at_its_deadline_with_the_history() {
    let (_held, nobody) = reserved();
    let start = Instant::now();
    let mut connector = Connector::new(&Handle::new(nobody, KEY), None, start, start + Duration::from_secs(60));
    let mut now = start;
    let e = loop {
        match connector.poll(now) {
            Poll::Ready(result) => break result.unwrap_err(),
            Poll::Pending => now += Duration::from_millis(5),
        }
        assert!(now - start <= Duration::from_secs(61));
    };
    assert!(now - start >= Duration::from_secs(60));
    let RendezvousError::Connect(failure) = &e else { panic!("{e}") };
    // Ten doublings to a second, then one in every half to whole second.
    assert!((60..=140).contains(&failure.attempts), "{}", failure.attempts);
    assert_eq!(failure.last.as_ref().unwrap().raw_os_error(), Some(libc::ECONNREFUSED));
    let text = e.to_string();
    let wanted = [&nobody.to_string(), "60.0 s", "refused", "attempts"];
    assert!(wanted.iter().all(|w| text.contains(w)), "{text}");
}

#[test]
fn a_listener_that_comes_late_is_found() {
    let (_held, addr) = reserved();
    let mut connector = connector(&Handle::new(addr, KEY));
    until("second attempt", || {
        assert!(connector.poll(Instant::now()).is_pending());
        (connector.attempts() > 1).then_some(())
    });
    assert_eq!(connector.last_failure().unwrap().raw_os_error(), Some(libc::ECONNREFUSED));
    let (mut listener, _) = Listener::with_key(addr, None, Limits::default(), KEY).unwrap();
    join(&mut listener, &mut connector);
}

#[test]
fn a_reset_in_the_middle_is_tried_again_with_a_new_socket() {
    let plain = TcpListener::bind(any_port(LOCALHOST)).unwrap();
    let addr = plain.local_addr().unwrap();
    let mut connector = connector(&Handle::new(addr, KEY));
    until("greeting", || {
        assert!(connector.poll(Instant::now()).is_pending());
        (connector.stage() == Stage::Greeting).then_some(())
    });
    // Closed with the hello unread: a reset.
    drop(plain.accept().unwrap());
    until("retry", || {
        assert!(connector.poll(Instant::now()).is_pending());
        (connector.attempts() > 1).then_some(())
    });
    drop(plain);
    let (mut listener, _) = Listener::with_key(addr, None, Limits::default(), KEY).unwrap();
    join(&mut listener, &mut connector);
}

/// A caller that comes back after the listener's patience finds that out and dials again.
#[test]
fn a_slow_caller_gets_in_with_its_next_attempt() {
    let (mut listener, handle) = listener();
    let mut connector = connector(&handle);
    until("answer", || {
        if connector.stage() != Stage::Greeting {
            assert!(connector.poll(Instant::now()).is_pending());
        }
        assert!(listener.poll(Instant::now()).is_pending());
        (listener.pending() == 1 && connector.stage() == Stage::Greeting).then_some(())
    });
    until("patience over", || {
        assert!(listener.poll(Instant::now() + Limits::default().patience).is_pending());
        (listener.rejected().silent == 1).then_some(())
    });
    join(&mut listener, &mut connector);
    assert_eq!(connector.attempts(), 2);
}

/// What came in time counts, however late the listener's caller looks at it.
#[test]
fn a_slow_listener_still_takes_its_peer() {
    let (mut listener, handle) = listener();
    let mut connector = connector(&handle);
    let mut late = Instant::now();
    let mut near = None;
    until("connection", || {
        if near.is_none()
            && let Poll::Ready(result) = connector.poll(Instant::now())
        {
            let mut channel = result.unwrap();
            channel.send(1, b"first").unwrap();
            near = Some(channel);
        }
        // Between two polls of the listener the peer acts, and for the listener a minute goes by.
        thread::sleep(Duration::from_millis(5));
        late += Duration::from_secs(60);
        listener.poll(late).is_ready().then_some(())
    });
    assert_eq!(listener.rejected().total(), 0, "{}", listener.rejected());
}

#[test]
fn every_peer_that_proves_itself_is_handed_out() {
    let (mut listener, handle) = listener();
    let mut connectors: Vec<_> = (0..40).map(|_| connector(&handle)).collect();
    let (mut near, mut far) = (Vec::new(), Vec::new());
    until("all", || {
        connectors.retain_mut(|c| match c.poll(Instant::now()) {
            Poll::Ready(result) => {
                let mut channel = result.unwrap();
                assert!(channel.poll_flush().is_ready());
                near.push(channel);
                false
            }
            Poll::Pending => true,
        });
        if let Poll::Ready(result) = listener.poll(Instant::now()) {
            far.push(result.unwrap());
        }
        (far.len() == 40).then_some(())
    });
    assert_eq!(near.len(), 40);
}

#[test]
fn many_pairs_make_progress_together() {
    const PAIRS: usize = 512;
    // Some systems begin with 1024 descriptors, which is less than this takes.
    raise_descriptor_limit();
    let (mut listeners, mut connectors): (Vec<_>, Vec<_>) = (0..PAIRS)
        .map(|_| {
            let (listener, handle) = listener();
            (listener, connector(&handle))
        })
        .unzip();
    let start = Instant::now();
    let (mut near, mut far) = (Vec::new(), Vec::new());
    while near.len() + far.len() < 2 * PAIRS {
        connectors.retain_mut(|c| match c.poll(Instant::now()) {
            Poll::Ready(result) => {
                let mut channel = result.unwrap();
                channel.send(1, b"offer").unwrap();
                near.push(channel);
                false
            }
            Poll::Pending => true,
        });
        listeners.retain_mut(|l| match l.poll(Instant::now()) {
            Poll::Ready(result) => {
                far.push(result.unwrap());
                false
            }
            Poll::Pending => true,
        });
        assert!(start.elapsed() < LONG, "{} of {PAIRS} accepted", far.len());
    }
    for channel in &mut far {
        assert_eq!(recv(channel).unwrap().body, b"offer");
    }
}

fn raise_descriptor_limit() {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to an rlimit of ours.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    assert_eq!(rc, 0);
    limit.rlim_cur = limit.rlim_max;
    // SAFETY: as above; the soft limit is raised to the hard one, which is always allowed.
    let rc = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(rc, 0);
}

#[test]
fn ports_come_from_the_range_and_an_exhausted_one_is_named() {
    // Four ports in a row that are free now.
    let range = until("free ports", || {
        let first = TcpListener::bind(any_port(LOCALHOST)).unwrap().local_addr().unwrap().port();
        let last = first.checked_add(3)?;
        (first..=last).all(|p| TcpListener::bind((LOCALHOST, p)).is_ok()).then_some(first..=last)
    });
    let bind = || Listener::bind(any_port(LOCALHOST), Some(range.clone()), Limits::default());
    let mut held = Vec::new();
    let e = loop {
        match bind() {
            Ok((listener, handle)) => {
                assert!(range.contains(&handle.addr().port()));
                held.push(listener);
            }
            Err(e) => break e,
        }
    };
    // Another test may have taken one in the meantime.
    assert!((1..=4).contains(&held.len()), "{}", held.len());
    let text = e.to_string();
    let ports = format!("ports {}-{}", range.start(), range.end());
    assert!(text.contains("127.0.0.1") && text.contains(&ports) && text.contains("in use"), "{text}");
}

#[test]
fn an_address_that_nobody_can_connect_to_is_refused() {
    let any = any_port(IpAddr::V4(Ipv4Addr::UNSPECIFIED));
    assert!(matches!(Listener::bind(any, None, Limits::default()), Err(RendezvousError::Bind { .. })));
    #[expect(clippy::reversed_empty_ranges, reason = "the case in question")]
    let empty = 5..=4;
    assert!(Listener::bind(any_port(LOCALHOST), Some(empty), Limits::default()).is_err());
}

#[test]
fn a_peer_that_does_not_read_is_bounded_and_loses_nothing() {
    let (mut near, mut far) = pair();
    let body = vec![3; MAX_BODY];
    let mut sent = 0;
    let e = loop {
        match near.send(1, &body) {
            Ok(()) => sent += 1,
            Err(e) => break e,
        }
        assert!(sent < 10_000, "never full");
    };
    assert!(matches!(e, RendezvousError::Backlog { .. }), "{e}");
    assert!(near.poll_flush().is_pending());
    for _ in 0..sent {
        let frame = until("frame", || {
            let _ = near.poll_flush();
            match far.recv() {
                Poll::Ready(result) => Some(result.unwrap()),
                Poll::Pending => None,
            }
        });
        assert_eq!(frame.body, body);
    }
    assert!(matches!(near.poll_flush(), Poll::Ready(Ok(()))));
}

/// Closing with unread bytes would reset the connection and drop what the kernel has not sent yet.
#[test]
fn what_was_sent_before_the_close_arrives_although_bytes_were_left_unread() {
    let (mut near, mut far) = pair();
    socket2::SockRef::from(&near).set_send_buffer_size(1 << 20).unwrap();
    socket2::SockRef::from(&far).set_recv_buffer_size(32 << 10).unwrap();
    far.send(1, b"unread").unwrap();
    let body = vec![4; MAX_BODY];
    for _ in 0..8 {
        near.send(2, &body).unwrap();
    }
    assert!(near.poll_flush().is_ready(), "the kernel takes all of it");
    near.finish();
    for _ in 0..8 {
        assert_eq!(recv(&mut far).unwrap().body, body);
    }
    assert!(matches!(recv(&mut far), Err(RendezvousError::Closed { why: Closed::Eof, .. })));
}

#[test]
fn frames_that_are_not_the_callers_to_send_are_refused() {
    let (mut near, mut far) = pair();
    assert!(matches!(near.send(MAX_KIND + 1, &[]), Err(RendezvousError::Kind(_))));
    assert!(matches!(near.send(1, &vec![0; MAX_BODY + 1]), Err(RendezvousError::TooLong(_))));
    // Nor may the peer.
    let mut raw = TcpStream::from(std::os::fd::AsFd::as_fd(&near).try_clone_to_owned().unwrap());
    raw.write_all(&frame(VERSION, u8::MAX, &[])).unwrap();
    assert!(matches!(recv(&mut far), Err(RendezvousError::Closed { why: Closed::Garbage, .. })));
}

#[test]
fn a_reset_names_its_errno_and_what_came_before_it_is_read() {
    let (mut near, mut far) = pair();
    near.send(1, b"last words").unwrap();
    socket2::SockRef::from(&near).set_linger(Some(Duration::ZERO)).unwrap();
    drop(near);
    // Writing meets the reset first.
    until("broken", || far.send(2, b"into the void").is_err().then_some(()));
    assert_eq!(recv(&mut far).unwrap().body, b"last words");
    let Err(RendezvousError::Closed { why, .. }) = recv(&mut far) else { panic!("not closed") };
    assert_eq!(why, Closed::Reset(libc::ECONNRESET));
}

#[test]
fn dead_hosts_are_probed_for() {
    let (near, far) = pair();
    for channel in [&near, &far] {
        let socket = socket2::SockRef::from(channel);
        assert!(socket.keepalive().unwrap() && socket.tcp_nodelay().unwrap() && socket.nonblocking().unwrap());
        assert_eq!(socket.tcp_user_timeout().unwrap(), Some(Duration::from_secs(30)));
        // SAFETY: no memory is involved.
        let flags = unsafe { libc::fcntl(channel.as_raw_fd(), libc::F_GETFD) };
        assert_ne!(flags & libc::FD_CLOEXEC, 0);
    }
}
