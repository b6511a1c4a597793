// The memory that device work may touch: what the stand-in gave out itself (between red zones, filled with NaNs), and
// what a test has declared to be device memory (torch's CPU tensors stand for CUDA ones).
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>

struct CUctx_st;

namespace fake {

enum class Place { kDevice, kPinned, kRegistered };

struct Allocation {
  uintptr_t base = 0;
  size_t bytes = 0;
  Place place = Place::kDevice;
  CUctx_st* context = nullptr;
  std::string name;
  std::unique_ptr<unsigned char[]> block;  // with the red zones; null where the memory is not ours
  size_t block_bytes = 0;

  bool is_host() const { return place == Place::kPinned; }
  bool holds(uintptr_t address, size_t count) const {
    return address >= base && count <= bytes && address - base <= bytes - count;
  }
};

class Memory {
 public:
  // Uninitialised memory is all ones: NaNs in every floating-point type.
  Allocation& allocate(size_t bytes, size_t alignment, Place place, CUctx_st* context, std::string name);
  // Memory that somebody else owns. False where it overlaps what is live.
  bool add(uintptr_t base, size_t bytes, CUctx_st* context, std::string name);
  // The block stays unusable for a while, so that what still refers to it is noticed. The allocation must be live.
  void release(Allocation& allocation);

  Allocation* starting_at(uintptr_t base);
  Allocation* holding(uintptr_t address);
  // Within one live allocation? If not, that is reported, as done by `who`.
  bool check(const std::string& who, uintptr_t address, size_t bytes, bool write);
  // "bucket 0 [0, 4096)", for reports; freed memory is known for a while too.
  std::string describe(uintptr_t address, size_t bytes) const;

  void check_red_zones();
  void report_leaks();
  size_t live_bytes(CUctx_st* context) const;
  void clear();

 private:
  void check_red_zones(const Allocation& allocation);
  const Allocation* freed_at(uintptr_t address) const;

  std::map<uintptr_t, std::unique_ptr<Allocation>> live_;
  std::deque<std::unique_ptr<Allocation>> freed_;  // quarantined, the oldest first
  size_t freed_bytes_ = 0;
  uint64_t count_ = 0;
};

Memory& memory();

}  // namespace fake
