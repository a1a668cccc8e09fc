//! What a verb that failed says: which verb, on which device, errno in words and number, and what usually helps.

use std::fmt;
use std::io;

/// A control verb that failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VerbsError {
    /// The verb, as in its man page.
    pub verb: &'static str,
    /// The device it was called on; empty where there is none yet.
    pub device: String,
    /// errno, or the verb's own return value.
    pub errno: i32,
    /// What the caller knows beyond errno: sizes asked for, addresses, limits.
    pub detail: String,
}

impl VerbsError {
    pub(crate) fn new(verb: &'static str, device: &str, errno: i32) -> Self {
        let detail = if errno == libc::ENOMEM { memlock_hint() } else { String::new() };
        Self { verb, device: device.to_owned(), errno, detail }
    }

    /// From the errno that the last call on this thread left.
    pub(super) fn last(verb: &'static str, device: &str) -> Self {
        Self::new(verb, device, io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// Adds what the caller knows.
    #[must_use]
    pub fn with(mut self, detail: impl fmt::Display) -> Self {
        use fmt::Write as _;
        if !self.detail.is_empty() {
            self.detail.push_str("; ");
        }
        // Writing to a String cannot fail.
        let _ = write!(self.detail, "{detail}");
        self
    }
}

impl fmt::Display for VerbsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.verb)?;
        if !self.device.is_empty() {
            write!(f, " on {}", self.device)?;
        }
        write!(f, " failed: {}", io::Error::from_raw_os_error(self.errno))?;
        if !self.detail.is_empty() {
            write!(f, "; {}", self.detail)?;
        }
        Ok(())
    }
}

impl std::error::Error for VerbsError {}

/// ENOMEM from a verb nearly always means the limit on locked memory, or else a limit of the device.
fn memlock_hint() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit fills the struct it is given.
    let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) } == 0;
    let show = |v: libc::rlim_t| if v == libc::RLIM_INFINITY { "unlimited".to_owned() } else { format!("{v} bytes") };
    let limits = if known {
        format!("memlock limit soft {}, hard {}", show(limit.rlim_cur), show(limit.rlim_max))
    } else {
        "memlock limit unknown".to_owned()
    };
    let cap = match has_ipc_lock() {
        Some(true) => "held",
        Some(false) => "not held",
        None => "unknown",
    };
    format!(
        "{limits}, CAP_IPC_LOCK {cap}; unless the limit is unlimited raise it for the launched process (ulimit -l \
         unlimited, LimitMEMLOCK=infinity, docker --ulimit memlock=-1), else look at the device's own limits (max_qp, \
         max_mr) and vm.max_map_count"
    )
}

/// Whether this process may lock memory beyond its limit (`CapEff` of `/proc/self/status`, capability 14).
fn has_ipc_lock() -> Option<bool> {
    const CAP_IPC_LOCK: u32 = 14;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let mask = status.lines().find_map(|l| l.strip_prefix("CapEff:"))?;
    Some(u64::from_str_radix(mask.trim(), 16).ok()? >> CAP_IPC_LOCK & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enomem_names_the_memlock_limit() {
        let text = VerbsError::new("ibv_create_cq", "mlx5_0", libc::ENOMEM).to_string();
        assert!(text.contains("ibv_create_cq on mlx5_0 failed: Cannot allocate memory"), "{text}");
        assert!(text.contains("memlock limit soft"), "{text}");
        assert!(text.contains("CAP_IPC_LOCK"), "{text}");
    }

    #[test]
    fn details_are_joined() {
        let e = VerbsError::new("ibv_modify_qp", "", libc::EINVAL).with("a").with(7);
        assert!(e.to_string().ends_with("; a; 7"), "{e}");
    }
}
