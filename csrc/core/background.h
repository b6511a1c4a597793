// Something that happens on a thread of its own, which may hang for ever: it owns what it uses, and nobody has to wait.
#pragma once

#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace gpucomm {

class Background {
 public:
  // Calls body(owned) on a new thread. What is owned is gone by the time it counts as done. body does not throw. Throws
  // std::system_error if no thread is to be had.
  template <typename Owned, typename Body>
  static std::shared_ptr<Background> start(Owned owned, Body body) {
    auto started = std::make_shared<Background>();
    std::thread([started, owned = std::make_unique<Owned>(std::move(owned)), body]() mutable {
      body(*owned);
      owned.reset();
      const std::lock_guard lock(started->mutex_);
      started->done_ = true;
      started->changed_.notify_all();
    }).detach();
    return started;
  }

  // Whether it is done; waits for that no longer than given.
  bool wait_for(std::chrono::milliseconds longest) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, longest, [this] { return done_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
};

}  // namespace gpucomm
