//! Asynchronous events of a device: read by the background thread, one line each, and passed to the connections that they
//! end.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use ibverbs_sys as ib;

use crate::rendezvous::FdEvents;
use crate::verbs::{AsyncEvent, Context};

use super::alert::Alert;
use super::{Code, NetError};

/// What a device's events change: connections by QP number, and what is known of its ports.
#[derive(Debug, Default)]
pub(super) struct DeviceEvents {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By QP number, with the port that the QP uses.
    comms: HashMap<u32, (u8, Weak<Alert>)>,
    ports: HashMap<u8, PortHistory>,
}

#[derive(Debug, Default)]
struct PortHistory {
    flaps: u32,
    down_since: Option<Instant>,
    /// Counts GID_CHANGE events: a GID chosen before is chosen anew.
    gid_epoch: u64,
}

impl DeviceEvents {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A connection wants to hear of events of its QPs.
    pub(super) fn remember(&self, port: u8, qp_nums: impl Iterator<Item = u32>, alert: &Arc<Alert>) {
        let mut state = self.state();
        state.comms.extend(qp_nums.map(|q| (q, (port, Arc::downgrade(alert)))));
    }

    pub(super) fn forget(&self, qp_nums: impl Iterator<Item = u32>) {
        let mut state = self.state();
        for qp in qp_nums {
            state.comms.remove(&qp);
        }
    }

    pub(super) fn gid_epoch(&self, port: u8) -> u64 {
        self.state().ports.get(&port).map_or(0, |p| p.gid_epoch)
    }

    pub(super) fn fail(&self, device: &str, text: &str, which: impl Fn(u32, u8) -> bool) {
        let hit: Vec<Arc<Alert>> = self
            .state()
            .comms
            .iter()
            .filter(|(qp, (port, _))| which(**qp, *port))
            .filter_map(|(_, (_, a))| a.upgrade())
            .collect();
        for alert in hit {
            // NCCL may make no call for long, and the peer waits.
            let error = NetError::new(Code::System, format!("{device}: {text}"));
            // Printed by whoever read the event, once for all connections.
            if alert.fail(error.clone(), |_| {}) {
                alert.tell(&error.text);
            }
        }
    }
}

/// Reads the events of one device.
#[derive(Debug)]
pub(super) struct EventReader {
    pub(super) context: Arc<Context>,
    pub(super) events: Arc<DeviceEvents>,
    /// NCCL_IB_RETURN_ASYNC_EVENTS: whether a fatal event ends connections.
    pub(super) fatal_ends: bool,
}

impl FdEvents for EventReader {
    fn on_readable(&self) {
        while let Some(event) = self.context.next_event() {
            self.handle(event);
        }
    }
}

impl EventReader {
    fn handle(&self, event: AsyncEvent) {
        let device = self.context.name();
        match event {
            AsyncEvent::Port { kind: ib::IBV_EVENT_PORT_ERR, port } => {
                let mut state = self.events.state();
                let users = state.comms.values().filter(|(p, _)| *p == port).count();
                let history = state.ports.entry(port).or_default();
                history.flaps += 1;
                let repeated = history.down_since.replace(Instant::now()).is_some();
                let flaps = history.flaps;
                drop(state);
                if !repeated {
                    tracing::warn!(target: "init", "{device}:{port} lost its link (time {flaps}), {users} QPs use it: the NIC retries \
                        until NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT run out; check cable and switch port");
                }
            }
            AsyncEvent::Port { kind: ib::IBV_EVENT_PORT_ACTIVE, port } => {
                let down = self.events.state().ports.entry(port).or_default().down_since.take();
                let after = down.map_or(String::new(), |t| format!(" after {:.1} s", t.elapsed().as_secs_f64()));
                tracing::warn!(target: "init", "{device}:{port} has its link again{after}");
            }
            AsyncEvent::Port { kind: ib::IBV_EVENT_GID_CHANGE, port } => {
                self.events.state().ports.entry(port).or_default().gid_epoch += 1;
                tracing::info!(target: "init", "{device}:{port}: GID table changed; new connections choose their GID anew");
            }
            AsyncEvent::Port { kind, port } => {
                tracing::info!(target: "init", "{device}:{port}: event {kind} ({})", name(kind));
            }
            AsyncEvent::Qp { kind, qp_num } if is_fatal(kind) => {
                let text = format!("QP {qp_num:#x} got a fatal event: {} ({kind})", name(kind));
                tracing::warn!(target: "init", "{device}: {text}; the peer's log names the request that failed");
                if self.fatal_ends {
                    self.events.fail(device, &text, |qp, _| qp == qp_num);
                }
            }
            AsyncEvent::Cq { kind } | AsyncEvent::Device { kind } => {
                let text = format!("fatal event: {} ({kind})", name(kind));
                tracing::warn!(target: "init", "{device}: {text}; see the kernel log for the device's own report");
                if self.fatal_ends {
                    self.events.fail(device, &text, |_, _| true);
                }
            }
            AsyncEvent::Qp { kind, .. } | AsyncEvent::Other { kind } => {
                tracing::debug!(target: "net", "{device}: event {kind} ({})", name(kind));
            }
        }
    }
}

fn is_fatal(kind: u32) -> bool {
    matches!(kind, ib::IBV_EVENT_QP_FATAL | ib::IBV_EVENT_QP_REQ_ERR | ib::IBV_EVENT_QP_ACCESS_ERR)
}

/// The event by its name in `<infiniband/verbs.h>`, without IBV_EVENT_.
fn name(kind: u32) -> &'static str {
    match kind {
        ib::IBV_EVENT_CQ_ERR => "CQ_ERR",
        ib::IBV_EVENT_QP_FATAL => "QP_FATAL",
        ib::IBV_EVENT_QP_REQ_ERR => "QP_REQ_ERR",
        ib::IBV_EVENT_QP_ACCESS_ERR => "QP_ACCESS_ERR",
        ib::IBV_EVENT_COMM_EST => "COMM_EST",
        ib::IBV_EVENT_DEVICE_FATAL => "DEVICE_FATAL",
        ib::IBV_EVENT_PORT_ACTIVE => "PORT_ACTIVE",
        ib::IBV_EVENT_PORT_ERR => "PORT_ERR",
        ib::IBV_EVENT_LID_CHANGE => "LID_CHANGE",
        ib::IBV_EVENT_PKEY_CHANGE => "PKEY_CHANGE",
        ib::IBV_EVENT_SM_CHANGE => "SM_CHANGE",
        ib::IBV_EVENT_CLIENT_REREGISTER => "CLIENT_REREGISTER",
        ib::IBV_EVENT_GID_CHANGE => "GID_CHANGE",
        ib::IBV_EVENT_QP_LAST_WQE_REACHED => "QP_LAST_WQE_REACHED",
        _ => "unknown",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::tests::{connection, engine};

    #[test]
    fn an_event_of_one_qp_ends_its_connection_only() {
        let events = DeviceEvents::default();
        let (a, b) = (Arc::new(Alert::default()), Arc::new(Alert::default()));
        events.remember(1, [5, 6].into_iter(), &a);
        events.remember(1, [7].into_iter(), &b);
        events.fail("mlx5_0", "QP_FATAL", |qp, _| qp == 6);
        assert!(a.has_failed() && !b.has_failed());
        events.forget([7].into_iter());
        events.fail("mlx5_0", "DEVICE_FATAL", |_, _| true);
        assert!(!b.has_failed());
    }

    /// Two devices number their QPs alike: what one device says of a number must not reach the owner of that number on the
    /// other.
    #[test]
    fn each_device_knows_the_qps_on_itself_only() {
        let engine = engine(&[("NCCL_NET_RDMA_RAILS", "soft_0+soft_1")]);
        let (send, recv) = connection(&engine);
        let known = |rail: usize| {
            let mut known: Vec<u32> =
                engine.device(0).expect("the first").rails[rail].events.state().comms.keys().copied().collect();
            known.sort_unstable();
            known
        };
        let (first, second) = (known(0), known(1));
        // One at each end.
        assert_eq!((first.len(), second.len()), (2, 2), "{first:x?} {second:x?}");
        // SAFETY: nothing runs on them.
        unsafe { send.close() };
        // SAFETY: as above.
        unsafe { recv.close() };
        assert_eq!((known(0).len(), known(1).len()), (0, 0));
    }
}
