//! A second opinion on the structs of `<infiniband/verbs.h>`: ibverbs-sys, whose types the verbs room uses, against rdma-sys,
//! which makes its own from the headers of the machine. rdma-sys builds only with librdmacm-dev and a libclang of at most 15;
//! elsewhere the test says that it is skipped, and why.

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;
    use std::io::Write as _;
    use std::mem::offset_of;
    use std::path::Path;
    use std::process::{Command, Output};

    use ibverbs_sys::*;

    macro_rules! layouts {
        ($($name:ident { $($field:ident),* })*) => {{
            let mut text = String::new();
            $(
                writeln!(text, "{} {} {}", stringify!($name), size_of::<$name>(), align_of::<$name>()).unwrap();
                $(writeln!(text, "{}.{} {}", stringify!($name), stringify!($field), offset_of!($name, $field)).unwrap();)*
            )*
            text
        }};
    }

    fn cargo(args: &[&str]) -> Output {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        Command::new(env!("CARGO"))
            .args(args)
            .args(["--quiet", "--locked"])
            .current_dir(root.join("tests/layout-check"))
            .env("CARGO_TARGET_DIR", root.join("target/layout-check"))
            .output()
            .unwrap()
    }

    fn size(line: &str) -> usize {
        line.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn ibverbs_sys_and_rdma_sys_agree() {
        let build = cargo(&["build", "--package=rdma-sys"]);
        if !build.status.success() {
            let why = String::from_utf8_lossy(&build.stderr);
            // Past the test runner's capture, so that a run shows it.
            let line = format!("skipped: layouts against rdma-sys, which does not build here: {why}\n");
            std::io::stderr().write_all(line.as_bytes()).unwrap();
            return;
        }
        let run = cargo(&["run"]);
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
        let theirs = String::from_utf8(run.stdout).unwrap();
        let ours = include!("layout-check/fields.rs");
        assert!(ours.lines().count() > 80, "{ours}");
        assert_eq!(ours.lines().count(), theirs.lines().count());
        for (ours, theirs) in ours.lines().zip(theirs.lines()) {
            // Newer headers have one more field at its end, which the room zeroes before it asks an older library.
            let grown = ours.starts_with("ibv_port_attr ") && size(ours) > size(theirs);
            assert!(ours == theirs || grown, "ibverbs-sys has {ours}, rdma-sys {theirs}");
        }
    }
}
