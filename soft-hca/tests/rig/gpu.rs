//! A buffer in the memory of the model of a GPU.
use super::RIGHTS;
use super::*;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};

pub(crate) struct Buffer {
    pub(crate) file: File,
    pub(crate) at: *mut u8,
    pub(crate) len: usize,
    pub(crate) mr: *mut ffi::ibv_mr,
}

impl Buffer {
    pub(crate) fn new(nic: &Nic, len: usize) -> Self {
        unsafe {
            let fd = libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC);
            let file = File::from_raw_fd(fd);
            file.set_len(len as u64).unwrap();
            let flags = libc::PROT_READ | libc::PROT_WRITE;
            let at: *mut u8 = libc::mmap(ptr::null_mut(), len, flags, libc::MAP_SHARED, fd, 0).cast();
            let mr = v::reg_dmabuf_mr(nic.pd, 0, len, at.expose_provenance() as u64, file.as_raw_fd(), RIGHTS);
            assert!(!mr.is_null(), "{}", std::io::Error::last_os_error());
            Self { file, at, len, mr }
        }
    }

    pub(crate) fn bytes(&mut self) -> &mut [u8] {
        unsafe { std::slice::from_raw_parts_mut(self.at, self.len) }
    }

    pub(crate) fn sge(&self, offset: usize, len: usize) -> ffi::ibv_sge {
        let addr = self.at.wrapping_add(offset).expose_provenance() as u64;
        ffi::ibv_sge { addr, length: len as u32, lkey: unsafe { (*self.mr).lkey } }
    }

    pub(crate) fn addr(&self) -> u64 {
        self.at.expose_provenance() as u64
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        unsafe {
            assert_eq!(v::dereg_mr(self.mr), 0);
            libc::munmap(self.at.cast(), self.len);
        }
    }
}
