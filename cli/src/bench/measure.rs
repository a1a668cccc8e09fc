//! The two processes that measure one path: they check that the bytes are right, then time single messages back and
//! forth, a stream of them, and the CPU time of a stream.

use std::ops::Range;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use nccl_net_rdma::memory::profile::Way;
use serde::{Deserialize, Serialize};

use super::machine::Machine;
use crate::abi::{self, AnyComm, Buffer, Memory, PTR_CUDA, PTR_DMABUF, Plugin, Properties, Region};
use crate::gpu::{DeviceMemory, Gpu};
use crate::pipe::{self, Batch, EMPTY, Pipe};
use crate::procs::{Mailbox, Seat};

/// For a message between the ranks outside the measurement.
const PATIENCE: Duration = Duration::from_secs(120);
/// Room that messages in flight share, unless a single one is larger.
const ROOM: usize = 32 << 20;
/// What the caller does while nothing moves when CPU time is measured: long enough to cost little, short enough to keep
/// a stream going.
const NAP: Duration = Duration::from_micros(20);

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    pub(super) plugin: PathBuf,
    pub(super) dev: i32,
    pub(super) way: Way,
    /// Index of the GPU; without one only host memory can be measured.
    pub(super) gpu: i32,
    pub(super) sizes: Vec<usize>,
    pub(super) depth: usize,
    /// Flush what is received also where the GPU needs none.
    pub(super) flush: bool,
    /// Time for each of the three measurements of a size.
    pub(super) budget: Duration,
}

/// What the ranks report.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum Note {
    Using(Using),
    /// The plugin does not offer this path.
    Refused(String),
    Row(Row),
}

/// What is measured.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Using {
    pub(super) machine: Machine,
    pub(super) memory: String,
    pub(super) flush: bool,
}

impl Using {
    pub(super) fn memory_in_words(&self) -> String {
        format!("{}{}", self.memory, if self.flush { ", flushed after each receive" } else { "" })
    }
}

/// Messages of one size, as one rank sees them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Row {
    pub(super) bytes: usize,
    /// Bytes that arrived wrong.
    pub(super) wrong: u64,
    /// CPU time for a message beyond idle polls, sending (rank 0) or receiving (rank 1). What is near 0 varies to both sides.
    pub(super) cpu: f64,
    /// From the sender.
    pub(super) times: Option<Times>,
}

/// Seconds for a message.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Times {
    /// Half a round trip: the median and what 99 of 100 are below. None: there were fewer.
    pub(super) p50: f64,
    pub(super) p99: Option<f64>,
    /// In a stream.
    pub(super) streaming: f64,
}

/// Messages in each measurement of a size, the same in both ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Plan {
    pings: usize,
    burst: usize,
}

impl Plan {
    /// From the seconds that one message took, half a round trip.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "between the bounds")]
    fn new(one_way: f64, depth: usize, budget: Duration) -> Self {
        let fit = budget.as_secs_f64() / one_way.max(1e-9);
        Self { pings: (fit / 2.0).clamp(5.0, 2000.0) as usize, burst: (fit as usize).clamp(depth, 4000) }
    }
}

/// Memory that a path is measured with.
#[derive(Debug)]
enum Place {
    Host(Buffer),
    Gpu(DeviceMemory),
}

impl Place {
    fn region(&self) -> &dyn Region {
        match self {
            Self::Host(buffer) => buffer,
            Self::Gpu(memory) => memory,
        }
    }

    fn put(&mut self, gpu: Option<&Gpu>, bytes: &[u8]) -> anyhow::Result<()> {
        match (self, gpu) {
            (Self::Gpu(memory), Some(gpu)) => gpu.upload(&*memory, bytes),
            (Self::Host(buffer), _) => {
                buffer.bytes_mut()[..bytes.len()].copy_from_slice(bytes);
                Ok(())
            }
            (Self::Gpu(_), None) => Ok(()),
        }
    }

    fn get(&self, gpu: Option<&Gpu>, bytes: &mut [u8]) -> anyhow::Result<()> {
        match (self, gpu) {
            (Self::Gpu(memory), Some(gpu)) => gpu.download(bytes, memory),
            (Self::Host(buffer), _) => {
                bytes.copy_from_slice(&buffer.bytes()[..bytes.len()]);
                Ok(())
            }
            (Self::Gpu(_), None) => Ok(()),
        }
    }
}

/// How GPU memory is made known to the plugin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Registered {
    Host,
    Dmabuf,
    Address,
}

impl Registered {
    /// As NCCL chooses. Err: the plugin does not offer it.
    fn choose(way: Way, support: i32, gpu_has_dmabuf: bool) -> Result<Self, String> {
        match way {
            Way::Host => Ok(Self::Host),
            Way::Gdr | Way::Staging if support & PTR_DMABUF != 0 && gpu_has_dmabuf => Ok(Self::Dmabuf),
            Way::Gdr | Way::Staging if support & PTR_CUDA != 0 => Ok(Self::Address),
            Way::Gdr | Way::Staging => Err(format!(
                "the plugin offers no GPU memory{}",
                if support & PTR_DMABUF != 0 { " but by dma-buf, of which the GPU driver makes none" } else { "" }
            )),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Host => "host memory",
            Self::Dmabuf => "GPU memory by dma-buf",
            Self::Address => "GPU memory by address",
        }
    }

    fn register(self, plugin: &Plugin, comm: impl Into<AnyComm>, place: &Place) -> anyhow::Result<Memory> {
        let comm = comm.into();
        match place {
            Place::Host(buffer) => Ok(plugin.reg_mr(comm, buffer, 0..buffer.len())?),
            Place::Gpu(memory) if self == Self::Dmabuf => {
                // The plugin's registration keeps what it needs; NCCL closes its descriptor as well.
                let descriptor = memory.export()?;
                Ok(plugin.reg_dmabuf(comm, memory, descriptor.as_fd())?)
            }
            Place::Gpu(memory) => Ok(plugin.reg_gpu(comm, memory, 0..memory.len())?),
        }
    }
}

/// The work of one process.
pub(crate) fn rank_main(job: &Job, seat: &Seat, mail: &mut Mailbox) -> anyhow::Result<()> {
    let gpu = if job.way == Way::Host { None } else { Some(Gpu::open(job.gpu)?) };
    let (plugin, properties) = pipe::open(&job.plugin, None, job.dev)?;
    let has_dmabuf = gpu.is_some() && Gpu::has_dmabuf(job.gpu)?;
    let registered = match Registered::choose(job.way, properties.ptr_support, has_dmabuf) {
        Ok(registered) => registered,
        Err(why) => return mail.report(&Note::Refused(why + &own_words(&properties))),
    };
    let needs_flush = gpu.is_some() && (properties.force_flush || Gpu::needs_flush(job.gpu)? || job.flush);
    if seat.rank == 0 {
        let bus_id = Gpu::bus_id(job.gpu).ok();
        let using = Using {
            machine: Machine::look(&properties.name, bus_id.as_deref()),
            memory: registered.name().to_owned(),
            flush: needs_flush,
        };
        mail.report(&Note::Using(using))?;
    }
    let peer = 1 - seat.rank;
    let mut pipe = Pipe::connect(&plugin, mail, job.dev, peer, peer, job.depth)?;
    pipe.flush = needs_flush;
    Bench::new(job, seat.rank, gpu, pipe, registered)?.run(job, mail)
}

/// What the plugin says of GPU memory on this device.
fn own_words(properties: &Properties) -> String {
    let mut told = String::new();
    for line in abi::take_log() {
        if line.text.contains("GPU") && line.text.contains(&properties.name) || line.level <= abi::LOG_WARN {
            told += &format!("; {}", line.text);
        }
    }
    told
}

struct Bench<'a> {
    rank: usize,
    gpu: Option<Gpu>,
    pipe: Pipe<'a>,
    outgoing: Place,
    incoming: Place,
    send_memory: Memory,
    recv_memory: Memory,
    /// CPU time of one idle turn of the loop that naps.
    idle_turn: f64,
}

impl<'a> Bench<'a> {
    fn new(job: &Job, rank: usize, gpu: Option<Gpu>, pipe: Pipe<'a>, registered: Registered) -> anyhow::Result<Self> {
        let most = job.sizes.iter().copied().max().unwrap_or(0).max(ROOM);
        let place = || match &gpu {
            // As NCCL's own buffers are.
            Some(gpu) => gpu.alloc_mapped(most).map(Place::Gpu),
            None => Buffer::new(most).map(Place::Host),
        };
        let (outgoing, incoming) = (place()?, place()?);
        let send_memory = registered.register(pipe.plugin, pipe.send, &outgoing)?;
        let recv_memory = registered.register(pipe.plugin, pipe.recv, &incoming)?;
        Ok(Self { rank, gpu, pipe, outgoing, incoming, send_memory, recv_memory, idle_turn: 0.0 })
    }

    fn run(mut self, job: &Job, mail: &mut Mailbox) -> anyhow::Result<()> {
        self.idle_turn = self.idle_turn()?;
        for (round, &bytes) in job.sizes.iter().enumerate() {
            let row = self.size(job, mail, bytes, round).with_context(|| format!("messages of {bytes} bytes"))?;
            mail.report(&Note::Row(row))?;
        }
        mail.barrier(Instant::now() + PATIENCE)?;
        self.pipe.plugin.dereg_mr(self.pipe.send, self.send_memory)?;
        self.pipe.plugin.dereg_mr(self.pipe.recv, self.recv_memory)?;
        self.pipe.close()
    }

    fn size(&mut self, job: &Job, mail: &mut Mailbox, bytes: usize, round: usize) -> anyhow::Result<Row> {
        let places = (self.outgoing.region().len() / bytes.max(1)).clamp(1, job.depth);
        let ranges: Vec<_> = (0..places).map(|at| at * bytes..(at + 1) * bytes).collect();
        let wrong = self.check(&ranges, round)?;
        // The second and third message tell how long one takes.
        self.ping(&ranges)?;
        let start = Instant::now();
        (0..2).try_for_each(|_| self.ping(&ranges))?;
        let plan = if self.rank == 0 {
            let plan = Plan::new(start.elapsed().as_secs_f64() / 4.0, job.depth, job.budget);
            mail.post(1, &format!("plan {round}"), &serde_json::to_vec(&plan)?)?;
            plan
        } else {
            let plan = mail.take(0, &format!("plan {round}"), Instant::now() + PATIENCE)?;
            serde_json::from_slice(&plan)?
        };
        let mut pings = Vec::with_capacity(plan.pings);
        for _ in 0..plan.pings {
            let start = Instant::now();
            self.ping(&ranges)?;
            pings.push(start.elapsed().as_secs_f64() / 2.0);
        }
        pings.sort_by(f64::total_cmp);
        let burst: Vec<_> = ranges.iter().cycle().take(plan.burst).cloned().collect();
        self.stream(&burst[..job.depth.min(burst.len())], std::thread::yield_now)?;
        let start = Instant::now();
        self.stream(&burst, std::thread::yield_now)?;
        let messages = f64::from(u32::try_from(burst.len())?);
        let streaming = start.elapsed().as_secs_f64() / messages;
        let mut turns = 0_u32;
        let begun = cpu_time()?;
        self.stream(&burst, || {
            turns += 1;
            sleep(NAP);
        })?;
        let used = cpu_time()?.saturating_sub(begun).as_secs_f64();
        let cpu = (used - f64::from(turns) * self.idle_turn) / messages;
        let times = (self.rank == 0).then(|| Times {
            p50: part(&pings, 50),
            p99: (pings.len() >= 100).then(|| part(&pings, 99)),
            streaming,
        });
        Ok(Row { bytes, wrong, cpu, times })
    }

    fn sends<'b>(&'b self, ranges: &'b [Range<usize>]) -> Batch<'b> {
        Batch { buffer: self.outgoing.region(), memory: self.send_memory, ranges }
    }

    fn recvs<'b>(&'b self, ranges: &'b [Range<usize>]) -> Batch<'b> {
        Batch { buffer: self.incoming.region(), memory: self.recv_memory, ranges }
    }

    fn ping(&self, ranges: &[Range<usize>]) -> anyhow::Result<()> {
        self.pipe.ping(self.rank, self.sends(ranges), self.recvs(ranges))
    }

    fn stream(&self, ranges: &[Range<usize>], rest: impl FnMut()) -> anyhow::Result<()> {
        self.pipe.stream(self.rank, self.sends(ranges), self.recvs(ranges), rest)
    }

    /// CPU time of a turn in which nothing moves: each rank in turn waits for the other, which sleeps.
    fn idle_turn(&self) -> anyhow::Result<f64> {
        const SLEEP: Duration = Duration::from_millis(60);
        let (mut turns, mut used) = (0_u32, Duration::ZERO);
        for sleeper in [0, 1] {
            if self.rank == sleeper {
                sleep(SLEEP);
                self.pipe.transfer(Some(self.sends(&[EMPTY])), None)?;
            } else {
                let begun = cpu_time()?;
                self.pipe.transfer_with(None, Some(self.recvs(&[EMPTY])), || {
                    turns += 1;
                    sleep(NAP);
                })?;
                used = cpu_time()?.saturating_sub(begun);
            }
        }
        ensure!(turns > 0, "the peer did not sleep");
        Ok(used.as_secs_f64() / f64::from(turns))
    }

    /// All places full of bytes that depend on sender, place and round, both ways at once. The number of wrong ones.
    fn check(&mut self, ranges: &[Range<usize>], round: usize) -> anyhow::Result<u64> {
        let all = ranges.last().map_or(0, |last| last.end);
        let mut bytes = vec![0xff; all];
        self.incoming.put(self.gpu.as_ref(), &bytes)?;
        fill(&mut bytes, self.rank, round);
        self.outgoing.put(self.gpu.as_ref(), &bytes)?;
        self.pipe.transfer(Some(self.sends(ranges)), Some(self.recvs(ranges)))?;
        let mut got = vec![0; all];
        self.incoming.get(self.gpu.as_ref(), &mut got)?;
        fill(&mut bytes, 1 - self.rank, round);
        let wrong = got.iter().zip(&bytes).filter(|(got, must)| got != must).count();
        Ok(u64::try_from(wrong)?)
    }
}

/// Bytes that tell their place, their sender and the round.
fn fill(bytes: &mut [u8], rank: usize, round: usize) {
    let seed = u64::try_from(rank * 7919 + round * 104_729).unwrap_or(0);
    for (at, chunk) in (seed..).zip(bytes.chunks_mut(8)) {
        // A multiplication by an odd constant spreads the place over the bytes; the low one would repeat.
        let word = at.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).to_ne_bytes();
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

/// What so many of 100 sorted values are not above.
fn part(sorted: &[f64], of_100: usize) -> f64 {
    let at = (sorted.len() * of_100).div_ceil(100).saturating_sub(1);
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

/// CPU time of all threads of this process, user and system.
fn cpu_time() -> anyhow::Result<Duration> {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: one timespec to write.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    ensure!(result == 0, "clock_gettime: {}", std::io::Error::last_os_error());
    Ok(Duration::new(u64::try_from(time.tv_sec)?, u32::try_from(time.tv_nsec)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gpu_memory_is_registered_as_nccl_would() {
        let choose = |support, dmabuf| Registered::choose(Way::Gdr, support, dmabuf);
        assert_eq!(choose(7, true), Ok(Registered::Dmabuf));
        assert_eq!(choose(7, false), Ok(Registered::Address));
        assert_eq!(choose(3, true), Ok(Registered::Address));
        assert!(choose(1, true).unwrap_err().ends_with("offers no GPU memory"));
        assert!(choose(5, false).unwrap_err().contains("driver makes none"));
        assert_eq!(Registered::choose(Way::Host, 1, false), Ok(Registered::Host));
    }

    #[test]
    fn the_plan_fits_the_time_and_has_bounds() {
        let plan = |one_way| Plan::new(one_way, 8, Duration::from_millis(40));
        assert_eq!(plan(1e-9), Plan { pings: 2000, burst: 4000 });
        assert_eq!(plan(100e-6), Plan { pings: 200, burst: 400 });
        assert_eq!(plan(4.0), Plan { pings: 5, burst: 8 });
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let sorted: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!([part(&sorted, 50), part(&sorted, 99), part(&sorted[..5], 99)], [100.0, 198.0, 5.0]);
    }

    #[test]
    fn patterns_differ_by_sender_round_and_place() {
        let of = |rank, round| {
            let mut bytes = [0; 4096];
            fill(&mut bytes, rank, round);
            bytes
        };
        assert_ne!(of(0, 0), of(1, 0));
        assert_ne!(of(0, 0), of(0, 1));
        assert_ne!(of(0, 0)[..2048], of(0, 0)[2048..]);
    }

    #[test]
    fn cpu_time_is_that_of_work() {
        let begun = cpu_time().unwrap();
        sleep(Duration::from_millis(30));
        let asleep = cpu_time().unwrap() - begun;
        let (begun, start) = (cpu_time().unwrap(), Instant::now());
        // Other processes may have the cores for a while.
        while cpu_time().unwrap() - begun < Duration::from_millis(10) {
            assert!(start.elapsed() < Duration::from_secs(30), "{asleep:?}");
        }
    }
}
