// A stream of a GPU. It runs by itself: nothing is moved forward from here, and the host waits only in synchronize().
//
// [Note: order between streams] An event is recorded on the stream that goes first and waited for by the other; the
// wait takes the event as it was recorded last, so one event serves all such pairs, again and again.
//
// [Note: captures] What is captured as a graph cannot wait for work that is not, nor the other way round: it runs when
// the graph is replayed, on the program's stream, and is ordered there. Work from before a capture is complete when the
// program begins it, or comes before the replays on that stream, which waited for it at the end of its iteration.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "core/embedder.h"
#include "core/stream.h"
#include "cuda/device.h"

namespace gpucomm::cuda {

class CudaStream final : public Stream {
 public:
  // A stream of its own that does not synchronise with the legacy default stream, of the highest priority: its kernels
  // are few, and peers wait for them. embedder: lets signals of the program end a wait.
  CudaStream(std::shared_ptr<const GpuDevice> device, Embedder* embedder);
  ~CudaStream() override;
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;

  // Tasks are moved forward by a thread; there is none here. Throws InternalError.
  void enqueue(std::shared_ptr<Task> task) override;
  Event record() override;
  // An event recorded while a graph was captured counts as complete: it happens in replays only.
  bool query(Event event) override;
  void progress() override {}
  // Polls, so that what a peer's failure left running is noticed: see watch(). Throws UsageError for an event of a
  // capture.
  void synchronize(Event event) override;
  bool runs_by_itself() const override { return true; }
  void follow(Caller caller) override;
  void lead(Caller caller, Event event) override;
  void order(Caller first, Caller then) override;

  // Called between the polls of a wait; throws to end it.
  void watch(std::function<void()> look) { look_ = std::move(look); }

  StreamHandle handle() const { return handle_; }
  const std::shared_ptr<const GpuDevice>& device() const { return device_; }
  // Whether the stream is part of a graph that is being captured: the host must not ask for events then.
  bool is_capturing() const;
  // Throws UsageError if the caller is being captured: before anything is enqueued that the host is to wait for.
  void refuse_capture(Caller caller) const;

 private:
  struct Recorded {
    EventHandle event = nullptr;
    bool captured = false;
  };
  // The slot of an event; of one long past the slot's present, later event.
  const Recorded& slot_of(Event event) const { return ring_[event.ticket % ring_.size()]; }
  void wait_for(StreamHandle then, EventHandle event);
  bool is_capturing(StreamHandle stream) const;

  std::shared_ptr<const GpuDevice> device_;
  Embedder* embedder_;
  StreamHandle handle_ = nullptr;
  EventHandle between_ = nullptr;  // [Note: order between streams]
  std::vector<Recorded> ring_;     // by ticket; events are made once, not in an iteration
  uint64_t recorded_ = 0;
  uint64_t completed_ = 0;  // all up to this ticket are known to be complete
  std::function<void()> look_;
};

}  // namespace gpucomm::cuda
