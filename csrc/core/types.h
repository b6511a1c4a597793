// Vocabulary of the engine: element types, reductions and collectives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gpucomm {

enum class DType : uint8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kInt32, kInt64, kUInt8 };
inline constexpr int kDTypeCount = 7;

// kAvg is the sum divided by the number of ranks; on integer types it truncates toward zero.
enum class ReduceOp : uint8_t { kSum, kAvg, kMin, kMax, kProd };
inline constexpr int kReduceOpCount = 5;

enum class CollectiveKind : uint8_t { kAllReduce, kReduceScatter, kAllGather, kBroadcast, kBarrier };
inline constexpr int kCollectiveKindCount = 5;

constexpr size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kUInt8:
      return 1;
  }
  return 0;
}

constexpr bool is_floating(DType dtype) { return dtype <= DType::kFloat64; }

// Torch's spelling: "float16", "bfloat16", "float32", "float64", "int32", "int64", "uint8".
constexpr std::string_view name_of(DType dtype) {
  constexpr std::string_view names[kDTypeCount] = {"float16", "bfloat16", "float32", "float64",
                                                   "int32",   "int64",    "uint8"};
  return names[static_cast<int>(dtype)];
}

constexpr std::string_view name_of(ReduceOp op) {
  constexpr std::string_view names[kReduceOpCount] = {"sum", "avg", "min", "max", "prod"};
  return names[static_cast<int>(op)];
}

constexpr std::string_view name_of(CollectiveKind kind) {
  constexpr std::string_view names[kCollectiveKindCount] = {"all_reduce", "reduce_scatter", "all_gather", "broadcast",
                                                            "barrier"};
  return names[static_cast<int>(kind)];
}

}  // namespace gpucomm
