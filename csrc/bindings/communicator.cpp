// The base of gpucomm.Communicator: collectives on any array. Raw C methods, because a small all_reduce over shared
// memory takes less time than a generic argument parser.
//
// Arrays of the host go through one channel, those of a GPU, if there is one, through another: there the program's
// current stream is ordered with the channel's, and the host does not wait.
#include <cstring>
#include <deque>
#include <memory>

#include "bindings/array.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/names.h"
#include "cuda/stream_cuda.h"
#include "transport/transport.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

// What a communicator and the Work handles it gave out share.
struct Channel {
  std::shared_ptr<Transport> transport;
  std::shared_ptr<Stream> stream;
  // Arrays of collectives in flight: their memory must live until the event.
  std::deque<std::pair<Event, py::object>> in_flight;
  bool writes_after_failure = false;  // of the transport
  bool busy = false;                  // a thread is inside; the GIL may be released there
  // Of a GPU: which, and the program's stream of the moment.
  std::shared_ptr<const cuda::GpuDevice> device;
  py::function current_stream;
  bool asks_driver = false;  // about every array, whatever it says of itself

  Caller caller() const {
    return device ? Caller{reinterpret_cast<void*>(current_stream().cast<uintptr_t>())} : Caller{};
  }

  ~Channel() {
    try {
      abandon_unfinished();
    } catch (const std::exception&) {
      // The stream has failed, and what was on it with it.
    }
  }

  void check_failure() const {
    if (transport) transport->check_failure();
  }

  void forget_completed() {
    while (!in_flight.empty() && stream->query(in_flight.front().first)) in_flight.pop_front();
  }

  // An array that a process group may still write to after a failure, and that cannot be called back, is never freed.
  void abandon(PyObject* array) {
    if (writes_after_failure) Py_INCREF(array);
  }

  // On a GPU what is still written to is freed as work of the program's stream, and so after the collective.
  void abandon_unfinished() {
    for (const auto& [event, array] : in_flight) {
      if (stream->query(event)) continue;
      if (device) stream->lead(caller(), event);
      abandon(array.ptr());
    }
    in_flight.clear();
  }
};

class Busy {
 public:
  explicit Busy(Channel& channel) : channel_(channel) {
    if (channel.busy) {
      throw std::runtime_error("this communicator is in a collective on another thread: use it from one at a time");
    }
    channel.busy = true;
  }
  ~Busy() { channel_.busy = false; }

 private:
  Channel& channel_;
};

// Handle of an asynchronous collective.
struct Work {
  std::shared_ptr<Channel> channel;
  Event event;

  void wait() {
    const Busy busy(*channel);
    channel->stream->lead(channel->caller(), event);
    channel->forget_completed();
    channel->check_failure();
  }
  bool done() {
    const Busy busy(*channel);
    channel->stream->progress();
    channel->forget_completed();
    const bool is_complete = channel->stream->query(event);
    channel->check_failure();  // which may be why
    return is_complete;
  }
};

struct CommunicatorBase {
  PyObject_HEAD std::shared_ptr<Channel> channel;
  std::shared_ptr<Channel> gpu_channel;  // null: only the host's arrays are taken
};

struct Arguments {
  PyObject* values[4] = {};

  // names: a null-terminated list; the first `required` must be given.
  bool parse(const char* method, const char* const* names, int required, PyObject* const* args, Py_ssize_t nargs,
             PyObject* keywords) {
    int count = 0;
    while (names[count]) ++count;
    if (nargs > count) {
      PyErr_Format(PyExc_TypeError, "%s takes at most %d arguments (%zd given)", method, count, nargs);
      return false;
    }
    for (Py_ssize_t i = 0; i < nargs; ++i) values[i] = args[i];
    const Py_ssize_t keyword_count = keywords ? PyTuple_GET_SIZE(keywords) : 0;
    for (Py_ssize_t k = 0; k < keyword_count; ++k) {
      PyObject* keyword = PyTuple_GET_ITEM(keywords, k);
      int at = 0;
      while (at < count && PyUnicode_CompareWithASCIIString(keyword, names[at]) != 0) ++at;
      if (at == count || values[at]) {
        PyErr_Format(PyExc_TypeError, at == count ? "%s has no argument '%U'" : "%s got argument '%U' twice", method,
                     keyword);
        return false;
      }
      values[at] = args[nargs + k];
    }
    for (int i = 0; i < required; ++i) {
      if (!values[i]) {
        PyErr_Format(PyExc_TypeError, "%s needs argument '%s'", method, names[i]);
        return false;
      }
    }
    return true;
  }
};

ReduceOp parse_op(PyObject* op) {
  if (!op) return ReduceOp::kSum;
  const char* text = PyUnicode_Check(op) ? PyUnicode_AsUTF8(op) : nullptr;
  if (!text) {
    PyErr_Clear();
    throw py::type_error("op is " + std::string(py::repr(py::handle(op))) +
                         ", accepted are 'sum', 'avg', 'min', 'max', 'prod'");
  }
  return reduce_op_named(text);
}

// The op for an array of this kind. A complex array travels as pairs of real numbers, which only sums respect.
ReduceOp op_for(const Array& array, const std::string& what, PyObject* op) {
  const ReduceOp parsed = parse_op(op);
  if (array.complex && parsed != ReduceOp::kSum && parsed != ReduceOp::kAvg) {
    throw UsageError(what + ": op is '" + std::string(name_of(parsed)) + "', complex arrays take 'sum' and 'avg'");
  }
  return parsed;
}

int parse_root(PyObject* root) {
  if (!root) return 0;
  if (PyIndex_Check(root)) {
    int overflow = 0;
    const auto number = py::reinterpret_steal<py::object>(PyNumber_Index(root));
    if (!number) throw py::error_already_set();
    const long value = PyLong_AsLongAndOverflow(number.ptr(), &overflow);
    if (overflow == 0 && value == static_cast<int>(value)) return static_cast<int>(value);
    throw py::value_error("root is " + std::string(py::repr(py::handle(root))) + ", it is a rank in the group");
  }
  throw py::type_error("root is " + std::string(py::repr(py::handle(root))) +
                       ", it is an integer: a rank in the group");
}

bool parse_flag(PyObject* flag) {
  const int value = flag ? PyObject_IsTrue(flag) : 0;
  if (value < 0) throw py::error_already_set();
  return value != 0;
}

enum class Access : uint8_t { kRead, kWrite };

// The Python error that is set, of the same type and with the operation and the argument before its text.
[[noreturn]] void throw_named(const std::string& where) {
  const py::error_already_set error;
  const std::string text = where + ": " + std::string(py::str(error.value()));
  PyErr_SetString(error.type().ptr(), text.c_str());
  throw py::error_already_set();
}

// where: operation and argument, for messages.
Array contiguous_array(const std::string& where, PyObject* object, Access access) {
  Array array;
  if (!read_array(object, &array, nullptr)) throw_named(where);
  if (array.may_have_lazy_sign) {
    const int lazy = has_lazy_sign(object, array.numel > 1);
    if (lazy < 0) throw py::error_already_set();
    if (lazy > 0) throw UsageError(where + " is a conjugated or negated view: call resolve_conj()");
  }
  if (!array.contiguous) throw UsageError(where + " is not contiguous in memory");
  if (access == Access::kWrite && array.read_only) {
    throw UsageError(where + " is read-only (" + Py_TYPE(object)->tp_name + "), the operation writes to it");
  }
  return array;
}

// What keeps the array's memory as it is: of a buffer an export, so that a bytearray refuses to be resized meanwhile.
py::object hold(PyObject* array) {
  if (PyObject_CheckBuffer(array)) {
    if (PyObject* view = PyMemoryView_FromObject(array)) return py::reinterpret_steal<py::object>(view);
    PyErr_Clear();
  }
  return py::reinterpret_borrow<py::object>(array);
}

// The channel for an array. where: operation and argument, for messages.
std::shared_ptr<Channel> channel_for(CommunicatorBase* self, const Array& array, const std::string& where) {
  const std::shared_ptr<Channel>& gpu = self->gpu_channel;
  if (!self->channel->transport) throw std::runtime_error("this communicator is closed");
  if (!gpu) {
    if (array.device == kHost) return self->channel;
    throw UsageError(where +
                     " is on a GPU, this communicator takes arrays in host memory (transport='nccl' takes both)");
  }
  const bool known = array.device >= 0 || (array.device == kHost && !gpu->asks_driver);
  const bool ours = known ? array.device == gpu->device->ordinal() : gpu->device->owns(array.address);
  if (ours) return gpu;
  if (array.device == kHost) return self->channel;
  throw UsageError(where + " is on another GPU than this communicator's, " + gpu->device->text());
}

// Runs or starts the collective; returns x (a new reference) or a Work.
PyObject* carry_out(const std::shared_ptr<Channel>& shared, Collective collective, PyObject* result,
                    PyObject* also_kept, bool async_op) {
  Channel& channel = *shared;
  if (!channel.transport) throw std::runtime_error("this communicator is closed");
  const Busy busy(channel);
  const Caller caller = channel.caller();
  channel.stream->follow(caller);
  if (!async_op && channel.stream->runs_by_itself()) {
    channel.transport->start(collective, *channel.stream);
    channel.stream->lead(caller, channel.stream->record());
    return Py_NewRef(result);
  }
  if (!async_op) {
    try {
      channel.transport->run(collective, *channel.stream);
    } catch (const UsageError&) {
      throw;
    } catch (...) {
      channel.abandon(result);
      if (also_kept) channel.abandon(also_kept);
      throw;
    }
    if (!channel.in_flight.empty()) channel.forget_completed();
    return Py_NewRef(result);
  }
  channel.transport->start(collective, *channel.stream);
  const Event event = channel.stream->record();
  channel.in_flight.emplace_back(event, hold(result));
  if (also_kept) channel.in_flight.emplace_back(event, hold(also_kept));
  channel.stream->progress();
  channel.forget_completed();
  return py::cast(Work{shared, event}).release().ptr();
}

template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

using Args = PyObject* const*;

PyObject* all_reduce(PyObject* object, Args args, Py_ssize_t nargs, PyObject* keywords) {
  static const char* const names[] = {"x", "op", "async_op", nullptr};
  Arguments given;
  if (!given.parse("all_reduce", names, 1, args, nargs, keywords)) return nullptr;
  return guarded([&] {
    const Array x = contiguous_array("all_reduce: x", given.values[0], Access::kWrite);
    const Collective collective{.kind = CollectiveKind::kAllReduce,
                                .dtype = x.dtype,
                                .op = op_for(x, "all_reduce", given.values[1]),
                                .numel = x.numel,
                                .in = x.address,
                                .out = x.address};
    return carry_out(channel_for(reinterpret_cast<CommunicatorBase*>(object), x, "all_reduce: x"), collective,
                     given.values[0], nullptr, parse_flag(given.values[2]));
  });
}

// reduce_scatter and all_gather: one side is `size` times the other.
PyObject* two_sided(PyObject* object, CollectiveKind kind, const Arguments& given, PyObject* op, PyObject* async_op) {
  auto* self = reinterpret_cast<CommunicatorBase*>(object);
  if (!self->channel->transport) throw std::runtime_error("this communicator is closed");
  const std::string what(name_of(kind));
  const Array output = contiguous_array(what + ": output", given.values[0], Access::kWrite);
  const Array input = contiguous_array(what + ": input", given.values[1], Access::kRead);
  const auto size = static_cast<size_t>(self->channel->transport->size());
  const bool scatter = kind == CollectiveKind::kReduceScatter;
  const Array& small = scatter ? output : input;
  const Array& large = scatter ? input : output;
  if (small.dtype != large.dtype || small.complex != large.complex) {
    const auto text = [](const Array& a) { return (a.complex ? "complex of " : "") + std::string(name_of(a.dtype)); };
    throw py::type_error(what + ": output is " + text(output) + ", input is " + text(input));
  }
  if (large.numel != small.numel * size) {
    throw UsageError(what + (scatter ? ": input" : ": output") + " has " + std::to_string(large.numel) +
                     " elements, expected " + std::to_string(size) + " ranks * " + std::to_string(small.numel));
  }
  const Collective collective{.kind = kind,
                              .dtype = small.dtype,
                              .op = op_for(input, what, op),
                              .numel = small.numel,
                              .in = input.address,
                              .out = output.address};
  const std::shared_ptr<Channel> channel = channel_for(self, output, what + ": output");
  if (channel != channel_for(self, input, what + ": input")) {
    throw UsageError(what + ": output and input are not on one device");
  }
  return carry_out(channel, collective, given.values[0], given.values[1], parse_flag(async_op));
}

PyObject* reduce_scatter(PyObject* object, Args args, Py_ssize_t nargs, PyObject* keywords) {
  static const char* const names[] = {"output", "input", "op", "async_op", nullptr};
  Arguments given;
  if (!given.parse("reduce_scatter", names, 2, args, nargs, keywords)) return nullptr;
  return guarded(
      [&] { return two_sided(object, CollectiveKind::kReduceScatter, given, given.values[2], given.values[3]); });
}

PyObject* all_gather(PyObject* object, Args args, Py_ssize_t nargs, PyObject* keywords) {
  static const char* const names[] = {"output", "input", "async_op", nullptr};
  Arguments given;
  if (!given.parse("all_gather", names, 2, args, nargs, keywords)) return nullptr;
  return guarded([&] { return two_sided(object, CollectiveKind::kAllGather, given, nullptr, given.values[2]); });
}

PyObject* broadcast(PyObject* object, Args args, Py_ssize_t nargs, PyObject* keywords) {
  static const char* const names[] = {"x", "root", "async_op", nullptr};
  Arguments given;
  if (!given.parse("broadcast", names, 1, args, nargs, keywords)) return nullptr;
  return guarded([&] {
    const Array x = contiguous_array("broadcast: x", given.values[0], Access::kWrite);
    const int root = parse_root(given.values[1]);
    const Collective collective{.kind = CollectiveKind::kBroadcast,
                                .dtype = x.dtype,
                                .root = root,
                                .numel = x.numel,
                                .in = x.address,
                                .out = x.address};
    return carry_out(channel_for(reinterpret_cast<CommunicatorBase*>(object), x, "broadcast: x"), collective,
                     given.values[0], nullptr, parse_flag(given.values[2]));
  });
}

PyObject* barrier(PyObject* object, PyObject*) {
  return guarded([&] {
    return carry_out(reinterpret_cast<CommunicatorBase*>(object)->channel, {.kind = CollectiveKind::kBarrier}, Py_None,
                     nullptr, false);
  });
}

PyObject* release(PyObject* object, PyObject*) {
  return guarded([&] {
    auto* self = reinterpret_cast<CommunicatorBase*>(object);
    for (const std::shared_ptr<Channel>& channel : {self->gpu_channel, self->channel}) {
      if (!channel) continue;
      const Busy busy(*channel);
      channel->abandon_unfinished();
      channel->transport.reset();
    }
    return Py_NewRef(Py_None);
  });
}

// attach_gpu(transport, stream, current_stream, asks_driver): arrays of the stream's GPU go there.
PyObject* attach_gpu(PyObject* object, PyObject* args) {
  PyObject *transport = nullptr, *stream = nullptr, *current_stream = nullptr;
  int asks_driver = 0;
  if (!PyArg_ParseTuple(args, "OOOp", &transport, &stream, &current_stream, &asks_driver)) return nullptr;
  return guarded([&] {
    auto channel = std::make_shared<Channel>();
    const auto on = py::handle(stream).cast<std::shared_ptr<cuda::CudaStream>>();
    channel->transport = py::handle(transport).cast<std::shared_ptr<Transport>>();
    channel->stream = on;
    channel->device = on->device();
    channel->current_stream = py::reinterpret_borrow<py::function>(current_stream);
    channel->asks_driver = asks_driver != 0;
    reinterpret_cast<CommunicatorBase*>(object)->gpu_channel = std::move(channel);
    return Py_NewRef(Py_None);
  });
}

int init(PyObject* object, PyObject* args, PyObject* keywords) {
  static char transport_name[] = "transport", stream_name[] = "stream";
  static char* names[] = {transport_name, stream_name, nullptr};
  PyObject *transport = nullptr, *stream = nullptr;
  if (!PyArg_ParseTupleAndKeywords(args, keywords, "OO", names, &transport, &stream)) return -1;
  try {
    auto channel = std::make_shared<Channel>();
    channel->transport = py::handle(transport).cast<std::shared_ptr<Transport>>();
    channel->stream = py::handle(stream).cast<std::shared_ptr<Stream>>();
    channel->writes_after_failure = channel->transport->writes_after_failure();
    reinterpret_cast<CommunicatorBase*>(object)->channel = std::move(channel);
    return 0;
  } catch (...) {
    set_python_error(std::current_exception());
    return -1;
  }
}

PyObject* make(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* object = type->tp_alloc(type, 0);
  if (!object) return nullptr;
  auto* self = reinterpret_cast<CommunicatorBase*>(object);
  new (&self->channel) std::shared_ptr<Channel>(new Channel);
  new (&self->gpu_channel) std::shared_ptr<Channel>();
  return object;
}

void dealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  auto* self = reinterpret_cast<CommunicatorBase*>(object);
  self->gpu_channel.~shared_ptr();
  self->channel.~shared_ptr();
  type->tp_free(object);
  Py_DECREF(type);
}

template <typename Function>
PyCFunction as_method(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

constexpr int kFast = METH_FASTCALL | METH_KEYWORDS;

PyMethodDef communicator_methods[] = {
    {"all_reduce", as_method(all_reduce), kFast,
     "all_reduce(x, op='sum', async_op=False)\n\nReduces x over the ranks, in place; every rank gets the same bits.\n"
     "x: contiguous array in host memory, the same dtype and numel on every rank. op: 'sum', 'avg', 'min', 'max', "
     "'prod' (complex: 'sum', 'avg'; the average of integers is rounded towards zero).\nReturns x, or a Work with "
     "async_op=True. Blocks until the peers came. Raises CommTimeout, PeerFailed."},
    {"reduce_scatter", as_method(reduce_scatter), kFast,
     "reduce_scatter(output, input, op='sum', async_op=False)\n\nReduces input over the ranks; rank r gets part r of "
     "the "
     "result in output.\ninput: world_size * output.numel elements. Returns output, or a Work."},
    {"all_gather", as_method(all_gather), kFast,
     "all_gather(output, input, async_op=False)\n\nWrites the inputs of all ranks to output, in rank order.\n"
     "output: world_size * input.numel elements. Returns output, or a Work."},
    {"broadcast", as_method(broadcast), kFast,
     "broadcast(x, root=0, async_op=False)\n\nCopies x of rank root (in the group) to every rank's x. Returns x, or a "
     "Work."},
    {"barrier", as_method(barrier), METH_NOARGS, "barrier()\n\nReturns once every rank has come here."},
    {"_attach_gpu", as_method(attach_gpu), METH_VARARGS,
     "_attach_gpu(transport, stream, current_stream, asks_driver): arrays of the stream's GPU go through them."},
    {"_release", as_method(release), METH_NOARGS, "Lets go of the transport; every later call raises."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot communicator_slots[] = {{Py_tp_new, reinterpret_cast<void*>(make)},
                                    {Py_tp_init, reinterpret_cast<void*>(init)},
                                    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc)},
                                    {Py_tp_methods, communicator_methods},
                                    {0, nullptr}};

PyType_Spec communicator_spec = {"gpucomm._core.CommunicatorBase", sizeof(CommunicatorBase), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, communicator_slots};

}  // namespace

void bind_communicator(py::module_& module) {
  py::class_<Work>(module, "Work")
      .def("wait", &Work::wait, "Blocks until the collective is complete. Raises what went wrong in it.")
      .def("done", &Work::done, "True once it is complete; moves it forward, never blocks.");
  PyObject* type = PyType_FromSpec(&communicator_spec);
  if (!type) throw py::error_already_set();
  module.add_object("CommunicatorBase", type);
}

}  // namespace gpucomm
