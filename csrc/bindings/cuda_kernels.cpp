// The CUDA kernels as images, for who wants to look at them: no device is needed.
#include "bindings/bindings.h"
#include "cuda/embedded_kernels.h"
#include "cuda/kernel_image.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

py::tuple cuda_compile_kernels(const std::string& nvrtc_path, int compute_capability, const std::string& cache_folder) {
  cuda::KernelImage image;
  {
    const py::gil_scoped_release unlocked;  // a compilation takes a second or more
    const auto api = nvrtc::load({.path = nvrtc_path, .wheel_paths = {}, .driver_version = 0, .arch = 0});
    image = cuda::compile_kernels(*api, compute_capability, cache_folder);
  }
  return py::make_tuple(py::bytes(image.bytes), image.origin);
}

py::bytes cuda_fat_binary() {
  const std::string_view binary = cuda::fat_binary();
  return py::bytes(binary.data(), binary.size());
}

}  // namespace

void bind_cuda_kernels(py::module_& module) {
  module.def(
      "cuda_compile_kernels", &cuda_compile_kernels, py::arg("nvrtc_path"), py::arg("compute_capability"),
      py::arg("cache_folder") = "",
      "The CUDA kernels compiled by that libnvrtc for a device of compute capability 90 (that is 9.0), and where "
      "they come from. cache_folder: where they are kept, empty for nowhere. Raises CommError with the compiler's "
      "messages, TransportUnavailable, and ValueError if that NVRTC does not know the device.");
  module.def("cuda_fat_binary", &cuda_fat_binary, "The fat binary of the build, empty if it had no nvcc.");
}

}  // namespace gpucomm
