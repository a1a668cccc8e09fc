//! `nccl-rdma nccl-check`: NCCL's operations through one network; every element is checked, and NCCL's own log must say
//! that this network was in use and which way GPU data took to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::operation::{Operation, Part};
use super::{Common, GpuPath, Libraries, PATIENCE, Placement, Setting, differing, encode};
use crate::gpu::{Gpu, Kind, Nccl, Place};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::{self, Table};

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
    /// Register the buffers with the communicator (ncclCommRegister), so that the network takes them without NCCL's own
    /// in between; NCCL's log must say that it does
    #[arg(long)]
    register: bool,
    /// Besides, capture each operation in a CUDA graph and replay it with other data, checked each time
    #[arg(long)]
    graph: bool,
    /// Have so many streams wait for each operation with a copy of their own, as programs do with results. A network that
    /// has the GPU copy must not come to stand behind them; with CUDA_DEVICE_MAX_CONNECTIONS=1 it is hardest
    #[arg(long, default_value_t = 0, value_name = "STREAMS", value_parser = clap::value_parser!(u8).range(0..=64))]
    behind: u8,
    /// What NCCL does (may be given more than once)
    #[arg(long = "op", value_enum, value_delimiter = ',', default_value = "all-reduce")]
    operations: Vec<Operation>,
    /// Processes, all on one GPU, each a host of its own to NCCL
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(2..=8))]
    ranks: u8,
    /// Ranks that are one host to NCCL
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    per_host: u8,
    /// GPUs over which the ranks of a host are spread, from --device on
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=4))]
    gpus: u8,
    /// NICs that NCCL is told to be near the GPUs (NCCL_TOPO_FILE): the first near the first, and so on; a+b are two near one
    #[arg(long, value_delimiter = ',', value_name = "NIC")]
    near: Vec<String>,
    /// Whether ranks of a host must reach the network through each other's GPUs: with `on`, grouped receives must be
    /// seen too
    #[arg(long, value_name = "on|off", value_parser = |text: &str| match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err("on or off"),
    })]
    pxn: Option<bool>,
    /// NCCL must have made one NIC of so many (NCCL_NET_MERGE_LEVEL), and all data go through that
    #[arg(long, value_name = "NICS", value_parser = clap::value_parser!(u8).range(2..=8))]
    fused: Option<u8>,
    /// Types of the elements
    #[arg(long = "type", value_enum, value_delimiter = ',', default_value = "float,int32")]
    kinds: Vec<Kind>,
    /// Algorithm that NCCL must use (NCCL_ALGO) [default: as NCCL likes]
    #[arg(long, value_name = "ALGO")]
    algo: Option<String>,
    /// Protocols, each in fresh processes
    #[arg(long, value_delimiter = ',', default_value = "Simple,LL")]
    protos: Vec<String>,
    /// Smallest size
    #[arg(long, default_value = "8", value_parser = table::parse_bytes)]
    min: usize,
    /// Largest size
    #[arg(long, default_value = "64M", value_parser = table::parse_bytes, overrides_with = "max")]
    max: usize,
    /// Timed operations per size
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..), overrides_with = "iters")]
    iters: u32,
    /// Bound of one path and protocol in seconds: connecting and all sizes
    #[arg(long, default_value_t = 540, value_name = "S")]
    time_limit: u64,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    nccl: Option<PathBuf>,
    device: i32,
    placement: Placement,
    operations: Vec<Operation>,
    kinds: Vec<Kind>,
    sizes: Vec<usize>,
    iters: usize,
    register: bool,
    graph: bool,
    behind: usize,
}

/// What a rank reports per operation, size and type: seconds and wrong elements, out of place and in place.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    operation: Operation,
    count: usize,
    kind: Kind,
    places: [Option<Figure>; 2],
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Figure {
    seconds: f64,
    wrong: u64,
}

const ROWS: Table = Table(&[
    ("operation", -14),
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

/// Times that a graph is replayed.
const REPLAYS: usize = 3;

/// NCCL can take none of the paths that were asked for: nothing is known about right or wrong.
#[derive(Debug)]
pub(crate) struct Impossible;

impl std::fmt::Display for Impossible {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nothing was checked: NCCL can take none of these paths")
    }
}

impl std::error::Error for Impossible {}

/// Everything that does not change from one path and protocol to the next.
struct Check<'a> {
    libraries: &'a Libraries,
    logs: &'a Path,
    channels: u32,
    algo: Option<String>,
    time_limit: Duration,
    job: Job,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let sizes = table::doubling(args.min.max(8), args.max);
    ensure!(!sizes.is_empty(), "no size between {} and {}", args.min, args.max);
    let (per_host, gpus) = (usize::from(args.per_host), usize::from(args.gpus));
    ensure!(gpus <= per_host, "--gpus {gpus} is more than --per-host {per_host}: each rank has one GPU");
    ensure!(
        usize::from(args.ranks) > per_host,
        "--ranks {} are one host with --per-host {per_host}: nothing would take the network",
        args.ranks
    );
    let gpu = Gpu::probe(common.device)?;
    let bus_ids = (common.device..).take(gpus).map(Gpu::bus_id).collect::<Result<Vec<_>, _>>()?;
    let version = Nccl::load(common.nccl.as_deref())?.version()?;
    let logs = common.logs()?;
    let topology = if args.near.is_empty() {
        None
    } else {
        let file = logs.join("topology.xml");
        fs::write(&file, Placement::topology(&bus_ids, &args.near)).with_context(|| file.display().to_string())?;
        Some(file)
    };
    let placement = Placement { per_host, gpus, topology, pxn: args.pxn, fused: args.fused.map_or(0, usize::from) };
    let check = Check {
        libraries: &common.libraries(&logs)?,
        logs: &logs,
        channels: common.channels,
        algo: args.algo.clone(),
        time_limit: Duration::from_secs(args.time_limit),
        job: Job {
            nccl: common.nccl.clone(),
            device: common.device,
            placement: placement.clone(),
            operations: args.operations.clone(),
            kinds: args.kinds.clone(),
            sizes,
            iters: usize::try_from(args.iters)?,
            register: args.register,
            graph: args.graph,
            behind: usize::from(args.behind),
        },
    };
    println!("NCCL {version}, {} ranks on GPU {} ({gpu}), network {}", args.ranks, common.device, args.net);
    println!("NCCL's logs are in {}", logs.display());
    let (mut rows, mut passed, mut skipped) = (0, 0, 0);
    let mut failed = Vec::new();
    for &path in &args.paths {
        let setting = Setting {
            net: args.net.clone(),
            path,
            flush: args.flush,
            register: args.register,
            graph: args.graph,
            ranks: usize::from(args.ranks),
            placement: placement.clone(),
        };
        if let Some(reason) = setting.impossible(&version) {
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
    if passed == 0 {
        bail!(Impossible);
    }
    Ok(())
}

impl Check<'_> {
    /// One protocol, in fresh processes: NCCL reads its environment once. The number of rows that are right.
    fn play(&self, setting: &Setting, protocol: &str) -> anyhow::Result<usize> {
        let log_of = |rank: &str| self.logs.join(format!("check-{}-{protocol}-rank{rank}.log", setting.slug()));
        super::forget_logs(setting, log_of);
        let mut env = setting.environment(self.libraries, Some(protocol), self.channels, &log_of("{rank}"))?;
        env.extend(self.algo.iter().map(|algo| ("NCCL_ALGO".to_owned(), algo.clone())));
        let spec = Spec {
            ranks: setting.ranks,
            job: procs::Job::NcclCheck(self.job.clone()),
            env,
            same_host: false,
            per_host: setting.placement.per_host,
            time_limit: self.time_limit,
            dies: None,
            meeting: None,
        };
        println!("\nprotocol {protocol}, network {setting}");
        println!("{}", ROWS.head());
        let mut pending: Vec<(Row, usize)> = Vec::new();
        let (mut rows, mut wrong) = (0, 0);
        let outcomes = procs::run(&spec, |_, value| {
            let Ok(row) = serde_json::from_value::<Row>(value) else { return };
            let key = |r: &Row| (r.operation.name(), r.count, r.kind.name());
            let at = pending.iter().position(|(p, _)| key(p) == key(&row));
            let at = at.unwrap_or_else(|| {
                pending.push((Row { places: [None; 2], ..row }, 0));
                pending.len() - 1
            });
            let (sum, count) = &mut pending[at];
            for (place, figure) in sum.places.iter_mut().zip(row.places) {
                if let Some(figure) = figure {
                    let place = place.get_or_insert(Figure { seconds: 0.0, wrong: 0 });
                    place.seconds = place.seconds.max(figure.seconds);
                    place.wrong += figure.wrong;
                }
            }
            *count += 1;
            if *count == setting.ranks {
                let (row, _) = pending.remove(at);
                println!("{}", cells(&row, setting.ranks));
                rows += 1;
                wrong += row.places.iter().flatten().map(|figure| figure.wrong).sum::<u64>();
            }
        })?;
        if let Some(why) = procs::failure(&outcomes) {
            bail!("{why}{}", super::warnings(setting, log_of));
        }
        let expected = self.job.operations.len() * self.job.sizes.len() * self.job.kinds.len();
        ensure!(rows == expected, "{rows} of {expected} rows came");
        ensure!(wrong == 0, "{wrong} elements are wrong");
        super::proven(setting, log_of)?;
        println!("every rank's log says: network {}, path {}", setting.net, setting.path.name());
        Ok(rows)
    }
}

#[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
fn cells(row: &Row, ranks: usize) -> String {
    let bytes = row.count * row.kind.size();
    let place = |i: usize| match row.places[i] {
        Some(Figure { seconds, wrong }) => {
            let alg = bytes as f64 / seconds.max(1e-9) / 1e9;
            let bus = alg * row.operation.bus_factor(ranks);
            [format!("{:.1}", seconds * 1e6), format!("{alg:.2}"), format!("{bus:.2}"), wrong.to_string()]
        }
        None => ["N/A"; 4].map(str::to_owned),
    };
    let ([time, alg, bus, wrong], [time_in, alg_in, bus_in, wrong_in]) = (place(0), place(1));
    let (operation, size, count) = (row.operation.name().to_owned(), bytes.to_string(), row.count.to_string());
    let (kind, op) = (row.kind.name().to_owned(), row.operation.reduction().to_owned());
    ROWS.row([operation, size, count, kind, op, time, alg, bus, wrong, time_in, alg_in, bus_in, wrong_in])
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let (rank, ranks) = (seat.rank, seat.ranks);
    let gpu = Gpu::open(job.device + i32::try_from(job.placement.gpu(rank))?)?;
    let nccl = Nccl::load(job.nccl.as_deref())?;
    let comm = super::join(&nccl, seat, mail, "unique id")?;
    // Where elements are dealt out each rank has at least one, of 8 bytes at most.
    let most = job.sizes.iter().copied().max().unwrap_or(0).max(8 * ranks);
    // The network takes memory that is made as by ncclMemAlloc, whatever the path.
    let alloc = || if job.register { gpu.alloc_mapped(most) } else { gpu.alloc(most) };
    let (input, output) = (alloc()?, alloc()?);
    let registered = if job.register { vec![comm.register(&input)?, comm.register(&output)?] } else { Vec::new() };
    let followers = (0..job.behind).map(|_| gpu.follower()).collect::<Result<Vec<_>, _>>()?;
    let mut bytes = vec![0; most];
    for &operation in &job.operations {
        for (round, &size) in job.sizes.iter().enumerate() {
            for &kind in &job.kinds {
                let part = Part::new(operation, kind, size / kind.size(), round, rank, ranks);
                let out_of_place = Some((Place::from(&input), Place::from(&output)));
                let in_place = part.in_place().map(|(from, to)| {
                    let place = Place::from(&input);
                    (place.skip(from * kind.size()), place.skip(to * kind.size()))
                });
                let mut places = [None; 2];
                for (at, place) in [out_of_place, in_place].into_iter().enumerate() {
                    let Some((from, to)) = place else { continue };
                    let queue = |times: usize| -> anyhow::Result<f64> {
                        let start = Instant::now();
                        for _ in 0..times {
                            part.queue(&comm, &gpu, from, to)?;
                            followers.iter().try_for_each(|follower| follower.follow(&gpu))?;
                        }
                        comm.wait(&gpu, PATIENCE)?;
                        Ok(start.elapsed().as_secs_f64())
                    };
                    let mut judge = |part: &Part| -> anyhow::Result<u64> {
                        let got = &mut bytes[..part.taken() * kind.size()];
                        gpu.download(got, to)?;
                        Ok(differing(kind, got, (0..).map(|i| part.takes(i))))
                    };
                    gpu.wipe(&output, 0xff)?;
                    gpu.wipe(&input, 0xff)?;
                    gpu.upload(from, &given(&part, kind))?;
                    queue(1)?;
                    let mut wrong = judge(&part)?;
                    // One more brings the ranks together before the clock starts.
                    queue(1)?;
                    let seconds = queue(job.iters)? / f64::from(u32::try_from(job.iters)?);
                    if at == 0 {
                        // Out of place the result stays the same, however often.
                        wrong += judge(&part)?;
                    }
                    if job.graph {
                        let graph = gpu.capture(|| part.queue(&comm, &gpu, from, to))?;
                        for replay in 1..=REPLAYS {
                            // Other data, the same root.
                            let part =
                                Part::new(operation, kind, size / kind.size(), round + replay * ranks, rank, ranks);
                            gpu.wipe(&output, 0xff)?;
                            gpu.upload(from, &given(&part, kind))?;
                            gpu.replay(&graph)?;
                            comm.wait(&gpu, PATIENCE)?;
                            wrong += judge(&part)?;
                        }
                    }
                    places[at] = Some(Figure { seconds, wrong });
                }
                let count = operation.elements(size / kind.size(), ranks);
                mail.report(&Row { operation, count, kind, places })?;
            }
        }
    }
    mail.barrier(Instant::now() + PATIENCE)?;
    registered.into_iter().try_for_each(|handle| comm.deregister(handle))?;
    comm.destroy()
}

fn given(part: &Part, kind: Kind) -> Vec<u8> {
    (0..part.given()).flat_map(|i| encode(kind, part.gives(i)).into_iter().take(kind.size())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_judged_exactly() {
        for kind in [Kind::Float, Kind::Int32, Kind::Half, Kind::Int8, Kind::Double] {
            let part = |rank| Part::new(Operation::AllReduce, kind, 100, 3, rank, 2);
            let sum = |i| part(0).gives(i) + part(1).gives(i);
            let mut got: Vec<u8> = (0..100).flat_map(|i| encode(kind, sum(i))[..kind.size()].to_vec()).collect();
            let wrong = |got: &[u8]| differing(kind, got, (0..).map(|i| part(1).takes(i)));
            assert_eq!(wrong(&got), 0);
            got[17 * kind.size()] ^= 1;
            assert_eq!(wrong(&got), 1);
        }
        let part = Part::new(Operation::AllToAll, Kind::Int32, 2, 0, 1, 2);
        assert_eq!(given(&part, Kind::Int32)[4..], part.gives(1).to_ne_bytes());
    }
}
