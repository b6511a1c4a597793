// What libfake_nccl.so exports: every function of the table that the transport calls NCCL by, under NCCL's names and
// with the types of that table, so that a definition of another type does not compile.
#pragma once

#include <type_traits>

#include "nccl/nccl_api.h"

namespace fake_nccl {
using namespace gpucomm::nccl;  // the vocabulary: Result, Config, DataType ...
namespace cuda = gpucomm::cuda;
}  // namespace fake_nccl

namespace gpucomm::nccl {
#define FAKE_NCCL_DECLARE(member, symbol, since, ...) \
  extern "C" __attribute__((visibility("default"))) std::type_identity_t<__VA_ARGS__> symbol;
GPUCOMM_NCCL_FUNCTIONS(FAKE_NCCL_DECLARE)
#undef FAKE_NCCL_DECLARE
}  // namespace gpucomm::nccl
