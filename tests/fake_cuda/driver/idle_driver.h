// The thread that runs what is pending where nobody drives: see fake_drive_when_idle in control.h.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

namespace fake {

class IdleDriver {
 public:
  // Ends the one there is, and starts another unless seconds is 0. Not under the lock, which the thread takes.
  static void start(double seconds);

  explicit IdleDriver(std::chrono::duration<double> after);
  ~IdleDriver();
  IdleDriver(const IdleDriver&) = delete;
  IdleDriver& operator=(const IdleDriver&) = delete;

 private:
  std::atomic<bool> is_over_{false};
  std::thread thread_;
};

}  // namespace fake
