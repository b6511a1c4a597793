#include "fake_cuda/nccl/launch.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "fake_cuda/nccl/arithmetic.h"
#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/windows.h"

namespace fake_nccl {
namespace {

// What a rank publishes begins with this; then descriptors, what was launched before, and the inputs one after the
// other.
struct Head {
  uint64_t operations, befores, inputs_at;
};

constexpr size_t kAlignment = 64;
constexpr size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }
constexpr int kGarbage = 0xff;  // a NaN in every floating type

Head head_of(const std::byte* half) {
  Head head;
  std::memcpy(&head, half, sizeof head);
  return head;
}

template <class T>
std::vector<T> read_array(const std::byte* at, size_t count) {
  std::vector<T> values(count);
  if (count > 0) std::memcpy(values.data(), at, count * sizeof(T));
  return values;
}

std::vector<Descriptor> descriptors_of(const std::byte* half) {
  return read_array<Descriptor>(half + sizeof(Head), head_of(half).operations);
}

std::vector<Before> befores_of(const std::byte* half) {
  const Head head = head_of(half);
  return read_array<Before>(half + sizeof(Head) + head.operations * sizeof(Descriptor), head.befores);
}

std::string text_of(const std::vector<Descriptor>& descriptors) {
  std::string text;
  for (const Descriptor& descriptor : descriptors) text += (text.empty() ? "" : " + ") + descriptor.text();
  return text;
}

bool same_operations(const std::vector<Descriptor>& a, const std::vector<Descriptor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Descriptor& x, const Descriptor& y) { return x.same_operation(y); });
}

bool same_placements(const std::vector<Descriptor>& a, const std::vector<Descriptor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Descriptor& x, const Descriptor& y) { return x.same_placement(y); });
}

}  // namespace

LaunchCounts& launch_counts() {
  static auto* const counts = new LaunchCounts;
  return *counts;
}

Launch::Launch(ncclComm* comm, std::vector<Operation> operations, cuda::StreamHandle stream, const char* function)
    : comm_(comm),
      board_(comm->board),
      operations_(std::move(operations)),
      before_(launched_before(*comm)),
      stream_(stream),
      function_(function),
      number_(comm->launched++) {
  for (const Operation& operation : operations_) {
    descriptors_.push_back(describe(operation));
    place(*comm_, operation, &descriptors_.back());
  }
  comm_->launches.push_back(this);
  sequence_ = launch_counts().launched++;
}

Launch::~Launch() {
  if (has_place_) leave_place(this);
  std::erase(comm_->launches, this);
  if (comm_->stage == Stage::kFreed && comm_->launches.empty()) comm_->board.reset();
}

Result Launch::enqueue(ncclComm* comm, std::vector<Operation> operations, cuda::StreamHandle stream,
                       const char* function) {
  auto* launch = new Launch(comm, std::move(operations), stream, function);
  const std::string name = launch->name();
  const std::vector<FakeRange> ranges = launch->ranges();
  FakeTask task{};
  task.name = name.c_str();
  task.step = [](void* self) { return static_cast<Launch*>(self)->step(); };
  task.drop = [](void* self) { delete static_cast<Launch*>(self); };
  task.self = launch;
  task.ranges = ranges.data();
  task.range_count = ranges.size();
  const Within within(comm->context);
  const int refused = fake_enqueue(stream, &task);
  if (refused == 0) return kSuccess;
  --comm->launched;
  return failure(kUnhandledCudaError, "Cuda failure " + std::to_string(refused));
}

std::string Launch::name() const {
  std::string text = comm_->name() + " #" + std::to_string(number_) + ": " + text_of(descriptors_);
  return text;
}

std::vector<FakeRange> Launch::ranges() const {
  std::vector<FakeRange> ranges;
  for (const Operation& operation : operations_) {
    if (operation.reads(comm_->rank)) ranges.push_back({operation.in, operation.in_bytes(comm_->size), false});
    const bool in_place_root =
        operation.kind == Kind::kBroadcast && operation.reads(comm_->rank) && operation.is_in_place(comm_->rank);
    if (!in_place_root) ranges.push_back({operation.out, operation.out_bytes(comm_->size), true});
  }
  return ranges;
}

bool Launch::step() {
  if (cancelled_) {
    spoil_outputs();
    finish();
    return true;
  }
  if (stuck_ || !is_turn() || is_delayed() || meets_its_fault()) return false;
  if (!published_) {
    has_place_ = take_place(this);
    if (!has_place_) return false;
    publish();
  }
  if (!all_published()) {
    tell_held_up(*this);
    find_deadlock(*this);
    notice_failures(comm_, false);
    return false;
  }
  stuck_ = !compare();
  if (stuck_) return false;
  reduce();
  finish();
  return true;
}

// The launches of one communicator run one after the other, on whatever streams they are.
bool Launch::is_turn() {
  if (comm_->launches.front() != this || !is_next(*this)) return false;
  if (turn_ms_ < 0) turn_ms_ = now_ms();
  return true;
}

bool Launch::is_delayed() {
  if (published_) return false;
  const Statement* delay = script().find("delay", comm_->subject(static_cast<int64_t>(number_)));
  if (delay == nullptr) return false;
  return now_ms() - turn_ms_ < delay->number("ms").value_or(0) || steps_++ < delay->number("steps").value_or(0);
}

bool Launch::meets_its_fault() {
  if (published_) return false;
  const Subject subject = comm_->subject(static_cast<int64_t>(number_));
  if (script().find("die", subject) != nullptr) kill(getpid(), SIGKILL);
  if (const Statement* fault = script().find("async_error", subject)) {
    fail(comm_, static_cast<Result>(fault->number("result").value_or(kRemoteError)), "scripted asynchronous error");
    stuck_ = true;
  }
  return stuck_ || comm_->async_error != kSuccess;
}

void Launch::publish() {
  std::byte* half = board_->half(comm_->rank, number_);
  Head head{operations_.size(), before_.size(), 0};
  std::byte* at = half + sizeof head;
  std::memcpy(at, descriptors_.data(), descriptors_.size() * sizeof(Descriptor));
  at += descriptors_.size() * sizeof(Descriptor);
  if (!before_.empty()) std::memcpy(at, before_.data(), before_.size() * sizeof(Before));
  at += before_.size() * sizeof(Before);
  head.inputs_at = aligned(static_cast<size_t>(at - half));
  std::memcpy(half, &head, sizeof head);
  size_t offset = head.inputs_at;
  for (const Operation& operation : operations_) {
    const size_t bytes = operation.in_bytes(comm_->size);
    if (operation.reads(comm_->rank)) std::memcpy(half + offset, operation.in, bytes);
    offset += aligned(bytes);
  }
  published_ = true;
  board_->member(comm_->rank).published.store(number_ + 1, std::memory_order_release);  // all_published of the peers
  spoil_outputs();
}

// From here until completion the outputs are being written, so nobody may count on them.
void Launch::spoil_outputs() const {
  const int rank = comm_->rank, size = comm_->size;
  for (const Operation& operation : operations_) {
    auto* out = static_cast<std::byte*>(operation.out);
    const bool keeps_part = operation.reads(rank) && operation.is_in_place(rank);
    if (keeps_part && operation.kind == Kind::kBroadcast) continue;
    const size_t part = operation.count * size_of(operation.type);
    for (size_t begin = 0; begin < operation.out_bytes(size); begin += part) {
      const bool is_input =
          keeps_part && operation.kind == Kind::kAllGather && begin == part * static_cast<size_t>(rank);
      if (!is_input) std::memset(out + begin, kGarbage, part);
    }
  }
}

bool Launch::all_published() const {
  for (int rank = 0; rank < board_->size(); ++rank)
    if (board_->member(rank).published.load(std::memory_order_acquire) <= number_) return false;
  return true;
}

// NCCL checks nothing of this: it would hang or mix up data.
bool Launch::compare() {
  for (int peer = 0; peer < board_->size(); ++peer) {
    const std::byte* half = board_->half(peer, number_);
    const std::vector<Descriptor> theirs = descriptors_of(half);
    const std::string where = "launch " + std::to_string(number_) + " of " + comm_->name() + " is ";
    if (!same_operations(descriptors_, theirs)) {
      const std::string text =
          where + text_of(descriptors_) + "; on rank " + std::to_string(peer) + " it is " + text_of(theirs);
      misuse(function_, "mismatch", text);
      fail(comm_, kInternalError, text);
      return false;
    }
    if (!same_placements(descriptors_, theirs))
      misuse(function_, "window-partial",
             where + text_of(descriptors_) + " in other places of registered memory than on rank " +
                 std::to_string(peer) + ", or registered on one of the two only");
    compare_orders(function_, *comm_, number_, before_, peer, befores_of(half));
  }
  return true;
}

void Launch::reduce() {
  size_t offset = 0;
  for (const Operation& operation : operations_) {
    compute(operation, offset);
    offset += aligned(operation.in_bytes(comm_->size));
  }
}

void Launch::compute(const Operation& operation, size_t offset) {
  const size_t size = static_cast<size_t>(comm_->size), rank = static_cast<size_t>(comm_->rank);
  const size_t width = size_of(operation.type), bytes = operation.count * width;
  std::vector<const std::byte*> inputs;
  for (int peer = 0; peer < comm_->size; ++peer) {
    const std::byte* half = board_->half(peer, number_);
    inputs.push_back(half + head_of(half).inputs_at + offset);
  }
  auto* out = static_cast<std::byte*>(operation.out);
  const Reduction reduction{operation.type, operation.op, script().find("fp32_sums") != nullptr,
                            static_cast<size_t>(script().value("ring", "seed", 0))};
  const auto from = [&](size_t begin) {
    std::vector<const std::byte*> parts = inputs;
    for (const std::byte*& part : parts) part += begin * width;
    return parts;
  };
  switch (operation.kind) {
    case Kind::kAllReduce:
      for (size_t part = 0; part < size; ++part) {
        const size_t begin = operation.count * part / size, end = operation.count * (part + 1) / size;
        reduce_part(reduction, from(begin), part, out + begin * width, end - begin);
      }
      break;
    case Kind::kReduceScatter:
      reduce_part(reduction, from(rank * operation.count), rank, out, operation.count);
      break;
    case Kind::kAllGather:
      for (size_t peer = 0; peer < size; ++peer) std::memcpy(out + peer * bytes, inputs[peer], bytes);
      break;
    case Kind::kBroadcast:
      std::memcpy(out, inputs[static_cast<size_t>(operation.root)], bytes);
      break;
  }
}

void Launch::finish() {
  if (has_place_) leave_place(this);
  has_place_ = false;
  std::erase(comm_->launches, this);
  ++launch_counts().completed;
}

}  // namespace fake_nccl
