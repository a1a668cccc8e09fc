//! The tables of all versions as they lie in memory. Up to version 10 an entry has one place in every table; where its
//! arguments differ, it is a union, of which the table's version tells the member.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};

pub(super) type Logger = unsafe extern "C" fn(c_int, c_ulong, *const c_char, c_int, *const c_char, ...);
pub(super) type Profiler = unsafe extern "C" fn(Out, c_int, *mut c_void, i64, *mut c_void) -> Code;
pub(super) type Code = c_int;
pub(super) type Out = *mut *mut c_void;
type Object = *mut c_void;

/// A version of the plugin ABI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
pub(crate) enum Version {
    V6,
    V7,
    V8,
    V9,
    V10,
    V11,
    V12,
}

impl Version {
    /// In the order in which NCCL looks for them.
    pub(crate) const ALL: [Self; 7] = [Self::V12, Self::V11, Self::V10, Self::V9, Self::V8, Self::V7, Self::V6];

    pub(crate) fn number(self) -> u8 {
        match self {
            Self::V6 => 6,
            Self::V7 => 7,
            Self::V8 => 8,
            Self::V9 => 9,
            Self::V10 => 10,
            Self::V11 => 11,
            Self::V12 => 12,
        }
    }

    pub(super) fn symbol(self) -> &'static CStr {
        match self {
            Self::V6 => c"ncclNetPlugin_v6",
            Self::V7 => c"ncclNetPlugin_v7",
            Self::V8 => c"ncclNetPlugin_v8",
            Self::V9 => c"ncclNetPlugin_v9",
            Self::V10 => c"ncclNetPlugin_v10",
            Self::V11 => c"ncclNetPlugin_v11",
            Self::V12 => c"ncclNetPlugin_v12",
        }
    }

    /// Bytes of `ncclNetProperties_vN_t`.
    pub(super) fn properties_bytes(self) -> usize {
        match self {
            Self::V6 => 48,
            Self::V7 => 56,
            Self::V8 => 64,
            Self::V9 | Self::V10 => 104,
            Self::V11 => 112,
            Self::V12 => 128,
        }
    }

    /// Devices that may be fused into one; 0 before there was such a thing.
    pub(crate) fn max_parts(self) -> usize {
        match self {
            Self::V6 | Self::V7 | Self::V8 => 0,
            Self::V9 | Self::V10 | Self::V11 => 4,
            Self::V12 => 8,
        }
    }
}

macro_rules! unions {
    ($($name:ident { $($(#[$doc:meta])* $member:ident: fn($($argument:ty),*),)* })*) => { $(
        #[derive(Clone, Copy)]
        pub(super) union $name {
            present: Option<unsafe extern "C" fn()>,
            $($(#[$doc])* pub(super) $member: unsafe extern "C" fn($($argument),*) -> Code,)*
        }

        impl $name {
            /// The entry unless it is NULL.
            pub(super) fn get(self) -> Option<Self> {
                // SAFETY: a pointer or NULL, whatever its type.
                unsafe { self.present }.map(|_| self)
            }
        }
    )* };
}
unions! {
    Init {
        v6: fn(Logger),
        v10: fn(Logger, Profiler),
        v11: fn(Out, u64, *mut CommConfig, Logger, Profiler),
    }
    Listen {
        v6: fn(c_int, Object, Out),
        v11: fn(Object, c_int, Object, Out),
    }
    Connect {
        v6: fn(c_int, Object, Out),
        v7: fn(c_int, Object, Out, Out),
        v10: fn(c_int, *mut CommConfig, Object, Out, Out),
        v11: fn(Object, c_int, Object, Out, Out),
    }
    Accept {
        v6: fn(Object, Out),
        v7: fn(Object, Out, Out),
    }
    RegMr {
        v6: fn(Object, Object, c_int, c_int, Out),
        v8: fn(Object, Object, usize, c_int, Out),
    }
    Isend {
        v6: fn(Object, Object, c_int, c_int, Object, Out),
        v9: fn(Object, Object, usize, c_int, Object, Out),
        v10: fn(Object, Object, usize, c_int, Object, Object, Out),
    }
    Irecv {
        v6: fn(Object, c_int, Out, *mut c_int, *mut c_int, Out, Out),
        v9: fn(Object, c_int, Out, *mut usize, *mut c_int, Out, Out),
        v10: fn(Object, c_int, Out, *mut usize, *mut c_int, Out, Out, Out),
    }
}

/// `ncclNetCommConfig_v10_t` and those of later versions.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CommConfig {
    pub(super) traffic_class: c_int,
}

/// `ncclNetVDeviceProps_vN_t` with the most devices that any version has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Parts {
    pub(super) ndevs: c_int,
    pub(super) devs: [c_int; 8],
}

/// `ncclNetAttr_v11_t`: what NCCL says of sends and receives (most and fewest peers, most and fewest flows to each), and
/// bits of operations, algorithms and protocols.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct NetAttr {
    pub(super) send: [i32; 4],
    pub(super) recv: [i32; 4],
    pub(super) op: u32,
    pub(super) algo: u32,
    pub(super) proto: u32,
}

/// What is at the same place in every `ncclNet_vN_t`: all of version 6.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Table {
    pub(super) name: *const c_char,
    pub(super) init: Init,
    pub(super) devices: Option<unsafe extern "C" fn(*mut c_int) -> Code>,
    pub(super) get_properties: Option<unsafe extern "C" fn(c_int, *mut c_void) -> Code>,
    pub(super) listen: Listen,
    pub(super) connect: Connect,
    pub(super) accept: Accept,
    pub(super) reg_mr: RegMr,
    pub(super) reg_mr_dma_buf: Option<unsafe extern "C" fn(Object, Object, usize, c_int, u64, c_int, Out) -> Code>,
    pub(super) dereg_mr: Option<unsafe extern "C" fn(Object, Object) -> Code>,
    pub(super) isend: Isend,
    pub(super) irecv: Irecv,
    pub(super) iflush: Option<unsafe extern "C" fn(Object, c_int, Out, *mut c_int, Out, Out) -> Code>,
    pub(super) test: Option<unsafe extern "C" fn(Object, *mut c_int, *mut c_int) -> Code>,
    pub(super) close_send: Option<unsafe extern "C" fn(Object) -> Code>,
    pub(super) close_recv: Option<unsafe extern "C" fn(Object) -> Code>,
    pub(super) close_listen: Option<unsafe extern "C" fn(Object) -> Code>,
}

/// The table of version 7 and later, as far as version 8 goes.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LongTable {
    pub(super) base: Table,
    pub(super) get_device_mr: Option<unsafe extern "C" fn(Object, Object, Out) -> Code>,
    pub(super) irecv_consumed: Option<unsafe extern "C" fn(Object, c_int, Object) -> Code>,
}

/// The table of version 11 and later. Version 9 and 10 have it as far as `make_v_device`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LongestTable {
    pub(super) base: LongTable,
    pub(super) make_v_device: Option<unsafe extern "C" fn(*mut c_int, *mut Parts) -> Code>,
    pub(super) finalize: Option<unsafe extern "C" fn(Object) -> Code>,
    pub(super) set_net_attr: Option<unsafe extern "C" fn(Object, *mut NetAttr) -> Code>,
}

const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Table>() == 136);
    assert!(offset_of!(Table, connect) == 40);
    assert!(offset_of!(Table, isend) == 80);
    assert!(offset_of!(Table, test) == 104);
    assert!(size_of::<LongTable>() == 152);
    assert!(offset_of!(LongTable, irecv_consumed) == 144);
    assert!(size_of::<LongestTable>() == 176);
    assert!(offset_of!(LongestTable, make_v_device) == 152);
    assert!(size_of::<NetAttr>() == 44);
};
