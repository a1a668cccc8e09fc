//! GPU memory, on the model of a GPU: a memfd registered as a dma-buf, which a thread copies with delay and out of order. What
//! a real GPU does is tested where there is one (ci/gpu).
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::cast_possible_truncation,
    reason = "the verbs are called as C programs call them, on small numbers"
)]
mod rig;

#[cfg(test)]
mod tests {
    use crate::rig::gpu::Buffer;
    use crate::rig::peer::*;
    use crate::rig::*;
    use ibverbs_sys as ffi;
    use soft_hca::fabric::Fabric;
    use soft_hca::verbs as v;
    use std::fs::File;
    use std::os::fd::AsRawFd;

    fn nic() -> Nic {
        let mut fabric = Fabric::default_for("here");
        fabric.registry = Some(scratch().to_owned());
        let device = &mut fabric.hosts[0].devices[0];
        (device.gpu_dmabuf, device.gpu_model) = (true, true);
        soft_hca::install(fabric, 0);
        Nic::open(0)
    }

    #[test]
    fn registering_is_strict() {
        let nic = nic();
        let errno = |offset, len, fd| unsafe {
            let mr = v::reg_dmabuf_mr(nic.pd, offset, len, 0x1000, fd, RIGHTS);
            assert!(mr.is_null());
            std::io::Error::last_os_error().raw_os_error().unwrap()
        };
        assert_eq!(errno(0, 0, -1), libc::EBADF, "how programs ask whether the verb is there");
        let exe = File::open("/proc/self/exe").unwrap();
        assert_eq!(errno(0, 4096, exe.as_raw_fd()), libc::EINVAL, "no dma-buf");
        let buffer = Buffer::new(&nic, 8192);
        assert_eq!(errno(4096, 8192, buffer.file.as_raw_fd()), libc::EINVAL, "past its end");
    }

    #[test]
    fn every_mix_of_memories_in_one_process() {
        let nic = nic();
        let (a, b) = pair(&nic);
        let len = 300_001;
        let (mut gpu, mut other) = (Buffer::new(&nic, 1 << 20), Buffer::new(&nic, 1 << 20));
        let mut host = pattern(len, 3);
        let host_mr = nic.mr(&mut host, RIGHTS);
        gpu.bytes()[..len].fill(0);
        // Host to GPU, GPU to GPU, GPU to host, with and without a receive; a READ back.
        a.write(1, &[sge(&host, host_mr)], gpu.addr() + 8, rkey(gpu.mr), None);
        assert_eq!(a.one().status, 0);
        assert_eq!(gpu.bytes()[8..8 + len], host);
        assert_eq!(b.recv(77, &[]), 0);
        a.write(2, &[gpu.sge(8, len)], other.addr(), rkey(other.mr), Some(5));
        assert_eq!(a.one().wr_id, 2);
        let got = b.one();
        assert_eq!((got.wr_id, got.byte_len, u32::from_be(got.imm_data)), (77, len as u32, 5));
        assert_eq!(other.bytes()[..len], host);
        let mut back = vec![0; len];
        let back_mr = nic.mr(&mut back, RIGHTS);
        a.write(3, &[other.sge(0, len)], addr(&back), rkey(back_mr), None);
        assert_eq!(a.one().status, 0);
        assert_eq!(back, host);
        back.fill(0);
        assert_eq!(a.send(wr(4, 4, &[sge(&back, back_mr)], gpu.addr() + 8, rkey(gpu.mr), 0)), 0);
        assert_eq!(a.one().status, 0);
        assert_eq!(back, host);
    }

    #[test]
    fn messages_of_a_queue_pair_land_in_order() {
        let nic = nic();
        let (a, b) = pair(&nic);
        let (mut gpu, source) = (Buffer::new(&nic, 4096), Buffer::new(&nic, 1 << 16));
        let mut sources: Vec<Vec<u8>> = (0..50).map(|i| vec![i; 64]).collect();
        let mrs: Vec<_> = sources.iter_mut().map(|bytes| nic.mr(bytes, RIGHTS)).collect();
        for round in 0..20 {
            // All to one place: the last wins, whatever the batches; behind it, one in host memory and one of no bytes.
            for (i, (bytes, mr)) in sources.iter().zip(&mrs).enumerate() {
                a.write(i as u64, &[sge(bytes, *mr)], gpu.addr(), rkey(gpu.mr), None);
            }
            let mut flag = vec![0u8; 8];
            let flag_mr = nic.mr(&mut flag, RIGHTS);
            assert_eq!(b.recv(round, &[]), 0);
            a.write(100, &[sge(&sources[7][..8], mrs[7])], addr(&flag), rkey(flag_mr), None);
            a.write(101, &[], 0, 0, Some(1));
            assert_eq!(b.one().wr_id, round);
            assert_eq!(gpu.bytes()[..64], [49; 64]);
            assert_eq!(flag, [7; 8]);
            assert_eq!(a.wait(52).iter().map(|wc| (wc.wr_id, wc.status)).next_back(), Some((101, 0)));
            gpu.bytes().fill(0);
        }
        drop(source);
    }

    #[test]
    fn what_was_written_is_there_when_it_is_read() {
        let nic = nic();
        let (a, _b) = pair(&nic);
        let (mut from, mut to) = (Buffer::new(&nic, 1 << 16), Buffer::new(&nic, 1 << 16));
        let mut host = vec![0u8; 4096];
        let host_mr = nic.mr(&mut host, RIGHTS);
        for round in 0..50u8 {
            from.bytes()[..4096].fill(round);
            // Into host memory, which the CPU fills once the GPU has read its own; then that, into GPU memory, by a READ.
            a.write(1, &[from.sge(0, 4096)], addr(&host), rkey(host_mr), None);
            assert_eq!(a.send(wr(2, 4, &[to.sge(0, 4096)], addr(&host), rkey(host_mr), 0)), 0);
            assert!(a.wait(2).iter().all(|wc| wc.status == 0));
            assert!(to.bytes()[..4096].iter().all(|&byte| byte == round), "round {round}");
        }
    }

    #[test]
    fn nothing_lands_after_deregistration_or_reset() {
        let nic = nic();
        for how in 0..3 {
            let (a, _b) = pair(&nic);
            let mut gpu = Buffer::new(&nic, 4 << 20);
            let mut host = pattern(4 << 20, 9);
            let mr = nic.mr(&mut host, RIGHTS);
            // More than can be done by the time that the first byte is seen.
            let many = 40;
            (0..many).for_each(|i| a.write(i, &[sge(&host, mr)], gpu.addr(), rkey(gpu.mr), None));
            let last = || a.wait(usize::try_from(many).unwrap()).last().map(|wc| wc.status);
            while gpu.bytes()[0] != host[0] {
                std::hint::spin_loop();
            }
            match how {
                0 => {
                    let again = gpu.mr;
                    unsafe { assert_eq!(v::dereg_mr(again), 0) };
                    let now = gpu.bytes().to_vec();
                    assert_eq!(last(), Some(5), "flushed behind one that has no target any more");
                    assert_eq!(gpu.bytes(), now);
                    let addr = gpu.addr();
                    gpu.mr = unsafe { v::reg_dmabuf_mr(nic.pd, 0, gpu.len, addr, gpu.file.as_raw_fd(), RIGHTS) };
                }
                1 => {
                    a.to_err();
                    let now = gpu.bytes().to_vec();
                    assert_eq!(last(), Some(5));
                    assert_eq!(gpu.bytes(), now);
                }
                _ => {
                    unsafe { assert_eq!(v::destroy_qp(a.qp), 0) };
                    let now = gpu.bytes().to_vec();
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    assert_eq!(gpu.bytes(), now);
                }
            }
        }
    }

    fn start(fail: &str) -> Peer {
        let registry = scratch().to_str().unwrap();
        Peer::start(&[
            ("SOFT_HCA_REGISTRY", registry),
            ("SOFT_HCA_HOST", "there"),
            ("SOFT_HCA_FABRIC", concat!(env!("CARGO_MANIFEST_DIR"), "/tests/rig/model.toml")),
            (IN_GPU, "1"),
            ("SOFT_HCA_FAIL", fail),
        ])
    }

    #[test]
    #[ignore = "the other process of the tests here"]
    fn peer() {
        serve();
    }

    /// The peer's target is GPU memory, the source in turn host and GPU; then READs of it into both.
    fn across(fail: &str) {
        let nic = nic();
        let mut peer = start(fail);
        let qp = peer.connect(&nic, |_| ());
        let len = 200_000;
        let mut host = pattern(len, 1);
        let host_mr = nic.mr(&mut host, RIGHTS);
        let mut gpu = Buffer::new(&nic, 1 << 20);
        for round in 0..10u8 {
            let fresh = pattern(len, round);
            gpu.bytes()[..len].copy_from_slice(&fresh);
            host.copy_from_slice(&pattern(len, round ^ 0x55));
            qp.write(1, &[gpu.sge(0, len)], peer.raddr, peer.rkey, None);
            assert_eq!(qp.one().status, 0);
            gpu.bytes()[..len].fill(0);
            let read = |id, to: ffi::ibv_sge| {
                assert_eq!(qp.send(wr(id, 4, &[to], peer.raddr, peer.rkey, 0)), 0);
                assert_eq!(qp.one().status, 0);
            };
            read(2, gpu.sge(8, len));
            assert_eq!(gpu.bytes()[8..8 + len], fresh, "GPU to GPU and back");
            qp.write(3, &[sge(&host, host_mr)], peer.raddr, peer.rkey, None);
            assert_eq!(qp.one().status, 0);
            let wanted = host.clone();
            host.fill(0);
            read(4, sge(&host, host_mr));
            assert_eq!(host, wanted, "host to GPU and back");
        }
        // A peer that has mapped memory lets go of it when it is deregistered, and meets what comes after in its place.
        drop(gpu);
        let mut gpu = Buffer::new(&nic, 1 << 20);
        gpu.bytes().fill(0x77);
        qp.write(5, &[gpu.sge(0, len)], peer.raddr, peer.rkey, None);
        assert_eq!(qp.one().status, 0);
        assert_eq!(qp.send(wr(6, 4, &[sge(&host, host_mr)], peer.raddr, peer.rkey, 0)), 0);
        assert_eq!(qp.one().status, 0);
        assert_eq!(host, vec![0x77; len]);
    }

    #[test]
    fn between_processes_by_reference() {
        across("");
    }

    #[test]
    fn between_processes_where_memory_cannot_be_shared() {
        across("gpu_import:1+:EPERM");
    }
}
