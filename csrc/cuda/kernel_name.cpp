#include "cuda/kernel_name.h"

#include <string>

#include "core/error.h"

namespace gpucomm::cuda {

const char* kernel_name(Kernel what, DType from, DType to) {
#define GPUCOMM_NAME_OF_PAIR(from_name, From, to_name, To)                 \
  if (from == DType::k##From && to == DType::k##To) {                      \
    if (what == Kernel::kPack) return "pack_" #from_name "_" #to_name;     \
    if (what == Kernel::kUnpack) return "unpack_" #from_name "_" #to_name; \
  }
#define GPUCOMM_NAME_OF_TYPE(name, Type)                            \
  if (from == DType::k##Type) {                                     \
    if (what == Kernel::kSquaredNorm) return "squared_norm_" #name; \
    if (what == Kernel::kScale) return "scale_" #name;              \
  }
  if (what == Kernel::kSumPartials) return "sum_partials";
  GPUCOMM_CODEC_PAIRS(GPUCOMM_NAME_OF_PAIR)
  GPUCOMM_CODEC_TYPES(GPUCOMM_NAME_OF_TYPE)
#undef GPUCOMM_NAME_OF_PAIR
#undef GPUCOMM_NAME_OF_TYPE
  throw UsageError("there is no CUDA kernel from " + std::string(name_of(from)) + " to " + std::string(name_of(to)) +
                   ": gradients and slots on a GPU are float32, float16 or bfloat16 in any pairing, or both float64");
}

}  // namespace gpucomm::cuda
