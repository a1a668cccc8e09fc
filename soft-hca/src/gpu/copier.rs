//! Copies gathered into batches. One batch fills while up to `DEPTH` others are under way, so that a busy adapter starts few
//! large batches and an idle one starts each copy at once.
use super::{Device, Item, Mem};
use crate::rc::Pieces;
use crate::wire::SEGMENT;
use std::time::{Duration, Instant};

/// Copies of a batch at most.
pub(super) const ITEMS: usize = 64;
/// Batches under way at most.
const DEPTH: u64 = 3;
/// The pool: chunks through which host memory reaches the GPU, the last of them for `stage`.
pub(super) const POOL: usize = CHUNKS * SEGMENT;
const CHUNKS: usize = 128;
/// A batch that takes longer will not end: the GPU has failed, or a program occupies all of it for good.
const STUCK: Duration = Duration::from_secs(20);
/// How often a batch that is late is looked into.
const LATE: Duration = Duration::from_millis(50);

/// A batch of a GPU. Batches land in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ticket {
    pub(crate) gpu: u8,
    pub(crate) batch: u64,
}

/// A part of the pool that a copy uses, and where its bytes go once they are in it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Unload {
    chunk: usize,
    target: Option<(*mut u8, usize)>,
}

impl Unload {
    /// Are bytes yet to be brought to their place?
    pub(crate) fn is_delivery(&self) -> bool {
        self.target.is_some()
    }
}

// SAFETY: the target is checked memory; who holds the engine's lock uses it.
unsafe impl Send for Unload {}

#[derive(Debug)]
pub(crate) enum Copied {
    /// Done, or there was nothing to do.
    Now,
    /// Done when the ticket is; then `unload`.
    Later(Ticket, Vec<Unload>),
    /// No room at the moment; nothing was started.
    Busy,
    /// It can never be done.
    Failed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Pending,
    Done,
    Failed,
}

pub(crate) struct Copier {
    gpu: u8,
    device: Box<dyn Device>,
    filling: Vec<Item>,
    /// The last batch that was started.
    started: u64,
    /// When the oldest batch under way was last known not to be late.
    since: Instant,
    seen: u64,
    begun: Instant,
    free: Vec<usize>,
    failed: bool,
}

impl Copier {
    pub(super) fn new(gpu: u8, device: Box<dyn Device>) -> Self {
        let now = Instant::now();
        let free = (0..CHUNKS - 1).rev().collect();
        let (started, seen) = (device.done(), device.done());
        Self { gpu, device, filling: Vec::new(), started, since: now, seen, begun: now, free, failed: false }
    }

    pub(super) fn device(&self) -> &dyn Device {
        &*self.device
    }

    pub(super) fn is_sound(&self) -> bool {
        !self.failed && self.filling.is_empty() && self.device.check().is_ok() && self.device.done() == self.started
    }

    fn chunk(&self, index: usize) -> *mut u8 {
        self.device.pool().wrapping_add(index * SEGMENT)
    }

    pub(super) fn copy(&mut self, from: &Pieces, to: &Pieces, not_with: Option<Ticket>) -> Copied {
        if self.failed {
            return Copied::Failed;
        }
        let parts: Vec<_> = from.pairs(to).collect();
        let pooled = parts.iter().filter(|part| part.is_mixed()).count();
        let filling = Ticket { gpu: self.gpu, batch: self.started + 1 };
        if self.filling.len() + parts.len() > ITEMS || not_with == Some(filling) && !self.filling.is_empty() {
            self.submit();
            if !self.filling.is_empty() {
                return Copied::Busy;
            }
        }
        if pooled > self.free.len() || parts.len() > ITEMS || parts.iter().any(|part| part.len > SEGMENT) {
            self.submit();
            return Copied::Busy;
        }
        let mut unload = Vec::new();
        for part in parts {
            let (mut src, mut dst) = (part.src, part.dst);
            if part.is_mixed() {
                let Some(chunk) = self.free.pop() else { return Copied::Failed };
                let at = self.chunk(chunk);
                if part.src_mem == Mem::Host {
                    // SAFETY: a checked source, and a chunk of our own with room for a segment.
                    unsafe { std::ptr::copy_nonoverlapping(part.src, at, part.len) };
                    src = at;
                    unload.push(Unload { chunk, target: None });
                } else {
                    dst = at;
                    unload.push(Unload { chunk, target: Some((part.dst, part.len)) });
                }
            }
            self.filling.push(item(dst, src, part.len));
        }
        Copied::Later(Ticket { gpu: self.gpu, batch: self.started + 1 }, unload)
    }

    pub(super) fn submit(&mut self) {
        if self.filling.is_empty() {
            return;
        }
        let under_way = self.started - self.device.done().min(self.started);
        if under_way < DEPTH && self.device.accepts(&self.filling) {
            self.launch();
        }
    }

    fn launch(&mut self) {
        if self.failed {
            self.filling.clear();
            return;
        }
        if self.started == self.device.done() {
            (self.since, self.begun) = (Instant::now(), Instant::now());
        }
        if let Err(error) = self.device.launch(&self.filling, self.started + 1) {
            self.fail(&error);
        }
        self.started += 1;
        self.filling.clear();
    }

    fn fail(&mut self, error: &str) {
        if !self.failed {
            eprintln!("soft-hca: GPU {}: {error}; nothing more goes to or from its memory", self.gpu);
            // What has not begun must not begin later, when its memory is somebody else's.
            self.device.abandon();
        }
        self.failed = true;
    }

    pub(super) fn progress(&mut self, batch: u64) -> Progress {
        let done = self.device.done();
        if done >= batch {
            return Progress::Done;
        }
        if self.failed {
            return Progress::Failed;
        }
        if batch > self.started {
            self.submit();
        }
        if let Err(error) = self.device.poll() {
            self.fail(&error);
        }
        if done != self.seen {
            self.seen = done;
            (self.since, self.begun) = (Instant::now(), Instant::now());
        } else if self.since.elapsed() > LATE {
            self.since = Instant::now();
            let late = self.begun.elapsed() > STUCK;
            match self.device.check() {
                Err(error) => self.fail(&error),
                Ok(()) if late => self.fail(&format!("a copy is not done after {} s", STUCK.as_secs())),
                Ok(()) => {}
            }
        }
        Progress::Pending
    }

    /// # Safety
    /// The targets are checked host memory that is still registered.
    pub(super) unsafe fn unload(&mut self, unload: &[Unload], deliver: bool) {
        for part in unload {
            if let Some((target, len)) = part.target.filter(|_| deliver) {
                // SAFETY: a chunk of our own; the rest is the caller's.
                unsafe { crate::copy::visible(target, self.chunk(part.chunk), len) };
            }
            self.free.push(part.chunk);
        }
    }

    pub(super) fn stage(&mut self, source: &Pieces) -> Option<Pieces> {
        let at = self.chunk(CHUNKS - 1);
        if source.iter().any(|(_, _, mem)| mem.gpu().is_some_and(|gpu| gpu != self.gpu)) {
            return None; // this GPU may not reach that one
        }
        let mut target = Pieces::none();
        target.add_in(Mem::Gpu { gpu: self.gpu, share: 0 }, at, SEGMENT);
        let mut len = 0;
        for part in source.pairs(&target) {
            len += part.len;
            if part.src_mem == Mem::Host {
                // SAFETY: a checked source, and our own chunk.
                unsafe { std::ptr::copy_nonoverlapping(part.src, part.dst, part.len) };
                continue;
            }
            while self.filling.len() == ITEMS {
                if self.progress(self.started) == Progress::Failed {
                    return None;
                }
                self.submit();
            }
            self.filling.push(item(part.dst, part.src, part.len));
        }
        let batch = self.started + u64::from(!self.filling.is_empty());
        loop {
            match self.progress(batch) {
                Progress::Done => return Some(Pieces::one(at, len)),
                Progress::Failed => return None,
                Progress::Pending => std::hint::spin_loop(),
            }
        }
    }
}

fn item(dst: *mut u8, src: *mut u8, len: usize) -> Item {
    Item { dst: dst.expose_provenance() as u64, src: src.expose_provenance() as u64, len: len as u64 }
}
