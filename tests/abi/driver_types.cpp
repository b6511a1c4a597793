// The functions of the CUDA driver that we declare, against the header's declarations of the same symbols, old versions
// of them included.
#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>

#include "cuda/cuda_api.h"
#include "same_type.h"

template <>
inline constexpr bool abi::kStandsFor<gpucomm::cuda::Uuid, CUuuid> = true;

namespace gpucomm::cuda {

static_assert(sizeof(Uuid) == sizeof(CUuuid) && alignof(Uuid) == alignof(CUuuid));
ABI_SAME_MEMBER(Uuid, bytes, CUuuid, bytes);

#define ABI_CHECK(member, name, symbol, ...) static_assert(abi::kSame<__VA_ARGS__, decltype(::symbol)>, #symbol);
GPUCOMM_CUDA_FUNCTIONS(ABI_CHECK)

}  // namespace gpucomm::cuda
