// Memory and windows as libfake_nccl.so exports them.
#include "fake_cuda/nccl/group.h"
#include "fake_cuda/nccl/windows.h"

namespace fake_nccl {
namespace {

// A local call on a communicator, which may have failed or been revoked.
template <class Call>
Result locally(const char* function, const ncclComm* given, const Call& call) {
  const DeviceLock lock;
  if (const int scripted = fake_enter(function)) return scripted;
  ncclComm* comm = find_comm(given, function);
  if (comm == nullptr) return failure(kInvalidArgument, std::string(function) + ": no communicator");
  const Presence presence(comm, function);
  return call(comm);
}

}  // namespace
}  // namespace fake_nccl

namespace gpucomm::nccl {

using fake_nccl::DeviceLock;

extern "C" {

Result ncclMemAlloc(void** address, size_t bytes) {
  const DeviceLock lock;
  if (const int scripted = fake_enter(__func__)) return scripted;
  return fake_nccl::allocate_memory(__func__, address, bytes);
}

Result ncclMemFree(void* address) {
  const DeviceLock lock;
  if (const int scripted = fake_enter(__func__)) return scripted;
  return address == nullptr ? kSuccess : fake_nccl::free_memory(__func__, address);
}

Result ncclCommRegister(const Comm comm, void* address, size_t bytes, void** handle) {
  return fake_nccl::locally(__func__, comm, [&](ncclComm* found) {
    const Result result = fake_nccl::ready_for(found, "ncclCommRegister");
    return result == kSuccess ? fake_nccl::register_memory(found, "ncclCommRegister", address, bytes, handle) : result;
  });
}

Result ncclCommDeregister(const Comm comm, void* handle) {
  return fake_nccl::locally(__func__, comm, [&](ncclComm* found) {
    return fake_nccl::deregister_memory(found, "ncclCommDeregister", handle);
  });
}

Result ncclCommWindowRegister(Comm comm, void* address, size_t bytes, Window* window, int flags) {
  fake_nccl::Poll poll;
  const Result result = fake_nccl::locally(__func__, comm, [&](ncclComm* found) {
    const Result ready = fake_nccl::ready_for(found, "ncclCommWindowRegister");
    return ready == kSuccess
               ? fake_nccl::prepare_window(found, "ncclCommWindowRegister", address, bytes, window, flags, &poll)
               : ready;
  });
  if (result != kSuccess) return fake_nccl::fail_group(result);
  return fake_nccl::submit(comm, __func__, fake_nccl::guarded(comm, poll));
}

Result ncclCommWindowDeregister(Comm comm, Window window) {
  return fake_nccl::locally(__func__, comm, [&](ncclComm* found) {
    return fake_nccl::end_window(found, "ncclCommWindowDeregister", window);
  });
}

}  // extern "C"
}  // namespace gpucomm::nccl
