/* What every version of NCCL's network plugin ABI shares.
 *
 * Our own declaration of a public binary interface: names, values and layouts follow NCCL's plugin headers
 * (ext-net/example/nccl/ in its tree). tests/data/nccl-net-layout.json holds the measured layouts; build.rs
 * checks this file and the Rust types made from it against them. */
#ifndef NCCL_NET_RDMA_NCCL_NET_H
#define NCCL_NET_RDMA_NCCL_NET_H

#include <stddef.h>
#include <stdint.h>

/* Bytes of the handle that listen() fills and NCCL carries to the connecting side. */
#define NCCL_NET_HANDLE_MAXSIZE 128
/* Kinds of memory: the type argument of regMr, and the bits of ptrSupport. */
#define NCCL_PTR_HOST 0x1
#define NCCL_PTR_CUDA 0x2
#define NCCL_PTR_DMABUF 0x4
/* Receive requests that NCCL may have outstanding on one comm (8 before 2.19.1). */
#define NCCL_NET_MAX_REQUESTS 32
/* Most bytes of one isend or irecv up to v8. */
#define MAX_NET_SIZE (1024 * 1024 * 1024L)
/* Most that maxP2pBytes may say, v9 and later. */
#define NCCL_MAX_NET_SIZE_BYTES (1024 * 1024 * 1024 * 1024L)
/* What *request of irecv may hold on the way in, v9 and later: the data say themselves when they are there. */
#define NCCL_NET_OPTIONAL_RECV_COMPLETION 0x1
/* Devices that one virtual device can be made of, v9 to v11 and v12. */
#define NCCL_NET_MAX_DEVS_PER_NIC_V11 4
#define NCCL_NET_MAX_DEVS_PER_NIC_V12 8
/* Not known, not asked for. */
#define NCCL_NET_TRAFFIC_CLASS_UNDEF -1
#define NCCL_NET_ATTR_UNDEF -1
#define NCCL_NET_ID_UNDEF -1

typedef enum {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclSystemError = 2,
  ncclInternalError = 3,
  ncclInvalidArgument = 4,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
} ncclResult_t;

typedef enum {
  NCCL_NET_DEVICE_HOST = 0,
  NCCL_NET_DEVICE_UNPACK = 1,
} ncclNetDeviceType;

typedef enum {
  NCCL_LOG_NONE = 0,
  NCCL_LOG_VERSION = 1,
  NCCL_LOG_WARN = 2,
  NCCL_LOG_INFO = 3,
  NCCL_LOG_ABORT = 4,
  NCCL_LOG_TRACE = 5,
} ncclDebugLogLevel;

typedef enum {
  NCCL_INIT = 0x1,
  NCCL_COLL = 0x2,
  NCCL_P2P = 0x4,
  NCCL_SHM = 0x8,
  NCCL_NET = 0x10,
  NCCL_GRAPH = 0x20,
  NCCL_TUNING = 0x40,
  NCCL_ENV = 0x80,
  NCCL_ALLOC = 0x100,
  NCCL_CALL = 0x200,
  NCCL_PROXY = 0x400,
  NCCL_NVLS = 0x800,
  NCCL_BOOTSTRAP = 0x1000,
  NCCL_REG = 0x2000,
} ncclDebugLogSubSys;

/* NCCL's logger: safe from any thread; fmt is printf's. */
typedef void (*ncclDebugLogger_t)(ncclDebugLogLevel level, unsigned long flags, const char *file, int line,
                                  const char *fmt, ...);

/* Where a plugin reports events to NCCL's profiler, v10 and later; may be NULL. */
typedef ncclResult_t (*ncclProfilerCallback_t)(void **eHandle, int type, void *pHandle, int64_t pluginId,
                                               void *extData);

#endif
