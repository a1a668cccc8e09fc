//! Copying as a NIC writes host memory: whoever watches the target sees aligned 8-byte units, whole, in ascending order.
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// On x86 stores become visible in program order; elsewhere each must be a release.
const STORE: Ordering = if cfg!(target_arch = "x86_64") { Ordering::Relaxed } else { Ordering::Release };

/// Copies `len` bytes. Atomic stores are neither torn, merged, vectorised nor reordered by the compiler; `rep movs` would
/// be faster, but its stores may become visible in any order.
///
/// # Safety
/// `src` is readable and `dst` writable for `len` bytes, and they do not overlap. Others may read and write both meanwhile.
pub unsafe fn visible(dst: *mut u8, src: *const u8, len: usize) {
    let head = dst.align_offset(8).min(len);
    // SAFETY: head <= len.
    unsafe { bytes(dst, src, head) };
    let words = (len - head) / 8;
    let (mut to, mut from) = (dst.wrapping_add(head).cast::<u64>(), src.wrapping_add(head).cast::<u64>());
    for _ in 0..words / 8 {
        for i in 0..8 {
            // SAFETY: inside the len bytes; to is aligned.
            unsafe { word(to.wrapping_add(i), from.wrapping_add(i)) };
        }
        (to, from) = (to.wrapping_add(8), from.wrapping_add(8));
    }
    for i in 0..words % 8 {
        // SAFETY: inside the len bytes; to is aligned.
        unsafe { word(to.wrapping_add(i), from.wrapping_add(i)) };
    }
    let done = head + words * 8;
    // SAFETY: done <= len.
    unsafe { bytes(dst.wrapping_add(done), src.wrapping_add(done), len - done) };
}

/// # Safety
/// `to` is aligned and writable, `from` readable, for 8 bytes each.
#[inline(always)]
unsafe fn word(to: *mut u64, from: *const u64) {
    // SAFETY: the caller's.
    let value = unsafe { from.read_unaligned() };
    // SAFETY: the caller's.
    let target = unsafe { AtomicU64::from_ptr(to) };
    target.store(value, STORE);
}

/// # Safety
/// As [`visible`].
unsafe fn bytes(dst: *mut u8, src: *const u8, len: usize) {
    for i in 0..len {
        // SAFETY: i < len.
        let value = unsafe { src.wrapping_add(i).read() };
        // SAFETY: i < len.
        let target = unsafe { AtomicU8::from_ptr(dst.wrapping_add(i)) };
        target.store(value, STORE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn every_alignment_and_length_is_exact() {
        let src: Vec<u8> = (0..400u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
        for (off, from) in (0..9).flat_map(|a| (0..9).map(move |b| (a, b))) {
            for len in (0..40).chain([63, 64, 65, 127, 128, 129, 255, 256, 300]) {
                let mut dst = vec![0xEEu8; 400];
                // SAFETY: off + len and from + len are below 400.
                unsafe { visible(dst.as_mut_ptr().wrapping_add(off), src[from..].as_ptr(), len) };
                assert_eq!(dst[off..off + len], src[from..from + len]);
                assert!(dst[..off].iter().chain(&dst[off + len..]).all(|&b| b == 0xEE));
            }
        }
    }

    #[test]
    fn a_watcher_sees_words_whole_and_ascending() {
        const WORDS: usize = 4096;
        let dst: Vec<AtomicU64> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    // From the end: once word i is seen in a round, every word before it must be of that round or later.
                    let mut floor = 0;
                    for word in dst.iter().rev() {
                        let seen = word.load(Ordering::Acquire);
                        let (high, low) = (seen >> 32, seen & 0xffff_ffff);
                        assert_eq!(high, low, "torn word {seen:#x}");
                        assert!(low >= floor, "word of round {low} below one of round {floor}");
                        floor = low;
                    }
                }
            });
            for round in 1..400u64 {
                let src = vec![round << 32 | round; WORDS];
                // SAFETY: both hold WORDS words.
                unsafe { visible(dst.as_ptr().cast_mut().cast(), src.as_ptr().cast(), WORDS * 8) };
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
