#include "transport/transport.h"

#include <cstdint>

namespace gpucomm {

static uintptr_t address_of(const void* memory) { return reinterpret_cast<uintptr_t>(memory); }

[[noreturn]] static void refuse(const Collective& c, const std::string& why) {
  throw UsageError(std::string(name_of(c.kind)) + ": " + why);
}

// Ranks read each other's input while they write their output, so the two may share memory in one way only: where the
// smaller is this rank's own part of the larger, which no other rank's data goes to or comes from.
static void check_overlap(const Collective& c, int rank, int size) {
  const bool gathers = c.kind == CollectiveKind::kAllGather;
  if (!gathers && c.kind != CollectiveKind::kReduceScatter) return;
  const size_t part = c.numel * size_of(c.dtype);
  const size_t whole = part * static_cast<size_t>(size);
  const uintptr_t in = address_of(c.in), out = address_of(c.out);
  const bool apart = in + (gathers ? part : whole) <= out || out + (gathers ? whole : part) <= in;
  const uintptr_t own_part = (gathers ? out : in) + static_cast<size_t>(rank) * part;
  if (part == 0 || apart || (gathers ? in : out) == own_part) return;
  refuse(c, std::string("input and output overlap; ") +
                (gathers ? "input may only be part " + std::to_string(rank) + " of output"
                         : "output may only be part " + std::to_string(rank) + " of input") +
                ", this rank's own");
}

void Transport::check(const Collective& c) const {
  if (c.kind == CollectiveKind::kBroadcast && (c.root < 0 || c.root >= size_)) {
    refuse(c, "root is " + std::to_string(c.root) + ", ranks are 0.." + std::to_string(size_ - 1));
  }
  if (c.numel > 0 && (c.out == nullptr || (c.kind != CollectiveKind::kBroadcast && c.in == nullptr))) {
    refuse(c, "null pointer with numel " + std::to_string(c.numel));
  }
  if (c.kind == CollectiveKind::kAllReduce && c.in != c.out) refuse(c, "in and out differ, it works in place");
  check_overlap(c, rank_, size_);
  if (c.scale != 1.0 && !is_floating(c.dtype)) {
    refuse(c, "scale " + std::to_string(c.scale) + " with dtype " + std::string(name_of(c.dtype)));
  }
}

}  // namespace gpucomm
