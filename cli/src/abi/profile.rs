//! NCCL's side of the profiler: takes the events that a plugin reports, checks how it reports them, and adds them up.

use std::collections::HashMap;
use std::ffi::{c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::{Out, PROFILED};

/// Steps of an event, as NCCL numbers them.
const START: c_int = 0;
const STOP: c_int = 1;
const UPDATE: c_int = 2;
const UPDATE_AND_STOP: c_int = 3;

/// What a plugin for InfiniBand says that it is, with the first version of its descriptor.
const IB: i64 = (1 << 16) | 1;
/// An IB plugin's event of a work request: `ncclProfilerNetIbDescr_v1_t`.
#[repr(C)]
struct WorkRequest {
    kind: u8,
    device: u64,
    wr_id: u64,
    opcode: c_int,
    qp_num: c_int,
    length: usize,
}

/// Events of a process.
#[derive(Debug, Default, Clone)]
pub(crate) struct Events {
    /// Bytes of those that have begun and not ended, by their handle.
    open: HashMap<usize, usize>,
    pub(crate) begun: usize,
    /// Of those that have ended.
    pub(crate) bytes: usize,
    /// QPs that they were on.
    pub(crate) qps: Vec<c_int>,
    wrong: Option<String>,
}

impl Events {
    /// Whether each was reported as NCCL wants it, and has ended.
    pub(crate) fn check(&self) -> Result<(), String> {
        match &self.wrong {
            Some(wrong) => Err(wrong.clone()),
            None if self.open.is_empty() => Ok(()),
            None => Err(format!("{} of {} events have not ended", self.open.len(), self.begun)),
        }
    }

    fn take(
        &mut self,
        event: Out,
        step: c_int,
        parent: *mut c_void,
        plugin: i64,
        data: *mut c_void,
    ) -> Result<(), String> {
        // SAFETY: NULL, or a place for one pointer.
        let Some(event) = (unsafe { event.as_mut() }) else {
            return Err("an event has no place for its handle".into());
        };
        match step {
            START => {
                if parent.addr() != PROFILED {
                    return Err(format!("an event is part of {parent:?}, which NCCL did not name"));
                }
                if plugin != IB || data.is_null() {
                    return Err(format!("an event of plugin {plugin:#x} with data at {data:?}"));
                }
                // SAFETY: the descriptor of such a plugin, alive during the call.
                let request = unsafe { &*data.cast::<WorkRequest>() };
                if request.kind != 1 {
                    return Err(format!("an event of kind {}, where 1 is a work request's", request.kind));
                }
                self.begun += 1;
                self.open.insert(self.begun, request.length);
                if !self.qps.contains(&request.qp_num) {
                    self.qps.push(request.qp_num);
                }
                *event = ptr::without_provenance_mut(self.begun);
                Ok(())
            }
            STOP | UPDATE_AND_STOP => match self.open.remove(&event.addr()) {
                Some(bytes) => {
                    self.bytes += bytes;
                    Ok(())
                }
                None => Err(format!("an event ends that is not open: {event:?}")),
            },
            UPDATE => Ok(()),
            step => Err(format!("an event has the step {step}")),
        }
    }
}

/// None: nothing is profiled.
static EVENTS: Mutex<Option<Events>> = Mutex::new(None);

fn events() -> MutexGuard<'static, Option<Events>> {
    EVENTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Takes events from here on.
pub(crate) fn start() {
    *events() = Some(Events::default());
}

/// Those since [`start`].
pub(crate) fn stop() -> Events {
    events().take().unwrap_or_default()
}

/// NCCL's callback. Where nothing is profiled the handle stays as it is.
pub(super) unsafe extern "C" fn callback(
    event: Out,
    step: c_int,
    parent: *mut c_void,
    plugin: i64,
    data: *mut c_void,
) -> c_int {
    if let Some(events) = events().as_mut()
        && let Err(wrong) = events.take(event, step, parent, plugin, data)
    {
        events.wrong.get_or_insert(wrong);
    }
    0
}
