// NCCL as a table of function pointers, resolved at run time. One build serves NCCL 2.18 to 2.32: what came later than
// 2.18 is optional, and its absence (a null member) is what features are gated on.
//
// These are our own declarations of what we call; the ABI check compares each of them with the real nccl.h.
#pragma once

#include <climits>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "core/error.h"
#include "core/types.h"
#include "cuda/cuda_api.h"

struct ncclComm;
struct ncclWindow_vidmem;

namespace gpucomm::nccl {

using Result = int;
using Comm = ncclComm*;
using Window = ncclWindow_vidmem*;

enum : Result {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
  kTimeout = 8,  // from 2.30
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

enum : int { kWindowDefault = 0, kWindowCollSymmetric = 1 };
enum : int { kShrinkDefault = 0, kShrinkAbort = 1 };
inline constexpr size_t kWindowAlignment = 4096;

struct UniqueId {
  char bytes[128];
};

// ncclConfig_t as of 2.27: NCCL copies the smaller of its own size and `size`, and gives later fields their defaults by
// `version`; so an older NCCL takes its part of this, and a newer one all of it.
inline constexpr unsigned kConfigMagic = 0xcafebeef;
inline constexpr int kUnset = INT_MIN;
struct Config {
  size_t size = sizeof(Config);
  unsigned magic = kConfigMagic;
  unsigned version = 22700;
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;
  const char* comm_name = nullptr;
  int collnet_enable = kUnset;
  int cta_policy = kUnset;
  int shrink_share = kUnset;
  int nvls_ctas = kUnset;
};

// F(member, name in nccl.h and symbol, first version that has it (0: every one from 2.18), type)
#define GPUCOMM_NCCL_FUNCTIONS(F)                                                                                   \
  F(get_version, ncclGetVersion, 0, Result(int* version))                                                           \
  F(get_unique_id, ncclGetUniqueId, 0, Result(UniqueId* id))                                                        \
  F(get_error_string, ncclGetErrorString, 0, const char*(Result result))                                            \
  F(get_last_error, ncclGetLastError, 0, const char*(Comm comm))                                                    \
  F(comm_init_rank_config, ncclCommInitRankConfig, 0,                                                               \
    Result(Comm* comm, int size, UniqueId id, int rank, Config* config))                                            \
  F(comm_finalize, ncclCommFinalize, 0, Result(Comm comm))                                                          \
  F(comm_destroy, ncclCommDestroy, 0, Result(Comm comm))                                                            \
  F(comm_abort, ncclCommAbort, 0, Result(Comm comm))                                                                \
  F(comm_get_async_error, ncclCommGetAsyncError, 0, Result(Comm comm, Result* error))                               \
  F(comm_count, ncclCommCount, 0, Result(const Comm comm, int* count))                                              \
  F(all_reduce, ncclAllReduce, 0,                                                                                   \
    Result(const void* in, void* out, size_t count, DataType type, RedOp op, Comm comm, cuda::StreamHandle stream)) \
  F(reduce_scatter, ncclReduceScatter, 0,                                                                           \
    Result(const void* in, void* out, size_t count, DataType type, RedOp op, Comm comm, cuda::StreamHandle stream)) \
  F(all_gather, ncclAllGather, 0,                                                                                   \
    Result(const void* in, void* out, size_t count, DataType type, Comm comm, cuda::StreamHandle stream))           \
  F(broadcast, ncclBroadcast, 0,                                                                                    \
    Result(const void* in, void* out, size_t count, DataType type, int root, Comm comm, cuda::StreamHandle stream)) \
  F(group_start, ncclGroupStart, 0, Result())                                                                       \
  F(group_end, ncclGroupEnd, 0, Result())                                                                           \
  F(comm_split, ncclCommSplit, 0, Result(Comm comm, int color, int key, Comm* split, Config* config))               \
  F(mem_alloc, ncclMemAlloc, 21900, Result(void** address, size_t bytes))                                           \
  F(mem_free, ncclMemFree, 21900, Result(void* address))                                                            \
  F(comm_register, ncclCommRegister, 21900, Result(const Comm comm, void* address, size_t bytes, void** handle))    \
  F(comm_deregister, ncclCommDeregister, 21900, Result(const Comm comm, void* handle))                              \
  F(comm_window_register, ncclCommWindowRegister, 22703,                                                            \
    Result(Comm comm, void* address, size_t bytes, Window* window, int flags))                                      \
  F(comm_window_deregister, ncclCommWindowDeregister, 22703, Result(Comm comm, Window window))                      \
  F(comm_shrink, ncclCommShrink, 22703,                                                                             \
    Result(Comm comm, int* excluded, int excluded_count, Comm* shrunk, Config* config, int flags))                  \
  F(comm_revoke, ncclCommRevoke, 22807, Result(Comm comm, int flags))

struct Api {
#define GPUCOMM_NCCL_MEMBER(member, symbol, since, ...) std::add_pointer_t<__VA_ARGS__> member = nullptr;
  GPUCOMM_NCCL_FUNCTIONS(GPUCOMM_NCCL_MEMBER)
#undef GPUCOMM_NCCL_MEMBER
  std::string path;  // of the library, as the loader knows it
  int version = 0;   // as ncclGetVersion gives it: 22703 is 2.27.3
};

// "2.27.3" of 22703.
std::string version_text(int version);

// A call of NCCL failed: what was called, NCCL's text for the result and for the last error of the communicator.
class NcclError : public CommError {
 public:
  NcclError(const Api& api, Result result, const char* what, Comm comm = nullptr);
  Result result;
};

// Where to look for the library.
struct Search {
  std::string path;        // an explicit one; nothing else is tried then
  std::string wheel_path;  // of the nvidia-nccl wheel's library, if there is one
};

// NCCL: the explicit path; else the copy that the process has loaded already; else the wheel's; else the system's.
// There is one NCCL in a process: with another one loaded an explicit path to a different file is a UsageError naming
// both, and so is a later call that asks for another. Throws TransportUnavailable: none found (where it was looked
// for), one older than 2.18 or without a symbol of that version (which). Thread-safe.
std::shared_ptr<const Api> load(const Search& search);

// Throws NcclError unless result is kSuccess.
void check(const Api& api, Result result, const char* what, Comm comm = nullptr);

// The type as NCCL calls it.
DataType type_of(DType dtype);

}  // namespace gpucomm::nccl
