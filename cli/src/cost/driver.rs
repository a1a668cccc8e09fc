//! The process that callgrind counts: both ends of one connection on one thread over soft-hca's null engine, called
//! through NCCL's table. What is counted happens inside [`measured`], one function per kind of call, so that the figures
//! can be told apart by who called.

use std::path::Path;
use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use crate::abi::{Buffer, Memory, Plugin, RecvComm, SendComm, Slot, Version};
use crate::pipe;

/// A way to use a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setting {
    pub(crate) name: &'static str,
    pub(crate) bytes: usize,
    /// Receives in flight.
    pub(crate) depth: usize,
    /// Buffers in each receive.
    pub(crate) group: usize,
    /// Whether each receive is flushed.
    pub(crate) flush: bool,
    /// Whether receives need no completion, as of LL.
    pub(crate) hinted: bool,
    /// Of the interface. From the tenth on the plugin offers its work requests to a profiler; here there is none.
    version: Version,
    pub(crate) env: &'static [(&'static str, &'static str)],
}

impl Setting {
    pub(crate) fn named(name: &str) -> anyhow::Result<&'static Self> {
        SETTINGS.iter().find(|s| s.name == name).with_context(|| format!("no setting {name:?}"))
    }

    pub(crate) fn version(&self) -> Version {
        self.version
    }

    /// Whether it means something to any plugin, by whichever version.
    pub(crate) fn is_general(&self) -> bool {
        self.version != Version::V12 && !self.env.iter().any(|(name, _)| name.starts_with("NCCL_NET_RDMA_"))
    }

    fn rounds(&self) -> usize {
        MESSAGES / (self.depth * self.group)
    }
}

/// Messages counted; a whole number of turns of everything that happens once in a while: credit rings go round after 256,
/// receives are posted 64 at a time on each QP, every 32nd credit write asks for a completion.
pub(crate) const MESSAGES: usize = 1024;

/// One old version for nearly all, so that figures can be compared with earlier ones.
const PLAIN: Setting =
    Setting { name: "", bytes: 8, depth: 1, group: 1, flush: false, hinted: false, version: Version::V8, env: &[] };
const TWO_RAILS: (&str, &str) = ("NCCL_NET_RDMA_RAILS", "soft_0+soft_1");

pub(crate) const SETTINGS: [Setting; 11] = [
    Setting { name: "8 B", ..PLAIN },
    Setting { name: "8 B by v12", version: Version::V12, ..PLAIN },
    Setting { name: "8 B, 8 deep", depth: 8, ..PLAIN },
    Setting { name: "8 B, hinted", hinted: true, version: Version::V9, ..PLAIN },
    Setting { name: "64 KiB", bytes: 64 << 10, ..PLAIN },
    Setting { name: "512 KiB", bytes: 512 << 10, ..PLAIN },
    Setting { name: "8 B, groups of 8", group: 8, ..PLAIN },
    Setting {
        name: "512 KiB cut over 4 QPs",
        bytes: 512 << 10,
        env: &[("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")],
        ..PLAIN
    },
    Setting { name: "512 KiB over 2 rails", bytes: 512 << 10, env: &[TWO_RAILS], ..PLAIN },
    Setting { name: "8 B with 2 rails", env: &[TWO_RAILS], ..PLAIN },
    Setting { name: "8 B, flushed", flush: true, env: &[("NCCL_NET_RDMA_FORCE_FLUSH", "1")], ..PLAIN },
];

/// Two devices, so that rails can be had; one alone is used where no setting joins them.
pub(crate) const FABRIC: &str = r#"
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

[[host.device]]
name = "soft_1"
node_guid = 0x50f7000000000a01
[[host.device.port]]
link_layer = "Ethernet"
rate_gbps = 200
gids = [{ index = 0, gid = "::ffff:10.0.1.1", type = "RoCE v2" }]
"#;

/// The module whose functions are counted, as callgrind writes their names.
pub(crate) const MEASURED: &str = "nccl_rdma::cost::driver::measured::";

/// The kinds of calls, with how often each happens in one setting.
pub(crate) fn calls(setting: &Setting) -> Vec<(&'static str, usize)> {
    let receives = setting.rounds() * setting.depth;
    let mut calls = vec![
        ("isend_refused", setting.rounds()),
        ("irecv", receives),
        ("isend", MESSAGES),
        ("test_recv", receives),
        ("test_send", MESSAGES),
    ];
    // A receive that needs no completion is never pending.
    if !setting.hinted {
        calls.push(("test_pending", setting.rounds()));
    }
    if setting.flush {
        calls.extend([("iflush", receives), ("test_flush", receives)]);
    }
    calls
}

/// Calls of which a message needs those that the count says; what is asked in vain comes on top.
pub(crate) fn in_vain(call: &str) -> bool {
    matches!(call, "isend_refused" | "test_pending")
}

struct Pair<'a> {
    plugin: &'a Plugin,
    setting: &'a Setting,
    send: SendComm,
    recv: RecvComm,
    from: Buffer,
    to: Buffer,
    send_memory: Memory,
    recv_memory: Memory,
}

/// Every call is a function of its own that is never inlined, so that it has a name in the profile; each also checks that
/// the call did what its name says, so that a figure is never that of another case.
mod measured {
    use anyhow::{Context as _, ensure};

    use super::Pair;
    use crate::abi::{Request, Slot};

    #[inline(never)]
    pub(super) fn isend_refused(pair: &Pair<'_>) -> anyhow::Result<()> {
        let bytes = 0..pair.setting.bytes;
        ensure!(
            pair.plugin.isend(pair.send, &pair.from, bytes, 0, pair.send_memory)?.is_none(),
            "sent without a credit"
        );
        Ok(())
    }

    #[inline(never)]
    pub(super) fn irecv(pair: &Pair<'_>, slots: &[Slot<'_>]) -> anyhow::Result<Request> {
        let posted = match slots {
            [slot] if pair.setting.hinted => pair.plugin.irecv_hinted(pair.recv, slot.clone())?,
            slots => pair.plugin.irecv(pair.recv, slots)?,
        };
        posted.context("irecv had no room")
    }

    #[inline(never)]
    pub(super) fn test_pending(pair: &Pair<'_>, request: Request) -> anyhow::Result<()> {
        ensure!(pair.plugin.test_recv(request, pair.setting.group)?.is_none(), "received before it was sent");
        Ok(())
    }

    #[inline(never)]
    pub(super) fn isend(pair: &Pair<'_>, tag: i32) -> anyhow::Result<Request> {
        let bytes = 0..pair.setting.bytes;
        pair.plugin.isend(pair.send, &pair.from, bytes, tag, pair.send_memory)?.context("isend had no room")
    }

    #[inline(never)]
    pub(super) fn test_recv(pair: &Pair<'_>, request: Request) -> anyhow::Result<()> {
        let sizes = pair.plugin.test_recv(request, pair.setting.group)?.context("nothing received")?;
        ensure!(sizes[0] == pair.setting.bytes, "received {} bytes", sizes[0]);
        Ok(())
    }

    #[inline(never)]
    pub(super) fn test_send(pair: &Pair<'_>, request: Request) -> anyhow::Result<()> {
        pair.plugin.test_send(request)?.context("not sent")?;
        Ok(())
    }

    #[inline(never)]
    pub(super) fn iflush(pair: &Pair<'_>, slots: &[Slot<'_>]) -> anyhow::Result<Request> {
        pair.plugin.iflush(pair.recv, slots, &[pair.setting.bytes; 8])?.context("nothing was flushed")
    }

    #[inline(never)]
    pub(super) fn test_flush(pair: &Pair<'_>, request: Request) -> anyhow::Result<()> {
        ensure!(pair.plugin.test_plain(request)?, "not flushed");
        Ok(())
    }
}

impl Pair<'_> {
    /// Every kind of call once, in an order in which each has the outcome that it is to be counted with.
    fn round(&self, slots: &[Slot<'_>], receives: &mut Vec<crate::abi::Request>) -> anyhow::Result<()> {
        measured::isend_refused(self)?;
        for _ in 0..self.setting.depth {
            receives.push(measured::irecv(self, slots)?);
        }
        if !self.setting.hinted {
            measured::test_pending(self, receives[0])?;
        }
        let mut sends = Vec::with_capacity(self.setting.depth * self.setting.group);
        for _ in 0..self.setting.depth {
            for slot in slots {
                sends.push(measured::isend(self, slot.tag)?);
            }
        }
        for receive in receives.drain(..) {
            measured::test_recv(self, receive)?;
            if self.setting.flush {
                let flush = measured::iflush(self, slots)?;
                measured::test_flush(self, flush)?;
            }
        }
        for send in sends {
            measured::test_send(self, send)?;
        }
        Ok(())
    }
}

/// Connects and runs one setting, by this version of the interface or the newest that the plugin knows.
pub(crate) fn run(plugin: &Path, version: Option<Version>, setting: &Setting) -> anyhow::Result<()> {
    let (plugin, _) = pipe::open(plugin, version, 0)?;
    let (mut handle, listener) = plugin.listen(0)?;
    let (mut send, mut recv) = (None, None);
    let deadline = Instant::now() + Duration::from_secs(60);
    while send.is_none() || recv.is_none() {
        ensure!(Instant::now() < deadline, "the connection did not come about");
        send = send.map_or_else(|| plugin.connect(0, &mut handle), |s| Ok(Some(s)))?;
        recv = recv.map_or_else(|| plugin.accept(listener), |r| Ok(Some(r)))?;
        yield_now();
    }
    let (send, recv) = (send.context("no comm")?, recv.context("no comm")?);
    let (from, to) = (Buffer::new(setting.bytes)?, Buffer::new(setting.bytes)?);
    let send_memory = plugin.reg_mr(send, &from, 0..from.len())?;
    let recv_memory = plugin.reg_mr(recv, &to, 0..to.len())?;
    let pair = Pair { plugin: &plugin, setting, send, recv, from, to, send_memory, recv_memory };
    let slots: Vec<_> = (0..8)
        .take(setting.group)
        .map(|tag| Slot { buffer: &pair.to, range: 0..setting.bytes, tag, memory: pair.recv_memory })
        .collect();
    let mut receives = Vec::new();
    for _ in 0..setting.rounds() {
        pair.round(&slots, &mut receives)?;
    }
    plugin.dereg_mr(send, send_memory)?;
    plugin.dereg_mr(recv, recv_memory)?;
    plugin.close_send(Some(send))?;
    plugin.close_recv(Some(recv))?;
    plugin.close_listen(Some(listener))?;
    Ok(())
}
