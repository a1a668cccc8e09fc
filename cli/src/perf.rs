//! `nccl-rdma perf`: half a round trip of one message, and bandwidth of a stream, between two processes.

use std::path::PathBuf;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::bail;
use serde::{Deserialize, Serialize};

use crate::abi::Buffer;
use crate::hosts::Meeting;
use crate::pipe::{self, Batch, Pipe};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::Table;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) plugin: PathBuf,
    pub(crate) dev: i32,
    pub(crate) sizes: Vec<usize>,
    pub(crate) depth: usize,
    pub(crate) rounds: usize,
    /// Bytes of a stream.
    pub(crate) volume: usize,
}

/// Seconds per message, one figure per round.
#[derive(Debug, Serialize, Deserialize)]
struct Row {
    bytes: usize,
    latency: Vec<f64>,
    streaming: Vec<f64>,
}

const ROWS: Table = Table(&[("size (B)", 10), ("latency (us)", 12), ("spread", 15), ("GB/s", 8), ("spread", 15)]);

pub(crate) fn run(job: &Job, same_host: bool, meeting: Option<&Meeting>) -> anyhow::Result<()> {
    let spec = Spec {
        ranks: 2,
        job: procs::Job::Perf(job.clone()),
        env: procs::talkative(),
        same_host,
        per_host: 1,
        time_limit: Duration::from_secs(600),
        dies: None,
        meeting,
    };
    println!(
        "two processes, plugin {}; stream depth {}; medians of {} rounds",
        job.plugin.display(),
        job.depth,
        job.rounds
    );
    println!("{}", ROWS.head());
    let outcomes = procs::run(&spec, |_, value| {
        if let Ok(row) = serde_json::from_value::<Row>(value) {
            println!("{}", cells(&row));
        }
    })?;
    match procs::failure(&outcomes) {
        Some(why) => bail!("{why}"),
        None => Ok(()),
    }
}

fn cells(row: &Row) -> String {
    #[expect(clippy::cast_precision_loss, reason = "sizes are far below 2^53")]
    let bytes = row.bytes as f64;
    let latency = spread(row.latency.iter().map(|s| s * 1e6));
    let rate = spread(row.streaming.iter().map(|s| bytes / s / 1e9));
    ROWS.row([
        row.bytes.to_string(),
        format!("{:.2}", latency.1),
        format!("{:.2}-{:.2}", latency.0, latency.2),
        gigabytes(rate.1),
        format!("{}-{}", gigabytes(rate.0), gigabytes(rate.2)),
    ])
}

/// Slow networks (an emulated one moves 0.015) need more digits.
pub(crate) fn gigabytes(rate: f64) -> String {
    if rate < 1.0 { format!("{rate:.5}") } else { format!("{rate:.3}") }
}

/// Least, median and most.
fn spread(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    let at = |i: usize| values.get(i).copied().unwrap_or(f64::NAN);
    (at(0), at(values.len() / 2), at(values.len().saturating_sub(1)))
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let (plugin, _) = pipe::open(&job.plugin, None, job.dev)?;
    let peer = 1 - seat.rank;
    let pipe = Pipe::connect(&plugin, mail, job.dev, peer, peer, job.depth)?;
    let most = job.sizes.iter().copied().max().unwrap_or(0);
    let (outgoing, incoming) = (Buffer::new(most)?, Buffer::new(most)?);
    let send_memory = plugin.reg_mr(pipe.send, &outgoing, 0..outgoing.len())?;
    let recv_memory = plugin.reg_mr(pipe.recv, &incoming, 0..incoming.len())?;
    for &bytes in &job.sizes {
        let fit = job.volume / bytes.max(1);
        let (pings, burst) = (u32::try_from((fit / 4).clamp(1, 200))?, fit.clamp(4, 2000));
        let ranges = vec![0..bytes; burst];
        let sends = Batch { buffer: &outgoing, memory: send_memory, ranges: &ranges };
        let recvs = Batch { buffer: &incoming, memory: recv_memory, ranges: &ranges };
        let ping = || pipe.ping(seat.rank, sends, recvs);
        let stream = || pipe.stream(seat.rank, sends, recvs, yield_now);
        let mut row = Row { bytes, latency: Vec::new(), streaming: Vec::new() };
        for round in 0..=job.rounds {
            let ping_seconds = timed(pings, ping)? / 2.0;
            let stream_seconds = timed(1, stream)? / f64::from(u32::try_from(burst)?);
            // The first round warms up.
            if round > 0 {
                row.latency.push(ping_seconds);
                row.streaming.push(stream_seconds);
            }
        }
        if seat.rank == 0 {
            mail.report(&row)?;
        }
    }
    mail.barrier(Instant::now() + Duration::from_secs(60))?;
    plugin.dereg_mr(pipe.send, send_memory)?;
    plugin.dereg_mr(pipe.recv, recv_memory)?;
    pipe.close()
}

/// Seconds for one call, over `times` calls.
fn timed(times: u32, call: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    (0..times).try_for_each(|_| call())?;
    Ok(start.elapsed().as_secs_f64() / f64::from(times))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_keeps_its_digits() {
        assert_eq!([0.014_683, 0.999, 48.25].map(gigabytes), ["0.01468", "0.99900", "48.250"]);
    }

    #[test]
    fn spread_is_least_median_most() {
        assert_eq!(spread([3.0, 1.0, 2.0].into_iter()), (1.0, 2.0, 3.0));
    }
}
