// Names of the kernels of codec.cu. Made from the lists that codec.cu defines them by, so a name given here exists.
#pragma once

#include "core/types.h"
#include "cuda/codec_args.h"

namespace gpucomm::cuda {

enum class Kernel : uint8_t { kPack, kUnpack, kSquaredNorm, kScale, kSumPartials };

// pack: from the gradient's type to the slot's; unpack: from the slot's to the gradient's; squared_norm and scale: of
// the type `from`, `to` is not looked at; sum_partials: neither is. Throws UsageError naming both types if there is no
// such kernel.
const char* kernel_name(Kernel what, DType from = DType::kFloat32, DType to = DType::kFloat32);

}  // namespace gpucomm::cuda
