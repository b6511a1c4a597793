#include "fake_cuda/nccl/occupancy.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "fake_cuda/nccl/launch.h"

namespace fake_nccl {
namespace {

constexpr int kImplicitOrderVersion = 22600;

std::vector<Launch*>& running() {
  static auto* const launches = new std::vector<Launch*>;
  return *launches;
}

bool is_full(int device) {
  const int64_t slots = script().value("slots", "n", 0);
  const auto on_device = [&](const Launch* launch) { return launch->comm().device == device; };
  return slots > 0 && std::count_if(running().begin(), running().end(), on_device) >= slots;
}

// The other communicators on the device of one that still launch.
std::vector<ncclComm*> beside(const ncclComm& comm) {
  std::vector<ncclComm*> others = live_comms();
  std::erase_if(others, [&](const ncclComm* other) {
    return !other->board || other->has_ended() || other->device != comm.device ||
           other->board->tag() == comm.board->tag();
  });
  return others;
}

uint64_t mark_of(const Launch& launch) { return uint64_t{launch.comm().board->tag()} << 32 | (launch.number() + 1); }
uint32_t tag_of(uint64_t mark) { return static_cast<uint32_t>(mark >> 32); }
uint64_t number_of(uint64_t mark) { return (mark & 0xffffffff) - 1; }

std::string text_of(const ncclComm& comm, uint64_t number) { return comm.name() + " #" + std::to_string(number); }

}  // namespace

std::vector<Before> launched_before(const ncclComm& comm) {
  std::vector<Before> before;
  const std::vector<ncclComm*> others = beside(comm);
  for (const ncclComm* other : others) {
    const auto same = [&](const ncclComm* one) { return one->board->tag() == other->board->tag(); };
    // Two ranks of the other one on one device: which is meant cannot be told.
    if (std::count_if(others.begin(), others.end(), same) == 1)
      before.push_back({other->board->tag(), other->launched});
  }
  return before;
}

void compare_orders(const char* function, const ncclComm& comm, uint64_t number, const std::vector<Before>& ours,
                    int peer, const std::vector<Before>& theirs) {
  for (const Before& mine : ours) {
    for (const Before& its : theirs) {
      if (mine.tag != its.tag || mine.launched == its.launched) continue;
      misuse(function, "launch-order",
             text_of(comm, number) + " comes after " + std::to_string(mine.launched) +
                 " launches of another communicator here, on rank " + std::to_string(peer) + " after " +
                 std::to_string(its.launched) + " of them: the order must be one on all ranks");
    }
  }
}

bool is_next(const Launch& launch) {
  const char* implicit = std::getenv("NCCL_LAUNCH_ORDER_IMPLICIT");
  if (kLibraryVersion < kImplicitOrderVersion || implicit == nullptr || std::string(implicit) != "1") return true;
  const std::vector<ncclComm*> others = beside(launch.comm());
  return std::none_of(others.begin(), others.end(), [&](const ncclComm* other) {
    return !other->launches.empty() && other->launches.front()->sequence() < launch.sequence();
  });
}

bool take_place(Launch* launch) {
  if (is_full(launch->comm().device)) return false;
  running().push_back(launch);
  return true;
}

void leave_place(Launch* launch) {
  std::erase(running(), launch);
  const uint64_t mark = mark_of(*launch);
  for (ncclComm* other : beside(launch->comm())) {
    uint64_t held_up_by_us = mark;
    other->board->member(other->rank).held_up_by.compare_exchange_strong(held_up_by_us, 0);
  }
}

void tell_held_up(const Launch& launch) {
  const bool full = is_full(launch.comm().device);
  for (ncclComm* other : beside(launch.comm())) {
    if (other->launches.empty() || other->launches.front()->is_published()) continue;
    if (full || other->launches.front()->stream() == launch.stream())
      other->board->member(other->rank).held_up_by.store(mark_of(launch));
  }
}

void find_deadlock(Launch& launch) {
  if (launch.deadlock_reported) return;
  const ncclComm& comm = launch.comm();
  const bool full = is_full(comm.device);
  for (int peer = 0; peer < comm.size; ++peer) {
    Member& theirs = comm.board->member(peer);
    const uint64_t mark = theirs.held_up_by.load();
    if (mark == 0 || theirs.published.load() > launch.number()) continue;
    for (ncclComm* other : beside(comm)) {
      if (other->board->tag() != tag_of(mark) || other->board->member(other->rank).published.load() > number_of(mark))
        continue;
      // What the peer runs needs us, and we cannot come before this launch is complete.
      const bool behind = !other->launches.empty() && other->launches.front()->stream() == launch.stream();
      if (!full && !behind) continue;
      launch.deadlock_reported = true;
      misuse(launch.function(), "deadlock",
             "rank " + std::to_string(comm.rank) + " runs " + text_of(comm, launch.number()) + " before " +
                 text_of(*other, number_of(mark)) + ", rank " + std::to_string(peer) + " of " + comm.name() +
                 " the other way round: both wait for ever");
      return;
    }
  }
}

}  // namespace fake_nccl
