// How ranks tell each other that one of them gave up, and what each of them raises then.
//
// The first failure is written to the own control block, once, with its culprits; peers that find it raise the same
// verdict, so that all name the rank that is at fault and not the one that noticed first.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "transport/fork_guard.h"
#include "transport/shm_layout.h"

namespace gpucomm::shm {

class Failures {
 public:
  Failures(const std::vector<ControlBlock*>& blocks, int rank, std::vector<int> global_ranks, double timeout_s);

  // Throws if any rank has given up: this one does too, then. The same failure each time. A forked child is refused.
  void check() {
    if (in_child()) refuse_child();
    // Acquire: partner is the release in alarm_everybody(); the failure that it announces is visible then.
    if (blocks_[rank_]->failure.alarm.load(std::memory_order_acquire) != 0) adopt();
  }
  // The same before a new operation: one who was told already is told that this transport is dead, and of what.
  void check_before_use();
  bool in_child() const { return fork_guard_.forked(); }
  bool failed() const { return blocks_[rank_]->failure.alarm.load(std::memory_order_acquire) != 0; }

  // Each records (unless there is a failure already), alarms everybody and throws what is recorded.
  [[noreturn]] void peer_failed(int culprit, const std::string& reason);
  [[noreturn]] void timed_out(const std::vector<int>& missing, const std::string& what);
  [[noreturn]] void mismatch(const std::string& difference);
  // Any thread; does not throw. Nothing in a forked child, which does not speak for its parent.
  void abort(const std::string& reason) noexcept;

  int global(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[static_cast<size_t>(rank)]; }

 private:
  [[noreturn]] static void refuse_child();
  void adopt();
  [[noreturn]] void rethrow();
  void alarm_everybody() noexcept;
  void record(FailureKind kind, const std::vector<int>& culprits, const std::string& reason) noexcept;

  std::vector<ControlBlock*> blocks_;
  int rank_;
  std::vector<int> global_ranks_;
  double timeout_s_;
  bool told_ = false;  // this rank's failure was thrown
  std::mutex mutex_;   // an abort from another thread
  ForkGuard fork_guard_;
};

}  // namespace gpucomm::shm
