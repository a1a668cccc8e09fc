//! `nccl-check` and `nccl-compare` without a GPU, on a driver and an NCCL that are a fixture: right results pass, and each fault
//! is found for what it is.

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;
    use std::process::Command;

    const ALL: &str = "all-reduce,all-gather,reduce-scatter,broadcast,reduce,send-recv,all-to-all";

    /// Whether it succeeded, and what it printed.
    fn nccl(bug: &str, args: &str) -> (bool, String) {
        let command = PathBuf::from(env!("CARGO_BIN_EXE_nccl-rdma"));
        let fixture = command.with_file_name("examples").join("libfixture_gpu.so");
        assert!(fixture.exists(), "{} is built by `cargo test -p nccl-rdma` without --test", fixture.display());
        let folder = tempfile::tempdir().unwrap();
        for name in ["libcuda.so.1", "libcuda.so"] {
            symlink(&fixture, folder.path().join(name)).unwrap();
        }
        let mut command = Command::new(command);
        command.args(args.split_whitespace()).args(["--plugin", "libnccl-net-rdma.so", "--nccl"]).arg(&fixture);
        command.arg("--log-dir").arg(folder.path().join("logs")).env("FIXTURE_BUG", bug);
        command.env("FIXTURE_FOLDER", folder.path()).env("LD_LIBRARY_PATH", folder.path());
        command.env_remove("NCCL_IBVERBS_LIB").env_remove("SOFT_HCA_FABRIC");
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.success(), text)
    }

    fn check(bug: &str, args: &str) -> (bool, String) {
        nccl(bug, &format!("nccl-check --protos LL --max 1K {args}"))
    }

    #[test]
    fn every_operation_is_right_on_every_path() {
        for args in [
            "--ranks 2 --type int8,int32,int64,float --iters 1",
            "--ranks 3 --path dmabuf --graph --behind 2 --iters 2",
        ] {
            let (passed, text) = check("", &format!("--op {ALL} {args}"));
            assert!(passed && text.contains("1 passed, 0 failed"), "{text}");
        }
        let (passed, text) = check("", "--path dmabuf,peermem,staging,mix,mix-host --iters 2");
        assert!(passed && text.contains("5 passed, 0 failed"), "{text}");
    }

    #[test]
    fn an_operation_that_only_the_clock_saw_is_judged_too() {
        let (passed, text) = check("idle-thirds", &format!("--op {ALL} --type int8,float --iters 1"));
        assert!(!passed && text.contains("elements are wrong"), "{text}");
        let rows = text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>()).filter(|row| row.len() == 13);
        let rows: Vec<_> = rows.filter(|row| row[4] == "sum" || row[4] == "none").collect();
        assert_eq!(rows.len(), 7 * 8 * 2, "{text}");
        for row in rows {
            assert!(row[8] != "0" && row[12] != "0", "nothing wrong in {row:?}");
        }
    }

    #[test]
    fn an_operation_that_never_ends_is_named() {
        let (passed, text) = check("hangs", "--behind 1 --time-limit 10");
        let hung = "all_reduce of 8 bytes of float, out of place: the operation is not done after 5s";
        assert!(!passed && text.contains(hung) && text.contains("failed-1.log"), "{text}");
    }

    #[test]
    fn a_connection_whose_memory_went_another_way_is_missed() {
        for (path, mark) in [("dmabuf", "GPUDirect by dma-buf"), ("staging", "staging")] {
            let (passed, text) = check("unsaid", &format!("--path {path}"));
            assert!(!passed && text.contains(&format!("1 lines say ': {mark}; ', but there are 2 channels")), "{text}");
        }
    }

    #[test]
    fn comparison_judges_the_last_operation_that_it_times() {
        let args = "nccl-compare --ranks 2 --nets RDMA --path host --protos default,LL --max 512 --rounds 1 --factor 8";
        let (passed, text) = nccl("", args);
        assert!(passed, "{text}");
        let (passed, text) = nccl("idle-thirds", args);
        assert!(!passed && text.contains("elements are wrong"), "{text}");
    }
}
