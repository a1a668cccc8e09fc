//! soft-hca: an RDMA adapter in software.
