//! How NCCL is told which network to use and how GPU data reach it, and how its own log proves that it obeyed.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use crate::adapter::Adapter;

/// Where the data are while the network reads or writes them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub(crate) enum GpuPath {
    /// In host memory: NCCL copies
    Host,
    /// In GPU memory, registered by way of a dma-buf
    Dmabuf,
    /// In GPU memory, registered by its address (nvidia_peermem)
    Peermem,
    /// In GPU memory as far as NCCL knows: the plugin copies through host memory
    Staging,
    /// Ranks take turns: even ones staging, odd ones dmabuf
    Mix,
    /// Ranks take turns: even ones staging, odd ones host
    MixHost,
    /// Wherever NCCL likes
    Auto,
}

impl GpuPath {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Dmabuf => "dmabuf",
            Self::Peermem => "peermem",
            Self::Staging => "staging",
            Self::Mix => "mix",
            Self::MixHost => "mix-host",
            Self::Auto => "auto",
        }
    }

    /// The path of one rank.
    fn of(self, rank: usize) -> Self {
        match self {
            Self::Mix | Self::MixHost if rank.is_multiple_of(2) => Self::Staging,
            Self::Mix => Self::Dmabuf,
            Self::MixHost => Self::Host,
            path => path,
        }
    }

    /// NCCL hands GPU memory to the network, in every rank.
    fn is_gpu_memory(self) -> bool {
        matches!(self, Self::Dmabuf | Self::Peermem | Self::Staging | Self::Mix)
    }

    /// Only the plugin has it.
    fn is_staged(self) -> bool {
        matches!(self, Self::Staging | Self::Mix | Self::MixHost)
    }
}

/// Which files serve.
#[derive(Clone, Debug)]
pub(crate) struct Libraries {
    pub(crate) plugin: PathBuf,
    pub(crate) adapter: Adapter,
}

/// Which ranks are one host to NCCL, and which GPU each has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Placement {
    pub(crate) per_host: usize,
    /// GPUs of each host.
    pub(crate) gpus: usize,
    /// What NCCL is told of where GPUs and NICs are.
    pub(crate) topology: Option<PathBuf>,
    /// Whether ranks must send through the GPU of another (PXN); None: as NCCL likes.
    pub(crate) pxn: Option<bool>,
    /// NICs of which NCCL must have made one, and use it; 0: it may do as it likes.
    pub(crate) fused: usize,
}

impl Default for Placement {
    fn default() -> Self {
        Self { per_host: 1, gpus: 1, topology: None, pxn: None, fused: 0 }
    }
}

impl Placement {
    /// The GPU of a rank, counted from the first.
    pub(crate) fn gpu(&self, rank: usize) -> usize {
        rank % self.per_host % self.gpus
    }

    /// A topology of one PCIe switch for each GPU, with the NICs of the same place (`a+b` are two) behind it.
    pub(crate) fn topology(gpus: &[String], nics: &[String]) -> String {
        let link = "link_speed=\"32.0 GT/s PCIe\" link_width=\"16\"";
        let mut text = String::from(
            "<system version=\"1\">\n  <cpu numaid=\"0\" arch=\"x86_64\" vendor=\"GenuineIntel\" familyid=\"6\" modelid=\"207\">\n",
        );
        for (i, gpu) in gpus.iter().enumerate() {
            // Domain ffff is no machine's.
            text += &format!("    <pci busid=\"ffff:{i:02x}:00.0\" class=\"0x060400\" {link}>\n");
            text += &format!("      <pci busid=\"{gpu}\" class=\"0x030200\" {link}/>\n");
            for (k, nic) in nics.get(i).iter().flat_map(|nics| nics.split('+')).enumerate() {
                text += &format!("      <pci busid=\"ffff:{i:02x}:{:02x}.0\" class=\"0x020000\" {link}>\n", k + 1);
                text += &format!("        <nic><net name=\"{nic}\"/></nic>\n      </pci>\n");
            }
            text += "    </pci>\n";
        }
        text + "  </cpu>\n</system>\n"
    }

    /// Judges the logs of all ranks: whether some send through another's GPU, and receives come in groups then.
    pub(crate) fn proven(&self, logs: &[String]) -> anyhow::Result<()> {
        if self.fused > 0 {
            logs.iter().try_for_each(|log| uses_fused(log, self.fused))?;
        }
        let Some(wanted) = self.pxn else { return Ok(()) };
        let channels = logs.iter().flat_map(|log| log.lines()).filter_map(|line| Some(line.split_once(" via NET/")?.1));
        // The number of the device, and in brackets the rank whose GPU it is reached through.
        let through = channels.filter(|c| c.split('/').nth(1).is_some_and(|device| device.contains('('))).count();
        ensure!(wanted == (through > 0), "{through} channels go through another rank's GPU (PXN)");
        let mark = " buffers received, up to ";
        let most = logs
            .iter()
            .flat_map(|log| log.lines())
            .filter_map(|line| line.split_once(mark)?.1.split_once(' ')?.0.parse::<usize>().ok());
        let most = most.max();
        ensure!(!wanted || most > Some(1), "receives of {most:?} buffers at most; groups belong to PXN");
        Ok(())
    }
}

/// All channels must go through the one device that NCCL fused of so many NICs.
fn uses_fused(log: &str, nics: usize) -> anyhow::Result<()> {
    let made = log.lines().find_map(|line| {
        let (before, after) = line.split_once(", fused: ")?;
        Some((before.rsplit_once("device ")?.1, after.split(' ').next()?))
    });
    let (fused, name) = made.context("no line says 'device N, fused': NCCL has fused nothing")?;
    ensure!(name.split('+').count() == nics, "NCCL has fused {name}, not {nics} NICs");
    let mut channels = log.lines().filter_map(|line| line.split_once(" via NET/")?.1.split('/').nth(1));
    let other = channels.find(|device| device.split('(').next() != Some(fused));
    other.map_or(Ok(()), |device| bail!("a channel goes through device {device}, not {fused}, which is the fused one"))
}

impl fmt::Display for Placement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.per_host > 1 {
            write!(f, ", {} a host on {} GPU(s)", self.per_host, self.gpus)?;
        }
        if self.fused > 0 {
            write!(f, ", {} fused NICs", self.fused)?;
        }
        match self.pxn {
            Some(true) => f.write_str(", PXN"),
            Some(false) => f.write_str(", no PXN"),
            None => Ok(()),
        }
    }
}

/// One way to run NCCL.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Setting {
    /// `RDMA` is the plugin, `IB` and `Socket` are NCCL's own.
    pub(crate) net: String,
    pub(crate) path: GpuPath,
    /// Makes NCCL flush also on GPUs that need none.
    pub(crate) flush: bool,
    /// The user's buffers are registered with the communicator (ncclCommRegister).
    pub(crate) register: bool,
    /// Operations are also captured in a CUDA graph and replayed.
    pub(crate) graph: bool,
    pub(crate) ranks: usize,
    pub(crate) placement: Placement,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let flush = if self.flush { ", flushes forced" } else { "" };
        let register = if self.register { ", registered buffers" } else { "" };
        let graph = if self.graph { ", graph replayed" } else { "" };
        let (net, path, ranks) = (&self.net, self.path.name(), self.ranks);
        write!(f, "{net}, path {path}{flush}{register}{graph}, {ranks} ranks{}", self.placement)
    }
}

/// In the plugin's line about the first GPU memory of a connection: which way it goes.
const STAGED: &str = ": staging; ";
const BY_DMABUF: &str = ": GPUDirect by dma-buf; ";
const BY_ADDRESS: &str = ": GPUDirect by nvidia_peermem; ";
/// In its line about memory, of any connection, that could not go the way that was chosen.
const FELL_BACK: (&str, &str) = ("GPU memory goes by ", " instead");
/// In NCCL's line about a user's buffer that the network knows, and about one that it does not.
const REGISTERED: &str = " - NET register userbuff";
const NOT_REGISTERED: &str = " failed to NET register";

/// Files by which NCCL's own transport knows a peer memory driver.
const PEER_MEMORY: [&str; 3] = [
    "/sys/kernel/mm/memory_peers/nv_mem/version",
    "/sys/kernel/mm/memory_peers/nv_mem_nc/version",
    "/sys/module/nvidia_peermem/version",
];

/// Whether NCCL is of this minor version of 2, or newer.
fn is_from(version: &str, minor: u32) -> bool {
    let mut numbers = version.split('.').map(|number| number.parse::<u32>().unwrap_or(0));
    (numbers.next(), numbers.next()) >= (Some(2), Some(minor))
}

/// From 2.30 on NCCL takes what a NIC can do from the first of its own parts and the plugin that knows one of that name.
fn decides_itself(version: &str) -> bool {
    is_from(version, 30)
}

/// Most NICs that NCCL makes one of: from version 12 of the plugin interface 8, from version 9 on 4.
fn most_fused(version: &str) -> usize {
    match version {
        v if is_from(v, 30) => 8,
        v if is_from(v, 24) => 4,
        _ => 1,
    }
}

impl Setting {
    fn is_net(&self, name: &str) -> bool {
        self.net.eq_ignore_ascii_case(name)
    }

    fn is_builtin(&self) -> bool {
        self.is_net("IB") || self.is_net("Socket")
    }

    /// Why NCCL of this version cannot do this at all.
    pub(crate) fn impossible(&self, version: &str) -> Option<String> {
        if self.is_net("Socket") && self.path.is_gpu_memory() {
            return Some("NCCL's Socket transport takes host memory only".to_owned());
        }
        if self.is_net("IB") && self.path == GpuPath::Peermem && !PEER_MEMORY.iter().any(|f| Path::new(f).exists()) {
            let files = PEER_MEMORY.join(", ");
            return Some(format!("NCCL's IB transport offers it only where one of {files} exists, and none does"));
        }
        if self.path == GpuPath::Peermem
            && decides_itself(version)
            && !PEER_MEMORY.iter().any(|f| Path::new(f).exists())
        {
            return Some(format!(
                "NCCL {version} goes by its own IB transport (for RMA) in what a device of this name can do, and that finds no \
                 peer memory driver"
            ));
        }
        if self.placement.fused > most_fused(version) {
            return Some(format!("NCCL {version} makes one NIC of {} at most", most_fused(version)));
        }
        if self.is_builtin() && self.path.is_staged() {
            return Some(format!("only the plugin stages, not NCCL's {} transport", self.net));
        }
        if self.register && !self.path.is_gpu_memory() {
            return Some("NCCL registers buffers only where the network of every rank takes GPU memory".to_owned());
        }
        if self.flush && self.path == GpuPath::Host {
            return Some("data in host memory need no flush, NCCL never asks for one".to_owned());
        }
        None
    }

    /// A name for files.
    pub(crate) fn slug(&self) -> String {
        let flag = |on: bool, name| if on { name } else { "" };
        let flags = [flag(self.flush, "-flush"), flag(self.register, "-register"), flag(self.graph, "-graph")].concat();
        let pxn = match self.placement.pxn {
            Some(true) => "-pxn",
            Some(false) => "-nopxn",
            None => "",
        };
        format!("{}-{}{flags}{pxn}-{}ranks", self.net, self.path.name(), self.ranks)
    }

    /// The environment of every rank; `{rank}` stands for its number, `{a|b}` for the first in even ranks, the second in
    /// odd ones.
    pub(crate) fn environment(
        &self,
        libraries: &Libraries,
        protocol: Option<&str>,
        channels: u32,
        log: &Path,
    ) -> anyhow::Result<Vec<(String, String)>> {
        let channels = channels.to_string();
        let log = log.to_string_lossy();
        let mut env = vec![
            ("NCCL_HOSTID", "nccl-rdma-host{host}"),
            ("NCCL_NET", &self.net),
            ("NCCL_DEBUG", "INFO"),
            ("NCCL_DEBUG_SUBSYS", if self.register { "INIT,NET,ENV,REG" } else { "INIT,NET,ENV" }),
            ("NCCL_DEBUG_FILE", &log),
            // Kernels of all ranks must fit on the GPU at once.
            ("NCCL_MAX_NCHANNELS", &channels),
        ];
        env.extend(protocol.map(|protocol| ("NCCL_PROTO", protocol)));
        match self.path {
            GpuPath::Host => env.push(("NCCL_NET_GDR_LEVEL", "LOC")),
            // NCCL's log tells these two apart only by what was made impossible.
            GpuPath::Dmabuf => env.extend([
                ("NCCL_NET_GDR_LEVEL", "SYS"),
                ("NCCL_DMABUF_ENABLE", "1"),
                ("NCCL_NET_RDMA_PEERMEM", "off"),
            ]),
            GpuPath::Peermem => env.extend([
                ("NCCL_NET_GDR_LEVEL", "SYS"),
                ("NCCL_DMABUF_ENABLE", "0"),
                ("NCCL_NET_RDMA_PEERMEM", "on"),
            ]),
            GpuPath::Staging => env.extend([("NCCL_NET_GDR_LEVEL", "SYS"), ("NCCL_NET_RDMA_GPU_PATH", "staging")]),
            GpuPath::Mix => env.extend([
                ("NCCL_NET_GDR_LEVEL", "SYS"),
                ("NCCL_DMABUF_ENABLE", "1"),
                ("NCCL_NET_RDMA_PEERMEM", "off"),
                ("NCCL_NET_RDMA_GPU_PATH", "{staging|gdr}"),
            ]),
            // From 2.30 on NCCL does not go by what the plugin says of a NIC that it knows itself.
            GpuPath::MixHost => {
                env.extend([("NCCL_NET_GDR_LEVEL", "{SYS|LOC}"), ("NCCL_NET_RDMA_GPU_PATH", "{staging|host}")]);
            }
            GpuPath::Auto => {}
        }
        if self.flush {
            // NCCL asks for them, and the plugin does them.
            env.extend([("NCCL_NET_FORCE_FLUSH", "1"), ("NCCL_NET_RDMA_FORCE_FLUSH", "1")]);
        }
        let topology = self.placement.topology.as_ref().map(|file| file.to_string_lossy());
        if let Some(file) = &topology {
            env.push(("NCCL_TOPO_FILE", file));
        }
        if self.placement.per_host > 1 {
            // Multicast between GPUs is the machine's, not this host's.
            env.push(("NCCL_NVLS_ENABLE", "0"));
        }
        if let Some(pxn) = self.placement.pxn {
            env.push(("NCCL_PXN_DISABLE", if pxn { "0" } else { "1" }));
        }
        if self.is_builtin() {
            env.push(("NCCL_NET_PLUGIN", "none"));
        }
        if self.is_net("IB") {
            // By default 2.28.9 looks for GPU-initiated networking, and crashes where no adapter is a mlx5 one.
            env.push(("NCCL_GIN_TYPE", "2"));
        }
        let mut env: Vec<_> = env.into_iter().map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        let search = std::env::var_os("LD_LIBRARY_PATH");
        env.extend(libraries.adapter.environment());
        if let Some(library) = libraries.adapter.library.as_ref().filter(|_| self.is_net("IB")) {
            env.push(("LD_LIBRARY_PATH".to_owned(), before(adapter_folder(library)?, search.clone())));
        }
        if !self.is_builtin() {
            env.extend(plugin_env(&libraries.plugin, search)?);
            // NCCL 2.28 unloads a plugin with its last communicator, forgets its name, and so cannot load it for the next.
            env.push(("NCCL_NET_PLUGIN_REF_COUNT".to_owned(), "1".to_owned()));
        }
        Ok(env)
    }

    /// Judges the log of one rank: the network in use, and on each channel the way that GPU data took.
    pub(crate) fn proven(&self, rank: usize, log: &str) -> anyhow::Result<()> {
        let path = self.path.of(rank);
        uses_network(log, &self.net)?;
        let channels: Vec<_> = log.lines().filter_map(|line| Some(line.split_once(" via NET/")?.1.trim())).collect();
        let mark = format!("via NET/{}", self.net);
        ensure!(!channels.is_empty(), "no channel line says '{mark}': the data did not take the network");
        let other = channels.iter().find(|c| !c.split('/').next().is_some_and(|net| self.is_net(net)));
        ensure!(other.is_none(), "a channel goes 'via NET/{}', not '{mark}'", other.unwrap_or(&""));
        let direct = channels.iter().filter(|c| c.contains("/GDRDMA")).count();
        let all = channels.len();
        if path == GpuPath::Host {
            ensure!(direct == 0, "{direct} of {all} channels use GPUDirect (GDRDMA), none should");
        }
        if path.is_gpu_memory() {
            let why = log.lines().filter_map(|line| Some(line.split_once("GPU Direct RDMA Disabled")?.1)).next();
            let why = why.map_or_else(String::new, |why| format!("; NCCL: GPU Direct RDMA Disabled{why}"));
            ensure!(direct == all, "{direct} of {all} channels use GPUDirect (GDRDMA), all should{why}");
        }
        let dmabuf = log.contains("DMA-BUF is available on GPU device");
        // To NCCL staging looks like GPUDirect; the plugin says of each connection which it is.
        let staged = log.contains(STAGED);
        match path {
            GpuPath::Dmabuf => {
                ensure!(dmabuf, "no line says 'DMA-BUF is available on GPU device': the driver has none");
            }
            GpuPath::Peermem => ensure!(!dmabuf, "NCCL says 'DMA-BUF is available', so it may have used that instead"),
            GpuPath::Staging => ensure!(staged, "no line says '{STAGED}': the plugin does not stage"),
            _ => {}
        }
        if path != GpuPath::Auto {
            ensure!(path == GpuPath::Staging || !staged, "a line says '{STAGED}', but this is path {}", path.name());
        }
        self.proven_by_plugin(path, all, log)?;
        if self.register {
            let count = |mark: &str| log.lines().filter(|line| line.contains(mark)).count();
            let (done, failed) = (count(REGISTERED), count(NOT_REGISTERED));
            ensure!(done > 0 && failed == 0, "{done} lines say '{REGISTERED}', {failed} say '{NOT_REGISTERED}'");
        }
        Ok(())
    }

    /// The plugin says of each connection which way its first GPU memory takes, and of any later one that has to go another.
    fn proven_by_plugin(&self, path: GpuPath, channels: usize, log: &str) -> anyhow::Result<()> {
        let mark = match path {
            GpuPath::Dmabuf => BY_DMABUF,
            GpuPath::Peermem => BY_ADDRESS,
            GpuPath::Staging => STAGED,
            GpuPath::Host | GpuPath::Mix | GpuPath::MixHost | GpuPath::Auto => return Ok(()),
        };
        if !self.is_net("RDMA") {
            return Ok(());
        }
        let said = log.lines().filter(|line| line.contains(mark)).count();
        // Ranks of one host may use each other's connections, which the other's log tells of.
        if self.placement.per_host == 1 {
            ensure!(said >= channels, "{said} lines say '{mark}', but there are {channels} channels");
        }
        let (begin, end) = FELL_BACK;
        let other = log.lines().find_map(|line| line.split_once(begin).filter(|(_, way)| way.contains(end)));
        other.map_or(Ok(()), |(_, way)| bail!("the plugin says: {begin}{way}"))
    }
}

/// NCCL's log must name this network and no other.
fn uses_network(log: &str, net: &str) -> anyhow::Result<()> {
    let mark = "Using network ";
    let used: Vec<_> = log.lines().filter_map(|l| Some(l.split_once(mark)?.1.trim())).collect();
    ensure!(!used.is_empty(), "no line says '{mark}{net}'");
    let other = used.iter().find(|name| !name.eq_ignore_ascii_case(net));
    other.map_or(Ok(()), |name| bail!("NCCL was using network {name}, not {net}"))
}

fn before(folder: &Path, search: Option<OsString>) -> String {
    let folder = folder.to_string_lossy();
    match search.filter(|search| !search.is_empty()) {
        Some(search) => format!("{folder}:{}", search.to_string_lossy()),
        None => folder.into_owned(),
    }
}

/// The folder in which NCCL before 2.30 finds this libibverbs: it tries the name without a version first, by the
/// dynamic linker's search.
fn adapter_folder(adapter: &Path) -> anyhow::Result<&Path> {
    let folder = adapter.parent().filter(|folder| folder.is_absolute());
    let folder = folder.with_context(|| format!("{}: not an absolute path", adapter.display()))?;
    for name in ["libibverbs.so", "libibverbs.so.1"] {
        ensure!(folder.join(name).exists(), "{} has no {name}, by which NCCL looks for it", folder.display());
    }
    Ok(folder)
}

/// How NCCL finds the plugin in every version: a folder to search and the word between `libnccl-net-` and `.so`.
fn plugin_env(plugin: &Path, search: Option<OsString>) -> anyhow::Result<Vec<(String, String)>> {
    let whole = plugin.to_string_lossy().into_owned();
    let name = plugin.file_name().unwrap_or_default().to_string_lossy();
    let word = name.strip_prefix("libnccl-net-").and_then(|n| n.strip_suffix(".so"));
    let (Some(word), true) = (word, whole.contains('/')) else {
        return Ok(vec![("NCCL_NET_PLUGIN".to_owned(), whole)]);
    };
    let plugin = plugin.canonicalize().with_context(|| whole.clone())?;
    let path = before(plugin.parent().unwrap_or_else(|| Path::new("/")), search);
    Ok(vec![("NCCL_NET_PLUGIN".to_owned(), word.to_owned()), ("LD_LIBRARY_PATH".to_owned(), path)])
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::fs;

    use super::*;

    fn setting(net: &str, path: GpuPath) -> Setting {
        let (flush, register, graph) = (false, false, false);
        Setting { net: net.to_owned(), path, flush, register, graph, ranks: 2, placement: Placement::default() }
    }

    fn environment(setting: &Setting, library: Option<PathBuf>) -> anyhow::Result<HashMap<String, String>> {
        let adapter = Adapter { library, fabric: Some(PathBuf::from("/fabric.toml")) };
        let libraries = Libraries { plugin: PathBuf::from("libnccl-net-rdma.so"), adapter };
        Ok(setting.environment(&libraries, Some("LL"), 2, Path::new("/log-{rank}"))?.into_iter().collect())
    }

    #[test]
    fn each_path_has_its_settings() {
        let host = environment(&setting("RDMA", GpuPath::Host), None).unwrap();
        assert_eq!(host["NCCL_NET_GDR_LEVEL"], "LOC");
        assert_eq!(host["NCCL_PROTO"], "LL");
        assert_eq!(host["SOFT_HCA_FABRIC"], "/fabric.toml");
        assert!(!host.contains_key("NCCL_NET_FORCE_FLUSH"));
        let dmabuf = environment(&setting("RDMA", GpuPath::Dmabuf), None).unwrap();
        assert_eq!((&*dmabuf["NCCL_NET_GDR_LEVEL"], &*dmabuf["NCCL_DMABUF_ENABLE"]), ("SYS", "1"));
        assert_eq!(dmabuf["NCCL_NET_RDMA_PEERMEM"], "off");
        let peermem = environment(&Setting { flush: true, ..setting("RDMA", GpuPath::Peermem) }, None).unwrap();
        assert_eq!((&*peermem["NCCL_NET_GDR_LEVEL"], &*peermem["NCCL_DMABUF_ENABLE"]), ("SYS", "0"));
        assert_eq!((&*peermem["NCCL_NET_RDMA_PEERMEM"], &*peermem["NCCL_NET_FORCE_FLUSH"]), ("on", "1"));
        let staging = environment(&setting("RDMA", GpuPath::Staging), None).unwrap();
        assert_eq!((&*staging["NCCL_NET_GDR_LEVEL"], &*staging["NCCL_NET_RDMA_GPU_PATH"]), ("SYS", "staging"));
        assert_eq!(staging["NCCL_DEBUG_SUBSYS"], "INIT,NET,ENV");
        let mix = environment(&Setting { register: true, ..setting("RDMA", GpuPath::Mix) }, None).unwrap();
        assert_eq!(
            (&*mix["NCCL_NET_RDMA_GPU_PATH"], &*mix["NCCL_DEBUG_SUBSYS"]),
            ("{staging|gdr}", "INIT,NET,ENV,REG")
        );
    }

    #[test]
    fn nccls_own_transport_finds_the_adapter_in_every_version() {
        let folder = tempfile::tempdir().unwrap();
        let adapter = folder.path().join("libibverbs.so.1");
        fs::write(&adapter, "").unwrap();
        let ib = setting("IB", GpuPath::Host);
        let error = environment(&ib, Some(adapter.clone())).unwrap_err().to_string();
        assert!(error.contains("has no libibverbs.so,"), "{error}");
        fs::write(folder.path().join("libibverbs.so"), "").unwrap();
        let env = environment(&ib, Some(adapter.clone())).unwrap();
        assert!(env["LD_LIBRARY_PATH"].starts_with(folder.path().to_str().unwrap()));
        assert_eq!(env["NCCL_IBVERBS_LIB"], adapter.to_str().unwrap());
        assert_eq!((&*env["NCCL_NET"], &*env["NCCL_NET_PLUGIN"], &*env["NCCL_GIN_TYPE"]), ("IB", "none", "2"));
        let ours = environment(&setting("RDMA", GpuPath::Host), Some(adapter)).unwrap();
        assert_eq!(ours["NCCL_NET_PLUGIN_REF_COUNT"], "1", "a second communicator of a process needs it");
        assert!(!ours.contains_key("NCCL_GIN_TYPE") && ours["NCCL_NET_PLUGIN"] == "libnccl-net-rdma.so");
        assert!(environment(&ib, Some("libibverbs.so.1".into())).unwrap_err().to_string().contains("absolute"));
    }

    #[test]
    fn what_nccl_cannot_do_has_a_reason() {
        assert!(setting("Socket", GpuPath::Dmabuf).impossible("2.28.9").unwrap().contains("host memory only"));
        assert!(setting("IB", GpuPath::Mix).impossible("2.28.9").unwrap().contains("only the plugin stages"));
        let register = Setting { register: true, ..setting("RDMA", GpuPath::MixHost) };
        assert!(register.impossible("2.28.9").unwrap().contains("registers buffers only"));
        assert_eq!(Setting { path: GpuPath::Mix, ..register }.impossible("2.28.9"), None);
        let flush = Setting { flush: true, ..setting("RDMA", GpuPath::Host) };
        assert!(flush.impossible("2.28.9").unwrap().contains("no flush"));
        let fused = |nics| Setting {
            placement: Placement { fused: nics, ..Placement::default() },
            ..setting("RDMA", GpuPath::Dmabuf)
        };
        assert_eq!((fused(4).impossible("2.28.9"), fused(8).impossible("2.30.7")), (None, None));
        assert!(fused(8).impossible("2.28.9").unwrap().contains("of 4 at most"));
        assert!(fused(2).impossible("2.23.4").unwrap().contains("of 1 at most"));
        if !PEER_MEMORY.iter().any(|file| Path::new(file).exists()) {
            assert!(setting("IB", GpuPath::Peermem).impossible("2.28.9").unwrap().contains("nvidia_peermem"));
            assert!(setting("RDMA", GpuPath::Peermem).impossible("2.30.7").unwrap().contains("2.30.7"));
        }
        for (net, path) in [("RDMA", GpuPath::Peermem), ("IB", GpuPath::Dmabuf), ("Socket", GpuPath::Host)] {
            assert_eq!(setting(net, path).impossible("2.28.9"), None);
        }
    }

    const START: &str = "gpu:7:7 [0] NCCL INFO Using network RDMA\n";
    const AVAILABLE: &str = "gpu:7:7 [0] NCCL INFO DMA-BUF is available on GPU device 0\n";

    fn channel(via: &str) -> String {
        format!("gpu:7:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/{via}\n")
    }

    /// As the plugin says it of a connection.
    fn goes(way: &str) -> String {
        format!("x NCCL INFO NET/RDMA : GPU 0 (NVIDIA H200) with peer b pid 7: {way}; NCCL_NET_RDMA_GPU_PATH\n")
    }

    #[test]
    fn the_plugin_says_of_each_connection_which_way_its_memory_takes() {
        let channels = |n| START.to_owned() + AVAILABLE + &channel("RDMA/0/GDRDMA").repeat(n);
        let dmabuf = setting("RDMA", GpuPath::Dmabuf);
        let log = channels(2) + &goes("GPUDirect by dma-buf").repeat(2);
        dmabuf.proven(0, &log).unwrap();
        let error = dmabuf.proven(0, &(log.clone() + &channel("RDMA/0/GDRDMA"))).unwrap_err().to_string();
        assert!(error.starts_with("2 lines say") && error.ends_with("there are 3 channels"), "{error}");
        let later = "x NCCL WARN NET/RDMA : mlx5_0:1: GPU memory goes by staging instead: the provider refused\n";
        let error = dmabuf.proven(0, &(log.clone() + later)).unwrap_err().to_string();
        assert!(error.contains("goes by staging instead: the provider refused"), "{error}");
        // What others do is not for the plugin to say, and a rank may use another's connections.
        let ib = START.replace("RDMA", "IB") + AVAILABLE + &channel("IB/0/GDRDMA");
        setting("IB", GpuPath::Dmabuf).proven(0, &ib).unwrap();
        let placement = Placement { per_host: 2, ..Placement::default() };
        Setting { placement, ..dmabuf }.proven(0, &channels(2)).unwrap();
    }

    #[test]
    fn the_channels_say_which_way_the_data_took() {
        let host = START.to_owned() + &channel("RDMA/0") + &channel("RDMA/0/Shared");
        let direct =
            START.to_owned() + AVAILABLE + &channel("RDMA/0/GDRDMA") + &channel("RDMA/0(1)/GDRDMA(PCI)/Shared");
        let said = direct.clone() + &goes("GPUDirect by dma-buf").repeat(2);
        let half = host.clone() + AVAILABLE + &channel("RDMA/0/GDRDMA");
        setting("RDMA", GpuPath::Host).proven(0, &host).unwrap();
        setting("RDMA", GpuPath::Dmabuf).proven(0, &said).unwrap();
        setting("RDMA", GpuPath::Auto).proven(0, &half).unwrap();
        let peermem = setting("RDMA", GpuPath::Peermem);
        peermem.proven(0, &(direct.replace(AVAILABLE, "") + &goes("GPUDirect by nvidia_peermem").repeat(2))).unwrap();
        let says = |path, log: &str| setting("RDMA", path).proven(0, log).unwrap_err().to_string();
        assert!(says(GpuPath::Peermem, &direct).contains("DMA-BUF is available"));
        assert!(says(GpuPath::Dmabuf, &direct.replace(AVAILABLE, "")).contains("DMA-BUF is available"));
        assert!(says(GpuPath::Host, &direct).starts_with("2 of 2 channels"));
        assert!(says(GpuPath::Host, &half).starts_with("1 of 3 channels"));
        let why = "gpu:7:7 [0] NCCL INFO GPU Direct RDMA Disabled for GPU 0 / HCA 0 (distance 8 > 2)\n";
        let error = says(GpuPath::Dmabuf, &(half + why));
        assert!(error.starts_with("1 of 3") && error.contains("distance 8 > 2"), "{error}");
        assert!(says(GpuPath::Host, START).contains("no channel line"));
        assert!(says(GpuPath::Host, &(START.to_owned() + &channel("Socket/0"))).contains("via NET/Socket/0"));
    }

    #[test]
    fn staging_is_told_from_gpudirect_rank_by_rank() {
        let staged = START.to_owned() + &channel("RDMA/0/GDRDMA") + &goes("staging");
        let direct = START.to_owned() + AVAILABLE + &channel("RDMA/0/GDRDMA") + &goes("GPUDirect by dma-buf");
        let host = START.to_owned() + &channel("RDMA/0");
        setting("RDMA", GpuPath::Staging).proven(1, &staged).unwrap();
        let mix = setting("RDMA", GpuPath::Mix);
        mix.proven(0, &staged).unwrap();
        mix.proven(1, &direct).unwrap();
        assert!(mix.proven(0, &direct).unwrap_err().to_string().contains("the plugin does not stage"));
        assert!(mix.proven(1, &(staged.clone() + AVAILABLE)).unwrap_err().to_string().contains("this is path dmabuf"));
        let mix = setting("RDMA", GpuPath::MixHost);
        mix.proven(2, &staged).unwrap();
        mix.proven(3, &host).unwrap();
        assert!(mix.proven(3, &staged).is_err());
    }

    #[test]
    fn registered_buffers_must_be_known_to_the_network() {
        let log = START.to_owned() + AVAILABLE + &channel("RDMA/0/GDRDMA") + &goes("GPUDirect by dma-buf");
        let registered = "x NCCL INFO rank 0 - NET register userbuff 0x7f (handle 0x7e), buffSize 64\n";
        let failed = "x NCCL INFO rank 0 failed to NET register userbuff 0x7f buffSize 64 GDR flag 1\n";
        let register = Setting { register: true, ..setting("RDMA", GpuPath::Dmabuf) };
        register.proven(0, &(log.clone() + registered)).unwrap();
        assert!(register.proven(0, &log).unwrap_err().to_string().starts_with("0 lines"));
        let error = register.proven(0, &(log + registered + failed)).unwrap_err().to_string();
        assert!(error.starts_with("1 lines") && error.contains("1 say"), "{error}");
    }

    #[test]
    fn hosts_of_several_ranks_have_a_gpu_for_each() {
        let pairs = Placement { per_host: 2, gpus: 2, topology: Some("/near.xml".into()), pxn: Some(true), fused: 0 };
        assert_eq!([0, 1, 2, 3].map(|rank| pairs.gpu(rank)), [0, 1, 0, 1]);
        assert_eq!([0, 1, 2, 3].map(|rank| Placement::default().gpu(rank)), [0; 4]);
        let env = environment(&Setting { placement: pairs, ..setting("RDMA", GpuPath::Dmabuf) }, None).unwrap();
        assert_eq!((&*env["NCCL_TOPO_FILE"], &*env["NCCL_PXN_DISABLE"]), ("/near.xml", "0"));
        assert_eq!((&*env["NCCL_NVLS_ENABLE"], &*env["NCCL_HOSTID"]), ("0", "nccl-rdma-host{host}"));
    }

    #[test]
    fn pxn_shows_in_the_logs_or_is_missed() {
        let placed = |pxn| Placement { pxn, ..Placement::default() };
        let says = |n| {
            format!("x NCCL INFO NET/RDMA : closing a connection from peer p: 7 buffers received, up to {n} at once\n")
        };
        let through = channel("RDMA/0(1)/GDRDMA/Shared");
        let logs = [channel("RDMA/1/GDRDMA(PCI)"), through.clone() + &says(1) + &says(4)];
        placed(Some(true)).proven(&logs).unwrap();
        placed(None).proven(&logs).unwrap();
        assert!(placed(Some(false)).proven(&logs).unwrap_err().to_string().contains("1 channels"));
        placed(Some(false)).proven(&logs[..1]).unwrap();
        assert!(placed(Some(true)).proven(&logs[..1]).unwrap_err().to_string().starts_with("0 channels"));
        let single = [through + &says(1)];
        assert!(placed(Some(true)).proven(&single).unwrap_err().to_string().contains("Some(1)"));
    }

    #[test]
    fn fused_nics_must_be_in_use() {
        let fused = Placement { fused: 2, ..Placement::default() };
        let made = "x NCCL INFO NET/RDMA : device 2, fused: a+b (800 Gb/s); a:1 InfiniBand MTU 4096\n";
        fused.proven(&[made.to_owned() + &channel("RDMA/2/GDRDMA") + &channel("RDMA/2(1)")]).unwrap();
        let other = fused.proven(&[made.to_owned() + &channel("RDMA/0/GDRDMA")]).unwrap_err().to_string();
        assert!(other.contains("device 0, not 2"), "{other}");
        assert!(fused.proven(&[channel("RDMA/0")]).unwrap_err().to_string().contains("fused nothing"));
        let more = Placement { fused: 4, ..Placement::default() };
        let half = more.proven(&[made.to_owned() + &channel("RDMA/2/GDRDMA")]).unwrap_err().to_string();
        assert!(half.contains("a+b, not 4 NICs"), "{half}");
        let eight = Placement { fused: 8, ..Placement::default() };
        let made = made.replace("a+b", "a+b+c+d+e+f+g+h").replace("device 2", "device 8");
        eight.proven(&[made + &channel("RDMA/8/GDRDMA")]).unwrap();
    }

    #[test]
    fn the_topology_has_each_nic_beside_a_gpu() {
        let text = Placement::topology(&["0000:00:06.0".into(), "0000:00:07.0".into()], &["soft_gpu0+b".into()]);
        let (gpu, nic) = (text.find("0000:00:06.0").unwrap(), text.find("soft_gpu0").unwrap());
        assert!(gpu < nic && nic < text.find("0000:00:07.0").unwrap(), "{text}");
        assert_eq!((text.matches("0x060400").count(), text.matches("<nic>").count()), (2, 2));
        assert!(text.contains("ffff:00:01.0") && text.contains("ffff:00:02.0"));
        let nics: Vec<_> = (0..8).map(|i| format!("soft_gpu{i}")).collect();
        let text = Placement::topology(&["0000:00:06.0".into()], &[nics.join("+")]);
        for (i, nic) in nics.iter().enumerate() {
            let place = format!("busid=\"ffff:00:{:02x}.0\"", i + 1);
            let name = format!("name=\"{nic}\"");
            assert_eq!((text.matches(&place).count(), text.matches(&name).count()), (1, 1), "{text}");
        }
    }

    #[test]
    fn a_silent_fallback_to_another_network_is_seen() {
        uses_network("x NCCL INFO Using network RDMA\n", "RDMA").unwrap();
        assert!(uses_network("x NCCL INFO Using network Socket\n", "RDMA").is_err());
        assert!(uses_network("Using network RDMA\nUsing network IB\n", "RDMA").is_err());
        assert!(uses_network("", "RDMA").unwrap_err().to_string().contains("no line"));
    }

    #[test]
    fn nccl_is_given_the_folder_and_the_word() {
        let folder = tempfile::tempdir().unwrap();
        let plugin = folder.path().join("libnccl-net-rdma.so");
        fs::write(&plugin, "").unwrap();
        let env = plugin_env(&plugin, Some("/old".into())).unwrap();
        assert_eq!(env[0].1, "rdma");
        assert_eq!(env[1].1, format!("{}:/old", folder.path().canonicalize().unwrap().display()));
        let bare = plugin_env(Path::new("libnccl-net-rdma.so"), None).unwrap();
        assert_eq!(bare, [("NCCL_NET_PLUGIN".to_owned(), "libnccl-net-rdma.so".to_owned())]);
    }
}
