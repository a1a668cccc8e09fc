//! A second process: this test binary again, which serves one queue pair and a buffer and obeys lines on its stdin.
use super::*;
use soft_hca::verbs as v;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub(crate) const SIZE: usize = 4 << 20;
const ROLE: &str = "SOFT_HCA_TEST_PEER";
/// Set: the buffer is in GPU memory.
pub(crate) const IN_GPU: &str = "SOFT_HCA_TEST_IN_GPU";

pub(crate) struct Peer {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub(crate) qpn: u32,
    pub(crate) raddr: u64,
    pub(crate) rkey: u32,
    pub(crate) gid: [u8; 16],
}

impl Peer {
    /// Starts the test `tests::peer` of this binary as the other process.
    pub(crate) fn start(vars: &[(&str, &str)]) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "tests::peer", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .envs(vars.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut peer = Self { child, stdin, stdout, qpn: 0, raddr: 0, rkey: 0, gid: [0; 16] };
        let words: Vec<u128> = peer.answer().split(' ').map(|word| word.parse().unwrap()).collect();
        peer.qpn = words[0].try_into().unwrap();
        peer.raddr = words[1].try_into().unwrap();
        peer.rkey = words[2].try_into().unwrap();
        peer.gid = words[3].to_ne_bytes();
        peer
    }

    fn answer(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the peer is gone");
            // libtest may have begun the line.
            if let Some((_, rest)) = line.split_once('@') {
                return rest.trim_end().to_owned();
            }
        }
    }

    pub(crate) fn ask(&mut self, line: &str) -> String {
        writeln!(self.stdin, "{line}").unwrap();
        self.answer()
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// A queue pair of ours connected to the peer's.
    pub(crate) fn connect(&mut self, nic: &Nic, change: impl FnOnce(&mut Link)) -> Qp {
        let qp = nic.qp();
        let mut link = Link { gid: self.gid, ..Link::to(nic, self.qpn) };
        change(&mut link);
        let line = format!("connect {} {}", qp.num(), u128::from_ne_bytes(nic.gid));
        assert_eq!(self.ask(&line), "connected");
        qp.connect(&link);
        qp
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The other process's life.
pub(crate) fn serve() {
    if std::env::var_os(ROLE).is_none() {
        return;
    }
    let nic = Nic::open(0);
    let mut in_gpu = std::env::var_os(IN_GPU).map(|_| gpu::Buffer::new(&nic, SIZE));
    let mut in_host = pattern(SIZE, 9);
    let (buf, mr) = match &mut in_gpu {
        Some(buffer) => {
            let mr = buffer.mr;
            (buffer.bytes(), mr)
        }
        None => {
            let mr = nic.mr(&mut in_host, RIGHTS);
            (&mut in_host[..], mr)
        }
    };
    let mut qp = nic.qp();
    println!("@{} {} {} {}", qp.num(), addr(buf), rkey(mr), u128::from_ne_bytes(nic.gid));
    for line in std::io::stdin().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let number = |i: usize| words[i].parse::<usize>().unwrap();
        match words[0] {
            "connect" => {
                let gid = words[2].parse::<u128>().unwrap().to_ne_bytes();
                let dest = u32::try_from(number(1)).unwrap();
                if unsafe { (*qp.qp).state } != 0 {
                    assert_eq!(qp.modify(ffi::ibv_qp_attr::default(), 0, mask::STATE), 0);
                    qp.poll();
                }
                qp.connect(&Link { gid, min_rnr: 12, ..Link::to(&nic, dest) });
                println!("@connected");
            }
            // recv id from len
            "recv" => {
                assert_eq!(qp.recv(number(1) as u64, &[sge(&buf[number(2)..number(2) + number(3)], mr)]), 0);
                println!("@posted");
            }
            "one" => {
                let wc = qp.one();
                let imm = u32::from_be(wc.imm_data);
                println!("@{} {} {} {} {}", wc.wr_id, wc.status, wc.opcode, wc.byte_len, imm);
            }
            // sum from len: position-dependent
            "sum" => println!("@{}", sum(&buf[number(1)..number(1) + number(2)])),
            // Is the call a fence?
            "fence" => {
                while unsafe { ptr::read_volatile(&buf[0]) } != 0xA5 {}
                match words[1] {
                    "err" => qp.to_err(),
                    "dereg" => assert_eq!(unsafe { v::dereg_mr(mr) }, 0),
                    _ => {
                        assert_eq!(unsafe { v::destroy_qp(qp.qp) }, 0);
                        qp = nic.qp();
                    }
                }
                let before = buf.to_vec();
                std::thread::sleep(Duration::from_millis(20));
                println!("@{}", if before == *buf { "still" } else { "bytes landed" });
            }
            other => panic!("{other}?"),
        }
    }
}

pub(crate) fn sum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(7, |sum: u64, &b| sum.wrapping_mul(0x100_0000_01b3) ^ u64::from(b))
}

/// Every operation with a peer in another process.
pub(crate) fn every_operation(nic: &Nic, peer: &mut Peer) {
    let qp = peer.connect(nic, |_| ());
    let mut src = pattern(SIZE, 4);
    let mut back = vec![0u8; SIZE];
    let (src_mr, back_mr) = (nic.mr(&mut src, 0), nic.mr(&mut back, 1));
    for (i, len) in [0usize, 1, 7, 8, 100, 4096, 65_535, 65_536, 65_537, 1 << 20, SIZE].into_iter().enumerate() {
        peer.ask(&format!("recv {i} 0 0"));
        qp.write(i as u64, &[sge(&src[..len], src_mr)], peer.raddr, peer.rkey, Some(0xABC0 + i as u32));
        assert_eq!(peer.ask("one"), format!("{i} 0 129 {len} {}", 0xABC0 + i));
        assert_eq!(qp.one().status, 0);
        assert_eq!(peer.ask(&format!("sum 0 {len}")), sum(&src[..len]).to_string(), "{len} bytes");
        assert_eq!(qp.send(wr(1, 4, &[sge(&back[..len], back_mr)], peer.raddr, peer.rkey, 0)), 0);
        let read = qp.one();
        assert_eq!((read.status, read.opcode, read.byte_len as usize), (0, 2, len));
        assert!(back[..len] == src[..len], "{len} bytes read back");
    }
    // A SEND, which has to wait for its receive.
    assert_eq!(qp.send(wr(2, 3, &[sge(&src[..5000], src_mr)], 0, 0, 77)), 0);
    std::thread::sleep(Duration::from_millis(5));
    assert!(qp.poll().is_empty());
    peer.ask("recv 50 1000 6000");
    assert_eq!(peer.ask("one"), "50 0 128 5000 77");
    assert_eq!(qp.one().status, 0);
    assert_eq!(peer.ask("sum 1000 5000"), sum(&src[..5000]).to_string());
    // Many unsignalled ones in flight with a READ among them complete in order.
    for i in 0..40u64 {
        let len = 1000 * i as usize;
        let (opcode, sges) =
            if i % 8 == 7 { (4, [sge(&back[..len], back_mr)]) } else { (0, [sge(&src[..len], src_mr)]) };
        let mut request = wr(i, opcode, &sges, peer.raddr, peer.rkey, 0);
        request.send_flags = if i % 4 == 3 { 2 } else { 0 };
        assert_eq!(qp.send(request), 0);
    }
    let order: Vec<u64> = qp.wait(10).iter().map(|wc| wc.wr_id).collect();
    assert_eq!(order, [3, 7, 11, 15, 19, 23, 27, 31, 35, 39]);
    qp.destroy();
}

/// Errors that the other process finds.
pub(crate) fn remote_errors(nic: &Nic, peer: &mut Peer) {
    let mut src = pattern(4096, 4);
    let src_mr = nic.mr(&mut src, 0);
    let qp = peer.connect(nic, |_| ());
    qp.write(1, &[sge(&src, src_mr)], peer.raddr + SIZE as u64 - 10, peer.rkey, None);
    qp.write(2, &[], peer.raddr, peer.rkey, None);
    let failed: Vec<_> = qp.wait(2).iter().map(|wc| (wc.wr_id, wc.status, wc.vendor_err)).collect();
    assert_eq!(failed, [(1, 10, 0x88), (2, 5, 249)]);
    let qp = peer.connect(nic, |_| ());
    peer.ask("recv 1 0 100");
    assert_eq!(qp.send(wr(1, 2, &[sge(&src, src_mr)], 0, 0, 0)), 0);
    assert_eq!(qp.one().status, 9);
    assert!(peer.ask("one").starts_with("1 1 "), "LOC_LEN_ERR");
    let qp = peer.connect(nic, |link| link.rnr_retry = 2);
    assert_eq!(qp.send(wr(1, 1, &[], peer.raddr, peer.rkey, 0)), 0);
    assert_eq!((qp.one().status, qp.poll().len()), (13, 0));
}

/// A killed peer: silence, then the time-out that was configured.
pub(crate) fn killed(nic: &Nic, peer: &mut Peer) {
    let qp = peer.connect(nic, |link| (link.timeout, link.retry_cnt) = (12, 3));
    qp.write(1, &[], peer.raddr, peer.rkey, None);
    assert_eq!(qp.one().status, 0);
    peer.kill();
    let start = Instant::now();
    qp.write(2, &[], peer.raddr, peer.rkey, None);
    let failed = qp.one();
    assert_eq!((failed.wr_id, failed.status, failed.vendor_err), (2, 12, 129));
    let expected = Duration::from_nanos(4 * (4096 << 12));
    let took = start.elapsed();
    assert!(took >= expected.mul_f32(0.7) && took < expected * 10, "{took:?} of {expected:?}");
}

pub(crate) fn fences(nic: &Nic, start: impl Fn() -> Peer) {
    let mut src = vec![0xA5u8; SIZE];
    let src_mr = nic.mr(&mut src, 0);
    for how in ["err", "destroy", "dereg"] {
        let mut peer = start();
        let qp = peer.connect(nic, |_| ());
        for id in 0..8 {
            qp.write(id, &[sge(&src, src_mr)], peer.raddr, peer.rkey, None);
        }
        assert_eq!(peer.ask(&format!("fence {how}")), "still", "{how}");
        qp.to_err();
        qp.destroy();
    }
}
