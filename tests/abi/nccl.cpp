// What we declare of NCCL, against its header, of 2.18 or newer: a function must be there from the version on that we
// give for it, and not before.
#include <nccl.h>

#include "nccl/nccl_api.h"
#include "same_type.h"

template <>
inline constexpr bool abi::kStandsFor<gpucomm::nccl::UniqueId, ncclUniqueId> = true;
template <>
inline constexpr bool abi::kStandsFor<gpucomm::nccl::Config, ncclConfig_t> = true;
#if NCCL_VERSION_CODE >= 22700 && NCCL_VERSION_CODE < 22800
// The window's tag was another one at first; only pointers to it are ever seen.
template <>
inline constexpr bool abi::kStandsFor<ncclWindow_vidmem, ncclWindow> = true;
#endif

// Where a function must be absent, its name is free for something else.
#define ABI_SINCE_0(symbol, ...) static_assert(abi::kSame<__VA_ARGS__, decltype(::symbol)>, #symbol);
#define ABI_ABSENT(symbol, ...) \
  extern "C" {                  \
  extern char symbol;           \
  }
#if NCCL_VERSION_CODE >= 21900
#define ABI_SINCE_21900 ABI_SINCE_0
#else
#define ABI_SINCE_21900 ABI_ABSENT
#endif
#if NCCL_VERSION_CODE >= 22703
#define ABI_SINCE_22703 ABI_SINCE_0
#else
#define ABI_SINCE_22703 ABI_ABSENT
#endif
#if NCCL_VERSION_CODE >= 22807
#define ABI_SINCE_22807 ABI_SINCE_0
#else
#define ABI_SINCE_22807 ABI_ABSENT
#endif

namespace gpucomm::nccl {
#define ABI_CHECK(member, symbol, since, ...) ABI_SINCE_##since(symbol, __VA_ARGS__)
GPUCOMM_NCCL_FUNCTIONS(ABI_CHECK)

#define ABI_EXPANDED(name) ABI_TEXT(name)
#define ABI_TEXT(name) #name
#define ABI_NAME(member, symbol, ...) static_assert(sizeof(#symbol) == sizeof(ABI_EXPANDED(symbol)), #symbol);
GPUCOMM_NCCL_FUNCTIONS(ABI_NAME)

#define ABI_EQUAL(ours, theirs) static_assert(abi::equal(ours, theirs), #ours)
ABI_EQUAL(kSuccess, ncclSuccess);
ABI_EQUAL(kUnhandledCudaError, ncclUnhandledCudaError);
ABI_EQUAL(kSystemError, ncclSystemError);
ABI_EQUAL(kInternalError, ncclInternalError);
ABI_EQUAL(kInvalidArgument, ncclInvalidArgument);
ABI_EQUAL(kInvalidUsage, ncclInvalidUsage);
ABI_EQUAL(kRemoteError, ncclRemoteError);
ABI_EQUAL(kInProgress, ncclInProgress);
ABI_EQUAL(kInt8, ncclInt8);
ABI_EQUAL(kUint8, ncclUint8);
ABI_EQUAL(kInt32, ncclInt32);
ABI_EQUAL(kUint32, ncclUint32);
ABI_EQUAL(kInt64, ncclInt64);
ABI_EQUAL(kUint64, ncclUint64);
ABI_EQUAL(kFloat16, ncclFloat16);
ABI_EQUAL(kFloat32, ncclFloat32);
ABI_EQUAL(kFloat64, ncclFloat64);
ABI_EQUAL(kBfloat16, ncclBfloat16);
ABI_EQUAL(kSum, ncclSum);
ABI_EQUAL(kProd, ncclProd);
ABI_EQUAL(kMax, ncclMax);
ABI_EQUAL(kMin, ncclMin);
ABI_EQUAL(kAvg, ncclAvg);
#if NCCL_VERSION_CODE >= 22703
ABI_EQUAL(kWindowDefault, NCCL_WIN_DEFAULT);
ABI_EQUAL(kWindowCollSymmetric, NCCL_WIN_COLL_SYMMETRIC);
ABI_EQUAL(kShrinkDefault, NCCL_SHRINK_DEFAULT);
ABI_EQUAL(kShrinkAbort, NCCL_SHRINK_ABORT);
#endif
#if NCCL_VERSION_CODE >= 22800
ABI_EQUAL(kWindowAlignment, NCCL_WIN_REQUIRED_ALIGNMENT);
#endif
#if NCCL_VERSION_CODE >= 23003
ABI_EQUAL(kTimeout, ncclTimeout);
#endif

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
ABI_SAME_MEMBER(UniqueId, bytes, ncclUniqueId, internal);

// ---- the configuration: one is a prefix of the other, and what is unset in theirs is unset in ours

constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
constexpr Config kOurs;
static_assert(alignof(Config) == alignof(ncclConfig_t));
static_assert(kOurs.size == sizeof(Config) && kTheirs.size == sizeof(ncclConfig_t));
static_assert(kOurs.magic == kTheirs.magic, "magic");
// NCCL reads fields by the version: it must be that of the layout, which a newer NCCL extends.
static_assert((kOurs.version <= kTheirs.version) == (sizeof(Config) <= sizeof(ncclConfig_t)), "version");

ABI_SAME_MEMBER(Config, size, ncclConfig_t, size);
ABI_SAME_MEMBER(Config, magic, ncclConfig_t, magic);
ABI_SAME_MEMBER(Config, version, ncclConfig_t, version);
#define ABI_FIELD(ours, theirs)                        \
  ABI_SAME_MEMBER(Config, ours, ncclConfig_t, theirs); \
  static_assert(kOurs.ours == kTheirs.theirs, #theirs)
ABI_FIELD(blocking, blocking);
ABI_FIELD(cga_cluster_size, cgaClusterSize);
ABI_FIELD(min_ctas, minCTAs);
ABI_FIELD(max_ctas, maxCTAs);
ABI_FIELD(net_name, netName);
ABI_FIELD(split_share, splitShare);
#if NCCL_VERSION_CODE >= 22605
ABI_FIELD(traffic_class, trafficClass);
#endif
#if NCCL_VERSION_CODE >= 22700
ABI_FIELD(comm_name, commName);
ABI_FIELD(collnet_enable, collnetEnable);
ABI_FIELD(cta_policy, CTAPolicy);
ABI_FIELD(shrink_share, shrinkShare);
ABI_FIELD(nvls_ctas, nvlsCTAs);
#endif

}  // namespace gpucomm::nccl
