//! The cases in which everything goes well: what devices say, and traffic of every shape.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::traffic::{Flow, Incoming, Manner, Msg, Outgoing, Random, RecvRun, exchange};
use super::{Case, Rank, Ranks, skip};
use crate::abi::{
    Buffer, LOG_WARN, MAX_REQUESTS, Memory, PTR_HOST, Plugin, RecvComm, SendComm, Slot, Version, profile, take_log,
};
use crate::wire::{self, Link};

pub(super) fn all() -> Vec<Case> {
    use Ranks::{Any, One, Two};
    vec![
        Case::new("table", "every entry that NCCL calls is there, none that it must not call", One, table),
        Case::new("properties", "init, devices and getProperties again and again: sane and stable", One, properties),
        Case::new("self", "a process connects to itself, no device handle asked for, and sends", One, itself),
        Case::new("ring", "a ring of processes: all sizes, send and receive at once", Any, ring),
        Case::new("all-pairs", "every process to every other, both directions at once", Any, all_pairs),
        Case::new("sizes", "every size between two processes, three rounds", Two, sizes),
        Case::new("large", "64 MiB once (16 MiB with --quick)", Two, large),
        Case::new("huge", "4 GiB and 1 byte at once: about 9 GiB of memory, ABI v9 and newer", Two, huge).costly(),
        Case::new("zero-bytes", "empty sends between full ones, and into empty receives", Two, zero_bytes),
        Case::new("short-sends", "sends shorter than their receives: exact size, nothing behind it", Two, short_sends),
        Case::new("long-sends", "sends longer than their receives: cut to the posted size", Two, long_sends),
        Case::new("sizes-null", "test with NULL for the sizes", Two, sizes_null),
        Case::new("test-order", "requests tested newest first", Two, test_order),
        Case::new("send-first", "isend long before any receive: NULL, or kept and right", Two, send_first),
        Case::new(
            "profiled",
            "events of work requests for NCCL's profiler begin, end, and count every byte",
            Two,
            profiled,
        ),
        Case::new("tags", "receives of one buffer, sends in another order of tags", Two, tags),
        Case::new("groups-1", "grouped receives of 1", Two, groups::<1>),
        Case::new(
            "groups-2",
            "grouped receives of 2, sends in any order and mixed with later groups",
            Two,
            groups::<2>,
        ),
        Case::new("groups-3", "the same with 3", Two, groups::<3>),
        Case::new("groups-4", "the same with 4", Two, groups::<4>),
        Case::new("groups-5", "the same with 5", Two, groups::<5>),
        Case::new("groups-6", "the same with 6", Two, groups::<6>),
        Case::new("groups-7", "the same with 7", Two, groups::<7>),
        Case::new("groups-8", "the same with 8", Two, groups::<8>),
        Case::new("large-groups", "8 MiB in a group of 1 and in one of 8 (1 MiB with --quick)", Two, large_groups),
        Case::new("groups-one-tag", "groups whose buffers all have one tag: filled in order", Two, groups_one_tag),
        Case::new("receives-32", "32 receives outstanding, of largest groups, before the first send", Two, receives_32),
        Case::new("two-ways", "large transfers in both directions at once", Two, two_ways),
        Case::new("iflush", "iflush for completed receives; a NULL request means done", Two, iflush),
        Case::new("many-connections", "16 connections between two processes, mixed", Two, many_connections),
        Case::new("random", "random sizes, groups, tags and truncations from the seed", Any, random),
        Case::new(
            "ll-lines",
            "data in arrival: 8-byte words whole, 128-byte lines with the last word last",
            Two,
            ll_lines,
        ),
        Case::new(
            "fused",
            "as many devices as may be in one, as NCCL fuses them: what it says of itself, and large messages over it",
            Two,
            fused,
        ),
        Case::new(
            "hinted",
            "receives without completion, as of LL: flags in the data tell; empty and plain ones in between",
            Two,
            hinted,
        ),
        Case::new("hinted-empty", "thousands of empty sends into receives without completion", Two, hinted_empty),
        Case::new(
            "mr-two-comms",
            "one range registered on two comms, released on one, used on the other",
            Two,
            mr_two_comms,
        ),
        Case::new(
            "mr-while-sending",
            "registration on a second thread while the first one sends",
            Two,
            mr_while_sending,
        ),
        Case::new(
            "connect-while-sending",
            "new connections on one thread, traffic on another",
            Two,
            connect_while_sending,
        ),
    ]
}

fn table(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let faults = rank.plugin.table_faults();
    ensure!(faults.is_empty(), "{}", faults.join("; "));
    Ok(())
}

fn properties(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let read = || -> anyhow::Result<Vec<_>> {
        (0..rank.plugin.devices()?).map(|dev| Ok(rank.plugin.properties(dev)?)).collect()
    };
    let first = read()?;
    for _ in 0..3 {
        rank.plugin.init().context("a repeated init")?;
        ensure!(read()? == first && read()? == first, "devices or their properties have changed");
    }
    for (dev, p) in first.iter().enumerate() {
        let what = format!("device {dev} ({})", p.name);
        ensure!(!p.name.is_empty(), "{what}: no name");
        ensure!(first.iter().filter(|q| q.name == p.name).count() == 1, "{what}: NCCL merges devices of one name");
        let same_port = first.iter().filter(|q| (q.guid, q.port) == (p.guid, p.port)).count();
        ensure!(same_port == 1, "{what}: guid and port of another device");
        ensure!(p.speed_mbps > 0, "{what}: speed {}", p.speed_mbps);
        ensure!(p.ptr_support & PTR_HOST != 0, "{what}: no host memory");
        ensure!(p.max_recvs >= 1 && p.max_comms >= 1, "{what}: no room for comms or receives");
        ensure!(p.latency_us >= 0.0, "{what}: latency {}", p.latency_us);
        ensure!(p.net_device_type == 0, "{what}: device type {} needs offload", p.net_device_type);
        if let Some(path) = p.pci_path.as_deref().filter(|path| std::path::Path::new(path).exists()) {
            let bus = path.rsplit('/').next().unwrap_or_default();
            ensure!(bus.len() < 16, "{what}: the end of {path} does not fit NCCL's 16 bytes of bus id");
        }
    }
    Ok(())
}

fn fused(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let plugin = rank.plugin;
    let count = plugin.devices()?;
    let most = c_int::try_from(plugin.version().max_parts())?;
    let parts: Vec<_> = (0..count.min(most)).collect();
    if !plugin.fuses() || parts.len() < 2 {
        let why = format!("{count} device(s), of which this version of the interface fuses up to {most}");
        return skip(&why);
    }
    let dev = plugin.make_v_device(&parts)?;
    ensure!(dev == count, "the fused device has index {dev}; {count} was the next");
    ensure!(plugin.devices()? == count + 1, "the fused device is not counted");
    ensure!(plugin.make_v_device(&parts)? == dev, "the same devices again are another device");
    let whole = plugin.properties(dev)?;
    ensure!(whole.parts == parts, "made of {parts:?}, but says {:?}", whole.parts);
    let each = parts.iter().map(|&part| plugin.properties(part)).collect::<Result<Vec<_>, _>>()?;
    let speed: c_int = each.iter().map(|p| p.speed_mbps).sum();
    ensure!(whole.speed_mbps == speed, "speed {}; its parts have {speed} together", whole.speed_mbps);
    ensure!(each.iter().all(|p| p.name != whole.name), "{} is the name of a part", whole.name);
    ensure!(each.iter().all(|p| p.parts.len() == 1), "a device of its own has parts");
    rank.dev = dev;
    let sizes = [8, 1 << 20, 0, 4 << 20, 65537, 100, 3 << 20];
    let flow = Flow::plain(&sizes, 0);
    let (mut out, mut inn) = rank.both_ways()?;
    for _ in 0..rank.rounds(8) {
        rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
    }
    rank.close(out, inn)
}

fn itself(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let sizes = small(rank)?;
    loopback(rank, rank.plugin, &sizes)
}

/// Connects a plugin to itself, sends, closes.
pub(super) fn loopback(rank: &Rank<'_>, plugin: &Plugin, sizes: &[usize]) -> anyhow::Result<()> {
    let dev = rank.options.dev;
    let (mut handle, listener) = plugin.listen(dev)?;
    let (mut send, mut recv) = (None, None);
    while send.is_none() || recv.is_none() {
        if send.is_none() {
            send = plugin.connect_plain(dev, &mut handle)?;
        }
        if recv.is_none() {
            recv = wire::accept_once(plugin, listener)?;
        }
        ensure!(Instant::now() < rank.deadline, "connect or accept to itself still NULL");
        thread::yield_now();
    }
    plugin.close_listen(Some(listener))?;
    let mut out = Outgoing::new(send.context("no comm")?, 0, 1, rank.options.memory[0])?;
    let mut inn = Incoming::new(recv.context("no comm")?, 0, 1, rank.options.memory[1])?;
    let flow = || Flow::plain(sizes, 0);
    exchange(plugin, &mut [(&mut out, flow())], &mut [(&mut inn, flow())], Manner::default(), rank.deadline)?;
    out.close(plugin)?;
    inn.close(plugin)
}

/// The sizes up to 1 MiB.
fn small(rank: &Rank<'_>) -> anyhow::Result<Vec<usize>> {
    let sizes: Vec<_> = rank.options.sizes.iter().copied().filter(|&s| s <= 1 << 20).collect();
    if sizes.is_empty() {
        return skip("no size up to 1 MiB is asked for");
    }
    Ok(sizes)
}

fn ring(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (me, n) = (rank.rank, rank.ranks);
    let (next, previous) = ((me + 1) % n, (me + n - 1) % n);
    let (mut out, mut inn) = rank.connect(&[Link::new(next, "ring")], &[Link::new(previous, "ring")])?;
    let sizes = rank.options.sizes.clone();
    for _ in 0..2 {
        let mut sends = [(&mut out[0], Flow::plain(&sizes, tag(me)))];
        let mut recvs = [(&mut inn[0], Flow::plain(&sizes, tag(previous)))];
        exchange(rank.plugin, &mut sends, &mut recvs, Manner::default(), rank.deadline)?;
    }
    rank.close(out, inn)
}

/// NCCL's tag is the rank of the sender.
fn tag(rank: usize) -> i32 {
    i32::try_from(rank).unwrap_or(0)
}

fn pairs(rank: &Rank<'_>) -> (Vec<Link>, Vec<Link>) {
    let me = rank.rank;
    let others = || (0..rank.ranks).filter(move |&r| r != me);
    let to = others().map(|r| Link::new(r, format!("{me}>{r}"))).collect();
    (to, others().map(|r| Link::new(r, format!("{r}>{me}"))).collect())
}

fn all_pairs(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (to, from) = pairs(rank);
    let sizes = small(rank)?;
    let (mut out, mut inn) = rank.connect(&to, &from)?;
    for _ in 0..2 {
        let mut sends: Vec<_> = out.iter_mut().map(|lane| (lane, Flow::plain(&sizes, tag(rank.rank)))).collect();
        let flows = from.iter().map(|link| Flow::plain(&sizes, tag(link.peer)));
        let mut recvs: Vec<_> = inn.iter_mut().zip(flows).collect();
        exchange(rank.plugin, &mut sends, &mut recvs, Manner::default(), rank.deadline)?;
    }
    rank.close(out, inn)
}

/// Connects one way, moves the flows one after the other, closes.
fn play(rank: &mut Rank<'_>, flows: &[Flow], manner: Manner) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.one_way()?;
    for flow in flows {
        rank.exchange(&mut out, &mut inn, flow, manner)?;
    }
    rank.close(out, inn)
}

fn sizes(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = Flow::plain(&rank.options.sizes, 0);
    play(rank, &[flow.clone(), flow.clone(), flow], Manner::default())
}

fn large(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let size = if rank.options.quick { 16 << 20 } else { 64 << 20 };
    play(rank, &[Flow::plain(&[size], 0)], Manner::default())
}

fn huge(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    if rank.plugin.version() < Version::V9 {
        return skip("sizes are ints up to version 8");
    }
    play(rank, &[Flow::plain(&[(4 << 30) + 1], 0)], Manner::default())
}

fn zero_bytes(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let pairs =
        [(0, 0), (0, 4096), (100, 100), (0, 1 << 20), (0, 0), (0, 8), (65536, 65536), (0, 65536), (1, 1), (0, 1)];
    let empty = [(0, 0); 40];
    play(rank, &[Flow::sized(&pairs, 0), Flow::sized(&empty, 0), Flow::sized(&pairs, 0)], Manner::default())
}

fn short_sends(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let posted = small(rank)?.into_iter().filter(|&cap| cap > 0);
    let pairs: Vec<_> =
        posted.flat_map(|cap| [(cap / 2, cap), (cap.saturating_sub(1), cap), (cap.min(1), cap)]).collect();
    if pairs.is_empty() {
        return skip("no size above 0 is asked for");
    }
    play(rank, &[Flow::sized(&pairs, 3)], Manner::default())
}

fn long_sends(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let pairs = [(8, 7), (100, 0), (4096, 100), (65537, 65536), (65536, 1), (1 << 20, 65537), (1 << 20, 4096)];
    play(rank, &[Flow::sized(&pairs, 3), Flow::sized(&pairs, 4)], Manner::default())
}

fn sizes_null(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = Flow::plain(&small(rank)?, 0);
    play(rank, &[flow], Manner { sizes_null: true, ..Manner::default() })
}

fn test_order(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = Flow::plain(&[100, 65536, 8, 1 << 20, 0, 4096].repeat(6), 0);
    play(rank, &[flow], Manner { reverse: true, depth: 16, ..Manner::default() })
}

fn send_first(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = Flow::plain(&[100, 0, 65536, 1 << 20, 8], 0);
    play(rank, &[flow], Manner { late_recv: Duration::from_millis(100), ..Manner::default() })
}

/// Messages that are one work request, or several on several QPs, alone and in groups.
fn profiled(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    if rank.plugin.version() < Version::V10 {
        return skip("there is no profiler up to version 9");
    }
    profile::start();
    let group = rank.max_group().min(4);
    let flows = [Flow::plain(&[8, 0, 100, 65536, 1 << 20, 3 << 20, 8], 0), grouped(rank, group, rank.rounds(24), 1)];
    play(rank, &flows, Manner::default())?;
    let events = profile::stop();
    if let Err(wrong) = events.check() {
        bail!("{wrong}");
    }
    if events.begun == 0 {
        return skip("the plugin reports no events");
    }
    let messages: Vec<_> = flows.iter().flat_map(Flow::pairs).collect();
    let (sent, posted) = messages.iter().fold((0, 0), |(sent, posted), &(s, p)| (sent + s.min(p), posted + p));
    if rank.rank == 0 {
        ensure!(events.begun >= messages.len(), "{} messages, {} events", messages.len(), events.begun);
        ensure!(events.bytes == sent, "{sent} bytes were sent, the events have {}", events.bytes);
    } else {
        ensure!(events.begun == messages.len(), "{} receives, {} events", messages.len(), events.begun);
        ensure!(events.bytes == posted, "receives of {posted} bytes were posted, the events have {}", events.bytes);
    }
    ensure!(events.qps.iter().all(|&qp| qp > 0), "events on QPs {:?}", events.qps);
    Ok(())
}

fn tags(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let mut flow = Flow::default();
    let mut random = rank.random(0, 1, 1);
    for i in 0..rank.rounds(64) {
        let msg = Msg { len: [8, 0, 4096, 100, 65537][i % 5], tag: [7, -1, 0, i32::MAX][random.below(4)] };
        flow.recvs.push(vec![msg]);
        flow.sends.push(msg);
    }
    random.shuffle(&mut flow.sends);
    // A tag's sends take its receives in order, whatever their sizes: make room for any.
    for slot in flow.recvs.iter_mut().flatten() {
        slot.len = 65537;
    }
    play(rank, &[flow], Manner::default())
}

/// Groups of n with a tag per buffer; sends of all groups shuffled among each other.
fn grouped(rank: &Rank<'_>, n: usize, groups: usize, round: usize) -> Flow {
    let mut random = rank.random(0, n, round);
    let mut flow = Flow::default();
    for _ in 0..groups {
        let sizes = [0, 1, 7, 8, 100, 4096, 65535, 65537];
        let pick = |random: &mut Random| sizes[random.below(sizes.len())];
        let group: Vec<_> = (0..n).map(|i| Msg { len: pick(&mut random), tag: 10 + tag(i) }).collect();
        flow.sends.extend(group.iter().map(|slot| Msg { len: pick(&mut random), tag: slot.tag }));
        flow.recvs.push(group);
    }
    if round > 0 {
        random.shuffle(&mut flow.sends);
    }
    flow
}

fn groups<const N: usize>(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    if N > rank.max_group() {
        return skip(&format!("groups of up to {} are taken", rank.max_group()));
    }
    let flows: Vec<_> = (0..3).map(|round| grouped(rank, N, rank.rounds(24), round)).collect();
    play(rank, &flows, Manner::default())
}

fn large_groups(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let len = if rank.options.quick { 1 << 20 } else { 8 << 20 };
    let group = |n: usize| (0..n).map(|i| Msg { len, tag: 10 + tag(i) }).collect::<Vec<_>>();
    let mut flow = Flow { sends: Vec::new(), recvs: vec![group(1), group(rank.max_group())] };
    flow.sends.extend(flow.recvs.iter().flatten().rev());
    // The single one first: its tag is also one of the group's.
    flow.sends.rotate_right(1);
    play(rank, &[flow], Manner::default())
}

fn groups_one_tag(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let n = rank.max_group();
    let mut flow = grouped(rank, n, rank.rounds(16), 0);
    flow.sends.iter_mut().chain(flow.recvs.iter_mut().flatten()).for_each(|msg| msg.tag = 5);
    play(rank, &[flow], Manner::default())
}

fn receives_32(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = grouped(rank, rank.max_group(), 2 * MAX_REQUESTS, 1);
    let manner = Manner { depth: 2 * MAX_REQUESTS, ..Manner::default() };
    let (mut out, mut inn) = rank.one_way()?;
    if rank.rank == 0 {
        // Not before the other side has counted its receives.
        rank.barrier()?;
        rank.exchange(&mut out, &mut inn, &flow, manner)?;
    } else {
        let mut run = RecvRun::new(rank.plugin, &mut inn[0], &flow, manner)?;
        while run.in_flight() < MAX_REQUESTS {
            run.post()?;
            ensure!(
                Instant::now() < rank.error_deadline().min(rank.deadline),
                "irecv gives NULL with only {} receives outstanding; NCCL may have {MAX_REQUESTS}",
                run.in_flight()
            );
            if run.in_flight() < MAX_REQUESTS {
                thread::yield_now();
            }
        }
        rank.barrier()?;
        while !run.done() {
            run.step()?;
            ensure!(Instant::now() < rank.deadline, "time is up, waits for {:?}", run.waits_for());
            thread::yield_now();
        }
        run.check()?;
    }
    rank.close(out, inn)
}

fn two_ways(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.both_ways()?;
    let size = if rank.options.quick { 1 << 20 } else { 8 << 20 };
    let flow = Flow::plain(&[size, 65537, size, 0, size], 0);
    rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
    rank.close(out, inn)
}

fn iflush(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let manner = Manner { flush: true, ..Manner::default() };
    let flows = [Flow::plain(&small(rank)?, 0), grouped(rank, rank.max_group(), 16, 1)];
    play(rank, &flows, manner)
}

fn many_connections(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let links: Vec<_> = (0..16).map(|i| Link::new(1 - rank.rank, format!("many {i}"))).collect();
    let (mut out, mut inn) = rank.connect(&links, &links)?;
    rank.exchange(&mut out, &mut inn, &Flow::plain(&[8, 65536, 0, 100, 4096], 0), Manner::default())?;
    rank.close(out, inn)
}

fn random(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (to, from) = pairs(rank);
    let (mut out, mut inn) = rank.connect(&to, &from)?;
    for round in 1..=rank.rounds(16) {
        let me = rank.rank;
        let flows =
            |links: &[Link], flow: &dyn Fn(usize) -> Flow| links.iter().map(|l| flow(l.peer)).collect::<Vec<_>>();
        let sending = flows(&to, &|peer| random_flow(rank, me, peer, round));
        let receiving = flows(&from, &|peer| random_flow(rank, peer, me, round));
        let mut choice = rank.random(99, 99, round);
        let manner = Manner {
            depth: [1, 2, 8, 32][choice.below(4)],
            reverse: choice.below(2) == 0,
            flush: choice.below(3) == 0,
            ..Manner::default()
        };
        let mut sends: Vec<_> = out.iter_mut().zip(sending).collect();
        let mut recvs: Vec<_> = inn.iter_mut().zip(receiving).collect();
        exchange(rank.plugin, &mut sends, &mut recvs, manner, rank.deadline)
            .with_context(|| format!("round {round} of seed {}", rank.options.seed))?;
    }
    rank.close(out, inn)
}

fn random_flow(rank: &Rank<'_>, from: usize, to: usize, round: usize) -> Flow {
    let mut random = rank.random(from, to, round);
    let mut flow = Flow::default();
    let length = |random: &mut Random| {
        let bits = random.below(18);
        random.below((1 << bits) + 1)
    };
    for _ in 0..4 + random.below(24) {
        let mut group = Vec::new();
        for _ in 0..=random.below(rank.max_group()) {
            let slot = Msg { len: length(&mut random), tag: tag(random.below(4)) };
            let len = if random.below(2) == 0 { slot.len } else { length(&mut random) };
            flow.sends.push(Msg { len, tag: slot.tag });
            group.push(slot);
        }
        flow.recvs.push(group);
    }
    random.shuffle(&mut flow.sends);
    flow
}

/// LL and LL128 read flags in the data itself while they arrive: a word is old or new, never half; and in a line of 128
/// bytes the last word, LL128's flag, must not be seen before the others.
fn ll_lines(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    const BYTES: usize = 600 << 10;
    const LINE: usize = 128;
    let wires = {
        let link = [Link::new(1 - rank.rank, "lines")];
        let (to, from): (&[_], &[_]) = if rank.rank == 0 { (&link, &[]) } else { (&[], &link) };
        wire::connect(rank.plugin, rank.mail, rank.options.dev, to, from, rank.deadline)?
    };
    rank.barrier()?;
    let (plugin, deadline) = (rank.plugin, rank.deadline);
    let mut buffer = rank.buffer(BYTES)?;
    let word = |round: usize, at: usize| {
        Random::new(&[rank.options.seed, u64::try_from(round * BYTES + at).unwrap_or(0)]).next()
    };
    let rounds = rank.rounds(8);
    if let [comm] = wires.sends[..] {
        let memory = plugin.reg_mr(comm, &buffer, 0..BYTES)?;
        for round in 1..=rounds {
            let (words, _) = buffer.bytes_mut()[..BYTES].as_chunks_mut();
            words.iter_mut().enumerate().for_each(|(i, w)| *w = word(round, i * 8).to_ne_bytes());
            finish_send(rank, comm, &buffer, 0..BYTES, memory)?;
        }
        plugin.dereg_mr(comm, memory)?;
        plugin.close_send(Some(comm))?;
    }
    if let [comm] = wires.recvs[..] {
        let memory = plugin.reg_mr(comm, &buffer, 0..BYTES)?;
        for round in 1..=rounds {
            let old: Vec<_> = (0..BYTES).step_by(8).map(|at| buffer.word(at)).collect();
            let new: Vec<_> = (0..BYTES).step_by(8).map(|at| word(round, at)).collect();
            let look = |whole: bool| -> anyhow::Result<()> {
                for line in (0..BYTES).step_by(LINE) {
                    let mut all = whole;
                    for at in (line..line + LINE).step_by(8).rev() {
                        let seen = buffer.word(at);
                        let arrived = seen == new[at / 8];
                        ensure!(
                            arrived || seen == old[at / 8],
                            "the word at byte {at} is {seen:#018x}: neither old nor new"
                        );
                        ensure!(arrived || !all, "byte {at} is still old, but a later word of its line has arrived");
                        all |= arrived && at == line + LINE - 8;
                    }
                }
                Ok(())
            };
            let (mut request, mut done) = (None, false);
            loop {
                match request {
                    None => {
                        let slot = Slot { buffer: &buffer, range: 0..BYTES, tag: 0, memory };
                        // As NCCL's of LL128.
                        request = plugin.irecv_hinted(comm, slot)?;
                    }
                    Some(posted) if !done => done = plugin.test_recv(posted, 1)?.is_some(),
                    Some(_) if (0..BYTES).step_by(8).all(|at| buffer.word(at) == new[at / 8]) => break,
                    Some(_) => look(false)?,
                }
                if request.is_some() {
                    look(false)?;
                }
                ensure!(Instant::now() < deadline, "a receive of {BYTES} bytes is not done");
                thread::yield_now();
            }
            look(true)?;
        }
        plugin.dereg_mr(comm, memory)?;
        plugin.close_recv(Some(comm))?;
    }
    Ok(())
}

/// One step of a connection as NCCL's LL makes it: words of data and flag in one of a few slots.
#[derive(Clone, Copy)]
struct Step {
    bytes: usize,
    /// Of a receive that completes.
    plain: bool,
}

/// Steps that NCCL has in flight.
const STEPS: usize = 8;
const LL_SLOT: usize = 64 << 10;
/// With a guard behind.
const LL_STRIDE: usize = LL_SLOT + 128;

fn ll_range(step: usize) -> Range<usize> {
    let start = step % STEPS * LL_STRIDE;
    start..start + LL_SLOT
}

/// The flag is the step, so that what was there before is never taken for it.
fn ll_word(seed: u64, step: usize, at: usize) -> u64 {
    let word = |n: usize| u64::try_from(n).unwrap_or(0);
    Random::new(&[seed, word(step), word(at)]).next() >> 32 | word(step + 1) << 32
}

/// The sending end: keeps the slots of the steps under way as they are.
fn send_steps(rank: &Rank<'_>, comm: SendComm, steps: &[Step]) -> anyhow::Result<()> {
    let plugin = rank.plugin;
    let mut buffer = rank.buffer(STEPS * LL_STRIDE)?;
    let memory = plugin.reg_mr(comm, &buffer, 0..buffer.len())?;
    let mut flying = std::collections::VecDeque::new();
    let (mut next, mut written) = (0, 0);
    while next < steps.len() || !flying.is_empty() {
        if let Some(&request) = flying.front()
            && plugin.test_send(request)?.is_some()
        {
            flying.pop_front();
        }
        if next < steps.len() && flying.len() < STEPS {
            let range = ll_range(next);
            if written == next {
                let payload = &mut buffer.bytes_mut()[range.start..range.start + steps[next].bytes];
                for (i, word) in payload.as_chunks_mut().0.iter_mut().enumerate() {
                    *word = ll_word(rank.options.seed, next, i).to_ne_bytes();
                }
                written += 1;
            }
            let range = range.start..range.start + steps[next].bytes;
            if let Some(request) = plugin.isend(comm, &buffer, range, 0, memory)? {
                flying.push_back(request);
                next += 1;
            }
        }
        ensure!(Instant::now() < rank.deadline, "step {next} of {} is not sent", steps.len());
        thread::yield_now();
    }
    Ok(plugin.dereg_mr(comm, memory)?)
}

/// The receiving end: looks at flags as a GPU does, and posts a slot again once its step was read.
fn receive_steps(rank: &Rank<'_>, comm: RecvComm, steps: &[Step]) -> anyhow::Result<()> {
    let plugin = rank.plugin;
    let buffer = rank.buffer(STEPS * LL_STRIDE)?;
    let memory = plugin.reg_mr(comm, &buffer, 0..buffer.len())?;
    let mut flying = std::collections::VecDeque::new();
    // What each slot has until the next step comes into it.
    let mut kept = vec![vec![0; LL_SLOT / 8]; STEPS];
    let (mut posted, mut done, mut read, mut words) = (0, 0, 0, 0);
    while read < steps.len() || !flying.is_empty() {
        if posted < steps.len() && posted < read + STEPS {
            let slot = Slot { buffer: &buffer, range: ll_range(posted), tag: 0, memory };
            let request =
                if steps[posted].plain { plugin.irecv(comm, &[slot])? } else { plugin.irecv_hinted(comm, slot)? };
            if let Some(request) = request {
                flying.push_back(request);
                posted += 1;
            }
        }
        if let Some(&request) = flying.front()
            && let Some(sizes) = plugin.test_recv(request, 1)?
        {
            flying.pop_front();
            let (size, bytes) = (sizes[0], steps[done].bytes);
            ensure!(if steps[done].plain { size == bytes } else { size >= bytes }, "step {done} has size {size}");
            done += 1;
        }
        // The words of a step that are there; without completion they may be there before test says done, or after.
        if let Some(&step) = steps.get(read)
            && (read < done || !step.plain && read < posted)
        {
            while words * 8 < step.bytes {
                let seen = buffer.word(ll_range(read).start + words * 8);
                if seen >> 32 != u64::try_from(read + 1)? {
                    ensure!(!step.plain, "step {read} is done, but its word {words} is {seen:#018x}");
                    break;
                }
                ensure!(
                    seen == ll_word(rank.options.seed, read, words),
                    "step {read} has {seen:#018x} at word {words}"
                );
                kept[read % STEPS][words] = seen;
                words += 1;
            }
            if words * 8 >= step.bytes {
                let now = |word: usize| buffer.word(ll_range(read).start + word * 8);
                let kept = kept[read % STEPS].iter().enumerate().skip(words);
                if let Some((word, old)) = kept.into_iter().find(|&(word, &old)| now(word) != old) {
                    bail!(
                        "word {word}, behind the payload of step {read} ({} bytes), became {:#018x} from {old:#018x}",
                        step.bytes,
                        now(word)
                    );
                }
                (read, words) = (read + 1, 0);
            }
        }
        ensure!(
            Instant::now() < rank.deadline,
            "of {} steps {posted} were posted, {done} done and {read} read",
            steps.len()
        );
        thread::yield_now();
    }
    for step in 0..STEPS {
        let guard = ll_range(step).end..(step + 1) * LL_STRIDE;
        ensure!(buffer.bytes()[guard].iter().all(|&b| b == 0), "the guard behind slot {step} was written to");
    }
    // As NCCL does it: what test has called done is over, whether or not the sender has come to it.
    Ok(plugin.dereg_mr(comm, memory)?)
}

fn play_steps(rank: &mut Rank<'_>, steps: &[Step]) -> anyhow::Result<()> {
    let link = [Link::new(1 - rank.rank, "steps")];
    let (to, from): (&[_], &[_]) = if rank.rank == 0 { (&link, &[]) } else { (&[], &link) };
    let wires = wire::connect(rank.plugin, rank.mail, rank.options.dev, to, from, rank.deadline)?;
    rank.barrier()?;
    take_log();
    if let [comm] = wires.sends[..] {
        send_steps(rank, comm, steps)?;
        // The receiver has gone.
        rank.barrier()?;
        rank.plugin.close_send(Some(comm))?;
    }
    if let [comm] = wires.recvs[..] {
        receive_steps(rank, comm, steps)?;
        rank.plugin.close_recv(Some(comm))?;
        rank.barrier()?;
    }
    let warning = take_log().into_iter().find(|line| line.level <= LOG_WARN);
    ensure!(warning.is_none(), "everything went well, but: {}", warning.map_or_else(String::new, |w| w.to_string()));
    Ok(())
}

fn hinted(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let mut random = rank.random(0, 1, 7);
    let bytes = [0, 8, 8, 16, 128, 4096, 8, LL_SLOT];
    let steps: Vec<_> = (0..rank.rounds(2400))
        // Long runs of each, and single plain ones among the others.
        .map(|i| Step { bytes: bytes[random.below(bytes.len())], plain: i / 300 % 3 == 2 || random.below(40) == 0 })
        .collect();
    play_steps(rank, &steps)
}

fn hinted_empty(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let steps = vec![Step { bytes: 0, plain: false }; rank.rounds(4000)];
    play_steps(rank, &steps)
}

fn mr_two_comms(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let links = [Link::new(1 - rank.rank, "first"), Link::new(1 - rank.rank, "second")];
    let (to, from): (&[_], &[_]) = if rank.rank == 0 { (&links, &[]) } else { (&[], &links) };
    let wires = wire::connect(rank.plugin, rank.mail, rank.options.dev, to, from, rank.deadline)?;
    rank.barrier()?;
    let plugin = rank.plugin;
    let mut buffer = rank.buffer(1 << 20)?;
    let whole = 0..buffer.len();
    if rank.rank == 0 {
        buffer.bytes_mut().fill(0x77);
        let [a, b] = [wires.sends[0], wires.sends[1]];
        let (on_a, on_b) = (plugin.reg_mr(a, &buffer, whole.clone())?, plugin.reg_mr(b, &buffer, whole.clone())?);
        // Also a part of it, as for a slice of a pool, and the whole once more.
        let part = plugin.reg_mr(b, &buffer, 4096..65536)?;
        let again = plugin.reg_mr(b, &buffer, whole)?;
        for (comm, memory, range) in
            [(a, on_a, 0..65536), (b, on_b, 100..70000), (b, part, 5000..60001), (b, again, 0..1 << 20)]
        {
            finish_send(rank, comm, &buffer, range, memory)?;
        }
        plugin.dereg_mr(a, on_a)?;
        plugin.dereg_mr(b, part)?;
        plugin.dereg_mr(b, again)?;
        finish_send(rank, b, &buffer, 1..1 << 20, on_b)?;
        plugin.dereg_mr(b, on_b)?;
        plugin.close_send(Some(a))?;
        plugin.close_send(Some(b))?;
    } else {
        let [a, b] = [wires.recvs[0], wires.recvs[1]];
        let (on_a, on_b) = (plugin.reg_mr(a, &buffer, whole.clone())?, plugin.reg_mr(b, &buffer, whole)?);
        for (comm, memory, range) in
            [(a, on_a, 0..65536), (b, on_b, 100..70000), (b, on_b, 5000..60001), (b, on_b, 0..1 << 20)]
        {
            finish_recv(rank, comm, &mut buffer, range, memory)?;
        }
        plugin.dereg_mr(a, on_a)?;
        finish_recv(rank, b, &mut buffer, 1..1 << 20, on_b)?;
        plugin.dereg_mr(b, on_b)?;
        plugin.close_recv(Some(a))?;
        plugin.close_recv(Some(b))?;
    }
    Ok(())
}

fn finish_send(
    rank: &Rank<'_>,
    comm: SendComm,
    buffer: &Buffer,
    range: Range<usize>,
    memory: Memory,
) -> anyhow::Result<()> {
    let mut request = None;
    loop {
        match request {
            None => request = rank.plugin.isend(comm, buffer, range.clone(), 0, memory)?,
            Some(posted) => {
                if rank.plugin.test_send(posted)?.is_some() {
                    return Ok(());
                }
            }
        }
        ensure!(Instant::now() < rank.deadline, "a send of {} bytes is not done", range.len());
        thread::yield_now();
    }
}

fn finish_recv(
    rank: &Rank<'_>,
    comm: RecvComm,
    buffer: &mut Buffer,
    range: Range<usize>,
    memory: Memory,
) -> anyhow::Result<()> {
    buffer.bytes_mut().fill(0);
    let mut request = None;
    loop {
        match request {
            None => request = rank.plugin.irecv(comm, &[Slot { buffer, range: range.clone(), tag: 0, memory }])?,
            Some(posted) => {
                if let Some(sizes) = rank.plugin.test_recv(posted, 1)? {
                    ensure!(sizes[0] == range.len(), "size {} and not {}", sizes[0], range.len());
                    break;
                }
            }
        }
        ensure!(Instant::now() < rank.deadline, "a receive of {} bytes is not done", range.len());
        thread::yield_now();
    }
    let inside = |i: usize| if range.contains(&i) { 0x77 } else { 0 };
    match buffer.bytes().iter().enumerate().position(|(i, &b)| b != inside(i)) {
        Some(at) => bail!("byte {at} is wrong after a receive into {range:?}"),
        None => Ok(()),
    }
}

/// Runs `beside` on a second thread, again and again, as long as the main thread's traffic goes on.
fn beside_traffic(
    rank: &Rank<'_>,
    out: &mut [Outgoing],
    inn: &mut [Incoming],
    beside: impl Fn() -> anyhow::Result<()> + Sync,
) -> anyhow::Result<()> {
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let service = scope.spawn(|| -> anyhow::Result<usize> {
            let mut turns = 0;
            while !over.load(Ordering::Acquire) || turns == 0 {
                beside()?;
                turns += 1;
                thread::yield_now();
            }
            Ok(turns)
        });
        let flow = Flow::plain(&[65536, 100, 1 << 20, 8, 4096].repeat(rank.rounds(32)), 0);
        let moved = rank.exchange(out, inn, &flow, Manner::default());
        over.store(true, Ordering::Release);
        let turns = service.join().map_err(|_| anyhow::anyhow!("the second thread panicked"))?;
        moved?;
        turns.context("on the second thread").map(drop)
    })
}

fn mr_while_sending(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.both_ways()?;
    let (send, recv, plugin) = (out[0].comm, inn[0].comm, rank.plugin);
    let other = Buffer::new(1 << 20)?;
    beside_traffic(rank, &mut out, &mut inn, || {
        let first = plugin.reg_mr(send, &other, 0..other.len())?;
        let second = plugin.reg_mr(recv, &other, 8192..65536)?;
        plugin.dereg_mr(send, first)?;
        Ok(plugin.dereg_mr(recv, second)?)
    })?;
    rank.close(out, inn)
}

fn connect_while_sending(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.both_ways()?;
    let (plugin, dev, deadline) = (rank.plugin, rank.options.dev, rank.deadline);
    beside_traffic(rank, &mut out, &mut inn, || {
        let (mut handle, listener) = plugin.listen(dev)?;
        let (mut send, mut recv) = (None, None);
        while send.is_none() || recv.is_none() {
            if send.is_none() {
                send = wire::connect_once(plugin, dev, &mut handle)?;
            }
            if recv.is_none() {
                recv = wire::accept_once(plugin, listener)?;
            }
            ensure!(Instant::now() < deadline, "a connection beside traffic does not come up");
            thread::yield_now();
        }
        plugin.close_listen(Some(listener))?;
        plugin.close_send(send)?;
        Ok(plugin.close_recv(recv)?)
    })?;
    rank.close(out, inn)
}
