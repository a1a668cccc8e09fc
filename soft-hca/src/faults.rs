//! Failures on order, for tests of error paths: `SOFT_HCA_FAIL` is a comma-separated list of
//! `verb:nth:errno` (the nth call of a verb fails; `nth+`: that one and all after it) and
//! `send_wr:nth:STATUS/vendor` (the nth send work request of the process completes with that status; `NEVER`: it is not
//! carried out and never completes, as over a cut link by a device that retries for ever, and all behind it on its queue
//! pair waits).
use crate::fabric::errno_by_name;
use std::sync::atomic::{AtomicU64, Ordering};

pub const FAIL_VAR: &str = "SOFT_HCA_FAIL";
/// The status of a work request that never completes.
pub const NEVER: u32 = u32::MAX;

#[derive(Debug, Default)]
pub struct Faults {
    verbs: Vec<Rule>,
    sends: Vec<Rule>,
    sends_seen: AtomicU64,
}

#[derive(Debug)]
struct Rule {
    verb: String,
    nth: u64,
    onwards: bool,
    /// errno, or a completion status with its vendor code.
    code: u32,
    vendor: u32,
    seen: AtomicU64,
}

impl Rule {
    fn hits(&self, count: u64) -> bool {
        count == self.nth || self.onwards && count > self.nth
    }
}

impl Faults {
    pub fn from_env() -> Self {
        let text = std::env::var(FAIL_VAR).unwrap_or_default();
        Self::parse(&text).unwrap_or_else(|wrong| {
            eprintln!("soft-hca: {FAIL_VAR}: \"{wrong}\" is not verb:nth[+]:errno or send_wr:nth[+]:STATUS/vendor");
            Self::default()
        })
    }

    /// The part that is wrong, if one is.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let rule = parse_rule(part).ok_or_else(|| part.to_owned())?;
            if rule.verb == "send_wr" { faults.sends.push(rule) } else { faults.verbs.push(rule) }
        }
        Ok(faults)
    }

    /// The errno with which this call of `verb` is to fail.
    pub fn verb(&self, verb: &str) -> Option<i32> {
        let mut errno = None;
        for rule in self.verbs.iter().filter(|rule| rule.verb == verb) {
            if rule.hits(rule.seen.fetch_add(1, Ordering::Relaxed) + 1) {
                errno = i32::try_from(rule.code).ok();
            }
        }
        errno
    }

    /// Status and vendor code with which this send work request is to complete.
    #[inline]
    pub fn send(&self) -> Option<(u32, u32)> {
        if self.sends.is_empty() {
            return None;
        }
        let count = self.sends_seen.fetch_add(1, Ordering::Relaxed) + 1;
        self.sends.iter().find(|rule| rule.hits(count)).map(|rule| (rule.code, rule.vendor))
    }
}

fn parse_rule(part: &str) -> Option<Rule> {
    let mut fields = part.split(':');
    let (verb, nth, what) = (fields.next()?, fields.next()?, fields.next()?);
    let onwards = nth.ends_with('+');
    let nth = nth.trim_end_matches('+').parse().ok().filter(|&nth| nth > 0)?;
    let (code, vendor) = if verb == "send_wr" {
        let (status, vendor) = what.split_once('/').unwrap_or((what, "0"));
        let code = match status {
            "NEVER" => NEVER,
            _ => u32::try_from((0..STATUS.len()).find(|&code| STATUS[code] == status)?).ok()?,
        };
        (code, vendor.parse().ok()?)
    } else {
        (u32::try_from(errno_by_name(what)?).ok()?, 0)
    };
    (!verb.is_empty() && fields.next().is_none()).then(|| Rule {
        verb: verb.to_owned(),
        nth,
        onwards,
        code,
        vendor,
        seen: AtomicU64::new(0),
    })
}

/// `IBV_WC_*` without the prefix, by value.
const STATUS: [&str; 22] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nth_call_fails_and_no_other() {
        let plan = "create_qp:2:ENOMEM, modify_qp:3+:110,send_wr:2:RETRY_EXC_ERR/129,send_wr:4+:NEVER";
        let faults = Faults::parse(plan).unwrap();
        let calls = |verb| (0..5).map(|_| faults.verb(verb)).collect::<Vec<_>>();
        assert_eq!(calls("create_qp"), [None, Some(libc::ENOMEM), None, None, None]);
        assert_eq!(calls("modify_qp"), [None, None, Some(110), Some(110), Some(110)]);
        assert_eq!(calls("reg_mr"), [None; 5]);
        let never = Some((NEVER, 0));
        assert_eq!([(); 5].map(|()| faults.send()), [None, Some((12, 129)), None, never, never]);
    }

    #[test]
    fn nonsense_is_named() {
        for wrong in ["create_qp", "create_qp:0:ENOMEM", "create_qp:1:EWHAT", "send_wr:1:OOPS", ":1:EIO", "a:1:EIO:x"] {
            assert_eq!(Faults::parse(wrong).unwrap_err(), wrong);
        }
    }
}
