#include <cstring>
#include <string>

#include "core/error.h"
#include "kernels/codec.h"
#include "kernels/kernels.h"

namespace gpucomm {

namespace {

void convert(void* to, DType to_dtype, const void* from, DType from_dtype, size_t numel, double scale) {
  if (is_floating(to_dtype) && is_floating(from_dtype)) {
    kernels().pack[static_cast<int>(to_dtype)][static_cast<int>(from_dtype)](to, from, numel, scale);
    return;
  }
  // A gradient is floating, but a bucket may also carry integers as they are.
  if (to_dtype != from_dtype || scale != 1.0) {
    throw UsageError("cannot convert " + std::string(name_of(from_dtype)) + " to " + std::string(name_of(to_dtype)) +
                     " with scale " + std::to_string(scale) +
                     ": accepted are floating types with any scale, or one integer type with scale 1");
  }
  if (to != from && numel != 0) std::memcpy(to, from, numel * size_of(to_dtype));
}

}  // namespace

void CpuCodec::pack(void* slot, DType slot_dtype, const void* grad, DType grad_dtype, size_t numel, double scale) {
  convert(slot, slot_dtype, grad, grad_dtype, numel, scale);
}

void CpuCodec::unpack(void* grad, DType grad_dtype, const void* slot, DType slot_dtype, size_t numel, double scale) {
  convert(grad, grad_dtype, slot, slot_dtype, numel, scale);
}

void CpuCodec::zero(void* slot, size_t bytes) {
  if (bytes != 0) std::memset(slot, 0, bytes);
}

int64_t CpuCodec::first_nonfinite(const void* slot, DType slot_dtype, size_t numel) {
  if (!is_floating(slot_dtype)) return -1;
  return kernels().first_nonfinite[static_cast<int>(slot_dtype)](slot, numel);
}

}  // namespace gpucomm
