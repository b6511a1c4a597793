// The kernels for x86-64 with AVX512; see kernel_tables_x86.cpp for what the compiler may use here.
#define GPUCOMM_KERNEL_TABLE kAvx512Kernels
#define GPUCOMM_KERNEL_ISA "avx512"
#include "kernels/half_rows_f16c.h"
#include "kernels/kernels_body.h"
