// The one source of the reduce, pack, first_nonfinite, checksum and (in step_body.h) step kernels, compiled once for
// each instruction set: the including file defines GPUCOMM_KERNEL_TABLE (the table to fill) and GPUCOMM_KERNEL_ISA (its
// name) and includes the half_rows_*.h of its choice.
//
// [Note: one instruction set per file] Everything here has internal linkage and nothing calls an inline function or a
// template of the standard library: the linker keeps one copy of such a function for the whole program, and that copy
// could be the one with AVX-512 in it. Compile with -ffp-contract=off: a fused multiply-add would round differently.
//
// Loops carry "GCC ivdep" because a destination may be one of the sources: same index, so no iteration depends on
// another, which the compiler cannot know.
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/checksum_lanes.h"
#include "kernels/kernel_tables.h"
#include "kernels/step_body.h"

namespace gpucomm {
namespace {

// What rounds to a 16-bit type as value itself does. From fp64: rounded to odd, that is toward zero with the last bit
// set if anything was lost (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums", 2008).
inline float float_before_16_bits(float value) { return value; }
inline float float_before_16_bits(double value) {
  const float nearest = static_cast<float>(value);
  const double back = nearest;
  const uint32_t too_large = __builtin_fabs(back) > __builtin_fabs(value) ? 1u : 0u;
  const uint32_t inexact = (back < value) | (back > value) ? 1u : 0u;
  return float_of((bits_of(nearest) - too_large) | inexact);
}

// Element types: how a value is stored and the type that it is computed in.

// float16 goes through rows of fp32, for there are instructions that convert several elements at once.
struct Float16 {
  using Storage = uint16_t;
  static constexpr bool kInRows = true;
};

struct BFloat16 {
  using Storage = uint16_t;
  using Wide = float;
  static constexpr bool kInRows = false;
  static Wide load(Storage x) { return bfloat_to_float(x); }
  static Storage store(float x) { return float_to_bfloat(x); }
  static Storage store(double x) { return float_to_bfloat(float_before_16_bits(x)); }
};

template <class T>
struct Float {
  using Storage = T;
  using Wide = T;
  static constexpr bool kInRows = false;
  static Wide load(Storage x) { return x; }
  static Storage store(float x) { return static_cast<Storage>(x); }
  static Storage store(double x) { return static_cast<Storage>(x); }
};

using Float32 = Float<float>;
using Float64 = Float<double>;

// T wraps in Unsigned; an average accumulates in Wide, modulo 2^64 in WideUnsigned.
template <class T, class UnsignedT, class WideT, class WideUnsignedT>
struct Integer {
  using Storage = T;
  using Unsigned = UnsignedT;
  using Wide = WideT;
  using WideUnsigned = WideUnsignedT;
};

using Int32 = Integer<int32_t, uint32_t, int64_t, uint64_t>;
using Int64 = Integer<int64_t, uint64_t, int64_t, uint64_t>;
using UInt8 = Integer<uint8_t, uint8_t, uint32_t, uint32_t>;

// Reductions: the contribution of one element, how two combine, and how the last accumulator becomes an element.

template <class Element>
struct FloatReduction {
  using Storage = typename Element::Storage;
  using Accumulator = typename Element::Wide;
  static Accumulator contribution(Storage x, Accumulator scale) { return Element::load(x) * scale; }
  static Storage finish(Accumulator sum, int) { return Element::store(sum); }
};

template <class Element>
struct FloatSum : FloatReduction<Element> {
  using Wide = typename Element::Wide;
  static Wide combine(Wide a, Wide b) { return a + b; }
};

template <class Element>
struct FloatProd : FloatReduction<Element> {
  using Wide = typename Element::Wide;
  static Wide combine(Wide a, Wide b) { return a * b; }
};

// A NaN on either side wins; of equal values (-0 and 0) the earlier source's.
template <class Element>
struct FloatMin : FloatReduction<Element> {
  using Wide = typename Element::Wide;
  static Wide combine(Wide a, Wide b) { return ((b < a) | (b != b)) ? b : a; }
};

template <class Element>
struct FloatMax : FloatReduction<Element> {
  using Wide = typename Element::Wide;
  static Wide combine(Wide a, Wide b) { return ((b > a) | (b != b)) ? b : a; }
};

template <class Element>
struct IntegerSum {
  using Storage = typename Element::Storage;
  using Accumulator = typename Element::Unsigned;
  static Accumulator contribution(Storage x, Accumulator) { return static_cast<Accumulator>(x); }
  static Accumulator combine(Accumulator a, Accumulator b) { return static_cast<Accumulator>(a + b); }
  static Storage finish(Accumulator sum, int) { return static_cast<Storage>(sum); }
};

template <class Element>
struct IntegerProd : IntegerSum<Element> {
  using Accumulator = typename Element::Unsigned;
  static Accumulator combine(Accumulator a, Accumulator b) { return static_cast<Accumulator>(a * b); }
};

template <class Element>
struct IntegerAvg {
  using Storage = typename Element::Storage;
  using Accumulator = typename Element::WideUnsigned;
  static Accumulator contribution(Storage x, Accumulator) {
    return static_cast<Accumulator>(static_cast<typename Element::Wide>(x));
  }
  static Accumulator combine(Accumulator a, Accumulator b) { return a + b; }
  static Storage finish(Accumulator sum, int count) {
    using Wide = typename Element::Wide;
    return static_cast<Storage>(static_cast<Wide>(sum) / static_cast<Wide>(count));
  }
};

template <class Element>
struct IntegerMin {
  using Storage = typename Element::Storage;
  using Accumulator = Storage;
  static Accumulator contribution(Storage x, Accumulator) { return x; }
  static Accumulator combine(Accumulator a, Accumulator b) { return b < a ? b : a; }
  static Storage finish(Accumulator value, int) { return value; }
};

template <class Element>
struct IntegerMax : IntegerMin<Element> {
  using Accumulator = typename Element::Storage;
  static Accumulator combine(Accumulator a, Accumulator b) { return b > a ? b : a; }
};

// Accumulators of one block stay in the L1 cache while the sources pass by.
constexpr size_t kBlockNumel = 1024;

template <class Reduction>
struct Reduce {
  using Storage = typename Reduction::Storage;
  using Accumulator = typename Reduction::Accumulator;

  static void one_source(const Storage* a, Storage* out, size_t numel, Accumulator scale) {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) out[i] = Reduction::finish(Reduction::contribution(a[i], scale), 1);
  }

  static void two_sources(const Storage* a, const Storage* b, Storage* out, size_t numel, Accumulator scale) {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) {
      out[i] = Reduction::finish(
          Reduction::combine(Reduction::contribution(a[i], scale), Reduction::contribution(b[i], scale)), 2);
    }
  }

  // The hot shape: two ranks, in place.
  static void two_sources_to_two(const Storage* a, const Storage* b, Storage* out0, Storage* out1, size_t numel,
                                 Accumulator scale) {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) {
      const Storage result = Reduction::finish(
          Reduction::combine(Reduction::contribution(a[i], scale), Reduction::contribution(b[i], scale)), 2);
      out0[i] = result;
      out1[i] = result;
    }
  }

  // Not inlined: GCC would interleave the loops over sources and over elements and lose the vectors (a fifth of the
  // speed from six sources on).
  [[gnu::noinline]] static void accumulate(Accumulator* sum, const Storage* next, size_t numel, Accumulator scale) {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) sum[i] = Reduction::combine(sum[i], Reduction::contribution(next[i], scale));
  }

  // Three sources or more, at most kBlockNumel elements.
  static void block(const void* const* src, int src_count, size_t begin, Storage* out, size_t numel,
                    Accumulator scale) {
    alignas(64) Accumulator sum[kBlockNumel];
    const Storage* a = static_cast<const Storage*>(src[0]) + begin;
    const Storage* b = static_cast<const Storage*>(src[1]) + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) {
      sum[i] = Reduction::combine(Reduction::contribution(a[i], scale), Reduction::contribution(b[i], scale));
    }
    for (int s = 2; s < src_count - 1; ++s) accumulate(sum, static_cast<const Storage*>(src[s]) + begin, numel, scale);
    const Storage* last = static_cast<const Storage*>(src[src_count - 1]) + begin;
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) {
      out[i] = Reduction::finish(Reduction::combine(sum[i], Reduction::contribution(last[i], scale)), src_count);
    }
  }

  static void run(const void* const* src, int src_count, void* const* dst, int dst_count, size_t numel, double scale) {
    const Accumulator wide_scale = static_cast<Accumulator>(scale);
    const Storage* src0 = static_cast<const Storage*>(src[0]);
    if (src_count == 2 && dst_count == 2) {
      two_sources_to_two(src0, static_cast<const Storage*>(src[1]), static_cast<Storage*>(dst[0]),
                         static_cast<Storage*>(dst[1]), numel, wide_scale);
      return;
    }
    for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
      const size_t count = numel - begin < kBlockNumel ? numel - begin : kBlockNumel;
      Storage* out = static_cast<Storage*>(dst[0]) + begin;
      if (src_count == 1) {
        one_source(src0 + begin, out, count, wide_scale);
      } else if (src_count == 2) {
        two_sources(src0 + begin, static_cast<const Storage*>(src[1]) + begin, out, count, wide_scale);
      } else {
        block(src, src_count, begin, out, count, wide_scale);
      }
      for (int d = 1; d < dst_count; ++d) {
        std::memcpy(static_cast<Storage*>(dst[d]) + begin, out, count * sizeof(Storage));
      }
    }
  }
};

// Reduces float16 as fp32, block by block: widened, reduced with the scale, narrowed.
template <class Reduction>
struct Widened {
  static void run(const void* const* src, int src_count, void* const* dst, int dst_count, size_t numel, double scale) {
    const float float_scale = static_cast<float>(scale);
    alignas(64) float sum[kBlockNumel];
    alignas(64) float next[kBlockNumel];
    for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
      const size_t count = numel - begin < kBlockNumel ? numel - begin : kBlockNumel;
      widen_halves(sum, static_cast<const uint16_t*>(src[0]) + begin, count);
      for (size_t i = 0; i < count; ++i) sum[i] *= float_scale;
      for (int s = 1; s < src_count; ++s) {
        widen_halves(next, static_cast<const uint16_t*>(src[s]) + begin, count);
        Reduce<Reduction>::accumulate(sum, next, count, float_scale);
      }
      uint16_t* out = static_cast<uint16_t*>(dst[0]) + begin;
      narrow_to_halves(out, sum, count);
      for (int d = 1; d < dst_count; ++d) {
        std::memcpy(static_cast<uint16_t*>(dst[d]) + begin, out, count * sizeof(uint16_t));
      }
    }
  }
};

// Pack: the product is taken in fp64 if either side is, else in fp32, and rounded once to what is stored.

template <class To, class From>
struct Product {
  using Wide = float;
};
template <class To>
struct Product<To, Float64> {
  using Wide = double;
};
template <class From>
struct Product<Float64, From> {
  using Wide = double;
};
template <>
struct Product<Float64, Float64> {
  using Wide = double;
};

template <class To, class From, class Wide = typename Product<To, From>::Wide>
void pack_row(typename To::Storage* out, const typename From::Storage* in, size_t numel, Wide scale) {
  if constexpr (From::kInRows || To::kInRows) {
    alignas(64) float row[kBlockNumel];
    for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
      const size_t count = numel - begin < kBlockNumel ? numel - begin : kBlockNumel;
      if constexpr (From::kInRows) {
        widen_halves(row, in + begin, count);
        pack_row<To, Float32>(out + begin, row, count, scale);
      } else {
        for (size_t i = 0; i < count; ++i) {
          row[i] = float_before_16_bits(static_cast<Wide>(From::load(in[begin + i])) * scale);
        }
        narrow_to_halves(out + begin, row, count);
      }
    }
  } else {
#pragma GCC ivdep
    for (size_t i = 0; i < numel; ++i) out[i] = To::store(static_cast<Wide>(From::load(in[i])) * scale);
  }
}

template <class To, class From>
void pack(void* dst, const void* src, size_t numel, double scale) {
  pack_row<To, From>(static_cast<typename To::Storage*>(dst), static_cast<const typename From::Storage*>(src), numel,
                     static_cast<typename Product<To, From>::Wide>(scale));
}

template <class Element>
void pack_same(void* dst, const void* src, size_t numel, double scale) {
  if (scale != 1.0) {
    pack<Element, Element>(dst, src, numel, scale);
  } else if (dst != src && numel > 0) {
    std::memcpy(dst, src, numel * sizeof(typename Element::Storage));
  }
}

// Inf and NaN are the numbers whose exponent is all ones: without the sign, one unit in the exponent's last place
// carries into the sign's place. A sum and no comparison, because not every instruction set compares 64 bits.
template <class Bits, int kMantissaBits>
int64_t first_nonfinite(const void* src, size_t numel) {
  constexpr Bits kSign = static_cast<Bits>(Bits{1} << (8 * sizeof(Bits) - 1));
  constexpr Bits kMagnitude = static_cast<Bits>(~kSign);
  constexpr Bits kUnit = static_cast<Bits>(Bits{1} << kMantissaBits);
  const Bits* in = static_cast<const Bits*>(src);
  for (size_t begin = 0; begin < numel; begin += kBlockNumel) {
    const size_t end = numel - begin < kBlockNumel ? numel : begin + kBlockNumel;
    Bits found = 0;
    for (size_t i = begin; i < end; ++i) {
      found = static_cast<Bits>(found | static_cast<Bits>((in[i] & kMagnitude) + kUnit));
    }
    if ((found & kSign) == 0) continue;
    size_t i = begin;
    while ((((in[i] & kMagnitude) + kUnit) & kSign) == 0) ++i;
    return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace

#define GPUCOMM_HALF_REDUCE                                                                           \
  {Widened<FloatSum<Float32>>::run, Widened<FloatSum<Float32>>::run, Widened<FloatMin<Float32>>::run, \
   Widened<FloatMax<Float32>>::run, Widened<FloatProd<Float32>>::run}
#define GPUCOMM_FLOAT_REDUCE(Element)                                                              \
  {Reduce<FloatSum<Element>>::run, Reduce<FloatSum<Element>>::run, Reduce<FloatMin<Element>>::run, \
   Reduce<FloatMax<Element>>::run, Reduce<FloatProd<Element>>::run}
#define GPUCOMM_INTEGER_REDUCE(Element)                                                                  \
  {Reduce<IntegerSum<Element>>::run, Reduce<IntegerAvg<Element>>::run, Reduce<IntegerMin<Element>>::run, \
   Reduce<IntegerMax<Element>>::run, Reduce<IntegerProd<Element>>::run}

// Rows in the order of DType, columns in the order of ReduceOp.
constexpr Kernels GPUCOMM_KERNEL_TABLE = {
    GPUCOMM_KERNEL_ISA,
    {GPUCOMM_HALF_REDUCE, GPUCOMM_FLOAT_REDUCE(BFloat16), GPUCOMM_FLOAT_REDUCE(Float32), GPUCOMM_FLOAT_REDUCE(Float64),
     GPUCOMM_INTEGER_REDUCE(Int32), GPUCOMM_INTEGER_REDUCE(Int64), GPUCOMM_INTEGER_REDUCE(UInt8)},
    {{pack_same<Float16>, pack<Float16, BFloat16>, pack<Float16, Float32>, pack<Float16, Float64>},
     {pack<BFloat16, Float16>, pack_same<BFloat16>, pack<BFloat16, Float32>, pack<BFloat16, Float64>},
     {pack<Float32, Float16>, pack<Float32, BFloat16>, pack_same<Float32>, pack<Float32, Float64>},
     {pack<Float64, Float16>, pack<Float64, BFloat16>, pack<Float64, Float32>, pack_same<Float64>}},
    {first_nonfinite<uint16_t, 10>, first_nonfinite<uint16_t, 7>, first_nonfinite<uint32_t, 23>,
     first_nonfinite<uint64_t, 52>},
    checksum,
    {GPUCOMM_STEP_RULES(float), GPUCOMM_STEP_RULES(double)},
};

}  // namespace gpucomm
