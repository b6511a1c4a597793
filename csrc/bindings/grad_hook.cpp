// The gradient hook: a C callable, because a Python closure alone would cost as much as everything else it does.
//
// Called by autograd once a parameter's gradient is accumulated. It packs the gradient and takes it out of
// `param.grad`: with the bucket's view left there, a second gradient of the same backward would be added straight into
// a bucket that is being reduced. Whatever is not the plain case goes to a Python callable.
#include <Python.h>
// The next two come after Python.h.
#include <pybind11/stl.h>
#include <structmember.h>

#include <memory>

#include "bindings/array.h"
#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/names.h"
#include "bindings/parameter_attribute.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

ParameterAttribute grad_attribute;
ParameterAttribute hooks_attribute;

struct GradHook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<Engine> engine;
  int32_t parameter;
  PyObject* on_first;  // () -> None: the first gradient of a backward; arms the engine
  PyObject* on_moved;  // () -> None: a gradient on another thread than those before; raises if of another backward
  PyObject* on_other;  // (parameter index, parameter) -> None: every case but the plain one
  Layout layout;       // of the view that the gradient becomes
  int device;          // on which it lies
  uint32_t accepted;   // dtypes that are packed as they come, a bit each
};

uint32_t bit(DType dtype) { return uint32_t{1} << static_cast<int>(dtype); }

PyObject* call_other(GradHook* self, PyObject* param) {
  PyObject* index = PyLong_FromLong(self->parameter);
  if (!index) return nullptr;
  PyObject* result = PyObject_CallFunctionObjArgs(self->on_other, index, param, nullptr);
  Py_DECREF(index);
  return result;
}

// Hooks that the program added may come after ours, and want the gradient.
bool is_only_hook(PyObject* param) {
  PyObject* hooks = hooks_attribute.get(param);
  const bool only = hooks && PyDict_Check(hooks) && PyDict_GET_SIZE(hooks) == 1;
  Py_XDECREF(hooks);
  PyErr_Clear();
  return only;
}

// A complex gradient goes the long way without being asked.
bool may_be_lazy(PyObject* grad, const Array& array) {
  if (!array.may_have_lazy_sign) return false;
  if (array.numel != 1) return true;
  const int lazy = has_lazy_sign(grad, false);
  if (lazy < 0) PyErr_Clear();
  return lazy != 0;
}

PyObject* grad_hook_call(PyObject* object, PyObject* const* args, size_t nargsf, PyObject*) {
  auto* self = reinterpret_cast<GradHook*>(object);
  if (PyVectorcall_NARGS(nargsf) != 1) {
    PyErr_SetString(PyExc_TypeError, "a gradient hook takes the parameter");
    return nullptr;
  }
  PyObject* param = args[0];
  Engine& engine = *self->engine;
  if (engine.mode() == Engine::Mode::kIdle) {
    PyObject* armed = PyObject_CallNoArgs(self->on_first);
    if (!armed) return nullptr;
    Py_DECREF(armed);
  } else if (!engine.on_its_thread()) {
    PyObject* allowed = PyObject_CallNoArgs(self->on_moved);
    if (!allowed) return nullptr;
    Py_DECREF(allowed);
    engine.adopt_thread();
  }
  if (engine.mode() == Engine::Mode::kLocal) {
    engine.mark_used(self->parameter);
    Py_RETURN_NONE;
  }
  const Slot& slot = engine.slot(self->parameter);
  if (engine.mode() != Engine::Mode::kReduce || slot.bucket < 0 || engine.packed(self->parameter) || engine.by_hand() ||
      !is_only_hook(param)) {
    return call_other(self, param);
  }
  PyObject* grad = grad_attribute.get(param);
  if (!grad) return nullptr;
  Array array;
  Layout layout;
  if (grad == Py_None || !read_exchange_array(grad, &array, &layout) || !(self->accepted & bit(array.dtype)) ||
      array.device != self->device || array.numel != slot.numel || !(layout == self->layout) ||
      may_be_lazy(grad, array)) {
    Py_DECREF(grad);
    return call_other(self, param);
  }
  try {
    engine.mark_ready(self->parameter, array.address, array.dtype);
  } catch (...) {
    Py_DECREF(grad);
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_DECREF(grad);
  // Of a bucket that is packed as a whole it stays there until then: see release_grads().
  if (!engine.packs_buckets() && grad_attribute.set(param, Py_None) != 0) return nullptr;
  Py_RETURN_NONE;
}

void grad_hook_dealloc(PyObject* object) {
  auto* self = reinterpret_cast<GradHook*>(object);
  PyTypeObject* type = Py_TYPE(object);
  self->engine.~shared_ptr();
  Py_XDECREF(self->on_first);
  Py_XDECREF(self->on_moved);
  Py_XDECREF(self->on_other);
  type->tp_free(object);
  Py_DECREF(type);
}

// set_layout(view): what the parameter's gradient becomes in a new plan: the view of its slot, or of where it is
// unpacked.
PyObject* grad_hook_set_layout(PyObject* object, PyObject* view) {
  auto* self = reinterpret_cast<GradHook*>(object);
  Array array;
  if (!read_array(view, &array, &self->layout)) return nullptr;
  self->device = array.device;
  self->accepted = bit(array.dtype);
  Py_RETURN_NONE;
}

// accept(dtype name): gradients of this dtype are packed too, until the next set_layout.
PyObject* grad_hook_accept(PyObject* object, PyObject* dtype) {
  const char* name = PyUnicode_AsUTF8(dtype);
  if (!name) return nullptr;
  try {
    reinterpret_cast<GradHook*>(object)->accepted |= bit(dtype_named(name));
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
  Py_RETURN_NONE;
}

PyMethodDef grad_hook_methods[] = {
    {"set_layout", grad_hook_set_layout, METH_O,
     "set_layout(view): the layout and dtype that a gradient must have to be packed"},
    {"accept", grad_hook_accept, METH_O, "accept(dtype): a further dtype that it may have"},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef grad_hook_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(GradHook, vectorcall)), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot grad_hook_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(grad_hook_dealloc)},
                                 {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                                 {Py_tp_methods, grad_hook_methods},
                                 {Py_tp_members, grad_hook_members},
                                 {0, nullptr}};

PyType_Spec grad_hook_spec = {"gpucomm._core.GradHook", sizeof(GradHook), 0,
                              Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION,
                              grad_hook_slots};

PyTypeObject* grad_hook_type = nullptr;

py::object make_grad_hook(std::shared_ptr<Engine> engine, int32_t parameter, py::object on_first, py::object on_moved,
                          py::object on_other) {
  if (parameter < 0 || static_cast<size_t>(parameter) >= engine->parameter_count()) {
    throw py::value_error("parameter index " + std::to_string(parameter) + " of " +
                          std::to_string(engine->parameter_count()));
  }
  auto* self = PyObject_New(GradHook, grad_hook_type);
  if (!self) throw py::error_already_set();
  self->vectorcall = grad_hook_call;
  new (&self->engine) std::shared_ptr<Engine>(std::move(engine));
  self->parameter = parameter;
  self->on_first = on_first.release().ptr();
  self->on_moved = on_moved.release().ptr();
  self->on_other = on_other.release().ptr();
  self->layout = Layout{};
  self->accepted = 0;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

// unpack where gradients are views: gives every parameter of the verdict's used set its slot's view as gradient.
void install_views(const Engine& engine, const Verdict& verdict, const py::list& params, const py::list& views) {
  const size_t count = engine.parameter_count();
  if (params.size() != count || views.size() != count) throw py::value_error("params and views: one per parameter");
  for (size_t i = 0; i < count; ++i) {
    if (engine.slot(static_cast<int32_t>(i)).bucket < 0 || !verdict.used.test(i)) continue;
    const auto at = static_cast<Py_ssize_t>(i);
    if (grad_attribute.set(PyList_GET_ITEM(params.ptr(), at), PyList_GET_ITEM(views.ptr(), at)) != 0) {
      throw py::error_already_set();
    }
  }
}

// Has the engine take gradients out of `params` (a list by index, looked into each time) once their bucket is packed.
// They are held until forget_grads(), and so is what they hold: hooks, and with those the engine.
// record_stream(grad, stream): called before, for each further stream on which a gradient of the bucket was made.
void release_grads(Engine& engine, py::list params, py::function record_stream) {
  grad_attribute.look_at(Py_TYPE(PyList_GET_ITEM(params.ptr(), 0)));
  engine.on_release([params = std::move(params), record_stream = std::move(record_stream)](
                        std::span<const int32_t> released, std::span<const Caller> producers) {
    for (const int32_t parameter : released) {
      PyObject* param = PyList_GET_ITEM(params.ptr(), parameter);
      if (producers.size() > 1) {
        const auto grad = py::reinterpret_steal<py::object>(grad_attribute.get(param));
        for (const Caller& producer : producers) {
          if (grad && !grad.is_none()) record_stream(grad, reinterpret_cast<uintptr_t>(producer.stream));
        }
      }
      if (grad_attribute.set(param, Py_None) != 0) throw py::error_already_set();
    }
  });
}

// Indices of the parameters whose `.grad` is something else than None and what is installed by us (None: nothing is).
std::vector<int32_t> other_grads(const py::list& params, const py::list& grads) {
  std::vector<int32_t> others;
  if (params.size() != grads.size()) throw py::value_error("params and grads: one per parameter");
  for (size_t i = 0; i < params.size(); ++i) {
    const auto at = static_cast<Py_ssize_t>(i);
    PyObject* grad = grad_attribute.get(PyList_GET_ITEM(params.ptr(), at));
    if (!grad) throw py::error_already_set();
    if (grad != Py_None && grad != PyList_GET_ITEM(grads.ptr(), at)) others.push_back(static_cast<int32_t>(i));
    Py_DECREF(grad);
  }
  return others;
}

// The layout of each parameter's view as it was made: a program may transpose or resize a gradient in place.
struct ViewLayouts {
  std::vector<Layout> layouts;
  void note(size_t index, const py::handle& view) {
    Array array;
    if (index >= layouts.size()) layouts.resize(index + 1);
    if (!read_array(view.ptr(), &array, &layouts[index])) throw py::error_already_set();
  }
};

// Indices of the views that cannot take this iteration's gradient: somebody besides `views` and the parameter's `.grad`
// holds the tensor, it was moved to other memory (by module.to() and its kin), or has another layout than it had.
// grad_references: how many references a tensor gains by being a `.grad` (depends on the version of torch).
std::vector<int32_t> stale_views(const Engine& engine, const py::list& params, const py::list& views,
                                 const ViewLayouts& made, int grad_references) {
  std::vector<int32_t> stale;
  const size_t count = engine.parameter_count();
  if (params.size() != count || views.size() != count) throw py::value_error("params and views: one per parameter");
  if (count > 0) {
    grad_attribute.look_at(Py_TYPE(PyList_GET_ITEM(params.ptr(), 0)));
    hooks_attribute.look_at(Py_TYPE(PyList_GET_ITEM(params.ptr(), 0)));
  }
  for (size_t i = 0; i < count; ++i) {
    const Slot& slot = engine.slot(static_cast<int32_t>(i));
    if (slot.bucket < 0) continue;
    PyObject* view = PyList_GET_ITEM(views.ptr(), static_cast<Py_ssize_t>(i));
    Array array;
    Layout layout;
    bool usable = read_array(view, &array, &layout) && (layout.ndim < 0 || layout == made.layouts.at(i)) &&
                  (array.address == slot.grad || array.numel == 0);
    PyErr_Clear();
    if (usable && Py_REFCNT(view) > 1) {
      PyObject* grad = grad_attribute.get(PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i)));
      if (!grad) throw py::error_already_set();
      const bool is_grad = grad == view;
      Py_DECREF(grad);
      usable = Py_REFCNT(view) <= 1 + (is_grad ? grad_references : 0);
    }
    if (!usable) stale.push_back(static_cast<int32_t>(i));
  }
  return stale;
}

}  // namespace

void bind_grad_hook(py::module_& module) {
  grad_attribute.name_it("grad");
  hooks_attribute.name_it("_post_accumulate_grad_hooks");
  grad_hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&grad_hook_spec));
  if (!grad_hook_type) throw py::error_already_set();
  module.add_object("GradHook", reinterpret_cast<PyObject*>(grad_hook_type));
  module.def("make_grad_hook", &make_grad_hook, py::arg("engine"), py::arg("parameter"), py::arg("on_first"),
             py::arg("on_moved"), py::arg("on_other"));
  module.def("install_views", &install_views, py::arg("engine"), py::arg("verdict"), py::arg("params"),
             py::arg("views"));
  module.def("release_grads", &release_grads, py::arg("engine"), py::arg("params"), py::arg("record_stream"));
  module.def("forget_grads", [](Engine& engine) { engine.on_release(nullptr); }, py::arg("engine"));
  module.def("other_grads", &other_grads, py::arg("params"), py::arg("grads"));
  py::class_<ViewLayouts>(module, "ViewLayouts")
      .def(py::init<>())
      .def("note", &ViewLayouts::note, py::arg("index"), py::arg("view"));
  module.def("stale_views", &stale_views, py::arg("engine"), py::arg("params"), py::arg("views"), py::arg("made"),
             py::arg("grad_references"));
}

}  // namespace gpucomm
