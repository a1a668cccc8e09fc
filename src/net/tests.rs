//! Connections of the engine over soft-hca, both ends in this process.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::memory::Memory;
use crate::memory::gpu::PATIENCE;
use crate::transfer::Parent;

#[path = "../../tests/cuda/mod.rs"]
mod cuda;

/// Nothing here takes so long unless it hangs.
const LONG: Duration = Duration::from_secs(20);

/// Devices of one port each; the last has room for few QPs.
const FABRIC: &str = r#"
[[host]]
name = "a"
[[host.device]]
name = "soft_0"
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.0.1", type = "RoCE v2" }]
[[host.device]]
name = "soft_1"
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.1.1", type = "RoCE v2" }]
[[host.device]]
name = "soft_2"
max_qp = 2
[[host.device.port]]
link_layer = "Ethernet"
gids = [{ index = 0, gid = "::ffff:10.0.2.1", type = "RoCE v2" }]
"#;

/// The adapter, built beside this test in whatever profile and target directory that is.
pub(crate) fn library() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let deps = std::env::current_exe().expect("own path").parent().expect("deps").to_owned();
        let profile_dir = deps.parent().expect("profile");
        let profile = match profile_dir.file_name().and_then(|n| n.to_str()).expect("name") {
            "debug" => "dev",
            other => other,
        };
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        let built = Command::new(cargo)
            .args(["build", "--quiet", "-p", "soft-hca-verbs", "--profile", profile, "--target-dir"])
            .arg(profile_dir.parent().expect("target"))
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            .status()
            .expect("cargo");
        assert!(built.success());
        extern "C" fn remove() {
            let _ = std::fs::remove_dir_all(scratch());
        }
        let scratch = scratch();
        std::fs::create_dir_all(&scratch).expect("a directory");
        // SAFETY: the function stays where it is.
        unsafe { libc::atexit(remove) };
        let fabric = scratch.join("fabric.toml");
        std::fs::write(&fabric, FABRIC).expect("a file");
        for (name, value) in [
            ("SOFT_HCA_FABRIC", fabric.as_os_str()),
            ("SOFT_HCA_REGISTRY", scratch.as_os_str()),
            ("SOFT_HCA_HOST", "a".as_ref()),
        ] {
            // SAFETY: the other tests read the environment through std only, which locks.
            unsafe { std::env::set_var(name, value) };
        }
        let path = profile_dir.join("libsoft_hca_verbs.so").to_string_lossy().into_owned();
        // It reads its fabric now.
        let library = crate::verbs::Library::load(Some(path.as_ref())).expect("the adapter");
        assert_eq!(library.devices().expect("devices").len(), 3);
        path
    })
}

/// Of this process: the adapter's registry and fabric.
fn scratch() -> PathBuf {
    std::env::temp_dir().join(format!("nccl-net-rdma-test-{}", std::process::id()))
}

pub(super) fn engine(settings: &[(&str, &str)]) -> Engine {
    let lookup = |name: &str| match name {
        "NCCL_IBVERBS_LIB" => Some(library().to_owned()),
        "NCCL_SOCKET_IFNAME" => Some("lo".to_owned()),
        _ => settings.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned()),
    };
    let (config, warnings) = Config::load(&lookup, std::iter::empty());
    assert!(warnings.is_empty(), "{warnings:?}");
    let found = discover(&config);
    assert!(!found.devices.is_empty(), "{:?}", found.left_out);
    Engine { config, devices: Devices::new(found.devices), connecting: DashMap::new() }
}

pub(super) fn until<T>(what: &str, mut f: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(result) = f() {
            return result;
        }
        assert!(start.elapsed() < LONG, "{what}: timed out");
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// The sending and the receiving comm of a connection of device 0 with itself.
pub(super) fn connection(engine: &Engine) -> (Box<Comm>, Box<Comm>) {
    connection_by(engine, engine, |_| {})
}

/// A connection of two engines, which may have other settings; `way` may redirect the handle.
fn connection_by(from: &Engine, to: &Engine, way: impl FnOnce(&mut [u8; HANDLE_BYTES])) -> (Box<Comm>, Box<Comm>) {
    let (mut listener, mut handle) = to.listen(0, None).expect("a listener");
    way(&mut handle);
    let (mut send, mut recv) = (None, None);
    until("connection", || {
        if send.is_none() {
            send = from.connect(0, &mut handle, Wishes::default()).expect("connect");
        }
        if recv.is_none() {
            recv = to.accept(&mut listener).expect("accept");
        }
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.expect("above"), recv.expect("above"))
}

/// The lines that the thread which runs it prints for all: of what one peer does, only the first is a warning, and all
/// tests have the same peer.
#[derive(Debug, Clone, Default)]
pub(super) struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no panic"))
    }
}

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target() == "init" && *metadata.level() <= tracing::Level::INFO
    }
    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }
    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, event: &tracing::Event<'_>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 = format!("{value:?}");
            }
        }
        let mut text = Text(String::new());
        event.record(&mut text);
        self.0.lock().expect("no panic").push(text.0);
    }
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[test]
fn a_sender_may_close_before_accept_has_finished() {
    let engine = engine(&[]);
    let (mut listener, mut handle) = engine.listen(0, None).expect("a listener");
    let send = until("connect", || {
        let send = engine.connect(0, &mut handle, Wishes::default()).expect("connect");
        if send.is_none() {
            assert!(engine.accept(&mut listener).expect("accept").is_none());
        }
        send
    });
    // SAFETY: nothing runs on it.
    unsafe { send.close() };
    let recv = until("accept", || engine.accept(&mut listener).expect("accept"));
    let data = [0u8; 8];
    // SAFETY: the array outlives the comm.
    let mr = unsafe { recv.register(data.as_ptr() as u64, 8, Memory::Host) }.expect("a registration");
    let mut buffers = Buffers::new();
    buffers.push(data.as_ptr() as u64, 8, 0, &mr);
    // SAFETY: one call at a time.
    let request = unsafe { recv.irecv(&buffers) }.expect("no fault").expect("room");
    // SAFETY: as above.
    until("the error", || unsafe { Comm::test(request) }.err());
    // SAFETY: nothing runs on it.
    unsafe { recv.close() };
}

/// Only a host that can't be reached is given up sooner than the limit of the set-up: a process may be slow to accept.
#[test]
fn a_peer_that_is_slow_to_accept_is_waited_for() {
    let engine = engine(&[]);
    let (mut listener, mut handle) = engine.listen(0, None).expect("a listener");
    for _ in 0..100 {
        assert!(engine.connect(0, &mut handle, Wishes::default()).expect("connect").is_none());
        std::thread::sleep(Duration::from_micros(100));
    }
    let id = *engine.connecting.iter().next().expect("it is under way").key();
    let (_, connecting) = engine.connecting.remove(&id).expect("it is under way");
    let later = Instant::now() + Duration::from_secs(100);
    let Ok(connect::Step::Again(connecting)) = connecting.step(&engine.config, later) else { panic!("it gave up") };
    let too_late = Instant::now() + Duration::from_secs(400);
    assert!(connecting.step(&engine.config, too_late).is_err());
    assert!(engine.accept(&mut listener).expect("accept").is_none());
}

/// The last things of the accepting side are had before it answers, so that the connecting side never gets a comm whose
/// other end failed.
#[test]
fn an_accept_that_fails_at_its_end_tells_why() {
    let engine = engine(&[("NCCL_IB_HCA", "=soft_2"), ("NCCL_NET_RDMA_FORCE_FLUSH", "1")]);
    let (mut listener, mut handle) = engine.listen(0, None).expect("a listener");
    let mut told = None;
    let why = until("accept's error", || {
        told = told
            .take()
            .or_else(|| engine.connect(0, &mut handle, Wishes::default()).map(|c| assert!(c.is_none())).err());
        engine.accept(&mut listener).err()
    });
    assert!(why.text.contains("ibv_create_qp"), "{why}");
    let told =
        told.unwrap_or_else(|| until("connect's error", || engine.connect(0, &mut handle, Wishes::default()).err()));
    assert!(told.text.contains("ibv_create_qp"), "{told}");
}

/// A keep-alive whose limit passes while a test waits.
const BRISK: [(&str, &str); 2] =
    [("NCCL_NET_RDMA_KEEPALIVE_INTERVAL", "100"), ("NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", "600")];
const BRISK_INTERVAL: Duration = Duration::from_millis(100);
const BRISK_LIMIT: Duration = Duration::from_millis(600);

fn beats(comm: &Comm) -> u64 {
    comm.alert().control().expect("it stands").beats()
}

fn close_both((send, recv): (Box<Comm>, Box<Comm>)) {
    for comm in [send, recv] {
        // SAFETY: nothing runs on it.
        unsafe { comm.close() };
    }
}

#[test]
fn an_idle_connection_beats_as_often_as_agreed_and_stays() {
    // The interval of one end and the limit of the other.
    let rarely = engine(&[BRISK[0], ("NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", "400")]);
    let often = engine(&[("NCCL_NET_RDMA_KEEPALIVE_INTERVAL", "20"), BRISK[1]]);
    for (from, to) in [(&rarely, &often), (&often, &rarely)] {
        let start = Instant::now();
        let ends = connection_by(from, to, |_| {});
        std::thread::sleep(BRISK_LIMIT * 3);
        for end in [&ends.0, &ends.1] {
            let sent = beats(end);
            // The first one comes at once.
            let most = 1 + start.elapsed().as_millis() / BRISK_INTERVAL.as_millis();
            assert!(sent >= 3 && u128::from(sent) <= most, "{sent} beats, at most {most}");
            assert!(!end.alert().has_failed() && !end.alert().has_closed());
        }
        close_both(ends);
    }
}

/// An end without keep-alive says the same as a plugin that knows of none.
#[test]
fn one_end_without_keep_alive_is_enough_to_have_none() {
    let on = engine(&BRISK);
    for off in [("NCCL_NET_RDMA_KEEPALIVE_INTERVAL", "0"), ("NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", "0")] {
        let off = engine(&[off]);
        for (from, to) in [(&on, &off), (&off, &on)] {
            let ends = connection_by(from, to, |_| {});
            std::thread::sleep(BRISK_LIMIT * 2);
            for end in [&ends.0, &ends.1] {
                assert_eq!(beats(end), 0);
                assert!(!end.alert().has_failed() && !end.alert().has_closed());
            }
            close_both(ends);
        }
    }
}

/// Carries bytes between the two ends of one connection until it is told to be a black hole.
fn black_hole(handle: &mut [u8; HANDLE_BYTES]) -> Arc<AtomicBool> {
    let door = Handle::decode(handle).expect("a handle").addr();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    // Where a handle keeps its port.
    handle[8..10].copy_from_slice(&listener.local_addr().expect("bound").port().to_le_bytes());
    let cut = Arc::new(AtomicBool::new(false));
    std::thread::spawn({
        let cut = Arc::clone(&cut);
        move || {
            let near = listener.accept().expect("the connecting end").0;
            let far = TcpStream::connect(door).expect("the accepting end");
            let carry = |mut from: TcpStream, mut to: TcpStream| {
                let cut = Arc::clone(&cut);
                move || {
                    let mut bytes = [0; 4096];
                    while let Ok(n @ 1..) = from.read(&mut bytes) {
                        if !cut.load(Ordering::SeqCst) && to.write_all(&bytes[..n]).is_err() {
                            break;
                        }
                    }
                    // Seen only where bytes still pass.
                    if !cut.load(Ordering::SeqCst) {
                        let _ = to.shutdown(Shutdown::Both);
                    }
                }
            };
            let back = carry(far.try_clone().expect("a copy"), near.try_clone().expect("a copy"));
            std::thread::scope(|s| {
                s.spawn(back);
                carry(near, far)();
            });
        }
    });
    cut
}

/// No end of stream, no reset: both ends find out by themselves, the one with a receive open and the idle one.
#[test]
fn a_black_hole_is_noticed_by_both_ends() {
    let engine = engine(&BRISK);
    let mut cut = None;
    let (send, recv) = connection_by(&engine, &engine, |handle| cut = Some(black_hole(handle)));
    let data = [0u8; 8];
    // SAFETY: the array outlives the comm.
    let mr = unsafe { recv.register(data.as_ptr() as u64, 8, Memory::Host) }.expect("a registration");
    let mut buffers = Buffers::new();
    buffers.push(data.as_ptr() as u64, 8, 0, &mr);
    // SAFETY: one call at a time.
    let request = unsafe { recv.irecv(&buffers) }.expect("no fault").expect("room");
    std::thread::sleep(BRISK_LIMIT * 2);
    assert!([&send, &recv].iter().all(|end| !end.alert().has_failed() && !end.alert().has_closed()));
    let start = Instant::now();
    cut.expect("a way").store(true, Ordering::SeqCst);
    // SAFETY: as above.
    let error = until("the error", || unsafe { Comm::test(request) }.err());
    let after = start.elapsed();
    assert!(after + BRISK_INTERVAL * 2 >= BRISK_LIMIT && after < BRISK_LIMIT * 5, "{after:?}");
    assert_eq!(error.code, Code::Remote);
    let pid = format!("pid {} has been silent for", std::process::id());
    for part in [&*pid, "limit is 0.6 s", "with 1 transfer(s) under way", "soft_0:1"] {
        assert!(error.text.contains(part), "{part} is missing: {error}");
    }
    let idle = until("the idle end's error", || match send.alert().attention() {
        Some(alert::Attention::Failed(error)) => Some(error),
        _ => None,
    });
    assert!(idle.text.contains("has been silent for") && idle.text.contains("with 0 transfer(s)"), "{idle}");
    close_both((send, recv));
}

/// On the stand-in for the CUDA driver, which only a process finds that starts with it.
#[test]
fn copies_that_hang_are_told_of_and_waited_for_once() {
    let folder = cuda::folder();
    if std::env::var("LD_LIBRARY_PATH").as_deref() != Ok(folder) {
        let own = ["--exact", "net::tests::copies_that_hang_are_told_of_and_waited_for_once", "--nocapture"];
        let own =
            Command::new(std::env::current_exe().expect("own path")).args(own).env("LD_LIBRARY_PATH", folder).output();
        let own = own.expect("a process");
        let text = String::from_utf8_lossy(&own.stdout) + String::from_utf8_lossy(&own.stderr);
        assert!(own.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let engine = engine(&[("NCCL_NET_RDMA_GPU_PATH", "staging")]);
    let ((send, recv), (other, there)) = (connection(&engine), connection(&engine));
    // SAFETY: the stand-in, by the name under which the driver is looked for.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: a library, or NULL, of which all names are looked up.
    let [alloc, hang] = [c"stand_in_alloc", c"stand_in_hang"].map(|name| unsafe { libc::dlsym(driver, name.as_ptr()) });
    assert!(!alloc.is_null() && !hang.is_null());
    // SAFETY: its type there.
    let alloc: unsafe extern "C" fn(usize, c_int) -> u64 = unsafe { std::mem::transmute(alloc) };
    // SAFETY: as above.
    let hang: unsafe extern "C" fn(c_int) = unsafe { std::mem::transmute(hang) };
    // SAFETY: gives memory.
    let from = unsafe { alloc(4096, 1) };
    let mut to = [0u8; 8];
    // SAFETY: there until the process ends.
    let from_mr = unsafe { send.register(from, 4096, Memory::Gpu) }.expect("a registration");
    // SAFETY: longer than the comm.
    let to_mr = unsafe { recv.register(to.as_ptr() as u64, 8, Memory::Host) }.expect("a registration");
    let mut buffers = Buffers::new();
    buffers.push(to.as_mut_ptr() as u64, 8, 0, &to_mr);
    // SAFETY: one call at a time.
    unsafe { recv.irecv(&buffers) }.expect("no fault").expect("room");
    // SAFETY: only says so.
    unsafe { hang(1) };
    // SAFETY: as above.
    until("a credit", || unsafe { send.isend(from, 8, 0, &from_mr, Parent::NONE) }.expect("no fault"));

    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(lines.clone());
    let begin = Instant::now();
    send.deregister(from_mr);
    assert!(begin.elapsed() >= PATIENCE, "{:?}", begin.elapsed());
    let told = lines.take();
    let parts = [
        "copies from GPU 0 (Stand-in) do not end; waited for ",
        "memory was deregistered: its shadow stays pinned",
        &format!("peer {}", send.base().peer),
        "look at nvidia-smi and for Xid errors",
    ];
    assert!(told.iter().any(|line| parts.iter().all(|part| line.contains(part))), "{told:#?}");

    // Who comes later learns it without such a wait: the end of this connection is two.
    let begin = Instant::now();
    // SAFETY: there until the process ends.
    let refused = unsafe { other.register(from, 4096, Memory::Gpu) }.expect_err("it hangs");
    assert!(refused.text.contains("copies on GPU 0 (Stand-in) hang"), "{refused}");
    // SAFETY: nothing else runs on it.
    unsafe { send.close() };
    assert!(begin.elapsed() < 2 * PATIENCE, "{:?}", begin.elapsed());
    assert!(lines.take().iter().any(|line| line.contains("meanwhile the connection was closed")));
    assert_eq!(to, [0; 8]);
    for comm in [recv, other, there] {
        // SAFETY: as above.
        unsafe { comm.close() };
    }
}
