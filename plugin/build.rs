//! Link arguments of the shipped library.
fn main() {
    for arg in [
        // The name that NCCL_NET_PLUGIN=rdma looks for.
        "-Wl,-soname,libnccl-net-rdma.so",
        // An undefined symbol fails here, not inside the job.
        "-Wl,-z,defs",
        // NCCL dlcloses plugins without a call (up to v10 there is no finalize); our threads must not lose their code.
        "-Wl,-z,nodelete",
    ] {
        println!("cargo:rustc-cdylib-link-arg={arg}");
    }
    println!("cargo:rerun-if-changed=build.rs");
}
