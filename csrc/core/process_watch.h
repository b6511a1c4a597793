// Whether a peer process is still alive, and the facts by which processes recognise each other.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

namespace gpucomm {

// Ticks since boot at which the process started; 0 if that cannot be read. With the pid it names one process for ever.
uint64_t process_start_time(pid_t pid);
// Names this boot of this kernel; empty if unknown.
std::string boot_id();
// Names the namespace in which this process's pid is valid; empty if unknown.
std::string pid_namespace();

// Watches one process through a pidfd, or by pid and start time where the kernel has none (before 5.3).
class ProcessWatch {
 public:
  // Of a process of this machine's, in the same pid namespace.
  ProcessWatch(pid_t pid, uint64_t start_time);
  ~ProcessWatch();
  ProcessWatch(ProcessWatch&& other) noexcept;
  ProcessWatch(const ProcessWatch&) = delete;
  ProcessWatch& operator=(const ProcessWatch&) = delete;

  pid_t pid() const { return pid_; }
  // True from the moment the process ended, reaped or not. One system call.
  bool ended() const;

 private:
  pid_t pid_;
  uint64_t start_time_;
  int pidfd_ = -1;
};

}  // namespace gpucomm
