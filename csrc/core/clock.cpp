// CLOCK_MONOTONIC, and the straight line from ticks to it through two anchors: library load and the present call.
#include "core/clock.h"

#include <time.h>

#include "core/clock_counter.h"

namespace gpucomm {

namespace {

// One instant on both scales.
struct Anchor {
  uint64_t ticks;
  int64_t ns;
};

// The tightest of a few tries, so that a pre-emption between the two readings does not count.
Anchor take_anchor() {
  Anchor best = {};
  uint64_t best_width = UINT64_MAX;
  for (int attempt = 0; attempt < 5; ++attempt) {
    const uint64_t before = ticks();
    const int64_t ns = monotonic_ns();
    const uint64_t width = ticks() - before;
    if (width < best_width) {
      best_width = width;
      best = {before + width / 2, ns};
    }
  }
  return best;
}

const Anchor load_anchor = take_anchor();

}  // namespace

int64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

TickScale TickScale::measure() {
  const Anchor now = take_anchor();
  if (ticks_are_monotonic_ns()) return {now.ticks, static_cast<int64_t>(now.ticks), 1.0};
  // The origin is the present anchor, because what is converted is recent and the distance small.
  return {now.ticks, now.ns,
          static_cast<double>(now.ns - load_anchor.ns) / static_cast<double>(now.ticks - load_anchor.ticks)};
}

}  // namespace gpucomm
