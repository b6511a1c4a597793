// The CUDA driver as a table of function pointers, resolved at run time: the build needs no CUDA toolkit, and tests may
// put a stand-in in the driver's place. These are our own declarations of what we call; the ABI check compares each of
// them with the real cuda.h.
//
// Symbols are named in full (`_v2`): a plain name is an older function with another signature.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "core/error.h"

// The driver's own tags, so that its header may be included beside this one.
struct CUctx_st;
struct CUevent_st;
struct CUfunc_st;
struct CUmod_st;
struct CUstream_st;

namespace gpucomm::cuda {

using Result = int;
using Device = int;
using Context = CUctx_st*;
using StreamHandle = CUstream_st*;  // nullptr is the legacy default stream, torch's own default
using EventHandle = CUevent_st*;
using Module = CUmod_st*;
using Function = CUfunc_st*;
using DeviceAddress = unsigned long long;

enum : Result {
  kSuccess = 0,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kStubLibrary = 34,
  kNoDevice = 100,
  kInvalidImage = 200,
  kNoBinaryForGpu = 209,
  kNotReady = 600,
  kSystemNotReady = 802,
  kSystemDriverMismatch = 803,
  kStreamCaptureUnsupported = 900,
};

enum : unsigned { kStreamNonBlocking = 1 };
enum : unsigned { kEventDisableTiming = 2 };
enum : unsigned { kEventRecordDefault = 0, kEventRecordExternal = 1 };
enum CaptureStatus : int { kCaptureNone = 0, kCaptureActive = 1, kCaptureInvalidated = 2 };
enum CaptureMode : int { kCaptureGlobal = 0, kCaptureThreadLocal = 1, kCaptureRelaxed = 2 };
enum DeviceAttribute : int { kMultiprocessorCount = 16, kComputeMajor = 75, kComputeMinor = 76 };
enum PointerAttribute : int { kPointerContext = 1, kPointerMemoryType = 2, kPointerDeviceOrdinal = 9 };
enum : unsigned { kMemoryHost = 1, kMemoryDevice = 2 };
enum FunctionAttribute : int { kFunctionLocalBytes = 3, kFunctionRegisters = 4 };

inline constexpr const char* kDriverName = "libcuda.so.1";
inline constexpr int kOldestDriver = 12000;  // as cuDriverGetVersion counts: 12.0

struct Uuid {
  char bytes[16];
};

// F(member, name in cuda.h, symbol, type). Where cuda.h is included, `name` is a macro for the newest symbol.
#define GPUCOMM_CUDA_FUNCTIONS(F)                                                                                      \
  F(init, cuInit, cuInit, Result(unsigned flags))                                                                      \
  F(driver_get_version, cuDriverGetVersion, cuDriverGetVersion, Result(int* version))                                  \
  F(get_error_name, cuGetErrorName, cuGetErrorName, Result(Result error, const char** text))                           \
  F(get_error_string, cuGetErrorString, cuGetErrorString, Result(Result error, const char** text))                     \
  F(device_get, cuDeviceGet, cuDeviceGet, Result(Device* device, int ordinal))                                         \
  F(device_get_count, cuDeviceGetCount, cuDeviceGetCount, Result(int* count))                                          \
  F(device_get_name, cuDeviceGetName, cuDeviceGetName, Result(char* name, int length, Device device))                  \
  F(device_get_attribute, cuDeviceGetAttribute, cuDeviceGetAttribute,                                                  \
    Result(int* value, DeviceAttribute attribute, Device device))                                                      \
  F(device_get_uuid, cuDeviceGetUuid, cuDeviceGetUuid_v2, Result(Uuid* uuid, Device device))                           \
  F(device_get_pci_bus_id, cuDeviceGetPCIBusId, cuDeviceGetPCIBusId, Result(char* id, int length, Device device))      \
  F(primary_ctx_retain, cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, Result(Context* context, Device device))   \
  F(primary_ctx_release, cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, Result(Device device))               \
  F(ctx_get_current, cuCtxGetCurrent, cuCtxGetCurrent, Result(Context* context))                                       \
  F(ctx_push_current, cuCtxPushCurrent, cuCtxPushCurrent_v2, Result(Context context))                                  \
  F(ctx_pop_current, cuCtxPopCurrent, cuCtxPopCurrent_v2, Result(Context* context))                                    \
  F(ctx_synchronize, cuCtxSynchronize, cuCtxSynchronize, Result())                                                     \
  F(ctx_get_stream_priority_range, cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange,                           \
    Result(int* least, int* greatest))                                                                                 \
  F(stream_create_with_priority, cuStreamCreateWithPriority, cuStreamCreateWithPriority,                               \
    Result(StreamHandle* stream, unsigned flags, int priority))                                                        \
  F(stream_destroy, cuStreamDestroy, cuStreamDestroy_v2, Result(StreamHandle stream))                                  \
  F(stream_get_ctx, cuStreamGetCtx, cuStreamGetCtx, Result(StreamHandle stream, Context* context))                     \
  F(stream_wait_event, cuStreamWaitEvent, cuStreamWaitEvent,                                                           \
    Result(StreamHandle stream, EventHandle event, unsigned flags))                                                    \
  F(stream_query, cuStreamQuery, cuStreamQuery, Result(StreamHandle stream))                                           \
  F(stream_is_capturing, cuStreamIsCapturing, cuStreamIsCapturing, Result(StreamHandle stream, CaptureStatus* status)) \
  F(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode,                \
    Result(CaptureMode* mode))                                                                                         \
  F(event_create, cuEventCreate, cuEventCreate, Result(EventHandle* event, unsigned flags))                            \
  F(event_destroy, cuEventDestroy, cuEventDestroy_v2, Result(EventHandle event))                                       \
  F(event_record, cuEventRecord, cuEventRecord, Result(EventHandle event, StreamHandle stream))                        \
  F(event_record_with_flags, cuEventRecordWithFlags, cuEventRecordWithFlags,                                           \
    Result(EventHandle event, StreamHandle stream, unsigned flags))                                                    \
  F(event_query, cuEventQuery, cuEventQuery, Result(EventHandle event))                                                \
  F(event_elapsed_time, cuEventElapsedTime, cuEventElapsedTime,                                                        \
    Result(float* milliseconds, EventHandle begin, EventHandle end))                                                   \
  F(mem_alloc, cuMemAlloc, cuMemAlloc_v2, Result(DeviceAddress* address, size_t bytes))                                \
  F(mem_free, cuMemFree, cuMemFree_v2, Result(DeviceAddress address))                                                  \
  F(mem_host_alloc, cuMemHostAlloc, cuMemHostAlloc, Result(void** address, size_t bytes, unsigned flags))              \
  F(mem_free_host, cuMemFreeHost, cuMemFreeHost, Result(void* address))                                                \
  F(memcpy_htod_async, cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2,                                                        \
    Result(DeviceAddress to, const void* from, size_t bytes, StreamHandle stream))                                     \
  F(memcpy_dtoh_async, cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2,                                                        \
    Result(void* to, DeviceAddress from, size_t bytes, StreamHandle stream))                                           \
  F(memcpy_dtod_async, cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2,                                                        \
    Result(DeviceAddress to, DeviceAddress from, size_t bytes, StreamHandle stream))                                   \
  F(memset_d8_async, cuMemsetD8Async, cuMemsetD8Async,                                                                 \
    Result(DeviceAddress to, unsigned char value, size_t bytes, StreamHandle stream))                                  \
  F(pointer_get_attribute, cuPointerGetAttribute, cuPointerGetAttribute,                                               \
    Result(void* value, PointerAttribute attribute, DeviceAddress address))                                            \
  F(module_load_data, cuModuleLoadData, cuModuleLoadData, Result(Module* module, const void* image))                   \
  F(module_unload, cuModuleUnload, cuModuleUnload, Result(Module module))                                              \
  F(module_get_function, cuModuleGetFunction, cuModuleGetFunction,                                                     \
    Result(Function* function, Module module, const char* name))                                                       \
  F(func_get_attribute, cuFuncGetAttribute, cuFuncGetAttribute,                                                        \
    Result(int* value, FunctionAttribute attribute, Function function))                                                \
  F(launch_kernel, cuLaunchKernel, cuLaunchKernel,                                                                     \
    Result(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,   \
           unsigned block_z, unsigned shared_bytes, StreamHandle stream, void** arguments, void** extra))

// The functions by their members. One instance per library; copies are cheap to hold by shared_ptr.
struct Api {
#define GPUCOMM_CUDA_MEMBER(member, name, symbol, ...) std::add_pointer_t<__VA_ARGS__> member = nullptr;
  GPUCOMM_CUDA_FUNCTIONS(GPUCOMM_CUDA_MEMBER)
#undef GPUCOMM_CUDA_MEMBER
  std::string path;        // of the library's file
  int driver_version = 0;  // 1000 * major + 10 * minor, of the newest CUDA that the driver serves
};

// A call of the driver failed: what was called, the error's name and text.
class CudaError : public CommError {
 public:
  CudaError(const Api& api, Result result, const char* what);
  Result result;
};

// The driver, loaded and initialised. path: of the library, empty: the one loaded before, else kDriverName. The first
// call that succeeds decides for the process: another file later is a UsageError. Throws TransportUnavailable: no
// driver (and what to install), one too old (which symbol it lacks, which version it is), no device. Thread-safe.
std::shared_ptr<const Api> load(const std::string& path = "");

// Throws CudaError unless result is kSuccess.
void check(const Api& api, Result result, const char* what);

// Makes the primary context of a device current for its scope, and what was current before afterwards. Every entry into
// the driver, on every thread, happens within one.
class Current {
 public:
  Current(const Api& api, Context context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Api& api_;
};

// Within it this thread may ask for events and free memory while a CUDA graph is captured, by whatever thread.
class BesideCaptures {
 public:
  explicit BesideCaptures(const Api& api) : api_(api) { api_.thread_exchange_capture_mode(&mode_); }
  ~BesideCaptures() { api_.thread_exchange_capture_mode(&mode_); }
  BesideCaptures(const BesideCaptures&) = delete;
  BesideCaptures& operator=(const BesideCaptures&) = delete;

 private:
  const Api& api_;
  CaptureMode mode_ = kCaptureRelaxed;
};

}  // namespace gpucomm::cuda
