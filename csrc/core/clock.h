// Time stamps cheap enough for the hot path: the time-stamp counter where the architecture has an invariant one
// (clock_x86.cpp, clock_aarch64.cpp), else CLOCK_MONOTONIC (clock_generic.cpp).
#pragma once

#include <cstdint>

namespace gpucomm {

// Monotone, unit unspecified; convert with ticks_to_ns. About 10 ns a call where there is a counter.
uint64_t ticks();

// CLOCK_MONOTONIC, nanoseconds: one clock for all processes of a host.
int64_t monotonic_ns();

// A ticks() value on the CLOCK_MONOTONIC scale. Calibrated between library load and this call, so accurate to well
// under 1 us for values taken in between.
int64_t ticks_to_ns(uint64_t ticks);

}  // namespace gpucomm
