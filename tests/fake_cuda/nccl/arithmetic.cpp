#include "fake_cuda/nccl/arithmetic.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels/half_bits.h"

namespace fake_nccl {
namespace {

// How a type is stored (Stored) and computed in (Value); every result is stored, and so rounded.
struct Half {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored stored) { return gpucomm::half_to_float(stored); }
  static Stored store(Value value) { return gpucomm::float_to_half(value); }
};
struct Bfloat {
  using Stored = uint16_t;
  using Value = float;
  static Value load(Stored stored) { return gpucomm::bfloat_to_float(stored); }
  static Stored store(Value value) { return gpucomm::float_to_bfloat(value); }
};
template <class T>
struct Plain {
  using Stored = T;
  using Value = T;
  static Value load(Stored stored) { return stored; }
  static Stored store(Value value) { return value; }
};

// Integers wrap around, as they do on the device. Types below int are computed in unsigned, so that nothing overflows.
template <class V>
V combine(RedOp op, V a, V b) {
  if constexpr (std::is_floating_point_v<V>) {
    switch (op) {
      case kProd:
        return a * b;
      case kMax:
        return std::fmax(a, b);
      case kMin:
        return std::fmin(a, b);
      default:
        return a + b;
    }
  } else {
    using U = std::common_type_t<std::make_unsigned_t<V>, unsigned>;
    switch (op) {
      case kProd:
        return static_cast<V>(static_cast<U>(a) * static_cast<U>(b));
      case kMax:
        return a > b ? a : b;
      case kMin:
        return a < b ? a : b;
      default:
        return static_cast<V>(static_cast<U>(a) + static_cast<U>(b));
    }
  }
}

template <class T>
const typename T::Stored* typed(const std::byte* bytes) {
  return reinterpret_cast<const typename T::Stored*>(bytes);
}

template <class T>
void ring(const Reduction& reduction, const std::vector<const std::byte*>& inputs, size_t part, std::byte* out_bytes,
          size_t count) {
  using Value = typename T::Value;
  const size_t size = inputs.size();
  auto* out = reinterpret_cast<typename T::Stored*>(out_bytes);
  const bool premultiplies = reduction.op == kAvg && std::is_floating_point_v<Value>;
  const Value scale = premultiplies ? T::load(T::store(Value{1} / static_cast<Value>(size))) : Value{1};
  const auto input = [&](size_t rank, size_t index) {
    const Value value = T::load(typed<T>(inputs[rank])[index]);
    return premultiplies ? T::load(T::store(value * scale)) : value;
  };
  const size_t first = (part + 1 + reduction.ring_seed) % size;
  for (size_t i = 0; i < count; ++i) out[i] = T::store(input(first, i));
  for (size_t hop = 1; hop < size; ++hop) {
    const size_t rank = (first + hop) % size;
    for (size_t i = 0; i < count; ++i) out[i] = T::store(combine<Value>(reduction.op, T::load(out[i]), input(rank, i)));
  }
  if constexpr (std::is_integral_v<Value>) {
    if (reduction.op == kAvg)
      for (size_t i = 0; i < count; ++i) out[i] = static_cast<Value>(out[i] / static_cast<Value>(size));
  }
}

template <class T>
void in_fp32(const Reduction& reduction, const std::vector<const std::byte*>& inputs, std::byte* out_bytes,
             size_t count) {
  auto* out = reinterpret_cast<typename T::Stored*>(out_bytes);
  const float scale = reduction.op == kAvg ? 1.0f / static_cast<float>(inputs.size()) : 1.0f;
  for (size_t i = 0; i < count; ++i) {
    float value = T::load(typed<T>(inputs[0])[i]);
    for (size_t rank = 1; rank < inputs.size(); ++rank)
      value = combine<float>(reduction.op, value, T::load(typed<T>(inputs[rank])[i]));
    out[i] = T::store(value * scale);
  }
}

template <class T>
void half_precision(const Reduction& reduction, const std::vector<const std::byte*>& inputs, size_t part,
                    std::byte* out, size_t count) {
  if (reduction.fp32_sums)
    in_fp32<T>(reduction, inputs, out, count);
  else
    ring<T>(reduction, inputs, part, out, count);
}

}  // namespace

void reduce_part(const Reduction& reduction, const std::vector<const std::byte*>& inputs, size_t part, std::byte* out,
                 size_t count) {
  switch (reduction.type) {
    case kInt8:
      return ring<Plain<int8_t>>(reduction, inputs, part, out, count);
    case kUint8:
      return ring<Plain<uint8_t>>(reduction, inputs, part, out, count);
    case kInt32:
      return ring<Plain<int32_t>>(reduction, inputs, part, out, count);
    case kUint32:
      return ring<Plain<uint32_t>>(reduction, inputs, part, out, count);
    case kInt64:
      return ring<Plain<int64_t>>(reduction, inputs, part, out, count);
    case kUint64:
      return ring<Plain<uint64_t>>(reduction, inputs, part, out, count);
    case kFloat16:
      return half_precision<Half>(reduction, inputs, part, out, count);
    case kFloat32:
      return ring<Plain<float>>(reduction, inputs, part, out, count);
    case kFloat64:
      return ring<Plain<double>>(reduction, inputs, part, out, count);
    case kBfloat16:
      return half_precision<Bfloat>(reduction, inputs, part, out, count);
  }
}

}  // namespace fake_nccl
