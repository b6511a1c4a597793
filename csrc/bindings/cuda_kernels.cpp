// The CUDA kernels by themselves: as images, for who wants to look at them, and launched one by one, for tests and
// benchmarks.
#include "bindings/bindings.h"
#include "cuda/codec_cuda.h"
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

std::shared_ptr<cuda::CudaKernels> cuda_kernels_of(std::shared_ptr<cuda::GpuDevice> device, const py::bytes& image) {
  const std::string bytes = image;
  cuda::Module module = nullptr;
  const cuda::Current current(device->api(), device->context());
  device->check(device->api().module_load_data(&module, bytes.data()), "cuModuleLoadData");
  return std::make_shared<cuda::CudaKernels>(std::move(device), module);
}

void cuda_launch_kernel(cuda::CudaKernels& kernels, const std::string& name, unsigned blocks,
                        const py::bytes& arguments, uintptr_t stream) {
  std::string bytes = arguments;
  const bool by_slots = name.starts_with("pack_") || name.starts_with("unpack_");
  const size_t expected = by_slots ? sizeof(codec::CodecArgs) : sizeof(codec::FlatArgs);
  if (bytes.size() != expected) {
    throw UsageError(name + ": arguments of " + std::to_string(bytes.size()) + " bytes, expected " +
                     std::to_string(expected));
  }
  const cuda::Function kernel = kernels.function(name.c_str());
  const cuda::GpuDevice& device = *kernels.device();
  const cuda::Current current(device.api(), device.context());
  void* pointers[] = {bytes.data()};
  device.check(device.api().launch_kernel(kernel, blocks, 1, 1, codec::kBlockThreads, 1, 1, 0,
                                          reinterpret_cast<cuda::StreamHandle>(stream), pointers, nullptr),
               "cuLaunchKernel");
}

}  // namespace

void bind_cuda_kernels(py::module_& module) {
  module.def(
      "cuda_compile_kernels", &cuda_compile_kernels, py::arg("nvrtc_path"), py::arg("compute_capability"),
      py::arg("cache_folder") = "",
      "The CUDA kernels compiled by that libnvrtc for a device of compute capability 90 (that is 9.0), and where "
      "they come from. cache_folder: where they are kept, empty for nowhere. Raises CommError with the compiler's "
      "messages, TransportUnavailable, and ValueError if that NVRTC does not know the device.");
  module.def("cuda_kernels_of", &cuda_kernels_of, py::arg("device"), py::arg("image"),
             "CudaKernels of an image, as cuda_compile_kernels gives it. Raises CommError if the driver refuses it.");
  module.def("cuda_launch_kernel", &cuda_launch_kernel, py::arg("kernels"), py::arg("name"), py::arg("blocks"),
             py::arg("arguments"), py::arg("stream"),
             "Launches one kernel of codec.cu on a stream, by its handle. arguments: the bytes of a CodecArgs or a "
             "FlatArgs (codec_args.h). Raises ValueError for another number of bytes, CommError.");
  module.def("cuda_fat_binary", &cuda_fat_binary, "The fat binary of the build, empty if it had no nvcc.");
}

}  // namespace gpucomm
