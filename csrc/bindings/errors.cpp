#include "bindings/errors.h"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "core/error.h"

namespace py = pybind11;

namespace gpucomm {

static py::object error_type(const char* name) { return py::module_::import("gpucomm.errors").attr(name); }

// Makes an instance by the class's own constructor, so that attributes (rank, missing, ...) are there.
template <typename... Args>
static void raise(const char* name, Args&&... args) {
  const py::object type = error_type(name);
  const py::object error = type(std::forward<Args>(args)...);
  PyErr_SetObject(type.ptr(), error.ptr());
}

PythonError PythonError::fetch() {
  const py::error_already_set error;
  return {error.what(), Py_NewRef(error.value().ptr())};
}

PythonError::PythonError(const std::string& text, void* error)
    : std::runtime_error(text), error_(error, [](void* object) {
        const py::gil_scoped_acquire gil;
        Py_DECREF(static_cast<PyObject*>(object));
      }) {}

void PythonError::restore() const {
  auto* error = static_cast<PyObject*>(error_.get());
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
}

void set_python_error(std::exception_ptr failure) {
  try {
    try {
      std::rethrow_exception(failure);
    } catch (py::error_already_set& e) {
      e.restore();
    } catch (const PythonError& e) {
      e.restore();
    } catch (const py::builtin_exception& e) {
      e.set_error();
    } catch (const PeerFailed& e) {
      raise("PeerFailed", e.what(), e.rank, e.reason);
    } catch (const CommTimeout& e) {
      raise("CommTimeout", e.what(), e.missing);
    } catch (const StepFailed& e) {
      raise("StepFailed", e.what());
    } catch (const CollectiveMismatch& e) {
      raise("CollectiveMismatch", e.what());
    } catch (const TransportUnavailable& e) {
      raise("TransportUnavailable", e.what());
    } catch (const CommError& e) {
      raise("CommError", e.what());
    } catch (const InternalError& e) {
      raise("InternalError", e.what());
    } catch (const std::invalid_argument& e) {
      PyErr_SetString(PyExc_ValueError, e.what());
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::exception& e) {
      PyErr_SetString(PyExc_RuntimeError, e.what());
    }
  } catch (py::error_already_set& e) {
    e.restore();  // gpucomm.errors could not be had
  }
}

void throw_python_error() { throw PythonError::fetch(); }

void register_errors() {
  py::register_local_exception_translator([](std::exception_ptr failure) {
    if (!failure) return;
    try {
      std::rethrow_exception(failure);
    } catch (const CommError&) {
      set_python_error(failure);
    } catch (const InternalError&) {
      set_python_error(failure);
    } catch (const PythonError&) {
      set_python_error(failure);
    }
  });
}

}  // namespace gpucomm
