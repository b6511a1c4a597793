// Rows of float16 converted eight at a time by F16C (x86), several times the speed of bit arithmetic.
#pragma once

#include <immintrin.h>

#include "kernels/half_bits.h"

namespace gpucomm {
namespace {

inline void widen_halves(float* out, const uint16_t* in, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < numel; ++i) out[i] = half_to_float(in[i]);
}

inline void narrow_to_halves(uint16_t* out, const float* in, size_t numel) {
  size_t i = 0;
  for (; i + 8 <= numel; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < numel; ++i) out[i] = float_to_half(in[i]);
}

}  // namespace
}  // namespace gpucomm
