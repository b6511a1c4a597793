// Every (dtype, op, table) and every conversion against plain scalar arithmetic that shares nothing with the kernels:
// 16-bit values are decoded by formula and rounded by search among all of them.
#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace gpucomm {
namespace {

// A 16-bit format by its definition: sign, exponent bits, mantissa bits.
struct SmallFloat {
  int exponent_bits;
  int mantissa_bits;
  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  uint16_t infinity() const { return static_cast<uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits); }
  bool is_nan(uint16_t bits) const { return (bits & 0x7fff) > infinity(); }

  double decode(uint16_t bits) const {
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    if ((bits & 0x7fff) == infinity()) return sign * std::numeric_limits<double>::infinity();
    if (is_nan(bits)) return std::copysign(std::numeric_limits<double>::quiet_NaN(), sign);
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return sign * std::ldexp((1 << mantissa_bits) + mantissa, exponent - bias() - mantissa_bits);
  }

  // Nearest, ties to even: magnitudes are ordered as their bits are; infinity stands for the next power of two.
  uint16_t encode(double value) const {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    if (std::isnan(value)) return static_cast<uint16_t>(sign | 0x7fff);
    const double magnitude = std::fabs(value);
    uint16_t low = 0, high = infinity();
    const double top = std::ldexp(1.0, bias() + 1);
    if (magnitude >= top) return static_cast<uint16_t>(sign | high);
    while (high - low > 1) {
      const uint16_t middle = static_cast<uint16_t>((low + high) / 2);
      (decode(middle) <= magnitude ? low : high) = middle;
    }
    const double below = magnitude - decode(low);
    const double above = (high == infinity() ? top : decode(high)) - magnitude;
    const bool up = above < below || (above == below && (low & 1));
    return static_cast<uint16_t>(sign | (up ? high : low));
  }
};

constexpr SmallFloat kHalf = {5, 10};
constexpr SmallFloat kBFloat = {8, 7};

// How each dtype is stored, read and rounded in the reference.
template <DType kDType>
struct Reference;

template <>
struct Reference<DType::kFloat16> {
  using Storage = uint16_t;
  using Wide = float;
  static Wide load(Storage x) { return static_cast<float>(kHalf.decode(x)); }
  static Storage store(double x) { return kHalf.encode(x); }
  static bool is_nan(Storage x) { return kHalf.is_nan(x); }
};
template <>
struct Reference<DType::kBFloat16> {
  using Storage = uint16_t;
  using Wide = float;
  static Wide load(Storage x) { return static_cast<float>(kBFloat.decode(x)); }
  static Storage store(double x) { return kBFloat.encode(x); }
  static bool is_nan(Storage x) { return kBFloat.is_nan(x); }
};
template <>
struct Reference<DType::kFloat32> {
  using Storage = float;
  using Wide = float;
  static Wide load(Storage x) { return x; }
  static Storage store(double x) { return static_cast<float>(x); }
  static bool is_nan(Storage x) { return std::isnan(x); }
};
template <>
struct Reference<DType::kFloat64> {
  using Storage = double;
  using Wide = double;
  static Wide load(Storage x) { return x; }
  static Storage store(double x) { return x; }
  static bool is_nan(Storage x) { return std::isnan(x); }
};
template <class T>
struct IntegerReference {
  using Storage = T;
  using Wide = T;
  static bool is_nan(T) { return false; }
};
template <>
struct Reference<DType::kInt32> : IntegerReference<int32_t> {};
template <>
struct Reference<DType::kInt64> : IntegerReference<int64_t> {};
template <>
struct Reference<DType::kUInt8> : IntegerReference<uint8_t> {};

template <DType kDType>
typename Reference<kDType>::Storage reduce_one(ReduceOp op, const std::vector<typename Reference<kDType>::Storage>& x,
                                               double scale) {
  using R = Reference<kDType>;
  using Wide = typename R::Wide;
  if constexpr (is_floating(kDType)) {
    volatile Wide result = R::load(x[0]) * static_cast<Wide>(scale);  // volatile: no fused multiply-add here either
    for (size_t s = 1; s < x.size(); ++s) {
      volatile const Wide next = R::load(x[s]) * static_cast<Wide>(scale);
      const Wide a = result, b = next;
      switch (op) {
        case ReduceOp::kSum:
        case ReduceOp::kAvg:
          result = a + b;
          break;
        case ReduceOp::kMin:
          result = std::isnan(a) ? a : std::isnan(b) ? b : std::min(a, b);
          break;
        case ReduceOp::kMax:
          result = std::isnan(a) ? a : std::isnan(b) ? b : std::max(a, b);
          break;
        case ReduceOp::kProd:
          result = a * b;
          break;
      }
    }
    return R::store(result);
  } else {
    using T = typename R::Storage;
    __extension__ using Exact = __int128;
    Exact result = x[0];
    for (size_t s = 1; s < x.size(); ++s) {
      switch (op) {
        case ReduceOp::kSum:
        case ReduceOp::kAvg:
          result += x[s];
          break;
        case ReduceOp::kMin:
          result = std::min<Exact>(result, x[s]);
          break;
        case ReduceOp::kMax:
          result = std::max<Exact>(result, x[s]);
          break;
        case ReduceOp::kProd:
          result = static_cast<int64_t>(static_cast<uint64_t>(result) * static_cast<uint64_t>(x[s]));
          break;
      }
    }
    if (op == ReduceOp::kAvg) {
      return static_cast<T>(static_cast<int64_t>(result) / static_cast<int64_t>(x.size()));  // the sum wraps in int64
    }
    return static_cast<T>(static_cast<uint64_t>(result));
  }
}

// Ordinary values, and now and then an extreme one.
template <DType kDType>
typename Reference<kDType>::Storage value_at(std::mt19937_64& random) {
  using R = Reference<kDType>;
  const uint64_t bits = random();
  if constexpr (is_floating(kDType)) {
    if (bits % 8 == 0) {
      const double special[] = {0.0,
                                -0.0,
                                std::numeric_limits<double>::infinity(),
                                -std::numeric_limits<double>::infinity(),
                                std::numeric_limits<double>::quiet_NaN(),
                                65504.0,
                                65520.0,
                                3.38e38,
                                -3.4e38,
                                6e-8,
                                -1e-40,
                                1e-45};
      return R::store(special[(bits >> 8) % std::size(special)]);
    }
    return R::store(static_cast<double>(static_cast<int64_t>(bits)) / 9.3e17);
  } else {
    using T = typename R::Storage;
    if (bits % 8 == 0) return bits & 256 ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
    return static_cast<T>(bits >> 5);
  }
}

// Equal bits, or both NaN: which NaN comes out of an addition is the processor's choice.
template <DType kDType, class T = typename Reference<kDType>::Storage>
void expect_same(const std::vector<T>& got, const std::vector<T>& expected, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    if (Reference<kDType>::is_nan(got[i]) && Reference<kDType>::is_nan(expected[i])) continue;
    ASSERT_EQ(std::memcmp(&got[i], &expected[i], sizeof(T)), 0)
        << what << ": element " << i << " is " << +got[i] << ", expected " << +expected[i];
  }
}

template <class Constant>
class ReduceTest : public testing::Test {};

template <DType kDType>
using Constant = std::integral_constant<DType, kDType>;
using DTypes = testing::Types<Constant<DType::kFloat16>, Constant<DType::kBFloat16>, Constant<DType::kFloat32>,
                              Constant<DType::kFloat64>, Constant<DType::kInt32>, Constant<DType::kInt64>,
                              Constant<DType::kUInt8>>;

struct DTypeName {
  template <class T>
  static std::string GetName(int) {
    return std::string(name_of(T::value));
  }
};
TYPED_TEST_SUITE(ReduceTest, DTypes, DTypeName);

constexpr size_t kSizes[] = {0, 1, 7, 31, 64, 1000, 4097};
constexpr int kSourceCounts[] = {1, 2, 3, 4, 8};

// One reduction with src_count sources, offset elements into their buffers; dst_count of them are written in place when
// in_place, else separate memory. Checks the result, the guard elements around it and the sources.
template <DType kDType>
void check_reduce(const Kernels& table, ReduceOp op, size_t numel, int src_count, int dst_count, size_t offset,
                  bool in_place, double scale) {
  using T = typename Reference<kDType>::Storage;
  const std::string what = std::string(table.isa) + " " + std::string(name_of(kDType)) + " " +
                           std::string(name_of(op)) + " numel " + std::to_string(numel) + " sources " +
                           std::to_string(src_count) + " destinations " + std::to_string(dst_count) + " offset " +
                           std::to_string(offset) + (in_place ? " in place" : "");
  std::mt19937_64 random(numel * 131 + static_cast<size_t>(src_count));
  std::vector<std::vector<T>> sources(static_cast<size_t>(src_count));
  for (auto& source : sources) {
    source.resize(offset + numel + 1);
    for (T& x : source) x = value_at<kDType>(random);
  }
  std::vector<T> expected(numel);
  for (size_t i = 0; i < numel; ++i) {
    std::vector<T> column;
    for (const auto& source : sources) column.push_back(source[offset + i]);
    expected[i] = reduce_one<kDType>(op, column, scale);
  }

  std::vector<std::vector<T>> separate(static_cast<size_t>(dst_count), std::vector<T>(offset + numel + 1, T(77)));
  const auto before = sources;
  auto& written = in_place ? sources : separate;
  const auto guards = written;
  std::vector<const void*> src;
  std::vector<void*> dst;
  for (auto& source : sources) src.push_back(source.data() + offset);
  for (int d = 0; d < dst_count; ++d) dst.push_back(written[static_cast<size_t>(d)].data() + offset);
  table.reduce[static_cast<int>(kDType)][static_cast<int>(op)](src.data(), src_count, dst.data(), dst_count, numel,
                                                               scale);

  for (size_t d = 0; d < static_cast<size_t>(dst_count); ++d) {
    std::vector<T> got(written[d].begin() + static_cast<ptrdiff_t>(offset), written[d].end() - 1);
    expect_same<kDType>(got, expected, what);
    for (size_t i = 0; i < offset; ++i) ASSERT_EQ(std::memcmp(&written[d][i], &guards[d][i], sizeof(T)), 0) << what;
    ASSERT_EQ(std::memcmp(&written[d].back(), &guards[d].back(), sizeof(T)), 0) << what;
  }
  for (size_t s = in_place ? static_cast<size_t>(dst_count) : 0; s < sources.size(); ++s) {
    ASSERT_EQ(std::memcmp(sources[s].data(), before[s].data(), before[s].size() * sizeof(T)), 0) << what;
  }
}

TYPED_TEST(ReduceTest, EqualsTheScalarReferenceInEveryTable) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      for (const int src_count : kSourceCounts) {
        for (const size_t numel : kSizes) {
          const double scale = op == static_cast<int>(ReduceOp::kAvg) ? 1.0 / src_count : 1.0;
          check_reduce<TypeParam::value>(kernel_table(t), static_cast<ReduceOp>(op), numel, src_count, 1, 0, false,
                                         scale);
          if (this->HasFatalFailure()) return;
        }
      }
    }
  }
}

TYPED_TEST(ReduceTest, WritesSourcesInPlaceAtAnyElementOffset) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    for (int op = 0; op < kReduceOpCount; ++op) {
      for (const int src_count : kSourceCounts) {
        for (size_t offset = 0; offset < 9; offset += 1 + offset) {
          for (const int dst_count : {1, 2, src_count}) {
            if (dst_count > src_count) continue;
            check_reduce<TypeParam::value>(kernel_table(t), static_cast<ReduceOp>(op), 133, src_count, dst_count,
                                           offset, true, 1.0);
            if (this->HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

// 1/3 is inexact, so a fused multiply-add, or scaling the sum instead, would show.
TYPED_TEST(ReduceTest, ScalesEachContributionBeforeItIsAdded) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProd}) {
      for (const int src_count : kSourceCounts) {
        check_reduce<TypeParam::value>(kernel_table(t), op, 1000, src_count, std::min(src_count, 2), 1, true,
                                       1.0 / 3.0);
        if (this->HasFatalFailure()) return;
      }
    }
  }
}

TEST(ReduceTest, IntegerAverageTruncatesTowardZero) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    const int32_t a[] = {-3, 3, -1, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
    const int32_t b[] = {0, 0, 0, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min()};
    int32_t out[5];
    const void* src[] = {a, b};
    void* dst[] = {out};
    kernel_table(t).reduce[static_cast<int>(DType::kInt32)][static_cast<int>(ReduceOp::kAvg)](src, 2, dst, 1, 5, 0.5);
    EXPECT_EQ(std::vector<int32_t>(out, out + 5), (std::vector<int32_t>{-1, 1, 0, std::numeric_limits<int32_t>::max(),
                                                                        std::numeric_limits<int32_t>::min()}));
  }
}

TEST(ReduceTest, HalfSumsRoundOnceFromFp32) {
  // 2048 + 1 + 1: rounding after each addition would leave 2048.
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    const uint16_t a = kHalf.encode(2048), b = kHalf.encode(1);
    uint16_t out = 0;
    const void* src[] = {&a, &b, &b};
    void* dst[] = {&out};
    kernel_table(t).reduce[static_cast<int>(DType::kFloat16)][static_cast<int>(ReduceOp::kSum)](src, 3, dst, 1, 1, 1.0);
    EXPECT_EQ(kHalf.decode(out), 2050.0);
  }
}

// ---- pack ----

constexpr DType kFloatTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};

template <class Visitor>
void for_each_float_type(Visitor visit) {
  visit(Constant<DType::kFloat16>{});
  visit(Constant<DType::kBFloat16>{});
  visit(Constant<DType::kFloat32>{});
  visit(Constant<DType::kFloat64>{});
}

template <DType kTo, DType kFrom>
void check_pack(const std::vector<typename Reference<kFrom>::Storage>& in, double scale, size_t offset = 0) {
  using To = typename Reference<kTo>::Storage;
  constexpr bool kDouble = kTo == DType::kFloat64 || kFrom == DType::kFloat64;
  const size_t numel = in.size() - offset;
  std::vector<To> expected(numel);
  for (size_t i = 0; i < numel; ++i) {
    const auto x = Reference<kFrom>::load(in[offset + i]);
    const double product = kDouble ? static_cast<double>(x) * scale
                                   : static_cast<double>(static_cast<float>(x) * static_cast<float>(scale));
    expected[i] = Reference<kTo>::store(product);
  }
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    std::vector<To> out(numel + 1, To(77));
    kernel_table(t).pack[static_cast<int>(kTo)][static_cast<int>(kFrom)](out.data(), in.data() + offset, numel, scale);
    EXPECT_EQ(out.back(), To(77));
    out.pop_back();
    expect_same<kTo>(out, expected,
                     std::string(kernel_table(t).isa) + " " + std::string(name_of(kFrom)) + " to " +
                         std::string(name_of(kTo)) + " scale " + std::to_string(scale));
  }
}

template <DType kFrom>
void check_pack_to_all(const std::vector<typename Reference<kFrom>::Storage>& in) {
  for_each_float_type([&](auto to) {
    for (const double scale : {1.0, 0.5, 1.0 / 3.0, -1e-3, 3e4}) check_pack<to.value, kFrom>(in, scale);
  });
}

std::vector<uint16_t> all_patterns() {
  std::vector<uint16_t> patterns(65536);
  for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
  return patterns;
}

TEST(PackTest, EveryFloat16PatternConvertsToEveryType) { check_pack_to_all<DType::kFloat16>(all_patterns()); }
TEST(PackTest, EveryBFloat16PatternConvertsToEveryType) { check_pack_to_all<DType::kBFloat16>(all_patterns()); }

// Around each 16-bit value and each midpoint between two of them, one step to either side in the source type.
template <class T>
std::vector<T> around_rounding_points(const SmallFloat& format) {
  std::vector<T> points;
  for (uint16_t bits = 0; bits <= format.infinity(); ++bits) {
    const double low = format.decode(bits);
    const double high = bits + 1 >= format.infinity() ? std::ldexp(1.0, format.bias() + 1)
                                                      : format.decode(static_cast<uint16_t>(bits + 1));
    for (const double point : {low, low + (high - low) / 2}) {
      const T x = static_cast<T>(point);
      for (const T y : {std::nextafter(x, T(0)), x, std::nextafter(x, std::numeric_limits<T>::infinity())}) {
        points.push_back(y);
        points.push_back(-y);
      }
    }
  }
  return points;
}

TEST(PackTest, RoundsHalfwayCasesToEvenOnce) {
  for (const double scale : {1.0, 0.5}) {
    check_pack<DType::kFloat16, DType::kFloat32>(around_rounding_points<float>(kHalf), scale);
    check_pack<DType::kFloat16, DType::kFloat64>(around_rounding_points<double>(kHalf), scale);
    check_pack<DType::kBFloat16, DType::kFloat32>(around_rounding_points<float>(kBFloat), scale);
    check_pack<DType::kBFloat16, DType::kFloat64>(around_rounding_points<double>(kBFloat), scale);
  }
}

template <class T, class Bits>
std::vector<T> random_patterns(size_t count) {
  std::mt19937_64 random(count);
  std::vector<T> values(count);
  for (T& value : values) value = std::bit_cast<T>(static_cast<Bits>(random()));
  return values;
}

TEST(PackTest, RandomBitPatternsOfFp32AndFp64ConvertToEveryType) {
  check_pack_to_all<DType::kFloat32>(random_patterns<float, uint32_t>(20011));
  check_pack_to_all<DType::kFloat64>(random_patterns<double, uint64_t>(20011));
}

TEST(PackTest, AnySizeAndOffset) {
  for_each_float_type([](auto from) {
    for (const size_t numel : kSizes) {
      for (size_t offset = 0; offset < 4; ++offset) {
        std::mt19937_64 random(numel);
        std::vector<typename Reference<from.value>::Storage> in(numel + offset);
        for (auto& x : in) x = value_at<from.value>(random);
        for_each_float_type([&](auto to) { check_pack<to.value, from.value>(in, 0.25, offset); });
      }
    }
  });
}

TEST(PackTest, ScaleOneBetweenEqualTypesCopiesTheBitsOfNan) {
  const uint32_t in[] = {0x7f800001u, 0xffc12345u, 0x00000001u};  // signalling, with payload, subnormal
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    uint32_t out[3] = {};
    kernel_table(t).pack[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kFloat32)](out, in, 3, 1.0);
    EXPECT_EQ(std::memcmp(in, out, sizeof in), 0);
  }
}

TEST(PackTest, EveryTableGivesTheSameNanBits) {
  const auto fp32 = random_patterns<uint32_t, uint32_t>(20011);
  const auto half = all_patterns();
  const auto run = [](const Kernels& table, DType to, DType from, const void* in, size_t numel) {
    std::vector<unsigned char> out(numel * size_of(to));
    table.pack[static_cast<int>(to)][static_cast<int>(from)](out.data(), in, numel, 0.5);
    return out;
  };
  for (size_t t = 1; t < kernel_table_count(); ++t) {
    for (const DType type : {DType::kFloat16, DType::kBFloat16}) {
      EXPECT_EQ(run(kernel_table(t), DType::kFloat32, type, half.data(), half.size()),
                run(kernel_table(0), DType::kFloat32, type, half.data(), half.size()));
      EXPECT_EQ(run(kernel_table(t), type, DType::kFloat32, fp32.data(), fp32.size()),
                run(kernel_table(0), type, DType::kFloat32, fp32.data(), fp32.size()));
    }
  }
}

TEST(PackTest, InPlaceScalesInPlace) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    std::vector<float> x(1001);
    for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i);
    kernel_table(t).pack[static_cast<int>(DType::kFloat32)][static_cast<int>(DType::kFloat32)](x.data(), x.data(),
                                                                                               x.size(), 0.5);
    for (size_t i = 0; i < x.size(); ++i) ASSERT_EQ(x[i], static_cast<float>(i) / 2);
  }
}

// ---- first_nonfinite ----

TEST(FirstNonfiniteTest, TheFirstBadElementIsFoundWhereverItIs) {
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    for_each_float_type([&](auto type) {
      using R = Reference<type.value>;
      const auto first_nonfinite = kernel_table(t).first_nonfinite[static_cast<int>(type.value)];
      for (const size_t numel : kSizes) {
        std::vector<typename R::Storage> x(numel, R::store(type.value == DType::kFloat16 ? -65504.0 : -3.38e38));
        EXPECT_EQ(first_nonfinite(x.data(), numel), -1);
        for (const size_t at : {size_t{0}, numel / 2, numel - 1}) {
          if (at >= numel) continue;
          for (const double bad : {HUGE_VAL, -HUGE_VAL, std::nan("")}) {
            const auto good = x[at];
            x[at] = R::store(bad);
            EXPECT_EQ(first_nonfinite(x.data(), numel), static_cast<int64_t>(at)) << "numel " << numel;
            const auto last = x[numel - 1];
            x[numel - 1] = R::store(HUGE_VAL);
            EXPECT_EQ(first_nonfinite(x.data(), numel), static_cast<int64_t>(at)) << "numel " << numel;
            x[numel - 1] = last;
            x[at] = good;
          }
        }
      }
    });
  }
}

TEST(FirstNonfiniteTest, EveryPatternOf16BitsIsJudgedByItsExponent) {
  const auto patterns = all_patterns();
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    for (const auto& [type, format] : {std::pair{DType::kFloat16, kHalf}, std::pair{DType::kBFloat16, kBFloat}}) {
      const auto first_nonfinite = kernel_table(t).first_nonfinite[static_cast<int>(type)];
      for (const uint16_t& bits : patterns) {
        EXPECT_EQ(first_nonfinite(&bits, 1), (bits & 0x7fff) >= format.infinity() ? 0 : -1) << bits;
      }
    }
  }
}

TEST(FirstNonfiniteTest, RandomPatternsOfFp32AndFp64AreJudgedAsTheLibraryDoes) {
  const auto fp32 = random_patterns<float, uint32_t>(20011);
  const auto fp64 = random_patterns<double, uint64_t>(20011);
  const auto expected = [](const auto& x) {
    const auto found = std::find_if(x.begin(), x.end(), [](auto value) { return !std::isfinite(value); });
    return found == x.end() ? -1 : found - x.begin();
  };
  ASSERT_GE(expected(fp32), 0);
  for (size_t t = 0; t < kernel_table_count(); ++t) {
    const auto& kernels = kernel_table(t).first_nonfinite;
    EXPECT_EQ(kernels[static_cast<int>(DType::kFloat32)](fp32.data(), fp32.size()), expected(fp32));
    EXPECT_EQ(kernels[static_cast<int>(DType::kFloat64)](fp64.data(), fp64.size()), expected(fp64));
  }
}

TEST(KernelTableTest, TheBestTableIsTheLastAndTheBaselineTheFirst) {
  ASSERT_GE(kernel_table_count(), 1u);
  EXPECT_EQ(kernel_table(0).isa, "baseline");
  EXPECT_EQ(&kernels(), &kernel_table(kernel_table_count() - 1));
  for (const DType type : kFloatTypes) EXPECT_NE(kernels().first_nonfinite[static_cast<int>(type)], nullptr);
}

}  // namespace
}  // namespace gpucomm
