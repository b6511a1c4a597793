// Rows of float16 converted by half_bits.h, for instruction sets without an instruction that we use for it.
#pragma once

#include "kernels/half_bits.h"

namespace gpucomm {
namespace {

inline void widen_halves(float* out, const uint16_t* in, size_t numel) {
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) out[i] = half_to_float(in[i]);
}

inline void narrow_to_halves(uint16_t* out, const float* in, size_t numel) {
#pragma GCC ivdep
  for (size_t i = 0; i < numel; ++i) out[i] = float_to_half(in[i]);
}

}  // namespace
}  // namespace gpucomm
