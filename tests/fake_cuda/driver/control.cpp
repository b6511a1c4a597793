// What tests call: control.h.
#include "fake_cuda/driver/control.h"

#include "fake_cuda/driver/accesses.h"
#include "fake_cuda/driver/driver.h"
#include "fake_cuda/driver/idle_driver.h"
#include "fake_cuda/driver/memory.h"

using namespace fake;

extern "C" {

// ---- the run

void fake_reset(void) {
  IdleDriver::start(0);
  Locked lock(queues().lock());
  queues().clear();
  driver().events.clear();
  driver().modules.clear();
  driver().names.clear();
  driver().global_captures = 0;
  for (CUctx_st& context : driver().contexts) context = {};
  thread_state() = {};
  accesses().clear();
  memory().clear();
  script() = {};
  reports().clear();
}

void fake_set_order(int order, uint64_t seed) {
  Locked lock(queues().lock());
  queues().set_order(static_cast<Order>(order), seed);
}

void fake_set_deadline(double seconds) {
  Locked lock(queues().lock());
  queues().set_deadline(seconds);
}

void fake_drive_when_idle(double seconds) { IdleDriver::start(seconds); }

bool fake_drain(void) {
  Locked lock(queues().lock());
  const bool is_complete = queues().drain(nullptr, "fake_drain");
  memory().check_red_zones();
  return is_complete;
}

bool fake_run_until(CUstream_st* handle) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_run_until", handle);
  return stream && queues().run_before({stream}, "fake_run_until of " + stream->name);
}

bool fake_synchronize(CUstream_st* handle) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_synchronize", handle);
  return stream && fake_op(handle, "synchronisation of the host", nullptr, 0) &&
         (queues().host_joins(stream->clock), true);
}

bool fake_order(CUstream_st* first_handle, CUstream_st* then_handle) {
  Locked lock(queues().lock());
  CUstream_st* first = find_stream("fake_order", first_handle);
  CUstream_st* then = find_stream("fake_order", then_handle);
  if (!first || !then) return false;
  // As an event that is recorded on the one and waited for on the other brings it into the other's capture.
  if (then->capture && first->capture != then->capture) {
    then->capture_broken = true;
    return misused("fake_order", then->name + " captures and waits for " + first->name + ", which does not");
  }
  then->capture = first->capture;
  Work record, wait;
  record.name = "record by the test";
  wait.name = "wait by the test";
  queues().enqueue(*then, std::move(wait), {queues().enqueue(*first, std::move(record))});
  return true;
}

// ---- other accesses

bool fake_op(CUstream_st* handle, const char* name, const FakeRange* ranges, size_t count) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream(name, handle);
  if (!stream) return false;
  Work work;
  work.name = name;
  work.ranges.assign(ranges, ranges + count);
  return queues().run_until(queues().enqueue(*stream, std::move(work)), name);
}

bool fake_access(CUstream_st* stream, const void* address, size_t bytes, bool write, const char* name) {
  const FakeRange range{address, bytes, write};
  return fake_op(stream, name, &range, 1);
}

bool fake_host_access(const void* address, size_t bytes, bool write, const char* name) {
  Locked lock(queues().lock());
  const auto place = reinterpret_cast<uintptr_t>(address);
  if (!memory().check(std::string(name) + " on the host", place, bytes, write)) return false;
  const Access access = queues().host_access(name);
  if (write) {
    accesses().write(place, bytes, access, queues().host_clock());
  } else {
    accesses().read(place, bytes, access, queues().host_clock());
  }
  return true;
}

bool fake_register(const void* address, size_t bytes, const char* name, CUstream_st* handle) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_register", handle);
  if (!stream) return false;
  const auto base = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0 || !memory().add(base, bytes, stream->context, name)) {
    return misused("fake_register",
                   std::string(name) + " is empty or overlaps what is live: " + memory().describe(base, bytes));
  }
  stream->clock.join(queues().host_clock());
  accesses().begin(base, bytes, {stream->clock.tick(stream->line), accesses().site("allocation", stream->name)});
  return true;
}

bool fake_adopt(const void* address, size_t bytes, const char* name) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_adopt", nullptr);
  if (!stream) return false;
  const auto base = reinterpret_cast<uintptr_t>(address);
  if (bytes == 0 || !memory().add(base, bytes, stream->context, name)) {
    return misused("fake_adopt",
                   std::string(name) + " is empty or overlaps what is live: " + memory().describe(base, bytes));
  }
  accesses().forget(base, bytes);
  return true;
}

bool fake_forget(const void* address) {
  Locked lock(queues().lock());
  Allocation* allocation = memory().starting_at(reinterpret_cast<uintptr_t>(address));
  if (!allocation || allocation->block) return misused("fake_forget", "not registered memory");
  accesses().forget(allocation->base, allocation->bytes);
  memory().release(*allocation);
  return true;
}

bool fake_unregister(const void* address, CUstream_st* handle, CUstream_st* const* used, size_t used_count) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_unregister", handle);
  const auto base = reinterpret_cast<uintptr_t>(address);
  Allocation* allocation = memory().starting_at(base);
  if (!stream || !allocation || allocation->block) return misused("fake_unregister", "not registered memory");
  std::vector<CUstream_st*> streams{stream};
  for (size_t i = 0; i < used_count; ++i) {
    CUstream_st* other = find_stream("fake_unregister", used[i]);
    if (!other) return false;
    streams.push_back(other);
  }
  const bool is_complete = queues().run_before(streams, "free of " + allocation->name);
  Clock clock = queues().host_clock();
  for (const CUstream_st* other : streams) clock.join(other->clock);
  const Access access{stream->clock.tick(stream->line), accesses().site("free", stream->name)};
  accesses().write(base, allocation->bytes, access, clock);
  memory().release(*allocation);
  return is_complete;
}

// ---- reports

size_t fake_report_count(void) {
  Locked lock(queues().lock());
  return reports().all().size();
}

int fake_report_kind(size_t index) {
  Locked lock(queues().lock());
  return static_cast<int>(reports().all().at(index).kind);
}

uint64_t fake_report_times(size_t index) {
  Locked lock(queues().lock());
  return reports().all().at(index).count;
}

const char* fake_report_text(size_t index) {
  Locked lock(queues().lock());
  return reports().all().at(index).text.c_str();
}

void fake_clear_reports(void) {
  Locked lock(queues().lock());
  reports().clear();
}

void fake_check_leaks(void) {
  Locked lock(queues().lock());
  auto leak = [](const std::string& text) { reports().add(Kind::kLeak, text); };
  memory().report_leaks();
  for (const auto& stream : queues().streams().all()) {
    if (stream->is_alive && stream.get() != stream->context->legacy) leak(stream->name + " was never destroyed");
  }
  for (const auto& event : driver().events.all()) {
    if (event->is_alive) leak(event->name + " was never destroyed");
  }
  for (const auto& module : driver().modules.all()) {
    if (module->is_alive) leak("a module was never unloaded");
  }
  for (const CUctx_st& context : driver().contexts) {
    if (context.retained > 0) leak("the context of device " + std::to_string(context.device) + " was never released");
  }
}

// ---- scripts

void fake_set_device_count(int count) {
  Locked lock(queues().lock());
  if (count < 0 || count > kMaxDevices) {
    misused("fake_set_device_count", std::to_string(count) + ", not 0 to " + std::to_string(kMaxDevices));
    return;
  }
  script().machine.device_count = count;
}

void fake_set_driver_version(int version) {
  Locked lock(queues().lock());
  script().machine.driver_version = version;
}

void fake_set_capability(int major, int minor) {
  Locked lock(queues().lock());
  script().machine.capability_major = major;
  script().machine.capability_minor = minor;
}

void fake_set_memory(size_t bytes) {
  Locked lock(queues().lock());
  script().machine.memory_bytes = bytes;
}

void fake_fail_call(const char* function, uint64_t nth, int result) {
  Locked lock(queues().lock());
  script().calls.fail(function, nth, result);
}

uint64_t fake_calls(const char* function) {
  Locked lock(queues().lock());
  return script().calls.count(function);
}

void fake_set_site_depth(int depth) {
  Locked lock(queues().lock());
  script().sites.set_depth(depth);
}

size_t fake_site_count(void) {
  Locked lock(queues().lock());
  return script().sites.all().size();
}

const char* fake_site_name(size_t site) {
  Locked lock(queues().lock());
  return script().sites.all().at(site).name.c_str();
}

uint64_t fake_site_calls(size_t site) {
  Locked lock(queues().lock());
  return script().sites.all().at(site).calls;
}

void fake_mutate(int site) {
  Locked lock(queues().lock());
  script().sites.mutate(site);
}

// ---- capture

bool fake_begin_capture(CUstream_st* handle, int mode) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_begin_capture", handle);
  if (!stream) return false;
  if (stream->capture) return misused("fake_begin_capture", stream->name + " captures already");
  if (stream == stream->context->legacy) return misused("fake_begin_capture", "the legacy stream cannot capture");
  stream->capture = driver().next_capture++;
  stream->capture_origin = true;
  stream->capture_mode = mode;
  stream->capture_broken = false;
  if (mode == kCaptureGlobal) ++driver().global_captures;
  return true;
}

bool fake_end_capture(CUstream_st* handle) {
  Locked lock(queues().lock());
  CUstream_st* stream = find_stream("fake_end_capture", handle);
  if (!stream) return false;
  if (!stream->capture || !stream->capture_origin)
    return misused("fake_end_capture", stream->name + " began no capture");
  bool is_whole = true;
  for (const auto& other : queues().streams().all()) {
    if (other->capture != stream->capture) continue;
    is_whole &= !other->capture_broken;
    if (other->tail && !stream->clock.has_seen(other->tail->epoch)) {
      is_whole = misused("fake_end_capture", other->name + " joined the capture and was not joined back");
    }
    if (other.get() != stream) other->capture = 0;
    other->capture_broken = false;
  }
  if (stream->capture_mode == kCaptureGlobal) --driver().global_captures;
  stream->capture = 0;
  stream->capture_origin = false;
  return is_whole;
}

// ---- names

void fake_name_stream(CUstream_st* handle, const char* name) {
  Locked lock(queues().lock());
  if (CUstream_st* stream = find_stream("fake_name_stream", handle)) stream->name = name;
}

void fake_name_memory(const void* address, const char* name) {
  Locked lock(queues().lock());
  Allocation* allocation = memory().holding(reinterpret_cast<uintptr_t>(address));
  if (allocation) {
    allocation->name = name;
  } else {
    misused("fake_name_memory", std::string(name) + " is not live memory");
  }
}

}  // extern "C"
