#include "fake_cuda/nccl/arrival.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <optional>
#include <tuple>

#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/host_call.h"

namespace fake_nccl {
namespace {

constexpr int kMultiRankGpuVersion = 23003;

std::string version_of(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// False where the rank has come already: the id was used twice.
bool join(ncclComm* comm) {
  Member& own = comm->board->member(comm->rank);
  int none = 0;
  if (!own.joined.compare_exchange_strong(none, -1)) return false;
  own.pid = getpid();
  own.process_started = process_start_time();
  own.size = comm->size;
  own.version = kLibraryVersion;
  own.host_hash = host_hash();
  std::strncpy(own.bus_id, bus_id(comm->device).c_str(), sizeof own.bus_id - 1);
  own.joined.store(1, std::memory_order_release);  // have_all_joined of the peers
  return true;
}

bool have_all_joined(Board& board) {
  for (int rank = 0; rank < board.size(); ++rank)
    if (board.member(rank).joined.load(std::memory_order_acquire) != 1) return false;
  return true;
}

bool ranks_may_share_a_gpu() {
  const char* enabled = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  return kLibraryVersion >= kMultiRankGpuVersion && enabled != nullptr && std::strcmp(enabled, "1") == 0;
}

// What all ranks see alike.
Result check_together(Board& board) {
  for (int rank = 0; rank < board.size(); ++rank) {
    const Member& one = board.member(rank);
    const Member& first = board.member(0);
    if (one.version != first.version)
      return failure(kInvalidUsage, "Mismatched NCCL version detected : rank 0 version " + version_of(first.version) +
                                        " rank " + std::to_string(rank) + " version " + version_of(one.version));
    if (one.size != first.size)
      return failure(kInvalidUsage, "Bootstrap Root : mismatch in rank count from procs " + std::to_string(first.size) +
                                        " : " + std::to_string(one.size));
    for (int other = 0; other < rank; ++other) {
      const Member& two = board.member(other);
      if (one.host_hash == two.host_hash && std::strcmp(one.bus_id, two.bus_id) == 0 && !ranks_may_share_a_gpu())
        return failure(kInvalidUsage, "Duplicate GPU detected : rank " + std::to_string(rank) + " and rank " +
                                          std::to_string(other) + " both on CUDA device " + one.bus_id);
    }
  }
  return kSuccess;
}

class Arrival {
 public:
  Arrival(ncclComm* comm, const char* function, const UniqueId& id) : comm_(comm), function_(function), id_(id) {}

  Result poll() {
    if (begun_ms_ < 0) begun_ms_ = now_ms();
    if (const Statement* hang = script().find("init_hang", comm_->subject())) {
      const std::optional<int64_t> until = hang->number("ms");
      if (!until || now_ms() - begun_ms_ < *until) return kInProgress;
    }
    if (!comm_->board) {
      const Result result = come();
      if (result != kSuccess) return result;
    }
    if (!have_all_joined(*comm_->board)) return kInProgress;
    Board::release(id_);
    if (const Statement* fault = script().find("init_error", comm_->subject())) {
      const auto text = fault->words.find("text");
      return failure(static_cast<Result>(fault->number("result").value_or(kInternalError)),
                     text == fault->words.end() ? "scripted init error" : text->second);
    }
    const Result result = check_together(*comm_->board);
    if (result == kSuccess) comm_->stage = Stage::kReady;
    return result;
  }

 private:
  Result come() {
    if (!script_fault().empty()) {
      misuse(function_, "script", script_fault());
      return failure(kInternalError, script_fault());
    }
    std::string why;
    comm_->board = Board::open(id_, comm_->size, &why);
    if (!comm_->board) return failure(kSystemError, why);
    if (join(comm_)) return kSuccess;
    comm_->board.reset();
    misuse(function_, "unique-id-twice",
           "rank " + std::to_string(comm_->rank) + " has come with this unique id already");
    return failure(kInternalError, "a unique id serves one communicator");
  }

  ncclComm* comm_;
  const char* function_;
  UniqueId id_;
  int64_t begun_ms_ = -1;
};

// The id of a communicator made of these ranks of the parent: its lowest one makes it and leaves it on its part of the
// board, where the others find it by the key. Nothing: not there yet.
std::optional<UniqueId> child_id(ncclComm* parent, const std::vector<int>& ranks, uint64_t key) {
  Member& lowest = parent->board->member(ranks.front());
  const int count = lowest.child_count.load(std::memory_order_acquire);
  for (int child = 0; child < count; ++child)
    if (lowest.children[child].key.load(std::memory_order_acquire) == key) return lowest.children[child].id;
  if (parent->rank != ranks.front() || count == kMaxChildren) return std::nullopt;
  lowest.children[count].id = Board::create();
  lowest.children[count].key.store(key, std::memory_order_release);
  lowest.child_count.store(count + 1, std::memory_order_release);
  return lowest.children[count].id;
}

// The n-th communicator of the same ranks, made the same way, has the same key on each of them.
uint64_t child_key(ncclComm* parent, const std::string& how, const std::vector<int>& ranks) {
  std::string text = how;
  for (const int rank : ranks) text += " " + std::to_string(rank);
  text += " #" + std::to_string(parent->derived[text]++);
  return std::hash<std::string>()(text) | 1;
}

Poll arrive_as_child(ncclComm* parent, const char* function, const std::vector<int>& ranks, const std::string& how,
                     ncclComm* made) {
  made->size = static_cast<int>(ranks.size());
  made->rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), parent->rank) - ranks.begin());
  std::vector<int> sorted = ranks;
  std::sort(sorted.begin(), sorted.end());
  return [=, key = child_key(parent, how, sorted), arrival = std::shared_ptr<Arrival>()]() mutable {
    if (!arrival) {
      const std::optional<UniqueId> id = child_id(parent, sorted, key);
      if (!id) return Result{kInProgress};
      arrival = std::make_shared<Arrival>(made, function, *id);
    }
    return arrival->poll();
  };
}

// The parent's ranks of one color, in the order of keys, then of ranks.
std::vector<int> ranks_of_color(const ncclComm& parent, const Meeting& meeting, int color) {
  std::vector<std::tuple<int64_t, int>> found;
  for (int rank = 0; rank < parent.size; ++rank)
    if (meeting.of(rank).words[0] == color) found.emplace_back(meeting.of(rank).words[1], rank);
  std::sort(found.begin(), found.end());
  std::vector<int> ranks;
  for (const auto& [key, rank] : found) ranks.push_back(rank);
  return ranks;
}

}  // namespace

Poll arrive(ncclComm* comm, const char* function, const UniqueId& id) {
  return [arrival = std::make_shared<Arrival>(comm, function, id)] { return arrival->poll(); };
}

Poll split(ncclComm* parent, const char* function, int color, int key, ncclComm* made, ncclComm** result) {
  auto meeting = std::make_shared<Meeting>(parent, function, HostCall{kSplitCall, {color, key, 0}});
  return [=, arrival = Poll()]() mutable {
    if (!arrival) {
      const Result met = meeting->poll();
      if (met != kSuccess) return met;
      if (color < 0) {
        end_comm(made, function, kDestroyed);
        *result = nullptr;
        return Result{kSuccess};
      }
      arrival = arrive_as_child(parent, function, ranks_of_color(*parent, *meeting, color),
                                "split " + std::to_string(meeting->number()), made);
    }
    return arrival();
  };
}

Poll shrink(ncclComm* parent, const char* function, const std::vector<int>& stay, ncclComm* made) {
  return arrive_as_child(parent, function, stay, "shrink", made);
}

}  // namespace fake_nccl
