//! soft-hca as `libibverbs.so.1`: every function under the name and GNU symbol version that programs look for, and nothing
//! else. `nodes.map` declares the versions; here it is said which function has which. A trampoline of one instruction
//! carries the version, so it does not matter where the compiler puts the function itself.
use soft_hca::{compat, names, verbs};

#[cfg(target_arch = "x86_64")]
macro_rules! jump {
    () => {
        "jmp {target}"
    };
}
#[cfg(target_arch = "aarch64")]
macro_rules! jump {
    () => {
        "b {target}"
    };
}

/// `label, "symbol@@@NODE" => function;` where `@@@` makes the default version and drops the name without one.
macro_rules! export {
    ($($label:expr, $symbol:expr => $target:path;)*) => {$(
        core::arch::global_asm!(
            concat!(".pushsection .text.", $label, ",\"ax\",@progbits"),
            concat!(".globl ", $label),
            concat!(".type ", $label, ",@function"),
            concat!($label, ":"),
            jump!(),
            concat!(".size ", $label, ", .-", $label),
            concat!(".symver ", $label, ", ", $symbol),
            ".popsection",
            target = sym $target,
        );
    )*};
}

/// The nodes that libibverbs shares with providers and its own examples only. The number grows when these functions change:
/// 34 is rdma-core up to 56, 57 is 57 and 58, 59 is 59 to 63, 64 is 64. None of them is a version to link against.
macro_rules! at_private_nodes {
    ($export:ident, $($name:expr => $target:path;)*) => {$(
        $export!("34", $name, $target);
        $export!("57", $name, $target);
        $export!("59", $name, $target);
        $export!("64", $name, $target);
    )*};
}

macro_rules! export_private {
    ($node:literal, $name:expr, $target:path) => {
        export! {
            concat!("soft_", $node, "_", $name), concat!($name, "@IBVERBS_PRIVATE_", $node, ", remove") => $target;
        }
    };
}

/// Providers register under a name that has the node's number too.
macro_rules! export_register {
    ($node:literal, $name:expr, $target:path) => {
        export! {
            concat!("soft_", $name, $node), concat!($name, $node, "@IBVERBS_PRIVATE_", $node, ", remove") => $target;
        }
    };
}

/// The one that is no function but a `bool`, which providers read.
macro_rules! export_false {
    ($node:literal, $name:expr, $target:path) => {
        core::arch::global_asm!(
            concat!(".pushsection .bss.soft_", $node, "_", $name, ",\"aw\",@nobits"),
            concat!(".globl soft_", $node, "_", $name),
            concat!(".type soft_", $node, "_", $name, ",@object"),
            concat!("soft_", $node, "_", $name, ":"),
            ".zero 1",
            concat!(".size soft_", $node, "_", $name, ", 1"),
            concat!(".symver soft_", $node, "_", $name, ", ", $name, "@IBVERBS_PRIVATE_", $node, ", remove"),
            ".popsection",
        );
    };
}

export! {
    "soft_ibv_get_device_list", "ibv_get_device_list@@@IBVERBS_1.1" => verbs::get_device_list;
    "soft_ibv_free_device_list", "ibv_free_device_list@@@IBVERBS_1.1" => verbs::free_device_list;
    "soft_ibv_get_device_name", "ibv_get_device_name@@@IBVERBS_1.1" => verbs::get_device_name;
    "soft_ibv_get_device_guid", "ibv_get_device_guid@@@IBVERBS_1.1" => verbs::get_device_guid;
    "soft_ibv_open_device", "ibv_open_device@@@IBVERBS_1.1" => verbs::open_device;
    "soft_ibv_close_device", "ibv_close_device@@@IBVERBS_1.1" => verbs::close_device;
    "soft_ibv_get_async_event", "ibv_get_async_event@@@IBVERBS_1.1" => verbs::get_async_event;
    "soft_ibv_ack_async_event", "ibv_ack_async_event@@@IBVERBS_1.1" => verbs::ack_async_event;
    "soft_ibv_query_device", "ibv_query_device@@@IBVERBS_1.1" => verbs::query_device;
    "soft_ibv_query_port", "ibv_query_port@@@IBVERBS_1.1" => verbs::query_port;
    "soft_ibv_query_gid", "ibv_query_gid@@@IBVERBS_1.1" => verbs::query_gid;
    "soft_ibv_query_pkey", "ibv_query_pkey@@@IBVERBS_1.1" => verbs::query_pkey;
    "soft_ibv_query_qp", "ibv_query_qp@@@IBVERBS_1.1" => verbs::query_qp;
    "soft_ibv_alloc_pd", "ibv_alloc_pd@@@IBVERBS_1.1" => verbs::alloc_pd;
    "soft_ibv_dealloc_pd", "ibv_dealloc_pd@@@IBVERBS_1.1" => verbs::dealloc_pd;
    "soft_ibv_reg_mr", "ibv_reg_mr@@@IBVERBS_1.1" => verbs::reg_mr;
    "soft_ibv_dereg_mr", "ibv_dereg_mr@@@IBVERBS_1.1" => verbs::dereg_mr;
    "soft_ibv_create_cq", "ibv_create_cq@@@IBVERBS_1.1" => verbs::create_cq;
    "soft_ibv_destroy_cq", "ibv_destroy_cq@@@IBVERBS_1.1" => verbs::destroy_cq;
    "soft_ibv_get_cq_event", "ibv_get_cq_event@@@IBVERBS_1.1" => verbs::get_cq_event;
    "soft_ibv_ack_cq_events", "ibv_ack_cq_events@@@IBVERBS_1.1" => verbs::ack_cq_events;
    "soft_ibv_create_qp", "ibv_create_qp@@@IBVERBS_1.1" => verbs::create_qp;
    "soft_ibv_modify_qp", "ibv_modify_qp@@@IBVERBS_1.1" => verbs::modify_qp;
    "soft_ibv_destroy_qp", "ibv_destroy_qp@@@IBVERBS_1.1" => verbs::destroy_qp;
    "soft_ibv_fork_init", "ibv_fork_init@@@IBVERBS_1.1" => verbs::fork_init;
    "soft_ibv_event_type_str", "ibv_event_type_str@@@IBVERBS_1.1" => names::event_type_str;
    "soft_ibv_node_type_str", "ibv_node_type_str@@@IBVERBS_1.1" => names::node_type_str;
    "soft_ibv_port_state_str", "ibv_port_state_str@@@IBVERBS_1.1" => names::port_state_str;
    "soft_ibv_rate_to_mbps", "ibv_rate_to_mbps@@@IBVERBS_1.1" => names::rate_to_mbps;
    "soft_mbps_to_ibv_rate", "mbps_to_ibv_rate@@@IBVERBS_1.1" => names::mbps_to_rate;
    "soft_ibv_resize_cq", "ibv_resize_cq@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_modify_srq", "ibv_modify_srq@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_query_srq", "ibv_query_srq@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_destroy_srq", "ibv_destroy_srq@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_attach_mcast", "ibv_attach_mcast@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_detach_mcast", "ibv_detach_mcast@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_destroy_ah", "ibv_destroy_ah@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_init_ah_from_wc", "ibv_init_ah_from_wc@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_create_srq", "ibv_create_srq@@@IBVERBS_1.1" => verbs::none_offered;
    "soft_ibv_create_ah", "ibv_create_ah@@@IBVERBS_1.1" => verbs::none_offered;
    "soft_ibv_create_ah_from_wc", "ibv_create_ah_from_wc@@@IBVERBS_1.1" => verbs::none_offered;
    "soft_ibv_create_comp_channel", "ibv_create_comp_channel@@@IBVERBS_1.0" => verbs::create_comp_channel;
    "soft_ibv_destroy_comp_channel", "ibv_destroy_comp_channel@@@IBVERBS_1.0" => verbs::destroy_comp_channel;
    "soft_ibv_wc_status_str", "ibv_wc_status_str@@@IBVERBS_1.1" => names::wc_status_str;
    "soft_ibv_rate_to_mult", "ibv_rate_to_mult@@@IBVERBS_1.0" => names::rate_to_mult;
    "soft_mult_to_ibv_rate", "mult_to_ibv_rate@@@IBVERBS_1.0" => names::mult_to_rate;
    "soft_ibv_rereg_mr", "ibv_rereg_mr@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_get_pkey_index", "ibv_get_pkey_index@@@IBVERBS_1.5" => verbs::get_pkey_index;
    "soft_ibv_qp_to_qp_ex", "ibv_qp_to_qp_ex@@@IBVERBS_1.6" => verbs::none_offered;
    "soft_ibv_reg_mr_iova", "ibv_reg_mr_iova@@@IBVERBS_1.7" => verbs::reg_mr_iova;
    "soft_ibv_reg_mr_iova2", "ibv_reg_mr_iova2@@@IBVERBS_1.8" => verbs::reg_mr_iova2;
    "soft_ibv_get_device_index", "ibv_get_device_index@@@IBVERBS_1.9" => verbs::get_device_index;
    "soft_ibv_query_ece", "ibv_query_ece@@@IBVERBS_1.10" => verbs::ece;
    "soft_ibv_set_ece", "ibv_set_ece@@@IBVERBS_1.10" => verbs::ece;
    "soft_ibv_import_device", "ibv_import_device@@@IBVERBS_1.10" => verbs::none_offered;
    "soft_ibv_import_pd", "ibv_import_pd@@@IBVERBS_1.10" => verbs::none_offered;
    "soft_ibv_import_mr", "ibv_import_mr@@@IBVERBS_1.10" => verbs::none_offered;
    "soft__ibv_query_gid_ex", "_ibv_query_gid_ex@@@IBVERBS_1.11" => verbs::query_gid_ex;
    "soft__ibv_query_gid_table", "_ibv_query_gid_table@@@IBVERBS_1.11" => verbs::query_gid_table;
    "soft_ibv_reg_dmabuf_mr", "ibv_reg_dmabuf_mr@@@IBVERBS_1.12" => verbs::reg_dmabuf_mr;
    "soft_ibv_is_fork_initialized", "ibv_is_fork_initialized@@@IBVERBS_1.13" => verbs::is_fork_initialized;
    "soft_ibv_import_dm", "ibv_import_dm@@@IBVERBS_1.13" => verbs::none_offered;
    "soft_ibv_query_qp_data_in_order", "ibv_query_qp_data_in_order@@@IBVERBS_1.14" => verbs::data_in_order;
    "soft_ibv_query_port_speed", "ibv_query_port_speed@@@IBVERBS_1.16" => verbs::query_port_speed;
    "soft_ibv_copy_path_rec_from_kern", "ibv_copy_path_rec_from_kern@@@IBVERBS_1.0" => compat::nothing;
    "soft_ibv_copy_path_rec_to_kern", "ibv_copy_path_rec_to_kern@@@IBVERBS_1.0" => compat::nothing;
    "soft_ibv_copy_qp_attr_from_kern", "ibv_copy_qp_attr_from_kern@@@IBVERBS_1.0" => compat::nothing;
    "soft_ibv_copy_ah_attr_from_kern", "ibv_copy_ah_attr_from_kern@@@IBVERBS_1.1" => compat::nothing;
    "soft_ibv_get_sysfs_path", "ibv_get_sysfs_path@@@IBVERBS_1.0" => compat::get_sysfs_path;
    "soft_ibv_read_sysfs_file", "ibv_read_sysfs_file@@@IBVERBS_1.0" => compat::read_sysfs_file;
    "soft_ibv_dontfork_range", "ibv_dontfork_range@@@IBVERBS_1.1" => compat::done;
    "soft_ibv_dofork_range", "ibv_dofork_range@@@IBVERBS_1.1" => compat::done;
    "soft_ibv_resolve_eth_l2_from_gid", "ibv_resolve_eth_l2_from_gid@@@IBVERBS_1.1" => verbs::not_offered;
    "soft_ibv_unimport_pd", "ibv_unimport_pd@@@IBVERBS_1.10" => compat::nothing;
    "soft_ibv_unimport_mr", "ibv_unimport_mr@@@IBVERBS_1.10" => compat::nothing;
    "soft_ibv_unimport_dm", "ibv_unimport_dm@@@IBVERBS_1.13" => compat::nothing;
    "soft_ibv_register_driver", "ibv_register_driver@IBVERBS_1.1, remove" => compat::nothing;
}

at_private_nodes! {
    export_private,
    "__ioctl_final_num_attrs" => compat::done;
    "__verbs_log" => compat::nothing;
    "_verbs_init_and_alloc_context" => verbs::none_offered;
    "execute_ioctl" => verbs::not_offered;
    "ibv_cmd_advise_mr" => verbs::not_offered;
    "ibv_cmd_alloc_dm" => verbs::not_offered;
    "ibv_cmd_alloc_dmah" => verbs::not_offered;
    "ibv_cmd_alloc_mw" => verbs::not_offered;
    "ibv_cmd_alloc_pd" => verbs::not_offered;
    "ibv_cmd_attach_mcast" => verbs::not_offered;
    "ibv_cmd_close_xrcd" => verbs::not_offered;
    "ibv_cmd_create_ah" => verbs::not_offered;
    "ibv_cmd_create_counters" => verbs::not_offered;
    "ibv_cmd_create_cq" => verbs::not_offered;
    "ibv_cmd_create_cq_ex" => verbs::not_offered;
    "ibv_cmd_create_cq_ex2" => verbs::not_offered;
    "ibv_cmd_create_flow" => verbs::not_offered;
    "ibv_cmd_create_flow_action_esp" => verbs::not_offered;
    "ibv_cmd_create_qp" => verbs::not_offered;
    "ibv_cmd_create_qp_ex" => verbs::not_offered;
    "ibv_cmd_create_qp_ex2" => verbs::not_offered;
    "ibv_cmd_create_rwq_ind_table" => verbs::not_offered;
    "ibv_cmd_create_srq" => verbs::not_offered;
    "ibv_cmd_create_srq_ex" => verbs::not_offered;
    "ibv_cmd_create_wq" => verbs::not_offered;
    "ibv_cmd_dealloc_mw" => verbs::not_offered;
    "ibv_cmd_dealloc_pd" => verbs::not_offered;
    "ibv_cmd_dereg_mr" => verbs::not_offered;
    "ibv_cmd_destroy_ah" => verbs::not_offered;
    "ibv_cmd_destroy_counters" => verbs::not_offered;
    "ibv_cmd_destroy_cq" => verbs::not_offered;
    "ibv_cmd_destroy_flow" => verbs::not_offered;
    "ibv_cmd_destroy_flow_action" => verbs::not_offered;
    "ibv_cmd_destroy_qp" => verbs::not_offered;
    "ibv_cmd_destroy_rwq_ind_table" => verbs::not_offered;
    "ibv_cmd_destroy_srq" => verbs::not_offered;
    "ibv_cmd_destroy_wq" => verbs::not_offered;
    "ibv_cmd_detach_mcast" => verbs::not_offered;
    "ibv_cmd_export_dmabuf_fd" => verbs::not_offered;
    "ibv_cmd_free_dm" => verbs::not_offered;
    "ibv_cmd_free_dmah" => verbs::not_offered;
    "ibv_cmd_get_context" => verbs::not_offered;
    "ibv_cmd_modify_cq" => verbs::not_offered;
    "ibv_cmd_modify_flow_action_esp" => verbs::not_offered;
    "ibv_cmd_modify_qp" => verbs::not_offered;
    "ibv_cmd_modify_qp_ex" => verbs::not_offered;
    "ibv_cmd_modify_srq" => verbs::not_offered;
    "ibv_cmd_modify_wq" => verbs::not_offered;
    "ibv_cmd_open_qp" => verbs::not_offered;
    "ibv_cmd_open_xrcd" => verbs::not_offered;
    "ibv_cmd_poll_cq" => verbs::not_offered;
    "ibv_cmd_post_recv" => verbs::not_offered;
    "ibv_cmd_post_send" => verbs::not_offered;
    "ibv_cmd_post_srq_recv" => verbs::not_offered;
    "ibv_cmd_query_context" => verbs::not_offered;
    "ibv_cmd_query_device" => verbs::not_offered;
    "ibv_cmd_query_device_any" => verbs::not_offered;
    "ibv_cmd_query_mr" => verbs::not_offered;
    "ibv_cmd_query_port" => verbs::not_offered;
    "ibv_cmd_query_port_speed" => verbs::not_offered;
    "ibv_cmd_query_qp" => verbs::not_offered;
    "ibv_cmd_query_srq" => verbs::not_offered;
    "ibv_cmd_read_counters" => verbs::not_offered;
    "ibv_cmd_reg_dm_mr" => verbs::not_offered;
    "ibv_cmd_reg_dmabuf_mr" => verbs::not_offered;
    "ibv_cmd_reg_mr" => verbs::not_offered;
    "ibv_cmd_reg_mr_ex" => verbs::not_offered;
    "ibv_cmd_req_notify_cq" => verbs::not_offered;
    "ibv_cmd_rereg_mr" => verbs::not_offered;
    "ibv_cmd_resize_cq" => verbs::not_offered;
    "ibv_dmabuf_heap_alloc" => verbs::none_offered;
    "ibv_dmabuf_heap_cc_shared_init" => verbs::none_offered;
    "ibv_dmabuf_heap_destroy" => compat::nothing;
    "ibv_dmabuf_heap_free" => compat::nothing;
    "ibv_query_gid_type" => compat::query_gid_type;
    "ibv_read_ibdev_sysfs_file" => compat::no_length;
    "ibv_wr_opcode_str" => compat::unnamed;
    "verbs_init_cq" => compat::nothing;
    "verbs_open_device" => verbs::none_offered;
    "verbs_set_ops" => compat::nothing;
    "verbs_uninit_context" => compat::nothing;
}

at_private_nodes! { export_register, "verbs_register_driver_" => compat::nothing; }
at_private_nodes! { export_false, "verbs_allow_disassociate_destroy" => compat::nothing; }
