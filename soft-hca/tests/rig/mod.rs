//! What the tests share: a device opened through the verbs functions, and queue pairs between its ports.
#![allow(dead_code, reason = "each test binary uses a part")]
pub(crate) mod gpu;
pub(crate) mod peer;

use ibverbs_sys as ffi;
use soft_hca::abi::{Wc, access, mask};
use soft_hca::fabric::Fabric;
use soft_hca::verbs as v;
use std::path::{Path, PathBuf};
use std::ptr;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

pub(crate) const ALL: i32 = 0xf;
pub(crate) const LIMIT: Duration = Duration::from_secs(20);

/// A directory of this process's own for its registry; it goes when the process ends.
pub(crate) fn scratch() -> &'static Path {
    static DIR: OnceLock<PathBuf> = OnceLock::new();
    extern "C" fn remove() {
        let _ = DIR.get().map(std::fs::remove_dir_all);
    }
    DIR.get_or_init(|| {
        unsafe { libc::atexit(remove) };
        let dir = PathBuf::from(format!("/dev/shm/soft-hca-test-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        dir
    })
}

pub(crate) struct Nic {
    pub(crate) ctx: *mut ffi::ibv_context,
    pub(crate) pd: *mut ffi::ibv_pd,
    pub(crate) gid_index: u8,
    pub(crate) gid: [u8; 16],
}

// The verbs are thread-safe; tests share a device among threads.
unsafe impl Send for Nic {}
unsafe impl Sync for Nic {}

impl Nic {
    pub(crate) fn open(index: usize) -> Self {
        if std::env::var_os("SOFT_HCA_REGISTRY").is_none() {
            // Not if the test has installed a fabric of its own.
            let mut fabric = Fabric::default_for("here");
            fabric.registry = Some(scratch().to_owned());
            soft_hca::install(fabric, 0);
        }
        unsafe {
            let mut num = 0;
            let list = v::get_device_list(&mut num);
            assert!(usize::try_from(num).unwrap() > index, "{num} devices");
            let ctx = v::open_device(*list.add(index));
            assert!(!ctx.is_null());
            v::free_device_list(list);
            let pd = v::alloc_pd(ctx);
            let mut attr = ffi::ibv_port_attr::default();
            assert_eq!(v::query_port(ctx, 1, &mut attr), 0);
            let mut gid = ffi::ibv_gid::default();
            let gid_index = u8::try_from(attr.gid_tbl_len - 1).unwrap();
            assert_eq!(v::query_gid(ctx, 1, gid_index.into(), &mut gid), 0);
            Self { ctx, pd, gid_index, gid: gid.raw }
        }
    }

    pub(crate) fn cq(&self, cqe: i32) -> *mut ffi::ibv_cq {
        let cq = unsafe { v::create_cq(self.ctx, cqe, ptr::null_mut(), ptr::null_mut(), 0) };
        assert!(!cq.is_null());
        cq
    }

    pub(crate) fn mr(&self, bytes: &mut [u8], access: i32) -> *mut ffi::ibv_mr {
        let mr = unsafe { v::reg_mr(self.pd, bytes.as_mut_ptr().cast(), bytes.len(), access) };
        assert!(!mr.is_null());
        mr
    }

    pub(crate) fn qp(&self) -> Qp {
        self.qp_with(|_| ())
    }

    pub(crate) fn qp_with(&self, change: impl FnOnce(&mut ffi::ibv_qp_init_attr)) -> Qp {
        let cq = self.cq(256);
        let mut init = ffi::ibv_qp_init_attr {
            send_cq: cq,
            recv_cq: cq,
            cap: ffi::ibv_qp_cap {
                max_send_wr: 64,
                max_recv_wr: 64,
                max_send_sge: 8,
                max_recv_sge: 8,
                max_inline_data: 64,
            },
            qp_type: ffi::ibv_qp_type::IBV_QPT_RC,
            ..Default::default()
        };
        change(&mut init);
        let qp = unsafe { v::create_qp(self.pd, &mut init) };
        assert!(!qp.is_null(), "{}", std::io::Error::last_os_error());
        Qp { qp, cq }
    }
}

/// How a connection is made; tests change what they test.
#[derive(Clone, Copy)]
pub(crate) struct Link {
    pub(crate) dest: u32,
    pub(crate) gid: [u8; 16],
    pub(crate) gid_index: u8,
    pub(crate) mtu: u32,
    pub(crate) sq_psn: u32,
    pub(crate) rq_psn: u32,
    pub(crate) timeout: u8,
    pub(crate) retry_cnt: u8,
    pub(crate) rnr_retry: u8,
    pub(crate) min_rnr: u8,
    pub(crate) access: i32,
    pub(crate) reads: u8,
}

impl Link {
    pub(crate) fn to(nic: &Nic, dest: u32) -> Self {
        Self {
            dest,
            gid: nic.gid,
            gid_index: nic.gid_index,
            mtu: 5,
            sq_psn: 0xff_fff0,
            rq_psn: 0xff_fff0,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            min_rnr: 1,
            access: ALL,
            reads: 4,
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Qp {
    pub(crate) qp: *mut ffi::ibv_qp,
    pub(crate) cq: *mut ffi::ibv_cq,
}

unsafe impl Send for Qp {}
unsafe impl Sync for Qp {}

pub(crate) const INIT: u32 = mask::STATE | mask::PKEY_INDEX | mask::PORT | mask::ACCESS;
pub(crate) const RTR: u32 =
    mask::STATE | mask::AV | mask::PATH_MTU | mask::DEST_QPN | mask::RQ_PSN | mask::MAX_DEST_RD | mask::MIN_RNR;
pub(crate) const RTS: u32 =
    mask::STATE | mask::TIMEOUT | mask::RETRY_CNT | mask::RNR_RETRY | mask::SQ_PSN | mask::MAX_RD;

impl Qp {
    pub(crate) fn num(&self) -> u32 {
        unsafe { (*self.qp).qp_num }
    }

    pub(crate) fn attr(link: &Link) -> ffi::ibv_qp_attr {
        let mut attr = ffi::ibv_qp_attr {
            port_num: 1,
            path_mtu: link.mtu,
            dest_qp_num: link.dest,
            rq_psn: link.rq_psn,
            sq_psn: link.sq_psn,
            max_rd_atomic: link.reads,
            max_dest_rd_atomic: link.reads,
            min_rnr_timer: link.min_rnr,
            timeout: link.timeout,
            retry_cnt: link.retry_cnt,
            rnr_retry: link.rnr_retry,
            qp_access_flags: link.access.cast_unsigned(),
            ..Default::default()
        };
        attr.ah_attr.is_global = 1;
        attr.ah_attr.port_num = 1;
        attr.ah_attr.grh.sgid_index = link.gid_index;
        attr.ah_attr.grh.dgid.raw = link.gid;
        attr
    }

    pub(crate) fn modify(&self, mut attr: ffi::ibv_qp_attr, state: u32, given: u32) -> i32 {
        attr.qp_state = state;
        unsafe { v::modify_qp(self.qp, &mut attr, given.cast_signed()) }
    }

    pub(crate) fn init(&self, link: &Link) {
        assert_eq!(self.modify(Self::attr(link), 1, INIT), 0);
    }

    pub(crate) fn connect(&self, link: &Link) {
        self.init(link);
        assert_eq!(self.modify(Self::attr(link), 2, RTR), 0);
        assert_eq!(self.modify(Self::attr(link), 3, RTS), 0);
    }

    pub(crate) fn to_err(self) {
        assert_eq!(self.modify(ffi::ibv_qp_attr::default(), 6, mask::STATE), 0);
    }

    pub(crate) fn send(&self, mut wr: ffi::ibv_send_wr) -> i32 {
        let mut bad = ptr::null_mut();
        unsafe { (*(*self.qp).context).ops.post_send.unwrap()(self.qp, &mut wr, &mut bad) }
    }

    pub(crate) fn write(&self, id: u64, local: &[ffi::ibv_sge], raddr: u64, rkey: u32, imm: Option<u32>) {
        let opcode = if imm.is_some() { 1 } else { 0 };
        let wr = wr(id, opcode, local, raddr, rkey, imm.unwrap_or(0));
        assert_eq!(self.send(wr), 0);
    }

    pub(crate) fn recv(&self, id: u64, sges: &[ffi::ibv_sge]) -> i32 {
        let mut wr = ffi::ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: sges.as_ptr().cast_mut(),
            num_sge: i32::try_from(sges.len()).unwrap(),
        };
        let mut bad = ptr::null_mut();
        unsafe { (*(*self.qp).context).ops.post_recv.unwrap()(self.qp, &mut wr, &mut bad) }
    }

    pub(crate) fn poll(&self) -> Vec<Wc> {
        poll(self.cq)
    }

    pub(crate) fn wait(&self, count: usize) -> Vec<Wc> {
        wait(self.cq, count)
    }

    /// The next completion.
    pub(crate) fn one(&self) -> Wc {
        wait(self.cq, 1)[0]
    }

    pub(crate) fn destroy(self) {
        unsafe {
            assert_eq!(v::destroy_qp(self.qp), 0);
            assert_eq!(v::destroy_cq(self.cq), 0);
        }
    }
}

pub(crate) fn poll(cq: *mut ffi::ibv_cq) -> Vec<Wc> {
    let mut out = [Wc::default(); 32];
    let found = unsafe { (*(*cq).context).ops.poll_cq.unwrap()(cq, 32, out.as_mut_ptr().cast()) };
    out[..usize::try_from(found).unwrap()].to_vec()
}

pub(crate) fn wait(cq: *mut ffi::ibv_cq, count: usize) -> Vec<Wc> {
    let (start, mut all) = (Instant::now(), Vec::new());
    while all.len() < count {
        let mut one = [Wc::default(); 1];
        let found = unsafe { (*(*cq).context).ops.poll_cq.unwrap()(cq, 1, one.as_mut_ptr().cast()) };
        if found == 1 {
            all.push(one[0]);
        } else {
            assert!(start.elapsed() < LIMIT, "{count} completions wanted, got {all:?}");
            std::thread::yield_now();
        }
    }
    all
}

pub(crate) fn sge(bytes: &[u8], mr: *mut ffi::ibv_mr) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: bytes.as_ptr().expose_provenance() as u64,
        length: u32::try_from(bytes.len()).unwrap(),
        lkey: if mr.is_null() { 0 } else { unsafe { (*mr).lkey } },
    }
}

/// Signalled.
pub(crate) fn wr(id: u64, opcode: u32, local: &[ffi::ibv_sge], raddr: u64, rkey: u32, imm: u32) -> ffi::ibv_send_wr {
    let mut wr: ffi::ibv_send_wr = unsafe { std::mem::zeroed() };
    wr.wr_id = id;
    wr.opcode = opcode;
    wr.sg_list = local.as_ptr().cast_mut();
    wr.num_sge = i32::try_from(local.len()).unwrap();
    wr.send_flags = 2;
    wr.__bindgen_anon_1.imm_data = imm.to_be();
    wr.wr.rdma.remote_addr = raddr;
    wr.wr.rdma.rkey = rkey;
    wr
}

/// Two connected queue pairs of one device.
pub(crate) fn pair(nic: &Nic) -> (Qp, Qp) {
    pair_with(nic, |_| (), |_| ())
}

pub(crate) fn pair_with(nic: &Nic, first: impl FnOnce(&mut Link), second: impl FnOnce(&mut Link)) -> (Qp, Qp) {
    let (a, b) = (nic.qp(), nic.qp());
    let (mut to_b, mut to_a) = (Link::to(nic, b.num()), Link::to(nic, a.num()));
    first(&mut to_b);
    second(&mut to_a);
    b.connect(&to_a);
    a.connect(&to_b);
    (a, b)
}

pub(crate) fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31) ^ (i >> 8) as u8 ^ seed).collect()
}

pub(crate) fn addr(bytes: &[u8]) -> u64 {
    bytes.as_ptr().expose_provenance() as u64
}

pub(crate) fn rkey(mr: *mut ffi::ibv_mr) -> u32 {
    unsafe { (*mr).rkey }
}

/// The next asynchronous event, or None after a while.
pub(crate) fn async_event(ctx: *mut ffi::ibv_context, within: Duration) -> Option<ffi::ibv_async_event> {
    let fd = unsafe { (*ctx).async_fd };
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(within.as_millis()).unwrap();
    (unsafe { libc::poll(&mut poll, 1, ms) } == 1).then(|| unsafe {
        let mut event = std::mem::zeroed();
        assert_eq!(v::get_async_event(ctx, &mut event), 0);
        event
    })
}

pub(crate) const RIGHTS: i32 = (access::LOCAL_WRITE | access::REMOTE_WRITE | access::REMOTE_READ).cast_signed();
