#include "transport/shm_region.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <set>
#include <system_error>
#include <utility>

namespace gpucomm {
namespace {

// Of a peer's heap, mapped at once.
constexpr size_t kFirstHeapBytes = size_t{1} << 20;

// Granularity of blocks: Memory promises 4096, and pages are given back whole.
size_t page_bytes() {
  static const size_t bytes = std::max<size_t>(4096, static_cast<size_t>(sysconf(_SC_PAGESIZE)));
  return bytes;
}

[[noreturn]] void throw_errno(const std::string& what) {
  throw std::system_error(errno, std::generic_category(), what);
}

std::string posix_name(const Nonce& nonce) { return "/gpucomm-" + nonce.hex(); }

// The regions that this process created, so that ranks that are threads of it share one mapping.
struct OwnRegions {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<SharedRegion>> by_nonce;
};

OwnRegions& own_regions() {
  static OwnRegions* const regions = new OwnRegions;  // outlives every static that holds a region
  return *regions;
}

// All that this process has mapped, for a child that it forks. [Note: forked children]
struct MappedRegions {
  std::mutex mutex;
  std::set<SharedRegion*> regions;
};

MappedRegions& mapped_regions() {
  static MappedRegions* const mapped = new MappedRegions;
  return *mapped;
}

}  // namespace

Nonce Nonce::random() {
  Nonce nonce;
  if (getrandom(&nonce, sizeof nonce, 0) != static_cast<ssize_t>(sizeof nonce)) throw_errno("getrandom");
  return nonce;
}

std::string Nonce::hex() const {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(words[0]),
                static_cast<unsigned long long>(words[1]));
  return text;
}

SharedRegion::SharedRegion(RegionKind kind, int fd, size_t bytes) : kind_(kind), fd_(fd), bytes_(bytes) {}

SharedRegion::~SharedRegion() {
  if (base_ != nullptr) {
    MappedRegions& mapped = mapped_regions();
    const std::lock_guard lock(mapped.mutex);
    mapped.regions.erase(this);
    munmap(base_, mapped_);
    if (heap_.address != nullptr) munmap(heap_.address, heap_.bytes);
  }
  if (fd_ >= 0) close(fd_);
  if (named_ && !fork_guard_.forked()) unlink();
}

void SharedRegion::map(size_t bytes) {
  // The lock is held over the fork, so that the child finds the set as it is and every mapping in it.
  static const int registered =
      pthread_atfork([] { mapped_regions().mutex.lock(); }, [] { mapped_regions().mutex.unlock(); }, &part_from_parent);
  if (registered != 0) throw std::system_error(registered, std::generic_category(), "pthread_atfork");
  MappedRegions& mapped = mapped_regions();
  const std::lock_guard lock(mapped.mutex);
  mapped.regions.insert(this);
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, 0);
  if (address == MAP_FAILED) {
    const int error = errno;
    mapped.regions.erase(this);
    throw std::system_error(error, std::generic_category(), "mmap of " + std::to_string(bytes) + " shared bytes");
  }
  base_ = static_cast<std::byte*>(address);
  mapped_ = bytes;
}

void SharedRegion::map_heap(size_t offset) {
  if (offset == bytes_) return;
  const size_t bytes = std::min(bytes_ - offset, kFirstHeapBytes);
  const std::lock_guard lock(mapped_regions().mutex);
  void* address =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_, static_cast<off_t>(offset));
  if (address == MAP_FAILED) throw_errno("mmap of " + std::to_string(bytes) + " shared bytes");
  heap_ = {static_cast<std::byte*>(address), offset, bytes};
}

// The file stays closed: a mapping of it can be made longer, for which it may have to move.
void SharedRegion::grow_heap(size_t end) {
  GPUCOMM_ASSERT(end <= bytes_ && heap_.address != nullptr, std::to_string(end) + " of " + std::to_string(bytes_));
  const std::lock_guard lock(mapped_regions().mutex);
  const size_t page = page_bytes();
  const size_t needed = (end - heap_.offset + page - 1) / page * page;
  size_t bytes = std::min(bytes_ - heap_.offset, std::max(needed, 2 * heap_.bytes));
  void* address = mremap(heap_.address, heap_.bytes, bytes, MREMAP_MAYMOVE);
  if (address == MAP_FAILED && bytes > needed) {
    bytes = needed;
    address = mremap(heap_.address, heap_.bytes, bytes, MREMAP_MAYMOVE);
  }
  if (address == MAP_FAILED) throw_errno("mapping " + std::to_string(bytes) + " bytes of a peer's shared memory");
  heap_ = {static_cast<std::byte*>(address), heap_.offset, bytes};
}

// In a forked child, which may call nothing that takes a lock or memory. [Note: forked children]
void SharedRegion::part_from_parent() noexcept {
  MappedRegions& mapped = mapped_regions();
  constexpr int kFlags = MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE;
  const auto replace = [](void* address, size_t bytes, int fd, off_t offset) {
    const int flags = fd >= 0 ? kFlags : kFlags | MAP_ANONYMOUS;
    if (mmap(address, bytes, PROT_READ | PROT_WRITE, flags, fd, offset) == MAP_FAILED) {
      // Where memory may not be overcommitted: no memory at all, rather than the parent's.
      mmap(address, bytes, PROT_NONE, kFlags | MAP_ANONYMOUS, -1, 0);
    }
  };
  for (SharedRegion* region : mapped.regions) {
    replace(region->base_, region->mapped_, region->fd_, 0);
    const View& heap = region->heap_;
    if (heap.address != nullptr) replace(heap.address, heap.bytes, region->fd_, static_cast<off_t>(heap.offset));
  }
  mapped.mutex.unlock();
}

std::shared_ptr<SharedRegion> SharedRegion::create(RegionKind kind, size_t bytes, size_t committed_bytes) {
  const Nonce nonce = Nonce::random();
  const bool memfd = kind == RegionKind::kMemfd;
  const int fd = memfd ? memfd_create("gpucomm", MFD_CLOEXEC)
                       : shm_open(posix_name(nonce).c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) throw_errno(memfd ? "memfd_create" : "shm_open " + posix_name(nonce));
  std::shared_ptr<SharedRegion> region(new SharedRegion(kind, fd, bytes));
  region->nonce_ = nonce;
  region->named_ = !memfd;
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) throw_errno("ftruncate to " + std::to_string(bytes) + " bytes");
  region->commit(0, committed_bytes);
  region->map(bytes);
  std::memcpy(region->base_, &nonce, sizeof nonce);
  OwnRegions& own = own_regions();
  const std::lock_guard lock(own.mutex);
  std::erase_if(own.by_nonce, [](const auto& entry) { return entry.second.expired(); });
  own.by_nonce[nonce.hex()] = region;
  return region;
}

static std::shared_ptr<SharedRegion> verified(std::shared_ptr<SharedRegion> region, const std::string& path,
                                              const Nonce& nonce) {
  Nonce found;
  std::memcpy(&found, region->base(), sizeof found);
  if (found != nonce) {
    throw std::system_error(ESTALE, std::generic_category(), path + " is not the region that the peer described");
  }
  return region;
}

static void require_size(int fd, size_t bytes, const std::string& path) {
  struct stat status;
  if (fstat(fd, &status) != 0) throw_errno("fstat " + path);
  if (static_cast<size_t>(status.st_size) != bytes) {
    throw std::system_error(
        ESTALE, std::generic_category(),
        path + " holds " + std::to_string(status.st_size) + " bytes, the peer described " + std::to_string(bytes));
  }
}

std::shared_ptr<SharedRegion> SharedRegion::open_memfd(pid_t pid, int fd, size_t bytes, size_t heap_offset,
                                                       const Nonce& nonce) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  const int opened = open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (opened < 0) throw_errno("open " + path);
  std::shared_ptr<SharedRegion> region(new SharedRegion(RegionKind::kMemfd, opened, bytes));
  require_size(opened, bytes, path);
  region->map(heap_offset);
  region->map_heap(heap_offset);
  close(std::exchange(region->fd_, -1));
  return verified(std::move(region), path, nonce);
}

std::shared_ptr<SharedRegion> SharedRegion::open_posix(size_t bytes, size_t heap_offset, const Nonce& nonce) {
  const std::string name = posix_name(nonce);
  const int opened = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (opened < 0) throw_errno("shm_open " + name);
  std::shared_ptr<SharedRegion> region(new SharedRegion(RegionKind::kPosix, opened, bytes));
  require_size(opened, bytes, name);
  region->map(heap_offset);
  region->map_heap(heap_offset);
  return verified(std::move(region), name, nonce);
}

std::shared_ptr<SharedRegion> SharedRegion::find_own(const Nonce& nonce) {
  OwnRegions& own = own_regions();
  const std::lock_guard lock(own.mutex);
  const auto found = own.by_nonce.find(nonce.hex());
  return found == own.by_nonce.end() ? nullptr : found->second.lock();
}

void SharedRegion::unlink() noexcept {
  shm_unlink(posix_name(nonce_).c_str());
  named_ = false;
}

void SharedRegion::seal() noexcept {
  if (named_) unlink();
}

void SharedRegion::commit(size_t offset, size_t bytes) {
  // A memfd is bounded by the machine's memory alone, as any allocation; a mounted tmpfs has a size of its own.
  if (kind_ == RegionKind::kMemfd || bytes == 0) return;
  const int error = posix_fallocate(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error != 0) {
    throw std::system_error(error, std::generic_category(),
                            "reserving " + std::to_string(bytes) + " bytes in /dev/shm");
  }
}

void SharedRegion::discard(size_t offset, size_t bytes) noexcept {
  if (madvise(base_ + offset, bytes, MADV_REMOVE) != 0) std::memset(base_ + offset, 0, bytes);
}

// What a Memory owns: gives the range back when the last copy dies, whichever thread that is on.
struct SharedHeap::Block {
  Block(std::shared_ptr<SharedHeap> owner, size_t at, size_t size) : heap(std::move(owner)), offset(at), bytes(size) {}
  ~Block() {
    if (!fork_guard.forked()) heap->release(offset, bytes);
  }
  std::shared_ptr<SharedHeap> heap;
  size_t offset;
  size_t bytes;
  ForkGuard fork_guard;
};

SharedHeap::SharedHeap(std::shared_ptr<SharedRegion> region, size_t begin) : region_(std::move(region)) {
  GPUCOMM_ASSERT(begin % page_bytes() == 0 && begin <= region_->bytes(), std::to_string(begin));
  if (begin < region_->bytes()) free_[begin] = region_->bytes() - begin;
}

Memory SharedHeap::allocate(size_t bytes) {
  const std::lock_guard lock(mutex_);
  size_t largest = 0;
  auto found = free_.end();
  for (auto hole = free_.begin(); hole != free_.end() && found == free_.end(); ++hole) {
    largest = std::max(largest, hole->second);
    if (hole->second >= bytes && hole->second > 0) found = hole;
  }
  if (found == free_.end()) {
    throw UsageError("allocate: no room for " + std::to_string(bytes) + " bytes of shared memory, at most " +
                     std::to_string(largest) + " are free in one piece");
  }
  const size_t page = page_bytes();
  const size_t size = std::max(page, (bytes + page - 1) / page * page);
  const auto [offset, hole_bytes] = *found;
  region_->commit(offset, size);
  auto block = std::make_shared<Block>(shared_from_this(), offset, size);
  auto hole = free_.extract(found);  // re-keyed, not copied: nothing here throws any more
  if (hole_bytes > size) {
    hole.key() = offset + size;
    hole.mapped() = hole_bytes - size;
    free_.insert(std::move(hole));
  }
  return {std::move(block), region_->base() + offset, bytes};
}

void SharedHeap::release(size_t offset, size_t bytes) noexcept {
  region_->discard(offset, bytes);
  const std::lock_guard lock(mutex_);
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

}  // namespace gpucomm
