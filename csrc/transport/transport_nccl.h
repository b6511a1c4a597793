// Collectives between GPUs through NCCL, on device memory. What it starts runs on the stream it is given, a CudaStream;
// nothing here waits for the device but construction.
//
// NCCL may wait for ever: for a peer that never comes, a wire that was cut. So the communicator is initialised on a
// thread of its own, with a deadline, and afterwards a watcher looks every few milliseconds for NCCL's asynchronous
// errors and for a collective that outlasts the timeout; then it revokes or aborts the communicator, which ends the
// kernels that wait on the device, and every later call raises. See nccl/communicator.h.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/embedder.h"
#include "cuda/device.h"
#include "cuda/stream_cuda.h"
#include "nccl/nccl_api.h"
#include "transport/transport.h"

namespace gpucomm {

namespace nccl {
class Communicator;
}

// Multiplies memory of the device by a factor, as work of the stream.
using ScaleOnDevice =
    std::function<void(void* memory, DType dtype, size_t numel, double factor, cuda::StreamHandle stream)>;

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;
  double timeout_s = 600.0;  // of initialisation, and of each collective since it could have begun
  std::shared_ptr<const nccl::Api> nccl;
  std::shared_ptr<const cuda::GpuDevice> device;
  nccl::UniqueId id{};  // of rank 0's making, the same on every rank
  std::string name;     // of the communicator, in NCCL's own logs
  int min_ctas = 0;     // blocks that a collective takes of the GPU; 0: NCCL's choice
  int max_ctas = 0;
  int cga_cluster_size = 0;
  // False: calls return before their work is on the stream, and are polled; each collective then costs a thread of
  // NCCL's, some 100 us.
  bool blocking = true;
  ScaleOnDevice scale;  // for averages of floating numbers; none: they are refused
  Embedder* embedder = nullptr;
};

class NcclTransport final : public Transport {
 public:
  // Collective; blocks until all ranks came or the timeout ends. Throws UsageError for options that NCCL refuses,
  // NcclError with what to check (the same GPU for two ranks, a wrong interface), CommTimeout.
  explicit NcclTransport(NcclOptions options);
  // What is under way is completed in the background; waits some seconds for it at most. Memory that was allocated here
  // lives on until its last owner dies.
  ~NcclTransport() override;

  std::string name() const override { return "nccl"; }
  bool scales_in_reduce() const override { return false; }
  // Device memory, of NCCL's own allocator where it has one. Local; waits for the device.
  Memory allocate(size_t bytes) override;
  // The stream has to be a CudaStream of the same device. Throws what the watcher found.
  void start(const Collective& collective, Stream& stream) override;
  void abort(const std::string& reason) noexcept override;

  // Throws what went wrong since it was looked for last, if anything did.
  void check_failure() override;
  const std::shared_ptr<const cuda::GpuDevice>& device() const { return options_.device; }

 private:
  void enqueue(const Collective& collective, cuda::StreamHandle stream);

  NcclOptions options_;
  std::shared_ptr<nccl::Communicator> comm_;
};

}  // namespace gpucomm
