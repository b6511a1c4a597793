#include "transport/shm_staging.h"

#include <algorithm>
#include <cstring>

#include "kernels/kernels.h"
#include "transport/cpu_hints.h"

namespace gpucomm::shm {
namespace {

int index_among_others(int owner, int rank) { return owner < rank ? owner : owner - 1; }

std::byte* at(void* memory, size_t offset) { return static_cast<std::byte*>(memory) + offset; }
const std::byte* at(const void* memory, size_t offset) { return static_cast<const std::byte*>(memory) + offset; }

// Lines are taken from their owners' caches a block ahead of their use.
constexpr size_t kBlockBytes = 1024;
constexpr size_t kCacheLine = 64;

// Takes the block of lines that starts `skip` bytes into memory, up to `end`.
void take(const std::byte* memory, size_t skip, size_t end) {
  for (size_t i = skip; i < std::min(skip + kBlockBytes, end); i += kCacheLine) prefetch_for_write(memory + i);
}

// What is copied is overwritten next.
void copy_and_take(std::byte* destination, const std::byte* source, size_t bytes) {
  take(source, 0, bytes);
  for (size_t done = 0; done < bytes; done += kBlockBytes) {
    take(source, done + kBlockBytes, bytes);
    std::memcpy(destination + done, source + done, std::min(kBlockBytes, bytes - done));
  }
}

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
      sources_(world.ranks.size()),
      destinations_(world.ranks.size()) {}

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

// Whether this rank writes to its shared slot, for all the others.
bool Staging::shares() const {
  return collective_.kind == CollectiveKind::kBroadcast ? rank_ == collective_.root : !reduces();
}

// Whether the owner's stage is needed here: for its result, or because it reads what is to be overwritten.
bool Staging::awaits(int owner) const {
  return owner != rank_ && (collective_.kind != CollectiveKind::kBroadcast || owner == collective_.root);
}

// Where contributor's part of the owner's piece lies.
std::byte* Staging::staged(int contributor, int owner, uint64_t round) const {
  return world_.ranks[static_cast<size_t>(contributor)].base +
         world_.layout.in(round, size_ - 1, index_among_others(owner, contributor));
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

bool Staging::copy_in() {
  const uint64_t round = copied_in_;
  if (reduces()) {
    if (round >= copied_out_ + kStagingSlots) return false;
    for (int owner = 0; owner < size_; ++owner) {
      const Piece part = piece(owner, round);
      if (owner == rank_ || part.numel == 0) continue;
      std::memcpy(staged(rank_, owner, round), at(collective_.in, part.offset),
                  part.numel * size_of(collective_.dtype));
    }
  }
  // Release: partner is the acquire in the peers' reduce().
  own_.copied_in.store(++copied_in_, std::memory_order_release);
  return true;
}

bool Staging::reduce(Blocker& blocker) {
  const uint64_t round = reduced_;
  if (reduces()) {
    if (!counters_.all_reached(Awaited::kCopiedIn, round + 1, blocker)) return false;
    reduce_piece(round);
  } else if (shares()) {
    if (round >= kStagingSlots && !counters_.all_reached(Awaited::kCopiedOut, round - kStagingSlots + 1, blocker)) {
      return false;
    }
    share_piece(round);
  }
  // Release: partner is the acquire in the peers' copy_out().
  own_.reduced.store(++reduced_, std::memory_order_release);
  return true;
}

void Staging::reduce_piece(uint64_t round) {
  const Piece part = piece(rank_, round);
  const size_t element_bytes = size_of(collective_.dtype);
  const bool scatters = collective_.kind == CollectiveKind::kReduceScatter;
  const size_t own_offset = scatters ? (round - first_) * piece_numel_ * element_bytes : part.offset;
  const auto reduce_block = kernels().reduce[static_cast<int>(collective_.dtype)][static_cast<int>(collective_.op)];
  take_block(round, 0, part.numel * element_bytes);
  for (size_t begin = 0; begin < part.numel; begin += kBlockBytes / element_bytes) {
    const size_t skip = begin * element_bytes;
    const size_t numel = std::min(part.numel - begin, kBlockBytes / element_bytes);
    take_block(round, skip + kBlockBytes, part.numel * element_bytes);
    destinations_[0] = at(collective_.out, own_offset + skip);
    int destinations = 1;
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) {
        sources_[peer] = at(collective_.in, part.offset + skip);
        continue;
      }
      std::byte* theirs = staged(peer, rank_, round) + skip;
      sources_[peer] = theirs;
      if (!scatters) destinations_[destinations++] = theirs;
    }
    reduce_block(sources_.data(), size_, destinations_.data(), destinations, numel, scale_);
  }
}

// Takes the peers' contributions to a block of this rank's piece for writing.
void Staging::take_block(uint64_t round, size_t skip, size_t end) const {
  for (int peer = 0; peer < size_; ++peer) {
    if (peer != rank_) take(staged(peer, rank_, round), skip, end);
  }
}

// all_gather has its contribution at the start of `in`, broadcast its source in `out`.
void Staging::share_piece(uint64_t round) {
  const Piece part = piece(rank_, round);
  if (part.numel == 0) return;
  const size_t element_bytes = size_of(collective_.dtype);
  const bool gathers = collective_.kind == CollectiveKind::kAllGather;
  const std::byte* source =
      gathers ? at(collective_.in, (round - first_) * piece_numel_ * element_bytes) : at(collective_.out, part.offset);
  std::memcpy(world_.ranks[rank_].base + world_.layout.out(round), source, part.numel * element_bytes);
  std::byte* own = at(collective_.out, part.offset);
  if (own != source) std::memcpy(own, source, part.numel * element_bytes);
}

bool Staging::copy_out(Blocker& blocker) {
  const uint64_t round = copied_out_;
  for (int owner = 0; owner < size_; ++owner) {
    if (awaits(owner) && !counters_.reached(owner, Awaited::kReduced, round + 1)) {
      blocker = {Awaited::kReduced, owner, round + 1};
      return false;
    }
  }
  for (int owner = 0; owner < size_; ++owner) {
    const Piece part = piece(owner, round);
    if (!awaits(owner) || part.numel == 0 || collective_.kind == CollectiveKind::kReduceScatter) continue;
    const size_t bytes = part.numel * size_of(collective_.dtype);
    std::byte* destination = at(collective_.out, part.offset);
    if (collective_.kind == CollectiveKind::kAllReduce) {
      copy_and_take(destination, staged(rank_, owner, round), bytes);
    } else {
      std::memcpy(destination, world_.ranks[owner].base + world_.layout.out(round), bytes);
    }
  }
  // Release: partner is the acquire in the owners' reduce(), which then may overwrite their shared slots.
  own_.copied_out.store(++copied_out_, std::memory_order_release);
  return true;
}

bool Staging::advance(Blocker& blocker) {
  Blocker at_out, at_reduce;
  for (bool moved = true; moved;) {
    moved = false;
    // Later stages first: what they read is still in cache.
    if (copied_out_ < reduced_ && copy_out(at_out)) moved = true;
    if (reduced_ < copied_in_ && reduce(at_reduce)) moved = true;
    if (copied_in_ < end_ && copy_in()) moved = true;
    if (moved) own_.bell.ring();
  }
  if (copied_out_ == end_) {
    active_ = false;
    return true;
  }
  // copy_in() never waits for a peer but only for copy_out().
  blocker = copied_out_ < reduced_ ? at_out : at_reduce;
  return false;
}

}  // namespace gpucomm::shm
