// codec.cu for the host, and its kernels by name.
#include "fake_cuda/driver/host_kernels.h"

#include <cstring>

#include "cuda/codec.cu"

namespace gpucomm::codec {

HostKernel host_kernel(const char* name) {
  struct Entry {
    const char* name;
    HostKernel kernel;
  };
#define GPUCOMM_ENTRY(kernel, Args) \
  Entry{#kernel, [](void** arguments) { kernel(*static_cast<const Args*>(arguments[0])); }},
#define GPUCOMM_OF_PAIR(from, From, to, To)    \
  GPUCOMM_ENTRY(pack_##from##_##to, CodecArgs) \
  GPUCOMM_ENTRY(unpack_##from##_##to, CodecArgs)
#define GPUCOMM_OF_TYPE(name, Type)            \
  GPUCOMM_ENTRY(squared_norm_##name, FlatArgs) \
  GPUCOMM_ENTRY(scale_##name, FlatArgs)
  static constexpr Entry kEntries[] = {
      // clang-format off
      GPUCOMM_CODEC_PAIRS(GPUCOMM_OF_PAIR)
      GPUCOMM_CODEC_TYPES(GPUCOMM_OF_TYPE)
      GPUCOMM_ENTRY(sum_partials, FlatArgs)
      // clang-format on
  };
  for (const Entry& entry : kEntries) {
    if (std::strcmp(entry.name, name) == 0) return entry.kernel;
  }
  return nullptr;
}

}  // namespace gpucomm::codec
