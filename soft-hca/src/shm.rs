//! Shared memory: mappings, the word an engine sleeps on, and byte rings with one writer and one reader each, which may be
//! different processes. The other side is another process of the same user: nothing it writes is trusted beyond that.
use crate::rc::Pieces;
use crate::wire::{Frame, HEADER, SEGMENT};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Offset of the sleep word in an engine's own mapping.
const SLEEP_WORD: usize = 20;

#[derive(Debug)]
pub(crate) struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory, reached through atomics and through the rings below.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    pub(crate) fn base(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Maps `len` bytes of a file; the file keeps its size, or a later access would raise SIGBUS.
    pub(crate) fn of_file(file: &File, len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED, file.as_raw_fd())
    }

    pub(crate) fn anonymous(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED | libc::MAP_ANONYMOUS, -1)
    }

    fn map(len: usize, flags: libc::c_int, fd: libc::c_int) -> io::Result<Self> {
        // SAFETY: a new mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        NonNull::new(at.cast()).map(|at| Self { at, len }).ok_or_else(io::Error::last_os_error)
    }

    pub(crate) fn word32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.len);
        let at = self.at.as_ptr().wrapping_add(offset).cast();
        // SAFETY: inside the mapping, aligned, and only ever reached as an atomic.
        unsafe { AtomicU32::from_ptr(at) }
    }

    pub(crate) fn word64(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.len);
        let at = self.at.as_ptr().wrapping_add(offset).cast();
        // SAFETY: inside the mapping, aligned, and only ever reached as an atomic.
        unsafe { AtomicU64::from_ptr(at) }
    }

    /// 1 while the engine that owns this mapping sleeps.
    pub(crate) fn sleep_word(&self) -> &AtomicU32 {
        self.word32(SLEEP_WORD)
    }

    /// Wakes the engine that owns this mapping, with a system call only if it sleeps.
    pub(crate) fn wake(&self) {
        fence(Ordering::SeqCst);
        let word = self.sleep_word();
        if word.load(Ordering::SeqCst) == 1 && word.swap(0, Ordering::SeqCst) == 1 {
            // SAFETY: the word outlives the call.
            unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), libc::FUTEX_WAKE, 1) };
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length; nothing refers to it any more.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// Layout of a ring's mapping: counters on lines of their own, data behind the first page.
const HEAD: usize = 128;
const TAIL: usize = 192;
const WRITER_WAITS: usize = 256;
pub(crate) const DATA: usize = 4096;

/// What the program's readers may rely on to arrive whole (NCCL's LL128).
const LINE: u64 = 128;
const _: () = assert!(LINE.is_multiple_of(HEADER as u64) && (SEGMENT as u64).is_multiple_of(LINE));

/// One direction of a pair of processes. Payloads start on a line, their headers right before: headers never wrap, and a
/// payload that does is cut between lines. A GPU takes each piece by a copy of its own, which would tear a line cut in two.
#[derive(Debug)]
pub(crate) struct Ring {
    memory: Arc<Mapping>,
    size: u64,
    /// This side's own counter; what the memory holds of it is for the other side.
    mine: u64,
}

fn whole_lines(len: u32) -> u64 {
    (HEADER as u64 + u64::from(len)).next_multiple_of(LINE)
}

impl Ring {
    /// A ring over `DATA + size` bytes, where `size` is a power of two of at least two segments.
    pub(crate) fn new(memory: Arc<Mapping>, size: usize) -> Option<Self> {
        let sound = size.is_power_of_two() && size >= 2 * SEGMENT && DATA + size <= memory.len;
        sound.then(|| Self { memory, size: size as u64, mine: 0 })
    }

    /// For the thread of this process at the ring's other end, where that is a socket: it sleeps on the ring itself.
    pub(crate) fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    fn head(&self) -> &AtomicU64 {
        self.memory.word64(HEAD)
    }
    fn tail(&self) -> &AtomicU64 {
        self.memory.word64(TAIL)
    }

    /// The data at `position`, as at most two pieces.
    fn pieces(&self, position: u64, len: usize) -> Pieces {
        let size = usize::try_from(self.size).unwrap_or(0);
        let start = usize::try_from((position + LINE - HEADER as u64) & (self.size - 1)).unwrap_or(0);
        let first = len.min(size - start);
        let data = self.memory.at.as_ptr().wrapping_add(DATA);
        let mut pieces = Pieces::none();
        pieces.add(data.wrapping_add(start), first);
        pieces.add(data, len - first);
        pieces
    }

    /// Writer: false when there is no room; then the reader will ring when there is.
    pub(crate) fn write(&mut self, frame: &Frame, payload: &Pieces) -> bool {
        let need = whole_lines(frame.payload());
        let room = |tail: u64| self.size.checked_sub(self.mine.wrapping_sub(tail)).is_some_and(|room| room >= need);
        if !room(self.tail().load(Ordering::Acquire)) {
            self.memory.word32(WRITER_WAITS).store(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            if !room(self.tail().load(Ordering::SeqCst)) {
                return false;
            }
        }
        let mut header = frame.encode();
        let header = Pieces::one(header.as_mut_ptr(), HEADER);
        // SAFETY: the reader is past these bytes; the header is ours.
        unsafe { header.copy_to(&self.pieces(self.mine, HEADER)) };
        // SAFETY: as above; the payload was checked by the caller.
        unsafe { payload.copy_to(&self.pieces(self.mine + HEADER as u64, frame.payload() as usize)) };
        self.mine += need;
        self.head().store(self.mine, Ordering::Release);
        true
    }

    /// Writer: has the reader taken everything?
    pub(crate) fn is_drained(&self) -> bool {
        self.tail().load(Ordering::Acquire) == self.mine
    }

    pub(crate) fn has_input(&self) -> bool {
        self.head().load(Ordering::Acquire) != self.mine
    }

    /// Reader: the next frame and where its payload lies. `Err` when the writer wrote what can't be.
    pub(crate) fn read(&self) -> Result<Option<(Frame, Pieces)>, ()> {
        let there = self.head().load(Ordering::Acquire).wrapping_sub(self.mine);
        if there == 0 {
            return Ok(None);
        }
        if there < HEADER as u64 || there > self.size {
            return Err(());
        }
        // Copied before anything in it is looked at: the writer could still change it.
        let mut header = [0u8; HEADER];
        // SAFETY: HEADER bytes of the ring, and our own array.
        unsafe { self.pieces(self.mine, HEADER).copy_to(&Pieces::one(header.as_mut_ptr(), HEADER)) };
        let frame = Frame::decode(&header).ok_or(())?;
        if whole_lines(frame.payload()) > there {
            return Err(());
        }
        Ok(Some((frame, self.pieces(self.mine + HEADER as u64, frame.payload() as usize))))
    }

    /// Reader: done with a frame. True if the writer waits for room.
    pub(crate) fn consume(&mut self, frame: &Frame) -> bool {
        self.mine += whole_lines(frame.payload());
        self.tail().store(self.mine, Ordering::Release);
        fence(Ordering::SeqCst);
        let waits = self.memory.word32(WRITER_WAITS);
        // Half the ring at a time, or writer and reader would wake each other for every frame.
        let room = self.size - self.head().load(Ordering::Relaxed).wrapping_sub(self.mine).min(self.size);
        room >= self.size / 2 && waits.load(Ordering::SeqCst) == 1 && waits.swap(0, Ordering::SeqCst) == 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Kind;

    fn frame(psn: u32, len: u32) -> Frame {
        let (kind, total) = (Kind::Write, u64::from(len));
        Frame {
            kind,
            syndrome: 0,
            mtu: 5,
            solicited: false,
            by_reference: false,
            src: 1,
            dst: 2,
            psn,
            imm: 0,
            rkey: 0,
            len,
            total,
            offset: 0,
            raddr: 0,
        }
    }

    #[test]
    fn frames_of_all_sizes_cross_in_order() {
        let size = 2 * SEGMENT;
        let memory = Arc::new(Mapping::anonymous(DATA + size).unwrap());
        let mut writer = Ring::new(Arc::clone(&memory), size).unwrap();
        let mut reader = Ring::new(memory, size).unwrap();
        let len_of = |i: u32| (i * 7919) % 65537;
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..500u32 {
                    let mut data = vec![u8::try_from(i % 251).unwrap(); len_of(i) as usize];
                    let payload = Pieces::one(data.as_mut_ptr(), data.len());
                    while !writer.write(&frame(i, len_of(i)), &payload) {
                        std::thread::yield_now();
                    }
                }
            });
            for i in 0..500u32 {
                let (frame, data) = loop {
                    match reader.read().unwrap() {
                        Some(found) => break found,
                        None => std::thread::yield_now(),
                    }
                };
                assert_eq!((frame.psn, frame.len), (i, len_of(i)));
                let mut got = vec![0u8; frame.len as usize];
                // SAFETY: the frame is not consumed yet; got is ours.
                unsafe { data.copy_to(&Pieces::one(got.as_mut_ptr(), got.len())) };
                assert!(got.iter().all(|&b| u32::from(b) == i % 251));
                reader.consume(&frame);
            }
        });
    }

    #[test]
    fn no_line_of_a_payload_is_cut_in_two() {
        let size = 2 * SEGMENT;
        let memory = Arc::new(Mapping::anonymous(DATA + size).unwrap());
        let mut writer = Ring::new(Arc::clone(&memory), size).unwrap();
        let mut reader = Ring::new(memory, size).unwrap();
        let mut cut = 0;
        for len in (0..2000u32).map(|i| i * 7919 % 65537) {
            let mut data = vec![0; len as usize];
            assert!(writer.write(&frame(1, len), &Pieces::one(data.as_mut_ptr(), data.len())));
            let (frame, pieces) = reader.read().unwrap().unwrap();
            let lens: Vec<_> = pieces.iter().map(|(_, len, _)| len).collect();
            assert_eq!(lens.iter().sum::<usize>(), data.len());
            if let [first, _] = lens[..] {
                assert!(first.is_multiple_of(128), "{lens:?}");
                cut += 1;
            }
            reader.consume(&frame);
        }
        assert!(cut > 100, "{cut}");
    }

    #[test]
    fn a_writer_that_lies_is_cut_off() {
        let size = 2 * SEGMENT;
        let memory = Arc::new(Mapping::anonymous(DATA + size).unwrap());
        let reader = Ring::new(Arc::clone(&memory), size).unwrap();
        memory.word64(HEAD).store(1 << 40, Ordering::Relaxed);
        assert!(reader.read().is_err(), "more than the ring holds");
        memory.word64(HEAD).store(128, Ordering::Relaxed);
        assert!(reader.read().is_err(), "no frame");
        let mut writer = Ring::new(Arc::clone(&memory), size).unwrap();
        let mut data = [0u8; 4096];
        assert!(writer.write(&frame(1, 4096), &Pieces::one(data.as_mut_ptr(), 4096)));
        memory.word64(HEAD).store(128, Ordering::Relaxed);
        assert!(reader.read().is_err(), "a payload that is not all there");
    }
}
