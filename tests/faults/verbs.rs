//! The verbs room over the built soft-hca: every step from the library to two connected QPs, each step made to fail once.

use std::sync::Arc;

use nccl_net_rdma::verbs::{
    Access, AddressVector, Arrived, Completion, Context, Cq, Failure, Init, Library, Mr, Pd, Qp, QpCaps, Refused,
    RtrAttr, Rts, RtsAttr, VerbsError, WcBatch, WriteWr,
};

use crate::rig::{Setting, alone, dist, host, roce, until};

const LEN: usize = 4096;
const GID_INDEX: u8 = 3;

/// Both ends in one process, in the order in which they were made.
struct Pair {
    a: Qp<Rts>,
    b: Qp<Rts>,
    cq: Arc<Cq>,
    from: Mr,
    to: Mr,
    // Last: the regions above are over it.
    memory: Box<[u8; 2 * LEN]>,
}

fn connected(qp: Qp<Init>, peer: u32, gid: [u8; 16]) -> Result<Qp<Rts>, VerbsError> {
    let address = AddressVector::Gid {
        dgid: gid,
        sgid_index: GID_INDEX,
        dlid: 0,
        flow_label: 0,
        hop_limit: 64,
        traffic_class: 0,
    };
    let rtr =
        RtrAttr { address, service_level: 0, port: 1, dest_qp_num: peer, rq_psn: 77, path_mtu: 5, min_rnr_timer: 12 };
    let rts = RtsAttr { sq_psn: 77, timeout: 14, retry_cnt: 7, rnr_retry: 6 };
    let qp = qp.rtr(&rtr).map_err(|r| r.error)?;
    qp.rts(&rts).map_err(|r| r.error)
}

/// All the way up. What fails takes down what was made before it.
fn climb(max_inline: u32) -> Result<Pair, VerbsError> {
    let library = Library::load(Some(&dist("soft-hca/libibverbs.so.1"))).expect("soft-hca loads");
    let list = library.devices()?;
    assert_eq!(list.len(), 1);
    let context = Context::open(&list, 0)?;
    drop(list);
    assert_eq!(context.query()?.ports, 1);
    let port = context.query_port(1)?;
    let gid = context.gids(1, port.gid_tbl_len).into_iter().find(|g| g.index == u32::from(GID_INDEX)).unwrap().raw;
    let pd = Pd::alloc(&context)?;
    let mut memory = Box::new([0u8; 2 * LEN]);
    memory[..LEN].iter_mut().enumerate().for_each(|(i, b)| *b = i.to_le_bytes()[0] ^ 0x5a);
    let at = memory.as_ptr() as u64;
    // SAFETY: the regions are dropped before the memory.
    let from = unsafe { Mr::register(&pd, at, LEN, Access::LOCAL_WRITE) }?;
    // SAFETY: as above.
    let to = unsafe { Mr::register(&pd, at + LEN as u64, LEN, Access::LOCAL_WRITE | Access::REMOTE_WRITE) }?;
    let cq = Cq::create(&context, 64)?;
    let caps = QpCaps { max_send_wr: 16, max_recv_wr: 16, max_inline };
    let a = Qp::create(&pd, &cq, &cq, caps)?;
    let b = Qp::create(&pd, &cq, &cq, caps)?;
    let init = |qp: Qp<_>| qp.init(1, 0, Access::REMOTE_WRITE).map_err(|r: Refused<_>| r.error);
    let (a, b) = (init(a)?, init(b)?);
    b.post_empty_recvs(9, 4)?;
    let (a_num, b_num) = (a.num(), b.num());
    let a = connected(a, b_num, gid)?;
    let b = connected(b, a_num, gid)?;
    Ok(Pair { a, b, cq, from, to, memory })
}

impl Pair {
    fn write_with_imm(&self, wr_id: u64) {
        let at = self.memory.as_ptr() as u64;
        let w = WriteWr {
            wr_id,
            local: at,
            lkey: self.from.lkey(),
            length: u32::try_from(LEN).unwrap(),
            remote: at + LEN as u64,
            rkey: self.to.rkey(),
            imm: Some(0xfeed_0001),
            signaled: true,
            inline: false,
        };
        // SAFETY: the region outlives the request: the pair is dropped after it.
        unsafe { self.a.post_write(&w) }.unwrap();
    }

    fn completions(&self, count: usize) -> Vec<Completion> {
        let mut seen = Vec::new();
        until("completions", || {
            let mut batch = WcBatch::default();
            seen.extend(self.cq.poll(&mut batch).unwrap().iter().map(|wc| wc.read()));
            (seen.len() >= count).then_some(())
        });
        seen
    }

    /// A write with immediate goes over and is whole.
    fn works(&self) {
        self.write_with_imm(5);
        let seen = self.completions(2);
        assert!(seen.contains(&Completion::Sent { wr_id: 5 }), "{seen:?}");
        let bytes = u32::try_from(LEN).unwrap();
        let arrived = Completion::Arrived(Arrived { wr_id: 9, bytes, imm: Some(0xfeed_0001) });
        assert!(seen.contains(&arrived), "{seen:?}");
        assert!(self.memory[..LEN] == self.memory[LEN..], "the bytes differ");
        assert_ne!(self.a.num(), self.b.num());
    }
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Verbs that a climb calls, in order.
const STEPS: [&str; 15] = [
    "open_device",
    "query_device",
    "query_port",
    "alloc_pd",
    "reg_mr",
    "reg_mr",
    "create_cq",
    "create_qp",
    "create_qp",
    "modify_qp",
    "modify_qp",
    "modify_qp",
    "modify_qp",
    "modify_qp",
    "modify_qp",
];

/// Has climb number i fail at step i, and none after the last.
fn each_step_once() -> String {
    let mut rules = Vec::new();
    for failing in 0..STEPS.len() {
        let verb = STEPS[failing];
        // Each earlier climb j called the verbs up to and including step j.
        let before: usize = (0..failing).map(|j| STEPS[..=j].iter().filter(|v| **v == verb).count()).sum();
        let nth = before + STEPS[..=failing].iter().filter(|v| **v == verb).count();
        rules.push(format!("{verb}:{nth}:{}", 40 + failing));
    }
    rules.join(",")
}

/// Room for one pair and nothing that was left behind.
fn tight() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "max_qp = 2\nmax_mr = 2", "")])
}

#[test]
fn a_pair_comes_up_and_carries_a_write() {
    alone(&Setting { fabric: Some(&tight()), ..Setting::default() }, |_| {
        for _ in 0..3 {
            climb(64).unwrap().works();
        }
    });
}

#[test]
fn each_step_fails_once_and_leaves_nothing() {
    let plan = each_step_once();
    alone(&Setting { fabric: Some(&tight()), env: &[("SOFT_HCA_FAIL", &plan)] }, |_| {
        let mut open = None;
        for (i, verb) in STEPS.iter().enumerate() {
            let error = climb(0).err().unwrap_or_else(|| panic!("step {i}, {verb}, did not fail"));
            assert_eq!(error.verb, format!("ibv_{verb}"), "step {i}");
            assert_eq!(error.errno, 40 + i32::try_from(i).unwrap(), "step {i}");
            if *verb != "open_device" {
                assert_eq!(error.device, "soft0", "step {i}");
            }
            // The first climb that opens a device may leave what the adapter keeps for the process.
            let now = descriptors();
            assert!(i < 2 || *open.get_or_insert(now) == now, "step {i} left a descriptor open");
        }
        // The device has room for one pair only: had any step left a QP or region, this would fail.
        climb(0).unwrap().works();
    });
}

#[test]
fn a_transition_that_failed_can_be_tried_again() {
    // Calls 1 and 2 are INIT; RTR is refused twice.
    alone(
        &Setting { fabric: Some(&tight()), env: &[("SOFT_HCA_FAIL", "modify_qp:2:ETIMEDOUT,modify_qp:3:110")] },
        |_| {
            let library = Library::load(Some(&dist("soft-hca/libibverbs.so.1"))).unwrap();
            let context = Context::open(&library.devices().unwrap(), 0).unwrap();
            let pd = Pd::alloc(&context).unwrap();
            let cq = Cq::create(&context, 8).unwrap();
            let gid = context.gids(1, 4)[3].raw;
            let mut qp = Qp::create(&pd, &cq, &cq, QpCaps { max_send_wr: 1, max_recv_wr: 1, max_inline: 0 })
                .unwrap()
                .init(1, 0, Access::REMOTE_WRITE)
                .unwrap();
            let address = AddressVector::Gid {
                dgid: gid,
                sgid_index: GID_INDEX,
                dlid: 0,
                flow_label: 0,
                hop_limit: 64,
                traffic_class: 0,
            };
            let rtr = RtrAttr {
                address,
                service_level: 0,
                port: 1,
                dest_qp_num: qp.num(),
                rq_psn: 0,
                path_mtu: 5,
                min_rnr_timer: 12,
            };
            for _ in 0..2 {
                let refused = qp.rtr(&rtr).unwrap_err();
                assert_eq!(refused.error.errno, libc::ETIMEDOUT);
                assert!(refused.error.to_string().contains("to RTR"), "{}", refused.error);
                qp = refused.qp;
            }
            qp.rtr(&rtr).unwrap();
        },
    );
}

#[test]
fn a_provider_that_refuses_inline_data_is_asked_without() {
    alone(&Setting { fabric: Some(&tight()), env: &[("SOFT_HCA_FAIL", "create_qp:1:EINVAL")] }, |_| {
        climb(64).unwrap().works();
    });
}

#[test]
fn a_failed_completion_shows_its_four_fields() {
    alone(&Setting { fabric: Some(&tight()), env: &[("SOFT_HCA_FAIL", "send_wr:1:RETRY_EXC_ERR/129")] }, |_| {
        let pair = climb(0).unwrap();
        pair.write_with_imm(31);
        pair.write_with_imm(32);
        let qp_num = pair.a.num();
        let seen = pair.completions(2);
        assert_eq!(seen[0], Completion::Failed(Failure { wr_id: 31, status: 12, qp_num, vendor_err: 129 }));
        // What was behind it on the queue flushes.
        let Completion::Failed(second) = seen[1] else { panic!("{seen:?}") };
        assert!(second.is_flush() && second.wr_id == 32 && second.qp_num == qp_num, "{second:?}");
        assert!(pair.memory[LEN..].iter().all(|&b| b == 0), "a failed write landed");
    });
}

#[test]
fn optional_verbs_that_are_not_offered_are_not_used() {
    let hidden =
        host("a", &[roce("soft0", "10.0.0.1", "hide = [\"query_port_speed\", \"reg_dmabuf_mr\"]", "rate_gbps = 200")]);
    alone(&Setting { fabric: Some(&hidden), ..Setting::default() }, |_| {
        let library = Library::load(Some(&dist("soft-hca/libibverbs.so.1"))).unwrap();
        let context = Context::open(&library.devices().unwrap(), 0).unwrap();
        let port = context.query_port(1).unwrap();
        assert_eq!(port.speed_mbps, None);
        assert!(port.active_speed > 0 && port.active_width > 0);
        let pd = Pd::alloc(&context).unwrap();
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsFd::as_fd(&file);
        let error = Mr::register_dmabuf(&pd, fd, 0, 0x1000, 4096, Access::LOCAL_WRITE).unwrap_err();
        assert_eq!(error.errno, libc::EOPNOTSUPP, "{error}");
    });
}
