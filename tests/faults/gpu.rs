//! GPU memory, as far as it goes without a GPU: what is reported by what the machine shows, what is refused and how, and
//! flushes. Registered by its address, host memory stands in for it (an adapter does not mind); by a dma-buf, soft-hca's
//! model of a GPU, a memfd.

use std::ffi::c_int;
use std::fs::File;
use std::os::fd::{AsFd as _, FromRawFd as _};
use std::ptr::NonNull;

use nccl_net_rdma::abi::types::ncclResult_t;

use crate::plugin::{CUDA, Comm, DMABUF, HOST, Plugin, forget_lines, infos, pattern, warnings, warnings_with};
use crate::rig::{Room, Setting, alone, host, roce, until};

const LOADED: (&str, &str) = ("proc/modules", "nvidia_peermem 16384 0 - Live 0x0000000000000000\n");
const REGISTERED: (&str, &str) = ("sys/kernel/mm/memory_peers/nv_mem/version", "580.95.05\n");
const TAKES_DMABUF: &str = "gpu_dmabuf = true";
const PEERMEM_ON: (&str, &str) = ("NCCL_NET_RDMA_PEERMEM", "on");

/// The plugin on a machine that shows these files.
pub(crate) fn on_machine(room: &Room, files: &[(&str, &str)]) -> Plugin {
    let root = room.path("root");
    for (name, text) in files {
        std::fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
        std::fs::write(root.join(name), text).unwrap();
    }
    // SAFETY: this process has one other thread, the test runner's, which waits.
    unsafe { std::env::set_var("NCCL_NET_RDMA_SYSROOT", root) };
    Plugin::started()
}

/// The line that says which memory a device takes.
fn takes(device: c_int) -> String {
    let start = format!("device {device} takes ");
    infos().into_iter().chain(warnings()).find(|l| l.contains(&start)).unwrap()
}

macro_rules! machines {
    ($($name:ident: $files:expr, $device:expr, $env:expr => $support:expr, $words:expr;)*) => { $(
        #[test]
        fn $name() {
            let fabric = host("a", &[roce("soft0", "10.0.0.1", $device, "")]);
            alone(&Setting { fabric: Some(&fabric), env: &$env }, |room| {
                let plugin = on_machine(room, &$files);
                assert_eq!(plugin.properties(0).ptr_support, $support);
                let told = takes(0);
                let words: &[&str] = &$words;
                for word in words {
                    assert!(told.contains(word), "{word} is missing: {told}");
                }
            });
        }
    )* };
}

machines! {
    a_module_that_is_loaded_and_not_registered_does_not_count: [LOADED], "", [] =>
        HOST, ["host memory only", "loaded, not registered", "no dma-buf: not supported", "ibv_reg_dmabuf_mr on soft0"];
    dma_buf_alone_is_no_cuda_bit: [LOADED], TAKES_DMABUF, [] =>
        HOST | DMABUF, ["GPU memory by dma-buf", "loaded, not registered"];
    both_ways: [LOADED, REGISTERED], TAKES_DMABUF, [] =>
        HOST | CUDA | DMABUF, ["GPU memory by dma-buf or nvidia_peermem"];
    a_module_that_is_not_loaded: [], "", [] => HOST, ["modprobe nvidia_peermem"];
    a_driver_that_is_hidden_can_be_vouched_for: [], "", [PEERMEM_ON] => HOST | CUDA, ["GPU memory by nvidia_peermem"];
    a_driver_can_be_left_alone: [LOADED, REGISTERED], TAKES_DMABUF, [("NCCL_NET_RDMA_PEERMEM", "off")] =>
        HOST | DMABUF, ["NCCL_NET_RDMA_PEERMEM=off"];
    a_kernel_that_knows_no_dma_buf: [], TAKES_DMABUF, [("SOFT_HCA_FAIL", "reg_dmabuf_mr:1:93")] =>
        HOST, ["Protocol not supported"];
    an_answer_that_is_not_understood_is_a_no: [], TAKES_DMABUF, [("SOFT_HCA_FAIL", "reg_dmabuf_mr:1:EINVAL")] =>
        HOST, ["Invalid argument"];
    a_verb_that_is_hidden: [], "gpu_dmabuf = true\nhide = [\"reg_dmabuf_mr\"]", [] => HOST, ["Operation not supported"];
}

/// What any rail lacks, the group lacks.
#[test]
fn a_group_takes_what_all_its_rails_take() {
    let rail = |n: usize, extra| roce(&format!("r{n}"), &format!("10.0.{n}.1"), extra, "");
    let fabric = host("a", &[rail(0, TAKES_DMABUF), rail(1, ""), rail(2, TAKES_DMABUF), rail(3, TAKES_DMABUF)]);
    let env = [("NCCL_NET_RDMA_RAILS", "r0+r1,r2+r3")];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |room| {
        let plugin = on_machine(room, &[REGISTERED]);
        assert_eq!(plugin.properties(plugin.find("r0+r1")).ptr_support, HOST | CUDA);
        assert_eq!(plugin.properties(plugin.find("r2+r3")).ptr_support, HOST | CUDA | DMABUF);
        let told = takes(plugin.find("r0+r1"));
        assert!(told.contains("ibv_reg_dmabuf_mr on r1"), "{told}");
    });
}

/// The one warning of a call that failed.
fn refusal<T: std::fmt::Debug, E>(result: &Result<T, E>, parts: &[&str]) {
    assert!(result.is_err(), "{result:?}", result = result.as_ref().ok());
    let told = warnings();
    assert_eq!(told.len(), 1, "{told:#?}");
    for part in parts {
        assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
    }
    forget_lines();
}

#[test]
fn memory_that_was_not_offered_is_refused_with_the_reason() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |room| {
        let plugin = on_machine(room, &[LOADED]);
        // That every byte will be staged although the module is there is a warning.
        assert!(warnings().iter().any(|l| l.contains("host memory only")), "{:?}", warnings());
        forget_lines();
        let pair = plugin.pair(0, 0);
        let data = pattern(5000);
        let file = File::open("/dev/null").unwrap();
        let by_address = plugin.reg_mr_as(pair.1, &data, CUDA);
        refusal(&by_address, &["soft0:1 can't register GPU memory by its address", "loaded, not registered"]);
        let by_descriptor = plugin.reg_dma_buf(pair.1, &data, 0, file.as_fd());
        refusal(&by_descriptor, &["soft0:1 can't register a dma-buf", "Operation not supported"]);
        plugin.carry(pair, &data);
        plugin.close(pair);
    });
}

fn two_rails(extra: &str) -> String {
    host("a", &[roce("r0", "10.0.0.1", extra, ""), roce("r1", "10.0.1.1", extra, "")])
}

const RAILS: (&str, &str) = ("NCCL_NET_RDMA_RAILS", "r0+r1");

/// A failure on the second rail gives back what the first one registered: it has room for one more region than the
/// connection itself takes (credit ring, its shadow, landing place of flushes).
#[test]
fn a_registration_that_fails_half_way_leaves_nothing() {
    let env = [RAILS, PEERMEM_ON, ("SOFT_HCA_FAIL", "reg_mr_iova2:2:EFAULT,reg_mr_iova2:4:ENOMEM")];
    alone(&Setting { fabric: Some(&two_rails("max_mr = 4")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let (one, other) = (pattern(10_000), pattern(10_000));
        let parts = ["ibv_reg_mr_iova2 on r1", "Bad address", "/sys/kernel/mm/memory_peers"];
        refusal(&plugin.reg_mr_as(pair.1, &one, CUDA), &parts);
        refusal(&plugin.reg_mr_as(pair.1, &one, CUDA), &["ibv_reg_mr_iova2 on r1", "BAR1"]);
        let memory = plugin.reg_mr_as(pair.1, &other, CUDA).unwrap();
        plugin.dereg_mr(pair.1, memory);
        plugin.close(pair);
    });
}

/// The probes of the two devices are calls 1 and 2.
#[test]
fn a_dma_buf_that_is_refused_says_why() {
    let env = [RAILS, ("SOFT_HCA_FAIL", "reg_dmabuf_mr:3:EINVAL")];
    alone(&Setting { fabric: Some(&two_rails(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let data = pattern(10_000);
        let file = File::open("/dev/null").unwrap();
        let refused = plugin.reg_dma_buf(pair.1, &data, 0, file.as_fd());
        refusal(&refused, &["ibv_reg_dmabuf_mr on r0", "Invalid argument", "from offset 0x0", "10000 bytes"]);
        // That file is no dma-buf: the same once more, of which no one needs a second warning.
        assert!(plugin.reg_dma_buf(pair.1, &data, 0, file.as_fd()).is_err());
        assert!(warnings().is_empty() && infos().iter().any(|l| l.contains("ibv_reg_dmabuf_mr on r0")));
        plugin.carry(pair, &data);
        plugin.close(pair);
    });
}

/// Memory of soft-hca's model of a GPU, mapped.
struct Modelled {
    file: File,
    base: NonNull<u8>,
    len: usize,
}

impl Modelled {
    fn new(len: usize) -> Self {
        // SAFETY: a C string.
        let fd = unsafe { libc::memfd_create(c"gpu".as_ptr(), libc::MFD_CLOEXEC) };
        assert!(fd >= 0);
        // SAFETY: just opened.
        let file = unsafe { File::from_raw_fd(fd) };
        file.set_len(u64::try_from(len).unwrap()).unwrap();
        let (access, at) = (libc::PROT_READ | libc::PROT_WRITE, std::ptr::null_mut());
        // SAFETY: a new mapping touches no existing memory.
        let base = unsafe { libc::mmap(at, len, access, libc::MAP_SHARED, fd, 0) };
        assert_ne!(base, libc::MAP_FAILED);
        Self { file, base: NonNull::new(base.cast()).unwrap(), len }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped as long as this object lives.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }

    /// Registers what is from `offset` on; the descriptor is closed afterwards, as NCCL does.
    fn register(&mut self, plugin: &Plugin, comm: Comm, offset: usize) -> Result<Comm, ncclResult_t> {
        let fd = self.file.try_clone().unwrap();
        plugin.reg_dma_buf(comm, &self.bytes()[offset..], u64::try_from(offset).unwrap(), fd.as_fd())
    }
}

impl Drop for Modelled {
    fn drop(&mut self) {
        // SAFETY: mapped by us, unmapped once.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

const MODEL: &str = "gpu_dmabuf = true\ngpu_model = true";

/// The lengths are no multiple of a page, and the dma-bufs end where the data end.
#[test]
fn bytes_travel_between_dma_bufs() {
    alone(&Setting { fabric: Some(&two_rails(MODEL)), env: &[RAILS] }, |_| {
        let plugin = Plugin::started();
        let (send, recv) = plugin.pair(0, 0);
        for (len, offset) in [(8, 0), (10_000, 4096), (3_000_001, 65_536 + 100)] {
            let (mut from, mut to) = (Modelled::new(offset + len), Modelled::new(offset + len));
            from.bytes().copy_from_slice(&pattern(offset + len));
            let sending = from.register(&plugin, send, offset).unwrap();
            let receiving = to.register(&plugin, recv, offset).unwrap();
            let receive = until("irecv", || plugin.irecv(recv, &mut to.bytes()[offset..], 0, receiving).unwrap());
            let sent = until("isend", || plugin.isend(send, &from.bytes()[offset..], 0, sending).unwrap());
            let size = plugin.finish(receive).unwrap();
            assert_eq!(usize::try_from(size).unwrap(), len);
            plugin.finish(sent).unwrap();
            let flush = plugin.iflush(recv, &to.bytes()[offset..], size, receiving).unwrap().unwrap();
            plugin.finish(flush).unwrap();
            assert!(to.bytes()[offset..] == from.bytes()[offset..], "{len} bytes at {offset} differ");
            assert!(to.bytes()[..offset].iter().all(|&b| b == 0), "written before the start");
            plugin.dereg_mr(send, sending);
            plugin.dereg_mr(recv, receiving);
        }
        plugin.close((send, recv));
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// Connections that get the same dma-buf have one region of it on each NIC; another export is another.
#[test]
fn one_dma_buf_is_registered_once() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", MODEL, "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let pairs = [plugin.pair(0, 0), plugin.pair(0, 0)];
        let (mut memory, mut other) = (Modelled::new(10_000), Modelled::new(10_000));
        let handles = pairs.map(|(send, _)| memory.register(&plugin, send, 0).unwrap());
        let another = other.register(&plugin, pairs[0].0, 0).unwrap();
        for ((send, _), handle) in pairs.into_iter().zip(handles) {
            plugin.dereg_mr(send, handle);
        }
        plugin.dereg_mr(pairs[0].0, another);
        for pair in pairs {
            plugin.close(pair);
        }
        let told = infos().into_iter().find(|l| l.contains("last connection closed")).unwrap();
        assert!(told.contains("2 memory regions registered, 1 times shared"), "{told}");
    });
}

/// As a_registration_that_fails_half_way_leaves_nothing; the first two calls are the probes.
#[test]
fn a_dma_buf_that_the_second_rail_refuses_leaves_nothing() {
    let env = [RAILS, ("SOFT_HCA_FAIL", "reg_dmabuf_mr:4:ENOMEM")];
    let tight = format!("{MODEL}\nmax_mr = 4");
    alone(&Setting { fabric: Some(&two_rails(&tight)), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let mut memory = Modelled::new(1 << 20);
        refusal(&memory.register(&plugin, pair.1, 0), &["ibv_reg_dmabuf_mr on r1", "memlock", "BAR1"]);
        let handle = memory.register(&plugin, pair.1, 0).unwrap();
        plugin.dereg_mr(pair.1, handle);
        plugin.close(pair);
    });
}

/// A message that has arrived in memory registered as that of a GPU.
struct Arrived {
    pair: (Comm, Comm),
    memory: [Comm; 2],
    _from: Vec<u8>,
    to: Vec<u8>,
}

impl Arrived {
    fn new(plugin: &Plugin, len: usize) -> Self {
        let pair = plugin.pair(0, 0);
        let (from, mut to) = (pattern(len), vec![0; len]);
        let kind = if plugin.properties(0).ptr_support & CUDA == 0 { HOST } else { CUDA };
        let memory = [plugin.reg_mr_as(pair.0, &from, kind).unwrap(), plugin.reg_mr_as(pair.1, &to, kind).unwrap()];
        let receive = until("irecv", || plugin.irecv(pair.1, &mut to, 0, memory[1]).unwrap());
        let send = until("isend", || plugin.isend(pair.0, &from, 0, memory[0]).unwrap());
        let size = plugin.finish(receive).unwrap();
        assert_eq!(usize::try_from(size).unwrap(), len);
        plugin.finish(send).unwrap();
        assert!(from == to, "the bytes differ");
        Self { pair, memory, _from: from, to }
    }

    fn iflush(&self, plugin: &Plugin, size: c_int) -> Option<Comm> {
        plugin.iflush(self.pair.1, &self.to, size, self.memory[1]).unwrap()
    }

    fn end(self, plugin: &Plugin) {
        plugin.dereg_mr(self.pair.0, self.memory[0]);
        plugin.dereg_mr(self.pair.1, self.memory[1]);
        plugin.close(self.pair);
    }
}

#[test]
fn gpu_memory_is_flushed_and_host_memory_is_not() {
    alone(&Setting { fabric: Some(&two_rails("")), env: &[RAILS, PEERMEM_ON] }, |_| {
        let plugin = Plugin::started();
        let arrived = Arrived::new(&plugin, 100_000);
        for _ in 0..200 {
            let flush = arrived.iflush(&plugin, 100_000).unwrap();
            plugin.finish(flush).unwrap();
        }
        assert_eq!(arrived.iflush(&plugin, 0), None, "nothing arrived");
        let room = pattern(4096);
        let as_host = plugin.reg_mr(arrived.pair.1, &room).unwrap();
        assert_eq!(plugin.iflush(arrived.pair.1, &room, 4096, as_host).unwrap(), None);
        plugin.dereg_mr(arrived.pair.1, as_host);
        arrived.end(&plugin);
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// A small message is a credit and one write; then come the reads, one on each rail. Any of them may fail.
macro_rules! flushes_that_fail {
    ($($name:ident: $plan:literal, $rail:literal;)*) => { $(
        #[test]
        fn $name() {
            let env = [RAILS, PEERMEM_ON, ("SOFT_HCA_FAIL", $plan)];
            alone(&Setting { fabric: Some(&two_rails("")), env: &env }, |_| {
                let plugin = Plugin::started();
                let arrived = Arrived::new(&plugin, 100);
                let flush = arrived.iflush(&plugin, 100).unwrap();
                plugin.finish(flush).unwrap_err();
                // The other end of the connection is in this process and tells what it was told.
                let own = warnings_with(": flush (RDMA READ) of 1 bytes received from peer");
                assert!(own.iter().any(|w| w.contains($rail) && w.contains("REM_OP_ERR")), "{:#?}", warnings());
                arrived.end(&plugin);
            });
        }
    )* };
}

flushes_that_fail! {
    a_flush_reads_on_the_first_rail: "send_wr:3:REM_OP_ERR/7", "on r0:1 QP";
    a_flush_reads_on_the_second_rail: "send_wr:4:REM_OP_ERR/7", "on r1:1 QP";
}

/// The device has QPs for the connection itself and for no flush.
#[test]
fn flushes_can_be_disabled() {
    let env = [PEERMEM_ON, ("NCCL_GDR_FLUSH_DISABLE", "1")];
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "max_qp = 2", "")]);
    alone(&Setting { fabric: Some(&fabric), env: &env }, |_| {
        let plugin = Plugin::started();
        let arrived = Arrived::new(&plugin, 100);
        assert_eq!(arrived.iflush(&plugin, 100), None);
        arrived.end(&plugin);
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// NCCL aborts so. The read is under way for a tenth of a second, and must find its region.
#[test]
fn memory_given_back_during_its_flush_ends_the_connection_in_good_order() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", "latency_us = 100000")]);
    alone(&Setting { fabric: Some(&fabric), env: &[PEERMEM_ON] }, |_| {
        let plugin = Plugin::started();
        let arrived = Arrived::new(&plugin, 100);
        let flush = arrived.iflush(&plugin, 100).unwrap();
        plugin.dereg_mr(arrived.pair.1, arrived.memory[1]);
        plugin.finish(flush).unwrap_err();
        assert!(infos().iter().any(|l| l.contains("aborted by deregistration")), "{:#?}", infos());
        assert!(!warnings().iter().any(|w| w.contains("RDMA READ")), "{:#?}", warnings());
        plugin.dereg_mr(arrived.pair.0, arrived.memory[0]);
        plugin.close(arrived.pair);
    });
}
