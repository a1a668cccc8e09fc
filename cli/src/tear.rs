//! `nccl-rdma tear`: whether RDMA WRITEs arrive in whole units where NCCL's LL and LL128 protocols need it. A kernel
//! watches every line of the memory while an adapter writes there round after round, with NCCL's own loads: LL needs
//! that 8 bytes (4 of data, 4 of flag) are never seen half-written, LL128 that the 120 bytes before a line's flag are
//! never older than the flag.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use nccl_net_rdma::verbs::{
    Access, AddressVector, Completion, Context, Cq, Library, Mr, Pd, Qp, QpCaps, RtrAttr, Rts, RtsAttr, WcBatch,
    WriteWr,
};
use serde::{Deserialize, Serialize};

use crate::adapter::AdapterArgs;
use crate::gpu::{DeviceMemory, Gpu, HostMemory, Kernel};
use crate::procs::{self, Mailbox, Spec};
use crate::table::{self, Table};

const PTX: &str = include_str!("tear/watch.ptx");
const BLOCK: u32 = 256;
/// Words of the kernel's answer, as watch.cu numbers them.
const ANSWER: usize = 5 + 4 * EXAMPLES;
const EXAMPLES: usize = 4;

/// A write that takes longer has hung.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    adapter: AdapterArgs,
    /// Bytes of one write, multiples of 128
    #[arg(long, value_delimiter = ',', value_parser = table::parse_bytes, default_value = "128,512,4K,32K,128K,512K")]
    sizes: Vec<usize>,
    /// Writes per case
    #[arg(long, default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(1..1 << 30))]
    rounds: u32,
    /// A case ends after this many milliseconds, however many writes are left
    #[arg(long, default_value_t = 1000, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=86_400_000))]
    case_limit: u64,
    /// Bound of the whole in seconds
    #[arg(long, default_value_t = 120, value_name = "S", value_parser = table::seconds())]
    time_limit: u64,
    /// Index of the GPU
    #[arg(long, default_value_t = 0, value_parser = table::index())]
    device: i32,
    /// Torn units are no failure here, only counted
    #[arg(long)]
    expect: bool,
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Job {
    library: Option<PathBuf>,
    device: i32,
    sizes: Vec<usize>,
    rounds: u32,
    case_limit: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Protocol {
    LL,
    LL128,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Place {
    Host,
    Gpu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Case {
    protocol: Protocol,
    from: Place,
    to: Place,
    bytes: usize,
    /// The bytes are torn on purpose, which the kernel must see.
    control: bool,
}

impl Case {
    /// A GPU reads lines of 128 bytes in host memory over PCIe piece by piece: nobody can promise them whole.
    fn is_promised(&self) -> bool {
        !(self.protocol == Protocol::LL128 && self.to == Place::Host)
    }
}

/// What became of a case.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Row {
    case: Case,
    seen: Result<Seen, String>,
}

#[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
struct Seen {
    rounds: u32,
    seconds: f64,
    torn: u64,
    /// Lines seen with a new flag.
    fresh: u64,
    /// 16-byte parts in which the GPU did not see the last round after its write had completed.
    stale: u64,
    /// Part, two words, flag.
    examples: Vec<[u64; 4]>,
}

const ROWS: Table = Table(&[
    ("protocol", -8),
    ("from", -4),
    ("to", -4),
    ("size (B)", 8),
    ("writes", 8),
    ("us each", 9),
    ("lines seen new", 15),
    ("torn", 8),
    ("stale", 6),
]);

fn cases(sizes: &[usize]) -> Vec<Case> {
    let mut cases = Vec::new();
    for to in [Place::Gpu, Place::Host] {
        for protocol in [Protocol::LL, Protocol::LL128] {
            cases.push(Case { protocol, from: Place::Host, to, bytes: 128, control: true });
            for from in [Place::Host, Place::Gpu] {
                cases.extend(sizes.iter().map(|&bytes| Case { protocol, from, to, bytes, control: false }));
            }
        }
    }
    cases
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let odd = args.sizes.iter().find(|&&size| size == 0 || size % 128 != 0);
    ensure!(odd.is_none(), "size {}: not a multiple of 128", odd.unwrap_or(&0));
    let gpu = Gpu::probe(args.device)?;
    let folder = tempfile::Builder::new().prefix("nccl-rdma-tear-").tempdir()?;
    let adapter = args.adapter.resolve(folder.path())?;
    let name =
        adapter.library.as_ref().map_or_else(|| "the system's libibverbs".to_owned(), |l| l.display().to_string());
    println!("GPU {} ({gpu}), {name}", args.device);
    println!("each control writes in two pieces on purpose and must be seen torn\n{}", ROWS.head());
    let cases = cases(&args.sizes);
    let case_limit = Duration::from_millis(args.case_limit);
    let spec = Spec {
        ranks: 1,
        job: procs::Job::Tear(Job {
            library: adapter.library.clone(),
            device: args.device,
            sizes: args.sizes.clone(),
            rounds: args.rounds,
            case_limit,
        }),
        env: adapter.environment(),
        same_host: false,
        per_host: 1,
        time_limit: Duration::from_secs(args.time_limit),
        dies: None,
        meeting: None,
    };
    let mut rows: Vec<Row> = Vec::new();
    let outcomes = procs::run(&spec, |_, value| {
        if let Ok(row) = serde_json::from_value::<Row>(value) {
            println!("{}", row.line());
            rows.push(row);
        }
    });
    // It only holds the fabric file.
    let verdict = judge(&rows, args.expect);
    if let Some(why) = procs::failure(&outcomes?) {
        bail!("after {} of {} cases: {why}", rows.len(), cases.len());
    }
    ensure!(rows.len() == cases.len(), "{} of {} cases were reported", rows.len(), cases.len());
    println!("{}", verdict?);
    Ok(())
}

impl Row {
    fn line(&self) -> String {
        let Case { protocol, from, to, bytes, control } = self.case;
        let place = |place| if place == Place::Gpu { "GPU" } else { "host" };
        let head = [format!("{protocol:?}"), place(from).to_owned(), place(to).to_owned(), bytes.to_string()];
        let [protocol, from, to, bytes] = head;
        let seen = match &self.seen {
            Ok(seen) => seen,
            Err(error) => return format!("{protocol:8}  {from:4}  {to:4}  {bytes:>8}  FAIL: {error}"),
        };
        let each = seen.seconds / f64::from(seen.rounds.max(1)) * 1e6;
        let counts = [seen.fresh, seen.torn, seen.stale].map(|count| count.to_string());
        let [fresh, torn, stale] = counts;
        let row = [protocol, from, to, bytes, seen.rounds.to_string(), format!("{each:.1}"), fresh, torn, stale];
        let mut line = ROWS.row(row);
        if control {
            line += "  (control)";
        } else if !self.case.is_promised() {
            line += "  (not promised)";
        } else {
            for [part, v0, v1, flag] in &seen.examples {
                line += &format!("\n    bytes {}..: {v0:016x} {v1:016x} where the flag was {flag:#x}", part * 16);
            }
        }
        line
    }
}

/// The last line, or why this is a failure.
fn judge(rows: &[Row], expect: bool) -> anyhow::Result<String> {
    let seen = || rows.iter().filter_map(|row| Some((&row.case, row.seen.as_ref().ok()?)));
    let failed = rows.len() - seen().count();
    let blind = seen().filter(|(case, seen)| case.control && seen.torn == 0).count();
    let empty = seen().filter(|(_, seen)| seen.fresh == 0).count();
    let sum = |promised: bool, of: fn(&Seen) -> u64| {
        let cases = seen().filter(|(case, _)| !case.control && case.is_promised() == promised);
        cases.map(|(_, seen)| of(seen)).sum::<u64>()
    };
    let (torn, stale, fresh) =
        (sum(true, |s| s.torn), sum(true, |s| s.stale) + sum(false, |s| s.stale), sum(true, |s| s.fresh));
    ensure!(failed == 0, "{failed} of {} cases failed", rows.len());
    ensure!(blind == 0, "{blind} controls were not seen torn: nothing is known about the others");
    ensure!(empty == 0, "in {empty} cases the GPU saw no new line at all");
    let told = format!(
        "{torn} parts of 16 bytes torn, {stale} stale, among {fresh} lines that were seen new; besides, {} torn among {} lines \
         of LL128 in host memory, where nobody promises them whole",
        sum(false, |s| s.torn),
        sum(false, |s| s.fresh),
    );
    ensure!(expect || torn + stale == 0, "{told}");
    Ok(told)
}

/// Two connected queue pairs of one port: the first writes.
struct Link {
    cq: Arc<Cq>,
    writer: Qp<Rts>,
    /// The other end only has to exist.
    _target: Qp<Rts>,
    pd: Arc<Pd>,
}

impl Link {
    fn open(library: &Arc<Library>) -> anyhow::Result<Self> {
        let list = library.devices()?;
        ensure!(!list.is_empty(), "{} has no device", library.name);
        let context = Context::open(&list, 0)?;
        let port = context.query_port(1)?;
        let pd = Pd::alloc(&context)?;
        let cq = Cq::create(&context, 64)?;
        let address = match port.link_layer {
            // IBV_LINK_LAYER_INFINIBAND
            1 => AddressVector::Lid { dlid: port.lid },
            _ => {
                let gids = context.gids(1, port.gid_tbl_len);
                let gid = gids.last().context("the port has no GID")?;
                let sgid_index = u8::try_from(gid.index)?;
                AddressVector::Gid {
                    dgid: gid.raw,
                    sgid_index,
                    dlid: port.lid,
                    flow_label: 0,
                    hop_limit: 64,
                    traffic_class: 0,
                }
            }
        };
        let caps = QpCaps { max_send_wr: 16, max_recv_wr: 1, max_inline: 0 };
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        let new = || Qp::create(&pd, &cq, &cq, caps)?.init(1, 0, access).map_err(|refused| refused.error);
        let (writer, target) = (new()?, new()?);
        let (from, to) = (writer.num(), target.num());
        let connect = |qp: Qp<_>, dest_qp_num| {
            let rtr = RtrAttr {
                address,
                service_level: 0,
                port: 1,
                dest_qp_num,
                rq_psn: 0,
                path_mtu: port.active_mtu,
                min_rnr_timer: 12,
            };
            let qp = qp.rtr(&rtr).map_err(|refused| refused.error)?;
            qp.rts(&RtsAttr { sq_psn: 0, timeout: 18, retry_cnt: 7, rnr_retry: 7 }).map_err(|refused| refused.error)
        };
        let (writer, target) = (connect(writer, to)?, connect(target, from)?);
        Ok(Self { cq, writer, _target: target, pd })
    }

    /// Writes the bytes from `at` on and waits until they are there.
    fn write(&self, from: &Registered, to: &Registered, at: usize, bytes: usize) -> anyhow::Result<()> {
        let offset = u64::try_from(at)?;
        let request = WriteWr {
            wr_id: 1,
            local: from.address + offset,
            lkey: from.region.lkey(),
            length: u32::try_from(bytes)?,
            remote: to.address + offset,
            rkey: to.region.rkey(),
            imm: None,
            signaled: true,
            inline: false,
        };
        // SAFETY: both regions live as long as the link's user, who waits for the completion below or ends the process.
        unsafe { self.writer.post_write(&request) }?;
        let deadline = Instant::now() + PATIENCE;
        let mut batch = WcBatch::default();
        loop {
            match self.cq.poll(&mut batch)?.first().map(|wc| wc.read()) {
                Some(Completion::Sent { .. }) => return Ok(()),
                Some(Completion::Failed(failure)) => bail!("the write failed: {}: {}", failure.name(), failure.hint()),
                Some(Completion::Arrived(_)) => bail!("a completion of a receive that was never posted"),
                None => ensure!(Instant::now() < deadline, "a write is not complete after {PATIENCE:?}"),
            }
        }
    }
}

/// Memory known to the adapter.
struct Registered {
    address: u64,
    region: Mr,
}

impl Registered {
    fn new(pd: &Arc<Pd>, address: u64, bytes: usize) -> anyhow::Result<Self> {
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ;
        // SAFETY: a buffer holds both the region and the memory, and drops the region first.
        let region = unsafe { Mr::register(pd, address, bytes, access) }?;
        Ok(Self { address, region })
    }
}

struct HostBuffer {
    known: Registered,
    memory: HostMemory,
}

impl HostBuffer {
    fn new(gpu: &Gpu, pd: &Arc<Pd>, bytes: usize) -> anyhow::Result<Self> {
        let memory = gpu.alloc_host(bytes)?;
        let address = u64::try_from(memory.words().as_ptr().expose_provenance())?;
        Ok(Self { known: Registered::new(pd, address, bytes)?, memory })
    }
}

struct GpuBuffer {
    known: Registered,
    memory: DeviceMemory,
}

impl GpuBuffer {
    fn new(gpu: &Gpu, pd: &Arc<Pd>, bytes: usize) -> anyhow::Result<Self> {
        let memory = gpu.alloc(bytes)?;
        let known = Registered::new(pd, memory.address(), bytes)
            .context("the adapter does not take GPU memory (soft-hca: gpu_peermem = true in the fabric file)")?;
        Ok(Self { known, memory })
    }
}

/// Everything is allocated before the first kernel starts: the driver would wait for that one to end.
struct Bench {
    gpu: Gpu,
    /// Another stream, on which copies do not wait for the kernel.
    side: Gpu,
    kernel: Kernel,
    stop: HostMemory,
    answer: DeviceMemory,
    host: [HostBuffer; 2],
    on_gpu: anyhow::Result<[GpuBuffer; 2]>,
    link: Link,
}

/// The work of the one process.
pub(crate) fn rank_main(job: &Job, mail: &mut Mailbox) -> anyhow::Result<()> {
    let gpu = Gpu::open(job.device)?;
    let link = Link::open(&Library::load(job.library.as_deref())?)?;
    let most = job.sizes.iter().copied().max().unwrap_or(0).max(128);
    let host = || HostBuffer::new(&gpu, &link.pd, most);
    let on_gpu = || GpuBuffer::new(&gpu, &link.pd, most);
    let bench = Bench {
        side: Gpu::open(job.device)?,
        kernel: gpu.load(PTX, c"watch")?,
        stop: gpu.alloc_host(8)?,
        answer: gpu.alloc(ANSWER * 8)?,
        host: [host()?, host()?],
        on_gpu: on_gpu().and_then(|first| Ok([first, on_gpu()?])),
        link,
        gpu,
    };
    for case in cases(&job.sizes) {
        let seen = bench.play(case, job).map_err(|error| format!("{error:#}"));
        mail.report(&Row { case, seen })?;
    }
    Ok(())
}

impl Bench {
    fn gpu_buffers(&self) -> anyhow::Result<&[GpuBuffer; 2]> {
        self.on_gpu.as_ref().map_err(|error| anyhow::anyhow!("{error:#}"))
    }

    fn play(&self, case: Case, job: &Job) -> anyhow::Result<Seen> {
        let target = match case.to {
            Place::Host => {
                let buffer = &self.host[1];
                buffer.memory.fill(0);
                buffer.memory.device_address()
            }
            Place::Gpu => {
                let buffer = &self.gpu_buffers()?[1];
                self.gpu.wipe(&buffer.memory, 0)?;
                buffer.memory.address()
            }
        };
        self.gpu.wipe(&self.answer, 0)?;
        self.stop.fill(0);
        let parts = u32::try_from(case.bytes / 16)?;
        let patience = job.case_limit + Duration::from_secs(2);
        let mut arguments = [
            target,
            u64::from(parts),
            u64::from(case.protocol == Protocol::LL128),
            self.stop.device_address(),
            u64::try_from(patience.as_nanos())?,
            self.answer.address(),
        ];
        // SAFETY: what `watch` takes; all memory is the bench's, and the kernel ends below or by its own clock.
        unsafe { self.gpu.launch(&self.kernel, parts.div_ceil(BLOCK), BLOCK, &mut arguments) }?;
        // It must be looking before the first write.
        sleep(Duration::from_millis(5));
        let start = Instant::now();
        let mut rounds = 0;
        let written = (1..=job.rounds).take_while(|_| start.elapsed() < job.case_limit).try_for_each(|round| {
            rounds = round;
            self.write(case, round)
        });
        let seconds = start.elapsed().as_secs_f64();
        self.stop.words()[0].store(u64::from(rounds.max(1)), Ordering::Release);
        self.gpu.wait(patience + PATIENCE)?;
        written?;
        let mut answer = [0; ANSWER * 8];
        self.gpu.download(&mut answer, &self.answer)?;
        let (words, _) = answer.as_chunks();
        let words: Vec<_> = words.iter().map(|word| u64::from_ne_bytes(*word)).collect();
        ensure!(words[3] == 0, "the kernel gave up after {patience:?}");
        let (examples, _) = words[5..].as_chunks();
        let examples = examples.iter().take(usize::try_from(words[4])?).copied().collect();
        Ok(Seen { rounds, seconds, torn: words[0], fresh: words[1], stale: words[2], examples })
    }

    /// One round: all words carry its number.
    fn write(&self, case: Case, round: u32) -> anyhow::Result<()> {
        let word = u64::from(round) << 32 | u64::from(round);
        let from = match case.from {
            Place::Host => {
                let buffer = &self.host[0];
                buffer.memory.words()[..case.bytes / 8].iter().for_each(|w| w.store(word, Ordering::Relaxed));
                &buffer.known
            }
            Place::Gpu => {
                let buffer = &self.gpu_buffers()?[0];
                self.side.upload(&buffer.memory, &word.to_ne_bytes().repeat(case.bytes / 8))?;
                &buffer.known
            }
        };
        let to = match case.to {
            Place::Host => &self.host[1].known,
            Place::Gpu => &self.gpu_buffers()?[1].known,
        };
        if case.control {
            self.link.write(from, to, 4, case.bytes - 4)?;
            self.link.write(from, to, 0, 4)
        } else {
            self.link.write(from, to, 0, case.bytes)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::process::Command;

    use super::*;

    fn row(control: bool, torn: u64, fresh: u64) -> Row {
        let case = Case { protocol: Protocol::LL, from: Place::Host, to: Place::Gpu, bytes: 128, control };
        Row { case, seen: Ok(Seen { rounds: 10, torn, fresh, ..Seen::default() }) }
    }

    #[test]
    fn torn_units_are_a_failure_unless_expected() {
        let whole = [row(true, 9, 10), row(false, 0, 10)];
        assert!(judge(&whole, false).unwrap().starts_with("0 parts of 16 bytes torn"));
        let torn = [row(true, 9, 10), row(false, 3, 10)];
        assert!(judge(&torn, false).unwrap_err().to_string().starts_with("3 parts"));
        judge(&torn, true).unwrap();
        let mut unpromised = row(false, 5, 10);
        (unpromised.case.protocol, unpromised.case.to) = (Protocol::LL128, Place::Host);
        let told = judge(&[row(true, 9, 10), row(false, 0, 10), unpromised], false).unwrap();
        assert!(told.contains("5 torn among 10 lines of LL128"), "{told}");
    }

    #[test]
    fn a_blind_kernel_proves_nothing() {
        assert!(judge(&[row(true, 0, 10), row(false, 0, 10)], true).unwrap_err().to_string().contains("controls"));
        assert!(judge(&[row(true, 9, 10), row(false, 0, 0)], true).unwrap_err().to_string().contains("no new line"));
        let failed = Row { seen: Err("no".to_owned()), ..row(false, 0, 10) };
        assert!(judge(&[row(true, 9, 10), failed], true).unwrap_err().to_string().contains("1 of 2 cases failed"));
    }

    #[test]
    fn every_place_has_a_control() {
        let cases = cases(&[128, 512]);
        assert_eq!(cases.len(), 2 * 2 * (1 + 2 * 2));
        assert_eq!(cases.iter().filter(|case| case.control).count(), 4);
    }

    /// Where clang 14 is installed.
    #[test]
    fn the_ptx_is_that_of_the_source() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("watch.ptx");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tear/watch.cu");
        let made = Command::new("clang-14")
            .args([
                "-x",
                "cuda",
                "-nocudainc",
                "-nocudalib",
                "--cuda-device-only",
                "--cuda-gpu-arch=sm_70",
                "-O3",
                "-S",
            ])
            .arg(source)
            .arg("-o")
            .arg(&out)
            .status();
        match made {
            Ok(status) => {
                assert!(status.success());
                assert_eq!(std::fs::read_to_string(out).unwrap(), PTX);
            }
            // Not by println, which a test that passes keeps to itself.
            Err(error) => std::io::stderr().write_all(format!("skipped: clang-14: {error}\n").as_bytes()).unwrap(),
        }
        assert!(PTX.contains(".visible .entry watch("));
    }
}
