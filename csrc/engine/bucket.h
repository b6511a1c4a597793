// A bucket: slots of several parameters in one piece of memory that is reduced as a whole. It counts its slots down.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/stream.h"
#include "core/types.h"
#include "transport/transport.h"

namespace gpucomm {

// Where a parameter's gradient lies in its bucket. A parameter without a slot (frozen) has bucket -1.
struct Slot {
  int32_t bucket = -1;
  DType dtype = DType::kFloat32;
  size_t numel = 0;
  std::byte* address = nullptr;
};

struct Bucket {
  Memory memory;
  DType dtype = DType::kFloat32;
  size_t numel = 0;                 // padding between slots included, it is zero
  std::vector<int32_t> parameters;  // in slot order
  size_t pending = 0;               // slots not yet packed in this iteration
  Event reduced;                    // recorded when launched
  uint64_t launch_ticks = 0;
};

}  // namespace gpucomm
