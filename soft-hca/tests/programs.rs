//! Foreign programs, as Debian ships them, on soft-hca: perftest, the examples of rdma-core, and libmlx5 as NCCL looks at it.
//! Where a program is not installed, its test says that it was skipped.
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    reason = "the verbs are called as C programs call them"
)]
mod library;

#[cfg(test)]
mod tests {
    use crate::library::{Folder, skip};
    use ibverbs_sys as ffi;
    use std::collections::BTreeMap;
    use std::ffi::{CStr, CString, c_char, c_int, c_void};
    use std::fmt::Write as _;
    use std::fs::File;
    use std::net::TcpListener;
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command};
    use std::sync::{Mutex, MutexGuard, PoisonError};
    use std::time::{Duration, Instant};

    /// For a program that measures for a second; on a loaded machine of two cores, whose programs poll in turns.
    const LIMIT: Duration = Duration::from_secs(120);

    /// What the programs of one test share: the library, and a registry in which only they find one another. One test at a
    /// time has it, as each starts programs that poll.
    struct Bench {
        folder: Folder,
        scratch: tempfile::TempDir,
        fabric: Option<PathBuf>,
        _alone: MutexGuard<'static, ()>,
    }

    impl Bench {
        /// None, and said so, without the program.
        fn with(program: &str) -> Option<Self> {
            static ALONE: Mutex<()> = Mutex::new(());
            let path = std::env::var_os("PATH").unwrap_or_default();
            if !std::env::split_paths(&path).any(|dir| dir.join(program).exists()) {
                skip(&format!("{program} is not installed (packages perftest and ibverbs-utils)"));
                return None;
            }
            let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
            let scratch = tempfile::tempdir_in("/dev/shm").unwrap();
            Some(Self { folder: Folder::new(), scratch, fabric: None, _alone: alone })
        }

        /// The same in a fabric of `soft-hca/examples`.
        fn in_fabric(self, name: &str) -> Self {
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
            assert!(file.exists());
            Self { fabric: Some(file), ..self }
        }

        fn command(&self, program: &str, host: &str, args: &[&str]) -> Command {
            let mut command = Command::new(program);
            command
                .args(args)
                .env("LD_LIBRARY_PATH", self.folder.path())
                .env("SOFT_HCA_REGISTRY", self.scratch.path())
                .env("SOFT_HCA_HOST", host)
                .env_remove("SOFT_HCA_FABRIC")
                .envs(self.fabric.iter().map(|file| ("SOFT_HCA_FABRIC", file)));
            command
        }

        fn start(&self, program: &str, host: &str, args: &[&str]) -> Running {
            let output = self.scratch.path().join(format!("{host}.out"));
            let file = File::create(&output).unwrap();
            let mut command = self.command(program, host, args);
            command.stdout(file.try_clone().unwrap()).stderr(file);
            let what = format!("{program} {} on host {host}", args.join(" "));
            Running { child: command.spawn().unwrap(), output, what }
        }

        /// One program alone.
        fn alone(&self, program: &str, args: &[&str]) -> String {
            self.start(program, "a", args).output()
        }

        /// A server and a client, with the same arguments; both have to succeed. What they printed.
        fn pair(&self, program: &str, args: &[&str]) -> [String; 2] {
            let port = free_port();
            let number = port.to_string();
            let mut args = [&["-p", &number], args].concat();
            let mut server = self.start(program, "a", &args);
            server.wait_for_listener(port);
            args.push("localhost");
            let client = self.start(program, "b", &args);
            // The client first: where it fails, the server waits for nothing.
            let client = client.output();
            [server.output(), client]
        }
    }

    /// A process that does not outlive its test.
    struct Running {
        child: Child,
        output: PathBuf,
        what: String,
    }

    impl Running {
        fn printed(&self) -> String {
            std::fs::read_to_string(&self.output).unwrap()
        }

        /// Not by connecting: these servers take one client.
        fn wait_for_listener(&mut self, port: u16) {
            let start = Instant::now();
            let end = format!(":{port:04X}");
            let listens = |table: &str| {
                let text = std::fs::read_to_string(table).unwrap_or_default();
                text.lines().any(|line| {
                    let words: Vec<&str> = line.split_whitespace().collect();
                    words.len() > 3 && words[1].ends_with(&end) && words[3] == "0A"
                })
            };
            while !["/proc/net/tcp", "/proc/net/tcp6"].into_iter().any(listens) {
                let gone = self.child.try_wait().unwrap();
                assert!(gone.is_none() && start.elapsed() < LIMIT, "{} {gone:?}:\n{}", self.what, self.printed());
                std::thread::sleep(Duration::from_millis(5));
            }
        }

        fn output(mut self) -> String {
            let start = Instant::now();
            let status = loop {
                if let Some(status) = self.child.try_wait().unwrap() {
                    break status;
                }
                assert!(start.elapsed() < LIMIT, "{} does not end:\n{}", self.what, self.printed());
                std::thread::sleep(Duration::from_millis(5));
            };
            let text = self.printed();
            assert!(status.success(), "{}: {status}\n{text}", self.what);
            text
        }
    }

    impl Drop for Running {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    fn free_port() -> u16 {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
    }

    /// The rows of perftest's table: numbers by the title of their column, up to its unit.
    fn rows(text: &str) -> Vec<BTreeMap<String, f64>> {
        let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
        let titles = lines.next().unwrap_or_default().replace("BW ", "").replace("percentile", "");
        let titles: Vec<&str> = titles.split(['[', ']', ' ']).filter(|word| !word.is_empty()).collect();
        let titles = titles.into_iter().filter(|word| !matches!(*word, "MB/sec" | "MiB/sec" | "Mpps" | "usec"));
        let titles: Vec<&str> = titles.collect();
        let numbers = |line: &str| {
            let numbers: Result<Vec<f64>, _> = line.split_whitespace().map(str::parse).collect();
            numbers.ok().filter(|numbers| numbers.len() == titles.len())
        };
        let named = |numbers: Vec<f64>| titles.iter().map(ToString::to_string).zip(numbers).collect();
        lines.filter_map(|line| numbers(line).map(named)).collect()
    }

    fn bandwidth(program: &str) {
        let Some(bench) = Bench::with(program) else { return };
        let [server, client] = bench.pair(program, &["-F", "-n", "200"]);
        let rows = rows(&client);
        let [row] = &rows[..] else { panic!("one row\n{client}") };
        assert_eq!((row["#bytes"], row["#iterations"]), (65536.0, 200.0), "{client}");
        assert!(row["peak"] > 0.0 && row["average"] > 0.0 && row["MsgRate"] > 0.0, "{client}");
        assert!(client.contains("Device         : soft0"), "{client}");
        assert!(server.contains("Device         : soft0"), "{server}");
    }

    fn latency(program: &str) {
        let Some(bench) = Bench::with(program) else { return };
        let [_, client] = bench.pair(program, &["-F", "-n", "50"]);
        let rows = rows(&client);
        let [row] = &rows[..] else { panic!("one row\n{client}") };
        assert_eq!((row["#bytes"], row["#iterations"]), (2.0, 50.0), "{client}");
        assert!(row["t_min"] > 0.0 && row["t_max"] >= row["t_typical"] && row["t_avg"] > 0.0, "{client}");
    }

    #[test]
    fn perftest_write_bandwidth() {
        bandwidth("ib_write_bw");
    }

    #[test]
    fn perftest_read_bandwidth() {
        bandwidth("ib_read_bw");
    }

    #[test]
    fn perftest_send_bandwidth() {
        bandwidth("ib_send_bw");
    }

    #[test]
    fn perftest_write_latency() {
        latency("ib_write_lat");
    }

    #[test]
    fn perftest_read_latency() {
        latency("ib_read_lat");
    }

    #[test]
    fn perftest_send_latency() {
        latency("ib_send_lat");
    }

    #[test]
    fn perftest_in_every_size() {
        let Some(bench) = Bench::with("ib_write_bw") else { return };
        let [_, client] = bench.pair("ib_write_bw", &["-F", "-a", "-n", "5"]);
        let rows = rows(&client);
        let sizes: Vec<f64> = rows.iter().map(|row| row["#bytes"]).collect();
        let powers: Vec<f64> = (1..=23).map(|power| f64::from(1 << power)).collect();
        assert_eq!(sizes, powers, "{client}");
        assert!(rows[22]["average"] > 0.0, "{client}");
    }

    #[test]
    fn perftest_both_ways_on_several_queue_pairs() {
        let Some(bench) = Bench::with("ib_write_bw") else { return };
        let [_, client] = bench.pair("ib_write_bw", &["-F", "-b", "-q", "4", "-n", "50"]);
        let rows = rows(&client);
        assert_eq!((rows[0]["#bytes"], rows[0]["#iterations"]), (65536.0, 200.0), "{client}");
        assert!(rows[0]["average"] > 0.0, "{client}");
    }

    #[test]
    fn perftest_waits_for_events() {
        let Some(bench) = Bench::with("ib_send_bw") else { return };
        let [_, client] = bench.pair("ib_send_bw", &["-F", "-e", "-n", "50"]);
        assert!(rows(&client)[0]["average"] > 0.0, "{client}");
    }

    #[test]
    fn perftest_between_hosts_by_local_identifier() {
        let Some(bench) = Bench::with("ib_read_bw") else { return };
        let [server, client] = bench.in_fabric("infiniband.toml").pair("ib_read_bw", &["-F", "-n", "50"]);
        for text in [&server, &client] {
            assert!(text.contains("Link type       : IB") && !text.contains("GID:"), "{text}");
        }
        assert!(rows(&client)[0]["average"] > 0.0, "{client}");
    }

    /// What an adapter without atomics, datagrams or shared receive queues answers: an error, at once.
    #[test]
    fn what_is_not_offered_is_refused_and_nothing_hangs() {
        let Some(bench) = Bench::with("ibv_ud_pingpong") else { return };
        for (program, args, reason) in [
            ("ibv_ud_pingpong", &[][..], "Couldn't create QP"),
            ("ibv_uc_pingpong", &[], "Couldn't create QP"),
            ("ibv_srq_pingpong", &[], "Couldn't create SRQ"),
            ("ibv_rc_pingpong", &["--new_send"], "Couldn't create QP"),
            ("ibv_rc_pingpong", &["--ts"], "timestamp"),
            ("ibv_rc_pingpong", &["--odp"], "ODP"),
            ("ibv_rc_pingpong", &["--dm"], "Device doesn't support dm"),
        ] {
            let output = bench.command(program, "a", args).output().unwrap();
            let text = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{program} {args:?}: {text}");
            assert!(text.contains(reason), "{program} {args:?}: {text}");
        }
    }

    /// Every byte is checked by the program (`-c`), between two hosts.
    #[test]
    fn pingpong_with_validated_data() {
        let Some(bench) = Bench::with("ibv_rc_pingpong") else { return };
        let bench = bench.in_fabric("roce-two-rails.toml");
        for more in [&[][..], &["-e"]] {
            let args = [&["-d", "soft_1", "-g", "3", "-c", "-s", "10000", "-m", "4096", "-n", "100", "-r", "20"], more];
            let both = bench.pair("ibv_rc_pingpong", &args.concat());
            let of = ["::ffff:10.0.1.1", "::ffff:10.0.1.2"];
            for (text, other) in both.iter().zip([of[1], of[0]]) {
                assert!(text.contains("100 iters in"), "{text}");
                assert!(!text.contains("invalid data"), "{text}");
                assert!(text.lines().any(|line| line.contains("remote address") && line.ends_with(other)), "{text}");
            }
        }
    }

    #[test]
    fn devinfo_shows_devices_ports_and_gids() {
        let Some(bench) = Bench::with("ibv_devinfo") else { return };
        let fields = |text: &str| -> Vec<String> {
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            text.lines().map(words).collect()
        };
        let text = bench.alone("ibv_devinfo", &["-v"]);
        let lines = fields(&text);
        for field in [
            "hca_id: soft0",
            "transport: InfiniBand (0)",
            "phys_port_cnt: 1",
            "max_mr: 8192",
            "max_sge: 8",
            "atomic_cap: ATOMIC_NONE (0)",
            "port: 1",
            "state: PORT_ACTIVE (4)",
            "active_mtu: 4096 (5)",
            "link_layer: Ethernet",
            "gid_tbl_len: 4",
            "phys_state: LINK_UP (5)",
        ] {
            assert!(lines.iter().any(|line| line == field), "{field}\n{text}");
        }
        let bench = bench.in_fabric("roce-two-rails.toml");
        let text = bench.alone("ibv_devinfo", &["-v"]);
        let lines = fields(&text);
        for field in [
            "hca_id: soft_0",
            "hca_id: soft_1",
            "GID[ 2]: 0000:0000:0000:0000:0000:ffff:0a00:0101, RoCE v1",
            "GID[ 3]: ::ffff:10.0.1.1, RoCE v2",
        ] {
            assert!(lines.iter().any(|line| line == field), "{field}\n{text}");
        }
        let listed = bench.alone("ibv_devices", &[]);
        assert!(listed.contains("soft_0") && listed.contains("50f7000000000a01"), "{listed}");
    }

    // ---- libmlx5 on top of soft-hca ----

    const INNER: &str = "SOFT_HCA_TEST_MLX5";

    #[test]
    fn libmlx5_takes_no_device_for_its_own() {
        let Some(bench) = Bench::with("true") else { return };
        let exe = std::env::current_exe().unwrap();
        let args = ["--exact", "tests::as_nccl_looks_for_mlx5", "--ignored", "--nocapture"];
        let file = bench.folder.path().join("libibverbs.so.1");
        // Found by its name, and given by its path, as NCCL_IBVERBS_LIB does.
        for (verbs, path) in [(Path::new("libibverbs.so.1"), Some(bench.folder.path())), (&file, None)] {
            let mut command = bench.command(exe.to_str().unwrap(), "a", &args);
            command.env(INNER, verbs).env_remove("LD_LIBRARY_PATH").envs(path.map(|path| ("LD_LIBRARY_PATH", path)));
            let output = command.output().unwrap();
            let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
            write!(text, "{}", String::from_utf8_lossy(&output.stderr)).unwrap();
            assert!(output.status.success(), "{text}");
            if let Some((_, why)) = text.split_once("@skipped ") {
                skip(why.lines().next().unwrap_or_default());
                return;
            }
            assert!(text.contains("@unharmed"), "{text}");
        }
    }

    fn open(library: &str) -> Result<*mut c_void, String> {
        let name = CString::new(library).unwrap();
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) };
        if handle.is_null() {
            Err(unsafe { CStr::from_ptr(libc::dlerror()) }.to_str().unwrap().to_owned())
        } else {
            Ok(handle)
        }
    }

    fn versioned(library: *mut c_void, name: &CStr, version: &CStr) -> *mut c_void {
        let found = unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) };
        assert!(!found.is_null(), "{name:?}@{version:?}");
        found
    }

    /// A process of its own, as it keeps what it loads: the verbs library first, libmlx5 next, then what NCCL asks it.
    #[test]
    #[ignore = "run by the test above, in a process of its own"]
    fn as_nccl_looks_for_mlx5() {
        let Some(verbs) = std::env::var_os(INNER) else { return };
        let verbs = open(verbs.to_str().unwrap()).unwrap();
        let mlx5 = match open("libmlx5.so.1") {
            Ok(mlx5) => mlx5,
            Err(why) if why.starts_with("libmlx5.so.1: cannot open") => {
                println!("@skipped libmlx5.so.1 is not installed (package ibverbs-providers)");
                return;
            }
            Err(why) => panic!("{why}"),
        };
        // One libibverbs in the process, and that is soft-hca.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.contains("libsoft_hca_verbs.so") && !maps.contains("libibverbs.so"), "{maps}");

        type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ffi::ibv_device;
        type OpenDevice = unsafe extern "C" fn(*mut ffi::ibv_device) -> *mut ffi::ibv_context;
        type AllocPd = unsafe extern "C" fn(*mut ffi::ibv_context) -> *mut ffi::ibv_pd;
        type Close = unsafe extern "C" fn(*mut c_void) -> c_int;
        type IsSupported = unsafe extern "C" fn(*mut ffi::ibv_device) -> bool;
        type Query = unsafe extern "C" fn(*mut ffi::ibv_context, *mut u64) -> c_int;
        unsafe {
            let list: List = std::mem::transmute(versioned(verbs, c"ibv_get_device_list", c"IBVERBS_1.1"));
            let open_device: OpenDevice = std::mem::transmute(versioned(verbs, c"ibv_open_device", c"IBVERBS_1.1"));
            let alloc_pd: AllocPd = std::mem::transmute(versioned(verbs, c"ibv_alloc_pd", c"IBVERBS_1.1"));
            let dealloc_pd: Close = std::mem::transmute(versioned(verbs, c"ibv_dealloc_pd", c"IBVERBS_1.1"));
            let close: Close = std::mem::transmute(versioned(verbs, c"ibv_close_device", c"IBVERBS_1.1"));
            let supported: IsSupported = std::mem::transmute(versioned(mlx5, c"mlx5dv_is_supported", c"MLX5_1.8"));
            let query: Query = std::mem::transmute(versioned(mlx5, c"mlx5dv_query_device", c"MLX5_1.0"));
            let mut count = 0;
            let devices = list(&raw mut count);
            assert_eq!(count, 1, "libmlx5 has registered a driver, but it brings no devices");
            for i in 0..usize::try_from(count).unwrap() {
                let device = *devices.add(i);
                assert!(!supported(device));
                let context = open_device(device);
                assert!(!context.is_null());
                let mut attr = [0; 64];
                assert_eq!(query(context, attr.as_mut_ptr()), libc::EOPNOTSUPP);
                // Where this libmlx5 has them, the two that NCCL calls for data direct.
                let direct = libc::dlsym(mlx5, c"mlx5dv_get_data_direct_sysfs_path".as_ptr());
                if !direct.is_null() {
                    type Direct = unsafe extern "C" fn(*mut ffi::ibv_context, *mut c_char, usize) -> c_int;
                    let direct: Direct = std::mem::transmute(direct);
                    let mut path = [0; 256];
                    assert_ne!(direct(context, path.as_mut_ptr(), path.len()), 0);
                }
                let pd = alloc_pd(context);
                assert!(!pd.is_null());
                let dmabuf = libc::dlsym(mlx5, c"mlx5dv_reg_dmabuf_mr".as_ptr());
                if !dmabuf.is_null() {
                    type Dmabuf = unsafe extern "C" fn(
                        *mut ffi::ibv_pd,
                        u64,
                        usize,
                        u64,
                        c_int,
                        c_int,
                        c_int,
                    ) -> *mut ffi::ibv_mr;
                    let dmabuf: Dmabuf = std::mem::transmute(dmabuf);
                    assert!(dmabuf(pd, 0, 4096, 0, -1, 1, 0).is_null());
                }
                assert_eq!(dealloc_pd(pd.cast()), 0);
                assert_eq!(close(context.cast()), 0);
            }
        }
        // Every other vendor's library finds its symbols too, as binding at once shows.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        let known = versioned(mlx5, c"mlx5dv_is_supported", c"MLX5_1.8");
        assert_ne!(unsafe { libc::dladdr(known, &raw mut info) }, 0);
        let file = std::fs::canonicalize(unsafe { CStr::from_ptr(info.dli_fname) }.to_str().unwrap()).unwrap();
        let providers = file.parent().unwrap().join("libibverbs");
        let mut count = 0;
        for provider in std::fs::read_dir(&providers).unwrap() {
            open(provider.unwrap().path().to_str().unwrap()).unwrap();
            count += 1;
        }
        assert!(count > 3, "{count} providers in {}", providers.display());
        println!("@unharmed");
    }
}
