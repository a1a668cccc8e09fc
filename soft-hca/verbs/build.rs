//! Link arguments of the library. Two version scripts meet here, rustc's own and `nodes.map`: LLD takes both.
fn main() {
    let dir = std::env::var("CARGO_MANIFEST_DIR").unwrap_or_default();
    for arg in [
        &format!("-Wl,--version-script={dir}/nodes.map"),
        "-Wl,-soname,libibverbs.so.1",
        // An undefined symbol fails here and not inside a job.
        "-Wl,-z,defs",
        // The engine's thread and the fork handler must not lose their code.
        "-Wl,-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
    println!("cargo:rerun-if-changed=nodes.map");
    println!("cargo:rerun-if-changed=build.rs");
}
