//! What the plugin reports, leaves out and says: with and without libibverbs and devices, by setting.

use nccl_net_rdma::abi::types::ncclResult_t;

use crate::plugin::{Plugin, infos, pattern, warnings, warnings_with};
use crate::rig::{MAIN, Room, Setting, alone, dist, host, roce};

fn three(second: &str) -> String {
    let second = roce("mlx5_1", "10.0.1.1", second, "rate_gbps = 200");
    host("a", &[roce("mlx5_0", "10.0.0.1", "", "rate_gbps = 100"), second, roce("mlx5_2", "10.0.2.1", "", "")])
}

/// Starts with no device in the end, twice as communicators may, and returns the one warning.
fn no_device() -> String {
    let plugin = Plugin::started();
    assert_eq!(plugin.devices(), 0);
    plugin.init().unwrap();
    assert_eq!(plugin.devices(), 0);
    // Where the system has a libibverbs, that the one asked for was passed over is a line of its own.
    let (passed_over, told): (Vec<_>, Vec<_>) = warnings().into_iter().partition(|w| w.contains(" is used"));
    assert!(passed_over.len() <= 1, "{passed_over:#?}");
    assert_eq!(told.len(), 1, "one line says why: {told:#?}");
    told.into_iter().next().unwrap()
}

#[test]
fn without_a_usable_libibverbs_there_are_no_devices() {
    // The machine's own library may be there: that it is used instead has a line of its own.
    let env = [("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1")];
    alone(&Setting { env: &env, ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.devices(), 0);
        let why = warnings_with("no RDMA device can be used: all devices: ");
        assert_eq!(why.len(), 1, "{why:#?}");
        assert!(why[0].contains("NCCL goes on to its next transport"), "{why:#?}");
        assert_eq!(warnings_with("/nonexistent/libibverbs.so.1").len(), 1, "{:#?}", warnings());
    });
}

/// A directory that the loader looks into before the system's holds broken files of both usual names.
#[test]
fn a_machine_without_libibverbs_is_told_what_to_install() {
    alone(&Setting::default(), |room| {
        if room.role() == MAIN {
            std::fs::create_dir(room.path("broken")).unwrap();
            for name in ["libibverbs.so.1", "libibverbs.so"] {
                std::fs::write(room.path("broken").join(name), "no library").unwrap();
            }
            let broken = room.path("broken").to_string_lossy().into_owned();
            let env = [("LD_LIBRARY_PATH", broken.as_str()), ("NCCL_IBVERBS_LIB", "/nonexistent/libibverbs.so.1")];
            room.start("without", &env).expect_success();
        } else {
            let told = no_device();
            for part in
                ["libibverbs could not be loaded", "/nonexistent/libibverbs.so.1", "libibverbs.so.1: ", "install"]
            {
                assert!(told.contains(part), "{part} is missing: {told}");
            }
        }
    });
}

#[test]
fn another_library_is_no_libibverbs() {
    alone(&Setting { env: &[("NCCL_IBVERBS_LIB", "libm.so.6")], ..Setting::default() }, |_| {
        let told = no_device();
        assert!(told.contains("libm.so.6 has no ibv_fork_init"), "{told}");
    });
}

#[test]
fn a_host_without_devices_says_so() {
    alone(&Setting { fabric: Some("[[host]]\nname = \"a\"\n"), ..Setting::default() }, |_| {
        let told = no_device();
        assert!(told.contains("no RDMA device can be used: all devices: "), "{told}");
    });
}

#[test]
fn device_nodes_that_are_missing_are_named() {
    let prepare = |room: &Room| std::fs::create_dir_all(room.path("root/sys/class/infiniband/mlx5_0")).unwrap();
    alone(&Setting { fabric: Some("[[host]]\nname = \"a\"\n"), ..Setting::default() }, |room| {
        prepare(room);
        // SAFETY: this process has one other thread, the test runner's, which waits.
        unsafe { std::env::set_var("NCCL_NET_RDMA_SYSROOT", room.path("root")) };
        let told = no_device();
        assert!(told.contains("/dev/infiniband"), "{told}");
    });
}

/// There is no next transport then, and what NCCL says itself is only that it has none.
#[test]
fn a_job_that_stops_for_want_of_a_device_is_told_why() {
    let env = [("NCCL_NET", "RDMA")];
    alone(&Setting { fabric: Some("[[host]]\nname = \"a\"\n"), env: &env }, |_| {
        let told = no_device();
        assert!(told.contains("NCCL_NET=RDMA is set: NCCL stops") && !told.contains("next transport"), "{told}");
    });
}

#[test]
fn a_job_that_stops_since_the_plugin_is_disabled_is_told_why() {
    let env = [("NCCL_NET", "RDMA"), ("NCCL_IB_DISABLE", "1")];
    alone(&Setting { env: &env, ..Setting::default() }, |_| {
        assert_eq!(Plugin::load().init().unwrap_err(), ncclResult_t::ncclInternalError);
        let told = warnings();
        assert!(told.len() == 1 && told[0].contains("NCCL_IB_DISABLE is set: no devices; NCCL_NET=RDMA"), "{told:#?}");
    });
}

/// It is what was asked for.
#[test]
fn a_plugin_that_is_disabled_for_another_network_warns_of_nothing() {
    let env = [("NCCL_NET", "Socket"), ("NCCL_IB_DISABLE", "1")];
    alone(&Setting { env: &env, ..Setting::default() }, |_| {
        assert_eq!(Plugin::load().init().unwrap_err(), ncclResult_t::ncclInternalError);
        assert_eq!(warnings(), [] as [String; 0]);
    });
}

#[test]
fn strict_stops_instead_of_falling_back() {
    let env = [("NCCL_NET_RDMA_STRICT", "1")];
    alone(&Setting { fabric: Some("[[host]]\nname = \"a\"\n"), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.devices(), 1);
        let told = warnings();
        assert_eq!(told.len(), 1, "{told:#?}");
        assert!(told[0].contains("the job stops") && !told[0].contains("next transport"), "{told:#?}");
        assert_eq!(plugin.listen(0).unwrap_err(), ncclResult_t::ncclSystemError);
    });
}

#[test]
fn a_device_that_is_not_permitted_is_left_out() {
    alone(&Setting { fabric: Some(&three("open_errno = \"EPERM\"")), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.names(), ["mlx5_0", "mlx5_2"]);
        let told = warnings();
        assert_eq!(told.len(), 1, "{told:#?}");
        assert!(told[0].contains("mlx5_1") && told[0].contains("not permitted"), "{told:#?}");
        let pair = plugin.pair(0, 0);
        plugin.carry(pair, &pattern(5000));
        plugin.close(pair);
    });
}

#[test]
fn strict_and_the_only_device_wanted_is_not_permitted() {
    let env = [("NCCL_NET_RDMA_STRICT", "1"), ("NCCL_IB_HCA", "=mlx5_1")];
    alone(&Setting { fabric: Some(&three("open_errno = \"EPERM\"")), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.listen(0).unwrap_err(), ncclResult_t::ncclSystemError);
        assert_eq!(warnings_with("mlx5_1 is left out: ").len(), 1, "{:#?}", warnings());
        // It is there and the filter names it: that it can't be opened is another matter.
        assert_eq!(warnings_with("matches no"), Vec::<String>::new());
    });
}

#[test]
fn a_device_that_the_filter_excludes_is_not_complained_of() {
    let env = [("NCCL_IB_HCA", "^=mlx5_1")];
    alone(&Setting { fabric: Some(&three("open_errno = \"EPERM\"")), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.names(), ["mlx5_0", "mlx5_2"]);
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// NCCL takes the last component as the bus id; the functions of one card look alike.
#[test]
fn the_pci_path_is_that_of_the_function() {
    let near = roce("mlx5_0", "10.0.0.1", "pci_path = \"/sys/devices/pci0000:80/0000:81:00.1\"", "");
    let fabric = host("a", &[near, roce("mlx5_1", "10.0.1.1", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |room| {
        if room.role() == MAIN {
            std::fs::create_dir_all(room.path("root/sys/devices/pci0000:80/0000:81:00.1")).unwrap();
            let root = room.path("root").to_string_lossy().into_owned();
            room.start("placed", &[("NCCL_NET_RDMA_SYSROOT", root.as_str())]).expect_success();
        } else {
            let plugin = Plugin::started();
            let path = plugin.properties(plugin.find("mlx5_0")).pci_path;
            assert_eq!(path.as_deref(), Some("/sys/devices/pci0000:80/0000:81:00.0"));
            assert_eq!(plugin.properties(plugin.find("mlx5_1")).pci_path, None);
        }
    });
}

/// NCCL_IB_HCA, the devices that stay, and a word of each warning.
const SELECTIONS: &[(&str, &[&str], &[&str])] = &[
    ("mlx5_1", &["mlx5_1", "mlx5_10", "mlx5_11"], &["prefix"]),
    ("=mlx5_1", &["mlx5_1"], &[]),
    ("^mlx5_1", &["mlx5_0"], &["prefix"]),
    ("^=mlx5_10,mlx5_11", &["mlx5_0", "mlx5_1"], &[]),
    ("=mlx5_1:2", &[], &["matches no port", "no RDMA device can be used"]),
];

/// Sets NCCL_IB_HCA by the case's number; a macro, since each test needs a name.
fn selection(case: usize, names: &[String], told: &[String]) {
    let (value, expected, words) = SELECTIONS[case];
    assert_eq!(names, expected, "NCCL_IB_HCA={value}");
    for word in words {
        assert!(told.iter().any(|w| w.contains(word)), "NCCL_IB_HCA={value}: no line says {word}: {told:#?}");
    }
    if words.is_empty() {
        assert!(told.is_empty(), "NCCL_IB_HCA={value}: {told:#?}");
    }
}

macro_rules! selections {
    ($($name:ident: $case:literal;)*) => { $(
        #[test]
        fn $name() {
            let names = ["mlx5_0", "mlx5_1", "mlx5_10", "mlx5_11"];
            let devices: Vec<String> =
                names.iter().enumerate().map(|(i, n)| roce(n, &format!("10.0.{i}.1"), "", "")).collect();
            let env = [("NCCL_IB_HCA", SELECTIONS[$case].0)];
            alone(&Setting { fabric: Some(&host("a", &devices)), env: &env }, |_| {
                let plugin = Plugin::started();
                selection($case, &plugin.names(), &warnings());
            });
        }
    )* };
}

selections! {
    a_prefix_takes_all_that_begin_so: 0;
    an_exact_name_takes_one: 1;
    an_exclusion_by_prefix: 2;
    an_exclusion_by_name: 3;
    a_port_that_is_not_there_matches_nothing: 4;
}

#[test]
fn rails_make_one_device_of_several() {
    let fabric = host(
        "a",
        &[
            roce("r0", "10.0.0.1", "", "rate_gbps = 200"),
            roce("r1", "10.0.1.1", "", "rate_gbps = 100"),
            roce("r2", "10.0.2.1", "", "rate_gbps = 400"),
        ],
    );
    let env = [("NCCL_NET_RDMA_RAILS", "r0+r1")];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.names(), ["r0+r1", "r2"]);
        assert_eq!(plugin.properties(0).speed, 300_000);
        assert_eq!(plugin.properties(1).speed, 400_000);
        let pair = plugin.pair(0, 0);
        plugin.carry(pair, &pattern(3_000_001));
        plugin.close(pair);
    });
}

/// NCCL_IB_GID_INDEX=3 on a port whose entries 0 to 3 are empty.
#[test]
fn an_empty_gid_index_is_refused_with_what_there_is() {
    let sparse = r#"
[[host]]
name = "a"
[[host.device]]
name = "mlx5_0"
[[host.device.port]]
link_layer = "Ethernet"
gid_tbl_len = 8
gids = [
    { index = 4, gid = "fe80::1", type = "RoCE v1" },
    { index = 5, gid = "fe80::1", type = "RoCE v2" },
    { index = 6, gid = "::ffff:10.152.0.12", type = "RoCE v1" },
    { index = 7, gid = "::ffff:10.152.0.12", type = "RoCE v2" },
]
"#;
    alone(&Setting { fabric: Some(sparse), env: &[("NCCL_IB_GID_INDEX", "3")] }, |_| {
        let plugin = Plugin::started();
        assert_eq!(plugin.devices(), 0);
        let told = warnings_with("mlx5_0:1 is left out");
        assert_eq!(told.len(), 1, "{told:#?}");
        for part in ["index 3", "empty", "4 (fe80::1", "5 (fe80::1", "6 (10.152.0.12", "7 (10.152.0.12", "index 7"] {
            assert!(told[0].contains(part), "{part} is missing: {}", told[0]);
        }
    });
}

#[test]
fn settings_out_of_range_or_unknown_are_told_once() {
    let env = [
        ("NCCL_IB_TIMEOUT", "60"),
        ("NCCL_IB_RETRY_CNT", "12"),
        ("NCCL_IB_QPS_PER_CONNECTION", "0"),
        ("NCCL_IB_SL", "7x"),
        ("NCCL_IB_ADAPTIVE_ROUTING_OF_TOMORROW", "1"),
    ];
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", "")]);
    alone(&Setting { fabric: Some(&fabric), env: &env }, |_| {
        let plugin = Plugin::started();
        plugin.init().unwrap();
        let told = warnings();
        for (name, value) in [
            ("NCCL_IB_TIMEOUT=60", "31"),
            ("NCCL_IB_RETRY_CNT=12", "7"),
            ("NCCL_IB_QPS_PER_CONNECTION=0", "1"),
            ("NCCL_IB_SL=7x", ""),
            ("NCCL_IB_ADAPTIVE_ROUTING_OF_TOMORROW", "not honoured"),
        ] {
            let lines: Vec<&String> = told.iter().filter(|w| w.contains(name)).collect();
            assert_eq!(lines.len(), 1, "{name}: {told:#?}");
            assert!(lines[0].contains(value), "{name}: {lines:?}");
        }
        assert_eq!(told.len(), 5, "{told:#?}");
        let pair = plugin.pair(0, 0);
        plugin.carry(pair, &pattern(70_000));
        plugin.close(pair);
    });
}

#[test]
fn the_first_line_has_version_and_commit() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", "", "")]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |_| {
        let plugin = Plugin::started();
        let lines = infos();
        assert!(lines[0].contains(env!("CARGO_PKG_VERSION")) && lines[0].contains("commit "), "{lines:#?}");
        for part in ["soft0:1", "10.0.0.1", "index 3", "RoCE v2"] {
            assert!(lines.iter().any(|l| l.contains("device 0") && l.contains(part)), "{part}: {lines:#?}");
        }
        assert_eq!(warnings(), Vec::<String>::new());
        assert_eq!(plugin.devices(), 1);
        let _ = dist("bin/nccl-rdma");
    });
}
