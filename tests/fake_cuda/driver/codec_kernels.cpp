// The kernels of codec.cu for the host. Each takes one argument, a struct.
#include "cuda/codec_args.h"
#include "fake_cuda/driver/host_kernels.h"
#include "fake_cuda/driver/kernels.h"

namespace fake {

namespace {

bool starts_with(const std::string& text, const char* with) { return text.rfind(with, 0) == 0; }

void set(HostDim3& variable, FakeKernel::Index value) { variable = {value.x, value.y, value.z}; }

std::vector<std::pair<const void*, size_t>> own_variables() {
  return {{&gridDim, sizeof gridDim},
          {&blockDim, sizeof blockDim},
          {&blockIdx, sizeof blockIdx},
          {&threadIdx, sizeof threadIdx}};
}

}  // namespace

FakeKernel codec_kernel(const std::string& name) {
  const gpucomm::codec::HostKernel kernel = gpucomm::codec::host_kernel(name.c_str());
  if (!kernel) return {};
  const bool by_slot = starts_with(name, "pack") || starts_with(name, "unpack");
  auto run = [kernel](void** arguments, FakeKernel::Index grid, FakeKernel::Index block) {
    set(gridDim, grid);
    set(blockDim, {1, 1, 1});
    set(blockIdx, block);
    set(threadIdx, {0, 0, 0});
    kernel(arguments);
  };
  return {{by_slot ? sizeof(gpucomm::codec::CodecArgs) : sizeof(gpucomm::codec::FlatArgs)}, run, own_variables};
}

}  // namespace fake
