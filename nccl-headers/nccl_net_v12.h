/* Version 12 of the plugin ABI: known to NCCL from 2.30.3 on. */
#ifndef NCCL_NET_RDMA_NCCL_NET_V12_H
#define NCCL_NET_RDMA_NCCL_NET_V12_H

#include "nccl_net.h"

typedef struct {
  int ndevs;                        /* entries of devs that count */
  int devs[NCCL_NET_MAX_DEVS_PER_NIC_V12];
} ncclNetVDeviceProps_v12_t;

typedef struct {
  int trafficClass;                 /* NCCL_NET_TRAFFIC_CLASS_UNDEF: not asked for */
} ncclNetCommConfig_v12_t;

typedef struct {
  char *name;                       /* unique; outlives the call */
  char *pciPath;                    /* resolved /sys path of the PCI function, or NULL */
  uint64_t guid;                    /* identity of the NIC chip */
  int ptrSupport;                   /* bits NCCL_PTR_* */
  int regIsGlobal;                  /* a registration holds for every comm of the device */
  int forceFlush;                   /* received data are flushed on every GPU */
  int speed;                        /* Mbit/s */
  int port;                         /* port number */
  float latency;                    /* microseconds */
  int maxComms;                     /* comms that can exist */
  int maxRecvs;                     /* largest n of irecv */
  ncclNetDeviceType netDeviceType;  /* NCCL_NET_DEVICE_HOST */
  int netDeviceVersion;             /* 0 with NCCL_NET_DEVICE_HOST */
  ncclNetVDeviceProps_v12_t vProps; /* the devices that this one is made of; itself where it is physical */
  size_t maxP2pBytes;               /* 1 to NCCL_MAX_NET_SIZE_BYTES */
  size_t maxCollBytes;              /* the same for CollNet */
  int maxMultiRequestSize;          /* buffers in one request; CollNet only */
  int16_t railId;                   /* NCCL_NET_ID_UNDEF: unknown */
  int16_t planeId;                  /* NCCL_NET_ID_UNDEF: unknown */
} ncclNetProperties_v12_t;

typedef struct {
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  void *handle;
  size_t size;
  int needsProxyProgress;
} ncclNetDeviceHandle_v12_t;

/* What NCCL expects of one direction; NCCL_NET_ATTR_UNDEF: unknown. */
typedef struct {
  int32_t maxConcurrentPeers;
  int32_t minConcurrentPeers;
  int32_t maxFlowsPerPeer;
  int32_t minFlowsPerPeer;
} ncclNetCommAttr_v12_t;

typedef struct {
  ncclNetCommAttr_v12_t sendCommAttr;
  ncclNetCommAttr_v12_t recvCommAttr;
  uint32_t op;                      /* bits of collectives */
  uint32_t algo;                    /* bits of algorithms */
  uint32_t proto;                   /* bits of protocols */
} ncclNetAttr_v12_t;

typedef struct {
  const char *name;
  ncclResult_t (*init)(void **ctx, uint64_t commId, ncclNetCommConfig_v12_t *config, ncclDebugLogger_t logFunction,
                       ncclProfilerCallback_t profFunction);
  ncclResult_t (*devices)(int *ndev);
  ncclResult_t (*getProperties)(int dev, ncclNetProperties_v12_t *props);
  ncclResult_t (*listen)(void *ctx, int dev, void *handle, void **listenComm);
  ncclResult_t (*connect)(void *ctx, int dev, void *handle, void **sendComm, ncclNetDeviceHandle_v12_t **sendDevComm);
  ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_v12_t **recvDevComm);
  ncclResult_t (*regMr)(void *comm, void *data, size_t size, int type, void **mhandle);
  ncclResult_t (*regMrDmaBuf)(void *comm, void *data, size_t size, int type, uint64_t offset, int fd, void **mhandle);
  ncclResult_t (*deregMr)(void *comm, void *mhandle);
  ncclResult_t (*isend)(void *sendComm, void *data, size_t size, int tag, void *mhandle, void *phandle, void **request);
  ncclResult_t (*irecv)(void *recvComm, int n, void **data, size_t *sizes, int *tags, void **mhandles, void **phandles,
                        void **request);
  ncclResult_t (*iflush)(void *recvComm, int n, void **data, int *sizes, void **mhandles, void **request);
  ncclResult_t (*test)(void *request, int *done, int *sizes);
  ncclResult_t (*closeSend)(void *sendComm);
  ncclResult_t (*closeRecv)(void *recvComm);
  ncclResult_t (*closeListen)(void *listenComm);
  ncclResult_t (*getDeviceMr)(void *comm, void *mhandle, void **dptr_mhandle);
  ncclResult_t (*irecvConsumed)(void *recvComm, int n, void *request);
  ncclResult_t (*makeVDevice)(int *d, ncclNetVDeviceProps_v12_t *props);
  ncclResult_t (*finalize)(void *ctx);
  ncclResult_t (*setNetAttr)(void *ctx, ncclNetAttr_v12_t *attr);
} ncclNet_v12_t;

#endif
