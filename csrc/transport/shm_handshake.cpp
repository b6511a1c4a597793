#include "transport/shm_handshake.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <new>

#include "core/error.h"

namespace gpucomm::shm {
namespace {

constexpr size_t kAlignment = size_t{64} * 1024;  // the largest page size of the architectures we know
constexpr char kMagic[16] = "gpucomm-shm-1";

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What a rank tells the others about itself. Plain bytes: the magic says whether they can be understood.
struct Hello {
  char magic[16];
  int64_t pid;
  uint64_t start_time;
  char boot[48];
  char pid_namespace[48];
  int64_t fd;
  uint64_t region_bytes;
  Nonce nonce;
  Layout layout;
  char error[256];  // why there is no region; empty if there is one
};

template <size_t N>
void copy_text(char (&to)[N], const std::string& from) {
  const size_t length = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), length);
  std::memset(to + length, 0, N - length);
}

// Memory of the machine, bounded so that hundreds of heaps fit into a 47-bit address space; a sixteenth of that where
// it has a limit (ulimit -v), which is for everything else too.
size_t default_heap_bytes() {
  const size_t memory = static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t heap = std::min(memory, size_t{256} << 30);
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return heap;
  return std::min<size_t>(heap, limit.rlim_cur / 16);
}

class Handshake {
 public:
  Handshake(const ShmOptions& options, RegionKind kind) : options_(options), kind_(kind) {}

  // Empty if every rank opened every peer; else what went wrong, the same text on all ranks.
  std::string attempt();
  // Whether another kind of region could help: the ranks are processes of one kernel that see each other.
  bool same_machine() const { return same_machine_; }
  World world() &&;

 private:
  std::string name(int rank) const {
    return "rank " + std::to_string(options_.global_ranks.empty() ? rank : options_.global_ranks[rank]);
  }
  std::vector<std::string> exchange(const std::string& mine) const;
  Hello introduce();
  std::string compare_hellos();
  std::shared_ptr<SharedRegion> open(const Hello& hello) const;
  std::string open_peers();

  const ShmOptions& options_;
  RegionKind kind_;
  Layout layout_{};
  std::shared_ptr<SharedRegion> own_;
  std::vector<Hello> hellos_;
  std::vector<std::shared_ptr<SharedRegion>> regions_;
  bool same_machine_ = false;
};

std::vector<std::string> Handshake::exchange(const std::string& mine) const {
  if (options_.size == 1) return {mine};
  std::vector<std::string> all = options_.exchange(mine);
  if (all.size() != static_cast<size_t>(options_.size)) {
    throw UsageError("exchange returned " + std::to_string(all.size()) + " strings for " +
                     std::to_string(options_.size) + " ranks");
  }
  return all;
}

Hello Handshake::introduce() {
  Hello hello{};
  std::memcpy(hello.magic, kMagic, sizeof kMagic);
  hello.pid = getpid();
  hello.start_time = process_start_time(getpid());
  copy_text(hello.boot, boot_id());
  copy_text(hello.pid_namespace, pid_namespace());
  layout_ = hello.layout = Layout::of(options_.size, options_.slot_bytes, options_.piece_bytes);
  const size_t heap = aligned(options_.heap_bytes != 0 ? options_.heap_bytes : default_heap_bytes());
  try {
    own_ = SharedRegion::create(kind_, layout_.heap_offset + heap, layout_.heap_offset);
    auto* block = new (own_->base()) ControlBlock;
    block->nonce = own_->nonce();
    hello.fd = own_->fd();
    hello.region_bytes = own_->bytes();
    hello.nonce = own_->nonce();
  } catch (const std::exception& error) {
    copy_text(hello.error, error.what());
  }
  return hello;
}

// Every rank sees the same hellos, so every rank comes to the same verdict.
std::string Handshake::compare_hellos() {
  const auto* first = &hellos_[0];
  for (int rank = 0; rank < options_.size; ++rank) {
    const Hello& hello = hellos_[rank];
    if (std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0) return name(rank) + " runs another version of gpucomm";
    if (std::strcmp(hello.boot, first->boot) != 0) return name(rank) + " is on another host than " + name(0);
    if (std::strcmp(hello.pid_namespace, first->pid_namespace) != 0) {
      return name(rank) + " is in another pid namespace (container) than " + name(0) +
             ", so neither can watch the other";
    }
    if (hello.layout != first->layout) return name(rank) + " was given other buffer sizes than " + name(0);
  }
  same_machine_ = true;
  std::string text;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (hellos_[rank].error[0] == 0) continue;
    text += (text.empty() ? "" : "; ") + name(rank) + " could not make shared memory: " + hellos_[rank].error;
  }
  return text;
}

std::shared_ptr<SharedRegion> Handshake::open(const Hello& hello) const {
  if (hello.pid == getpid()) {
    if (auto region = SharedRegion::find_own(hello.nonce)) return region;
  }
  if (kind_ == RegionKind::kPosix)
    return SharedRegion::open_posix(hello.region_bytes, layout_.heap_offset, hello.nonce);
  return SharedRegion::open_memfd(static_cast<pid_t>(hello.pid), static_cast<int>(hello.fd), hello.region_bytes,
                                  layout_.heap_offset, hello.nonce);
}

std::string Handshake::open_peers() {
  std::string text;
  for (int rank = 0; rank < options_.size; ++rank) {
    try {
      regions_.push_back(rank == options_.rank ? own_ : open(hellos_[rank]));
    } catch (const std::exception& error) {
      regions_.push_back(nullptr);
      text += (text.empty() ? "" : "; ") + name(options_.rank) + " could not open the memory of " + name(rank) + ": " +
              error.what();
    }
  }
  return text;
}

std::string Handshake::attempt() {
  const Hello mine = introduce();
  for (const std::string& bytes : exchange(std::string(reinterpret_cast<const char*>(&mine), sizeof mine))) {
    Hello hello{};
    if (bytes.size() == sizeof hello) std::memcpy(&hello, bytes.data(), sizeof hello);
    hellos_.push_back(hello);
  }
  if (std::string difference = compare_hellos(); !difference.empty()) return difference;
  std::string text;
  for (const std::string& outcome : exchange(open_peers())) {
    if (!outcome.empty()) text += (text.empty() ? "" : "; ") + outcome;
  }
  own_->seal();  // everybody who will ever open it has tried
  return text;
}

World Handshake::world() && {
  World world{layout_, {}};
  for (int rank = 0; rank < options_.size; ++rank) {
    std::shared_ptr<SharedRegion>& region = regions_[rank];
    auto* block = std::launder(reinterpret_cast<ControlBlock*>(region->base()));
    std::byte* base = region->base();
    world.ranks.push_back({std::move(region), block, base,
                           ProcessWatch(static_cast<pid_t>(hellos_[rank].pid), hellos_[rank].start_time)});
  }
  return world;
}

}  // namespace

Layout Layout::of(int size, size_t slot_bytes, size_t piece_bytes) {
  const size_t others = static_cast<size_t>(std::max(size - 1, 1));
  Layout layout{};
  layout.slot_bytes = slot_bytes != 0 ? slot_bytes : size_t{64} * 1024;
  // In flight per rank: four rounds of pieces for all others, well within a core's own cache. 64 KiB was faster than
  // 32 and 128 KiB at 1 to 64 MiB, P = 2.
  constexpr size_t kRoundBytes = size_t{128} * 1024;
  layout.piece_bytes = piece_bytes;
  if (piece_bytes == 0) layout.piece_bytes = std::clamp<size_t>(kRoundBytes / others / 4096 * 4096, 8192, 65536);
  layout.slots_offset = aligned(sizeof(ControlBlock));
  layout.in_offset = aligned(layout.slots_offset + kRingSize * layout.slot_bytes);
  layout.out_offset = aligned(layout.in_offset + kStagingSlots * others * layout.piece_bytes);
  layout.heap_offset = aligned(layout.out_offset + kStagingSlots * layout.piece_bytes);
  return layout;
}

World connect(const ShmOptions& options) {
  if (options.size < 1 || options.size > kMaxRanks || options.rank < 0 || options.rank >= options.size) {
    throw UsageError("shm: rank " + std::to_string(options.rank) + " of " + std::to_string(options.size) +
                     " ranks; at most " + std::to_string(kMaxRanks) + " are served");
  }
  std::string reasons;
  for (const RegionKind kind : {RegionKind::kMemfd, RegionKind::kPosix}) {
    if (kind < options.kind) continue;
    Handshake handshake(options, kind);
    const std::string reason = handshake.attempt();
    if (reason.empty()) return std::move(handshake).world();
    reasons += (reasons.empty() ? "" : "; then, with POSIX shared memory: ") + reason;
    if (!handshake.same_machine()) break;
  }
  throw TransportUnavailable("the ranks cannot share memory: " + reasons);
}

}  // namespace gpucomm::shm
