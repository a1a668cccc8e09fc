//! Devices by NCCL's index: those that were found, then those that NCCL has fused from them.
//!
//! NCCL fuses devices once a load of the plugin and then counts what there is. It may unload the plugin and load it again,
//! with the library and this list still in place; or keep the plugin, and count on what it fused before. What tells the two
//! apart is what it does next. So after an init that begins anew, fused devices are hidden until NCCL uses one by its index
//! (it kept the plugin) or fuses again (it forgot them).

use std::ffi::c_int;
use std::sync::{Arc, Mutex, PoisonError};

use super::device::{Device, MAX_DEVICES};
use super::{Code, NetError};

#[derive(Debug)]
pub(super) struct Devices {
    found: Vec<Arc<Device>>,
    fused: Mutex<Fused>,
}

#[derive(Debug, Default)]
struct Fused {
    /// All that were ever made; they stay, as NCCL may hold their names.
    made: Vec<Arc<Device>>,
    /// In the order of NCCL's indices.
    known: Vec<Arc<Device>>,
    hidden: bool,
}

impl Devices {
    pub(super) fn new(found: Vec<Device>) -> Self {
        Self { found: found.into_iter().map(Arc::new).collect(), fused: Mutex::default() }
    }

    /// NCCL begins anew, without a communicator.
    pub(super) fn begin(&self) {
        self.fused().hidden = true;
    }

    pub(super) fn count(&self) -> usize {
        let fused = self.fused();
        self.found.len() + if fused.hidden { 0 } else { fused.known.len() }
    }

    /// A device by NCCL's index.
    pub(super) fn get(&self, dev: c_int) -> Result<Arc<Device>, NetError> {
        let index = usize::try_from(dev).unwrap_or(usize::MAX);
        if let Some(found) = self.found.get(index) {
            return Ok(Arc::clone(found));
        }
        let mut fused = self.fused();
        match index.checked_sub(self.found.len()).and_then(|i| fused.known.get(i).cloned()) {
            Some(device) => {
                fused.hidden = false;
                Ok(device)
            }
            None => {
                let count = self.found.len() + fused.known.len();
                Err(NetError::misuse(&format!("device {dev}; there are {count}")))
            }
        }
    }

    /// One device of several found ones; its index.
    pub(super) fn fuse(&self, members: &[c_int]) -> Result<usize, NetError> {
        let refused =
            |why: &str| NetError::new(Code::InvalidUsage, format!("devices {members:?} are not fused: {why}"));
        let mut parts = Vec::with_capacity(members.len());
        for &dev in members {
            let index = usize::try_from(dev).unwrap_or(usize::MAX);
            let device = self.found.get(index).ok_or_else(|| refused(&format!("{dev} is no device of its own")))?;
            parts.push((dev, Arc::clone(device)));
        }
        if let [(dev, _)] = parts[..] {
            // It is there already.
            return usize::try_from(dev).map_err(|e| refused(&e.to_string()));
        }
        let mut fused = self.fused();
        if std::mem::take(&mut fused.hidden) {
            fused.known.clear();
        }
        if let Some(i) = fused.known.iter().position(|d| d.parts == members) {
            return Ok(self.found.len() + i);
        }
        let index = self.found.len() + fused.known.len();
        if index >= MAX_DEVICES {
            return Err(refused(&format!("NCCL takes {MAX_DEVICES} devices")));
        }
        let device = match fused.made.iter().find(|d| d.parts == members) {
            Some(made) => Arc::clone(made),
            None => {
                let device = Arc::new(Device::fused(&parts).map_err(|why| refused(&why))?);
                fused.made.push(Arc::clone(&device));
                device
            }
        };
        tracing::info!(target: "init", "device {index}, fused: {device}");
        fused.known.push(device);
        Ok(index)
    }

    fn fused(&self) -> std::sync::MutexGuard<'_, Fused> {
        self.fused.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use crate::net::tests::engine;

    #[test]
    fn a_fused_device_has_what_its_parts_have_together() {
        let engine = engine(&[("NCCL_IB_HCA", "soft_0:1:7:0,soft_1:1:7:1,soft_2:1:8:0")]);
        assert_eq!(engine.device_count(), 3);
        assert_eq!(engine.fuse(&[0, 1]).expect("fused"), 3);
        assert_eq!(engine.device_count(), 4);
        let (whole, part) = (engine.device(3).expect("fused"), engine.device(0).expect("found"));
        assert_eq!(whole.name.as_c_str(), c"soft_0+soft_1");
        assert_eq!((whole.speed, whole.rails.len(), whole.parts.as_slice()), (2 * part.speed, 2, &[0, 1][..]));
        assert_eq!((part.rail, part.plane, engine.device(1).expect("found").plane), (Some(7), Some(0), Some(1)));
        // What is equal stays; a set of planes is a plane of its own.
        assert_eq!((whole.rail, whole.plane), (Some(7), Some(1 << 14 | 0b11)));
        assert_eq!(engine.fuse(&[0, 2]).expect("fused"), 4);
        let other = engine.device(4).expect("fused");
        assert_eq!((other.rail, other.plane, other.max_comms), (None, Some(0), 2));
        // The same again is the same.
        assert_eq!(engine.fuse(&[0, 1]).expect("fused"), 3);
        // One alone is there already.
        assert_eq!(engine.fuse(&[2]).expect("itself"), 2);
    }

    #[test]
    fn what_can_not_be_fused_is_refused() {
        let engine = engine(&[]);
        for (members, why) in [
            (&[][..], "none"),
            (&[0, 0], "twice"),
            (&[0, 3], "3 is no device of its own"),
            (&[-1, 0], "-1 is no device of its own"),
        ] {
            let text = engine.fuse(members).expect_err("refused").text;
            assert!(text.contains(why), "{text}");
        }
        engine.fuse(&[0, 1]).expect("fused");
        let text = engine.fuse(&[3, 2]).expect_err("a fused part").text;
        assert!(text.contains("3 is no device of its own"), "{text}");
        let off = super::super::tests::engine(&[("NCCL_IB_MERGE_NICS", "0")]);
        let text = off.fuse(&[0, 1]).expect_err("switched off").text;
        assert!(text.contains("NCCL_IB_MERGE_NICS"), "{text}");
        assert_eq!(off.device_count(), 3);
    }

    #[test]
    fn a_plugin_that_is_loaded_again_begins_with_what_was_found() {
        let engine = engine(&[]);
        engine.fuse(&[0, 1]).expect("fused");
        engine.fuse(&[1, 2]).expect("fused");
        engine.devices.begin();
        assert_eq!(engine.device_count(), 3);
        assert_eq!(engine.fuse(&[1, 2]).expect("fused again, in another order"), 3);
        assert_eq!(engine.device(3).expect("fused").name.as_c_str(), c"soft_1+soft_2");
        assert_eq!(engine.device_count(), 4);
        engine.device(4).expect_err("forgotten");
    }

    #[test]
    fn a_plugin_that_nccl_kept_keeps_its_fused_devices() {
        let engine = engine(&[]);
        engine.fuse(&[0, 1]).expect("fused");
        engine.devices.begin();
        assert_eq!(engine.device(3).expect("used by its index").name.as_c_str(), c"soft_0+soft_1");
        assert_eq!(engine.device_count(), 4);
    }
}
