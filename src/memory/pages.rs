//! Memory of our own that a device reads or writes: whole pages, alone in them.
//!
//! After a fork the pages of a registration may be missing in the child (madvise DONTFORK), so nothing else may live in
//! them: no `Vec`, no `Box`.

use std::io;
use std::ptr::{self, NonNull};

/// Zeroed pages, unmapped on drop.
#[derive(Debug)]
pub struct Pages {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; whoever hands it out is responsible for what shares it.
unsafe impl Send for Pages {}
// SAFETY: as above: this type itself never reads or writes the memory.
unsafe impl Sync for Pages {}

impl Pages {
    /// At least `len` bytes, rounded up to whole pages.
    pub fn map(len: usize) -> io::Result<Self> {
        // SAFETY: sysconf has no preconditions.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let len = len.max(1).next_multiple_of(page);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        // SAFETY: a new anonymous mapping touches no existing memory.
        let base = unsafe { libc::mmap(ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, len })
    }

    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    pub fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// Leaves them out of children of fork: else the first to write to a page, this process too, would get another one, and a
    /// device that has it pinned would go on with the old.
    pub fn keep_from_children(&self) {
        // A kernel that refuses changes nothing.
        // SAFETY: whole pages of ours.
        unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, libc::MADV_DONTFORK) };
    }

    pub fn is_empty(&self) -> bool {
        false
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by us, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_that_are_zero() {
        let pages = Pages::map(5000).expect("memory");
        assert_eq!(pages.len() % 4096, 0);
        assert!(pages.len() >= 5000 && pages.address().is_multiple_of(4096));
        // SAFETY: inside the mapping.
        let last = unsafe { pages.base().add(4999) };
        // SAFETY: as above.
        assert_eq!(unsafe { last.read() }, 0);
    }

    #[test]
    fn pages_are_kept_from_children() {
        let pages = Pages::map(3 * 4096).expect("memory");
        let flags = || {
            let maps = std::fs::read_to_string("/proc/self/smaps").expect("a list of mappings");
            let own = maps.split_once(&format!("{:x}-", pages.address())).map(|(_, rest)| rest.to_owned());
            let own = own.unwrap_or_default();
            own.lines().find_map(|line| line.strip_prefix("VmFlags:")).unwrap_or_default().to_owned()
        };
        pages.keep_from_children();
        assert!(flags().split_whitespace().any(|flag| flag == "dc"), "{}", flags());
    }
}
