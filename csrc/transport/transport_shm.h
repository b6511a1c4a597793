// Collectives between processes of one host through shared memory.
//
// Memory from allocate() is reduced in place, symmetrically; any other memory goes through data slots (small) or a
// staging pipeline. Work is done by the ranks' own threads inside start(), the tasks and run(): there is no thread.
// See shm_collectives.h for the protocol, shm_region.h for the memory, shm_failures.h for what happens when a rank
// fails.
#pragma once

#include <memory>

#include "transport/shm_handshake.h"
#include "transport/transport.h"

namespace gpucomm {

namespace shm {
class Collectives;
}

class ShmTransport final : public Transport {
 public:
  // Collective over all ranks; blocks as long as options.exchange does. Throws TransportUnavailable on all ranks alike
  // if any of them cannot open the memory of another.
  explicit ShmTransport(ShmOptions options);
  // Tells the peers that this rank is gone; does not block. Tasks still on a stream fail.
  ~ShmTransport() override;

  std::string name() const override { return "shm"; }
  bool scales_in_reduce() const override { return true; }
  // Local: peers take no part. Throws UsageError if the heap is full.
  Memory allocate(size_t bytes) override;
  void start(const Collective& collective, Stream& stream) override;
  // Without a task or an allocation if nothing is in flight here or on the stream.
  void run(const Collective& collective, Stream& stream) override;
  void abort(const std::string& reason) noexcept override;

 private:
  std::shared_ptr<shm::Collectives> collectives_;  // shared with the tasks
};

}  // namespace gpucomm
