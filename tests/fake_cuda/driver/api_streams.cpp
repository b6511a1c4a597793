// The driver's functions for streams, events and capture.
#include <algorithm>

#include "fake_cuda/driver/driver.h"

namespace fake {

namespace {

// Work that does nothing but be in order.
Work marker(const std::string& name) {
  Work work;
  work.name = name;
  return work;
}

}  // namespace

Result cuStreamCreateWithPriority(StreamHandle* stream, unsigned flags, int priority) {
  Call call("cuStreamCreateWithPriority", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (flags > kStreamNonBlocking) return call.misuse(kInvalidValue, "flags " + std::to_string(flags));
  *stream = &queues().make_stream(call.context(), flags != kStreamNonBlocking, std::clamp(priority, -5, 0));
  return kSuccess;
}

// What is pending still runs.
Result cuStreamDestroy(StreamHandle handle) {
  Call call("cuStreamDestroy_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUstream_st* stream = call.stream(handle);
  if (!stream) return kInvalidHandle;
  if (stream == call.context().legacy) return call.misuse(kInvalidHandle, "the legacy stream");
  stream->is_alive = false;
  return kSuccess;
}

// Asks for the context, so none need be current.
Result cuStreamGetCtx(StreamHandle handle, Context* context) {
  Call call("cuStreamGetCtx", Needs::kInit);
  if (call.is_refused()) return call.result();
  const CUstream_st* stream = stream_of(handle);
  if (!stream) return call.misuse(kInvalidHandle, "not a stream");
  if (stream == stream->context->legacy && thread_state().contexts.empty()) {
    return call.misuse(kInvalidContext, "the legacy stream of no current context");
  }
  if (!stream->is_alive) return call.misuse(kInvalidHandle, stream->name + " was destroyed");
  *context = stream->context;
  return kSuccess;
}

Result cuStreamWaitEvent(StreamHandle stream_handle, EventHandle event_handle, unsigned flags) {
  Call call("cuStreamWaitEvent", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUstream_st* stream = call.stream(stream_handle);
  CUevent_st* event = stream ? call.event(event_handle) : nullptr;
  if (!event) return kInvalidHandle;
  if (flags > 1) return call.misuse(kInvalidValue, "flags " + std::to_string(flags));
  if (script().sites.drops(call.symbol())) return kSuccess;
  if (!event->record) {
    reports().add(Kind::kNote, stream->name + " waits for " + event->name + ", which was never recorded");
    return kSuccess;
  }
  const uint64_t from = event->record->capture;
  if (stream->capture && from != stream->capture && flags != 1) {
    stream->capture_broken = true;
    return call.misuse(kCaptureIsolation, stream->name + " captures and waits for " + event->name +
                                              ", which was recorded outside of this capture");
  }
  if (from && !stream->capture) {
    const bool is_under_way = std::any_of(queues().streams().all().begin(), queues().streams().all().end(),
                                          [&](const auto& other) { return other->capture == from; });
    if (!is_under_way)
      return call.misuse(kCapturedEvent, stream->name + " waits for " + event->name +
                                             ", which was recorded in a capture that has ended");
    stream->capture = from;
  }
  queues().enqueue(*stream, marker("wait for " + event->name), {event->record});
  return kSuccess;
}

Result cuStreamQuery(StreamHandle handle) {
  Call call("cuStreamQuery", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUstream_st* stream = call.stream(handle);
  if (!stream) return kInvalidHandle;
  if (stream->capture) {
    stream->capture_broken = true;
    return call.misuse(kStreamCaptureUnsupported, stream->name + " captures");
  }
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  queues().run_some();
  if (!queues().is_idle(*stream)) return kNotReady;
  queues().host_joins(stream->clock);
  if (stream == call.context().legacy) {
    for (const auto& other : queues().streams().all()) {
      if (other->blocking && other->context == stream->context) queues().host_joins(other->clock);
    }
  }
  return kSuccess;
}

Result cuStreamIsCapturing(StreamHandle handle, CaptureStatus* status) {
  Call call("cuStreamIsCapturing", Needs::kContext);
  if (call.is_refused()) return call.result();
  const CUstream_st* stream = call.stream(handle);
  if (!stream) return kInvalidHandle;
  *status = !stream->capture ? kCaptureNone : stream->capture_broken ? kCaptureInvalidated : kCaptureActive;
  return kSuccess;
}

Result cuThreadExchangeStreamCaptureMode(CaptureMode* mode) {
  Call call("cuThreadExchangeStreamCaptureMode", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (*mode < kCaptureGlobal || *mode > kCaptureRelaxed) return call.misuse(kInvalidValue, "not a capture mode");
  std::swap(*mode, thread_state().mode);
  return kSuccess;
}

Result cuEventCreate(EventHandle* event, unsigned flags) {
  Call call("cuEventCreate", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUevent_st& made = driver().events.make();
  made.context = &call.context();
  made.has_timing = (flags & kEventDisableTiming) == 0;
  made.name = "event " + std::to_string(driver().events.all().size());
  *event = &made;
  return kSuccess;
}

Result cuEventDestroy(EventHandle handle) {
  Call call("cuEventDestroy_v2", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUevent_st* event = call.event(handle);
  if (!event) return kInvalidHandle;
  event->is_alive = false;
  event->record.reset();
  return kSuccess;
}

namespace {

Result record(const Call& call, EventHandle event_handle, StreamHandle stream_handle, unsigned flags) {
  CUstream_st* stream = call.stream(stream_handle);
  CUevent_st* event = stream ? call.event(event_handle) : nullptr;
  if (!event) return kInvalidHandle;
  if (flags > kEventRecordExternal) return call.misuse(kInvalidValue, "flags " + std::to_string(flags));
  if (script().sites.drops(call.symbol())) return kSuccess;
  event->record = queues().enqueue(*stream, marker("record of " + event->name));
  // An external record is a node of the graph that marks time: others do not depend on it.
  if (flags == kEventRecordExternal) event->record->capture = 0;
  return kSuccess;
}

}  // namespace

Result cuEventRecord(EventHandle event, StreamHandle stream) {
  Call call("cuEventRecord", Needs::kContext);
  return call.is_refused() ? call.result() : record(call, event, stream, kEventRecordDefault);
}

Result cuEventRecordWithFlags(EventHandle event, StreamHandle stream, unsigned flags) {
  Call call("cuEventRecordWithFlags", Needs::kContext);
  return call.is_refused() ? call.result() : record(call, event, stream, flags);
}

Result cuEventQuery(EventHandle handle) {
  Call call("cuEventQuery", Needs::kContext);
  if (call.is_refused()) return call.result();
  CUevent_st* event = call.event(handle);
  if (!event) return kInvalidHandle;
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  if (!event->record) return kSuccess;
  if (event->record->capture) return call.misuse(kStreamCaptureUnsupported, event->name + " was recorded in a capture");
  queues().run_some();
  if (!event->record->done) return kNotReady;
  queues().host_joins(event->record->clock);
  return kSuccess;
}

Result cuEventElapsedTime(float* milliseconds, EventHandle begin_handle, EventHandle end_handle) {
  Call call("cuEventElapsedTime", Needs::kContext);
  if (call.is_refused()) return call.result();
  const CUevent_st* begin = call.event(begin_handle);
  const CUevent_st* end = begin ? call.event(end_handle) : nullptr;
  if (!end) return kInvalidHandle;
  if (!begin->has_timing || !end->has_timing) return call.misuse(kInvalidHandle, "events made without timing");
  if (!begin->record || !end->record) return call.misuse(kInvalidHandle, "an event that was never recorded");
  if (!begin->record->done || !end->record->done) return kNotReady;
  *milliseconds = static_cast<float>(end->record->completed_ns - begin->record->completed_ns) * 1e-6F;
  return kSuccess;
}

}  // namespace fake
