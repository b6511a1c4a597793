// What the host and the kernels of codec.cu tell each other. Included by both; includes nothing itself, because the
// run-time compiler opens no header.
#pragma once

namespace gpucomm::codec {

using u32 = unsigned int;
using u64 = unsigned long long;

// Launched with this many threads a block. Any number is correct, multiples of 32 are fast, more than kMaxBlockThreads
// are refused by the driver.
constexpr u32 kBlockThreads = 256;
constexpr u32 kMaxBlockThreads = 640;

// The longest piece that is fast: a block of kBlockThreads then has every 16-byte load of a 16-bit gradient in flight
// at once, and a bucket of 25 MiB has several blocks for each multiprocessor. Longer ones are correct. Cut a gradient
// at multiples of this, so that pieces start aligned.
constexpr u32 kPieceNumel = 8192;

// Pointers that travel by value with one launch. Arguments of a kernel may be 4096 bytes on every driver; a bucket with
// more slots than that takes several launches.
constexpr u32 kPointersPerLaunch = 504;

// What one block packs: a stretch of one slot. Uploaded once a plan; nothing is copied to the device in an iteration.
struct Piece {
  u64 slot_offset;  // in elements, from the start of the bucket
  u64 grad_offset;  // in elements, from the start of the gradient
  u32 numel;
  u32 slot;  // of the bucket, in order; its gradient is pointers[slot - first_slot]
};

// pack: bucket[slot_offset + i] = to(scale * grad[grad_offset + i]), i < numel, for each piece; a null gradient packs
// zeros. Beside it, where the pointers are not null:
//   partial_norms[block]  the sum of squares of what was packed (before rounding to the slot's type)
//   first_nonfinite       the lowest `slot` with an infinity or a NaN in what was packed, if lower than what is there;
//                         start it at INT_MAX
// unpack: grad[grad_offset + i] = to(scale * bucket[slot_offset + i]); a null gradient is left out.
// Where device_scale is not null, *device_scale multiplies `scale`. Products are taken in fp32, of fp64 in fp64, and
// rounded once to nearest even. A NaN stays a NaN; its payload is the hardware's.
// Gradients and slots may be aligned to their elements alone; both aligned to 16 bytes is the fast path.
struct CodecArgs {
  void* bucket;
  const Piece* pieces;  // of this launch: one a block
  float* partial_norms;
  int* first_nonfinite;
  const float* device_scale;
  double scale;
  u32 first_slot;
  void* pointers[kPointersPerLaunch];
};
static_assert(sizeof(CodecArgs) <= 4096, "the arguments of a kernel");

// One stretch of memory, for the kernels that do not go slot by slot.
struct FlatArgs {
  void* data;
  u64 numel;
  float* partials;  // squared_norm: one for each block
  const float* device_scale;
  double scale;       // scale: data[i] = to(scale * *device_scale * data[i]); a factor of 1 touches nothing
  u32 partial_count;  // sum_partials, which is one block
  float* result;      // sum_partials: *result += the sum of partials, in an order that hangs on blockDim alone
};

#ifndef __CUDACC_RTC__  // which takes no functions of the host
// Blocks for the kernels over FlatArgs (any number is correct; the order of a norm's sum hangs on it).
constexpr u32 kMaxFlatBlocks = 1024;
constexpr u32 flat_blocks(u64 numel) {
  const u64 blocks = (numel + kPieceNumel - 1) / kPieceNumel;
  return blocks == 0 ? 1 : blocks > kMaxFlatBlocks ? kMaxFlatBlocks : static_cast<u32>(blocks);
}
#endif

}  // namespace gpucomm::codec

// The kernels, for codec.cu to define and the host to name (kernel_name.h): F(name, Type) of a type's own kernels,
// squared_norm_<name> and scale_<name>; F(from, FromType, to, ToType) of those that convert, pack_<from>_<to> and
// unpack_<from>_<to>. Types are called as in DType. sum_partials has no type.
#define GPUCOMM_CODEC_TYPES(F) F(f32, Float32) F(f16, Float16) F(bf16, BFloat16) F(f64, Float64)
#define GPUCOMM_CODEC_PAIRS(F)      \
  F(f32, Float32, f32, Float32)     \
  F(f32, Float32, f16, Float16)     \
  F(f32, Float32, bf16, BFloat16)   \
  F(f16, Float16, f32, Float32)     \
  F(f16, Float16, f16, Float16)     \
  F(f16, Float16, bf16, BFloat16)   \
  F(bf16, BFloat16, f32, Float32)   \
  F(bf16, BFloat16, f16, Float16)   \
  F(bf16, BFloat16, bf16, BFloat16) \
  F(f64, Float64, f64, Float64)
