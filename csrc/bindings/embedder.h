// Python as the program around the engine: long waits release the GIL and look for signals.
#pragma once

#include <Python.h>

#include "core/embedder.h"

namespace gpucomm {

class PythonEmbedder final : public Embedder {
 public:
  void before_blocking() override;
  void after_blocking() override;
  // Runs pending signal handlers (KeyboardInterrupt) if this is the main thread.
  void check_interrupt() override;

  // One for the process; it has no state but the waiting thread's.
  static PythonEmbedder& instance();
};

}  // namespace gpucomm
