// An NCCL that only tells its version, VERSION of the compiler's command line; a macro that gives a function another
// name leaves it out.
#include "nccl/nccl_api.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))
#define GPUCOMM_IDLE(member, symbol, ...) \
  EXPORTED int symbol() { return 0; }

#define ncclGetVersion idle_get_version
#define ncclGetErrorString idle_get_error_string
#define ncclGetLastError idle_get_last_error
GPUCOMM_NCCL_FUNCTIONS(GPUCOMM_IDLE)
#undef ncclGetVersion
#undef ncclGetErrorString
#undef ncclGetLastError

EXPORTED int ncclGetVersion(int* version) {
  *version = VERSION;
  return 0;
}

EXPORTED const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "another error"; }

EXPORTED const char* ncclGetLastError(void*) { return "rank 3 came twice"; }
