/* Version 10 of the plugin ABI: known to NCCL from 2.26.2 on, accepted by every later release so far. */
#ifndef NCCL_NET_RDMA_NCCL_NET_V10_H
#define NCCL_NET_RDMA_NCCL_NET_V10_H

#include "nccl_net.h"

typedef struct {
  int ndevs;                        /* entries of devs that count */
  int devs[NCCL_NET_MAX_DEVS_PER_NIC_V11];
} ncclNetVDeviceProps_v10_t;

typedef struct {
  int trafficClass;                 /* NCCL_NET_TRAFFIC_CLASS_UNDEF: not asked for */
} ncclNetCommConfig_v10_t;

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
  ncclNetVDeviceProps_v10_t vProps; /* the devices that this one is made of; itself where it is physical */
  size_t maxP2pBytes;               /* 1 to NCCL_MAX_NET_SIZE_BYTES */
  size_t maxCollBytes;              /* the same for CollNet */
} ncclNetProperties_v10_t;

typedef struct {
  ncclNetDeviceType netDeviceType;
  int netDeviceVersion;
  void *handle;
  size_t size;
  int needsProxyProgress;
} ncclNetDeviceHandle_v10_t;

typedef struct {
  const char *name;
  ncclResult_t (*init)(ncclDebugLogger_t logFunction, ncclProfilerCallback_t profFunction);
  ncclResult_t (*devices)(int *ndev);
  ncclResult_t (*getProperties)(int dev, ncclNetProperties_v10_t *props);
  ncclResult_t (*listen)(int dev, void *handle, void **listenComm);
  ncclResult_t (*connect)(int dev, ncclNetCommConfig_v10_t *config, void *handle, void **sendComm,
                          ncclNetDeviceHandle_v10_t **sendDevComm);
  ncclResult_t (*accept)(void *listenComm, void **recvComm, ncclNetDeviceHandle_v10_t **recvDevComm);
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
  ncclResult_t (*makeVDevice)(int *d, ncclNetVDeviceProps_v10_t *props);
} ncclNet_v10_t;

#endif
