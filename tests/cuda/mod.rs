//! The stand-in for the CUDA driver, built beside the test that wants it.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A folder for LD_LIBRARY_PATH.
pub(crate) fn folder() -> &'static str {
    static FOLDER: OnceLock<String> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let profile_dir = own.parent().and_then(Path::parent).unwrap();
        let folder = profile_dir.join("examples/cuda_stand_in");
        let text = folder.to_str().unwrap().to_owned();
        // A process that a test has started has it already.
        if std::env::var("LD_LIBRARY_PATH").as_deref() != Ok(&*text) {
            build(profile_dir, &folder);
        }
        text
    })
}

/// A folder for LD_LIBRARY_PATH that hides the machine's driver, should it have one: the dynamic linker takes the first file of a
/// name, and does not look on where that is no library.
#[allow(dead_code, reason = "not every test that has this module needs it")]
pub(crate) fn no_driver() -> &'static str {
    static FOLDER: OnceLock<String> = OnceLock::new();
    FOLDER.get_or_init(|| {
        let own = std::env::current_exe().unwrap();
        let folder = own.parent().and_then(Path::parent).unwrap().join("examples/no_cuda");
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["libcuda.so", "libcuda.so.1"] {
            std::fs::write(folder.join(name), "").unwrap();
        }
        folder.to_str().unwrap().to_owned()
    })
}

fn build(profile_dir: &Path, folder: &Path) {
    let profile = match profile_dir.file_name().and_then(|n| n.to_str()).unwrap() {
        "debug" => "dev",
        other => other,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args([
            "build",
            "--quiet",
            "--locked",
            "-p",
            "nccl-net-rdma",
            "--example",
            "cuda_stand_in",
            "--profile",
            profile,
        ])
        .arg("--target-dir")
        .arg(profile_dir.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status();
    assert!(built.unwrap().success());
    std::fs::create_dir_all(folder).unwrap();
    for name in ["libcuda.so", "libcuda.so.1"] {
        // Tests run at once: whoever comes first makes it.
        let library = PathBuf::from("../libcuda_stand_in.so");
        let made = std::os::unix::fs::symlink(library, folder.join(name));
        assert!(made.is_ok() || folder.join(name).exists());
    }
}
