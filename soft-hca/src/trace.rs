//! What programs tell their queue pairs: `SOFT_HCA_TRACE` names a file, to which every process appends one line for each
//! successful ibv_modify_qp, with all attributes then in force, and one for each verb that a child of fork calls in vain.
use crate::qp::{Attr, State};
use std::fmt::Write as _;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::net::Ipv6Addr;

pub const TRACE_VAR: &str = "SOFT_HCA_TRACE";

/// Nothing unless the variable is set.
#[derive(Debug, Default)]
pub(crate) struct Trace(Option<File>);

impl Trace {
    pub(crate) fn from_env() -> Self {
        let Some(path) = std::env::var_os(TRACE_VAR).filter(|path| !path.is_empty()) else { return Self::default() };
        let file = OpenOptions::new().append(true).create(true).open(&path);
        Self(file.inspect_err(|e| eprintln!("soft-hca: {TRACE_VAR}: {}: {e}", path.display())).ok())
    }

    /// One line; written whole, so that lines of several processes don't mix.
    pub(crate) fn modified(&self, host: &str, device: &str, qp: u32, state: State, attr: &Attr) {
        self.append(|| line(host, device, qp, state, attr));
    }

    /// A verb of a forked child, refused.
    pub(crate) fn refused(&self, host: &str) {
        self.append(|| format!("host={host} pid={} refused=forked", std::process::id()));
    }

    fn append(&self, line: impl FnOnce() -> String) {
        let Some(mut file) = self.0.as_ref() else { return };
        let mut line = line();
        line.push('\n');
        // A full disk must not fail a verb.
        let _ = file.write_all(line.as_bytes());
    }
}

fn line(host: &str, device: &str, qp: u32, state: State, attr: &Attr) -> String {
    let mut text = format!("host={host} pid={} device={device}", std::process::id());
    let Attr { port, pkey_index, access, mtu, dest, rq_psn, sq_psn, .. } = attr;
    let Attr { max_dest_rd, max_rd, min_rnr, timeout, retry_cnt, rnr_retry, address, .. } = attr;
    // A String takes everything.
    let _ = write!(text, " qp={qp:#x} state={} port={port} pkey_index={pkey_index} access={access:#x}", state.name());
    let _ = write!(text, " path_mtu={} dest_qp={dest:#x} rq_psn={rq_psn:#x} sq_psn={sq_psn:#x}", 128_u32 << mtu);
    let _ = write!(text, " max_dest_rd_atomic={max_dest_rd} max_rd_atomic={max_rd} min_rnr_timer={min_rnr}");
    let _ = write!(text, " timeout={timeout} retry_cnt={retry_cnt} rnr_retry={rnr_retry}");
    let _ = write!(text, " dlid={} sl={} is_global={}", address.dlid, address.sl, u8::from(address.global));
    let _ = write!(text, " dgid={} sgid_index={}", Ipv6Addr::from(address.dgid), address.sgid_index);
    let _ = write!(text, " traffic_class={} flow_label={:#x}", address.traffic_class, address.flow_label);
    let _ = write!(text, " hop_limit={}", address.hop_limit);
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qp::Address;

    #[test]
    fn a_line_has_what_the_queue_pair_was_given() {
        let address = Address { global: true, sl: 3, traffic_class: 106, ..Address::default() };
        let attr = Attr { port: 2, mtu: 5, timeout: 20, address, ..Attr::default() };
        let text = line("a", "soft0", 0x4001, State::Rtr, &attr);
        let has = |field: &str| text.split(' ').any(|word| word == field);
        for field in ["host=a", "device=soft0", "qp=0x4001", "state=RTR", "port=2", "path_mtu=4096", "timeout=20"] {
            assert!(has(field), "{field}: {text}");
        }
        assert!(has("traffic_class=106") && has("sl=3") && has("is_global=1"), "{text}");
    }
}
