layouts! {
    ibv_device_attr { node_guid, sys_image_guid, max_qp, max_qp_wr, max_cqe, max_mr, phys_port_cnt }
    ibv_port_attr {
        state, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, active_width, active_speed, phys_state, link_layer, flags
    }
    ibv_context { ops, async_fd }
    ibv_context_ops { poll_cq, post_send, post_recv }
    ibv_gid {}
    ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
    ibv_async_event { element, event_type }
    ibv_mr { lkey, rkey }
    ibv_qp { qp_num }
    ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
    ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
    ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
    ibv_ah_attr { grh, dlid, sl, is_global, port_num }
    ibv_qp_attr {
        qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, ah_attr, pkey_index, max_rd_atomic,
        max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry
    }
    ibv_sge { addr, length, lkey }
    ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, wr }
    ibv_recv_wr { wr_id, next, sg_list, num_sge }
    ibv_wc { qp_num, src_qp, wc_flags, dlid_path_bits }
}
