// The kernels for any processor of the architecture (x86-64: SSE2; aarch64: NEON).
#define GPUCOMM_KERNEL_TABLE kBaselineKernels
#define GPUCOMM_KERNEL_ISA "baseline"
#include "kernels/half_rows_bits.h"
#include "kernels/kernels_body.h"
