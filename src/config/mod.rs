//! Every setting, declared once: name, default, range, meaning. Read once, at init; never on the data path.
//!
//! The names are NCCL's own where it has one, with its meaning; integers follow strtoll with base 0 (`0x10`, `010`). What
//! NCCL takes in silence (values out of range, trailing junk, unknown words) yields a [`Warning`] here that says what is
//! used instead.

mod parse;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use parse::{Note, Value};

/// Something a person probably meant otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Warning(pub String);

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Address family of GIDs or sockets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddrFamily {
    V4,
    V6,
}

/// RoCE version of a GID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RoceVersion {
    V1,
    V2,
}

/// Whether registrations may count on a peer memory driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerMemory {
    /// As sysfs says.
    Auto,
    On,
    Off,
}

/// Which way data take between a GPU and a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuPath {
    /// The best that this machine has, as far as is known.
    Auto,
    /// The NIC reads and writes GPU memory.
    Gdr,
    /// The plugin copies through pinned host memory.
    Staging,
    /// NCCL keeps what it sends in host memory.
    Host,
}

/// Where a value in force came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Origin {
    Default,
    Environment,
    /// Set, but not to a valid value: the nearest one, or the default, is in force.
    Corrected,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "default",
            Self::Environment => "environment",
            Self::Corrected => "corrected",
        })
    }
}

/// One setting as it is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    /// As it would be written in the environment; empty where unset.
    pub value: String,
    pub default: String,
    /// The values that it may have, in words.
    pub valid: String,
    pub origin: Origin,
    pub meaning: &'static str,
}

macro_rules! settings {
    ($($field:ident: $type:ty = $default:expr, $name:literal, $spec:expr, $meaning:literal;)*) => {
        /// The settings in force.
        #[derive(Debug, Clone)]
        pub struct Config {
            $(#[doc = concat!("`", $name, "`: ", $meaning)] pub $field: $type,)*
            origins: Vec<(&'static str, Origin)>,
        }

        /// Names of all settings.
        pub const NAMES: &[&str] = &[$($name),*];

        impl Config {
            /// Reads the settings from `lookup`; `names` are the names of everything that is set, so that what is not
            /// honoured can be told.
            pub fn load(
                lookup: &dyn Fn(&str) -> Option<String>,
                names: impl Iterator<Item = String>,
            ) -> (Self, Vec<Warning>) {
                // An empty text means the default, as in NCCL.
                let lookup = |name: &str| lookup(name).filter(|text| !text.is_empty());
                let mut warnings = Vec::new();
                let mut origins = Vec::new();
                $(let $field: $type = {
                    let (value, origin) = read($name, lookup($name), $default, &$spec, &mut warnings);
                    origins.push(($name, origin));
                    value
                };)*
                not_honoured(names.filter(|name| lookup(name).is_some()), &mut warnings);
                (Self { $($field,)* origins }, warnings)
            }

            /// The settings in force, with where each came from and what it means.
            pub fn describe(&self) -> Vec<Setting> {
                let origin = |name| self.origins.iter().find(|(n, _)| *n == name).map_or(Origin::Default, |(_, o)| *o);
                vec![$({
                    let default: $type = $default;
                    Setting {
                        name: $name,
                        value: self.$field.show(),
                        default: default.show(),
                        valid: <$type as Value>::valid(&$spec),
                        origin: origin($name),
                        meaning: $meaning,
                    }
                }),*]
            }
        }
    };
}

/// The value in force of one setting. What is not as the user wrote it is told, with the valid values and the one used.
fn read<T: Value>(
    name: &str,
    text: Option<String>,
    default: T,
    spec: &Spec,
    warnings: &mut Vec<Warning>,
) -> (T, Origin) {
    let Some(text) = text else { return (default, Origin::Default) };
    match T::parse(&text, spec) {
        Ok((value, None)) => (value, Origin::Environment),
        Ok((value, Some(Note::Advice(what)))) => {
            warnings.push(Warning(format!("{name}={text}: {what}")));
            (value, Origin::Environment)
        }
        Ok((value, Some(Note::OutOfRange))) => {
            let (valid, used) = (T::valid(spec), value.show());
            warnings.push(Warning(format!("{name}={text}: out of range, valid: {valid}; {used} is used")));
            (value, Origin::Corrected)
        }
        Err(what) => {
            let valid = T::valid(spec);
            let shown = default.show();
            let used =
                if shown.is_empty() { "as if it were unset".to_owned() } else { format!("the default, {shown}") };
            warnings.push(Warning(format!("{name}={text}: {what}, valid: {valid}; used: {used}")));
            (default, Origin::Corrected)
        }
    }
}

/// What a value may be.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Spec {
    /// Nothing but what the type says.
    Any,
    /// An integer range; outside it the nearest end is used.
    Range(i64, i64),
    /// A range in which 0 stands for "for ever" and is told.
    RangeOrForever(i64, i64),
}
use Spec::{Any, Range, RangeOrForever};

settings! {
    nccl_net: Option<String> = None, "NCCL_NET", Any, "NCCL's own: the network to use, RDMA for this plugin; without a device of that network the job stops instead of falling back";
    nccl_debug: Option<String> = None, "NCCL_DEBUG", Any, "NCCL's own: what it prints: WARN, INFO or TRACE; unset: not even a WARN";
    ib_disable: bool = false, "NCCL_IB_DISABLE", Any, "1: report no devices, NCCL goes on to its next transport; with NCCL_NET=RDMA the job stops";
    ib_hca: Option<String> = None, "NCCL_IB_HCA", Any, "devices to use: [^][=]name[:port[:rail[:plane]]],...; ^ excludes, = is exact, else names are prefixes";
    ib_gid_index: Option<u8> = None, "NCCL_IB_GID_INDEX", Range(-1, 255), "RoCE: index in the GID table; -1: chosen automatically";
    ib_roce_version: RoceVersion = RoceVersion::V2, "NCCL_IB_ROCE_VERSION_NUM", Any, "RoCE version of the GID that is chosen automatically: 1 or 2";
    ib_addr_family: AddrFamily = AddrFamily::V4, "NCCL_IB_ADDR_FAMILY", Any, "address family of the GID that is chosen automatically: AF_INET or AF_INET6";
    ib_addr_range: Option<IpNet> = None, "NCCL_IB_ADDR_RANGE", Any, "CIDR range that the GID chosen automatically must lie in";
    ib_timeout: u8 = 20, "NCCL_IB_TIMEOUT", RangeOrForever(1, 31), "wait for an acknowledgement: 4.096 us x 2^n";
    ib_retry_cnt: u8 = 7, "NCCL_IB_RETRY_CNT", Range(0, 7), "times that the NIC sends again before it gives up";
    ib_tc: Option<u8> = None, "NCCL_IB_TC", Range(-1, 255), "traffic class of data (RoCE: DSCP in the upper 6 bits); -1: what the communicator asks for with RoCE, else 0";
    ib_fifo_tc: Option<u8> = None, "NCCL_IB_FIFO_TC", Range(-1, 255), "traffic class of what goes from receiver to sender; -1: as NCCL_IB_TC";
    ib_sl: Option<u8> = None, "NCCL_IB_SL", Range(-1, 15), "service level; -1: what the communicator asks for with InfiniBand, else 0";
    ib_pkey: u16 = 0, "NCCL_IB_PKEY", Range(0, 65535), "index in the P_Key table";
    ib_qps_per_connection: usize = 1, "NCCL_IB_QPS_PER_CONNECTION", Range(1, 16), "QPs on each rail of a connection";
    ib_split_data_on_qps: bool = false, "NCCL_IB_SPLIT_DATA_ON_QPS", Any, "1: cut large messages over all QPs of a rail; 0: QPs take turns";
    ib_pci_relaxed_ordering: u8 = 2, "NCCL_IB_PCI_RELAXED_ORDERING", Range(0, 2), "PCIe relaxed ordering for bulk data: 0 off, 1 and 2 on where libibverbs can";
    ib_merge_vfs: bool = true, "NCCL_IB_MERGE_VFS", Any, "1: virtual functions of one card look like one NIC to NCCL";
    ib_merge_nics: bool = true, "NCCL_IB_MERGE_NICS", Any, "1: NCCL may fuse NICs into one (NCCL_NET_MERGE_LEVEL, NCCL_NET_FORCE_MERGE; from NCCL 2.24 on); 0: it may not, and NCCL 2.24 and 2.25 end the job where they try (NCCL_NET_MERGE_LEVEL=LOC: none tries)";
    ib_mqp_retry_all: bool = false, "NCCL_IB_MQP_RETRY_ALL", Any, "1: try a refused ibv_modify_qp again whatever the error; 0: only on ETIMEDOUT";
    ib_mqp_retry_cnt: u32 = 34, "NCCL_IB_MQP_RETRY_CNT", Range(0, 1_000_000), "times that a refused ibv_modify_qp is tried again";
    ib_mqp_retry_sleep_msec: u64 = 100, "NCCL_IB_MQP_RETRY_SLEEP_MSEC", Range(0, 3_600_000), "ms between these tries, times the number of the try";
    ib_device_pci_order: bool = true, "NCCL_IB_DEVICE_PCI_ORDER", Any, "1: devices in order of PCI address; 0: in the order of libibverbs";
    ib_return_async_events: bool = true, "NCCL_IB_RETURN_ASYNC_EVENTS", Any, "1: fatal device events end the connections that they concern; 0: they are only logged";
    ibverbs_lib: Option<PathBuf> = None, "NCCL_IBVERBS_LIB", Any, "libibverbs to load, before the usual names";
    socket_ifname: Option<String> = None, "NCCL_SOCKET_IFNAME", Any, "interfaces for connection set-up: [^][=]name,... or an IP address";
    socket_family: Option<AddrFamily> = None, "NCCL_SOCKET_FAMILY", Any, "address family for connection set-up: AF_INET or AF_INET6";
    comm_id: Option<String> = None, "NCCL_COMM_ID", Any, "address of NCCL's root; a hint which subnet connection set-up should use";
    rails: Option<String> = None, "NCCL_NET_RDMA_RAILS", Any, "groups of ports that one connection uses together: a+b,c:1+d:1";
    strict: bool = false, "NCCL_NET_RDMA_STRICT", Any, "1: without a usable device the job stops instead of falling back, and a way to GPU memory that is closed or refused is an error";
    port_range: Option<RangeInclusive<u16>> = None, "NCCL_NET_RDMA_PORT_RANGE", Any, "TCP ports for connection set-up: first-last; unset: any";
    connect_timeout: Duration = Duration::from_secs(300), "NCCL_NET_RDMA_CONNECT_TIMEOUT", Range(1, 86_400), "seconds that connection set-up may take; a peer that can't be reached at all is given up after 60";
    keepalive_interval: u32 = 5000, "NCCL_NET_RDMA_KEEPALIVE_INTERVAL", Range(0, 3_600_000), "ms after which a side of a connection that had nothing to say sends a keep-alive over TCP, at most a third of the timeout; both sides keep the longer of their values; 0 on either: none";
    keepalive_timeout: u32 = 20_000, "NCCL_NET_RDMA_KEEPALIVE_TIMEOUT", Range(0, 86_400_000), "ms without a sign of life after which the peer counts as dead, also when its process is merely stopped (a debugger, SIGSTOP); both sides keep the longer of their values; 0 on either: never";
    stall_timeout: Option<u32> = None, "NCCL_NET_RDMA_STALL_TIMEOUT", Range(-1, 86_400_000), "ms that the peer's NIC may leave all of a connection's outstanding work requests unacknowledged, while NCCL polls, before the connection ends with an error; -1: four times what NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT tell the NIC to wait, as late as it may be, and 10 s more (147 s), never if NCCL_IB_TIMEOUT is 0; 0: never";
    split_threshold: u64 = 16384, "NCCL_NET_RDMA_SPLIT_THRESHOLD", Range(0, 1 << 30), "bytes up to which a message goes over one QP";
    peermem: PeerMemory = PeerMemory::Auto, "NCCL_NET_RDMA_PEERMEM", Any, "GPU memory by nvidia_peermem: auto: where /sys/kernel/mm/memory_peers has it; on: although that is hidden (a container, a software adapter); off";
    gpu_path: GpuPath = GpuPath::Auto, "NCCL_NET_RDMA_GPU_PATH", Any, "the way of GPU data: auto: the best there is, see NCCL_NET_RDMA_PROFILE; gdr: the NIC reads and writes GPU memory (GPUDirect RDMA); staging: the plugin copies through pinned host memory; host: NCCL's kernels write to and read from host memory";
    profile: Option<PathBuf> = None, "NCCL_NET_RDMA_PROFILE", Any, "file of `nccl-rdma bench paths`: what was measured for each path on this machine; auto follows it";
    staging_chunk: u64 = 512 << 10, "NCCL_NET_RDMA_STAGING_CHUNK", Range(128, 1 << 30), "bytes that staging copies, and sends, at a time; a message has at most 16 such parts, so a large one has larger ones";
    staging_max: u64 = 1 << 30, "NCCL_NET_RDMA_STAGING_MAX", Range(1, 0xffff_ffff), "bytes that one registration of GPU memory may have to be staged: as much host memory is pinned. NCCL does without registration of larger user buffers; its own pool has up to 512 MiB (64 channels of 16 buffers of 512 KiB)";
    staging_total: u64 = 8 << 30, "NCCL_NET_RDMA_STAGING_TOTAL", Range(1, 1 << 50), "bytes of GPU memory that a process may have staged at once: as much host memory is pinned, once for all connections that register the same address and length";
    gdr_level: Option<String> = None, "NCCL_NET_GDR_LEVEL", Any, "NCCL's own: how far apart a NIC and a GPU may be for it to give the NIC GPU memory; the plugin only warns where that contradicts NCCL_NET_RDMA_GPU_PATH";
    gdr_flush_disable: bool = false, "NCCL_GDR_FLUSH_DISABLE", Any, "1: GPU memory is not flushed after a receive";
    tells_flags: bool = true, "NCCL_NET_OPTIONAL_RECV_COMPLETION", Any, "NCCL's own, ABI v9 and newer: whether it says which receives need no completion (LL and LL128); staging takes that";
    recv_hint: bool = true, "NCCL_NET_RDMA_RECV_HINT", Any, "0: receives for which NCCL needs no completion (LL and LL128, ABI v9 and newer) complete all the same; either side of a connection can say so";
    force_flush: bool = false, "NCCL_NET_RDMA_FORCE_FLUSH", Any, "1: flush received data whatever the memory, unless NCCL_GDR_FLUSH_DISABLE; for tests";
    sysroot: PathBuf = PathBuf::from("/"), "NCCL_NET_RDMA_SYSROOT", Any, "where /sys and /proc are looked for; for tests";
}

impl Config {
    /// NCCL may use this network only, as it is told here.
    pub fn insists_on(&self, network: &str) -> Option<&str> {
        self.nccl_net.as_deref().filter(|wanted| wanted.eq_ignore_ascii_case(network))
    }

    /// What NCCL does where it gets no device of a network, for people.
    pub fn without_devices(&self, network: &str) -> String {
        match self.insists_on(network) {
            Some(wanted) => format!("NCCL_NET={wanted} is set: NCCL stops"),
            None => "NCCL goes on to its next transport".to_owned(),
        }
    }
}

/// Names that have no effect on this plugin though people set them, and what to know or to use instead.
const INSTEAD: &[(&str, &str)] = &[
    ("NCCL_IB_CUDA_SUPPORT", "NCCL_NET_GDR_LEVEL decides on GPUDirect"),
    ("NCCL_IB_GDR_LEVEL", "it is called NCCL_NET_GDR_LEVEL now"),
    ("NCCL_IB_IS_GLOBAL", "a GRH is used where the port or the subnets ask for it"),
    ("NCCL_SOCKET_RETRY_CNT", "NCCL_NET_RDMA_CONNECT_TIMEOUT bounds connection set-up"),
    ("NCCL_SOCKET_RETRY_SLEEP_MSEC", "NCCL_NET_RDMA_CONNECT_TIMEOUT bounds connection set-up"),
];

/// Tells, once a name, what is set in vain: NCCL's names for its own InfiniBand transport, and misspelt ones of ours.
fn not_honoured(names: impl Iterator<Item = String>, warnings: &mut Vec<Warning>) {
    for name in names.collect::<BTreeSet<_>>() {
        if let Some((_, instead)) = INSTEAD.iter().find(|(n, _)| *n == name) {
            warnings.push(Warning(format!("{name} is set and has no effect on this plugin: {instead}")));
        } else if name.starts_with("NCCL_NET_RDMA_") && !NAMES.contains(&name.as_str()) {
            let ours = NAMES.iter().copied().filter(|n| n.starts_with("NCCL_NET_RDMA_")).collect::<Vec<_>>().join(", ");
            warnings.push(Warning(format!("{name} is set and is no setting of this plugin; there are {ours}")));
        } else if name.starts_with("NCCL_IB_") && !NAMES.contains(&name.as_str()) {
            warnings.push(Warning(format!("{name} is set and not honoured by this version of the plugin")));
        }
    }
}

impl Config {
    /// Reads the settings from the process's environment. NCCL has put those of its configuration files there.
    pub fn from_process() -> (Self, Vec<Warning>) {
        let text = |s: &OsStr| s.to_string_lossy().into_owned();
        Self::load(&|name| std::env::var_os(name).map(|v| text(&v)), std::env::vars_os().map(|(n, _)| text(&n)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn load(set: &[(&str, &str)]) -> (Config, Vec<String>) {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        let (config, warnings) = Config::load(&find, set.iter().map(|(n, _)| (*n).to_owned()));
        (config, warnings.into_iter().map(|w| w.0).collect())
    }

    #[test]
    fn defaults_without_warnings() {
        let (c, w) = load(&[]);
        assert!(w.is_empty(), "{w:?}");
        assert_eq!((c.ib_timeout, c.ib_retry_cnt, c.ib_qps_per_connection, c.split_threshold), (20, 7, 1, 16384));
        assert_eq!((c.ib_gid_index, c.ib_tc, c.ib_sl), (None, None, None));
        assert!(c.ib_merge_vfs && !c.ib_disable);
    }

    #[test]
    fn integers_as_strtoll_with_base_0() {
        let (c, w) = load(&[
            ("NCCL_IB_TC", "0x6a"),
            ("NCCL_IB_TIMEOUT", "022"),
            ("NCCL_IB_GID_INDEX", "-1"),
            ("NCCL_IB_SL", ""),
        ]);
        assert!(w.is_empty(), "{w:?}");
        assert_eq!((c.ib_tc, c.ib_timeout, c.ib_gid_index, c.ib_sl), (Some(106), 18, None, None));
    }

    /// N36: 5 and 3 bit fields; what is out of range must not be cut to them.
    #[test]
    fn values_out_of_range_are_told_and_clamped() {
        for (name, value, check) in [
            ("NCCL_IB_TIMEOUT", "60", (31, 7)),
            ("NCCL_IB_RETRY_CNT", "15", (20, 7)),
            ("NCCL_IB_TIMEOUT", "0", (0, 7)),
            ("NCCL_IB_TIMEOUT", "abc", (20, 7)),
            ("NCCL_IB_TIMEOUT", "18x", (20, 7)),
            ("NCCL_IB_TIMEOUT", "99999999999999999999", (20, 7)),
        ] {
            let (c, w) = load(&[(name, value)]);
            assert_eq!((c.ib_timeout, c.ib_retry_cnt), check, "{name}={value}");
            assert_eq!(w.len(), 1, "{name}={value}: {w:?}");
            assert!(w[0].starts_with(&format!("{name}={value}: ")), "{w:?}");
        }
    }

    /// A warning names the variable, its text, the valid values and the one in force.
    #[test]
    fn a_warning_says_what_is_valid_and_what_is_used() {
        let only = |name, value| load(&[(name, value)]).1.join("\n");
        assert_eq!(only("NCCL_IB_RETRY_CNT", "15"), "NCCL_IB_RETRY_CNT=15: out of range, valid: 0 to 7; 7 is used");
        assert_eq!(
            only("NCCL_IB_RETRY_CNT", "many"),
            "NCCL_IB_RETRY_CNT=many: not a whole number, valid: 0 to 7; used: the default, 7"
        );
        assert_eq!(
            only("NCCL_SOCKET_FAMILY", "v6"),
            "NCCL_SOCKET_FAMILY=v6: not a word that is known, valid: AF_INET or AF_INET6; used: as if it were unset"
        );
        assert!(only("NCCL_IB_TIMEOUT", "60").contains("1 to 31"));
        assert!(only("NCCL_IB_DISABLE", "yes").contains("valid: 0 or 1; used: the default, 0"));
    }

    #[test]
    fn without_devices_nccl_stops_if_it_is_told_to_use_no_other_network() {
        let then = |net| load(&[("NCCL_NET", net)]).0.without_devices("RDMA");
        assert_eq!(then("rdma"), "NCCL_NET=rdma is set: NCCL stops");
        assert_eq!([then(""), then("IB")], ["NCCL goes on to its next transport"; 2]);
    }

    /// 0 is what was asked for, so it is in force; what it means is told.
    #[test]
    fn a_timeout_of_0_is_taken_and_told() {
        let (c, w) = load(&[("NCCL_IB_TIMEOUT", "0")]);
        let shown = c.describe().into_iter().find(|s| s.name == "NCCL_IB_TIMEOUT").expect("there");
        assert_eq!((shown.value.as_str(), shown.origin), ("0", Origin::Environment));
        assert!(w.len() == 1 && w[0].contains("for ever"), "{w:?}");
    }

    #[test]
    fn words_and_ranges() {
        let (c, w) = load(&[
            ("NCCL_IB_ADDR_FAMILY", "AF_INET6"),
            ("NCCL_IB_ADDR_RANGE", "10.0.0.0/8"),
            ("NCCL_IB_ROCE_VERSION_NUM", "1"),
            ("NCCL_NET_RDMA_PORT_RANGE", "50000-50010"),
            ("NCCL_NET_RDMA_CONNECT_TIMEOUT", "5"),
            ("NCCL_NET_RDMA_PEERMEM", "on"),
        ]);
        assert!(w.is_empty(), "{w:?}");
        assert_eq!(c.peermem, PeerMemory::On);
        assert_eq!(c.ib_addr_family, AddrFamily::V6);
        assert_eq!(c.ib_addr_range.map(|r| r.to_string()).as_deref(), Some("10.0.0.0/8"));
        assert_eq!(c.ib_roce_version, RoceVersion::V1);
        assert_eq!(c.port_range, Some(50000..=50010));
        assert_eq!(c.connect_timeout, Duration::from_secs(5));
        for bad in [
            ("NCCL_IB_ADDR_FAMILY", "inet"),
            ("NCCL_IB_ADDR_RANGE", "10.0.0.0"),
            ("NCCL_IB_ADDR_RANGE", "10.0.0.0/33"),
            ("NCCL_NET_RDMA_PORT_RANGE", "9-5"),
            ("NCCL_IB_ROCE_VERSION_NUM", "3"),
            ("NCCL_NET_RDMA_PEERMEM", "1"),
        ] {
            assert_eq!(load(&[bad]).1.len(), 1, "{bad:?}");
        }
    }

    #[test]
    fn what_is_not_honoured_is_told_once() {
        let (_, w) = load(&[
            ("NCCL_IB_OOO_RQ", "1"),
            ("NCCL_IB_CUDA_SUPPORT", "1"),
            ("NCCL_IB_TIMEOUT", "22"),
            ("NCCL_DEBUG", "INFO"),
        ]);
        assert_eq!(w.len(), 2, "{w:?}");
        assert!(w.iter().any(|x| x.contains("NCCL_IB_OOO_RQ")));
        assert!(w.iter().any(|x| x.contains("NCCL_NET_GDR_LEVEL")));
        let (_, w) = load(&[("NCCL_NET_RDMA_RAIL", "a+b"), ("NCCL_SOCKET_RETRY_CNT", "5"), ("NCCL_IB_OOO_RQ", "")]);
        assert_eq!(w.len(), 2, "{w:?}");
        assert!(w[0].contains("NCCL_NET_RDMA_RAILS") && w[1].contains("NCCL_NET_RDMA_CONNECT_TIMEOUT"), "{w:?}");
        let twice = ["NCCL_IB_AR_THRESHOLD", "NCCL_IB_AR_THRESHOLD"].map(str::to_owned);
        assert_eq!(
            Config::load(&|_| Some("1".into()), twice.into_iter()).1.iter().filter(|w| w.0.contains("AR_T")).count(),
            1
        );
        assert!(load(&[("NCCL_IB_MERGE_NICS", "0")]).1.is_empty());
    }

    #[test]
    fn every_setting_can_be_shown() {
        let (c, _) = load(&[("NCCL_IB_TIMEOUT", "60")]);
        let shown = c.describe();
        assert_eq!(shown.len(), NAMES.len());
        let timeout = shown.iter().find(|s| s.name == "NCCL_IB_TIMEOUT").expect("there");
        assert_eq!((timeout.value.as_str(), timeout.origin), ("31", Origin::Corrected));
        assert_eq!((timeout.default.as_str(), timeout.valid.as_str()), ("20", "1 to 31, or 0: for ever"));
        assert!(shown.iter().all(|s| !s.meaning.is_empty() && !s.valid.is_empty()));
    }

    /// What is shown can be put into the environment again, and means the same.
    #[test]
    fn what_is_shown_reads_back() {
        let set = [
            ("NCCL_IB_GID_INDEX", "0x3"),
            ("NCCL_IB_ADDR_RANGE", "fd00::/8"),
            ("NCCL_IB_ADDR_FAMILY", "AF_INET6"),
            ("NCCL_NET_RDMA_PORT_RANGE", "50000-50010"),
            ("NCCL_NET_RDMA_CONNECT_TIMEOUT", "5"),
            ("NCCL_IB_MERGE_VFS", "0"),
        ];
        let shown = load(&set).0.describe();
        let again: Vec<(&str, &str)> = shown.iter().map(|s| (s.name, s.value.as_str())).collect();
        let (config, warnings) = load(&again);
        assert!(warnings.is_empty(), "{warnings:?}");
        let values = |d: &[Setting]| d.iter().map(|s| s.value.clone()).collect::<Vec<_>>();
        assert_eq!(values(&config.describe()), values(&shown));
    }

    proptest! {
        #[test]
        fn no_text_panics(value in ".{0,40}") {
            for name in NAMES {
                let _ = load(&[(name, &value)]);
            }
        }
    }
}
