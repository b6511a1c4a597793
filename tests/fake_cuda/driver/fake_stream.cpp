// What stand-ins for other libraries of the device call.
#include "fake_cuda/driver/fake_stream.h"

#include "fake_cuda/driver/accesses.h"
#include "fake_cuda/driver/driver.h"
#include "fake_cuda/driver/memory.h"

using namespace fake;

extern "C" {

int fake_enqueue(CUstream_st* handle, const FakeTask* task) {
  Call call("fake_enqueue", Needs::kContext);
  CUstream_st* stream = call.is_refused() ? nullptr : call.stream(handle);
  if (!stream) {
    if (task->drop) task->drop(task->self);
    return call.is_refused() ? call.result() : kInvalidHandle;
  }
  Work work;
  work.name = task->name;
  work.ranges.assign(task->ranges, task->ranges + task->range_count);
  work.step = [step = task->step, self = task->self](Work&) { return step(self); };
  if (task->drop) work.drop = [drop = task->drop, self = task->self] { drop(self); };
  queues().enqueue(*stream, std::move(work));
  return kSuccess;
}

int fake_current_device(void) {
  Locked lock(queues().lock());
  const CUctx_st* context = current_context();
  return context ? context->device : -1;
}

bool fake_find_allocation(const void* address, FakeAllocation* found) {
  Locked lock(queues().lock());
  const Allocation* allocation = memory().holding(reinterpret_cast<uintptr_t>(address));
  if (!allocation) return false;
  found->base = reinterpret_cast<const void*>(allocation->base);
  found->bytes = allocation->bytes;
  found->name = driver().names.insert(allocation->name).first->c_str();
  found->device = allocation->is_host() || !allocation->context ? -1 : allocation->context->device;
  found->is_host = allocation->is_host();
  return true;
}

void* fake_allocate(size_t bytes, size_t alignment, const char* name) {
  Locked lock(queues().lock());
  CUctx_st* context = current_context();
  if (!context || bytes == 0) return nullptr;
  if (memory().live_bytes(context) + bytes > script().machine.memory_bytes) return nullptr;
  const Allocation& made =
      memory().allocate(bytes, alignment ? alignment : 512, Place::kDevice, context, name ? name : "");
  accesses().forget(made.base, bytes);
  return reinterpret_cast<void*>(made.base);
}

bool fake_unmap(void* address) {
  Locked lock(queues().lock());
  Allocation* allocation = memory().starting_at(reinterpret_cast<uintptr_t>(address));
  if (!allocation || !allocation->block || allocation->is_host()) return false;
  memory().release(*allocation);
  return true;
}

void fake_lock(void) { queues().lock().lock(); }
void fake_unlock(void) { queues().lock().unlock(); }

void fake_misuse(const char* text) {
  Locked lock(queues().lock());
  reports().add(Kind::kMisuse, text);
}

int fake_enter(const char* function) {
  Locked lock(queues().lock());
  return script().calls.enter(function);
}

int fake_capture_status(CUstream_st* handle) {
  Locked lock(queues().lock());
  const CUstream_st* stream = find_stream("fake_capture_status", handle);
  return !stream || !stream->capture ? kCaptureNone : stream->capture_broken ? kCaptureInvalidated : kCaptureActive;
}

unsigned fake_random(unsigned bound) {
  Locked lock(queues().lock());
  return queues().random(bound);
}

}  // extern "C"
