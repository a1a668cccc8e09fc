//! Peers on other hosts, over TCP: two registries on this machine, so that shared memory can't help.
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::cast_possible_truncation,
    reason = "the verbs are called as C programs call them, on small numbers"
)]
mod rig;

#[cfg(test)]
mod tests {
    use crate::rig::peer::*;
    use crate::rig::*;
    use soft_hca::fabric::Fabric;
    use std::net::TcpListener;
    use std::path::{Path, PathBuf};
    use std::sync::OnceLock;

    struct Bed {
        dir: PathBuf,
        file: PathBuf,
    }

    /// Two ports, a few apart, that are free now.
    fn ports() -> (u16, u16) {
        loop {
            let bound = TcpListener::bind("127.0.0.1:0").unwrap();
            let base = bound.local_addr().unwrap().port();
            if base < 65000 && (1..32).all(|i| TcpListener::bind(("127.0.0.1", base + i)).is_ok()) {
                return (base, base + 16);
            }
        }
    }

    fn bed() -> &'static Bed {
        static BED: OnceLock<Bed> = OnceLock::new();
        BED.get_or_init(|| {
            let dir = scratch().to_owned();
            let (here, there) = ports();
            let host = |name: &str, port: u16, last: u8| {
                format!(
                    "[[host]]\nname = \"{name}\"\ntcp = \"127.0.0.1:{port}\"\n[[host.device]]\nname = \"soft0\"\n\
                     [[host.device.port]]\nlink_layer = \"Ethernet\"\n\
                     gids = [{{ index = 0, gid = \"::ffff:10.0.0.{last}\", type = \"RoCE v2\" }}]\n"
                )
            };
            let text = host("here", here, 1) + &host("there", there, 2);
            let file = dir.join("fabric.toml");
            std::fs::write(&file, &text).unwrap();
            let mut fabric = Fabric::parse(&text, Path::new("here")).unwrap();
            fabric.registry = Some(dir.join("here"));
            assert!(soft_hca::install(fabric, 0));
            Bed { dir, file }
        })
    }

    fn start() -> Peer {
        let bed = bed();
        Peer::start(&[
            ("SOFT_HCA_FABRIC", bed.file.to_str().unwrap()),
            ("SOFT_HCA_REGISTRY", bed.dir.join("there").to_str().unwrap()),
            ("SOFT_HCA_HOST", "there"),
        ])
    }

    #[test]
    #[ignore = "the other process of the tests here"]
    fn peer() {
        serve();
    }

    #[test]
    fn every_operation_works() {
        let mut peer = start();
        every_operation(&Nic::open(0), &mut peer);
    }

    #[test]
    fn errors_come_back() {
        let mut peer = start();
        remote_errors(&Nic::open(0), &mut peer);
    }

    #[test]
    fn a_killed_peer_is_a_timeout() {
        let mut peer = start();
        killed(&Nic::open(0), &mut peer);
    }

    #[test]
    fn fences_hold() {
        bed();
        fences(&Nic::open(0), start);
    }
}
