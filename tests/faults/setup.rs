//! Set-up through the plugin: failures on either end.

use std::time::Duration;

use nccl_net_rdma::abi::types::ncclResult_t;

use crate::plugin::{Plugin, SetUp, pattern, warnings};
use crate::rig::{Setting, alone, host, roce};

/// Two devices in one subnet: this process is both ends.
fn two() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")])
}

/// How long the other end may take to hear of a failure.
const SECONDS: Duration = Duration::from_secs(3);

/// The set-up fails on both ends, for one reason that both name; nothing is left in the way of the next one.
fn fails_on_both_ends(plugin: &Plugin, parts: &[&str]) {
    let up: SetUp = plugin.set_up(0, 1, SECONDS);
    assert!(matches!(up.connect, Some(Err(_))), "the connecting end: {up:?}");
    assert!(matches!(up.accept, Some(Err(_))), "the accepting end: {up:?}");
    assert!(up.slowest_call < Duration::from_millis(50), "a call took {:?}", up.slowest_call);
    let told = warnings();
    assert_eq!(told.len(), 2, "one line for each end: {told:#?}");
    for part in parts {
        assert!(told.iter().all(|w| w.contains(part)), "{part} is missing: {told:#?}");
    }
    // With the reason gone all works.
    let pair = plugin.pair(0, 1);
    plugin.carry(pair, &pattern(100_000));
    plugin.close(pair);
}

/// The nth call of a verb fails during the first set-up.
macro_rules! set_up_failures {
    ($($name:ident: $plan:literal, $parts:expr;)*) => { $(
        #[test]
        fn $name() {
            alone(&Setting { fabric: Some(&two()), env: &[("SOFT_HCA_FAIL", $plan)] }, |_| {
                fails_on_both_ends(&Plugin::started(), &$parts);
            });
        }
    )* };
}

set_up_failures! {
    connect_fails_to_register_its_ring: "reg_mr:1:ENOMEM", ["ibv_reg_mr on soft0", "Cannot allocate memory"];
    connect_fails_to_create_a_cq: "create_cq:1:ENOMEM", ["ibv_create_cq on soft0", "Cannot allocate memory"];
    connect_fails_to_create_a_qp: "create_qp:1:EINVAL", ["ibv_create_qp on soft0", "Invalid argument"];
    connect_fails_to_take_its_qp_to_init: "modify_qp:1:EIO", ["ibv_modify_qp on soft0", "to INIT"];
    accept_fails_to_create_a_cq: "create_cq:2:ENOMEM", ["ibv_create_cq on soft1", "Cannot allocate memory"];
    accept_fails_to_create_a_qp: "create_qp:2:EINVAL,create_qp:3:EINVAL", ["ibv_create_qp on soft1", "Invalid argument"];
    accept_fails_to_take_its_qp_to_init: "modify_qp:2:EIO", ["ibv_modify_qp on soft1", "to INIT"];
    accept_fails_to_take_its_qp_to_rtr: "modify_qp:3:ENETUNREACH", ["to RTR", "GID 10.0.0.2", "GID 10.0.0.1", "no route"];
    accept_fails_to_take_its_qp_to_rts: "modify_qp:4:EINVAL", ["to RTS", "soft1:1"];
    connect_fails_to_take_its_qp_to_rtr: "modify_qp:5:ENODEV", ["to RTR", "soft0:1", "GID index is empty"];
    connect_fails_to_take_its_qp_to_rts: "modify_qp:6:EIO", ["to RTS", "soft0:1"];
    accept_fails_to_register_its_ring: "reg_mr:2:ENOMEM", ["ibv_reg_mr on soft1", "Cannot allocate memory"];
}
