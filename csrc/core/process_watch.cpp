#include "core/process_watch.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <sstream>
#include <utility>

namespace gpucomm {
namespace {

// State letter and start time from /proc/<pid>/stat: fields 3 and 22, counted behind the name in parentheses, which may
// hold anything.
bool read_stat(pid_t pid, char* state, uint64_t* start_time) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return false;
  std::istringstream fields(text.substr(name_end + 1));
  std::string field;
  if (!(fields >> *state)) return false;
  for (int i = 4; i < 22; ++i) fields >> field;
  return static_cast<bool>(fields >> *start_time);
}

}  // namespace

uint64_t process_start_time(pid_t pid) {
  char state = 0;
  uint64_t start_time = 0;
  return read_stat(pid, &state, &start_time) ? start_time : 0;
}

std::string boot_id() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  std::getline(file, text);
  return text;
}

std::string pid_namespace() {
  char text[64];
  const ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text);
  return length > 0 ? std::string(text, static_cast<size_t>(length)) : std::string();
}

ProcessWatch::ProcessWatch(pid_t pid, uint64_t start_time) : pid_(pid), start_time_(start_time) {
  if (pid == getpid()) return;
#ifdef SYS_pidfd_open
  pidfd_ = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
}

ProcessWatch::~ProcessWatch() {
  if (pidfd_ >= 0) close(pidfd_);
}

ProcessWatch::ProcessWatch(ProcessWatch&& other) noexcept
    : pid_(other.pid_), start_time_(other.start_time_), pidfd_(std::exchange(other.pidfd_, -1)) {}

bool ProcessWatch::ended() const {
  if (pidfd_ >= 0) {
    pollfd entry{pidfd_, POLLIN, 0};
    return poll(&entry, 1, 0) == 1 && (entry.revents & POLLIN) != 0;
  }
  if (pid_ == getpid()) return false;
  if (kill(pid_, 0) != 0 && errno == ESRCH) return true;
  char state = 0;
  uint64_t start_time = 0;
  if (!read_stat(pid_, &state, &start_time)) return false;  // hidden from us, yet there
  return state == 'Z' || state == 'X' || (start_time_ != 0 && start_time != start_time_);
}

}  // namespace gpucomm
