// Conversions between the 16-bit types and fp32 in integer arithmetic without branches, so that they vectorise on any
// instruction set. Rounding is to nearest even; a NaN stays a NaN, made quiet, with its sign and the payload bits that
// fit, which is what F16C does too.
//
// Part of a kernel file (see kernels_body.h): everything here has internal linkage.
#pragma once

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

inline float half_to_float(uint16_t half) {
  constexpr uint32_t kRebias = (127u - 15u) << 23;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t normal = magnitude + kRebias;
  // Inf and NaN go to the top exponent, a NaN's quiet bit is set.
  const uint32_t special = (magnitude + 2 * kRebias) | (magnitude > 0x0f800000u ? 0x00400000u : 0u);
  // Zero and subnormals: put the bits below an implicit one of weight 2^-14, then take it away, which is exact.
  constexpr uint32_t kSmallestNormal = 113u << 23;
  const uint32_t subnormal = bits_of(float_of(magnitude + kSmallestNormal) - float_of(kSmallestNormal));
  const uint32_t finite = magnitude < 0x00800000u ? subnormal : normal;
  return float_of(sign | (magnitude >= 0x0f800000u ? special : finite));
}

inline uint16_t float_to_half(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t sign = (bits >> 16) & 0x8000u;
  // Half of the last kept bit, less one unless that bit is odd: a carry may run into the exponent, as it should.
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
  // Below 2^-14: the last place of [0.5, 1) in fp32 weighs 2^-24, a half's subnormal unit, so the addition rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
  const uint32_t bounded = magnitude >= 0x477ff000u ? 0x7c00u : finite;
  return static_cast<uint16_t>(sign | (magnitude > 0x7f800000u ? nan : bounded));
}

inline float bfloat_to_float(uint16_t bfloat) { return float_of(static_cast<uint32_t>(bfloat) << 16); }

inline uint16_t float_to_bfloat(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const uint32_t nan = (bits >> 16) | 0x40u;
  return static_cast<uint16_t>((bits & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

}  // namespace
}  // namespace gpucomm
