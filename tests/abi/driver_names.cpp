// The symbols and constants of the CUDA driver that we name, against the header. For each function the header's macro
// names the symbol of the newest version; ours must be that one, for old ones behave differently under the same type.
#include <cuda.h>

#include <string_view>

#include "cuda/cuda_api.h"
#include "same_type.h"

namespace gpucomm::cuda {

struct Exception {
  std::string_view ours;
  std::string_view newest;
};

constexpr Exception kExceptions[] = {
    // From CUDA 12.8 on there is a second version, of the same type, that also takes events of other contexts; drivers
    // of 12.0 have the first one alone.
    {"cuEventElapsedTime", "cuEventElapsedTime_v2"},
    // Headers of CUDA 12 still mean the first one by the plain name; it does not know partitions of a device.
    {"cuDeviceGetUuid_v2", "cuDeviceGetUuid"},
};

constexpr bool is_newest(std::string_view ours, std::string_view newest) {
  for (const Exception& exception : kExceptions) {
    if (exception.ours == ours && exception.newest == newest) return true;
  }
  return ours == newest;
}

// Their argument is expanded, ours is not.
#define ABI_EXPANDED(name) ABI_TEXT(name)
#define ABI_TEXT(name) #name
#define ABI_CHECK(member, name, symbol, ...) static_assert(is_newest(#symbol, ABI_EXPANDED(name)), #symbol);
GPUCOMM_CUDA_FUNCTIONS(ABI_CHECK)

#define ABI_EQUAL(ours, theirs) static_assert(abi::equal(ours, theirs), #ours)
ABI_EQUAL(kSuccess, CUDA_SUCCESS);
ABI_EQUAL(kOutOfMemory, CUDA_ERROR_OUT_OF_MEMORY);
ABI_EQUAL(kNotInitialized, CUDA_ERROR_NOT_INITIALIZED);
ABI_EQUAL(kStubLibrary, CUDA_ERROR_STUB_LIBRARY);
ABI_EQUAL(kNoDevice, CUDA_ERROR_NO_DEVICE);
ABI_EQUAL(kInvalidImage, CUDA_ERROR_INVALID_IMAGE);
ABI_EQUAL(kNoBinaryForGpu, CUDA_ERROR_NO_BINARY_FOR_GPU);
ABI_EQUAL(kNotReady, CUDA_ERROR_NOT_READY);
ABI_EQUAL(kSystemNotReady, CUDA_ERROR_SYSTEM_NOT_READY);
ABI_EQUAL(kSystemDriverMismatch, CUDA_ERROR_SYSTEM_DRIVER_MISMATCH);
ABI_EQUAL(kStreamCaptureUnsupported, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
ABI_EQUAL(kStreamNonBlocking, CU_STREAM_NON_BLOCKING);
ABI_EQUAL(kEventDisableTiming, CU_EVENT_DISABLE_TIMING);
ABI_EQUAL(kEventRecordDefault, CU_EVENT_RECORD_DEFAULT);
ABI_EQUAL(kEventRecordExternal, CU_EVENT_RECORD_EXTERNAL);
ABI_EQUAL(kCaptureNone, CU_STREAM_CAPTURE_STATUS_NONE);
ABI_EQUAL(kCaptureActive, CU_STREAM_CAPTURE_STATUS_ACTIVE);
ABI_EQUAL(kCaptureInvalidated, CU_STREAM_CAPTURE_STATUS_INVALIDATED);
ABI_EQUAL(kCaptureGlobal, CU_STREAM_CAPTURE_MODE_GLOBAL);
ABI_EQUAL(kCaptureThreadLocal, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
ABI_EQUAL(kCaptureRelaxed, CU_STREAM_CAPTURE_MODE_RELAXED);
ABI_EQUAL(kMultiprocessorCount, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
ABI_EQUAL(kComputeMajor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
ABI_EQUAL(kComputeMinor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
ABI_EQUAL(kPointerContext, CU_POINTER_ATTRIBUTE_CONTEXT);
ABI_EQUAL(kPointerMemoryType, CU_POINTER_ATTRIBUTE_MEMORY_TYPE);
ABI_EQUAL(kPointerDeviceOrdinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
ABI_EQUAL(kMemoryHost, CU_MEMORYTYPE_HOST);
ABI_EQUAL(kMemoryDevice, CU_MEMORYTYPE_DEVICE);
ABI_EQUAL(kFunctionLocalBytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES);
ABI_EQUAL(kFunctionRegisters, CU_FUNC_ATTRIBUTE_NUM_REGS);

}  // namespace gpucomm::cuda
