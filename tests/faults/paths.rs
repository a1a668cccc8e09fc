//! NICs, GPUs and what lies between them: what is told at start, and how the way of GPU data is chosen.

use crate::cuda;
use crate::gpu::on_machine;
use crate::plugin::{CUDA, DMABUF, HOST, infos, pattern, warnings};
use crate::rig::{Room, Setting, alone, host, roce};
use crate::staging::{Gpu, carry};

const SWITCH: &str = "sys/devices/pci0000:80/0000:80:01.1/0000:81:00.0";
const FAR: &str = "sys/devices/pci0000:c0/0000:c0:01.0/0000:c1:00.0";
/// Where the fabric file says that the adapter is.
const PLACE: &str =
    "pci_path = \"/sys/devices/pci0000:80/0000:80:01.1/0000:81:00.0/0000:82:01.0/0000:84:00.0\"\ngpu_dmabuf = true";
const PROFILE: (&str, &str) = ("NCCL_NET_RDMA_PROFILE", "profile.json");
/// A port of 400 Gb/s.
const RATE: &str = "rate_gbps = 400";

/// A machine with the adapter and a GPU below one switch, a GPU at the other CPU, and these files besides or instead.
fn with_gpus(room: &Room, files: &[(&str, &[u8])]) {
    let root = room.path("root");
    let put = |name: &str, bytes: &[u8]| {
        let file = root.join(name);
        std::fs::create_dir_all(file.parent().unwrap()).unwrap();
        std::fs::write(file, bytes).unwrap();
    };
    let (nic, near) = (format!("{SWITCH}/0000:82:01.0/0000:84:00.0"), format!("{SWITCH}/0000:82:00.0/0000:83:00.0"));
    let link = [("current_link_speed", "16.0 GT/s PCIe"), ("max_link_speed", "16.0 GT/s PCIe")];
    for (name, text) in link.into_iter().chain([("current_link_width", "16"), ("max_link_width", "16")]) {
        put(&format!("{nic}/{name}"), text.as_bytes());
    }
    for (gpu, node, bus) in [(near.as_str(), "0", "0000:83:00.0"), (FAR, "1", "0000:c1:00.0")] {
        let window = "0x0 0x0 0x0\n0x200000000000 0x201fffffffff 0x14220c\n";
        let files = [("vendor", "0x10de"), ("class", "0x030200"), ("numa_node", node), ("resource", window)];
        for (name, text) in files {
            put(&format!("{gpu}/{name}"), text.as_bytes());
        }
        put(&format!("proc/driver/nvidia/gpus/{bus}/information"), b"Model: \t\t NVIDIA H200\n");
        let bus_folder = root.join("sys/bus/pci/devices");
        std::fs::create_dir_all(&bus_folder).unwrap();
        std::os::unix::fs::symlink(root.join(gpu), bus_folder.join(bus)).unwrap();
    }
    put(&format!("{nic}/numa_node"), b"0");
    for (name, bytes) in files {
        put(name, bytes);
    }
}

/// Lines that the plugin printed at start on such a machine.
fn told_at_start(room: &Room, files: &[(&str, &[u8])]) -> (Vec<String>, Vec<String>) {
    with_gpus(room, files);
    on_machine(room, &[]);
    (infos(), warnings())
}

fn contains(lines: &[String], parts: &[&str]) {
    assert!(lines.iter().any(|l| parts.iter().all(|p| l.contains(p))), "{parts:?} is missing: {lines:#?}");
}

#[test]
fn each_nic_and_gpu_is_told_with_its_way() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), ..Setting::default() }, |room| {
        let (infos, warnings) = told_at_start(room, &[]);
        contains(
            &infos,
            &["soft0 (0x50f7:1, firmware soft-hca", "400 Gb/s) at 0000:84:00.0, NUMA node 0, PCIe 16 GT/s x16"],
        );
        contains(&infos, &["GPU 0000:83:00.0 (NVIDIA H200, Hopper), NUMA node 0, BAR1 128 GiB"]);
        contains(
            &infos,
            &["soft0 and GPU 0000:83:00.0: PIX", "GPUDirect (rule: GPUDirect is open (dma-buf), distance PIX)"],
        );
        contains(&infos, &["soft0 and GPU 0000:c1:00.0: SYS", "NCCL decides by NCCL_NET_GDR_LEVEL"]);
        contains(&infos, &["soft0: PCIe 16 GT/s x16: PCIe limits to about 252 Gb/s, the port has 400"]);
        contains(&infos, &["soft0 and GPU 0000:83:00.0: whether ACS redirects", "0000:82:00.0: ACS unknown"]);
        assert_eq!(warnings, Vec::<String>::new());
    });
}

/// V17, V18, N51.
#[test]
fn what_makes_gpudirect_slow_or_fail_is_a_warning() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    let env = [("NCCL_NET_RDMA_GPU_PATH", "gdr")];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |room| {
        // Extended capabilities: ACS alone, with what redirects set.
        let mut config = vec![0; 4096];
        for (at, word) in [(0x100, 0x000du16), (0x102, 0x0001), (0x104, 0x001f), (0x106, 0x001d)] {
            config[at..at + 2].copy_from_slice(&word.to_le_bytes());
        }
        let (_, warnings) = told_at_start(
            room,
            &[
                (&format!("{SWITCH}/0000:82:01.0/0000:84:00.0/current_link_width"), b"8"),
                (&format!("{SWITCH}/0000:82:00.0/config"), &config),
                (
                    &format!("{SWITCH}/0000:82:00.0/0000:83:00.0/resource"),
                    b"0x0 0x0 0x0\n0xd0000000 0xdfffffff 0x14220c\n",
                ),
            ],
        );
        contains(&warnings, &["soft0: PCIe 16 GT/s x8 of 16 GT/s x16: PCIe limits to about 126 Gb/s", "trained low"]);
        contains(
            &warnings,
            &["soft0 and GPU 0000:83:00.0: ACS redirects", "0000:82:00.0: ACS 0x001d (SrcValid ReqRedir"],
        );
        contains(&warnings, &["GPU 0000:83:00.0: BAR1 has 256 MiB"]);
        contains(&warnings, &["GPU 0000:c1:00.0: its nearest NIC is SYS apart"]);
        assert_eq!(warnings.len(), 4, "{warnings:#?}");
    });
}

/// Of the near GPU, if that is its model.
fn profile(gpu: &str, rules: &str) -> String {
    let gdr = r#"{"latency_us": 1.0, "gb_s": 1.0, "cpu_share": 0.0, "pcie_bytes_per_byte": 1.0}"#;
    format!(
        r#"{{"version": 1, "made_by": "a test", "adapter": "soft-hca", "pairs": [{{
            "nic": {{"name": "soft0", "model": "0x50f7:1", "firmware": "soft-hca", "port_gbps": 400.0}},
            "gpu": {{"name": "{gpu}", "compute_capability": "9.0", "bus_id": "0000:83:00.0"}},
            "distance": "PIX", "link": "", "sizes": [{{"bytes": 65536, "gdr": {gdr}, "staging": {gdr}, "host": null}}],
            "rules": {rules}}}]}}"#
    )
}

const BY_SIZE: &str = r#"[{"from": 0, "to": 65536, "path": "gdr"}, {"from": 65536, "to": null, "path": "staging"}]"#;
const STAGED: &str = r#"[{"from": 0, "to": null, "path": "staging"}]"#;

/// Leaves the file that PROFILE names.
fn put_profile(room: &Room, text: &str) {
    room.put("profile.json", text.as_bytes());
    std::env::set_current_dir(room.path(".")).unwrap();
}

#[test]
fn auto_follows_a_profile_of_this_hardware() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE, ("LD_LIBRARY_PATH", cuda::folder())] }, |room| {
        put_profile(room, &profile("NVIDIA H200", BY_SIZE));
        let (infos, warnings) = told_at_start(room, &[]);
        let rule =
            "GPUDirect, staging from 65536 bytes on (rule: profile profile.json: staging is best from 65536 bytes on";
        contains(&infos, &["soft0 and GPU 0000:83:00.0: PIX", rule]);
        contains(&infos, &["device 0 takes host memory, GPU memory by dma-buf"]);
        contains(&infos, &["soft0 and GPU 0000:c1:00.0: SYS", "GPUDirect is open (dma-buf)"]);
        assert_eq!(warnings, Vec::<String>::new());
    });
}

#[test]
fn a_profile_that_does_not_fit_is_a_warning() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE] }, |room| {
        put_profile(room, &profile("NVIDIA A100-SXM4-80GB", BY_SIZE));
        let (infos, warnings) = told_at_start(room, &[]);
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
        let parts =
            ["NCCL_NET_RDMA_PROFILE is not used: profile.json is of other hardware", "auto goes on by its defaults"];
        contains(&warnings, &parts);
        contains(&infos, &["soft0 and GPU 0000:83:00.0: PIX", "GPUDirect is open (dma-buf)"]);
    });
}

/// The stand-in's GPU is the near one. That it is staged is for it alone; the other GPU would be too, as NCCL is told once.
#[test]
fn a_profile_decides_for_the_gpu_that_has_the_memory() {
    let place = PLACE.replace("gpu_dmabuf = true", "");
    let fabric = host("a", &[roce("soft0", "10.0.0.1", &place, RATE)]);
    let env = [PROFILE, ("LD_LIBRARY_PATH", cuda::folder())];
    alone(&Setting { fabric: Some(&fabric), env: &env }, |room| {
        put_profile(room, &profile("NVIDIA H200", STAGED));
        with_gpus(room, &[]);
        let plugin = on_machine(room, &[]);
        assert_eq!(plugin.properties(0).ptr_support, HOST | CUDA);
        let pair = plugin.pair(0, 0);
        let gpus = [Gpu::new(1 << 20), Gpu::new(1 << 20)];
        let memory = [gpus[0].register(&plugin, pair.0).unwrap(), gpus[1].register(&plugin, pair.1).unwrap()];
        carry(&plugin, pair, [&gpus[0], &gpus[1]], memory, 1 << 20);
        contains(&infos(), &["GPU 0 (Stand-in) with peer", "staging; profile profile.json: staging is best"]);
        plugin.dereg_mr(pair.0, memory[0]);
        plugin.dereg_mr(pair.1, memory[1]);
        plugin.close(pair);
        contains(&infos(), &["soft0 and GPU 0000:c1:00.0: SYS", "but this NIC takes GPU memory, for GPU 0000:83:00.0"]);
        assert_eq!(warnings(), Vec::<String>::new());
    });
}

/// Without the CUDA driver nothing can be copied, whatever was measured.
#[test]
fn a_profile_that_wants_staging_needs_the_driver() {
    let place = PLACE.replace("gpu_dmabuf = true", "");
    let fabric = host("a", &[roce("soft0", "10.0.0.1", &place, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE, ("LD_LIBRARY_PATH", cuda::no_driver())] }, |room| {
        put_profile(room, &profile("NVIDIA H200", STAGED));
        with_gpus(room, &[]);
        assert_eq!(on_machine(room, &[]).properties(0).ptr_support, HOST);
        contains(&warnings(), &["soft0 and GPU 0000:83:00.0: the profile is not followed", "there is no CUDA driver"]);
        assert_eq!(warnings().len(), 1, "{:#?}", warnings());
    });
}

/// What is registered by size is offered for both.
#[test]
fn a_profile_of_sizes_offers_gpudirect() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE, ("LD_LIBRARY_PATH", cuda::folder())] }, |room| {
        put_profile(room, &profile("NVIDIA H200", BY_SIZE));
        with_gpus(room, &[]);
        assert_eq!(on_machine(room, &[]).properties(0).ptr_support, HOST | DMABUF);
    });
}

/// What should be staged by size can't be: the driver does not know this memory.
fn without_staged_half(room: &Room, strict: bool) {
    put_profile(room, &profile("NVIDIA H200", BY_SIZE));
    with_gpus(room, &[]);
    let plugin = on_machine(room, &[]);
    let pair = plugin.pair(0, 0);
    let data = pattern(100_000);
    let registered = plugin.reg_mr_as(pair.0, &data, CUDA);
    let told = warnings().join(
        "
",
    );
    assert!(told.contains("staging: cuPointerGetAttribute"), "{told}");
    assert_eq!(registered.is_err(), strict, "{told}");
    assert_eq!(told.contains("by nvidia_peermem whatever its size"), !strict, "{told}");
    assert_eq!(told.contains("NCCL_NET_RDMA_STRICT is set"), strict, "{told}");
    if let Ok(memory) = registered {
        plugin.dereg_mr(pair.0, memory);
    }
    plugin.close(pair);
}

fn with_both() -> [(&'static str, &'static str); 3] {
    [PROFILE, ("NCCL_NET_RDMA_PEERMEM", "on"), ("LD_LIBRARY_PATH", cuda::folder())]
}

#[test]
fn a_registration_without_its_staged_half_is_of_gpudirect() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &with_both() }, |room| without_staged_half(room, false));
}

#[test]
fn a_registration_without_its_staged_half_is_none_with_strict() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    let env: Vec<_> = with_both().into_iter().chain([("NCCL_NET_RDMA_STRICT", "1")]).collect();
    alone(&Setting { fabric: Some(&fabric), env: &env }, |room| without_staged_half(room, true));
}

#[test]
fn a_profile_that_says_host_offers_no_gpu_memory() {
    let fabric = host("a", &[roce("soft0", "10.0.0.1", PLACE, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE] }, |room| {
        let both = profile("NVIDIA H200", r#"[{"from": 0, "to": null, "path": "host"}]"#);
        put_profile(room, &both);
        with_gpus(room, &[]);
        let near = format!("{SWITCH}/0000:82:00.0/0000:83:00.0");
        // The GPU of which nothing was measured is not there.
        std::fs::remove_file(room.path("root/sys/bus/pci/devices/0000:c1:00.0")).unwrap();
        assert!(room.path("root").join(near).exists());
        let plugin = on_machine(room, &[]);
        assert_eq!(plugin.properties(0).ptr_support, HOST);
        contains(&infos(), &["device 0 takes host memory only", "profile profile.json: host memory is best"]);
    });
}

const LOADED: (&str, &[u8]) = ("proc/modules", b"nvidia_peermem 16384 0 - Live 0x0000000000000000\n");

/// What is warned of where a peer memory driver is loaded and not registered, with a profile of these rules.
fn with_a_driver_that_is_not_registered(room: &Room, rules: &str) -> Vec<String> {
    put_profile(room, &profile("NVIDIA H200", rules));
    told_at_start(room, &[LOADED]).1
}

#[test]
fn who_is_told_by_a_profile_to_use_host_memory_misses_no_gpudirect() {
    let place = PLACE.replace("gpu_dmabuf = true", "");
    let fabric = host("a", &[roce("soft0", "10.0.0.1", &place, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE] }, |room| {
        let warnings = with_a_driver_that_is_not_registered(room, r#"[{"from": 0, "to": null, "path": "host"}]"#);
        assert_eq!(warnings, Vec::<String>::new());
    });
}

#[test]
fn who_is_told_by_a_profile_to_use_gpudirect_misses_it() {
    let place = PLACE.replace("gpu_dmabuf = true", "");
    let fabric = host("a", &[roce("soft0", "10.0.0.1", &place, RATE)]);
    alone(&Setting { fabric: Some(&fabric), env: &[PROFILE] }, |room| {
        let only = profile("NVIDIA H200", r#"[{"from": 0, "to": null, "path": "gdr"}]"#);
        put_profile(
            room,
            &only.replace("\"staging\": {", "\"host\": {").replace(", \"host\": null", ", \"staging\": null"),
        );
        let (_, warnings) = told_at_start(room, &[LOADED]);
        contains(&warnings, &["device 0 takes host memory only", "loaded, not registered"]);
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
    });
}

const FAR_NIC: &str = "pci0000:c0/0000:c0:02.0/0000:c2:00.0";

fn a_near_and_a_far_nic() -> String {
    let (near, far) = (PLACE.replace("gpu_dmabuf = true", ""), format!("pci_path = \"/sys/devices/{FAR_NIC}\""));
    host("a", &[roce("soft0", "10.0.0.1", &near, RATE), roce("soft1", "10.0.1.1", &far, RATE)])
}

/// Nothing was measured of the NIC at the other CPU.
fn they_go_by_the_far_one(room: &Room, rails: &str) {
    put_profile(room, &profile("NVIDIA H200", STAGED));
    with_gpus(room, &[(&format!("sys/devices/{FAR_NIC}/numa_node"), b"1")]);
    let plugin = on_machine(room, &[]);
    assert_eq!((plugin.devices(), plugin.properties(0).ptr_support), (1, HOST));
    contains(&infos(), &["soft0 and GPU 0000:83:00.0: PIX", "profile profile.json: staging is best"]);
    contains(&infos(), &["soft1 and GPU 0000:83:00.0: SYS"]);
    contains(&infos(), &[&format!("device 0: {rails} (800 Gb/s")]);
}

#[test]
fn rails_go_by_the_nic_that_is_furthest_from_the_gpu() {
    let env = [PROFILE, ("LD_LIBRARY_PATH", cuda::folder()), ("NCCL_NET_RDMA_RAILS", "soft0+soft1")];
    alone(&Setting { fabric: Some(&a_near_and_a_far_nic()), env: &env }, |room| {
        they_go_by_the_far_one(room, "soft0+soft1");
    });
}

#[test]
fn rails_go_by_the_nic_that_is_furthest_from_the_gpu_in_any_order() {
    let env = [PROFILE, ("LD_LIBRARY_PATH", cuda::folder()), ("NCCL_NET_RDMA_RAILS", "soft1+soft0")];
    alone(&Setting { fabric: Some(&a_near_and_a_far_nic()), env: &env }, |room| {
        they_go_by_the_far_one(room, "soft1+soft0");
    });
}

/// V12.
#[test]
fn device_nodes_that_are_missing_are_named() {
    alone(&Setting { fabric: Some(&host("a", &[])), ..Setting::default() }, |room| {
        let plugin = on_machine(room, &[("sys/class/infiniband/mlx5_0/node_type", "1: CA\n")]);
        assert_eq!(plugin.devices(), 0);
        let told = warnings();
        assert_eq!(told.len(), 1, "{told:#?}");
        contains(&told, &["no RDMA device can be used", "mlx5_0", "device nodes are missing: /dev/infiniband"]);
    });
}
