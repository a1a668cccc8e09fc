//! Prints every size and offset on which ibverbs-sys and rdma-sys differ; exits 1 if there is one.

use std::mem::{offset_of, size_of};

macro_rules! compare {
    ($differences:ident, $checked:ident: $($name:ident { $($field:ident),* })*) => {$(
        let pairs = [
            ("size", size_of::<ibverbs_sys::$name>(), size_of::<rdma_sys::$name>()),
            $((stringify!($field), offset_of!(ibverbs_sys::$name, $field), offset_of!(rdma_sys::$name, $field)),)*
        ];
        for (what, ours, system) in pairs {
            $checked += 1;
            if ours != system {
                println!("{}.{what}: ibverbs-sys {ours}, rdma-sys {system}", stringify!($name));
                $differences += 1;
            }
        }
    )*};
}

fn main() {
    let mut differences = 0;
    let mut checked = 0;
    compare! { differences, checked:
        ibv_gid { raw }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr { qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry }
        ibv_device_attr { node_guid, sys_image_guid, max_qp, max_qp_wr, max_cqe, max_mr, phys_port_cnt }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_async_event { element, event_type }
        ibv_context { device, ops, async_fd }
        ibv_context_ops { poll_cq, post_send, post_recv }
    }
    // The newest header has one field more, at the end; the code zeroes the struct and reads the field only where filled.
    let tail = size_of::<ibverbs_sys::ibv_port_attr>() - size_of::<rdma_sys::ibv_port_attr>();
    if tail != 0 && tail != 4 {
        println!("ibv_port_attr: {tail} bytes more in ibverbs-sys");
        differences += 1;
    }
    println!("{checked} sizes and offsets compared, {differences} differ");
    std::process::exit(i32::from(differences > 0));
}
