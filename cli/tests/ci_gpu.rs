//! `ci/gpu` itself, on a machine that seems to have a GPU: which rows it plays, and what it makes of how they went. In place of
//! `nccl-rdma` and Python stand scripts that write down how they were called.

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::path::{Path, PathBuf};
    use std::process::Command;

    use tempfile::TempDir;

    /// A source tree with a build.
    struct Tree(TempDir);

    impl Tree {
        fn new() -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            let ci = Path::new(env!("CARGO_MANIFEST_DIR")).join("../ci").canonicalize().unwrap();
            symlink(ci.join("gpu-train.py"), tree.file("ci/gpu-train.py")).unwrap();
            fs::copy(ci.join("gpu"), tree.file("ci/gpu")).unwrap();
            for file in ["lib/libnccl-net-rdma.so", "soft-hca/libibverbs.so", "soft-hca/libibverbs.so.1"] {
                fs::write(tree.file(&format!("dist/{file}")), file).unwrap();
            }
            fs::write(tree.file("libnccl.so.2"), "one NCCL").unwrap();
            let status = "case \"$*\" in *$FAILS*) exit 1 ;; *) exit ${STATUS:-0} ;; esac";
            tree.script("dist/bin/nccl-rdma", &format!("echo \"$*\" >>\"$CALLS\"\n{status}"));
            tree.script("bin/python", "echo \"$*\" >>\"$CALLS\"");
            tree.script("bin/nvidia-smi", "echo 'GPU 0: none'");
            tree.script("bin/gcc", "touch .cache/only-v8/libnccl-net-rdma.so");
            tree
        }

        fn file(&self, path: &str) -> PathBuf {
            let file = self.0.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            file
        }

        fn script(&self, path: &str, body: &str) {
            let file = self.file(path);
            fs::write(&file, format!("#!/bin/sh\n{body}\n")).unwrap();
            fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
        }

        /// Exit status, what it printed, and the calls that it made.
        fn run(&self, args: &str, env: &[(&str, &str)]) -> (i32, String, Vec<String>) {
            let calls = self.file("calls");
            fs::write(&calls, "").unwrap();
            let mut command = Command::new("bash");
            command.arg(self.file("ci/gpu")).args(args.split_whitespace());
            command.env_clear().env("PATH", format!("{}:/usr/bin:/bin", self.file("bin").display()));
            command.env("CALLS", &calls).env("FAILS", "nothing").env("GPU_PYTHON", self.file("bin/python"));
            command.env("NCCL_LIB", self.file("libnccl.so.2")).envs(env.iter().copied());
            let output = command.output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
            let calls = fs::read_to_string(calls).unwrap().lines().map(str::to_owned).collect();
            (output.status.code().unwrap(), text, calls)
        }
    }

    #[test]
    fn what_passed_is_played_again_with_another_nccl_abi_or_option() {
        let tree = Tree::new();
        let plays = |args: &str, env: &[(&str, &str)]| {
            let (status, text, calls) = tree.run(args, env);
            assert_eq!(status, 0, "{text}");
            (calls.len(), text)
        };
        let (all, text) = plays("matrix", &[]);
        assert!(all > 70 && text.contains(&format!("all passed: {all} passed, 0 passed before, 3 skipped")), "{text}");
        let (none, text) = plays("matrix", &[]);
        assert!(none == 0 && text.contains(&format!("all passed: 0 passed, {all} passed before, 3 skipped")), "{text}");
        assert_eq!(plays("matrix --channels 4", &[]).0, all);
        let (v8, _) = plays("matrix", &[("GPU_ABI", "8")]);
        assert!((1..all).contains(&v8), "{v8} rows with version 8");
        fs::write(tree.file("libnccl.so.2"), "another NCCL").unwrap();
        assert_eq!(plays("matrix", &[]).0, all);
        let (unknown, _) = plays("matrix", &[("NCCL_LIB", "/nowhere")]);
        assert_eq!((unknown, plays("matrix", &[("NCCL_LIB", "/nowhere")]).0), (all, all));
    }

    #[test]
    fn a_row_of_the_matrix_that_failed_is_played_again() {
        let tree = Tree::new();
        let (status, text, all) = tree.run("matrix", &[("FAILS", "--algo PAT")]);
        assert!(status == 1 && text.contains("not all passed"), "{text}");
        let (status, text, again) = tree.run("matrix", &[]);
        assert_eq!(status, 0, "{text}");
        assert!(
            again.iter().all(|call| call.contains("--algo PAT")) && (1..all.len()).contains(&again.len()),
            "{text}"
        );
    }

    #[test]
    fn rows_can_be_chosen_by_name() {
        let tree = Tree::new();
        let (status, text, calls) = tree.run("matrix", &[("GPU_ONLY", "dmabuf, PAT")]);
        assert_eq!((status, calls.len()), (0, 1), "{text}");
        assert!(text.contains("all passed: 1 passed"), "{text}");
        let (status, text, calls) = tree.run("matrix", &[("GPU_ONLY", "no such row")]);
        assert_eq!((status, calls.len()), (2, 0), "{text}");
    }

    #[test]
    fn a_run_in_which_nothing_passed_fails() {
        let tree = Tree::new();
        let (status, text, _) = tree.run("pxn", &[]);
        assert!(status == 1 && text.contains("nothing passed: 0 passed, 0 passed before, 1 skipped"), "{text}");
        let (status, text, _) = tree.run("rdma", &[("STATUS", "4")]);
        assert!(status == 1 && text.contains("nothing passed"), "{text}");
        let (status, text, _) = tree.run("rdma", &[("FAILS", "--path staging")]);
        assert!(status == 1 && text.contains("skipped, 4 failed or not run"), "{text}");
    }

    #[test]
    fn version_8_is_not_asked_to_stage() {
        let (status, text, calls) = Tree::new().run("rdma behind train", &[("GPU_ABI", "8")]);
        assert_eq!(status, 0, "{text}");
        assert!(!calls.iter().any(|call| call.contains("staging")), "{calls:?}");
        assert!(calls.iter().any(|call| call.contains("--behind 40")), "{calls:?}");
        assert!(text.contains("skipped: staging takes version 9"), "{text}");
    }

    #[test]
    fn training_is_judged() {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut command = Command::new("python3");
        command
            .env("PYTHONDONTWRITEBYTECODE", "1")
            .arg(here.join("tests/ci_gpu_train.py"))
            .arg(here.join("../ci/gpu-train.py"));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    #[test]
    fn training_takes_every_path_and_no_option_of_others() {
        let (status, text, calls) = Tree::new().run("behind train --max 8M", &[]);
        assert_eq!(status, 0, "{text}");
        let (trains, checks): (Vec<_>, Vec<_>) = calls.iter().partition(|call| call.contains("gpu-train.py"));
        assert!(
            trains.len() == 2 && trains.iter().all(|call| call.contains("--paths host,dmabuf,staging")),
            "{calls:?}"
        );
        assert!(!trains.iter().any(|call| call.contains("--max")), "{calls:?}");
        assert!(checks.len() == 8 && checks.iter().all(|call| call.contains("--max 8M")), "{calls:?}");
        assert_eq!(checks.iter().filter(|call| call.contains("--path dmabuf")).count(), 4);
    }
}
