#include "fake_cuda/nccl/windows.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>

#include "fake_cuda/nccl/device.h"
#include "fake_cuda/nccl/host_call.h"

namespace fake_nccl {
namespace {

constexpr int kWindowsOverHostsVersion = 22800;

struct Allocation {
  size_t bytes;
  bool takes_windows;  // made of memory that can be mapped by peers
};

// What ncclMemAlloc gave and ncclMemFree has not taken back.
std::map<const std::byte*, Allocation>& allocations() {
  static auto* const all = new std::map<const std::byte*, Allocation>;
  return *all;
}

bool overlap(const Registered& a, const Registered& b) {
  return a.address < b.address + b.bytes && b.address < a.address + a.bytes;
}

bool contains(const Registered& whole, const void* address, size_t bytes) {
  const auto* first = static_cast<const std::byte*>(address);
  return whole.address <= first && first + bytes <= whole.address + whole.bytes;
}

bool can_be_window(const Registered& memory) {
  const auto next = allocations().upper_bound(memory.address);
  if (next == allocations().begin()) return false;
  const auto& [address, allocation] = *std::prev(next);
  return allocation.takes_windows && contains({address, allocation.bytes}, memory.address, memory.bytes);
}

bool is_live(const Registered& memory) {
  FakeAllocation found{};
  return fake_find_allocation(memory.address, &found) &&
         contains({static_cast<const std::byte*>(found.base), found.bytes}, memory.address, memory.bytes);
}

std::string text_of(const Registered& memory) {
  return std::to_string(memory.bytes) + " bytes at " + std::to_string(reinterpret_cast<uintptr_t>(memory.address));
}

void check_still_live(const char* function, const Registered& memory) {
  if (!is_live(memory)) misuse(function, "freed-while-registered", text_of(memory) + " were freed while registered");
}

Placement placement_of(const ncclComm& comm, const void* address, size_t bytes) {
  for (const auto& [handle, window] : comm.windows) {
    if (contains(window->memory, address, bytes))
      return {window->number + 1,
              static_cast<uint64_t>(static_cast<const std::byte*>(address) - window->memory.address)};
  }
  return {};
}

bool is_registered(const ncclComm& comm, const void* address, size_t bytes) {
  return std::any_of(comm.registrations.begin(), comm.registrations.end(),
                     [&](const auto& entry) { return contains(*entry.second, address, bytes); });
}

// Symmetric memory is not for ranks that share a GPU, and in 2.27 not for those of several hosts.
bool are_windows_possible(ncclComm* comm) {
  for (int rank = 0; rank < comm->size; ++rank) {
    const Member& one = comm->board->member(rank);
    for (int other = 0; other < rank; ++other) {
      const Member& two = comm->board->member(other);
      // NCCL_HOSTID makes hosts of ranks that share one, so two with the same GPU are not told apart from that.
      if (std::strcmp(one.bus_id, two.bus_id) == 0) return false;
      if (one.host_hash != two.host_hash && kLibraryVersion < kWindowsOverHostsVersion) return false;
    }
  }
  return true;
}

// After all ranks have come: those that cannot have the window get none, without an error.
Result finish_window(ncclComm* comm, const Registered& memory, uint64_t number, Window* window) {
  if (!can_be_window(memory) || !are_windows_possible(comm) ||
      script().find("no_windows", comm->subject()) != nullptr) {
    *window = nullptr;
    return kSuccess;
  }
  auto made = std::make_unique<ncclWindow_vidmem>(ncclWindow_vidmem{number, memory});
  *window = made.get();
  comm->windows[*window] = std::move(made);
  return kSuccess;
}

}  // namespace

Result allocate_memory(const char* function, void** address, size_t bytes) {
  if (address == nullptr || bytes == 0) return failure(kInvalidArgument, "ncclMemAlloc: no pointer or no bytes");
  int device = 0;
  const Within within(bind_device(function, &device));
  *address = fake_allocate(bytes, kWindowAlignment, "ncclMemAlloc");
  if (*address == nullptr) return failure(kUnhandledCudaError, "Cuda failure 2 'out of memory'");
  allocations()[static_cast<const std::byte*>(*address)] = {bytes, script().find("no_cumem") == nullptr};
  return kSuccess;
}

Result free_memory(const char* function, void* address) {
  const auto found = allocations().find(static_cast<const std::byte*>(address));
  if (found == allocations().end()) {
    misuse(function, "unpaired-free", "not memory of ncclMemAlloc, or freed already");
    return failure(kInvalidArgument, "ncclMemFree: unknown address");
  }
  const Registered memory{found->first, found->second.bytes};
  if (!is_live(memory)) {
    misuse(function, "unpaired-free", text_of(memory) + " were freed by another function");
    allocations().erase(found);
    return failure(kUnhandledCudaError, "Cuda failure 1 'invalid argument'");
  }
  for (const ncclComm* comm : live_comms()) {
    for (const auto& [handle, window] : comm->windows)
      if (overlap(window->memory, memory))
        misuse(function, "freed-while-registered", text_of(memory) + " are still a window of " + comm->name());
    for (const auto& [handle, registered] : comm->registrations)
      if (overlap(*registered, memory))
        misuse(function, "freed-while-registered", text_of(memory) + " are still registered with " + comm->name());
  }
  const bool is_mapped = found->second.takes_windows;  // unmapping waits for nothing
  allocations().erase(found);
  return (is_mapped ? fake_unmap(address) : free_device_memory(address))
             ? kSuccess
             : failure(kUnhandledCudaError, "Cuda failure of cuMemFree");
}

void forget_memory() { allocations().clear(); }

Result prepare_window(ncclComm* comm, const char* function, void* address, size_t bytes, Window* window, int flags,
                      Poll* poll) {
  const Registered memory{static_cast<const std::byte*>(address), bytes};
  if (window == nullptr || address == nullptr || bytes == 0)
    return failure(kInvalidArgument, "ncclCommWindowRegister: no window, buffer or bytes");
  if (reinterpret_cast<uintptr_t>(address) % kWindowAlignment != 0) {
    misuse(function, "window-alignment", text_of(memory) + " do not begin at a multiple of 4096");
    return failure(kInvalidArgument, "ncclCommWindowRegister: the buffer is not aligned to 4096 bytes");
  }
  if (flags != kWindowDefault && flags != kWindowCollSymmetric)
    return failure(kInvalidArgument, "ncclCommWindowRegister: flags " + std::to_string(flags));
  if (!is_live(memory)) {
    misuse(function, "window-range", text_of(memory) + " are not within one live allocation");
    return failure(kInvalidArgument, "ncclCommWindowRegister: not device memory");
  }
  for (const auto& [handle, other] : comm->windows)
    if (overlap(other->memory, memory))
      misuse(function, "double-window", text_of(memory) + " overlap a window of the same communicator");
  const HostCall call{kWindowCall, {static_cast<int64_t>(bytes), flags, 0}};
  *poll = [=, meeting = std::make_shared<Meeting>(comm, function, call)] {
    const Result result = meeting->poll();
    if (result != kSuccess) return result;
    meeting->require_equal();
    return finish_window(comm, memory, meeting->number(), window);
  };
  return kSuccess;
}

Result end_window(ncclComm* comm, const char* function, Window window) {
  if (window == nullptr) return kSuccess;
  const auto found = comm->windows.find(window);
  if (found == comm->windows.end()) {
    misuse(function, "unknown-window", "not a window of " + comm->name() + ", or deregistered already");
    return failure(kInvalidArgument, "ncclCommWindowDeregister: unknown window");
  }
  if (!comm->has_ended() && !comm->launches.empty())
    misuse(function, "busy", comm->name() + " still has " + std::to_string(comm->launches.size()) + " launches to run");
  check_still_live(function, found->second->memory);
  comm->windows.erase(found);
  return kSuccess;
}

Result register_memory(ncclComm* comm, const char* function, void* address, size_t bytes, void** handle) {
  if (handle == nullptr || address == nullptr || bytes == 0)
    return failure(kInvalidArgument, "ncclCommRegister: no handle, buffer or bytes");
  auto memory = std::make_unique<Registered>(Registered{static_cast<const std::byte*>(address), bytes});
  if (!is_live(*memory)) {
    misuse(function, "window-range", text_of(*memory) + " are not within one live allocation");
    return failure(kInvalidArgument, "ncclCommRegister: not device memory");
  }
  *handle = memory.get();
  comm->registrations[*handle] = std::move(memory);
  return kSuccess;
}

Result deregister_memory(ncclComm* comm, const char* function, void* handle) {
  if (handle == nullptr) return kSuccess;
  const auto found = comm->registrations.find(handle);
  if (found == comm->registrations.end()) {
    misuse(function, "unknown-window", "not a registration of " + comm->name() + ", or deregistered already");
    return failure(kInvalidArgument, "ncclCommDeregister: unknown handle");
  }
  check_still_live(function, *found->second);
  comm->registrations.erase(found);
  return kSuccess;
}

void place(const ncclComm& comm, const Operation& operation, Descriptor* descriptor) {
  const size_t in_bytes = operation.in_bytes(comm.size), out_bytes = operation.out_bytes(comm.size);
  const bool reads = operation.reads(comm.rank);
  descriptor->out = placement_of(comm, operation.out, out_bytes);
  // What is not read on this rank counts as lying where the output does.
  descriptor->in = reads ? placement_of(comm, operation.in, in_bytes) : descriptor->out;
  descriptor->registered =
      is_registered(comm, operation.out, out_bytes) && (!reads || is_registered(comm, operation.in, in_bytes));
}

void check_registrations(const ncclComm& comm, const char* function) {
  for (const auto& [handle, window] : comm.windows) {
    check_still_live(function, window->memory);
    misuse(function, "still-registered", comm.name() + " ends with a window of " + text_of(window->memory));
  }
  for (const auto& [handle, memory] : comm.registrations) {
    check_still_live(function, *memory);
    misuse(function, "still-registered", comm.name() + " ends with " + text_of(*memory) + " registered");
  }
}

}  // namespace fake_nccl
