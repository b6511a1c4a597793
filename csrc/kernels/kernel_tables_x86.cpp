// x86-64: the processor and the operating system (vector registers saved) decide.
#include "kernels/kernel_tables.h"

namespace gpucomm {

KernelTables runnable_kernel_tables() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  KernelTables tables = {{&kBaselineKernels}, 1};
  if (avx2) tables.table[tables.count++] = &kAvx2Kernels;
  if (avx512) tables.table[tables.count++] = &kAvx512Kernels;
  return tables;
}

}  // namespace gpucomm
