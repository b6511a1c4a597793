// Collectives on memory that peers cannot see, pipelined through staging buffers.
//
// The operation is cut into rounds of one piece per owner. A round passes three stages on every rank:
//   copy in   the pieces that other ranks own, from the caller's memory to this rank's staging
//   reduce    the piece that this rank owns, from all ranks' staging to the caller's memory; of an all_reduce also back
//             to where in staging the contributions were. What is not reduced goes to a shared slot of its own.
//   copy out  the other pieces, from this rank's staging or the owners' shared slots to the caller's memory
// Staging holds four rounds, so that they overlap, and stays small enough to remain in cache: the caller's memory is
// read and written once. Not every collective has every stage; a stage it lacks passes at once.
//   copy in g  needs copy out g - 4;   reduce g needs every peer's copy in g, and to write a shared slot every peer's
//   copy out g - 4;   copy out g needs every owner's reduce g.
// Each stage depends on older rounds or on earlier stages of its own, so waiting for the oldest stage cannot deadlock.
//
// Between two cores what counts is how often a line of staging changes hands. Results travel back in the lines in which
// the contributions came, and whoever reads a line takes it for writing: two moves instead of four (two cores of a
// Xeon, 64 MiB: 11.9 against 16.4 ms).
#pragma once

#include "transport/shm_counters.h"
#include "transport/shm_handshake.h"

namespace gpucomm::shm {

class Staging {
 public:
  // world and counters outlive it.
  Staging(const World& world, const Counters& counters, int rank);

  // Operations pass one after the other, in the order of their numbers on every rank.
  void begin(const Collective& collective, double scale);
  // Goes on as far as it goes without waiting; true once this rank's part is complete. blocker: what to wait for.
  bool advance(Blocker& blocker);
  bool active() const { return active_; }

 private:
  struct Piece {
    size_t offset;  // bytes from the start of the whole
    size_t numel;
  };
  Piece piece(int owner, uint64_t round) const;
  bool reduces() const;
  bool shares() const;
  bool awaits(int owner) const;

  bool copy_in();
  bool reduce(Blocker& blocker);
  bool copy_out(Blocker& blocker);
  void reduce_piece(uint64_t round);
  void take_block(uint64_t round, size_t skip, size_t end) const;
  void share_piece(uint64_t round);
  std::byte* staged(int contributor, int owner, uint64_t round) const;

  const World& world_;
  const Counters& counters_;
  ControlBlock& own_;
  int rank_;
  int size_;

  bool active_ = false;
  Collective collective_{};
  double scale_ = 1;
  size_t slice_numel_ = 0;
  size_t piece_numel_ = 0;
  // Rounds are numbered through all operations. Passed by this rank: copied_out_ <= reduced_ <= copied_in_.
  uint64_t first_ = 0;
  uint64_t end_ = 0;
  uint64_t copied_in_ = 0;
  uint64_t reduced_ = 0;
  uint64_t copied_out_ = 0;
  std::vector<const void*> sources_;
  std::vector<void*> destinations_;
};

// The part of an all_reduce that each rank owns: equal slices on cache-line boundaries.
size_t slice_numel(size_t numel, DType dtype, int size);

}  // namespace gpucomm::shm
