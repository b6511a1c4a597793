// One process standing for N equal ranks, with an optional model of the link between them. What it computes is exact
// for N ranks that contribute the same; how long it takes is simulated, and name() says so.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>

#include "core/embedder.h"
#include "transport/transport.h"

namespace gpucomm {

struct LoopbackOptions {
  int size = 1;
  // A collective takes latency_s + its payload bytes / bytes_per_s, and collectives follow one another on the link.
  // Payload: all_reduce and broadcast numel elements, reduce_scatter and all_gather size * numel, barrier none.
  double latency_s = 0;
  double bytes_per_s = std::numeric_limits<double>::infinity();
  Embedder* embedder = nullptr;  // outlives the transport; may be null
};

class LoopbackTransport final : public Transport {
 public:
  // rank() is 0. Throws UsageError for a size below 1, a negative latency or a bandwidth that is not positive.
  explicit LoopbackTransport(const LoopbackOptions& options);
  ~LoopbackTransport() override;

  std::string name() const override { return "loopback"; }
  bool scales_in_reduce() const override { return true; }
  Memory allocate(size_t bytes) override;
  // `out` holds the result when the task completes, not before the modelled time has passed.
  void start(const Collective& collective, Stream& stream) override;
  void abort(const std::string& reason) noexcept override;

 private:
  class ModelledTask;
  struct Link;  // shared with the tasks

  std::shared_ptr<Link> link_;
};

}  // namespace gpucomm
