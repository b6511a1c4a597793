// The state machine behind ShmTransport: operations in flight, moved forward without blocking.
//
// Operation k of a rank passes through
//   published   its descriptor stands in the ring: what it is and where the rank's data lies. The descriptor's number
//               is the "ready" flag. Waits while the ring is full.
//   own part    once all peers have published k: the rank does its share and moves its counter `done` to k.
//   complete    once nobody needs this rank's memory any more.
// Each stage is passed in order of k, but an operation may have its own part done while an older one is incomplete.
// What the share is follows from ALL descriptors, so all ranks decide alike:
//   gather   every rank reads every contribution and makes its whole output itself. Contributions lie in descriptors,
//            data slots or heaps; only a rank whose heap is being read waits for its peers' done.
//   push     all_reduce of more than a little, or with a contribution in a heap: rank r reduces slice r of all
//            contributions, in rank order, and writes it into all of them; complete when all are done.
//   staged   a contribution is in ordinary memory and too large for a data slot: shm_staging.h.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "transport/shm_counters.h"
#include "transport/shm_failures.h"
#include "transport/shm_handshake.h"
#include "transport/shm_peer_wait.h"
#include "transport/shm_staging.h"

namespace gpucomm::shm {

class Collectives {
 public:
  // Connects to the peers; see connect().
  explicit Collectives(const ShmOptions& options);
  Collectives(const Collectives&) = delete;
  Collectives& operator=(const Collectives&) = delete;

  // Accepts an operation and returns its number. Publishes it if the ring has room. Throws the failure if there is one.
  uint64_t begin(const Collective& collective);
  // Does what can be done without waiting. Throws if this rank or, for a collective that differs, the world has failed.
  void progress();
  // Blocks until the operation is complete.
  void finish(uint64_t number);
  bool complete(uint64_t number) const { return completed_ >= number; }
  bool idle() const { return completed_ == begun_; }
  // Blocks until progress() may get further. Throws CommTimeout, PeerFailed, or what the interrupt check raised.
  void block();

  Memory allocate(size_t bytes);
  void abort(const std::string& reason) noexcept { failures_.abort(reason); }
  // Tells peers that nothing more will come; operations in flight fail. Does not block.
  void close() noexcept;

 private:
  enum class Share : uint8_t { kUndecided, kNothing, kGather, kPush, kStaged };

  struct Operation {
    Collective collective;
    double scale;
    Place place;
    Share share;
    bool waits_for_peers;  // before it is complete
  };

  Operation& operation(uint64_t number) { return operations_[number & (operations_.size() - 1)]; }
  Descriptor& descriptor(int rank, uint64_t number) const { return blocks_[rank]->ring[number % kRingSize]; }
  void grow();
  void step();  // progress() without the bell

  void publish_pending();
  Place place_contribution(uint64_t number, const Collective& collective, Descriptor& descriptor);
  void do_own_parts();
  bool all_published(uint64_t number);
  void decide_share(uint64_t number);
  void compare_descriptors(uint64_t number);
  bool do_share(uint64_t number);
  void gather(uint64_t number);
  void push(uint64_t number);
  void complete_pending();
  std::byte* shared(int rank, uint64_t offset, size_t bytes);
  const std::byte* contribution(int rank, uint64_t number);
  void reduce(const Operation& operation, size_t skip_bytes, int destinations, size_t numel);

  void ring();
  Blocker head_blocker();
  std::string describe(uint64_t number) const;

  World world_;
  std::vector<ControlBlock*> blocks_;
  int rank_;
  int size_;
  ControlBlock& own_;
  Counters counters_;
  Failures failures_;
  Staging staging_;
  PeerWait peer_wait_;
  std::shared_ptr<SharedHeap> heap_;
  uintptr_t heap_begin_;
  uintptr_t heap_end_;
  size_t copy_limit_;  // heap memory up to this size is copied to the data slot all the same

  std::vector<Operation> operations_;  // a ring: at least all in flight
  // Numbers count from 1. completed_ <= done_ <= published_ <= begun_.
  uint64_t begun_ = 0;
  uint64_t published_ = 0;
  uint64_t done_ = 0;
  uint64_t completed_ = 0;
  int published_peers_ = 0;  // of operation done_ + 1: that many ranks were seen to have it published
  uint64_t peers_done_ = 0;  // all peers are known to be done up to here
  bool ring_due_ = false;    // a counter moved and the bell was not rung yet
  Blocker publish_blocker_, share_blocker_, complete_blocker_;

  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

}  // namespace gpucomm::shm
