// What the build put into the library: the kernels as source and, where it had nvcc, as a fat binary.
#pragma once

#include <string_view>

namespace gpucomm::cuda {

// codec.cu and codec_args.h; null-terminated.
std::string_view kernels_source();
std::string_view kernels_header();
// Empty if the build had no nvcc.
std::string_view fat_binary();

}  // namespace gpucomm::cuda
