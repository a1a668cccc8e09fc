//! libibverbs, found with `dlopen`; its entry points, found with `dlvsym` under the versions that the real one carries.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use ibverbs_sys as ib;

use super::error::VerbsError;

/// Why there is no libibverbs.
#[derive(Debug, Clone, thiserror::Error)]
pub enum LoadError {
    #[error(
        "libibverbs could not be loaded ({0}); install it (Debian, Ubuntu: libibverbs1 and ibverbs-providers; RHEL: \
         libibverbs and rdma-core) or set NCCL_IBVERBS_LIB to its path"
    )]
    NotFound(String),
    #[error("{library} has no {symbol} in version {version}: it is not libibverbs, or one from before 2009")]
    NoSymbol { library: String, symbol: &'static str, version: &'static str },
}

/// Extended connection establishment options (`man ibv_query_ece`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Ece {
    pub vendor_id: u32,
    pub options: u32,
    pub comp_mask: u32,
}
const _: () = assert!(size_of::<Ece>() == size_of::<ib::ibv_ece>());

macro_rules! api {
    (
        required { $($req:ident: $req_sym:literal $req_ver:literal fn($($req_arg:ty),*) -> $req_ret:ty;)* }
        optional { $($opt:ident: $opt_sym:literal $opt_ver:literal fn($($opt_arg:ty),*) -> $opt_ret:ty;)* }
    ) => {
        /// Entry points by the names of their man pages.
        pub(super) struct Api {
            $(pub(super) $req: unsafe extern "C" fn($($req_arg),*) -> $req_ret,)*
            $(pub(super) $opt: Option<unsafe extern "C" fn($($opt_arg),*) -> $opt_ret>,)*
        }

        impl Api {
            fn find(handle: NonNull<c_void>, library: &str) -> Result<Self, LoadError> {
                Ok(Self {
                    $($req: {
                        let Some(symbol) = versioned(handle, $req_sym, $req_ver) else {
                            return Err(LoadError::NoSymbol { library: library.to_owned(), symbol: $req_sym, version: $req_ver });
                        };
                        // SAFETY: the symbol carries this name and version, so it has the signature of <infiniband/verbs.h>.
                        unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($req_arg),*) -> $req_ret>(symbol) }
                    },)*
                    $($opt: versioned(handle, $opt_sym, $opt_ver).map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn($($opt_arg),*) -> $opt_ret>(symbol) }
                    }),)*
                })
            }
        }
    };
}

api! {
    required {
        fork_init: "ibv_fork_init" "IBVERBS_1.1" fn() -> c_int;
        get_device_list: "ibv_get_device_list" "IBVERBS_1.1" fn(*mut c_int) -> *mut *mut ib::ibv_device;
        free_device_list: "ibv_free_device_list" "IBVERBS_1.1" fn(*mut *mut ib::ibv_device) -> ();
        get_device_name: "ibv_get_device_name" "IBVERBS_1.1" fn(*mut ib::ibv_device) -> *const c_char;
        open_device: "ibv_open_device" "IBVERBS_1.1" fn(*mut ib::ibv_device) -> *mut ib::ibv_context;
        close_device: "ibv_close_device" "IBVERBS_1.1" fn(*mut ib::ibv_context) -> c_int;
        query_device: "ibv_query_device" "IBVERBS_1.1" fn(*mut ib::ibv_context, *mut ib::ibv_device_attr) -> c_int;
        query_port: "ibv_query_port" "IBVERBS_1.1" fn(*mut ib::ibv_context, u8, *mut ib::ibv_port_attr) -> c_int;
        query_gid: "ibv_query_gid" "IBVERBS_1.1" fn(*mut ib::ibv_context, u8, c_int, *mut ib::ibv_gid) -> c_int;
        query_pkey: "ibv_query_pkey" "IBVERBS_1.1" fn(*mut ib::ibv_context, u8, c_int, *mut u16) -> c_int;
        get_async_event: "ibv_get_async_event" "IBVERBS_1.1" fn(*mut ib::ibv_context, *mut ib::ibv_async_event) -> c_int;
        ack_async_event: "ibv_ack_async_event" "IBVERBS_1.1" fn(*mut ib::ibv_async_event) -> ();
        alloc_pd: "ibv_alloc_pd" "IBVERBS_1.1" fn(*mut ib::ibv_context) -> *mut ib::ibv_pd;
        dealloc_pd: "ibv_dealloc_pd" "IBVERBS_1.1" fn(*mut ib::ibv_pd) -> c_int;
        reg_mr: "ibv_reg_mr" "IBVERBS_1.1" fn(*mut ib::ibv_pd, *mut c_void, usize, c_int) -> *mut ib::ibv_mr;
        dereg_mr: "ibv_dereg_mr" "IBVERBS_1.1" fn(*mut ib::ibv_mr) -> c_int;
        create_cq: "ibv_create_cq" "IBVERBS_1.1" fn(*mut ib::ibv_context, c_int, *mut c_void, *mut ib::ibv_comp_channel, c_int) -> *mut ib::ibv_cq;
        destroy_cq: "ibv_destroy_cq" "IBVERBS_1.1" fn(*mut ib::ibv_cq) -> c_int;
        create_qp: "ibv_create_qp" "IBVERBS_1.1" fn(*mut ib::ibv_pd, *mut ib::ibv_qp_init_attr) -> *mut ib::ibv_qp;
        modify_qp: "ibv_modify_qp" "IBVERBS_1.1" fn(*mut ib::ibv_qp, *mut ib::ibv_qp_attr, c_int) -> c_int;
        destroy_qp: "ibv_destroy_qp" "IBVERBS_1.1" fn(*mut ib::ibv_qp) -> c_int;
    }
    optional {
        reg_mr_iova2: "ibv_reg_mr_iova2" "IBVERBS_1.8" fn(*mut ib::ibv_pd, *mut c_void, usize, u64, c_uint) -> *mut ib::ibv_mr;
        query_ece: "ibv_query_ece" "IBVERBS_1.10" fn(*mut ib::ibv_qp, *mut Ece) -> c_int;
        set_ece: "ibv_set_ece" "IBVERBS_1.10" fn(*mut ib::ibv_qp, *mut Ece) -> c_int;
        query_gid_ex: "_ibv_query_gid_ex" "IBVERBS_1.11" fn(*mut ib::ibv_context, u32, u32, *mut ib::ibv_gid_entry, u32, usize) -> c_int;
        reg_dmabuf_mr: "ibv_reg_dmabuf_mr" "IBVERBS_1.12" fn(*mut ib::ibv_pd, u64, usize, u64, c_int, c_int) -> *mut ib::ibv_mr;
        query_port_speed: "ibv_query_port_speed" "IBVERBS_1.16" fn(*mut ib::ibv_context, u32, *mut u64) -> c_int;
    }
}

/// `dlvsym`: an exact name in an exact version.
fn versioned(handle: NonNull<c_void>, symbol: &str, version: &str) -> Option<NonNull<c_void>> {
    let symbol = CString::new(symbol).ok()?;
    let version = CString::new(version).ok()?;
    // SAFETY: the handle came from dlopen and is never closed; both strings end in NUL.
    NonNull::new(unsafe { libc::dlvsym(handle.as_ptr(), symbol.as_ptr(), version.as_ptr()) })
}

/// The loaded library. It is never unloaded: providers keep threads and callbacks of their own.
pub struct Library {
    pub(super) api: Api,
    /// The name or path under which it was found.
    pub name: String,
    /// Why names that came first were not taken; empty for the first.
    pub passed_over: String,
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Library").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Library {
    /// Loads libibverbs: `preferred` first where given (NCCL_IBVERBS_LIB), then the usual names. Fork safety is asked for
    /// before any other verb is called.
    pub fn load(preferred: Option<&Path>) -> Result<Arc<Self>, LoadError> {
        let mut tried = Vec::new();
        let names = preferred
            .map(|p| p.to_string_lossy().into_owned())
            .into_iter()
            .chain(["libibverbs.so.1".to_owned(), "libibverbs.so".to_owned()]);
        for name in names {
            match open(&name) {
                Ok(handle) => {
                    let api = Api::find(handle, &name)?;
                    // A data loader may fork after init. The result is ignored: kernels since 5.12 need no help and say so.
                    // SAFETY: takes no arguments and comes before every other verb.
                    let _ = unsafe { (api.fork_init)() };
                    return Ok(Arc::new(Self { api, name, passed_over: tried.join("; ") }));
                }
                Err(why) => tried.push(why),
            }
        }
        Err(LoadError::NotFound(tried.join("; ")))
    }

    /// Devices present now.
    pub fn devices(self: &Arc<Self>) -> Result<DeviceList, VerbsError> {
        let mut count: c_int = 0;
        // SAFETY: the count is a valid place to write.
        let list = unsafe { (self.api.get_device_list)(&raw mut count) };
        let Some(list) = NonNull::new(list) else {
            let e = VerbsError::last("ibv_get_device_list", "");
            // No device and no kernel support are not failures: the list is empty.
            return if matches!(e.errno, 0 | libc::ENOSYS | libc::ENOENT) {
                Ok(DeviceList { library: Arc::clone(self), list: ptr::null_mut(), count: 0 })
            } else {
                Err(e)
            };
        };
        Ok(DeviceList { library: Arc::clone(self), list: list.as_ptr(), count: usize::try_from(count).unwrap_or(0) })
    }

    /// Whether a registration with relaxed ordering is possible at all.
    pub fn has_relaxed_ordering(&self) -> bool {
        self.api.reg_mr_iova2.is_some()
    }
}

fn open(name: &str) -> Result<NonNull<c_void>, String> {
    let c_name = CString::new(name).map_err(|_| format!("{name:?} holds a NUL byte"))?;
    // SAFETY: a NUL-terminated name; constructors of a library that the user named run here, as for any dlopen.
    let handle = unsafe { libc::dlopen(c_name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    NonNull::new(handle).ok_or_else(|| {
        // SAFETY: dlerror returns NULL or a string that stays valid until the next dl call on this thread.
        let text = unsafe { libc::dlerror() };
        if text.is_null() {
            return format!("{name}: dlopen failed");
        }
        // SAFETY: not NULL, hence a C string.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    })
}

/// What `ibv_get_device_list` returned; freed on drop, after which only opened devices stay valid.
pub struct DeviceList {
    pub(super) library: Arc<Library>,
    list: *mut *mut ib::ibv_device,
    count: usize,
}

impl std::fmt::Debug for DeviceList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries((0..self.count).map(|i| self.name(i))).finish()
    }
}

impl DeviceList {
    pub fn len(&self) -> usize {
        self.count
    }

    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The name of device `i`, for example `mlx5_0`.
    pub fn name(&self, i: usize) -> String {
        // SAFETY: get returns a live device of this list.
        let name = unsafe { (self.library.api.get_device_name)(self.get(i).as_ptr()) };
        if name.is_null() {
            return String::new();
        }
        // SAFETY: libibverbs returns the NUL-terminated name inside the device.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    /// Where device `i` is in sysfs, as libibverbs says (ibv_device.ibdev_path); empty where it does not.
    pub fn ibdev_path(&self, i: usize) -> String {
        // SAFETY: get returns a live device of this list.
        let device = unsafe { self.get(i).as_ref() };
        let bytes: Vec<u8> = device.ibdev_path.iter().take_while(|c| **c != 0).map(|c| c.cast_unsigned()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    pub(super) fn get(&self, i: usize) -> NonNull<ib::ibv_device> {
        assert!(i < self.count, "device {i} of {}", self.count);
        // SAFETY: the list holds `count` pointers and is alive.
        let entry = unsafe { self.list.add(i) };
        // SAFETY: as above.
        let device = unsafe { *entry };
        NonNull::new(device).expect("libibverbs ends the list at the first NULL")
    }
}

impl Drop for DeviceList {
    fn drop(&mut self) {
        if !self.list.is_null() {
            // SAFETY: from ibv_get_device_list, freed once.
            unsafe { (self.library.api.free_device_list)(self.list) }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_says_what_to_install() {
        // The usual names may exist on the machine that runs this test; an empty preference must not hide that a wrong one
        // was tried first.
        match Library::load(Some(Path::new("/nonexistent/libibverbs.so.1"))) {
            Ok(found) => assert!(found.name.starts_with("libibverbs.so")),
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains("/nonexistent/libibverbs.so.1") && text.contains("libibverbs1"), "{text}");
            }
        }
    }

    #[test]
    fn another_library_is_refused_by_name() {
        let e = Library::load(Some(Path::new("libc.so.6"))).expect_err("libc is not libibverbs");
        assert!(e.to_string().contains("ibv_fork_init"), "{e}");
    }
}
