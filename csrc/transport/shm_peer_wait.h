// Waiting for a counter of a peer, and finding out why it does not come: the peer closed its transport, its process
// ended, somebody reported a failure, the time is over.
#pragma once

#include <functional>
#include <string>

#include "transport/shm_counters.h"
#include "transport/shm_failures.h"
#include "transport/shm_handshake.h"
#include "transport/waiter.h"

namespace gpucomm::shm {

class PeerWait final : private Waiter::Watch {
 public:
  using Describe = std::function<std::string()>;

  // All references outlive it. describe: names the operation that is waited for, for messages.
  PeerWait(const World& world, const Counters& counters, Failures& failures, int rank, double timeout_s,
           Embedder* embedder, Describe describe);

  // A few polls; true if the counter came.
  bool spin_briefly(const Blocker& blocker) const;
  // Blocks until the counter came. Throws CommTimeout, PeerFailed, or what the interrupt check raised.
  void wait(const Blocker& blocker);

 private:
  bool misses(int rank) const;
  void examine(bool slice_over) override;
  void check_deadline();
  void interrupted() noexcept override;

  const World& world_;
  const Counters& counters_;
  Failures& failures_;
  int rank_;
  int size_;
  double timeout_s_;
  Waiter waiter_;
  Describe describe_;
  Blocker awaited_;          // what the deadline belongs to
  int64_t deadline_ns_ = 0;  // 0: not set
};

}  // namespace gpucomm::shm
