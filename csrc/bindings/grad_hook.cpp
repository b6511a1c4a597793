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

#include "bindings/bindings.h"
#include "bindings/errors.h"
#include "bindings/host_array.h"
#include "engine/engine.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

PyObject* grad_name = nullptr;  // interned "grad"

struct GradHook {
  PyObject_HEAD vectorcallfunc vectorcall;
  std::shared_ptr<Engine> engine;
  int32_t parameter;
  PyObject* on_first;  // () -> None: the first gradient of a backward; arms the engine
  PyObject* on_moved;  // () -> None: a gradient on another thread than those before; raises if of another backward
  PyObject* on_other;  // (parameter index, parameter) -> None: every case but the plain one
  Layout layout;       // of the slot's view
};

PyObject* call_other(GradHook* self, PyObject* param) {
  PyObject* index = PyLong_FromLong(self->parameter);
  if (!index) return nullptr;
  PyObject* result = PyObject_CallFunctionObjArgs(self->on_other, index, param, nullptr);
  Py_DECREF(index);
  return result;
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
  if (engine.mode() != Engine::Mode::kReduce || slot.bucket < 0 || engine.packed(self->parameter)) {
    return call_other(self, param);
  }
  PyObject* grad = PyObject_GetAttr(param, grad_name);
  if (!grad) return nullptr;
  HostArray array;
  Layout layout;
  if (grad == Py_None || !read_exchange_array(grad, &array, &layout) || array.dtype != slot.dtype ||
      array.numel != slot.numel || array.may_have_lazy_sign || !(layout == self->layout)) {
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
  if (PyObject_SetAttr(param, grad_name, Py_None) != 0) return nullptr;
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

// set_layout(view): the view of the slot that this parameter has in a new plan.
PyObject* grad_hook_set_layout(PyObject* object, PyObject* view) {
  HostArray array;
  if (!read_host_array(view, &array, &reinterpret_cast<GradHook*>(object)->layout)) return nullptr;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"set_layout", grad_hook_set_layout, METH_O, "set_layout(view): the layout that a gradient must have to be packed"},
    {nullptr, nullptr, 0, nullptr}};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, static_cast<Py_ssize_t>(offsetof(GradHook, vectorcall)), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr}};

PyType_Slot slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(grad_hook_dealloc)},
                       {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                       {Py_tp_methods, methods},
                       {Py_tp_members, members},
                       {0, nullptr}};

PyType_Spec spec = {"gpucomm._core.GradHook", sizeof(GradHook), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

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
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

// unpack where gradients are views: gives every parameter of the verdict's used set its slot's view as gradient.
void install_views(const Engine& engine, const Verdict& verdict, const py::list& params, const py::list& views) {
  const size_t count = engine.parameter_count();
  if (params.size() != count || views.size() != count) throw py::value_error("params and views: one per parameter");
  for (size_t i = 0; i < count; ++i) {
    if (engine.slot(static_cast<int32_t>(i)).bucket < 0 || !verdict.used.test(i)) continue;
    const auto at = static_cast<Py_ssize_t>(i);
    if (PyObject_SetAttr(PyList_GET_ITEM(params.ptr(), at), grad_name, PyList_GET_ITEM(views.ptr(), at)) != 0) {
      throw py::error_already_set();
    }
  }
}

// Indices of the views that cannot take this iteration's gradient: somebody besides `views` and the parameter's `.grad`
// holds the tensor, or it was moved to other memory (by module.to() and its kin). grad_references: how many references
// a tensor gains by being a `.grad` (depends on the version of torch).
std::vector<int32_t> stale_views(const Engine& engine, const py::list& params, const py::list& views,
                                 int grad_references) {
  std::vector<int32_t> stale;
  const size_t count = engine.parameter_count();
  if (params.size() != count || views.size() != count) throw py::value_error("params and views: one per parameter");
  for (size_t i = 0; i < count; ++i) {
    const Slot& slot = engine.slot(static_cast<int32_t>(i));
    if (slot.bucket < 0) continue;
    PyObject* view = PyList_GET_ITEM(views.ptr(), static_cast<Py_ssize_t>(i));
    HostArray array;
    bool usable = read_host_array(view, &array, nullptr) && (array.address == slot.address || array.numel == 0);
    PyErr_Clear();
    if (usable && Py_REFCNT(view) > 1) {
      PyObject* grad = PyObject_GetAttr(PyList_GET_ITEM(params.ptr(), static_cast<Py_ssize_t>(i)), grad_name);
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
  grad_name = PyUnicode_InternFromString("grad");
  grad_hook_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (!grad_hook_type) throw py::error_already_set();
  module.add_object("GradHook", reinterpret_cast<PyObject*>(grad_hook_type));
  module.def("make_grad_hook", &make_grad_hook, py::arg("engine"), py::arg("parameter"), py::arg("on_first"),
             py::arg("on_moved"), py::arg("on_other"));
  module.def("install_views", &install_views, py::arg("engine"), py::arg("verdict"), py::arg("params"),
             py::arg("views"));
  module.def("stale_views", &stale_views, py::arg("engine"), py::arg("params"), py::arg("views"),
             py::arg("grad_references"));
}

}  // namespace gpucomm
