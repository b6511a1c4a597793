#include "fake_cuda/nccl/comm.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/launch.h"

namespace fake_nccl {
namespace {

std::vector<std::unique_ptr<ncclComm>>& registry() {
  static auto* const all = new std::vector<std::unique_ptr<ncclComm>>;  // threads may outlive what ends at exit
  return *all;
}

int generation = 0;

// Of this process, not of one that it was forked from.
bool is_ours(const ncclComm& comm) { return comm.process == getpid(); }

bool is_gone(Member& peer) {
  if (peer.departure.load() != kPresent || peer.async_error.load() != kSuccess) return true;
  return peer.joined.load(std::memory_order_acquire) != 0 && !process_runs(peer.pid, peer.process_started);
}

}  // namespace

int64_t now_ms() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

ncclComm* new_comm(const char* function, int rank, int size, const Options& options) {
  auto comm = std::make_unique<ncclComm>();
  comm->process = getpid();
  comm->generation = generation;
  comm->rank = rank;
  comm->size = size;
  comm->options = options;
  comm->context = bind_device(function, &comm->device);
  comm->ordinal = static_cast<int>(std::count_if(registry().begin(), registry().end(), [&](const auto& other) {
    return other->rank == rank && other->generation == generation && is_ours(*other);
  }));
  registry().push_back(std::move(comm));
  return registry().back().get();
}

void forget_comms() {
  for (ncclComm* comm : live_comms()) end_comm(comm, "fake_nccl_reset", kAborted);
  ++generation;
}

std::vector<ncclComm*> live_comms() {
  std::vector<ncclComm*> live;
  for (const auto& comm : registry())
    if (comm->stage != Stage::kFreed && is_ours(*comm)) live.push_back(comm.get());
  return live;
}

ncclComm* find_comm(const ncclComm* comm, const char* function) {
  const auto found =
      std::find_if(registry().begin(), registry().end(), [&](const auto& other) { return other.get() == comm; });
  if (found == registry().end()) {
    misuse(function, "no-communicator", comm == nullptr ? "a null communicator" : "not a communicator");
    return nullptr;
  }
  if (!is_ours(*comm)) {
    misuse(function, "forked", comm->name() + " is of the process that this one was forked from");
    return nullptr;
  }
  if (comm->stage == Stage::kFreed) {
    misuse(function, "after-end", comm->name() + " was freed by " + comm->ended_by);
    return nullptr;
  }
  return found->get();
}

Result ready_for(ncclComm* comm, const char* function) {
  if (comm->stage == Stage::kFinalized || comm->stage == Stage::kRevoked) {
    misuse(function, "after-end", comm->name() + (comm->stage == Stage::kRevoked ? " was revoked" : " was finalized"));
    return failure(kInvalidUsage, std::string(function) + ": the communicator was finalized or revoked");
  }
  if (comm->async_error != kSuccess)
    return failure(comm->async_error, std::string(function) + ": the communicator has failed");
  if (!comm->pending.empty() || comm->stage == Stage::kJoining) {
    misuse(function, "in-progress",
           comm->name() + " was not polled until its last operation was no longer in progress");
    return failure(kInvalidArgument, "Attempt to use communicator before the previous operation returned ncclSuccess");
  }
  return kSuccess;
}

void fail(ncclComm* comm, Result result, const std::string& text) {
  if (comm->async_error != kSuccess) return;
  comm->async_error = failure(result, text);
  if (comm->board) comm->board->member(comm->rank).async_error.store(result);
}

void notice_failures(ncclComm* comm, bool in_host_call) {
  const int64_t after_ms = script().value("remote_error", "ms", -1);
  if (after_ms < 0 || !comm->board || (comm->launches.empty() && !in_host_call)) return;
  for (int rank = 0; rank < comm->size; ++rank) {
    Member& peer = comm->board->member(rank);
    const bool is_awaited = in_host_call ? peer.host_published.load() < comm->host_calls
                                         : peer.published.load() <= comm->launches.front()->number();
    if (rank == comm->rank || !is_awaited || !is_gone(peer)) continue;
    if (comm->failure_noticed_ms == 0) comm->failure_noticed_ms = now_ms();
    if (now_ms() - comm->failure_noticed_ms >= after_ms)
      fail(comm, kRemoteError, "remote process exited: rank " + std::to_string(rank) + " of " + comm->name());
  }
}

Result carry_on(ncclComm* comm) {
  while (!comm->pending.empty()) {
    if (comm->polls_left > 0) {
      --comm->polls_left;
      return kInProgress;
    }
    const Result result = comm->pending.front()();
    if (result == kInProgress) return kInProgress;
    comm->pending.pop_front();
    if (result != kSuccess) {
      fail(comm, result, last_error());
      comm->pending.clear();
    }
  }
  notice_failures(comm, false);
  return comm->async_error;
}

void cancel_launches(ncclComm* comm) {
  for (Launch* launch : comm->launches) launch->cancel();
}

void end_comm(ncclComm* comm, const char* function, Departure departure) {
  cancel_launches(comm);
  comm->pending.clear();
  if (comm->board) comm->board->member(comm->rank).departure.store(departure);
  comm->stage = departure == kRevoked ? Stage::kRevoked : Stage::kFreed;
  comm->ended_by = function;
  if (comm->stage == Stage::kRevoked) return;
  comm->windows.clear();
  comm->registrations.clear();
  if (comm->launches.empty()) comm->board.reset();
}

Presence::Presence(ncclComm* comm, const char* function) : comm_(comm), counted_(false) {
  const DeviceLock lock;
  const std::thread::id self = std::this_thread::get_id();
  if (comm->inside_depth > 0 && comm->inside != self) {
    misuse(function, "two-threads", comm->name() + " is in " + comm->inside_call + " on another thread");
    return;
  }
  counted_ = true;
  if (comm->inside_depth++ == 0) {
    comm->inside = self;
    comm->inside_call = function;
  }
}

Presence::~Presence() {
  const DeviceLock lock;
  if (counted_) --comm_->inside_depth;
}

Poll guarded(ncclComm* comm, Poll poll, bool outlives_revoke) {
  return [=] {
    if (comm->stage == Stage::kFreed || (comm->stage == Stage::kRevoked && !outlives_revoke))
      return failure(kInternalError, comm->name() + ": " + comm->ended_by + " while a call was within it");
    return poll();
  };
}

Result wait_for(const Poll& poll) {
  while (true) {
    std::vector<std::pair<cuda::Context, cuda::StreamHandle>> busy;
    {
      const DeviceLock lock;
      const Result result = poll();
      if (result != kInProgress) return result;
      for (const ncclComm* comm : live_comms())
        if (!comm->launches.empty()) busy.emplace_back(comm->context, comm->launches.front()->stream());
    }
    for (const auto& [context, stream] : busy) drive(context, stream);
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

}  // namespace fake_nccl

std::string ncclComm::name() const {
  char tag[16] = "?";
  if (board) std::snprintf(tag, sizeof tag, "%04x", static_cast<unsigned>(board->tag() & 0xffff));
  return "communicator " + std::string(tag) + " (rank " + std::to_string(rank) + " of " + std::to_string(size) + ")";
}
