#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "kernels/kernels.h"

PYBIND11_MODULE(_core, module) {
  module.doc() = "The torch-free engine of gpucomm. Private: use the package `gpucomm`.";
  gpucomm::register_errors();
  gpucomm::bind_memory_and_transports(module);
  gpucomm::bind_cuda(module);
  gpucomm::bind_gpu(module);
  gpucomm::bind_cuda_kernels(module);
  gpucomm::bind_communicator(module);
  gpucomm::bind_engine(module);
  gpucomm::bind_grad_hook(module);
  gpucomm::bind_kernels(module);
  gpucomm::bind_optim(module);
  module.attr("isa") = std::string(gpucomm::kernels().isa);
}
