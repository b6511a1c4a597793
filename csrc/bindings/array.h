// Reads where an array lies, from any Python object that says so: torch (through the DLPack exchange table where its
// type has one), NumPy and others (buffer protocol), anything else with `__dlpack__` or `__cuda_array_interface__`.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/types.h"

namespace gpucomm {

inline constexpr int kHost = -1;
inline constexpr int kCurrentGpu = -2;  // a GPU, and its owner does not say which

struct Array {
  void* address = nullptr;
  int device = kHost;  // or the ordinal of a GPU
  DType dtype = DType::kUInt8;
  size_t numel = 0;    // of dtype: a complex array has two float elements for each of its own
  bool dense = false;  // its elements fill one gapless stretch of memory in some order
  bool contiguous = false;
  bool complex = false;
  bool read_only = false;  // as far as its owner says
  // What lies in memory may be the conjugate or negative of the values (lazy conj and neg views of torch): see
  // has_lazy_sign(). A real tensor with more than one element would then not be dense.
  bool may_have_lazy_sign = false;
};

inline constexpr int kMaxDims = 16;

// The layout of an array, to compare two. Dimensions of size 1 are left out: their stride means nothing.
struct Layout {
  int ndim = -1;  // -1: more than kMaxDims dimensions
  int64_t size[kMaxDims];
  int64_t stride[kMaxDims];

  bool operator==(const Layout& other) const {
    if (ndim != other.ndim || ndim < 0) return false;
    for (int d = 0; d < ndim; ++d) {
      if (size[d] != other.size[d] || stride[d] != other.stride[d]) return false;
    }
    return true;
  }
};

// Borrowed: valid as long as the object lives and keeps its memory. Returns false with a Python error set: TypeError
// for an object that is no array or has a dtype without a counterpart here, ValueError for memory that is neither the
// host's nor a GPU's. Memory that is read-only is read all the same: the caller looks at `read_only`. `layout` may be
// null. Memory of a GPU is not touched, and no stream is made to wait for it.
bool read_array(PyObject* object, Array* array, Layout* layout);
// The same, with ValueError for memory that is not the host's.
bool read_host_array(PyObject* object, Array* array, Layout* layout);

// True if the object is a torch tensor whose memory holds the negative or, where complex, the conjugate of its values.
// -1: error set.
int has_lazy_sign(PyObject* object, bool complex);

// The fast path alone: true if the type carries the exchange table and everything fits. False without a Python error.
bool read_exchange_array(PyObject* object, Array* array, Layout* layout);

}  // namespace gpucomm
