// Our own minimal declarations of DLPack 1.x (https://dmlc.github.io/dlpack): the tensor, its two owners, and the C
// exchange table that a tensor type may carry as `__dlpack_c_exchange_api__`.
#pragma once

#include <cstdint>

namespace gpucomm::dlpack {

inline constexpr int32_t kCpu = 1;
inline constexpr int32_t kCuda = 2;
inline constexpr int32_t kCudaHost = 3;
enum TypeCode : uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kComplex = 5, kBool = 6 };

struct Device {
  int32_t type;
  int32_t id;
};

struct DataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  int32_t ndim;
  DataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row-major contiguous
  uint64_t byte_offset;
};

struct ManagedTensor {  // in a capsule named "dltensor"
  Tensor tensor;
  void* manager_context;
  void (*deleter)(ManagedTensor*);
};

struct Version {
  uint32_t major;
  uint32_t minor;
};

inline constexpr uint64_t kReadOnly = 1;

struct VersionedTensor {  // in a capsule named "dltensor_versioned"
  Version version;
  void* manager_context;
  void (*deleter)(VersionedTensor*);
  uint64_t flags;
  Tensor tensor;
};

struct ExchangeApi {  // in a capsule named "dlpack_exchange_api"
  Version version;
  ExchangeApi* previous;
  void* managed_tensor_allocator;
  void* managed_tensor_from_object;
  void* managed_tensor_to_object;
  int (*tensor_from_object)(void* object, Tensor* out);  // borrowed: valid while the object lives; -1: Python error set
  void* current_work_stream;
};

}  // namespace gpucomm::dlpack
