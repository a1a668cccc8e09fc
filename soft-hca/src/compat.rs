//! What libibverbs exports beside verbs(3): functions for its examples, for librdmacm and for vendors' provider libraries.
//! Programs such as perftest link all of these, so the names have to be there. An adapter in software has neither a kernel
//! driver nor providers: what can be answered is answered, everything else fails where it is called.
use crate::fabric::GidKind;
use crate::verbs;
use ibverbs_sys as ffi;
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint};
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

/// The kind of a GID as sysfs has it: 0 for InfiniBand and RoCE v1, 1 for RoCE v2. An empty entry reads as 0.
///
/// # Safety
/// `context` is an open device's; `kind` is null or writable.
pub unsafe extern "C" fn query_gid_type(
    context: *mut ffi::ibv_context,
    port: u8,
    index: c_uint,
    kind: *mut c_uint,
) -> c_int {
    let mut entry = ffi::ibv_gid_entry::default();
    // SAFETY: the caller's context; the entry is of the size given.
    let result = unsafe { verbs::query_gid_ex(context, port.into(), index, &raw mut entry, 0, size_of_val(&entry)) };
    if kind.is_null() || !matches!(result, 0 | libc::ENODATA) {
        return -1;
    }
    let v2 = result == 0 && entry.gid_type == GidKind::RoceV2 as u32;
    // SAFETY: not null, so the caller's to be written.
    unsafe { kind.write(v2.into()) };
    0
}

/// One line of a file under a folder, without its end; its length, or -1. librdmacm looks for the kernel's side with it.
///
/// # Safety
/// `dir` and `file` are null or C strings; `out` is null or writable for `size` bytes.
pub unsafe extern "C" fn read_sysfs_file(
    dir: *const c_char,
    file: *const c_char,
    out: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: the caller's path.
    let dir = unsafe { path(dir) };
    // SAFETY: the caller's path.
    let file = unsafe { path(file) };
    let (Some(dir), Some(file)) = (dir, file) else { return -1 };
    let Some(room) = size.checked_sub(1).filter(|_| !out.is_null()) else { return -1 };
    let mut text = Vec::new();
    let limit = u64::try_from(room).unwrap_or(u64::MAX);
    if std::fs::File::open(dir.join(file)).and_then(|file| file.take(limit).read_to_end(&mut text)).is_err() {
        return -1;
    }
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    text.push(0);
    // SAFETY: the caller has room for `size` bytes, and at most that many were read, the last one for the end.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr(), out.cast(), text.len()) };
    c_int::try_from(text.len() - 1).unwrap_or(-1)
}

/// # Safety
/// `at` is null or a C string that outlives the result.
unsafe fn path<'a>(at: *const c_char) -> Option<&'a Path> {
    if at.is_null() {
        return None;
    }
    // SAFETY: the caller's string.
    let text = unsafe { CStr::from_ptr(at) };
    Some(Path::new(OsStr::from_bytes(text.to_bytes())))
}

pub extern "C" fn get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// For what returns nothing. A provider that registers stays unused: devices come from the fabric alone.
pub extern "C" fn nothing() {}

/// For requests that are fulfilled by doing nothing.
pub extern "C" fn done() -> c_int {
    0
}

/// For functions that answer a length or -1.
pub extern "C" fn no_length() -> c_int {
    -1
}

/// For names of things that can't be met here.
pub extern "C" fn unnamed() -> *const c_char {
    c"unknown".as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &CStr, file: &CStr, out: &mut [u8]) -> c_int {
        // SAFETY: strings and a buffer of that size.
        unsafe { read_sysfs_file(dir.as_ptr(), file.as_ptr(), out.as_mut_ptr().cast(), out.len()) }
    }

    #[test]
    fn files_are_read_without_their_last_newline() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("board_id"), "SOFT\n").unwrap();
        let c_dir = std::ffi::CString::new(dir.path().to_str().unwrap()).unwrap();
        let mut out = [0xff; 8];
        assert_eq!((read(&c_dir, c"board_id", &mut out), &out[..5]), (4, &b"SOFT\0"[..]));
        // Cut to the room there is, and ended all the same.
        let mut small = [0xff; 3];
        assert_eq!((read(&c_dir, c"board_id", &mut small), small), (2, *b"SO\0"));
        assert_eq!(read(&c_dir, c"absent", &mut out), -1);
        assert_eq!(read(&c_dir, c"board_id", &mut []), -1);
    }
}
