// What lies in a rank's shared region, in this order: control block, data slots, staging, heap.
//
// Every counter has one writer, the region's owner (bell and alarm: everybody), only grows, and stands on cache lines
// of its own.
#pragma once

#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/types.h"
#include "transport/shm_region.h"
#include "transport/waiter.h"

namespace gpucomm::shm {

inline constexpr size_t kLine = 128;  // two lines of 64: the adjacent one is prefetched along
inline constexpr uint64_t kRingSize = 32;
inline constexpr size_t kInlineBytes = 80;
inline constexpr uint64_t kStagingSlots = 4;
inline constexpr int kMaxRanks = 256;

// What must be equal on all ranks.
struct Signature {
  CollectiveKind kind;
  DType dtype;
  ReduceOp op;
  uint8_t unused = 0;
  int32_t root;
  uint64_t numel;
  double scale;
  // Bit for bit, so that a scale of NaN equals itself.
  bool operator==(const Signature& other) const {
    return kind == other.kind && dtype == other.dtype && op == other.op && root == other.root && numel == other.numel &&
           std::bit_cast<uint64_t>(scale) == std::bit_cast<uint64_t>(other.scale);
  }
};

// Where a rank's contribution can be read.
enum class Place : uint32_t {
  kInline,    // in the descriptor
  kSlot,      // in the operation's data slot
  kHeap,      // where the caller has it: memory from allocate()
  kOrdinary,  // only in the owner's address space: must be staged piece by piece
};

// One operation as one rank started it. A small payload travels in the same cache lines as the flag.
struct alignas(kLine) Descriptor {
  std::atomic<uint64_t> number{0};  // written last (release): operation `number` is described and its data in place
  Signature signature;
  uint64_t offset;  // kSlot, kHeap: in the owner's region
  Place place;
  alignas(16) std::byte payload[kInlineBytes];
};

// Why a rank gave up, for its peers.
enum class FailureKind : uint32_t { kAborted, kMismatch, kPeerFailed, kTimeout };

struct FailureRecord {
  std::atomic<uint32_t> alarm{0};     // set by any rank after it recorded a failure of its own
  std::atomic<uint32_t> recorded{0};  // release, after the rest
  FailureKind kind;
  uint64_t culprits[kMaxRanks / 64];  // kPeerFailed, kTimeout: bit per rank
  char reason[512];
};

static_assert(sizeof(Descriptor) == kLine);

struct ControlBlock {
  Nonce nonce;
  alignas(kLine) std::atomic<uint64_t> done{0};       // this rank has done its part of all operations up to this number
  alignas(kLine) std::atomic<uint64_t> copied_in{0};  // rounds of staging since construction (shm_staging.h)
  alignas(kLine) std::atomic<uint64_t> reduced{0};
  alignas(kLine) std::atomic<uint64_t> copied_out{0};
  alignas(kLine) Bell bell;
  alignas(kLine) std::atomic<uint32_t> closed{0};
  alignas(kLine) FailureRecord failure;
  alignas(kLine) Descriptor ring[kRingSize];
};

// Sizes and offsets within a region; the same on all ranks.
struct Layout {
  uint64_t slot_bytes;   // one operation's data, when copied as a whole
  uint64_t piece_bytes;  // one owner's share of one round of staging
  uint64_t slots_offset;
  uint64_t in_offset;
  uint64_t out_offset;
  uint64_t heap_offset;

  static Layout of(int size, size_t slot_bytes, size_t piece_bytes);
  bool operator==(const Layout&) const = default;

  uint64_t slot(uint64_t number) const { return slots_offset + number % kRingSize * slot_bytes; }
  // Staging of one round: a piece for every other rank (at its index among the others), and one result.
  uint64_t in(uint64_t round, int others, int index) const {
    return in_offset +
           (round % kStagingSlots * static_cast<uint64_t>(others) + static_cast<uint64_t>(index)) * piece_bytes;
  }
  uint64_t out(uint64_t round) const { return out_offset + round % kStagingSlots * piece_bytes; }
};

}  // namespace gpucomm::shm
