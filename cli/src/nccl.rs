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
use crate::values::value;
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
        setting.proven(rank, &log).with_context(|| file.display().to_string())?;
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

/// The element of a rank at a position, so small that the sum of 8 is exact in every type.
fn value_of(kind: Kind, rank: usize, i: usize, round: usize) -> i32 {
    let value = value(rank, i, round);
    match kind {
        // 8 x 15 is below 128, 8 x 31 below 256, up to which 8 bits of mantissa are exact.
        Kind::Int8 => value % 16,
        Kind::Uint8 | Kind::Half | Kind::Bfloat16 => value % 32,
        _ => value,
    }
}

/// The element as it lies in memory: the first bytes, as many as the type has.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "values are whole, not negative, and so small that every type has them"
)]
fn encode(kind: Kind, value: i32) -> [u8; 8] {
    let mut bytes = [0; 8];
    let float = (value as f32).to_bits();
    match kind {
        Kind::Int8 | Kind::Uint8 => bytes[0] = value.cast_unsigned() as u8,
        Kind::Int32 | Kind::Uint32 => bytes[..4].copy_from_slice(&value.to_ne_bytes()),
        Kind::Int64 | Kind::Uint64 => bytes.copy_from_slice(&i64::from(value).to_ne_bytes()),
        Kind::Float => bytes[..4].copy_from_slice(&float.to_ne_bytes()),
        Kind::Double => bytes.copy_from_slice(&f64::from(value).to_ne_bytes()),
        Kind::Bfloat16 => bytes[..2].copy_from_slice(&((float >> 16) as u16).to_ne_bytes()),
        Kind::Half if value == 0 => {}
        // Exponents are biased by 127 and by 15; 10 of 23 bits of mantissa stay.
        Kind::Half => bytes[..2].copy_from_slice(&(((float >> 13) - ((127 - 15) << 10)) as u16).to_ne_bytes()),
    }
    bytes
}

/// Elements one behind the other, as they lie in memory.
fn encoded(kind: Kind, count: usize, element: impl Fn(usize) -> i32) -> Vec<u8> {
    // With the size known to the compiler this is several times as fast.
    fn fill<const SIZE: usize>(kind: Kind, out: &mut [u8], element: impl Fn(usize) -> i32) {
        for (i, place) in out.as_chunks_mut::<SIZE>().0.iter_mut().enumerate() {
            place.copy_from_slice(&encode(kind, element(i))[..SIZE]);
        }
    }
    let mut out = vec![0; count * kind.size()];
    match kind.size() {
        1 => fill::<1>(kind, &mut out, element),
        2 => fill::<2>(kind, &mut out, element),
        4 => fill::<4>(kind, &mut out, element),
        _ => fill::<8>(kind, &mut out, element),
    }
    out
}

/// Elements that are others than expected; where nothing is expected, all are right.
fn differing(kind: Kind, got: &[u8], expected: impl Fn(usize) -> Option<i32>) -> u64 {
    fn count<const SIZE: usize>(kind: Kind, got: &[u8], expected: impl Fn(usize) -> Option<i32>) -> usize {
        let elements = got.as_chunks::<SIZE>().0.iter().enumerate();
        elements.filter(|&(i, got)| expected(i).is_some_and(|must| got[..] != encode(kind, must)[..SIZE])).count()
    }
    let wrong = match kind.size() {
        1 => count::<1>(kind, got, expected),
        2 => count::<2>(kind, got, expected),
        4 => count::<4>(kind, got, expected),
        _ => count::<8>(kind, got, expected),
    };
    u64::try_from(wrong).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_lie_in_memory_as_their_type_has_it() {
        assert_eq!(encode(Kind::Half, 1)[..2], 0x3c00_u16.to_ne_bytes());
        assert_eq!(encode(Kind::Half, 248)[..2], 0x5bc0_u16.to_ne_bytes());
        assert_eq!(encode(Kind::Half, 0)[..2], [0; 2]);
        assert_eq!(encode(Kind::Bfloat16, 1)[..2], 0x3f80_u16.to_ne_bytes());
        assert_eq!(encode(Kind::Bfloat16, 248)[..2], 0x4378_u16.to_ne_bytes());
        assert_eq!(encode(Kind::Double, 3), 3.0_f64.to_ne_bytes());
        assert_eq!(encode(Kind::Int8, 120)[0], 120);
        assert_eq!(encode(Kind::Uint64, 7), 7_u64.to_ne_bytes());
    }

    #[test]
    fn what_differs_is_counted() {
        let got = encoded(Kind::Half, 3, |i| [1, 2, 3][i]);
        let must = |list: [Option<i32>; 3]| differing(Kind::Half, &got, |i| list[i]);
        assert_eq!(must([Some(1), Some(2), Some(3)]), 0);
        assert_eq!(must([Some(1), Some(3), None]), 1);
    }
}
