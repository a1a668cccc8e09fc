//! The C border: NCCL's network plugin tables as the `nccl-rdma` command sees them, a loader that finds the plugin the
//! way NCCL does, and one method per entry of the table that calls it exactly as NCCL may: stale request slots, an
//! uninitialised `done`, argument arrays that die with the call, one `int` for the size of a send.
//! Layouts and rules follow `net.h` and `net_v6.h` to `net_v12.h` of NCCL's public sources.

pub(crate) mod profile;
mod table;

use std::error::Error as _;
use std::ffi::{CStr, OsStr, c_char, c_int, c_ulong, c_void};
use std::fmt;
use std::ops::Range;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, anyhow, bail};

pub(crate) use table::Version;
use table::{CommConfig, Logger, LongTable, LongestTable, NetAttr, Out, Parts, Table};

/// Bytes of the handle that `listen` fills and `connect` reads.
pub(crate) const HANDLE_BYTES: usize = 128;
/// Receives that NCCL keeps in flight on one comm.
pub(crate) const MAX_REQUESTS: usize = 32;
/// Buffers in one grouped receive that this command ever asks for.
pub(crate) const MAX_GROUP: usize = 8;
/// Entries of the size array that NCCL hands to `test` for a receive.
const RECV_SIZES: usize = 64;
pub(crate) const PTR_HOST: c_int = 1;
pub(crate) const PTR_CUDA: c_int = 2;
pub(crate) const PTR_DMABUF: c_int = 4;

pub(crate) const LOG_WARN: c_int = 2;
pub(crate) const LOG_INFO: c_int = 3;

const CANARY: c_int = 0x5ca1_ab1e;
const POISON_INT: c_int = 0xaaaa_aaaa_u32.cast_signed();
/// What a request slot holds before each call: a pointer that a plugin which forgets to write it would hand back.
const STALE: usize = 0xdead_0000_0000_beef;
/// `NCCL_NET_OPTIONAL_RECV_COMPLETION`: in the request slot of an irecv that needs no completion.
const OPTIONAL_COMPLETION: usize = 1;

/// What every byte of properties holds before the plugin writes them.
const POISON: u8 = 0xaa;
/// What NCCL says of a transfer that it reports to a profiler; plugins only hand it on.
const PROFILED: usize = 0xabcd_0000_0000_0000;
/// Most that a message has for versions whose properties don't say.
const MAX_NET_SIZE: usize = 1 << 30;
/// Most that the properties may say.
const MAX_NET_SIZE_BYTES: usize = 1 << 40;
/// What NCCL says where it knows nothing.
const UNDEFINED: c_int = -1;
/// What all ranks of a communicator call it.
const COMM_ID: u64 = 0xc0_11ec_71fe;

/// What went wrong in one call.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The plugin returned this `ncclResult_t`.
    Code { call: &'static str, code: c_int },
    /// The plugin returned success, but broke the contract.
    Broken { call: &'static str, what: String },
}

impl Fault {
    fn broken(call: &'static str, what: impl Into<String>) -> Self {
        Self::Broken { call, what: what.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Code { call, code } => write!(f, "{call} returned {code} ({})", result_name(*code)),
            Self::Broken { call, what } => write!(f, "{call} broke the contract: {what}"),
        }
    }
}

impl std::error::Error for Fault {}

/// The name of an `ncclResult_t`.
pub(crate) fn result_name(code: c_int) -> &'static str {
    match code {
        0 => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        7 => "ncclInProgress",
        8 => "ncclTimeout",
        _ => "not an ncclResult_t",
    }
}

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident),+) => { $(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub(crate) struct $name(*mut c_void);
        // SAFETY: NCCL creates these objects on one thread and uses them on another; the pointer is never read here.
        unsafe impl Send for $name {}
        // SAFETY: as above; only the plugin looks behind the pointer, and NCCL itself uses a comm from two threads.
        unsafe impl Sync for $name {}
    )+ };
}
opaque!(
    /// What `listen` made.
    ListenComm,
    /// What `connect` made.
    SendComm,
    /// What `accept` made.
    RecvComm,
    /// What `init` made of a communicator.
    AnyContext,
    /// A comm of either direction, for registration.
    AnyComm,
    /// What `regMr` made.
    Memory,
    /// What `isend`, `irecv` or `iflush` made; dead once `test` says done.
    Request
);

impl From<SendComm> for AnyComm {
    fn from(comm: SendComm) -> Self {
        Self(comm.0)
    }
}

impl From<RecvComm> for AnyComm {
    fn from(comm: RecvComm) -> Self {
        Self(comm.0)
    }
}

/// The 128 bytes that a listener gives to its peer, alone in memory between canaries and always at one address.
#[derive(Debug)]
pub(crate) struct Handle(Box<GuardedHandle>);

#[repr(C, align(16))]
#[derive(Debug)]
struct GuardedHandle {
    before: [u8; 64],
    bytes: [u8; HANDLE_BYTES],
    after: [u8; 64],
}

impl Handle {
    pub(crate) fn new() -> Self {
        Self(Box::new(GuardedHandle { before: [0xc3; 64], bytes: [0; HANDLE_BYTES], after: [0x3c; 64] }))
    }

    pub(crate) fn from_wire(bytes: &[u8]) -> anyhow::Result<Self> {
        let mut handle = Self::new();
        handle.0.bytes = bytes.try_into().with_context(|| format!("a handle of {} bytes", bytes.len()))?;
        Ok(handle)
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }

    fn guards_ok(&self, call: &'static str) -> Result<(), Fault> {
        if self.0.before != [0xc3; 64] || self.0.after != [0x3c; 64] {
            return Err(Fault::broken(call, "wrote outside the 128 bytes of the handle"));
        }
        Ok(())
    }
}

/// Memory that messages come from and go to: the host's or a GPU's.
pub(crate) trait Region: fmt::Debug + Sync {
    fn base(&self) -> *mut u8;
    fn len(&self) -> usize;

    fn at(&self, range: &Range<usize>) -> *mut c_void {
        let len = self.len();
        assert!(range.start <= range.end && range.end <= len, "{range:?} is outside a region of {len}");
        self.base().wrapping_add(range.start).cast()
    }
}

/// Page-aligned memory that stays mapped for the life of the process, so that a plugin which still writes to it after a
/// close cannot corrupt the command itself.
#[derive(Debug)]
pub(crate) struct Buffer {
    /// Where this command reads and writes it.
    base: *mut u8,
    len: usize,
    /// Its address on the GPU, if it is there.
    gpu: Option<u64>,
}

/// Where a buffer is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) enum Place {
    #[default]
    Host,
    /// GPU memory of the stand-in for the CUDA driver, the only one that lets a CPU look into it.
    Gpu,
}

// SAFETY: the memory is owned by this value and lives for ever; access through &self reads, through &mut self writes.
unsafe impl Send for Buffer {}
// SAFETY: as above.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(crate) fn new(len: usize) -> anyhow::Result<Self> {
        let len = len.max(1).next_multiple_of(4096);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a fresh anonymous mapping; no existing memory is touched.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            bail!("no memory for a buffer of {len} bytes: {}", std::io::Error::last_os_error());
        }
        Ok(Self { base: base.cast(), len, gpu: None })
    }

    pub(crate) fn at_place(place: Place, len: usize) -> anyhow::Result<Self> {
        match place {
            Place::Host => Self::new(len),
            Place::Gpu => Self::on_gpu(len),
        }
    }

    fn on_gpu(len: usize) -> anyhow::Result<Self> {
        let len = len.max(1).next_multiple_of(4096);
        // SAFETY: a library without initializers of its own; it stays.
        let driver = unsafe { libloading::Library::new("libcuda.so.1") }.context("libcuda.so.1")?;
        let driver: &'static libloading::Library = Box::leak(Box::new(driver));
        let missing = "the CUDA driver is not the stand-in of the tests, whose GPU memory can be looked into";
        // SAFETY: the stand-in's signature.
        let alloc = unsafe { driver.get::<unsafe extern "C" fn(usize, c_int) -> u64>(b"stand_in_alloc\0") };
        // SAFETY: as above.
        let view = unsafe { driver.get::<unsafe extern "C" fn(u64) -> *mut u8>(b"stand_in_view\0") };
        let (alloc, view) = (alloc.context(missing)?, view.context(missing)?);
        // SAFETY: asks for nothing but memory.
        let gpu = unsafe { alloc(len, 1) };
        // SAFETY: of the address that it gave.
        let base = unsafe { view(gpu) };
        if gpu == 0 || base.is_null() {
            bail!("no GPU memory for a buffer of {len} bytes");
        }
        Ok(Self { base, len, gpu: Some(gpu) })
    }

    /// NCCL's kind of it.
    fn kind(&self) -> c_int {
        if self.gpu.is_some() { PTR_CUDA } else { PTR_HOST }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: base..base+len is mapped, initialised (zero pages) and never unmapped.
        unsafe { std::slice::from_raw_parts(self.base, self.len) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for bytes(); &mut self makes this the only view.
        unsafe { std::slice::from_raw_parts_mut(self.base, self.len) }
    }

    /// One aligned 8-byte word, read as it is now, also while a device writes to it.
    pub(crate) fn word(&self, at: usize) -> u64 {
        assert!(at.is_multiple_of(8) && at + 8 <= self.len);
        let address = self.base.wrapping_add(at).cast::<u64>();
        // SAFETY: aligned and inside the mapping; devices and other threads write it atomically or not at all.
        unsafe { AtomicU64::from_ptr(address) }.load(Ordering::Acquire)
    }
}

impl Region for Buffer {
    fn base(&self) -> *mut u8 {
        self.gpu.map_or(self.base, |gpu| ptr::with_exposed_provenance_mut(usize::try_from(gpu).unwrap_or(0)))
    }

    fn len(&self) -> usize {
        self.len
    }
}

/// One buffer of a receive.
#[derive(Clone, Debug)]
pub(crate) struct Slot<'a> {
    pub buffer: &'a dyn Region,
    pub range: Range<usize>,
    pub tag: c_int,
    pub memory: Memory,
}

/// As text: JSON's numbers have 53 bits to many readers.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
pub(crate) fn hex<S: serde::Serializer>(number: &u64, s: S) -> Result<S::Ok, S::Error> {
    s.collect_str(&format_args!("{number:#018x}"))
}

/// What NCCL would be told about a device.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub(crate) struct Properties {
    pub name: String,
    pub pci_path: Option<String>,
    #[serde(serialize_with = "hex")]
    pub guid: u64,
    pub ptr_support: c_int,
    pub reg_is_global: bool,
    pub force_flush: bool,
    pub speed_mbps: c_int,
    pub port: c_int,
    pub latency_us: f32,
    pub max_comms: c_int,
    pub max_recvs: c_int,
    pub net_device_type: c_int,
    pub net_device_version: c_int,
    pub max_p2p_bytes: usize,
    /// What it is fused of; itself where it is one device.
    pub parts: Vec<c_int>,
    pub rail: c_int,
    pub plane: c_int,
}

/// One line that the plugin gave to NCCL's logger.
#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)]
pub(crate) struct LogLine {
    pub level: c_int,
    pub text: String,
}

impl fmt::Display for LogLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let level = match self.level {
            LOG_WARN => "WARN",
            LOG_INFO => "INFO",
            5 => "TRACE",
            _ => "NOTE",
        };
        write!(f, "{level} {}", self.text)
    }
}

static LOG: Mutex<Vec<LogLine>> = Mutex::new(Vec::new());

/// The lines logged so far, taken out.
pub(crate) fn take_log() -> Vec<LogLine> {
    std::mem::take(&mut *LOG.lock().unwrap_or_else(std::sync::PoisonError::into_inner))
}

/// NCCL's logger is variadic. Stable Rust cannot define such a function, but on the 64-bit Linux ABIs the first
/// variadic pointer arrives where a sixth ordinary one would; formats other than `%s` are shown as they are.
unsafe extern "C" fn log(
    level: c_int,
    _flags: c_ulong,
    _file: *const c_char,
    _line: c_int,
    format: *const c_char,
    first: *const c_char,
) {
    if format.is_null() {
        return;
    }
    // SAFETY: the caller passes a C string as the format.
    let format = unsafe { CStr::from_ptr(format) };
    let text = if format == c"%s" && !first.is_null() {
        // SAFETY: `%s` promises that the first variadic argument is a C string.
        unsafe { CStr::from_ptr(first) }
    } else {
        format
    };
    let line = LogLine { level, text: text.to_string_lossy().trim_end().to_owned() };
    if let Ok(mut lines) = LOG.lock() {
        lines.push(line);
    }
}

/// The plugin, loaded. One per process, as in NCCL.
pub(crate) struct Plugin {
    table: Table,
    version: Version,
    irecv_consumed: bool,
    make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut Parts) -> c_int>,
    finalize: Option<unsafe extern "C" fn(*mut c_void) -> c_int>,
    set_net_attr: Option<unsafe extern "C" fn(*mut c_void, *mut NetAttr) -> c_int>,
    /// One for every init of version 11 and later: each is a communicator's.
    contexts: Mutex<Vec<AnyContext>>,
    path: PathBuf,
    name: String,
    _library: libloading::Library,
}

impl fmt::Debug for Plugin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plugin")
            .field("name", &self.name)
            .field("version", &self.version)
            .field("path", &self.path)
            .finish_non_exhaustive()
    }
}

// SAFETY: the table is plain data that never changes; NCCL calls its functions from several threads.
unsafe impl Send for Plugin {}
// SAFETY: as above.
unsafe impl Sync for Plugin {}

/// The plugin to load when none is named: the one installed beside this executable, else by the linker's search.
pub(crate) fn default_plugin() -> PathBuf {
    let name = "libnccl-net-rdma.so";
    let beside = std::env::current_exe().ok().and_then(|exe| Some(exe.parent()?.parent()?.join("lib").join(name)));
    beside.filter(|path| path.exists()).unwrap_or_else(|| PathBuf::from(name))
}

/// Its error is what the dynamic linker says.
fn open(path: &OsStr) -> Result<libloading::Library, String> {
    use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
    // SAFETY: running the constructors of a plugin that the user named is what this command is for.
    let opened = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) };
    opened.map(Into::into).map_err(|error| error.source().map_or_else(|| error.to_string(), ToString::to_string))
}

macro_rules! entry {
    ($self:ident . $field:ident) => {
        entry!($self.table.$field, $field)
    };
    // One whose arguments depend on the version.
    ($self:ident . $field:ident . get()) => {
        entry!($self.table.$field.get(), $field)
    };
    ($entry:expr, $field:ident) => {
        $entry.ok_or_else(|| Fault::broken(stringify!($field), "the entry of the table is NULL"))?
    };
}

/// The fields of a plugin's properties, in order, none of them left unwritten.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self, name: &str) -> Result<[u8; N], Fault> {
        let (field, rest) = self.0.split_first_chunk::<N>().expect("fields inside the structure");
        self.0 = rest;
        if *field == [POISON; N] {
            return Err(Fault::broken("getProperties", format!("left {name} unwritten")));
        }
        Ok(*field)
    }

    fn word(&mut self, name: &str) -> Result<usize, Fault> {
        self.bytes(name).map(usize::from_ne_bytes)
    }

    fn int(&mut self, name: &str) -> Result<c_int, Fault> {
        self.bytes(name).map(c_int::from_ne_bytes)
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, Fault> {
        let text = ptr::with_exposed_provenance::<c_char>(self.word(name)?);
        Ok((!text.is_null()).then(|| {
            // SAFETY: not NULL, by contract a C string that outlives the call.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        }))
    }
}

fn checked(call: &'static str, code: c_int) -> Result<(), Fault> {
    match code {
        0 => Ok(()),
        7 => Err(Fault::broken(call, "returned ncclInProgress; 'again' is success with a NULL object")),
        code => Err(Fault::Code { call, code }),
    }
}

impl Plugin {
    /// dlopen as NCCL does it: the text as given, then `libnccl-net-TEXT.so` where the text is a bare word. Without a
    /// version the highest that the plugin exports, as NCCL takes it.
    pub(crate) fn load(path: &Path, version: Option<Version>) -> anyhow::Result<Self> {
        let text = path.as_os_str();
        let word = text.to_string_lossy();
        let file = word.contains('/') || word.starts_with("lib") && word.ends_with(".so");
        let library = match open(text) {
            Err(first) if !file => {
                let long = format!("libnccl-net-{word}.so");
                open(OsStr::new(&long)).map_err(|second| format!("{first}; {second}"))
            }
            opened => opened,
        }
        .map_err(|why| anyhow!("no plugin (ci/build makes it, --plugin PATH names it): {why}"))?;
        let wanted = version.as_ref().map_or(&Version::ALL[..], std::slice::from_ref);
        let found = wanted.iter().find_map(|&version| {
            // SAFETY: the symbol is a data object; it is read below, with the type that NCCL's headers give it.
            let symbol = unsafe { library.get::<*const c_void>(version.symbol().to_bytes_with_nul()) };
            Some((version, *symbol.ok()?))
        });
        let Some((version, symbol)) = found else {
            let names: Vec<_> = wanted.iter().map(|v| v.symbol().to_string_lossy()).collect();
            bail!("{} exports no {}", path.display(), names.join(", "));
        };
        // SAFETY: as above; the object is constant and lives as long as the library, which is kept.
        let table = unsafe { symbol.cast::<Table>().read() };
        let irecv_consumed = version >= Version::V7 && {
            // SAFETY: as above; from version 7 on the table has these entries.
            let table = unsafe { symbol.cast::<LongTable>().read() };
            table.irecv_consumed.is_some()
        };
        let make_v_device = (version >= Version::V9).then(|| {
            let entry = symbol.wrapping_byte_add(std::mem::offset_of!(LongestTable, make_v_device));
            // SAFETY: as above; from version 9 on the table has this entry.
            unsafe { entry.cast::<Option<_>>().read() }
        });
        let last = (version >= Version::V11).then(|| {
            // SAFETY: as above; from version 11 on the table is this.
            unsafe { symbol.cast::<LongestTable>().read() }
        });
        if table.name.is_null() {
            bail!("{}: the name in the table is NULL; NCCL reads it before init", path.display());
        }
        // SAFETY: not NULL, and by contract a C string that lives as long as the library.
        let name = unsafe { CStr::from_ptr(table.name) }.to_string_lossy().into_owned();
        Ok(Self {
            table,
            version,
            irecv_consumed,
            make_v_device: make_v_device.flatten(),
            finalize: last.and_then(|t| t.finalize),
            set_net_attr: last.and_then(|t| t.set_net_attr),
            contexts: Mutex::default(),
            path: path.to_owned(),
            name,
            _library: library,
        })
    }

    /// The name that `NCCL_NET` selects.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Entries that must be there and are not; entries that must be NULL and are not.
    pub(crate) fn table_faults(&self) -> Vec<&'static str> {
        let t = &self.table;
        let needed = [
            (t.init.get().is_some(), "init is NULL"),
            (t.devices.is_some(), "devices is NULL"),
            (t.get_properties.is_some(), "getProperties is NULL"),
            (t.listen.get().is_some(), "listen is NULL"),
            (t.connect.get().is_some(), "connect is NULL"),
            (t.accept.get().is_some(), "accept is NULL"),
            (t.reg_mr.get().is_some(), "regMr is NULL"),
            (t.dereg_mr.is_some(), "deregMr is NULL"),
            (t.isend.get().is_some(), "isend is NULL"),
            (t.irecv.get().is_some(), "irecv is NULL"),
            (t.iflush.is_some(), "iflush is NULL"),
            (t.test.is_some(), "test is NULL"),
            (t.close_send.is_some(), "closeSend is NULL"),
            (t.close_recv.is_some(), "closeRecv is NULL"),
            (t.close_listen.is_some(), "closeListen is NULL"),
            (self.version < Version::V11 || self.finalize.is_some(), "finalize is NULL"),
            (!self.irecv_consumed, "irecvConsumed is set: NCCL would call it with requests that test has freed"),
        ];
        needed.iter().filter(|(ok, _)| !ok).map(|(_, what)| *what).collect()
    }

    /// From version 11 on every init is of another communicator, and what is made next is made in it.
    pub(crate) fn init(&self) -> Result<(), Fault> {
        self.init_with(UNDEFINED)
    }

    /// With a communicator that asks for a traffic class; before version 11 connect says so.
    pub(crate) fn init_with(&self, traffic_class: c_int) -> Result<(), Fault> {
        let init = entry!(self.init.get());
        type Fixed = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, *const c_char);
        // SAFETY: see `log`: on 64-bit Linux a variadic call with one pointer looks like this function's own call.
        let logger = unsafe { std::mem::transmute::<Fixed, Logger>(log) };
        let code = if self.version < Version::V10 {
            // SAFETY: the member of this version.
            let init = unsafe { init.v6 };
            // SAFETY: the logger lives for ever.
            unsafe { init(logger) }
        } else if self.version < Version::V11 {
            // SAFETY: the member of this version.
            let init = unsafe { init.v10 };
            // SAFETY: the logger and the callback live for ever.
            unsafe { init(logger, profile::callback) }
        } else {
            // SAFETY: the member of these versions.
            let init = unsafe { init.v11 };
            let mut config = CommConfig { traffic_class };
            let mut context = ptr::null_mut();
            // SAFETY: as above; a pointer to write and a configuration.
            let code = unsafe { init(&raw mut context, COMM_ID, &raw mut config, logger, profile::callback) };
            config.traffic_class = POISON_INT;
            std::hint::black_box(config);
            checked("init", code)?;
            self.contexts().push(AnyContext(context));
            code
        };
        checked("init", code)
    }

    /// How NCCL begins with a plugin: the number of devices; where that fails, all that the plugin has said.
    pub(crate) fn start(&self) -> anyhow::Result<c_int> {
        self.init().and_then(|()| self.devices()).map_err(|fault| {
            let said = take_log().into_iter().filter(|line| line.level <= LOG_INFO);
            let said: String = said.map(|line| format!("\n    {line}")).collect();
            anyhow!("{fault}{said}")
        })
    }

    fn contexts(&self) -> std::sync::MutexGuard<'_, Vec<AnyContext>> {
        self.contexts.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// The communicator of the last init; NULL for versions that have none.
    fn context(&self) -> *mut c_void {
        self.contexts().last().map_or(ptr::null_mut(), |c| c.0)
    }

    /// Ends the communicator of the last init.
    pub(crate) fn finalize(&self) -> Result<(), Fault> {
        let Some(AnyContext(context)) = self.contexts().pop() else { return Ok(()) };
        let finalize = entry!(self.finalize, finalize);
        // SAFETY: of an init, finalized once.
        checked("finalize", unsafe { finalize(context) })
    }

    /// Whether devices may be fused.
    pub(crate) fn fuses(&self) -> bool {
        self.make_v_device.is_some()
    }

    /// One device of several.
    pub(crate) fn make_v_device(&self, devs: &[c_int]) -> Result<c_int, Fault> {
        let make = entry!(self.make_v_device, make_v_device);
        let mut parts = Parts { ndevs: int(devs.len()), devs: [POISON_INT; 8] };
        parts.devs[..devs.len()].copy_from_slice(devs);
        let mut index = POISON_INT;
        // SAFETY: an int to write, and the parts.
        checked("makeVDevice", unsafe { make(&raw mut index, &raw mut parts) })?;
        if index == POISON_INT {
            return Err(Fault::broken("makeVDevice", "did not write the index"));
        }
        Ok(index)
    }

    /// As NCCL does before it makes a connection.
    fn set_net_attr(&self, context: *mut c_void) -> Result<(), Fault> {
        let Some(set) = self.set_net_attr else { return Ok(()) };
        let side = [4, 1, 2, 1];
        let mut attr = NetAttr { send: side, recv: side, op: u32::MAX, algo: u32::MAX, proto: u32::MAX };
        // SAFETY: an open context; the structure dies with the call.
        checked("setNetAttr", unsafe { set(context, &raw mut attr) })
    }

    pub(crate) fn devices(&self) -> Result<c_int, Fault> {
        let devices = entry!(self.devices);
        let mut count = POISON_INT;
        // SAFETY: one int to write.
        checked("devices", unsafe { devices(&raw mut count) })?;
        if count == POISON_INT || count < 0 {
            return Err(Fault::broken("devices", format!("a device count of {count}")));
        }
        Ok(count)
    }

    /// What NCCL makes of the device's properties: where the version lacks a field, what NCCL puts there.
    pub(crate) fn properties(&self, dev: c_int) -> Result<Properties, Fault> {
        let get = entry!(self.get_properties);
        // NCCL does not clear the structure either: what a plugin leaves out is garbage there too.
        let mut raw = Box::new(RawProperties([POISON; 192]));
        // SAFETY: room for the structure of any version, aligned for it.
        checked("getProperties", unsafe { get(dev, ptr::from_mut(&mut *raw).cast()) })?;
        let (structure, behind) = raw.0.split_at(self.version.properties_bytes());
        if behind.iter().any(|&byte| byte != POISON) {
            return Err(Fault::broken("getProperties", "wrote behind the structure of this version"));
        }
        let has = |version| self.version >= version;
        let mut fields = Fields(structure);
        let Some(name) = fields.text("name")? else {
            return Err(Fault::broken("getProperties", "the name is NULL"));
        };
        let pci_path = fields.text("pciPath")?;
        let guid = u64::from_ne_bytes(fields.bytes("guid")?);
        let ptr_support = fields.int("ptrSupport")?;
        let reg_is_global = has(Version::V8) && fields.int("regIsGlobal")? != 0;
        let force_flush = has(Version::V9) && fields.int("forceFlush")? != 0;
        let (speed_mbps, port) = (fields.int("speed")?, fields.int("port")?);
        let latency_us = f32::from_ne_bytes(fields.bytes("latency")?);
        let (max_comms, max_recvs) = (fields.int("maxComms")?, fields.int("maxRecvs")?);
        let (mut net_device_type, mut net_device_version) = (0, 0);
        if has(Version::V7) {
            net_device_type = fields.int("netDeviceType")?;
            net_device_version = fields.int("netDeviceVersion")?;
        }
        let mut max_p2p_bytes = MAX_NET_SIZE;
        let mut parts = vec![dev];
        let (mut rail, mut plane) = (UNDEFINED, UNDEFINED);
        if has(Version::V9) {
            let ndevs = fields.int("vProps.ndevs")?;
            let max = self.version.max_parts();
            // Entries that do not count may be anything.
            let (devs, rest) = fields.0.split_at(max * size_of::<c_int>());
            let count = usize::try_from(ndevs).ok().filter(|n| (1..=max).contains(n));
            let Some(count) = count else {
                return Err(Fault::broken("getProperties", format!("a device made of {ndevs}; 1 to {max} may be")));
            };
            let mut devs = Fields(devs);
            parts = (0..count).map(|_| devs.int("vProps.devs")).collect::<Result<_, _>>()?;
            // Padding.
            fields = Fields(&rest[size_of::<c_int>()..]);
            max_p2p_bytes = fields.word("maxP2pBytes")?;
            fields.word("maxCollBytes")?;
            if !(1..=MAX_NET_SIZE_BYTES).contains(&max_p2p_bytes) {
                return Err(Fault::broken(
                    "getProperties",
                    format!("maxP2pBytes {max_p2p_bytes}; NCCL takes 1 to 1 TiB"),
                ));
            }
        }
        if has(Version::V11) {
            fields.int("maxMultiRequestSize")?;
        }
        if has(Version::V12) {
            rail = i16::from_ne_bytes(fields.bytes("railId")?).into();
            plane = i16::from_ne_bytes(fields.bytes("planeId")?).into();
        }
        Ok(Properties {
            name,
            pci_path,
            guid,
            ptr_support,
            reg_is_global,
            force_flush,
            speed_mbps,
            port,
            latency_us,
            max_comms,
            max_recvs,
            net_device_type,
            net_device_version,
            max_p2p_bytes,
            parts,
            rail,
            plane,
        })
    }

    pub(crate) fn listen(&self, dev: c_int) -> Result<(Handle, ListenComm), Fault> {
        let listen = entry!(self.listen.get());
        let mut handle = Handle::new();
        let mut comm = ptr::null_mut();
        let bytes = handle.0.bytes.as_mut_ptr().cast();
        let code = if self.version < Version::V11 {
            // SAFETY: the member of these versions.
            let listen = unsafe { listen.v6 };
            // SAFETY: 128 bytes and one pointer to write.
            unsafe { listen(dev, bytes, &raw mut comm) }
        } else {
            // SAFETY: the member of these versions.
            let listen = unsafe { listen.v11 };
            let context = self.context();
            self.set_net_attr(context)?;
            // SAFETY: as above; an open context.
            unsafe { listen(context, dev, bytes, &raw mut comm) }
        };
        checked("listen", code)?;
        handle.guards_ok("listen")?;
        if comm.is_null() {
            return Err(Fault::broken("listen", "success with a NULL comm; listen must be immediate"));
        }
        Ok((handle, ListenComm(comm)))
    }

    /// One call of connect. None: call again, with the same handle.
    pub(crate) fn connect(&self, dev: c_int, handle: &mut Handle) -> Result<Option<SendComm>, Fault> {
        // A communicator that asks for no traffic class.
        let mut config = CommConfig { traffic_class: UNDEFINED };
        let mut device = ptr::null_mut();
        let connected = self.connect_with(dev, &raw mut config, handle, &raw mut device)?;
        config.traffic_class = POISON_INT;
        std::hint::black_box(config);
        if !device.is_null() {
            return Err(Fault::broken("connect", "a device handle although the device type is HOST"));
        }
        Ok(connected)
    }

    /// As [`Plugin::connect`], with NULL for the device handle and the configuration, as NCCL's probe for GPU memory does
    /// it.
    pub(crate) fn connect_plain(&self, dev: c_int, handle: &mut Handle) -> Result<Option<SendComm>, Fault> {
        self.connect_with(dev, ptr::null_mut(), handle, ptr::null_mut())
    }

    fn connect_with(
        &self,
        dev: c_int,
        config: *mut CommConfig,
        handle: &mut Handle,
        device: Out,
    ) -> Result<Option<SendComm>, Fault> {
        let connect = entry!(self.connect.get());
        let mut comm = ptr::null_mut();
        // The handle's bytes stay at one address between calls.
        let bytes = handle.0.bytes.as_mut_ptr().cast();
        let code = match self.version {
            Version::V6 => {
                // SAFETY: the member of this version.
                let connect = unsafe { connect.v6 };
                // SAFETY: a handle and a pointer to write.
                unsafe { connect(dev, bytes, &raw mut comm) }
            }
            Version::V7 | Version::V8 | Version::V9 => {
                // SAFETY: the member of these versions.
                let connect = unsafe { connect.v7 };
                // SAFETY: a handle and two pointers to write, of which the second may be NULL.
                unsafe { connect(dev, bytes, &raw mut comm, device) }
            }
            Version::V10 => {
                // SAFETY: the member of this version.
                let connect = unsafe { connect.v10 };
                // SAFETY: as above; the configuration may be NULL too.
                unsafe { connect(dev, config, bytes, &raw mut comm, device) }
            }
            Version::V11 | Version::V12 => {
                // SAFETY: the member of these versions.
                let connect = unsafe { connect.v11 };
                let context = self.context();
                self.set_net_attr(context)?;
                // SAFETY: as for version 7; an open context.
                unsafe { connect(context, dev, bytes, &raw mut comm, device) }
            }
        };
        handle.guards_ok("connect")?;
        Self::connected("connect", code, comm).map(|comm| comm.map(SendComm))
    }

    /// One call of accept. None: call again.
    pub(crate) fn accept(&self, listener: ListenComm) -> Result<Option<RecvComm>, Fault> {
        let accept = entry!(self.accept.get());
        let mut comm = ptr::null_mut();
        let mut device = ptr::null_mut();
        let code = if self.version < Version::V7 {
            // SAFETY: the member of this version.
            let accept = unsafe { accept.v6 };
            // SAFETY: a listener of this plugin that is still open; a pointer to write.
            unsafe { accept(listener.0, &raw mut comm) }
        } else {
            // SAFETY: the member of these versions.
            let accept = unsafe { accept.v7 };
            // SAFETY: as above; two pointers to write.
            unsafe { accept(listener.0, &raw mut comm, &raw mut device) }
        };
        let connected = Self::connected("accept", code, comm)?;
        if !device.is_null() {
            return Err(Fault::broken("accept", "a device handle although the device type is HOST"));
        }
        Ok(connected.map(RecvComm))
    }

    fn connected(call: &'static str, code: c_int, comm: *mut c_void) -> Result<Option<*mut c_void>, Fault> {
        if code != 0 && !comm.is_null() {
            return Err(Fault::broken(call, format!("returned {code} and a comm; NCCL would close it twice")));
        }
        checked(call, code)?;
        Ok((!comm.is_null()).then_some(comm))
    }

    pub(crate) fn reg_mr(
        &self,
        comm: impl Into<AnyComm>,
        buffer: &Buffer,
        range: Range<usize>,
    ) -> Result<Memory, Fault> {
        self.reg_as(comm.into(), buffer, &range, buffer.kind())
    }

    /// Registers GPU memory by its address.
    pub(crate) fn reg_gpu(
        &self,
        comm: impl Into<AnyComm>,
        memory: &dyn Region,
        range: Range<usize>,
    ) -> Result<Memory, Fault> {
        self.reg_as(comm.into(), memory, &range, PTR_CUDA)
    }

    fn reg_as(&self, comm: AnyComm, region: &dyn Region, range: &Range<usize>, kind: c_int) -> Result<Memory, Fault> {
        let reg_mr = entry!(self.reg_mr.get());
        let mut memory = ptr::null_mut();
        let data = region.at(range);
        let code = if self.version < Version::V8 {
            // SAFETY: the member of these versions.
            let reg_mr = unsafe { reg_mr.v6 };
            // SAFETY: an open comm; the region outlives its registration.
            unsafe { reg_mr(comm.0, data, int(range.len()), kind, &raw mut memory) }
        } else {
            // SAFETY: the member of these versions.
            let reg_mr = unsafe { reg_mr.v8 };
            // SAFETY: as above.
            unsafe { reg_mr(comm.0, data, range.len(), kind, &raw mut memory) }
        };
        checked("regMr", code)?;
        Ok(Memory(memory))
    }

    /// Registers GPU memory, all of it, by a descriptor that begins where it begins.
    pub(crate) fn reg_dmabuf(
        &self,
        comm: impl Into<AnyComm>,
        region: &dyn Region,
        descriptor: BorrowedFd<'_>,
    ) -> Result<Memory, Fault> {
        let reg = entry!(self.reg_mr_dma_buf);
        let (comm, mut memory) = (comm.into().0, ptr::null_mut());
        let (data, bytes, fd) = (region.at(&(0..region.len())), region.len(), descriptor.as_raw_fd());
        // SAFETY: an open comm; the region outlives its registration; an open descriptor of it.
        checked("regMrDmaBuf", unsafe { reg(comm, data, bytes, PTR_CUDA, 0, fd, &raw mut memory) })?;
        Ok(Memory(memory))
    }

    pub(crate) fn dereg_mr(&self, comm: impl Into<AnyComm>, memory: Memory) -> Result<(), Fault> {
        let dereg_mr = entry!(self.dereg_mr);
        // SAFETY: an open comm and a registration made on it.
        checked("deregMr", unsafe { dereg_mr(comm.into().0, memory.0) })
    }

    fn posted(call: &'static str, code: c_int, request: *mut c_void) -> Result<Option<Request>, Fault> {
        checked(call, code)?;
        if request.addr() == STALE || request.addr() == OPTIONAL_COMPLETION {
            return Err(Fault::broken(call, "left what was in the request slot; NCCL would take it for a request"));
        }
        Ok((!request.is_null()).then_some(Request(request)))
    }

    /// None: again later.
    pub(crate) fn isend(
        &self,
        comm: SendComm,
        buffer: &dyn Region,
        range: Range<usize>,
        tag: c_int,
        memory: Memory,
    ) -> Result<Option<Request>, Fault> {
        let isend = entry!(self.isend.get());
        let mut request = ptr::without_provenance_mut(STALE);
        let size = range.len();
        let data = buffer.at(&range);
        let code = match self.version {
            Version::V6 | Version::V7 | Version::V8 => {
                // SAFETY: the member of these versions.
                let isend = unsafe { isend.v6 };
                // SAFETY: an open comm; registered memory that is never unmapped; one pointer to write.
                unsafe { isend(comm.0, data, int(size), tag, memory.0, &raw mut request) }
            }
            Version::V9 => {
                // SAFETY: the member of this version.
                let isend = unsafe { isend.v9 };
                // SAFETY: as above.
                unsafe { isend(comm.0, data, size, tag, memory.0, &raw mut request) }
            }
            Version::V10 | Version::V11 | Version::V12 => {
                // SAFETY: the member of these versions.
                let isend = unsafe { isend.v10 };
                let profiled = ptr::without_provenance_mut(PROFILED);
                // SAFETY: as above.
                unsafe { isend(comm.0, data, size, tag, memory.0, profiled, &raw mut request) }
            }
        };
        Self::posted("isend", code, request)
    }

    /// None: again later. The argument arrays are overwritten as soon as the call is over.
    pub(crate) fn irecv(&self, comm: RecvComm, slots: &[Slot<'_>]) -> Result<Option<Request>, Fault> {
        self.irecv_with(comm, slots, STALE)
    }

    /// As [`Plugin::irecv`], of a receive whose data tell by themselves when they are there, so that it may be done before;
    /// it stays a plain one for a version that does not know such, and for a plugin that does not care.
    pub(crate) fn irecv_hinted(&self, comm: RecvComm, slot: Slot<'_>) -> Result<Option<Request>, Fault> {
        // What NCCL makes of it for older versions.
        let hint = if self.version < Version::V9 { 0 } else { OPTIONAL_COMPLETION };
        self.irecv_with(comm, &[slot], hint)
    }

    fn irecv_with(&self, comm: RecvComm, slots: &[Slot<'_>], held: usize) -> Result<Option<Request>, Fault> {
        let irecv = entry!(self.irecv.get());
        let mut args = Arguments::new(slots);
        for (i, slot) in slots.iter().enumerate() {
            args.long_sizes[i] = slot.range.len();
            args.sizes[i] = int(slot.range.len());
        }
        let mut request = ptr::without_provenance_mut(held);
        let (n, data, tags, memory) =
            (int(slots.len()), args.data.as_mut_ptr(), args.tags.as_mut_ptr(), args.memory.as_mut_ptr());
        let (sizes, long_sizes) = (args.sizes.as_mut_ptr(), args.long_sizes.as_mut_ptr());
        let code = match self.version {
            Version::V6 | Version::V7 | Version::V8 => {
                // SAFETY: the member of these versions.
                let irecv = unsafe { irecv.v6 };
                // SAFETY: an open comm; n entries in each array; registered memory that is never unmapped.
                unsafe { irecv(comm.0, n, data, sizes, tags, memory, &raw mut request) }
            }
            Version::V9 => {
                // SAFETY: the member of this version.
                let irecv = unsafe { irecv.v9 };
                // SAFETY: as above.
                unsafe { irecv(comm.0, n, data, long_sizes, tags, memory, &raw mut request) }
            }
            Version::V10 | Version::V11 | Version::V12 => {
                // SAFETY: the member of these versions.
                let irecv = unsafe { irecv.v10 };
                let profiled = args.profiled.as_mut_ptr();
                // SAFETY: as above.
                unsafe { irecv(comm.0, n, data, long_sizes, tags, memory, profiled, &raw mut request) }
            }
        };
        args.poison();
        Self::posted("irecv", code, request)
    }

    /// None: there is nothing to flush, or it is done already.
    pub(crate) fn iflush(&self, comm: RecvComm, slots: &[Slot<'_>], sizes: &[usize]) -> Result<Option<Request>, Fault> {
        let iflush = entry!(self.iflush);
        let mut args = Arguments::new(slots);
        for (to, size) in args.sizes.iter_mut().zip(sizes) {
            *to = int(*size);
        }
        let mut request = ptr::without_provenance_mut(STALE);
        // SAFETY: an open comm; n entries in each array; memory of a receive that has completed.
        let code = unsafe {
            iflush(
                comm.0,
                int(slots.len()),
                args.data.as_mut_ptr(),
                args.sizes.as_mut_ptr(),
                args.memory.as_mut_ptr(),
                &raw mut request,
            )
        };
        args.poison();
        Self::posted("iflush", code, request)
    }

    fn test(&self, request: Request, sizes: *mut c_int) -> Result<bool, Fault> {
        let test = entry!(self.test);
        let mut done = POISON_INT;
        // SAFETY: a request that has not been reported done; one int for done; sizes as its caller says.
        checked("test", unsafe { test(request.0, &raw mut done, sizes) })?;
        match done {
            0 => Ok(false),
            1 => Ok(true),
            POISON_INT => Err(Fault::broken("test", "did not write *done; NCCL's variable is uninitialised")),
            other => Err(Fault::broken("test", format!("wrote {other} to *done"))),
        }
    }

    /// Tests a send. NCCL passes the address of a single int, here between canaries.
    pub(crate) fn test_send(&self, request: Request) -> Result<Option<SendSize>, Fault> {
        let mut stack = [CANARY; 32];
        stack[8] = POISON_INT;
        let done = self.test(request, stack[8..].as_mut_ptr())?;
        let size = std::mem::replace(&mut stack[8], CANARY);
        if stack != [CANARY; 32] {
            return Err(Fault::broken("test", "wrote more than one size for a send"));
        }
        let size = if size == POISON_INT { SendSize::Unwritten } else { SendSize::Bytes(size) };
        Ok(done.then_some(size))
    }

    /// Tests a receive of n buffers: their sizes once it is done.
    pub(crate) fn test_recv(&self, request: Request, n: usize) -> Result<Option<[usize; MAX_GROUP]>, Fault> {
        // NCCL's array is zeroed; the words around it are not its own.
        let mut stack = [CANARY; RECV_SIZES + 16];
        stack[8..8 + RECV_SIZES].fill(0);
        let done = self.test(request, stack[8..].as_mut_ptr())?;
        if stack[..8] != [CANARY; 8] || stack[8 + RECV_SIZES..] != [CANARY; 8] {
            return Err(Fault::broken("test", "wrote outside the array of sizes"));
        }
        if stack[8 + n..8 + RECV_SIZES].iter().any(|&size| size != 0) {
            return Err(Fault::broken("test", format!("wrote more than {n} sizes for a receive of {n} buffers")));
        }
        let mut sizes = [0; MAX_GROUP];
        for (to, &from) in sizes.iter_mut().zip(&stack[8..8 + n]) {
            *to = usize::try_from(from).map_err(|_| Fault::broken("test", format!("a received size of {from}")))?;
        }
        Ok(done.then_some(sizes))
    }

    /// Tests with NULL for the sizes, as NCCL does for flushes and in its bootstrap.
    pub(crate) fn test_plain(&self, request: Request) -> Result<bool, Fault> {
        self.test(request, ptr::null_mut())
    }

    pub(crate) fn close_send(&self, comm: Option<SendComm>) -> Result<(), Fault> {
        let close = entry!(self.close_send);
        // SAFETY: an open comm that is not used again, or NULL, which NCCL passes after a failed connect.
        checked("closeSend", unsafe { close(comm.map_or(ptr::null_mut(), |c| c.0)) })
    }

    pub(crate) fn close_recv(&self, comm: Option<RecvComm>) -> Result<(), Fault> {
        let close = entry!(self.close_recv);
        // SAFETY: as in close_send.
        checked("closeRecv", unsafe { close(comm.map_or(ptr::null_mut(), |c| c.0)) })
    }

    pub(crate) fn close_listen(&self, comm: Option<ListenComm>) -> Result<(), Fault> {
        let close = entry!(self.close_listen);
        // SAFETY: as in close_send.
        checked("closeListen", unsafe { close(comm.map_or(ptr::null_mut(), |c| c.0)) })
    }
}

impl Drop for Plugin {
    fn drop(&mut self) {
        // NCCL ends its communicators before it unloads the plugin.
        while !self.contexts().is_empty() {
            let _ = self.finalize();
        }
    }
}

/// What `test` wrote as the size of a completed send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SendSize {
    Unwritten,
    Bytes(c_int),
}

/// The arrays of irecv and iflush, dead with the call.
struct Arguments {
    data: [*mut c_void; MAX_GROUP],
    sizes: [c_int; MAX_GROUP],
    long_sizes: [usize; MAX_GROUP],
    tags: [c_int; MAX_GROUP],
    memory: [*mut c_void; MAX_GROUP],
    profiled: [*mut c_void; MAX_GROUP],
}

/// Room for the properties of any version, and behind them.
#[repr(C, align(8))]
struct RawProperties([u8; 192]);

impl Arguments {
    fn new(slots: &[Slot<'_>]) -> Self {
        assert!(slots.len() <= MAX_GROUP);
        let mut args = Self {
            data: [ptr::null_mut(); MAX_GROUP],
            sizes: [0; MAX_GROUP],
            long_sizes: [0; MAX_GROUP],
            tags: [0; MAX_GROUP],
            memory: [ptr::null_mut(); MAX_GROUP],
            profiled: [ptr::without_provenance_mut(PROFILED); MAX_GROUP],
        };
        for (i, slot) in slots.iter().enumerate() {
            args.data[i] = slot.buffer.at(&slot.range);
            args.tags[i] = slot.tag;
            args.memory[i] = slot.memory.0;
        }
        args
    }

    fn poison(&mut self) {
        self.data.fill(ptr::without_provenance_mut(STALE));
        self.sizes.fill(c_int::MIN);
        self.long_sizes.fill(usize::MAX);
        self.tags.fill(c_int::MIN);
        self.memory.fill(ptr::without_provenance_mut(STALE));
        self.profiled.fill(ptr::without_provenance_mut(STALE));
        // Keeps the stores: a plugin that still looks at the arrays must see the poison.
        std::hint::black_box(self);
    }
}

/// Sizes are `int` in some versions and calls; no buffer of this command comes near that limit.
fn int(n: usize) -> c_int {
    c_int::try_from(n).unwrap_or(c_int::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_keeps_its_bytes_and_sees_overruns() {
        let mut handle = Handle::from_wire(&[7; HANDLE_BYTES]).unwrap();
        assert_eq!(handle.bytes(), [7; HANDLE_BYTES]);
        handle.guards_ok("connect").unwrap();
        handle.0.after[0] = 0;
        assert!(handle.guards_ok("connect").is_err());
        assert!(Handle::from_wire(&[0; 5]).is_err());
    }

    #[test]
    fn stale_request_is_a_broken_contract() {
        let stale = ptr::without_provenance_mut(STALE);
        assert!(matches!(Plugin::posted("isend", 0, stale), Err(Fault::Broken { .. })));
        assert!(Plugin::posted("isend", 0, ptr::null_mut()).unwrap().is_none());
        assert!(matches!(Plugin::posted("isend", 6, stale), Err(Fault::Code { code: 6, .. })));
    }

    #[test]
    fn in_progress_and_error_with_comm_are_broken_contracts() {
        assert!(matches!(checked("accept", 7), Err(Fault::Broken { .. })));
        let comm = ptr::without_provenance_mut(8);
        assert!(matches!(Plugin::connected("connect", 2, comm), Err(Fault::Broken { .. })));
    }

    #[test]
    fn a_property_left_unwritten_is_named() {
        let mut raw = [POISON; 8];
        raw[..4].copy_from_slice(&7_i32.to_ne_bytes());
        let mut fields = Fields(&raw);
        assert_eq!(fields.int("speed").unwrap(), 7);
        let fault = fields.int("port").unwrap_err().to_string();
        assert!(fault.contains("left port unwritten"), "{fault}");
    }

    #[test]
    fn missing_plugin_is_a_clear_error() {
        let error = format!("{:#}", Plugin::load(Path::new("/nonexistent/libnccl-net-x.so"), None).unwrap_err());
        assert!(error.contains("/nonexistent/libnccl-net-x.so: cannot open"), "the linker's own words: {error}");
        let error = format!("{:#}", Plugin::load(Path::new("no-such-word"), None).unwrap_err());
        for named in ["no-such-word: cannot open", "libnccl-net-no-such-word.so: cannot open", "ci/build", "--plugin"] {
            assert!(error.contains(named), "{named}: {error}");
        }
        let error = format!("{:#}", Plugin::load(Path::new("libnccl-net-none.so"), None).unwrap_err());
        assert!(!error.contains("libnccl-net-lib"), "NCCL does not try it either: {error}");
    }
}
