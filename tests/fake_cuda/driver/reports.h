// What went wrong, for the test to read. Nothing here stops the program under test: it goes on as on the device, where
// nobody would have told.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace fake {

// In the order of FakeKind in control.h.
enum class Kind : int {
  kRace,    // two accesses without an order between them
  kMemory,  // an access outside of live memory, a red zone that was written to
  kMisuse,  // a call that the driver's contract forbids
  kLeak,
  kStuck,  // work that did not get further within the deadline
  kNote,   // allowed, but perhaps not meant: waiting on an event that was never recorded
};

struct Report {
  Kind kind;
  std::string text;
  uint64_t count = 1;
};

class Reports {
 public:
  void add(Kind kind, std::string text);
  const std::vector<Report>& all() const { return reports_; }
  void clear();

 private:
  std::vector<Report> reports_;
  std::unordered_map<std::string, size_t> seen_;
};

Reports& reports();

}  // namespace fake
