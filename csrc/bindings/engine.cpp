// Engine, its verdict, and the trace.
#include "engine/engine.h"

#include <pybind11/functional.h>
#include <pybind11/stl.h>

#include <optional>

#include "bindings/array.h"
#include "bindings/bindings.h"
#include "bindings/names.h"
#include "core/trace.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

// Raises TypeError/ValueError for what is no array, or not of the memory that the engine works on; contiguity is the
// caller's business.
Array array_of(const Engine& engine, const py::handle& object) {
  Array array;
  const auto read = engine.packs_buckets() ? read_array : read_host_array;
  if (!read(object.ptr(), &array, nullptr)) throw py::error_already_set();
  return array;
}

std::vector<int32_t> indices(const Bitmap& bitmap) {
  std::vector<int32_t> result;
  for (size_t i = 0; i < bitmap.count(); ++i) {
    if (bitmap.test(i)) result.push_back(static_cast<int32_t>(i));
  }
  return result;
}

// buckets: [(memory, dtype name, numel, [(parameter, offset, numel), ...]), ...]
void set_plan(Engine& engine, const py::list& buckets, uint64_t layout_hash) {
  std::vector<BucketSpec> specs;
  for (const py::handle bucket : buckets) {
    const auto fields = bucket.cast<py::tuple>();
    BucketSpec& spec = specs.emplace_back();
    spec.memory = fields[0].cast<Memory>();
    spec.dtype = dtype_named(fields[1].cast<std::string>());
    spec.numel = fields[2].cast<size_t>();
    for (const py::handle slot : fields[3]) {
      const auto values = slot.cast<std::tuple<int32_t, size_t, size_t>>();
      spec.slots.push_back({std::get<0>(values), std::get<1>(values), std::get<2>(values)});
    }
  }
  engine.set_plan(std::move(specs), layout_hash);
}

// weight: what the program gave, None where it gave none.
const Verdict& finish(Engine& engine, uint32_t backwards, uint32_t forwards, bool failed, bool joined,
                      std::optional<double> weight, int32_t nonfinite) {
  const uint32_t flags = (failed ? kFailed : 0u) | (joined ? kJoined : 0u) | (weight ? kWeighted : 0u);
  return engine.finish({.iteration = engine.iteration(),
                        .layout_hash = engine.layout_hash(),
                        .backwards = backwards,
                        .forwards = forwards,
                        .flags = flags,
                        .nonfinite = nonfinite,
                        .weight = weight.value_or(joined ? 0.0 : 1.0),
                        .wait_ns = engine.wait_ns()});
}

// grad: a dense host array in the slot's layout, or None for zeros.
void complete(Engine& engine, int32_t parameter, const py::object& grad) {
  if (grad.is_none()) {
    engine.complete(parameter, nullptr, DType::kFloat32);
    return;
  }
  const Array array = array_of(engine, grad);
  if (array.numel != engine.slot(parameter).numel) throw py::value_error("complete: numel differs from the slot's");
  engine.complete(parameter, array.address, array.dtype);
}

// grad: a dense host array of the slot's number of elements, which the caller keeps alive.
void unpack_to(Engine& engine, int32_t parameter, const py::object& grad) {
  const Array array = array_of(engine, grad);
  if (array.numel != engine.slot(parameter).numel) throw py::value_error("unpack_to: numel differs from the slot's");
  engine.unpack_to(parameter, array.address, array.dtype);
}

// iteration: only the events of this one (its low 16 bits count), all if negative.
py::list trace_events(const Trace& trace, int64_t iteration) {
  py::list events;
  const TickScale scale = TickScale::measure();
  const auto append = [&](TraceKind kind, uint64_t end_ticks, const TraceEvent& event) {
    events.append(py::make_tuple(std::string(name_of(kind)), event.id, scale.to_ns(event.begin_ticks),
                                 scale.to_ns(end_ticks), event.bytes, event.iteration));
  };
  for (const TraceEvent& event : trace.snapshot()) {
    if (iteration >= 0 && event.iteration != static_cast<uint16_t>(iteration)) continue;
    if (event.kind == TraceKind::kPack) append(TraceKind::kReady, event.begin_ticks, event);
    append(event.kind, event.end_ticks, event);
  }
  return events;
}

double trace_record_ns(Trace& trace, uint64_t count) {
  const int64_t begin = monotonic_ns();
  for (uint64_t i = 0; i < count; ++i) {
    const uint64_t t = ticks();
    trace.record(TraceKind::kStep, 0, t, ticks(), 0, i);
  }
  return static_cast<double>(monotonic_ns() - begin) / static_cast<double>(count);
}

// current_stream: () -> int, the program's stream of the moment as the driver names it.
std::function<Caller()> caller_from(py::function current_stream) {
  return [current_stream = std::move(current_stream)] {
    return Caller{reinterpret_cast<void*>(current_stream().cast<uintptr_t>())};
  };
}

}  // namespace

void bind_engine(py::module_& module) {
  py::class_<Trace, std::shared_ptr<Trace>>(module, "Trace")
      .def(py::init<size_t>(), py::arg("capacity") = 16384)
      .def("events", &trace_events, py::arg("iteration") = -1,
           "[(kind, id, begin_ns, end_ns, bytes, iteration)], oldest first; CLOCK_MONOTONIC. iteration: only of this "
           "one")
      .def("recorded", &Trace::recorded)
      .def("clear", &Trace::clear)
      .def("measure_record_ns", &trace_record_ns, py::arg("count"),
           "Nanoseconds to take two time stamps and record an event, mean over `count`; overwrites the ring.");

  py::class_<HeaderWords>(module, "HeaderWords")
      .def_readonly("iteration", &HeaderWords::iteration)
      .def_readonly("layout_hash", &HeaderWords::layout_hash)
      .def_readonly("backwards", &HeaderWords::backwards)
      .def_readonly("forwards", &HeaderWords::forwards)
      .def_property_readonly("failed", [](const HeaderWords& w) { return (w.flags & kFailed) != 0; })
      .def_property_readonly("joined", [](const HeaderWords& w) { return (w.flags & kJoined) != 0; })
      .def_property_readonly("weighted", [](const HeaderWords& w) { return (w.flags & kWeighted) != 0; })
      .def_readonly("nonfinite", &HeaderWords::nonfinite)
      .def_readonly("weight", &HeaderWords::weight)
      .def_readonly("wait_ns", &HeaderWords::wait_ns);

  py::class_<Verdict>(module, "Verdict")
      .def_readonly("agreed", &Verdict::agreed)
      .def_readonly("all_used", &Verdict::all_used)
      .def_readonly("ranks", &Verdict::ranks)
      .def("used", [](const Verdict& v) { return indices(v.used); })
      .def("used_by_all", [](const Verdict& v) { return indices(v.used_by_all); })
      .def("is_used", [](const Verdict& v, size_t parameter) { return v.used.test(parameter); })
      .def("second_round", [](const Verdict& v) { return indices(v.second_round); });

  py::enum_<Engine::Mode>(module, "Mode")
      .value("IDLE", Engine::Mode::kIdle)
      .value("LOCAL", Engine::Mode::kLocal)
      .value("REDUCE", Engine::Mode::kReduce);

  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def(py::init([](std::shared_ptr<Transport> transport, std::shared_ptr<Stream> stream,
                       std::shared_ptr<Trace> trace, size_t parameters, bool average, size_t piece_bytes,
                       std::shared_ptr<BucketCodec> codec, std::shared_ptr<Transport> control_transport,
                       std::shared_ptr<Stream> control_stream, const std::optional<py::function>& current_stream) {
             EngineParts parts{
                 .transport = std::move(transport), .stream = std::move(stream), .trace = std::move(trace)};
             parts.bucket_codec = std::move(codec);
             if (!parts.bucket_codec) parts.codec = std::make_shared<CpuCodec>();
             parts.control_transport = std::move(control_transport);
             parts.control_stream = std::move(control_stream);
             if (current_stream) parts.caller = caller_from(*current_stream);
             return std::make_shared<Engine>(std::move(parts), parameters, average, piece_bytes);
           }),
           py::arg("transport"), py::arg("stream"), py::arg("trace"), py::arg("parameters"), py::arg("average") = true,
           py::arg("piece_bytes") = 0, py::kw_only(), py::arg("codec") = nullptr,
           py::arg("control_transport") = nullptr, py::arg("control_stream") = nullptr,
           py::arg("current_stream") = py::none())
      .def("set_plan", &set_plan, py::arg("buckets"), py::arg("layout_hash"))
      .def("replace_memory", &Engine::replace_memory, py::arg("bucket"), py::arg("memory"))
      .def("unpack_to", &unpack_to, py::arg("parameter"), py::arg("grad"))
      .def("arm", &Engine::arm)
      .def("arm_local", &Engine::arm_local)
      .def("complete", &complete, py::arg("parameter"), py::arg("grad").none(true))
      .def("mark_packed", &Engine::mark_packed, py::arg("parameter"))
      .def("mark_used", &Engine::mark_used, py::arg("parameter"))
      .def("used", &Engine::used, py::arg("parameter"), "since the last reduction")
      .def("packed", &Engine::packed, py::arg("parameter"))
      .def("has_slot", [](const Engine& e, int32_t parameter) { return e.slot(parameter).bucket >= 0; })
      .def("set_measure_norm", &Engine::set_measure_norm, py::arg("measure"))
      .def("set_check_finite", &Engine::set_check_finite, py::arg("check"))
      .def("request_second_round", &Engine::request_second_round, py::arg("parameter"))
      .def("ask_about", &Engine::ask_about, py::arg("parameter"))
      .def("missing", &Engine::missing)
      .def("hand_over_to", &Engine::hand_over_to, py::arg("take"))
      .def("mark_reduced", &Engine::mark_reduced, py::arg("bucket"))
      .def("hold_back", &Engine::hold_back, py::arg("bucket"), py::arg("held") = true)
      .def("set_by_hand", &Engine::set_by_hand, py::arg("by_hand"))
      .def("launch_rest", &Engine::launch_rest)
      .def("finish", &finish, py::arg("backwards"), py::arg("forwards"), py::arg("failed"), py::arg("joined") = false,
           py::arg("weight") = py::none(), py::arg("nonfinite") = -1, py::return_value_policy::reference_internal)
      .def("disarm", &Engine::disarm)
      .def("look_at_reduced", &Engine::look_at_reduced)
      .def("used_counts", &Engine::used_counts)
      .def_property_readonly("mode", &Engine::mode)
      .def_property_readonly("iteration", &Engine::iteration)
      .def_property_readonly("launched", &Engine::launched)
      .def_property_readonly("reduced", &Engine::reduced)
      .def_property_readonly("nonfinite_parameter", &Engine::nonfinite_parameter,
                             "waits for the device, if there is one")
      .def_property_readonly("packs_buckets", &Engine::packs_buckets)
      .def_property_readonly("wait_ns", &Engine::wait_ns)
      .def_property_readonly("ready_order", &Engine::ready_order);
}

}  // namespace gpucomm
