// The board: shared memory over which the ranks of one communicator meet. It is a memfd that the process which made the
// unique id holds, and that the others open through /proc/<pid>/fd: it has no name, so nothing stays behind after a
// crash.
//
// [Note: two halves] Launch n of a rank is published in half n % 2 of its part. A rank publishes n + 2 only after it
// has completed n + 1, for which all had published n + 1, and so had completed reading n. Host calls (registrations,
// splits) are numbered apart and use two places in the same way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "fake_cuda/nccl/functions.h"

namespace fake_nccl {

inline constexpr int kMaxRanks = 16;
inline constexpr int kMaxChildren = 64;
inline constexpr size_t kHalfBytes = size_t{1} << 30;  // sparse: costs what is written

struct HostCall {
  int kind;
  int64_t words[3];
};

// A board made from this one, by the lowest of its ranks: by split or shrink.
struct Child {
  std::atomic<uint64_t> key;
  UniqueId id;
};

enum Departure : int { kPresent = 0, kRevoked, kAborted, kDestroyed };

// One rank's part, written by that rank alone. All zero before it comes.
struct Member {
  std::atomic<int> joined;
  int pid;
  uint64_t process_started;
  int size;  // that it gave at init
  int version;
  uint64_t host_hash;
  char bus_id[32];
  std::atomic<int> departure;
  std::atomic<int> async_error;
  std::atomic<uint64_t> published;  // launches
  std::atomic<uint64_t> host_published;
  HostCall host_calls[2];
  // What keeps this rank from its next launch here: uid_tag of another communicator and its launch + 1. 0: nothing.
  std::atomic<uint64_t> held_up_by;
  std::atomic<int> child_count;
  Child children[kMaxChildren];
};

class Board {
 public:
  // A new board, held by this process until release, and the unique id that leads to it.
  static UniqueId create();
  // Null: not there any more, or not a unique id (why).
  static std::shared_ptr<Board> open(const UniqueId& id, int size, std::string* why);
  // This process no longer holds the board for others to open. Without effect where another process made it.
  static void release(const UniqueId& id);
  ~Board();
  Board(const Board&) = delete;
  Board& operator=(const Board&) = delete;

  uint64_t uid() const { return uid_; }
  uint32_t tag() const { return static_cast<uint32_t>(uid_); }
  int size() const { return size_; }
  Member& member(int rank);
  std::byte* half(int rank, uint64_t launch);

 private:
  Board(std::byte* memory, size_t bytes, uint64_t uid, int size);
  std::byte* memory_;
  size_t bytes_;
  uint64_t uid_;
  int size_;
};

// Of this process, and whether that process still runs (a zombie does not).
uint64_t process_start_time();
bool process_runs(int pid, uint64_t started);

}  // namespace fake_nccl
