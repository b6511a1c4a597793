// What the program around the engine wants done when a wait gets longer than a short spin: Python releases the GIL and
// looks for signals. The engine itself knows neither.
#pragma once

namespace gpucomm {

class Embedder {
 public:
  virtual ~Embedder() = default;
  // Around each blocking stretch (yield, futex) of a wait, on the waiting thread, never nested.
  virtual void before_blocking() {}
  virtual void after_blocking() {}
  // At least every 100 ms of a wait and at once when a signal ended a futex; between after_ and before_blocking.
  // Throws to end the wait.
  virtual void check_interrupt() {}
};

}  // namespace gpucomm
