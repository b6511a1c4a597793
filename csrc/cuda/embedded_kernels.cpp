#include "cuda/embedded_kernels.h"

// The assembler takes the files in as they are; which they are, cmake/cuda_kernels.cmake says. A zero follows each,
// which makes a string of it; what a driver reads is aligned.
#define GPUCOMM_EMBED(name, path) \
  __asm__(                        \
      ".pushsection .rodata\n"    \
      ".balign 64\n"              \
      ".hidden gpucomm_" name     \
      "\n"                        \
      ".globl gpucomm_" name      \
      "\n"                        \
      "gpucomm_" name             \
      ":\n"                       \
      ".incbin \"" path           \
      "\"\n"                      \
      ".hidden gpucomm_" name     \
      "_end\n"                    \
      ".globl gpucomm_" name      \
      "_end\n"                    \
      "gpucomm_" name             \
      "_end:\n"                   \
      ".byte 0\n"                 \
      ".popsection\n")

GPUCOMM_EMBED("kernels_source", GPUCOMM_KERNELS_SOURCE);
GPUCOMM_EMBED("kernels_header", GPUCOMM_KERNELS_HEADER);
GPUCOMM_EMBED("fat_binary", GPUCOMM_FAT_BINARY);

extern "C" {
extern const char gpucomm_kernels_source[], gpucomm_kernels_source_end[];
extern const char gpucomm_kernels_header[], gpucomm_kernels_header_end[];
extern const char gpucomm_fat_binary[], gpucomm_fat_binary_end[];
}

namespace gpucomm::cuda {

std::string_view kernels_source() { return {gpucomm_kernels_source, gpucomm_kernels_source_end}; }
std::string_view kernels_header() { return {gpucomm_kernels_header, gpucomm_kernels_header_end}; }
std::string_view fat_binary() { return {gpucomm_fat_binary, gpucomm_fat_binary_end}; }

}  // namespace gpucomm::cuda
