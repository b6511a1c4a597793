// codec.cu, compiled for the host, against the CPU codec (bit for bit) and against sums in fp64.
#include <gtest/gtest.h>

#include <bit>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "core/error.h"
#include "cuda/codec_args.h"
#include "cuda/kernel_name.h"
#include "fake_cuda/driver/host_kernels.h"
#include "kernels/codec.h"

namespace gpucomm {
namespace {

using codec::CodecArgs;
using codec::FlatArgs;
using codec::Piece;
using cuda::Kernel;
using cuda::kernel_name;

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

std::vector<std::pair<DType, DType>> served_pairs() {
  std::vector<std::pair<DType, DType>> pairs = {{DType::kFloat64, DType::kFloat64}};
  for (const DType from : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const DType to : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) pairs.emplace_back(from, to);
  }
  return pairs;
}

std::string text(DType from, DType to) { return std::string(name_of(from)) + " to " + std::string(name_of(to)); }

// Memory of any type at any alignment, with a margin that must stay as it was.
class Memory {
 public:
  Memory(DType dtype, size_t numel, size_t skip = 0)
      : dtype_(dtype), numel_(numel), begin_(64 + skip * size_of(dtype)), bytes_(128 + (numel + 32) * size_of(dtype)) {
    std::memset(bytes_.data(), 0xa5, bytes_.size() * sizeof(Line));
  }
  void* data() { return reinterpret_cast<unsigned char*>(bytes_.data()) + begin_; }
  size_t numel() const { return numel_; }
  size_t bytes() const { return numel_ * size_of(dtype_); }
  std::vector<unsigned char> everything() const {
    const auto* first = reinterpret_cast<const unsigned char*>(bytes_.data());
    return {first, first + bytes_.size() * sizeof(Line)};
  }
  // From doubles, rounded as the CPU codec does.
  void fill(const std::vector<double>& values) {
    CpuCodec().pack(data(), dtype_, values.data(), DType::kFloat64, values.size(), 1.0);
  }
  std::vector<double> values() {
    std::vector<double> wide(numel_);
    CpuCodec().unpack(wide.data(), DType::kFloat64, data(), dtype_, numel_, 1.0);
    return wide;
  }

 private:
  struct alignas(64) Line {
    unsigned char bytes[64];
  };
  DType dtype_;
  size_t numel_;
  size_t begin_;
  std::vector<Line> bytes_;
};

// Of every magnitude that the type has, subnormals and ties too.
std::vector<double> varied_values(DType dtype, size_t numel, unsigned seed) {
  std::mt19937_64 random(seed);
  const int exponents = dtype == DType::kFloat16 ? 24 : dtype == DType::kFloat64 ? 1000 : 140;
  std::vector<double> values(numel);
  for (double& value : values) {
    const double mantissa = static_cast<double>(random() % 8192) / 2048.0 - 2.0;
    value = std::ldexp(mantissa, static_cast<int>(random() % static_cast<unsigned>(exponents)) - exponents * 5 / 8);
  }
  return values;
}

void run(Kernel what, DType from, DType to, CodecArgs& args, size_t pieces) {
  const codec::HostKernel kernel = codec::host_kernel(kernel_name(what, from, to));
  ASSERT_NE(kernel, nullptr) << kernel_name(what, from, to);
  void* arguments[] = {&args};
  codec::launch(kernel, static_cast<unsigned>(pieces), arguments);
}

void run(Kernel what, DType dtype, FlatArgs& args, unsigned blocks) {
  const codec::HostKernel kernel = codec::host_kernel(kernel_name(what, dtype));
  ASSERT_NE(kernel, nullptr) << kernel_name(what, dtype);
  void* arguments[] = {&args};
  codec::launch(kernel, blocks, arguments);
}

// One slot of one gradient, both shifted by some elements, against the CPU codec. A memcmp of all memory, so a write
// beside the slot shows too.
void expect_same_as_cpu(Kernel what, DType from, DType to, size_t numel, size_t skip_from, size_t skip_to,
                        double scale) {
  Memory in(from, numel, skip_from);
  Memory out(to, numel, skip_to);
  Memory expected(to, numel, skip_to);
  in.fill(varied_values(from, numel, static_cast<unsigned>(numel)));
  CpuCodec().pack(expected.data(), to, in.data(), from, numel, scale);

  const Piece piece = {0, 0, static_cast<codec::u32>(numel), 5};
  CodecArgs args = {};
  args.pieces = &piece;
  args.scale = scale;
  args.first_slot = 5;
  args.bucket = what == Kernel::kPack ? out.data() : in.data();
  args.pointers[0] = what == Kernel::kPack ? in.data() : out.data();
  run(what, from, to, args, 1);
  EXPECT_TRUE(out.everything() == expected.everything())
      << kernel_name(what, from, to) << " numel " << numel << " shifts " << skip_from << ", " << skip_to << " scale "
      << scale;
}

TEST(CodecCudaKernelsTest, PackAndUnpackEqualTheCpuCodecBitForBit) {
  for (const auto& [from, to] : served_pairs()) {
    for (const size_t numel : {0, 1, 7, 8, 31, 64, 1000, 8192, 20011}) {
      for (const double scale : {1.0, 1.0 / 3.0, -65536.0}) {
        expect_same_as_cpu(Kernel::kPack, from, to, numel, 0, 0, scale);
        expect_same_as_cpu(Kernel::kUnpack, from, to, numel, 0, 0, scale);
      }
    }
  }
}

TEST(CodecCudaKernelsTest, UnalignedMemoryGivesTheSameBits) {
  for (const auto& [from, to] : served_pairs()) {
    for (const size_t numel : {1, 7, 1000}) {
      for (const auto& [skip_from, skip_to] : {std::pair{1, 0}, std::pair{0, 1}, std::pair{3, 1}, std::pair{16, 8}}) {
        expect_same_as_cpu(Kernel::kPack, from, to, numel, skip_from, skip_to, 0.25);
        expect_same_as_cpu(Kernel::kUnpack, from, to, numel, skip_from, skip_to, 0.25);
      }
    }
  }
}

// All 65,536 patterns of a 16-bit type, and the fp32 values on both sides of each and halfway between: all that
// rounding can meet. A signalling NaN becomes quiet in any multiplication and is left out.
TEST(CodecCudaKernelsTest, EveryHalfAndWhatLiesBetweenConvertsAsOnTheCpu) {
  for (const DType half : {DType::kFloat16, DType::kBFloat16}) {
    const int dropped = half == DType::kFloat16 ? 13 : 16;
    std::vector<uint16_t> halves;
    std::vector<float> floats;
    for (unsigned bits = 0; bits < 0x10000; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      float value = 0;
      CpuCodec().unpack(&value, DType::kFloat32, &pattern, half, 1, 1.0);
      const unsigned quiet = half == DType::kFloat16 ? 0x200u : 0x40u;
      if (std::isnan(value) && (bits & quiet) == 0) continue;
      halves.push_back(pattern);
      for (const int offset : {-1, 0, 1}) {
        const uint32_t halfway = 1u << (dropped - 1);
        for (const uint32_t base : {0u, halfway}) {
          const float near =
              std::bit_cast<float>(std::bit_cast<uint32_t>(value) + base + static_cast<uint32_t>(offset));
          if (!std::isnan(near) || (std::bit_cast<uint32_t>(near) & 0x00400000u) != 0) floats.push_back(near);
        }
      }
    }
    for (const auto& [from, to, in, numel] :
         {std::tuple<DType, DType, void*, size_t>{half, DType::kFloat32, halves.data(), halves.size()},
          {half, half, halves.data(), halves.size()},
          {DType::kFloat32, half, floats.data(), floats.size()}}) {
      Memory out(to, numel);
      Memory expected(to, numel);
      CpuCodec().pack(expected.data(), to, in, from, numel, 1.0);
      const Piece piece = {0, 0, static_cast<codec::u32>(numel), 0};
      CodecArgs args = {};
      args.bucket = out.data();
      args.pieces = &piece;
      args.scale = 1.0;
      args.pointers[0] = in;
      run(Kernel::kPack, from, to, args, 1);
      EXPECT_EQ(std::memcmp(out.data(), expected.data(), out.bytes()), 0) << text(from, to);
    }
  }
}

TEST(CodecCudaKernelsTest, PiecesOfSeveralGradientsLandInTheirSlots) {
  Memory first(DType::kFloat32, 100);
  Memory second(DType::kFloat32, 50);
  first.fill(varied_values(DType::kFloat32, 100, 1));
  second.fill(varied_values(DType::kFloat32, 50, 2));
  Memory bucket(DType::kBFloat16, 176);
  Memory expected(DType::kBFloat16, 176);
  auto* slots = static_cast<uint16_t*>(expected.data());
  CpuCodec().pack(slots, DType::kBFloat16, first.data(), DType::kFloat32, 100, 0.5);
  CpuCodec().pack(slots + 112, DType::kBFloat16, second.data(), DType::kFloat32, 50, 0.5);

  const Piece pieces[] = {{112, 0, 50, 8}, {0, 0, 64, 7}, {64, 64, 36, 7}};
  CodecArgs args = {};
  args.bucket = bucket.data();
  args.pieces = pieces;
  args.scale = 0.5;
  args.first_slot = 7;
  args.pointers[0] = first.data();
  args.pointers[1] = second.data();
  run(Kernel::kPack, DType::kFloat32, DType::kBFloat16, args, 3);
  EXPECT_TRUE(bucket.everything() == expected.everything());
}

TEST(CodecCudaKernelsTest, TheScaleOnTheDeviceMultipliesTheScaleOfTheHost) {
  const float device_scale = 0.3f;
  for (const auto& [from, to] : served_pairs()) {
    Memory in(from, 1000);
    Memory out(to, 1000);
    Memory expected(to, 1000);
    in.fill(varied_values(from, 1000, 3));
    const double factor = from == DType::kFloat64 ? (1.0 / 3.0) * static_cast<double>(device_scale)
                                                  : static_cast<double>(static_cast<float>(1.0 / 3.0) * device_scale);
    CpuCodec().pack(expected.data(), to, in.data(), from, 1000, factor);
    const Piece piece = {0, 0, 1000, 0};
    CodecArgs args = {};
    args.bucket = out.data();
    args.pieces = &piece;
    args.scale = 1.0 / 3.0;
    args.device_scale = &device_scale;
    args.pointers[0] = in.data();
    run(Kernel::kPack, from, to, args, 1);
    EXPECT_TRUE(out.everything() == expected.everything()) << text(from, to);
  }
}

TEST(CodecCudaKernelsTest, AMissingGradientPacksZerosAndUnpacksNothing) {
  for (const auto& [from, to] : served_pairs()) {
    for (const size_t skip : {0, 1}) {
      Memory bucket(to, 999, skip);
      Memory expected(to, 999, skip);
      std::memset(expected.data(), 0, expected.bytes());
      const Piece piece = {0, 0, 999, 0};
      float norm = -1.0f;
      int first = INT_MAX;
      CodecArgs args = {};
      args.bucket = bucket.data();
      args.pieces = &piece;
      args.partial_norms = &norm;
      args.first_nonfinite = &first;
      args.scale = std::numeric_limits<double>::infinity();
      run(Kernel::kPack, from, to, args, 1);
      EXPECT_TRUE(bucket.everything() == expected.everything()) << text(from, to);
      EXPECT_EQ(norm, 0.0f);
      EXPECT_EQ(first, INT_MAX);
      run(Kernel::kUnpack, to, from, args, 1);
      EXPECT_TRUE(bucket.everything() == expected.everything()) << text(from, to);
    }
  }
}

// What is infinite only once rounded counts too.
TEST(CodecCudaKernelsTest, TheLowestSlotThatIsNotFiniteIsFound) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [from, to] : served_pairs()) {
    for (const double bad : {nan, infinity, -infinity}) {
      for (const size_t at : {0, 17, 999, 1002}) {
        Memory fine(from, 1003);
        Memory broken(from, 1003);
        std::vector<double> values(1003, 2.0);
        fine.fill(values);
        values[at] = bad;
        broken.fill(values);
        Memory bucket(to, 4 * 1008);
        const Piece pieces[] = {{3024, 0, 1003, 14}, {0, 0, 1003, 11}, {2016, 0, 1003, 13}, {1008, 0, 1003, 12}};
        int first = INT_MAX;
        CodecArgs args = {};
        args.bucket = bucket.data();
        args.pieces = pieces;
        args.first_nonfinite = &first;
        args.scale = 0.5;
        args.first_slot = 11;
        args.pointers[0] = args.pointers[2] = fine.data();
        args.pointers[1] = args.pointers[3] = broken.data();
        run(Kernel::kPack, from, to, args, 4);
        EXPECT_EQ(first, 12) << text(from, to) << " at " << at;
        first = 3;
        run(Kernel::kPack, from, to, args, 4);
        EXPECT_EQ(first, 3);
      }
    }
  }
}

TEST(CodecCudaKernelsTest, OnlyWhatIsInfiniteOnceRoundedIsNotFinite) {
  for (const auto& [slot, largest, too_large] :
       {std::tuple{DType::kFloat16, 65519.99f, 65520.0f}, std::tuple{DType::kBFloat16, 0x1.fefffep127f, 0x1.ffp127f},
        std::tuple{DType::kFloat32, FLT_MAX, INFINITY}}) {
    for (const float sign : {1.0f, -1.0f}) {
      for (const bool overflows : {false, true}) {
        std::vector<float> grad(64, 1.0f);
        grad[40] = sign * (overflows ? too_large : largest);
        Memory bucket(slot, 64);
        const Piece piece = {0, 0, 64, 0};
        int first = INT_MAX;
        CodecArgs args = {};
        args.bucket = bucket.data();
        args.pieces = &piece;
        args.first_nonfinite = &first;
        args.scale = 1.0;
        args.pointers[0] = grad.data();
        run(Kernel::kPack, DType::kFloat32, slot, args, 1);
        EXPECT_EQ(first, overflows ? 0 : INT_MAX) << name_of(slot);
        EXPECT_EQ(CpuCodec().first_nonfinite(bucket.data(), slot, 64), overflows ? 40 : -1) << name_of(slot);
      }
    }
  }
}

double squares(const std::vector<double>& values, double scale) {
  double sum = 0;
  for (const double value : values) sum += value * scale * value * scale;
  return sum;
}

std::vector<double> moderate_values(size_t numel) {
  std::vector<double> values(numel);
  for (size_t i = 0; i < numel; ++i) values[i] = static_cast<double>((i * 37) % 256) / 128.0 - 1.0;
  return values;
}

TEST(CodecCudaKernelsTest, PackGivesTheSumOfSquaresOfEachPiece) {
  for (const auto& [from, to] : served_pairs()) {
    for (const size_t skip : {0, 1}) {
      Memory grad(from, 9000, skip);
      grad.fill(moderate_values(9000));
      Memory bucket(to, 9000);
      const Piece pieces[] = {{0, 0, 8192, 0}, {8192, 8192, 808, 0}, {0, 0, 0, 0}};
      float norms[] = {-1.0f, -1.0f, -1.0f};
      CodecArgs args = {};
      args.bucket = bucket.data();
      args.pieces = pieces;
      args.partial_norms = norms;
      args.scale = 0.25;
      args.pointers[0] = grad.data();
      run(Kernel::kPack, from, to, args, 3);
      const std::vector<double> values = grad.values();
      const double first = squares({values.begin(), values.begin() + 8192}, 0.25);
      const double second = squares({values.begin() + 8192, values.end()}, 0.25);
      EXPECT_NEAR(norms[0] / first, 1.0, 1e-4) << text(from, to);
      EXPECT_NEAR(norms[1] / second, 1.0, 1e-4) << text(from, to);
      EXPECT_EQ(norms[2], 0.0f);
    }
  }
}

TEST(CodecCudaKernelsTest, TheNormOfFlatMemoryIsThatInFloat64ForAnyNumberOfBlocks) {
  for (const DType dtype : kTypes) {
    for (const size_t numel : {0, 1, 7, 1000, 20011}) {
      for (const unsigned blocks : {1u, 3u, 64u}) {
        for (const size_t skip : {0, 1}) {
          Memory memory(dtype, numel, skip);
          memory.fill(moderate_values(numel));
          std::vector<float> partials(blocks, -1.0f);
          float result = 2.0f;
          FlatArgs args = {};
          args.data = memory.data();
          args.numel = numel;
          args.partials = partials.data();
          run(Kernel::kSquaredNorm, dtype, args, blocks);
          args.partial_count = blocks;
          args.result = &result;
          run(Kernel::kSumPartials, dtype, args, 1);
          const double expected = 2.0 + squares(memory.values(), 1.0);
          // Unaligned, the one thread adds up to 20,011 squares one after the other.
          EXPECT_NEAR(result / expected, 1.0, numel > 1000 ? 3e-4 : 1e-5)
              << name_of(dtype) << " numel " << numel << " blocks " << blocks;
        }
      }
    }
  }
}

TEST(CodecCudaKernelsTest, ScaleMultipliesInPlaceAsTheCpuCodecDoes) {
  const float device_scale = 0.7f;
  for (const DType dtype : kTypes) {
    for (const size_t numel : {0, 1, 7, 1000, 20011}) {
      for (const unsigned blocks : {1u, 3u, 64u}) {
        for (const size_t skip : {0, 1}) {
          Memory memory(dtype, numel, skip);
          Memory expected(dtype, numel, skip);
          memory.fill(varied_values(dtype, numel, 9));
          const double factor = dtype == DType::kFloat64 ? 0.1 * static_cast<double>(device_scale)
                                                         : static_cast<double>(0.1f * device_scale);
          CpuCodec().pack(expected.data(), dtype, memory.data(), dtype, numel, factor);
          FlatArgs args = {};
          args.data = memory.data();
          args.numel = numel;
          args.device_scale = &device_scale;
          args.scale = 0.1;
          run(Kernel::kScale, dtype, args, blocks);
          EXPECT_TRUE(memory.everything() == expected.everything()) << name_of(dtype) << " numel " << numel;
        }
      }
    }
  }
}

TEST(CodecCudaKernelsTest, TwoRunsGiveTheSameNormBitForBit) {
  Memory memory(DType::kBFloat16, 20011);
  memory.fill(varied_values(DType::kFloat16, 20011, 4));
  std::vector<float> partials[2];
  for (std::vector<float>& run_partials : partials) {
    run_partials.assign(codec::flat_blocks(20011), -1.0f);
    FlatArgs args = {};
    args.data = memory.data();
    args.numel = 20011;
    args.partials = run_partials.data();
    run(Kernel::kSquaredNorm, DType::kBFloat16, args, codec::flat_blocks(20011));
  }
  EXPECT_EQ(std::memcmp(partials[0].data(), partials[1].data(), partials[0].size() * sizeof(float)), 0);
}

TEST(CodecCudaKernelsTest, BlocksForFlatMemoryAreAtLeastOneAndBounded) {
  EXPECT_EQ(codec::flat_blocks(0), 1u);
  EXPECT_EQ(codec::flat_blocks(1), 1u);
  EXPECT_EQ(codec::flat_blocks(codec::kPieceNumel + 1), 2u);
  EXPECT_EQ(codec::flat_blocks(codec::u64{1} << 40), codec::kMaxFlatBlocks);
}

TEST(CodecCudaKernelsTest, APairThatIsNotServedNamesBothTypes) {
  try {
    kernel_name(Kernel::kPack, DType::kFloat64, DType::kBFloat16);
    FAIL() << "no error";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("float64 to bfloat16"), std::string::npos) << error.what();
  }
  EXPECT_THROW(kernel_name(Kernel::kScale, DType::kInt32), UsageError);
  EXPECT_EQ(codec::host_kernel("pack_f64_bf16"), nullptr);
}

}  // namespace
}  // namespace gpucomm
