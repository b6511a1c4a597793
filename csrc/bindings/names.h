// Names from Python to the vocabulary of core/types.h.
#pragma once

#include <string>
#include <string_view>

#include "core/error.h"
#include "core/types.h"

namespace gpucomm {

inline DType dtype_named(std::string_view name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  throw UsageError("dtype is '" + std::string(name) +
                   "', accepted are float16, bfloat16, float32, float64, int32, int64, uint8");
}

inline ReduceOp reduce_op_named(std::string_view name) {
  for (int i = 0; i < kReduceOpCount; ++i) {
    if (name_of(static_cast<ReduceOp>(i)) == name) return static_cast<ReduceOp>(i);
  }
  throw UsageError("op is '" + std::string(name) + "', accepted are 'sum', 'avg', 'min', 'max', 'prod'");
}

}  // namespace gpucomm
