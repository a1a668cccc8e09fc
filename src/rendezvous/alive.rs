//! Keep-alive: when a side says that it lives, and when the other one counts as dead. No clock and no sockets here.
//!
//! The connecting side names its terms at the end of the set-up. The accepting side merges them with its own, begins, and
//! puts what was agreed into its first beat; with that beat the connecting side begins. So a peer that knows nothing of
//! keep-alive, or does not want it, is sent nothing and waited for as before.

use std::time::{Duration, Instant};

/// Sent when nothing else was: the body of the first one of the accepting side holds the terms, the others have none.
pub(super) const BEAT: u8 = 0xF0;

/// Beats that fit into the silence after which a peer counts as dead, so that one late beat is no verdict.
const BEATS_PER_LIMIT: u32 = 3;
/// Looks per interval: what is due is noticed late by one of them at most.
const LOOKS_PER_INTERVAL: u32 = 4;

/// The terms of a keep-alive, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeepAlive {
    /// A side that has sent nothing for so long sends a beat.
    interval: u32,
    /// A side from which nothing came for so long counts as dead.
    limit: u32,
}

impl KeepAlive {
    /// Of times in milliseconds. None where either is 0: no keep-alive. The interval is cut to a third of the limit.
    pub fn new(interval: u32, limit: u32) -> Option<Self> {
        let interval = interval.min(limit / BEATS_PER_LIMIT);
        (interval > 0).then_some(Self { interval, limit })
    }

    /// What both sides keep: the longer times.
    pub fn agree(self, other: Self) -> Self {
        Self { interval: self.interval.max(other.interval), limit: self.limit.max(other.limit) }
    }

    /// The silence after which the peer counts as dead.
    pub fn limit(&self) -> Duration {
        ms(self.limit)
    }

    fn interval(&self) -> Duration {
        ms(self.interval)
    }

    /// Milliseconds of interval and limit, little-endian.
    pub fn encode(&self) -> [u8; 8] {
        let [a, b, c, d] = self.interval.to_le_bytes();
        let [e, f, g, h] = self.limit.to_le_bytes();
        [a, b, c, d, e, f, g, h]
    }

    /// None from a peer that has no keep-alive. What follows is left to later versions.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let &[a, b, c, d, e, f, g, h, ..] = bytes else { return None };
        Self::new(u32::from_le_bytes([a, b, c, d]), u32::from_le_bytes([e, f, g, h]))
    }
}

fn ms(time: u32) -> Duration {
    Duration::from_millis(u64::from(time))
}

/// What is to be done for a channel now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    Beat,
    /// Nothing has come for so long.
    Dead(Duration),
}

/// The state of one channel.
#[derive(Debug)]
pub(super) struct Pulse {
    terms: KeepAlive,
    sent: Instant,
    heard: Instant,
    looked: Instant,
    beats: u64,
}

impl Pulse {
    pub(super) fn new(terms: KeepAlive, now: Instant) -> Self {
        Self { terms, sent: now, heard: now, looked: now, beats: 0 }
    }

    pub(super) fn terms(&self) -> KeepAlive {
        self.terms
    }

    /// A frame has been sent.
    pub(super) fn sent(&mut self, now: Instant) {
        self.sent = now;
    }

    /// The next frame is a beat.
    pub(super) fn count(&mut self) {
        self.beats += 1;
    }

    /// Beats so far.
    pub(super) fn beats(&self) -> u64 {
        self.beats
    }

    /// Bytes have come.
    pub(super) fn heard(&mut self, now: Instant) {
        self.heard = now;
    }

    /// How often [`Self::look`] is to be called.
    pub(super) fn period(&self) -> Duration {
        (self.terms.interval() / LOOKS_PER_INTERVAL).max(Duration::from_millis(1))
    }

    pub(super) fn look(&mut self, now: Instant) -> Due {
        // This side itself was stopped, as a whole job may be: what the peer did meanwhile says nothing.
        if now.saturating_duration_since(self.looked) > self.terms.limit() / 2 {
            self.heard = now;
        }
        self.looked = now;
        let silent = now.saturating_duration_since(self.heard);
        if silent > self.terms.limit() {
            Due::Dead(silent)
        } else if now.saturating_duration_since(self.sent) >= self.terms.interval() {
            Due::Beat
        } else {
            Due::Nothing
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const MS: Duration = Duration::from_millis(1);

    fn terms(interval: u32, limit: u32) -> KeepAlive {
        KeepAlive::new(interval, limit).expect("on")
    }

    #[test]
    fn zero_turns_it_off() {
        assert_eq!(KeepAlive::new(0, 900), None);
        assert_eq!(KeepAlive::new(100, 0), None);
        assert_eq!(KeepAlive::decode(&[]), None);
        assert_eq!(KeepAlive::decode(&[0; 8]), None);
    }

    #[test]
    fn the_longer_times_are_kept() {
        assert_eq!(terms(100, 2000).agree(terms(300, 1000)), terms(300, 2000));
        assert_eq!(terms(300, 1000).agree(terms(100, 2000)), terms(300, 2000));
    }

    /// Else a peer would be dead before it had to say anything.
    #[test]
    fn the_interval_fits_into_the_limit() {
        assert_eq!(terms(5000, 900), terms(300, 900));
    }

    #[test]
    fn a_later_version_may_say_more() {
        let mut bytes = terms(5000, 20_000).encode().to_vec();
        bytes.push(7);
        assert_eq!(KeepAlive::decode(&bytes), Some(terms(5000, 20_000)));
    }

    #[test]
    fn a_beat_is_due_after_an_interval_without_a_frame() {
        let start = Instant::now();
        let mut pulse = Pulse::new(terms(100, 1000), start);
        pulse.heard(start + MS * 150);
        assert_eq!(pulse.look(start + MS * 99), Due::Nothing);
        assert_eq!(pulse.look(start + MS * 100), Due::Beat);
        // Any frame will do.
        pulse.sent(start + MS * 100);
        assert_eq!(pulse.look(start + MS * 199), Due::Nothing);
        assert_eq!(pulse.look(start + MS * 200), Due::Beat);
    }

    #[test]
    fn silence_is_death_after_the_limit_and_not_before() {
        let start = Instant::now();
        let mut pulse = Pulse::new(terms(100, 1000), start);
        for ms in (25..=1000).step_by(25) {
            let due = pulse.look(start + MS * ms);
            assert!(!matches!(due, Due::Dead(_)), "after {ms} ms");
            if due == Due::Beat {
                pulse.sent(start + MS * ms);
            }
        }
        assert_eq!(pulse.look(start + MS * 1025), Due::Dead(MS * 1025));
        pulse.heard(start + MS * 1030);
        assert_eq!(pulse.look(start + MS * 2030), Due::Beat);
    }

    #[test]
    fn a_side_that_was_stopped_itself_gives_the_peer_its_time() {
        let start = Instant::now();
        let mut pulse = Pulse::new(terms(100, 1000), start);
        let woken = start + MS * 60_000;
        assert_eq!(pulse.look(woken), Due::Beat);
        for ms in (25..=1000).step_by(25) {
            assert!(!matches!(pulse.look(woken + MS * ms), Due::Dead(_)), "after {ms} ms");
        }
        assert_eq!(pulse.look(woken + MS * 1025), Due::Dead(MS * 1025));
    }

    proptest! {
        #[test]
        fn what_was_agreed_reads_back(interval in 1u32..100_000, limit in 3u32..100_000) {
            let agreed = terms(interval, limit);
            prop_assert_eq!(KeepAlive::decode(&agreed.encode()), Some(agreed));
        }

        /// Whatever the looks, beats are no more than the time allows, and a peer that beats is never dead.
        #[test]
        fn beats_are_bounded_by_the_time(gaps in prop::collection::vec(1u32..200, 1..200)) {
            let start = Instant::now();
            let mut pulse = Pulse::new(terms(100, 1000), start);
            let (mut now, mut beats) = (start, 0);
            for gap in gaps {
                now += MS * gap;
                pulse.heard(now);
                match pulse.look(now) {
                    Due::Beat => { beats += 1; pulse.sent(now); }
                    due => prop_assert_eq!(due, Due::Nothing),
                }
            }
            prop_assert!(beats <= (now - start).as_millis() / 100);
        }
    }
}
