#include "fake_cuda/driver/memory.h"

#include <cstring>

#include "fake_cuda/driver/reports.h"

namespace fake {

namespace {

constexpr size_t kRedZoneBytes = 1024;
constexpr unsigned char kRedZone = 0xa5;
constexpr unsigned char kFresh = 0xff;
constexpr unsigned char kFreed = 0xfe;
constexpr size_t kQuarantineBytes = size_t{64} << 20;
constexpr size_t kQuarantineCount = 4096;

bool is_all(const unsigned char* from, const unsigned char* to, unsigned char value) {
  for (; from < to; ++from) {
    if (*from != value) return false;
  }
  return true;
}

}  // namespace

Allocation& Memory::allocate(size_t bytes, size_t alignment, Place place, CUctx_st* context, std::string name) {
  auto allocation = std::make_unique<Allocation>();
  allocation->block_bytes = bytes + alignment + 2 * kRedZoneBytes;
  allocation->block.reset(new unsigned char[allocation->block_bytes]);
  unsigned char* block = allocation->block.get();
  std::memset(block, kRedZone, allocation->block_bytes);
  const auto start = reinterpret_cast<uintptr_t>(block) + kRedZoneBytes;
  allocation->base = (start + alignment - 1) / alignment * alignment;
  std::memset(block + (allocation->base - reinterpret_cast<uintptr_t>(block)), kFresh, bytes);
  allocation->bytes = bytes;
  allocation->place = place;
  allocation->context = context;
  allocation->name = name.empty() ? (place == Place::kPinned ? "pinned " : "memory ") + std::to_string(count_) : name;
  ++count_;
  Allocation& result = *allocation;
  live_[result.base] = std::move(allocation);
  return result;
}

bool Memory::add(uintptr_t base, size_t bytes, CUctx_st* context, std::string name) {
  auto next = live_.lower_bound(base);
  if (next != live_.end() && next->first < base + bytes) return false;
  if (holding(base)) return false;
  auto allocation = std::make_unique<Allocation>();
  allocation->base = base;
  allocation->bytes = bytes;
  allocation->place = Place::kRegistered;
  allocation->context = context;
  allocation->name = name.empty() ? "tensor " + std::to_string(count_) : std::move(name);
  ++count_;
  live_[base] = std::move(allocation);
  return true;
}

void Memory::release(Allocation& allocation) {
  auto place = live_.find(allocation.base);
  std::unique_ptr<Allocation> owned = std::move(place->second);
  live_.erase(place);
  check_red_zones(*owned);
  if (owned->block) std::memset(reinterpret_cast<void*>(owned->base), kFreed, owned->bytes);
  freed_bytes_ += owned->block_bytes;
  freed_.push_back(std::move(owned));
  while (freed_bytes_ > kQuarantineBytes || freed_.size() > kQuarantineCount) {
    freed_bytes_ -= freed_.front()->block_bytes;
    freed_.pop_front();
  }
}

Allocation* Memory::starting_at(uintptr_t base) {
  auto place = live_.find(base);
  return place == live_.end() ? nullptr : place->second.get();
}

Allocation* Memory::holding(uintptr_t address) {
  auto next = live_.upper_bound(address);
  if (next == live_.begin()) return nullptr;
  Allocation* allocation = std::prev(next)->second.get();
  return address - allocation->base < allocation->bytes ? allocation : nullptr;
}

bool Memory::check(const std::string& who, uintptr_t address, size_t bytes, bool write) {
  const Allocation* allocation = holding(address);
  if (allocation && allocation->holds(address, bytes)) return true;
  reports().add(Kind::kMemory, who + (write ? " writes to " : " reads from ") + describe(address, bytes) +
                                   (allocation ? ": past its end" : ": not in live memory"));
  return false;
}

const Allocation* Memory::freed_at(uintptr_t address) const {
  for (auto allocation = freed_.rbegin(); allocation != freed_.rend(); ++allocation) {
    if (address - (*allocation)->base < (*allocation)->bytes) return allocation->get();
  }
  return nullptr;
}

std::string Memory::describe(uintptr_t address, size_t bytes) const {
  auto next = live_.upper_bound(address);
  const Allocation* allocation = next == live_.begin() ? nullptr : std::prev(next)->second.get();
  if (allocation && address - allocation->base < allocation->bytes + kRedZoneBytes) {
    const size_t offset = address - allocation->base;
    return allocation->name + " (" + std::to_string(allocation->bytes) + " bytes) [" + std::to_string(offset) + ", " +
           std::to_string(offset + bytes) + ")";
  }
  if (const Allocation* freed = freed_at(address)) {
    const size_t offset = address - freed->base;
    return "freed " + freed->name + " [" + std::to_string(offset) + ", " + std::to_string(offset + bytes) + ")";
  }
  char text[64];
  std::snprintf(text, sizeof text, "address %#zx, %zu bytes", static_cast<size_t>(address), bytes);
  return text;
}

void Memory::check_red_zones(const Allocation& allocation) {
  if (!allocation.block) return;
  const unsigned char* begin = allocation.block.get();
  const unsigned char* data = begin + (allocation.base - reinterpret_cast<uintptr_t>(begin));
  if (!is_all(begin, data, kRedZone))
    reports().add(Kind::kMemory, allocation.name + " was written to before its start");
  if (!is_all(data + allocation.bytes, begin + allocation.block_bytes, kRedZone)) {
    reports().add(Kind::kMemory, allocation.name + " was written to past its end");
  }
}

void Memory::check_red_zones() {
  for (const auto& [base, allocation] : live_) check_red_zones(*allocation);
}

void Memory::report_leaks() {
  for (const auto& [base, allocation] : live_) {
    if (allocation->block) {
      reports().add(Kind::kLeak,
                    allocation->name + ", " + std::to_string(allocation->bytes) + " bytes, was never freed");
    }
  }
}

size_t Memory::live_bytes(CUctx_st* context) const {
  size_t bytes = 0;
  for (const auto& [base, allocation] : live_) {
    if (allocation->place == Place::kDevice && allocation->context == context) bytes += allocation->bytes;
  }
  return bytes;
}

void Memory::clear() {
  live_.clear();
  freed_.clear();
  freed_bytes_ = 0;
  count_ = 0;
}

Memory& memory() {
  static Memory* const instance = new Memory;  // threads may outlive what is destroyed at exit
  return *instance;
}

}  // namespace fake
