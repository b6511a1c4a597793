// What clock.cpp asks of the architecture's file beside ticks().
#pragma once

namespace gpucomm {

// True if ticks() is CLOCK_MONOTONIC in nanoseconds, so that there is nothing to calibrate.
bool ticks_are_monotonic_ns();

}  // namespace gpucomm
