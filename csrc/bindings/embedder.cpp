#include "bindings/embedder.h"

#include "bindings/errors.h"

namespace gpucomm {

namespace {

// pybind11's own would cost this small file six seconds of compile time.
class Gil {
 public:
  Gil() : state_(PyGILState_Ensure()) {}
  ~Gil() { PyGILState_Release(state_); }
  Gil(const Gil&) = delete;
  Gil& operator=(const Gil&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace

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
  const Gil gil;
  if (PyErr_CheckSignals() != 0) throw_python_error();
}

PythonEmbedder& PythonEmbedder::instance() {
  static PythonEmbedder embedder;
  return embedder;
}

}  // namespace gpucomm
