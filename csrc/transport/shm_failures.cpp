#include "transport/shm_failures.h"

#include <algorithm>
#include <cstring>

#include "core/error.h"

namespace gpucomm::shm {
namespace {

std::vector<int> culprits_of(const FailureRecord& record, int size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank) {
    if (record.culprits[rank / 64] >> (rank % 64) & 1) ranks.push_back(rank);
  }
  return ranks;
}

}  // namespace

Failures::Failures(const std::vector<ControlBlock*>& blocks, int rank, std::vector<int> global_ranks, double timeout_s)
    : blocks_(blocks), rank_(rank), global_ranks_(std::move(global_ranks)), timeout_s_(timeout_s) {}

void Failures::record(FailureKind kind, const std::vector<int>& culprits, const std::string& reason) noexcept {
  {
    const std::lock_guard lock(mutex_);
    FailureRecord& record = blocks_[rank_]->failure;
    if (record.recorded.load(std::memory_order_relaxed) != 0) return;
    record.kind = kind;
    std::fill(std::begin(record.culprits), std::end(record.culprits), 0);
    for (const int rank : culprits) record.culprits[rank / 64] |= uint64_t{1} << (rank % 64);
    const size_t length = std::min(reason.size(), sizeof record.reason - 1);
    std::memcpy(record.reason, reason.data(), length);
    record.reason[length] = 0;
    // Release: partners is the acquire load in adopt().
    record.recorded.store(1, std::memory_order_release);
  }
  alarm_everybody();
}

void Failures::alarm_everybody() noexcept {
  for (ControlBlock* block : blocks_) {
    block->failure.alarm.store(1, std::memory_order_release);  // partner: check()
    block->bell.wake();
  }
}

void Failures::refuse_child() {
  throw UsageError("this process was forked from one that takes part in a group: a child cannot take its place");
}

void Failures::check_before_use() {
  if (in_child()) refuse_child();
  if (!told_) return check();
  const std::string dead = "this communicator is dead since an earlier operation: ";
  try {
    rethrow();
  } catch (const PeerFailed& error) {
    throw PeerFailed(dead + error.what(), error);
  } catch (const CommTimeout& error) {
    throw CommTimeout(dead + error.what(), error);
  } catch (const CollectiveMismatch& error) {
    throw CollectiveMismatch(dead + error.what());
  }
}

void Failures::rethrow() {
  told_ = true;
  const FailureRecord& record = blocks_[rank_]->failure;
  const std::vector<int> culprits = culprits_of(record, static_cast<int>(blocks_.size()));
  switch (record.kind) {
    case FailureKind::kAborted:
      throw PeerFailed(global(rank_), record.reason);
    case FailureKind::kMismatch:
      throw CollectiveMismatch(record.reason);
    case FailureKind::kPeerFailed:
      throw PeerFailed(global(culprits.at(0)), record.reason);
    case FailureKind::kTimeout:
      break;
  }
  std::vector<int> missing;
  for (const int rank : culprits) missing.push_back(global(rank));
  throw CommTimeout(missing, timeout_s_, record.reason);
}

void Failures::adopt() {
  // The own verdict stands once there is one.
  if (blocks_[rank_]->failure.recorded.load(std::memory_order_acquire) != 0) rethrow();
  for (int peer = 0; peer < static_cast<int>(blocks_.size()); ++peer) {
    const FailureRecord& theirs = blocks_[peer]->failure;
    if (theirs.recorded.load(std::memory_order_acquire) == 0) continue;
    const std::vector<int> culprits = culprits_of(theirs, static_cast<int>(blocks_.size()));
    const bool blames_us = std::find(culprits.begin(), culprits.end(), rank_) != culprits.end();
    if (theirs.kind == FailureKind::kAborted) {
      record(FailureKind::kPeerFailed, {peer}, theirs.reason);
    } else if (blames_us) {
      record(FailureKind::kPeerFailed, {peer}, std::string("it gave up on this rank: ") + theirs.reason);
    } else {
      record(theirs.kind, culprits, theirs.reason);
    }
    rethrow();
  }
}

void Failures::peer_failed(int culprit, const std::string& reason) {
  record(FailureKind::kPeerFailed, {culprit}, reason);
  rethrow();
}

void Failures::timed_out(const std::vector<int>& missing, const std::string& what) {
  record(FailureKind::kTimeout, missing, what);
  rethrow();
}

void Failures::mismatch(const std::string& difference) {
  record(FailureKind::kMismatch, {}, difference);
  rethrow();
}

void Failures::abort(const std::string& reason) noexcept {
  if (!in_child()) record(FailureKind::kAborted, {}, reason);
}

}  // namespace gpucomm::shm
