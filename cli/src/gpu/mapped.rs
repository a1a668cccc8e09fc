//! GPU memory as NCCL makes its own: a piece of the GPU mapped to an address (cuMemCreate), which can be exported and copied
//! without waiting for the program's kernels.

use std::ptr;

use anyhow::Context as _;
use cudarc::driver::sys as cuda;

use super::{DeviceMemory, Gpu, cu};

impl Gpu {
    /// At least so many bytes.
    pub(crate) fn alloc_mapped(&self, bytes: usize) -> anyhow::Result<DeviceMemory> {
        let location =
            cuda::CUmemLocation { type_: cuda::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: self.device };
        let direct = cuda::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED;
        let properties = cuda::CUmemAllocationProp {
            type_: cuda::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: cuda::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
            location,
            win32HandleMetaData: ptr::null_mut(),
            allocFlags: cuda::CUmemAllocationProp_st__bindgen_ty_1 {
                compressionType: 0,
                gpuDirectRDMACapable: u8::from(Self::attribute(self.device, direct)? == 1),
                usage: 0,
                reserved: [0; 4],
            },
        };
        let mut granularity = 0;
        let recommended = cuda::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED;
        // SAFETY: properties to read; one size to write.
        let result =
            unsafe { cuda::cuMemGetAllocationGranularity(&raw mut granularity, &raw const properties, recommended) };
        cu("cuMemGetAllocationGranularity", result)?;
        let bytes = bytes.max(1).next_multiple_of(granularity.max(1));
        let mut handle = 0;
        // SAFETY: properties to read; one handle to write.
        let result = unsafe { cuda::cuMemCreate(&raw mut handle, bytes, &raw const properties, 0) };
        cu("cuMemCreate", result).with_context(|| format!("{bytes} bytes of GPU memory"))?;
        let mut address = 0;
        // SAFETY: one address to write.
        let result = unsafe { cuda::cuMemAddressReserve(&raw mut address, bytes, granularity, 0, 0) };
        cu("cuMemAddressReserve", result)?;
        // SAFETY: the range was reserved and the memory created by the lines above, both of this size.
        cu("cuMemMap", unsafe { cuda::cuMemMap(address, bytes, 0, handle, 0) })?;
        let access =
            cuda::CUmemAccessDesc { location, flags: cuda::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE };
        // SAFETY: the range that was mapped by the line above; one description to read.
        cu("cuMemSetAccess", unsafe { cuda::cuMemSetAccess(address, bytes, &raw const access, 1) })?;
        Ok(DeviceMemory { address, bytes, mapped: Some(handle) })
    }
}

/// Gives back what [`Gpu::alloc_mapped`] made. A failure leaks, no more.
pub(super) fn free(address: cuda::CUdeviceptr, bytes: usize, handle: cuda::CUmemGenericAllocationHandle) {
    // SAFETY: mapped by alloc_mapped; every operation on it has been waited for.
    let _ = unsafe { cuda::cuMemUnmap(address, bytes) };
    // SAFETY: reserved by alloc_mapped, and nothing is mapped there any more.
    let _ = unsafe { cuda::cuMemAddressFree(address, bytes) };
    // SAFETY: made by alloc_mapped, given back once.
    let _ = unsafe { cuda::cuMemRelease(handle) };
}
