// A bucket: slots of several parameters in one stretch of memory. It counts its slots down, and knows how far from its
// start it is packed without a gap: it may be reduced in pieces while its later slots are still to come.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/stream.h"
#include "core/types.h"
#include "kernels/bucket_codec.h"
#include "transport/transport.h"

namespace gpucomm {

// Where a parameter's gradient lies in its bucket, and where the program sees it: in the slot itself, or in other
// memory into which it is unpacked: it travels in another dtype, or in memory that is the transport's own. A parameter
// without a slot (frozen) has bucket -1.
struct Slot {
  int32_t bucket = -1;
  uint32_t order = 0;  // among the slots of the bucket
  DType dtype = DType::kFloat32;
  size_t offset = 0;  // in elements from the start of the bucket
  size_t numel = 0;
  std::byte* address = nullptr;
  bool unpacks = false;                // the gradient does not stay in its slot
  std::byte* grad = nullptr;           // where it lies then; else the address above
  DType grad_dtype = DType::kFloat32;  // of the gradient; that of the slot, unless it unpacks
};

struct Bucket {
  Memory memory;
  DType dtype = DType::kFloat32;
  size_t numel = 0;                 // padding between slots included, it is zero
  std::vector<int32_t> parameters;  // in slot order
  size_t unpacked_bytes = 0;        // of gradients that do not stay in their slots
  bool held = false;                // not launched before the end of backward
  // Of this iteration:
  size_t pending = 0;   // slots not yet ready
  size_t in_order = 0;  // slots packed before the first one that is not
  size_t packed = 0;    // elements from the start without a gap
  size_t launched = 0;  // elements from the start whose reduction was started
  Event reduced;        // recorded when the last piece was launched
  uint64_t launch_ticks = 0;
  // Of a bucket that is packed as a whole: by slot, where its gradient lies, and the streams of the program on which
  // they were made.
  std::vector<GradPointer> grads;
  std::vector<Caller> producers;
};

}  // namespace gpucomm
