// One stretch of memory shared between processes, and the heap inside it that allocate() serves.
//
// A region is a memfd: it has no name, so nothing is left behind however its processes end. Peers open it through
// /proc/<pid>/fd/<n> and prove by a nonce that they got the right one. It is sparse: its maker maps as much as may ever
// be needed, pages come when they are touched and go when a block is released. Its peers map the part before the heap,
// and of the heap what they had to reach so far: growing that takes no further handshake, and address space is left for
// many communicators.
//
// [Note: forked children] A child inherits the mappings, so whatever it wrote there (a gradient, a counter, a failure)
// would reach its parent's group. The moment it is forked it therefore trades them: its own region for a private view,
// and its peers' for empty memory. The view is no snapshot: a page that the child has not written shows what the parent
// writes there later. Copying it all at each fork would cost what an arena holds, for children that never look.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "transport/fork_guard.h"
#include "transport/transport.h"

namespace gpucomm {

// 128 random bits.
struct Nonce {
  uint64_t words[2] = {0, 0};
  bool operator==(const Nonce&) const = default;
  static Nonce random();
  std::string hex() const;
};

// kMemfd: nameless, through /proc. kPosix: a name in /dev/shm until unlink(), for where /proc is refused.
enum class RegionKind : uint8_t { kMemfd, kPosix };

// A mapped region. Throws std::system_error with the failed call and what it was called on.
class SharedRegion {
 public:
  // A new region, zero-filled, of which the first committed_bytes are backed by memory at once.
  static std::shared_ptr<SharedRegion> create(RegionKind kind, size_t bytes, size_t committed_bytes);
  // The region of a peer, of which the heap begins at heap_offset. nonce: what the peer said; compared with what lies
  // in the region's first bytes.
  static std::shared_ptr<SharedRegion> open_memfd(pid_t pid, int fd, size_t bytes, size_t heap_offset,
                                                  const Nonce& nonce);
  static std::shared_ptr<SharedRegion> open_posix(size_t bytes, size_t heap_offset, const Nonce& nonce);
  // The region that this process itself created under the nonce (threads as ranks): they share one mapping. Null if
  // none.
  static std::shared_ptr<SharedRegion> find_own(const Nonce& nonce);

  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  // Where the part before the heap lies; in the process that made the region, all of it.
  std::byte* base() const { return base_; }
  size_t bytes() const { return bytes_; }
  // Where [offset, offset + bytes) lies, which is within the heap or before it. What was returned for the heap before
  // may have moved.
  std::byte* reach(size_t offset, size_t bytes) {
    if (offset + bytes <= mapped_) return base_ + offset;
    if (offset + bytes > heap_.offset + heap_.bytes) grow_heap(offset + bytes);
    return heap_.address + (offset - heap_.offset);
  }
  const Nonce& nonce() const { return nonce_; }
  int fd() const { return fd_; }

  // All peers have mapped it: drops the name. Idempotent.
  void seal() noexcept;
  // Backs a range with memory now, so that a full /dev/shm is an error here and no SIGBUS later.
  void commit(size_t offset, size_t bytes);
  // Gives the pages of a range back; it reads as zeros afterwards.
  void discard(size_t offset, size_t bytes) noexcept;

 private:
  SharedRegion(RegionKind kind, int fd, size_t bytes);
  // A part of it that a peer mapped.
  struct View {
    std::byte* address = nullptr;
    size_t offset = 0;
    size_t bytes = 0;
  };
  void map(size_t bytes);
  void map_heap(size_t offset);
  void grow_heap(size_t end);
  void unlink() noexcept;
  static void part_from_parent() noexcept;

  RegionKind kind_;
  int fd_;
  size_t bytes_;
  std::byte* base_ = nullptr;
  size_t mapped_ = 0;  // at base_
  View heap_;          // of a peer's region
  Nonce nonce_;
  bool named_ = false;
  ForkGuard fork_guard_;
};

// First-fit allocation of page-aligned blocks in [begin, region end). Any thread.
class SharedHeap : public std::enable_shared_from_this<SharedHeap> {
 public:
  SharedHeap(std::shared_ptr<SharedRegion> region, size_t begin);

  // Zero-filled. The block keeps the region mapped until its last owner dies. Throws UsageError if there is no room,
  // std::system_error if the system has none.
  Memory allocate(size_t bytes);

 private:
  struct Block;
  void release(size_t offset, size_t bytes) noexcept;

  std::shared_ptr<SharedRegion> region_;
  std::mutex mutex_;
  std::map<size_t, size_t> free_;  // offset -> bytes; neighbours are merged
};

}  // namespace gpucomm
