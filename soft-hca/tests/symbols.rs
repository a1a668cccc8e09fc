//! The shared library as its users see it: every name under its version, and nothing more that it needs.
#![allow(
    clippy::undocumented_unsafe_blocks,
    clippy::multiple_unsafe_ops_per_block,
    clippy::cast_possible_truncation,
    reason = "the verbs are called as C programs call them, on small numbers"
)]
mod library;

#[cfg(test)]
mod tests {
    use crate::library::{built, skip};
    use ibverbs_sys as ffi;
    use std::collections::BTreeSet;
    use std::ffi::{CString, c_int, c_void};
    use std::path::Path;
    use std::process::Command;

    const EXPORTS: &[(&str, &[&str])] = &[
        (
            "1.0",
            &[
                "ibv_create_comp_channel",
                "ibv_destroy_comp_channel",
                "ibv_rate_to_mult",
                "mult_to_ibv_rate",
                "ibv_copy_path_rec_from_kern",
                "ibv_copy_path_rec_to_kern",
                "ibv_copy_qp_attr_from_kern",
                "ibv_get_sysfs_path",
                "ibv_read_sysfs_file",
            ],
        ),
        (
            "1.1",
            &[
                "ibv_get_device_list",
                "ibv_free_device_list",
                "ibv_get_device_name",
                "ibv_get_device_guid",
                "ibv_open_device",
                "ibv_close_device",
                "ibv_get_async_event",
                "ibv_ack_async_event",
                "ibv_query_device",
                "ibv_query_port",
                "ibv_query_gid",
                "ibv_query_pkey",
                "ibv_query_qp",
                "ibv_alloc_pd",
                "ibv_dealloc_pd",
                "ibv_reg_mr",
                "ibv_dereg_mr",
                "ibv_create_cq",
                "ibv_destroy_cq",
                "ibv_resize_cq",
                "ibv_get_cq_event",
                "ibv_ack_cq_events",
                "ibv_create_qp",
                "ibv_modify_qp",
                "ibv_destroy_qp",
                "ibv_fork_init",
                "ibv_event_type_str",
                "ibv_node_type_str",
                "ibv_port_state_str",
                "ibv_wc_status_str",
                "ibv_rate_to_mbps",
                "mbps_to_ibv_rate",
                "ibv_create_srq",
                "ibv_modify_srq",
                "ibv_query_srq",
                "ibv_destroy_srq",
                "ibv_create_ah",
                "ibv_create_ah_from_wc",
                "ibv_init_ah_from_wc",
                "ibv_destroy_ah",
                "ibv_attach_mcast",
                "ibv_detach_mcast",
                "ibv_rereg_mr",
                "ibv_copy_ah_attr_from_kern",
                "ibv_dontfork_range",
                "ibv_dofork_range",
                "ibv_register_driver",
                "ibv_resolve_eth_l2_from_gid",
            ],
        ),
        ("1.5", &["ibv_get_pkey_index"]),
        ("1.6", &["ibv_qp_to_qp_ex"]),
        ("1.7", &["ibv_reg_mr_iova"]),
        ("1.8", &["ibv_reg_mr_iova2"]),
        ("1.9", &["ibv_get_device_index"]),
        (
            "1.10",
            &[
                "ibv_query_ece",
                "ibv_set_ece",
                "ibv_import_device",
                "ibv_import_pd",
                "ibv_import_mr",
                "ibv_unimport_pd",
                "ibv_unimport_mr",
            ],
        ),
        ("1.11", &["_ibv_query_gid_ex", "_ibv_query_gid_table"]),
        ("1.12", &["ibv_reg_dmabuf_mr"]),
        ("1.13", &["ibv_is_fork_initialized", "ibv_import_dm", "ibv_unimport_dm"]),
        ("1.14", &["ibv_query_qp_data_in_order"]),
        ("1.16", &["ibv_query_port_speed"]),
    ];

    fn look_up(library: *mut c_void, name: &str, version: &str) -> *mut c_void {
        let (name, version) = (CString::new(name).unwrap(), CString::new(version).unwrap());
        unsafe { libc::dlvsym(library, name.as_ptr(), version.as_ptr()) }
    }

    #[test]
    fn every_symbol_has_its_version_and_no_other() {
        let path = built();
        let c_path = CString::new(path.to_str().unwrap()).unwrap();
        let handle = unsafe { libc::dlopen(c_path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!handle.is_null());
        for (version, names) in EXPORTS {
            for name in *names {
                assert!(!look_up(handle, name, &format!("IBVERBS_{version}")).is_null(), "{name}@IBVERBS_{version}");
                let other = if *version == "1.2" { "1.3" } else { "1.2" };
                assert!(look_up(handle, name, &format!("IBVERBS_{other}")).is_null(), "{name}@IBVERBS_{other}");
            }
        }
        for node in [34, 57, 59, 64] {
            let node = format!("IBVERBS_PRIVATE_{node}");
            let register = node.replace("IBVERBS_PRIVATE", "verbs_register_driver");
            for name in ["ibv_query_gid_type", "ibv_cmd_reg_mr", "verbs_allow_disassociate_destroy", &register] {
                assert!(!look_up(handle, name, &node).is_null(), "{name}@{node}");
            }
        }
        for hidden in ["soft_ibv_open_device", "rust_eh_personality", "main"] {
            let name = CString::new(hidden).unwrap();
            let found = unsafe { libc::dlsym(handle, name.as_ptr()) };
            let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
            let ours = !found.is_null()
                && unsafe { libc::dladdr(found, &mut info) } != 0
                && unsafe { std::ffi::CStr::from_ptr(info.dli_fname) }.to_str() == Ok(path.to_str().unwrap());
            assert!(!ours, "{hidden} is exported");
        }
        // The trampolines lead where they should.
        type List = unsafe extern "C" fn(*mut c_int) -> *mut *mut ffi::ibv_device;
        type Name = unsafe extern "C" fn(*mut ffi::ibv_device) -> *const std::ffi::c_char;
        type Rate = unsafe extern "C" fn(c_int) -> c_int;
        unsafe {
            let list: List = std::mem::transmute(look_up(handle, "ibv_get_device_list", "IBVERBS_1.1"));
            let name: Name = std::mem::transmute(look_up(handle, "ibv_get_device_name", "IBVERBS_1.1"));
            let rate: Rate = std::mem::transmute(look_up(handle, "ibv_rate_to_mbps", "IBVERBS_1.1"));
            let mut count = 0;
            let first = *list(&mut count);
            assert_eq!((count, rate(3)), (1, 10_000));
            assert_eq!(std::ffi::CStr::from_ptr(name(first)).to_str(), Ok("soft0"));
        }
    }

    #[test]
    fn it_needs_no_other_verbs_built() {
        let bytes = std::fs::read(built()).unwrap();
        let holds = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
        assert!(holds(b"libibverbs.so.1\0"), "its own name");
        let needed = needed(&bytes);
        assert!(needed.iter().any(|name| name.starts_with("libc.so")), "{needed:?}");
        assert!(!needed.iter().any(|name| name.contains("ibverbs") || name.contains("cuda")), "{needed:?}");
    }

    /// DT_NEEDED of a 64-bit little-endian ELF file.
    fn needed(elf: &[u8]) -> Vec<String> {
        let word = |at: usize| u64::from_le_bytes(elf[at..at + 8].try_into().unwrap()) as usize;
        let half = |at: usize| usize::from(u16::from_le_bytes(elf[at..at + 2].try_into().unwrap()));
        let sections: Vec<usize> = (0..half(60)).map(|i| word(40) + i * half(58)).collect();
        let kind = |at: usize| u32::from_le_bytes(elf[at + 4..at + 8].try_into().unwrap());
        let dynamic = *sections.iter().find(|&&at| kind(at) == 6).unwrap();
        let link = u32::from_le_bytes(elf[dynamic + 40..dynamic + 44].try_into().unwrap()) as usize;
        let strings = word(sections[link] + 24);
        let text = |at: usize| elf[at..].split(|&b| b == 0).next().unwrap();
        (word(dynamic + 24)..word(dynamic + 24) + word(dynamic + 32))
            .step_by(16)
            .filter(|&at| word(at) == 1)
            .map(|at| String::from_utf8(text(strings + word(at + 8)).to_vec()).unwrap())
            .collect()
    }

    /// Of libibverbs' public functions, the ones that are missing on purpose: the forms that 1.1 replaced in 2006, which only
    /// programs built before that ask for.
    const REPLACED: &[&str] = &[
        "ibv_ack_async_event",
        "ibv_ack_cq_events",
        "ibv_alloc_pd",
        "ibv_attach_mcast",
        "ibv_close_device",
        "ibv_create_ah",
        "ibv_create_cq",
        "ibv_create_qp",
        "ibv_create_srq",
        "ibv_dealloc_pd",
        "ibv_dereg_mr",
        "ibv_destroy_ah",
        "ibv_destroy_cq",
        "ibv_destroy_qp",
        "ibv_destroy_srq",
        "ibv_detach_mcast",
        "ibv_free_device_list",
        "ibv_get_async_event",
        "ibv_get_cq_event",
        "ibv_get_device_guid",
        "ibv_get_device_list",
        "ibv_get_device_name",
        "ibv_modify_qp",
        "ibv_modify_srq",
        "ibv_open_device",
        "ibv_query_device",
        "ibv_query_gid",
        "ibv_query_pkey",
        "ibv_query_port",
        "ibv_query_qp",
        "ibv_query_srq",
        "ibv_reg_mr",
        "ibv_resize_cq",
    ];

    /// Every function and object that a library defines, as `name@version`.
    fn exports(library: &Path) -> BTreeSet<String> {
        let dump = Command::new("objdump").arg("-T").arg(library).output().unwrap();
        assert!(dump.status.success(), "{}", String::from_utf8_lossy(&dump.stderr));
        let text = String::from_utf8(dump.stdout).unwrap();
        let defined = text.lines().filter(|line| !line.contains("*UND*") && !line.contains("*ABS*"));
        defined
            .filter_map(|line| {
                let mut words = line.split_whitespace().rev();
                let (name, version) = (words.next()?, words.next()?.trim_matches(['(', ')']));
                version.starts_with("IBVERBS_").then(|| format!("{name}@{version}"))
            })
            .collect()
    }

    #[test]
    fn it_has_what_the_systems_libibverbs_has() {
        let folders = std::fs::read_dir("/usr/lib").unwrap().map(|entry| entry.unwrap().path());
        let Some(system) = folders.map(|folder| folder.join("libibverbs.so.1")).find(|path| path.exists()) else {
            skip("no libibverbs.so.1 under /usr/lib to compare with (package libibverbs1)");
            return;
        };
        let ours = exports(&built());
        // What a newer libibverbs than this adapter knows has on top is no gap.
        let known = |symbol: &&String| {
            let node = symbol.split_once("@IBVERBS_").unwrap().1;
            node.strip_prefix("1.").map_or_else(
                || ours.contains(&format!("ibv_query_gid_type@IBVERBS_{node}")),
                |minor| minor.parse::<u32>().unwrap() <= 14,
            )
        };
        let theirs = exports(&system);
        let missing: BTreeSet<&String> = theirs.iter().filter(known).filter(|symbol| !ours.contains(*symbol)).collect();
        let replaced: BTreeSet<String> = REPLACED.iter().map(|name| format!("{name}@IBVERBS_1.0")).collect();
        assert_eq!(missing, replaced.iter().collect());
        assert!(theirs.len() > 150, "{theirs:?}");
    }
}
