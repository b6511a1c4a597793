// What a test has scripted: the machine, calls that fail, ordering calls that are dropped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace fake {

struct Machine {
  int device_count = 1;
  int driver_version = 13000;
  int capability_major = 9;
  int capability_minor = 0;
  size_t memory_bytes = size_t{4} << 30;
};

// Places in the program under test that put an order between streams.
class Sites {
 public:
  struct Site {
    std::string name;
    uint64_t calls = 0;
  };

  // Is this call, of an exported function that the program has just called, to be dropped?
  bool drops(const char* function);
  void set_depth(int depth) { depth_ = depth; }
  void mutate(int site) { mutated_ = site; }
  const std::vector<Site>& all() const { return sites_; }
  void clear();

 private:
  std::string caller_of(const char* function) const;

  std::vector<Site> sites_;
  std::map<std::string, size_t> by_name_;
  int depth_ = 4;
  int mutated_ = -1;
};

// Calls by function, and those that are to fail.
class Calls {
 public:
  // Counts one. The result it is to fail with, or 0.
  int enter(const std::string& function);
  void fail(const std::string& function, uint64_t nth, int result) {
    failures_[function][counts_[function] + nth] = result;
  }
  uint64_t count(const std::string& function) const;
  void clear();

 private:
  std::map<std::string, uint64_t> counts_;
  std::map<std::string, std::map<uint64_t, int>> failures_;
};

struct Script {
  Machine machine;
  Sites sites;
  Calls calls;
};

Script& script();

}  // namespace fake
