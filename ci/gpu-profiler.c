/* A profiler for NCCL 2.28 and newer (versions 5 and 6 of that interface, alike as far as this goes), for `ci/gpu profiled`:
 * checks and counts the events that the network plugin reports, and writes what it found into GPU_PROFILE/rankN when the
 * communicator ends: one line, "ok: ..." or "bad: ...". */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

enum { PROXY_STEP = 1 << 4, NET_PLUGIN = 1 << 7 }; /* kinds of events */
enum { STEP_SEND_WAIT = 9 };                       /* a step's bytes were given to the network */
enum { IB_V1 = 1 << 16 | 1, WORK_REQUEST = 1 };    /* an InfiniBand plugin, version 1 of its descriptor; its kind of event */
enum { RDMA_WRITE = 0, RDMA_WRITE_WITH_IMM = 1, RECV_RDMA_WITH_IMM = 129 };

struct descriptor {
  uint64_t type;
  void *parent;
  int rank;
  struct {
    int64_t id;
    void *data;
  } net; /* of NET_PLUGIN; other kinds have other things here */
};

struct work_request {
  uint8_t kind;
  struct { /* aligned as a whole */
    int device;
    uint64_t wr_id;
    int opcode, qp_num;
    size_t length;
  } qp;
};

/* A handle of a network event is its place here; of the others it says only whether it is a step's. */
enum { EVENTS = 1 << 22 };
static _Atomic unsigned char open_events[EVENTS];
static char step, other;

static atomic_size_t started, stopped, writes, receives, wrong;
static atomic_size_t written, sent; /* bytes by the plugin's events, and by NCCL's own steps */
static _Atomic(const char *) first_wrong;
static int own_rank;

static void is_wrong(const char *why) {
  const char *none = NULL;
  wrong++;
  atomic_compare_exchange_strong(&first_wrong, &none, why);
}

static int init(void **context, uint64_t comm, int *mask, const char *name, int nodes, int ranks, int rank, void *log) {
  (void)comm, (void)name, (void)nodes, (void)ranks, (void)log;
  own_rank = rank;
  *context = &own_rank; /* without one there is no finalize */
  *mask = NET_PLUGIN;   /* what these are part of comes along */
  return 0;
}

static void check(const struct descriptor *d) {
  const struct work_request *w = d->net.data;
  if (d->parent != &step) is_wrong("an event is part of no step");
  if (d->net.id != IB_V1 || !w) {
    is_wrong("an event is of another plugin or version");
    return;
  }
  if (w->kind != WORK_REQUEST) is_wrong("an event is no work request's");
  if (w->qp.device < 0 || w->qp.device > 7) is_wrong("a device is out of range");
  if (w->qp.qp_num <= 0 || w->qp.qp_num > 0xffffff) is_wrong("a QP number is out of range");
  if (w->qp.length > 1 << 30) is_wrong("a work request is longer than 1 GiB");
  switch (w->qp.opcode) {
  case RDMA_WRITE:
  case RDMA_WRITE_WITH_IMM:
    writes++;
    written += w->qp.length;
    break;
  case RECV_RDMA_WITH_IMM: receives++; break;
  default: is_wrong("an opcode is none of write, write with immediate, receive");
  }
}

static int start_event(void *context, void **handle, const struct descriptor *d) {
  (void)context;
  if (d->type != NET_PLUGIN) {
    *handle = d->type == PROXY_STEP ? &step : &other;
    return 0;
  }
  check(d);
  size_t place = started++;
  *handle = NULL;
  if (place >= EVENTS) {
    is_wrong("there are more events than this can take");
    return 0;
  }
  open_events[place] = 1;
  *handle = (void *)&open_events[place];
  return 0;
}

static int stop_event(void *handle) {
  if (handle == &step || handle == &other) return 0;
  _Atomic unsigned char *event = handle;
  if (!event || event < open_events || event >= open_events + EVENTS || !atomic_exchange(event, 0)) {
    is_wrong("what is stopped is no event under way");
    return 0;
  }
  stopped++;
  return 0;
}

static int record_event_state(void *handle, int state, const size_t *bytes) {
  if (handle == &step && state == STEP_SEND_WAIT && bytes) sent += *bytes;
  return 0;
}

static int finalize(void *context) {
  (void)context;
  const char *why = first_wrong, *folder = getenv("GPU_PROFILE");
  if (!why && stopped != started) why = "events were not stopped";
  if (!why && !(writes && receives)) why = "there are no events of writes, or none of receives";
  if (!why && written != sent) why = "NCCL gave the network another number of bytes";
  char path[4096];
  snprintf(path, sizeof path, "%s/rank%d", folder ? folder : ".", own_rank);
  FILE *file = fopen(path, "w");
  if (!file) {
    perror(path);
    return 0;
  }
  fprintf(file, "%s: %s%s%zu events started, %zu stopped, %zu wrong; %zu writes of %zu bytes, %zu receives; NCCL sent %zu bytes\n",
          why ? "bad" : "ok", why ? why : "", why ? "; " : "", started, stopped, wrong, writes, written, receives, sent);
  fclose(file);
  return 0;
}

struct profiler {
  const char *name;
  int (*init)(void **, uint64_t, int *, const char *, int, int, int, void *);
  int (*start_event)(void *, void **, const struct descriptor *);
  int (*stop_event)(void *);
  int (*record_event_state)(void *, int, const size_t *);
  int (*finalize)(void *);
};
const struct profiler ncclProfiler_v5 = {"ci/gpu", init, start_event, stop_event, record_event_state, finalize};
const struct profiler ncclProfiler_v6 = {"ci/gpu", init, start_event, stop_event, record_event_state, finalize};
