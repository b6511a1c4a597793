// CPU kernels behind a table of function pointers, filled once at load for the instruction set of this machine.
//
// kernels_body.h is the one source; kernels_baseline.cpp, kernels_avx2.cpp and kernels_avx512.cpp compile it, each with
// its own compiler flags. The result is the same bit for bit in all of them: reductions add in the order of the
// sources, 16-bit types accumulate in fp32 and round once to nearest even, and nothing is contracted to an FMA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/types.h"
#include "kernels/step.h"

namespace gpucomm {

// dst[d][i] = op over s of (scale * src[s][i]), for d < dst_count, s < src_count, i < numel.
//   src and dst: at least 1 each; a dst may be one of the src (same address), else they do not overlap.
//   scale: applied to every contribution before the reduction (in fp32 for float16/bfloat16, in the type otherwise);
//     integer types ignore it.
//   kAvg on floating types is kSum (pass 1/N in scale); on integer types the sum, accumulated in 64 bits (uint8: 32),
//     divided by src_count, toward zero. Integer kSum and kProd wrap.
//   kMin, kMax: a NaN in any contribution gives NaN, as torch.
using ReduceKernel = void (*)(const void* const* src, int src_count, void* const* dst, int dst_count, size_t numel,
                              double scale);

// dst[i] = to(scale * src[i]); floating types only. Between 16-bit types and fp32 the product is taken in fp32, with
// fp64 on either side in fp64; one rounding to nearest even; overflow goes to infinity. scale == 1 between equal types
// copies the bits. dst and src do not overlap, or are the same address and type.
using PackKernel = void (*)(void* dst, const void* src, size_t numel, double scale);

struct Kernels {
  std::string_view isa;  // "baseline", "avx2", "avx512"
  ReduceKernel reduce[kDTypeCount][kReduceOpCount];
  PackKernel pack[4][4];  // [dst dtype][src dtype], floating types
  // Index of the first element that is infinite or NaN, -1 if there is none; floating types.
  int64_t (*first_nonfinite[4])(const void* src, size_t numel);
  // 64 bits that depend on every byte and on their order; of any alignment. See checksum_lanes.h.
  uint64_t (*checksum)(const void* src, size_t bytes);
  // [0]: computed in fp32, for parameters of 16 and 32 bits; [1]: in fp64. See step.h.
  StepKernel step[2][kStepRuleCount];
};

// The best table this machine can run.
const Kernels& kernels();
// Every table this machine can run, baseline first: for tests and benchmarks.
size_t kernel_table_count();
const Kernels& kernel_table(size_t index);

}  // namespace gpucomm
