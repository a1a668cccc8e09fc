//! `nccl-rdma contract`: does to a plugin what NCCL does and what it may do, over real connections between processes,
//! and checks every byte. Each row of its table is one case, played by a fresh set of processes.

mod cases;
mod edges;
mod traffic;

use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::abi::{Buffer, MAX_GROUP, Place, Plugin, Properties, Version};
use crate::hosts::Meeting;
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::Table;
use crate::wire::{self, Link};
use traffic::{Flow, Incoming, Manner, Outgoing, Random};

/// What a case is played with.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Options {
    pub plugin: PathBuf,
    /// None: the highest that the plugin exports.
    pub abi: Option<Version>,
    pub dev: i32,
    /// Processes of the cases that take any number.
    pub procs: usize,
    pub sizes: Vec<usize>,
    /// Largest group.
    pub groups: usize,
    pub seed: u64,
    /// Fewer rounds, nothing above 1 MiB.
    pub quick: bool,
    /// Where what is sent is, and what is received; small special cases stay in host memory.
    pub memory: [Place; 2],
    pub same_host: bool,
    /// Bound of one case.
    pub time_limit: Duration,
    /// Within this time a rank must hear that its peer has died or given up.
    pub error_bound: Duration,
    /// Within this time connect must give up on a listener that has gone.
    pub connect_bound: Duration,
}

/// What a rank of a case gets.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    case: String,
    options: Options,
}

/// How many processes a case takes.
#[derive(Clone, Copy, Debug)]
enum Ranks {
    One,
    Two,
    Any,
}

type Play = fn(&mut Rank<'_>) -> anyhow::Result<()>;

/// One row of the table.
struct Case {
    name: &'static str,
    about: &'static str,
    ranks: Ranks,
    play: Play,
    /// Rank that kills itself as part of the case.
    dies: Option<usize>,
    /// Takes so much time or memory that it is played only when asked for by name.
    costly: bool,
}

impl Case {
    const fn new(name: &'static str, about: &'static str, ranks: Ranks, play: Play) -> Self {
        Self { name, about, ranks, play, dies: None, costly: false }
    }

    const fn kills(mut self, rank: usize) -> Self {
        self.dies = Some(rank);
        self
    }

    const fn costly(mut self) -> Self {
        self.costly = true;
        self
    }

    fn chosen(&self, only: &[String]) -> bool {
        if only.is_empty() { !self.costly } else { only.iter().any(|name| name == self.name) }
    }
}

fn all() -> Vec<Case> {
    cases::all().into_iter().chain(edges::all()).collect()
}

/// What a rank tells the parent besides success or failure.
#[derive(Serialize, Deserialize)]
enum Note {
    Skipped(String),
}

/// Prints names and meanings.
pub(crate) fn list() {
    for case in all() {
        let when = if case.costly { " (only with --only)" } else { "" };
        println!("{:<24} {}{when}", case.name, case.about);
    }
}

const ROWS: Table = Table(&[("case", -24), ("procs", 5), ("result", -6), ("time", 8), ("", -1)]);

/// Plays the cases; an error unless every one is right.
pub(crate) fn run(options: &Options, only: &[String], meeting: Option<&Meeting>) -> anyhow::Result<()> {
    ensure!(!options.sizes.is_empty(), "no size is left: with --quick there is none above 1 MiB");
    for name in only {
        ensure!(all().iter().any(|c| c.name == name), "there is no case {name:?}; see --list");
    }
    let (mut passed, mut failed, mut skipped) = (0, 0, 0);
    let version = Plugin::load(&options.plugin, options.abi)?.version().number();
    println!("contract of NCCL's network plugins, ABI v{version}: {}, seed {}", options.plugin.display(), options.seed);
    println!("{}", ROWS.head());
    for case in all().iter().filter(|c| c.chosen(only)) {
        let start = Instant::now();
        let (result, note) = match play(case, options, meeting)? {
            Verdict::Passed => {
                passed += 1;
                ("ok", String::new())
            }
            Verdict::Failed(why) => {
                failed += 1;
                ("FAIL", why)
            }
            Verdict::Skipped(why) => {
                skipped += 1;
                ("skip", why)
            }
        };
        let time = format!("{:.2} s", start.elapsed().as_secs_f64());
        let procs = ranks(case, options).to_string();
        println!("{}", ROWS.row([case.name.to_owned(), procs, result.to_owned(), time, note]));
    }
    let skips = if skipped > 0 { format!(", {skipped} skipped") } else { String::new() };
    println!("{passed} passed, {failed} failed{skips}");
    ensure!(failed == 0, "{failed} of {} cases failed", passed + failed);
    ensure!(passed > 0, "no case was played");
    Ok(())
}

enum Verdict {
    Passed,
    Failed(String),
    Skipped(String),
}

fn ranks(case: &Case, options: &Options) -> usize {
    match case.ranks {
        Ranks::One => 1,
        Ranks::Two => 2,
        Ranks::Any => options.procs,
    }
}

fn play(case: &Case, options: &Options, meeting: Option<&Meeting>) -> anyhow::Result<Verdict> {
    let spec = Spec {
        ranks: ranks(case, options),
        job: procs::Job::Contract(Job { case: case.name.to_owned(), options: options.clone() }),
        env: Vec::new(),
        same_host: options.same_host,
        per_host: 1,
        // The ranks watch the limit themselves and say what they wait for; this one is for ranks that cannot.
        time_limit: options.time_limit + Duration::from_secs(5),
        dies: case.dies,
        meeting,
    };
    let mut skipped = None;
    let outcomes = procs::run(&spec, |_, value| {
        if let Ok(Note::Skipped(why)) = serde_json::from_value(value) {
            skipped = Some(why);
        }
    })?;
    Ok(match (procs::failure(&outcomes), skipped) {
        (Some(why), _) => Verdict::Failed(why),
        (None, Some(why)) => Verdict::Skipped(why),
        (None, None) => Verdict::Passed,
    })
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let cases = all();
    let case = cases.iter().find(|c| c.name == job.case).context("no such case")?;
    let plugin = Plugin::load(&job.options.plugin, job.options.abi)?;
    let count = plugin.start()?;
    let dev = job.options.dev;
    ensure!(dev < count, "device {dev} is asked for, but the plugin has {count}; `nccl-rdma devices` tells why");
    let properties = plugin.properties(dev)?;
    let deadline = Instant::now() + job.options.time_limit;
    let options = &job.options;
    let mut rank =
        Rank { plugin: &plugin, mail, rank: seat.rank, ranks: seat.ranks, options, dev, properties, deadline };
    match (case.play)(&mut rank) {
        // All ranks come to the same conclusion.
        Err(error) if error.is::<Skipped>() => rank.mail.report(&Note::Skipped(error.to_string())),
        played => played,
    }
}

/// Why a case can't be played. It is decided before anything has moved.
#[derive(Debug)]
struct Skipped(String);

impl fmt::Display for Skipped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Skipped {}

fn skip<T>(why: &str) -> anyhow::Result<T> {
    Err(Skipped(why.to_owned()).into())
}

/// What a case has at hand in one process.
struct Rank<'a> {
    plugin: &'a Plugin,
    mail: &'a mut Mailbox,
    rank: usize,
    ranks: usize,
    options: &'a Options,
    /// The device that connections use.
    dev: std::ffi::c_int,
    properties: Properties,
    deadline: Instant,
}

impl Rank<'_> {
    /// The end of a wait for something that concerns only the peer's errors.
    fn error_deadline(&self) -> Instant {
        self.deadline.min(Instant::now() + self.options.error_bound)
    }

    fn barrier(&mut self) -> anyhow::Result<()> {
        self.mail.barrier(self.deadline)
    }

    /// Largest group that both the options and the plugin allow.
    fn max_group(&self) -> usize {
        let plugin = usize::try_from(self.properties.max_recvs).unwrap_or(1);
        self.options.groups.min(plugin).min(MAX_GROUP)
    }

    /// Memory for what one end of a connection from rank 0 to rank 1 sends or receives.
    fn buffer(&self, len: usize) -> anyhow::Result<Buffer> {
        Buffer::at_place(self.options.memory[usize::from(self.rank > 0)], len)
    }

    fn rounds(&self, full: usize) -> usize {
        if self.options.quick { full.div_ceil(4) } else { full }
    }

    /// A generator that both ends of a connection share.
    fn random(&self, from: usize, to: usize, round: usize) -> Random {
        let word = |n: usize| u64::try_from(n).unwrap_or(0);
        Random::new(&[self.options.seed, word(from), word(to), word(round)])
    }

    /// Connects and waits until all ranks are connected, as NCCL does before it lets data flow.
    fn connect(&mut self, to: &[Link], from: &[Link]) -> anyhow::Result<(Vec<Outgoing>, Vec<Incoming>)> {
        let wires = wire::connect(self.plugin, self.mail, self.dev, to, from, self.deadline)?;
        let key = |from: usize, to: usize, name: &str| {
            let mut random = self.random(from, to, 0);
            name.bytes().fold(random.next(), |key, b| key.rotate_left(7) ^ u64::from(b))
        };
        let out = wires.sends.into_iter().zip(to);
        let out =
            out.map(|(comm, l)| Outgoing::new(comm, l.peer, key(self.rank, l.peer, &l.name), self.options.memory[0]));
        let inn = wires.recvs.into_iter().zip(from);
        let inn =
            inn.map(|(comm, l)| Incoming::new(comm, l.peer, key(l.peer, self.rank, &l.name), self.options.memory[1]));
        let (out, inn) = (out.collect::<Result<_, _>>()?, inn.collect::<Result<_, _>>()?);
        self.barrier()?;
        Ok((out, inn))
    }

    /// One connection from rank 0 to rank 1 of two.
    fn one_way(&mut self) -> anyhow::Result<(Vec<Outgoing>, Vec<Incoming>)> {
        match self.rank {
            0 => self.connect(&[Link::new(1, "0>1")], &[]),
            _ => self.connect(&[], &[Link::new(0, "0>1")]),
        }
    }

    /// A connection each way between two ranks.
    fn both_ways(&mut self) -> anyhow::Result<(Vec<Outgoing>, Vec<Incoming>)> {
        let (me, peer) = (self.rank, 1 - self.rank);
        self.connect(&[Link::new(peer, format!("{me}>{peer}"))], &[Link::new(peer, format!("{peer}>{me}"))])
    }

    /// The same flow on every connection.
    fn exchange(&self, out: &mut [Outgoing], inn: &mut [Incoming], flow: &Flow, manner: Manner) -> anyhow::Result<()> {
        let mut out: Vec<_> = out.iter_mut().map(|lane| (lane, flow.clone())).collect();
        let mut inn: Vec<_> = inn.iter_mut().map(|lane| (lane, flow.clone())).collect();
        traffic::exchange(self.plugin, &mut out, &mut inn, manner, self.deadline)
    }

    fn close(&self, out: Vec<Outgoing>, inn: Vec<Incoming>) -> anyhow::Result<()> {
        out.into_iter().try_for_each(|lane| lane.close(self.plugin))?;
        inn.into_iter().try_for_each(|lane| lane.close(self.plugin))
    }
}

/// Kills this process as an operator would.
fn die() -> anyhow::Result<()> {
    // SAFETY: no memory is involved.
    let _ = unsafe { libc::raise(libc::SIGKILL) };
    bail!("survived its own SIGKILL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_cases_share_a_name() {
        let mut names: Vec<_> = all().iter().map(|case| case.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }
}
