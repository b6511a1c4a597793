// Architectures without a counter that user space may read: CLOCK_MONOTONIC itself.
#include "core/clock.h"
#include "core/clock_counter.h"

namespace gpucomm {

uint64_t ticks() { return static_cast<uint64_t>(monotonic_ns()); }

bool ticks_are_monotonic_ns() { return true; }

}  // namespace gpucomm
