#include "bindings/array.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "bindings/dlpack.h"

namespace gpucomm {

namespace {

// Tables by type, most recently used first; a program has two or three tensor types (Tensor, Parameter).
struct KnownType {
  PyTypeObject* type;
  const dlpack::ExchangeApi* api;  // null: none
  bool stands_for_others;
};
constexpr int kKnownTypes = 8;
KnownType known_types[kKnownTypes];

// Torch's distributed, fake and other wrapper tensors have operators of their own, in Python, and a shape, but no
// memory: the address that they inherit the means to tell is none. All others inherit a builtin function here.
bool stands_for_others(PyTypeObject* type) {
  PyObject* dispatch = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__torch_dispatch__");
  const bool own = dispatch && !PyCFunction_Check(dispatch);
  PyErr_Clear();
  Py_XDECREF(dispatch);
  return own;
}

KnownType look_up(PyTypeObject* type) {
  for (const KnownType& known : known_types) {
    if (known.type == type) return known;
  }
  const dlpack::ExchangeApi* api = nullptr;
  if (PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__")) {
    if (PyCapsule_CheckExact(capsule)) {
      api = static_cast<const dlpack::ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
      while (api != nullptr && api->version.major != 1) api = api->previous;
    }
    Py_DECREF(capsule);
  }
  PyErr_Clear();
  std::move_backward(known_types, known_types + kKnownTypes - 1, known_types + kKnownTypes);
  // The reference keeps the type's address from being used again for another type.
  Py_INCREF(type);
  const bool stands = stands_for_others(type);
  known_types[0] = {type, stands ? nullptr : api, stands};
  return known_types[0];
}

// Returns the number of our elements in one of theirs, 0 if there is no counterpart.
int counterpart(dlpack::DataType type, DType* dtype) {
  if (type.lanes != 1) return 0;
  const int key = type.code * 256 + type.bits;
  switch (key) {
    case dlpack::kFloat * 256 + 32:
      *dtype = DType::kFloat32;
      return 1;
    case dlpack::kBFloat * 256 + 16:
      *dtype = DType::kBFloat16;
      return 1;
    case dlpack::kFloat * 256 + 16:
      *dtype = DType::kFloat16;
      return 1;
    case dlpack::kFloat * 256 + 64:
      *dtype = DType::kFloat64;
      return 1;
    case dlpack::kInt * 256 + 32:
      *dtype = DType::kInt32;
      return 1;
    case dlpack::kInt * 256 + 64:
      *dtype = DType::kInt64;
      return 1;
    case dlpack::kUInt * 256 + 8:
      *dtype = DType::kUInt8;
      return 1;
    case dlpack::kComplex * 256 + 64:
      *dtype = DType::kFloat32;
      return 2;
    case dlpack::kComplex * 256 + 128:
      *dtype = DType::kFloat64;
      return 2;
    default:
      return 0;
  }
}

bool is_dense(const Layout& layout) {
  if (layout.ndim < 0) return false;
  Layout sorted = layout;
  for (int i = 1; i < sorted.ndim; ++i) {
    for (int j = i; j > 0 && sorted.stride[j] > sorted.stride[j - 1]; --j) {
      std::swap(sorted.stride[j], sorted.stride[j - 1]);
      std::swap(sorted.size[j], sorted.size[j - 1]);
    }
  }
  int64_t expected = 1;
  for (int d = sorted.ndim - 1; d >= 0; --d) {
    if (sorted.stride[d] != expected) return false;
    expected *= sorted.size[d];
  }
  return true;
}

// False for memory of a kind that nothing here works on.
bool set_device(dlpack::Device device, Array* array) {
  array->device = device.type == dlpack::kCuda ? device.id : kHost;
  return device.type == dlpack::kCuda || device.type == dlpack::kCpu || device.type == dlpack::kCudaHost;
}

void fill(const dlpack::Tensor& tensor, int per_element, Array* array, Layout* wanted) {
  Layout local;
  Layout* layout = wanted ? wanted : &local;
  array->address = static_cast<char*>(tensor.data) + tensor.byte_offset;
  size_t numel = static_cast<size_t>(per_element);
  int64_t row_major = 1;
  bool contiguous = true;
  layout->ndim = 0;
  for (int d = tensor.ndim - 1; d >= 0; --d) {
    const int64_t size = tensor.shape[d];
    numel *= static_cast<size_t>(size);
    if (size == 1) continue;
    const int64_t stride = tensor.strides ? tensor.strides[d] : row_major;
    contiguous &= stride == row_major;
    row_major *= size;
    if (layout->ndim >= 0 && layout->ndim < kMaxDims) {
      layout->size[layout->ndim] = size;
      layout->stride[layout->ndim] = stride;
      ++layout->ndim;
    } else {
      layout->ndim = -1;
    }
  }
  array->numel = numel;
  array->complex = per_element == 2;
  array->may_have_lazy_sign = array->complex || numel == 1;
  array->contiguous = contiguous || numel == 0;
  array->dense = array->contiguous || is_dense(*layout);
}

bool read_buffer(PyObject* object, Array* array, Layout* layout) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_STRIDES | PyBUF_FORMAT) != 0) return false;
  const char* format = view.format ? view.format : "B";
  if (*format == '@' || *format == '=' || (*format == '<' && PY_LITTLE_ENDIAN)) ++format;
  const bool complex = *format == 'Z';
  const char letter = complex ? format[1] : format[0];
  dlpack::DataType type{dlpack::kBool, static_cast<uint8_t>(view.itemsize * 8), 1};
  if (std::strchr("efd", letter)) type.code = complex ? dlpack::kComplex : dlpack::kFloat;
  if (std::strchr("bhilqn", letter)) type.code = dlpack::kInt;
  if (std::strchr("BHILQNc", letter)) type.code = dlpack::kUInt;
  const int per_element = counterpart(type, &array->dtype);
  const bool fits = per_element > 0 && view.ndim <= kMaxDims;
  if (fits) {
    int64_t shape[kMaxDims], strides[kMaxDims];
    bool whole = true;
    for (int d = 0; d < view.ndim; ++d) {
      shape[d] = view.shape[d];
      whole &= view.strides[d] % view.itemsize == 0;
      strides[d] = view.strides[d] / view.itemsize;
    }
    fill({view.buf, {dlpack::kCpu, 0}, view.ndim, type, shape, strides, 0}, per_element, array, layout);
    if (!whole) array->contiguous = array->dense = false;
    array->read_only = view.readonly != 0;
  } else {
    PyErr_Format(PyExc_TypeError,
                 "an array of format '%s' has no counterpart here (float16, bfloat16, float32, float64, "
                 "complex64, complex128, int32, int64, uint8)",
                 view.format ? view.format : "?");
  }
  PyBuffer_Release(&view);
  return fits;
}

// Whether an object with `__dlpack__` says that it is on a GPU.
bool is_on_gpu(PyObject* object) {
  PyObject* device = PyObject_CallMethod(object, "__dlpack_device__", nullptr);
  int type = 0, id = 0;
  const bool gpu = device && PyArg_ParseTuple(device, "ii", &type, &id) && type == dlpack::kCuda;
  PyErr_Clear();
  Py_XDECREF(device);
  return gpu;
}

// What `__dlpack__` gives: in the form that tells whether it is read-only, where the producer knows that one. Of a
// GPU's memory without making a stream wait: who uses it orders its own.
PyObject* export_dlpack(PyObject* object) {
  PyObject* method = PyObject_GetAttrString(object, "__dlpack__");
  PyObject* no_arguments = PyTuple_New(0);
  PyObject* options = is_on_gpu(object) ? Py_BuildValue("{s:(ii),s:i}", "max_version", 1, 0, "stream", -1)
                                        : Py_BuildValue("{s:(ii)}", "max_version", 1, 0);
  PyObject* capsule = nullptr;
  if (method && no_arguments && options) {
    capsule = PyObject_Call(method, no_arguments, options);
    if (!capsule && PyErr_ExceptionMatches(PyExc_TypeError)) {
      PyErr_Clear();
      capsule = PyObject_CallNoArgs(method);
    }
  }
  Py_XDECREF(options);
  Py_XDECREF(no_arguments);
  Py_XDECREF(method);
  return capsule;
}

// The tensor in a capsule of either form; null with a Python error set.
const dlpack::Tensor* tensor_in(PyObject* capsule, bool* read_only) {
  if (PyCapsule_IsValid(capsule, "dltensor_versioned")) {
    auto* versioned = static_cast<dlpack::VersionedTensor*>(PyCapsule_GetPointer(capsule, "dltensor_versioned"));
    if (versioned->version.major == 1) {
      *read_only = (versioned->flags & dlpack::kReadOnly) != 0;
      return &versioned->tensor;
    }
    PyErr_Format(PyExc_TypeError, "its DLPack version is %u.%u, 1.x is understood", versioned->version.major,
                 versioned->version.minor);
    return nullptr;
  }
  auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, "dltensor"));
  return managed ? &managed->tensor : nullptr;
}

bool read_dlpack(PyObject* object, Array* array, Layout* layout) {
  // A tensor that requires grad refuses to be exported; what we do with its memory is not recorded anyhow.
  PyObject* exported =
      PyObject_HasAttrString(object, "detach") ? PyObject_CallMethod(object, "detach", nullptr) : Py_NewRef(object);
  if (!exported) return false;
  PyObject* capsule = export_dlpack(exported);
  Py_DECREF(exported);
  if (!capsule) return false;
  bool fits = false;
  if (const dlpack::Tensor* found = tensor_in(capsule, &array->read_only)) {
    const dlpack::Tensor& tensor = *found;
    const int per_element = counterpart(tensor.dtype, &array->dtype);
    if (!set_device(tensor.device, array)) {
      PyErr_Format(PyExc_ValueError,
                   "the array is on a device of DLPack type %d, memory of the host or a GPU is needed",
                   static_cast<int>(tensor.device.type));
    } else if (per_element == 0) {
      static const char* const kinds[] = {"int", "uint", "float", "opaque", "bfloat", "complex", "bool"};
      const char* kind = tensor.dtype.code < std::size(kinds) ? kinds[tensor.dtype.code] : "unknown";
      PyErr_Format(PyExc_TypeError,
                   "an array of %s of %d bits has no counterpart here (float16, bfloat16, float32, float64, complex64, "
                   "complex128, int32, int64, uint8)",
                   kind, static_cast<int>(tensor.dtype.bits));
    } else {
      fill(tensor, per_element, array, layout);
      fits = true;
    }
  }
  // The capsule still owns the tensor and frees it; the object keeps the memory.
  Py_DECREF(capsule);
  return fits;
}

// https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html: a dict of shape, typestr, data and, for arrays
// that are not in C order, strides in bytes. It does not tell the device: it is the current one.
bool read_cuda_interface(PyObject* object, Array* array, Layout* layout) {
  PyObject* facts = PyObject_GetAttrString(object, "__cuda_array_interface__");
  if (!facts) return false;
  const auto field = [&](const char* name) {
    return PyDict_Check(facts) ? PyDict_GetItemString(facts, name) : nullptr;
  };
  PyObject *shape = field("shape"), *type_text = field("typestr"), *data = field("data"), *strides = field("strides");
  const char* text = type_text && PyUnicode_Check(type_text) ? PyUnicode_AsUTF8(type_text) : nullptr;
  int64_t sizes[kMaxDims], steps[kMaxDims];
  bool fits = text && std::strlen(text) >= 3 && shape && PyTuple_Check(shape) && data && PyTuple_Check(data) &&
              PyTuple_GET_SIZE(data) == 2 && PyTuple_GET_SIZE(shape) <= kMaxDims;
  int per_element = 0;
  const int ndim = fits ? static_cast<int>(PyTuple_GET_SIZE(shape)) : 0;
  if (fits) {
    const int itemsize = std::atoi(text + 2);
    dlpack::DataType type{dlpack::kBool, static_cast<uint8_t>(itemsize * 8), 1};
    if (text[1] == 'f') type.code = dlpack::kFloat;
    if (text[1] == 'i') type.code = dlpack::kInt;
    if (text[1] == 'u') type.code = dlpack::kUInt;
    if (text[1] == 'c') type.code = dlpack::kComplex;
    per_element = counterpart(type, &array->dtype);
    const bool strided = strides && PyTuple_Check(strides) && PyTuple_GET_SIZE(strides) == ndim;
    for (int d = 0; d < ndim; ++d) {
      sizes[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, d));
      if (strided) steps[d] = PyLong_AsLongLong(PyTuple_GET_ITEM(strides, d)) / std::max(itemsize, 1);
    }
    void* address = PyLong_AsVoidPtr(PyTuple_GET_ITEM(data, 0));
    fits = per_element > 0 && !PyErr_Occurred();
    if (fits) {
      fill({address, {dlpack::kCuda, 0}, ndim, type, sizes, strided ? steps : nullptr, 0}, per_element, array, layout);
      array->device = kCurrentGpu;
      array->read_only = PyObject_IsTrue(PyTuple_GET_ITEM(data, 1)) == 1;
    }
  }
  if (!fits && !PyErr_Occurred()) {
    PyErr_Format(PyExc_TypeError, "the __cuda_array_interface__ of this %s has no counterpart here",
                 Py_TYPE(object)->tp_name);
  }
  Py_DECREF(facts);
  return fits;
}

// The object would not hand out its memory: the caller's mistake, with the object's own words.
void refuse_unexported(PyObject* object) {
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_Format(PyExc_ValueError, "expected a strided array, got %s: %S", Py_TYPE(object)->tp_name,
               value ? value : Py_None);
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(traceback);
}

}  // namespace

int has_lazy_sign(PyObject* object, bool complex) {
  static PyObject* const is_neg = PyUnicode_InternFromString("is_neg");
  static PyObject* const is_conj = PyUnicode_InternFromString("is_conj");
  for (PyObject* bit : {is_neg, complex ? is_conj : nullptr}) {
    if (!bit) continue;
    PyObject* set = PyObject_CallMethodNoArgs(object, bit);
    if (!set) {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) return -1;
      PyErr_Clear();  // no tensor of torch's
      continue;
    }
    const int value = PyObject_IsTrue(set);
    Py_DECREF(set);
    if (value != 0) return value;
  }
  return 0;
}

bool read_exchange_array(PyObject* object, Array* array, Layout* layout) {
  const dlpack::ExchangeApi* api = look_up(Py_TYPE(object)).api;
  if (!api) return false;
  dlpack::Tensor tensor;
  if (api->tensor_from_object(object, &tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (!set_device(tensor.device, array)) return false;
  const int per_element = counterpart(tensor.dtype, &array->dtype);
  if (per_element == 0) return false;
  fill(tensor, per_element, array, layout);
  return true;
}

bool read_array(PyObject* object, Array* array, Layout* layout) {
  if (read_exchange_array(object, array, layout)) return true;
  if (look_up(Py_TYPE(object)).stands_for_others) {
    PyErr_Format(PyExc_ValueError, "expected an array with memory, this %s has none of its own",
                 Py_TYPE(object)->tp_name);
    return false;
  }
  const bool has_buffer = PyObject_CheckBuffer(object) != 0;
  if (!has_buffer && !PyObject_HasAttrString(object, "__dlpack__")) {
    if (PyObject_HasAttrString(object, "__cuda_array_interface__")) return read_cuda_interface(object, array, layout);
    PyErr_Format(PyExc_TypeError, "expected an array (torch, NumPy, CuPy or anything with DLPack), got %s",
                 Py_TYPE(object)->tp_name);
    return false;
  }
  if (has_buffer ? read_buffer(object, array, layout) : read_dlpack(object, array, layout)) return true;
  if (PyErr_ExceptionMatches(PyExc_BufferError)) refuse_unexported(object);
  return false;
}

bool read_host_array(PyObject* object, Array* array, Layout* layout) {
  if (!read_array(object, array, layout)) return false;
  if (array->device == kHost) return true;
  PyErr_Format(PyExc_ValueError, "the array is on a device (cuda:%d), host memory is needed", array->device);
  return false;
}

}  // namespace gpucomm
