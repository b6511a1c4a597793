#include "cuda/device.h"

#include <utility>

namespace gpucomm::cuda {

GpuDevice::GpuDevice(std::shared_ptr<const Api> api, int ordinal) : api_(std::move(api)), ordinal_(ordinal) {
  int count = 0;
  cuda::check(*api_, api_->device_get_count(&count), "cuDeviceGetCount");
  if (ordinal < 0 || ordinal >= count) {
    throw UsageError("device " + std::to_string(ordinal) + ": this process sees " + std::to_string(count) +
                     " (is LOCAL_RANK larger than the number of GPUs, or CUDA_VISIBLE_DEVICES set?)");
  }
  cuda::check(*api_, api_->device_get(&handle_, ordinal), "cuDeviceGet");
  char name[256] = "", bus[32] = "";
  cuda::check(*api_, api_->device_get_name(name, sizeof name, handle_), "cuDeviceGetName");
  cuda::check(*api_, api_->device_get_pci_bus_id(bus, sizeof bus, handle_), "cuDeviceGetPCIBusId");
  pci_bus_id_ = bus;
  text_ = std::string(name) + " (cuda:" + std::to_string(ordinal) + ", " + bus + ")";
  const auto attribute = [&](DeviceAttribute which) {
    int value = 0;
    check(api_->device_get_attribute(&value, which, handle_), "cuDeviceGetAttribute");
    return value;
  };
  compute_capability_ = 10 * attribute(kComputeMajor) + attribute(kComputeMinor);
  multiprocessors_ = attribute(kMultiprocessorCount);
  check(api_->primary_ctx_retain(&context_, handle_), "cuDevicePrimaryCtxRetain");
}

// At the end of the process the driver may be gone before us; what it says then does not matter.
GpuDevice::~GpuDevice() { api_->primary_ctx_release(handle_); }

bool GpuDevice::owns(const void* address) const {
  const Current current(*api_, context_);
  const auto at = reinterpret_cast<DeviceAddress>(address);
  unsigned kind = 0;
  int ordinal = -1;
  return api_->pointer_get_attribute(&kind, kPointerMemoryType, at) == kSuccess && kind == kMemoryDevice &&
         api_->pointer_get_attribute(&ordinal, kPointerDeviceOrdinal, at) == kSuccess && ordinal == ordinal_;
}

void GpuDevice::throw_error(Result result, const char* what) const {
  const std::string where = std::string(what) + " on " + (text_.empty() ? "cuda:" + std::to_string(ordinal_) : text_);
  throw CudaError(*api_, result, where.c_str());
}

DeviceMemory::DeviceMemory(std::shared_ptr<const GpuDevice> device, size_t bytes)
    : device_(std::move(device)), bytes_(bytes) {
  const Current current(device_->api(), device_->context());
  const std::string what = "cuMemAlloc of " + std::to_string(bytes) + " bytes";
  device_->check(device_->api().mem_alloc(&address_, bytes ? bytes : 1), what.c_str());
}

DeviceMemory::~DeviceMemory() {
  try {
    const Current current(device_->api(), device_->context());
    const BesideCaptures beside(device_->api());
    device_->api().mem_free(address_);
  } catch (const CudaError&) {
    // The context is gone, and the memory with it.
  }
}

PinnedMemory::PinnedMemory(std::shared_ptr<const GpuDevice> device, size_t bytes) : device_(std::move(device)) {
  const Current current(device_->api(), device_->context());
  device_->check(device_->api().mem_host_alloc(&address_, bytes ? bytes : 1, 0), "cuMemHostAlloc");
}

PinnedMemory::~PinnedMemory() {
  try {
    const Current current(device_->api(), device_->context());
    const BesideCaptures beside(device_->api());
    device_->api().mem_free_host(address_);
  } catch (const CudaError&) {
    // The context is gone, and the memory with it.
  }
}

}  // namespace gpucomm::cuda
