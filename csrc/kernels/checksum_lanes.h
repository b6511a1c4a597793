// The checksum of a stretch of memory: 64 bits, to tell whether the copies of some memory are still equal.
//
// Words of 64 bits go into 32 lanes in turn, each lane being
//     x ^= x >> 20;  x += x << 14;  x += word;
// and in the end the lanes go one after the other into
//     h = mix(h ^ x)
// that started from the length. What lacks to a whole turn is read as zeros.
//
// Each of these steps is invertible: a xorshift (G. Marsaglia, "Xorshift RNGs", 2003), a product with the odd number
// 2^14 + 1, a sum, and mix (Stafford's variant 13 of MurmurHash3's finalizer, as in G. Steele, D. Lea, C. Flood, "Fast
// splittable pseudorandom number generators", 2014). So copies that differ within one word never have the same
// checksum, whichever bits they are; others have it by a chance of about 2^-64, for what a word does to its lane
// depends on all that come later: swapped elements show. The shifts are those after which a flipped bit has spread
// furthest four words later. Shifts and sums alone, because not every instruction set multiplies 64 bits; no protection
// against intent.
//
// Part of a kernel file (see kernels_body.h): everything here has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace gpucomm {
namespace {

constexpr size_t kChecksumLanes =
    32;  // independent of each other: enough to hide a step's latency in any register width

inline uint64_t mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

inline void absorb(uint64_t* lanes, const void* turn) {
  uint64_t words[kChecksumLanes];
  std::memcpy(words, turn, sizeof words);
  for (size_t l = 0; l < kChecksumLanes; ++l) {
    uint64_t x = lanes[l];
    x ^= x >> 20;
    x += x << 14;
    lanes[l] = x + words[l];
  }
}

uint64_t checksum(const void* src, size_t bytes) {
  constexpr size_t kTurnBytes = kChecksumLanes * sizeof(uint64_t);
  const char* in = static_cast<const char*>(src);
  uint64_t lanes[kChecksumLanes];
  for (size_t l = 0; l < kChecksumLanes; ++l) lanes[l] = (l + 1) * 0x9e3779b97f4a7c15u;  // any that differ
  size_t at = 0;
  for (; bytes - at >= kTurnBytes; at += kTurnBytes) absorb(lanes, in + at);
  if (at < bytes) {
    char rest[kTurnBytes] = {};
    std::memcpy(rest, in + at, bytes - at);
    absorb(lanes, rest);
  }
  uint64_t h = bytes;
  for (size_t l = 0; l < kChecksumLanes; ++l) h = mix(h ^ lanes[l]);
  return h;
}

}  // namespace
}  // namespace gpucomm
