//! A second opinion on the verbs structs: ibverbs-sys against rdma-sys, in a crate of its own that never joins the product.

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::process::Command;

    /// The newest libclang that bindgen would find, by the folders of Debian and Ubuntu.
    fn libclang() -> Option<u32> {
        let versions = std::fs::read_dir("/usr/lib").ok()?.filter_map(|e| {
            let name = e.ok()?.file_name().into_string().ok()?;
            let version: u32 = name.strip_prefix("llvm-")?.parse().ok()?;
            let lib = Path::new("/usr/lib").join(&name).join("lib");
            std::fs::read_dir(lib)
                .ok()?
                .any(|f| {
                    f.is_ok_and(|f| {
                        f.file_name().to_string_lossy().starts_with("libclang")
                            && f.file_name().to_string_lossy().contains(".so")
                    })
                })
                .then_some(version)
        });
        versions.max()
    }

    #[test]
    fn rdma_sys_agrees_on_every_layout() {
        match libclang() {
            Some(v) if v <= 15 => {}
            found => {
                println!("skipped: rdma-sys builds with libclang 15 or older; found {found:?}");
                return;
            }
        }
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let output = Command::new(env!("CARGO"))
            .args(["run", "--locked", "--quiet", "--manifest-path"])
            .arg(root.join("tests/layout-check/Cargo.toml"))
            .env("CARGO_TARGET_DIR", root.join("target/layout-check"))
            .output()
            .expect("cargo runs");
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("compared, 0 differ"), "{text}");
        println!("{text}");
    }
}
