//! The `nccl-rdma` command: looks at, proves and measures the plugin through nothing but the table that NCCL uses.

mod abi;
mod adapter;
mod bench;
mod contract;
mod cost;
mod devices;
mod env;
mod gpu;
mod hosts;
mod nccl;
mod perf;
mod pipe;
mod procs;
mod ring;
mod table;
mod tear;
mod values;
mod wire;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Parser, Subcommand};

use hosts::Meeting;
use procs::Job;

/// Looks at, proves and measures libnccl-net-rdma.so, the NCCL network plugin over RDMA.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Args)]
struct PluginArg {
    /// The plugin: a path, or a name as NCCL_NET_PLUGIN takes it [default: ../lib/libnccl-net-rdma.so beside this
    /// command, then the dynamic linker's search]
    #[arg(long, value_name = "PATH")]
    plugin: Option<PathBuf>,
}

impl PluginArg {
    fn path(&self) -> PathBuf {
        self.plugin.clone().unwrap_or_else(abi::default_plugin)
    }
}

#[derive(Debug, Args)]
struct HostsArg {
    /// Run every other process on a second host, which joins by `nccl-rdma join` with this address. The plugin has the same
    /// path there; its settings are those of that host's environment
    #[arg(long, value_name = "ADDR:PORT")]
    meet: Option<String>,
}

impl HostsArg {
    fn open(&self) -> anyhow::Result<Option<Meeting>> {
        self.meet.as_deref().map(Meeting::open).transpose()
    }
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print what NCCL would be told about the devices of this machine, and why others are left out
    Devices {
        #[command(flatten)]
        plugin: PluginArg,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Print every setting of the plugin, the value in force and where it comes from
    Env {
        /// Print the table of docs/environment.md
        #[arg(long)]
        markdown: bool,
    },
    /// Do to the plugin all that NCCL does and may do, between processes, and check every byte
    Contract(ContractArgs),
    /// Ring all-reduce between processes on host memory through the plugin, every element checked
    Demo(DemoArgs),
    /// Latency and bandwidth between two processes through the plugin
    Perf(PerfArgs),
    /// What the ways of GPU data cost on this machine (exit status 3: no GPU here)
    #[command(subcommand)]
    Bench(bench::Command),
    /// Be the second host of a contract, demo, perf or bench that was started with --meet, until it ends
    Join {
        /// Where --meet listens, as this host reaches the first one
        #[arg(value_name = "HOST:PORT")]
        address: String,
    },
    /// NCCL itself on GPUs through a network, every element checked (exit status 3: no GPU or no NCCL here; 4: NCCL
    /// can't do what was asked for)
    NcclCheck(nccl::check::Args),
    /// The plugin, NCCL's own IB transport and its Socket transport side by side on a GPU: all_reduce, times and ratios
    NcclCompare(nccl::compare::Args),
    /// Whether writes reach GPU and host memory in the whole units that NCCL's LL and LL128 need, watched by a kernel
    Tear(tear::Args),
    /// Instructions per message, counted by callgrind over a software adapter without threads
    #[command(hide = true)]
    Cost(cost::CostArgs),
    /// One process of another subcommand
    #[command(hide = true)]
    Rank { seat: String },
}

/// Ends of a connection whose buffers are in GPU memory.
#[derive(Clone, Copy, Debug, clap::ValueEnum)]
enum GpuEnds {
    Send,
    Recv,
    Both,
}

#[derive(Debug, Args)]
struct ContractArgs {
    #[command(flatten)]
    plugin: PluginArg,
    #[command(flatten)]
    hosts: HostsArg,
    /// Version of NCCL's plugin ABI [default: the highest that the plugin exports, as NCCL takes it]
    #[arg(long, value_enum, value_name = "VERSION")]
    abi: Option<abi::Version>,
    /// Processes in the cases that take any number
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..=8))]
    procs: u8,
    /// Message sizes in bytes
    #[arg(long, value_delimiter = ',', value_parser = table::parse_bytes,
          default_value = "0,1,7,8,100,4096,65535,65536,65537,1M,8M")]
    sizes: Vec<usize>,
    /// Largest grouped receive
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=8))]
    groups: u8,
    /// Seed of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Index of the device to use
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    dev: i32,
    /// Fewer rounds, nothing above 1 MiB but one message of 16 MiB
    #[arg(long)]
    quick: bool,
    /// What is in GPU memory: of a CUDA driver that lets the CPU look into it, which is the tests' stand-in
    #[arg(long, value_enum, value_name = "ENDS")]
    gpu: Option<GpuEnds>,
    /// Let a software adapter see all processes as one host (otherwise SOFT_HCA_HOST is set to h0, h1, ...)
    #[arg(long)]
    same_host: bool,
    /// Bound of one case in seconds
    #[arg(long, default_value_t = 90, value_name = "S", value_parser = table::seconds())]
    time_limit: u64,
    /// A rank must hear of its peer's death within this many seconds
    #[arg(long, default_value_t = 20, value_name = "S", value_parser = table::seconds())]
    error_bound: u64,
    /// connect must give up on a listener that has gone within this many seconds
    #[arg(long, default_value_t = 75, value_name = "S", value_parser = table::seconds())]
    connect_bound: u64,
    /// Print the cases and what they are about
    #[arg(long)]
    list: bool,
    /// Play only this case (may be given more than once)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
}

impl ContractArgs {
    fn run(&self) -> anyhow::Result<()> {
        if self.list {
            contract::list();
            return Ok(());
        }
        let most = if self.quick { 1 << 20 } else { usize::MAX };
        let options = contract::Options {
            plugin: self.plugin.path(),
            abi: self.abi,
            dev: self.dev,
            procs: usize::from(self.procs),
            sizes: self.sizes.iter().copied().filter(|&size| size <= most).collect(),
            groups: usize::from(self.groups),
            seed: self.seed,
            quick: self.quick,
            memory: match self.gpu {
                None => [abi::Place::Host; 2],
                Some(GpuEnds::Send) => [abi::Place::Gpu, abi::Place::Host],
                Some(GpuEnds::Recv) => [abi::Place::Host, abi::Place::Gpu],
                Some(GpuEnds::Both) => [abi::Place::Gpu; 2],
            },
            same_host: self.same_host,
            time_limit: Duration::from_secs(self.time_limit),
            error_bound: Duration::from_secs(self.error_bound),
            connect_bound: Duration::from_secs(self.connect_bound),
        };
        contract::run(&options, &self.only, self.hosts.open()?.as_ref())
    }
}

#[derive(Debug, Args)]
struct DemoArgs {
    #[command(flatten)]
    plugin: PluginArg,
    #[command(flatten)]
    hosts: HostsArg,
    /// Processes in the ring
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u8).range(2..=64))]
    ranks: u8,
    /// Smallest size
    #[arg(long, default_value = "8", value_parser = table::parse_bytes)]
    min: usize,
    /// Largest size
    #[arg(long, default_value = "64M", value_parser = table::parse_bytes)]
    max: usize,
    /// Operations per size (a quarter of them above 1 MiB)
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..))]
    iters: u32,
    /// Index of the device to use
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    dev: i32,
    /// Let a software adapter see all processes as one host
    #[arg(long)]
    same_host: bool,
    /// Connect anew for each size, after so many seconds of rest
    #[arg(long, value_name = "S")]
    anew: Option<u64>,
    /// Print each rank's log lines of the plugin and how it ended
    #[arg(long, short)]
    verbose: bool,
}

impl DemoArgs {
    fn run(&self) -> anyhow::Result<()> {
        let sizes = table::doubling(self.min.max(4), self.max);
        anyhow::ensure!(!sizes.is_empty(), "no size between {} and {}", self.min, self.max);
        let iters = usize::try_from(self.iters)?;
        let job = ring::Job { plugin: self.plugin.path(), dev: self.dev, sizes, iters, anew: self.anew };
        ring::run(&job, usize::from(self.ranks), self.same_host, self.hosts.open()?.as_ref(), self.verbose)
    }
}

#[derive(Debug, Args)]
struct PerfArgs {
    #[command(flatten)]
    plugin: PluginArg,
    #[command(flatten)]
    hosts: HostsArg,
    /// Message sizes in bytes
    #[arg(long, value_delimiter = ',', value_parser = table::parse_bytes, default_value = "8,512,4K,64K,512K,4M")]
    sizes: Vec<usize>,
    /// Requests in flight when streaming
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=32))]
    depth: u8,
    /// Rounds, after one to warm up
    #[arg(long, default_value_t = 7, value_parser = clap::value_parser!(u8).range(1..))]
    rounds: u8,
    /// Bytes to stream in a round, at least 4 messages and at most 2000
    #[arg(long, default_value = "64M", value_parser = table::parse_bytes)]
    volume: usize,
    /// Index of the device to use
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    dev: i32,
    /// Let a software adapter see both processes as one host
    #[arg(long)]
    same_host: bool,
}

impl PerfArgs {
    fn run(&self) -> anyhow::Result<()> {
        let (sizes, depth) = (self.sizes.clone(), usize::from(self.depth));
        let rounds = usize::from(self.rounds);
        let job = perf::Job { plugin: self.plugin.path(), dev: self.dev, sizes, depth, rounds, volume: self.volume };
        perf::run(&job, self.same_host, self.hosts.open()?.as_ref())
    }
}

impl Command {
    /// Has a reader that has seen enough (`| head`) end this process quietly, as it ends others; but not one that writes to
    /// sockets: it must see the error instead.
    fn end_with_the_reader(&self) {
        let prints = match self {
            Self::Devices { .. } | Self::Env { .. } => true,
            Self::Contract(args) => args.list,
            _ => false,
        };
        if prints {
            // SAFETY: the default action, and the process has no other thread yet.
            unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        }
    }
}

/// Exit status where the machine lacks what a command needs.
const ABSENT: u8 = 3;
/// Exit status where NCCL can do nothing of what was asked for.
const IMPOSSIBLE: u8 = 4;

fn main() -> ExitCode {
    let command = Cli::parse().command;
    command.end_with_the_reader();
    let result = match command {
        Command::Devices { plugin, json } => devices::run(&plugin.path(), json),
        Command::Env { markdown } => {
            env::run(markdown);
            Ok(())
        }
        Command::Contract(args) => args.run(),
        Command::Demo(args) => args.run(),
        Command::Perf(args) => args.run(),
        Command::Bench(command) => command.run(),
        Command::Join { address } => hosts::join(&address),
        Command::NcclCheck(args) => nccl::check::run(&args),
        Command::NcclCompare(args) => nccl::compare::run(&args),
        Command::Tear(args) => tear::run(&args),
        Command::Cost(args) => cost::run(&args),
        Command::Rank { seat } => {
            return procs::rank_main(&seat, |seat, mail| match &seat.job {
                Job::Contract(job) => contract::rank_main(job, seat, mail),
                Job::Ring(job) => ring::rank_main(job, seat, mail),
                Job::Perf(job) => perf::rank_main(job, seat, mail),
                Job::Bench(job) => bench::measure::rank_main(job, seat, mail),
                Job::NcclCheck(job) => nccl::check::rank_main(job, seat, mail),
                Job::Tear(job) => tear::rank_main(job, mail),
                Job::NcclCompare(job) => nccl::compare::rank_main(job, seat, mail),
            });
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nccl-rdma: {error:#}");
            if error.is::<gpu::Absent>() {
                ExitCode::from(ABSENT)
            } else if error.is::<nccl::check::Impossible>() {
                ExitCode::from(IMPOSSIBLE)
            } else {
                ExitCode::FAILURE
            }
        }
    }
}
