//! Connections of the engine over soft-hca, both ends in this process.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::*;
use crate::memory::Memory;

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
fn library() -> &'static str {
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
    Engine { config, devices: found.devices, connecting: DashMap::new() }
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
    let (mut listener, mut handle) = engine.listen(0).expect("a listener");
    let (mut send, mut recv) = (None, None);
    until("connection", || {
        if send.is_none() {
            send = engine.connect(0, &mut handle, None).expect("connect");
        }
        if recv.is_none() {
            recv = engine.accept(&mut listener).expect("accept");
        }
        (send.is_some() && recv.is_some()).then_some(())
    });
    (send.expect("above"), recv.expect("above"))
}

/// Counts the WARN lines of the thread that runs it.
#[derive(Debug, Clone, Default)]
pub(super) struct Warnings(Arc<Mutex<Vec<String>>>);

impl Warnings {
    pub(super) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().expect("no panic"))
    }
}

impl tracing::Subscriber for Warnings {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        *metadata.level() <= tracing::Level::WARN
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
    let (mut listener, mut handle) = engine.listen(0).expect("a listener");
    let send = until("connect", || {
        let send = engine.connect(0, &mut handle, None).expect("connect");
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
    let (mut listener, mut handle) = engine.listen(0).expect("a listener");
    for _ in 0..100 {
        assert!(engine.connect(0, &mut handle, None).expect("connect").is_none());
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
    let (mut listener, mut handle) = engine.listen(0).expect("a listener");
    let mut told = None;
    let why = until("accept's error", || {
        told = told.take().or_else(|| engine.connect(0, &mut handle, None).map(|c| assert!(c.is_none())).err());
        engine.accept(&mut listener).err()
    });
    assert!(why.text.contains("ibv_create_qp"), "{why}");
    let told = told.unwrap_or_else(|| until("connect's error", || engine.connect(0, &mut handle, None).err()));
    assert!(told.text.contains("ibv_create_qp"), "{told}");
}
