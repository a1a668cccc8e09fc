//! Codes in words, and link rates: the functions of libibverbs that need no device.
use std::ffi::{CStr, c_char, c_int};

fn pick(names: &'static [&'static CStr], code: c_int, otherwise: &'static CStr) -> *const c_char {
    usize::try_from(code).ok().and_then(|code| names.get(code)).unwrap_or(&otherwise).as_ptr()
}

pub extern "C" fn wc_status_str(status: c_int) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"success",
        c"local length error",
        c"local QP operation error",
        c"local EE context operation error",
        c"local protection error",
        c"work request flushed",
        c"memory window bind error",
        c"bad response",
        c"local access error",
        c"remote invalid request",
        c"remote access error",
        c"remote operation error",
        c"transport retries exhausted",
        c"receiver-not-ready retries exhausted",
        c"local RDD violation",
        c"remote invalid RD request",
        c"operation aborted",
        c"invalid EE context number",
        c"invalid EE context state",
        c"fatal error",
        c"response timeout",
        c"general error",
    ];
    pick(NAMES, status, c"unknown status")
}

pub extern "C" fn event_type_str(event: c_int) -> *const c_char {
    const NAMES: &[&CStr] = &[
        c"completion queue overrun",
        c"queue pair: fatal error",
        c"queue pair: invalid request",
        c"queue pair: access violation",
        c"communication established",
        c"send queue drained",
        c"path migrated",
        c"path migration failed",
        c"device: fatal error",
        c"port is up",
        c"port is down",
        c"LID changed",
        c"P_Key table changed",
        c"subnet manager changed",
        c"shared receive queue: error",
        c"shared receive queue: limit reached",
        c"last work request reached",
        c"client reregistration",
        c"GID table changed",
        c"work queue: fatal error",
    ];
    pick(NAMES, event, c"unknown event")
}

pub extern "C" fn port_state_str(state: c_int) -> *const c_char {
    const NAMES: &[&CStr] =
        &[c"no change", c"PORT_DOWN", c"PORT_INIT", c"PORT_ARMED", c"PORT_ACTIVE", c"PORT_ACTIVE_DEFER"];
    pick(NAMES, state, c"invalid state")
}

pub extern "C" fn node_type_str(kind: c_int) -> *const c_char {
    const NAMES: &[&CStr] =
        &[c"unknown", c"channel adapter", c"switch", c"router", c"RNIC", c"usNIC", c"usNIC UDP", c"unspecified"];
    pick(NAMES, kind, c"unknown")
}

/// `enum ibv_rate` code, Mb/s on the wire, multiple of 2.5 Gb/s (-1 where it is none).
const RATES: [(c_int, c_int, c_int); 22] = [
    (2, 2500, 1),
    (5, 5000, 2),
    (3, 10000, 4),
    (6, 20000, 8),
    (4, 30000, 12),
    (7, 40000, 16),
    (8, 60000, 24),
    (9, 80000, 32),
    (10, 120_000, 48),
    (11, 14062, -1),
    (12, 56250, -1),
    (13, 112_500, -1),
    (14, 168_750, -1),
    (15, 25781, -1),
    (16, 103_125, -1),
    (17, 206_250, -1),
    (18, 309_375, -1),
    (19, 28125, 11),
    (20, 50000, 20),
    (21, 400_000, 160),
    (22, 600_000, 240),
    (23, 800_000, 320),
];

pub extern "C" fn rate_to_mbps(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.1)
}

/// 0 is IBV_RATE_MAX.
pub extern "C" fn mbps_to_rate(mbps: c_int) -> c_int {
    RATES.iter().find(|entry| entry.1 == mbps).map_or(0, |entry| entry.0)
}

pub extern "C" fn rate_to_mult(rate: c_int) -> c_int {
    RATES.iter().find(|entry| entry.0 == rate).map_or(-1, |entry| entry.2)
}

pub extern "C" fn mult_to_rate(mult: c_int) -> c_int {
    RATES.iter().find(|entry| entry.2 == mult && mult > 0).map_or(0, |entry| entry.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_rates() {
        // SAFETY: static strings.
        let text = |at| unsafe { CStr::from_ptr(at) }.to_str().unwrap();
        assert_eq!(text(wc_status_str(12)), "transport retries exhausted");
        assert_eq!(text(wc_status_str(-1)), "unknown status");
        assert_eq!(text(event_type_str(10)), "port is down");
        assert_eq!(text(port_state_str(4)), "PORT_ACTIVE");
        assert_eq!((rate_to_mbps(16), mbps_to_rate(103_125), rate_to_mult(3), mult_to_rate(4)), (103_125, 16, 4, 3));
        assert_eq!((rate_to_mbps(99), rate_to_mult(99), mult_to_rate(-1)), (-1, -1, 0));
    }
}
