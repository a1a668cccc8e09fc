//! Moving bytes over a pair of comms: posts sends and receives a few deep and waits until all are done, as NCCL's
//! progress thread does. What the demo and the measurements are made of.

use std::collections::VecDeque;
use std::ops::Range;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::abi::{Buffer, Memory, Plugin, Properties, RecvComm, SendComm, Slot, Version};
use crate::procs::Mailbox;
use crate::wire::{self, Link};

/// Without any progress for this long a transfer has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Messages to send or to receive: their places in a registered buffer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Batch<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) memory: Memory,
    pub(crate) ranges: &'a [Range<usize>],
}

/// A comm to one rank and a comm from one rank.
#[derive(Debug)]
pub(crate) struct Pipe<'a> {
    pub(crate) plugin: &'a Plugin,
    pub(crate) send: SendComm,
    pub(crate) recv: RecvComm,
    /// Requests in flight in each direction.
    pub(crate) depth: usize,
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
        Ok(Self { plugin, send: send.context("no comm")?, recv: recv.context("no comm")?, depth })
    }

    /// Sends and receives both batches at once.
    pub(crate) fn transfer(&self, sends: Option<Batch<'_>>, recvs: Option<Batch<'_>>) -> anyhow::Result<()> {
        let (mut sending, mut receiving) = (VecDeque::new(), VecDeque::new());
        let (mut sent, mut asked) = (0, 0);
        let all = |batch: Option<Batch<'_>>| batch.map_or(0, |b| b.ranges.len());
        let mut deadline = Instant::now() + PATIENCE;
        let mut idle = 0_u32;
        while sent < all(sends) || asked < all(recvs) || !sending.is_empty() || !receiving.is_empty() {
            let mut moved = false;
            if let Some(batch) = recvs {
                while asked < batch.ranges.len() && receiving.len() < self.depth {
                    let range = batch.ranges[asked].clone();
                    let slot = Slot { buffer: batch.buffer, range, tag: 0, memory: batch.memory };
                    let Some(request) = self.plugin.irecv(self.recv, &[slot])? else { break };
                    receiving.push_back((request, batch.ranges[asked].len()));
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
            while let Some(&(request, len)) = receiving.front() {
                let Some(sizes) = self.plugin.test_recv(request, 1)? else { break };
                ensure!(sizes[0] == len, "received {} bytes, not {len}", sizes[0]);
                receiving.pop_front();
                moved = true;
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
            yield_now();
        }
        Ok(())
    }

    pub(crate) fn close(self) -> anyhow::Result<()> {
        self.plugin.close_send(Some(self.send))?;
        Ok(self.plugin.close_recv(Some(self.recv))?)
    }
}

/// Loads the plugin and picks a device, as every rank of a measurement does first.
pub(crate) fn open(path: &std::path::Path, version: Option<Version>, dev: i32) -> anyhow::Result<(Plugin, Properties)> {
    let plugin = Plugin::load(path, version)?;
    plugin.init()?;
    let count = plugin.devices()?;
    ensure!(dev < count, "device {dev} is asked for, but the plugin has {count}; `nccl-rdma devices` tells why");
    let properties = plugin.properties(dev)?;
    Ok((plugin, properties))
}
