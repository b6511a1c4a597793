// What the NCCL stand-in asks of the driver's stand-in beyond its streams.
#pragma once

#include <string>

#include "fake_cuda/nccl/functions.h"

namespace fake_nccl {

// The context current on this thread, or where there is none that of device 0, which is what NCCL then takes: reported.
cuda::Context bind_device(const char* function, int* device);
std::string bus_id(int device);
// Of the host, as far as NCCL tells hosts apart: NCCL_HOSTID decides where it is set.
uint64_t host_hash();

// Makes a context current for its scope, as NCCL does within its calls.
class Within {
 public:
  explicit Within(cuda::Context context);
  ~Within();
  Within(const Within&) = delete;
  Within& operator=(const Within&) = delete;
};

// Lets the device go on as far as it can, beginning at a stream.
void drive(cuda::Context context, cuda::StreamHandle stream);

// cuMemFree.
bool free_device_memory(void* address);

}  // namespace fake_nccl
