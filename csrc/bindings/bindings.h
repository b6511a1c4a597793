// What each file of this folder adds to the module `gpucomm._core`. Only this folder knows Python.
#pragma once

#include <pybind11/pybind11.h>

namespace gpucomm {

void bind_memory_and_transports(pybind11::module_& module);
void bind_cuda(pybind11::module_& module);
void bind_cuda_kernels(pybind11::module_& module);
void bind_gpu(pybind11::module_& module);
void bind_communicator(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_kernels(pybind11::module_& module);
void bind_grad_hook(pybind11::module_& module);
void bind_optim(pybind11::module_& module);

}  // namespace gpucomm
