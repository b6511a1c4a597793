// Where codec.cu, compiled for the host, gets what the CUDA compiler builds in: blockIdx and its kin as variables of
// the thread, set by who launches; blocks of one thread; 16-byte vectors; bit casts.
//
// host_kernels.cpp includes this and then codec.cu; whoever launches includes this alone:
//
//     const HostKernel kernel = host_kernel("pack_f32_bf16");   // null: there is no such kernel
//     launch(kernel, grid_x, arguments);                        // arguments: as cuLaunchKernel takes them
//
// or sets gridDim and blockIdx itself and calls kernel(arguments) for each block, in any order. blockDim stays 1.
#pragma once

#define GPUCOMM_HOST_KERNELS 1

#include <atomic>
#include <bit>
#include <cmath>
#include <cstdint>

struct HostDim3 {
  unsigned x = 1;
  unsigned y = 1;
  unsigned z = 1;
};

inline thread_local HostDim3 gridDim;
inline thread_local HostDim3 blockDim;
inline thread_local HostDim3 blockIdx = {0, 0, 0};
inline thread_local HostDim3 threadIdx = {0, 0, 0};

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(threads, blocks)

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float value) { return std::bit_cast<unsigned>(value); }
inline double __longlong_as_double(long long bits) { return std::bit_cast<double>(bits); }
inline long long __double_as_longlong(double value) { return std::bit_cast<long long>(value); }
inline void atomicMin(int* address, int value) {
  std::atomic_ref<int> current(*address);
  int seen = current.load(std::memory_order_relaxed);
  while (value < seen && !current.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
  }
}

namespace gpucomm::codec {

using HostKernel = void (*)(void** arguments);

// The kernel of that name, null if there is none.
HostKernel host_kernel(const char* name);

// Every block in turn, as one that the caller chooses an order for would.
inline void launch(HostKernel kernel, unsigned grid_x, void** arguments) {
  gridDim = {grid_x, 1, 1};
  blockDim = {1, 1, 1};
  threadIdx = {0, 0, 0};
  for (unsigned block = 0; block < grid_x; ++block) {
    blockIdx = {block, 0, 0};
    kernel(arguments);
  }
}

}  // namespace gpucomm::codec
