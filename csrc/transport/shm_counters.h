// The counters of all ranks, and what it means to wait for one of them.
#pragma once

#include <vector>

#include "transport/shm_layout.h"

namespace gpucomm::shm {

enum class Awaited { kStarted, kDone, kCopiedIn, kReduced, kCopiedOut };

// The counter that stands in the way: `awaited` of `rank` has not reached `target`.
struct Blocker {
  Awaited awaited = Awaited::kStarted;
  int rank = 0;
  uint64_t target = 0;
};

class Counters {
 public:
  Counters(std::vector<ControlBlock*> blocks, int rank) : blocks_(std::move(blocks)), rank_(rank) {}

  const std::atomic<uint64_t>& of(int rank, Awaited awaited, uint64_t target) const {
    const ControlBlock& block = *blocks_[static_cast<size_t>(rank)];
    switch (awaited) {
      case Awaited::kStarted:
        return block.ring[target % kRingSize].number;
      case Awaited::kDone:
        return block.done;
      case Awaited::kCopiedIn:
        return block.copied_in;
      case Awaited::kReduced:
        return block.reduced;
      case Awaited::kCopiedOut:
        break;
    }
    return block.copied_out;
  }

  // Acquire: partner is the release store of the counter by its rank; what that rank wrote before is visible.
  bool reached(int rank, Awaited awaited, uint64_t target) const {
    return of(rank, awaited, target).load(std::memory_order_acquire) >= target;
  }

  // True if all peers are there; else the first that is not goes to blocker.
  bool all_reached(Awaited awaited, uint64_t target, Blocker& blocker) const {
    for (int rank = 0; rank < static_cast<int>(blocks_.size()); ++rank) {
      if (rank == rank_ || reached(rank, awaited, target)) continue;
      blocker = {awaited, rank, target};
      return false;
    }
    return true;
  }

 private:
  std::vector<ControlBlock*> blocks_;
  int rank_;
};

}  // namespace gpucomm::shm
