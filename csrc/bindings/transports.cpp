// Memory, Stream, and the transports: ours as they are, and Transport as a base for subclasses in Python.
#include <pybind11/stl.h>

#include <optional>

#include "bindings/bindings.h"
#include "bindings/dlpack.h"
#include "bindings/embedder.h"
#include "bindings/errors.h"
#include "bindings/names.h"
#include "transport/transport.h"
#include "transport/transport_loopback.h"
#include "transport/transport_shm.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

// Calls body, which may throw what pybind11 throws, and throws that as a PythonError.
template <typename Body>
auto keeping_python_errors(Body body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
    throw PythonError::fetch();
  }
}

// Completion of a collective that a Python transport started: an object with is_completed() and wait().
class PythonTask final : public Task {
 public:
  explicit PythonTask(py::object work) : work_(std::move(work)) {}
  ~PythonTask() override {
    const py::gil_scoped_acquire gil;
    work_ = py::object();
  }
  bool advance() override {
    const py::gil_scoped_acquire gil;
    return keeping_python_errors([&] {
      if (!work_.attr("is_completed")().cast<bool>()) return false;
      work_.attr("wait")();  // raises what went wrong
      return true;
    });
  }
  void wait() override {
    const py::gil_scoped_acquire gil;
    keeping_python_errors([&] { work_.attr("wait")(); });
  }

 private:
  py::object work_;
};

class PythonTransport : public Transport {
 public:
  using Transport::Transport;

  std::string name() const override { PYBIND11_OVERRIDE_PURE(std::string, Transport, name); }
  bool scales_in_reduce() const override { return false; }
  bool writes_after_failure() const override { return true; }

  Memory allocate(size_t bytes) override {
    // Plain zeroed host memory: a transport that copies through sockets needs no other.
    auto* address = static_cast<std::byte*>(::operator new(bytes ? bytes : 1, std::align_val_t{4096}));
    std::memset(address, 0, bytes);
    return {std::shared_ptr<void>(address, [](void* p) { ::operator delete(p, std::align_val_t{4096}); }), address,
            bytes};
  }

  void start(const Collective& collective, Stream& stream) override {
    check(collective);
    const py::gil_scoped_acquire gil;
    const py::function override = py::get_override(static_cast<const Transport*>(this), "start");
    if (!override) py::pybind11_fail("a Transport subclass has to define start(collective)");
    if (failure_) raise_dead(*failure_);
    if (!interrupted_by_.empty()) {
      throw CommError("this transport is dead: " + interrupted_by_ + " interrupted the start of an operation");
    }
    try {
      stream.enqueue(std::make_shared<PythonTask>(override(collective)));
    } catch (py::error_already_set& e) {
      // Started or not? Unless it was refused nobody knows, and starting it again could pair it with a peer's next one.
      const bool refused =
          e.matches(PyExc_TypeError) || e.matches(PyExc_ValueError) || e.matches(PyExc_NotImplementedError);
      const bool failed = e.matches(py::module_::import("gpucomm.errors").attr("CommError"));
      const std::string type = py::str(e.type().attr("__name__"));
      std::string text = type;
      try {
        text = py::str(e.value());
      } catch (py::error_already_set&) {  // an exception whose text raises
      }
      e.restore();
      const PythonError error = PythonError::fetch();
      if (failed) {
        failure_.emplace(error);
        abort(text);
      } else if (!refused) {
        interrupted_by_ = type;
        abort(type + " interrupted the start of an operation");
      }
      throw error;
    }
  }

  void abort(const std::string& reason) noexcept override {
    const py::gil_scoped_acquire gil;
    try {
      const py::function override = py::get_override(static_cast<const Transport*>(this), "abort");
      if (override) override(reason);
    } catch (py::error_already_set& e) {
      e.discard_as_unraisable("Transport.abort");
    }
  }

 private:
  [[noreturn]] static void raise_dead(const PythonError& failure) {
    failure.restore();
    const py::error_already_set error;
    const py::object dead = py::module_::import("gpucomm.errors").attr("dead_since")(error.value());
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(dead.ptr())), dead.ptr());
    throw py::error_already_set();
  }

  std::string interrupted_by_;
  std::optional<PythonError> failure_;  // raised by the start of an operation
};

py::buffer_info memory_buffer(Memory& memory) {
  if (memory.device >= 0) throw py::buffer_error("memory of a GPU: see dlpack()");
  return py::buffer_info(memory.address, 1, py::format_descriptor<uint8_t>::format(),
                         static_cast<py::ssize_t>(memory.bytes));
}

Memory slice(const Memory& memory, size_t offset, size_t bytes) {
  if (offset > memory.bytes || bytes > memory.bytes - offset) {
    throw py::value_error("slice of " + std::to_string(bytes) + " bytes at " + std::to_string(offset) + " in " +
                          std::to_string(memory.bytes));
  }
  return {memory.owner, static_cast<std::byte*>(memory.address) + offset, bytes, memory.device};
}

// What a DLPack capsule of ours owns.
struct ExportedMemory {
  dlpack::ManagedTensor tensor;
  Memory memory;
  int64_t shape[1];
};

dlpack::DataType dlpack_type(DType dtype) {
  const auto bits = static_cast<uint8_t>(8 * size_of(dtype));
  if (dtype == DType::kBFloat16) return {dlpack::kBFloat, bits, 1};
  if (dtype == DType::kUInt8) return {dlpack::kUInt, bits, 1};
  return {is_floating(dtype) ? dlpack::kFloat : dlpack::kInt, bits, 1};
}

// A capsule for torch.from_dlpack: a flat array over the memory, which lives as long as the last array over it.
// device_type, device_id: as DLPack counts them.
py::object export_memory(const Memory& memory, const std::string& dtype_name, size_t numel, int32_t device_type,
                         int32_t device_id) {
  const DType dtype = dtype_named(dtype_name);
  if (numel * size_of(dtype) > memory.bytes) throw py::value_error("dlpack: more elements than the memory holds");
  auto exported = std::make_unique<ExportedMemory>(ExportedMemory{{}, memory, {static_cast<int64_t>(numel)}});
  exported->tensor.tensor = {
      memory.address, {device_type, device_id}, 1, dlpack_type(dtype), exported->shape, nullptr, 0};
  exported->tensor.manager_context = exported.get();
  exported->tensor.deleter = [](dlpack::ManagedTensor* self) {
    delete static_cast<ExportedMemory*>(self->manager_context);
  };
  PyObject* capsule = PyCapsule_New(&exported->tensor, "dltensor", [](PyObject* dying) {
    // Renamed by who took it over.
    if (!PyCapsule_IsValid(dying, "dltensor")) return;
    auto* tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(dying, "dltensor"));
    tensor->deleter(tensor);
  });
  if (!capsule) throw py::error_already_set();
  exported.release();
  return py::reinterpret_steal<py::object>(capsule);
}

uintptr_t as_integer(const void* address) { return reinterpret_cast<uintptr_t>(address); }

// The exchange of the handshake, from a Python callable bytes -> list[bytes].
ShmOptions shm_options(int rank, int size, double timeout_s, const py::function& exchange,
                       std::vector<int> global_ranks) {
  ShmOptions options;
  options.rank = rank;
  options.size = size;
  options.timeout_s = timeout_s;
  options.global_ranks = std::move(global_ranks);
  options.embedder = &PythonEmbedder::instance();
  options.exchange = [exchange](const std::string& mine) {
    std::vector<std::string> all;
    for (const py::handle item : exchange(py::bytes(mine))) all.push_back(item.cast<std::string>());
    return all;
  };
  return options;
}

}  // namespace

void bind_memory_and_transports(py::module_& module) {
  py::class_<Memory>(module, "Memory", py::buffer_protocol())
      .def_buffer(&memory_buffer)
      .def("slice", &slice, py::arg("offset"), py::arg("nbytes"), "A part of it; the whole lives as long as any part.")
      .def_property_readonly("address", [](const Memory& m) { return as_integer(m.address); })
      .def_property_readonly("nbytes", [](const Memory& m) { return m.bytes; })
      .def_readonly("device", &Memory::device, "the ordinal of the GPU whose memory it is, -1: the host's")
      .def("dlpack", &export_memory, py::arg("dtype"), py::arg("numel"), py::arg("device_type"), py::arg("device_id"),
           "A DLPack capsule: a flat array over the memory, which lives as long as an array over it does.");

  py::class_<Collective>(module, "Collective")
      .def_property_readonly("kind", [](const Collective& c) { return std::string(name_of(c.kind)); })
      .def_property_readonly("dtype", [](const Collective& c) { return std::string(name_of(c.dtype)); })
      .def_property_readonly("op", [](const Collective& c) { return std::string(name_of(c.op)); })
      .def_readonly("root", &Collective::root)
      .def_readonly("numel", &Collective::numel)
      .def_readonly("scale", &Collective::scale)
      .def_property_readonly("input_address", [](const Collective& c) { return as_integer(c.in); })
      .def_property_readonly("output_address", [](const Collective& c) { return as_integer(c.out); });

  py::class_<Stream, std::shared_ptr<Stream>>(module, "Stream");
  py::class_<InlineStream, Stream, std::shared_ptr<InlineStream>>(module, "InlineStream").def(py::init<>());

  py::class_<Transport, PythonTransport, std::shared_ptr<Transport>>(module, "Transport")
      .def(py::init<int, int, std::vector<int>>(), py::arg("rank"), py::arg("size"),
           py::arg("global_ranks") = std::vector<int>())
      .def_property_readonly("rank", &Transport::rank)
      .def_property_readonly("size", &Transport::size)
      .def("global_rank", &Transport::global_rank, py::arg("rank"))
      .def("name", &Transport::name)
      .def("allocate", &Transport::allocate, py::arg("nbytes"))
      .def("abort", &Transport::abort, py::arg("reason"));

  py::class_<ShmTransport, Transport, std::shared_ptr<ShmTransport>>(module, "ShmTransport")
      .def(py::init(
               [](int rank, int size, double timeout_s, const py::function& exchange, std::vector<int> global_ranks) {
                 return std::make_shared<ShmTransport>(
                     shm_options(rank, size, timeout_s, exchange, std::move(global_ranks)));
               }),
           py::arg("rank"), py::arg("size"), py::arg("timeout_s"), py::arg("exchange"),
           py::arg("global_ranks") = std::vector<int>());

  py::class_<LoopbackTransport, Transport, std::shared_ptr<LoopbackTransport>>(module, "LoopbackTransport")
      .def(py::init([](int size, double latency_s, double bytes_per_s) {
             return std::make_shared<LoopbackTransport>(LoopbackOptions{.size = size,
                                                                        .latency_s = latency_s,
                                                                        .bytes_per_s = bytes_per_s,
                                                                        .embedder = &PythonEmbedder::instance()});
           }),
           py::arg("size"), py::arg("latency_s") = 0.0,
           py::arg("bytes_per_s") = std::numeric_limits<double>::infinity());
}

}  // namespace gpucomm
