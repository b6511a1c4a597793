// The trace: a fixed ring of events, always on. Writing one costs two counter reads and a 32-byte store.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "core/clock.h"

namespace gpucomm {

// The five stages, and what can stand between them. A gradient that is packed as soon as it is ready gives one event,
// the pack, which begins at that moment, and readers of the trace get both from it. A bucket that is packed as a whole
// gives a ready for each gradient and one pack_bucket.
enum class TraceKind : uint16_t { kReady, kPack, kReduce, kUnpack, kStep, kWait, kHeader, kPackBucket };
inline constexpr int kTraceKindCount = 8;

constexpr std::string_view name_of(TraceKind kind) {
  constexpr std::string_view names[kTraceKindCount] = {"ready", "pack", "reduce", "unpack",
                                                       "step",  "wait", "header", "pack_bucket"};
  return names[static_cast<int>(kind)];
}

struct TraceEvent {
  uint64_t begin_ticks;
  uint64_t end_ticks;
  uint64_t bytes;
  int32_t id;  // ready, pack: parameter; pack_bucket, reduce, unpack, wait: bucket (-1: the whole iteration)
  TraceKind kind;
  uint16_t iteration;  // low 16 bits
};
static_assert(sizeof(TraceEvent) == 32);

class Trace {
 public:
  // capacity is rounded up to a power of two.
  explicit Trace(size_t capacity = 16384);

  // Any thread. A reader that overtakes a writer may see a torn event; snapshot() drops the ones being overwritten.
  void record(TraceKind kind, int32_t id, uint64_t begin_ticks, uint64_t end_ticks, uint64_t bytes,
              uint64_t iteration) noexcept {
    const uint64_t at = next_.fetch_add(1, std::memory_order_relaxed);
    Slot& slot = slots_[at & mask_];
    // Release, with the acquire in snapshot(): a reader that sees a word of this event also sees its claim in next_.
    slot.begin_ticks.store(begin_ticks, std::memory_order_release);
    slot.end_ticks.store(end_ticks, std::memory_order_release);
    slot.bytes.store(bytes, std::memory_order_release);
    slot.label.store(
        static_cast<uint32_t>(id) | static_cast<uint64_t>(kind) << 32 | static_cast<uint64_t>(iteration) << 48,
        std::memory_order_release);
  }

  // Oldest first; at most capacity events.
  std::vector<TraceEvent> snapshot() const;
  uint64_t recorded() const noexcept { return next_.load(std::memory_order_relaxed); }
  void clear() noexcept { next_.store(0, std::memory_order_relaxed); }

 private:
  // An event in words that can be written and read at the same time.
  struct Slot {
    std::atomic<uint64_t> begin_ticks, end_ticks, bytes;
    std::atomic<uint64_t> label;  // id, kind and iteration, from the low bits up
  };
  static_assert(sizeof(Slot) == sizeof(TraceEvent));

  std::unique_ptr<Slot[]> slots_;
  uint64_t mask_;
  std::atomic<uint64_t> next_{0};
};

}  // namespace gpucomm
