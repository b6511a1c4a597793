// A codec turns a gradient into its slot of a bucket (pack) and back (unpack). The CPU codec is the reference for every
// other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace gpucomm {

class Codec {
 public:
  virtual ~Codec() = default;
  // slot[i] = to(scale * grad[i]). Contiguous memory of numel elements each; grad == slot with equal dtypes and
  // scale 1 is a no-op.
  virtual void pack(void* slot, DType slot_dtype, const void* grad, DType grad_dtype, size_t numel, double scale) = 0;
  virtual void unpack(void* grad, DType grad_dtype, const void* slot, DType slot_dtype, size_t numel, double scale) = 0;
  virtual void zero(void* slot, size_t bytes) = 0;
  // Index of the first element of the slot that is infinite or NaN, -1 if there is none (integers: never).
  virtual int64_t first_nonfinite(const void* slot, DType slot_dtype, size_t numel) = 0;
};

class CpuCodec final : public Codec {
 public:
  void pack(void* slot, DType slot_dtype, const void* grad, DType grad_dtype, size_t numel, double scale) override;
  void unpack(void* grad, DType grad_dtype, const void* slot, DType slot_dtype, size_t numel, double scale) override;
  void zero(void* slot, size_t bytes) override;
  int64_t first_nonfinite(const void* slot, DType slot_dtype, size_t numel) override;
};

}  // namespace gpucomm
