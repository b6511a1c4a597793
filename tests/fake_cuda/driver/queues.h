// The streams' queues and the adversary that runs them.
//
// Enqueueing computes the clocks and runs nothing. Whatever drives (a query, a drain, a torch op) runs work whose turn
// it is: first in its stream, after all that it waits for. Which of several such streams comes next is the adversary's
// choice. So every order that the program permits can happen, and no order is an accident of threads.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <random>
#include <set>
#include <unordered_set>
#include <vector>

#include "fake_cuda/driver/accesses.h"
#include "fake_cuda/driver/objects.h"

namespace fake {

// In the order of FakeOrder in control.h.
enum class Order : int { kEarliest, kLatest, kRandom };

class Queues {
 public:
  CUstream_st& make_stream(CUctx_st& context, bool blocking, int priority);
  Handles<CUstream_st>& streams() { return streams_; }

  // Takes its place on the stream: after what was enqueued there, what the host has seen complete, what the legacy
  // stream's rules add, and `after`.
  WorkPtr enqueue(CUstream_st& stream, Work work, const std::vector<WorkPtr>& after = {});

  // Drives. Each is false where it did not get to the end within the deadline, which is then reported as `what`.
  bool run_until(const WorkPtr& work, const std::string& what);
  // All that work enqueued on these now would wait for.
  bool run_before(const std::vector<CUstream_st*>& streams, const std::string& what);
  // All of a context; null: of all contexts.
  bool drain(const CUctx_st* context, const std::string& what);
  // All that can run without waiting, if nothing has driven since `since`.
  void run_if_idle(std::chrono::steady_clock::time_point since);
  // A few steps, as many as the adversary likes.
  void run_some();

  bool is_idle(const CUstream_st& stream) const;
  // The host has seen all of this complete: what it enqueues from now on is ordered after it.
  void host_joins(const Clock& clock) { host_.join(clock); }
  // An access by the host itself: ordered after what it has seen complete.
  Access host_access(const std::string& name);
  const Clock& host_clock() const { return host_; }

  void set_order(Order order, uint64_t seed);
  void set_deadline(double seconds) { deadline_ = std::chrono::duration<double>(seconds); }
  unsigned random(unsigned bound) { return bound < 2 ? 0 : static_cast<unsigned>(generator_() % bound); }
  bool is_running_work() const { return running_; }
  std::recursive_mutex& lock() { return lock_; }
  void clear();

 private:
  enum class Progress { kSome, kBlocked, kNone };
  using Chosen = std::unordered_set<const Work*>;

  // One step of one piece of work; null: of any.
  Progress step_one(const Chosen* among);
  CUstream_st& random_one(const std::vector<CUstream_st*>& ready);
  bool drive(const std::function<bool()>& is_over, const Chosen* among, const std::string& what);
  void step(CUstream_st& stream);
  void complete(CUstream_st& stream, Work& work);
  void add_before(const WorkPtr& work, Chosen& chosen) const;
  std::vector<WorkPtr> legacy_order(const CUstream_st& stream) const;
  std::string pending_text() const;

  std::recursive_mutex lock_;
  Handles<CUstream_st> streams_;
  std::unordered_set<const Work*> blocked_;  // could not go on since anything else did
  Clock host_;
  uint32_t lines_ = kHostLine + 1;
  uint64_t sequence_ = 0;
  Order order_ = Order::kRandom;
  std::mt19937_64 generator_{1};
  std::chrono::duration<double> deadline_{20.0};
  std::chrono::steady_clock::time_point driven_{};  // last
  bool running_ = false;
};

Queues& queues();

}  // namespace fake
