//! GPU memory that is copied through host memory, on a stand-in for the CUDA driver: what is reported, what is refused and
//! how, which way gives way to which, and the end of memory that is being copied.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::os::fd::AsFd as _;
use std::time::Duration;

use nccl_net_rdma::abi::types::ncclResult_t;

use crate::cuda;
use crate::plugin::{CUDA, Comm, DMABUF, HOST, Plugin, forget_lines, infos, pattern, warnings, warnings_with};
use crate::rig::{Setting, alone, host, roce, until};

pub(crate) const STAGING: (&str, &str) = ("NCCL_NET_RDMA_GPU_PATH", "staging");
const PEERMEM_ON: (&str, &str) = ("NCCL_NET_RDMA_PEERMEM", "on");
const STRICT: (&str, &str) = ("NCCL_NET_RDMA_STRICT", "1");
const TAKES_DMABUF: &str = "gpu_dmabuf = true";

fn driver() -> (&'static str, &'static str) {
    ("LD_LIBRARY_PATH", cuda::folder())
}

pub(crate) fn fabric(device: &str) -> String {
    host("a", &[roce("soft0", "10.0.0.1", device, "")])
}

/// A function of the stand-in.
pub(crate) fn of_driver<T: Copy>(name: &std::ffi::CStr) -> T {
    // SAFETY: a C string; the plugin or this test has loaded it.
    let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
    // SAFETY: a live library and a C string.
    let found = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!found.is_null(), "{name:?} is missing");
    const { assert!(size_of::<T>() == size_of::<*mut c_void>()) };
    // SAFETY: the caller names a function and its type.
    unsafe { std::mem::transmute_copy(&found) }
}

pub(crate) fn count(name: &std::ffi::CStr) -> u64 {
    let count: unsafe extern "C" fn() -> u64 = of_driver(name);
    // SAFETY: only looks.
    unsafe { count() }
}

pub(crate) fn pinned() -> u64 {
    count(c"stand_in_pinned")
}

/// Memory of the GPU, and a look at it.
pub(crate) struct Gpu {
    at: *mut c_void,
    len: usize,
    view: *mut u8,
}

impl Gpu {
    pub(crate) fn new(len: usize) -> Self {
        Self::of_kind(len, 1)
    }

    fn of_kind(len: usize, vmm: c_int) -> Self {
        let alloc: unsafe extern "C" fn(usize, c_int) -> u64 = of_driver(c"stand_in_alloc");
        let view: unsafe extern "C" fn(u64) -> *mut u8 = of_driver(c"stand_in_view");
        // SAFETY: gives memory.
        let at = unsafe { alloc(len, vmm) };
        assert_ne!(at, 0);
        // SAFETY: of its own memory.
        let view = unsafe { view(at) };
        Self { at: at as *mut c_void, len, view }
    }

    /// Gives it back, as NCCL does after deregMr.
    fn free(&self) {
        let free: unsafe extern "C" fn(u64) = of_driver(c"stand_in_free");
        // SAFETY: only forgets it.
        unsafe { free(self.at as u64) };
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        // SAFETY: as long as this.
        unsafe { std::slice::from_raw_parts(self.view, self.len) }.to_vec()
    }

    pub(crate) fn fill(&self, bytes: &[u8]) {
        assert!(bytes.len() <= self.len);
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.view, bytes.len()) };
    }

    pub(crate) fn part(&self, len: usize) -> (*mut c_void, usize) {
        (self.at, len)
    }

    pub(crate) fn register(&self, plugin: &Plugin, comm: Comm) -> Result<Comm, ncclResult_t> {
        plugin.reg_mr_at(comm, self.at, self.len, CUDA)
    }

    /// By a descriptor that a test's adapter refuses.
    fn register_dmabuf(&self, plugin: &Plugin, comm: Comm) -> Result<Comm, ncclResult_t> {
        let file = File::open("/dev/null").unwrap();
        plugin.reg_dma_buf_at(comm, self.at, self.len, 0, file.as_fd())
    }
}

/// Sends what one GPU buffer has to the other.
pub(crate) fn carry(plugin: &Plugin, (send, recv): (Comm, Comm), gpus: [&Gpu; 2], memory: [Comm; 2], len: usize) {
    let [from, to] = gpus;
    from.fill(&pattern(len));
    let receive = until("irecv", || plugin.irecv_at(recv, to.part(len), 0, memory[1]).unwrap());
    let sent = until("isend", || plugin.isend_at(send, from.part(len), 0, memory[0]).unwrap());
    let (mut received, mut done) = (None, None);
    until("both ends", || {
        received = received.take().or_else(|| plugin.test(receive).unwrap());
        done = done.take().or_else(|| plugin.test(sent).unwrap());
        (received.is_some() && done.is_some()).then_some(())
    });
    assert_eq!(received, Some(c_int::try_from(len).unwrap()));
    assert!(to.bytes()[..len] == from.bytes()[..len], "the bytes differ");
}

fn refused<T: std::fmt::Debug, E>(result: &Result<T, E>, parts: &[&str]) {
    assert!(result.is_err(), "{result:?}", result = result.as_ref().ok());
    let told = warnings();
    assert_eq!(told.len(), 1, "{told:#?}");
    for part in parts {
        assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
    }
    forget_lines();
}

#[test]
fn staging_is_told_to_nccl_and_per_connection() {
    let env = [STAGING, driver(), ("CUDA_STAND_IN_DELAY", "500")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.properties(0).ptr_support, HOST | CUDA);
        assert!(infos().iter().any(|l| l.contains("takes host memory, GPU memory by staging (NCCL_NET_RDMA_GPU_PATH")));
        let pair = plugin.pair(0, 0);
        let (from, to) = (Gpu::new(3 << 20), Gpu::new(3 << 20));
        let memory = [from.register(&plugin, pair.0).unwrap(), to.register(&plugin, pair.1).unwrap()];
        for len in [0, 1, 4096, 100_001, 3 << 20] {
            carry(&plugin, pair, [&from, &to], memory, len);
        }
        assert_eq!(plugin.iflush(pair.1, &[0; 8], 8, memory[1]).unwrap(), None, "the copy engine wrote it");
        for end in ["sending", "receiving"] {
            assert!(infos().iter().any(|l| l.contains(end) && l.contains("GPU memory by staging")), "{:#?}", infos());
        }
        let told: Vec<String> = infos().into_iter().filter(|l| l.contains("GPU 0 (Stand-in) with peer")).collect();
        assert!(told.len() == 2 && told[0].contains("staging; NCCL_NET_RDMA_GPU_PATH=staging"), "{told:#?}");
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
        assert_eq!(warnings(), Vec::<String>::new());
        assert_eq!(pinned(), 0, "nothing stays pinned");
    });
}

#[test]
fn connections_share_the_shadow_of_a_range() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let pairs = [plugin.pair(0, 0), plugin.pair(0, 0)];
        let gpu = Gpu::new(1 << 20);
        let first = gpu.register(&plugin, pairs[0].0).unwrap();
        let once = pinned();
        assert!(once >= 1 << 20);
        let second = gpu.register(&plugin, pairs[1].0).unwrap();
        assert_eq!(pinned(), once);
        plugin.dereg_mr(pairs[0].0, first);
        assert_eq!(pinned(), once);
        plugin.dereg_mr(pairs[1].0, second);
        assert!(pinned() < 1 << 20);
        pairs.into_iter().for_each(|pair| plugin.close(pair));
    });
}

#[test]
fn without_a_driver_staging_is_not_offered() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, ("LD_LIBRARY_PATH", cuda::no_driver())] }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.properties(0).ptr_support, HOST);
        let told = warnings_with("device 0 takes host memory only");
        assert!(told.len() == 1 && told[0].contains("no staging: there is no CUDA driver"), "{:#?}", warnings());
    });
}

#[test]
fn host_is_host_whatever_is_open() {
    let env = [("NCCL_NET_RDMA_GPU_PATH", "host"), PEERMEM_ON];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.properties(0).ptr_support, HOST);
        let pair = plugin.pair(0, 0);
        let data = pattern(100);
        let parts =
            ["soft0:1 can't register GPU memory", "GPU_PATH=host", "NCCL_NET_GDR_LEVEL=LOC", "there is no staging"];
        refused(&plugin.reg_mr_as(pair.1, &data, CUDA), &parts);
        plugin.close(pair);
    });
}

/// NCCL 2.30 and newer may come with GPU memory although it was told otherwise: the job goes on.
#[test]
fn gpu_memory_that_comes_although_host_was_said_is_staged() {
    let env = [("NCCL_NET_RDMA_GPU_PATH", "host"), PEERMEM_ON, driver()];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.properties(0).ptr_support, HOST);
        let pair = plugin.pair(0, 0);
        let gpus = [Gpu::new(4096), Gpu::new(4096)];
        let memory = [gpus[0].register(&plugin, pair.0).unwrap(), gpus[1].register(&plugin, pair.1).unwrap()];
        let told = warnings_with("GPU memory goes by staging instead");
        assert!(told.len() == 1 && told[0].contains("NCCL_NET_GDR_LEVEL=LOC"), "{:#?}", warnings());
        carry(&plugin, pair, [&gpus[0], &gpus[1]], memory, 4096);
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
    });
}

#[test]
fn strictly_host_takes_no_gpu_memory() {
    let env = [("NCCL_NET_RDMA_GPU_PATH", "host"), PEERMEM_ON, driver(), ("NCCL_NET_RDMA_STRICT", "1")];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        refused(
            &Gpu::new(4096).register(&plugin, pair.1),
            &["can't register GPU memory", "NCCL_NET_RDMA_STRICT is set"],
        );
        plugin.close(pair);
    });
}

/// The driver carries such copies out behind the program's own kernels.
#[test]
fn memory_that_belongs_to_a_context_is_refused() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        refused(&Gpu::of_kind(4096, 0).register(&plugin, pair.0), &["not of cuMemCreate", "NCCL_CUMEM_ENABLE=1"]);
        plugin.close(pair);
    });
}

#[test]
fn more_than_is_staged_is_refused() {
    let env = [STAGING, driver(), ("NCCL_NET_RDMA_STAGING_MAX", "65536")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let (large, small) = (Gpu::new(65_537), Gpu::new(65_536));
        refused(&large.register(&plugin, pair.0), &["65537 bytes", "65536", "NCCL_NET_RDMA_STAGING_MAX"]);
        let memory = small.register(&plugin, pair.0).unwrap();
        plugin.dereg_mr(pair.0, memory);
        plugin.close(pair);
    });
}

/// However many registrations there are; what they pin is given back.
#[test]
fn a_process_stages_no_more_than_its_total() {
    let env = [STAGING, driver(), ("NCCL_NET_RDMA_STAGING_TOTAL", "100000")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let (one, other) = (Gpu::new(65_536), Gpu::new(65_536));
        for _ in 0..3 {
            let memory = one.register(&plugin, pair.0).unwrap();
            let same = one.register(&plugin, pair.1).unwrap();
            other.register(&plugin, pair.1).unwrap_err();
            plugin.dereg_mr(pair.0, memory);
            plugin.dereg_mr(pair.1, same);
        }
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("NCCL_NET_RDMA_STAGING_TOTAL allows, 100000 bytes"), "{told:#?}");
        plugin.close(pair);
    });
}

/// Memory that the driver knows nothing of, in turn of other lengths: the reason is the same.
#[test]
fn a_refusal_is_told_once_for_all_memory() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        for pages in 1..5 {
            Gpu::of_kind(4096 * pages, 0).register(&plugin, pair.0).unwrap_err();
        }
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("4096 bytes at 0x"), "{told:#?}");
        assert!(told[0].contains("of GPU 0 (Stand-in), by soft0:1, for peer"), "{told:#?}");
        plugin.close(pair);
    });
}

#[test]
fn a_driver_that_refuses_marks_is_no_driver_for_staging() {
    let env = [STAGING, driver(), ("CUDA_STAND_IN_LACKS", "cuStreamWriteValue32_v2")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let gpu = Gpu::new(4096);
        refused(&gpu.register(&plugin, pair.0), &["staging: cuStreamWriteValue32", "NOT_SUPPORTED"]);
        gpu.register(&plugin, pair.1).unwrap_err();
        assert_eq!(count(c"stand_in_contexts"), 1, "the answer is remembered");
        plugin.close(pair);
    });
}

/// Nothing else is watched.
#[test]
fn an_error_of_the_gpu_is_noticed_without_the_stall_watch() {
    let env = [STAGING, driver(), ("NCCL_NET_RDMA_STALL_TIMEOUT", "0"), ("CUDA_STAND_IN_LACKS", "cuStreamQuery")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let gpu = Gpu::new(4096);
        let memory = gpu.register(&plugin, pair.1).unwrap();
        let receive = until("irecv", || plugin.irecv_at(pair.1, gpu.part(4096), 0, memory).unwrap());
        until("the error", || plugin.test(receive).err());
        // The other end of the connection is in this process and tells what it was told.
        let told = warnings_with(" : a copy between GPU and host memory failed: cuStreamQuery");
        assert!(told.len() == 1 && told[0].contains("on GPU 0 (Stand-in)"), "{:#?}", warnings());
        plugin.dereg_mr(pair.1, memory);
        plugin.close(pair);
    });
}

/// The probe is the first call.
const REFUSES: (&str, &str) = ("SOFT_HCA_FAIL", "reg_dmabuf_mr:2:EINVAL,reg_dmabuf_mr:3:EINVAL");

#[test]
fn a_dma_buf_that_is_refused_gives_way_to_staging() {
    let env = [driver(), REFUSES, ("NCCL_NET_RDMA_PEERMEM", "off")];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.properties(0).ptr_support, HOST | DMABUF);
        let pair = plugin.pair(0, 0);
        let (from, to) = (Gpu::new(1 << 20), Gpu::new(1 << 20));
        let memory = [from.register_dmabuf(&plugin, pair.0).unwrap(), to.register_dmabuf(&plugin, pair.1).unwrap()];
        carry(&plugin, pair, [&from, &to], memory, 1 << 20);
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("ibv_reg_dmabuf_mr on soft0"), "once for the two: {told:#?}");
        assert!(told[0].contains("GPU memory goes by staging instead"), "{told:#?}");
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
    });
}

#[test]
fn a_dma_buf_that_is_refused_gives_way_to_peermem() {
    let env = [driver(), REFUSES, PEERMEM_ON];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        // Host memory, which a software adapter registers by its address.
        let data = pattern(10_000);
        let file = File::open("/dev/null").unwrap();
        let memory = plugin.reg_dma_buf(pair.0, &data, 0, file.as_fd()).unwrap();
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("GPU memory goes by nvidia_peermem instead"), "{told:#?}");
        plugin.dereg_mr(pair.0, memory);
        plugin.close(pair);
    });
}

#[test]
fn strict_lets_nothing_give_way() {
    let env = [driver(), REFUSES, PEERMEM_ON, STRICT];
    alone(&Setting { fabric: Some(&fabric(TAKES_DMABUF)), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let gpu = Gpu::new(4096);
        refused(&gpu.register_dmabuf(&plugin, pair.0), &["ibv_reg_dmabuf_mr on soft0", "NCCL_NET_RDMA_STRICT is set"]);
        plugin.close(pair);
    });
}

/// NCCL gives memory back in the middle of a copy, when it aborts, and frees it.
#[test]
fn a_copy_ends_before_its_memory_is_given_back() {
    let env = [STAGING, driver(), ("CUDA_STAND_IN_DELAY", "40000"), ("NCCL_NET_RDMA_STAGING_CHUNK", "65536")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 0);
        let (from, to) = (Gpu::new(1 << 20), Gpu::new(1 << 20));
        from.fill(&pattern(1 << 20));
        let memory = [from.register(&plugin, pair.0).unwrap(), to.register(&plugin, pair.1).unwrap()];
        let receive = until("irecv", || plugin.irecv_at(pair.1, to.part(1 << 20), 0, memory[1]).unwrap());
        let send = until("isend", || plugin.isend_at(pair.0, from.part(1 << 20), 0, memory[0]).unwrap());
        until("the first copy at the receiver", || {
            assert_eq!((plugin.test(send).unwrap(), plugin.test(receive).unwrap()), (None, None));
            to.bytes().iter().any(|&b| b != 0).then_some(())
        });
        plugin.dereg_mr(pair.1, memory[1]);
        let then = to.bytes();
        to.fill(&vec![7; 1 << 20]);
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.close(pair);
        assert!(then != from.bytes(), "it was in the middle");
        assert_eq!(pinned(), 0);
        std::thread::sleep(Duration::from_millis(500));
        assert!(to.bytes().iter().all(|&b| b == 7), "written after it was given back");
    });
}

/// All of the message lies in the shadow, and nobody has polled; NCCL aborts, frees the memory and closes. The stand-in ends the
/// process if a copy is started after that.
#[test]
fn what_arrived_unseen_is_not_copied_into_memory_that_was_given_back() {
    let env = [STAGING, driver(), ("NCCL_NET_RDMA_STAGING_CHUNK", "65536")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        for look in [false, true] {
            let pair = plugin.pair(0, 0);
            let (from, to) = (Gpu::new(1 << 20), Gpu::new(1 << 20));
            from.fill(&pattern(1 << 20));
            let memory = [from.register(&plugin, pair.0).unwrap(), to.register(&plugin, pair.1).unwrap()];
            let receive = until("irecv", || plugin.irecv_at(pair.1, to.part(1 << 20), 0, memory[1]).unwrap());
            let send = until("isend", || plugin.isend_at(pair.0, from.part(1 << 20), 0, memory[0]).unwrap());
            until("the send", || plugin.test(send).unwrap());
            plugin.dereg_mr(pair.1, memory[1]);
            to.free();
            if look {
                // The watch has every call look.
                std::thread::sleep(Duration::from_millis(1200));
                plugin.test(receive).unwrap_err();
            }
            plugin.dereg_mr(pair.0, memory[0]);
            plugin.close(pair);
            assert!(to.bytes().iter().all(|&b| b == 0));
        }
    });
}
