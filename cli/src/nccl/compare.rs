//! `nccl-rdma nccl-compare`: the plugin, NCCL's own IB transport and its Socket transport side by side. They take turns
//! round by round, so that what else happens on the machine happens to all; one that fails does not stop the others.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use comfy_table::presets;
use serde::{Deserialize, Serialize};

use super::{Common, GpuPath, Libraries, PATIENCE, Placement, Setting, encode};
use crate::gpu::{Gpu, Kind, Nccl, Place};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::{self, bandwidths};
use crate::values::{SLACK, turn, value};

/// The protocol's name that leaves the choice to NCCL.
const DEFAULT: &str = "default";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    common: Common,
    /// Networks, which take turns; the first is what the others are compared with
    #[arg(long, value_delimiter = ',', default_value = "RDMA,IB,Socket")]
    nets: Vec<String>,
    /// Ways of GPU data to the network; Socket's figures with host memory stand beside all of them
    #[arg(long = "path", value_enum, value_delimiter = ',', default_value = "host,dmabuf")]
    paths: Vec<GpuPath>,
    /// Numbers of processes, all on one GPU, each a host of its own to NCCL
    #[arg(long, value_delimiter = ',', default_value = "2,4", value_parser = clap::value_parser!(u8).range(2..=8))]
    ranks: Vec<u8>,
    /// Protocols; `default` leaves the choice to NCCL
    #[arg(long, value_delimiter = ',', default_value = "default,LL,Simple")]
    protos: Vec<String>,
    /// Smallest size
    #[arg(long, default_value = "8", value_parser = table::parse_bytes)]
    min: usize,
    /// Largest size, always among the sizes [default: 256M, or 4M with --quick]
    #[arg(long, value_parser = table::parse_bytes)]
    max: Option<usize>,
    /// From one size to the next
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..))]
    factor: u8,
    /// Turns of each network, in fresh processes each time [default: 3, or 1 with --quick]
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: Option<u8>,
    /// One round, sizes up to 4 MiB
    #[arg(long)]
    quick: bool,
    /// No turn begins or goes on after this many seconds; what has been measured is printed
    #[arg(long, default_value_t = 285, value_name = "S")]
    time_limit: u64,
    /// Bound of one turn in seconds
    #[arg(long, default_value_t = 45, value_name = "S")]
    turn_limit: u64,
    /// Write the figures to FILE.json and FILE.md
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    nccl: Option<PathBuf>,
    device: i32,
    protocols: Vec<String>,
    sizes: Vec<usize>,
}

/// What a rank reports per protocol and size: the time of one operation in each repetition.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Row {
    protocol: usize,
    bytes: usize,
    seconds: Vec<f64>,
    wrong: u64,
}

/// Repetitions, and operations in each: enough to be steady, few enough that all sizes take about the same time.
fn effort(bytes: usize) -> (usize, usize) {
    match bytes {
        0..=65_536 => (5, 20),
        65_537..=1_048_576 => (5, 8),
        1_048_577..=16_777_216 => (5, 2),
        _ => (3, 1),
    }
}

fn sizes(min: usize, max: usize, factor: usize) -> Vec<usize> {
    let mut sizes: Vec<_> =
        std::iter::successors(Some(min), |n| n.checked_mul(factor)).take_while(|&n| n < max).collect();
    sizes.push(max);
    sizes
}

/// The figures of one network in one place of the table.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct Figures {
    median_us: f64,
    min_us: f64,
    max_us: f64,
    /// GB/s, from the median.
    busbw: f64,
    repetitions: usize,
    wrong: u64,
}

/// Times of one network in one place of the table.
#[derive(Clone, Debug, Default)]
struct Times {
    seconds: Vec<f64>,
    wrong: u64,
}

impl Times {
    fn figures(&self, bytes: usize, ranks: usize) -> Option<Figures> {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let median = f64::midpoint(sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
        Some(Figures {
            median_us: median * 1e6,
            min_us: min * 1e6,
            max_us: max * 1e6,
            busbw: bandwidths(bytes, ranks, median).1,
            repetitions: sorted.len(),
            wrong: self.wrong,
        })
    }
}

/// A line of the table.
#[derive(Debug, Serialize)]
struct Line {
    protocol: String,
    ranks: usize,
    path: &'static str,
    bytes: usize,
    networks: BTreeMap<String, Figures>,
    /// Time of each other network over that of the first: above 1 the first is faster.
    ratios: BTreeMap<String, f64>,
}

#[derive(Debug, Serialize)]
struct Report {
    command: String,
    nccl: String,
    gpu: String,
    channels: u32,
    /// Whether CUDA MPS was there: without it ranks share the GPU by time slices.
    mps: bool,
    networks: Vec<String>,
    turns_done: usize,
    turns_planned: usize,
    lines: Vec<Line>,
    failures: Vec<String>,
    skipped: Vec<String>,
}

/// Everything measured so far.
#[derive(Debug, Default)]
struct Measured(BTreeMap<(Setting, usize, usize), Times>);

impl Measured {
    fn add(&mut self, setting: &Setting, row: &Row) {
        let times = self.0.entry((setting.clone(), row.protocol, row.bytes)).or_default();
        times.seconds.extend(&row.seconds);
        times.wrong += row.wrong;
    }

    /// The table, in the order in which it is read: protocol, ranks, path, size.
    fn lines(&self, nets: &[String], paths: &[GpuPath], ranks: &[usize], job: &Job) -> Vec<Line> {
        let mut lines = Vec::new();
        for (protocol, name) in job.protocols.iter().enumerate() {
            for &ranks in ranks {
                for &path in paths {
                    for &bytes in &job.sizes {
                        let networks: BTreeMap<_, _> = nets
                            .iter()
                            .filter_map(|net| {
                                let times = self.0.get(&(Setting::plain(net, path, ranks), protocol, bytes))?;
                                Some((net.clone(), times.figures(bytes, ranks)?))
                            })
                            .collect();
                        if networks.is_empty() {
                            continue;
                        }
                        let ratios = ratios(nets, &networks);
                        lines.push(Line { protocol: name.clone(), ranks, path: path.name(), bytes, networks, ratios });
                    }
                }
            }
        }
        lines
    }
}

impl Setting {
    /// Host memory for Socket, whatever the others take.
    fn plain(net: &str, path: GpuPath, ranks: usize) -> Self {
        let path = if net.eq_ignore_ascii_case("Socket") { GpuPath::Host } else { path };
        let (flush, register, graph) = (false, false, false);
        Self { net: net.to_owned(), path, flush, register, graph, ranks, placement: Placement::default() }
    }
}

fn ratios(nets: &[String], networks: &BTreeMap<String, Figures>) -> BTreeMap<String, f64> {
    let Some((base, others)) = nets.split_first() else { return BTreeMap::new() };
    let Some(base) = networks.get(base) else { return BTreeMap::new() };
    let ratio = |net: &String| Some((net.clone(), networks.get(net)?.median_us / base.median_us));
    others.iter().filter_map(ratio).collect()
}

/// Everything that does not change from turn to turn.
struct Compare<'a> {
    libraries: &'a Libraries,
    logs: &'a Path,
    channels: u32,
    job: Job,
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let common = &args.common;
    let max = args.max.unwrap_or(if args.quick { 4 << 20 } else { 256 << 20 });
    let min = args.min.max(4);
    ensure!(min <= max, "no size between {min} and {max}");
    let rounds = args.rounds.unwrap_or(if args.quick { 1 } else { 3 });
    let gpu = Gpu::probe(common.device)?;
    let version = Nccl::load(common.nccl.as_deref())?.version()?;
    let logs = common.logs()?;
    let compare = Compare {
        libraries: &common.libraries(&logs)?,
        logs: &logs,
        channels: common.channels,
        job: Job {
            nccl: common.nccl.clone(),
            device: common.device,
            protocols: args.protos.clone(),
            sizes: sizes(min, max, usize::from(args.factor)),
        },
    };
    let ranks: Vec<_> = args.ranks.iter().copied().map(usize::from).collect();
    let (turns, skipped) = plan(&args.nets, &args.paths, &ranks, &version);
    ensure!(!turns.is_empty(), "nothing to compare: {}", skipped.join("; "));
    let planned = turns.len() * usize::from(rounds);
    println!("NCCL {version} on GPU {} ({gpu}); {rounds} rounds of {} turns", common.device, turns.len());
    println!("NCCL's logs are in {}", logs.display());
    skipped.iter().for_each(|reason| println!("SKIP {reason}"));

    let deadline = Instant::now() + Duration::from_secs(args.time_limit);
    let turn_limit = Duration::from_secs(args.turn_limit);
    let mut measured = Measured::default();
    let mut failures = Vec::new();
    let mut broken = BTreeSet::new();
    let (mut begun, mut done) = (0, 0);
    for setting in (0..rounds).flat_map(|_| &turns) {
        begun += 1;
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            println!("time is over after {done} of {planned} turns (--time-limit {})", args.time_limit);
            break;
        }
        if broken.contains(setting) {
            continue;
        }
        let start = Instant::now();
        let result = compare.turn(setting, left.min(turn_limit), &mut measured);
        let took = start.elapsed().as_secs_f64();
        match result {
            Ok(rows) => {
                done += 1;
                println!("turn {begun} of {planned}: {setting}: {rows} rows in {took:.1} s");
            }
            Err(error) if Instant::now() >= deadline => println!("turn {begun} of {planned}: cut short: {error:#}"),
            Err(error) => {
                println!("FAIL turn {begun} of {planned}: {setting} after {took:.1} s: {error:#}");
                failures.push(format!("{setting}: {error:#}"));
                broken.insert(setting);
            }
        }
    }

    let report = Report {
        command: std::env::args().collect::<Vec<_>>().join(" "),
        nccl: version,
        gpu,
        channels: common.channels,
        mps: mps_runs(),
        networks: args.nets.clone(),
        turns_done: done,
        turns_planned: planned,
        lines: measured.lines(&args.nets, &args.paths, &ranks, &compare.job),
        failures,
        skipped,
    };
    let text = report.markdown();
    println!("\n{text}");
    if let Some(out) = &args.out {
        for (ending, text) in [("md", text), ("json", serde_json::to_string_pretty(&report)? + "\n")] {
            let file = PathBuf::from(format!("{}.{ending}", out.display()));
            fs::write(&file, text).with_context(|| file.display().to_string())?;
            println!("written: {}", file.display());
        }
    }
    let wrong: u64 = report.lines.iter().flat_map(|line| line.networks.values()).map(|f| f.wrong).sum();
    ensure!(wrong == 0, "{wrong} elements are wrong");
    ensure!(report.failures.is_empty(), "failed: {}", report.failures.join("; "));
    ensure!(!report.lines.is_empty(), "nothing was measured in the time that there was");
    Ok(())
}

/// The control daemon of CUDA MPS leaves this where clients look for it.
fn mps_runs() -> bool {
    let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").unwrap_or_else(|| "/tmp/nvidia-mps".into());
    Path::new(&folder).join("control").exists()
}

/// The turns of one round, and what cannot be done.
fn plan(nets: &[String], paths: &[GpuPath], ranks: &[usize], version: &str) -> (Vec<Setting>, Vec<String>) {
    let mut turns = Vec::new();
    let mut skipped = Vec::new();
    for &ranks in ranks {
        for &path in paths {
            for net in nets {
                let setting = Setting::plain(net, path, ranks);
                match setting.impossible(version) {
                    Some(reason) => skipped.push(format!("{setting}: {reason}")),
                    None if turns.contains(&setting) => {}
                    None => turns.push(setting),
                }
            }
        }
    }
    (turns, skipped)
}

impl Compare<'_> {
    /// One network's turn in fresh processes, all protocols and sizes. The number of rows.
    fn turn(&self, setting: &Setting, time_limit: Duration, measured: &mut Measured) -> anyhow::Result<usize> {
        let log_of = |rank: &str| self.logs.join(format!("compare-{}-rank{rank}.log", setting.slug()));
        super::forget_logs(setting, log_of);
        let spec = Spec {
            ranks: setting.ranks,
            job: procs::Job::NcclCompare(self.job.clone()),
            env: setting.environment(self.libraries, None, self.channels, &log_of("{rank}"))?,
            same_host: false,
            per_host: 1,
            time_limit,
            dies: None,
            meeting: None,
        };
        let mut gathered = Gathered::new(setting.ranks);
        let outcomes = procs::run(&spec, |_, value| {
            if let Ok(row) = serde_json::from_value::<Row>(value) {
                gathered.add(row);
            }
        })?;
        let failure = procs::failure(&outcomes).map(|why| why + &super::warnings(setting, log_of));
        // Times of another network than the one that was asked for would be worse than none.
        if let Err(unproven) = super::proven(setting, log_of) {
            bail!(failure.map_or_else(|| format!("{unproven:#}"), |why| format!("{unproven:#}; {why}")));
        }
        if failure.is_none() {
            let first = log_of("0");
            let log = fs::read(&first).with_context(|| first.display().to_string())?;
            took_protocols(&String::from_utf8_lossy(&log), &self.job.protocols)?;
        }
        gathered.complete.iter().for_each(|row| measured.add(setting, row));
        if let Some(why) = failure {
            bail!("{why}");
        }
        let expected = self.job.sizes.len() * self.job.protocols.len();
        ensure!(gathered.complete.len() == expected, "{} of {expected} rows came", gathered.complete.len());
        Ok(expected)
    }
}

/// NCCL tells of the variable each time it reads it: one process goes through all protocols.
fn took_protocols(log: &str, protocols: &[String]) -> anyhow::Result<()> {
    let told: Vec<_> = log.lines().filter_map(|line| line.split_once("NCCL_PROTO set by environment to ")).collect();
    let missing = protocols.iter().find(|p| *p != DEFAULT && !told.iter().any(|(_, value)| value.trim() == *p));
    ensure!(
        missing.is_none(),
        "no line says 'NCCL_PROTO set by environment to {}'",
        missing.map_or("", String::as_str)
    );
    Ok(())
}

/// Rows of all ranks become one: an operation takes as long as the slowest rank.
#[derive(Debug)]
struct Gathered {
    ranks: usize,
    partial: Vec<(Row, usize)>,
    complete: Vec<Row>,
}

impl Gathered {
    fn new(ranks: usize) -> Self {
        Self { ranks, partial: Vec::new(), complete: Vec::new() }
    }

    fn add(&mut self, row: Row) {
        let same = |(other, _): &(Row, usize)| (other.protocol, other.bytes) == (row.protocol, row.bytes);
        let Some(at) = self.partial.iter().position(same) else {
            self.partial.push((row, 1));
            return;
        };
        let (all, count) = &mut self.partial[at];
        for (most, seconds) in all.seconds.iter_mut().zip(&row.seconds) {
            *most = most.max(*seconds);
        }
        all.wrong += row.wrong;
        *count += 1;
        if *count == self.ranks {
            let (row, _) = self.partial.swap_remove(at);
            self.complete.push(row);
        }
    }
}

impl Report {
    fn markdown(&self) -> String {
        let mut table = comfy_table::Table::new();
        table.load_style(presets::ASCII_MARKDOWN);
        let mut head: Vec<_> = ["proto", "ranks", "path", "size (B)"].map(str::to_owned).into();
        head.extend(self.networks.iter().flat_map(|net| [format!("{net}: us (min..max)"), "busbw".to_owned()]));
        let base = self.networks.first().map_or("", String::as_str);
        head.extend(self.networks.iter().skip(1).map(|net| format!("{net}/{base}")));
        head.push("#wrong".to_owned());
        table.set_header(head);
        for line in &self.lines {
            let mut cells =
                vec![line.protocol.clone(), line.ranks.to_string(), line.path.to_owned(), line.bytes.to_string()];
            for net in &self.networks {
                cells.extend(line.networks.get(net).map_or_else(
                    || ["-".to_owned(), "-".to_owned()],
                    |f| {
                        let time = format!("{:.1} ({:.1}..{:.1})", f.median_us, f.min_us, f.max_us);
                        [time, format!("{:.3}", f.busbw)]
                    },
                ));
            }
            let ratio = |net| line.ratios.get(net).map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
            cells.extend(self.networks.iter().skip(1).map(ratio));
            cells.push(line.networks.values().map(|f| f.wrong).sum::<u64>().to_string());
            table.add_row(cells);
        }
        let mps = if self.mps { "with CUDA MPS" } else { "without CUDA MPS (times mean little)" };
        let mut text = format!(
            "`{}`\n\nNCCL {} on {}, up to {} channels, {mps}; all_reduce of float, out of place; {} of {} turns. Time of one \
             operation: median (min..max) of all repetitions of all turns; busbw in GB/s; ratios of times, above 1 {base} \
             is faster; Socket goes through host memory on every path.\n\n{table}\n",
            self.command, self.nccl, self.gpu, self.channels, self.turns_done, self.turns_planned
        );
        for (word, list) in [("Failed", &self.failures), ("Skipped", &self.skipped)] {
            for entry in list {
                text += &format!("\n- {word}: {entry}");
            }
        }
        if !text.ends_with('\n') {
            text.push('\n');
        }
        text
    }
}

/// Values repeat after this many elements: no more have to be made, however large the buffers.
const PERIOD: usize = 1_000_003;
const ELEMENT: usize = 4;

/// Elements that are others than those that must be there.
fn differing(got: &[u8], must: &[u8]) -> u64 {
    if got == must {
        return 0;
    }
    let pairs = got.as_chunks::<ELEMENT>().0.iter().zip(must.as_chunks::<ELEMENT>().0);
    u64::try_from(pairs.filter(|(got, must)| got != must).count()).unwrap_or(u64::MAX)
}

/// Repeats the elements of one period over the whole slice.
fn pave(out: &mut [u8], element: impl Fn(usize) -> i32) {
    let most = (PERIOD * ELEMENT).min(out.len());
    let (period, _) = out.split_at_mut(most);
    let (elements, _) = period.as_chunks_mut::<ELEMENT>();
    for (i, place) in elements.iter_mut().enumerate() {
        place.copy_from_slice(&encode(Kind::Float, element(i))[..ELEMENT]);
    }
    let mut done = most;
    while done < out.len() {
        let next = (out.len() - done).min(most);
        out.copy_within(..next, done);
        done += next;
    }
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let gpu = Gpu::open(job.device)?;
    let nccl = Nccl::load(job.nccl.as_deref())?;
    let most = job.sizes.iter().copied().max().unwrap_or(0);
    let (input, output) = (gpu.alloc(most + SLACK)?, gpu.alloc(most)?);
    let (mut expected, mut got) = (vec![0; most + SLACK], vec![0; most + SLACK]);
    pave(&mut got, |i| value(seat.rank, i, 0));
    gpu.upload(&input, &got)?;
    pave(&mut expected, |i| (0..seat.ranks).map(|rank| value(rank, i, 0)).sum());
    // Operations that have been done.
    let mut next = 0;
    for (protocol, name) in job.protocols.iter().enumerate() {
        // NCCL reads this one variable whenever a communicator begins.
        if name == DEFAULT {
            // SAFETY: between communicators no thread of NCCL is at work, and this program's others read no variables.
            unsafe { std::env::remove_var("NCCL_PROTO") };
        } else {
            // SAFETY: as above.
            unsafe { std::env::set_var("NCCL_PROTO", name) };
        }
        let comm = super::join(&nccl, seat, mail, &format!("unique id {protocol}"))?;
        for &bytes in &job.sizes {
            let reduce = |first: usize, times: usize| -> anyhow::Result<f64> {
                let start = Instant::now();
                for n in first..first + times {
                    let from = Place::from(&input).skip(turn(n));
                    comm.all_reduce(&gpu, from, (&output).into(), bytes / ELEMENT, Kind::Float)?;
                }
                comm.wait(&gpu, PATIENCE)?;
                Ok(start.elapsed().as_secs_f64() / f64::from(u32::try_from(times)?))
            };
            let mut judge = |n: usize| -> anyhow::Result<u64> {
                let got = &mut got[..bytes];
                gpu.download(got, &output)?;
                Ok(differing(got, &expected[turn(n)..][..bytes]))
            };
            gpu.wipe(&output, 0xff)?;
            reduce(next, 1)?;
            let mut wrong = judge(next)?;
            gpu.wipe(&output, 0xff)?;
            // One more brings the ranks together before the clock starts.
            reduce(next + 1, 1)?;
            next += 2;
            let (repetitions, operations) = effort(bytes);
            let mut seconds = Vec::new();
            for _ in 0..repetitions {
                seconds.push(reduce(next, operations)?);
                next += operations;
            }
            wrong += judge(next - 1)?;
            mail.report(&Row { protocol, bytes, seconds, wrong })?;
        }
        mail.barrier(Instant::now() + PATIENCE)?;
        comm.destroy()?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::values::TURNS;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn row(bytes: usize, seconds: &[f64], wrong: u64) -> Row {
        Row { protocol: 0, bytes, seconds: seconds.to_vec(), wrong }
    }

    #[test]
    fn the_largest_size_is_always_there() {
        assert_eq!(sizes(8, 256, 4), [8, 32, 128, 256]);
        assert_eq!(sizes(8, 128, 4), [8, 32, 128]);
        assert_eq!(sizes(8, 8, 4), [8]);
    }

    #[test]
    fn socket_runs_once_for_all_paths() {
        let (turns, skipped) =
            plan(&names(&["RDMA", "IB", "Socket"]), &[GpuPath::Host, GpuPath::Dmabuf], &[2], "2.28.9");
        let turns: Vec<_> = turns.iter().map(Setting::slug).collect();
        let right = ["RDMA-host", "IB-host", "Socket-host", "RDMA-dmabuf", "IB-dmabuf"];
        assert_eq!(turns, right.map(|turn| format!("{turn}-2ranks")));
        assert!(skipped.is_empty());
    }

    #[test]
    fn the_slowest_rank_counts() {
        let mut gathered = Gathered::new(2);
        gathered.add(row(8, &[1.0, 5.0], 0));
        gathered.add(row(32, &[7.0, 7.0], 0));
        assert!(gathered.complete.is_empty());
        gathered.add(row(8, &[2.0, 4.0], 3));
        assert_eq!(gathered.complete.len(), 1);
        assert_eq!((&*gathered.complete[0].seconds, gathered.complete[0].wrong), (&[2.0, 5.0][..], 3));
    }

    #[test]
    fn medians_and_ratios_are_over_all_rounds() {
        let nets = names(&["RDMA", "IB", "Socket"]);
        let job = Job { nccl: None, device: 0, protocols: names(&["LL"]), sizes: vec![1000] };
        let mut measured = Measured::default();
        let us = |times: &[f64]| row(1000, &times.iter().map(|t| t * 1e-6).collect::<Vec<_>>(), 0);
        let [ours, ib, socket] = nets.each_setting();
        measured.add(&ours, &us(&[9.0, 10.0]));
        measured.add(&ours, &us(&[11.0, 50.0, 1.0]));
        measured.add(&ib, &us(&[15.0, 25.0]));
        measured.add(&socket, &us(&[40.0]));
        let lines = measured.lines(&nets, &[GpuPath::Dmabuf], &[2], &job);
        assert_eq!(lines.len(), 1);
        let near = |a: f64, b: f64| (a - b).abs() < 1e-9;
        let figures = &lines[0].networks["RDMA"];
        assert!(near(figures.median_us, 10.0) && near(figures.min_us, 1.0) && near(figures.max_us, 50.0));
        assert_eq!(figures.repetitions, 5);
        assert!(near(figures.busbw, 0.1), "{figures:?}");
        assert!(near(lines[0].ratios["IB"], 2.0) && near(lines[0].ratios["Socket"], 4.0));
        assert!(!lines[0].ratios.contains_key("RDMA"));
    }

    trait EachSetting {
        fn each_setting(&self) -> [Setting; 3];
    }

    impl EachSetting for Vec<String> {
        fn each_setting(&self) -> [Setting; 3] {
            [0, 1, 2].map(|i| Setting::plain(&self[i], GpuPath::Dmabuf, 2))
        }
    }

    #[test]
    fn a_missing_network_leaves_a_gap_and_the_failure_is_told() {
        let nets = names(&["RDMA", "IB"]);
        let job = Job { nccl: None, device: 0, protocols: names(&[DEFAULT]), sizes: vec![8] };
        let mut measured = Measured::default();
        measured.add(&Setting::plain("RDMA", GpuPath::Host, 2), &row(8, &[20e-6], 0));
        let report = Report {
            command: "nccl-rdma nccl-compare".to_owned(),
            nccl: "2.28.9".to_owned(),
            gpu: "a GPU".to_owned(),
            channels: 2,
            mps: true,
            networks: nets.clone(),
            turns_done: 1,
            turns_planned: 2,
            lines: measured.lines(&nets, &[GpuPath::Host], &[2], &job),
            failures: names(&["IB, path host, 2 ranks: rank 0: it broke"]),
            skipped: Vec::new(),
        };
        let text = report.markdown();
        assert!(text.contains("| default | 2     | host | 8        | 20.0 (20.0..20.0)"), "{text}");
        assert!(text.contains("| -"), "{text}");
        assert!(text.contains("\n- Failed: IB, path host, 2 ranks: rank 0: it broke\n"), "{text}");
        assert!(serde_json::to_string(&report).unwrap().contains("\"median_us\""));
    }

    #[test]
    fn a_protocol_that_was_not_taken_is_seen() {
        let log = "x NCCL INFO NCCL_PROTO set by environment to LL128\nx NCCL INFO Using network RDMA\n";
        took_protocols(log, &names(&[DEFAULT, "LL128"])).unwrap();
        assert!(took_protocols(log, &names(&["LL"])).unwrap_err().to_string().ends_with("to LL'"));
    }

    #[test]
    fn paving_repeats_the_period() {
        let mut out = vec![0; PERIOD * 8 + 40];
        pave(&mut out, |i| value(1, i, 0));
        let (elements, rest) = out.as_chunks::<ELEMENT>();
        let must = |i: usize| encode(Kind::Float, value(1, i % PERIOD, 0));
        assert!(rest.is_empty() && elements.iter().enumerate().all(|(i, e)| *e == must(i)[..ELEMENT]));
    }

    #[test]
    fn the_result_of_another_operation_is_wrong() {
        let mut sums = vec![0; 4096 + SLACK];
        pave(&mut sums, |i| value(0, i, 0) + value(1, i, 0));
        let result = |n: usize| &sums[turn(n)..][..4096];
        assert_eq!(differing(result(100), result(100)), 0);
        for before in 1..TURNS {
            assert!(differing(result(100 - before), result(100)) > 1000, "{before} before");
        }
    }
}
