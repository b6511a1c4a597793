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
#include "nccl/communicator.h"
#include "nccl/nccl_api.h"
#include "transport/transport.h"

namespace gpucomm {

// Multiplies memory of the device by a factor, as work of the stream.
using ScaleOnDevice =
    std::function<void(void* memory, DType dtype, size_t numel, double factor, cuda::StreamHandle stream)>;

class NcclTransport;

struct NcclOptions {
  int rank = 0;
  int size = 1;
  std::vector<int> global_ranks;
  double timeout_s = 600.0;  // of initialisation, and of each collective since it could have begun
  std::shared_ptr<const nccl::Api> nccl;
  std::shared_ptr<const cuda::GpuDevice> device;
  nccl::UniqueId id{};  // of rank 0's making, the same on every rank
  std::string name;     // of the communicator, in NCCL's own logs
  // What is unset is NCCL's choice, but for blocking: 1. With 0 calls return before their work is on the stream, and
  // are polled; each collective then costs a thread of NCCL's, some 100 us.
  nccl::Config config;
  std::string net_name;  // of NCCL's network module; empty: its choice
  ScaleOnDevice scale;   // for averages of floating numbers; none: they are refused
  Embedder* embedder = nullptr;
  std::vector<nccl::PeerProcess> peers =
      {};  // ranks of this machine, whose death ends the collectives they are part of
  // One of whose ranks this is to have all but `excluded`, and which can_shrink() on all of those; `id` is not looked
  // at.
  std::shared_ptr<NcclTransport> parent = nullptr;
  std::vector<int> excluded = {};
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
  // Fills memory with zeros; waits for the device. No work on it may be under way.
  void clear(const Memory& memory);
  // Makes memory of allocate() known to NCCL: as a symmetric window, by which ranks reach each other's directly
  // (collective: all ranks, memory of one size; blocks until they came), or plainly. False: not to be had on this rank
  // (an older NCCL, ranks that share a GPU, several hosts); peers may have got it, and memory is to be registered on
  // all ranks or on none. It stays so, and alive, until it is taken back or the transport ends.
  bool register_memory(const Memory& memory, bool symmetric);
  // No work on it may be under way. Local. Nothing if it is not registered.
  void deregister_memory(const Memory& memory);
  // The stream has to be a CudaStream of the same device. Throws what the watcher found.
  void start(const Collective& collective, Stream& stream) override;
  void abort(const std::string& reason) noexcept override;

  // Whether a transport of some of its ranks can be made of it: it works, and NCCL is 2.27.3 or later.
  bool can_shrink() const;
  // Throws what went wrong since it was looked for last, if anything did.
  void check_failure() override;
  const std::shared_ptr<const cuda::GpuDevice>& device() const { return options_.device; }
  const std::shared_ptr<nccl::Communicator>& communicator() const { return comm_; }

 private:
  void enqueue(const Collective& collective, cuda::StreamHandle stream);

  NcclOptions options_;
  std::shared_ptr<nccl::Communicator> comm_;
};

}  // namespace gpucomm
