//! TCP sockets with the options that this room wants.

use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;
use std::task::Poll;
use std::time::Duration;

use socket2::{Domain, Protocol, SockRef, Socket, TcpKeepalive, Type};

use super::RendezvousError;
use super::frame::Decoder;

/// The kernel cuts this down to net.core.somaxconn.
const BACKLOG: i32 = i32::MAX;
/// Most bytes of one read.
const CHUNK: usize = 4 << 10;

/// A dead host is noticed after about this time, idle or not.
const DEAD_AFTER: Duration = Duration::from_secs(30);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;

fn socket(addr: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(addr), Type::STREAM, Some(Protocol::TCP))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Listens on the address; where it names no port, on a free one of the range.
pub(super) fn listen(addr: SocketAddr, range: Option<RangeInclusive<u16>>) -> Result<TcpListener, RendezvousError> {
    let ports = match &range {
        Some(range) if addr.port() == 0 => range.clone(),
        _ => addr.port()..=addr.port(),
    };
    // An empty range has no port and no error of its own.
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    // Many processes of a host share the range: they do not all try its first port first.
    let start = ports.len() * usize::from(getrandom::u32().unwrap_or(0).to_le_bytes()[0]) / 256;
    let (before, from) = (ports.clone().take(start), ports.skip(start));
    for port in from.chain(before) {
        match listen_on(SocketAddr::new(addr.ip(), port), addr) {
            Ok(listener) => return Ok(listener),
            Err(e) => {
                let taken = matches!(e.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::PermissionDenied);
                last = e;
                if !taken {
                    break;
                }
            }
        }
    }
    Err(RendezvousError::Bind { ip: addr.ip(), range, source: last })
}

fn listen_on(addr: SocketAddr, asked: SocketAddr) -> io::Result<TcpListener> {
    let addr = with_scope(addr, asked);
    let socket = socket(addr)?;
    socket.set_reuse_address(true)?;
    if addr.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&addr.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

/// A link-local address means nothing without its interface.
fn with_scope(mut addr: SocketAddr, scope: SocketAddr) -> SocketAddr {
    if let (SocketAddr::V6(addr), SocketAddr::V6(scope)) = (&mut addr, scope) {
        addr.set_scope_id(scope.scope_id());
    }
    addr
}

/// Begins to connect.
pub(super) fn dial(peer: SocketAddr, local: Option<SocketAddr>) -> io::Result<TcpStream> {
    let socket = socket(peer)?;
    socket.set_tcp_nodelay(true)?;
    let peer = match local {
        Some(local) => {
            socket.bind(&with_scope(SocketAddr::new(local.ip(), 0), local).into())?;
            // Interfaces are numbered by each host for itself: the scope in a handle is the listener's.
            if is_link_local(peer.ip()) { with_scope(peer, local) } else { peer }
        }
        None => peer,
    };
    match socket.connect(&peer.into()) {
        Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => Err(e),
        _ => Ok(socket.into()),
    }
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// Whether a connection that was begun is there.
pub(super) fn connected(stream: &TcpStream) -> Poll<io::Result<()>> {
    if let Some(e) = stream.take_error()? {
        return Poll::Ready(Err(e));
    }
    match stream.peer_addr() {
        Ok(_) => Poll::Ready(Ok(())),
        Err(e) if e.kind() == io::ErrorKind::NotConnected => Poll::Pending,
        Err(e) => Poll::Ready(Err(e)),
    }
}

/// Options of a connection that is there.
pub(super) fn settle(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    let keepalive =
        TcpKeepalive::new().with_time(KEEPALIVE_IDLE).with_interval(KEEPALIVE_INTERVAL).with_retries(KEEPALIVE_PROBES);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(DEAD_AFTER))
}

/// Failures of an attempt to connect that another attempt may not meet.
pub(super) fn is_transient(e: &io::Error) -> bool {
    const ERRNOS: [i32; 8] = [
        libc::ECONNREFUSED,
        libc::ETIMEDOUT,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
        libc::ECONNRESET,
        libc::ECONNABORTED,
        libc::EPIPE,
        libc::EINTR,
    ];
    e.raw_os_error().is_some_and(|errno| ERRNOS.contains(&errno))
}

/// Reads one piece; 0 is the end of the stream.
pub(super) fn read(stream: &mut TcpStream, into: &mut Decoder) -> Poll<io::Result<usize>> {
    let mut chunk = [0; CHUNK];
    loop {
        match stream.read(&mut chunk) {
            Ok(n) => {
                into.push(&chunk[..n]);
                return Poll::Ready(Ok(n));
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Poll::Pending,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Poll::Ready(Err(e)),
        }
    }
}
