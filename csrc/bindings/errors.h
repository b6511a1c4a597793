// C++ exceptions as the Python ones of gpucomm.errors.
#pragma once

#include <exception>
#include <memory>
#include <stdexcept>
#include <string>

namespace gpucomm {

// A Python exception on its way through the engine, which may keep it and throw it again any number of times: what
// pybind11 throws can be given back to Python once only.
class PythonError : public std::runtime_error {
 public:
  // Takes the Python error that is set. The GIL is held.
  static PythonError fetch();
  // Sets it (again). The GIL is held.
  void restore() const;

 private:
  PythonError(const std::string& text, void* error);  // error: a reference that it takes over
  std::shared_ptr<void> error_;
};

void register_errors();

// Sets the Python error that stands for `failure`; for C callables outside pybind11.
void set_python_error(std::exception_ptr failure);

// Throws the Python error that is set; the GIL must be held.
[[noreturn]] void throw_python_error();

}  // namespace gpucomm
