#include "cuda/stream_cuda.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace gpucomm::cuda {

namespace {

// Events between which an older one may still be asked for: some for each bucket of an iteration. One that was recorded
// over counts as the later one, which is complete no earlier.
constexpr size_t kRing = 256;

constexpr std::chrono::microseconds kSpin{50};
constexpr std::chrono::milliseconds kBetweenLooks{20};

StreamHandle stream_of(Caller caller) { return static_cast<StreamHandle>(caller.stream); }

}  // namespace

CudaStream::CudaStream(std::shared_ptr<const GpuDevice> device, Embedder* embedder)
    : device_(std::move(device)), embedder_(embedder), ring_(kRing) {
  const Api& api = device_->api();
  const Current current(api, device_->context());
  int least = 0, greatest = 0;
  device_->check(api.ctx_get_stream_priority_range(&least, &greatest), "cuCtxGetStreamPriorityRange");
  device_->check(api.stream_create_with_priority(&handle_, kStreamNonBlocking, greatest), "cuStreamCreateWithPriority");
  device_->check(api.event_create(&between_, kEventDisableTiming), "cuEventCreate");
  for (Recorded& slot : ring_) device_->check(api.event_create(&slot.event, kEventDisableTiming), "cuEventCreate");
}

// The driver keeps what is destroyed until the work before it is done.
CudaStream::~CudaStream() {
  try {
    const Api& api = device_->api();
    const Current current(api, device_->context());
    for (Recorded& slot : ring_) api.event_destroy(slot.event);
    api.event_destroy(between_);
    api.stream_destroy(handle_);
  } catch (const CudaError&) {
    // The context is gone, and with it all that was in it.
  }
}

void CudaStream::enqueue(std::shared_ptr<Task>) { GPUCOMM_ASSERT(false, "a task on a stream of " + device_->text()); }

bool CudaStream::captures(StreamHandle stream) const {
  if (!stream) return false;  // the legacy stream cannot, and asking it is an error while another stream captures
  const Current current(device_->api(), device_->context());
  CaptureStatus status = kCaptureNone;
  device_->check(device_->api().stream_is_capturing(stream, &status), "cuStreamIsCapturing");
  return status != kCaptureNone;
}

// Before and after this stream may have joined one.
void CudaStream::note_capture() {
  if (!captures(handle_)) {
    capture_ = 0;
  } else if (capture_ == 0) {
    capture_ = ++captures_;
  }
}

Event CudaStream::record() {
  const Current current(device_->api(), device_->context());
  Recorded& slot = ring_[(recorded_ + 1) % ring_.size()];
  device_->check(device_->api().event_record(slot.event, handle_), "cuEventRecord");
  note_capture();
  slot.capture = capture_;
  return {++recorded_};
}

bool CudaStream::query(Event event) {
  if (event.ticket <= completed_) return true;
  const Recorded& slot = slot_of(event);
  if (slot.capture != 0) return true;
  const Current current(device_->api(), device_->context());
  const BesideCaptures beside(device_->api());
  const Result result = device_->api().event_query(slot.event);
  if (result == kNotReady) return false;
  device_->check(result, "cuEventQuery");
  completed_ = event.ticket;
  return true;
}

void CudaStream::synchronize(Event event) {
  using namespace std::chrono;
  const auto begin = steady_clock::now();
  auto looked = begin;
  while (!query(event)) {
    const auto now = steady_clock::now();
    if (now - begin < kSpin) continue;
    if (now - looked > kBetweenLooks) {
      looked = now;
      if (look_) look_();
      if (embedder_) embedder_->check_interrupt();
    }
    if (embedder_) embedder_->before_blocking();
    // What has lasted is not about to end within microseconds.
    std::this_thread::sleep_for(std::min<nanoseconds>((now - begin) / 8, milliseconds(1)));
    if (embedder_) embedder_->after_blocking();
  }
}

void CudaStream::wait_for(StreamHandle then, EventHandle event) {
  device_->check(device_->api().stream_wait_event(then, event, 0), "cuStreamWaitEvent");
}

void CudaStream::follow(Caller caller) {
  const Current current(device_->api(), device_->context());
  note_capture();
  device_->check(device_->api().event_record(between_, stream_of(caller)), "cuEventRecord");
  wait_for(handle_, between_);
  note_capture();
}

void CudaStream::lead(Caller caller, Event event) {
  if (event.ticket == 0) return;  // nothing was ever enqueued here
  const Current current(device_->api(), device_->context());
  note_capture();
  const uint64_t capture = slot_of(event).capture;
  const bool together = captures(stream_of(caller)) ? capture != 0 && capture == capture_ : capture == 0;
  if (!together) return;  // [Note: captures]
  wait_for(stream_of(caller), slot_of(event).event);
}

void CudaStream::order(Caller first, Caller then) {
  if (first == then) return;
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().event_record(between_, stream_of(first)), "cuEventRecord");
  wait_for(stream_of(then), between_);
}

}  // namespace gpucomm::cuda
