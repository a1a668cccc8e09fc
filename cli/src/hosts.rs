//! Ranks on a second host. The first host listens; the second joins, and for each rank that it is handed starts a process
//! and passes on what this and the first host say to each other, so that neither end knows of the distance. Between orders
//! one line from the second host stands ready at the first. The network is trusted, as in an MPI launcher.

use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::{Shutdown, TcpListener, TcpStream, ToSocketAddrs as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::sync::{Mutex, PoisonError};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};

use crate::procs::{Order, Up, send_line};

/// How long either host waits for the other one to be started.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longer than any job takes: until then the first host may have nothing for the second.
const IDLE: Duration = Duration::from_secs(1800);
const PAUSE: Duration = Duration::from_millis(20);

/// The first host's end.
#[derive(Debug)]
pub(crate) struct Meeting {
    address: String,
    listener: TcpListener,
}

impl Meeting {
    pub(crate) fn open(address: &str) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(address).with_context(|| format!("cannot listen at {address}"))?;
        listener.set_nonblocking(true)?;
        Ok(Self { address: address.to_owned(), listener })
    }

    /// Has the second host start a rank, and gives the line to it.
    pub(crate) fn start(&self, order: &Order) -> anyhow::Result<UnixStream> {
        let deadline = Instant::now() + PATIENCE;
        let line = loop {
            match self.listener.accept() {
                Ok((line, _)) => break line,
                Err(error) if error.kind() != ErrorKind::WouldBlock => return Err(error).context("no second host"),
                Err(_) if Instant::now() > deadline => bail!(
                    "no second host has come within {PATIENCE:?}: run `nccl-rdma join` there with the address at which \
                     it reaches {}",
                    self.address
                ),
                Err(_) => sleep(PAUSE),
            }
        };
        line.set_nonblocking(false)?;
        line.set_nodelay(true)?;
        // Reads, writes and shuts down like the local ranks' sockets; the name of its family plays no part in that.
        let mut line = UnixStream::from(OwnedFd::from(line));
        send_line(&mut line, order).context("the second host has gone")?;
        Ok(line)
    }
}

/// The second host's life: starts ranks until the first host has no more to do.
pub(crate) fn join(address: &str) -> anyhow::Result<()> {
    let addresses = address.to_socket_addrs().with_context(|| format!("{address} is no HOST:PORT of a first host"))?;
    let addresses: Vec<_> = addresses.collect();
    println!("waiting for {address} ({} s)", PATIENCE.as_secs());
    let deadline = Instant::now() + PATIENCE;
    let mut met = false;
    // Leaving the scope waits for the ranks; they are killed when the first host goes.
    thread::scope(|scope| {
        loop {
            let line = match TcpStream::connect(&*addresses) {
                Ok(line) => line,
                Err(_) if met => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    return Err(error)
                        .with_context(|| format!("nobody waits at {address} (--meet) after {PATIENCE:?}"));
                }
                Err(_) => {
                    sleep(PAUSE);
                    continue;
                }
            };
            met = true;
            line.set_nodelay(true)?;
            line.set_read_timeout(Some(IDLE))?;
            let mut reader = BufReader::new(line.try_clone()?);
            let mut order = String::new();
            match reader.read_line(&mut order) {
                Ok(0) => return Ok(()),
                Ok(_) => line.set_read_timeout(None)?,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error).with_context(|| format!("nothing from {address} for {IDLE:?}")),
            }
            let order: Order = serde_json::from_str(&order).context("the first host is of another version")?;
            scope.spawn(move || serve(&order, reader, line));
        }
    })
}

/// One rank. Errors on its line need no telling: the line is all that the first host has of it.
fn serve(order: &Order, mut from: BufReader<TcpStream>, mut to: TcpStream) {
    let (child, socket) = match order.spawn() {
        Ok(spawned) => spawned,
        Err(error) => {
            let _ = send_line(&mut to, &Up::failed(&error));
            return;
        }
    };
    let child = Mutex::new(child);
    let child = || child.lock().unwrap_or_else(PoisonError::into_inner);
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = io::copy(&mut from, &mut &socket);
            // Told by the first host, or left by it.
            let _ = child().kill();
        });
        let _ = io::copy(&mut &socket, &mut to);
        if let Ok(status) = child().wait() {
            let _ = send_line(&mut to, &Up::Exited(status.into_raw()));
        }
        let _ = to.shutdown(Shutdown::Write);
    });
}
