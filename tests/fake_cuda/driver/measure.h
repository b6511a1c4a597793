// What a kernel reads and writes, measured: kernels are compiled with -fsanitize=thread, whose calls before each access
// come here in place of the sanitizer's library.
#pragma once

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "fake_cuda/driver/fake_stream.h"

namespace fake {

class Recorder {
 public:
  explicit Recorder(std::string who) : who_(std::move(who)) {}

  // Memory of the launch itself (arguments, variables of the thread), of no account.
  void ignore(const void* address, size_t bytes);
  // Runs a kernel. An access outside of live memory is reported and ends it there, before it happens.
  void run(const std::function<void()>& kernel);
  // What it accessed, merged.
  std::vector<FakeRange> ranges() const;

  void touch(uintptr_t address, size_t bytes, bool write);

 private:
  struct Span {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool holds(uintptr_t address, size_t bytes) const { return address >= begin && address + bytes <= end; }
  };
  bool is_live(uintptr_t address, size_t bytes);
  bool is_ignored(uintptr_t address, size_t bytes) const;
  static void append(std::vector<Span>& spans, uintptr_t address, size_t bytes);
  static void add_merged(std::vector<Span> spans, bool write, std::vector<FakeRange>& ranges);

  std::string who_;
  std::vector<Span> ignored_;
  std::vector<Span> reads_;
  std::vector<Span> writes_;
  Span recent_[4];  // allocations that were touched last
  unsigned next_recent_ = 0;
  std::jmp_buf stop_;
};

// The recorder of the kernel that runs on this thread, null: none.
extern thread_local Recorder* recorder;

}  // namespace fake
