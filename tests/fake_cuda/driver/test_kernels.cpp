// Kernels for the tests of the stand-in itself, with one float a thread and 64 threads a block. Compiled as codec.cu
// is, so that their accesses are measured.
#include <cstring>

#include "fake_cuda/driver/kernels.h"

namespace fake {

namespace {

constexpr unsigned kThreads = 64;

// test_fill: to[i] = value
void fill(float* to, unsigned numel, float value, unsigned block) {
  for (unsigned i = block * kThreads; i < numel && i < (block + 1) * kThreads; ++i) to[i] = value;
}

// test_axpy: to[i] += factor * from[i]
void axpy(float* to, const float* from, unsigned numel, float factor, unsigned block) {
  for (unsigned i = block * kThreads; i < numel && i < (block + 1) * kThreads; ++i) to[i] += factor * from[i];
}

// test_copy: to[i] = from[i], by the library's memcpy
void copy(float* to, const float* from, unsigned numel, unsigned block) {
  const unsigned begin = block * kThreads;
  if (begin >= numel) return;
  std::memcpy(to + begin, from + begin, (numel - begin < kThreads ? numel - begin : kThreads) * sizeof(float));
}

// test_count: *counter += 1, atomically, by each block
void count(int* counter) { __atomic_fetch_add(counter, 1, __ATOMIC_RELAXED); }

template <typename T>
T argument(void** arguments, int i) {
  return *static_cast<T*>(arguments[i]);
}

using Index = FakeKernel::Index;

}  // namespace

FakeKernel test_kernel(const std::string& name) {
  if (name == "test_fill") {
    return {{8, 4, 4}, [](void** a, Index, Index block) {
              fill(argument<float*>(a, 0), argument<unsigned>(a, 1), argument<float>(a, 2), block.x);
            }};
  }
  if (name == "test_axpy") {
    return {{8, 8, 4, 4}, [](void** a, Index, Index block) {
              axpy(argument<float*>(a, 0), argument<const float*>(a, 1), argument<unsigned>(a, 2),
                   argument<float>(a, 3), block.x);
            }};
  }
  if (name == "test_copy") {
    return {{8, 8, 4}, [](void** a, Index, Index block) {
              copy(argument<float*>(a, 0), argument<const float*>(a, 1), argument<unsigned>(a, 2), block.x);
            }};
  }
  if (name == "test_count") {
    return {{8}, [](void** a, Index, Index) { count(argument<int*>(a, 0)); }};
  }
  return {};
}

}  // namespace fake
