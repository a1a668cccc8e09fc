//! What stays behind: rounds of load, use and unload, and set-ups that fail.

use std::time::Duration;

use crate::plugin::{Communicator, Plugin, forget_lines, pattern};
use crate::rig::{Setting, alone, host, roce, until};

/// What a process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    threads: usize,
    descriptors: usize,
    mappings: usize,
}

fn held() -> Held {
    let entries = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    Held {
        threads: entries("/proc/self/task"),
        descriptors: entries("/proc/self/fd"),
        mappings: std::fs::read_to_string("/proc/self/maps").unwrap().lines().count(),
    }
}

/// As [`held`], once the background threads have come up and let go of what was closed.
fn settled() -> Held {
    std::thread::sleep(Duration::from_millis(200));
    held()
}

/// The memory allocator joins and splits its own mappings as it likes.
const MAPPINGS_TOLERANCE: usize = 8;

/// As much as before, or soon: the background thread lets go of closed control channels by itself.
fn as_before(before: Held) {
    let mut now = held();
    until(&format!("what is held to go back to {before:?}"), || {
        now = held();
        let same = now.threads == before.threads && now.descriptors == before.descriptors;
        (same && now.mappings <= before.mappings + MAPPINGS_TOLERANCE).then_some(())
    });
}

fn two() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")])
}

#[test]
fn fifty_rounds_of_load_use_and_unload_leave_what_the_first_left() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let data = pattern(1 << 20);
        let mut first = None;
        for _ in 0..50 {
            let plugin = Plugin::load();
            plugin.init().unwrap();
            let (there, back) = (plugin.pair(0, 1), plugin.pair(1, 0));
            plugin.carry(there, &data);
            plugin.carry(back, &data);
            plugin.close(there);
            plugin.close(back);
            plugin.unload();
            forget_lines();
            first.get_or_insert_with(settled);
        }
        as_before(first.unwrap());
    });
}

/// Two communicators a round, the second of which starts before the first has ended.
#[test]
fn fifty_rounds_of_version_12_leave_what_the_first_left() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let data = pattern(1 << 20);
        let mut first = None;
        for round in 0..50 {
            let plugin = Plugin::load();
            let open = |id| {
                let communicator = Communicator::open(&plugin, id, -1);
                let pairs = [(0, 1), (1, 0)].map(|(from, to)| communicator.set_up(from, to).comms());
                (communicator, pairs)
            };
            let end = |(communicator, pairs): (Communicator<'_>, [_; 2])| {
                for pair in pairs {
                    plugin.carry(pair, &data);
                    plugin.close(pair);
                }
                communicator.finalize();
            };
            let early = open(2 * round);
            let late = open(2 * round + 1);
            end(early);
            end(late);
            plugin.unload();
            forget_lines();
            first.get_or_insert_with(settled);
        }
        as_before(first.unwrap());
    });
}

#[test]
fn connects_that_fail_leave_nothing() {
    // After the first connection has made what stays for the process: INIT, RTR and RTS on both ends are calls 1 to 6.
    let env = [("SOFT_HCA_FAIL", "create_qp:5+:ENOMEM"), ("NCCL_DEBUG", "WARN")];
    alone(&Setting { fabric: Some(&two()), env: &env }, |_| {
        let plugin = Plugin::started();
        for _ in 0..2 {
            let pair = plugin.pair(0, 1);
            plugin.carry(pair, &pattern(1000));
            plugin.close(pair);
        }
        let up = plugin.set_up(0, 1, Duration::from_secs(3));
        assert!(matches!((up.connect, up.accept), (Some(Err(_)), Some(Err(_)))));
        let before = settled();
        for _ in 0..20 {
            let up = plugin.set_up(0, 1, Duration::from_secs(3));
            assert!(matches!((up.connect, up.accept), (Some(Err(_)), Some(Err(_)))));
        }
        as_before(before);
    });
}

/// Listeners that nobody connects to.
#[test]
fn listeners_leave_nothing() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let listen = || {
            let (listener, _) = plugin.listen(0).unwrap();
            assert_eq!(plugin.accept(listener).unwrap(), None);
            plugin.close_listen(listener);
        };
        listen();
        let before = settled();
        (0..20).for_each(|_| listen());
        as_before(before);
    });
}

/// A device with few QPs and regions: what a connection held is there for the next one.
#[test]
fn what_a_connection_held_is_free_for_the_next() {
    let limits = "max_qp = 2\nmax_mr = 5";
    let fabric = host("a", &[roce("soft0", "10.0.0.1", limits, "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        for _ in 0..5 {
            let pair = plugin.pair(0, 0);
            plugin.carry(pair, &pattern(100_000));
            plugin.close(pair);
        }
    });
}

/// Resident memory, bytes.
fn resident() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    4096 * statm.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap()
}

/// As a program does that registers its own buffers around each operation.
#[test]
fn ten_thousand_registrations_leave_no_memory_behind() {
    alone(&Setting { fabric: Some(&two()), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let pair = plugin.pair(0, 1);
        let data = pattern(64 * 4096);
        let rounds = |n: usize| {
            for i in 0..n {
                let part = &data[i % 64 * 4096..][..4096];
                let (one, other) = (plugin.reg_mr(pair.0, part).unwrap(), plugin.reg_mr(pair.1, part).unwrap());
                plugin.dereg_mr(pair.0, one);
                plugin.dereg_mr(pair.1, other);
            }
        };
        rounds(1000);
        let before = resident();
        rounds(10_000);
        let grown = resident().saturating_sub(before);
        assert!(grown < 1 << 20, "{grown} bytes more");
        plugin.close(pair);
        let told = crate::plugin::infos().into_iter().find(|l| l.contains("soft0: last connection closed")).unwrap();
        assert!(told.contains("11000 memory regions registered, 0 times shared, 0 refused"), "{told}");
        assert!(told.ends_with("at most 1 at once, 0 of 0 bytes now"), "{told}");
    });
}
