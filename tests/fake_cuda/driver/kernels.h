// The kernels that a launch can run on the host, by name: those of codec.cu, and a few of the tests' own.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

struct FakeKernel {
  struct Index {
    unsigned x, y, z;
  };
  std::vector<size_t> argument_bytes;
  // Runs one block. Arguments as cuLaunchKernel takes them.
  std::function<void(void** arguments, Index grid, Index block)> run;
  // Variables of the thread that the kernel reads as it would blockIdx.
  std::vector<std::pair<const void*, size_t>> (*own_variables)() = nullptr;
};

namespace fake {

// Null: there is none of that name. Lives forever.
const FakeKernel* find_kernel(const std::string& name);

// By the two sources of kernels; an empty `run` where there is none of that name.
FakeKernel codec_kernel(const std::string& name);
FakeKernel test_kernel(const std::string& name);

}  // namespace fake
