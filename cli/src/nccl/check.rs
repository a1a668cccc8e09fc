//! `nccl-rdma nccl-check`: NCCL all-reduces through one network; every element is checked, and NCCL's own log must say
//! that this network was in use and which way GPU data took to it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};

use super::{Common, GpuPath, Libraries, PATIENCE, Setting, differing, encode, sum, value};
use crate::gpu::{DeviceMemory, Gpu, Kind, Nccl};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::{self, Table, bandwidths};

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    common: Common,
    /// Network that NCCL must use: RDMA is this plugin, Socket and IB are NCCL's own
    #[arg(long, default_value = "RDMA")]
    net: String,
    /// Way of GPU data to the network (may be given more than once)
    #[arg(long = "path", value_enum, value_delimiter = ',', default_value = "host")]
    paths: Vec<GpuPath>,
    /// Have NCCL flush received GPU data also on GPUs that need none (NCCL_NET_FORCE_FLUSH=1)
    #[arg(long)]
    flush: bool,
    /// Processes, all on one GPU, each a host of its own to NCCL
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=8))]
    ranks: u8,
    /// Protocols, each in fresh processes
    #[arg(long, value_delimiter = ',', default_value = "Simple,LL")]
    protos: Vec<String>,
    /// Smallest size
    #[arg(long, default_value = "8", value_parser = table::parse_bytes)]
    min: usize,
    /// Largest size
    #[arg(long, default_value = "64M", value_parser = table::parse_bytes)]
    max: usize,
    /// Timed operations per size
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Bound of one path and protocol in seconds: connecting and all sizes
    #[arg(long, default_value_t = 540, value_name = "S")]
    time_limit: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    nccl: Option<PathBuf>,
    device: i32,
    sizes: Vec<usize>,
    iters: usize,
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

/// Everything that does not change from one path and protocol to the next.
struct Check<'a> {
    libraries: &'a Libraries,
    logs: &'a Path,
    channels: u32,
    time_limit: Duration,
    job: Job,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let sizes = table::doubling(args.min.max(4), args.max);
    ensure!(!sizes.is_empty(), "no size between {} and {}", args.min, args.max);
    let gpu = Gpu::probe(common.device)?;
    let version = Nccl::load(common.nccl.as_deref())?.version()?;
    let logs = common.logs()?;
    let check = Check {
        libraries: &common.libraries(&logs)?,
        logs: &logs,
        channels: common.channels,
        time_limit: Duration::from_secs(args.time_limit),
        job: Job { nccl: common.nccl.clone(), device: common.device, sizes, iters: usize::try_from(args.iters)? },
    };
    println!("NCCL {version}, {} ranks on GPU {} ({gpu}), network {}", args.ranks, common.device, args.net);
    println!("NCCL's logs are in {}", logs.display());
    let (mut rows, mut passed, mut skipped) = (0, 0, 0);
    let mut failed = Vec::new();
    for &path in &args.paths {
        let setting = Setting { net: args.net.clone(), path, flush: args.flush, ranks: usize::from(args.ranks) };
        if let Some(reason) = setting.impossible() {
            skipped += 1;
            println!("SKIP {setting}: {reason}");
            continue;
        }
        for protocol in &args.protos {
            match check.play(&setting, protocol) {
                Ok(right) => {
                    rows += right;
                    passed += 1;
                }
                Err(error) => {
                    println!("FAIL {setting}, protocol {protocol}: {error:#}");
                    failed.push(format!("path {}, protocol {protocol}", path.name()));
                }
            }
        }
    }
    println!("{rows} sizes and types right; {passed} passed, {} failed, {skipped} paths skipped", failed.len());
    ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
    ensure!(passed > 0, "nothing was checked: NCCL can take none of these paths");
    Ok(())
}

impl Check<'_> {
    /// One protocol, in fresh processes: NCCL reads its environment once. The number of rows that are right.
    fn play(&self, setting: &Setting, protocol: &str) -> anyhow::Result<usize> {
        let log_of = |rank: &str| self.logs.join(format!("check-{}-{protocol}-rank{rank}.log", setting.slug()));
        super::forget_logs(setting, log_of);
        let spec = Spec {
            ranks: setting.ranks,
            job: procs::Job::NcclCheck(self.job.clone()),
            env: setting.environment(self.libraries, Some(protocol), self.channels, &log_of("{rank}"))?,
            same_host: false,
            time_limit: self.time_limit,
            dies: None,
            meeting: None,
        };
        println!("\nall_reduce, protocol {protocol}, network {setting}");
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
            if *count == setting.ranks {
                let (row, _) = pending.remove(at);
                println!("{}", cells(&row, setting.ranks));
                rows += 1;
                wrong += row.wrong.iter().sum::<u64>();
            }
        })?;
        if let Some(why) = procs::failure(&outcomes) {
            bail!("{why}{}", super::warnings(setting, log_of));
        }
        let expected = self.job.sizes.len() * Kind::ALL.len();
        ensure!(rows == expected, "{rows} of {expected} rows came");
        ensure!(wrong == 0, "{wrong} elements are wrong");
        super::proven(setting, log_of)?;
        println!("every rank's log says: network {}, path {}", setting.net, setting.path.name());
        Ok(rows)
    }
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
    let comm = super::join(&nccl, seat, mail, "unique id")?;
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

fn fill(out: &mut [u8], kind: Kind, rank: usize, round: usize) {
    let (elements, _) = out.as_chunks_mut();
    for (i, element) in elements.iter_mut().enumerate() {
        *element = encode(kind, value(rank, i, round));
    }
}

/// Elements that are not the sum over all ranks.
fn wrong(got: &[u8], kind: Kind, ranks: usize, round: usize) -> u64 {
    differing(got, (0..).map(|i| encode(kind, sum(ranks, i, round))))
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
}
