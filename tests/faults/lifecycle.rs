//! What a job does to the process around the data path: several communicators that start at once, and forks, as data
//! loaders make them.

use std::sync::Barrier;
use std::thread;

use nccl_net_rdma::abi::types::{ncclNet_v6_t, ncclNet_v10_t};

use crate::alive::{connections, exchange, two_hosts};
use crate::plugin::{Comm, Communicator, Plugin, infos, logger, ok, pattern, warnings};
use crate::rig::{MAIN, Setting, alone, host, roce, until};

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
