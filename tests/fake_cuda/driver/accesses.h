// Which piece of work touched which bytes last, and whether each access is ordered after those it must be ordered
// after: a read after the last write, a write after the last write and after every read since.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "fake_cuda/driver/clock.h"

namespace fake {

// Who accesses: a kernel, copy, torch op by name, and the stream that it was on.
using Site = uint32_t;

struct Access {
  Epoch epoch;
  Site site = 0;
};

class Accesses {
 public:
  Site site(const std::string& name, const std::string& stream);

  // Records an access by work that has seen `clock` (its own epoch in it); a missing order is reported.
  void read(uintptr_t address, size_t bytes, Access access, const Clock& clock);
  void write(uintptr_t address, size_t bytes, Access access, const Clock& clock);
  // The range begins a new life: what follows must be ordered after `access`, nothing before it counts.
  void begin(uintptr_t address, size_t bytes, Access access);
  // As though it had never been touched.
  void forget(uintptr_t address, size_t bytes);
  void clear();

 private:
  struct Segment {
    uintptr_t end = 0;
    Access written;
    std::vector<Access> reads;  // since that write, the last one of each line
  };
  using Segments = std::map<uintptr_t, Segment>;

  // The first segment within [address, end), after cutting those that reach across its borders.
  Segments::iterator cut(uintptr_t address, uintptr_t end);
  void race(uintptr_t address, size_t bytes, Access earlier, bool earlier_writes, Access later, bool later_writes);

  Segments segments_;
  std::vector<std::string> sites_;
  std::unordered_map<std::string, Site> site_of_;
};

Accesses& accesses();

}  // namespace fake
