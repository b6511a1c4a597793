#include "fake_cuda/driver/driver.h"

#include "fake_cuda/driver/memory.h"

namespace fake {

Driver& driver() {
  static Driver* const instance = new Driver;  // threads may outlive what is destroyed at exit
  return *instance;
}

ThreadState& thread_state() {
  thread_local ThreadState state;
  return state;
}

CUstream_st& legacy_stream(CUctx_st& context) {
  if (!context.legacy) {
    context.legacy = &queues().make_stream(context, true, 0);
    context.legacy->name = "the legacy stream";
  }
  return *context.legacy;
}

CUstream_st* stream_of(StreamHandle handle) {
  const auto& contexts = thread_state().contexts;
  if (!handle || handle == reinterpret_cast<StreamHandle>(1)) {
    if (!contexts.empty()) return &legacy_stream(*contexts.back());
    CUctx_st& first = driver().contexts[0];
    return first.retained > 0 ? &legacy_stream(first) : nullptr;
  }
  return queues().streams().knows(handle) ? handle : nullptr;
}

bool misused(const char* function, const std::string& text) {
  reports().add(Kind::kMisuse, std::string(function) + ": " + text);
  return false;
}

CUstream_st* find_stream(const char* function, CUstream_st* handle) {
  CUstream_st* stream = stream_of(handle);
  if (!stream) misused(function, handle ? "not a stream" : "no context is current on this thread");
  return stream;
}

CUctx_st* current_context() {
  const auto& contexts = thread_state().contexts;
  return contexts.empty() ? nullptr : contexts.back();
}

Call::Call(const char* symbol, Needs needs) : lock_(queues().lock()), symbol_(symbol) {
  result_ = script().calls.enter(symbol);
  if (is_refused()) return;
  if (needs != Needs::kNothing && !driver().is_initialised) {
    result_ = misuse(kNotInitialized, "before cuInit");
    return;
  }
  const auto& contexts = thread_state().contexts;
  context_ = contexts.empty() ? nullptr : contexts.back();
  if (needs == Needs::kContext && !context_) {
    result_ = misuse(kInvalidContext, "no context is current on this thread");
  } else if (needs == Needs::kContext && context_->retained == 0) {
    result_ = misuse(kInvalidContext, "the current context was released");
  }
}

Result Call::misuse(Result result, const std::string& text) const {
  reports().add(Kind::kMisuse, std::string(symbol_) + ": " + text);
  return result;
}

CUstream_st* Call::stream(StreamHandle handle) const {
  if (handle == reinterpret_cast<StreamHandle>(2)) {
    misuse(kInvalidHandle, "the per-thread default stream, which this stand-in has not");
    return nullptr;
  }
  CUstream_st* stream = stream_of(handle);
  if (!stream) {
    misuse(kInvalidHandle, "not a stream");
  } else if (!stream->is_alive) {
    misuse(kInvalidHandle, stream->name + " was destroyed");
  } else if (stream->context != context_) {
    misuse(kInvalidHandle, stream->name + " belongs to device " + std::to_string(stream->context->device) +
                               ", current is " + std::to_string(context_->device));
  } else {
    return stream;
  }
  return nullptr;
}

CUevent_st* Call::event(EventHandle handle) const {
  if (!driver().events.knows(handle)) {
    misuse(kInvalidHandle, "not an event");
  } else if (!handle->is_alive) {
    misuse(kInvalidHandle, handle->name + " was destroyed");
  } else if (handle->context != context_) {
    misuse(kInvalidHandle, handle->name + " belongs to device " + std::to_string(handle->context->device) +
                               ", current is " + std::to_string(context_->device));
  } else {
    return handle;
  }
  return nullptr;
}

bool Call::is_unsafe_in_capture() const {
  if (driver().global_captures == 0 || thread_state().mode == kCaptureRelaxed) return false;
  misuse(kStreamCaptureUnsupported, "not allowed during a capture, unless in the thread's relaxed mode");
  for (const auto& stream : queues().streams().all()) {
    if (stream->capture) stream->capture_broken = true;
  }
  return true;
}

void synchronise(const Call& call, const std::string& what) {
  queues().drain(&call.context(), what);
  for (const auto& stream : queues().streams().all()) {
    if (stream->pending.empty() && stream->context == &call.context()) queues().host_joins(stream->clock);
  }
}

}  // namespace fake
