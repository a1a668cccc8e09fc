//! Copies under way to or from GPU memory, and what is due when they land. The state of a queue pair goes on when a copy is
//! started; what the program or the peer can see of it waits here, in the order in which it was started.
use super::{Copied, Kind, Pieces, World};
use crate::gpu::{Progress, Ticket, Unload};
use crate::qp::{INDEX_MASK, State, failed, status, vendor_code};
use crate::queue::Cqe;
use ibverbs_sys as ffi;
use std::sync::Arc;

/// Queue pairs are named by number: one that is gone by then is not found.
pub(super) struct Landing {
    ticket: Ticket,
    unload: Vec<Unload>,
    pub(super) responder: Option<u32>,
    pub(super) requester: Option<u32>,
    /// The responder's receive completion, and whether it was solicited.
    pub(super) receive: Option<(Cqe, bool)>,
    /// The message to acknowledge to another process.
    pub(super) ack: Option<u32>,
    /// The requester's request that is done with it, by its index.
    pub(super) sent: Option<u32>,
}

impl Landing {
    pub(super) fn new(ticket: Ticket, unload: Vec<Unload>) -> Self {
        Self { ticket, unload, responder: None, requester: None, receive: None, ack: None, sent: None }
    }

    /// The queue pairs that wait for it; one connected to itself waits once.
    fn ends(&self) -> impl Iterator<Item = u32> + use<> {
        self.responder.into_iter().chain(self.requester.filter(|_| self.requester != self.responder))
    }
}

impl World {
    /// Copies a segment for the queue pair at `index`; `first` is set for the first of a message.
    pub(super) fn carry(&mut self, index: u32, from: &Pieces, to: &Pieces, first: bool) -> Copied {
        let Some(conn) = self.conn(index) else { return Copied::Failed };
        let before = conn.last_ticket.filter(|_| conn.landing > 0);
        if from.is_empty() {
            return before.map_or(Copied::Now, |ticket| Copied::Later(ticket, Vec::new()));
        }
        if from.is_host() && to.is_host() {
            if before.is_some() {
                return Copied::Busy;
            }
            // SAFETY: the callers checked both under this hold of the lock, which deregistration takes.
            unsafe { from.copy_to(to) };
            return Copied::Now;
        }
        let before = before.filter(|_| first);
        if before.is_some() && self.lands_out_of_order(index, to) {
            return Copied::Busy;
        }
        // Messages of a queue pair land in order, those of one batch in any.
        self.gpu.copy(from, to, before)
    }

    /// Would a copy to this target be over before an earlier one of the queue pair? Batches of one GPU are in order, but the
    /// CPU unloads what goes to host memory after its batch, and another GPU has batches of its own.
    fn lands_out_of_order(&self, index: u32, to: &Pieces) -> bool {
        let Some(number) = self.conn(index).map(|conn| conn.qp.num) else { return false };
        let gpu = to.iter().find_map(|(_, _, mem)| mem.gpu());
        self.landings.iter().filter(|landing| landing.ends().any(|end| end == number)).any(|landing| {
            gpu.is_some_and(|gpu| landing.unload.iter().any(Unload::is_delivery) || gpu != landing.ticket.gpu)
        })
    }

    pub(super) fn queue(&mut self, landing: Landing) {
        for number in landing.ends() {
            if let Some(conn) = self.numbered(number) {
                conn.landing += 1;
                conn.last_ticket = Some(landing.ticket);
            }
        }
        self.landings.push_back(landing);
    }

    fn numbered(&mut self, number: u32) -> Option<&mut super::Conn> {
        self.conn_mut(number & INDEX_MASK).filter(|conn| conn.qp.num == number)
    }

    /// Finishes what has landed. True if there was something.
    pub(super) fn land(&mut self) -> bool {
        let mut any = false;
        while let Some(front) = self.landings.front() {
            let progress = self.gpu.progress(front.ticket);
            if progress == Progress::Pending {
                break;
            }
            if let Some(landing) = self.landings.pop_front() {
                self.finish(landing, progress == Progress::Done);
            }
            any = true;
        }
        any
    }

    /// Waits until nothing is under way: nobody reads or writes memory of the program any more.
    pub(crate) fn settle(&mut self) {
        while !self.landings.is_empty() {
            if !self.land() {
                std::hint::spin_loop();
            }
        }
    }

    /// As `settle`, if the queue pair takes part in something.
    pub(super) fn settle_for(&mut self, index: u32) {
        if self.conn(index).is_some_and(|conn| conn.landing > 0) {
            self.settle();
        }
    }

    fn finish(&mut self, landing: Landing, landed: bool) {
        // SAFETY: deregistration settles before it takes a target away.
        unsafe { self.gpu.unload(landing.ticket.gpu, &landing.unload, landed) };
        for number in landing.ends() {
            if let Some(conn) = self.numbered(number) {
                conn.landing -= 1;
            }
        }
        if !landed {
            return self.lost(&landing);
        }
        if let Some((number, (cqe, solicited))) = landing.responder.zip(landing.receive)
            && let Some(conn) = self.numbered(number)
        {
            let cq = conn.qp.recv_cq.clone();
            self.push(&cq, &cqe, solicited);
        }
        if let Some((number, psn)) = landing.responder.zip(landing.ack)
            && let Some(conn) = self.numbered(number)
        {
            conn.reply(Kind::Ack, 0, psn);
            self.activate(number & INDEX_MASK);
        }
        if let Some(number) = landing.requester
            && let Some(conn) = self.numbered(number)
        {
            // Not if it was sent again meanwhile and is done already.
            if conn.una != conn.next && landing.sent == Some(conn.una) {
                self.complete_send(number & INDEX_MASK);
            }
            self.activate(number & INDEX_MASK);
        }
    }

    /// The GPU failed: nobody may believe that the bytes are there.
    fn lost(&mut self, landing: &Landing) {
        if let Some(number) = landing.responder
            && let Some(conn) = self.numbered(number)
        {
            if let Some(psn) = landing.ack {
                conn.reply(Kind::Nak, u8::try_from(status::REM_OP).unwrap_or(0), psn);
            }
            let qp = Arc::clone(&conn.qp);
            if qp.state() != State::Err {
                qp.event(ffi::IBV_EVENT_QP_FATAL);
            }
            // The receive request has been taken: it ends, too.
            if let Some((cqe, _)) = &landing.receive {
                let code = status::LOC_QP_OP;
                let wc = failed(cqe.wc.wr_id, code, vendor_code(code), qp.num);
                self.push(&qp.recv_cq, &Cqe { wc, frees: cqe.frees }, true);
            }
            self.fail_all(number & INDEX_MASK);
            self.activate(number & INDEX_MASK);
        }
        if let Some(number) = landing.requester
            && self.numbered(number).is_some()
        {
            self.fail_send(number & INDEX_MASK, status::REM_OP, vendor_code(status::REM_OP));
        }
    }
}
