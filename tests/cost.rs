//! What the data path must not do in steady state: allocate or call the system.
//!
//! The release build of the plugin runs over the release build of soft-hca with its null engine, in which everything that
//! an adapter does happens inside the call and both ends are on one thread, so that nothing escapes the check:
//!
//! * Allocations are counted by this program's own `malloc` and its kin, which the dynamic linker puts before libc's for
//!   every library of the process.
//! * A seccomp filter kills the process at any system call but its exit.
//!
//! Each check has a control: the same loop with one thing in it that the check must find. Threads of the plugin beside the
//! data path are free to do all of this. An uncontended lock makes no system call and is not seen here.
#![cfg(all(target_os = "linux", target_env = "gnu", target_arch = "x86_64"))]

/// The allocator of the whole process, counting what one chosen thread asks for.
#[cfg(test)]
mod counting {
    use std::ffi::{c_int, c_void};
    use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

    unsafe extern "C" {
        fn __libc_malloc(size: usize) -> *mut c_void;
        fn __libc_calloc(count: usize, size: usize) -> *mut c_void;
        fn __libc_realloc(old: *mut c_void, size: usize) -> *mut c_void;
        fn __libc_memalign(align: usize, size: usize) -> *mut c_void;
        fn __libc_free(old: *mut c_void);
    }

    static COUNTED: AtomicUsize = AtomicUsize::new(0);
    static CALLS: AtomicU64 = AtomicU64::new(0);

    /// A number of this thread that costs neither a call of the system nor an allocation.
    fn me() -> usize {
        // SAFETY: always gives the thread's own errno.
        unsafe { libc::__errno_location() }.addr()
    }

    fn count() {
        if COUNTED.load(Relaxed) == me() {
            CALLS.store(CALLS.load(Relaxed) + 1, Relaxed);
        }
    }

    /// Counts the calls of this thread from now on.
    pub(crate) fn start() {
        COUNTED.store(me(), Relaxed);
    }

    pub(crate) fn calls() -> u64 {
        CALLS.load(Relaxed)
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn malloc(size: usize) -> *mut c_void {
        count();
        // SAFETY: the caller's.
        unsafe { __libc_malloc(size) }
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn calloc(n: usize, size: usize) -> *mut c_void {
        count();
        // SAFETY: the caller's.
        unsafe { __libc_calloc(n, size) }
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn realloc(old: *mut c_void, size: usize) -> *mut c_void {
        count();
        // SAFETY: the caller's.
        unsafe { __libc_realloc(old, size) }
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn posix_memalign(out: *mut *mut c_void, align: usize, size: usize) -> c_int {
        count();
        // SAFETY: the caller's.
        let new = unsafe { __libc_memalign(align, size) };
        if new.is_null() {
            return libc::ENOMEM;
        }
        // SAFETY: the caller's.
        unsafe { out.write(new) };
        0
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn aligned_alloc(align: usize, size: usize) -> *mut c_void {
        count();
        // SAFETY: the caller's.
        unsafe { __libc_memalign(align, size) }
    }

    /// # Safety
    /// As C's.
    #[unsafe(no_mangle)]
    unsafe extern "C" fn free(old: *mut c_void) {
        if !old.is_null() {
            count();
        }
        // SAFETY: the caller's.
        unsafe { __libc_free(old) };
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::{CString, c_char, c_int, c_ulong, c_void};
    use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
    use std::path::{Path, PathBuf};
    use std::process::{Child, Command, ExitStatus, Stdio};
    use std::ptr;
    use std::time::{Duration, Instant};

    use nccl_net_rdma::abi::types::{ncclDebugLogLevel, ncclNet_v8_t, ncclResult_t};

    use crate::counting;

    /// What the child is told to do, and what is done inside its loop.
    const WORK: &str = "COST_TEST_WORK";
    const STEADY: &str = "steady";
    const ALLOCATES: &str = "allocates";
    const CALLS_THE_SYSTEM: &str = "calls the system";

    const ALLOCATED: c_int = 10;
    const REFUSED: c_int = 11;

    /// Once round all rings, and a batch of receives on each of 4 QPs.
    const WARM_UP: u32 = 600;
    const ROUNDS: u32 = 2000;
    /// Small and large: the large one is cut where it can be.
    const SMALL: c_int = 8;
    const LARGE: c_int = 1024;
    const BYTES: usize = 1024;

    const FABRIC: &str = r#"
        engine = "null"
        [[host]]
        name = "here"
        [[host.device]]
        name = "soft_0"
        [[host.device.port]]
        link_layer = "Ethernet"
        rate_gbps = 200
        gids = [{ index = 0, gid = "::ffff:10.0.0.1", type = "RoCE v2" }]
        [[host.device]]
        name = "soft_1"
        node_guid = 1
        [[host.device.port]]
        link_layer = "Ethernet"
        rate_gbps = 200
        gids = [{ index = 0, gid = "::ffff:10.0.1.1", type = "RoCE v2" }]
    "#;

    /// Ways to set a connection up, all of which must hold.
    const SETTINGS: [&[(&str, &str)]; 3] = [
        &[],
        &[("NCCL_NET_RDMA_FORCE_FLUSH", "1"), ("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")],
        &[("NCCL_NET_RDMA_FORCE_FLUSH", "1"), ("NCCL_NET_RDMA_RAILS", "soft_0+soft_1")],
    ];

    fn built(file: &str) -> PathBuf {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist").join(file);
        assert!(path.exists(), "{} is missing: run ci/build first", path.display());
        path
    }

    /// Starts this program again, for the test named `child` below.
    fn start(work: &str, setting: &[(&str, &str)], fabric: &Path) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        for (name, _) in std::env::vars_os() {
            if ["NCCL_", "SOFT_HCA_"].iter().any(|prefix| name.to_string_lossy().starts_with(prefix)) {
                command.env_remove(name);
            }
        }
        command
            .args(["--ignored", "--exact", "tests::child", "--nocapture", "--test-threads=1"])
            .env(WORK, work)
            .env("NCCL_IBVERBS_LIB", built("soft-hca/libibverbs.so.1"))
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("SOFT_HCA_FABRIC", fabric)
            .env("SOFT_HCA_HOST", "here")
            .env("NCCL_NET_RDMA_SPLIT_THRESHOLD", "512")
            // Room at the heap's end: an allocation is to be found as such, not as the system call by which the heap grows.
            .env("MALLOC_TOP_PAD_", "4000000")
            .envs(setting.iter().copied())
            .stdout(Stdio::null());
        let bounded = || {
            // No test waits for ever.
            // SAFETY: a plain system call.
            unsafe { libc::alarm(60) };
            Ok(())
        };
        // SAFETY: the closure makes one system call and touches no memory.
        unsafe { command.pre_exec(bounded) };
        command.spawn().unwrap()
    }

    fn fabric() -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), FABRIC).unwrap();
        file
    }

    fn ends(work: &str, setting: &[(&str, &str)]) -> ExitStatus {
        let fabric = fabric();
        start(work, setting, fabric.path()).wait().unwrap()
    }

    #[test]
    fn nothing_is_allocated_and_the_system_is_not_called() {
        for setting in SETTINGS {
            let status = ends(STEADY, setting);
            assert_ne!(status.code(), Some(ALLOCATED), "{setting:?}: the data path allocates");
            assert_ne!(status.signal(), Some(libc::SIGSYS), "{setting:?}: the data path calls the system");
            assert_eq!(status.code(), Some(0), "{setting:?}: {status}");
        }
    }

    #[test]
    fn an_allocation_inside_the_plugin_would_be_found() {
        assert_eq!(ends(ALLOCATES, SETTINGS[0]).code(), Some(ALLOCATED));
    }

    #[test]
    fn a_system_call_inside_the_plugin_would_be_found() {
        assert_eq!(ends(CALLS_THE_SYSTEM, SETTINGS[0]).signal(), Some(libc::SIGSYS));
    }

    /// The process that is watched. It never returns.
    #[test]
    #[ignore = "the tests above start it"]
    fn child() {
        let Ok(work) = std::env::var(WORK) else { return };
        let wire = Wire::connect();
        for _ in 0..WARM_UP {
            assert!(wire.round(), "warm-up");
        }
        let extra: &dyn Fn(&Wire) = match &*work {
            STEADY => &|_| {},
            ALLOCATES => &Wire::misuse,
            CALLS_THE_SYSTEM => &Wire::listen_again,
            other => panic!("no work {other:?}"),
        };
        counting::start();
        forbid_system_calls();
        let before = counting::calls();
        let mut fine = true;
        for _ in 0..ROUNDS {
            fine &= wire.round();
            extra(&wire);
        }
        let code = if !fine {
            REFUSED
        } else if counting::calls() != before {
            ALLOCATED
        } else {
            0
        };
        // SAFETY: ends the process, whatever its other threads do.
        unsafe { libc::syscall(libc::SYS_exit_group, code) };
    }

    /// From here on every system call of this thread but exit_group kills the process with SIGSYS.
    fn forbid_system_calls() {
        let op =
            |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: u16::try_from(code).unwrap(), jt, jf, k };
        let exit = u32::try_from(libc::SYS_exit_group).unwrap();
        let mut filter = [
            op(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the number of the call
            op(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, exit, 0, 1),
            op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
            op(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        ];
        let program = libc::sock_fprog { len: 4, filter: filter.as_mut_ptr() };
        // SAFETY: plain numbers.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) }, 0);
        // SAFETY: the kernel copies the program during the call.
        let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) };
        assert_eq!(rc, 0, "this machine forbids seccomp");
    }

    type NcclObject = *mut c_void;

    /// Both ends of a connection, as NCCL would hold them.
    struct Wire {
        net: &'static ncclNet_v8_t,
        send: NcclObject,
        recv: NcclObject,
        send_mr: NcclObject,
        recv_mr: NcclObject,
        from: NcclObject,
        to: NcclObject,
    }

    unsafe extern "C" fn log(_: c_int, _: c_ulong, _: *const c_char, _: c_int, _: *const c_char, _: *const c_char) {}

    fn good(result: ncclResult_t) -> bool {
        result == ncclResult_t::ncclSuccess
    }

    /// Calls an entry of the table with what NCCL would pass.
    macro_rules! nccl {
        ($net:expr, $entry:ident ( $($argument:expr),* )) => {
            // SAFETY: objects of this plugin that are open, memory that is registered and never unmapped, places of the
            // right size on this stack.
            good(unsafe { ($net.$entry.unwrap())($($argument),*) })
        };
    }

    fn load() -> &'static ncclNet_v8_t {
        let path = CString::new(built("lib/libnccl-net-rdma.so").into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: the project's own library.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?} cannot be loaded");
        // SAFETY: an open library and a C string.
        let table = unsafe { libc::dlsym(library, c"ncclNetPlugin_v8".as_ptr()) };
        // SAFETY: the plugin exports a constant of this type, and is never unloaded.
        unsafe { table.cast::<ncclNet_v8_t>().as_ref() }.expect("ncclNetPlugin_v8 is exported")
    }

    impl Wire {
        fn connect() -> Self {
            type Fixed = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
            type Variadic = unsafe extern "C" fn(ncclDebugLogLevel, c_ulong, *const c_char, c_int, *const c_char, ...);
            let net = load();
            // SAFETY: on x86-64 a variadic call with one pointer after the format is made like one of a fixed function.
            let logger = unsafe { std::mem::transmute::<Fixed, Variadic>(log) };
            assert!(nccl!(net, init(Some(logger))));
            let (mut handle, mut listener) = ([0_u8; 128], ptr::null_mut());
            assert!(nccl!(net, listen(0, handle.as_mut_ptr().cast(), &raw mut listener)));
            let (mut send, mut recv): (NcclObject, NcclObject) = (ptr::null_mut(), ptr::null_mut());
            let deadline = Instant::now() + Duration::from_secs(30);
            while send.is_null() || recv.is_null() {
                assert!(Instant::now() < deadline, "the connection did not come about");
                if send.is_null() {
                    assert!(nccl!(net, connect(0, handle.as_mut_ptr().cast(), &raw mut send, ptr::null_mut())));
                }
                if recv.is_null() {
                    assert!(nccl!(net, accept(listener, &raw mut recv, ptr::null_mut())));
                }
                std::thread::yield_now();
            }
            let memory = || Box::leak(vec![1_u8; BYTES].into_boxed_slice()).as_mut_ptr().cast::<c_void>();
            let (from, to) = (memory(), memory());
            let (mut send_mr, mut recv_mr) = (ptr::null_mut(), ptr::null_mut());
            assert!(nccl!(net, regMr(send, from, BYTES, 1, &raw mut send_mr)));
            assert!(nccl!(net, regMr(recv, to, BYTES, 1, &raw mut recv_mr)));
            Self { net, send, recv, send_mr, recv_mr, from, to }
        }

        fn test(&self, request: NcclObject, want: bool) -> bool {
            let (mut done, mut sizes) = (-1, [0; 8]);
            !request.is_null()
                && nccl!(self.net, test(request, &raw mut done, sizes.as_mut_ptr()))
                && done == c_int::from(want)
        }

        fn isend(&self, size: c_int, tag: c_int) -> Option<NcclObject> {
            let mut request = ptr::null_mut();
            nccl!(self.net, isend(self.send, self.from, size, tag, self.send_mr, &raw mut request)).then_some(request)
        }

        /// A group of 2 and a single large message, after an isend without a credit, with a flush each; every outcome is
        /// checked.
        fn round(&self) -> bool {
            self.isend(SMALL, 0).is_some_and(|refused| refused.is_null())
                && self.group(2, SMALL)
                && self.group(1, LARGE)
        }

        fn group(&self, n: c_int, size: c_int) -> bool {
            let (mut to, mut sizes, mut tags, mut mrs) = ([self.to; 2], [size; 2], [0, 1], [self.recv_mr; 2]);
            let (to, sizes, mrs) = (to.as_mut_ptr(), sizes.as_mut_ptr(), mrs.as_mut_ptr());
            let (mut receive, mut flush) = (ptr::null_mut(), ptr::null_mut());
            let posted = nccl!(self.net, irecv(self.recv, n, to, sizes, tags.as_mut_ptr(), mrs, &raw mut receive));
            if !posted || !self.test(receive, false) {
                return false;
            }
            let mut sends = [ptr::null_mut(); 2];
            for (tag, send) in (0..n).zip(&mut sends) {
                let Some(request) = self.isend(size, tag) else { return false };
                *send = request;
            }
            self.test(receive, true)
                && nccl!(self.net, iflush(self.recv, n, to, sizes, mrs, &raw mut flush))
                // NULL: this connection needs no flush.
                && (flush.is_null() || self.test(flush, true))
                && (0..n).zip(sends).all(|(_, send)| self.test(send, true))
        }

        /// An error, whose text the plugin allocates.
        fn misuse(&self) {
            let (mut to, mut size, mut tag, mut mr, mut request) = (self.to, 8, 0, self.recv_mr, ptr::null_mut());
            let (to, mr, request) = (&raw mut to, &raw mut mr, &raw mut request);
            assert!(!nccl!(self.net, irecv(self.recv, 9, to, &raw mut size, &raw mut tag, mr, request)));
        }

        /// Opens a socket.
        fn listen_again(&self) {
            let (mut handle, mut listener) = ([0_u8; 128], ptr::null_mut());
            nccl!(self.net, listen(0, handle.as_mut_ptr().cast(), &raw mut listener));
        }
    }
}
