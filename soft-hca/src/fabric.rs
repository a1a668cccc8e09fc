//! The virtual fabric: which hosts there are, with which devices, ports and addresses. Read from a TOML file
//! (`SOFT_HCA_FABRIC`); without one, every host has one device `soft0`.
use serde::Deserialize;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::path::{Path, PathBuf};

/// Where the file is, and which host of it this process is on.
pub const FABRIC_VAR: &str = "SOFT_HCA_FABRIC";
pub const HOST_VAR: &str = "SOFT_HCA_HOST";
pub const ENGINE_VAR: &str = "SOFT_HCA_ENGINE";
pub const REGISTRY_VAR: &str = "SOFT_HCA_REGISTRY";

#[derive(Debug, thiserror::Error)]
pub enum FabricError {
    #[error("{FABRIC_VAR}={path}: {source}", path = .path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{FABRIC_VAR}={path}: {source}", path = .path.display())]
    Syntax { path: PathBuf, source: Box<toml::de::Error> },
    #[error("host \"{host}\", device \"{device}\": {key}: {reason}")]
    Value { host: String, device: String, key: String, reason: String },
    #[error("{named} is no host of the fabric file ({FABRIC_VAR}), which has {hosts}")]
    NoSuchHost { named: String, hosts: String },
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// A thread moves the data; peers in this process, in others, on other hosts.
    #[default]
    Thread,
    /// Everything happens inside `post_send`; both ends in one process and on one thread.
    Null,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fabric {
    #[serde(default)]
    pub engine: EngineKind,
    /// Directory in which the processes of this machine meet.
    pub registry: Option<PathBuf>,
    /// Size of the shared-memory ring of one direction of one pair of processes.
    pub ring_kib: Option<u32>,
    /// Of everything that is drawn at random.
    #[serde(default)]
    pub seed: u64,
    #[serde(default, rename = "host")]
    pub hosts: Vec<Host>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Host {
    pub name: String,
    /// "address:port" at which other hosts reach the first process of this one; the n-th listens n ports above.
    pub tcp: Option<std::net::SocketAddr>,
    #[serde(default, rename = "device")]
    pub devices: Vec<Device>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Device {
    pub name: String,
    pub pci_path: Option<String>,
    #[serde(default)]
    pub node_guid: u64,
    pub sys_image_guid: Option<u64>,
    #[serde(default = "vendor_id")]
    pub vendor_id: u32,
    #[serde(default = "vendor_part_id")]
    pub vendor_part_id: u32,
    #[serde(default = "max_qp")]
    pub max_qp: u32,
    #[serde(default = "max_qp_wr")]
    pub max_qp_wr: u32,
    #[serde(default = "max_mr")]
    pub max_mr: u32,
    #[serde(default = "max_msg_sz")]
    pub max_msg_sz: u32,
    #[serde(default = "max_inline")]
    pub max_inline: u32,
    /// Registering beyond this fails with ENOMEM, as a locked-memory limit makes it.
    pub max_pinned_bytes: Option<u64>,
    /// Addresses of GPU memory can be registered, as with nvidia-peermem.
    #[serde(default)]
    pub gpu_peermem: bool,
    /// GPU memory can be registered by its dma-buf.
    #[serde(default)]
    pub gpu_dmabuf: bool,
    /// For tests without a GPU: a memfd registered as a dma-buf is taken for GPU memory, copied by a thread.
    #[serde(default)]
    pub gpu_model: bool,
    /// Optional verbs that answer EOPNOTSUPP: "reg_dmabuf_mr", "query_port_speed".
    #[serde(default)]
    pub hide: Vec<String>,
    /// Opening the device fails with this, by name ("EPERM") or number.
    pub open_errno: Option<Errno>,
    #[serde(default, rename = "port")]
    pub ports: Vec<Port>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum LinkLayer {
    InfiniBand,
    Ethernet,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Port {
    pub link_layer: LinkLayer,
    /// "ACTIVE", "DOWN", "INIT", "ARMED".
    #[serde(default = "active")]
    pub state: PortState,
    /// The code of ibv_query_port; 5 is LinkUp, 3 Disabled, 2 Polling.
    pub phys_state: Option<u8>,
    #[serde(default)]
    pub lid: u16,
    #[serde(default)]
    pub sm_lid: u16,
    #[serde(default = "mtu")]
    pub active_mtu: u32,
    #[serde(default = "mtu")]
    pub max_mtu: u32,
    /// Reported speed in Gb/s, for which speed and width codes are found; or the codes themselves.
    pub rate_gbps: Option<u32>,
    pub speed: Option<u8>,
    pub width: Option<u8>,
    #[serde(default)]
    pub flags: u8,
    #[serde(default = "pkeys")]
    pub pkeys: Vec<u16>,
    #[serde(default)]
    pub gids: Vec<Gid>,
    /// Length of the GID table; by default up to the last entry.
    pub gid_tbl_len: Option<u8>,
    /// The port sends no faster than this many Gb/s. Default: as fast as it goes.
    pub rate: Option<f64>,
    /// Added to every message.
    #[serde(default)]
    pub latency_us: u32,
    /// And up to this, drawn anew for each by the fabric's seed. Order inside a queue pair stays.
    #[serde(default)]
    pub jitter_us: u32,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "UPPERCASE")]
pub enum PortState {
    Down = 1,
    Init = 2,
    Armed = 3,
    Active = 4,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Gid {
    pub index: u8,
    pub gid: Ipv6Addr,
    #[serde(rename = "type")]
    pub kind: GidKind,
    pub netdev: Option<String>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub enum GidKind {
    #[serde(rename = "IB")]
    Ib = 0,
    #[serde(rename = "RoCE v1")]
    RoceV1 = 1,
    #[serde(rename = "RoCE v2")]
    RoceV2 = 2,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum Errno {
    Number(i32),
    Name(String),
}

impl Errno {
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Number(number) => Some(*number),
            Self::Name(name) => errno_by_name(name),
        }
    }
}

pub(crate) fn errno_by_name(name: &str) -> Option<i32> {
    Some(match name {
        "EPERM" => libc::EPERM,
        "ENOENT" => libc::ENOENT,
        "EIO" => libc::EIO,
        "EAGAIN" => libc::EAGAIN,
        "ENOMEM" => libc::ENOMEM,
        "EACCES" => libc::EACCES,
        "EFAULT" => libc::EFAULT,
        "EBUSY" => libc::EBUSY,
        "ENODEV" => libc::ENODEV,
        "EINVAL" => libc::EINVAL,
        "ENOSYS" => libc::ENOSYS,
        "EOPNOTSUPP" => libc::EOPNOTSUPP,
        "ENETUNREACH" => libc::ENETUNREACH,
        "ETIMEDOUT" => libc::ETIMEDOUT,
        "EHOSTUNREACH" => libc::EHOSTUNREACH,
        other => other.parse().ok()?,
    })
}

fn vendor_id() -> u32 {
    0x50f7
}
fn vendor_part_id() -> u32 {
    1
}
fn max_qp() -> u32 {
    4096
}
fn max_qp_wr() -> u32 {
    16384
}
fn max_mr() -> u32 {
    8192
}
fn max_msg_sz() -> u32 {
    1 << 30
}
fn max_inline() -> u32 {
    256
}
fn active() -> PortState {
    PortState::Active
}
fn mtu() -> u32 {
    4096
}
fn pkeys() -> Vec<u16> {
    vec![0xffff]
}

impl Fabric {
    /// What the environment says. The host's index is None where the file does not name this process's host.
    pub fn from_env() -> Result<(Self, usize), FabricError> {
        let host = std::env::var(HOST_VAR).ok();
        let mut fabric = match std::env::var_os(FABRIC_VAR) {
            Some(path) => Self::read(Path::new(&path))?,
            None => Self::default_for(host.as_deref().unwrap_or("localhost")),
        };
        if let Some(registry) = std::env::var_os(REGISTRY_VAR) {
            fabric.registry = Some(registry.into());
        }
        match std::env::var(ENGINE_VAR).as_deref() {
            Ok("null") => fabric.engine = EngineKind::Null,
            Ok("thread") => fabric.engine = EngineKind::Thread,
            _ => {}
        }
        let index = fabric.find_host(host)?;
        Ok((fabric, index))
    }

    /// The host by name; unnamed, the file's only one or the one with this machine's name.
    fn find_host(&self, host: Option<String>) -> Result<usize, FabricError> {
        let (name, named) = match host {
            None if self.hosts.len() == 1 => return Ok(0),
            None => {
                let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default().trim().to_owned();
                let named = format!("{name}, this machine's name ({HOST_VAR} is not set),");
                (name, named)
            }
            Some(name) => {
                let named = format!("{HOST_VAR}={name}");
                (name, named)
            }
        };
        self.hosts.iter().position(|host| host.name == name).ok_or_else(|| {
            let hosts: Vec<_> = self.hosts.iter().map(|host| host.name.as_str()).collect();
            FabricError::NoSuchHost { named, hosts: hosts.join(", ") }
        })
    }

    pub fn read(path: &Path) -> Result<Self, FabricError> {
        let text = std::fs::read_to_string(path).map_err(|source| FabricError::Read { path: path.into(), source })?;
        Self::parse(&text, path)
    }

    /// `path` is for the message only.
    pub fn parse(text: &str, path: &Path) -> Result<Self, FabricError> {
        let fabric: Self = toml::from_str(text)
            .map_err(|source| FabricError::Syntax { path: path.into(), source: Box::new(source) })?;
        fabric.check()?;
        Ok(fabric)
    }

    /// One RoCE device on one port, its addresses derived from the host's name.
    pub fn default_for(host: &str) -> Self {
        // FNV-1a: the same on every machine and in every build.
        let hash = host.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let [a, b, c, d, e, f, g, h] = hash.to_be_bytes();
        let ip = Ipv4Addr::new(10, f, g, h);
        let mut eui = [0u8; 16];
        eui[..2].copy_from_slice(&[0xfe, 0x80]);
        eui[8..].copy_from_slice(&[a | 2, b, c, 0xff, 0xfe, d, e, f ^ h]);
        let gid = |index, gid, kind| Gid { index, gid, kind, netdev: None };
        let (local, mapped) = (Ipv6Addr::from(eui), ip.to_ipv6_mapped());
        let port = Port {
            link_layer: LinkLayer::Ethernet,
            state: PortState::Active,
            phys_state: None,
            lid: 0,
            sm_lid: 0,
            active_mtu: 4096,
            max_mtu: 4096,
            rate_gbps: Some(100),
            speed: None,
            width: None,
            flags: 0,
            pkeys: pkeys(),
            gids: vec![
                gid(0, local, GidKind::RoceV1),
                gid(1, local, GidKind::RoceV2),
                gid(2, mapped, GidKind::RoceV1),
                gid(3, mapped, GidKind::RoceV2),
            ],
            gid_tbl_len: None,
            rate: None,
            latency_us: 0,
            jitter_us: 0,
        };
        let device = Device {
            name: "soft0".into(),
            pci_path: None,
            node_guid: hash,
            sys_image_guid: None,
            vendor_id: vendor_id(),
            vendor_part_id: vendor_part_id(),
            max_qp: max_qp(),
            max_qp_wr: max_qp_wr(),
            max_mr: max_mr(),
            max_msg_sz: max_msg_sz(),
            max_inline: max_inline(),
            max_pinned_bytes: None,
            gpu_peermem: false,
            gpu_dmabuf: false,
            gpu_model: false,
            hide: Vec::new(),
            open_errno: None,
            ports: vec![port],
        };
        Self { hosts: vec![Host { name: host.into(), tcp: None, devices: vec![device] }], ..Self::default() }
    }

    fn check(&self) -> Result<(), FabricError> {
        for (host, device) in self.hosts.iter().flat_map(|host| host.devices.iter().map(move |d| (host, d))) {
            let wrong = |key: &str, reason: String| FabricError::Value {
                host: host.name.clone(),
                device: device.name.clone(),
                key: key.to_owned(),
                reason,
            };
            if device.name.is_empty() || device.name.len() > 63 {
                return Err(wrong("name", "1 to 63 bytes".into()));
            }
            if device.ports.is_empty() || device.ports.len() > 8 {
                return Err(wrong("port", format!("1 to 8 ports, found {}", device.ports.len())));
            }
            if !(64..=256).contains(&device.max_inline) {
                return Err(wrong("max_inline", format!("64 to 256, found {}", device.max_inline)));
            }
            if device.max_qp_wr == 0 || device.max_qp_wr > 1 << 20 {
                return Err(wrong("max_qp_wr", format!("1 to 1048576, found {}", device.max_qp_wr)));
            }
            if let Some(errno) = device.open_errno.as_ref().filter(|errno| errno.code().is_none()) {
                return Err(wrong("open_errno", format!("{errno:?} is no errno")));
            }
            for port in &device.ports {
                for (key, value) in [("active_mtu", port.active_mtu), ("max_mtu", port.max_mtu)] {
                    if mtu_code(value).is_none() {
                        return Err(wrong(key, format!("256, 512, 1024, 2048 or 4096, found {value}")));
                    }
                }
                if let Some(rate) = port.rate_gbps.filter(|&rate| speed_codes(rate).is_none()) {
                    return Err(wrong("rate_gbps", format!("no speed and width make {rate} Gb/s")));
                }
                if port.rate.is_some_and(|rate| rate.is_nan() || rate <= 0.0) {
                    return Err(wrong("rate", "above 0 Gb/s".into()));
                }
                for gid in &port.gids {
                    if port.gid_tbl_len.is_some_and(|len| gid.index >= len) {
                        return Err(wrong("gids.index", format!("{} is outside gid_tbl_len", gid.index)));
                    }
                    if (port.link_layer == LinkLayer::InfiniBand) != (gid.kind == GidKind::Ib) {
                        return Err(wrong("gids.type", format!("{:?} on {:?}", gid.kind, port.link_layer)));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Port {
    pub fn gid_table_len(&self) -> u8 {
        self.gid_tbl_len.unwrap_or_else(|| self.gids.iter().map(|gid| gid.index.saturating_add(1)).max().unwrap_or(0))
    }

    /// `active_speed` and `active_width` of ibv_query_port.
    pub fn codes(&self) -> (u8, u8) {
        let (speed, width) = speed_codes(self.rate_gbps.unwrap_or(100)).unwrap_or((32, 2));
        (self.speed.unwrap_or(speed), self.width.unwrap_or(width))
    }
}

/// The code of `enum ibv_mtu`.
pub(crate) fn mtu_code(bytes: u32) -> Option<u32> {
    (1..=5).find(|code| 128 << code == bytes)
}

/// Speed and width codes for a rate in Gb/s, the usual four lanes first.
fn speed_codes(gbps: u32) -> Option<(u8, u8)> {
    // In units of 0.5 Gb/s a lane: SDR 2.5, DDR 5, QDR 10, FDR 14, EDR 25, HDR 50, NDR 100 (XDR has no code in a byte).
    const SPEEDS: [(u8, u32); 7] = [(32, 50), (64, 100), (128, 200), (4, 20), (16, 28), (2, 10), (1, 5)];
    const WIDTHS: [(u8, u32); 5] = [(2, 4), (1, 1), (16, 2), (4, 8), (8, 12)];
    WIDTHS.iter().find_map(|&(width, lanes)| {
        SPEEDS.iter().find(|&&(_, halves)| halves * lanes == gbps * 2).map(|&(speed, _)| (speed, width))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Fabric, String> {
        Fabric::parse(text, Path::new("test.toml")).map_err(|e| e.to_string())
    }

    #[test]
    fn the_examples_are_right() {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples");
        let mut seen = 0;
        for entry in std::fs::read_dir(examples).unwrap() {
            let path = entry.unwrap().path();
            let fabric = Fabric::read(&path).unwrap();
            assert!(!fabric.hosts.is_empty() && fabric.hosts.iter().all(|host| !host.devices.is_empty()), "{path:?}");
            seen += 1;
        }
        assert!(seen >= 2);
    }

    #[test]
    fn mistakes_are_named() {
        let error = parse("[[host]]\nname = \"a\"\n[[host.device]]\nname = \"x\"\nmax_qq = 3").unwrap_err();
        assert!(error.contains("max_qq") && error.contains("test.toml"), "{error}");
        let device = "[[host]]\nname = \"a\"\n[[host.device]]\nname = \"x\"\n";
        let port = "[[host.device.port]]\nlink_layer = \"Ethernet\"\n";
        for (text, key) in [
            (format!("{device}max_inline = 9\n{port}"), "max_inline"),
            (format!("{device}{port}active_mtu = 1500"), "active_mtu"),
            (format!("{device}{port}rate_gbps = 33"), "rate_gbps"),
            (format!("{device}open_errno = \"EWHAT\"\n{port}"), "open_errno"),
            (format!("{device}{port}gids = [{{index = 0, gid = \"fe80::1\", type = \"IB\"}}]"), "gids.type"),
            (device.to_owned(), "port"),
        ] {
            let error = parse(&text).unwrap_err();
            assert!(error.contains(key) && error.contains("\"x\""), "{error}");
        }
    }

    #[test]
    fn hosts_are_found_by_name() {
        let two = parse("[[host]]\nname = \"a\"\n[[host]]\nname = \"b\"").unwrap();
        assert_eq!(two.find_host(Some("b".into())).unwrap(), 1);
        let unknown = two.find_host(Some("c".into())).unwrap_err().to_string();
        assert!(unknown.contains("SOFT_HCA_HOST=c") && unknown.contains("a, b"), "{unknown}");
        let unnamed = two.find_host(None).unwrap_err().to_string();
        assert!(unnamed.contains("this machine's name") && unnamed.contains("a, b"), "{unnamed}");
        assert_eq!(Fabric::default_for("x").find_host(None).unwrap(), 0);
    }

    #[test]
    fn rates_have_codes() {
        assert_eq!(speed_codes(100), Some((32, 2)));
        assert_eq!(speed_codes(400), Some((128, 2)));
        assert_eq!(speed_codes(56), Some((16, 2)));
        assert_eq!(speed_codes(25), Some((32, 1)));
        assert_eq!(mtu_code(4096), Some(5));
        assert_eq!(mtu_code(1500), None);
    }

    #[test]
    fn default_hosts_differ_in_every_address() {
        let (a, b) = (Fabric::default_for("a"), Fabric::default_for("b"));
        for (x, y) in a.hosts[0].devices[0].ports[0].gids.iter().zip(&b.hosts[0].devices[0].ports[0].gids) {
            assert_ne!(x.gid, y.gid);
        }
    }
}
