//! The PCIe link of a function: as it was trained, and as it could be.

use std::fmt;

use serde::Serialize;

use super::function::Function;

/// A speed and a width.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lanes {
    /// 10^9 transfers a second, of each lane.
    pub gt_s: f64,
    pub width: u32,
}

impl Lanes {
    fn read(function: &Function, which: &str) -> Option<Self> {
        // "16.0 GT/s PCIe"; "Unknown" where there is no link.
        let speed = function.text(&format!("{which}_link_speed"))?;
        let gt_s: f64 = speed.split_whitespace().next()?.parse().ok()?;
        let width: u32 = function.text(&format!("{which}_link_width"))?.parse().ok()?;
        (gt_s > 0.0 && width > 0).then_some(Self { gt_s, width })
    }

    /// 10^9 bits a second in one direction, without the line code, with the headers of packets.
    pub fn gbps(self) -> f64 {
        let code = match self.gt_s {
            g if g <= 5.0 => 8.0 / 10.0,
            g if g <= 32.0 => 128.0 / 130.0,
            // Flits: 236 of 256 bytes are packets.
            _ => 236.0 / 256.0,
        };
        self.gt_s * f64::from(self.width) * code
    }

    fn least(self, other: Self) -> Self {
        Self { gt_s: self.gt_s.min(other.gt_s), width: self.width.min(other.width) }
    }
}

impl fmt::Display for Lanes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} GT/s x{}", self.gt_s, self.width)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Link {
    pub now: Lanes,
    /// What the function can.
    pub most: Lanes,
    /// What the bridge above it can, where it says so.
    pub slot: Option<Lanes>,
}

impl Link {
    pub fn read(function: &Function) -> Option<Self> {
        let now = Lanes::read(function, "current")?;
        // Virtual functions and some virtual machines say only what is.
        let most = Lanes::read(function, "max").unwrap_or(now);
        let slot = function.parent().and_then(|bridge| Lanes::read(&bridge, "max"));
        Some(Self { now, most, slot })
    }

    /// What both ends can.
    fn possible(&self) -> Lanes {
        self.slot.map_or(self.most, |slot| slot.least(self.most))
    }

    /// It runs slower or narrower than both ends can.
    pub fn trained_low(&self) -> bool {
        let possible = self.possible();
        self.now.gt_s < possible.gt_s || self.now.width < possible.width
    }

    /// As [`Self::trained_low`], of the width alone: a GPU at rest lowers the speed by itself.
    pub fn trained_narrow(&self) -> bool {
        self.now.width < self.possible().width
    }

    /// What limits a port of this speed to how many Gb/s, if the link does.
    pub fn limits(&self, port_gbps: f64) -> Option<f64> {
        Some(self.now.gbps()).filter(|gbps| *gbps < port_gbps)
    }
}

impl fmt::Display for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PCIe {}", self.now)?;
        if self.now != self.most {
            write!(f, " of {}", self.most)?;
        }
        match self.slot {
            Some(slot) if slot.least(self.most) != self.most => write!(f, " (slot: {slot})"),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::fake::Fake;

    const PATH: &str = "pci0000:80/0000:80:01.0/0000:81:00.0";

    fn link(files: &[(&str, &str)]) -> Option<Link> {
        let fake = Fake::new();
        fake.nic(PATH, "0\n").function(PATH, files);
        Link::read(&Function::at(fake.root(), &format!("/sys/devices/{PATH}")).expect("there"))
    }

    /// V17.
    #[test]
    fn half_the_lanes_limit_a_port() {
        let low = link(&[("current_link_width", "8\n")]).expect("a link");
        assert!(low.trained_low() && low.trained_narrow());
        assert!((low.limits(200.0).expect("it does") - 126.03).abs() < 0.01);
        assert_eq!(low.limits(100.0), None);
        assert_eq!(low.to_string(), "PCIe 16 GT/s x8 of 16 GT/s x16");
        let good = link(&[]).expect("a link");
        assert!(!good.trained_low() && good.limits(200.0).is_none() && good.limits(400.0).is_some());
    }

    #[test]
    fn line_codes() {
        for (gt_s, gbps) in [(2.5, 2.0), (5.0, 4.0), (8.0, 7.88), (16.0, 15.75), (32.0, 31.51), (64.0, 59.0)] {
            assert!((Lanes { gt_s, width: 1 }.gbps() - gbps).abs() < 0.01, "{gt_s}");
        }
    }

    #[test]
    fn a_slot_that_can_no_more_is_not_badly_trained() {
        let fake = Fake::new();
        let slot = [("max_link_speed", "8.0 GT/s PCIe\n"), ("max_link_width", "16\n")];
        fake.nic(PATH, "0\n")
            .function("pci0000:80/0000:80:01.0", &slot)
            .function(PATH, &[("current_link_speed", "8.0 GT/s PCIe\n")]);
        let link =
            Link::read(&Function::at(fake.root(), &format!("/sys/devices/{PATH}")).expect("there")).expect("one");
        assert!(!link.trained_low() && link.limits(200.0).is_some());
        assert_eq!(link.to_string(), "PCIe 8 GT/s x16 of 16 GT/s x16 (slot: 8 GT/s x16)");
    }

    #[test]
    fn a_link_that_is_not_shown() {
        assert_eq!(link(&[("current_link_speed", "Unknown\n")]), None);
        assert_eq!(link(&[("current_link_width", "0\n")]), None);
        let hidden = link(&[("max_link_speed", "\n")]).expect("what is");
        assert!(!hidden.trained_low());
    }
}
