#include "cuda/cuda_api.h"

#include "core/loaded_library.h"

namespace gpucomm::cuda {

// "12.4" of 12040.
static std::string cuda_version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

static const char* advice_for(Result result) {
  switch (result) {
    case kNotInitialized:
      return "; CUDA does not work in a process that was forked after it was used: start processes by spawn";
    case kNoDevice:
      return "; look at nvidia-smi, CUDA_VISIBLE_DEVICES and what devices the container was given";
    case kStubLibrary:
      return "; this library is the toolkit's stub for linking, not the driver's: take it off the library path";
    case kSystemDriverMismatch:
      return "; the driver's library and its kernel module are of different versions: reboot, or reinstall the driver";
    case kSystemNotReady:
      return "; the machine is still starting, or its fabric manager is not running";
    default:
      return "";
  }
}

static std::string failure_text(const Api& api, Result result, const char* what) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (api.get_error_name == nullptr || api.get_error_name(result, &name) != kSuccess || name == nullptr) name = "error";
  if (api.get_error_string == nullptr || api.get_error_string(result, &text) != kSuccess || text == nullptr) {
    text = "a result that this driver has no text for";
  }
  return std::string(what) + " failed with " + name + " (" + std::to_string(result) + "): " + text + advice_for(result);
}

CudaError::CudaError(const Api& api, Result failed_with, const char* what)
    : CommError(failure_text(api, failed_with, what)), result(failed_with) {}

void check(const Api& api, Result result, const char* what) {
  if (result != kSuccess) throw CudaError(api, result, what);
}

// ---- loading

namespace {

// The name of the first function that is missing, nullptr if none is.
const char* resolve(const DynamicLibrary& library, Api* api) {
  const char* missing = nullptr;
#define GPUCOMM_CUDA_RESOLVE(member, name, symbol, ...) \
  if (!library.resolve(#symbol, &api->member) && missing == nullptr) missing = #symbol;
  GPUCOMM_CUDA_FUNCTIONS(GPUCOMM_CUDA_RESOLVE)
#undef GPUCOMM_CUDA_RESOLVE
  return missing;
}

// Everything but the library's handle: throws, or returns a table whose functions work.
std::shared_ptr<const Api> initialized(const DynamicLibrary& library) {
  auto api = std::make_shared<Api>();
  api->path = library.path();
  const char* missing = resolve(library, api.get());
  if (api->init == nullptr || api->driver_get_version == nullptr) {
    throw TransportUnavailable(api->path + " is not a CUDA driver: it has no " + missing);
  }
  check(*api, api->driver_get_version(&api->driver_version), "cuDriverGetVersion");
  const std::string serves = "the CUDA driver " + api->path + " is too old: it serves CUDA " +
                             cuda_version_text(api->driver_version) + ", " + cuda_version_text(kOldestDriver) +
                             " or newer is needed";
  if (missing != nullptr) throw TransportUnavailable(serves + "; it has no " + missing);
  if (api->driver_version < kOldestDriver) throw TransportUnavailable(serves);
  const Result result = api->init(0);
  if (result != kSuccess) {
    throw TransportUnavailable("the CUDA driver " + api->path +
                               " does not start: " + failure_text(*api, result, "cuInit"));
  }
  int devices = 0;
  check(*api, api->device_get_count(&devices), "cuDeviceGetCount");
  if (devices == 0) {
    throw TransportUnavailable(std::string("the CUDA driver ") + api->path + " shows no device" +
                               advice_for(kNoDevice));
  }
  return api;
}

}  // namespace

std::shared_ptr<const Api> load(const std::string& path) {
  auto& loaded = LoadedLibrary<Api>::instance();
  const std::lock_guard lock(loaded.mutex);
  if (loaded.api != nullptr) {
    if (loaded.is(path)) return loaded.api;
    throw UsageError("the CUDA driver is " + loaded.api->path + " in this process already, not " + path);
  }
  std::string error;
  DynamicLibrary library = DynamicLibrary::open(path.empty() ? kDriverName : path, &error);
  if (!library) {
    throw TransportUnavailable("the CUDA driver cannot be loaded (" + error + "): " +
                               (path.empty()
                                    ? "this machine has no NVIDIA driver, or the container was started without it "
                                      "(docker run --gpus all); nvidia-smi shows whether there is one"
                                    : "an explicit path must lead to a libcuda.so.1"));
  }
  library.keep();  // cuInit starts threads, even where it fails
  std::shared_ptr<const Api> api = initialized(library);
  return loaded.set(std::move(library), std::move(api));
}

// ---- contexts

Current::Current(const Api& api, Context context) : api_(api) {
  check(api, api.ctx_push_current(context), "cuCtxPushCurrent");
}

// A failure here has nobody to tell: it is one that the driver repeats on every later call (a context that a kernel
// has broken, a process that is ending).
Current::~Current() {
  Context popped = nullptr;
  api_.ctx_pop_current(&popped);
}

}  // namespace gpucomm::cuda
