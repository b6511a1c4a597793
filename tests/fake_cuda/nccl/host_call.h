// Calls of the host that all ranks of a communicator make together: they meet on the board.
#pragma once

#include <cstdint>

#include "fake_cuda/nccl/comm.h"

namespace fake_nccl {

enum HostCallKind : int { kWindowCall = 1, kSplitCall };

// The n-th such call of a communicator, from one rank's view. Comes to the board when it is first polled.
class Meeting {
 public:
  Meeting(ncclComm* comm, const char* function, const HostCall& call);

  // kSuccess once all ranks have come, kInvalidUsage where they do not all make the same call (reported).
  Result poll();
  uint64_t number() const { return number_; }
  const HostCall& of(int rank) const;
  // Reports where a rank gave other arguments.
  void require_equal() const;

 private:
  ncclComm* comm_;
  const char* function_;
  HostCall call_;
  uint64_t number_ = 0;
  bool came_ = false;
};

}  // namespace fake_nccl
