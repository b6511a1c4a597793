// What the host and the kernels of codec.cu tell each other. Included by both; includes nothing itself, because the
// run-time compiler opens no header.
#pragma once

namespace gpucomm::codec {

using u32 = unsigned int;
using u64 = unsigned long long;

// Pointers that travel by value with one launch. Arguments of a kernel may be 4096 bytes on every driver; a bucket with
// more slots than that takes several launches.
constexpr u32 kPointersPerLaunch = 480;

// What one block packs: a stretch of one slot. Uploaded once a plan; nothing is copied to the device in an iteration.
struct Piece {
  u64 slot_offset;  // in elements, from the start of the bucket
  u64 grad_offset;  // in elements, from the start of the gradient
  u32 numel;
  u32 slot;  // of the bucket, in order; its gradient is pointers[slot - first_slot]
};

// pack: bucket[slot_offset + i] = to(scale * grad[grad_offset + i]), i < numel, for each piece; a null gradient packs
// zeros. Beside it, where the pointers are not null:
//   partial_norms[piece]  the sum of squares, in fp32, of what was packed (before rounding to the slot's type)
//   first_nonfinite       the lowest `slot` with an infinity or a NaN in what was packed, if lower than what is there
// unpack: grad[grad_offset + i] = to(scale * bucket[slot_offset + i]); a null gradient is left out.
// Where device_scale is not null, *device_scale multiplies `scale`.
struct CodecArgs {
  void* bucket;
  const Piece* pieces;  // of this launch: one a block
  float* partial_norms;
  int* first_nonfinite;
  const float* device_scale;
  float scale;
  u32 first_slot;
  void* pointers[kPointersPerLaunch];
};

// One stretch of memory, for the kernels that do not go slot by slot.
struct FlatArgs {
  void* data;
  u64 numel;
  float* partials;  // squared_norm: one for each block
  const float* device_scale;
  float scale;
  u32 partial_count;  // sum_partials
  float* result;      // sum_partials: *result += the sum of partials, in a fixed order
};

}  // namespace gpucomm::codec
