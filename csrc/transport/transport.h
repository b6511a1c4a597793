// What moves buckets between ranks. A transport starts collectives; it never blocks: completion is a task on the
// stream.
//
// Every rank of a transport starts the same collectives in the same order, from one thread at a time. A collective that
// differs between ranks fails on every rank and names the difference.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/error.h"
#include "core/stream.h"
#include "core/types.h"

namespace gpucomm {

// Memory that a transport can reduce in place. Zero-filled, aligned to 4096 bytes, owned by `owner` (and so by every
// copy of this struct); usable until the last copy dies, even after the transport does.
struct Memory {
  std::shared_ptr<void> owner;
  void* address = nullptr;
  size_t bytes = 0;
  int device = -1;  // the ordinal of the GPU whose memory it is, -1: the host's
};

// One collective, as every rank calls it. Memory named here stays untouched by the caller until the task completes.
struct Collective {
  CollectiveKind kind;
  DType dtype = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;  // all_reduce, reduce_scatter
  int root = 0;                  // broadcast
  // Elements on the smaller side. all_reduce, broadcast: of `out`, which is also the input (in == out).
  // reduce_scatter: `in` holds size * numel, `out` numel. all_gather: `in` numel, `out` size * numel. barrier: 0.
  // Of these two the smaller side may be this rank's part of the larger; apart from that they do not overlap.
  size_t numel = 0;
  // Multiplies each rank's contribution before a floating sum (see kernels.h). 1 unless transport.scales_in_reduce().
  double scale = 1.0;
  const void* in = nullptr;
  void* out = nullptr;
  int32_t bucket = -1;  // of the plan, for messages; -1: none of a plan's
};

class Transport {
 public:
  // global_ranks[r] is the number that messages and exceptions use for rank r of this group; empty: r itself.
  Transport(int rank, int size, std::vector<int> global_ranks = {})
      : rank_(rank), size_(size), global_ranks_(std::move(global_ranks)) {}
  virtual ~Transport() = default;
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int global_rank(int rank) const { return global_ranks_.empty() ? rank : global_ranks_[rank]; }

  virtual std::string name() const = 0;
  // True if `scale` costs nothing: the reduction applies it. Otherwise the engine scales while it packs.
  virtual bool scales_in_reduce() const = 0;
  // True if arrays of a failed collective may still be written to afterwards, by something that cannot be called back.
  virtual bool writes_after_failure() const { return false; }
  virtual Memory allocate(size_t bytes) = 0;
  // Starts a collective and enqueues its completion. Throws UsageError for arguments no transport takes.
  virtual void start(const Collective& collective, Stream& stream) = 0;
  // start() and wait. A transport overrides it where it can do without the task.
  virtual void run(const Collective& collective, Stream& stream) {
    start(collective, stream);
    stream.synchronize(stream.record());
  }
  // Throws what went wrong with what was started, as far as it is known, where start() cannot tell: what is complete on
  // a device may have been ended.
  virtual void check_failure() {}
  // Tells the peers that this rank gives up: their waits end with PeerFailed(this rank, reason). Idempotent.
  virtual void abort(const std::string& reason) noexcept = 0;

 protected:
  // Checks what no transport accepts: null pointers with numel > 0, a root outside the group, scale on
  // integers, an all_reduce that is not in place, input and output that overlap elsewhere than in this rank's own part.
  void check(const Collective& collective) const;

 private:
  int rank_;
  int size_;
  std::vector<int> global_ranks_;
};

}  // namespace gpucomm
