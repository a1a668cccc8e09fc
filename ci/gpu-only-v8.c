/* The plugin as a library that exports version 8 of the interface and no other, for `ci/gpu`: NCCL takes the newest version
 * that it finds. GPU_PLUGIN names the plugin. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nccl_net_v8.h"

ncclNet_v8_t ncclNetPlugin_v8;

__attribute__((constructor)) static void load(void) {
  const char *path = getenv("GPU_PLUGIN");
  void *plugin = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
  const ncclNet_v8_t *table = plugin ? dlsym(plugin, "ncclNetPlugin_v8") : NULL;
  if (table)
    memcpy(&ncclNetPlugin_v8, table, sizeof ncclNetPlugin_v8);
  else
    fprintf(stderr, "GPU_PLUGIN=%s: %s\n", path ? path : "", path ? dlerror() : "not set");
}
