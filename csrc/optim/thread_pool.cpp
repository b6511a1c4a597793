#include "optim/thread_pool.h"

#include <system_error>
#include <thread>

namespace gpucomm {

ThreadPool& ThreadPool::instance() {
  static std::atomic<ThreadPool*> current{nullptr};
  ThreadPool* pool = current.load();
  // A child leaves its parent's pool alone: its threads are not here, and its locks may be held by them.
  while (pool == nullptr || pool->guard_.forked()) {
    auto* made = new ThreadPool;
    if (current.compare_exchange_strong(pool, made)) return *made;
    delete made;
  }
  return *pool;
}

void ThreadPool::run(size_t items, int threads, const std::function<void(size_t)>& body) {
  std::unique_lock entry(entry_, std::defer_lock);
  if (threads <= 1 || items <= 1 || !entry.try_lock()) {
    for (size_t item = 0; item < items; ++item) body(item);
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    grow(threads - 1);
    body_ = &body;
    items_ = items;
    next_.store(0, std::memory_order_relaxed);
    wanted_ = threads - 1;
  }
  begun_.notify_all();
  take_items(body, items);
  std::unique_lock lock(mutex_);
  wanted_ = 0;  // who is still asleep is not needed any more
  ended_.wait(lock, [this] { return working_ == 0; });
}

void ThreadPool::grow(int count) {
  for (; count_ < count; ++count_) {
    try {
      std::thread([this] { work(); }).detach();
    } catch (const std::system_error&) {
      return;  // fewer do the same work
    }
  }
}

void ThreadPool::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    begun_.wait(lock, [this] { return wanted_ > 0; });
    --wanted_;
    ++working_;
    const std::function<void(size_t)>& body = *body_;
    const size_t items = items_;
    lock.unlock();
    take_items(body, items);
    lock.lock();
    if (--working_ == 0) ended_.notify_one();
  }
}

void ThreadPool::take_items(const std::function<void(size_t)>& body, size_t items) {
  for (size_t item; (item = next_.fetch_add(1, std::memory_order_relaxed)) < items;) body(item);
}

}  // namespace gpucomm
