// A CUDA driver of which only the loader's own calls do anything. What is wrong with it comes from the compiler's
// command line: VERSION, INIT, DEVICES; a macro that gives a function another name leaves it out.
#include "cuda/cuda_api.h"

#ifndef VERSION
#define VERSION 12040
#endif
#ifndef INIT
#define INIT 0
#endif
#ifndef DEVICES
#define DEVICES 2
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define GPUCOMM_IDLE(member, name, symbol, ...) \
  EXPORTED int symbol() { return 0; }

#define cuDriverGetVersion idle_get_version
#define cuInit idle_init
#define cuDeviceGetCount idle_get_count
GPUCOMM_CUDA_FUNCTIONS(GPUCOMM_IDLE)
#undef cuDriverGetVersion
#undef cuInit
#undef cuDeviceGetCount

EXPORTED int cuDriverGetVersion(int* version) {
  *version = VERSION;
  return 0;
}

EXPORTED int cuInit(unsigned) { return INIT; }

EXPORTED int cuDeviceGetCount(int* count) {
  *count = DEVICES;
  return 0;
}
