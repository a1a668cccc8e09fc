//! Moving bytes over a pair of comms: posts sends and receives a few deep and waits until all are done, as NCCL's
//! progress thread does. What the demo and the measurements are made of.

use std::collections::VecDeque;
use std::ops::Range;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::abi::{Memory, Plugin, Properties, RecvComm, Region, Request, SendComm, Slot, Version};
use crate::procs::Mailbox;
use crate::wire::{self, Link};

/// Without any progress for this long a transfer has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Of a message without bytes.
pub(crate) const EMPTY: Range<usize> = Range { start: 0, end: 0 };

/// Messages to send or to receive: their places in a registered buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) buffer: &'a dyn Region,
    pub(crate) memory: Memory,
    pub(crate) ranges: &'a [Range<usize>],
}

impl<'a> Batch<'a> {
    /// Other places in the same buffer.
    fn only(self, ranges: &'a [Range<usize>]) -> Self {
        Self { ranges, ..self }
    }

    fn slot(&self, at: usize) -> Slot<'a> {
        Slot { buffer: self.buffer, range: self.ranges[at].clone(), tag: 0, memory: self.memory }
    }
}

/// A comm to one rank and a comm from one rank.
#[derive(Debug)]
pub(crate) struct Pipe<'a> {
    pub(crate) plugin: &'a Plugin,
    pub(crate) send: SendComm,
    pub(crate) recv: RecvComm,
    /// Requests in flight in each direction.
    pub(crate) depth: usize,
    /// What is received is flushed, as NCCL does it with memory of GPUs that need it.
    pub(crate) flush: bool,
}

/// A receive that is under way.
#[derive(Clone, Copy, Debug)]
enum Incoming {
    Data(Request),
    Flush(Request),
}

impl<'a> Pipe<'a> {
    /// Connects every rank to `to` and from `from`.
    pub(crate) fn connect(
        plugin: &'a Plugin,
        mail: &mut Mailbox,
        dev: i32,
        to: usize,
        from: usize,
        depth: usize,
    ) -> anyhow::Result<Self> {
        let deadline = Instant::now() + PATIENCE;
        let wires = wire::connect(plugin, mail, dev, &[Link::new(to, "pipe")], &[Link::new(from, "pipe")], deadline)?;
        mail.barrier(deadline)?;
        let (send, recv) = (wires.sends.first().copied(), wires.recvs.first().copied());
        Ok(Self { plugin, send: send.context("no comm")?, recv: recv.context("no comm")?, depth, flush: false })
    }

    /// Sends and receives both batches at once, and polls all the while.
    pub(crate) fn transfer(&self, sends: Option<Batch<'_>>, recvs: Option<Batch<'_>>) -> anyhow::Result<()> {
        self.transfer_with(sends, recvs, yield_now)
    }

    /// The same, with something else to do whenever nothing has moved.
    pub(crate) fn transfer_with(
        &self,
        sends: Option<Batch<'_>>,
        recvs: Option<Batch<'_>>,
        mut rest: impl FnMut(),
    ) -> anyhow::Result<()> {
        let (mut sending, mut receiving) = (VecDeque::new(), VecDeque::new());
        let (mut sent, mut asked) = (0, 0);
        let all = |batch: Option<Batch<'_>>| batch.map_or(0, |b| b.ranges.len());
        let mut deadline = Instant::now() + PATIENCE;
        let mut idle = 0_u32;
        while sent < all(sends) || asked < all(recvs) || !sending.is_empty() || !receiving.is_empty() {
            let mut moved = false;
            if let Some(batch) = recvs {
                while asked < batch.ranges.len() && receiving.len() < self.depth {
                    let Some(request) = self.plugin.irecv(self.recv, &[batch.slot(asked)])? else { break };
                    receiving.push_back((Incoming::Data(request), asked));
                    asked += 1;
                    moved = true;
                }
            }
            if let Some(batch) = sends {
                while sent < batch.ranges.len() && sending.len() < self.depth {
                    let range = batch.ranges[sent].clone();
                    let Some(request) = self.plugin.isend(self.send, batch.buffer, range, 0, batch.memory)? else {
                        break;
                    };
                    sending.push_back(request);
                    sent += 1;
                    moved = true;
                }
            }
            while let (Some((incoming, at)), Some(batch)) = (receiving.front_mut(), recvs) {
                let flush = match *incoming {
                    Incoming::Data(request) => {
                        let Some(sizes) = self.plugin.test_recv(request, 1)? else { break };
                        let slot = batch.slot(*at);
                        ensure!(sizes[0] == slot.range.len(), "received {} bytes, not {}", sizes[0], slot.range.len());
                        if self.flush { self.plugin.iflush(self.recv, &[slot], &sizes[..1])? } else { None }
                    }
                    Incoming::Flush(request) => {
                        if !self.plugin.test_plain(request)? {
                            break;
                        }
                        None
                    }
                };
                moved = true;
                match flush {
                    Some(request) => *incoming = Incoming::Flush(request),
                    None => drop(receiving.pop_front()),
                }
            }
            while let Some(&request) = sending.front() {
                if self.plugin.test_send(request)?.is_none() {
                    break;
                }
                sending.pop_front();
                moved = true;
            }
            if moved {
                idle = 0;
                continue;
            }
            idle += 1;
            // Looking at the clock costs more than a poll.
            if idle == 1 {
                deadline = Instant::now() + PATIENCE;
            } else if idle.is_multiple_of(1024) && Instant::now() > deadline {
                bail!(
                    "nothing has moved for {PATIENCE:?}: {sent} of {} sends posted, {} in flight, {asked} of {} receives posted, {} in flight",
                    all(sends),
                    sending.len(),
                    all(recvs),
                    receiving.len()
                );
            }
            rest();
        }
        Ok(())
    }

    /// The first message there and back, by rank 0 of the two ends.
    pub(crate) fn ping(&self, rank: usize, sends: Batch<'_>, recvs: Batch<'_>) -> anyhow::Result<()> {
        let (send, recv) = (sends.only(&sends.ranges[..1]), recvs.only(&recvs.ranges[..1]));
        if rank == 0 {
            self.transfer(Some(send), None)?;
            self.transfer(None, Some(recv))
        } else {
            self.transfer(None, Some(recv))?;
            self.transfer(Some(send), None)
        }
    }

    /// All messages from rank 0; an empty one comes back, so that the sender's clock covers the arrival of the last.
    pub(crate) fn stream(
        &self,
        rank: usize,
        sends: Batch<'_>,
        recvs: Batch<'_>,
        mut rest: impl FnMut(),
    ) -> anyhow::Result<()> {
        if rank == 0 {
            self.transfer_with(Some(sends), None, &mut rest)?;
            self.transfer_with(None, Some(recvs.only(&[EMPTY])), rest)
        } else {
            self.transfer_with(None, Some(recvs), &mut rest)?;
            self.transfer_with(Some(sends.only(&[EMPTY])), None, rest)
        }
    }

    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.plugin.close_send(Some(self.send))?;
        Ok(self.plugin.close_recv(Some(self.recv))?)
    }
}

/// Loads the plugin and picks a device, as every rank of a measurement does first.
pub(crate) fn open(path: &std::path::Path, version: Option<Version>, dev: i32) -> anyhow::Result<(Plugin, Properties)> {
    let plugin = Plugin::load(path, version)?;
    let count = plugin.start()?;
    ensure!(dev < count, "device {dev} is asked for, but the plugin has {count}; `nccl-rdma devices` tells why");
    let properties = plugin.properties(dev)?;
    Ok((plugin, properties))
}
