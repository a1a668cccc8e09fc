//! `nccl-rdma demo`: a ring all-reduce between processes on host memory, NCCL's main job by the plugin's own calls,
//! every element checked.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::ensure;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::abi::{Buffer, Memory, Plugin};
use crate::hosts::Meeting;
use crate::pipe::{self, Batch, Pipe};
use crate::procs::{self, Mailbox, Seat, Spec};
use crate::table::{ALL_REDUCE, all_reduce_row};
use crate::values::{self, SLACK, turn};

/// A chunk goes in slices of this size, as in NCCL's Simple protocol.
const SLICE: usize = 512 << 10;
const DEPTH: usize = 8;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(crate) plugin: PathBuf,
    pub(crate) dev: i32,
    pub(crate) sizes: Vec<usize>,
    pub(crate) iters: usize,
    /// New connections for each size, after so many seconds of rest.
    pub(crate) anew: Option<u64>,
}

/// What ranks report.
#[derive(Debug, Serialize, Deserialize)]
enum Note {
    Using { network: String, device: String, speed_mbps: i32 },
    Row { bytes: usize, seconds: f64, wrong: u64 },
}

pub(crate) fn run(
    job: &Job,
    ranks: usize,
    same_host: bool,
    meeting: Option<&Meeting>,
    verbose: bool,
) -> anyhow::Result<()> {
    let spec = Spec {
        ranks,
        job: procs::Job::Ring(job.clone()),
        env: procs::talkative(),
        same_host,
        per_host: 1,
        time_limit: Duration::from_secs(600),
        dies: None,
        meeting,
    };
    println!("ring all-reduce on host memory: {ranks} processes, plugin {}", job.plugin.display());
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sizes  {msg}  {elapsed}")?;
    let bar = ProgressBar::new(u64::try_from(job.sizes.len())?).with_style(style);
    bar.tick();
    // Per size: ranks that have reported, the slowest time, wrong elements.
    let mut rows = vec![(0, 0.0_f64, 0); job.sizes.len()];
    let mut wrong_in_all = 0;
    let outcomes = procs::run(&spec, |rank, value| match serde_json::from_value(value) {
        Ok(Note::Using { network, device, speed_mbps }) if rank == 0 => bar.suspend(|| {
            let speed = f64::from(speed_mbps) / 1000.0;
            println!("using network {network}, device {device} ({speed:.1} Gb/s), host memory\n{}", ALL_REDUCE.head());
        }),
        Ok(Note::Row { bytes, seconds, wrong }) => {
            let Some(row) = job.sizes.iter().position(|&s| s == bytes).and_then(|at| rows.get_mut(at)) else { return };
            *row = (row.0 + 1, row.1.max(seconds), row.2 + wrong);
            if row.0 == ranks {
                wrong_in_all += row.2;
                bar.suspend(|| println!("{}", all_reduce_row(bytes, "float", ranks, row.1, row.2)));
                bar.set_message(format!("{bytes} bytes done"));
                bar.inc(1);
            }
        }
        _ => {}
    })?;
    bar.finish_and_clear();
    if verbose {
        for o in &outcomes {
            o.log.iter().for_each(|line| println!("rank {}: {line}", o.rank));
            println!("rank {}: ended {}", o.rank, o.end.as_ref().err().map_or("well", String::as_str));
        }
    }
    if let Some(why) = procs::failure(&outcomes) {
        anyhow::bail!("{why}");
    }
    ensure!(rows.iter().all(|row| row.0 == ranks), "not every rank has reported every size");
    ensure!(wrong_in_all == 0, "{wrong_in_all} elements are wrong");
    println!("{} sizes passed, 0 failed: every element of every rank is right", rows.len());
    println!(
        "\nOn a real cluster, on every host:\n{}\nthen NCCL_DEBUG=INFO shows 'Using network RDMA'",
        for_nccl(&job.plugin)
    );
    Ok(())
}

/// What has NCCL load the plugin, for a shell.
fn for_nccl(plugin: &Path) -> String {
    // A bare name is one that the dynamic linker has found by itself.
    let folder = plugin.parent().and_then(|folder| folder.canonicalize().ok());
    let search =
        folder.map_or_else(String::new, |folder| format!("LD_LIBRARY_PATH=\"{}:$LD_LIBRARY_PATH\" ", folder.display()));
    format!("export {search}NCCL_NET_PLUGIN=rdma NCCL_NET=RDMA")
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let (plugin, properties) = pipe::open(&job.plugin, None, job.dev)?;
    let (rank, n) = (seat.rank, seat.ranks);
    let most = job.sizes.iter().copied().max().unwrap_or(0);
    let connect = |mail: &mut Mailbox| {
        let pipe = Pipe::connect(&plugin, mail, job.dev, (rank + 1) % n, (rank + n - 1) % n, DEPTH)?;
        Ring::new(&plugin, pipe, rank, n, most)
    };
    let mut ring = connect(mail)?;
    mail.report(&Note::Using {
        network: plugin.name().to_owned(),
        device: properties.name,
        speed_mbps: properties.speed_mbps,
    })?;
    for (round, &bytes) in job.sizes.iter().enumerate() {
        if let Some(rest) = job.anew.filter(|_| round > 0) {
            mail.barrier(Instant::now() + Duration::from_secs(60))?;
            std::thread::sleep(Duration::from_secs(rest));
            std::mem::replace(&mut ring, connect(mail)?).close()?;
        }
        let count = bytes / 4;
        ring.fill(count);
        ring.clear(count);
        let mut wrong = 0;
        // Once to warm up, checked as well.
        ring.all_reduce(count)?;
        wrong += ring.wrong(count);
        ring.clear(count);
        ring.meet()?;
        let iters = if bytes > 1 << 20 { job.iters.div_ceil(4) } else { job.iters };
        let start = Instant::now();
        for _ in 0..iters {
            ring.all_reduce(count)?;
        }
        let seconds = start.elapsed().as_secs_f64() / f64::from(u32::try_from(iters)?);
        wrong += ring.wrong(count);
        mail.report(&Note::Row { bytes, seconds, wrong })?;
    }
    mail.barrier(Instant::now() + Duration::from_secs(60))?;
    ring.close()
}

/// One process of the ring: input and output of the all-reduce, and what arrives in between.
struct Ring<'a> {
    plugin: &'a Plugin,
    pipe: Pipe<'a>,
    rank: usize,
    ranks: usize,
    input: Buffer,
    output: Buffer,
    scratch: Buffer,
    input_out: Memory,
    output_out: Memory,
    output_in: Memory,
    scratch_in: Memory,
    /// Elements of the input that have been laid out.
    filled: usize,
    /// Operations that have been done.
    done: usize,
}

impl<'a> Ring<'a> {
    fn new(plugin: &'a Plugin, pipe: Pipe<'a>, rank: usize, ranks: usize, bytes: usize) -> anyhow::Result<Self> {
        let (input, output, scratch) = (Buffer::new(bytes + SLACK)?, Buffer::new(bytes)?, Buffer::new(bytes)?);
        let input_out = plugin.reg_mr(pipe.send, &input, 0..input.len())?;
        let output_out = plugin.reg_mr(pipe.send, &output, 0..output.len())?;
        let output_in = plugin.reg_mr(pipe.recv, &output, 0..output.len())?;
        let scratch_in = plugin.reg_mr(pipe.recv, &scratch, 0..scratch.len())?;
        Ok(Self {
            plugin,
            pipe,
            rank,
            ranks,
            input,
            output,
            scratch,
            input_out,
            output_out,
            output_in,
            scratch_in,
            filled: 0,
            done: 0,
        })
    }

    /// Reduce-scatter, then all-gather, from its turn of the input to output.
    fn all_reduce(&mut self, count: usize) -> anyhow::Result<()> {
        let (me, n) = (self.rank, self.ranks);
        let given = |chunk: Range<usize>| chunk.start + turn(self.done)..chunk.end + turn(self.done);
        for step in 0..n - 1 {
            let (goes, comes) = ((me + n - step) % n, (me + n - step - 1) % n);
            let (goes, comes) = (chunk(count, n, goes), chunk(count, n, comes));
            let (buffer, memory, goes) = match step {
                0 => (&self.input, self.input_out, given(goes)),
                _ => (&self.output, self.output_out, goes),
            };
            let sends = Batch { buffer, memory, ranges: &slices(goes) };
            let recvs = Batch { buffer: &self.scratch, memory: self.scratch_in, ranges: &slices(comes.clone()) };
            self.pipe.transfer(Some(sends), Some(recvs))?;
            let (own, came) = (&self.input.bytes()[given(comes.clone())], &self.scratch.bytes()[comes.clone()]);
            add(&mut self.output.bytes_mut()[comes], own, came);
        }
        for step in 0..n - 1 {
            let (goes, comes) = ((me + 1 + n - step) % n, (me + n - step) % n);
            let (goes, comes) = (slices(chunk(count, n, goes)), slices(chunk(count, n, comes)));
            let sends = Batch { buffer: &self.output, memory: self.output_out, ranges: &goes };
            let recvs = Batch { buffer: &self.output, memory: self.output_in, ranges: &comes };
            self.pipe.transfer(Some(sends), Some(recvs))?;
        }
        self.done += 1;
        Ok(())
    }

    /// Returns when every rank is here: an empty message goes round the ring.
    fn meet(&self) -> anyhow::Result<()> {
        let empty = Range { start: 0, end: 0 };
        for _ in 0..self.ranks - 1 {
            let ranges = std::slice::from_ref(&empty);
            let sends = Batch { buffer: &self.input, memory: self.input_out, ranges };
            let recvs = Batch { buffer: &self.scratch, memory: self.scratch_in, ranges };
            self.pipe.transfer(Some(sends), Some(recvs))?;
        }
        Ok(())
    }

    /// Lays out the input of all turns.
    fn fill(&mut self, count: usize) {
        let (elements, _) = self.input.bytes_mut()[..count * 4 + SLACK].as_chunks_mut();
        for (i, element) in elements.iter_mut().enumerate().skip(self.filled) {
            *element = value(self.rank, i).to_ne_bytes();
        }
        self.filled = self.filled.max(elements.len());
    }

    /// Nothing that is there may be right.
    fn clear(&mut self, count: usize) {
        for buffer in [&mut self.output, &mut self.scratch] {
            buffer.bytes_mut()[..count * 4].fill(0xff);
        }
    }

    /// Elements of the output that are not the sum over all ranks in the latest operation.
    fn wrong(&self, count: usize) -> u64 {
        let (elements, _) = self.output.bytes()[..count * 4].as_chunks();
        let start = turn(self.done - 1) / 4;
        let sum = |i| (0..self.ranks).map(|rank| value(rank, start + i)).sum::<f32>();
        let wrong = elements.iter().enumerate().filter(|(i, e)| f32::from_ne_bytes(**e).to_bits() != sum(*i).to_bits());
        u64::try_from(wrong.count()).unwrap_or(u64::MAX)
    }

    fn close(self) -> anyhow::Result<()> {
        self.plugin.dereg_mr(self.pipe.send, self.input_out)?;
        self.plugin.dereg_mr(self.pipe.send, self.output_out)?;
        self.plugin.dereg_mr(self.pipe.recv, self.output_in)?;
        self.plugin.dereg_mr(self.pipe.recv, self.scratch_in)?;
        self.pipe.close()
    }
}

/// The bytes of a rank's chunk; chunks of small operations may be empty.
fn chunk(count: usize, ranks: usize, index: usize) -> Range<usize> {
    let each = count.div_ceil(ranks);
    let bound = |i: usize| (i * each).min(count) * 4;
    bound(index)..bound(index + 1)
}

/// A chunk as messages: at least one, which may be empty.
fn slices(chunk: Range<usize>) -> Vec<Range<usize>> {
    let starts = (chunk.start..chunk.end.max(chunk.start + 1)).step_by(SLICE);
    starts.map(|start| start..(start + SLICE).min(chunk.end)).collect()
}

/// Whole numbers below 2^16, so that the sum of 64 is exact.
fn value(rank: usize, i: usize) -> f32 {
    f32::from(u16::try_from(values::value(rank, i, 0) >> 4).unwrap_or(0))
}

fn add(out: &mut [u8], a: &[u8], b: &[u8]) {
    let (out, _) = out.as_chunks_mut::<4>();
    let ((a, _), (b, _)) = (a.as_chunks::<4>(), b.as_chunks::<4>());
    for (out, (a, b)) in out.iter_mut().zip(a.iter().zip(b)) {
        *out = (f32::from_ne_bytes(*a) + f32::from_ne_bytes(*b)).to_ne_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        for (count, ranks) in [(2, 4), (1, 3), (1000, 7), (4096, 4)] {
            let chunks: Vec<_> = (0..ranks).map(|i| chunk(count, ranks, i)).collect();
            assert_eq!(chunks[0].start, 0);
            assert_eq!(chunks[ranks - 1].end, count * 4);
            assert!(chunks.windows(2).all(|pair| pair[0].end == pair[1].start));
        }
    }

    #[test]
    fn slices_cover_a_chunk_and_an_empty_one_is_one_message() {
        let bounds = |chunk| slices(chunk).iter().map(|r| (r.start, r.end)).collect::<Vec<_>>();
        assert_eq!(bounds(8..8), [(8, 8)]);
        assert_eq!(bounds(0..SLICE + 4), [(0, SLICE), (SLICE, SLICE + 4)]);
        assert_eq!(bounds(4..SLICE + 4), [(4, SLICE + 4)]);
    }

    #[test]
    fn addition_is_element_wise() {
        let floats = |f: [f32; 2]| f.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
        let mut out = vec![0; 8];
        add(&mut out, &floats([1.0, 2.0]), &floats([10.0, 20.0]));
        assert_eq!(out, floats([11.0, 22.0]));
    }
}
