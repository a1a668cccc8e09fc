//! NCCL itself through a network of one's choice: several ranks share a GPU, each a host of its own to NCCL, so that every
//! byte goes through the network; or pretended hosts of several ranks, each rank of a host on another GPU.

pub(crate) mod check;
pub(crate) mod compare;
mod operation;
mod setting;

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::adapter::AdapterArgs;
use crate::gpu::{Communicator, Kind, Nccl};
use crate::procs::{Mailbox, Seat};
pub(crate) use setting::{GpuPath, Libraries, Placement, Setting};

/// One operation that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(60);

/// Options that every run of NCCL takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    /// The plugin: a path, or a name as NCCL_NET_PLUGIN takes it [default: ../lib/libnccl-net-rdma.so beside this
    /// command, then the dynamic linker's search]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// NCCL's library [default: libnccl.so.2, then libnccl.so, by the dynamic linker's search]
    #[arg(long, value_name = "PATH")]
    nccl: Option<PathBuf>,
    /// Index of the GPU
    #[arg(long, default_value_t = 0)]
    device: i32,
    /// Largest number of NCCL channels
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=32))]
    channels: u32,
    /// Folder for NCCL's logs [default: one in the temporary folder]
    #[arg(long, value_name = "DIR")]
    log_dir: Option<PathBuf>,
}

impl Common {
    /// The folder for the logs, which exists from here on.
    fn logs(&self) -> anyhow::Result<PathBuf> {
        let default_dir = || std::env::temp_dir().join(format!("nccl-rdma-{}", std::process::id()));
        let folder = self.log_dir.clone().unwrap_or_else(default_dir);
        fs::create_dir_all(&folder).with_context(|| folder.display().to_string())?;
        folder.canonicalize().with_context(|| folder.display().to_string())
    }

    fn libraries(&self, logs: &Path) -> anyhow::Result<Libraries> {
        let plugin = self.plugin.clone().unwrap_or_else(crate::abi::default_plugin);
        Ok(Libraries { plugin, adapter: self.adapter.resolve(logs)? })
    }
}

/// Joins a communicator of all ranks; `name` tells it from others of the same processes.
fn join<'a>(nccl: &'a Nccl, seat: &Seat, mail: &mut Mailbox, name: &str) -> anyhow::Result<Communicator<'a>> {
    let (rank, ranks) = (seat.rank, seat.ranks);
    let id = if rank == 0 {
        let id = nccl.unique_id()?;
        (1..ranks).try_for_each(|to| mail.post(to, name, &id))?;
        id.to_vec()
    } else {
        mail.take(0, name, Instant::now() + PATIENCE)?
    };
    nccl.join(&id, rank, ranks)
}

/// Judges the logs of all ranks.
fn proven(setting: &Setting, log_of: impl Fn(&str) -> PathBuf) -> anyhow::Result<()> {
    let mut logs = Vec::new();
    for rank in 0..setting.ranks {
        let file = log_of(&rank.to_string());
        let log = fs::read(&file).with_context(|| file.display().to_string())?;
        let log = String::from_utf8_lossy(&log).into_owned();
        setting.proven(&log).with_context(|| file.display().to_string())?;
        logs.push(log);
    }
    setting.placement.proven(&logs)
}

/// What NCCL warned of, for the message about a failure: the first lines of each rank.
fn warnings(setting: &Setting, log_of: impl Fn(&str) -> PathBuf) -> String {
    let warned = |rank: usize| {
        let log = fs::read(log_of(&rank.to_string())).unwrap_or_default();
        let log = String::from_utf8_lossy(&log).into_owned();
        let lines = log.lines().filter_map(|line| Some(line.split_once("NCCL WARN ")?.1)).take(3);
        lines.map(|line| format!("\n    rank {rank}, NCCL WARN {line}")).collect::<String>()
    };
    (0..setting.ranks).map(warned).collect()
}

/// A log of an earlier run must not vouch for this one.
fn forget_logs(setting: &Setting, log_of: impl Fn(&str) -> PathBuf) {
    for rank in 0..setting.ranks {
        // Mostly there is none.
        let _ = fs::remove_file(log_of(&rank.to_string()));
    }
}

/// Values repeat after this many elements.
const PERIOD: usize = 1_000_003;

/// The element of a rank at a position: whole numbers, so that the sum of any few is exact in a float.
fn value(rank: usize, i: usize, round: usize) -> i32 {
    i32::try_from((i * 31 + rank * 7919 + round * 104_729) % PERIOD).unwrap_or(0)
}

/// The sum of all ranks' elements at a position.
fn sum(ranks: usize, i: usize, round: usize) -> i32 {
    (0..ranks).map(|rank| value(rank, i, round)).sum()
}

fn encode(kind: Kind, value: i32) -> [u8; 4] {
    match kind {
        Kind::Int32 => value.to_ne_bytes(),
        #[expect(clippy::cast_precision_loss, reason = "sums of a few values below a million are exact")]
        Kind::Float32 => (value as f32).to_ne_bytes(),
    }
}

/// Elements that are others than expected.
fn differing(got: &[u8], expected: impl Iterator<Item = [u8; 4]>) -> u64 {
    let (elements, _) = got.as_chunks();
    let wrong = elements.iter().zip(expected).filter(|(got, expected)| *got != expected);
    u64::try_from(wrong.count()).unwrap_or(u64::MAX)
}
