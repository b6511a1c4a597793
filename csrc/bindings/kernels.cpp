// The kernels that the package calls on arrays by themselves.
#include "kernels/kernels.h"

#include "bindings/array.h"
#include "bindings/bindings.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

// array: dense in memory. Index in memory order, of a complex array's own elements; -1 if all are finite.
int64_t first_nonfinite_in(const py::object& object) {
  Array array;
  if (!read_host_array(object.ptr(), &array, nullptr)) throw py::error_already_set();
  if (!array.dense) throw py::value_error("first_nonfinite: the array's elements do not fill one stretch of memory");
  if (!is_floating(array.dtype)) return -1;
  const auto kernel = kernels().first_nonfinite[static_cast<int>(array.dtype)];
  int64_t index;
  {
    const py::gil_scoped_release unlocked;
    index = kernel(array.address, array.numel);
  }
  return array.complex && index >= 0 ? index / 2 : index;
}

// array: contiguous. Of its bytes, so copies of other shapes or dtypes are the same to it.
uint64_t checksum_of(const py::object& object) {
  Array array;
  if (!read_host_array(object.ptr(), &array, nullptr)) throw py::error_already_set();
  if (!array.contiguous) throw py::value_error("checksum: the array is not contiguous");
  const py::gil_scoped_release unlocked;
  return kernels().checksum(array.address, array.numel * size_of(array.dtype));
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("first_nonfinite", &first_nonfinite_in, py::arg("array"),
             "Index of the first infinite or NaN element in memory order, -1 if there is none.");
  module.def("checksum", &checksum_of, py::arg("array"),
             "64 bits that depend on every byte of a contiguous array and on their order.");
}

}  // namespace gpucomm
