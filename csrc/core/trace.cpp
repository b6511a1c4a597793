#include "core/trace.h"

#include <algorithm>
#include <bit>

namespace gpucomm {

Trace::Trace(size_t capacity) {
  const size_t rounded = std::bit_ceil(std::max<size_t>(capacity, 1));
  slots_ = std::make_unique<Slot[]>(rounded);
  mask_ = rounded - 1;
}

std::vector<TraceEvent> Trace::snapshot() const {
  const uint64_t capacity = mask_ + 1;
  const uint64_t end = recorded();
  const uint64_t begin = end > capacity ? end - capacity : 0;
  std::vector<TraceEvent> events;
  events.reserve(end - begin);
  for (uint64_t at = begin; at < end; ++at) {
    const Slot& slot = slots_[at & mask_];
    TraceEvent event;
    event.begin_ticks = slot.begin_ticks.load(std::memory_order_acquire);
    event.end_ticks = slot.end_ticks.load(std::memory_order_acquire);
    event.bytes = slot.bytes.load(std::memory_order_acquire);
    const uint64_t label = slot.label.load(std::memory_order_acquire);
    event.id = static_cast<int32_t>(label);
    event.kind = static_cast<TraceKind>(label >> 32 & 0xffff);
    event.iteration = static_cast<uint16_t>(label >> 48);
    events.push_back(event);
  }
  // Writers went on meanwhile: what they have claimed since may be half written.
  const uint64_t claimed = recorded();
  const uint64_t valid_from = claimed > capacity ? claimed - capacity : 0;
  if (valid_from > begin) {
    events.erase(events.begin(), events.begin() + static_cast<ptrdiff_t>(std::min(valid_from - begin, end - begin)));
  }
  return events;
}

}  // namespace gpucomm
