#include "fake_cuda/nccl/host_call.h"

#include <algorithm>
#include <iterator>
#include <string>

namespace fake_nccl {
namespace {

std::string text_of(const HostCall& call) {
  std::string text = call.kind == kWindowCall ? "ncclCommWindowRegister(" : "ncclCommSplit(";
  for (const int64_t word : call.words) text += (text.back() == '(' ? "" : ", ") + std::to_string(word);
  return text + ")";
}

}  // namespace

Meeting::Meeting(ncclComm* comm, const char* function, const HostCall& call)
    : comm_(comm), function_(function), call_(call) {}

Result Meeting::poll() {
  Board& board = *comm_->board;
  Member& own = board.member(comm_->rank);
  if (!came_) {
    number_ = comm_->host_calls++;
    own.host_calls[number_ % 2] = call_;
    own.host_published.store(number_ + 1, std::memory_order_release);  // the loads below, on the peers
    came_ = true;
  }
  for (int rank = 0; rank < board.size(); ++rank) {
    if (board.member(rank).host_published.load(std::memory_order_acquire) > number_) continue;
    notice_failures(comm_, true);
    return comm_->async_error == kSuccess ? kInProgress : comm_->async_error;
  }
  for (int rank = 0; rank < board.size(); ++rank) {
    if (of(rank).kind == call_.kind) continue;
    misuse(function_, "mismatch", "rank " + std::to_string(rank) + " is in " + text_of(of(rank)));
    return failure(kInvalidUsage, "ranks are in different calls");
  }
  return kSuccess;
}

const HostCall& Meeting::of(int rank) const { return comm_->board->member(rank).host_calls[number_ % 2]; }

void Meeting::require_equal() const {
  for (int rank = 0; rank < comm_->size; ++rank) {
    if (std::equal(std::begin(of(rank).words), std::end(of(rank).words), std::begin(call_.words))) continue;
    misuse(function_, "mismatch",
           text_of(call_) + " on rank " + std::to_string(comm_->rank) + ", " + text_of(of(rank)) + " on rank " +
               std::to_string(rank));
  }
}

}  // namespace fake_nccl
