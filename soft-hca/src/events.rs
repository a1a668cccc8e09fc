//! Events that a thread can wait for: asynchronous ones of a context, completion events of a channel. The descriptor is an
//! eventfd that counts the queue, so poll, O_NONBLOCK and blocking reads work as with a kernel's.
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::Mutex;

/// The address of an `ibv_cq`, kept as a number: this side never looks into it.
pub(crate) type CqHandle = usize;
pub(crate) type Channel = EventQueue<CqHandle>;

/// An asynchronous event: `IBV_EVENT_*` and the object's address, or the port number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AsyncEvent {
    pub(crate) kind: u32,
    pub(crate) element: usize,
}

#[derive(Debug)]
pub(crate) struct EventQueue<T> {
    fd: OwnedFd,
    queue: Mutex<VecDeque<T>>,
}

impl<T: Copy + PartialEq> EventQueue<T> {
    pub(crate) fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_SEMAPHORE) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just opened, owned by nobody else.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { fd, queue: Mutex::default() })
    }

    pub(crate) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    pub(crate) fn push(&self, event: T) {
        if let Ok(mut queue) = self.queue.lock() {
            queue.push_back(event);
        }
        let one = 1u64;
        // SAFETY: eight readable bytes. It can't block before 2^64 - 1 events wait.
        unsafe { libc::write(self.fd(), (&raw const one).cast(), 8) };
    }

    /// Blocks unless the user set O_NONBLOCK on the descriptor.
    pub(crate) fn take(&self) -> io::Result<T> {
        loop {
            let mut one = 0u64;
            // SAFETY: eight writable bytes.
            let read = unsafe { libc::read(self.fd(), (&raw mut one).cast(), 8) };
            if read != 8 {
                return Err(io::Error::last_os_error());
            }
            // Empty where the event was withdrawn: its count is used up now.
            if let Some(event) = self.queue.lock().ok().and_then(|mut queue| queue.pop_front()) {
                return Ok(event);
            }
        }
    }

    /// Withdraws events of an object that goes away.
    pub(crate) fn withdraw(&self, gone: impl Fn(&T) -> bool) {
        if let Ok(mut queue) = self.queue.lock() {
            queue.retain(|event| !gone(event));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_come_in_order_and_withdrawn_ones_never() {
        let events = EventQueue::new().unwrap();
        // SAFETY: no pointers.
        assert_eq!(unsafe { libc::fcntl(events.fd(), libc::F_SETFL, libc::O_NONBLOCK) }, 0);
        for event in [1, 2, 3] {
            events.push(event);
        }
        events.withdraw(|&event| event == 2);
        assert_eq!(events.take().unwrap(), 1);
        assert_eq!(events.take().unwrap(), 3);
        assert_eq!(events.take().unwrap_err().raw_os_error(), Some(libc::EAGAIN));
    }
}
