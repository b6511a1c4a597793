// A GPU as this process uses it: its primary context, the one that torch uses too, kept for as long as this lives.
#pragma once

#include <memory>
#include <string>

#include "cuda/cuda_api.h"

namespace gpucomm::cuda {

class GpuDevice {
 public:
  // ordinal: as torch counts devices. Throws UsageError for one that there is not, CudaError.
  GpuDevice(std::shared_ptr<const Api> api, int ordinal);
  ~GpuDevice();
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  const Api& api() const { return *api_; }
  int ordinal() const { return ordinal_; }
  Context context() const { return context_; }
  // "NVIDIA H200 (cuda:0, 0000:18:00.0)", for messages.
  const std::string& text() const { return text_; }
  const std::string& pci_bus_id() const { return pci_bus_id_; }
  int compute_capability() const { return compute_capability_; }  // 90 is 9.0
  int multiprocessors() const { return multiprocessors_; }

  // Whether memory at an address is this device's. False for what the driver does not know.
  bool owns(const void* address) const;

  // Throws CudaError, naming the device, unless result is kSuccess.
  void check(Result result, const char* what) const {
    if (result != kSuccess) throw_error(result, what);
  }

 private:
  [[noreturn]] void throw_error(Result result, const char* what) const;

  std::shared_ptr<const Api> api_;
  int ordinal_;
  Device handle_ = 0;
  Context context_ = nullptr;
  int compute_capability_ = 0;
  int multiprocessors_ = 0;
  std::string pci_bus_id_;
  std::string text_;
};

// Device memory of its own, freed with it.
class DeviceMemory {
 public:
  DeviceMemory(std::shared_ptr<const GpuDevice> device, size_t bytes);
  ~DeviceMemory();
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  DeviceAddress address() const { return address_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(address_);
  }
  size_t bytes() const { return bytes_; }

 private:
  std::shared_ptr<const GpuDevice> device_;
  DeviceAddress address_ = 0;
  size_t bytes_;
};

// Pinned memory of the host: a copy between it and a device does not wait.
class PinnedMemory {
 public:
  PinnedMemory(std::shared_ptr<const GpuDevice> device, size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  template <typename T>
  T* as() const {
    return static_cast<T*>(address_);
  }

 private:
  std::shared_ptr<const GpuDevice> device_;
  void* address_ = nullptr;
};

}  // namespace gpucomm::cuda
