// How ranks come to share their regions, and the proof that all of them do.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/process_watch.h"
#include "transport/shm_layout.h"

namespace gpucomm {

// An all-gather of byte strings among the ranks, in rank order.
using ByteExchange = std::function<std::vector<std::string>(const std::string&)>;

struct ShmOptions {
  int rank = 0;
  int size = 1;
  double timeout_s = 300;
  std::vector<int> global_ranks = {};
  Embedder* embedder = nullptr;  // outlives the transport; may be null
  ByteExchange exchange = {};    // used by the constructor alone; not needed for size 1
  // kMemfd: try memfds, then POSIX shared memory; kPosix: the latter at once.
  RegionKind kind = RegionKind::kMemfd;
  // Address space for allocate(); 0: as much as the machine has memory, within bounds. Pages are taken only when
  // touched.
  size_t heap_bytes = 0;
  size_t slot_bytes = 0;  // 0: chosen for the world size, as the next
  size_t piece_bytes = 0;
};

namespace shm {

// One rank as seen from this process; for the own rank region and block are the own ones.
struct Peer {
  std::shared_ptr<SharedRegion> region;
  ControlBlock* block;
  std::byte* base;
  ProcessWatch process;
};

struct World {
  Layout layout;
  std::vector<Peer> ranks;
};

// Makes the own region and opens every peer's. Collective. Throws TransportUnavailable, on every rank alike, naming who
// could not open what and why.
World connect(const ShmOptions& options);

}  // namespace shm
}  // namespace gpucomm
