// Time stamps cheap enough for the hot path: the time-stamp counter where the architecture has an invariant one
// (clock_x86.cpp, clock_aarch64.cpp), else CLOCK_MONOTONIC (clock_generic.cpp).
#pragma once

#include <cstdint>

namespace gpucomm {

// Monotone, unit unspecified; convert with ticks_to_ns. About 10 ns a call where there is a counter.
uint64_t ticks();

// CLOCK_MONOTONIC, nanoseconds: one clock for all processes of a host.
int64_t monotonic_ns();

// The straight line from ticks to CLOCK_MONOTONIC through two instants, library load and the call of measure():
// accurate to well under 1 us for values taken in between. One scale keeps the order of what it converts; two may
// differ by a few nanoseconds.
class TickScale {
 public:
  // About a quarter of a microsecond.
  static TickScale measure();

  int64_t to_ns(uint64_t ticks) const { return origin_ns_ + duration_ns(static_cast<int64_t>(ticks - origin_ticks_)); }
  int64_t duration_ns(int64_t ticks) const { return static_cast<int64_t>(static_cast<double>(ticks) * ns_per_tick_); }

 private:
  TickScale(uint64_t origin_ticks, int64_t origin_ns, double ns_per_tick)
      : origin_ticks_(origin_ticks), origin_ns_(origin_ns), ns_per_tick_(ns_per_tick) {}
  uint64_t origin_ticks_;
  int64_t origin_ns_;
  double ns_per_tick_;
};

}  // namespace gpucomm
