// What the files that define the driver's functions share: their declarations, made from the table of functions that
// gpucomm loads (another signature does not compile, a missing one does not link), and the entry into each.
#pragma once

#include <array>
#include <set>
#include <string>
#include <vector>

#include "cuda/cuda_api.h"
#include "fake_cuda/driver/objects.h"
#include "fake_cuda/driver/queues.h"
#include "fake_cuda/driver/reports.h"
#include "fake_cuda/driver/script.h"

#define GPUCOMM_FAKE_DECLARE(member, name, symbol, ...) \
  using name##Type = __VA_ARGS__;                       \
  extern "C" FAKE_EXPORT name##Type name asm(#symbol);
namespace fake {
using namespace gpucomm::cuda;
GPUCOMM_CUDA_FUNCTIONS(GPUCOMM_FAKE_DECLARE)
}  // namespace fake
#undef GPUCOMM_FAKE_DECLARE

namespace fake {

// Results that gpucomm does not name.
enum : Result {
  kInvalidValue = 1,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kLaunchFailed = 719,
  kCaptureInvalidatedError = 901,
  kCaptureIsolation = 905,
  kCapturedEvent = 907,
};

inline constexpr int kMaxDevices = 16;

struct Driver {
  bool is_initialised = false;
  std::array<CUctx_st, kMaxDevices> contexts;  // primary ones; there are no others
  Handles<CUevent_st> events;
  Handles<CUmod_st> modules;
  std::set<std::string> names;  // that fake_find_allocation has handed out
  int global_captures = 0;      // under way in the mode that forbids unsafe calls to all threads
  uint64_t next_capture = 1;
};
Driver& driver();

// The contexts that this thread has pushed, and its capture mode.
struct ThreadState {
  std::vector<CUctx_st*> contexts;
  CaptureMode mode = kCaptureGlobal;
};
ThreadState& thread_state();

enum class Needs { kNothing, kInit, kContext };

// The scope of one call: under the lock, counted, refused where a test has scripted that or what it needs is missing.
class Call {
 public:
  Call(const char* symbol, Needs needs);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  bool is_refused() const { return result_ != kSuccess; }
  Result result() const { return result_; }
  const char* symbol() const { return symbol_; }
  CUctx_st& context() const { return *context_; }

  // Reports what was wrong, and is the result to return.
  Result misuse(Result result, const std::string& text) const;
  // The stream of a handle; null, and reported, where it is none of the current context's.
  CUstream_st* stream(StreamHandle handle) const;
  CUevent_st* event(EventHandle handle) const;
  // Calls that are not allowed while this thread, or another in global mode, captures: true and a broken capture.
  bool is_unsafe_in_capture() const;

 private:
  std::unique_lock<std::recursive_mutex> lock_;
  const char* symbol_;
  Result result_ = kSuccess;
  CUctx_st* context_ = nullptr;
};

// The context's default stream, made at its first use.
CUstream_st& legacy_stream(CUctx_st& context);
// Null: not a stream. The legacy stream is the current context's, or the first device's where none is current (tensors
// are freed on any thread).
CUstream_st* stream_of(StreamHandle handle);

// For the functions that tests and other stand-ins call.
using Locked = std::lock_guard<std::recursive_mutex>;
bool misused(const char* function, const std::string& text);          // reports it, and is false
CUstream_st* find_stream(const char* function, StreamHandle handle);  // null, and reported: there is no such stream
CUctx_st* current_context();                                          // of this thread, null: none

// The host waits for all work of the call's device, and knows that it is done.
void synchronise(const Call& call, const std::string& what);

}  // namespace fake
