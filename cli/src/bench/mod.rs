//! `nccl-rdma bench paths`: what each way of GPU data costs on this machine (staging through host memory, GPUDirect, host
//! memory alone), by message size, through the plugin as NCCL calls it. It prints and plots the figures and writes the
//! profile that `NCCL_NET_RDMA_PROFILE` names.

mod machine;
pub(crate) mod measure;
mod plot;
mod results;

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use nccl_net_rdma::memory::profile::{self, Profile, Rule, Way};

use crate::adapter::{Adapter, AdapterArgs};
use crate::gpu::Gpu;
use crate::hosts::Meeting;
use crate::procs::{self, Spec};
use crate::{HostsArg, PluginArg, table};
use measure::{Job, Note, Using};
use plot::Chart;
use results::{Results, WAYS, rules_in_words};
use tempfile::NamedTempFile;

#[derive(Debug, clap::Subcommand)]
pub(crate) enum Command {
    /// Each way of GPU data to the NIC by message size: latency, bandwidth, CPU, PCIe traffic; a plot and a profile
    Paths(Args),
}

impl Command {
    pub(crate) fn run(&self) -> anyhow::Result<()> {
        match self {
            Self::Paths(args) => run(args),
        }
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    plugin: PluginArg,
    #[command(flatten)]
    hosts: HostsArg,
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Paths to measure
    #[arg(long, value_delimiter = ',', default_value = "staging,gdr,host", value_parser = parse_way,
          value_name = "staging|gdr|host")]
    paths: Vec<Way>,
    /// Index of the GPU
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    device: i32,
    /// Index of the plugin's device
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    dev: i32,
    /// Smallest size
    #[arg(long, default_value = "8", value_parser = table::parse_bytes)]
    min: usize,
    /// Largest size
    #[arg(long, default_value = "64M", value_parser = table::parse_bytes)]
    max: usize,
    /// Requests in flight when streaming
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=32))]
    depth: u8,
    /// Turns of each path, in fresh processes each time
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Time for each measurement of a size in a turn
    #[arg(long, default_value_t = 40, value_name = "MS", value_parser = clap::value_parser!(u16).range(1..))]
    budget: u16,
    /// Flush what is received also on GPUs that need none
    #[arg(long)]
    flush: bool,
    /// Let a software adapter see both processes as one host
    #[arg(long)]
    same_host: bool,
    /// No turn begins or goes on after this many seconds
    #[arg(long, default_value_t = 300, value_name = "S", value_parser = table::seconds())]
    time_limit: u64,
    /// Folder for profile.json, paths.svg and paths.png; those of an earlier run stay unless this one makes a profile
    #[arg(long, value_name = "DIR", overrides_with = "out")]
    out: Option<PathBuf>,
}

fn parse_way(text: &str) -> Result<Way, String> {
    WAYS.into_iter().find(|way| way.to_string() == text).ok_or_else(|| "staging, gdr or host".to_owned())
}

const FIGURES: &str = "\
us         one way: half a round trip of a single message; the data are where the path has them (staging, gdr: GPU memory)
GB/s       a stream, with the receiver's answer to the last message
CPU %      of a core, of sender and receiver: what messages at that bandwidth cost beyond polling. It is the CPU time of all
           threads of the process (user and system) for a stream whose caller sleeps while nothing moves, less that of as many
           idle turns, over the time that the stream took above. NCCL's own thread polls besides, whichever the path
PCIe       bytes that cross it for each byte of a message at one side, from the copies made: gdr 1 (GPU to NIC), staging 2 (GPU
           to host memory to NIC), host 2 (NCCL's kernels to host memory, host memory to NIC)
host       here is the NIC's part alone: what NCCL's kernels need to write host memory and to read it comes on top";

const SOFTWARE: &str = "\
The adapter is software: every path is a copy by a CPU or by the GPU, and the copying counts as CPU time here. These figures
prove that the tool works; they say nothing about which path is best with a NIC.";

/// What does not change from turn to turn.
struct Bench<'a> {
    args: &'a Args,
    adapter: &'a Adapter,
    meeting: Option<&'a Meeting>,
    sizes: Vec<usize>,
    bar: ProgressBar,
}

/// How a turn went.
enum Turn {
    Done,
    Refused(String),
}

fn run(args: &Args) -> anyhow::Result<()> {
    let sizes = table::doubling(args.min, args.max);
    ensure!(!sizes.is_empty(), "no size between {} and {}", args.min, args.max);
    let ways: Vec<_> = WAYS.into_iter().filter(|way| args.paths.contains(way)).collect();
    let gpu = match Gpu::probe(args.device) {
        Ok(name) => {
            let (major, minor) = Gpu::compute_capability(args.device)?;
            let compute_capability = Some(format!("{major}.{minor}"));
            Some(profile::Gpu { name, compute_capability, bus_id: Gpu::bus_id(args.device)? })
        }
        Err(_) if ways == [Way::Host] => None,
        Err(error) => {
            return Err(error.context("staging and gdr need a GPU (--paths host measures host memory without one)"));
        }
    };
    if let Some(folder) = &args.out {
        prepare(folder)?;
    }
    let scratch = tempfile::Builder::new().prefix("nccl-rdma-bench-").tempdir()?;
    let adapter = args.adapter.resolve(scratch.path())?;
    let meeting = args.hosts.open()?;
    let rounds = usize::from(args.rounds);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sizes  {msg}  {elapsed}")?;
    let bar = ProgressBar::new(u64::try_from(ways.len() * rounds * sizes.len())?).with_style(style);
    let bench = Bench { args, adapter: &adapter, meeting: meeting.as_ref(), sizes, bar };
    let names = ways.iter().map(Way::to_string).collect::<Vec<_>>().join(", ");
    let on = gpu.as_ref().map_or_else(|| "no GPU".to_owned(), |gpu| format!("GPU {} ({})", args.device, gpu.name));
    println!("paths {names}; {on}; plugin {}; {rounds} turns each, {} deep", args.plugin.path().display(), args.depth);

    let deadline = Instant::now() + Duration::from_secs(args.time_limit);
    let mut results = Results::default();
    let mut using = None;
    let mut refused: Vec<(Way, String)> = Vec::new();
    let mut failures = Vec::new();
    for round in 0..rounds {
        // There and back, so that what drifts does so for all.
        let order: Vec<_> = if round % 2 == 0 { ways.clone() } else { ways.iter().rev().copied().collect() };
        for way in order {
            let left = deadline.saturating_duration_since(Instant::now());
            if refused.iter().any(|(other, _)| *other == way) {
                continue;
            }
            if left.is_zero() {
                failures.push(format!("{way}: not measured in turn {}: time is over (--time-limit)", round + 1));
                continue;
            }
            match bench.turn(way, left, &mut results, &mut using) {
                Ok(Turn::Done) => {}
                Ok(Turn::Refused(why)) => refused.push((way, why)),
                Err(error) => failures.push(format!("{way}: {error:#}")),
            }
        }
    }
    bench.bar.finish_and_clear();
    drop(scratch);
    results.finish(args, using.as_ref(), gpu, &refused, &failures)
}

impl Bench<'_> {
    /// One path, all sizes, in fresh processes.
    fn turn(
        &self,
        way: Way,
        time_limit: Duration,
        results: &mut Results,
        using: &mut Option<Using>,
    ) -> anyhow::Result<Turn> {
        let mut env = self.adapter.environment();
        env.push(("NCCL_NET_RDMA_GPU_PATH".to_owned(), way.to_string()));
        // The plugin leaves out what NCCL would not show, and its words tell why a path is not to be had.
        env.push(("NCCL_DEBUG".to_owned(), "INFO".to_owned()));
        let spec = Spec {
            ranks: 2,
            job: procs::Job::Bench(Job {
                plugin: self.args.plugin.path(),
                dev: self.args.dev,
                way,
                gpu: self.args.device,
                sizes: self.sizes.clone(),
                depth: usize::from(self.args.depth),
                flush: self.args.flush,
                budget: Duration::from_millis(u64::from(self.args.budget)),
            }),
            env,
            same_host: self.args.same_host,
            per_host: 1,
            time_limit,
            dies: None,
            meeting: self.meeting,
        };
        let mut refused = None;
        let mut measured = 0;
        let start = Instant::now();
        self.bar.set_message(way.to_string());
        let outcomes = procs::run(&spec, |rank, value| match serde_json::from_value(value) {
            Ok(Note::Using(now)) => {
                self.bar.suspend(|| println!("{way}: device {}, {}", now.machine.nic.name, now.memory_in_words()));
                *using = Some(now);
            }
            Ok(Note::Refused(why)) => refused = Some(why),
            Ok(Note::Row(row)) => {
                results.add(way, rank, &row);
                if rank == 0 {
                    measured += 1;
                    self.bar.set_message(format!("{way}, {} bytes", row.bytes));
                    self.bar.inc(1);
                }
            }
            Err(_) => {}
        })?;
        match (refused, procs::failure(&outcomes)) {
            (Some(why), _) => Ok(Turn::Refused(why)),
            (None, Some(why)) => {
                let at = self.sizes.get(measured).map_or_else(String::new, |size| format!("at {size} bytes: "));
                let over = if start.elapsed() < time_limit { "" } else { "; time is over (--time-limit)" };
                bail!("{at}{why}{over}")
            }
            (None, None) => Ok(Turn::Done),
        }
    }
}

impl Results {
    /// Prints, plots and writes what there is; an error if anything was wrong or missing.
    fn finish(
        &self,
        args: &Args,
        using: Option<&Using>,
        gpu: Option<profile::Gpu>,
        refused: &[(Way, String)],
        failures: &[String],
    ) -> anyhow::Result<()> {
        for (way, why) in refused {
            println!("SKIP {way}: {why}");
        }
        for failure in failures {
            println!("FAIL {failure}");
        }
        let Some(using) = using.filter(|_| !self.ways().is_empty()) else {
            bail!("nothing was measured");
        };
        println!("\n{}\n\n{}\n\n{FIGURES}", using.machine, self.table());
        ensure!(self.wrong == 0, "{} bytes arrived wrong", self.wrong);
        let gpu_name = gpu.as_ref().map(|gpu| gpu.name.clone());
        let gpu = gpu.filter(|_| self.ways().iter().any(|way| *way != Way::Host));
        // Half of a measurement would decide by accident.
        let rules = if gpu.is_some() && failures.is_empty() { self.rules() } else { Vec::new() };
        let best = match (&gpu, failures) {
            (None, _) => "host memory only".to_owned(),
            (Some(_), []) => rules_in_words(&rules),
            (Some(_), _) => "not everything was measured".to_owned(),
        };
        if !rules.is_empty() {
            println!("\nbest by these figures: {best}");
        }
        if !using.machine.on_bus {
            println!("\n{SOFTWARE}");
        }
        if let Some(folder) = &args.out {
            let software =
                if using.machine.on_bus { "" } else { "; software adapter: proves the tool, not a threshold" };
            let chart = Chart {
                title: format!("{} and {}", using.machine.nic.name, gpu_name.as_deref().unwrap_or("no GPU")),
                subtitle: format!("nccl-rdma bench paths; {best}{software}"),
                series: self.series(),
                crossovers: rules.iter().skip(1).map(|rule| (rule.from, rule.path.to_string())).collect(),
            };
            println!();
            let profile = match gpu {
                Some(_) if !failures.is_empty() => {
                    println!("no profile: {best}, and half of it would decide by accident");
                    None
                }
                Some(gpu) => Some(self.profile(using, gpu, rules)),
                None => {
                    println!("no profile: there is nothing to choose between with host memory alone");
                    None
                }
            };
            let file = folder.join(PROFILE);
            // It may be in use, and plots of another run beside it would mislead.
            if profile.is_none() && file.exists() {
                println!("kept: {} and the plots of its run; nothing is written", file.display());
            } else {
                write(folder, &chart, profile.as_ref())?;
            }
            if profile.is_some() {
                if let Some(why) = using.machine.not_found_again() {
                    println!("WARN the plugin will not follow this profile: {why}");
                }
                println!("to follow it: NCCL_NET_RDMA_PROFILE={}", file.display());
            }
        }
        ensure!(failures.is_empty(), "not everything was measured: {}", failures.join("; "));
        Ok(())
    }
}

impl Results {
    fn profile(&self, using: &Using, gpu: profile::Gpu, rules: Vec<Rule>) -> Profile {
        let machine = using.machine.clone();
        let pair = profile::Pair {
            nic: machine.nic,
            gpu: profile::Gpu { name: machine.gpu_name.unwrap_or(gpu.name), ..gpu },
            distance: machine.distance,
            link: machine.link,
            sizes: self.measured(),
            rules,
        };
        Profile {
            version: profile::VERSION,
            made_by: format!("nccl-rdma {} bench paths, {}", env!("CARGO_PKG_VERSION"), today()),
            adapter: machine.adapter,
            pairs: vec![pair],
        }
    }
}

/// The date (UTC) as `2026-01-31`.
fn today() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let (year, month, day) = date(now.as_secs() / 86_400);
    format!("{year:04}-{month:02}-{day:02}")
}

/// Year, month and day of a day since 1970-01-01.
fn date(day: u64) -> (u64, u64, u64) {
    // Years that begin in March have their odd day at the end; eras of 400 of them are alike.
    let day = day + 719_468;
    let (era, day) = (day / 146_097, day % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let month_of_year = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month_of_year <= 2), month_of_year, day - (153 * month + 2) / 5 + 1)
}

const PROFILE: &str = "profile.json";
const PLOTS: [&str; 2] = ["paths.svg", "paths.png"];

/// Makes the folder where there is none. That nothing can be written is told before minutes of measuring, not after.
fn prepare(folder: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(folder)
        .and_then(|()| ready(folder, b""))
        .with_context(|| format!("nothing can be written to {} (--out)", folder.display()))?;
    Ok(())
}

/// A file without a name of its own yet, with the permissions of any other.
fn ready(folder: &Path, bytes: &[u8]) -> io::Result<NamedTempFile> {
    let any = fs::Permissions::from_mode(0o666);
    let mut file = tempfile::Builder::new().prefix(".nccl-rdma-").permissions(any).tempfile_in(folder)?;
    file.write_all(bytes)?;
    Ok(file)
}

/// Writes the plots, and last the profile. All lie ready before the first takes its name: a job that reads the profile
/// meanwhile has all of the old one or all of the new.
fn write(folder: &Path, chart: &Chart, profile: Option<&Profile>) -> anyhow::Result<()> {
    let mut files = vec![(PLOTS[0], chart.svg()?.into_bytes()), (PLOTS[1], chart.png()?)];
    files.extend(profile.map(|profile| (PROFILE, profile.to_json().into_bytes())));
    let files = files.into_iter().map(|(name, bytes)| {
        let file = folder.join(name);
        ready(folder, &bytes).with_context(|| file.display().to_string()).map(|ready| (ready, file))
    });
    for (ready, file) in files.collect::<Result<Vec<_>, _>>()? {
        ready.persist(&file).with_context(|| file.display().to_string())?;
        println!("written: {}", file.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use machine::Machine;
    use measure::{Row, Times};

    #[test]
    fn days_have_dates() {
        for (day, expected) in
            [(0, (1970, 1, 1)), (11_016, (2000, 2, 29)), (20_453, (2025, 12, 31)), (20_454, (2026, 1, 1))]
        {
            assert_eq!(date(day), expected);
        }
    }

    /// Staging and GPUDirect of two sizes, on an H200.
    fn measured() -> (Results, Using, profile::Gpu) {
        let mut results = Results::default();
        for (bytes, staging, gdr) in [(8, 12e-6, 3e-6), (1 << 20, 30e-6, 60e-6)] {
            for (way, seconds) in [(Way::Staging, staging), (Way::Gdr, gdr)] {
                let times = Times { p50: seconds, p99: Some(seconds), streaming: seconds };
                results.add(way, 0, &Row { bytes, wrong: 0, cpu: 1e-6, times: Some(times) });
                results.add(way, 1, &Row { bytes, wrong: 0, cpu: 2e-6, times: None });
            }
        }
        let nic = profile::Nic {
            name: "mlx5_0".to_owned(),
            model: profile::nic_model(0x2c9, 4129),
            firmware: "28.39".to_owned(),
            port_gbps: 400.0,
        };
        let using = Using {
            machine: Machine {
                nic,
                adapter: profile::Adapter::Hardware,
                on_bus: true,
                gpu_name: Some("NVIDIA H200".to_owned()),
                distance: nccl_net_rdma::topology::distance::Distance::Pix,
                link: "NIC PCIe 32 GT/s x16".to_owned(),
            },
            memory: "GPU memory by dma-buf".to_owned(),
            flush: false,
        };
        let gpu = profile::Gpu {
            name: "H200".to_owned(),
            compute_capability: Some("9.0".to_owned()),
            bus_id: "0000:1b:00.0".to_owned(),
        };
        (results, using, gpu)
    }

    #[derive(Debug, clap::Parser)]
    struct Typed {
        #[command(flatten)]
        args: Args,
    }

    #[test]
    fn the_profile_that_is_written_is_one_that_the_plugin_reads() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().to_str().unwrap();
        let (results, using, gpu) = measured();
        let Typed { args } = clap::Parser::parse_from(["paths", "--out", out]);
        results.finish(&args, Some(&using), Some(gpu), &[], &[]).unwrap();
        let read = Profile::load(&folder.path().join("profile.json")).unwrap();
        let pair = &read.pairs[0];
        assert_eq!(pair.gpu.name, "NVIDIA H200", "the name by which the plugin finds it");
        assert!(pair.staged().contains(1 << 20) && !pair.staged().contains(8), "{:?}", pair.rules);
        let staging = pair.sizes[1].staging.unwrap();
        assert!((staging.cpu_share - 2.0 / 30.0).abs() < 1e-9 && (staging.pcie_bytes_per_byte - 2.0).abs() < 1e-9);
        let plot = fs::read_to_string(folder.path().join("paths.svg")).unwrap();
        assert!(plot.contains("staging from 1048576 B on"), "{plot}");
    }

    /// A job may open the profile at any time, and as anybody.
    #[test]
    fn a_profile_is_replaced_as_a_whole() {
        use std::io::Read as _;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join(PROFILE);
        fs::write(&file, "earlier").unwrap();
        let mut open = fs::File::open(&file).unwrap();
        let (results, using, gpu) = measured();
        let Typed { args } = clap::Parser::parse_from(["paths", "--out", folder.path().to_str().unwrap()]);
        results.finish(&args, Some(&using), Some(gpu), &[], &[]).unwrap();
        let mut read = String::new();
        open.read_to_string(&mut read).unwrap();
        assert_eq!(read, "earlier", "whoever had it open still has all of it");
        assert!(Profile::load(&file).is_ok());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
        let mode = |path: &Path| path.metadata().unwrap().permissions().mode();
        let plain = folder.path().join("plain");
        fs::write(&plain, "").unwrap();
        assert_eq!(mode(&file), mode(&plain));
    }

    /// The paths that time was left for would win.
    #[test]
    fn half_a_measurement_decides_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().to_str().unwrap();
        let (results, using, gpu) = measured();
        let Typed { args } = clap::Parser::parse_from(["paths", "--out", out]);
        let failures = ["host: not measured in turn 1".to_owned()];
        let error = results.finish(&args, Some(&using), Some(gpu), &[], &failures).unwrap_err().to_string();
        assert!(error.contains("not everything was measured"), "{error}");
        assert!(!folder.path().join("profile.json").exists());
        let plot = fs::read_to_string(folder.path().join("paths.svg")).unwrap();
        assert!(plot.contains("not everything was measured") && !plot.contains("B on"), "{plot}");
    }
}
