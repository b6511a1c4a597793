// A communicator, and who may use it when. All members are guarded by the lock of the driver's stand-in. A communicator
// is never freed, only marked: so a use after its end is found instead of crashing somewhere.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda/nccl/board.h"
#include "fake_cuda/nccl/config.h"
#include "fake_cuda/nccl/report.h"
#include "fake_cuda/nccl/script.h"

namespace fake_nccl {

class Launch;

enum class Stage { kJoining, kReady, kFinalized, kRevoked, kFreed };

// What a call of the host has to wait for: its result, or kInProgress to be asked again. Called under the lock.
using Poll = std::function<Result()>;

struct Registered {
  const std::byte* address;
  size_t bytes;
};

}  // namespace fake_nccl

struct ncclWindow_vidmem {
  uint64_t number;  // the same on all ranks
  fake_nccl::Registered memory;
};

struct ncclComm {
  int process = 0;
  int generation = 0;  // how often all were forgotten before
  int rank = 0;
  int size = 1;
  int ordinal = 0;  // among those of this rank in this process
  fake_nccl::Stage stage = fake_nccl::Stage::kJoining;
  std::string ended_by;  // the function, once stage is kFreed
  fake_nccl::Options options;
  std::shared_ptr<fake_nccl::Board> board;  // null before the init got it
  gpucomm::cuda::Context context = nullptr;
  int device = 0;
  fake_nccl::Result async_error = fake_nccl::kSuccess;
  int64_t failure_noticed_ms = 0;

  // Of a non-blocking communicator: what is carried on by polling it, and how often it is in progress before.
  std::deque<fake_nccl::Poll> pending;
  int64_t polls_left = 0;

  std::deque<fake_nccl::Launch*> launches;  // enqueued and not complete
  uint64_t launched = 0;
  uint64_t host_calls = 0;
  std::map<std::string, int> derived;  // how many communicators were made of which ranks
  std::map<ncclWindow_vidmem*, std::unique_ptr<ncclWindow_vidmem>> windows;
  std::map<void*, std::unique_ptr<fake_nccl::Registered>> registrations;

  std::thread::id inside;  // the thread within a call
  const char* inside_call = nullptr;
  int inside_depth = 0;
  std::thread::id driver;  // the thread of the last collective

  bool has_ended() const { return stage == fake_nccl::Stage::kFreed || stage == fake_nccl::Stage::kRevoked; }
  fake_nccl::Subject subject(int64_t launch = -1) const { return {rank, ordinal, launch}; }
  std::string name() const;
};

namespace fake_nccl {

// A new one in the registry, of the current device.
ncclComm* new_comm(const char* function, int rank, int size, const Options& options);
// Ends all, and counts anew.
void forget_comms();
// Those of this process that were not freed.
std::vector<ncclComm*> live_comms();
// This process is behind no communicator that was used after its end: null and reported where it is.
ncclComm* find_comm(const ncclComm* comm, const char* function);

// May the function start work on it? kSuccess, or why not (reported where it is a misuse).
Result ready_for(ncclComm* comm, const char* function);

// The asynchronous error, which sticks and which peers may notice.
void fail(ncclComm* comm, Result result, const std::string& text);
// Sees whether a peer that the oldest launch, or a host call (in_host_call), waits for is gone; see remote_error.
void notice_failures(ncclComm* comm, bool in_host_call);
// What of the pending work can go on, and the state then.
Result carry_on(ncclComm* comm);
// The end: its launches finish with garbage, and the board is left.
void end_comm(ncclComm* comm, const char* function, Departure departure);
void cancel_launches(ncclComm* comm);

// A thread within a call, for the time of that call. Reports a second thread.
class Presence {
 public:
  Presence(ncclComm* comm, const char* function);
  ~Presence();
  Presence(const Presence&) = delete;
  Presence& operator=(const Presence&) = delete;

 private:
  ncclComm* comm_;
  bool counted_;
};

// The poll, but kInternalError once the communicator was aborted or revoked by another thread.
Poll guarded(ncclComm* comm, Poll poll, bool outlives_revoke = false);

// Asks again until there is a result, driving the streams of this process meanwhile: a device goes on while the host
// waits. Not to be called under the lock.
Result wait_for(const Poll& poll);

int64_t now_ms();

}  // namespace fake_nccl
