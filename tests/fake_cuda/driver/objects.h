// What the driver's handles point at. Destroyed ones stay known, so that using them is noticed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "fake_cuda/driver/clock.h"
#include "fake_cuda/driver/fake_stream.h"

struct CUctx_st {
  int device = 0;
  int retained = 0;
  CUstream_st* legacy = nullptr;  // its default stream
};

namespace fake {

// One piece of work on a stream.
struct Work {
  std::string name;
  CUstream_st* stream = nullptr;
  uint64_t sequence = 0;                     // in the order of enqueueing
  Epoch epoch;                               // its own
  Clock clock;                               // what it has seen when it runs, itself included
  std::vector<std::shared_ptr<Work>> after;  // of other streams; its own stream's order is the queue's
  std::function<bool(Work&)> step;           // empty: complete as soon as it is its turn
  std::function<void()> drop;
  std::vector<FakeRange> ranges;
  bool started = false;
  bool done = false;
  uint64_t capture = 0;  // in which it was recorded, 0: none
  int64_t completed_ns = 0;
};
using WorkPtr = std::shared_ptr<Work>;

}  // namespace fake

struct CUstream_st {
  CUctx_st* context = nullptr;
  uint32_t line = 0;
  bool blocking = true;  // synchronises with the legacy stream
  bool is_alive = true;
  int priority = 0;
  uint64_t precedence = 0;  // among the streams that could go on, in a random order
  std::string name;
  std::deque<fake::WorkPtr> pending;
  fake::WorkPtr tail;  // the newest work, also when it is done
  fake::Clock clock;
  uint64_t capture = 0;  // 0: none
  bool capture_origin = false;
  bool capture_broken = false;
  int capture_mode = 0;
};

struct CUmod_st;

struct CUevent_st {
  CUctx_st* context = nullptr;
  bool is_alive = true;
  bool has_timing = true;
  std::string name;
  fake::WorkPtr record;  // the newest one; null: never recorded
};

struct CUfunc_st {
  CUmod_st* module = nullptr;
  std::string name;
  const struct FakeKernel* kernel = nullptr;
};

struct CUmod_st {
  CUctx_st* context = nullptr;
  bool is_alive = true;
  std::vector<std::unique_ptr<CUfunc_st>> functions;
};

namespace fake {

// All handles of one kind that were ever given out since the last reset.
template <typename Object>
class Handles {
 public:
  Object& make() {
    objects_.push_back(std::make_unique<Object>());
    known_.emplace(objects_.back().get(), objects_.size() - 1);
    return *objects_.back();
  }
  bool knows(const Object* handle) const { return known_.contains(const_cast<Object*>(handle)); }
  const std::vector<std::unique_ptr<Object>>& all() const { return objects_; }
  void clear() {
    known_.clear();
    objects_.clear();
  }

 private:
  std::vector<std::unique_ptr<Object>> objects_;
  std::unordered_map<Object*, size_t> known_;
};

}  // namespace fake
