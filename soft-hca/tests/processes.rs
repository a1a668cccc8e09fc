//! Peers in other processes of the machine, through shared memory.
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
    use std::time::Instant;

    fn start() -> Peer {
        let registry = scratch().to_str().unwrap();
        Peer::start(&[("SOFT_HCA_REGISTRY", registry), ("SOFT_HCA_HOST", "there")])
    }

    #[test]
    #[ignore = "the other process of the tests here"]
    fn peer() {
        serve();
    }

    #[test]
    fn every_operation_works() {
        let mut peer = start();
        let nic = Nic::open(0);
        assert_ne!(nic.gid, peer.gid, "another host");
        every_operation(&nic, &mut peer);
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
        fences(&Nic::open(0), start);
    }

    #[test]
    fn many_peers_at_once() {
        let nic = Nic::open(0);
        std::thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    let mut peer = start();
                    every_operation(&nic, &mut peer);
                    remote_errors(&nic, &mut peer);
                });
            }
        });
    }

    /// Speed of one queue pair between two processes; run with --ignored --nocapture.
    #[test]
    #[ignore = "a measurement"]
    fn bandwidth() {
        let mut peer = start();
        let nic = Nic::open(0);
        let qp = peer.connect(&nic, |_| ());
        let mut src = pattern(1 << 20, 4);
        let mr = nic.mr(&mut src, 0);
        let (count, begin) = (2000u64, Instant::now());
        let mut posted = 0;
        let mut done = 0;
        while done < count {
            while posted < count && posted - done < 16 {
                qp.write(posted, &[sge(&src, mr)], peer.raddr, peer.rkey, None);
                posted += 1;
            }
            done += qp.wait(1).len() as u64;
        }
        let seconds = begin.elapsed().as_secs_f64();
        println!("{:.0} MB/s", count as f64 * 1.048_576 / seconds);
    }
}
