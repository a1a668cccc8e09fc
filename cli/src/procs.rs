//! Ranks as processes: the parent starts this command once per rank, carries small messages between the ranks (what
//! NCCL's bootstrap does for it) and collects how each one ended. A rank's standard input is a socket to the parent;
//! when the parent goes, its ranks go. With a second host every other rank is there.

use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitCode, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use nccl_net_rdma::config::Config;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::abi::{self, LogLine};
use crate::hosts::Meeting;
use crate::{adapter, bench, contract, nccl, perf, ring, tear};

/// How long the other ranks may go on once one has failed.
const GRACE: Duration = Duration::from_secs(3);

/// Between two looks whether a process has ended.
const PAUSE: Duration = Duration::from_millis(2);
/// No run lasts longer.
const DAY: Duration = Duration::from_secs(86_400);

/// What one process is asked to do.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Seat {
    pub rank: usize,
    pub ranks: usize,
    pub job: Job,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Job {
    Contract(contract::Job),
    Ring(ring::Job),
    Perf(perf::Job),
    Bench(bench::measure::Job),
    NcclCheck(nccl::check::Job),
    NcclCompare(nccl::compare::Job),
    Tear(tear::Job),
}

/// A set of ranks to start.
#[derive(Debug)]
pub(crate) struct Spec<'a> {
    pub ranks: usize,
    pub job: Job,
    /// Environment of every rank: `{rank}` and `{host}` are its numbers, of `{a|b}` ranks take one each in turn.
    pub env: Vec<(String, String)>,
    /// Leaves `SOFT_HCA_HOST` alone, so that the ranks are one host to a software adapter.
    pub same_host: bool,
    /// Ranks that are one host.
    pub per_host: usize,
    pub time_limit: Duration,
    /// This rank kills itself as part of the job.
    pub dies: Option<usize>,
    /// Where a second host comes to take the odd ranks.
    pub meeting: Option<&'a Meeting>,
}

/// How a rank ended.
#[derive(Debug)]
pub(crate) struct Outcome {
    pub rank: usize,
    pub end: Result<(), String>,
    /// When it ended, by the clock of the machine: of several failures the earliest is the cause.
    pub at: Duration,
    /// What the plugin logged in it.
    pub log: Vec<LogLine>,
}

/// What the parent hears on a rank's line.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Up {
    Post {
        to: usize,
        key: String,
        data: Vec<u8>,
    },
    Report(Value),
    Kill(usize),
    Done {
        error: Option<String>,
        log: Vec<LogLine>,
        at: Duration,
    },
    /// From the second host, at the end: the wait status of the rank's process.
    Exited(i32),
}

impl Up {
    pub(crate) fn failed(error: &anyhow::Error) -> Self {
        Self::Done { error: Some(format!("{error:#}")), log: abi::take_log(), at: clock() }
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Down {
    Mail { from: usize, key: String, data: Vec<u8> },
    Gone(usize),
}

enum Event {
    Said(usize, Up),
    Closed(usize),
}

/// The time of day: unlike the order in which lines reach the parent, it is the same for all processes.
fn clock() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn send_line(socket: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// For a rank's environment: the plugin leaves out what NCCL would not show, but its words are for the parent here.
pub(crate) fn talkative() -> Vec<(String, String)> {
    let told = Config::from_process().0.nccl_debug;
    let level = told.filter(|level| level.eq_ignore_ascii_case("TRACE")).unwrap_or_else(|| "INFO".to_owned());
    vec![("NCCL_DEBUG".to_owned(), level)]
}

/// A rank to start, on whichever host.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    seat: Seat,
    env: Vec<(String, String)>,
}

impl Order {
    fn new(spec: &Spec<'_>, rank: usize) -> Self {
        let seat = Seat { rank, ranks: spec.ranks, job: spec.job.clone() };
        let mut env = spec.env.clone();
        let host = rank / spec.per_host.max(1);
        for (_, value) in &mut env {
            *value = turns(value, rank).replace("{rank}", &rank.to_string()).replace("{host}", &host.to_string());
        }
        if !spec.same_host {
            env.push(("SOFT_HCA_HOST".to_owned(), format!("h{host}")));
        }
        Self { seat, env }
    }

    /// As it is for a second host, which has an adapter of its own.
    fn elsewhere(mut self) -> Self {
        self.env.retain(|(name, _)| !adapter::VARIABLES.contains(&&**name));
        self
    }

    /// Starts the rank's process; the socket is the other end of its standard input.
    pub(crate) fn spawn(&self) -> anyhow::Result<(Child, UnixStream)> {
        let (ours, theirs) = UnixStream::pair().context("no socket for a rank")?;
        let mut command = Command::new(std::env::current_exe().context("own path unknown")?);
        command.arg("rank").arg(serde_json::to_string(&self.seat)?).stdin(Stdio::from(OwnedFd::from(theirs)));
        command.envs(self.env.iter().map(|(name, value)| (name, value)));
        let child = command.spawn().with_context(|| format!("rank {} cannot be started", self.seat.rank))?;
        Ok((child, ours))
    }
}

/// The rank's own of alternatives: of `{a|b}` even ranks take `a`, odd ones `b`.
fn turns(value: &str, rank: usize) -> String {
    let parts = value.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?)));
    match parts {
        Some((before, (choices, after))) if choices.contains('|') => {
            let choices: Vec<_> = choices.split('|').collect();
            format!("{before}{}{after}", choices[rank % choices.len()])
        }
        _ => value.to_owned(),
    }
}

enum Place {
    Here(Child),
    /// The second host tells the status before it closes the line.
    There(Option<ExitStatus>),
}

/// A rank that has been started, and the line to it. Killed when the parent's run ends early.
struct Started {
    place: Place,
    line: UnixStream,
}

impl Started {
    fn start(spec: &Spec<'_>, rank: usize, events: Sender<Event>) -> anyhow::Result<Self> {
        let order = Order::new(spec, rank);
        let (place, line) = match spec.meeting {
            Some(meeting) if rank % 2 == 1 => (Place::There(None), meeting.start(&order.elsewhere())?),
            _ => order.spawn().map(|(child, line)| (Place::Here(child), line))?,
        };
        let reader = BufReader::new(line.try_clone()?);
        thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                let said = serde_json::from_str(&line).map(|up| events.send(Event::Said(rank, up)));
                if !matches!(said, Ok(Ok(()))) {
                    break;
                }
            }
            let _ = events.send(Event::Closed(rank));
        });
        Ok(Self { place, line })
    }

    fn kill(&mut self) {
        // Already gone is fine.
        let _ = match &mut self.place {
            Place::Here(child) => child.kill(),
            // The second host kills a rank when its line is cut.
            Place::There(_) => self.line.shutdown(Shutdown::Write),
        };
    }

    /// How the process ended, once its line is closed. The kernel may still be at its end then: the devices that it had open.
    fn wait(&mut self, deadline: Instant) -> anyhow::Result<ExitStatus> {
        match &mut self.place {
            Place::Here(child) => loop {
                match child.try_wait()? {
                    Some(status) => return Ok(status),
                    None if Instant::now() < deadline => thread::sleep(PAUSE),
                    None => bail!("its line is closed, but the process has not ended (pid {})", child.id()),
                }
            },
            Place::There(status) => status.context("the second host has gone, or the way to it"),
        }
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        self.kill();
        let _ = self.wait(Instant::now() + GRACE);
    }
}

/// Starts the ranks, serves them until all have ended or the time is up, and says how each one ended. `report` gets
/// what the ranks report on the way.
pub(crate) fn run(spec: &Spec<'_>, mut report: impl FnMut(usize, Value)) -> anyhow::Result<Vec<Outcome>> {
    let (sender, events) = channel();
    let mut ranks = Vec::new();
    for rank in 0..spec.ranks {
        ranks.push(Started::start(spec, rank, sender.clone())?);
    }
    drop(sender);

    let mut deadline = Instant::now() + spec.time_limit.min(DAY);
    let mut first_failure = None;
    let mut done: Vec<Option<Result<(), String>>> = vec![None; spec.ranks];
    let mut log: Vec<Vec<LogLine>> = vec![Vec::new(); spec.ranks];
    let mut alive = vec![true; spec.ranks];
    let mut at = vec![None; spec.ranks];
    while alive.contains(&true) {
        match events.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(Event::Said(from, Up::Post { to, key, data })) => {
                if let Some(rank) = ranks.get_mut(to) {
                    // A rank that has gone needs no mail.
                    let _ = send_line(&mut rank.line, &Down::Mail { from, key, data });
                }
            }
            Ok(Event::Said(rank, Up::Report(value))) => report(rank, value),
            Ok(Event::Said(_, Up::Kill(rank))) => {
                if let Some(rank) = ranks.get_mut(rank) {
                    rank.kill();
                }
            }
            Ok(Event::Said(rank, Up::Exited(status))) => {
                if let Place::There(told) = &mut ranks[rank].place {
                    *told = Some(ExitStatus::from_raw(status));
                }
            }
            Ok(Event::Said(rank, Up::Done { error, log: lines, at: when })) => {
                log[rank] = lines;
                at[rank] = Some(when);
                if error.is_some() && first_failure.is_none() {
                    first_failure = Some(rank);
                    deadline = deadline.min(Instant::now() + GRACE);
                }
                done[rank] = Some(error.map_or(Ok(()), Err));
            }
            Ok(Event::Closed(rank)) => {
                alive[rank] = false;
                at[rank].get_or_insert_with(clock);
                let end = match (done[rank].take(), ranks[rank].wait(deadline.max(Instant::now() + GRACE))) {
                    (Some(Err(error)), _) => Err(error),
                    (_, Err(lost)) => Err(format!("{lost:#}")),
                    (done, Ok(status)) => ended(done, status, spec.dies == Some(rank)),
                };
                if end.is_err() && first_failure.is_none() {
                    first_failure = Some(rank);
                    deadline = deadline.min(Instant::now() + GRACE);
                }
                done[rank] = Some(end);
                for other in &mut ranks {
                    let _ = send_line(&mut other.line, &Down::Gone(rank));
                }
            }
            Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
        }
    }
    let stopped = |rank| match first_failure {
        Some(first) => format!("stopped, since rank {first} had failed"),
        None => format!("rank {rank} was still running after {:.0} s", spec.time_limit.as_secs_f64()),
    };
    let now = clock();
    let ends = done.into_iter().zip(alive).zip(log).zip(at).enumerate();
    Ok(ends
        .map(|(rank, (((end, alive), log), at))| {
            let end = match end {
                Some(end) if !alive || end.is_err() => end,
                _ => Err(stopped(rank)),
            };
            Outcome { rank, end, at: at.unwrap_or(now), log }
        })
        .collect())
}

fn ended(done: Option<Result<(), String>>, status: ExitStatus, dies: bool) -> Result<(), String> {
    match (done, status.signal()) {
        (None, Some(libc::SIGKILL)) if dies => Ok(()),
        (Some(Err(error)), _) => Err(error),
        (Some(Ok(())), None) if status.success() && !dies => Ok(()),
        (Some(Ok(())), _) => Err(format!("all was right, but then the process ended with {status}")),
        (None, _) => Err(format!("the process ended with {status} in the middle of its work")),
    }
}

/// The failure that came first, in words; one that only follows from another rank's does not count as the first.
pub(crate) fn failure(outcomes: &[Outcome]) -> Option<String> {
    let failed = outcomes.iter().filter(|o| o.end.is_err());
    failed.min_by_key(|o| (is_consequence(o), o.at)).map(|o| {
        let error = o.end.as_ref().err().map_or("", String::as_str);
        let warnings = o.log.iter().filter(|l| l.level <= abi::LOG_WARN).take(5);
        let warnings: String = warnings.map(|line| format!("\n    rank {} logged: {line}", o.rank)).collect();
        format!("rank {}: {error}{warnings}", o.rank)
    })
}

fn is_consequence(outcome: &Outcome) -> bool {
    outcome.end.as_ref().is_err_and(|e| e.starts_with("stopped, since") || e.contains("has gone and will not send"))
}

/// A rank's line to the parent and through it to the other ranks.
#[derive(Debug)]
pub(crate) struct Mailbox {
    socket: UnixStream,
    mail: Receiver<Down>,
    kept: HashMap<(usize, String), Vec<u8>>,
    gone: Vec<usize>,
    rank: usize,
    ranks: usize,
    barriers: usize,
}

impl Mailbox {
    fn open(rank: usize, ranks: usize) -> anyhow::Result<Self> {
        let socket = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
        let reader = BufReader::new(socket.try_clone()?);
        let (sender, mail) = channel();
        thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                if let Ok(down) = serde_json::from_str(&line) {
                    let _ = sender.send(down);
                }
            }
            // The parent has gone.
            std::process::exit(2);
        });
        Ok(Self { socket, mail, kept: HashMap::new(), gone: Vec::new(), rank, ranks, barriers: 0 })
    }

    pub(crate) fn post(&mut self, to: usize, key: &str, data: &[u8]) -> anyhow::Result<()> {
        let post = Up::Post { to, key: key.to_owned(), data: data.to_vec() };
        send_line(&mut self.socket, &post).context("the parent does not listen")
    }

    pub(crate) fn report(&mut self, value: &impl Serialize) -> anyhow::Result<()> {
        let report = Up::Report(serde_json::to_value(value)?);
        send_line(&mut self.socket, &report).context("the parent does not listen")
    }

    /// Has the parent kill a rank, as an operator would.
    pub(crate) fn kill(&mut self, rank: usize) -> anyhow::Result<()> {
        send_line(&mut self.socket, &Up::Kill(rank)).context("the parent does not listen")
    }

    fn keep(&mut self, down: Down) {
        match down {
            Down::Mail { from, key, data } => drop(self.kept.insert((from, key), data)),
            Down::Gone(rank) => self.gone.push(rank),
        }
    }

    pub(crate) fn is_gone(&mut self, rank: usize) -> bool {
        while let Ok(down) = self.mail.try_recv() {
            self.keep(down);
        }
        self.gone.contains(&rank)
    }

    /// The message, if it has come already.
    pub(crate) fn try_take(&mut self, from: usize, key: &str) -> anyhow::Result<Option<Vec<u8>>> {
        let gone = self.is_gone(from);
        match self.kept.remove(&(from, key.to_owned())) {
            None if gone => bail!("rank {from} has gone and will not send {key:?}"),
            found => Ok(found),
        }
    }

    pub(crate) fn take(&mut self, from: usize, key: &str, deadline: Instant) -> anyhow::Result<Vec<u8>> {
        loop {
            if let Some(data) = self.try_take(from, key)? {
                return Ok(data);
            }
            match self.mail.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(down) => self.keep(down),
                Err(_) => bail!("no message {key:?} from rank {from} in time"),
            }
        }
    }

    /// Waits until every rank is here.
    pub(crate) fn barrier(&mut self, deadline: Instant) -> anyhow::Result<()> {
        let key = format!("barrier {}", self.barriers);
        self.barriers += 1;
        let others: Vec<_> = (0..self.ranks).filter(|&r| r != self.rank).collect();
        for &to in &others {
            self.post(to, &key, &[])?;
        }
        others.iter().try_for_each(|&from| self.take(from, &key, deadline).map(drop))
    }
}

/// The life of a rank: does the job in `seat`, tells the parent how it went, ends.
pub(crate) fn rank_main(seat: &str, work: impl FnOnce(&Seat, &mut Mailbox) -> anyhow::Result<()>) -> ExitCode {
    let opened = serde_json::from_str::<Seat>(seat)
        .context("not a seat")
        .and_then(|seat| Mailbox::open(seat.rank, seat.ranks).map(|mail| (seat, mail)));
    let (seat, mut mail) = match opened {
        Ok(opened) => opened,
        Err(error) => {
            eprintln!("nccl-rdma rank: {error:#}; this subcommand is for the command itself");
            return ExitCode::FAILURE;
        }
    };
    let result = work(&seat, &mut mail);
    let done = match result {
        Ok(()) => Up::Done { error: None, log: abi::take_log(), at: clock() },
        Err(error) => Up::failed(&error),
    };
    let told = send_line(&mut mail.socket, &done);
    // The result has been told; the status only says whether the process could end in peace.
    if told.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(rank: usize, at: Duration, end: Result<(), &str>) -> Outcome {
        Outcome { rank, end: end.map_err(str::to_owned), at, log: Vec::new() }
    }

    #[test]
    fn the_cause_is_told_before_its_consequences() {
        let (start, later) = (Duration::from_secs(1), Duration::from_secs(2));
        let outcomes = [
            outcome(0, start, Err("rank 2 has gone and will not send \"x\"")),
            outcome(1, later, Err("isend returned 6")),
            outcome(2, start, Err("byte 3 is wrong")),
            outcome(3, start, Ok(())),
        ];
        assert_eq!(failure(&outcomes).unwrap(), "rank 2: byte 3 is wrong");
        assert_eq!(failure(&outcomes[..2]).unwrap(), "rank 1: isend returned 6");
        assert!(failure(&outcomes[3..]).is_none());
    }

    #[test]
    fn a_process_that_does_not_end_is_not_waited_for() {
        let child = Command::new("sleep").arg("60").spawn().unwrap();
        let (line, _) = UnixStream::pair().unwrap();
        let mut started = Started { place: Place::Here(child), line };
        let why = started.wait(Instant::now() + Duration::from_millis(20)).unwrap_err().to_string();
        assert!(why.contains("the process has not ended"), "{why}");
        started.kill();
        assert_eq!(started.wait(Instant::now() + GRACE).unwrap().signal(), Some(libc::SIGKILL));
    }

    #[test]
    fn a_second_host_keeps_its_own_adapter() {
        let job =
            Job::Perf(perf::Job { plugin: "plugin".into(), dev: 0, sizes: Vec::new(), depth: 1, rounds: 1, volume: 1 });
        let env = ["NCCL_IBVERBS_LIB", "NCCL_NET_RDMA_GPU_PATH", "SOFT_HCA_FABRIC"];
        let env = env.map(|name| (name.to_owned(), "x".to_owned())).to_vec();
        let spec =
            Spec { ranks: 2, job, env, same_host: true, per_host: 1, time_limit: GRACE, dies: None, meeting: None };
        let names = |order: Order| order.env.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
        assert_eq!(names(Order::new(&spec, 1)).len(), 3);
        assert_eq!(names(Order::new(&spec, 1).elsewhere()), ["NCCL_NET_RDMA_GPU_PATH"]);
    }

    #[test]
    fn ranks_take_alternatives_in_turn() {
        assert_eq!([0, 1, 2].map(|rank| turns("{staging|gdr}", rank)), ["staging", "gdr", "staging"]);
        assert_eq!(turns("/logs/{rank}.log", 1), "/logs/{rank}.log");
    }

    #[test]
    fn a_crash_after_success_is_a_failure() {
        let killed = ExitStatus::from_raw(libc::SIGKILL);
        let clean = ExitStatus::from_raw(0);
        assert!(ended(Some(Ok(())), clean, false).is_ok());
        assert!(ended(Some(Ok(())), ExitStatus::from_raw(libc::SIGSEGV), false).is_err());
        assert!(ended(None, killed, true).is_ok());
        assert!(ended(None, killed, false).is_err());
        assert!(ended(Some(Ok(())), clean, true).is_err(), "a rank that was to die must not survive");
    }
}
