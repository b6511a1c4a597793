// Architectures where the compiler's baseline is all there is (aarch64: NEON is part of it).
#include "kernels/kernel_tables.h"

namespace gpucomm {

KernelTables runnable_kernel_tables() { return {{&kBaselineKernels}, 1}; }

}  // namespace gpucomm
