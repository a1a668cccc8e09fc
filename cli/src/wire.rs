//! Connections between ranks: listen, pass the handle, then connect and accept in turn until both have given a comm,
//! as NCCL's service thread does it. Neither call may wait for the peer.

use std::thread::yield_now;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use crate::abi::{Handle, ListenComm, Plugin, RecvComm, SendComm};
use crate::procs::Mailbox;

/// A single call that takes longer than this has waited for the peer: NCCL's service thread would stand still.
const BLOCKING: Duration = Duration::from_secs(2);

/// One connection: the rank at the other end, and a name that both ends use for it.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    pub peer: usize,
    pub name: String,
}

impl Link {
    pub(crate) fn new(peer: usize, name: impl Into<String>) -> Self {
        Self { peer, name: name.into() }
    }

    fn key(&self) -> String {
        format!("handle {}", self.name)
    }
}

/// The comms, in the order of the links asked for.
#[derive(Debug)]
pub(crate) struct Wires {
    pub sends: Vec<SendComm>,
    pub recvs: Vec<RecvComm>,
}

/// Sets up connections in both directions at once. Listeners are closed as soon as they have accepted.
pub(crate) fn connect(
    plugin: &Plugin,
    mail: &mut Mailbox,
    dev: i32,
    to: &[Link],
    from: &[Link],
    deadline: Instant,
) -> anyhow::Result<Wires> {
    let mut accepting = Vec::new();
    for link in from {
        let (handle, listener) = plugin.listen(dev)?;
        mail.post(link.peer, &link.key(), handle.bytes())?;
        accepting.push((link, listener, None));
    }
    let mut connecting: Vec<_> = to.iter().map(|link| (link, None, None)).collect();

    while connecting.iter().any(|c| c.2.is_none()) || accepting.iter().any(|a| a.2.is_none()) {
        for (link, handle, comm) in connecting.iter_mut().filter(|c| c.2.is_none()) {
            if handle.is_none() {
                *handle = mail.try_take(link.peer, &link.key())?.map(|b| Handle::from_wire(&b)).transpose()?;
            }
            if let Some(handle) = handle {
                *comm = connect_once(plugin, dev, handle)
                    .with_context(|| format!("connection {:?} to rank {}", link.name, link.peer))?;
            }
        }
        for (link, listener, comm) in accepting.iter_mut().filter(|a| a.2.is_none()) {
            *comm = accept_once(plugin, *listener)
                .with_context(|| format!("connection {:?} from rank {}", link.name, link.peer))?;
            if comm.is_some() {
                plugin.close_listen(Some(*listener))?;
            }
        }
        if Instant::now() > deadline {
            let waits = connecting.iter().filter(|c| c.2.is_none()).map(|c| ("connect to", c.0));
            let waits = waits.chain(accepting.iter().filter(|a| a.2.is_none()).map(|a| ("accept from", a.0)));
            let waits: Vec<_> = waits.map(|(call, l)| format!("{call} rank {} ({})", l.peer, l.name)).collect();
            bail!("still NULL when the time was up: {}", waits.join(", "));
        }
        yield_now();
    }
    Ok(Wires {
        sends: connecting.into_iter().filter_map(|c| c.2).collect(),
        recvs: accepting.into_iter().filter_map(|a| a.2).collect(),
    })
}

/// One call of connect that must come back at once.
pub(crate) fn connect_once(plugin: &Plugin, dev: i32, handle: &mut Handle) -> anyhow::Result<Option<SendComm>> {
    let start = Instant::now();
    let comm = plugin.connect(dev, handle)?;
    ensure!(start.elapsed() < BLOCKING, "connect blocked for {:?}; it must never wait for the peer", start.elapsed());
    Ok(comm)
}

/// One call of accept that must come back at once.
pub(crate) fn accept_once(plugin: &Plugin, listener: ListenComm) -> anyhow::Result<Option<RecvComm>> {
    let start = Instant::now();
    let comm = plugin.accept(listener)?;
    ensure!(start.elapsed() < BLOCKING, "accept blocked for {:?}; it must never wait for the peer", start.elapsed());
    Ok(comm)
}
