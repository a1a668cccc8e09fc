//! The contract driver against the library that ships, over soft-hca, in the settings that change the data path: number of
//! rails, of QPs, splitting, link layer, inline credits.
//!
//! Needs `dist/`: `ci/build` makes it, and `ci/test` runs that first.

#[cfg(test)]
mod cuda;

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use nccl_net_rdma::memory::profile::{Adapter, Profile, derive_rules};

    fn root() -> &'static Path {
        Path::new(env!("CARGO_MANIFEST_DIR"))
    }

    fn built(path: &str) -> PathBuf {
        let file = root().join("dist").join(path);
        assert!(file.exists(), "{} is missing: run ci/build first", file.display());
        file
    }

    /// GPU memory on these ends, staged, with copies that are late.
    fn staged(name: &str, ends: &str, fabric: Option<String>, settings: &[(&str, &str)], arguments: &[&str]) {
        let own = [
            ("LD_LIBRARY_PATH", crate::cuda::folder()),
            ("CUDA_STAND_IN_DELAY", "300"),
            ("NCCL_NET_RDMA_GPU_PATH", "staging"),
        ];
        play(name, fabric, &[&own[..], settings].concat(), &[&["--gpu", ends], arguments].concat());
    }

    #[test]
    fn staged_on_both_ends() {
        staged("staged", "both", None, &[], &["--quick", "--procs", "3"]);
    }

    /// One end in host memory; that which is staged goes in several portions from either.
    #[test]
    fn staged_on_one_end() {
        let small = [("NCCL_NET_RDMA_STAGING_CHUNK", "8192")];
        staged("staged at the sender", "send", None, &small, &["--quick", "--procs", "2", "--abi", "v9"]);
        staged("staged at the receiver", "recv", None, &small, &["--quick", "--procs", "2"]);
    }

    #[test]
    fn staged_over_two_rails_of_four_qps() {
        let settings = [
            ("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"),
            ("NCCL_IB_QPS_PER_CONNECTION", "4"),
            ("NCCL_NET_RDMA_STAGING_CHUNK", "4096"),
        ];
        let fabric = short(&fabric(8, 2, "Ethernet"), &[1 << 20, 300_001]);
        staged("staged, two rails", "both", Some(fabric), &settings, &["--procs", "2", "--quick"]);
    }

    /// Cases that move data by themselves have them in GPU memory, too: none passes where that can't be registered.
    #[test]
    fn no_case_takes_host_memory_for_that_of_a_gpu() {
        let own = tempfile::tempdir().expect("a directory");
        let output = Command::new(built("bin/nccl-rdma"))
            .args(["contract", "--gpu", "both", "--quick", "--plugin"])
            .arg(built("lib/libnccl-net-rdma.so"))
            .args(
                ["sizes", "ll-lines", "hinted", "hinted-empty", "mr-two-comms"]
                    .iter()
                    .flat_map(|name| ["--only", name]),
            )
            .env("LD_LIBRARY_PATH", crate::cuda::folder())
            .env("NCCL_IBVERBS_LIB", built("soft-hca/libibverbs.so.1"))
            .env("NCCL_NET_RDMA_GPU_PATH", "host")
            // Else it would be staged all the same.
            .env("NCCL_NET_RDMA_STRICT", "1")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("SOFT_HCA_REGISTRY", own.path())
            .output()
            .expect("the driver runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(!output.status.success() && text.contains("\n0 passed, 5 failed\n"), "{text}");
        assert_eq!(text.matches("can't register GPU memory").count(), 5, "{text}");
    }

    /// The command's measurement of paths, where the GPU is the stand-in: staging and host memory, and the profile. The ports of
    /// the adapter differ in speed.
    #[test]
    fn paths_are_measured_and_make_a_profile() {
        let folder = tempfile::tempdir().expect("a folder");
        let out = folder.path().join("paths");
        let registry = folder.path().join("registry");
        std::fs::create_dir(&registry).expect("a folder");
        let ports = (0..2).map(|host| {
            let port = |number: usize, gbps: usize| {
                format!(
                    "[[host.device.port]]\nlink_layer = \"InfiniBand\"\nlid = {}\nrate_gbps = {gbps}\n\
                     gids = [{{ index = 0, gid = \"fe80::{host}:{number}\", type = \"IB\" }}]\n",
                    1 + host * 2 + number
                )
            };
            let device = format!("name = \"soft_gpu0\"\nnode_guid = {}\n", 1 + host);
            format!("[[host]]\nname = \"h{host}\"\n[[host.device]]\n{device}{}{}", port(0, 200), port(1, 100))
        });
        let fabric = folder.path().join("fabric.toml");
        std::fs::write(&fabric, ports.collect::<String>()).expect("a file");
        let output = Command::new(built("bin/nccl-rdma"))
            .args(["bench", "paths", "--max", "64K", "--rounds", "1", "--budget", "2", "--paths", "staging,host"])
            .arg("--plugin")
            .arg(built("lib/libnccl-net-rdma.so"))
            .arg("--adapter")
            .arg(built("soft-hca/libibverbs.so.1"))
            .arg("--fabric")
            .arg(&fabric)
            .arg("--out")
            .arg(&out)
            .envs([("LD_LIBRARY_PATH", crate::cuda::folder()), ("CUDA_STAND_IN_DELAY", "100")])
            .env("SOFT_HCA_REGISTRY", &registry)
            .env("NCCL_SOCKET_IFNAME", "lo")
            .output()
            .expect("the command runs");
        let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{told}");
        assert!(told.contains("staging: device soft_gpu0:1, GPU memory by address"), "{told}");
        assert!(told.contains("These figures\nprove that the tool works"), "{told}");
        let profile = Profile::load(&out.join("profile.json")).expect("a profile");
        let pair = &profile.pairs[0];
        assert_eq!((profile.adapter, &*pair.gpu.name, pair.sizes.len()), (Adapter::SoftHca, "Stand-in", 14));
        assert!(pair.sizes.iter().all(|size| size.staging.is_some() && size.host.is_some() && size.gdr.is_none()));
        assert_eq!(pair.rules, derive_rules(&pair.sizes));
        assert!(
            (pair.nic.port_gbps - 150.0).abs() < f64::EPSILON,
            "as the plugin will find it: {}",
            pair.nic.port_gbps
        );
        let pcie = pair.sizes[0].staging.expect("measured").pcie_bytes_per_byte;
        assert!((pcie - 2.0).abs() < f64::EPSILON, "{pcie}");
    }

    /// A fabric of `hosts` hosts named as the driver names them (h0, h1, ...), each with `rails` ports.
    fn fabric(hosts: usize, rails: usize, link_layer: &str) -> String {
        use std::fmt::Write as _;
        let mut text = String::new();
        for host in 0..hosts {
            writeln!(text, "[[host]]\nname = \"h{host}\"").expect("a String");
            for rail in 0..rails {
                writeln!(text, "[[host.device]]\nname = \"soft_{rail}\"\nnode_guid = {}", 1 + host * 16 + rail)
                    .expect("a String");
                writeln!(text, "[[host.device.port]]\nlink_layer = \"{link_layer}\"").expect("a String");
                if link_layer == "Ethernet" {
                    writeln!(
                        text,
                        "gids = [{{ index = 0, gid = \"fe80::{host}:{rail}\", type = \"RoCE v2\" }}, {{ index = 1, gid = \
                         \"::ffff:10.0.{rail}.{}\", type = \"RoCE v2\" }}]",
                        host + 1
                    )
                    .expect("a String");
                } else {
                    writeln!(
                        text,
                        "lid = {}\ngids = [{{ index = 0, gid = \"fe80::{host}:{rail}\", type = \"IB\" }}]",
                        1 + host * 16 + rail
                    )
                    .expect("a String");
                }
            }
        }
        text
    }

    fn play(name: &str, fabric: Option<String>, settings: &[(&str, &str)], arguments: &[&str]) -> String {
        let own = tempfile::tempdir().expect("a directory");
        let mut command = Command::new(built("bin/nccl-rdma"));
        command
            .args(["contract", "--plugin"])
            .arg(built("lib/libnccl-net-rdma.so"))
            .args(arguments)
            .env("NCCL_IBVERBS_LIB", built("soft-hca/libibverbs.so.1"))
            .env("SOFT_HCA_REGISTRY", own.path())
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env("NCCL_NET_RDMA_CONNECT_TIMEOUT", "8")
            .envs(settings.iter().copied());
        if let Some(text) = fabric {
            let file = own.path().join("fabric.toml");
            std::fs::write(&file, text).expect("a file");
            command.env("SOFT_HCA_FABRIC", file);
        }
        let output = command.output().expect("the driver runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success(),
            "{name}: {}\n{text}\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        // What a plugin or a device can no longer do must not pass for a case that can't be played.
        let skipped = text.lines().filter(|line| line.split_whitespace().nth(2) == Some("skip"));
        let skipped: Vec<_> = skipped.filter_map(|line| line.split_whitespace().next()).collect();
        assert_eq!(skipped, skips(arguments), "{name}:\n{text}");
        println!("{name}: {}", text.lines().last().unwrap_or(""));
        text.into_owned()
    }

    /// The cases that such a run must skip: every setting that is played as a whole has one device, and there is nothing to tell
    /// to a profiler up to version 9.
    fn skips(arguments: &[&str]) -> &'static [&'static str] {
        if arguments.contains(&"--only") {
            return &[];
        }
        if ["v6", "v7", "v8", "v9"].iter().any(|old| arguments.contains(old)) {
            &["profiled", "fused"]
        } else {
            &["fused"]
        }
    }

    /// The same with ports whose messages have at most so many bytes.
    fn short(fabric: &str, max_msg_sz: &[u32]) -> String {
        let mut sizes = max_msg_sz.iter().cycle();
        let line = |line: &str| match line.starts_with("node_guid") {
            true => format!("{line}\nmax_msg_sz = {}\n", sizes.next().expect("a cycle")),
            false => format!("{line}\n"),
        };
        fabric.lines().map(line).collect()
    }

    /// Receives without completion where the second rail is slow, so that their data, credits and counts cross.
    #[test]
    fn hinted_receives_over_uneven_rails() {
        let only = ["--only", "hinted", "--only", "hinted-empty", "--only", "ll-lines"];
        for (name, qps, late) in [("rail 0 late", "1", [300, 0]), ("rail 1 late", "2", [0, 300])] {
            let settings = [("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"), ("NCCL_IB_QPS_PER_CONNECTION", qps)];
            let mut late = late.iter().cycle();
            let line = |line: &str| match line.starts_with("link_layer") {
                true => format!("{line}\nlatency_us = {}\n", late.next().expect("a cycle")),
                false => format!("{line}\n"),
            };
            let fabric: String = fabric(8, 2, "Ethernet").lines().map(line).collect();
            for seed in ["1", "2"] {
                play(name, Some(fabric.clone()), &settings, &[&only[..], &["--quick", "--seed", seed]].concat());
            }
        }
    }

    /// The same with ports on which every message takes a time of its own, one seed after the other: data, credits, counts and
    /// their acknowledgements overtake each other wherever queue pairs differ.
    #[test]
    fn hinted_receives_under_seeded_delays() {
        let only = ["--only", "hinted", "--only", "hinted-empty", "--only", "ll-lines", "--quick"];
        for seed in 1..=8 {
            let rails = [("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"), ("NCCL_IB_QPS_PER_CONNECTION", "2")];
            let settings = &rails[..if seed % 2 == 0 { 2 } else { 1 }];
            let line = |line: &str| match line.starts_with("link_layer") {
                true => format!("{line}\njitter_us = {}\n", 50 * seed),
                false => format!("{line}\n"),
            };
            let ports: String = fabric(2, 2, "Ethernet").lines().map(line).collect();
            let number = seed.to_string();
            let arguments = [&only[..], &["--seed", &number]].concat();
            play(&format!("seed {seed}"), Some(format!("seed = {seed}\n{ports}")), settings, &arguments);
        }
    }

    /// Most messages are several writes, with NICs that refuse longer ones.
    #[test]
    fn a_port_with_short_messages() {
        play("short messages", Some(short(&fabric(8, 1, "Ethernet"), &[256 << 10])), &[], &["--procs", "2", "--quick"]);
    }

    /// The agreed largest write is that of the least port of either end.
    #[test]
    fn two_rails_with_short_messages() {
        let settings = [("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"), ("NCCL_NET_RDMA_SPLIT_THRESHOLD", "512")];
        let fabric = short(&fabric(8, 2, "Ethernet"), &[1 << 20, 300_001, 1 << 30, 512 << 10]);
        play("short messages, two rails", Some(fabric), &settings, &["--procs", "2", "--quick"]);
    }

    /// 128 writes, all that the send queue takes, as 1 GiB is with Soft-RoCE, whose messages have at most 8 MiB.
    #[test]
    fn the_largest_message() {
        let fabric = short(&fabric(8, 1, "Ethernet"), &[256 << 10]);
        play("the largest message", Some(fabric), &[], &["--only", "sizes", "--sizes", "32M"]);
    }

    /// Everything, every size, with the defaults of a machine without a fabric file.
    #[test]
    fn one_rail_one_qp() {
        play("one rail, one QP", None, &[], &["--procs", "4"]);
    }

    /// Old releases of NCCL take older tables; what is not said otherwise here is played with the newest.
    fn version(abi: &str) {
        play(&format!("ABI {abi}"), None, &[], &["--abi", abi, "--quick", "--procs", "2"]);
    }

    #[test]
    fn abi_v6() {
        version("v6");
    }

    #[test]
    fn abi_v7() {
        version("v7");
    }

    #[test]
    fn abi_v8() {
        version("v8");
    }

    #[test]
    fn abi_v9() {
        version("v9");
    }

    #[test]
    fn abi_v10() {
        version("v10");
    }

    #[test]
    fn abi_v11() {
        version("v11");
    }

    #[test]
    fn abi_v12() {
        version("v12");
    }

    /// The last device is slow: a receive that does not wait for all of them shows bytes that are not there yet.
    #[test]
    fn fused_devices() {
        for (abi, most) in [("v9", 4), ("v10", 4), ("v11", 4), ("v12", 8)] {
            let slow = format!("name = \"soft_{}\"", most - 1);
            let mut text = String::new();
            let mut found = false;
            for line in fabric(2, 8, "Ethernet").lines() {
                found |= line == slow;
                text += line;
                text.push('\n');
                if found && line == "[[host.device.port]]" {
                    text += "latency_us = 2000\n";
                    found = false;
                }
            }
            assert_eq!(text.matches("latency_us").count(), 2, "{text}");
            let settings = [("NCCL_NET_RDMA_SPLIT_THRESHOLD", "4096")];
            play(&format!("fused, {abi}"), Some(text), &settings, &["--abi", abi, "--only", "fused", "--procs", "2"]);
        }
    }

    /// Events are wanted: a plugin without any would only be skipped. Messages are one work request or several, on several QPs.
    #[test]
    fn events_for_a_profiler() {
        let mut settings = vec![("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")];
        settings.push(("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"));
        let several = short(&fabric(2, 2, "Ethernet"), &[256 << 10]);
        for abi in ["v10", "v11", "v12"] {
            for (fabric, settings) in [(None, &[][..]), (Some(several.clone()), &settings)] {
                let text = play(&format!("profiled, {abi}"), fabric, settings, &["--abi", abi, "--only", "profiled"]);
                assert!(text.contains("1 passed, 0 failed") && !text.contains("skipped"), "{text}");
            }
        }
    }

    /// From v9 on NCCL can be asked to flush where it would not.
    #[test]
    fn forced_flushes_are_told_to_nccl() {
        for (value, told) in [("0", "\"force_flush\": false"), ("1", "\"force_flush\": true")] {
            let own = tempfile::tempdir().expect("a directory");
            let output = Command::new(built("bin/nccl-rdma"))
                .args(["devices", "--json", "--plugin"])
                .arg(built("lib/libnccl-net-rdma.so"))
                .env("NCCL_IBVERBS_LIB", built("soft-hca/libibverbs.so.1"))
                .env("SOFT_HCA_REGISTRY", own.path())
                .env("NCCL_NET_RDMA_FORCE_FLUSH", value)
                .output()
                .expect("the command runs");
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains(told), "{text}");
        }
    }

    #[test]
    fn four_qps_in_turn() {
        play("four QPs in turn", None, &[("NCCL_IB_QPS_PER_CONNECTION", "4")], &["--quick", "--procs", "3"]);
    }

    #[test]
    fn four_qps_split() {
        let settings = [("NCCL_IB_QPS_PER_CONNECTION", "4"), ("NCCL_IB_SPLIT_DATA_ON_QPS", "1")];
        play("four QPs, split", None, &settings, &["--quick", "--procs", "2"]);
    }

    #[test]
    fn two_rails_of_four_qps() {
        let settings = [
            ("NCCL_NET_RDMA_RAILS", "soft_0+soft_1"),
            ("NCCL_IB_QPS_PER_CONNECTION", "4"),
            ("NCCL_IB_SPLIT_DATA_ON_QPS", "1"),
            ("NCCL_NET_RDMA_SPLIT_THRESHOLD", "512"),
        ];
        play("two rails of four QPs", Some(fabric(8, 2, "Ethernet")), &settings, &["--procs", "2", "--quick"]);
    }

    /// More than two rails use the wide credit.
    #[test]
    fn eight_rails() {
        let rails = (0..8).map(|i| format!("soft_{i}")).collect::<Vec<_>>().join("+");
        let settings = [("NCCL_NET_RDMA_RAILS", rails.as_str()), ("NCCL_NET_RDMA_SPLIT_THRESHOLD", "4096")];
        play("eight rails", Some(fabric(8, 8, "Ethernet")), &settings, &["--procs", "2", "--quick"]);
    }

    #[test]
    fn infiniband_with_flushes() {
        let settings = [("NCCL_NET_RDMA_FORCE_FLUSH", "1")];
        play("InfiniBand, flushes forced", Some(fabric(8, 1, "InfiniBand")), &settings, &["--procs", "2", "--quick"]);
    }

    /// Eight processes on as few cores as there are.
    #[test]
    fn eight_processes() {
        play(
            "eight processes",
            None,
            &[],
            &["--procs", "8", "--quick", "--only", "ring", "--only", "all-pairs", "--only", "random"],
        );
    }

    /// Odd ranks on a second host (here by another name only): they are started, heard, stopped and killed over TCP.
    #[test]
    fn second_host() {
        // The next one to ask for a port gets another: the kernel goes round.
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("an address").to_string();
        drop(listener);
        let mut second = Command::new(built("bin/nccl-rdma"));
        second.args(["join", &address]).env("NCCL_SOCKET_IFNAME", "lo");
        let own = tempfile::tempdir().expect("a directory");
        second.env("SOFT_HCA_REGISTRY", own.path()).env("NCCL_IBVERBS_LIB", built("soft-hca/libibverbs.so.1"));
        let mut second = second.spawn().expect("the second host starts");
        let registry = own.path().to_str().expect("a path of text");
        let only = ["all-pairs", "two-ways", "peer-stopped", "dies-sending", "dies-receiving", "dies-idle"];
        let arguments: Vec<_> = ["--quick", "--procs", "3", "--meet", &address]
            .into_iter()
            .chain(only.iter().flat_map(|name| ["--only", name]))
            .collect();
        play("a second host", None, &[("SOFT_HCA_REGISTRY", registry)], &arguments);
        assert!(second.wait().expect("it ends with the first").success());
    }

    /// The null adapter is one process with both ends.
    #[test]
    fn null_adapter() {
        play("null adapter", None, &[("SOFT_HCA_ENGINE", "null")], &["--only", "self"]);
    }
}
