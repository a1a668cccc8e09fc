//! A completion queue for each connection, or one for all of a communicator? Counts the instructions of both ways with
//! callgrind over soft-hca's null engine; `ci/bench queues` builds it and runs it. It needs valgrind, and in
//! `NCCL_IBVERBS_LIB` soft-hca with symbols.
//!
//! Both ways do what the engine's test does with a send, and no more: look at the request, poll while anything is owed, and
//! find each completion's request by wr_id, whose generation must be right. Requests are tested in NCCL's order: the oldest of
//! each connection that has one, round and round. The shared queue has a guard that is only tried, since threads meet there
//! (whoever does not get it has its completions delivered by the other), and looks for the connection, by its index in the
//! wr_id and a generation of its own. Two threads that do meet are not measured, nor what a locked instruction costs beyond
//! being one: the guard is one for each poll.

use std::error::Error;
use std::hint::black_box;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};

use nccl_net_rdma::verbs::{
    Access, AddressVector, Completion, Context, Cq, Library, Mr, Pd, Qp, QpCaps, RtrAttr, Rts, RtsAttr, WcBatch,
    WriteWr,
};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Requests of a connection, as many as NCCL has under way.
const REQUESTS: usize = 8;
/// Each connection is the one that completes equally often.
const ROUNDS: usize = 64;
/// Connections, and how many of them have requests open.
const SIZES: [(usize, usize); 8] = [(1, 1), (4, 1), (4, 4), (16, 4), (16, 16), (64, 1), (64, 16), (64, 64)];

#[derive(Debug, Clone, Copy)]
enum Scene {
    /// So many requests of each connection are done before the first is tested.
    Ready(usize),
    /// One request of one connection is done; those of the others are tested in vain.
    Single,
    /// None is done.
    Idle,
}

const SCENES: [(Scene, &str); 4] = [
    (Scene::Ready(1), "all ready, 1 each"),
    (Scene::Ready(REQUESTS), "all ready, 8 each"),
    (Scene::Single, "one at a time"),
    (Scene::Idle, "test in vain"),
];

const FABRIC: &str = r#"
engine = "null"
[[host]]
name = "here"
[[host.device]]
name = "soft_0"
node_guid = 0x50f7000000000a00
[[host.device.port]]
link_layer = "Ethernet"
rate_gbps = 200
gids = [{ index = 0, gid = "::ffff:10.0.0.1", type = "RoCE v2" }]
"#;

/// QPs that write onto their own memory.
struct Rig {
    qps: Vec<Qp<Rts>>,
    region: Mr,
    // After the region over it.
    memory: Box<[u64; 2]>,
}

impl Rig {
    fn new(context: &Arc<Context>, cqs: &[Arc<Cq>], connections: usize) -> Outcome<Self> {
        let pd = Pd::alloc(context)?;
        let memory = Box::new([7; 2]);
        // SAFETY: the region is dropped before the memory.
        let region =
            unsafe { Mr::register(&pd, memory.as_ptr() as u64, 16, Access::LOCAL_WRITE | Access::REMOTE_WRITE) }?;
        let dgid = context.gids(1, 1).first().ok_or("the port has no GID")?.raw;
        let (flow_label, traffic_class, hop_limit) = (0, 0, 64);
        let address = AddressVector::Gid { dgid, sgid_index: 0, dlid: 0, flow_label, hop_limit, traffic_class };
        let caps = QpCaps { max_send_wr: 16, max_recv_wr: 1, max_inline: 0 };
        let mut qps = Vec::new();
        for cq in cqs.iter().cycle().take(connections) {
            let qp = Qp::create(&pd, cq, cq, caps)?.init(1, 0, Access::REMOTE_WRITE).map_err(|r| r.error)?;
            let (dest_qp_num, rq_psn) = (qp.num(), 0);
            let rtr =
                RtrAttr { address, service_level: 0, port: 1, dest_qp_num, rq_psn, path_mtu: 5, min_rnr_timer: 12 };
            let rts = RtsAttr { sq_psn: 0, timeout: 14, retry_cnt: 7, rnr_retry: 6 };
            qps.push(qp.rtr(&rtr).map_err(|r| r.error)?.rts(&rts).map_err(|r| r.error)?);
        }
        Ok(Self { qps, region, memory })
    }

    /// The null engine has completed it when this returns.
    fn write(&self, connection: usize, wr_id: u64) {
        let local = self.memory.as_ptr() as u64;
        let (lkey, rkey) = (self.region.lkey(), self.region.rkey());
        let (remote, length, imm) = (local + 8, 8, None);
        let w = WriteWr { wr_id, local, lkey, length, remote, rkey, imm, signaled: true, inline: false };
        // SAFETY: the memory is registered, and outlives the call, in which the write is done.
        unsafe { self.qps[connection].post_write(&w) }.expect("room is left");
    }
}

/// A way to find out what is done.
trait Way {
    fn new(context: &Arc<Context>, connections: usize) -> Outcome<Self>
    where
        Self: Sized;
    /// A request is under way.
    fn open(&mut self, connection: usize, request: usize);
    /// And done, as far as the device goes.
    fn complete(&mut self, connection: usize, request: usize);
    fn test(&mut self, connection: usize, request: usize) -> bool;
}

fn byte(n: u64, at: u32) -> u8 {
    n.to_le_bytes()[at as usize]
}

// ---- a queue for each connection ----

#[derive(Default, Clone, Copy)]
struct Request {
    left: u8,
    generation: u8,
}

struct Connection {
    cq: Arc<Cq>,
    owed: u32,
    requests: [Request; REQUESTS],
    stale: u32,
}

struct Own {
    connections: Vec<Connection>,
    rig: Rig,
}

/// Callgrind counts inside this one.
#[unsafe(no_mangle)]
#[inline(never)]
fn queues_test_own(connection: &mut Connection, request: usize) -> bool {
    if connection.requests[request].left > 0 {
        connection.poll();
    }
    connection.requests[request].left == 0
}

impl Connection {
    #[inline]
    fn poll(&mut self) {
        while self.owed > 0 {
            let mut batch = WcBatch::default();
            let Ok(completions) = self.cq.poll(&mut batch) else { return };
            for wc in completions {
                let Completion::Sent { wr_id } = wc.read() else {
                    self.stale += 1;
                    continue;
                };
                self.owed -= 1;
                match self.requests.get_mut(usize::from(byte(wr_id, 0))) {
                    Some(r) if r.generation == byte(wr_id, 1) && r.left > 0 => r.left -= 1,
                    _ => self.stale += 1,
                }
            }
            if completions.len() < WcBatch::LEN {
                return;
            }
        }
    }
}

impl Way for Own {
    fn new(context: &Arc<Context>, connections: usize) -> Outcome<Self> {
        let cqs = (0..connections).map(|_| Cq::create(context, 16)).collect::<Result<Vec<_>, _>>()?;
        let rig = Rig::new(context, &cqs, connections)?;
        let of = |cq| Connection { cq, owed: 0, requests: [Request::default(); REQUESTS], stale: 0 };
        Ok(Self { connections: cqs.into_iter().map(of).collect(), rig })
    }

    fn open(&mut self, connection: usize, request: usize) {
        let c = &mut self.connections[connection];
        let r = &mut c.requests[request];
        *r = Request { left: 1, generation: r.generation.wrapping_add(1) };
        c.owed += 1;
    }

    fn complete(&mut self, connection: usize, request: usize) {
        let generation = self.connections[connection].requests[request].generation;
        self.rig.write(connection, u64::from(generation) << 8 | request as u64);
    }

    #[inline]
    fn test(&mut self, connection: usize, request: usize) -> bool {
        queues_test_own(&mut self.connections[connection], request)
    }
}

// ---- one queue for all ----

/// What any thread may find completed; only the guard's holder counts down.
#[derive(Default)]
struct SharedRequest {
    left: AtomicU8,
    generation: AtomicU8,
}

#[derive(Default)]
struct Member {
    /// Connections come and go.
    generation: AtomicU8,
    completed: AtomicU32,
    requests: [SharedRequest; REQUESTS],
}

struct Shared {
    cq: Arc<Cq>,
    guard: AtomicBool,
    members: Box<[Member]>,
    stale: AtomicU32,
    rig: Rig,
}

/// And inside this one.
#[unsafe(no_mangle)]
#[inline(never)]
fn queues_test_shared(shared: &Shared, member: &Member, request: usize) -> bool {
    let left = &member.requests[request].left;
    if left.load(Ordering::Acquire) > 0 {
        shared.poll();
    }
    left.load(Ordering::Acquire) == 0
}

impl Shared {
    #[inline]
    fn poll(&self) {
        if self.guard.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return;
        }
        loop {
            let mut batch = WcBatch::default();
            let Ok(completions) = self.cq.poll(&mut batch) else { break };
            for wc in completions {
                let delivered = match wc.read() {
                    Completion::Sent { wr_id } => self.deliver(wr_id),
                    _ => None,
                };
                if delivered.is_none() {
                    add(&self.stale, 1);
                }
            }
            if completions.len() < WcBatch::LEN {
                break;
            }
        }
        self.guard.store(false, Ordering::Release);
    }

    #[inline]
    fn deliver(&self, wr_id: u64) -> Option<()> {
        let index = usize::from(u16::from_le_bytes([byte(wr_id, 2), byte(wr_id, 3)]));
        let member = self.members.get(index)?;
        if member.generation.load(Ordering::Relaxed) != byte(wr_id, 4) {
            return None;
        }
        add(&member.completed, 1);
        let r = member.requests.get(usize::from(byte(wr_id, 0)))?;
        let left = r.left.load(Ordering::Relaxed);
        if r.generation.load(Ordering::Relaxed) != byte(wr_id, 1) || left == 0 {
            return None;
        }
        r.left.store(left - 1, Ordering::Release);
        Some(())
    }
}

/// One thread at a time: no locked instruction is needed.
#[inline]
fn add(count: &AtomicU32, n: u32) {
    count.store(count.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
}

impl Way for Shared {
    fn new(context: &Arc<Context>, connections: usize) -> Outcome<Self> {
        let cq = Cq::create(context, u32::try_from(16 * connections)?)?;
        let rig = Rig::new(context, &[Arc::clone(&cq)], connections)?;
        let members = (0..connections).map(|_| Member::default()).collect();
        Ok(Self { cq, guard: AtomicBool::new(false), members, stale: AtomicU32::new(0), rig })
    }

    fn open(&mut self, connection: usize, request: usize) {
        let r = &self.members[connection].requests[request];
        r.generation.store(r.generation.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        r.left.store(1, Ordering::Release);
    }

    fn complete(&mut self, connection: usize, request: usize) {
        let member = &self.members[connection];
        let generation = u64::from(member.requests[request].generation.load(Ordering::Relaxed));
        let of_member = u64::from(member.generation.load(Ordering::Relaxed));
        self.rig.write(connection, of_member << 32 | (connection as u64) << 16 | generation << 8 | request as u64);
    }

    #[inline]
    fn test(&mut self, connection: usize, request: usize) -> bool {
        queues_test_shared(self, &self.members[connection], request)
    }
}

// ---- scenes ----

/// Callgrind writes down what it has counted when this returns, and begins anew.
#[unsafe(no_mangle)]
#[inline(never)]
fn queues_dump() {
    black_box(());
}

/// What a scene's instructions are divided by: messages that are done or, where none is, tests.
fn times(busy: usize, scene: Scene) -> usize {
    ROUNDS
        * match scene {
            Scene::Ready(depth) => busy * depth,
            Scene::Single => 1,
            Scene::Idle => busy,
        }
}

/// Plays a scene for [`ROUNDS`] rounds.
fn play<W: Way>(mut way: W, busy: usize, scene: Scene) -> Outcome<()> {
    let mut done = 0;
    for round in 0..ROUNDS {
        let depth = match scene {
            Scene::Ready(depth) => {
                for (c, r) in (0..busy).flat_map(|c| (0..depth).map(move |r| (c, r))) {
                    way.open(c, r);
                    way.complete(c, r);
                }
                depth
            }
            Scene::Single => {
                // All are open, the one that was done in the round before again.
                (0..busy).filter(|c| round == 0 || *c == (round - 1) % busy).for_each(|c| way.open(c, 0));
                way.complete(round % busy, 0);
                1
            }
            Scene::Idle => {
                (0..busy).filter(|_| round == 0).for_each(|c| way.open(c, 0));
                1
            }
        };
        done += (0..depth).map(|r| (0..busy).filter(|&c| way.test(c, r)).count()).sum::<usize>();
    }
    let expected = if matches!(scene, Scene::Idle) { 0 } else { times(busy, scene) };
    if done == expected { Ok(()) } else { Err(format!("{done} of {expected} requests were found done").into()) }
}

/// Under callgrind: all that the table needs, one dump each, in the table's order.
fn drive() -> Outcome<()> {
    let library = Library::load(std::env::var_os("NCCL_IBVERBS_LIB").map(PathBuf::from).as_deref())?;
    let context = Context::open(&library.devices()?, 0)?;
    for (connections, busy) in SIZES {
        for (scene, _) in SCENES {
            play(Own::new(&context, connections)?, busy, scene)?;
            queues_dump();
            play(Shared::new(&context, connections)?, busy, scene)?;
            queues_dump();
        }
    }
    Ok(())
}

/// Instructions of a dump: all, and those of the adapter.
fn instructions(profile: &Path, adapter: &str) -> Outcome<(f64, f64)> {
    let text = std::fs::read_to_string(profile).map_err(|e| format!("{}: {e}", profile.display()))?;
    let (mut all, mut of_adapter, mut in_adapter) = (0, 0, false);
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if let Some(object) = line.strip_prefix("ob=") {
            in_adapter = object.ends_with(adapter);
        } else if line.starts_with("calls=") {
            // What the callee costs has lines of its own.
            lines.next();
        } else if line.starts_with(|c: char| c.is_ascii_digit()) {
            let count: u64 = line.split(' ').nth(1).ok_or("a line without a count")?.parse()?;
            all += count;
            of_adapter += if in_adapter { count } else { 0 };
        }
    }
    #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
    Ok((all as f64, of_adapter as f64))
}

fn main() -> Outcome<()> {
    if std::env::args().any(|arg| arg == "--drive") {
        return drive();
    }
    let adapter = std::env::var("NCCL_IBVERBS_LIB").map_err(|_| "NCCL_IBVERBS_LIB must name soft-hca's libibverbs")?;
    let adapter = Path::new(&adapter).canonicalize()?;
    let name = adapter.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let folder = std::env::temp_dir().join(format!("nccl-rdma-queues-{}", std::process::id()));
    std::fs::create_dir_all(&folder)?;
    let (fabric, profile) = (folder.join("fabric.toml"), folder.join("profile"));
    std::fs::write(&fabric, FABRIC)?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--collect-atstart=no", "--compress-strings=no", "--compress-pos=no"])
        .args(["--toggle-collect=queues_test_*", "--dump-after=queues_dump"])
        .arg(format!("--callgrind-out-file={}", profile.display()))
        .arg(std::env::current_exe()?)
        .arg("--drive")
        .env("NCCL_IBVERBS_LIB", &adapter)
        .env("SOFT_HCA_FABRIC", &fabric)
        .env("SOFT_HCA_HOST", "here")
        .output()
        .map_err(|e| format!("valgrind: {e}"))?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let mut dumps = (1..).map(|i| instructions(&folder.join(format!("profile.{i}")), &name));
    let mut next = || dumps.next().unwrap_or_else(|| Err("no dump".into()));
    println!(
        "Instructions, own queues / a shared one, in brackets the adapter's part (soft-hca's null engine): for each message"
    );
    println!("that is done, or for each test that finds nothing.\n");
    print!("| connections | busy |");
    SCENES.iter().for_each(|(_, name)| print!(" {name} |"));
    println!("\n|---|---|{}", "---|".repeat(SCENES.len()));
    for (connections, busy) in SIZES {
        print!("| {connections} | {busy} |");
        for (scene, _) in SCENES {
            #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
            let times = times(busy, scene) as f64;
            let mut cell = || -> Outcome<String> {
                let (all, of_adapter) = next()?;
                Ok(format!("{:.0} ({:.0})", all / times, of_adapter / times))
            };
            print!(" {} / {} |", cell()?, cell()?);
        }
        println!();
    }
    std::fs::remove_dir_all(&folder)?;
    Ok(())
}
