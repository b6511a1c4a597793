// The driver's functions for devices, contexts and errors.
#include <cstdio>
#include <cstring>

#include "fake_cuda/driver/driver.h"

namespace fake {

namespace {

struct ErrorText {
  Result result;
  const char* name;
  const char* text;
};

constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kStubLibrary, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kInvalidImage, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {kNoBinaryForGpu, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {kNotFound, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {kNotReady, "CUDA_ERROR_NOT_READY", "device not ready"},
    {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {kSystemNotReady, "CUDA_ERROR_SYSTEM_NOT_READY", "system not yet initialized"},
    {kSystemDriverMismatch, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
     "system has unsupported display driver / cuda driver combination"},
    {kStreamCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {kCaptureInvalidatedError, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {kCaptureIsolation, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
     "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "CUDA_ERROR_CAPTURED_EVENT",
     "operation not permitted on an event last recorded in a capturing stream"},
};

Result error_text(Result error, const char** text, const char* ErrorText::* member) {
  for (const ErrorText& known : kErrors) {
    if (known.result != error) continue;
    *text = known.*member;
    return kSuccess;
  }
  *text = nullptr;
  return kInvalidValue;
}

bool is_device(Device device) { return device >= 0 && device < script().machine.device_count; }

}  // namespace

Result cuInit(unsigned) {
  Call call("cuInit", Needs::kNothing);
  if (call.is_refused()) return call.result();
  if (script().machine.device_count == 0) return kNoDevice;
  driver().is_initialised = true;
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  Call call("cuDriverGetVersion", Needs::kNothing);
  if (call.is_refused()) return call.result();
  *version = script().machine.driver_version;
  return kSuccess;
}

// Not counted and never refused: they are called to explain what was.
Result cuGetErrorName(Result error, const char** text) { return error_text(error, text, &ErrorText::name); }
Result cuGetErrorString(Result error, const char** text) { return error_text(error, text, &ErrorText::text); }

Result cuDeviceGet(Device* device, int ordinal) {
  Call call("cuDeviceGet", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(ordinal)) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

Result cuDeviceGetCount(int* count) {
  Call call("cuDeviceGetCount", Needs::kInit);
  if (call.is_refused()) return call.result();
  *count = script().machine.device_count;
  return kSuccess;
}

Result cuDeviceGetName(char* name, int length, Device device) {
  Call call("cuDeviceGetName", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device) || length < 1) return is_device(device) ? kInvalidValue : kInvalidDevice;
  std::snprintf(name, static_cast<size_t>(length), "Stand-in GPU");
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, DeviceAttribute attribute, Device device) {
  Call call("cuDeviceGetAttribute", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  switch (attribute) {
    case kMultiprocessorCount:
      *value = 132;
      return kSuccess;
    case kComputeMajor:
      *value = script().machine.capability_major;
      return kSuccess;
    case kComputeMinor:
      *value = script().machine.capability_minor;
      return kSuccess;
  }
  return call.misuse(kInvalidValue, "attribute " + std::to_string(attribute) + ", which this stand-in has not");
}

Result cuDeviceGetUuid(Uuid* uuid, Device device) {
  Call call("cuDeviceGetUuid_v2", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  std::memset(uuid->bytes, 0x47, sizeof uuid->bytes);
  uuid->bytes[15] = static_cast<char>(device);
  return kSuccess;
}

Result cuDeviceGetPCIBusId(char* id, int length, Device device) {
  Call call("cuDeviceGetPCIBusId", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device) || length < 13) return is_device(device) ? kInvalidValue : kInvalidDevice;
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", static_cast<unsigned>(device + 1) & 0xff);
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  Call call("cuDevicePrimaryCtxRetain", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  CUctx_st& primary = driver().contexts[static_cast<size_t>(device)];
  primary.device = device;
  ++primary.retained;
  *context = &primary;
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease(Device device) {
  Call call("cuDevicePrimaryCtxRelease_v2", Needs::kInit);
  if (call.is_refused()) return call.result();
  if (!is_device(device)) return kInvalidDevice;
  CUctx_st& primary = driver().contexts[static_cast<size_t>(device)];
  if (primary.retained == 0) return call.misuse(kInvalidContext, "released more often than retained");
  --primary.retained;
  return kSuccess;
}

Result cuCtxGetCurrent(Context* context) {
  Call call("cuCtxGetCurrent", Needs::kInit);
  if (call.is_refused()) return call.result();
  const auto& contexts = thread_state().contexts;
  *context = contexts.empty() ? nullptr : contexts.back();
  return kSuccess;
}

Result cuCtxPushCurrent(Context context) {
  Call call("cuCtxPushCurrent_v2", Needs::kInit);
  if (call.is_refused()) return call.result();
  const auto& known = driver().contexts;
  if (context < known.data() || context >= known.data() + known.size() || context->retained == 0) {
    return call.misuse(kInvalidContext, "not a context that is retained");
  }
  thread_state().contexts.push_back(context);
  return kSuccess;
}

Result cuCtxPopCurrent(Context* context) {
  Call call("cuCtxPopCurrent_v2", Needs::kInit);
  if (call.is_refused()) return call.result();
  auto& contexts = thread_state().contexts;
  if (contexts.empty()) return call.misuse(kInvalidContext, "no context is current on this thread");
  if (context) *context = contexts.back();
  contexts.pop_back();
  return kSuccess;
}

Result cuCtxSynchronize() {
  Call call("cuCtxSynchronize", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (call.is_unsafe_in_capture()) return kStreamCaptureUnsupported;
  synchronise(call, call.symbol());
  return kSuccess;
}

Result cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  Call call("cuCtxGetStreamPriorityRange", Needs::kContext);
  if (call.is_refused()) return call.result();
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return kSuccess;
}

}  // namespace fake
