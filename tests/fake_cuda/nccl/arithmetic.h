// Reductions as NCCL computes them: element by element, rounded to the type at every step, in the order in which a ring
// passes the element on. That order differs between the parts of a message, so no result relies on the order of ranks.
#pragma once

#include <cstddef>
#include <vector>

#include "fake_cuda/nccl/operation.h"

namespace fake_nccl {

struct Reduction {
  DataType type;
  RedOp op;
  bool fp32_sums = false;  // 16-bit types: accumulate in fp32, in the order of ranks, and round once
  size_t ring_seed = 0;    // rotates where the ring begins
};

// out[0, count) = the reduction of inputs[rank][0, count), which travels as part `part` of as many as there are ranks
// (it begins at rank part + 1 and ends at rank part). Inputs and out do not overlap. avg of floating types multiplies
// each input by 1/N, both rounded to the type; of integers it divides the sum, truncating.
void reduce_part(const Reduction& reduction, const std::vector<const std::byte*>& inputs, size_t part, std::byte* out,
                 size_t count);

}  // namespace fake_nccl
