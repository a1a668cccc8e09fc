//! The plugin as NCCL sees it: dist/lib through its C table, the lines that it gives to NCCL's logger, and both ends of a
//! connection driven from one thread.

use std::ffi::{CStr, CString, c_char, c_int, c_ulong, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use nccl_net_rdma::abi::types::{
    NCCL_NET_OPTIONAL_RECV_COMPLETION, ncclDebugLogLevel, ncclDebugLogger_t, ncclNet_v8_t, ncclNet_v9_t, ncclNet_v12_t,
    ncclNetCommConfig_v12_t, ncclNetProperties_v8_t, ncclResult_t,
};

use crate::rig::{PATIENCE, dist, until};

pub(crate) type Comm = *mut c_void;
pub(crate) type Handle = [u8; 128];

/// NCCL_PTR_*.
pub(crate) const HOST: c_int = 1;
pub(crate) const CUDA: c_int = 2;
pub(crate) const DMABUF: c_int = 4;

/// What the plugin said, in order.
static LINES: Mutex<Vec<(ncclDebugLogLevel, String)>> = Mutex::new(Vec::new());

/// NCCL's logger is variadic; with "%s" and one string, a call looks the same as one of this function on 64-bit Linux.
unsafe extern "C" fn log(
    level: ncclDebugLogLevel,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    _format: *const c_char,
    text: *const c_char,
) {
    // SAFETY: the plugin passes "%s" and a C string, and nothing else.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    println!("[{}] {text}", level.0);
    LINES.lock().unwrap().push((level, text));
}

/// What NCCL passes to init.
pub(crate) fn logger() -> ncclDebugLogger_t {
    type Fixed = unsafe extern "C" fn(ncclDebugLogLevel, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
    // SAFETY: see `log`.
    unsafe { std::mem::transmute::<Fixed, ncclDebugLogger_t>(log) }
}

/// The warnings so far.
pub(crate) fn warnings() -> Vec<String> {
    let lines = LINES.lock().unwrap();
    lines.iter().filter(|(level, _)| *level == ncclDebugLogLevel::NCCL_LOG_WARN).map(|(_, text)| text.clone()).collect()
}

/// The warnings, which come to `count` and no more: calls return an error that the background thread learnt of as soon as it
/// has recorded it, which may be before its line is out.
pub(crate) fn warnings_come_to(count: usize) -> Vec<String> {
    let start = Instant::now();
    while warnings().len() < count && start.elapsed() < Duration::from_secs(2) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(Duration::from_millis(20));
    let told = warnings();
    assert_eq!(told.len(), count, "{told:#?}");
    told
}

/// The warnings so far that hold this.
pub(crate) fn warnings_with(part: &str) -> Vec<String> {
    warnings().into_iter().filter(|w| w.contains(part)).collect()
}

pub(crate) fn infos() -> Vec<String> {
    let lines = LINES.lock().unwrap();
    lines.iter().filter(|(level, _)| *level == ncclDebugLogLevel::NCCL_LOG_INFO).map(|(_, text)| text.clone()).collect()
}

pub(crate) fn forget_lines() {
    LINES.lock().unwrap().clear();
}

pub(crate) fn dlopen(path: &Path) -> *mut c_void {
    let c_path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: a C string; the library is the one under test.
    let library = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!library.is_null(), "{} can't be loaded", path.display());
    library
}

pub(crate) fn ok(code: ncclResult_t) -> Result<(), ncclResult_t> {
    if code == ncclResult_t::ncclSuccess { Ok(()) } else { Err(code) }
}

/// What NCCL is told of a device.
#[derive(Debug)]
pub(crate) struct Properties {
    pub(crate) name: String,
    pub(crate) speed: c_int,
    pub(crate) pci_path: Option<String>,
    pub(crate) ptr_support: c_int,
}

/// The loaded plugin.
#[derive(Debug)]
pub(crate) struct Plugin {
    library: *mut c_void,
    table: ncclNet_v8_t,
}

// SAFETY: a handle and a table of constants; NCCL calls the functions from several threads.
unsafe impl Sync for Plugin {}

/// A table that the library exports; `T` is its type.
fn table<T: Copy>(library: *mut c_void, symbol: &CStr) -> T {
    // SAFETY: a live library and a C string.
    let found = unsafe { libc::dlsym(library, symbol.as_ptr()) };
    assert!(!found.is_null(), "no {symbol:?}");
    // SAFETY: the caller names symbol and type as NCCL does.
    unsafe { ptr::read(found.cast::<T>()) }
}

/// How one end of a set-up came out.
pub(crate) type End = Result<Comm, ncclResult_t>;

/// How a set-up came out. `None`: this end had no result when the other one's had been there for long.
#[derive(Debug)]
pub(crate) struct SetUp {
    pub(crate) connect: Option<End>,
    pub(crate) accept: Option<End>,
    /// The longest that one call took.
    pub(crate) slowest_call: Duration,
}

impl SetUp {
    /// Both comms, sending end first.
    pub(crate) fn comms(&self) -> (Comm, Comm) {
        match (&self.connect, &self.accept) {
            (Some(Ok(send)), Some(Ok(recv))) => (*send, *recv),
            _ => panic!("the set-up failed: {self:?}"),
        }
    }
}

impl Plugin {
    pub(crate) fn load() -> Self {
        let library = dlopen(&dist("lib/libnccl-net-rdma.so"));
        Self { library, table: table(library, c"ncclNetPlugin_v8") }
    }

    /// The table of another version; comms of all versions are the same.
    pub(crate) fn table<T: Copy>(&self, symbol: &CStr) -> T {
        table(self.library, symbol)
    }

    /// Loads and starts it; the test can't do without.
    pub(crate) fn started() -> Self {
        let plugin = Self::load();
        plugin.init().unwrap();
        plugin
    }

    /// As NCCL does it at the end; the library itself may stay.
    pub(crate) fn unload(self) {
        // SAFETY: the library was opened by us and the table is used no more.
        assert_eq!(unsafe { libc::dlclose(self.library) }, 0);
    }

    /// As an NCCL that takes version 9, below which there is no staging; all else is the same in version 8.
    pub(crate) fn init(&self) -> Result<(), ncclResult_t> {
        let newer: ncclNet_v9_t = self.table(c"ncclNetPlugin_v9");
        // SAFETY: a logger that lives for ever.
        ok(unsafe { newer.init.unwrap()(logger()) })
    }

    pub(crate) fn devices(&self) -> c_int {
        let mut count = -1;
        // SAFETY: one int to write.
        ok(unsafe { self.table.devices.unwrap()(&raw mut count) }).unwrap();
        count
    }

    pub(crate) fn properties(&self, dev: c_int) -> Properties {
        let mut raw = MaybeUninit::<ncclNetProperties_v8_t>::zeroed();
        // SAFETY: one struct to write.
        ok(unsafe { self.table.getProperties.unwrap()(dev, raw.as_mut_ptr()) }).unwrap();
        // SAFETY: zero is valid, and the call filled it.
        let raw = unsafe { raw.assume_init() };
        // SAFETY: the name is a C string that outlives the call.
        let name = unsafe { CStr::from_ptr(raw.name) }.to_string_lossy().into_owned();
        // SAFETY: NULL, or a C string that outlives the call.
        let path = (!raw.pciPath.is_null()).then(|| unsafe { CStr::from_ptr(raw.pciPath) });
        let pci_path = path.map(|p| p.to_string_lossy().into_owned());
        Properties { name, speed: raw.speed, pci_path, ptr_support: raw.ptrSupport }
    }

    /// Names of all devices, in order.
    pub(crate) fn names(&self) -> Vec<String> {
        (0..self.devices()).map(|d| self.properties(d).name).collect()
    }

    /// The device of that name.
    pub(crate) fn find(&self, name: &str) -> c_int {
        (0..self.devices()).find(|&d| self.properties(d).name == name).unwrap()
    }

    pub(crate) fn listen(&self, dev: c_int) -> Result<(Comm, Handle), ncclResult_t> {
        let mut handle = [0u8; 128];
        let mut comm = ptr::null_mut();
        // SAFETY: 128 bytes and one pointer to write.
        ok(unsafe { self.table.listen.unwrap()(dev, handle.as_mut_ptr().cast(), &raw mut comm) })?;
        assert!(!comm.is_null());
        Ok((comm, handle))
    }

    /// One call.
    pub(crate) fn connect(&self, dev: c_int, handle: &mut Handle) -> Result<Option<Comm>, ncclResult_t> {
        let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
        let connect = self.table.connect.unwrap();
        // SAFETY: the handle and two pointers to write.
        let code = unsafe { connect(dev, handle.as_mut_ptr().cast(), &raw mut comm, &raw mut device) };
        assert!(code == ncclResult_t::ncclSuccess || comm.is_null(), "an error and a comm");
        ok(code).map(|()| (!comm.is_null()).then_some(comm))
    }

    /// One call.
    pub(crate) fn accept(&self, listener: Comm) -> Result<Option<Comm>, ncclResult_t> {
        let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: an open listener and two pointers to write.
        let code = unsafe { self.table.accept.unwrap()(listener, &raw mut comm, &raw mut device) };
        assert!(code == ncclResult_t::ncclSuccess || comm.is_null(), "an error and a comm");
        ok(code).map(|()| (!comm.is_null()).then_some(comm))
    }

    /// Calls connect and accept in turn until both have a result, or one has and the other is left waiting for `patience`.
    pub(crate) fn set_up(&self, from: c_int, to: c_int, patience: Duration) -> SetUp {
        self.set_up_by(self.listen(to).unwrap(), patience, |handle| self.connect(from, handle))
    }

    /// The same with another version's listener and connect.
    pub(crate) fn set_up_by(
        &self,
        (listener, mut handle): (Comm, Handle),
        patience: Duration,
        mut connect: impl FnMut(&mut Handle) -> Result<Option<Comm>, ncclResult_t>,
    ) -> SetUp {
        let mut up = SetUp { connect: None, accept: None, slowest_call: Duration::ZERO };
        let start = Instant::now();
        let mut one_done = None;
        loop {
            let before = Instant::now();
            if up.connect.is_none() {
                up.connect = connect(&mut handle).transpose();
                up.slowest_call = up.slowest_call.max(before.elapsed());
            }
            let before = Instant::now();
            if up.accept.is_none() {
                up.accept = self.accept(listener).transpose();
                up.slowest_call = up.slowest_call.max(before.elapsed());
            }
            if up.connect.is_some() && up.accept.is_some() {
                break;
            }
            if up.connect.is_some() || up.accept.is_some() {
                let since = *one_done.get_or_insert_with(Instant::now);
                if since.elapsed() > patience {
                    break;
                }
            }
            assert!(start.elapsed() < PATIENCE, "neither end came to a result");
            std::thread::sleep(Duration::from_micros(200));
        }
        self.close_listen(listener);
        up
    }

    /// A connection that works.
    pub(crate) fn pair(&self, from: c_int, to: c_int) -> (Comm, Comm) {
        self.set_up(from, to, PATIENCE).comms()
    }

    /// As host memory.
    pub(crate) fn reg_mr(&self, comm: Comm, data: &[u8]) -> Result<Comm, ncclResult_t> {
        self.reg_mr_as(comm, data, HOST)
    }

    pub(crate) fn reg_mr_as(&self, comm: Comm, data: &[u8], kind: c_int) -> Result<Comm, ncclResult_t> {
        self.reg_mr_at(comm, data.as_ptr().cast_mut().cast(), data.len(), kind)
    }

    /// Of memory that may be a GPU's.
    pub(crate) fn reg_mr_at(&self, comm: Comm, at: *mut c_void, len: usize, kind: c_int) -> Result<Comm, ncclResult_t> {
        let mut handle = ptr::null_mut();
        // SAFETY: an open comm, memory that the caller keeps until deregistration, one pointer to write.
        ok(unsafe { self.table.regMr.unwrap()(comm, at, len, kind, &raw mut handle) })?;
        assert!(!handle.is_null());
        Ok(handle)
    }

    /// `data` is at `offset` of what the descriptor stands for.
    pub(crate) fn reg_dma_buf(
        &self,
        comm: Comm,
        data: &[u8],
        offset: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<Comm, ncclResult_t> {
        self.reg_dma_buf_at(comm, data.as_ptr().cast_mut().cast(), data.len(), offset, fd)
    }

    pub(crate) fn reg_dma_buf_at(
        &self,
        comm: Comm,
        at: *mut c_void,
        len: usize,
        offset: u64,
        fd: BorrowedFd<'_>,
    ) -> Result<Comm, ncclResult_t> {
        let mut handle = ptr::null_mut();
        let register = self.table.regMrDmaBuf.unwrap();
        // SAFETY: an open comm and descriptor, one pointer to write.
        ok(unsafe { register(comm, at, len, CUDA, offset, fd.as_raw_fd(), &raw mut handle) })?;
        assert!(!handle.is_null());
        Ok(handle)
    }

    /// One call, after a receive of `size` bytes; None: nothing to wait for.
    pub(crate) fn iflush(
        &self,
        comm: Comm,
        data: &[u8],
        size: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        // What it holds before the call must not matter.
        let mut request = ptr::dangling_mut();
        let (mut at, mut memory, mut size) = (data.as_ptr().cast_mut().cast(), memory, size);
        let iflush = self.table.iflush.unwrap();
        // SAFETY: registered memory that the caller keeps until the request is done; arrays of one.
        ok(unsafe { iflush(comm, 1, &raw mut at, &raw mut size, &raw mut memory, &raw mut request) })?;
        Ok((!request.is_null()).then_some(request))
    }

    pub(crate) fn dereg_mr(&self, comm: Comm, handle: Comm) {
        // SAFETY: a registration of this comm.
        ok(unsafe { self.table.deregMr.unwrap()(comm, handle) }).unwrap();
    }

    /// One call; None: again.
    pub(crate) fn isend(
        &self,
        comm: Comm,
        data: &[u8],
        tag: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        self.isend_at(comm, (data.as_ptr().cast_mut().cast(), data.len()), tag, memory)
    }

    pub(crate) fn isend_at(
        &self,
        comm: Comm,
        (at, len): (*mut c_void, usize),
        tag: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        let mut request = ptr::null_mut();
        let size = c_int::try_from(len).unwrap();
        // SAFETY: registered memory that the caller keeps until the request is done.
        ok(unsafe { self.table.isend.unwrap()(comm, at, size, tag, memory, &raw mut request) })?;
        Ok((!request.is_null()).then_some(request))
    }

    /// One call; None: again.
    pub(crate) fn irecv(
        &self,
        comm: Comm,
        data: &mut [u8],
        tag: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        self.irecv_at(comm, (data.as_mut_ptr().cast(), data.len()), tag, memory)
    }

    pub(crate) fn irecv_at(
        &self,
        comm: Comm,
        (at, len): (*mut c_void, usize),
        tag: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        let mut request = ptr::null_mut();
        let (mut at, mut memory, mut tag) = (at, memory, tag);
        let mut size = c_int::try_from(len).unwrap();
        let irecv = self.table.irecv.unwrap();
        // SAFETY: as in isend; arrays of one.
        ok(unsafe { irecv(comm, 1, &raw mut at, &raw mut size, &raw mut tag, &raw mut memory, &raw mut request) })?;
        Ok((!request.is_null()).then_some(request))
    }

    /// One for which NCCL needs no completion; from version 9 on.
    pub(crate) fn irecv_hinted(
        &self,
        comm: Comm,
        data: &mut [u8],
        tag: c_int,
        memory: Comm,
    ) -> Result<Option<Comm>, ncclResult_t> {
        let table: ncclNet_v12_t = self.table(c"ncclNetPlugin_v12");
        let mut request = ptr::without_provenance_mut(NCCL_NET_OPTIONAL_RECV_COMPLETION as usize);
        let (mut at, mut memory, mut tag, mut size) = (data.as_mut_ptr().cast(), memory, tag, data.len());
        let (irecv, none) = (table.irecv.unwrap(), &mut ptr::null_mut());
        // SAFETY: as in irecv.
        ok(unsafe {
            irecv(comm, 1, &raw mut at, &raw mut size, &raw mut tag, &raw mut memory, none, &raw mut request)
        })?;
        Ok((!request.is_null()).then_some(request))
    }

    /// One call: the size once done.
    pub(crate) fn test(&self, request: Comm) -> Result<Option<c_int>, ncclResult_t> {
        let (mut done, mut sizes) = (0, [0; 8]);
        // SAFETY: an open request and room for 8 sizes.
        ok(unsafe { self.table.test.unwrap()(request, &raw mut done, sizes.as_mut_ptr()) })?;
        Ok((done != 0).then_some(sizes[0]))
    }

    /// Tests until it is done or fails.
    pub(crate) fn finish(&self, request: Comm) -> Result<c_int, ncclResult_t> {
        until("a request", || self.test(request).transpose())
    }

    pub(crate) fn close_send(&self, comm: Comm) {
        // SAFETY: an open send comm, not used afterwards.
        ok(unsafe { self.table.closeSend.unwrap()(comm) }).unwrap();
    }

    pub(crate) fn close_recv(&self, comm: Comm) {
        // SAFETY: an open recv comm, not used afterwards.
        ok(unsafe { self.table.closeRecv.unwrap()(comm) }).unwrap();
    }

    pub(crate) fn close_listen(&self, comm: Comm) {
        // SAFETY: an open listener, not used afterwards.
        ok(unsafe { self.table.closeListen.unwrap()(comm) }).unwrap();
    }

    /// Sends `data` over the connection and checks that exactly it arrives; the ends of both sides.
    pub(crate) fn carry(&self, (send, recv): (Comm, Comm), data: &[u8]) {
        let mut room = vec![0x5a; data.len() + 64];
        let (from, to) = (self.reg_mr(send, data).unwrap(), self.reg_mr(recv, &room).unwrap());
        let receive = until("irecv", || self.irecv(recv, &mut room[..data.len()], 3, to).unwrap());
        let sent = until("isend", || self.isend(send, data, 3, from).unwrap());
        let (mut at_receiver, mut at_sender) = (None, None);
        until("both ends", || {
            at_receiver = at_receiver.take().or_else(|| self.test(receive).unwrap());
            at_sender = at_sender.take().or_else(|| self.test(sent).unwrap());
            (at_receiver.is_some() && at_sender.is_some()).then_some(())
        });
        assert_eq!(at_receiver, Some(c_int::try_from(data.len()).unwrap()));
        assert!(room[..data.len()] == *data, "the bytes differ");
        assert!(room[data.len()..].iter().all(|&b| b == 0x5a), "written past the end");
        self.dereg_mr(send, from);
        self.dereg_mr(recv, to);
    }

    pub(crate) fn close(&self, (send, recv): (Comm, Comm)) {
        self.close_send(send);
        self.close_recv(recv);
    }
}

/// A communicator of version 12: it has a context, in which it listens and connects. What its comms do is the same in all
/// versions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Communicator<'a> {
    plugin: &'a Plugin,
    table: ncclNet_v12_t,
    context: Comm,
}

impl<'a> Communicator<'a> {
    pub(crate) fn open(plugin: &'a Plugin, id: u64, class: c_int) -> Self {
        let table: ncclNet_v12_t = plugin.table(c"ncclNetPlugin_v12");
        let mut config = ncclNetCommConfig_v12_t { trafficClass: class };
        let mut context = ptr::null_mut();
        // SAFETY: a pointer to write, a configuration, a logger that lives for ever, no profiler.
        ok(unsafe { table.init.unwrap()(&raw mut context, id, &raw mut config, logger(), None) }).unwrap();
        assert!(!context.is_null());
        // NCCL's own is on its stack.
        config.trafficClass = c_int::MIN;
        std::hint::black_box(config);
        Self { plugin, table, context }
    }

    pub(crate) fn set_up(&self, from: c_int, to: c_int) -> SetUp {
        let (mut handle, mut listener) = ([0u8; 128], ptr::null_mut());
        let at = handle.as_mut_ptr().cast();
        // SAFETY: an open context, 128 bytes and one pointer to write.
        ok(unsafe { self.table.listen.unwrap()(self.context, to, at, &raw mut listener) }).unwrap();
        self.plugin.set_up_by((listener, handle), PATIENCE, |handle| {
            let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
            let (connect, handle) = (self.table.connect.unwrap(), handle.as_mut_ptr().cast());
            // SAFETY: an open context, the handle and two pointers to write.
            ok(unsafe { connect(self.context, from, handle, &raw mut comm, &raw mut device) })?;
            Ok((!comm.is_null()).then_some(comm))
        })
    }

    pub(crate) fn context(&self) -> Comm {
        self.context
    }

    pub(crate) fn finalize(self) {
        // SAFETY: an open context, not used afterwards.
        ok(unsafe { self.table.finalize.unwrap()(self.context) }).unwrap();
    }
}

/// Bytes that differ by position.
pub(crate) fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2_654_435_761) >> 13).to_le_bytes()[0]).collect()
}
