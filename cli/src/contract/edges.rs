//! The cases at the edges: objects that are never used, closed early, closed twice or closed in the middle, peers that
//! give up or die. Whatever happens, no call waits for a peer, and a rank whose peer has gone hears of it in time.

use std::ffi::c_int;
use std::fs;
use std::thread::{sleep, yield_now};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::cases::loopback;
use super::traffic::{Flow, Manner, RecvRun, SendRun, check_reclaimed};
use super::{Case, Rank, Ranks, die};
use crate::abi::{Buffer, Fault, Handle, Memory, Plugin, RecvComm, Request, SendComm, Slot};
use crate::wire::{self, Link};

pub(super) fn all() -> Vec<Case> {
    use Ranks::{One, Two};
    vec![
        Case::new("close-null", "closeSend, closeRecv and closeListen with NULL", One, close_null),
        Case::new(
            "listen-unused",
            "listeners that nobody connects to: accept stays NULL, then closeListen",
            One,
            listen_unused,
        ),
        Case::new(
            "connect-retries",
            "the peer accepts late: connect comes back at once, the handle stays",
            Two,
            connect_retries,
        ),
        Case::new("connect-unused", "connections closed before the first transfer", Two, connect_unused),
        Case::new(
            "close-after-send",
            "the sender closes as soon as its sends are done, the receiver tests later",
            Two,
            close_after_send,
        ),
        Case::new("close-idle", "a peer that closes while nothing is in flight is no error", Two, close_idle),
        Case::new(
            "reconnect",
            "connect, send, close, again and again: no descriptor, thread or mapping is left",
            Two,
            reconnect,
        ),
        Case::new(
            "reload",
            "load, use, unload, again and again: no descriptor, thread or mapping is left",
            One,
            reload,
        ),
        Case::new("forks", "children of fork come and go while data flow, as data loaders do", Two, forks),
        Case::new(
            "listener-gone",
            "closeListen before the peer connects: connect or the first send says so",
            Two,
            listener_gone,
        ),
        Case::new(
            "abort-sends",
            "deregMr and closeSend with sends in flight; the receiver hears of it",
            Two,
            abort_sends,
        ),
        Case::new(
            "abort-receives",
            "deregMr and closeRecv with receives posted; the sender hears of it",
            Two,
            abort_receives,
        ),
        Case::new("peer-stopped", "the peer stands still in the middle: close does not wait for it", Two, peer_stopped)
            .kills(1),
        Case::new("dies-before-accept", "the listening process is killed before it accepts", Two, dies_before_accept)
            .kills(1),
        Case::new("dies-sending", "the sending process is killed in the middle", Two, dies_sending).kills(0),
        Case::new("dies-receiving", "the receiving process is killed in the middle", Two, dies_receiving).kills(1),
        Case::new("dies-idle", "the peer is killed while nothing is in flight; the next send says so", Two, dies_idle)
            .kills(1),
    ]
}

/// A close must not wait for the peer.
const PROMPT: Duration = Duration::from_secs(5);

fn prompt<T>(what: &str, call: impl FnOnce() -> T) -> anyhow::Result<T> {
    let start = Instant::now();
    let value = call();
    ensure!(start.elapsed() < PROMPT, "{what} took {:?}: it waits for the peer", start.elapsed());
    Ok(value)
}

fn close_null(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    for _ in 0..2 {
        rank.plugin.close_send(None)?;
        rank.plugin.close_recv(None)?;
        rank.plugin.close_listen(None)?;
    }
    Ok(())
}

fn listen_unused(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let listeners = (0..16).map(|_| rank.plugin.listen(rank.options.dev)).collect::<Result<Vec<_>, _>>()?;
    for _ in 0..20 {
        for (_, listener) in &listeners {
            ensure!(
                wire::accept_once(rank.plugin, *listener)?.is_none(),
                "accept gave a comm, but nobody has connected"
            );
        }
        yield_now();
    }
    let mut handles: Vec<_> = listeners.iter().map(|(handle, _)| handle.bytes().to_vec()).collect();
    handles.sort();
    handles.dedup();
    ensure!(handles.len() == listeners.len(), "two listeners gave the same handle");
    for (_, listener) in listeners {
        prompt("closeListen", || rank.plugin.close_listen(Some(listener)))??;
    }
    Ok(())
}

fn connect_retries(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (plugin, dev) = (rank.plugin, rank.options.dev);
    if rank.rank == 0 {
        let mut handle = Handle::from_wire(&rank.mail.take(1, "handle", rank.deadline)?)?;
        let mut comm = None;
        let patience = Instant::now() + Duration::from_millis(300);
        while Instant::now() < patience && comm.is_none() {
            comm = wire::connect_once(plugin, dev, &mut handle)?;
            yield_now();
        }
        rank.mail.post(1, "accept now", &[])?;
        while comm.is_none() {
            comm = wire::connect_once(plugin, dev, &mut handle)?;
            ensure!(Instant::now() < rank.deadline, "connect still NULL although the peer accepts");
            yield_now();
        }
        rank.barrier()?;
        Ok(plugin.close_send(comm)?)
    } else {
        let (handle, listener) = plugin.listen(dev)?;
        rank.mail.post(0, "handle", handle.bytes())?;
        rank.mail.take(0, "accept now", rank.deadline)?;
        let mut comm = None;
        while comm.is_none() {
            comm = wire::accept_once(plugin, listener)?;
            ensure!(Instant::now() < rank.deadline, "accept still NULL although the peer connects");
            yield_now();
        }
        plugin.close_listen(Some(listener))?;
        rank.barrier()?;
        Ok(plugin.close_recv(comm)?)
    }
}

fn connect_unused(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    for _ in 0..rank.rounds(8) {
        let (out, inn) = rank.both_ways()?;
        for lane in out {
            prompt("closeSend", || lane.close(rank.plugin))??;
        }
        for lane in inn {
            prompt("closeRecv", || lane.close(rank.plugin))??;
        }
    }
    Ok(())
}

fn close_after_send(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.one_way()?;
    let manner = Manner { late_recv: Duration::from_millis(50), ..Manner::default() };
    rank.exchange(&mut out, &mut inn, &Flow::plain(&[65536, 0, 8, 1 << 20, 100], 0), manner)?;
    // No barrier: the sender is gone while the receiver still looks.
    rank.close(out, inn)
}

fn close_idle(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let peer = 1 - rank.rank;
    let links = [Link::new(peer, "closed early"), Link::new(peer, "stays")];
    let (mut out, mut inn) = rank.connect(&links, &links)?;
    let flow = Flow::plain(&[100, 65536], 0);
    rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
    rank.barrier()?;
    let (early_out, early_inn) = (out.remove(0), inn.remove(0));
    if rank.rank == 0 {
        early_out.close(rank.plugin)?;
        early_inn.close(rank.plugin)?;
        rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
    } else {
        rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
        sleep(Duration::from_millis(50));
        prompt("closeSend after the peer", || early_out.close(rank.plugin))??;
        prompt("closeRecv after the peer", || early_inn.close(rank.plugin))??;
    }
    rank.close(out, inn)
}

fn count(directory: &str) -> anyhow::Result<usize> {
    Ok(fs::read_dir(directory).with_context(|| directory.to_owned())?.count())
}

/// Files that are mapped. Memory without a file is not counted: this command's own buffers stay, and the allocator joins
/// and splits its own as it likes.
fn mapped_files() -> anyhow::Result<usize> {
    let maps = "/proc/self/maps";
    Ok(fs::read_to_string(maps).context(maps)?.lines().filter(|line| line.contains(" /")).count())
}

/// Descriptors, threads and mapped files of this process.
fn possessions() -> anyhow::Result<[usize; 3]> {
    Ok([count("/proc/self/fd")?, count("/proc/self/task")?, mapped_files()?])
}

/// Plays rounds; after the fourth, which may set up what stays, none may leave anything behind.
fn without_leak(rounds: usize, mut round: impl FnMut() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let mut play = |times| (0..times).try_for_each(|_| round());
    play(4)?;
    let before = possessions()?;
    play(rounds)?;
    // What a plugin tears down in the background gets a moment.
    let patience = Instant::now() + Duration::from_secs(2);
    loop {
        let now = possessions()?;
        if now.iter().zip(before).all(|(&now, before)| now <= before) {
            return Ok(());
        }
        let ([d0, t0, m0], [d, t, m]) = (before, now);
        ensure!(
            Instant::now() < patience,
            "{rounds} rounds: {d0} descriptors became {d}, {t0} threads became {t}, {m0} mapped files became {m}"
        );
        sleep(Duration::from_millis(20));
    }
}

fn reconnect(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    without_leak(rank.rounds(40), || {
        let (mut out, mut inn) = rank.both_ways()?;
        rank.exchange(&mut out, &mut inn, &Flow::plain(&[4096, 0], 0), Manner::default())?;
        rank.close(out, inn)
    })
}

fn reload(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    without_leak(rank.rounds(46), || {
        let plugin = Plugin::load(&rank.options.plugin, rank.options.abi)?;
        plugin.init()?;
        ensure!(plugin.devices()? > rank.options.dev, "the device has gone");
        loopback(rank, &plugin, &[1 << 20, 4096, 0])
    })
}

/// A child that lives for a moment and ends by `end`; the exit status it should have is 0.
fn fork(end: unsafe extern "C" fn(c_int) -> !) -> anyhow::Result<libc::pid_t> {
    // SAFETY: the child only sleeps and ends.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // SAFETY: takes and returns integers.
        unsafe { libc::usleep(20_000) };
        // SAFETY: ends the child.
        unsafe { end(0) };
    }
    ensure!(pid > 0, "fork failed: {}", std::io::Error::last_os_error());
    Ok(pid)
}

fn forks(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    // At once, or with all that libraries have put down to be done at the end.
    const ENDS: [unsafe extern "C" fn(c_int) -> !; 2] = [libc::_exit, libc::exit];
    let flow = Flow::plain(&[4096, 1 << 20, 0, 65537, 8, 1 << 20], 0);
    let (mut out, mut inn) = rank.both_ways()?;
    for round in 0..rank.rounds(8) {
        if rank.rank == 1 {
            rank.exchange(&mut out, &mut inn, &flow, Manner::default())?;
            continue;
        }
        let (to, from) = (out.first_mut().context("no connection")?, inn.first_mut().context("no connection")?);
        let mut receiving = RecvRun::new(rank.plugin, from, &flow, Manner::default())?;
        receiving.post()?;
        let mut sending = SendRun::new(rank.plugin, to, &flow, Manner::default())?;
        start(&mut sending, rank.deadline)?;
        let child = fork(ENDS[round % ENDS.len()])?;
        while !(sending.done() && receiving.done()) {
            receiving.step()?;
            sending.step()?;
            ensure!(Instant::now() < rank.deadline, "after a fork the data flow no more");
            yield_now();
        }
        let mut status = 0;
        // SAFETY: an int of ours to write.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        ensure!((waited, status) == (child, 0), "the child ended with wait status {status}");
        sending.check()?;
        receiving.check()?;
    }
    rank.close(out, inn)
}

/// The comm that connect gives, or the error; NULL for ever is a failure.
fn connect_or_error(rank: &Rank<'_>, handle: &mut Handle) -> anyhow::Result<Result<SendComm, Fault>> {
    let bound = rank.deadline.min(Instant::now() + rank.options.connect_bound);
    loop {
        let start = Instant::now();
        match rank.plugin.connect(rank.options.dev, handle) {
            Ok(Some(comm)) => return Ok(Ok(comm)),
            Ok(None) => {}
            Err(fault @ Fault::Code { .. }) => return Ok(Err(fault)),
            Err(fault) => return Err(fault.into()),
        }
        ensure!(start.elapsed() < PROMPT, "connect blocked for {:?}", start.elapsed());
        ensure!(
            Instant::now() < bound,
            "connect to a listener that has gone still gives NULL after {:?}",
            rank.options.connect_bound
        );
        yield_now();
    }
}

/// Ends well once the plugin says on this comm that the peer has gone, and says so again.
fn sends_fail(rank: &Rank<'_>, comm: SendComm) -> anyhow::Result<()> {
    let buffer = Buffer::at_place(rank.options.memory[0], 65536)?;
    let memory = match rank.plugin.reg_mr(comm, &buffer, 0..65536) {
        Ok(memory) => memory,
        Err(Fault::Code { .. }) => return Ok(()),
        Err(fault) => return Err(fault.into()),
    };
    let bound = rank.error_deadline();
    let mut request = None;
    loop {
        let result = match request {
            None => rank.plugin.isend(comm, &buffer, 0..65536, 0, memory).map(|posted| request = posted),
            Some(posted) => rank.plugin.test_send(posted).map(|done| {
                if done.is_some() {
                    request = None;
                }
            }),
        };
        match result {
            Ok(()) => {}
            Err(Fault::Code { .. }) => break,
            Err(fault) => return Err(fault.into()),
        }
        if Instant::now() > bound {
            let call = if request.is_some() { "test" } else { "isend" };
            bail!("the peer has gone, but {call} has given no error within {:?}", rank.options.error_bound);
        }
        yield_now();
    }
    let again = rank.plugin.isend(comm, &buffer, 0..8, 0, memory);
    ensure!(matches!(again, Err(Fault::Code { .. })), "isend after an error of the comm gives {again:?}, not an error");
    release(rank, memory, comm)
}

fn release(rank: &Rank<'_>, memory: Memory, comm: SendComm) -> anyhow::Result<()> {
    prompt("deregMr on a failed comm", || rank.plugin.dereg_mr(comm, memory))??;
    Ok(())
}

fn listener_gone(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    if rank.rank == 1 {
        let (handle, listener) = rank.plugin.listen(rank.options.dev)?;
        rank.plugin.close_listen(Some(listener))?;
        rank.mail.post(0, "handle", handle.bytes())?;
        return rank.barrier();
    }
    let mut handle = Handle::from_wire(&rank.mail.take(1, "handle", rank.deadline)?)?;
    match connect_or_error(rank, &mut handle)? {
        Err(_) => rank.plugin.close_send(None)?,
        Ok(comm) => {
            sends_fail(rank, comm)?;
            prompt("closeSend", || rank.plugin.close_send(Some(comm)))??;
        }
    }
    rank.barrier()
}

fn dies_before_accept(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    if rank.rank == 1 {
        let (handle, _listener) = rank.plugin.listen(rank.options.dev)?;
        rank.mail.post(0, "handle", handle.bytes())?;
        rank.mail.take(0, "connecting", rank.deadline)?;
        return die();
    }
    let mut handle = Handle::from_wire(&rank.mail.take(1, "handle", rank.deadline)?)?;
    let mut first = None;
    for _ in 0..20 {
        if first.is_none() {
            first = rank.plugin.connect(rank.options.dev, &mut handle)?;
        }
        yield_now();
    }
    rank.mail.post(1, "connecting", &[])?;
    let comm = match first {
        Some(comm) => Ok(comm),
        None => connect_or_error(rank, &mut handle)?,
    };
    match comm {
        Err(_) => Ok(rank.plugin.close_send(None)?),
        Ok(comm) => {
            sends_fail(rank, comm)?;
            prompt("closeSend", || rank.plugin.close_send(Some(comm)))??;
            Ok(())
        }
    }
}

fn big(rank: &Rank<'_>) -> Flow {
    Flow::plain(&[if rank.options.quick { 1 << 20 } else { 8 << 20 }; 16], 0)
}

/// Steps until something is in flight or has been done.
fn start(run: &mut SendRun<'_>, deadline: Instant) -> anyhow::Result<()> {
    while run.in_flight() == 0 && !run.done() {
        run.step()?;
        ensure!(Instant::now() < deadline, "time is up, waits for {:?}", run.waits_for());
        yield_now();
    }
    Ok(())
}

/// Steps until the plugin reports an error. Data that arrives before is checked as ever; that all arrives is as good.
fn until_error(rank: &Rank<'_>, mut step: impl FnMut() -> anyhow::Result<bool>, what: &str) -> anyhow::Result<()> {
    let bound = rank.error_deadline();
    loop {
        match step() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(error) if is_code(&error) => return Ok(()),
            Err(error) => return Err(error),
        }
        ensure!(
            Instant::now() < bound,
            "the peer has gone, but {what} has no end within {:?}",
            rank.options.error_bound
        );
        yield_now();
    }
}

/// Whether the plugin itself returned an error, as it should, and not the driver found one.
fn is_code(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<Fault>(), Some(Fault::Code { .. }))
}

fn abort_sends(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = big(rank);
    let (mut out, mut inn) = rank.one_way()?;
    if let Some(mut lane) = out.pop() {
        start(&mut SendRun::new(rank.plugin, &mut lane, &flow, Manner::default())?, rank.deadline)?;
        prompt("deregMr and closeSend with sends in flight", || lane.close(rank.plugin))??;
    }
    if let Some(mut lane) = inn.pop() {
        let mut run = RecvRun::new(rank.plugin, &mut lane, &flow, Manner::default())?;
        until_error(rank, || run.step().map(|()| run.done()), "a receive")?;
        prompt("deregMr and closeRecv", || lane.close(rank.plugin))??;
    }
    rank.barrier()
}

fn abort_receives(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = big(rank);
    let mut reclaimed = None;
    let (mut out, mut inn) = rank.one_way()?;
    if let Some(mut lane) = inn.pop() {
        let mut run = RecvRun::new(rank.plugin, &mut lane, &flow, Manner::default())?;
        run.post()?;
        ensure!(run.in_flight() > 0, "irecv gives NULL on a fresh comm");
        rank.mail.post(0, "posted", &[])?;
        rank.mail.take(0, "sending", rank.deadline)?;
        reclaimed = Some(prompt("deregMr and closeRecv with receives posted", || lane.abandon(rank.plugin))??);
    }
    if let Some(mut lane) = out.pop() {
        rank.mail.take(1, "posted", rank.deadline)?;
        let mut run = SendRun::new(rank.plugin, &mut lane, &flow, Manner::default())?;
        start(&mut run, rank.deadline)?;
        rank.mail.post(1, "sending", &[])?;
        until_error(rank, || run.step().map(|()| run.done()), "a send")?;
        prompt("deregMr and closeSend", || lane.close(rank.plugin))??;
    }
    rank.barrier()?;
    // By now the sender has given up: what could come late has come.
    reclaimed.as_ref().map_or(Ok(()), check_reclaimed)
}

fn peer_stopped(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = big(rank);
    let (mut out, mut inn) = rank.both_ways()?;
    if rank.rank == 1 {
        let lane = inn.first_mut().context("no connection")?;
        RecvRun::new(rank.plugin, lane, &flow, Manner::default())?.post()?;
        rank.mail.take(0, "sending", rank.deadline)?;
        // SAFETY: no memory is involved.
        let _ = unsafe { libc::raise(libc::SIGSTOP) };
        bail!("was woken up");
    }
    let (to, from) = (out.first_mut().context("no connection")?, inn.first_mut().context("no connection")?);
    let mut receiving = RecvRun::new(rank.plugin, from, &flow, Manner::default())?;
    receiving.post()?;
    let mut sending = SendRun::new(rank.plugin, to, &flow, Manner::default())?;
    start(&mut sending, rank.deadline)?;
    rank.mail.post(1, "sending", &[])?;
    // Long enough for the peer to stop; whether the plugin sees anything wrong by then is its own affair.
    let patience = Instant::now() + Duration::from_millis(100);
    while Instant::now() < patience {
        match sending.step().and_then(|()| receiving.step()) {
            Err(error) if !is_code(&error) => return Err(error),
            _ => yield_now(),
        }
    }
    let closed = prompt("close while the peer stands still", || rank.close(out, inn));
    rank.mail.kill(1)?;
    closed?
}

fn dies_sending(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = big(rank);
    let (mut out, mut inn) = rank.one_way()?;
    if let Some(mut lane) = out.pop() {
        start(&mut SendRun::new(rank.plugin, &mut lane, &flow, Manner::default())?, rank.deadline)?;
        return die();
    }
    let lane = inn.first_mut().context("no connection")?;
    let comm = lane.comm;
    let mut run = RecvRun::new(rank.plugin, lane, &flow, Manner::default())?;
    until_error(rank, || run.step().map(|()| false), "a receive")?;
    receives_fail(rank, comm)?;
    prompt("close after the peer's death", || rank.close(out, inn))?
}

fn dies_receiving(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let flow = big(rank);
    let (mut out, mut inn) = rank.one_way()?;
    if let Some(mut lane) = inn.pop() {
        let mut run = RecvRun::new(rank.plugin, &mut lane, &flow, Manner::default())?;
        run.post()?;
        rank.mail.post(0, "posted", &[])?;
        rank.mail.take(0, "sending", rank.deadline)?;
        return die();
    }
    rank.mail.take(1, "posted", rank.deadline)?;
    let lane = out.first_mut().context("no connection")?;
    let comm = lane.comm;
    let mut run = SendRun::new(rank.plugin, lane, &flow, Manner::default())?;
    start(&mut run, rank.deadline)?;
    rank.mail.post(1, "sending", &[])?;
    until_error(rank, || run.step().map(|()| false), "a send")?;
    sends_fail(rank, comm)?;
    prompt("close after the peer's death", || rank.close(out, inn))?
}

fn dies_idle(rank: &mut Rank<'_>) -> anyhow::Result<()> {
    let (mut out, mut inn) = rank.both_ways()?;
    rank.exchange(&mut out, &mut inn, &Flow::plain(&[4096], 0), Manner::default())?;
    rank.barrier()?;
    if rank.rank == 1 {
        return die();
    }
    while !rank.mail.is_gone(1) {
        ensure!(Instant::now() < rank.deadline, "the peer lives on");
        sleep(Duration::from_millis(1));
    }
    sends_fail(rank, out[0].comm)?;
    receives_fail(rank, inn[0].comm)?;
    prompt("close after the peer's death", || rank.close(out, inn))?
}

/// Ends well once the plugin says on this comm that the peer has gone.
fn receives_fail(rank: &Rank<'_>, comm: RecvComm) -> anyhow::Result<()> {
    let buffer = Buffer::at_place(rank.options.memory[1], 4096)?;
    let memory = match rank.plugin.reg_mr(comm, &buffer, 0..4096) {
        Ok(memory) => memory,
        Err(Fault::Code { .. }) => return Ok(()),
        Err(fault) => return Err(fault.into()),
    };
    let mut request: Option<Request> = None;
    let step = || -> anyhow::Result<bool> {
        match request {
            None => request = rank.plugin.irecv(comm, &[Slot { buffer: &buffer, range: 0..4096, tag: 0, memory }])?,
            Some(posted) => {
                ensure!(rank.plugin.test_recv(posted, 1)?.is_none(), "a receive from a dead peer is done");
            }
        }
        Ok(false)
    };
    until_error(rank, step, "a receive")?;
    prompt("deregMr on a failed comm", || rank.plugin.dereg_mr(comm, memory))??;
    Ok(())
}
