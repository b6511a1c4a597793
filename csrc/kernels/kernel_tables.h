// Which kernel tables exist. A table is a file compiled for one instruction set; kernel_tables_x86.cpp or
// kernel_tables_generic.cpp, chosen by the build, says which of them this machine can run.
#pragma once

#include <cstddef>

#include "kernels/kernels.h"

namespace gpucomm {

extern const Kernels kBaselineKernels;
extern const Kernels kAvx2Kernels;    // x86-64 only
extern const Kernels kAvx512Kernels;  // x86-64 only

inline constexpr size_t kMaxKernelTables = 3;

struct KernelTables {
  const Kernels* table[kMaxKernelTables];  // from the baseline to the best
  size_t count;
};

KernelTables runnable_kernel_tables();

}  // namespace gpucomm
