// The checksum: equal in every table for any length and alignment, and different for what differs.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace gpucomm {
namespace {

std::vector<unsigned char> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

uint64_t checksum(const std::vector<unsigned char>& bytes) { return kernels().checksum(bytes.data(), bytes.size()); }

// The definition, a word at a time: the n-th one goes into lane n % 32.
uint64_t by_definition(std::vector<unsigned char> bytes) {
  uint64_t lanes[32];
  for (size_t l = 0; l < 32; ++l) lanes[l] = (l + 1) * 0x9e3779b97f4a7c15u;
  uint64_t h = bytes.size();
  bytes.resize((bytes.size() + 255) / 256 * 256);
  for (size_t n = 0; n < bytes.size() / 8; ++n) {
    uint64_t word;
    std::memcpy(&word, &bytes[8 * n], 8);
    uint64_t& x = lanes[n % 32];
    x ^= x >> 20;
    x += x << 14;
    x += word;
  }
  for (const uint64_t lane : lanes) {
    h ^= lane;
    h = (h ^ (h >> 30)) * 0xbf58476d1ce4e5b9u;
    h = (h ^ (h >> 27)) * 0x94d049bb133111ebu;
    h ^= h >> 31;
  }
  return h;
}

TEST(ChecksumTest, IsWhatItsDefinitionSaysInEveryTableForAnyLengthAndAlignment) {
  const auto bytes = random_bytes(70'000, 1);
  std::vector<size_t> lengths(1100);
  for (size_t i = 0; i < lengths.size(); ++i) lengths[i] = i;
  lengths.insert(lengths.end(), {65'536, 65'537, 69'983});
  for (const size_t length : lengths) {
    for (const size_t offset : {0, 1, 3, 8, 16, 17}) {
      const std::vector<unsigned char> part(bytes.begin() + static_cast<ptrdiff_t>(offset),
                                            bytes.begin() + static_cast<ptrdiff_t>(offset + length));
      const uint64_t expected = by_definition(part);
      for (size_t t = 0; t < kernel_table_count(); ++t) {
        ASSERT_EQ(kernel_table(t).checksum(bytes.data() + offset, length), expected)
            << kernel_table(t).isa << " length " << length << " offset " << offset;
      }
    }
  }
}

TEST(ChecksumTest, EverySingleBitFlipIsSeen) {
  for (const size_t length : {1, 7, 8, 255, 256, 1031}) {
    for (const bool zeros : {false, true}) {
      auto bytes = zeros ? std::vector<unsigned char>(length) : random_bytes(length, length);
      std::set<uint64_t> seen = {checksum(bytes)};
      for (size_t bit = 0; bit < 8 * length; ++bit) {
        bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
        EXPECT_TRUE(seen.insert(checksum(bytes)).second) << "length " << length << " bit " << bit;
        bytes[bit / 8] ^= static_cast<unsigned char>(1u << (bit % 8));
      }
    }
  }
}

TEST(ChecksumTest, TwoFlipsOfTheSameBitAreSeenAtAnyDistance) {
  std::vector<unsigned char> bytes(16'384);
  const uint64_t before = checksum(bytes);
  for (const size_t bit : {0, 31, 63}) {
    const auto mask = static_cast<unsigned char>(1u << (bit % 8));
    for (size_t word = 1; word < bytes.size() / 8; ++word) {
      bytes[bit / 8] ^= mask;
      bytes[8 * word + bit / 8] ^= mask;
      EXPECT_NE(checksum(bytes), before) << "bit " << bit << " of words 0 and " << word;
      bytes[8 * word + bit / 8] ^= mask;
      bytes[bit / 8] ^= mask;
    }
  }
}

// Values as models have them: of few bits, often equal but for the sign.
template <class T>
void check_swaps(const std::vector<T>& kinds) {
  std::vector<T> x(4096);
  for (size_t i = 0; i < x.size(); ++i) x[i] = kinds[i * i % kinds.size()];
  const size_t bytes = x.size() * sizeof(T);
  const uint64_t before = kernels().checksum(x.data(), bytes);
  size_t swaps = 0;
  for (const size_t at : {size_t{0}, size_t{5}, x.size() / 2}) {
    for (size_t other = 0; other < x.size(); ++other) {
      if (std::memcmp(&x[at], &x[other], sizeof(T)) == 0) continue;
      std::swap(x[at], x[other]);
      EXPECT_NE(kernels().checksum(x.data(), bytes), before) << at << " and " << other;
      std::swap(x[at], x[other]);
      ++swaps;
    }
  }
  EXPECT_GT(swaps, x.size());
}

TEST(ChecksumTest, SwappedElementsAreSeenAtAnyDistance) {
  check_swaps<double>({1.0, -1.0, 0.0, -0.0, 2.0, 0.5, -0.5});
  check_swaps<float>({1.0f, -1.0f, 0.0f, -0.0f, 2.0f, 0.5f, -0.5f});
  check_swaps<uint16_t>({0x3f80, 0xbf80, 0x0000, 0x8000, 0x4000});
  check_swaps<uint8_t>({0, 1, 255});
}

TEST(ChecksumTest, ZerosOfDifferentLengthsDiffer) {
  const std::vector<unsigned char> zeros(5000);
  std::set<uint64_t> seen;
  for (size_t length = 0; length <= zeros.size(); ++length) {
    EXPECT_TRUE(seen.insert(kernels().checksum(zeros.data(), length)).second) << length;
  }
}

TEST(ChecksumTest, NothingAroundTheStretchMatters) {
  auto bytes = random_bytes(2000, 2);
  const uint64_t before = kernels().checksum(bytes.data() + 100, 1001);
  std::fill(bytes.begin(), bytes.begin() + 100, static_cast<unsigned char>(0));
  std::fill(bytes.begin() + 1101, bytes.end(), static_cast<unsigned char>(0));
  EXPECT_EQ(kernels().checksum(bytes.data() + 100, 1001), before);
}

}  // namespace
}  // namespace gpucomm
