// Threads that share out the items of one piece of work and are asleep otherwise. There is one pool in a process.
//
// Not OpenMP: its threads spin for a while after each loop, and a forked child cannot use what its parent had.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>

#include "transport/fork_guard.h"

namespace gpucomm {

class ThreadPool {
 public:
  // The pool of this process; a forked child gets one of its own. Never destroyed: its threads end with the process.
  static ThreadPool& instance();

  // Calls body(item) for each item below `items`, on the caller's thread and up to threads - 1 others, in no order;
  // returns when all are done. While another thread is in here, and where no threads are to be had, by itself alone.
  // body does not throw.
  void run(size_t items, int threads, const std::function<void(size_t)>& body);

 private:
  ThreadPool() = default;
  void grow(int count);
  void work();
  void take_items(const std::function<void(size_t)>& body, size_t items);

  const ForkGuard guard_;
  std::mutex entry_;  // held by the thread whose work it is
  std::mutex mutex_;  // of everything below, but for next_
  std::condition_variable begun_, ended_;
  const std::function<void(size_t)>* body_ = nullptr;
  size_t items_ = 0;
  std::atomic<size_t> next_{0};
  int count_ = 0;    // threads that there are
  int wanted_ = 0;   // threads that may still join the present work
  int working_ = 0;  // threads that have
};

}  // namespace gpucomm
