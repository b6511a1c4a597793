// The kernels of codec.cu as something that the driver loads: the fat binary of the build, else compiled by NVRTC for
// the device at hand and kept on disk.
#pragma once

#include <string>

#include "cuda/device.h"
#include "cuda/nvrtc_api.h"

namespace gpucomm::cuda {

struct KernelImage {
  std::string bytes;   // what cuModuleLoadData takes
  std::string origin;  // for messages: "compiled by NVRTC 12.9 for sm_90, kept in /home/..."
};

// Where an image comes from if the fat binary will not do.
struct KernelCompiler {
  nvrtc::Search search;      // its driver_version and arch are filled in
  std::string cache_folder;  // made if missing; empty: nothing is kept
};

// A cubin for a device of that compute capability (90 is 9.0), or the newest earlier one of its generation that NVRTC
// knows; never PTX, which a driver older than NVRTC would not read. From cache_folder if it was compiled before by the
// same NVRTC from the same source with the same options and is whole; else compiled (about a second) and kept there,
// where that is possible: origin says why not. Several processes may do so at once. Throws CommError with the
// compiler's messages; UsageError: NVRTC knows no architecture that runs on the device.
KernelImage compile_kernels(const nvrtc::Api& nvrtc, int compute_capability, const std::string& cache_folder);

// A module of the device's, with its context current: of the fat binary if the build made one and the driver takes it,
// else compiled. *origin: where it came from. Throws what compile_kernels and nvrtc::load throw, and CudaError; each
// says what was tried before.
Module load_kernels(const GpuDevice& device, const KernelCompiler& compiler, std::string* origin);

}  // namespace gpucomm::cuda
