#include "transport/shm_staging.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"

namespace gpucomm::shm {
namespace {

int index_among_others(int owner, int rank) { return owner < rank ? owner : owner - 1; }

std::byte* at(void* memory, size_t offset) { return static_cast<std::byte*>(memory) + offset; }
const std::byte* at(const void* memory, size_t offset) { return static_cast<const std::byte*>(memory) + offset; }

}  // namespace

size_t slice_numel(size_t numel, DType dtype, int size) {
  const size_t line = 64 / size_of(dtype);
  const size_t ranks = static_cast<size_t>(size);
  return (numel / ranks + (numel % ranks != 0 ? 1 : 0) + line - 1) / line * line;
}

Staging::Staging(const World& world, const Counters& counters, int rank)
    : world_(world),
      counters_(counters),
      own_(*world.ranks[static_cast<size_t>(rank)].block),
      rank_(rank),
      size_(static_cast<int>(world.ranks.size())),
      sources_(world.ranks.size()) {}

void Staging::begin(const Collective& collective, double scale) {
  collective_ = collective;
  scale_ = scale;
  piece_numel_ = world_.layout.piece_bytes / size_of(collective.dtype);
  slice_numel_ = collective.kind == CollectiveKind::kAllReduce ? slice_numel(collective.numel, collective.dtype, size_)
                                                               : collective.numel;
  first_ = end_;
  end_ = first_ + (slice_numel_ + piece_numel_ - 1) / piece_numel_;
  active_ = true;
}

bool Staging::reduces() const {
  return collective_.kind == CollectiveKind::kAllReduce || collective_.kind == CollectiveKind::kReduceScatter;
}

bool Staging::writes_result() const {
  return collective_.kind == CollectiveKind::kBroadcast ? rank_ == collective_.root
                                                        : collective_.kind != CollectiveKind::kReduceScatter;
}

bool Staging::reads_result_of(int owner) const {
  if (owner == rank_ || collective_.kind == CollectiveKind::kReduceScatter) return false;
  return collective_.kind != CollectiveKind::kBroadcast || owner == collective_.root;
}

// Round `round` of the slice that owner owns. In a broadcast the root owns the only slice.
Staging::Piece Staging::piece(int owner, uint64_t round) const {
  const size_t start = collective_.kind == CollectiveKind::kBroadcast ? 0 : static_cast<size_t>(owner) * slice_numel_;
  const size_t whole = collective_.kind == CollectiveKind::kAllReduce || collective_.kind == CollectiveKind::kBroadcast
                           ? collective_.numel
                           : collective_.numel * static_cast<size_t>(size_);
  const size_t begin = start + (round - first_) * piece_numel_;
  const size_t slice_end = std::min(start + slice_numel_, whole);
  if (begin >= slice_end) return {0, 0};
  return {begin * size_of(collective_.dtype), std::min(piece_numel_, slice_end - begin)};
}

bool Staging::copy_in(Blocker& blocker) {
  const uint64_t round = copied_in_;
  if (reduces()) {
    if (round >= kStagingSlots && !counters_.all_reached(Awaited::kReduced, round - kStagingSlots + 1, blocker)) {
      return false;
    }
    for (int owner = 0; owner < size_; ++owner) {
      if (owner == rank_) continue;
      const Piece part = piece(owner, round);
      std::byte* staged =
          world_.ranks[rank_].base + world_.layout.in(round, size_ - 1, index_among_others(owner, rank_));
      if (part.numel > 0) {
        std::memcpy(staged, at(collective_.in, part.offset), part.numel * size_of(collective_.dtype));
      }
    }
  }
  // Release: partner is the acquire in the peers' reduce().
  own_.copied_in.store(++copied_in_, std::memory_order_release);
  return true;
}

bool Staging::reduce(Blocker& blocker) {
  const uint64_t round = reduced_;
  if (reduces() && !counters_.all_reached(Awaited::kCopiedIn, round + 1, blocker)) return false;
  if (writes_result() && round >= kStagingSlots &&
      !counters_.all_reached(Awaited::kCopiedOut, round - kStagingSlots + 1, blocker)) {
    return false;
  }
  reduce_piece(round);
  // Release: partner is the acquire in the peers' copy_out() and copy_in().
  own_.reduced.store(++reduced_, std::memory_order_release);
  return true;
}

void Staging::reduce_piece(uint64_t round) {
  const Piece part = piece(rank_, round);
  if (part.numel == 0) return;
  std::byte* result = world_.ranks[rank_].base + world_.layout.out(round);
  const size_t bytes = part.numel * size_of(collective_.dtype);
  if (!reduces()) {
    if (!writes_result()) return;
    // all_gather has its contribution at the start of `in`, broadcast its source in `out`.
    const bool gathers = collective_.kind == CollectiveKind::kAllGather;
    const std::byte* source = gathers ? at(collective_.in, (round - first_) * piece_numel_ * size_of(collective_.dtype))
                                      : at(collective_.out, part.offset);
    std::memcpy(result, source, bytes);
    std::byte* own = at(collective_.out, part.offset);
    if (own != source) std::memcpy(own, source, bytes);
    return;
  }
  for (int peer = 0; peer < size_; ++peer) {
    sources_[peer] =
        peer == rank_ ? at(collective_.in, part.offset)
                      : world_.ranks[peer].base + world_.layout.in(round, size_ - 1, index_among_others(rank_, peer));
  }
  const bool scatters = collective_.kind == CollectiveKind::kReduceScatter;
  const size_t own_offset = scatters ? (round - first_) * piece_numel_ * size_of(collective_.dtype) : part.offset;
  void* const destinations[2] = {at(collective_.out, own_offset), result};
  kernels().reduce[static_cast<int>(collective_.dtype)][static_cast<int>(collective_.op)](
      sources_.data(), size_, destinations, scatters ? 1 : 2, part.numel, scale_);
}

bool Staging::copy_out(Blocker& blocker) {
  const uint64_t round = copied_out_;
  for (int owner = 0; owner < size_; ++owner) {
    if (reads_result_of(owner) && !counters_.reached(owner, Awaited::kReduced, round + 1)) {
      blocker = {Awaited::kReduced, owner, round + 1};
      return false;
    }
  }
  for (int owner = 0; owner < size_; ++owner) {
    const Piece part = piece(owner, round);
    if (!reads_result_of(owner) || part.numel == 0) continue;
    std::memcpy(at(collective_.out, part.offset), world_.ranks[owner].base + world_.layout.out(round),
                part.numel * size_of(collective_.dtype));
  }
  // Release: partner is the acquire in the owners' reduce(), which then may overwrite the result slot.
  own_.copied_out.store(++copied_out_, std::memory_order_release);
  return true;
}

bool Staging::advance(Blocker& blocker) {
  Blocker at_out, at_reduce, at_in;
  for (bool moved = true; moved;) {
    moved = false;
    // Later stages first: what they read is still in cache.
    if (copied_out_ < reduced_ && copy_out(at_out)) moved = true;
    if (reduced_ < copied_in_ && reduce(at_reduce)) moved = true;
    if (copied_in_ < end_ && copy_in(at_in)) moved = true;
    if (moved) own_.bell.ring();
  }
  if (copied_out_ == end_) {
    active_ = false;
    return true;
  }
  blocker = copied_out_ < reduced_ ? at_out : reduced_ < copied_in_ ? at_reduce : at_in;
  return false;
}

}  // namespace gpucomm::shm
