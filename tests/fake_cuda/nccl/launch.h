// A launch: the collectives of one call, or of one communicator in a group, as one piece of work on a stream. Nothing
// of it blocks: when its turn comes it publishes a snapshot of its inputs on the board, and it is complete once all
// ranks have published theirs. See [Note: two halves].
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "fake_cuda/nccl/comm.h"
#include "fake_cuda/nccl/occupancy.h"
#include "fake_cuda/nccl/operation.h"

namespace fake_nccl {

class Launch {
 public:
  // Numbers it and puts it on the stream. kUnhandledCudaError: the driver refused it.
  static Result enqueue(ncclComm* comm, std::vector<Operation> operations, cuda::StreamHandle stream,
                        const char* function);

  ncclComm& comm() const { return *comm_; }
  uint64_t number() const { return number_; }
  uint64_t sequence() const { return sequence_; }  // among the launches of this process
  cuda::StreamHandle stream() const { return stream_; }
  const char* function() const { return function_; }
  bool is_published() const { return published_; }
  std::string name() const;
  // Ends it: garbage in its outputs, and the stream goes on.
  void cancel() { cancelled_ = true; }

  bool deadlock_reported = false;

 private:
  Launch(ncclComm* comm, std::vector<Operation> operations, cuda::StreamHandle stream, const char* function);
  ~Launch();

  bool step();
  bool is_turn();
  bool is_delayed();
  bool meets_its_fault();
  void publish();
  bool all_published() const;
  bool compare();
  void reduce();
  void compute(const Operation& operation, size_t offset);
  void spoil_outputs() const;
  void finish();
  std::vector<FakeRange> ranges() const;

  ncclComm* comm_;
  std::shared_ptr<Board> board_;
  std::vector<Operation> operations_;
  std::vector<Descriptor> descriptors_;
  std::vector<Before> before_;
  cuda::StreamHandle stream_;
  const char* function_;
  uint64_t number_;
  uint64_t sequence_ = 0;
  int64_t turn_ms_ = -1;
  int64_t steps_ = 0;
  bool has_place_ = false;
  bool published_ = false;
  bool stuck_ = false;
  bool cancelled_ = false;
};

// Of this process, ever.
struct LaunchCounts {
  uint64_t launched = 0, completed = 0;
};
LaunchCounts& launch_counts();

}  // namespace fake_nccl
