//! Which way data take between one GPU and one NIC, and by which rule.

use crate::config::GpuPath;

/// Sizes of messages, from `from` up to below `to`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    pub from: u64,
    pub to: u64,
}

impl Sizes {
    pub const NONE: Self = Self { from: 0, to: 0 };
    pub const ALL: Self = Self { from: 0, to: u64::MAX };

    #[inline]
    pub fn contains(self, size: u64) -> bool {
        self.from <= size && size < self.to
    }
}

/// What was chosen for a GPU and a NIC.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// NCCL is told that GPU memory can be had: else it keeps its data in host memory.
    pub gpu_memory: bool,
    /// GPU memory is registered with the NIC, by any way that is open; where that fails all sizes are staged.
    pub gdr: bool,
    /// GDR that fails may become staging.
    pub fall_back: bool,
    /// Messages of these sizes are staged though GDR works.
    pub staged: Sizes,
    /// The rule that decided, for people.
    pub rule: String,
}

impl Choice {
    /// `open`: a way to GPU memory without a copy is open.
    pub fn of(wish: GpuPath, open: bool) -> Self {
        let choice = |gpu_memory, gdr, fall_back, staged, rule: &str| Self {
            gpu_memory,
            gdr,
            fall_back,
            staged,
            rule: rule.to_owned(),
        };
        match wish {
            GpuPath::Staging => choice(true, false, false, Sizes::ALL, "NCCL_NET_RDMA_GPU_PATH=staging"),
            GpuPath::Host => choice(false, false, false, Sizes::NONE, "NCCL_NET_RDMA_GPU_PATH=host"),
            GpuPath::Gdr => choice(open, open, false, Sizes::NONE, "NCCL_NET_RDMA_GPU_PATH=gdr"),
            GpuPath::Auto if open => choice(true, true, true, Sizes::NONE, "GPUDirect is open"),
            GpuPath::Auto => choice(false, false, false, Sizes::NONE, "GPUDirect is not open"),
        }
    }
}
