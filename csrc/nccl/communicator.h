// A communicator of NCCL's with what it needs to fail in bounded time: initialised on a thread of its own, watched by
// another, aborted by whichever notices first.
//
// [Note: abort] An abort frees the communicator while another thread may be inside a call of it. With revoke
// (NCCL 2.28.7 and later) the communicator is revoked first, which ends that call; then it is aborted. Older: it is
// aborted, and what the other thread still uses is leaked, never freed by us. No call is made once a failure is known.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/background.h"
#include "core/embedder.h"
#include "core/process_watch.h"
#include "cuda/device.h"
#include "nccl/nccl_api.h"

namespace gpucomm::nccl {

class Communicator;

// A rank of the same machine, as messages number it.
struct PeerProcess {
  int rank;
  std::shared_ptr<const ProcessWatch> process;
};

struct CommunicatorOptions {
  std::shared_ptr<const Api> api;
  std::shared_ptr<const cuda::GpuDevice> device;
  UniqueId id{};
  int rank = 0;
  int size = 1;
  double timeout_s = 600.0;
  std::string name;
  std::string net_name;  // of NCCL's network module; empty: its choice
  Config config;
  Embedder* embedder = nullptr;
  // Watched: NCCL itself does not notice that a rank it reaches through memory has died.
  std::vector<PeerProcess> peers = {};
  // Made of this one's ranks but those excluded (their ranks there), without `id`: for NCCL from 2.27.3 on, of one that
  // works and has no work under way.
  std::shared_ptr<Communicator> parent = nullptr;
  std::vector<int> excluded = {};
};

// Memory that NCCL knows of: by a window, or by a plain handle.
struct Registered {
  std::shared_ptr<void> memory;
  Window window = nullptr;
  void* handle = nullptr;
};

// What a call of NCCL's does, put into words where it fails: two words that it captures cost no memory.
using Text = std::function<std::string()>;

class Communicator {
 public:
  // Collective; blocks until all ranks came. Throws NcclError, CommTimeout.
  static std::shared_ptr<Communicator> make(CommunicatorOptions options);
  // What is under way is completed, by a thread of its own; waits some seconds for that at most.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  // Makes one call of NCCL's on the communicator, and waits until its work is on its stream.
  // Throws the failure that is known already; NcclError, after which the communicator is dead.
  void call(const Text& what, const std::function<Result(Comm)>& body);
  // From now on the work that the last call put on the stream is watched. Not while a graph is captured.
  void watch(const Text& what, cuda::StreamHandle stream);
  // Collective where symmetric, else local. Makes memory known to NCCL, as a symmetric window (4096-byte aligned, of
  // one size on all ranks) or plainly; keeps it until it is taken back or the communicator has ended. False: not to be
  // had.
  bool register_memory(std::shared_ptr<void> memory, size_t bytes, bool symmetric);
  // Takes it back; no work on it may be under way. Nothing if it is not registered.
  void deregister_memory(const void* memory);
  bool has_failed() const { return failed_.load(std::memory_order_acquire); }  // partner: the store in fail()
  // Throws the failure that is known, if any.
  void check_failure();
  // Ends everything that is under way; every later call throws. Does not block. Idempotent.
  void fail(std::exception_ptr failure) noexcept;

  const CommunicatorOptions& options() const { return options_; }

 private:
  using Clock = std::chrono::steady_clock;
  struct InFlight {
    cuda::EventHandle event = nullptr;
    Text what;
    Clock::time_point since;  // it could have begun then
  };

  explicit Communicator(CommunicatorOptions options);
  void initialise();
  Result settle(Result result);
  void end(bool abort) noexcept;
  void run_watcher();
  void look();
  void retire_completed();
  void look_at_peers();
  std::string oldest_in_flight(const std::string& otherwise);

  CommunicatorOptions options_;
  Comm comm_ = nullptr;
  std::shared_ptr<std::mutex> inside_;     // held in a call of NCCL's; outlives us where that never returns
  std::atomic<Clock::rep> call_began_{0};  // 0: no call is under way

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};  // failure_ is set
  bool ended_ = false;               // aborted or destroyed, or on the way to it
  std::shared_ptr<Background> ending_;
  bool closing_ = false;
  std::vector<Registered> registered_;
  Clock::time_point peer_gone_{};          // when a peer's process was seen to have ended
  std::list<InFlight> in_flight_, free_;   // nodes go to and fro: none is made while there is a free one
  std::vector<cuda::EventHandle> events_;  // of both
  std::thread watcher_;
};

}  // namespace gpucomm::nccl
