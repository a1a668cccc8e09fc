//! Copies of staging on a GPU that hangs, that fails, that is slow, full or short of memory; on the stand-in for the CUDA
//! driver.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cuda;
use crate::plugin::{Comm, Plugin, forget_lines, pattern, warnings, warnings_with};
use crate::rig::{Setting, alone, until};
use crate::staging::{Gpu, STAGING, carry, count, fabric, of_driver, pinned};

const CHUNK: (&str, &str) = ("NCCL_NET_RDMA_STAGING_CHUNK", "65536");
const LEN: usize = 1 << 20;

fn driver() -> (&'static str, &'static str) {
    ("LD_LIBRARY_PATH", cuda::folder())
}

/// All streams stand still, or go on.
fn stop(stopped: bool) {
    let stop: unsafe extern "C" fn(c_int) = of_driver(c"stand_in_hang");
    // SAFETY: a switch of the stand-in.
    unsafe { stop(stopped.into()) };
}

fn trick(which: &CStr, call: &CStr, value: c_int) {
    let trick: unsafe extern "C" fn(*const c_char, c_int, c_int) = of_driver(which);
    // SAFETY: a C string.
    unsafe { trick(call.as_ptr(), value, 1) };
}

/// The next call of this name answers so.
fn fail(call: &CStr, result: c_int) {
    trick(c"stand_in_fail", call, result);
}

/// The next call of this name takes so long.
fn rest(call: &CStr, ms: c_int) {
    trick(c"stand_in_rest", call, ms);
}

/// A comm or a handle for another thread, as NCCL has several.
#[derive(Clone, Copy)]
struct Shared(*mut c_void);
// SAFETY: the plugin's are for any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    fn get(&self) -> Comm {
        self.0
    }
}

/// A connection with GPU memory at its sending end, and its send under way.
struct Sending {
    pair: (Comm, Comm),
    from: Gpu,
    memory: Comm,
    to: (Vec<u8>, Comm),
}

impl Sending {
    fn new(plugin: &Plugin) -> Self {
        let (pair, from, to) = (plugin.pair(0, 0), Gpu::new(LEN), vec![0; LEN]);
        let memory = from.register(plugin, pair.0).unwrap();
        let there = plugin.reg_mr(pair.1, &to).unwrap();
        Self { pair, from, memory, to: (to, there) }
    }

    fn start(&mut self, plugin: &Plugin) -> Comm {
        until("irecv", || plugin.irecv(self.pair.1, &mut self.to.0, 0, self.to.1).unwrap());
        until("isend", || plugin.isend_at(self.pair.0, self.from.part(LEN), 0, self.memory).unwrap())
    }

    fn end(self, plugin: &Plugin) {
        plugin.dereg_mr(self.pair.1, self.to.1);
        plugin.close(self.pair);
    }
}

/// Those of all connections go through the same two, which the driver lets grow to some length, and then blocks.
#[test]
fn streams_take_no_more_than_the_driver_has_room_for() {
    const PAIRS: usize = 12;
    const EACH: usize = 8;
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        for staged in [0, 1] {
            let (gpu, host) = (Gpu::new(LEN), pattern(LEN));
            gpu.fill(&if staged == 0 { pattern(LEN) } else { vec![0; LEN] });
            let mut there = vec![0; LEN];
            let pairs: Vec<_> = (0..PAIRS).map(|_| plugin.pair(0, 0)).collect();
            let memory: Vec<_> = pairs
                .iter()
                .map(|&(send, recv)| match staged {
                    0 => (gpu.register(&plugin, send).unwrap(), plugin.reg_mr(recv, &there).unwrap()),
                    _ => (plugin.reg_mr(send, &host).unwrap(), gpu.register(&plugin, recv).unwrap()),
                })
                .collect();
            let at = there.as_mut_ptr().cast();
            let [from, to] =
                if staged == 0 { [gpu.part(LEN), (at, LEN)] } else { [(host.as_ptr() as _, LEN), gpu.part(LEN)] };
            stop(true);
            let mut open = Vec::new();
            let mut left = [EACH; PAIRS];
            for (pair, memory) in pairs.iter().zip(&memory) {
                open.extend((0..EACH).map(|_| until("irecv", || plugin.irecv_at(pair.1, to, 0, memory.1).unwrap())));
            }
            let mut progress = || {
                for ((pair, memory), left) in pairs.iter().zip(&memory).zip(&mut left) {
                    if *left > 0
                        && let Some(send) = plugin.isend_at(pair.0, from, 0, memory.0).unwrap()
                    {
                        open.push(send);
                        *left -= 1;
                    }
                }
                open.retain(|&request| plugin.test(request).unwrap().is_none());
                (open.is_empty() && left == [0; PAIRS]).then_some(())
            };
            let begin = Instant::now();
            while begin.elapsed() < Duration::from_secs(1) {
                assert_eq!(progress(), None);
            }
            let most = count(c"stand_in_longest");
            assert!((150..400).contains(&most), "{most} operations in a stream");
            stop(false);
            until("all of them", progress);
            assert!(if staged == 0 { there == gpu.bytes() } else { host == gpu.bytes() }, "the bytes differ");
            for ((send, recv), memory) in pairs.into_iter().zip(memory) {
                plugin.dereg_mr(send, memory.0);
                plugin.dereg_mr(recv, memory.1);
                plugin.close((send, recv));
            }
        }
        assert_eq!((warnings(), pinned()), (Vec::<String>::new(), 0));
    });
}

/// The driver waits for the streams of the context when it lets go of pages, also of those of others.
#[test]
fn memory_without_traffic_is_given_back_while_the_gpu_hangs() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let (mut busy, idle) = (Sending::new(&plugin), Gpu::new(LEN));
        let memory = idle.register(&plugin, busy.pair.0).unwrap();
        stop(true);
        busy.start(&plugin);
        let begin = Instant::now();
        plugin.dereg_mr(busy.pair.0, memory);
        assert!(begin.elapsed() < Duration::from_secs(15), "{:?}", begin.elapsed());
        assert!(pinned() >= 2 * LEN as u64, "the pages stay");
        stop(false);
        plugin.dereg_mr(busy.pair.0, busy.memory);
        busy.end(&plugin);
        // It goes on, and may be used again.
        let pair = plugin.pair(0, 0);
        let memory = [idle.register(&plugin, pair.0).unwrap(), idle.register(&plugin, pair.1).unwrap()];
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
        assert!((LEN as u64..2 * LEN as u64).contains(&pinned()), "{}", pinned());
        assert_eq!(count(c"stand_in_contexts"), 1);
    });
}

/// NCCL aborts one after the other, many of them.
#[test]
fn connections_wait_for_a_gpu_that_hangs_together() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let mut all = [Sending::new(&plugin), Sending::new(&plugin), Sending::new(&plugin)];
        stop(true);
        for one in &mut all {
            one.start(&plugin);
        }
        let begin = Instant::now();
        for one in &all {
            plugin.dereg_mr(one.pair.0, one.memory);
        }
        let took = begin.elapsed();
        assert!((Duration::from_secs(10)..Duration::from_secs(13)).contains(&took), "{took:?}");
        let told = warnings_with("do not end");
        assert!(
            told[0].contains("waited for 10.") && told[0].contains("; meanwhile memory was deregistered"),
            "{told:#?}"
        );
        // Once it goes on it has its time again.
        stop(false);
        let mut late = Sending::new(&plugin);
        stop(true);
        late.start(&plugin);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(2));
                stop(false);
            });
            plugin.dereg_mr(late.pair.0, late.memory);
        });
        assert_eq!(warnings_with("do not end"), told);
        all.into_iter().for_each(|one| one.end(&plugin));
        late.end(&plugin);
    });
}

/// What NCCL's next communicator registers is copied in another.
#[test]
fn a_context_that_has_failed_is_replaced() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let mut failing = Sending::new(&plugin);
        stop(true);
        let send = failing.start(&plugin);
        let fail: unsafe extern "C" fn() = of_driver(c"stand_in_break");
        // SAFETY: a switch of the stand-in.
        unsafe { fail() };
        stop(false);
        until("the error", || plugin.test(send).err());
        assert_eq!(warnings_with("copies").len(), 0, "nothing hangs: {:#?}", warnings());
        let pair = plugin.pair(0, 0);
        let (from, to) = (Gpu::new(LEN), Gpu::new(LEN));
        let memory = [from.register(&plugin, pair.0).unwrap(), to.register(&plugin, pair.1).unwrap()];
        carry(&plugin, pair, [&from, &to], memory, LEN);
        plugin.dereg_mr(failing.pair.0, failing.memory);
        failing.end(&plugin);
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
        assert_eq!((count(c"stand_in_contexts"), pinned()), (2, 0));
        assert_eq!(warnings_with("hang").len(), 0, "{:#?}", warnings());
    });
}

const OUT_OF_MEMORY: c_int = 2;
/// The device; MPS's connection, server, clients and connections.
const PASSING: [c_int; 5] = [46, 805, 807, 808, 809];

/// NCCL aborts for want of memory: the call that would tell when the copies are done is refused, while they go on.
#[test]
fn a_refused_wait_is_no_end_of_copies() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let mut one = Sending::new(&plugin);
        // Another use of the shadow: its pages are not what is waited for.
        let again = one.from.register(&plugin, one.pair.0).unwrap();
        stop(true);
        one.start(&plugin);
        fail(c"cuStreamWriteValue32_v2", OUT_OF_MEMORY);
        let goes_on = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(Duration::from_secs(1));
                goes_on.store(true, Ordering::Release);
                stop(false);
            });
            plugin.dereg_mr(one.pair.0, one.memory);
            assert!(goes_on.load(Ordering::Acquire), "given back with copies under way");
        });
        plugin.dereg_mr(one.pair.0, again);
        one.end(&plugin);
        assert_eq!((warnings_with("copies").len(), pinned()), (0, 0), "{:#?}", warnings());
    });
}

#[test]
fn a_context_that_was_refused_for_now_is_asked_for_again() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let (pair, gpu) = (plugin.pair(0, 0), Gpu::new(LEN));
        fail(c"cuCtxCreate_v2", OUT_OF_MEMORY);
        gpu.register(&plugin, pair.0).unwrap_err();
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("cuCtxCreate: CUDA_ERROR_OUT_OF_MEMORY on GPU 0"), "{told:#?}");
        for passing in PASSING {
            fail(c"cuCtxCreate_v2", passing);
            gpu.register(&plugin, pair.0).unwrap_err();
        }
        let memory = gpu.register(&plugin, pair.0).unwrap();
        plugin.dereg_mr(pair.0, memory);
        plugin.close(pair);
    });
}

/// NCCL ends one communicator while it makes the next: there may be memory for one context only.
#[test]
fn the_next_context_waits_for_the_end_of_the_last() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let (old, new, gpu) = (plugin.pair(0, 0), plugin.pair(0, 0), Gpu::new(LEN));
        let memory = gpu.register(&plugin, old.0).unwrap();
        plugin.dereg_mr(old.0, memory);
        rest(c"cuCtxDestroy_v2", 1000);
        let (send, recv) = (Shared(old.0), Shared(old.1));
        std::thread::scope(|scope| {
            scope.spawn(|| plugin.close((send.get(), recv.get())));
            until("the end of the lane", || (pinned() == 0).then_some(()));
            let memory = gpu.register(&plugin, new.0).unwrap();
            plugin.dereg_mr(new.0, memory);
        });
        plugin.close(new);
        assert_eq!((count(c"stand_in_contexts"), count(c"stand_in_contexts_at_once")), (2, 1));
    });
}

#[test]
fn a_range_that_is_pinned_slowly_holds_up_no_other() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let (slow, quick) = (plugin.pair(0, 0), plugin.pair(0, 0));
        let gpus = [Gpu::new(LEN), Gpu::new(LEN), Gpu::new(LEN)];
        let first = gpus[0].register(&plugin, quick.0).unwrap();
        // The words of the slow connection's lane need no page of their own.
        rest(c"cuMemHostRegister_v2", 2000);
        let send = Shared(slow.0);
        let (plugin, large) = (&plugin, Shared(gpus[1].part(LEN).0));
        let memory = std::thread::scope(|scope| {
            let slow = scope
                .spawn(move || Shared(plugin.reg_mr_at(send.get(), large.get(), LEN, crate::plugin::CUDA).unwrap()));
            std::thread::sleep(Duration::from_millis(200));
            let begin = Instant::now();
            let memory = gpus[2].register(plugin, quick.0).unwrap();
            plugin.dereg_mr(quick.0, memory);
            plugin.dereg_mr(quick.0, first);
            let took = begin.elapsed();
            let memory = slow.join().unwrap();
            assert!(took < Duration::from_secs(1), "{took:?}");
            memory
        });
        plugin.dereg_mr(slow.0, memory.get());
        plugin.close(slow);
        plugin.close(quick);
        assert_eq!(pinned(), 0);
    });
}

/// Where the next mapping would be at its addresses, which the driver still knows.
#[test]
fn memory_that_the_driver_keeps_is_not_unmapped() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver()] }, |_| {
        let plugin = Plugin::started();
        let (pair, gpu) = (plugin.pair(0, 0), Gpu::new(LEN));
        let memory = gpu.register(&plugin, pair.0).unwrap();
        fail(c"cuMemHostUnregister", 1);
        plugin.dereg_mr(pair.0, memory);
        let memory = gpu.register(&plugin, pair.0).unwrap();
        assert!(pinned() > 2 * LEN as u64, "{} bytes are pinned", pinned());
        plugin.dereg_mr(pair.0, memory);
        plugin.close(pair);
        assert_eq!(pinned(), 0);
    });
}

#[test]
fn a_registration_that_fails_leaves_no_context() {
    let env = [STAGING, driver(), ("NCCL_NET_RDMA_STAGING_TOTAL", "1")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let (pair, gpu) = (plugin.pair(0, 0), Gpu::new(LEN));
        gpu.register(&plugin, pair.0).unwrap_err();
        assert_eq!((count(c"stand_in_contexts"), pinned()), (1, 0));
        plugin.close(pair);
    });
}

/// NCCL's progress thread does not come back from isend. The background thread tells why; who aborts meanwhile is not held up
/// for ever, and the memory that the driver may still copy from stays.
#[test]
fn a_driver_that_does_not_return_holds_up_no_other_thread() {
    let env = [STAGING, driver(), CHUNK, ("NCCL_NET_RDMA_STALL_TIMEOUT", "10000")];
    alone(&Setting { fabric: Some(&fabric("")), env: &env }, |_| {
        let plugin = Plugin::started();
        let mut one = Sending::new(&plugin);
        let (other, idle) = (plugin.pair(0, 0), Gpu::new(LEN));
        until("irecv", || plugin.irecv(one.pair.1, &mut one.to.0, 0, one.to.1).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let returned = AtomicBool::new(false);
        rest(c"cuMemcpyDtoHAsync_v2", 24_000);
        let (send, at, memory) = (Shared(one.pair.0), Shared(one.from.part(LEN).0), Shared(one.memory));
        std::thread::scope(|scope| {
            let (plugin, returned) = (&plugin, &returned);
            scope.spawn(move || {
                let sent = plugin.isend_at(send.get(), (at.get(), LEN), 0, memory.get());
                assert_ne!(sent, Ok(None), "no credit");
                returned.store(true, Ordering::Release);
            });
            until("a word", || warnings_with("has not returned from starting a copy between GPU 0").first().cloned());
            forget_lines();
            // Nor would this one return, which keeps the GPU's memory.
            rest(c"cuMemRetainAllocationHandle", 20_000);
            let begin = Instant::now();
            plugin.dereg_mr(one.pair.0, one.memory);
            assert!(begin.elapsed() < Duration::from_secs(12) && !returned.load(Ordering::Acquire));
            let told = warnings_with("does not return from starting a copy on GPU 0");
            assert!(told.len() == 1 && told[0].contains("its shadow stays pinned"), "{told:#?}");
            // Nor this one, which is asked where memory is.
            rest(c"cuPointerGetAttribute", 20_000);
            let begin = Instant::now();
            idle.register(plugin, other.0).unwrap_err();
            assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
        });
        plugin.close(other);
        assert!(pinned() > LEN as u64);
        one.end(&plugin);
    });
}

/// Threads of NCCL that do not come back from isend for so long, and the connections that are aborted meanwhile, all at once;
/// `then` is called 11 s later.
fn stuck(plugin: &Plugin, all: &mut [Sending], ms: &[c_int], then: impl FnOnce()) {
    for one in &mut *all {
        until("irecv", || plugin.irecv(one.pair.1, &mut one.to.0, 0, one.to.1).unwrap());
    }
    std::thread::sleep(Duration::from_millis(100));
    std::thread::scope(|scope| {
        for (one, &ms) in all.iter().zip(ms) {
            rest(c"cuMemcpyDtoHAsync_v2", ms);
            let (send, at, memory) = (Shared(one.pair.0), Shared(one.from.part(LEN).0), Shared(one.memory));
            scope.spawn(move || {
                let sent = plugin.isend_at(send.get(), (at.get(), LEN), 0, memory.get());
                assert_ne!(sent, Ok(None), "no credit");
            });
            // The next is for the next.
            std::thread::sleep(Duration::from_millis(100));
        }
        for one in &*all {
            let (send, memory) = (Shared(one.pair.0), Shared(one.memory));
            scope.spawn(move || plugin.dereg_mr(send.get(), memory.get()));
        }
        std::thread::sleep(Duration::from_secs(11));
        then();
    });
}

#[test]
fn a_call_that_was_given_up_copies_no_more_when_it_returns() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let mut one = [Sending::new(&plugin)];
        stop(true);
        stuck(&plugin, &mut one, &[12_000], || {});
        assert!(count(c"stand_in_longest") < 4, "{} operations in a stream", count(c"stand_in_longest"));
        // The copy that it did start is still to come.
        let [one] = one;
        let other = plugin.pair(0, 0);
        one.from.register(&plugin, other.0).unwrap_err();
        assert_eq!(warnings_with("copies on GPU 0 (Stand-in) hang").len(), 1, "{:#?}", warnings());
        stop(false);
        let memory = until("the end of that copy", || one.from.register(&plugin, other.0).ok());
        plugin.dereg_mr(other.0, memory);
        plugin.close(other);
        one.end(&plugin);
    });
}

#[test]
fn one_call_that_returns_does_not_stand_for_another() {
    alone(&Setting { fabric: Some(&fabric("")), env: &[STAGING, driver(), CHUNK] }, |_| {
        let plugin = Plugin::started();
        let mut both = [Sending::new(&plugin), Sending::new(&plugin)];
        let (other, gpu) = (plugin.pair(0, 0), Gpu::new(LEN));
        stuck(&plugin, &mut both, &[10_700, 15_000], || {
            gpu.register(&plugin, other.0).unwrap_err();
        });
        let memory = gpu.register(&plugin, other.0).unwrap();
        plugin.dereg_mr(other.0, memory);
        plugin.close(other);
        both.into_iter().for_each(|one| one.end(&plugin));
    });
}
