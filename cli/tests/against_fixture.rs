//! The command against the fixture plugin: the contract driver passes an honest plugin and catches each deliberate bug
//! in the row that is about it; the demo is right with an honest plugin and fails with one that spoils a byte.

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::{Command, Output};

    fn fixture() -> PathBuf {
        let command = PathBuf::from(env!("CARGO_BIN_EXE_nccl-rdma"));
        let fixture = command.with_file_name("examples").join("libfixture_plugin.so");
        assert!(fixture.exists(), "{} is built by `cargo test -p nccl-rdma` without --test", fixture.display());
        fixture
    }

    fn nccl_rdma(bug: &str, args: &[&str]) -> Output {
        with_env(bug, args, &[])
    }

    fn with_env(bug: &str, args: &[&str], env: &[(&str, &str)]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-rdma"));
        command.args(args).arg("--plugin").arg(fixture()).env("FIXTURE_BUG", bug);
        command.env_remove("NCCL_DEBUG").env_remove("NCCL_NET").envs(env.iter().copied());
        command.output().unwrap()
    }

    fn text(output: &Output) -> String {
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
    }

    /// The bug fails the case, for this reason.
    fn caught(bug: &str, case: &str, reason: &str) {
        let output =
            nccl_rdma(bug, &["contract", "--quick", "--error-bound", "1", "--time-limit", "5", "--only", case]);
        let text = text(&output);
        assert!(!output.status.success(), "{bug} was not caught:\n{text}");
        assert!(text.contains("0 passed, 1 failed"), "{text}");
        assert!(text.contains(reason), "{bug} was caught for another reason than {reason:?}:\n{text}");
    }

    #[test]
    fn an_honest_plugin_passes_every_case() {
        let output = nccl_rdma("", &["contract", "--quick", "--procs", "3"]);
        let text = text(&output);
        assert!(output.status.success(), "{text}");
        let list = nccl_rdma("", &["contract", "--list"]);
        let list = String::from_utf8_lossy(&list.stdout).into_owned();
        // One takes long and is played only when it is named.
        let cases = list.lines().filter(|line| !line.starts_with("huge ")).count();
        assert!(cases >= 40, "{cases} cases");
        // It has version 8, in which no device is fused, and nothing is told to a profiler.
        assert!(text.contains(&format!("\n{} passed, 0 failed, 2 skipped\n", cases - 2)), "{text}");
        for skipped in ["fused", "profiled"] {
            assert!(text.lines().any(|line| line.starts_with(skipped) && line.contains(" skip ")), "{text}");
        }
    }

    #[test]
    fn a_version_that_is_not_exported_is_named() {
        let output = nccl_rdma("", &["contract", "--abi", "v9"]);
        let text = text(&output);
        assert!(!output.status.success(), "{text}");
        assert!(text.contains("exports no ncclNetPlugin_v9"), "{text}");
    }

    /// Nothing is a pass that has moved nothing.
    #[test]
    fn cases_without_a_size_are_skipped_or_refused() {
        let output = nccl_rdma("", &["contract", "--quick", "--sizes", "8M"]);
        let shown = text(&output);
        assert!(!output.status.success() && shown.contains("no size is left"), "{shown}");

        let mut args = vec!["contract", "--sizes", "2M"];
        let skipped = ["self", "all-pairs", "short-sends", "sizes-null", "iflush"];
        skipped.iter().chain(["sizes"].iter()).for_each(|name| args.extend(["--only", *name]));
        let output = nccl_rdma("", &args);
        let shown = text(&output);
        assert!(output.status.success() && shown.contains("1 passed, 0 failed, 5 skipped"), "{shown}");
        for name in skipped {
            let why = |line: &str| line.starts_with(name) && line.contains("no size up to 1 MiB");
            assert!(shown.lines().any(why), "{name}: {shown}");
        }

        let output = nccl_rdma("", &["contract", "--sizes", "0", "--only", "short-sends"]);
        let shown = text(&output);
        assert!(!output.status.success() && shown.contains("no case was played"), "{shown}");
    }

    #[test]
    fn numbers_that_cannot_be_meant_are_refused() {
        let (most, less) = (u64::MAX.to_string(), "--dev=-1");
        for option in ["--time-limit", "--error-bound", "--connect-bound"] {
            refused(&["contract", option, &most], option);
        }
        refused(&["bench", "paths", "--paths", "host", "--time-limit", &most], "--time-limit");
        refused(&["tear", "--time-limit", &most], "--time-limit");
        refused(&["tear", "--case-limit", &most], "--case-limit");
        for command in [&["contract", less][..], &["demo", less], &["perf", less], &["bench", "paths", less]] {
            refused(command, "--dev");
        }
        let output = nccl_rdma("", &["contract", "--only", "close-null", "--dev", "7"]);
        assert!(text(&output).contains("`nccl-rdma devices` tells why"), "{}", text(&output));
    }

    /// Like a misspelt option, before anything is begun.
    fn refused(args: &[&str], option: &str) {
        let output = Command::new(env!("CARGO_BIN_EXE_nccl-rdma")).args(args).output().unwrap();
        let shown = text(&output);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {shown}");
        assert!(shown.contains(&format!("for '{option}")) && shown.contains("is not in"), "{args:?}: {shown}");
    }

    #[test]
    fn breaches_of_the_data_path_are_caught() {
        caught("wrong-size", "sizes", "has size 1, not 0");
        caught("past-end", "sizes", "the guard after the buffer was written to");
        caught("past-end", "short-sends", "the space behind the payload was written to");
        caught("past-end", "hinted", "behind the payload of step");
        caught("lose-zero", "zero-bytes", "receive");
        caught("mix-tags", "groups-2", "receive");
        caught("garbage-first", "ll-lines", "neither old nor new");
        caught("late-byte", "abort-receives", "memory that deregMr had handed back");
        caught("no-truncate", "long-sends", "buffer 0 has size");
        caught("done-early", "sizes", " is 0x5a, not ");
    }

    #[test]
    fn breaches_of_the_call_rules_are_caught() {
        caught("keep-request", "send-first", "left what was in the request slot");
        caught("sizes-on-send", "sizes", "wrote more than one size for a send");
        caught("done-unwritten", "sizes", "did not write *done");
        caught("null-close", "close-null", "closeSend returned 4");
        caught("handle-overrun", "connect-retries", "wrote outside the 128 bytes of the handle");
        caught("leak-fd", "reconnect", "descriptors");
        caught("leak-fd", "reload", "descriptors");
        caught("leak-mapping", "reconnect", "mapped files became");
        caught("leak-mapping", "reload", "mapped files became");
        caught("fork-tells-peer", "forks", "returned 6");
    }

    #[test]
    fn a_plugin_that_hangs_on_a_dead_peer_is_caught() {
        for case in
            ["abort-sends", "abort-receives", "dies-before-accept", "dies-sending", "dies-receiving", "dies-idle"]
        {
            caught("hang-on-death", case, "the peer has gone, but");
        }
    }

    #[test]
    fn devices_tells_what_is_there_and_what_the_plugin_said() {
        let output = nccl_rdma("", &["devices"]);
        let shown = text(&output);
        assert!(output.status.success(), "{shown}");
        assert!(shown.contains("fix0") && shown.contains("WARN fixture: eth7 left out"), "{shown}");

        let output = nccl_rdma("", &["devices", "--json"]);
        let json: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(json["devices"][0]["speed_mbps"], 10_000);
        assert_eq!(json["log"][0]["text"], "fixture: eth7 left out");

        let output = nccl_rdma("no-device", &["devices"]);
        assert!(!output.status.success(), "no device is a failure");
        assert!(text(&output).contains("eth7 left out"), "the reason is shown all the same");
    }

    /// What stands in for a device so that the job stops is none that NCCL could use.
    #[test]
    fn devices_that_nobody_can_use_are_a_failure() {
        for bug in ["no-device", "stand-in"] {
            for (net, then) in
                [("FIXTURE", "NCCL_NET=FIXTURE is set: NCCL stops"), ("", "goes on to its next transport")]
            {
                let output = with_env(bug, &["devices"], &[("NCCL_NET", net)]);
                let shown = text(&output);
                let then = if bug == "stand-in" { "the job stops (NCCL_NET_RDMA_STRICT)" } else { then };
                assert_eq!(output.status.code(), Some(1), "{bug}: {shown}");
                assert!(shown.lines().last().unwrap().ends_with(then), "{bug}: {shown}");
                assert!(shown.contains("no device that can be used"), "{bug}: {shown}");
            }
        }
    }

    /// With whatever NCCL_DEBUG: here nothing but the plugin's own words tells why.
    #[test]
    fn an_init_that_fails_is_told_in_the_plugins_own_words() {
        for args in [&["devices"][..], &["demo", "--ranks", "2"], &["perf"]] {
            for debug in [&[][..], &[("NCCL_DEBUG", "WARN")]] {
                let output = with_env("no-init", args, debug);
                let shown = text(&output);
                assert!(!output.status.success() && shown.contains("init returned 3"), "{args:?}: {shown}");
                assert!(shown.contains("a word by the way"), "{args:?} {debug:?}: {shown}");
            }
        }
    }

    #[test]
    fn the_demo_is_verbose_if_asked_to() {
        let args = ["demo", "--ranks", "2", "--max", "8", "--iters", "1"];
        assert!(!text(&nccl_rdma("", &args)).contains("a word by the way"));
        let shown = text(&nccl_rdma("", &[&args[..], &["--verbose"]].concat()));
        assert!(shown.contains("rank 1: INFO fixture: a word by the way"), "{shown}");
    }

    /// Pasted as they stand.
    #[test]
    fn the_last_words_of_the_demo_work_in_a_shell() {
        let shown = text(&nccl_rdma("", &["demo", "--ranks", "2", "--max", "8", "--iters", "1"]));
        let line = shown.lines().map(str::trim).find(|line| line.starts_with("export ")).unwrap();
        let script = format!("{line}; env");
        let output = Command::new("sh").args(["-c", &script]).env("LD_LIBRARY_PATH", "/before").output().unwrap();
        let folder = fixture().canonicalize().unwrap().parent().unwrap().display().to_string();
        let env = text(&output);
        for set in ["NCCL_NET_PLUGIN=rdma", "NCCL_NET=RDMA", &format!("LD_LIBRARY_PATH={folder}:/before")] {
            assert!(env.lines().any(|line| line == set), "{set}: {line}");
        }
    }

    /// As with `| head`.
    #[test]
    fn a_reader_that_has_seen_enough_is_no_panic() {
        for args in [&["devices"][..], &["env"], &["contract", "--list"]] {
            let (reader, writer) = std::io::pipe().unwrap();
            drop(reader);
            let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-rdma"));
            command.args(args).stdout(writer);
            if args != ["env"] {
                command.arg("--plugin").arg(fixture());
            }
            let output = command.output().unwrap();
            assert!(output.stderr.is_empty() && output.status.code() != Some(101), "{args:?}: {}", text(&output));
        }
    }

    #[test]
    fn join_says_whom_it_waits_for() {
        let join = |address: &str| {
            let start = std::time::Instant::now();
            let output = Command::new(env!("CARGO_BIN_EXE_nccl-rdma")).args(["join", address]).output().unwrap();
            assert!(start.elapsed().as_secs() < 30, "{address}: {}", text(&output));
            output
        };
        let output = join("nonsense");
        assert!(!output.status.success() && text(&output).contains("HOST:PORT"), "{}", text(&output));
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        // A first host that has nothing to do.
        let host = std::thread::spawn(move || drop(listener.accept()));
        let output = join(&address);
        assert!(text(&output).contains(&format!("waiting for {address} (60 s)")), "{}", text(&output));
        host.join().unwrap();
    }

    /// NCCL puts their lines into its environment; this command does not.
    #[test]
    fn env_names_the_files_that_it_does_not_read() {
        let home = tempfile::tempdir().unwrap();
        let other = home.path().join("other.conf");
        let shown = |file: Option<&std::path::Path>| {
            let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-rdma"));
            command.arg("env").env("HOME", home.path()).env_remove("NCCL_CONF_FILE");
            file.map(|file| command.env("NCCL_CONF_FILE", file));
            text(&command.output().unwrap())
        };
        let file = home.path().join(".nccl.conf").display().to_string();
        assert!(!shown(None).contains(&file));
        std::fs::write(&file, "NCCL_IB_TIMEOUT=18\n").unwrap();
        let last = shown(None).lines().last().unwrap().to_owned();
        assert!(last.contains(&file) && last.contains("not shown here"), "{last}");
        std::fs::write(&other, "").unwrap();
        let shown = shown(Some(&other));
        assert!(shown.contains(&other.display().to_string()) && !shown.contains(&file), "instead: {shown}");
    }

    #[test]
    fn the_demo_checks_every_element() {
        let args = ["demo", "--ranks", "3", "--max", "2M", "--iters", "2"];
        let output = nccl_rdma("", &args);
        let shown = text(&output);
        assert!(output.status.success(), "{shown}");
        assert!(shown.contains("using network FIXTURE, device fix0"), "{shown}");
        assert!(shown.contains("19 sizes passed, 0 failed"), "{shown}");
        assert!(shown.contains("Using network RDMA"), "what to set on a cluster: {shown}");

        let output = nccl_rdma("spoil-byte", &args);
        let shown = text(&output);
        assert!(!output.status.success(), "{shown}");
        assert!(shown.contains("elements are wrong"), "{shown}");

        // One size, so that only what is timed has late data, and with 3 ranks only those that are summed: equal sums hid them.
        let output = nccl_rdma("done-early", &["demo", "--ranks", "3", "--min", "4K", "--max", "4K", "--iters", "6"]);
        let shown = text(&output);
        assert!(!output.status.success() && shown.contains("elements are wrong"), "{shown}");
    }

    #[test]
    fn bench_paths_measures_checks_and_plots() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("made/anew");
        let args = ["bench", "paths", "--paths", "host", "--max", "4K", "--rounds", "2", "--budget", "1", "--out"];
        let args = [&args[..], &[out.to_str().unwrap()]].concat();
        let output = nccl_rdma("", &args);
        let shown = text(&output);
        assert!(output.status.success(), "{shown}");
        assert!(shown.lines().filter(|line| line.starts_with("| ")).count() == 1 + 10, "{shown}");
        assert!(shown.contains("prove that the tool works"), "its device is unknown to the kernel: {shown}");
        assert!(shown.contains("no profile: "), "{shown}");
        assert!(std::fs::read_to_string(out.join("paths.svg")).unwrap().contains("bandwidth (GB/s)"));
        assert!(std::fs::read(out.join("paths.png")).unwrap().starts_with(b"\x89PNG"));
        assert!(!out.join("profile.json").exists());

        // The profile of an earlier run may be in use: it stays, with its plots, unless there is another.
        let names = ["paths.svg", "paths.png", "profile.json"];
        names.iter().for_each(|name| std::fs::write(out.join(name), "earlier").unwrap());
        for (bug, words) in [("spoil-byte", " bytes arrived wrong"), ("", "kept: ")] {
            let output = nccl_rdma(bug, &args);
            let shown = text(&output);
            assert!(output.status.success() == bug.is_empty() && shown.contains(words), "{shown}");
            assert!(names.iter().all(|name| std::fs::read_to_string(out.join(name)).unwrap() == "earlier"), "{bug}");
            assert_eq!(std::fs::read_dir(&out).unwrap().count(), names.len(), "nothing beside them");
        }
    }

    #[test]
    fn bench_paths_says_where_it_was_when_time_was_over() {
        let args = ["bench", "paths", "--paths", "host", "--rounds", "1", "--budget", "60000", "--time-limit", "1"];
        let output = nccl_rdma("", &args);
        let shown = text(&output);
        // A fast machine comes past the first size.
        assert!(!output.status.success() && shown.contains("FAIL host: at ") && shown.contains(" bytes: "), "{shown}");
        assert!(shown.contains("time is over (--time-limit)"), "{shown}");
    }

    #[test]
    fn bench_paths_says_what_it_lacks() {
        let output = nccl_rdma("", &["bench", "paths", "--paths", "host", "--out", "/proc/nowhere"]);
        let shown = text(&output);
        assert!(shown.contains("nothing can be written to /proc/nowhere"), "{shown}");
        // Index 99: no GPU where there is a driver, too.
        let output = nccl_rdma("", &["bench", "paths", "--device", "99"]);
        let shown = text(&output);
        assert_eq!(output.status.code(), Some(3), "{shown}");
        assert!(shown.contains("--paths host measures host memory without one"), "{shown}");
    }

    #[test]
    fn perf_measures_both() {
        let output = nccl_rdma("", &["perf", "--sizes", "8,4K"]);
        assert!(output.status.success(), "{}", text(&output));
        assert_eq!(String::from_utf8_lossy(&output.stdout).lines().count(), 4);
    }

    /// A full-size answer would be counted as time of the stream, though not as bytes: a fifth of a stream of four messages.
    #[test]
    fn perf_answers_a_stream_with_an_empty_message() {
        let folder = tempfile::tempdir().unwrap();
        let tally = folder.path().join("sent");
        let mut command = Command::new(env!("CARGO_BIN_EXE_nccl-rdma"));
        command.args(["perf", "--sizes", "1M", "--volume", "4M", "--rounds", "2", "--plugin"]).arg(fixture());
        let output = command.env("FIXTURE_TALLY", &tally).output().unwrap();
        assert!(output.status.success(), "{}", text(&output));
        let sent = std::fs::read_to_string(tally).unwrap();
        let mut sent: Vec<usize> = sent.lines().map(|line| line.parse().unwrap()).collect();
        sent.sort_unstable();
        // In each of three rounds, the first to warm up, a ping and its answer, and four messages.
        assert_eq!(sent, [3 << 20, 15 << 20]);
    }
}
