// Waiting for a counter in shared memory: a short spin, then yields, then a futex in slices.
//
// A long spin is the wrong kind of fast: with more ranks than cores the spinner holds the core that the awaited rank
// needs. After the first microseconds the waiter therefore gives the core away, and after a few yields it sleeps.
#pragma once

#include <atomic>
#include <cstdint>

#include "core/embedder.h"

namespace gpucomm {

// What a rank rings after it moved one of its counters. Lies in shared memory.
// [Note: ringing] The ringer stores its counter and then read-modify-writes `sleepers`; the sleeper
// read-modify-writes `sleepers` and then loads the counter. The two read-modify-writes are ordered one way or the
// other: either the ringer sees the sleeper, or the sleeper sees the counter.
struct Bell {
  std::atomic<uint32_t> rung{0};
  std::atomic<uint32_t> sleepers{0};

  // Costs one uncontended read-modify-write where nobody sleeps.
  void ring() {
    // Release: partner is the acquire half of the sleeper's fetch_add in Waiter::sleep.
    if (sleepers.fetch_add(0, std::memory_order_acq_rel) != 0) wake();
  }
  // Wakes without asking whether somebody sleeps.
  void wake();
};

class Waiter {
 public:
  // What a sleeping waiter looks at between its slices. Throws to end the wait.
  class Watch {
   public:
    virtual ~Watch() = default;
    // slice_over: time for what costs system calls; else only for flags in shared memory.
    virtual void examine(bool slice_over) = 0;
    // The embedder's interrupt check threw; the exception passes on afterwards.
    virtual void interrupted() noexcept = 0;
  };

  // embedder: may be null; outlives the waiter. crowded: more ranks than cores, so spin less.
  Waiter(Embedder* embedder, bool crowded);

  // Blocks until counter >= target, or throws what watch.examine() or the embedder's interrupt check threw.
  // bell: the one that the counter's writer rings.
  void wait(Bell& bell, const std::atomic<uint64_t>& counter, uint64_t target, Watch& watch);

  // A few polls, a fraction of a microsecond; true if the counter came.
  bool spin_briefly(const std::atomic<uint64_t>& counter, uint64_t target) const;

  // Longest time between two looks at the watch.
  static constexpr int kSliceMs = 50;

 private:
  static bool spin(const std::atomic<uint64_t>& counter, uint64_t target, int pauses);
  bool yield(const std::atomic<uint64_t>& counter, uint64_t target) const;
  void check_interrupt(Watch& watch);

  Embedder* embedder_;
  int pauses_;
  int yields_;
};

// Cores that this process may run on.
int available_cores();

}  // namespace gpucomm
