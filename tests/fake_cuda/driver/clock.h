// Vector clocks. Every stream is a line of its own, and so is the host; a piece of work has a place on its line (an
// epoch), and a clock that says how far it has seen each line when it starts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

inline constexpr uint32_t kHostLine = 0;

struct Epoch {
  uint32_t line = kHostLine;
  uint64_t time = 0;  // 0: before everything
};

class Clock {
 public:
  void join(const Clock& other) {
    if (times_.size() < other.times_.size()) times_.resize(other.times_.size());
    for (size_t line = 0; line < other.times_.size(); ++line) times_[line] = std::max(times_[line], other.times_[line]);
  }

  // One further on a line: the epoch of what happens there next.
  Epoch tick(uint32_t line) {
    if (times_.size() <= line) times_.resize(line + 1);
    return {line, ++times_[line]};
  }

  bool has_seen(Epoch epoch) const {
    return epoch.time == 0 || (epoch.line < times_.size() && times_[epoch.line] >= epoch.time);
  }

 private:
  std::vector<uint64_t> times_;
};

}  // namespace fake
