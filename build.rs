//! Makes the Rust types of NCCL's plugin ABI from `nccl-headers/` and holds both the headers and the types against the
//! measured layouts in `tests/data/nccl-net-layout.json`: a size or an offset that differs does not compile.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::{env, fs};

/// ABI versions whose headers exist.
const VERSIONS: [&str; 7] = ["v6", "v7", "v8", "v9", "v10", "v11", "v12"];
const LAYOUT: &str = "tests/data/nccl-net-layout.json";

fn main() {
    println!("cargo:rerun-if-changed=nccl-headers");
    println!("cargo:rerun-if-changed={LAYOUT}");
    println!("cargo:rerun-if-changed=build.rs");
    let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
    let root = PathBuf::from(env::var("CARGO_MANIFEST_DIR").expect("cargo sets CARGO_MANIFEST_DIR"));
    let layout: serde_json::Value = serde_json::from_str(&fs::read_to_string(root.join(LAYOUT)).expect("layout table"))
        .expect("layout table is JSON");

    let mut header = String::from("#include \"nccl_net.h\"\n");
    let mut rust = String::new();
    let text = fs::read_to_string(root.join("nccl-headers/nccl_net.h")).expect("header");
    for (name, value) in layout["constants"].as_object().expect("constants") {
        writeln!(header, "#ifdef {name}\n_Static_assert({name} == {value}, \"{name}\");\n#endif").expect("write");
    }
    // Later versions add enumerators that no version of this interface uses.
    let declared = |name: &str| text.contains(&format!(" {name} = "));
    for entries in layout["enums"].as_object().expect("enums").values() {
        for (name, value) in entries.as_object().expect("an enum").iter().filter(|(name, _)| declared(name)) {
            writeln!(header, "_Static_assert({name} == {value}, \"{name}\");").expect("write");
        }
    }
    for version in VERSIONS {
        writeln!(header, "#include \"nccl_net_{version}.h\"").expect("write to a string");
        // The table also knows CollNet and its scatter entries, which this plugin does not have.
        let ours = |name: &str| !name.starts_with("ncclCollNet") && !name.starts_with("ncclNetSGE");
        for (name, s) in layout[version].as_object().expect("structs of a version").iter().filter(|(n, _)| ours(n)) {
            writeln!(header, "_Static_assert(sizeof({name}) == {}, \"sizeof {name}\");", s["size"]).expect("write");
            writeln!(rust, "const _: () = assert!(size_of::<{name}>() == {});", s["size"]).expect("write");
            writeln!(rust, "const _: () = assert!(align_of::<{name}>() == {});", s["align"]).expect("write");
            for (field, f) in s["fields"].as_object().expect("fields of a struct") {
                let offset = &f["offset"];
                writeln!(header, "_Static_assert(offsetof({name}, {field}) == {offset}, \"{name}.{field}\");")
                    .expect("write");
                // The table gives function pointers no size of their own.
                let size = f["size"].as_u64().unwrap_or(8);
                writeln!(header, "_Static_assert(sizeof((({name} *)0)->{field}) == {size}, \"{name}.{field}\");")
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
