#include "fake_cuda/driver/idle_driver.h"

#include <unistd.h>

#include <mutex>

#include "fake_cuda/driver/queues.h"

namespace fake {

namespace {

constexpr std::chrono::milliseconds kBetweenLooks{5};

std::mutex instance_lock;
IdleDriver* instance = nullptr;
pid_t instance_process = 0;  // a forked child has the object and not the thread

}  // namespace

void IdleDriver::start(double seconds) {
  const std::lock_guard lock(instance_lock);
  if (instance_process == getpid()) delete instance;
  instance = seconds > 0 ? new IdleDriver(std::chrono::duration<double>(seconds)) : nullptr;
  instance_process = getpid();
}

IdleDriver::IdleDriver(std::chrono::duration<double> after)
    : thread_([this, after = std::chrono::duration_cast<std::chrono::steady_clock::duration>(after)] {
        while (!is_over_) {
          std::this_thread::sleep_for(kBetweenLooks);
          const std::lock_guard lock(queues().lock());
          queues().run_if_idle(std::chrono::steady_clock::now() - after);
        }
      }) {}

IdleDriver::~IdleDriver() {
  is_over_ = true;
  thread_.join();
}

}  // namespace fake
