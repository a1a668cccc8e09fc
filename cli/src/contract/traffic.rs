//! Traffic that can be judged: what is sent and asked for on a connection, where it has to land, and a pump that posts
//! and tests like NCCL's progress thread and then looks at every byte, inside the buffers and between them.

use std::ops::Range;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::abi::{Buffer, Memory, Place, Plugin, RecvComm, Request, SendComm, SendSize, Slot};
use crate::values::mix;

/// Free space behind all: a plugin that does not cut a long message is to be caught, not to end the process.
const OVERRUN: usize = 1 << 20;
/// Free space on both sides of every buffer; it must keep [`BACKGROUND`].
const GUARD: usize = 64;
const BACKGROUND: u8 = 0x5a;

/// A small seeded generator (splitmix64), the same on both ends of a connection.
#[derive(Clone, Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(parts: &[u64]) -> Self {
        let mut random = Self(0);
        for part in parts {
            random.0 ^= part.wrapping_mul(0x9e37_79b9_7f4a_7c15);
            random.next();
        }
        random
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below n.
    pub(super) fn below(&mut self, n: usize) -> usize {
        usize::try_from(self.next() % u64::try_from(n.max(1)).unwrap_or(1)).unwrap_or(0)
    }

    pub(super) fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}

fn words(key: u64) -> impl Iterator<Item = [u8; 8]> {
    (0_u64..).map(move |i| mix(key.wrapping_add(i)).to_le_bytes())
}

fn fill(key: u64, out: &mut [u8]) {
    for (chunk, word) in out.chunks_mut(8).zip(words(key)) {
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
}

fn check(key: u64, got: &[u8]) -> anyhow::Result<()> {
    let wrong = got.chunks(8).zip(words(key)).position(|(chunk, word)| *chunk != word[..chunk.len()]);
    let Some(word) = wrong else { return Ok(()) };
    let expected = words(key).nth(word).unwrap_or_default();
    let got = &got[word * 8..];
    let at = expected.iter().zip(got).position(|(e, g)| e != g).unwrap_or(0);
    bail!("byte {} is {:#04x}, not {:#04x}", word * 8 + at, got[at], expected[at])
}

/// Fills memory that has been taken back, to see later whether anyone still writes to it.
fn reclaim(buffer: &mut Buffer) {
    buffer.bytes_mut().fill(BACKGROUND);
}

/// Nobody has written to memory since [`reclaim`].
pub(super) fn check_reclaimed(buffer: &Buffer) -> anyhow::Result<()> {
    check_background("memory that deregMr had handed back", buffer.bytes())
}

fn check_background(what: &str, bytes: &[u8]) -> anyhow::Result<()> {
    match bytes.iter().position(|&b| b != BACKGROUND) {
        Some(at) => bail!("{what} was written to (byte {at} of {}: {:#04x})", bytes.len(), bytes[at]),
        None => Ok(()),
    }
}

/// One send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Msg {
    pub(super) len: usize,
    pub(super) tag: i32,
}

/// What goes over one connection: sends in the order in which they are first tried, and receives, each a group.
#[derive(Clone, Debug, Default)]
pub(super) struct Flow {
    pub(super) sends: Vec<Msg>,
    pub(super) recvs: Vec<Vec<Msg>>,
}

impl Flow {
    /// Each message has a receive of just its size.
    pub(super) fn plain(sizes: &[usize], tag: i32) -> Self {
        Self::sized(&sizes.iter().map(|&len| (len, len)).collect::<Vec<_>>(), tag)
    }

    /// Pairs of sent and posted size.
    pub(super) fn sized(pairs: &[(usize, usize)], tag: i32) -> Self {
        Self {
            sends: pairs.iter().map(|&(len, _)| Msg { len, tag }).collect(),
            recvs: pairs.iter().map(|&(_, len)| vec![Msg { len, tag }]).collect(),
        }
    }

    /// What was sent and what was posted for it, message by message.
    pub(super) fn pairs(&self) -> Vec<(usize, usize)> {
        let slots = self.recvs.iter().zip(self.matches());
        slots
            .flat_map(|(slots, sends)| {
                slots.iter().zip(sends).map(|(slot, send)| (self.sends[send].len, slot.len)).collect::<Vec<_>>()
            })
            .collect()
    }

    /// For each slot, in order, the number of the send that fills it: the first one left with its tag.
    fn matches(&self) -> Vec<Vec<usize>> {
        let mut free: Vec<_> = (0..self.sends.len()).collect();
        let fill = |slot: &Msg| {
            let at = free.iter().position(|&k| self.sends[k].tag == slot.tag);
            at.map(|at| free.remove(at)).expect("a flow has as many sends of a tag as slots")
        };
        let mut fill = fill;
        self.recvs.iter().map(|group| group.iter().map(&mut fill).collect()).collect()
    }
}

/// How the pump behaves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Manner {
    /// Requests in flight on one connection.
    pub(super) depth: usize,
    /// Calls iflush for each receive that has completed.
    pub(super) flush: bool,
    /// Tests with NULL for the sizes.
    pub(super) sizes_null: bool,
    /// Tests the newest request first.
    pub(super) reverse: bool,
    /// The receiver does nothing at first, for this long.
    pub(super) late_recv: Duration,
}

impl Default for Manner {
    fn default() -> Self {
        Self { depth: 8, flush: false, sizes_null: false, reverse: false, late_recv: Duration::ZERO }
    }
}

/// Registered memory of one comm, grown at need.
#[derive(Debug)]
struct Arena {
    place: Place,
    buffer: Buffer,
    memory: Option<Memory>,
}

impl Arena {
    fn new(place: Place) -> anyhow::Result<Self> {
        Ok(Self { place, buffer: Buffer::at_place(place, 0)?, memory: None })
    }

    /// Room for buffers of these sizes, at uneven addresses, with guards between; everything is background.
    fn lay_out(
        &mut self,
        sizes: impl IntoIterator<Item = usize>,
        register: impl Fn(&Buffer) -> anyhow::Result<Memory>,
        release: impl Fn(Memory) -> anyhow::Result<()>,
    ) -> anyhow::Result<Vec<Range<usize>>> {
        let mut ranges = Vec::new();
        let mut end: usize = 0;
        for (i, size) in sizes.into_iter().enumerate() {
            let skew = if i % 3 == 0 { 0 } else { i * 7 % 64 };
            let start = end.next_multiple_of(64) + GUARD + skew;
            end = start + size + GUARD;
            ranges.push(start..start + size);
        }
        let room = end + OVERRUN;
        if self.memory.is_none() || self.buffer.len() < room {
            if let Some(old) = self.memory.take() {
                release(old)?;
            }
            self.buffer = Buffer::at_place(self.place, room)?;
            self.memory = Some(register(&self.buffer)?);
        }
        self.buffer.bytes_mut().fill(BACKGROUND);
        Ok(ranges)
    }

    fn memory(&self) -> anyhow::Result<Memory> {
        self.memory.context("nothing is registered")
    }

    /// Nothing but the given ranges may have been touched.
    fn check_gaps(&self, ranges: &[Range<usize>]) -> anyhow::Result<()> {
        let mut from = 0;
        for (i, range) in ranges.iter().enumerate() {
            check_background(&format!("the guard before buffer {i}"), &self.buffer.bytes()[from..range.start])?;
            from = range.end;
        }
        check_background("the guard after the last buffer", &self.buffer.bytes()[from..])
    }
}

/// The sending end of a connection.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) comm: SendComm,
    peer: usize,
    key: u64,
    arena: Arena,
}

/// The receiving end of a connection.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) comm: RecvComm,
    peer: usize,
    key: u64,
    arena: Arena,
}

impl Outgoing {
    /// `key` makes the pattern of this connection; both ends must use the same.
    pub(super) fn new(comm: SendComm, peer: usize, key: u64, place: Place) -> anyhow::Result<Self> {
        Ok(Self { comm, peer, key, arena: Arena::new(place)? })
    }

    pub(super) fn close(mut self, plugin: &Plugin) -> anyhow::Result<()> {
        if let Some(memory) = self.arena.memory.take() {
            plugin.dereg_mr(self.comm, memory)?;
        }
        Ok(plugin.close_send(Some(self.comm))?)
    }
}

impl Incoming {
    pub(super) fn new(comm: RecvComm, peer: usize, key: u64, place: Place) -> anyhow::Result<Self> {
        Ok(Self { comm, peer, key, arena: Arena::new(place)? })
    }

    pub(super) fn close(mut self, plugin: &Plugin) -> anyhow::Result<()> {
        if let Some(memory) = self.arena.memory.take() {
            plugin.dereg_mr(self.comm, memory)?;
        }
        Ok(plugin.close_recv(Some(self.comm))?)
    }
}

impl Incoming {
    /// NCCL's order at an abort: deregMr, the memory is freed, closeRecv. Gives the memory, reclaimed.
    pub(super) fn abandon(mut self, plugin: &Plugin) -> anyhow::Result<Buffer> {
        if let Some(memory) = self.arena.memory.take() {
            plugin.dereg_mr(self.comm, memory)?;
        }
        reclaim(&mut self.arena.buffer);
        plugin.close_recv(Some(self.comm))?;
        Ok(self.arena.buffer)
    }
}

fn message_key(connection: u64, index: usize) -> u64 {
    Random::new(&[connection, u64::try_from(index).unwrap_or(u64::MAX)]).next()
}

/// The sends of one flow under way.
pub(super) struct SendRun<'a> {
    plugin: &'a Plugin,
    lane: &'a mut Outgoing,
    sends: &'a [Msg],
    ranges: Vec<Range<usize>>,
    waiting: Vec<usize>,
    flying: Vec<(usize, Request)>,
    manner: Manner,
}

impl<'a> SendRun<'a> {
    pub(super) fn new(
        plugin: &'a Plugin,
        lane: &'a mut Outgoing,
        flow: &'a Flow,
        manner: Manner,
    ) -> anyhow::Result<Self> {
        let comm = lane.comm;
        lane.key = lane.key.wrapping_add(1);
        let sizes = flow.sends.iter().map(|m| m.len);
        let register = |buffer: &Buffer| Ok(plugin.reg_mr(comm, buffer, 0..buffer.len())?);
        let ranges = lane.arena.lay_out(sizes, register, |old| Ok(plugin.dereg_mr(comm, old)?))?;
        for (k, range) in ranges.iter().enumerate() {
            fill(message_key(lane.key, k), &mut lane.arena.buffer.bytes_mut()[range.clone()]);
        }
        let waiting = (0..flow.sends.len()).collect();
        Ok(Self { plugin, lane, sends: &flow.sends, ranges, waiting, flying: Vec::new(), manner })
    }

    fn name(&self, k: usize) -> String {
        let Msg { len, tag } = self.sends[k];
        format!("send {k} ({len} bytes, tag {tag}) to rank {}", self.lane.peer)
    }

    pub(super) fn done(&self) -> bool {
        self.waiting.is_empty() && self.flying.is_empty()
    }

    /// Requests posted and not yet done.
    pub(super) fn in_flight(&self) -> usize {
        self.flying.len()
    }

    /// Tests what is in flight and posts what can be posted: the first waiting send of each tag.
    pub(super) fn step(&mut self) -> anyhow::Result<()> {
        let mut at = 0;
        while at < self.flying.len() {
            let index = if self.manner.reverse { self.flying.len() - 1 - at } else { at };
            let (k, request) = self.flying[index];
            let finished = if self.manner.sizes_null {
                self.plugin.test_plain(request).map(|done| done.then_some(SendSize::Unwritten))
            } else {
                self.plugin.test_send(request)
            };
            match finished.with_context(|| self.name(k))? {
                Some(SendSize::Bytes(size)) if usize::try_from(size).map_or(true, |s| s > self.sends[k].len) => {
                    bail!("{}: test says {size} bytes", self.name(k))
                }
                Some(_) => drop(self.flying.remove(index)),
                None => at += 1,
            }
        }
        let mut refused = Vec::new();
        let mut at = 0;
        while at < self.waiting.len() && self.flying.len() < self.manner.depth {
            let k = self.waiting[at];
            let tag = self.sends[k].tag;
            if refused.contains(&tag) {
                at += 1;
                continue;
            }
            let memory = self.lane.arena.memory()?;
            let range = self.ranges[k].clone();
            let posted = self.plugin.isend(self.lane.comm, &self.lane.arena.buffer, range, tag, memory);
            match posted.with_context(|| self.name(k))? {
                Some(request) => {
                    self.waiting.remove(at);
                    self.flying.push((k, request));
                }
                None => {
                    refused.push(tag);
                    at += 1;
                }
            }
        }
        Ok(())
    }

    pub(super) fn waits_for(&self) -> Option<String> {
        let of = self.sends.len();
        if let Some((k, _)) = self.flying.first() {
            return Some(format!("test of {} of {of}", self.name(*k)));
        }
        self.waiting.first().map(|&k| format!("isend gives NULL for {} of {of}", self.name(k)))
    }

    /// A send must leave its own side as it was.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        for (k, range) in self.ranges.iter().enumerate() {
            check(message_key(self.lane.key, k), &self.lane.arena.buffer.bytes()[range.clone()])
                .with_context(|| format!("{}: the sender's own buffer has changed", self.name(k)))?;
        }
        self.lane.arena.check_gaps(&self.ranges).with_context(|| format!("sending to rank {}", self.lane.peer))
    }
}

enum Stage {
    Receive,
    Flush,
}

/// The receives of one flow under way.
pub(super) struct RecvRun<'a> {
    plugin: &'a Plugin,
    lane: &'a mut Incoming,
    flow: &'a Flow,
    matches: Vec<Vec<usize>>,
    ranges: Vec<Vec<Range<usize>>>,
    next: usize,
    flying: Vec<(usize, Request, Stage)>,
    manner: Manner,
    starts: Instant,
}

impl<'a> RecvRun<'a> {
    pub(super) fn new(
        plugin: &'a Plugin,
        lane: &'a mut Incoming,
        flow: &'a Flow,
        manner: Manner,
    ) -> anyhow::Result<Self> {
        let comm = lane.comm;
        lane.key = lane.key.wrapping_add(1);
        let sizes = flow.recvs.iter().flatten().map(|m| m.len);
        let register = |buffer: &Buffer| Ok(plugin.reg_mr(comm, buffer, 0..buffer.len())?);
        let mut flat = lane.arena.lay_out(sizes, register, |old| Ok(plugin.dereg_mr(comm, old)?))?.into_iter();
        let ranges = flow.recvs.iter().map(|group| flat.by_ref().take(group.len()).collect()).collect();
        let starts = Instant::now() + manner.late_recv;
        let flying = Vec::new();
        Ok(Self { plugin, lane, flow, matches: flow.matches(), ranges, next: 0, flying, manner, starts })
    }

    fn name(&self, g: usize) -> String {
        let group: Vec<_> = self.flow.recvs[g].iter().map(|m| format!("{}/{}", m.len, m.tag)).collect();
        format!("receive {g} (bytes/tag {}) from rank {}", group.join(" "), self.lane.peer)
    }

    pub(super) fn done(&self) -> bool {
        self.next == self.flow.recvs.len() && self.flying.is_empty()
    }

    pub(super) fn in_flight(&self) -> usize {
        self.flying.len()
    }

    fn slots(&self, g: usize) -> anyhow::Result<Vec<Slot<'_>>> {
        let memory = self.lane.arena.memory()?;
        let slot = |(range, msg): (&Range<usize>, &Msg)| Slot {
            buffer: &self.lane.arena.buffer,
            range: range.clone(),
            tag: msg.tag,
            memory,
        };
        Ok(self.ranges[g].iter().zip(&self.flow.recvs[g]).map(slot).collect())
    }

    /// Posts receives up to the depth, without testing any.
    pub(super) fn post(&mut self) -> anyhow::Result<()> {
        while self.next < self.flow.recvs.len() && self.flying.len() < self.manner.depth {
            let g = self.next;
            let posted = self.plugin.irecv(self.lane.comm, &self.slots(g)?).with_context(|| self.name(g))?;
            let Some(request) = posted else { break };
            self.flying.push((g, request, Stage::Receive));
            self.next += 1;
        }
        Ok(())
    }

    pub(super) fn step(&mut self) -> anyhow::Result<()> {
        if Instant::now() < self.starts {
            return Ok(());
        }
        let mut at = 0;
        while at < self.flying.len() {
            let index = if self.manner.reverse { self.flying.len() - 1 - at } else { at };
            let (g, request, ref stage) = self.flying[index];
            let n = self.flow.recvs[g].len();
            let landed = match stage {
                Stage::Flush => self.plugin.test_plain(request).map(|done| done.then_some(None)),
                Stage::Receive if self.manner.sizes_null => {
                    self.plugin.test_plain(request).map(|done| done.then_some(None))
                }
                Stage::Receive => self.plugin.test_recv(request, n).map(|sizes| sizes.map(Some)),
            };
            match landed.with_context(|| self.name(g))? {
                None => at += 1,
                Some(sizes) => {
                    self.flying.remove(index);
                    if let Some(sizes) = sizes {
                        self.landed(g, &sizes[..n])?;
                    }
                    // What test has called done is there now, not later.
                    self.check_group(g)?;
                }
            }
        }
        self.post()
    }

    fn expected(&self, g: usize, slot: usize) -> usize {
        self.flow.sends[self.matches[g][slot]].len.min(self.flow.recvs[g][slot].len)
    }

    fn landed(&mut self, g: usize, sizes: &[usize]) -> anyhow::Result<()> {
        for (slot, &size) in sizes.iter().enumerate() {
            // test has an int for a size, whatever isend and irecv have.
            let expected = self.expected(g, slot).min(i32::MAX as usize);
            ensure!(size == expected, "{}: buffer {slot} has size {size}, not {expected}", self.name(g));
        }
        if self.manner.flush && sizes.iter().any(|&s| s > 0) {
            let flushing = self.plugin.iflush(self.lane.comm, &self.slots(g)?, sizes).with_context(|| self.name(g))?;
            if let Some(request) = flushing {
                self.flying.push((g, request, Stage::Flush));
            }
        }
        Ok(())
    }

    fn check_group(&self, g: usize) -> anyhow::Result<()> {
        let bytes = self.lane.arena.buffer.bytes();
        for (slot, range) in self.ranges[g].iter().enumerate() {
            let k = self.matches[g][slot];
            let end = range.start + self.expected(g, slot);
            let what = || format!("{}, buffer {slot}", self.name(g));
            check(message_key(self.lane.key, k), &bytes[range.start..end]).with_context(what)?;
            check_background("the space behind the payload", &bytes[end..range.end]).with_context(what)?;
            check_background("the guard after the buffer", &bytes[range.end..range.end + GUARD]).with_context(what)?;
        }
        Ok(())
    }

    pub(super) fn waits_for(&self) -> Option<String> {
        let of = self.flow.recvs.len();
        if let Some((g, ..)) = self.flying.first() {
            return Some(format!("test of {} of {of}", self.name(*g)));
        }
        (self.next < of).then(|| format!("irecv gives NULL for {} of {of}", self.name(self.next)))
    }

    /// Everything once more at the end: a byte may have come late.
    pub(super) fn check(&self) -> anyhow::Result<()> {
        (0..self.flow.recvs.len()).try_for_each(|g| self.check_group(g))?;
        let flat: Vec<_> = self.ranges.iter().flatten().cloned().collect();
        self.lane.arena.check_gaps(&flat).with_context(|| format!("receiving from rank {}", self.lane.peer))
    }
}

/// Moves all flows at once and checks every byte.
pub(super) fn exchange(
    plugin: &Plugin,
    out: &mut [(&mut Outgoing, Flow)],
    inn: &mut [(&mut Incoming, Flow)],
    manner: Manner,
    deadline: Instant,
) -> anyhow::Result<()> {
    let mut flows = out.iter().map(|(_, flow)| flow).chain(inn.iter().map(|(_, flow)| flow));
    ensure!(flows.all(|flow| !flow.sends.is_empty()), "nothing to move: that proves nothing");
    let sends = out.iter_mut().map(|(lane, flow)| SendRun::new(plugin, lane, flow, manner));
    let mut sends = sends.collect::<anyhow::Result<Vec<_>>>()?;
    let recvs = inn.iter_mut().map(|(lane, flow)| RecvRun::new(plugin, lane, flow, manner));
    let mut recvs = recvs.collect::<anyhow::Result<Vec<_>>>()?;
    while !(sends.iter().all(SendRun::done) && recvs.iter().all(RecvRun::done)) {
        recvs.iter_mut().try_for_each(RecvRun::step)?;
        sends.iter_mut().try_for_each(SendRun::step)?;
        if Instant::now() > deadline {
            let waits: Vec<_> = sends
                .iter()
                .filter_map(SendRun::waits_for)
                .chain(recvs.iter().filter_map(RecvRun::waits_for))
                .collect();
            bail!("time is up, waits for: {}", waits.join("; "));
        }
        yield_now();
    }
    sends.iter().try_for_each(SendRun::check)?;
    recvs.iter().try_for_each(RecvRun::check)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_wrong_byte_is_found_where_it_is() {
        let mut bytes = vec![0; 1003];
        fill(9, &mut bytes);
        check(9, &bytes).unwrap();
        assert!(check(10, &bytes).is_err());
        bytes[1001] ^= 1;
        assert!(check(9, &bytes).unwrap_err().to_string().starts_with("byte 1001 is"));
    }

    #[test]
    fn slots_are_filled_by_the_first_send_left_with_their_tag() {
        let msg = |tag| Msg { len: 1, tag };
        let flow = Flow {
            sends: vec![msg(2), msg(1), msg(1), msg(2)],
            recvs: vec![vec![msg(1), msg(2)], vec![msg(1)], vec![msg(2)]],
        };
        assert_eq!(flow.matches(), [vec![1, 0], vec![2], vec![3]]);
    }

    #[test]
    fn background_shows_a_touched_byte() {
        check_background("x", &[BACKGROUND; 9]).unwrap();
        let error = check_background("the guard", &[BACKGROUND, 0]).unwrap_err().to_string();
        assert!(error.contains("byte 1 of 2"), "{error}");
    }
}
