#include "transport/shm_peer_wait.h"

#include <time.h>

#include <algorithm>
#include <utility>

namespace gpucomm::shm {
namespace {

// Stands for no timeout at all: 30 years, which nanoseconds of 64 bits hold.
constexpr double kLongestS = 1e9;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000000000} + now.tv_nsec;
}

}  // namespace

PeerWait::PeerWait(const World& world, const Counters& counters, Failures& failures, int rank, double timeout_s,
                   Embedder* embedder, Describe describe)
    : world_(world),
      counters_(counters),
      failures_(failures),
      rank_(rank),
      size_(static_cast<int>(world.ranks.size())),
      timeout_s_(std::min(timeout_s, kLongestS)),
      waiter_(embedder, size_ > available_cores()),
      describe_(std::move(describe)) {}

bool PeerWait::spin_briefly(const Blocker& blocker) const {
  return waiter_.spin_briefly(counters_.of(blocker.rank, blocker.awaited, blocker.target), blocker.target);
}

void PeerWait::wait(const Blocker& blocker) {
  if (blocker.awaited != awaited_.awaited || blocker.target != awaited_.target) deadline_ns_ = 0;
  awaited_ = blocker;
  const std::atomic<uint64_t>& counter = counters_.of(blocker.rank, blocker.awaited, blocker.target);
  waiter_.wait(world_.ranks[static_cast<size_t>(blocker.rank)].block->bell, counter, blocker.target, *this);
}

bool PeerWait::misses(int rank) const {
  return rank != rank_ && !counters_.reached(rank, awaited_.awaited, awaited_.target);
}

void PeerWait::examine(bool slice_over) {
  failures_.check();
  bool any_missing = false;
  for (int rank = 0; rank < size_; ++rank) {
    if (!misses(rank)) continue;
    const Peer& peer = world_.ranks[static_cast<size_t>(rank)];
    // What a peer did before it closed or ended counts: look at the counter once more afterwards.
    // Acquire: partner is the release in Collectives::close().
    if (peer.block->closed.load(std::memory_order_acquire) != 0 && misses(rank)) {
      failures_.peer_failed(rank,
                            "it closed its transport (its program ended, or let go of the wrapper: do all ranks run "
                            "as many iterations?) before its part of " +
                                describe_());
    }
    if (slice_over && peer.process.ended() && misses(rank)) {
      failures_.peer_failed(
          rank, "process " + std::to_string(peer.process.pid()) + " ended before its part of " + describe_());
    }
    any_missing = true;
  }
  if (slice_over && any_missing) check_deadline();
}

void PeerWait::check_deadline() {
  const int64_t now = now_ns();
  if (deadline_ns_ == 0) {
    // The first slice is over: the wait began that much earlier.
    deadline_ns_ = now + static_cast<int64_t>(timeout_s_ * 1e9) - Waiter::kSliceMs * 1000000;
  }
  if (now < deadline_ns_) return;
  std::vector<int> ranks;
  for (int rank = 0; rank < size_; ++rank) {
    if (misses(rank)) ranks.push_back(rank);
  }
  if (!ranks.empty()) failures_.timed_out(ranks, describe_());
}

void PeerWait::interrupted() noexcept {
  // The caller gets its memory back, so the operation cannot go on.
  failures_.abort("it was interrupted in " + describe_());
}

}  // namespace gpucomm::shm
