//! How the fabric is to treat what a connection sends: the traffic class and service level that the QPs of both ends were
//! given, as soft-hca's trace tells.

use std::ptr;

use nccl_net_rdma::abi::types::{ncclNet_v10_t, ncclNetCommConfig_v10_t, ncclResult_t};

use crate::plugin::{Comm, Communicator, Plugin, SetUp, ok, pattern, warnings_with};
use crate::rig::{PATIENCE, Room, Setting, alone, host, infiniband, roce};

/// NCCL_NET_TRAFFIC_CLASS_UNDEF: the job asks for none.
const UNDEFINED: i32 = -1;

/// Traffic class and service level.
type Service = (u8, u8);

/// From device 0 to device 1 by version 10 of the ABI, for a communicator that asks for this class.
fn set_up(plugin: &Plugin, class: i32) -> SetUp {
    let table: ncclNet_v10_t = plugin.table(c"ncclNetPlugin_v10");
    plugin.set_up_by(plugin.listen(1).unwrap(), PATIENCE, |handle| -> Result<Option<Comm>, ncclResult_t> {
        let mut config = ncclNetCommConfig_v10_t { trafficClass: class };
        let (mut comm, mut device) = (ptr::null_mut(), ptr::null_mut());
        let handle = handle.as_mut_ptr().cast();
        // SAFETY: the configuration and the handle, and two pointers to write.
        ok(unsafe { table.connect.unwrap()(0, &raw mut config, handle, &raw mut comm, &raw mut device) })?;
        Ok((!comm.is_null()).then_some(comm))
    })
}

/// What each QP of a device was given on its way to RTR.
fn given(room: &Room, device: &str) -> Vec<Service> {
    let trace = String::from_utf8(room.get("trace")).unwrap();
    let ours = trace.lines().filter(|l| l.contains(&format!(" device={device} ")) && l.contains(" state=RTR "));
    let field = |line: &str, name: &str| -> u8 {
        let value = line.split(' ').find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.unwrap().parse().unwrap()
    };
    ours.map(|line| (field(line, "traffic_class"), field(line, "sl"))).collect()
}

/// What the QPs of the sending and those of the receiving end were given; each end has two, which got the same.
fn ends(room: &Room, devices: [&str; 2]) -> (Service, Service) {
    let [sending, receiving] = devices.map(|device| {
        let all = given(room, device);
        assert!(all.len() == 2 && all[0] == all[1], "{device}: {all:?}");
        all[0]
    });
    (sending, receiving)
}

/// By version 10, with data.
fn given_for(room: &Room, class: i32, devices: [&str; 2]) -> (Service, Service) {
    let plugin = Plugin::started();
    let pair = set_up(&plugin, class).comms();
    plugin.carry(pair, &pattern(100_000));
    plugin.close(pair);
    ends(room, devices)
}

/// By version 12, where the class is the communicator's from its start; another one asks for another class meanwhile.
fn given_from_start(room: &Room, class: i32, devices: [&str; 2]) -> (Service, Service) {
    let plugin = Plugin::load();
    let communicator = Communicator::open(&plugin, 1, class);
    let other = Communicator::open(&plugin, 2, 77);
    let pair = communicator.set_up(0, 1).comms();
    plugin.carry(pair, &pattern(100_000));
    plugin.close(pair);
    communicator.finalize();
    other.finalize();
    ends(room, devices)
}

const TWO_QPS: (&str, &str) = ("NCCL_IB_QPS_PER_CONNECTION", "2");

fn on_ethernet() -> String {
    host("a", &[roce("soft0", "10.0.0.1", "", ""), roce("soft1", "10.0.0.2", "", "")])
}

fn on_infiniband() -> String {
    host("a", &[infiniband("ib0", 1, "[0xffff]"), infiniband("ib1", 2, "[0xffff]")])
}

const ETHERNET: [&str; 2] = ["soft0", "soft1"];
const INFINIBAND: [&str; 2] = ["ib0", "ib1"];

#[test]
fn a_communicators_class_is_the_type_of_service_of_both_ends_with_roce() {
    alone(&Setting { fabric: Some(&on_ethernet()), env: &[TWO_QPS] }, |room| {
        assert_eq!(given_for(room, 106, ETHERNET), ((106, 0), (106, 0)));
    });
}

#[test]
fn a_communicators_class_is_the_service_level_of_both_ends_with_infiniband() {
    alone(&Setting { fabric: Some(&on_infiniband()), env: &[TWO_QPS] }, |room| {
        assert_eq!(given_for(room, 3, INFINIBAND), ((0, 3), (0, 3)));
    });
}

#[test]
fn infiniband_has_no_service_level_106() {
    alone(&Setting { fabric: Some(&on_infiniband()), ..Setting::default() }, |_| {
        let up = set_up(&Plugin::started(), 106);
        assert!(matches!(up.connect, Some(Err(ncclResult_t::ncclInvalidArgument))), "{up:?}");
        // Either end, and both are here.
        assert_eq!(warnings_with("traffic class 106, which on InfiniBand is the service level").len(), 2);
    });
}

#[test]
fn the_environment_holds_where_a_communicator_asks_for_nothing() {
    let env = [TWO_QPS, ("NCCL_IB_TC", "40"), ("NCCL_IB_SL", "2")];
    alone(&Setting { fabric: Some(&on_ethernet()), env: &env }, |room| {
        assert_eq!(given_for(room, UNDEFINED, ETHERNET), ((40, 2), (40, 2)));
    });
}

#[test]
fn the_environment_holds_with_infiniband_too() {
    let env = [TWO_QPS, ("NCCL_IB_TC", "40"), ("NCCL_IB_SL", "2")];
    alone(&Setting { fabric: Some(&on_infiniband()), env: &env }, |room| {
        // By LID packets have no traffic class.
        assert_eq!(given_for(room, UNDEFINED, INFINIBAND), ((0, 2), (0, 2)));
    });
}

#[test]
fn the_environment_goes_before_what_a_communicator_asks_for() {
    let env = [TWO_QPS, ("NCCL_IB_TC", "40"), ("NCCL_IB_FIFO_TC", "8")];
    alone(&Setting { fabric: Some(&on_ethernet()), env: &env }, |room| {
        assert_eq!(given_for(room, 106, ETHERNET), ((40, 0), (8, 0)));
    });
}

#[test]
fn without_either_both_are_0() {
    alone(&Setting { fabric: Some(&on_ethernet()), env: &[TWO_QPS] }, |room| {
        assert_eq!(given_for(room, UNDEFINED, ETHERNET), ((0, 0), (0, 0)));
    });
}

#[test]
fn from_version_11_on_the_class_comes_with_init() {
    alone(&Setting { fabric: Some(&on_ethernet()), env: &[TWO_QPS] }, |room| {
        assert_eq!(given_from_start(room, 106, ETHERNET), ((106, 0), (106, 0)));
    });
}

#[test]
fn from_version_11_on_with_infiniband_too() {
    alone(&Setting { fabric: Some(&on_infiniband()), env: &[TWO_QPS] }, |room| {
        assert_eq!(given_from_start(room, 3, INFINIBAND), ((0, 3), (0, 3)));
    });
}

#[test]
fn from_version_11_on_the_environment_holds_where_init_asks_for_nothing() {
    let env = [TWO_QPS, ("NCCL_IB_TC", "40"), ("NCCL_IB_SL", "2")];
    alone(&Setting { fabric: Some(&on_ethernet()), env: &env }, |room| {
        assert_eq!(given_from_start(room, UNDEFINED, ETHERNET), ((40, 2), (40, 2)));
    });
}
