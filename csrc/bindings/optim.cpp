// gpucomm._core.optim: the step of an optimizer, over Python's parameters, gradients and state.
//
// Between two steps a program may do anything to them: each step looks where everything lies. It does so in C, tensor
// by tensor, and tells Python the few that need more than that.
#include <Python.h>
// The next comes after Python.h.
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bindings/array.h"
#include "bindings/bindings.h"
#include "bindings/names.h"
#include "bindings/parameter_attribute.h"
#include "optim/step_plan.h"

namespace py = pybind11;

namespace gpucomm {

namespace {

ParameterAttribute step_grad_attribute;

// A tensor and how its elements lie in memory.
struct Placed {
  Array array;
  Layout layout;

  bool read(PyObject* tensor) {
    if (read_exchange_array(tensor, &array, &layout)) return true;
    // Torch before 2.10 has no exchange table; what is no plain tensor fails here too.
    const bool found = read_array(tensor, &array, &layout);
    PyErr_Clear();
    return found;
  }

  bool on_host() const { return array.device == kHost && !array.complex && is_floating(array.dtype); }

  // Element by element in the same order of memory.
  bool lies_as(const Placed& other) const {
    if (array.numel != other.array.numel) return false;
    if (array.contiguous && other.array.contiguous) return true;
    return array.dense && other.array.dense && layout == other.layout;
  }
};

StepMethod step_method_named(const std::string& name) {
  if (name == "sgd") return StepMethod::kSgd;
  if (name == "adam") return StepMethod::kAdam;
  if (name == "lion") return StepMethod::kLion;
  if (name == "lamb") return StepMethod::kLamb;
  throw py::value_error("method is '" + name + "', accepted are 'sgd', 'adam', 'lion', 'lamb'");
}

// Which keys of a parameter's state are what, in a group.
struct StateKeys {
  py::object count;  // None: steps are not counted
  std::vector<py::object> states;
  py::object master;  // None: no masters
};

// What is held of one parameter, so that no address is used again while it is compared.
struct HeldParameter {
  py::object param;
  py::object state;                 // its dict in the optimizer's state; null: none is needed or known
  std::vector<py::object> tensors;  // in it: count, states, master, as far as the group has them
  py::object grad;                  // while a step runs
  Placed known;                     // the parameter, as of when its state was last found to be in order
  bool ready = false;               // it was
};

class OptimizerPlan {
 public:
  // params: by group; firsts: what stochastic rounding counts, by parameter, all groups one after the other; keys: by
  // group (count or None, states, master or None).
  OptimizerPlan(const std::string& method, const std::vector<py::list>& params, const std::vector<uint64_t>& firsts,
                const std::vector<std::tuple<py::object, std::vector<py::object>, py::object>>& keys)
      : plan_(step_method_named(method), firsts.size(), params.size()) {
    if (keys.size() != params.size()) throw py::value_error("keys: one for each group");
    size_t index = 0;
    for (size_t group = 0; group < params.size(); ++group) {
      const auto& [count, states, master] = keys[group];
      if (states.size() > kMaxStepStates) throw py::value_error("too many states");
      keys_.push_back({count, states, master});
      for (const py::handle param : params[group]) {
        if (index == firsts.size()) throw py::value_error("firsts: one for each parameter");
        StepEntry& entry = plan_.entries()[index];
        entry.group = static_cast<int32_t>(group);
        entry.arrays.first = firsts[index++];
        held_.push_back({py::reinterpret_borrow<py::object>(param), {}, {}, {}, {}, false});
      }
    }
    if (index != firsts.size()) throw py::value_error("firsts: one for each parameter");
  }

  // Whether the groups have the parameters that this plan was made for, and in the same order.
  bool holds(const std::vector<py::list>& params) const {
    size_t index = 0;
    for (const py::list& group : params) {
      const Py_ssize_t count = PyList_GET_SIZE(group.ptr());
      if (index + static_cast<size_t>(count) > held_.size()) return false;
      for (Py_ssize_t i = 0; i < count; ++i) {
        if (PyList_GET_ITEM(group.ptr(), i) != held_[index++].param.ptr()) return false;
      }
    }
    return index == held_.size();
  }

  void set_group(size_t group, double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled,
                 bool amsgrad, bool nesterov, bool maximize, bool stochastic_rounding, uint64_t seed) {
    plan_.groups()[group] = {
        lr, beta1, beta2, eps, weight_decay, decoupled, amsgrad, nesterov, maximize, stochastic_rounding, seed};
  }

  // Looks at everything. Returns the parameters with a gradient whose state is missing or not as it must be (attach()
  // them), and those whose gradient or memory is not plain (place() them).
  // attributes: the optimizer's __dict__; touched: its state was given to somebody since the last call.
  std::pair<std::vector<size_t>, std::vector<size_t>> read(const py::dict& attributes, bool touched) {
    std::vector<size_t> unready, odd;
    const py::handle state = PyDict_GetItemString(attributes.ptr(), "state");
    if (!state || !PyDict_Check(state.ptr())) throw py::type_error("the optimizer's state must be a dict");
    trusted_ = trusted_ && !touched;
    const bool known = trusted_ || noted(state);
    bool exclusive = known && Py_REFCNT(state.ptr()) == 1;
    if (!held_.empty()) step_grad_attribute.look_at(Py_TYPE(held_[0].param.ptr()));
    for (size_t index = 0; index < held_.size(); ++index) {
      HeldParameter& held = held_[index];
      StepEntry& entry = plan_.entries()[index];
      entry.active = false;
      held.grad = py::reinterpret_steal<py::object>(step_grad_attribute.get(held.param.ptr()));
      if (!held.grad) throw py::error_already_set();
      if (held.grad.is_none()) continue;
      Placed param, grad;
      if (!param.read(held.param.ptr()) || !grad.read(held.grad.ptr()) || !is_plain(param, grad, held.grad.ptr())) {
        odd.push_back(index);
        continue;
      }
      take(index, param, grad);
      if (!known || !take_state(index, param)) unready.push_back(index);
    }
    for (size_t index = 0; exclusive && !trusted_ && index < held_.size(); ++index) exclusive = is_ours(held_[index]);
    trusted_ = exclusive;
    return {std::move(unready), std::move(odd)};
  }

  // The parameter and its gradient, or copies of them that are plain. Returns whether its state is ready for them.
  bool place(size_t index, const py::object& param_tensor, const py::object& grad_tensor) {
    Placed param, grad;
    if (!param.read(param_tensor.ptr()) || !grad.read(grad_tensor.ptr()) || !is_plain(param, grad, grad_tensor.ptr())) {
      throw py::value_error("place: parameter and gradient are not alike in memory");
    }
    copies_.push_back(param_tensor);
    copies_.push_back(grad_tensor);
    take(index, param, grad);
    placed_.emplace_back(index, param);
    return take_state(index, param);
  }

  // The dict with the state of a parameter; fresh: its momentum buffer holds nothing yet. To be called between read()
  // and run(); note() follows.
  void attach(size_t index, const py::dict& state, bool fresh) {
    HeldParameter& held = held_.at(index);
    const StateKeys& keys = keys_of(index);
    std::vector<py::object> tensors;
    const auto add = [&](const py::object& key) {
      if (!key.is_none()) tensors.push_back(state[key]);
    };
    add(keys.count);
    for (const py::object& key : keys.states) add(key);
    if (has_master(index)) add(keys.master);
    held.state = state;
    held.tensors = std::move(tensors);
    held.ready = trusted_ = false;
    plan_.entries()[index].fresh = fresh;
    Placed param;
    for (const auto& [placed, as] : placed_) {
      if (placed == index) param = as;
    }
    if (param.array.address == nullptr && !param.read(held.param.ptr())) throw py::value_error("attach: no memory");
    if (!take_state(index, param)) throw py::value_error("attach: the state does not fit the parameter");
  }

  // Remembers which dicts the optimizer's state consists of.
  void note(const py::dict& state) {
    noted_.clear();
    trusted_ = false;
    PyObject *key, *value;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value);) {
      noted_.emplace_back(py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value));
    }
  }

  // Those that have a gradient, as of the last read().
  py::list params() const {
    return active([](const HeldParameter& held) { return held.param; });
  }
  py::list grads() const {
    return active([](const HeldParameter& held) { return held.grad; });
  }

  void run(double grad_scale, const std::string& grad_after, int threads) {
    StepOptions options;
    options.grad_scale = grad_scale;
    if (grad_after == "zeroed") {
      options.grad_after = GradAfter::kZeroed;
    } else if (grad_after == "scaled") {
      options.grad_after = GradAfter::kScaled;
    } else if (grad_after != "kept") {
      throw py::value_error("grad_after is '" + grad_after + "', accepted are 'kept', 'scaled', 'zeroed'");
    }
    const py::gil_scoped_release unlocked;
    plan_.run(options, threads);
  }

  // Lets go of the gradients.
  void release() {
    for (HeldParameter& held : held_) held.grad = py::object();
    copies_.clear();
    placed_.clear();
  }

 private:
  const StateKeys& keys_of(size_t index) { return keys_[static_cast<size_t>(plan_.entries()[index].group)]; }

  bool has_master(size_t index) {
    const DType dtype = plan_.entries()[index].arrays.param_dtype;
    return !keys_of(index).master.is_none() && size_of(dtype) == 2;
  }

  static bool is_plain(const Placed& param, const Placed& grad, PyObject* grad_object) {
    if (!param.on_host() || !grad.on_host() || grad.array.dtype != param.array.dtype || !grad.lies_as(param)) {
      return false;
    }
    if (!grad.array.may_have_lazy_sign) return true;
    const int lazy = has_lazy_sign(grad_object, false);
    PyErr_Clear();
    return lazy == 0;
  }

  void take(size_t index, const Placed& param, const Placed& grad) {
    StepEntry& entry = plan_.entries()[index];
    entry.arrays.param = param.array.address;
    entry.arrays.param_dtype = param.array.dtype;
    entry.arrays.grad = grad.array.address;
    entry.arrays.grad_dtype = grad.array.dtype;
    entry.arrays.numel = param.array.numel;
    entry.active = true;
  }

  // [Note: trust] Reading where the state's tensors lie takes longer than reading parameter and gradient. It is left
  // out while nobody can have changed anything: the state was found in order, since then nobody asked the optimizer for
  // it
  // (`touched`), and at that time nobody held any of its dicts and tensors, as their reference counts tell.
  static bool is_ours(const HeldParameter& held) {
    // The optimizer's dict, `held` and `noted_`; the parameter's dict and `held`.
    if (held.state && Py_REFCNT(held.state.ptr()) != 3) return false;
    for (const py::object& tensor : held.tensors) {
      if (Py_REFCNT(tensor.ptr()) != 2) return false;
    }
    return true;
  }

  // False if the state is not known, was changed, or does not fit the parameter.
  bool take_state(size_t index, const Placed& param) {
    HeldParameter& held = held_[index];
    if (trusted_ && held.ready && held.known.array.dtype == param.array.dtype && held.known.lies_as(param)) return true;
    held.ready = find_state(index, param);
    if (held.ready) held.known = param;
    return held.ready;
  }

  bool find_state(size_t index, const Placed& param) {
    HeldParameter& held = held_[index];
    StepEntry& entry = plan_.entries()[index];
    const StateKeys& keys = keys_of(index);
    const DType wide = param.array.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    const bool master = has_master(index);
    const size_t wanted = (keys.count.is_none() ? 0 : 1) + keys.states.size() + (master ? 1 : 0);
    if (wanted == 0) return true;
    if (!held.state || held.tensors.size() != wanted) return false;
    size_t next = 0;
    Placed found;
    const auto look_up = [&](const py::object& key) {
      PyObject* tensor = PyDict_GetItemWithError(held.state.ptr(), key.ptr());
      return tensor != nullptr && tensor == held.tensors[next++].ptr() && found.read(tensor) && found.on_host();
    };
    if (!keys.count.is_none()) {
      if (!look_up(keys.count) || found.array.dtype != DType::kFloat32 || found.array.numel != 1) return false;
      entry.count = static_cast<float*>(found.array.address);
    }
    for (size_t s = 0; s < keys.states.size(); ++s) {
      if (!look_up(keys.states[s]) || found.array.dtype != wide || !found.lies_as(param)) return false;
      entry.arrays.state[s] = found.array.address;
    }
    entry.arrays.master = nullptr;
    if (master) {
      if (!look_up(keys.master) || found.array.dtype != DType::kFloat32 || !found.lies_as(param)) return false;
      entry.arrays.master = found.array.address;
    }
    return true;
  }

  // In the order in which they were added: no look-up, which would cost a call of Tensor.__hash__ each.
  bool noted(py::handle state) const {
    if (static_cast<size_t>(PyDict_Size(state.ptr())) != noted_.size()) return false;
    PyObject *key, *value;
    size_t index = 0;
    for (Py_ssize_t at = 0; PyDict_Next(state.ptr(), &at, &key, &value); ++index) {
      if (noted_[index].first.ptr() != key || noted_[index].second.ptr() != value) return false;
    }
    return true;
  }

  template <class Choice>
  py::list active(const Choice& choice) const {
    py::list chosen;
    for (size_t index = 0; index < held_.size(); ++index) {
      if (held_[index].grad && !held_[index].grad.is_none()) chosen.append(choice(held_[index]));
    }
    return chosen;
  }

  StepPlan plan_;
  std::vector<StateKeys> keys_;
  std::vector<HeldParameter> held_;
  std::vector<std::pair<py::object, py::object>> noted_;
  bool trusted_ = false;                           // see [Note: trust]
  std::vector<py::object> copies_;                 // of a step: what was placed
  std::vector<std::pair<size_t, Placed>> placed_;  // and how it lies
};

}  // namespace

void bind_optim(py::module_& module) {
  step_grad_attribute.name_it("grad");
  py::module_ optim = module.def_submodule("optim", "The steps of gpucomm.optim.");
  py::class_<OptimizerPlan>(optim, "OptimizerPlan")
      .def(py::init<const std::string&, const std::vector<py::list>&, const std::vector<uint64_t>&,
                    const std::vector<std::tuple<py::object, std::vector<py::object>, py::object>>&>(),
           py::arg("method"), py::arg("params"), py::arg("firsts"), py::arg("keys"))
      .def("holds", &OptimizerPlan::holds, py::arg("params"))
      .def("set_group", &OptimizerPlan::set_group, py::arg("group"), py::arg("lr"), py::arg("beta1"), py::arg("beta2"),
           py::arg("eps"), py::arg("weight_decay"), py::arg("decoupled"), py::arg("amsgrad"), py::arg("nesterov"),
           py::arg("maximize"), py::arg("stochastic_rounding"), py::arg("seed"))
      .def("read", &OptimizerPlan::read, py::arg("attributes"), py::arg("touched"))
      .def("place", &OptimizerPlan::place, py::arg("index"), py::arg("param"), py::arg("grad"))
      .def("attach", &OptimizerPlan::attach, py::arg("index"), py::arg("state"), py::arg("fresh"))
      .def("note", &OptimizerPlan::note, py::arg("state"))
      .def("params", &OptimizerPlan::params)
      .def("grads", &OptimizerPlan::grads)
      .def("run", &OptimizerPlan::run, py::arg("grad_scale"), py::arg("grad_after"), py::arg("threads"))
      .def("release", &OptimizerPlan::release);
}

}  // namespace gpucomm
