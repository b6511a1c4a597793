// aarch64: the generic timer's virtual count, invariant by architecture.
#include "core/clock.h"
#include "core/clock_counter.h"

namespace gpucomm {

uint64_t ticks() {
  uint64_t count;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  return count;
}

bool ticks_are_monotonic_ns() { return false; }

}  // namespace gpucomm
