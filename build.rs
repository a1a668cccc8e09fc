//! Makes the Rust types of NCCL's plugin ABI from `nccl-headers/` and holds both the headers and the types against the
//! measured layouts in `tests/data/nccl-net-layout.json`: a size or an offset that differs does not compile.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

/// ABI versions whose headers exist.
const VERSIONS: [&str; 1] = ["v8"];
const LAYOUT: &str = "tests/data/nccl-net-layout.json";

fn main() {
    println!("cargo:rerun-if-changed=nccl-headers");
    println!("cargo:rerun-if-changed={LAYOUT}");
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let layout: serde_json::Value = serde_json::from_str(&fs::read_to_string(root.join(LAYOUT)).expect("layout table"))
        .expect("layout table is JSON");

    let mut header = String::new();
    let mut rust = String::new();
    for version in VERSIONS {
        writeln!(header, "#include \"nccl_net_{version}.h\"").expect("write to a string");
        // Only the structs that our headers declare: the table also knows CollNet, which we do not export.
        let text = fs::read_to_string(root.join(format!("nccl-headers/nccl_net_{version}.h"))).expect("header");
        for (name, s) in layout[version].as_object().expect("structs of a version") {
            if !text.contains(&format!("}} {name};")) {
                continue;
            }
            writeln!(header, "_Static_assert(sizeof({name}) == {}, \"sizeof {name}\");", s["size"]).expect("write");
            writeln!(rust, "const _: () = assert!(size_of::<{name}>() == {});", s["size"]).expect("write");
            writeln!(rust, "const _: () = assert!(align_of::<{name}>() == {});", s["align"]).expect("write");
            for (field, f) in s["fields"].as_object().expect("fields of a struct") {
                let offset = &f["offset"];
                writeln!(header, "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");")
                    .expect("write");
                writeln!(rust, "const _: () = assert!(std::mem::offset_of!({name}, {field}) == {offset});")
                    .expect("write");
            }
        }
    }
    let wrapper = out.join("nccl_net_all.h");
    fs::write(&wrapper, header).expect("write the header");
    fs::write(out.join("nccl_net_layout.rs"), rust).expect("write the assertions");
    bindgen::Builder::default()
        .header(wrapper.to_str().expect("UTF-8 path"))
        .clang_arg(format!("-I{}", root.join("nccl-headers").display()))
        .allowlist_file(".*nccl_net.*")
        .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
        .layout_tests(false) // ours are stricter
        .use_core()
        .generate()
        .expect("bindgen over nccl-headers (a failed _Static_assert above names the field)")
        .write_to_file(out.join("nccl_net.rs"))
        .expect("write the bindings");
}
