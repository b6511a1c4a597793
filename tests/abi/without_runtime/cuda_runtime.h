// What nccl.h takes from cuda_runtime.h, where only a wheel is at hand: wheels hold that header without those that it
// includes. The runtime's streams and events are the driver's.
#pragma once

#include <cuda.h>

#define CUDART_VERSION CUDA_VERSION

typedef CUstream cudaStream_t;
typedef CUevent cudaEvent_t;
