// A stream of a GPU. It runs by itself: nothing is moved forward from here, and the host waits only in synchronize().
//
// [Note: order between streams] An event is recorded on the stream that goes first and waited for by the other; the
// wait takes the event as it was recorded last, so one event serves all such pairs, again and again.
//
// [Note: captures] A graph that is captured knows nothing outside of it: a stream of the program that captures may not
// wait for what came before, one that does not capture for what the graph holds. So between the two no order is made,
// and none is missing: what came before is complete when a capture begins, and the program orders the graph's replays.
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
  // An event recorded while a graph was captured counts as complete: it happens in replays only. May be called during a
  // capture.
  bool query(Event event) override;
  void progress() override {}
  // Polls, so that what a peer's failure left running is noticed: see watch().
  void synchronize(Event event) override;
  bool runs_by_itself() const override { return true; }
  void follow(Caller caller) override;
  // See [Note: captures].
  void lead(Caller caller, Event event) override;
  void order(Caller first, Caller then) override;

  // Called between the polls of a wait; throws to end it.
  void watch(std::function<void()> look) { look_ = std::move(look); }

  StreamHandle handle() const { return handle_; }
  const std::shared_ptr<const GpuDevice>& device() const { return device_; }
  // Whether a graph is captured of what is put on a stream of the device: the host must not wait for it then.
  bool captures(StreamHandle stream) const;

 private:
  struct Recorded {
    EventHandle event = nullptr;
    uint64_t capture = 0;  // of which it is a part; 0: none
  };
  void note_capture();
  // The slot of an event; of one long past the slot's present, later event.
  const Recorded& slot_of(Event event) const { return ring_[event.ticket % ring_.size()]; }
  void wait_for(StreamHandle then, EventHandle event);

  std::shared_ptr<const GpuDevice> device_;
  Embedder* embedder_;
  StreamHandle handle_ = nullptr;
  EventHandle between_ = nullptr;  // [Note: order between streams]
  std::vector<Recorded> ring_;     // by ticket; events are made once, not in an iteration
  uint64_t recorded_ = 0;
  uint64_t completed_ = 0;  // all up to this ticket are known to be complete
  uint64_t capture_ = 0;    // that this stream is a part of; 0: none
  uint64_t captures_ = 0;   // it was a part of so far
  std::function<void()> look_;
};

}  // namespace gpucomm::cuda
