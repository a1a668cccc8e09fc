//! What the codes of a port mean (`<infiniband/verbs.h>`, InfiniBand specification 14.2.5.6), and whether it is usable.

use std::fmt;

/// What a port's link is; the link layer decides, never the LID.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkLayer {
    InfiniBand,
    Ethernet,
    Other(u8),
}

impl LinkLayer {
    /// From ibv_port_attr.link_layer; unspecified is InfiniBand.
    pub fn from_code(code: u8) -> Self {
        match code {
            0 | 1 => Self::InfiniBand,
            2 => Self::Ethernet,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for LinkLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InfiniBand => f.write_str("InfiniBand"),
            Self::Ethernet => f.write_str("RoCE"),
            Self::Other(code) => write!(f, "link layer {code}"),
        }
    }
}

/// Speed of a port, Mb/s, from ibv_port_attr's codes (active_speed has 8 bits, active_speed_ex of newer libraries more). An
/// unknown code counts as the slowest: over-reporting a speed makes NCCL prefer the network to NVLink.
pub fn speed_mbps(active_speed: impl Into<u32>, active_width: u8) -> u32 {
    let lane = match active_speed.into() {
        2 => 5_000,
        4 | 8 => 10_000,
        16 => 14_000,
        32 => 25_000,
        64 => 50_000,
        128 => 100_000,
        256 => 200_000,
        _ => 2_500,
    };
    let lanes = match active_width {
        2 => 4,
        4 => 8,
        8 => 12,
        16 => 2,
        _ => 1,
    };
    lane * lanes
}

/// Bytes of an IBV_MTU_* code.
pub fn mtu_bytes(code: u32) -> u32 {
    if (1..=5).contains(&code) { 128 << code } else { 0 }
}

/// Why a port can't be used, from its state, physical state and link layer; None if it can.
pub fn why_left_out(state: u32, phys_state: u8, link_layer: u8) -> Option<String> {
    let state_name = match state {
        1 => "DOWN",
        2 => "INIT",
        3 => "ARMED",
        4 => "ACTIVE",
        5 => "ACTIVE_DEFER",
        _ => "unknown",
    };
    let phys_name = match phys_state {
        1 => "Sleep",
        2 => "Polling",
        3 => "Disabled",
        4 => "PortConfigurationTraining",
        5 => "LinkUp",
        6 => "LinkErrorRecovery",
        7 => "PhyTest",
        _ => "unknown",
    };
    if state != 4 {
        let hint = match state {
            2 => ": no subnet manager has configured it",
            1 => ": no link; check cable and switch port",
            _ => "",
        };
        return Some(format!("port state {state_name} ({state}), physical state {phys_name} ({phys_state}){hint}"));
    }
    // 0: software devices and old drivers do not fill it.
    if phys_state != 5 && phys_state != 0 {
        return Some(format!("port state ACTIVE, but physical state {phys_name} ({phys_state})"));
    }
    match LinkLayer::from_code(link_layer) {
        LinkLayer::Other(code) => Some(format!("link layer {code} is neither InfiniBand nor Ethernet")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_speed_and_width_code() {
        let lanes = [(1, 1), (2, 4), (4, 8), (8, 12), (16, 2)];
        let speeds = [
            (1u32, 2_500),
            (2, 5_000),
            (4, 10_000),
            (8, 10_000),
            (16, 14_000),
            (32, 25_000),
            (64, 50_000),
            (128, 100_000),
            (256, 200_000),
        ];
        for (speed, mbps) in speeds {
            for (width, n) in lanes {
                assert_eq!(speed_mbps(speed, width), mbps * n, "speed {speed} width {width}");
            }
        }
        // NDR 4x and an unknown code.
        assert_eq!(speed_mbps(128u8, 2), 400_000);
        assert_eq!(speed_mbps(0u8, 0), 2_500);
    }

    #[test]
    fn mtu_codes() {
        assert_eq!([1, 2, 3, 4, 5].map(mtu_bytes), [256, 512, 1024, 2048, 4096]);
        assert_eq!(mtu_bytes(9), 0);
    }

    #[test]
    fn reasons_name_both_states() {
        assert_eq!(why_left_out(4, 5, 1), None);
        assert_eq!(why_left_out(4, 0, 2), None);
        let init = why_left_out(2, 5, 1).expect("left out");
        assert!(init.contains("INIT") && init.contains("subnet manager"), "{init}");
        let disabled = why_left_out(4, 3, 2).expect("left out");
        assert!(disabled.contains("ACTIVE") && disabled.contains("Disabled"), "{disabled}");
        assert!(why_left_out(4, 5, 7).is_some());
    }

    /// Ethernet ports of some NICs report a LID that is not 0.
    #[test]
    fn the_link_layer_decides() {
        assert_eq!(LinkLayer::from_code(2), LinkLayer::Ethernet);
        assert_eq!(LinkLayer::from_code(0), LinkLayer::InfiniBand);
    }
}
