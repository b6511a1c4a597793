// The driver's functions for memory and copies.
#include <cstring>

#include "fake_cuda/driver/accesses.h"
#include "fake_cuda/driver/driver.h"
#include "fake_cuda/driver/memory.h"

namespace fake {

namespace {

constexpr size_t kAlignment = 512;

const void* pointer(DeviceAddress address) { return reinterpret_cast<const void*>(address); }

// Device memory of the current context? Reported, where it is not.
bool is_of_device(const Call& call, DeviceAddress address, size_t bytes, bool write) {
  const Allocation* allocation = memory().holding(address);
  if (allocation && allocation->is_host()) {
    call.misuse(kInvalidValue, allocation->name + " is host memory, not device memory");
    return false;
  }
  if (allocation && allocation->context != &call.context()) {
    call.misuse(kInvalidValue, allocation->name + " is on another device");
    return false;
  }
  return bytes == 0 || memory().check(call.symbol(), address, bytes, write);
}

// Host memory, pinned or not? Reported, where it is the device's.
bool is_of_host(const Call& call, const void* address) {
  const Allocation* allocation = memory().holding(reinterpret_cast<uintptr_t>(address));
  if (!allocation || allocation->is_host()) return true;
  call.misuse(kInvalidValue, allocation->name + " is device memory, not host memory");
  return false;
}

// A copy or fill, with the ranges that it touches.
Result enqueue(const Call& call, StreamHandle handle, std::function<void()> action, std::vector<FakeRange> ranges,
               WorkPtr* enqueued = nullptr) {
  CUstream_st* stream = call.stream(handle);
  if (!stream) return kInvalidHandle;
  Work work;
  work.name = call.symbol();
  work.ranges = std::move(ranges);
  work.step = [action = std::move(action)](Work&) {
    action();
    return true;
  };
  const WorkPtr result = queues().enqueue(*stream, std::move(work));
  if (enqueued) *enqueued = result;
  return kSuccess;
}

Result free(const Call& call, uintptr_t address, bool is_host) {
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  Allocation* allocation = memory().starting_at(address);
  if (!allocation || !allocation->block) {
    return call.misuse(kInvalidValue, memory().describe(address, 0) + ", not the start of live memory");
  }
  if (allocation->is_host() != is_host) return call.misuse(kInvalidValue, allocation->name + " is of the other kind");
  if (allocation->context != &call.context())
    return call.misuse(kInvalidValue, allocation->name + " is on another device");
  synchronise(call, std::string(call.symbol()) + " of " + allocation->name);  // which the host knows then
  memory().release(*allocation);
  return kSuccess;
}

}  // namespace

Result cuMemAlloc(DeviceAddress* address, size_t bytes) {
  Call call("cuMemAlloc_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  if (bytes == 0) return call.misuse(kInvalidValue, "no bytes");
  if (memory().live_bytes(&call.context()) + bytes > script().machine.memory_bytes) return kOutOfMemory;
  const Allocation& made = memory().allocate(bytes, kAlignment, Place::kDevice, &call.context(), "");
  accesses().forget(made.base, bytes);
  *address = made.base;
  return kSuccess;
}

Result cuMemFree(DeviceAddress address) {
  Call call("cuMemFree_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  return address == 0 ? kSuccess : free(call, address, false);
}

Result cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  Call call("cuMemHostAlloc", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  if (bytes == 0 || flags > 7) return call.misuse(kInvalidValue, "no bytes, or unknown flags");
  const Allocation& made = memory().allocate(bytes, kAlignment, Place::kPinned, &call.context(), "");
  accesses().forget(made.base, bytes);
  *address = reinterpret_cast<void*>(made.base);
  return kSuccess;
}

Result cuMemFreeHost(void* address) {
  Call call("cuMemFreeHost", Needs::kContext);
  if (call.is_refused()) return call.result();
  return free(call, reinterpret_cast<uintptr_t>(address), true);
}

// From memory that is not pinned the driver copies into a buffer of its own before it returns.
Result cuMemcpyHtoDAsync(DeviceAddress to, const void* from, size_t bytes, StreamHandle stream) {
  Call call("cuMemcpyHtoDAsync_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!is_of_device(call, to, bytes, true) || !is_of_host(call, from)) return kInvalidValue;
  void* target = reinterpret_cast<void*>(to);
  if (memory().holding(reinterpret_cast<uintptr_t>(from))) {
    return enqueue(call, stream, [=] { std::memcpy(target, from, bytes); },
                   {{from, bytes, false}, {target, bytes, true}});
  }
  auto staged = std::make_shared<std::vector<char>>(bytes);
  std::memcpy(staged->data(), from, bytes);
  return enqueue(call, stream, [=] { std::memcpy(target, staged->data(), bytes); }, {{target, bytes, true}});
}

// Into memory that is not pinned it returns only when the copy is complete.
Result cuMemcpyDtoHAsync(void* to, DeviceAddress from, size_t bytes, StreamHandle stream) {
  Call call("cuMemcpyDtoHAsync_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!is_of_device(call, from, bytes, false) || !is_of_host(call, to)) return kInvalidValue;
  const void* source = pointer(from);
  auto copy = [=] { std::memcpy(to, source, bytes); };
  if (memory().holding(reinterpret_cast<uintptr_t>(to))) {
    return enqueue(call, stream, copy, {{source, bytes, false}, {to, bytes, true}});
  }
  WorkPtr work;
  const Result result = enqueue(call, stream, copy, {{source, bytes, false}}, &work);
  if (result != kSuccess) return result;
  reports().add(Kind::kNote, std::string(call.symbol()) + ": into memory that is not pinned: the host waits");
  queues().run_until(work, call.symbol());
  queues().host_joins(work->clock);
  return kSuccess;
}

Result cuMemcpyDtoDAsync(DeviceAddress to, DeviceAddress from, size_t bytes, StreamHandle stream) {
  Call call("cuMemcpyDtoDAsync_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!is_of_device(call, from, bytes, false) || !is_of_device(call, to, bytes, true)) return kInvalidValue;
  const void* source = pointer(from);
  void* target = reinterpret_cast<void*>(to);
  return enqueue(call, stream, [=] { std::memmove(target, source, bytes); },
                 {{source, bytes, false}, {target, bytes, true}});
}

Result cuMemsetD8Async(DeviceAddress to, unsigned char value, size_t bytes, StreamHandle stream) {
  Call call("cuMemsetD8Async", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (!is_of_device(call, to, bytes, true)) return kInvalidValue;
  void* target = reinterpret_cast<void*>(to);
  return enqueue(call, stream, [=] { std::memset(target, value, bytes); }, {{target, bytes, true}});
}

// What the driver does not know is not an error to ask for.
Result cuPointerGetAttribute(void* value, PointerAttribute attribute, DeviceAddress address) {
  Call call("cuPointerGetAttribute", Needs::kInit);
  if (call.is_refused()) return call.result();
  const Allocation* allocation = memory().holding(address);
  if (!allocation) return kInvalidValue;
  switch (attribute) {
    case kPointerContext:
      *static_cast<Context*>(value) = allocation->context;
      return kSuccess;
    case kPointerMemoryType:
      *static_cast<unsigned*>(value) = allocation->is_host() ? kMemoryHost : kMemoryDevice;
      return kSuccess;
    case kPointerDeviceOrdinal:
      *static_cast<int*>(value) = allocation->context ? allocation->context->device : 0;
      return kSuccess;
  }
  return call.misuse(kInvalidValue, "attribute " + std::to_string(attribute) + ", which this stand-in has not");
}

}  // namespace fake
