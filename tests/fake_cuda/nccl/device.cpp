#include "fake_cuda/nccl/device.h"

#include <unistd.h>

#include <cstdlib>
#include <functional>

#include "fake_cuda/driver/fake_stream.h"
#include "fake_cuda/nccl/report.h"

// Of libfake_cuda.so, which exports them as the driver does.
extern "C" {
using gpucomm::cuda::Context;
int cuCtxGetCurrent(Context* context);
int cuCtxPushCurrent_v2(Context context);
int cuCtxPopCurrent_v2(Context* context);
int cuDevicePrimaryCtxRetain(Context* context, int device);
int cuDeviceGetPCIBusId(char* id, int length, int device);
int cuStreamQuery(gpucomm::cuda::StreamHandle stream);
int cuMemFree_v2(gpucomm::cuda::DeviceAddress address);
}

namespace fake_nccl {

cuda::Context bind_device(const char* function, int* device) {
  cuda::Context context = nullptr;
  *device = fake_current_device();
  if (*device >= 0) {
    cuCtxGetCurrent(&context);
    return context;
  }
  misuse(function, "no-context", "no context is current: device 0 is taken");
  *device = 0;
  cuDevicePrimaryCtxRetain(&context, 0);
  return context;
}

std::string bus_id(int device) {
  char id[32] = "";
  cuDeviceGetPCIBusId(id, sizeof id, device);
  return id;
}

uint64_t host_hash() {
  const char* set = std::getenv("NCCL_HOSTID");
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  return std::hash<std::string>()(set != nullptr ? set : name);
}

Within::Within(cuda::Context context) { cuCtxPushCurrent_v2(context); }

Within::~Within() {
  cuda::Context popped;
  cuCtxPopCurrent_v2(&popped);
}

void drive(cuda::Context context, cuda::StreamHandle stream) {
  const Within within(context);
  cuStreamQuery(stream);
}

bool free_device_memory(void* address) {
  return cuMemFree_v2(reinterpret_cast<cuda::DeviceAddress>(address)) == cuda::kSuccess;
}

}  // namespace fake_nccl
