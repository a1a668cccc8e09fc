//! Connections as NCCL holds them: a send comm, a recv comm, and the registrations made on them.
//!
//! One thread at a time makes the data path calls of a comm (isend, irecv, test, iflush); registrations and close may come
//! from another. What both touch is behind [`Base`], which is safe to share; the data path's own state is reached through
//! `unsafe fn` whose contract is NCCL's: never two of these calls on one comm at once.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::memory::gpu::CudaError;
use crate::memory::{Connected, Pages};
use crate::transfer::{
    Arrivals, Buffer, Copying, FLUSHES, Fault, MAX_GROUP, Owed, Parent, Profiled, Profiler, QpSet, RECV_REQUESTS,
    Receiver, RecvProgress, SEND_REQUESTS, SendProgress, Sender,
};
use crate::verbs::Mr;

use super::alert::{Alert, Attention};
use super::control::{self, News};
use super::device::Port;
use super::hello::{Bye, Who, kind};
use super::registration::{MrHandle, Paths};
use super::stall::Found;
use super::{Code, NetError, fork};

/// Requests are handed to NCCL as the comm's address plus their index, so the low byte of a comm's address is 0.
const _: () = assert!(align_of::<Comm>() == 256);
const _: () = assert!(SEND_REQUESTS <= 256 && RECV_REQUESTS + FLUSHES <= 256);

/// A connection, at an address that does not change.
#[repr(align(256))]
#[derive(Debug)]
pub enum Comm {
    Send(SendComm),
    Recv(RecvComm),
}

/// What both directions have.
#[derive(Debug)]
pub(super) struct Base {
    pub(super) alert: Arc<Alert>,
    pub(super) qps: Arc<QpSet>,
    /// Local ports by rail.
    pub(super) ports: Vec<Arc<Port>>,
    /// For messages: device:port, GID and QP number of both ends, by QP.
    pub(super) routes: Vec<String>,
    pub(super) peer: Who,
    /// Worst case in seconds until the NIC gives up on a peer that does not answer.
    pub(super) nic_patience: f64,
    /// Registrations that were given back while traffic used them; kept until the QPs are gone.
    pub(super) graveyard: Mutex<Vec<Arc<MrHandle>>>,
    pub(super) fenced: Mutex<bool>,
    /// Stopped because memory of hinted receives was given back: nothing went wrong.
    pub(super) retired: AtomicBool,
    /// Counts the connection at each port's registrar.
    pub(super) _connected: Vec<Connected>,
    pub(super) paths: Paths,
}

/// The sending side. Fields are dropped in order: data path, QPs, ring.
#[derive(Debug)]
pub struct SendComm {
    pub(super) hot: UnsafeCell<Sender<Profiled<Arc<QpSet>>>>,
    /// NCCL was given the error that ended the connection. Touched as `hot` is.
    pub(super) told: AtomicBool,
    pub(super) base: Base,
    pub(super) _ring: (Vec<Mr>, Pages),
}

/// The receiving side. Fields are dropped in order: data path, QPs, shadow ring, landing place of flushes.
#[derive(Debug)]
pub struct RecvComm {
    pub(super) hot: UnsafeCell<Receiver<Arc<QpSet>>>,
    /// Touched as `hot` is.
    pub(super) profile: UnsafeCell<Option<Box<Arrivals>>>,
    pub(super) base: Base,
    /// Behind the shadow.
    pub(super) _count: Option<Mr>,
    pub(super) _shadow: (Mr, Pages),
    pub(super) landing: Option<(Vec<Mr>, Pages)>,
    /// Host memory is flushed too.
    pub(super) flush_all: bool,
}

// SAFETY: `hot` is reached only through the unsafe functions below, whose contract is one thread at a time; the rest is
// Sync by itself.
unsafe impl Sync for Comm {}
// SAFETY: everything inside may be used from another thread than the one that made it.
unsafe impl Send for Comm {}

/// The buffers of an irecv or iflush.
#[derive(Debug)]
pub struct Buffers {
    list: [std::mem::MaybeUninit<Buffer>; MAX_GROUP],
    len: usize,
    /// NCCL's array of what its profiler calls the receives; NULL: there is none.
    parents: *const Parent,
}

impl Default for Buffers {
    fn default() -> Self {
        Self::new()
    }
}

impl Buffers {
    #[inline]
    pub fn new() -> Self {
        // A const block: the plain repeat expression is compiled to clearing the list.
        Self { list: [const { std::mem::MaybeUninit::uninit() }; MAX_GROUP], len: 0, parents: std::ptr::null() }
    }

    /// For a profiler: what NCCL calls the receives, one name for each buffer.
    #[inline]
    pub fn named(&mut self, parents: *const Parent) {
        self.parents = parents;
    }

    /// Adds one of at most [`MAX_GROUP`].
    #[inline]
    pub fn push(&mut self, address: u64, size: u64, tag: u32, mr: &MrHandle) {
        self.list[self.len].write(Buffer { address, size, tag, keys: NonNull::from(mr.keys()) });
        self.len += 1;
    }

    #[inline]
    fn as_slice(&self) -> &[Buffer] {
        // SAFETY: push wrote the first `len`.
        unsafe { std::slice::from_raw_parts(self.list.as_ptr().cast(), self.len) }
    }
}

/// An index below 256.
#[inline]
fn low_byte(index: usize) -> u8 {
    index.to_le_bytes()[0]
}

/// A request as NCCL holds it.
pub type Request = NonNull<c_void>;

/// What a finished request reports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tested<'a> {
    Pending,
    Sent {
        size: u64,
    },
    /// Sizes in the order of the irecv.
    Received {
        sizes: &'a [u64],
    },
    Flushed,
}

impl Base {
    /// The fault of a call: prints the first cause, tells the peer, stops all traffic, and stays for every later call.
    #[cold]
    fn fail(&self, fault: &Fault) -> NetError {
        // A flush that we caused ourselves, or that follows the peer's own word, is no cause of its own.
        if let (Fault::Completion { failure, .. }, Some(Attention::Failed(cause))) = (fault, self.alert.attention())
            && failure.is_flush()
        {
            return cause;
        }
        self.end(self.describe(fault))
    }

    /// Ends the connection with an error, unless it had an earlier one; the first cause is printed.
    #[cold]
    fn end(&self, error: NetError) -> NetError {
        self.end_told(error, |e| tracing::warn!(target: "init", "{}", e.text))
    }

    /// The peer, which may do the same to hundreds of connections, closed this one too early.
    #[cold]
    fn left(&self, what: &str) -> NetError {
        let error = NetError::new(Code::Remote, format!("peer {} closed the connection; {what}", self.peer));
        self.end_told(error, |e| control::warn(&self.peer, News::Left, &e.text))
    }

    fn end_told(&self, error: NetError, print: impl FnOnce(&NetError)) -> NetError {
        if self.alert.fail(error.clone(), print) {
            self.alert.tell(&error.text);
            self.fence();
            return error;
        }
        match self.alert.attention() {
            Some(Attention::Failed(cause)) => cause,
            _ => error,
        }
    }

    /// Who, where, why, what next.
    fn describe(&self, fault: &Fault) -> NetError {
        match fault {
            Fault::Completion { failure, qp, operation, bytes } => {
                let route = self.routes.get(*qp).map_or("unknown QP", String::as_str);
                let patience = if matches!(failure.status, 12 | 13) && self.nic_patience.is_finite() {
                    format!(" after at least {:.1} s of retries", self.nic_patience)
                } else {
                    String::new()
                };
                // The NIC asks itself for what it received: the other end of this QP is no peer.
                let own = operation.starts_with("flush");
                let direction = if own { "received from" } else { "to" };
                let peer_now = match (own, self.alert.has_closed()) {
                    (true, _) => "not involved, this is the receiving host's own NIC reading from its GPU",
                    (false, true) => "had closed",
                    (false, false) => "has its TCP connection still open",
                };
                let hint = if own {
                    "on the receiving host look at ACS, the IOMMU and the GPU's BAR1, and whether the buffer was deregistered; \
                     NCCL_GDR_FLUSH_DISABLE=1 rules the flush out"
                } else {
                    failure.hint()
                };
                NetError::new(
                    if own { Code::System } else { Code::Remote },
                    format!(
                        "{operation} of {bytes} bytes {direction} peer {} failed{patience}: {} (status {}, vendor error {} = {:#x}) on \
                         {route}; peer {peer_now}; {}",
                        self.peer,
                        failure.name(),
                        failure.status,
                        failure.vendor_err,
                        failure.vendor_err,
                        hint,
                    ),
                )
            }
            Fault::Verb(e) => NetError::new(Code::System, format!("{e}; connection to peer {}", self.peer)),
            Fault::Copy(text) => NetError::new(
                Code::System,
                format!(
                    "a copy between GPU and host memory failed: {text}; connection to peer {}; NCCL_NET_GDR_LEVEL=LOC does \
                     without",
                    self.peer
                ),
            ),
            Fault::Protocol(text) => {
                NetError::new(Code::Internal, format!("{text}; connection to peer {} on {}", self.peer, self.routes[0]))
            }
        }
    }

    /// The background thread asked for a look. True where this side should ask for an acknowledgement of what it has sent;
    /// an error where the peer's NIC owes one for too long. `routes` are those that owe it.
    fn look(&self, owed: Owed, routes: impl FnOnce() -> String) -> Result<bool, NetError> {
        // What a peer that has closed owes will never come, and was settled with its last word.
        if self.alert.has_closed() || self.alert.has_failed() {
            return Ok(false);
        }
        let (waited, limit) = match self.alert.look(owed) {
            (Found::Stalled(waited), limit) => (waited, limit),
            (found, _) => return Ok(found == Found::Quiet),
        };
        let told = if self.nic_patience.is_finite() {
            format!("although it was told to try for {:.1} s", self.nic_patience)
        } else {
            "as it was told to try for ever (NCCL_IB_TIMEOUT=0)".to_owned()
        };
        Err(self.end(NetError::new(
            Code::Remote,
            format!(
                "no progress to peer {} for {:.1} s: its NIC has not acknowledged {} work request(s) of {} bytes, the limit is \
                 {:.1} s (NCCL_NET_RDMA_STALL_TIMEOUT), and the local NIC reports no error, {told}; waiting: {}; the peer's TCP \
                 connection is still open: look at the link and switch counters of these ports, and whether their GIDs can reach \
                 each other",
                self.peer,
                waited.as_secs_f64(),
                owed.requests,
                owed.bytes,
                limit.as_secs_f64(),
                routes(),
            ),
        )))
    }

    /// The background thread asked for a look, and copies between GPU and host memory are to go on. Their own errors show
    /// otherwise; these have none.
    fn look_at_copies(&self, copying: Copying) -> Result<(), NetError> {
        let Some(waited) = self.alert.look_at_copies(copying) else { return Ok(()) };
        Err(self.end(NetError::new(
            Code::System,
            format!(
                "copies between {} and host memory have not gone on for {:.1} s: {} under way, for {} bytes, and the driver \
                 reports no error; connection to peer {}; look at nvidia-smi and for Xid errors in the kernel's log; \
                 NCCL_NET_GDR_LEVEL=LOC does without copies",
                self.paths.gpu(),
                waited.as_secs_f64(),
                copying.copies,
                copying.bytes,
                self.peer,
            ),
        )))
    }

    /// Moves every QP to the error state, once: after this nothing of this connection reads or writes NCCL's memory, but for
    /// copies that are under way ([`Paths::settle`]).
    pub(super) fn fence(&self) {
        {
            // Whoever comes second waits for the first: memory may be freed after this returns.
            let mut fenced = self.fenced.lock().unwrap_or_else(PoisonError::into_inner);
            if !std::mem::replace(&mut *fenced, true)
                && let Err(e) = self.qps.fail()
            {
                tracing::warn!(target: "init", "{e}; while stopping the connection to peer {}", self.peer);
            }
        }
        // What has arrived and was not polled is not copied any more. Second: it may have to wait for the driver.
        self.paths.close();
    }

    /// The connection is over without a failure.
    pub(super) fn retire(&self, over: NetError, print: impl FnOnce(&NetError)) {
        self.retired.fetch_or(self.alert.fail(over, print), Ordering::AcqRel);
    }

    /// The end of a connection: last word, fence, and the control channel closes.
    fn close(&self, complete: bool, received: u32) {
        let complete = complete && (!self.alert.has_failed() || self.retired.load(Ordering::Acquire));
        let control = self.alert.control();
        if let Some(control) = control {
            control.send(kind::BYE, &Bye { complete, received }.encode());
        }
        if !complete {
            self.fence();
        }
        for (rail, port) in self.ports.iter().enumerate() {
            port.events.forget(self.qps.qp_nums(rail));
        }
        if let Some(control) = control {
            control.close();
        }
        // NCCL frees its memory next.
        if let Err(why) = self.paths.settle() {
            self.copies_hang(&why, "the connection was closed");
        }
    }

    /// Said once a GPU, direction and port: hundreds of connections may end at once.
    pub(super) fn copies_hang(&self, why: &CudaError, meanwhile: &str) {
        self.ports[0].warn_once(format!(
            "{why}; meanwhile {meanwhile}, peer {}; look at nvidia-smi and for Xid errors in the kernel's log: a GPU that hangs is \
             reset with nvidia-smi --gpu-reset",
            self.peer
        ));
    }
}

impl Comm {
    pub(super) fn base(&self) -> &Base {
        match self {
            Self::Send(c) => &c.base,
            Self::Recv(c) => &c.base,
        }
    }

    #[cfg(test)]
    pub(super) fn alert(&self) -> &Alert {
        &self.base().alert
    }

    #[inline]
    fn request(&self, index: usize) -> Request {
        // Inside the allocation: a comm is larger than 256 bytes.
        const { assert!(size_of::<Self>() >= 256) };
        NonNull::from(self).cast::<u8>().map_addr(|a| a | index).cast()
    }

    /// Tells a profiler of what is received from here on. Sends have theirs from the start.
    pub(super) fn profile(&mut self, profiler: Option<Arc<dyn Profiler>>) {
        if let (Self::Recv(comm), Some(profiler)) = (self, profiler) {
            *comm.profile.get_mut() = Some(Box::new(Arrivals::new(profiler, comm.base.qps.qp_num(0))));
        }
    }

    /// Starts a send; None is "again". `parent` is what NCCL's profiler calls it.
    ///
    /// # Safety
    /// No other data path call on this comm runs at once; `data` is inside what `mr` registered on this comm and stays in
    /// place until the request is done or the comm is closed.
    #[inline(always)] // else only one ABI version's entry would have it inlined
    pub unsafe fn isend(
        &self,
        data: u64,
        size: u64,
        tag: u32,
        mr: &MrHandle,
        parent: Parent,
    ) -> Result<Option<Request>, NetError> {
        let Self::Send(comm) = self else { return Err(NetError::misuse("isend on a receiving comm")) };
        // SAFETY: one data path call at a time, by this function's contract.
        let sender = unsafe { &mut *comm.hot.get() };
        if comm.base.alert.raised()
            && let Some(unwanted) = comm.mind(sender, Some(size))?
        {
            return Ok(unwanted.map(|i| self.request(usize::from(i))));
        }
        sender.post().adopt(sender.next(), parent);
        // SAFETY: `data` by this function's contract; the handle's keys outlive their use (see deregister).
        let index = match unsafe { sender.isend(data, size, tag, NonNull::from(mr.keys())) } {
            Ok(index) => index,
            Err(fault) => comm.refuse(sender, size, comm.base.fail(&fault))?,
        };
        Ok(index.map(|i| self.request(usize::from(i))))
    }

    /// Posts a receive; None is "again".
    ///
    /// # Safety
    /// As [`Comm::isend`], for every buffer.
    #[inline(always)] // as isend
    pub unsafe fn irecv(&self, buffers: &Buffers) -> Result<Option<Request>, NetError> {
        let Self::Recv(comm) = self else { return Err(NetError::misuse("irecv on a sending comm")) };
        // SAFETY: one data path call at a time, by this function's contract.
        let receiver = unsafe { &mut *comm.hot.get() };
        if comm.base.alert.raised() {
            comm.mind(receiver)?;
        }
        // SAFETY: as in isend.
        match unsafe { receiver.irecv(buffers.as_slice()) } {
            Ok(index) => {
                if let Some(i) = index {
                    comm.begin(usize::from(i), buffers);
                }
                Ok(index.map(|i| self.request(usize::from(i))))
            }
            Err(fault) => Err(comm.base.fail(&fault)),
        }
    }

    /// As [`Comm::irecv`], off the path of single buffers.
    ///
    /// # Safety
    /// As [`Comm::irecv`].
    #[inline(never)]
    pub unsafe fn irecv_group(&self, buffers: &Buffers) -> Result<Option<Request>, NetError> {
        // SAFETY: by this function's contract.
        unsafe { self.irecv(buffers) }
    }

    /// As [`Comm::irecv`], of a receive for which NCCL needs no completion: where the peer knows such and it is a single
    /// one, it is done at its first test.
    ///
    /// # Safety
    /// As [`Comm::irecv`]; the memory stays in place until it is given back by [`Comm::deregister`].
    pub unsafe fn irecv_hinted(&self, buffers: &Buffers) -> Result<Option<Request>, NetError> {
        let Self::Recv(comm) = self else { return Err(NetError::misuse("irecv on a sending comm")) };
        // SAFETY: one data path call at a time, by this function's contract.
        let receiver = unsafe { &mut *comm.hot.get() };
        let [buffer] = buffers.as_slice() else {
            // SAFETY: by this function's contract.
            return unsafe { self.irecv_group(buffers) };
        };
        if comm.base.alert.raised() {
            comm.mind(receiver)?;
        }
        // SAFETY: as in isend; see deregister.
        match unsafe { receiver.irecv_hinted(buffer) } {
            Ok(index) => {
                // Where it completes as others do, its event ends with it, else at its first test.
                if let Some(i) = index {
                    comm.begin(usize::from(i), buffers);
                }
                Ok(index.map(|i| self.request(usize::from(i))))
            }
            Err(fault) => Err(comm.base.fail(&fault)),
        }
    }

    /// Makes received bytes visible to the GPU; None: nothing needs to be done.
    ///
    /// # Safety
    /// As [`Comm::irecv`].
    pub unsafe fn iflush(&self, buffers: &Buffers) -> Result<Option<Request>, NetError> {
        let Self::Recv(comm) = self else { return Err(NetError::misuse("iflush on a sending comm")) };
        // SAFETY: one data path call at a time, by this function's contract.
        let receiver = unsafe { &mut *comm.hot.get() };
        if comm.base.alert.raised() {
            comm.mind(receiver)?;
        }
        // SAFETY: as in isend.
        match unsafe { receiver.iflush(buffers.as_slice()) } {
            Ok(index) => Ok(index.map(|i| self.request(RECV_REQUESTS + usize::from(i)))),
            Err(fault) => Err(comm.base.fail(&fault)),
        }
    }

    /// How a request stands.
    ///
    /// # Safety
    /// `request` came from isend, irecv or iflush, was not reported as done, and its comm is not closed. No other data path
    /// call on that comm runs at once, nor while the result is in use.
    #[inline(always)] // else what a test finds goes through memory
    pub unsafe fn test<'a>(request: Request) -> Result<Tested<'a>, NetError> {
        let index = request.addr().get() & 0xff;
        // SAFETY: a request is its comm's address with the index in the low byte, which is 0 in a comm's address.
        let comm = unsafe { request.cast::<u8>().byte_sub(index) }.cast::<Self>();
        // SAFETY: the comm is alive by this function's contract.
        match unsafe { comm.as_ref() } {
            Self::Send(comm) => {
                // SAFETY: one data path call at a time, by this function's contract.
                let sender = unsafe { &mut *comm.hot.get() };
                if comm.base.alert.raised() {
                    comm.mind(sender, None)?;
                }
                match sender.test(low_byte(index)) {
                    Ok(SendProgress::Done { size }) => Ok(Tested::Sent { size }),
                    Ok(SendProgress::Pending) => Ok(Tested::Pending),
                    Err(fault) => comm.settle(sender, &fault, index),
                }
            }
            Self::Recv(comm) => {
                // SAFETY: as above.
                let receiver = unsafe { &mut *comm.hot.get() };
                let alarmed = comm.base.alert.raised();
                if alarmed {
                    comm.mind(receiver)?;
                }
                // Not where the last copy of what has come is under way.
                let open =
                    alarmed && index < RECV_REQUESTS && receiver.poll().is_ok() && receiver.awaits(low_byte(index));
                let tested = if index < RECV_REQUESTS {
                    receiver.test(low_byte(index)).map(|p| match p {
                        RecvProgress::Done { sizes } => Tested::Received { sizes },
                        RecvProgress::Pending => Tested::Pending,
                    })
                } else {
                    receiver
                        .test_flush(low_byte(index - RECV_REQUESTS))
                        .map(|done| if done { Tested::Flushed } else { Tested::Pending })
                };
                match tested {
                    Ok(received @ Tested::Received { .. }) => {
                        comm.end(index);
                        Ok(received)
                    }
                    Ok(Tested::Pending) if open => comm.abandoned(),
                    Ok(tested) => Ok(tested),
                    Err(fault) => Err(comm.base.fail(&fault)),
                }
            }
        }
    }

    /// Ends the connection. Never waits for the peer; what is under way is stopped.
    ///
    /// # Safety
    /// No data path call on this comm runs at once.
    pub unsafe fn close(self: Box<Self>) {
        match &*self {
            Self::Send(comm) => {
                // SAFETY: by this function's contract.
                let sender = unsafe { &mut *comm.hot.get() };
                // At an orderly end every receive has its send. The other side sees for itself what is open, but not what is hinted.
                comm.base.close(sender.in_flight() == 0 && !sender.awaited(), 0);
            }
            Self::Recv(comm) => {
                // SAFETY: by this function's contract.
                let receiver = unsafe { &mut *comm.hot.get() };
                // What has arrived and was not polled is not under way any more; after a failure nobody asks.
                if !comm.base.alert.has_failed() || comm.base.retired.load(Ordering::Acquire) {
                    let _ = receiver.poll();
                }
                let (received, largest) = (receiver.received(), receiver.largest());
                tracing::info!(
                    target: "net",
                    "closing a connection from peer {}: {received} buffers received, up to {largest} at once",
                    comm.base.peer
                );
                comm.base.close(receiver.open() == 0, received);
            }
        }
    }
}

impl SendComm {
    /// Something happened beside the data path; `starting`: size of a send that is about to start. Some: what isend
    /// answers, as the peer does not need it.
    #[cold]
    fn mind(
        &self,
        sender: &mut Sender<Profiled<Arc<QpSet>>>,
        starting: Option<u64>,
    ) -> Result<Option<Option<u8>>, NetError> {
        fork::refuse_child()?;
        match (self.attend(sender, starting), starting) {
            (Err(cause), Some(size)) => self.refuse(sender, size, cause).map(Some),
            (Err(cause), None) => Err(self.tell(cause)),
            (answer, _) => answer,
        }
    }

    /// A send on a connection that has ended is taken, as verbs take one on a QP in error, and its test tells why. So who
    /// closes with sends open, and asks about none, sees no error, whichever end was first. Once told, every call tells.
    #[cold]
    fn refuse(
        &self,
        sender: &mut Sender<Profiled<Arc<QpSet>>>,
        size: u64,
        cause: NetError,
    ) -> Result<Option<u8>, NetError> {
        let taken = if self.told.load(Ordering::Relaxed) { None } else { sender.refuse(size) };
        if taken.is_some() { Ok(taken) } else { Err(self.tell(cause)) }
    }

    fn tell(&self, cause: NetError) -> NetError {
        self.told.store(true, Ordering::Relaxed);
        cause
    }

    fn attend(
        &self,
        sender: &mut Sender<Profiled<Arc<QpSet>>>,
        starting: Option<u64>,
    ) -> Result<Option<Option<u8>>, NetError> {
        // A fault that polling finds is told below, or by the test of its request.
        if self.base.alert.asked() && !self.base.alert.has_failed() {
            let polled = sender.poll().is_ok();
            sender.check_copies().map_err(|fault| self.base.fail(&fault))?;
            self.base.look_at_copies(sender.copying())?;
            let quiet = polled
                && self.base.look(sender.owed(), || {
                    let routes = self.base.routes.iter().enumerate().filter(|(qp, _)| sender.owes(*qp));
                    routes.map(|(_, route)| route.as_str()).collect::<Vec<_>>().join("; ")
                })?;
            if quiet && starting.is_some() {
                sender.probe().map_err(|fault| self.base.fail(&fault))?;
            }
        }
        match self.base.alert.attention() {
            None => match sender.fault() {
                // isend itself looks for credits first, and there may be none for ever.
                Some(fault) if starting.is_some() => Err(self.base.fail(fault)),
                _ => Ok(None),
            },
            Some(Attention::Failed(cause)) => {
                self.base.fence();
                Err(cause)
            }
            Some(Attention::PeerClosed { received, .. }) => {
                if sender.settle(received) == Some(true) {
                    sender.post().settle();
                }
                let Some(size) = starting else { return Ok(None) };
                if let Some(unwanted) = sender.skip(size, received) {
                    return Ok(Some(unwanted));
                }
                Err(self.base.left("a send was still to come"))
            }
        }
    }

    /// A fault may only be the lost acknowledgement of what a peer, now closed in good order, has received.
    #[cold]
    fn settle(
        &self,
        sender: &mut Sender<Profiled<Arc<QpSet>>>,
        fault: &Fault,
        index: usize,
    ) -> Result<Tested<'static>, NetError> {
        if let Some(Attention::PeerClosed { received, .. }) = self.base.alert.attention() {
            let Some(settled) = sender.settle(received) else { return Ok(Tested::Pending) };
            if settled && let Ok(SendProgress::Done { size }) = sender.test(low_byte(index)) {
                sender.post().settle();
                return Ok(Tested::Sent { size });
            }
        }
        Err(self.tell(self.base.fail(fault)))
    }
}

impl RecvComm {
    /// A profiler, if there is one, learns of a receive.
    #[inline]
    fn begin(&self, request: usize, buffers: &Buffers) {
        // SAFETY: only the data path's thread comes here, which has no other reference to it.
        if let Some(profile) = unsafe { &mut *self.profile.get() }
            && !buffers.parents.is_null()
        {
            // SAFETY: NCCL passes one name for each buffer.
            let parents = unsafe { std::slice::from_raw_parts(buffers.parents, buffers.len) };
            profile.begin(request, buffers.as_slice(), parents);
        }
    }

    /// As [`Self::begin`], of its end.
    #[inline]
    fn end(&self, request: usize) {
        // SAFETY: as in `begin`.
        if let Some(profile) = unsafe { &mut *self.profile.get() } {
            profile.end(request);
        }
    }

    #[cold]
    fn mind(&self, receiver: &mut Receiver<Arc<QpSet>>) -> Result<(), NetError> {
        fork::refuse_child()?;
        // As for a sender. Credits go over the first QP.
        if self.base.alert.asked() && !self.base.alert.has_failed() {
            let polled = receiver.poll().is_ok();
            receiver.check_copies().map_err(|fault| self.base.fail(&fault))?;
            self.base.look_at_copies(receiver.copying())?;
            if polled && self.base.look(receiver.owed(), || self.base.routes[0].clone())? {
                receiver.probe().map_err(|fault| self.base.fail(&fault))?;
            }
        }
        match self.base.alert.attention() {
            Some(Attention::Failed(cause)) => {
                // Not printed when it ended: at the end of a job it is no news.
                if self.base.retired.load(Ordering::Acquire) {
                    self.base.ports[0].warn_once(cause.text.clone());
                }
                self.base.fence();
                Err(cause)
            }
            _ => Ok(()),
        }
    }

    /// A receive is open, and the peer closed in good order: its data are on their way or will never come.
    #[cold]
    fn abandoned(&self) -> Result<Tested<'static>, NetError> {
        match self.base.alert.attention() {
            Some(Attention::Failed(cause)) => Err(cause),
            Some(Attention::PeerClosed { over: true, .. }) => Err(self.base.left("a receive is still open")),
            _ => Ok(Tested::Pending),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Memory;
    use crate::net::tests::{Lines, connection, engine, until};
    use crate::transfer::FLUSH_WRS;
    use crate::verbs::Access;
    use std::collections::VecDeque;
    use std::sync::atomic::AtomicU64;
    use std::time::Duration;

    /// Registers an array on a comm; it must outlive the comm.
    fn register<const N: usize>(comm: &Comm, array: &[u8; N]) -> Arc<MrHandle> {
        // SAFETY: by this function's contract.
        unsafe { comm.register(array.as_ptr() as u64, N, Memory::Host) }.expect("a registration")
    }

    fn isend(comm: &Comm, data: &[u8; 8], mr: &MrHandle) -> Result<Option<Request>, NetError> {
        // SAFETY: the tests make one call at a time; the arrays outlive the comms.
        unsafe { comm.isend(data.as_ptr() as u64, 8, 0, mr, Parent::NONE) }
    }

    fn irecv(comm: &Comm, data: &mut [u8; 8], mr: &MrHandle) -> Result<Option<Request>, NetError> {
        let mut buffers = Buffers::new();
        buffers.push(data.as_mut_ptr() as u64, 8, 0, mr);
        // SAFETY: as in isend.
        unsafe { comm.irecv(&buffers) }
    }

    fn test(request: Request) -> Result<Tested<'static>, NetError> {
        // SAFETY: the tests test open requests of open comms.
        unsafe { Comm::test(request) }
    }

    /// The error with which a send ends, unless there is no credit yet.
    fn refused(comm: &Comm, data: &[u8; 8], mr: &MrHandle) -> Option<NetError> {
        match isend(comm, data, mr) {
            Ok(request) => request.map(|request| until("the error", || test(request).err())),
            Err(error) => Some(error),
        }
    }

    fn close(comm: Box<Comm>) {
        // SAFETY: nothing else runs on it.
        unsafe { comm.close() };
    }

    /// Carries 8 bytes.
    fn transfer(ends: &(Box<Comm>, Box<Comm>), from: &[u8; 8], to: &mut [u8; 8], mrs: (&MrHandle, &MrHandle)) {
        let receive = irecv(&ends.1, to, mrs.1).expect("no fault").expect("room");
        let send = until("a credit", || isend(&ends.0, from, mrs.0).expect("no fault"));
        until("the send", || (test(send).expect("no fault") == Tested::Sent { size: 8 }).then_some(()));
        until("the receive", || (test(receive).expect("no fault") != Tested::Pending).then_some(()));
        assert_eq!(from, to);
    }

    #[test]
    fn what_a_device_event_ended_is_told_to_the_peer() {
        let engine = engine(&[]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let (send, recv) = connection(&engine);
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        let receive = irecv(&recv, &mut to, &recv_mr).expect("no fault").expect("room");
        // As the background thread does. The sending side makes no call, yet the receiving side hears of it.
        let own: Vec<u32> = send.base().qps.qp_nums(0).collect();
        send.base().ports[0].events.fail("soft_0", "QP_FATAL", |qp, _| own.contains(&qp));
        let told = until("the peer's error", || test(receive).err());
        assert!(told.text.contains("soft_0: QP_FATAL"), "{told}");
        let error = refused(&send, &from, &send_mr).expect("it failed");
        assert_eq!(error.text, "soft_0: QP_FATAL");
        close(send);
        close(recv);
    }

    #[test]
    fn memory_given_back_with_traffic_open_ends_both_sides() {
        let engine = engine(&[]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let (send, recv) = connection(&engine);
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        let receive = irecv(&recv, &mut to, &recv_mr).expect("no fault").expect("room");
        let live = || recv.base().ports[0].registrar.stats().live;
        let before = live();
        recv.deregister(recv_mr);
        assert_eq!(live(), before - 1, "the next owner of these addresses must not find the old registration");
        assert!(test(receive).is_err());
        until("the sender's error", || refused(&send, &from, &send_mr));
        assert_eq!(to, [0; 8]);
        close(recv);
        close(send);
    }

    /// A program that closes with transfers open, which end in any order, asks about none of them.
    #[test]
    fn a_send_on_a_connection_that_ended_is_taken_and_its_test_tells() {
        let engine = engine(&[]);
        let (from, mut to) = ([1; 8], [0; 8]);
        for most in [1, usize::MAX] {
            let (send, recv) = connection(&engine);
            let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
            irecv(&recv, &mut to, &recv_mr).expect("no fault").expect("room");
            recv.deregister(recv_mr);
            until("the peer's word", || send.alert().has_failed().then_some(()));
            let sends = std::iter::from_fn(|| isend(&send, &from, &send_mr).ok());
            let taken: Vec<_> = sends.take(most).map(|request| request.expect("no again")).collect();
            assert!(taken.len() == most || taken.len() > 30, "{}", taken.len());
            for request in taken {
                assert!(test(request).expect_err("it has ended").text.contains("aborted"));
            }
            assert!(isend(&send, &from, &send_mr).expect_err("it was told").text.contains("aborted"));
            send.deregister(send_mr);
            close(send);
            close(recv);
        }
    }

    /// Every work request of every QP comes back flushed at once, unsignalled ones and receives posted ahead too, on top of
    /// flushes of GPU memory that nobody has asked after.
    #[test]
    fn a_fence_with_everything_outstanding_fits_the_completion_queues() {
        let engine = engine(&[("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_NET_RDMA_FORCE_FLUSH", "1")]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let (send, recv) = connection(&engine);
        let (other, mut there) = (connection(&engine), [0; 8]);
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        while irecv(&recv, &mut to, &recv_mr).expect("no fault").is_some() {}
        while isend(&send, &from, &send_mr).expect("no fault").is_some() {}
        let mut buffers = Buffers::new();
        for _ in 0..MAX_GROUP {
            buffers.push(to.as_mut_ptr() as u64, 8, 0, &recv_mr);
        }
        for _ in 0..FLUSH_WRS / MAX_GROUP {
            // SAFETY: one call at a time; the array outlives the comm.
            unsafe { recv.iflush(&buffers) }.expect("no fault").expect("a flush");
        }
        for comm in [&recv, &send] {
            comm.base().fence();
            assert!(*comm.base().fenced.lock().expect("no panic"));
        }
        // Nothing has been polled. A queue that ran over breaks the device, and with it every connection.
        std::thread::sleep(Duration::from_millis(100));
        let mrs = (register(&other.0, &from), register(&other.1, &there));
        transfer(&other, &from, &mut there, (&mrs.0, &mrs.1));
        for comm in [send, recv, other.0, other.1] {
            close(comm);
        }
    }

    /// What knows of registrations goes with the comm, whenever NCCL gives them back.
    #[test]
    fn a_comm_that_is_closed_leaves_nothing_of_its_own() {
        let engine = engine(&[]);
        let (send, recv) = connection(&engine);
        let data = [1; 8];
        let (given_back, kept) = (register(&send, &data), register(&send, &data));
        let (alert, first) = (Arc::downgrade(&send.base().alert), Arc::downgrade(&given_back));
        send.deregister(given_back);
        assert_eq!(first.strong_count(), 0);
        close(send);
        // But for who looks at it just now.
        until("the last reference", || (alert.strong_count() == 0).then_some(()));
        drop(kept);
        close(recv);
    }

    fn irecv_hinted(comm: &Comm, data: &mut [u8; 8], mr: &MrHandle) -> Option<Request> {
        let mut buffers = Buffers::new();
        buffers.push(data.as_mut_ptr() as u64, 8, 0, mr);
        // SAFETY: as in isend.
        unsafe { comm.irecv_hinted(&buffers) }.expect("no fault")
    }

    /// NCCL's service thread beside its progress thread: registrations and other connections that come and go disturb no
    /// transfer, and memory that is given back with traffic open is not written to from then on.
    #[test]
    fn another_thread_registers_closes_and_gives_back_memory_in_use() {
        let engine = engine(&[]);
        let (from, to) = (AtomicU64::new(0), AtomicU64::new(0));
        let (send, recv) = connection(&engine);
        // SAFETY: the words outlive the comms.
        let register = |comm: &Comm, word: &AtomicU64| unsafe {
            comm.register(word.as_ptr() as u64, 8, Memory::Host).expect("a registration")
        };
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        // Another registration of the same memory: the region itself stays.
        let same = register(&recv, &to);
        let carried = AtomicU64::new(0);
        std::thread::scope(|scope| {
            let progress = scope.spawn(|| {
                let mut receives = VecDeque::new();
                // Receives are open all the time.
                let mut receive = || -> Result<(), NetError> {
                    while receives.len() < 32 {
                        let mut buffers = Buffers::new();
                        buffers.push(to.as_ptr() as u64, 8, 0, &recv_mr);
                        // SAFETY: this thread alone makes calls of the data path.
                        let Some(request) = unsafe { recv.irecv(&buffers) }? else { break };
                        receives.push_back(request);
                    }
                    if let Some(&request) = receives.front()
                        && test(request)? != Tested::Pending
                    {
                        receives.pop_front();
                        carried.fetch_add(1, Ordering::Release);
                    }
                    Ok(())
                };
                let mut request = None;
                let mut send = || -> Result<(), NetError> {
                    if request.is_none() {
                        from.fetch_add(1, Ordering::Relaxed);
                        // SAFETY: as above.
                        request = unsafe { send.isend(from.as_ptr() as u64, 8, 0, &send_mr, Parent::NONE) }?;
                    }
                    if let Some(sent) = request
                        && test(sent)? != Tested::Pending
                    {
                        request = None;
                    }
                    Ok(())
                };
                // The sending end goes on with the credits that it has.
                let (mut received, mut sent) = (Ok(()), Ok(()));
                while received.is_ok() || sent.is_ok() {
                    received = received.and_then(|()| receive());
                    sent = sent.and_then(|()| send());
                }
                received.expect_err("it is over")
            });
            let go_on = || {
                let before = carried.load(Ordering::Acquire);
                until("transfers", || (carried.load(Ordering::Acquire) > before + 10).then_some(()));
            };
            let other = AtomicU64::new(0);
            for _ in 0..20 {
                for comm in [&send, &recv] {
                    comm.deregister(register(comm, &other));
                }
                let (passing, by) = connection(&engine);
                close(passing);
                close(by);
                go_on();
            }
            recv.deregister(Arc::clone(&recv_mr));
            let last = to.load(Ordering::Acquire);
            let error = progress.join().expect("no panic");
            assert!(error.text.contains("with traffic open"), "{error}");
            assert_eq!(to.load(Ordering::Acquire), last, "written to after it was given back");
        });
        recv.deregister(same);
        close(send);
        close(recv);
    }

    /// What NCCL does at the end of every communicator: the last hinted receives were never counted.
    #[test]
    fn memory_of_hinted_receives_given_back_ends_the_connection_in_good_order() {
        let engine = engine(&[]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let (send, recv) = connection(&engine);
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        let receive = irecv_hinted(&recv, &mut to, &recv_mr).expect("room");
        assert_eq!(test(receive).expect("no fault"), Tested::Received { sizes: &[8] });
        let sent = until("a credit", || isend(&send, &from, &send_mr).expect("no fault"));
        until("the send", || (test(sent).expect("no fault") == Tested::Sent { size: 8 }).then_some(()));
        assert_eq!(from, to);
        // One that the peer never answers.
        irecv_hinted(&recv, &mut to, &recv_mr).expect("room");
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        assert_eq!((recv_mr.in_flight(), recv_mr.hinted_in_flight()), (0, 2));
        recv.deregister(recv_mr);
        assert!(*recv.base().fenced.lock().expect("no panic"), "nothing may land from here on");
        assert_eq!(from, to);
        close(recv);
        until("the last word", || send.base().alert.has_closed().then_some(()));
        assert!(!send.base().alert.has_failed());
        assert_eq!(lines.take(), [] as [String; 0]);
        close(send);
    }

    /// The application of the sending side gives up while LL waits for its data: NCCL makes no call on this side that could
    /// tell.
    #[test]
    fn a_sender_that_closes_with_a_hinted_receive_unanswered_has_aborted() {
        let engine = engine(&[]);
        let mut to = [0; 8];
        let (send, recv) = connection(&engine);
        let recv_mr = register(&recv, &to);
        irecv_hinted(&recv, &mut to, &recv_mr).expect("room");
        let Comm::Send(sending) = &*send else { panic!("it sends") };
        // SAFETY: no data path call runs at once.
        until("the credit", || unsafe { &*sending.hot.get() }.awaited().then_some(()));
        close(send);
        until("the word", || recv.alert().has_failed().then_some(()));
        close(recv);
    }

    #[test]
    fn a_connection_used_after_memory_of_hinted_receives_was_given_back_says_so() {
        let engine = engine(&[]);
        let mut to = [0; 8];
        let (send, recv) = connection(&engine);
        let (recv_mr, other) = (register(&recv, &to), register(&recv, &to));
        irecv_hinted(&recv, &mut to, &recv_mr).expect("room");
        recv.deregister(recv_mr);
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        irecv(&recv, &mut to, &other).expect_err("it is over");
        let told = lines.take();
        assert!(told.len() == 1 && told[0].contains("NCCL_NET_RDMA_RECV_HINT=0"), "{told:?}");
        close(recv);
        close(send);
    }

    /// Empty sends of LL are done for the receiver's NCCL before the sender's has come to them.
    #[test]
    fn sends_for_hinted_receives_end_well_after_the_receiver_has_closed() {
        let engine = engine(&[]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let (send, recv) = connection(&engine);
        let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
        for _ in 0..3 {
            irecv_hinted(&recv, &mut to, &recv_mr).expect("room");
        }
        recv.deregister(recv_mr);
        close(recv);
        until("the last word", || send.base().alert.has_closed().then_some(()));
        for _ in 0..3 {
            let request = isend(&send, &from, &send_mr).expect("no fault").expect("a request");
            assert_eq!(test(request).expect("no fault"), Tested::Sent { size: 8 });
        }
        assert_eq!(send_mr.in_flight(), 0);
        assert!(refused(&send, &from, &send_mr).expect("nobody receives").text.contains("closed the connection"));
        close(send);
    }

    #[test]
    fn hinted_receives_are_had_only_where_both_ends_want_them() {
        for (setting, hinted) in [("0", 0), ("1", 1)] {
            let engine = engine(&[("NCCL_NET_RDMA_RECV_HINT", setting)]);
            let mut to = [0; 8];
            let (send, recv) = connection(&engine);
            let mr = register(&recv, &to);
            let receive = irecv_hinted(&recv, &mut to, &mr).expect("room");
            assert_eq!((mr.in_flight(), mr.hinted_in_flight()), (1 - hinted, hinted));
            assert_eq!(test(receive).expect("no fault") == Tested::Pending, hinted == 0);
            close(recv);
            close(send);
        }
    }

    /// Counts events: begun, ended.
    #[derive(Debug, Default)]
    struct Count([std::sync::atomic::AtomicUsize; 2]);

    impl Profiler for Count {
        fn begin(&self, parent: Parent, _: &crate::transfer::profile::Posted) -> crate::transfer::profile::Event {
            self.0[0].fetch_add(1, Ordering::Relaxed);
            NonNull::new(parent.0)
        }

        fn end(&self, _: NonNull<c_void>) {
            self.0[1].fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn hinted_receives_are_events_too_completed_or_not() {
        for setting in ["0", "1"] {
            let engine = engine(&[("NCCL_NET_RDMA_RECV_HINT", setting)]);
            let (from, mut to, count) = ([1; 8], [0; 8], Arc::new(Count::default()));
            let (send, mut recv) = connection(&engine);
            recv.profile(Some(Arc::clone(&count) as Arc<dyn Profiler>));
            let (send_mr, recv_mr) = (register(&send, &from), register(&recv, &to));
            let parent = Parent(std::ptr::without_provenance_mut(8));
            let mut buffers = Buffers::new();
            buffers.push(to.as_mut_ptr() as u64, 8, 0, &recv_mr);
            buffers.named(&raw const parent);
            // SAFETY: as in isend.
            let receive = unsafe { recv.irecv_hinted(&buffers) }.expect("no fault").expect("room");
            until("a credit", || isend(&send, &from, &send_mr).expect("no fault"));
            until("the receive", || (test(receive).expect("no fault") != Tested::Pending).then_some(()));
            assert_eq!(count.0.each_ref().map(|c| c.load(Ordering::Relaxed)), [1, 1]);
            close(send);
            close(recv);
        }
    }

    #[test]
    fn a_send_after_the_peer_closed_says_so_once() {
        let engine = engine(&[]);
        let from = [1; 8];
        let (send, recv) = connection(&engine);
        let mr = register(&send, &from);
        close(recv);
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        until("the peer's last word", || send.base().alert.has_closed().then_some(()));
        for _ in 0..3 {
            let error = refused(&send, &from, &mr).expect("nobody receives");
            assert!(error.text.contains("closed the connection"), "{error}");
        }
        assert_eq!(lines.take().len(), 1);
        close(send);
    }

    #[test]
    fn a_receive_that_never_comes_says_so_once() {
        let engine = engine(&[]);
        let mut to = [0; 8];
        let (send, recv) = connection(&engine);
        let mr = register(&recv, &to);
        let receive = irecv(&recv, &mut to, &mr).expect("no fault").expect("room");
        close(send);
        let lines = Lines::default();
        let _guard = tracing::subscriber::set_default(lines.clone());
        let first = until("the error", || test(receive).err());
        assert!(first.text.contains("a receive is still open"), "{first}");
        assert_eq!(test(receive).expect_err("it stays"), first);
        assert_eq!(lines.take(), [first.text]);
        close(recv);
    }

    /// Whatever the way of registering, a dma-buf's too: rails before the one that refuses give back what they have.
    #[test]
    fn a_registration_is_of_all_rails_or_of_none() {
        let engine = engine(&[("NCCL_NET_RDMA_RAILS", "soft_0+soft_1")]);
        let (send, recv) = connection(&engine);
        let base = recv.base();
        let data = [0u8; 8];
        let live = |rail: usize| base.ports[rail].registrar.stats().live;
        let refused = base.register(false, |port| {
            if port.name == base.ports[1].name {
                assert_eq!(live(0), 1);
                return Err(NetError::new(Code::System, "refused"));
            }
            // SAFETY: the array outlives the registration.
            unsafe { port.registrar.register(data.as_ptr() as u64, 8, Memory::Gpu, Access::LOCAL_WRITE) }
                .map_err(|e| NetError::new(Code::System, e.to_string()))
        });
        assert_eq!(refused.expect_err("the second rail refuses").text, "refused");
        assert_eq!((live(0), live(1)), (0, 0));
        close(send);
        close(recv);
    }

    #[test]
    fn a_flush_does_not_need_the_peer() {
        let engine = engine(&[("NCCL_NET_RDMA_FORCE_FLUSH", "1")]);
        let (from, mut to) = ([1; 8], [0; 8]);
        let ends = connection(&engine);
        let mrs = (register(&ends.0, &from), register(&ends.1, &to));
        transfer(&ends, &from, &mut to, (&mrs.0, &mrs.1));
        let (send, recv) = ends;
        close(send);
        until("the peer's last word to be old", || {
            matches!(recv.base().alert.attention(), Some(Attention::PeerClosed { over: true, .. })).then_some(())
        });
        for _ in 0..100 {
            let mut buffers = Buffers::new();
            buffers.push(to.as_mut_ptr() as u64, 8, 0, &mrs.1);
            // SAFETY: as in isend.
            let flush = unsafe { recv.iflush(&buffers) }.expect("no fault").expect("a flush");
            until("the flush", || (test(flush).expect("no fault") == Tested::Flushed).then_some(()));
        }
        close(recv);
    }
}
