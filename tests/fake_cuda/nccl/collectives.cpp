// The collectives and groups that libfake_nccl.so exports: checks of one call, the rest is the group's.
#include <string>

#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/group.h"
#include "fake_cuda/nccl/launch.h"

namespace fake_nccl {
namespace {

Result check_arguments(const ncclComm& comm, const char* function, const Operation& operation) {
  const std::string of = std::string(function) + " : ";
  if (size_of(operation.type) == 0) return failure(kInvalidArgument, of + "type " + std::to_string(operation.type));
  if (operation.op < kSum || operation.op > kAvg)
    return failure(kInvalidArgument, of + "op " + std::to_string(operation.op));
  if (operation.root < 0 || operation.root >= comm.size)
    return failure(kInvalidArgument, of + "invalid root " + std::to_string(operation.root));
  if (operation.count == 0) return kSuccess;
  if (operation.out == nullptr) return failure(kInvalidArgument, of + "recvbuff argument is NULL");
  if (operation.in == nullptr && operation.reads(comm.rank))
    return failure(kInvalidArgument, of + "sendbuff argument is NULL");
  constexpr size_t kLargest = kHalfBytes / 2;
  if (operation.count > kLargest || operation.in_bytes(comm.size) > kLargest) {
    misuse(function, "capacity", std::to_string(operation.count) + " elements are more than the stand-in carries");
    return failure(kInvalidArgument, of + "too large for the stand-in");
  }
  return kSuccess;
}

// A thread that drives several ranks of one clique needs groups: the first rank's call may wait for the second's.
void check_group(const ncclComm& comm, const char* function) {
  if (is_in_group()) return;
  for (const ncclComm* other : live_comms()) {
    if (other != &comm && other->board && other->board->uid() == comm.board->uid() &&
        other->driver == std::this_thread::get_id())
      misuse(function, "ungrouped", "this thread drives " + other->name() + " too, so both belong in one group");
  }
}

void check_use(const ncclComm& comm, const char* function, const Operation& operation, cuda::StreamHandle stream) {
  const int device = fake_current_device();
  if (device != comm.device)
    misuse(function, "wrong-device",
           comm.name() + " is of device " + std::to_string(comm.device) + ", current is " +
               (device < 0 ? std::string("none") : std::to_string(device)));
  if (stream == nullptr) misuse(function, "null-stream", comm.name() + " on the legacy default stream");
  if (operation.overlaps(comm.rank, comm.size) && !operation.is_in_place(comm.rank))
    misuse(function, "in-place", "input and output overlap otherwise than in place: " + describe(operation).text());
  check_group(comm, function);
}

Result collective(const char* function, ncclComm* given, const Operation& operation, cuda::StreamHandle stream) {
  ncclComm* comm = nullptr;
  {
    const DeviceLock lock;
    if (const int scripted = fake_enter(function)) return fail_group(scripted);
    comm = find_comm(given, function);
    if (comm == nullptr) return fail_group(failure(kInvalidArgument, std::string(function) + ": no communicator"));
    Result result = ready_for(comm, function);
    if (result == kSuccess) result = check_arguments(*comm, function, operation);
    if (result != kSuccess) return fail_group(result);
    check_use(*comm, function, operation, stream);
    comm->driver = std::this_thread::get_id();
    if (operation.count == 0) return kSuccess;  // nothing is launched, as in NCCL
  }
  return submit(comm, function, operation, stream);
}

}  // namespace
}  // namespace fake_nccl

namespace gpucomm::nccl {

using fake_nccl::collective;
using fake_nccl::Kind;
using fake_nccl::Operation;

extern "C" {

Result ncclAllReduce(const void* in, void* out, size_t count, DataType type, RedOp op, Comm comm,
                     cuda::StreamHandle stream) {
  return collective(__func__, comm, Operation{Kind::kAllReduce, in, out, count, type, op}, stream);
}

Result ncclReduceScatter(const void* in, void* out, size_t count, DataType type, RedOp op, Comm comm,
                         cuda::StreamHandle stream) {
  return collective(__func__, comm, Operation{Kind::kReduceScatter, in, out, count, type, op}, stream);
}

Result ncclAllGather(const void* in, void* out, size_t count, DataType type, Comm comm, cuda::StreamHandle stream) {
  return collective(__func__, comm, Operation{Kind::kAllGather, in, out, count, type}, stream);
}

Result ncclBroadcast(const void* in, void* out, size_t count, DataType type, int root, Comm comm,
                     cuda::StreamHandle stream) {
  return collective(__func__, comm, Operation{Kind::kBroadcast, in, out, count, type, kSum, root}, stream);
}

Result ncclGroupStart() {
  if (const int scripted = fake_enter(__func__)) return scripted;
  return fake_nccl::start_group();
}

Result ncclGroupEnd() {
  if (const int scripted = fake_enter(__func__)) return scripted;
  return fake_nccl::end_group();
}

}  // extern "C"
}  // namespace gpucomm::nccl
