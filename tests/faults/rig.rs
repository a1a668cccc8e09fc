//! What the tests stand on: a process of its own for each test (the environment is read once per process, and devices
//! stay open until it ends), a virtual fabric in a file, and a place where the processes of one test leave things for
//! each other.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::unistd::Pid;

/// Longest that the processes of one test may take together.
const LIMIT: Duration = Duration::from_secs(90);
/// Longest wait for another process of the test, or for something to happen in this one.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

const NAME_VAR: &str = "FAULTS_TEST";
const ROLE_VAR: &str = "FAULTS_ROLE";
const DIR_VAR: &str = "FAULTS_DIR";
/// The role of the process that a test starts in.
pub(crate) const MAIN: &str = "main";

/// The built tree: tests hold what users get.
pub(crate) fn dist(path: &str) -> PathBuf {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist").join(path);
    assert!(file.exists(), "{} is missing: run ci/build first", file.display());
    file
}

/// What a test runs in.
#[derive(Debug, Default)]
pub(crate) struct Setting<'a> {
    /// Text of the fabric file; None: soft-hca's own default.
    pub(crate) fabric: Option<&'a str>,
    pub(crate) env: &'a [(&'a str, &'a str)],
}

/// Runs `body` in a process of its own, with the role it is to play there. Outside that process it starts it and waits.
///
/// Uses the name of the test that the closure was written in, so `body` must be a closure in the test itself.
pub(crate) fn alone<F: FnOnce(&Room)>(setting: &Setting<'_>, body: F) {
    let full = std::any::type_name::<F>();
    let name = full.split_once("::").map_or(full, |(_, rest)| rest).trim_end_matches("::{{closure}}");
    if std::env::var(NAME_VAR).as_deref() == Ok(name) {
        body(&Room { dir: PathBuf::from(std::env::var_os(DIR_VAR).unwrap()), name: name.to_owned() });
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("registry")).unwrap();
    if let Some(text) = setting.fabric {
        fs::write(dir.path().join("fabric.toml"), text).unwrap();
    }
    let room = Room { dir: dir.path().to_owned(), name: name.to_owned() };
    let mut helper = room.start(MAIN, setting.env);
    let status = helper.wait(LIMIT);
    let output = helper.output();
    assert!(status == Some(0), "{name} ended with {status:?}:\n{output}");
    assert!(output.contains("1 passed"), "{name} ran another number of tests than one:\n{output}");
}

/// The processes of one test, as seen from one of them.
#[derive(Debug)]
pub(crate) struct Room {
    dir: PathBuf,
    name: String,
}

impl Room {
    pub(crate) fn role(&self) -> String {
        std::env::var(ROLE_VAR).unwrap()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Starts a further process of this test.
    pub(crate) fn start(&self, role: &str, env: &[(&str, &str)]) -> Helper {
        let log = self.path(&format!("{role}.log"));
        let out = File::create(&log).unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        for (key, _) in std::env::vars_os() {
            let name = key.to_string_lossy();
            if name.starts_with("NCCL_") || name.starts_with("SOFT_HCA_") {
                command.env_remove(&key);
            }
        }
        command
            .args(["--exact", &self.name, "--nocapture", "--test-threads=1"])
            .env(NAME_VAR, &self.name)
            .env(ROLE_VAR, role)
            .env(DIR_VAR, &self.dir)
            .env("SOFT_HCA_REGISTRY", self.path("registry"))
            .env("SOFT_HCA_TRACE", self.path("trace"))
            .env("NCCL_IBVERBS_LIB", dist("soft-hca/libibverbs.so.1"))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_DEBUG", "INFO")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::null())
            .stderr(out.try_clone().unwrap())
            .stdout(out);
        let fabric = self.path("fabric.toml");
        if fabric.exists() {
            command.env("SOFT_HCA_FABRIC", fabric);
        }
        for (key, value) in env {
            command.env(key, value);
        }
        Helper { child: command.spawn().unwrap(), log }
    }

    /// Leaves something for the other processes of the test.
    pub(crate) fn put(&self, name: &str, bytes: &[u8]) {
        let draft = self.path(&format!("{name}.new"));
        fs::write(&draft, bytes).unwrap();
        fs::rename(draft, self.path(name)).unwrap();
    }

    /// Takes what another process left, as soon as it is there.
    pub(crate) fn get(&self, name: &str) -> Vec<u8> {
        until(&format!("{name} from another process"), || fs::read(self.path(name)).ok())
    }
}

/// A process that this one started; killed if it is dropped before it has ended.
#[derive(Debug)]
pub(crate) struct Helper {
    child: Child,
    log: PathBuf,
}

impl Helper {
    /// Its exit code; None: it was killed, by us at the limit or by a signal.
    pub(crate) fn wait(&mut self, limit: Duration) -> Option<i32> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status.code();
            }
            if start.elapsed() > limit {
                self.kill();
                return None;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id().try_into().unwrap());
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    pub(crate) fn output(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits for its good end.
    pub(crate) fn expect_success(&mut self) {
        let status = self.wait(PATIENCE);
        assert!(status == Some(0), "a further process ended with {status:?}:\n{}", self.output());
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Asks again and again, at most for [`PATIENCE`].
pub(crate) fn until<T>(what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = ready() {
            return found;
        }
        assert!(start.elapsed() < PATIENCE, "waited {PATIENCE:?} for {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A device with one port on Ethernet and the usual four GIDs, the last of them routable.
pub(crate) fn roce(name: &str, ip: &str, device_extra: &str, port_extra: &str) -> String {
    format!(
        r#"
[[host.device]]
name = "{name}"
{device_extra}
[[host.device.port]]
link_layer = "Ethernet"
{port_extra}
gids = [
    {{ index = 0, gid = "fe80::{name_hash:x}", type = "RoCE v1" }},
    {{ index = 1, gid = "fe80::{name_hash:x}", type = "RoCE v2" }},
    {{ index = 2, gid = "::ffff:{ip}", type = "RoCE v1" }},
    {{ index = 3, gid = "::ffff:{ip}", type = "RoCE v2" }},
]
"#,
        name_hash = ip.bytes().fold(1u16, |h, b| h.wrapping_mul(31).wrapping_add(u16::from(b))),
    )
}

/// A device with one port on InfiniBand.
pub(crate) fn infiniband(name: &str, lid: u16, pkeys: &str) -> String {
    format!(
        "[[host.device]]\nname = \"{name}\"\n[[host.device.port]]\nlink_layer = \"InfiniBand\"\nlid = {lid}\nsm_lid = 9\n\
         pkeys = {pkeys}\ngids = [{{ index = 0, gid = \"fe80::{lid}\", type = \"IB\" }}]\n"
    )
}

/// A host with these devices.
pub(crate) fn host(name: &str, devices: &[String]) -> String {
    format!("[[host]]\nname = \"{name}\"\n{}", devices.concat())
}
