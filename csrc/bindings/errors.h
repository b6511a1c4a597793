// C++ exceptions as the Python ones of gpucomm.errors.
#pragma once

#include <exception>

namespace gpucomm {

void register_errors();

// Sets the Python error that stands for `failure`; for C callables outside pybind11.
void set_python_error(std::exception_ptr failure);

// Throws the Python error that is set; the GIL must be held.
[[noreturn]] void throw_python_error();

}  // namespace gpucomm
