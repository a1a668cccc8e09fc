//! The shared library under test, for programs that load it.
#![allow(dead_code, reason = "each test binary uses a part")]
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Builds the library beside this test, in whatever profile and target directory that is.
pub(crate) fn built() -> PathBuf {
    let deps = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    let profile_dir = deps.parent().unwrap();
    let profile = match profile_dir.file_name().unwrap().to_str().unwrap() {
        "debug" => "dev",
        other => other,
    };
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let built = Command::new(cargo)
        .args(["build", "--quiet", "-p", "soft-hca-verbs", "--profile", profile, "--target-dir"])
        .arg(profile_dir.parent().unwrap())
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .status()
        .unwrap();
    assert!(built.success());
    profile_dir.join("libsoft_hca_verbs.so")
}

/// A folder for LD_LIBRARY_PATH: the library under the names by which programs look for it.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let library = built();
        for name in ["libibverbs.so.1", "libibverbs.so"] {
            std::os::unix::fs::symlink(&library, dir.path().join(name)).unwrap();
        }
        Self(dir)
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }
}

/// Says so past the test runner's capture, so that every run shows it.
pub(crate) fn skip(why: &str) {
    std::io::stderr().write_all(format!("skipped: {why}\n").as_bytes()).unwrap();
}
