// Philox4x32-10: four random words for each counter; see [Note: stochastic rounding] in step.h.
//
// Part of a kernel file (see kernels_body.h): everything here has internal linkage.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpucomm {
namespace {

// words[4 c] to words[4 c + 3], for c < calls: those of block first + c in the given step.
inline void philox(uint32_t* words, uint64_t first, size_t calls, uint64_t seed, uint64_t step) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier2 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
#pragma GCC ivdep
  for (size_t c = 0; c < calls; ++c) {
    const uint64_t block = first + c;
    uint32_t x0 = static_cast<uint32_t>(block), x1 = static_cast<uint32_t>(block >> 32);
    uint32_t x2 = static_cast<uint32_t>(step), x3 = static_cast<uint32_t>(step >> 32);
    uint32_t key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; ++round) {
      const uint64_t product0 = kMultiplier0 * x0, product2 = kMultiplier2 * x2;
      const uint32_t high0 = static_cast<uint32_t>(product0 >> 32), high2 = static_cast<uint32_t>(product2 >> 32);
      x0 = high2 ^ x1 ^ key0;
      x2 = high0 ^ x3 ^ key1;
      x1 = static_cast<uint32_t>(product2);
      x3 = static_cast<uint32_t>(product0);
      key0 += kWeyl0;
      key1 += kWeyl1;
    }
    words[4 * c] = x0;
    words[4 * c + 1] = x1;
    words[4 * c + 2] = x2;
    words[4 * c + 3] = x3;
  }
}

}  // namespace
}  // namespace gpucomm
