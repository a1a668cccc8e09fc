//! Watch over progress: what a NIC does not report. A peer's NIC acknowledges every work request within the time that ours
//! is told to try, or ours reports an error. Some do neither (rxe with `NCCL_IB_RETRY_CNT=7` tries for ever), and while the
//! network of TCP stands no keep-alive misses the peer: the job would hang.
//!
//! The background thread asks each connection once a [`PERIOD`] to look at itself, by a bit in the word that every call of
//! the data path loads anyway. The next call looks: it compares what is owed with the last look. So the watch costs the data
//! path nothing between two looks, and only time in which NCCL polls counts: a process that was stopped, or is busy
//! elsewhere, has not waited.
//!
//! | at a look | then |
//! |---|---|
//! | something was posted or has completed since the last one | the wait begins anew |
//! | nothing owed, nothing new | quiet: the receiving side asks for an acknowledgement of its credits if none is on its way; the sending side that waits for a credit asks for a sign of life where receives are hinted, after which the other side makes no calls |
//! | the same is owed | one period more; **stalled** above the limit |
//!
//! Copies of staging, of which a GPU that hangs tells nothing either, are watched in the same way: by the last mark that was
//! reached, while some are under way. Should the driver not even return from starting one, the data path looks at nothing:
//! the background thread sees it itself.

use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use crate::config::Config;
use crate::memory::gpu::{Lane, Starts};
use crate::rendezvous::{RendezvousError, TimerHandle, Watcher};
use crate::transfer::Owed;

use super::alert::Alert;
use super::{Code, NetError};

/// Between two looks.
pub(super) const PERIOD: Duration = Duration::from_millis(500);
/// More than a NIC may take: a host may be slow for that long.
const MARGIN: Duration = Duration::from_secs(10);
/// A NIC's timer may fire as late as four times what it is told (InfiniBand Architecture Specification, 9.7.6.1.3).
const LATEST: f64 = 4.0;
/// A message is acknowledged when all of it has arrived: so much a millisecond goes over the slowest network there is.
const BYTES_PER_MS: u64 = 8192;

/// How long a work request may stay without an acknowledgement; None: for ever. `patience` is how long the NIC is told to
/// try, in seconds.
pub(super) fn limit(config: &Config, patience: f64) -> Option<Duration> {
    match config.stall_timeout {
        Some(0) => None,
        Some(ms) => Some(Duration::from_millis(ms.into())),
        None => Duration::try_from_secs_f64(patience * LATEST).ok().map(|d| d + MARGIN),
    }
}

/// How long copies between GPU and host memory may not go on; None: for ever, as the user wants it of the rest.
pub(super) fn copies_limit(config: &Config, limit: Option<Duration>) -> Option<Duration> {
    (config.stall_timeout != Some(0)).then(|| limit.unwrap_or(MARGIN).max(MARGIN))
}

/// What a look finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Found {
    Progress,
    /// Nothing is owed and nothing happens.
    Quiet,
    Waiting,
    /// Nothing was acknowledged for so long, which is more than the limit allows.
    Stalled(Duration),
}

/// The state of one connection. Time is the looks themselves.
#[derive(Debug)]
pub(super) struct Vigil {
    limit: Duration,
    last: Owed,
    periods: u32,
}

impl Vigil {
    pub(super) fn new(limit: Duration) -> Self {
        Self { limit, last: Owed::default(), periods: 0 }
    }

    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// A period is over in which the data path was polled.
    pub(super) fn look(&mut self, owed: Owed) -> Found {
        if owed != self.last {
            self.last = owed;
            self.periods = 0;
            return Found::Progress;
        }
        if owed.requests == 0 {
            return Found::Quiet;
        }
        self.periods += 1;
        // The first of them may have been cut short.
        let waited = PERIOD * (self.periods - 1);
        if waited < self.limit + Duration::from_millis(owed.bytes / BYTES_PER_MS) {
            Found::Waiting
        } else {
            Found::Stalled(waited)
        }
    }
}

/// Watches over the calls of the driver that start copies.
#[derive(Debug)]
pub(super) struct Calls {
    starts: Starts,
    vigil: Vigil,
    /// For people: the GPU and the peer.
    gpu: String,
    peer: String,
}

impl Calls {
    pub(super) fn of(lane: &Lane, peer: String, limit: Duration) -> Self {
        let (starts, gpu) = (lane.starts().clone(), lane.stager().describe());
        Self { starts, vigil: Vigil::new(limit), gpu, peer }
    }

    /// A period is over; why the connection is to end.
    pub(super) fn look(&mut self) -> Option<NetError> {
        let owed = Owed { mark: self.starts.count().into(), requests: self.starts.under_way().into(), bytes: 0 };
        let Found::Stalled(waited) = self.vigil.look(owed) else { return None };
        let text = format!(
            "the driver has not returned from starting a copy between {} and host memory for {:.1} s, and NCCL's thread waits for \
             it; connection to peer {}; look at nvidia-smi and for Xid errors in the kernel's log; NCCL_NET_GDR_LEVEL=LOC \
             does without copies",
            self.gpu,
            waited.as_secs_f64(),
            self.peer,
        );
        Some(NetError::new(Code::System, text))
    }
}

/// Asks all connections of this process to look.
struct Rounds {
    pid: u32,
    alerts: Vec<Weak<Alert>>,
    /// There while there are connections.
    _timer: TimerHandle,
}

static ROUNDS: Mutex<Option<Rounds>> = Mutex::new(None);

/// From now on `alert` is asked to look once a period.
pub(super) fn enroll(alert: &Arc<Alert>) -> Result<(), RendezvousError> {
    let mut rounds = ROUNDS.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    match &mut *rounds {
        // It may be there for the sake of its copies, or they for its own.
        Some(rounds) if rounds.pid == pid => {
            if !rounds.alerts.iter().any(|known| std::ptr::eq(known.as_ptr(), Arc::as_ptr(alert))) {
                rounds.alerts.push(Arc::downgrade(alert));
            }
        }
        // None yet, or those of the process that this one was forked from.
        _ => {
            let timer = Watcher::global()?.every(PERIOD, Arc::new(go_round));
            *rounds = Some(Rounds { pid, alerts: vec![Arc::downgrade(alert)], _timer: timer });
        }
    }
    Ok(())
}

fn go_round() {
    let mut living = Vec::new();
    {
        let mut rounds = ROUNDS.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(all) = &mut *rounds else { return };
        all.alerts.retain(|alert| alert.upgrade().map(|alert| living.push(alert)).is_some());
        if all.alerts.is_empty() {
            *rounds = None;
        }
    }
    // With no lock held: one that has failed is told of.
    for alert in living {
        alert.ask();
        alert.look_at_calls();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(10);

    fn owed(mark: u64, requests: u32) -> Owed {
        Owed { mark, requests, bytes: 0 }
    }

    /// How many looks at the same it takes until it counts as stalled, if so many do.
    fn looks(vigil: &mut Vigil, owed: Owed, most: u32) -> Option<u32> {
        (1..=most).find(|_| matches!(vigil.look(owed), Found::Stalled(_)))
    }

    fn load(set: &[(&str, &str)]) -> Config {
        let find = |name: &str| set.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned());
        Config::load(&find, std::iter::empty()).0
    }

    #[test]
    fn the_default_limit_is_above_the_nics_own() {
        assert_eq!(limit(&load(&[]), 34.5), Some(Duration::from_secs(148)));
        assert_eq!(limit(&load(&[]), 0.5), Some(Duration::from_secs(12)));
        // NCCL_IB_TIMEOUT=0: the user wants it to wait for ever.
        assert_eq!(limit(&load(&[]), f64::INFINITY), None);
    }

    #[test]
    fn the_setting_goes_before_the_default_and_zero_turns_it_off() {
        let set = |ms| load(&[("NCCL_NET_RDMA_STALL_TIMEOUT", ms)]);
        assert_eq!(limit(&set("2000"), 34.4), Some(Duration::from_secs(2)));
        assert_eq!(limit(&set("2000"), f64::INFINITY), Some(Duration::from_secs(2)));
        assert_eq!(limit(&set("0"), 34.4), None);
        assert_eq!(limit(&set("-1"), 0.5), Some(Duration::from_secs(12)));
    }

    #[test]
    fn copies_have_at_least_ten_seconds() {
        let limit = |set: &[_], of| copies_limit(&load(set), of);
        assert_eq!(limit(&[], None), Some(MARGIN), "the NIC may try for ever, the GPU not");
        assert_eq!(limit(&[("NCCL_NET_RDMA_STALL_TIMEOUT", "2000")], Some(Duration::from_secs(2))), Some(MARGIN));
        assert_eq!(limit(&[], Some(Duration::from_secs(148))), Some(Duration::from_secs(148)));
        assert_eq!(limit(&[("NCCL_NET_RDMA_STALL_TIMEOUT", "0")], None), None);
    }

    #[test]
    fn what_is_owed_too_long_is_a_stall_and_not_before() {
        let mut vigil = Vigil::new(LIMIT);
        assert_eq!(vigil.look(owed(1, 1)), Found::Progress);
        for _ in 0..20 {
            assert_eq!(vigil.look(owed(1, 1)), Found::Waiting);
        }
        assert_eq!(vigil.look(owed(1, 1)), Found::Stalled(LIMIT));
    }

    #[test]
    fn who_owes_nothing_never_stalls() {
        let mut vigil = Vigil::new(LIMIT);
        assert_eq!(vigil.look(owed(1, 0)), Found::Progress);
        for _ in 0..1000 {
            assert_eq!(vigil.look(owed(1, 0)), Found::Quiet);
        }
    }

    /// A completion with as many requests owed afterwards, a new request, one fewer owed: all of them end the wait.
    #[test]
    fn whatever_moves_begins_anew() {
        let mut vigil = Vigil::new(LIMIT);
        vigil.look(owed(1, 2));
        for moved in [owed(2, 2), owed(3, 3), owed(3, 2)] {
            let same = vigil.last;
            assert_eq!(looks(&mut vigil, same, 20), None);
            assert_eq!(vigil.look(moved), Found::Progress);
        }
        assert_eq!(looks(&mut vigil, owed(3, 2), 30), Some(21));
    }

    /// 128 MiB at 8 MiB/s take 16 s more.
    #[test]
    fn large_messages_have_their_time() {
        let mut vigil = Vigil::new(LIMIT);
        let owed = Owed { mark: 1, requests: 1, bytes: 128 << 20 };
        vigil.look(owed);
        assert_eq!(looks(&mut vigil, owed, 100), Some(1 + 20 + 33));
    }
}
