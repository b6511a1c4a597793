#include "transport/waiter.h"

#include <errno.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "transport/cpu_hints.h"

namespace gpucomm {
namespace {

// Not the private flavour: the word lies in memory shared between processes.
long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* timeout) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, timeout, nullptr, 0);
}

int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * int64_t{1000} + now.tv_nsec / 1000000;
}

// Acquire: partner is the release store of the counter's writer.
bool reached(const std::atomic<uint64_t>& counter, uint64_t target) {
  return counter.load(std::memory_order_acquire) >= target;
}

// Counts a sleeper for as long as it lives.
class Sleeper {
 public:
  explicit Sleeper(Bell& bell) : bell_(bell) { bell_.sleepers.fetch_add(1, std::memory_order_acq_rel); }
  ~Sleeper() { bell_.sleepers.fetch_sub(1, std::memory_order_relaxed); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

 private:
  Bell& bell_;
};

// Between before_blocking and after_blocking; left on every way out.
class BlockingStretch {
 public:
  explicit BlockingStretch(Embedder* embedder) : embedder_(embedder) { enter(); }
  ~BlockingStretch() { leave(); }
  BlockingStretch(const BlockingStretch&) = delete;
  BlockingStretch& operator=(const BlockingStretch&) = delete;
  void enter() {
    if (embedder_ != nullptr && !inside_) embedder_->before_blocking();
    inside_ = true;
  }
  void leave() {
    if (embedder_ != nullptr && inside_) embedder_->after_blocking();
    inside_ = false;
  }

 private:
  Embedder* embedder_;
  bool inside_ = false;
};

}  // namespace

void Bell::wake() {
  // Release: partner is the sleeper's acquire load of `rung`, which then finds the counter moved.
  rung.fetch_add(1, std::memory_order_release);
  futex(rung, FUTEX_WAKE, INT_MAX, nullptr);
}

// With a core for each rank the peer is at work and comes soon: a sleep and its wake-up cost more than the piece that
// is waited for (1 MiB through staging: 830 us with 20 yields, 150 with 300). A yield gives the core to whoever needs
// it.
Waiter::Waiter(Embedder* embedder, bool crowded)
    : embedder_(embedder), pauses_(crowded ? 4 : 40), yields_(crowded ? 8 : 300) {}

bool Waiter::spin(const std::atomic<uint64_t>& counter, uint64_t target, int pauses) {
  for (int i = 0; i < pauses; ++i) {
    if (reached(counter, target)) return true;
    cpu_pause();
  }
  return reached(counter, target);
}

bool Waiter::spin_briefly(const std::atomic<uint64_t>& counter, uint64_t target) const {
  return spin(counter, target, std::min(pauses_, 6));
}

bool Waiter::yield(const std::atomic<uint64_t>& counter, uint64_t target) const {
  for (int i = 0; i < yields_; ++i) {
    sched_yield();
    if (reached(counter, target)) return true;
  }
  return false;
}

void Waiter::check_interrupt(Watch& watch) {
  if (embedder_ == nullptr) return;
  try {
    embedder_->check_interrupt();
  } catch (...) {
    watch.interrupted();
    throw;
  }
}

void Waiter::wait(Bell& bell, const std::atomic<uint64_t>& counter, uint64_t target, Watch& watch) {
  if (spin(counter, target, pauses_)) return;
  BlockingStretch stretch(embedder_);
  if (yield(counter, target)) return;
  const timespec slice{0, kSliceMs * 1000000L};
  int64_t looked_ms = now_ms();
  for (;;) {
    bool signalled = false;
    {
      Sleeper sleeper(bell);
      const uint32_t rung = bell.rung.load(std::memory_order_acquire);
      if (reached(counter, target)) return;
      signalled = futex(bell.rung, FUTEX_WAIT, rung, &slice) != 0 && errno == EINTR;
    }
    if (reached(counter, target)) return;
    // Rung for something else: a flag may have been raised, but system calls can wait for the end of the slice.
    const bool slice_over = now_ms() - looked_ms >= kSliceMs;
    if (signalled || slice_over) {
      stretch.leave();
      check_interrupt(watch);
      stretch.enter();
    }
    if (slice_over) looked_ms = now_ms();
    watch.examine(slice_over);
  }
}

int available_cores() {
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
  const long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online > 0 ? static_cast<int>(online) : 1;
}

}  // namespace gpucomm
