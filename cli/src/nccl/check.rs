//! `nccl-rdma nccl-check`: NCCL's operations through one network; every element is checked, and NCCL's own log must say
//! that this network was in use and which way GPU data took to it.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use super::operation::{Operation, Part};
use super::{Common, GpuPath, Libraries, PATIENCE, Placement, Setting};
use crate::gpu::{Communicator, DeviceMemory, Follower, Gpu, Kind, Nccl, Place};
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
    /// How long one operation, or all that are timed, may take.
    patience: Duration,
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
            // So that a rank can tell what hung before it is stopped.
            patience: PATIENCE.min(Duration::from_secs(args.time_limit) / 2),
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
                    let log_of = |rank: &str| check.log(&setting, protocol, rank);
                    if let Some(log) = keep_logs(setting.ranks, log_of) {
                        println!("NCCL's logs of it are kept, the first as {}", log.display());
                    }
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
    /// The file of one rank; the next run that differs in other things takes the same.
    fn log(&self, setting: &Setting, protocol: &str, rank: &str) -> PathBuf {
        self.logs.join(format!("check-{}-{protocol}-rank{rank}.log", setting.slug()))
    }

    /// One protocol, in fresh processes: NCCL reads its environment once. The number of rows that are right.
    fn play(&self, setting: &Setting, protocol: &str) -> anyhow::Result<usize> {
        let log_of = |rank: &str| self.log(setting, protocol, rank);
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

/// Gives the logs of a failure names that no later run takes; the first of them.
fn keep_logs(ranks: usize, log_of: impl Fn(&str) -> PathBuf) -> Option<PathBuf> {
    let kept = |rank: usize, n: usize| log_of(&rank.to_string()).with_extension(format!("failed-{n}.log"));
    let n = (1..).find(|&n| (0..ranks).all(|rank| !kept(rank, n).exists()))?;
    // A rank that never came so far has none.
    let renamed = (0..ranks).filter(|&rank| fs::rename(log_of(&rank.to_string()), kept(rank, n)).is_ok());
    renamed.map(|rank| kept(rank, n)).collect::<Vec<_>>().into_iter().next()
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
    // Where elements are dealt out each rank has at least one, of 8 bytes at most.
    let most = job.sizes.iter().copied().max().unwrap_or(0).max(8 * ranks);
    // The network takes memory that is made as by ncclMemAlloc, whatever the path.
    let alloc = || if job.register { gpu.alloc_mapped(most) } else { gpu.alloc(most) };
    let (inputs, output) = ([alloc()?, alloc()?], alloc()?);
    let followers = (0..job.behind).map(|_| gpu.follower()).collect::<Result<Vec<_>, _>>()?;
    // After an error it goes before the others, which wait for its kernels, for ever if they hang.
    let comm = super::join(&nccl, seat, mail, "unique id")?;
    let known = inputs.iter().chain([&output]).filter(|_| job.register);
    let known = known.map(|memory| comm.register(memory)).collect::<anyhow::Result<Vec<_>>>()?;
    let stage = Stage { gpu: &gpu, comm: &comm, followers: &followers, job };
    // No two operations have the same data, but for those that are only timed.
    let mut rounds = 0..;
    let mut round = || rounds.next().unwrap_or_default();
    for &operation in &job.operations {
        for &size in &job.sizes {
            for &kind in &job.kinds {
                let count = size / kind.size();
                let part = |round| Part::new(operation, kind, count, round, rank, ranks);
                let mut places = [None; 2];
                for (place, in_place) in places.iter_mut().zip([false, true]) {
                    let [first, last] = [part(round()), part(round())];
                    let ground = |input, part| {
                        if in_place { Ground::shared(input, part) } else { Some(Ground::apart(input, &output)) }
                    };
                    let (Some(once), Some(again)) = (ground(&inputs[0], &first), ground(&inputs[1], &last)) else {
                        continue;
                    };
                    let replays = if job.graph { REPLAYS } else { 0 };
                    let replays = (0..replays).map(|_| first.renewed(round())).collect::<Vec<_>>();
                    let figure = stage.play((&first, once), (&last, again), &replays);
                    let what = || {
                        let ground = if in_place { "in place" } else { "out of place" };
                        format!("{} of {size} bytes of {}, {ground}", operation.name(), kind.name())
                    };
                    *place = Some(figure.with_context(what)?);
                }
                let count = operation.elements(count, ranks);
                mail.report(&Row { operation, count, kind, places })?;
            }
        }
    }
    mail.barrier(Instant::now() + PATIENCE)?;
    known.into_iter().try_for_each(|handle| comm.deregister(handle))?;
    comm.destroy()
}

/// Memory of an operation.
#[derive(Clone, Copy, Debug)]
struct Ground<'a> {
    from: Place<'a>,
    to: Place<'a>,
    /// The buffer in which `to` is.
    taker: &'a DeviceMemory,
}

impl<'a> Ground<'a> {
    fn apart(input: &'a DeviceMemory, output: &'a DeviceMemory) -> Self {
        Self { from: input.into(), to: output.into(), taker: output }
    }

    /// None: it needs two buffers.
    fn shared(memory: &'a DeviceMemory, part: &Part) -> Option<Self> {
        let (whole, (from, to)) = (Place::from(memory), part.in_place()?);
        Some(Self { from: whole.skip(from), to: whole.skip(to), taker: memory })
    }
}

/// What a rank does operations with.
struct Stage<'a> {
    gpu: &'a Gpu,
    comm: &'a Communicator<'a>,
    followers: &'a [Follower],
    job: &'a Job,
}

impl Stage<'_> {
    /// The first operation is judged and then repeated, in place on whatever is there by then. The last one of those that are
    /// timed has data of its own and is judged again, and so is each replay of a graph of the first.
    fn play(
        &self,
        (first, once): (&Part, Ground<'_>),
        (last, again): (&Part, Ground<'_>),
        replays: &[Part],
    ) -> anyhow::Result<Figure> {
        self.prepare(first, once)?;
        self.queue(first, once)?;
        self.wait()?;
        let mut wrong = self.wrong(first, once)?;
        self.prepare(last, again)?;
        // One more brings the ranks together before the clock starts.
        self.queue(first, once)?;
        self.wait()?;
        let start = Instant::now();
        (1..self.job.iters).try_for_each(|_| self.queue(first, once))?;
        self.queue(last, again)?;
        self.wait()?;
        let seconds = start.elapsed().as_secs_f64() / f64::from(u32::try_from(self.job.iters)?);
        wrong += self.wrong(last, again)?;
        if !replays.is_empty() {
            let graph = self.gpu.capture(|| first.queue(self.comm, self.gpu, once.from, once.to))?;
            for part in replays {
                self.prepare(part, once)?;
                self.gpu.replay(&graph)?;
                self.wait()?;
                wrong += self.wrong(part, once)?;
            }
        }
        Ok(Figure { seconds, wrong })
    }

    /// Lays out what the operation takes from, and where it puts something nothing that could be right.
    fn prepare(&self, part: &Part, ground: Ground<'_>) -> anyhow::Result<()> {
        self.gpu.wipe(ground.taker, 0xff)?;
        self.gpu.upload(ground.from, &part.input())
    }

    fn queue(&self, part: &Part, ground: Ground<'_>) -> anyhow::Result<()> {
        part.queue(self.comm, self.gpu, ground.from, ground.to)?;
        self.followers.iter().try_for_each(|follower| follower.follow(self.gpu))
    }

    fn wait(&self) -> anyhow::Result<()> {
        self.comm.wait(self.gpu, self.job.patience)
    }

    fn wrong(&self, part: &Part, ground: Ground<'_>) -> anyhow::Result<u64> {
        let mut got = vec![0; part.taken_bytes()];
        self.gpu.download(&mut got, ground.to)?;
        Ok(part.wrong(&got))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_of_a_failure_outlive_the_next_run() {
        let folder = tempfile::tempdir().unwrap();
        let log = |rank: &str| folder.path().join(format!("check-RDMA-host-2ranks-LL-rank{rank}.log"));
        fs::write(log("0"), "first").unwrap();
        let kept = keep_logs(2, log).unwrap();
        assert_eq!(fs::read_to_string(&kept).unwrap(), "first");
        fs::write(log("0"), "second").unwrap();
        let again = keep_logs(2, log).unwrap();
        assert_eq!(
            (fs::read_to_string(kept).unwrap(), fs::read_to_string(again).unwrap()),
            ("first".into(), "second".into())
        );
        assert!(!log("0").exists());
        assert_eq!(keep_logs(2, log), None, "there was none");
    }
}
