#include "transport/shm_collectives.h"

#include <algorithm>
#include <cstring>
#include <system_error>

#include "kernels/kernels.h"

namespace gpucomm::shm {
namespace {

// Below this the bell can wait until the share is done; above, a sleeping peer should work meanwhile.
constexpr size_t kShortShareBytes = 16 * 1024;

// All contributions of an all_reduce together: up to here every rank reads them all, above it is cheaper to share the
// work and wait once more (P = 4, 8 on 2 cores: equal at 64 KiB).
constexpr size_t kGatherBytes = 64 * 1024;

// Bytes of one rank's contribution.
size_t contribution_bytes(const Collective& c, int size) {
  const size_t bytes = c.numel * size_of(c.dtype);
  return c.kind == CollectiveKind::kReduceScatter ? bytes * static_cast<size_t>(size) : bytes;
}

// What a collective does not use is set alike on all ranks, so that signatures compare.
Signature signature_of(const Collective& c) {
  const bool reduces = c.kind == CollectiveKind::kAllReduce || c.kind == CollectiveKind::kReduceScatter;
  Signature signature{};
  signature.kind = c.kind;
  signature.dtype = c.kind == CollectiveKind::kBarrier ? DType::kUInt8 : c.dtype;
  signature.op = reduces ? c.op : ReduceOp::kSum;
  signature.root = c.kind == CollectiveKind::kBroadcast ? c.root : 0;
  signature.numel = c.kind == CollectiveKind::kBarrier ? 0 : c.numel;
  signature.scale = reduces ? c.scale : 1.0;
  return signature;
}

std::string text_of(const Signature& s, const std::vector<int>& roots) {
  if (s.kind == CollectiveKind::kBarrier) return "";
  std::string text = std::to_string(s.numel) + " " + std::string(name_of(s.dtype));
  if (s.kind == CollectiveKind::kAllReduce || s.kind == CollectiveKind::kReduceScatter) {
    text += ' ';
    text += name_of(s.op);
    if (s.scale != 1.0) text += " scaled by " + std::to_string(s.scale);
  }
  if (s.kind == CollectiveKind::kBroadcast) text += " from rank " + std::to_string(roots[static_cast<size_t>(s.root)]);
  return text;
}

std::vector<ControlBlock*> blocks_of(const World& world) {
  std::vector<ControlBlock*> blocks;
  for (const Peer& peer : world.ranks) blocks.push_back(peer.block);
  return blocks;
}

}  // namespace

Collectives::Collectives(const ShmOptions& options)
    : world_(connect(options)),
      blocks_(blocks_of(world_)),
      rank_(options.rank),
      size_(options.size),
      own_(*blocks_[static_cast<size_t>(options.rank)]),
      counters_(blocks_, rank_),
      failures_(blocks_, rank_, options.global_ranks, options.timeout_s),
      staging_(world_, counters_, rank_),
      peer_wait_(world_, counters_, failures_, rank_, options.timeout_s, options.embedder,
                 [this] { return describe(completed_ + 1); }),
      operations_(2 * kRingSize),
      sources_(static_cast<size_t>(size_)),
      destinations_(static_cast<size_t>(size_)) {
  const std::shared_ptr<SharedRegion>& region = world_.ranks[static_cast<size_t>(rank_)].region;
  heap_ = std::make_shared<SharedHeap>(region, world_.layout.heap_offset);
  heap_begin_ = reinterpret_cast<uintptr_t>(region->base()) + world_.layout.heap_offset;
  heap_end_ = reinterpret_cast<uintptr_t>(region->base()) + region->bytes();
  // With more ranks than cores a second wait costs more than a small copy (P = 4 on 2 cores: 4 against 8 us at 1 KiB).
  copy_limit_ = size_ > available_cores() ? 4096 : 0;
}

Memory Collectives::allocate(size_t bytes) {
  failures_.check_before_use();
  return heap_->allocate(bytes);
}

void Collectives::close() noexcept {
  if (failures_.in_child() || failures_.failed()) return;
  if (!idle()) {
    failures_.abort("it closed its transport during " + describe(completed_ + 1));
    return;
  }
  // Release: partner is the acquire in the peers' PeerWait::examine(), which then look at the counters once more.
  own_.closed.store(1, std::memory_order_release);
  own_.bell.wake();
}

void Collectives::grow() {
  std::vector<Operation> larger(operations_.size() * 2);
  for (uint64_t number = completed_ + 1; number <= begun_; ++number) {
    larger[number & (larger.size() - 1)] = operation(number);
  }
  operations_ = std::move(larger);
}

uint64_t Collectives::begin(const Collective& collective) {
  failures_.check_before_use();
  if (begun_ - completed_ == operations_.size()) grow();
  Operation& next = operation(++begun_);
  next.collective = collective;
  // Where the contribution is, whatever the collective: all_reduce and broadcast have it in `out`.
  if (collective.kind == CollectiveKind::kAllReduce || collective.kind == CollectiveKind::kBroadcast) {
    next.collective.in = collective.out;
  }
  const bool averages = collective.op == ReduceOp::kAvg && is_floating(collective.dtype);
  next.scale = averages ? collective.scale / size_ : collective.scale;
  next.share = Share::kUndecided;
  publish_pending();
  return begun_;
}

void Collectives::progress() {
  if (idle()) return;
  step();
  ring();
}

void Collectives::finish(uint64_t number) {
  for (step(); !complete(number); step()) block();
  ring();
}

void Collectives::step() {
  failures_.check();
  for (;;) {
    do_own_parts();
    complete_pending();
    // Room in the ring comes from completions here, and from peers that are done with what they read.
    const uint64_t published = published_;
    if (published != begun_) publish_pending();
    if (published_ == published) break;
  }
}

void Collectives::ring() {
  if (!ring_due_) return;
  ring_due_ = false;
  own_.bell.ring();
}

// Operation k takes the place of k - kRingSize: this rank has completed that, and no peer reads it any more.
void Collectives::publish_pending() {
  while (published_ < begun_) {
    const uint64_t number = published_ + 1;
    if (number > kRingSize) {
      const uint64_t replaced = number - kRingSize;
      if (completed_ < replaced) return;
      if (peers_done_ < replaced) {
        if (!counters_.all_reached(Awaited::kDone, replaced, publish_blocker_)) return;
        peers_done_ = replaced;
      }
    }
    const Collective& collective = operation(number).collective;
    Descriptor& descriptor = this->descriptor(rank_, number);
    descriptor.signature = signature_of(collective);
    operation(number).place = descriptor.place = place_contribution(number, collective, descriptor);
    // Release: partner is the acquire in the peers' all_published(); covers the contribution too.
    descriptor.number.store(number, std::memory_order_release);
    published_ = number;
    ring_due_ = true;
  }
}

Place Collectives::place_contribution(uint64_t number, const Collective& collective, Descriptor& descriptor) {
  const size_t bytes = contribution_bytes(collective, size_);
  const bool contributes = collective.kind != CollectiveKind::kBroadcast || collective.root == rank_;
  if (bytes <= kInlineBytes) {
    if (contributes && bytes > 0) std::memcpy(descriptor.payload, collective.in, bytes);
    return Place::kInline;
  }
  const auto address = reinterpret_cast<uintptr_t>(collective.in);
  const bool in_heap = address >= heap_begin_ && address < heap_end_ && bytes <= heap_end_ - address;
  if (in_heap && bytes > copy_limit_) {
    descriptor.offset = world_.layout.heap_offset + (address - heap_begin_);
    return Place::kHeap;
  }
  if (bytes > world_.layout.slot_bytes) return Place::kOrdinary;
  descriptor.offset = world_.layout.slot(number);
  if (contributes) std::memcpy(world_.ranks[rank_].base + descriptor.offset, collective.in, bytes);
  return Place::kSlot;
}

void Collectives::do_own_parts() {
  while (done_ < published_) {
    const uint64_t number = done_ + 1;
    if (!all_published(number)) return;
    if (operation(number).share == Share::kUndecided) decide_share(number);
    if (contribution_bytes(operation(number).collective, size_) > kShortShareBytes) ring();
    if (!do_share(number)) return;
    done_ = number;
    published_peers_ = 0;
    // Release: partners are the acquires for kDone: results written to peers, and descriptors and slots read.
    own_.done.store(number, std::memory_order_release);
    ring_due_ = true;
  }
}

bool Collectives::all_published(uint64_t number) {
  for (; published_peers_ < size_; ++published_peers_) {
    if (counters_.reached(published_peers_, Awaited::kStarted, number)) continue;
    share_blocker_ = {Awaited::kStarted, published_peers_, number};
    return false;
  }
  return true;
}

void Collectives::compare_descriptors(uint64_t number) {
  const Signature& first = descriptor(0, number).signature;
  for (int rank = 1; rank < size_; ++rank) {
    const Signature& other = descriptor(rank, number).signature;
    if (other == first) continue;
    std::vector<int> roots;
    for (int root = 0; root < size_; ++root) roots.push_back(failures_.global(root));
    const bool same_kind = other.kind == first.kind;
    const auto text = [&](const Signature& s) -> std::string {
      const std::string name(name_of(s.kind));
      if (same_kind) return text_of(s, roots);
      return s.kind == CollectiveKind::kBarrier ? name : name + " of " + text_of(s, roots);
    };
    failures_.mismatch((same_kind ? std::string(name_of(first.kind)) : "operation") + " #" + std::to_string(number) +
                       ": rank " + std::to_string(failures_.global(0)) + " has " + text(first) + ", rank " +
                       std::to_string(failures_.global(rank)) + " has " + text(other));
  }
}

// A function of all ranks' descriptors and nothing else: all ranks come to the same share.
void Collectives::decide_share(uint64_t number) {
  compare_descriptors(number);
  Operation& op = operation(number);
  const Collective& c = op.collective;
  op.waits_for_peers = false;
  if (c.kind == CollectiveKind::kBarrier || c.numel == 0) {
    op.share = Share::kNothing;
    return;
  }
  bool any_in_heap = false;
  bool any_ordinary = false;
  for (int rank = 0; rank < size_; ++rank) {
    if (c.kind == CollectiveKind::kBroadcast && rank != c.root) continue;
    any_in_heap |= descriptor(rank, number).place == Place::kHeap;
    any_ordinary |= descriptor(rank, number).place == Place::kOrdinary;
  }
  if (size_ == 1) {
    op.share = Share::kGather;
  } else if (any_ordinary) {
    op.share = Share::kStaged;
    staging_.begin(c, op.scale);
  } else if (c.kind == CollectiveKind::kAllReduce &&
             (any_in_heap || contribution_bytes(c, size_) * static_cast<size_t>(size_) > kGatherBytes)) {
    op.share = Share::kPush;
    op.waits_for_peers = true;
  } else {
    op.share = Share::kGather;
    op.waits_for_peers = op.place == Place::kHeap && (c.kind != CollectiveKind::kBroadcast || c.root == rank_);
  }
}

bool Collectives::do_share(uint64_t number) {
  switch (operation(number).share) {
    case Share::kGather:
      gather(number);
      return true;
    case Share::kPush:
      push(number);
      return true;
    case Share::kStaged:
      return staging_.advance(share_blocker_);
    case Share::kUndecided:
    case Share::kNothing:
      break;
  }
  return true;
}

// Where this process has a part of rank's region.
std::byte* Collectives::shared(int rank, uint64_t offset, size_t bytes) {
  if (offset + bytes <= world_.layout.heap_offset) return world_.ranks[rank].base + offset;
  try {
    return world_.ranks[rank].region->reach(offset, bytes);
  } catch (const std::system_error& error) {
    failures_.abort(error.what());  // it cannot do its part, which peers wait for
    failures_.check();
    throw;
  }
}

// Where this process reads what rank contributes.
const std::byte* Collectives::contribution(int rank, uint64_t number) {
  if (rank == rank_) return static_cast<const std::byte*>(operation(number).collective.in);
  const Descriptor& descriptor = this->descriptor(rank, number);
  if (descriptor.place == Place::kInline) return descriptor.payload;
  return shared(rank, descriptor.offset, contribution_bytes(operation(number).collective, size_));
}

// Reduces numel elements that start skip_bytes into every source, to the first of destinations_.
void Collectives::reduce(const Operation& operation, size_t skip_bytes, int destinations, size_t numel) {
  for (const void*& source : sources_) source = static_cast<const std::byte*>(source) + skip_bytes;
  kernels().reduce[static_cast<int>(operation.collective.dtype)][static_cast<int>(operation.collective.op)](
      sources_.data(), size_, destinations_.data(), destinations, numel, operation.scale);
}

void Collectives::gather(uint64_t number) {
  const Operation& op = operation(number);
  const Collective& c = op.collective;
  const size_t bytes = c.numel * size_of(c.dtype);
  if (c.kind == CollectiveKind::kAllReduce || c.kind == CollectiveKind::kReduceScatter) {
    for (int rank = 0; rank < size_; ++rank) sources_[rank] = contribution(rank, number);
    destinations_[0] = c.out;
    reduce(op, c.kind == CollectiveKind::kReduceScatter ? static_cast<size_t>(rank_) * bytes : 0, 1, c.numel);
    return;
  }
  for (int rank = 0; rank < size_; ++rank) {
    if (c.kind == CollectiveKind::kBroadcast && rank != c.root) continue;
    const size_t offset = c.kind == CollectiveKind::kBroadcast ? 0 : static_cast<size_t>(rank) * bytes;
    std::byte* destination = static_cast<std::byte*>(c.out) + offset;
    const std::byte* source = contribution(rank, number);
    if (destination != source) std::memcpy(destination, source, bytes);
  }
}

void Collectives::push(uint64_t number) {
  const Operation& op = operation(number);
  const size_t slice = slice_numel(op.collective.numel, op.collective.dtype, size_);
  const size_t begin = std::min(static_cast<size_t>(rank_) * slice, op.collective.numel);
  const size_t numel = std::min(slice, op.collective.numel - begin);
  if (numel == 0) return;
  const size_t skip_bytes = begin * size_of(op.collective.dtype);
  for (int rank = 0; rank < size_; ++rank) {
    std::byte* whole = shared(rank, descriptor(rank, number).offset, contribution_bytes(op.collective, size_));
    sources_[rank] = whole;
    destinations_[rank] = whole + skip_bytes;
  }
  reduce(op, skip_bytes, size_, numel);
}

void Collectives::complete_pending() {
  while (completed_ < done_) {
    const uint64_t number = completed_ + 1;
    const Operation& op = operation(number);
    if (op.waits_for_peers && peers_done_ < number) {
      if (!counters_.all_reached(Awaited::kDone, number, complete_blocker_)) return;
      peers_done_ = number;
    }
    if (op.share == Share::kPush && op.place == Place::kSlot) {
      std::memcpy(op.collective.out, world_.ranks[rank_].base + world_.layout.slot(number),
                  op.collective.numel * size_of(op.collective.dtype));
    }
    completed_ = number;
  }
}

Blocker Collectives::head_blocker() {
  if (done_ > completed_) return complete_blocker_;
  return published_ > completed_ ? share_blocker_ : publish_blocker_;
}

void Collectives::block() {
  failures_.check();
  if (idle()) return;
  const Blocker blocker = head_blocker();
  // Ringing waits until the counter has left this core: where the peer answers at once, do it after the next step.
  if (peer_wait_.spin_briefly(blocker)) return;
  ring();
  peer_wait_.wait(blocker);
}

std::string Collectives::describe(uint64_t number) const {
  const Collective& c = operations_[number & (operations_.size() - 1)].collective;
  std::string text = std::string(name_of(c.kind)) + " #" + std::to_string(number);
  if (c.kind != CollectiveKind::kBarrier)
    text += " of " + std::to_string(c.numel) + " " + std::string(name_of(c.dtype));
  return text;
}

}  // namespace gpucomm::shm
