// From the unique id to the end: how libfake_nccl.so makes and ends communicators, and what it tells about them.
#include <algorithm>
#include <string>

#include "fake_cuda/nccl/arrival.h"
#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/group.h"
#include "fake_cuda/nccl/launch.h"
#include "fake_cuda/nccl/windows.h"

namespace fake_nccl {
namespace {

// The communicator of a call, or null and the result to return.
struct Entry {
  ncclComm* comm = nullptr;
  Result refused = kSuccess;
};

// Only for calls that need the communicator to be as good as new.
enum class Needs { kLive, kReady };

Entry enter(const char* function, const ncclComm* given, Needs needs) {
  if (const int scripted = fake_enter(function)) return {nullptr, fail_group(scripted)};
  ncclComm* comm = find_comm(given, function);
  if (comm == nullptr)
    return {nullptr, fail_group(failure(kInvalidArgument, std::string(function) + ": no communicator"))};
  const Result result = needs == Needs::kReady ? ready_for(comm, function) : Result{kSuccess};
  return result == kSuccess ? Entry{comm, kSuccess} : Entry{nullptr, fail_group(result)};
}

// A blocking communicator that could not be made does not exist; a non-blocking one is there to be aborted.
Poll made_or_not(ncclComm* made, const char* function, ncclComm** out, const Poll& poll) {
  return [=] {
    const Result result = poll();
    if (result == kInProgress || result == kSuccess || !made->options.blocking) return result;
    if (made->stage != Stage::kFreed) end_comm(made, function, kDestroyed);
    *out = nullptr;
    return result;
  };
}

bool is_inside_elsewhere(const ncclComm& comm) {
  return comm.inside_depth > 0 && comm.inside != std::this_thread::get_id();
}

Result abort(const char* function, ncclComm* given) {
  Entry entry;
  Poll poll;
  {
    const DeviceLock lock;
    entry = enter(function, given, Needs::kLive);
    if (entry.comm == nullptr) return entry.refused;
    if (is_inside_elsewhere(*entry.comm))
      misuse(function, "abort-inside",
             entry.comm->name() + " is freed while another thread is in " + entry.comm->inside_call);
    const int64_t hang_ms = script().value("abort_hang", "ms", 0, entry.comm->subject());
    poll = [=, comm = entry.comm, begun_ms = now_ms()] {
      if (now_ms() - begun_ms < hang_ms) return Result{kInProgress};
      if (comm->stage != Stage::kFreed) end_comm(comm, function, kAborted);
      return Result{kSuccess};
    };
  }
  // Abort waits by itself, also where the communicator does not block, and is no second use of it.
  return is_in_group() ? submit(entry.comm, function, poll) : wait_for(poll);
}

void check_end(const ncclComm& comm, const char* function) {
  check_registrations(comm, function);
  if (comm.stage == Stage::kRevoked) return;
  if (!comm.launches.empty())
    misuse(function, "busy", comm.name() + " still has " + std::to_string(comm.launches.size()) + " launches to run");
  if (!comm.pending.empty()) misuse(function, "in-progress", comm.name() + " still has work in progress");
  if (comm.async_error != kSuccess)
    misuse(function, "destroy-failed", comm.name() + " has failed: destroying it may hang, it is to be aborted");
}

Result destroy(const char* function, ncclComm* given) {
  const DeviceLock lock;
  const Entry entry = enter(function, given, Needs::kLive);
  if (entry.comm == nullptr) return entry.refused;
  const Presence presence(entry.comm, function);
  check_end(*entry.comm, function);
  const Poll poll = [comm = entry.comm, function] {
    if (comm->stage != Stage::kFreed) end_comm(comm, function, kDestroyed);
    return Result{kSuccess};
  };
  return is_in_group() ? submit(entry.comm, function, poll) : poll();
}

Result finalize(const char* function, ncclComm* given) {
  Entry entry;
  {
    const DeviceLock lock;
    entry = enter(function, given, Needs::kReady);
  }
  if (entry.comm == nullptr) return entry.refused;
  return submit(entry.comm, function, guarded(entry.comm, [comm = entry.comm]() -> Result {
                  if (comm->async_error != kSuccess) return comm->async_error;
                  if (!comm->launches.empty()) return kInProgress;
                  comm->stage = Stage::kFinalized;
                  return kSuccess;
                }));
}

Result revoke(const char* function, ncclComm* given, int flags) {
  const DeviceLock lock;
  const Entry entry = enter(function, given, Needs::kLive);
  if (entry.comm == nullptr) return entry.refused;
  if (flags != 0) return failure(kInvalidArgument, "ncclCommRevoke: flags " + std::to_string(flags));
  if (entry.comm->stage == Stage::kRevoked || entry.comm->stage == Stage::kFinalized) {
    misuse(function, "after-end", entry.comm->name() + " was revoked or finalized already");
    return failure(kInvalidUsage, "ncclCommRevoke: revoked or finalized already");
  }
  end_comm(entry.comm, function, kRevoked);
  return kSuccess;
}

Result init(const char* function, ncclComm** out, int size, const UniqueId& id, int rank, const Config* config) {
  ncclComm* comm = nullptr;
  Poll poll;
  {
    const DeviceLock lock;
    if (const int scripted = fake_enter(function)) return fail_group(scripted);
    if (out == nullptr || size < 1 || rank < 0 || rank >= size)
      return fail_group(
          failure(kInvalidArgument, "Invalid rank requested : " + std::to_string(rank) + "/" + std::to_string(size)));
    if (size > kMaxRanks) {
      misuse(function, "capacity",
             std::to_string(size) + " ranks are more than the stand-in's " + std::to_string(kMaxRanks));
      return fail_group(failure(kInvalidArgument, "too many ranks for the stand-in"));
    }
    Options options;
    const Result result = read_config(function, config, {}, &options);
    if (result != kSuccess) return fail_group(result);
    comm = new_comm(function, rank, size, options);
    *out = comm;
    poll = made_or_not(comm, function, out, guarded(comm, arrive(comm, function, id)));
  }
  return submit(comm, function, poll);
}

Result split_comm(const char* function, ncclComm* given, int color, int key, ncclComm** out, const Config* config) {
  ncclComm* parent = nullptr;
  ncclComm* made = nullptr;
  Poll poll;
  {
    const DeviceLock lock;
    const bool revoked = given != nullptr && given->stage == Stage::kRevoked;
    const Entry entry = enter(function, given, revoked ? Needs::kLive : Needs::kReady);
    if (entry.comm == nullptr) return entry.refused;
    parent = entry.comm;
    if (out == nullptr || (color < 0 && color != -1))
      return fail_group(failure(kInvalidArgument, "ncclCommSplit: color " + std::to_string(color)));
    Options options;
    const Result result = read_config(function, config, parent->options, &options);
    if (result != kSuccess) return fail_group(result);
    made = new_comm(function, parent->rank, parent->size, options);
    *out = made;
    poll = made_or_not(made, function, out, guarded(parent, split(parent, function, color, key, made, out), true));
  }
  return submit(parent, function, poll);
}

Result shrink_comm(const char* function, ncclComm* given, const std::vector<int>& excluded, ncclComm** out,
                   const Config* config, int flags) {
  ncclComm* parent = nullptr;
  Poll poll;
  {
    const DeviceLock lock;
    const bool dead = given != nullptr && (given->stage == Stage::kRevoked || flags == kShrinkAbort);
    const Entry entry = enter(function, given, dead ? Needs::kLive : Needs::kReady);
    if (entry.comm == nullptr) return entry.refused;
    parent = entry.comm;
    std::vector<int> stay;
    for (int rank = 0; rank < parent->size; ++rank)
      if (std::find(excluded.begin(), excluded.end(), rank) == excluded.end()) stay.push_back(rank);
    const bool in_range =
        std::all_of(excluded.begin(), excluded.end(), [&](int rank) { return rank >= 0 && rank < parent->size; });
    if (out == nullptr || excluded.empty() || !in_range || (flags != kShrinkDefault && flags != kShrinkAbort) ||
        std::find(stay.begin(), stay.end(), parent->rank) == stay.end())
      return fail_group(failure(kInvalidArgument, "ncclCommShrink: the ranks to exclude, or the flags"));
    Options options;
    const Result result = read_config(function, config, parent->options, &options);
    if (result != kSuccess) return fail_group(result);
    if (flags == kShrinkAbort && parent->stage != Stage::kRevoked)
      end_comm(parent, function, kRevoked);
    else if (!parent->launches.empty() && parent->stage != Stage::kRevoked)
      misuse(function, "busy", parent->name() + " still has launches to run");
    ncclComm* made = new_comm(function, parent->rank, parent->size, options);
    *out = made;
    poll = made_or_not(made, function, out, guarded(parent, shrink(parent, function, stay, made), true));
  }
  return submit(parent, function, poll);
}

}  // namespace
}  // namespace fake_nccl

namespace gpucomm::nccl {

using fake_nccl::DeviceLock;

extern "C" {

Result ncclGetVersion(int* version) {
  if (const int scripted = fake_enter(__func__)) return scripted;
  *version = fake_nccl::kLibraryVersion;
  return kSuccess;
}

Result ncclGetUniqueId(UniqueId* id) {
  if (const int scripted = fake_enter(__func__)) return scripted;
  *id = fake_nccl::Board::create();
  return kSuccess;
}

const char* ncclGetErrorString(Result result) { return fake_nccl::result_text(result); }

const char* ncclGetLastError(Comm) { return fake_nccl::last_error(); }

Result ncclCommInitRankConfig(Comm* comm, int size, UniqueId id, int rank, Config* config) {
  return fake_nccl::init(__func__, comm, size, id, rank, config);
}

Result ncclCommFinalize(Comm comm) { return fake_nccl::finalize(__func__, comm); }

Result ncclCommDestroy(Comm comm) { return comm == nullptr ? kSuccess : fake_nccl::destroy(__func__, comm); }

Result ncclCommAbort(Comm comm) { return comm == nullptr ? kSuccess : fake_nccl::abort(__func__, comm); }

Result ncclCommRevoke(Comm comm, int flags) { return fake_nccl::revoke(__func__, comm, flags); }

Result ncclCommGetAsyncError(Comm comm, Result* error) {
  const DeviceLock lock;
  const fake_nccl::Entry entry = fake_nccl::enter(__func__, comm, fake_nccl::Needs::kLive);
  if (entry.comm == nullptr) return entry.refused;
  *error = fake_nccl::carry_on(entry.comm);
  return kSuccess;
}

Result ncclCommCount(const Comm comm, int* count) {
  const DeviceLock lock;
  const fake_nccl::Entry entry = fake_nccl::enter(__func__, comm, fake_nccl::Needs::kReady);
  if (entry.comm == nullptr) return entry.refused;
  *count = entry.comm->size;
  return kSuccess;
}

Result ncclCommSplit(Comm comm, int color, int key, Comm* split, Config* config) {
  return fake_nccl::split_comm(__func__, comm, color, key, split, config);
}

Result ncclCommShrink(Comm comm, int* excluded, int excluded_count, Comm* shrunk, Config* config, int flags) {
  return fake_nccl::shrink_comm(__func__, comm, {excluded, excluded + excluded_count}, shrunk, config, flags);
}

}  // extern "C"
}  // namespace gpucomm::nccl
