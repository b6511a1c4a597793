#include "bindings/embedder.h"

#include <pybind11/pybind11.h>

#include "bindings/errors.h"

namespace gpucomm {

// Set while this thread has given the GIL up for a wait.
static thread_local PyThreadState* saved_state = nullptr;

void PythonEmbedder::before_blocking() {
  if (PyGILState_Check()) saved_state = PyEval_SaveThread();
}

void PythonEmbedder::after_blocking() {
  if (saved_state == nullptr) return;
  PyEval_RestoreThread(saved_state);
  saved_state = nullptr;
}

void PythonEmbedder::check_interrupt() {
  const pybind11::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw PythonError::fetch();
}

PythonEmbedder& PythonEmbedder::instance() {
  static PythonEmbedder embedder;
  return embedder;
}

}  // namespace gpucomm
