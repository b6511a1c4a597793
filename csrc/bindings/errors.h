// C++ exceptions as the Python ones of gpucomm.errors.
#pragma once

#include <pybind11/pybind11.h>

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
  static PythonError fetch() { return of(pybind11::error_already_set()); }
  static PythonError of(const pybind11::error_already_set& error);
  // Sets it (again). The GIL is held.
  void restore() const;

 private:
  PythonError(const std::string& text, void* error);
  std::shared_ptr<void> error_;
};

// Calls body, which may throw what pybind11 throws, and throws that as a PythonError.
template <typename Body>
auto keeping_python_errors(Body body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
    throw PythonError::fetch();
  }
}

void register_errors();

// Sets the Python error that stands for `failure`; for C callables outside pybind11.
void set_python_error(std::exception_ptr failure);

}  // namespace gpucomm
