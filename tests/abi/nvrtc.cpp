// What we declare of NVRTC, against its header.
#include <nvrtc.h>

#include "cuda/nvrtc_api.h"
#include "same_type.h"

namespace gpucomm::nvrtc {

#define ABI_CHECK(member, symbol, ...) static_assert(abi::kSame<__VA_ARGS__, decltype(::symbol)>, #symbol);
GPUCOMM_NVRTC_FUNCTIONS(ABI_CHECK)

// No macro of the header gives a function another symbol.
#define ABI_EXPANDED(name) ABI_TEXT(name)
#define ABI_TEXT(name) #name
#define ABI_NAME(member, symbol, ...) static_assert(sizeof(#symbol) == sizeof(ABI_EXPANDED(symbol)), #symbol);
GPUCOMM_NVRTC_FUNCTIONS(ABI_NAME)

#define ABI_EQUAL(ours, theirs) static_assert(abi::equal(ours, theirs), #ours)
ABI_EQUAL(kSuccess, NVRTC_SUCCESS);
ABI_EQUAL(kOutOfMemory, NVRTC_ERROR_OUT_OF_MEMORY);
ABI_EQUAL(kInvalidOption, NVRTC_ERROR_INVALID_OPTION);
ABI_EQUAL(kCompilation, NVRTC_ERROR_COMPILATION);
ABI_EQUAL(kBuiltinOperationFailure, NVRTC_ERROR_BUILTIN_OPERATION_FAILURE);

}  // namespace gpucomm::nvrtc
