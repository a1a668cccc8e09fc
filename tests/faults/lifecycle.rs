//! What a job does to the process around the data path: several communicators that start at once, and forks, as data
//! loaders make them.

use std::mem::MaybeUninit;
use std::os::fd::AsFd as _;
use std::ptr;
use std::sync::Barrier;
use std::thread;

use nccl_net_rdma::abi::types::{
    ncclNet_v6_t, ncclNet_v8_t, ncclNet_v10_t, ncclNet_v12_t, ncclNetAttr_v12_t, ncclNetProperties_v12_t,
    ncclNetVDeviceProps_v12_t, ncclResult_t,
};

use crate::alive::{connections, exchange, two_hosts};
use crate::plugin::{Comm, Communicator, Plugin, infos, logger, ok, pattern, warnings, warnings_come_to};
use crate::rig::{MAIN, Room, Setting, alone, host, roce, until};

const THREADS: usize = 12;

fn two() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")])
}

/// Runs this on threads that begin together.
fn at_once(body: impl Fn(usize) + Sync) {
    let together = Barrier::new(THREADS);
    thread::scope(|scope| {
        for i in 0..THREADS {
            let (body, together) = (&body, &together);
            scope.spawn(move || {
                together.wait();
                body(i);
            });
        }
    });
}

/// Devices were opened once, whoever came first, and nothing was amiss.
fn started_once() {
    let said = |part: &str| infos().iter().filter(|line| line.contains(part)).count();
    assert_eq!((said("plugin ABI v"), said("device 0: soft0"), said("device 1: soft1")), (1, 1, 1));
    assert_eq!(warnings(), Vec::<String>::new());
}

/// Each of them moves data at once. NCCL itself takes one version a process; nothing is to depend on that.
#[test]
fn communicators_that_start_at_once_share_one_engine() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let plugin = Plugin::load();
        let v6 = plugin.table::<ncclNet_v6_t>(c"ncclNetPlugin_v6").init.unwrap();
        let v10 = plugin.table::<ncclNet_v10_t>(c"ncclNetPlugin_v10").init.unwrap();
        at_once(|i| {
            let started = match i % 3 {
                // SAFETY: a logger that lives for ever.
                0 => ok(unsafe { v6(logger()) }),
                1 => plugin.init(),
                // SAFETY: as above; no profiler.
                _ => ok(unsafe { v10(logger(), None) }),
            };
            started.unwrap();
            assert_eq!(plugin.names(), ["soft0", "soft1"]);
            let pair = plugin.pair(0, 1);
            plugin.carry(pair, &pattern(100_000));
            plugin.close(pair);
        });
        started_once();
    });
}

/// From v11 on each has a beginning and an end of its own, which is none for the others.
#[test]
fn communicators_of_version_12_come_and_go_at_once() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let plugin = Plugin::load();
        at_once(|i| {
            for round in 0..3 {
                let communicator = Communicator::open(&plugin, (10 * i + round).try_into().unwrap(), -1);
                assert_eq!(plugin.names(), ["soft0", "soft1"]);
                let pair = communicator.set_up(i.rem_euclid(2).try_into().unwrap(), 1).comms();
                plugin.carry(pair, &pattern(100_000));
                plugin.close(pair);
                communicator.finalize();
            }
        });
        started_once();
        let finished = infos().iter().filter(|line| line.ends_with("is finished")).count();
        assert_eq!(finished, 3 * THREADS);
    });
}

/// A child of fork, which lives at most for a while.
struct Child(libc::pid_t);

impl Child {
    /// Forks; the child, which has this thread only, does this and no more.
    fn start(body: impl FnOnce()) -> Self {
        // SAFETY: the child calls what is under test, and takes no lock that another thread may have held.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0);
        if pid == 0 {
            // SAFETY: takes and returns integers; bounds the child's life should it hang.
            unsafe { libc::alarm(20) };
            body();
            // SAFETY: ends the child; it came back although it should not have.
            unsafe { libc::_exit(99) };
        }
        Self(pid)
    }

    fn status(self) -> i32 {
        let mut status = -1;
        // SAFETY: an int of ours to write.
        assert_eq!(unsafe { libc::waitpid(self.0, &raw mut status, 0) }, self.0);
        status
    }
}

/// As data loaders end: at once, or with all that a program has put down to be done at its end.
const ENDS: [unsafe extern "C" fn(i32) -> !; 2] = [libc::_exit, libc::exit];
const ROUNDS: usize = 4;

#[test]
fn forks_with_transfers_under_way_disturb_neither_end() {
    alone(&Setting { fabric: Some(&two_hosts()), env: &[("SOFT_HCA_HOST", "a")] }, |room| {
        let plugin = Plugin::started();
        if room.role() != MAIN {
            let ends = connections(room, &plugin);
            (0..ROUNDS * ENDS.len()).for_each(|_| exchange(&plugin, ends));
            room.get("done");
            plugin.close(ends);
            assert_eq!(warnings(), Vec::<String>::new());
            return;
        }
        let mut other = room.start("b", &[("SOFT_HCA_HOST", "b")]);
        let ends = connections(room, &plugin);
        for _ in 0..ROUNDS {
            for end in ENDS {
                // SAFETY: ends the child.
                let child = exchange_with(&plugin, ends, || Child::start(|| unsafe { end(0) }));
                assert_eq!(child.status(), 0);
            }
        }
        assert_eq!(warnings(), Vec::<String>::new());
        room.put("done", b"");
        plugin.close(ends);
        other.expect_success();
    });
}

/// As the peer's [`exchange`], with something done while both transfers are open.
fn exchange_with<T>(plugin: &Plugin, (send, recv): (Comm, Comm), meanwhile: impl FnOnce() -> T) -> T {
    let (data, mut to) = (pattern(100_000), vec![0; 100_000]);
    let (from_mr, to_mr) = (plugin.reg_mr(send, &data).unwrap(), plugin.reg_mr(recv, &to).unwrap());
    let receive = until("irecv", || plugin.irecv(recv, &mut to, 0, to_mr).unwrap());
    let sent = until("isend", || plugin.isend(send, &data, 0, from_mr).unwrap());
    let result = meanwhile();
    plugin.finish(sent).unwrap();
    plugin.finish(receive).unwrap();
    assert!(to == data, "the bytes differ");
    plugin.dereg_mr(send, from_mr);
    plugin.dereg_mr(recv, to_mr);
    result
}

/// Its copies of our descriptors hide nothing from the peer, and new connections work.
#[test]
fn a_child_that_lives_on_does_not_hide_the_end() {
    alone(&Setting { fabric: Some(&two_hosts()), env: &[("SOFT_HCA_HOST", "a")] }, |room| {
        let plugin = Plugin::started();
        if room.role() != MAIN {
            let ends = connections(room, &plugin);
            exchange(&plugin, ends);
            plugin.close_send(ends.0);
            // Nothing is sent any more; the other end's close is what this one waits for.
            let mut to = vec![0; 100];
            let to_mr = plugin.reg_mr(ends.1, &to).unwrap();
            let receive = until("irecv", || plugin.irecv(ends.1, &mut to, 0, to_mr).unwrap());
            room.put("waiting", b"");
            until("the end of the connection", || plugin.test(receive).is_err().then_some(()));
            plugin.close_recv(ends.1);
            return;
        }
        let mut other = room.start("b", &[("SOFT_HCA_HOST", "b")]);
        let ends = connections(room, &plugin);
        exchange(&plugin, ends);
        room.get("waiting");
        let child = Child::start(|| {
            loop {
                // SAFETY: sleeps until a signal ends the process.
                unsafe { libc::pause() };
            }
        });
        let again = plugin.pair(0, 0);
        plugin.carry(again, &pattern(100_000));
        plugin.close(again);
        plugin.close(ends);
        other.expect_success();
        // SAFETY: a child of ours that is not waited for yet.
        assert_eq!(unsafe { libc::kill(child.0, libc::SIGKILL) }, 0);
        assert_eq!(child.status(), libc::SIGKILL);
    });
}

/// The peer of a process whose children call the plugin: it hears nothing of them.
fn peer_of_a_parent(room: &Room, plugin: &Plugin, rounds: usize) {
    let ends = connections(room, plugin);
    (0..rounds).for_each(|_| exchange(plugin, ends));
    room.get("done");
    plugin.close(ends);
    assert_eq!(warnings(), Vec::<String>::new());
}

/// Verbs that children of fork called; soft-hca refuses them, a real NIC would have done them to the parent.
fn verbs_of_children(room: &Room) -> usize {
    std::fs::read_to_string(room.path("trace")).unwrap().matches("refused=forked").count()
}

/// From here on every system call of this thread but read, write and exit kills the process.
fn forbid_system_calls() {
    // SAFETY: plain numbers.
    let rc = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
    assert_eq!(rc, 0, "this machine forbids seccomp");
}

/// What the destructors of a program do in a child, with transfers of the parent under way.
#[test]
fn a_child_that_closes_what_is_its_parents_touches_nothing() {
    alone(&Setting { fabric: Some(&two_hosts()), env: &[("SOFT_HCA_HOST", "a")] }, |room| {
        let plugin = Plugin::started();
        if room.role() != MAIN {
            return peer_of_a_parent(room, &plugin, 2);
        }
        let mut other = room.start("b", &[("SOFT_HCA_HOST", "b")]);
        let ends = connections(room, &plugin);
        let communicator = Communicator::open(&plugin, 7, -1);
        let (listener, mut handle) = plugin.listen(0).unwrap();
        let data = pattern(4096);
        let memory = plugin.reg_mr(ends.0, &data).unwrap();
        exchange_with(&plugin, ends, || {
            let child = Child::start(|| {
                forbid_system_calls();
                plugin.dereg_mr(ends.0, memory);
                plugin.close(ends);
                plugin.close_listen(listener);
                communicator.finalize();
                // SAFETY: ends the child; the only end that is left to it.
                unsafe { libc::syscall(libc::SYS_exit, 0) };
            });
            assert_eq!(child.status(), 0);
        });
        assert_eq!(verbs_of_children(room), 0);
        // All of it still works here.
        exchange(&plugin, ends);
        let (mut send, mut recv) = (None, None);
        until("a connection", || {
            send = send.take().or_else(|| plugin.connect(0, &mut handle).unwrap());
            recv = recv.take().or_else(|| plugin.accept(listener).unwrap());
            (send.is_some() && recv.is_some()).then_some(())
        });
        plugin.carry((send.unwrap(), recv.unwrap()), &data);
        plugin.close((send.unwrap(), recv.unwrap()));
        plugin.close_listen(listener);
        communicator.finalize();
        plugin.dereg_mr(ends.0, memory);
        assert_eq!(warnings(), Vec::<String>::new());
        room.put("done", b"");
        plugin.close(ends);
        other.expect_success();
    });
}

/// A child that goes on with its parent's connections, or begins its own, gets an error from every call and is told why once.
#[test]
fn a_child_that_uses_the_plugin_is_refused() {
    alone(&Setting { fabric: Some(&two_hosts()), env: &[("SOFT_HCA_HOST", "a")] }, |room| {
        let plugin = Plugin::started();
        if room.role() != MAIN {
            return peer_of_a_parent(room, &plugin, 2);
        }
        let mut other = room.start("b", &[("SOFT_HCA_HOST", "b")]);
        let (send, recv) = connections(room, &plugin);
        let communicator = Communicator::open(&plugin, 7, -1);
        let (listener, mut handle) = plugin.listen(0).unwrap();
        let (data, mut to) = (pattern(100_000), vec![0; 100_000]);
        let (from_mr, to_mr) = (plugin.reg_mr(send, &data).unwrap(), plugin.reg_mr(recv, &to).unwrap());
        let receive = until("irecv", || plugin.irecv(recv, &mut to, 0, to_mr).unwrap());
        let sent = until("isend", || plugin.isend(send, &data, 0, from_mr).unwrap());
        let parent = std::process::id();
        let child = Child::start(|| {
            let refused = |what: &str, result: Result<(), ncclResult_t>| {
                assert_eq!(result, Err(ncclResult_t::ncclInvalidUsage), "{what}");
            };
            let v8: ncclNet_v8_t = plugin.table(c"ncclNetPlugin_v8");
            let v12: ncclNet_v12_t = plugin.table(c"ncclNetPlugin_v12");
            refused("test of a send", plugin.test(sent).map(|_| ()));
            refused("test of a receive", plugin.test(receive).map(|_| ()));
            refused("isend", plugin.isend(send, &data, 0, from_mr).map(|_| ()));
            refused("irecv", plugin.irecv(recv, &mut to, 0, to_mr).map(|_| ()));
            refused("iflush", plugin.iflush(recv, &data, 1, to_mr).map(|_| ()));
            refused("iflush of nothing", plugin.iflush(recv, &data, 0, to_mr).map(|_| ()));
            refused("regMr", plugin.reg_mr(send, &data).map(|_| ()));
            let file = std::io::stdout();
            refused("regMrDmaBuf", plugin.reg_dma_buf(send, &data, 0, file.as_fd()).map(|_| ()));
            refused("listen", plugin.listen(0).map(|_| ()));
            refused("connect", plugin.connect(0, &mut handle).map(|_| ()));
            refused("accept", plugin.accept(listener).map(|_| ()));
            refused("init", plugin.init());
            let mut count = 0;
            // SAFETY: one int to write.
            refused("devices", ok(unsafe { v8.devices.unwrap()(&raw mut count) }));
            let mut properties = MaybeUninit::<ncclNetProperties_v12_t>::zeroed();
            // SAFETY: one struct to write.
            refused("getProperties", ok(unsafe { v12.getProperties.unwrap()(0, properties.as_mut_ptr()) }));
            let mut context = ptr::null_mut();
            let begin = v12.init.unwrap();
            // SAFETY: one pointer to write, no configuration, a logger that lives for ever, no profiler.
            refused("init of v12", ok(unsafe { begin(&raw mut context, 8, ptr::null_mut(), logger(), None) }));
            let mut parts = ncclNetVDeviceProps_v12_t { ndevs: 1, devs: Default::default() };
            let fuse = v12.makeVDevice.unwrap();
            // SAFETY: one int to write, one device.
            refused("makeVDevice", ok(unsafe { fuse(&raw mut count, &raw mut parts) }));
            let mut attributes = MaybeUninit::<ncclNetAttr_v12_t>::zeroed();
            let expect = v12.setNetAttr.unwrap();
            // SAFETY: an open context, and attributes for which zero is valid.
            refused("setNetAttr", ok(unsafe { expect(communicator.context(), attributes.as_mut_ptr()) }));
            let told = warnings_come_to(1);
            let cause = format!("NCCL communicators do not survive fork(): this process is a child of pid {parent}");
            assert!(told[0].contains(&cause), "{told:#?}");
            // SAFETY: ends the child.
            unsafe { libc::_exit(0) };
        });
        assert_eq!(child.status(), 0);
        assert_eq!(verbs_of_children(room), 0);
        plugin.finish(sent).unwrap();
        plugin.finish(receive).unwrap();
        assert!(to == data, "the bytes differ");
        exchange(&plugin, (send, recv));
        plugin.dereg_mr(send, from_mr);
        plugin.dereg_mr(recv, to_mr);
        plugin.close_listen(listener);
        communicator.finalize();
        assert_eq!(warnings(), Vec::<String>::new());
        room.put("done", b"");
        plugin.close((send, recv));
        other.expect_success();
    });
}

/// Only loading the library is no use of it: the child begins, as a process of its own.
#[test]
fn a_child_of_a_process_that_never_began_may_use_the_plugin() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let plugin = Plugin::load();
        let child = Child::start(|| {
            plugin.init().unwrap();
            let pair = plugin.pair(0, 1);
            plugin.carry(pair, &pattern(100_000));
            plugin.close(pair);
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!warnings().is_empty())) };
        });
        assert_eq!(child.status(), 0);
    });
}
