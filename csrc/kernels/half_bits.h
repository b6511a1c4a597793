// Conversions between the 16-bit types and fp32 in integer arithmetic without branches, so that they vectorise on any
// instruction set. Rounding is to nearest even; a NaN stays a NaN, made quiet, with its sign and the payload bits that
// fit, which is what F16C does too.
//
// Part of a kernel file (see kernels_body.h): everything here has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpucomm {
namespace {

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Magnitudes are signed, though never negative: SSE2 and AVX2 compare signed integers only.
constexpr int32_t kFloatInfinity = 0x7f800000;

inline float half_to_float(uint16_t half) {
  constexpr int32_t kRebias = (127 - 15) << 23;
  constexpr int32_t kHalfInfinity = 0x7c00 << 13;
  const int32_t magnitude = (half & 0x7fff) << 13;
  const uint32_t sign = (half & 0x8000u) << 16;
  const int32_t normal = magnitude + kRebias;
  // Inf and NaN go to the top exponent, a NaN's quiet bit is set.
  const int32_t special = (normal + kRebias) | (magnitude > kHalfInfinity ? 0x00400000 : 0);
  // Zero and subnormals: put the bits below an implicit one of weight 2^-14, then take it away, which is exact.
  constexpr uint32_t kSmallestNormal = 113u << 23;
  const float subnormal = float_of(static_cast<uint32_t>(magnitude) + kSmallestNormal) - float_of(kSmallestNormal);
  const int32_t finite = magnitude < 0x00800000 ? static_cast<int32_t>(bits_of(subnormal)) : normal;
  return float_of(sign | static_cast<uint32_t>(magnitude >= kHalfInfinity ? special : finite));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value);
  const int32_t magnitude = static_cast<int32_t>(bits & 0x7fffffffu);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Half of the last kept bit, less one unless that bit is odd: a carry may run into the exponent, as it should.
  const int32_t normal = (magnitude - ((127 - 15) << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Below 2^-14: the last place of [0.5, 1) in fp32 weighs 2^-24, a half's subnormal unit, so the addition rounds.
  const float shifted = float_of(static_cast<uint32_t>(magnitude)) + 0.5f;
  const int32_t subnormal = static_cast<int32_t>(bits_of(shifted) - 0x3f000000u);
  const int32_t nan = 0x7e00 | ((magnitude >> 13) & 0x3ff);
  const int32_t finite = magnitude < 0x38800000 ? subnormal : normal;
  const int32_t bounded = magnitude >= 0x477ff000 ? 0x7c00 : finite;
  return static_cast<uint16_t>(sign | static_cast<uint32_t>(magnitude > kFloatInfinity ? nan : bounded));
}

inline float bfloat_to_float(uint16_t bfloat) { return float_of(static_cast<uint32_t>(bfloat) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>(value != value ? nan : rounded);
}

}  // namespace
}  // namespace gpucomm
