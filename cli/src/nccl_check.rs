//! `nccl-rdma nccl-check`: NCCL itself all-reduces on a GPU through a network of one's choice. Several ranks share one
//! GPU, each a host of its own to NCCL, so that every byte goes through the network; every element is checked, and
//! NCCL's own log must say that the network was in use.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::gpu::{DeviceMemory, Gpu, Kind, Nccl};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::{Table, bandwidths};

/// One all-reduce that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(60);
/// Bound of one protocol: connecting and all sizes.
const TIME_LIMIT: Duration = Duration::from_secs(540);

/// What to check.
#[derive(Debug)]
pub(crate) struct Options {
    pub(crate) plugin: PathBuf,
    /// `RDMA`, or the name of a network inside NCCL.
    pub(crate) net: String,
    pub(crate) ranks: usize,
    pub(crate) protocols: Vec<String>,
    pub(crate) channels: u32,
    /// Keeps NCCL from handing GPU memory to the network.
    pub(crate) host_buffers: bool,
    pub(crate) log_dir: PathBuf,
    pub(crate) job: Job,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) nccl: Option<PathBuf>,
    pub(crate) device: i32,
    pub(crate) sizes: Vec<usize>,
    pub(crate) iters: usize,
}

/// What a rank reports per size and type: seconds and wrong elements, out of place and in place.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    bytes: usize,
    kind: String,
    seconds: [f64; 2],
    wrong: [u64; 2],
}

const ROWS: Table = Table(&[
    ("size (B)", 10),
    ("count", 10),
    ("type", 5),
    ("redop", 5),
    ("time (us)", 10),
    ("algbw", 7),
    ("busbw", 7),
    ("#wrong", 6),
    ("in place: us", 12),
    ("algbw", 7),
    ("busbw", 7),
    ("#wrong", 6),
]);

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let gpu = Gpu::probe(options.job.device)?;
    let version = Nccl::load(options.job.nccl.as_deref())?.version()?;
    fs::create_dir_all(&options.log_dir).with_context(|| options.log_dir.display().to_string())?;
    println!("NCCL {version}, {} ranks on GPU {} ({gpu}), network {}", options.ranks, options.job.device, options.net);
    println!("NCCL's logs are in {}", options.log_dir.display());
    let (mut rows, mut passed, mut failed) = (0, 0, 0);
    for protocol in &options.protocols {
        match check(options, protocol) {
            Ok(right) => {
                rows += right;
                passed += 1;
            }
            Err(error) => {
                failed += 1;
                println!("FAIL {protocol}: {error:#}");
            }
        }
    }
    println!("{rows} sizes and types right; protocols: {passed} passed, {failed} failed");
    ensure!(failed == 0 && passed > 0, "{failed} of {} protocols failed", options.protocols.len());
    Ok(())
}

fn log_file(options: &Options, protocol: &str, rank: &str) -> PathBuf {
    options.log_dir.join(format!("nccl-{}-{}ranks-{protocol}-rank{rank}.log", options.net, options.ranks))
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
    let mut path = plugin.parent().unwrap_or_else(|| Path::new("/")).to_string_lossy().into_owned();
    if let Some(search) = search.filter(|s| !s.is_empty()) {
        path = format!("{path}:{}", search.to_string_lossy());
    }
    Ok(vec![("NCCL_NET_PLUGIN".to_owned(), word.to_owned()), ("LD_LIBRARY_PATH".to_owned(), path)])
}

fn environment(options: &Options, protocol: &str) -> anyhow::Result<Vec<(String, String)>> {
    let log = log_file(options, protocol, "{rank}");
    let mut env: Vec<_> = [
        ("NCCL_HOSTID", "nccl-rdma-host{rank}"),
        ("NCCL_NET", &options.net),
        ("NCCL_PROTO", protocol),
        ("NCCL_DEBUG", "INFO"),
        ("NCCL_DEBUG_SUBSYS", "INIT,NET,ENV"),
        ("NCCL_DEBUG_FILE", &log.to_string_lossy()),
        // Kernels of all ranks must fit on the GPU at once.
        ("NCCL_MAX_NCHANNELS", &options.channels.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .into();
    if options.host_buffers {
        env.push(("NCCL_NET_GDR_LEVEL".to_owned(), "LOC".to_owned()));
    }
    if matches!(options.net.as_str(), "IB" | "Socket") {
        env.push(("NCCL_NET_PLUGIN".to_owned(), "none".to_owned()));
    } else {
        env.extend(plugin_env(&options.plugin, std::env::var_os("LD_LIBRARY_PATH"))?);
    }
    Ok(env)
}

/// One protocol, in fresh processes: NCCL reads its environment once. The number of rows that are right.
fn check(options: &Options, protocol: &str) -> anyhow::Result<usize> {
    for rank in 0..options.ranks {
        // A log of an earlier run must not vouch for this one.
        let _ = fs::remove_file(log_file(options, protocol, &rank.to_string()));
    }
    let spec = Spec {
        ranks: options.ranks,
        job: procs::Job::Nccl(options.job.clone()),
        env: environment(options, protocol)?,
        same_host: false,
        time_limit: TIME_LIMIT,
        dies: None,
        meeting: None,
    };
    println!("\nall_reduce, protocol {protocol}, {} ranks, network {}", options.ranks, options.net);
    println!("{}", ROWS.head());
    let mut pending: Vec<(Row, usize)> = Vec::new();
    let (mut rows, mut wrong) = (0, 0);
    let outcomes = procs::run(&spec, |_, value| {
        let Ok(row) = serde_json::from_value::<Row>(value) else { return };
        let at = pending.iter().position(|(p, _)| (p.bytes, &p.kind) == (row.bytes, &row.kind));
        let at = at.unwrap_or_else(|| {
            pending.push((Row { seconds: [0.0; 2], wrong: [0; 2], kind: row.kind.clone(), bytes: row.bytes }, 0));
            pending.len() - 1
        });
        let (sum, count) = &mut pending[at];
        for place in 0..2 {
            sum.seconds[place] = sum.seconds[place].max(row.seconds[place]);
            sum.wrong[place] += row.wrong[place];
        }
        *count += 1;
        if *count == options.ranks {
            let (row, _) = pending.remove(at);
            println!("{}", cells(&row, options.ranks));
            rows += 1;
            wrong += row.wrong.iter().sum::<u64>();
        }
    })?;
    if let Some(why) = procs::failure(&outcomes) {
        bail!("{why}");
    }
    let expected = options.job.sizes.len() * Kind::ALL.len();
    ensure!(rows == expected, "{rows} of {expected} rows came");
    ensure!(wrong == 0, "{wrong} elements are wrong");
    for rank in 0..options.ranks {
        let file = log_file(options, protocol, &rank.to_string());
        let log = fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        uses_network(&log, &options.net).with_context(|| file.display().to_string())?;
    }
    println!("every rank's log says: Using network {}", options.net);
    Ok(rows)
}

/// NCCL's log must name this network and no other.
fn uses_network(log: &str, net: &str) -> anyhow::Result<()> {
    let mark = "Using network ";
    let used: Vec<_> = log.lines().filter_map(|l| Some(l.split_once(mark)?.1.trim())).collect();
    ensure!(!used.is_empty(), "no line says '{mark}{net}'");
    let other = used.iter().find(|name| !name.eq_ignore_ascii_case(net));
    other.map_or(Ok(()), |name| bail!("NCCL was using network {name}, not {net}"))
}

fn cells(row: &Row, ranks: usize) -> String {
    let place = |i: usize| {
        let (alg, bus) = bandwidths(row.bytes, ranks, row.seconds[i]);
        [format!("{:.1}", row.seconds[i] * 1e6), format!("{alg:.2}"), format!("{bus:.2}"), row.wrong[i].to_string()]
    };
    let ([time, alg, bus, wrong], [time_in, alg_in, bus_in, wrong_in]) = (place(0), place(1));
    let (size, count) = (row.bytes.to_string(), (row.bytes / 4).to_string());
    let (kind, op) = (row.kind.clone(), "sum".to_owned());
    ROWS.row([size, count, kind, op, time, alg, bus, wrong, time_in, alg_in, bus_in, wrong_in])
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let gpu = Gpu::open(job.device)?;
    let nccl = Nccl::load(job.nccl.as_deref())?;
    let (rank, ranks) = (seat.rank, seat.ranks);
    let id = if rank == 0 {
        let id = nccl.unique_id()?;
        (1..ranks).try_for_each(|to| mail.post(to, "unique id", &id))?;
        id.to_vec()
    } else {
        mail.take(0, "unique id", Instant::now() + PATIENCE)?
    };
    let comm = nccl.join(&id, rank, ranks)?;
    let most = job.sizes.iter().copied().max().unwrap_or(0);
    let (input, output) = (gpu.alloc(most)?, gpu.alloc(most)?);
    let mut bytes_in = vec![0; most];
    let mut bytes_out = vec![0; most];
    for (round, &bytes) in job.sizes.iter().enumerate() {
        let count = bytes / 4;
        for kind in Kind::ALL {
            let mut row = Row { bytes, kind: kind.name().to_owned(), seconds: [0.0; 2], wrong: [0; 2] };
            for (place, to) in [&output, &input].into_iter().enumerate() {
                let reduce = |times: usize| -> anyhow::Result<f64> {
                    let start = Instant::now();
                    (0..times).try_for_each(|_| comm.all_reduce(&gpu, &input, to, count, kind))?;
                    comm.wait(&gpu, PATIENCE)?;
                    Ok(start.elapsed().as_secs_f64())
                };
                let mut judge = |to: &DeviceMemory| -> anyhow::Result<u64> {
                    gpu.download(&mut bytes_out[..bytes], to)?;
                    Ok(wrong(&bytes_out[..bytes], kind, ranks, round))
                };
                fill(&mut bytes_in[..bytes], kind, rank, round);
                gpu.upload(&output, &vec![0xff; bytes])?;
                gpu.upload(&input, &bytes_in[..bytes])?;
                reduce(1)?;
                row.wrong[place] = judge(to)?;
                // One more brings the ranks together before the clock starts.
                reduce(1)?;
                row.seconds[place] = reduce(job.iters)? / f64::from(u32::try_from(job.iters)?);
                if place == 0 {
                    // Out of place the result stays the same, however often.
                    row.wrong[place] += judge(to)?;
                }
            }
            mail.report(&row)?;
        }
    }
    mail.barrier(Instant::now() + PATIENCE)?;
    comm.destroy()
}

/// The element of a rank at a position: whole numbers, so that the sum of any few is exact in a float.
fn value(rank: usize, i: usize, round: usize) -> i32 {
    i32::try_from((i * 31 + rank * 7919 + round * 104_729) % 1_000_003).unwrap_or(0)
}

fn encode(kind: Kind, value: i32) -> [u8; 4] {
    match kind {
        Kind::Int32 => value.to_ne_bytes(),
        #[expect(clippy::cast_precision_loss, reason = "sums of a few values below a million are exact")]
        Kind::Float32 => (value as f32).to_ne_bytes(),
    }
}

fn fill(out: &mut [u8], kind: Kind, rank: usize, round: usize) {
    let (elements, _) = out.as_chunks_mut();
    for (i, element) in elements.iter_mut().enumerate() {
        *element = encode(kind, value(rank, i, round));
    }
}

/// Elements that are not the sum over all ranks.
fn wrong(got: &[u8], kind: Kind, ranks: usize, round: usize) -> u64 {
    let (elements, _) = got.as_chunks();
    let sum = |i| (0..ranks).map(|rank| value(rank, i, round)).sum::<i32>();
    let wrong = elements.iter().enumerate().filter(|(i, e)| **e != encode(kind, sum(*i)));
    u64::try_from(wrong.count()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_judged_exactly() {
        for kind in Kind::ALL {
            let mut sum = vec![0; 400];
            let (elements, _) = sum.as_chunks_mut::<4>();
            for (i, element) in elements.iter_mut().enumerate() {
                *element = encode(kind, value(0, i, 3) + value(1, i, 3));
            }
            assert_eq!(wrong(&sum, kind, 2, 3), 0);
            assert_eq!(wrong(&sum, kind, 3, 3), 100);
            sum[17] ^= 1;
            assert_eq!(wrong(&sum, kind, 2, 3), 1);
        }
        let mut own = vec![0; 8];
        fill(&mut own, Kind::Int32, 1, 0);
        assert_eq!(own[4..], value(1, 1, 0).to_ne_bytes());
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
