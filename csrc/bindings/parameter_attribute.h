// Reading and setting an attribute of many parameters, as `.grad`.
#pragma once

#include <Python.h>

namespace gpucomm {

// An attribute of parameters, past the look-up of its name: a third of its cost. Remembers the accessors that the type
// seen last, normally torch.nn.Parameter, has for it.
class ParameterAttribute {
 public:
  void name_it(const char* name) { name_ = PyUnicode_InternFromString(name); }

  // Finds the accessors if the type has them in C, as torch's have.
  void look_at(PyTypeObject* type) {
    if (type == type_) return;
    PyObject* found = PyObject_GetAttr(reinterpret_cast<PyObject*>(type), name_);
    if (found && Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
      Py_INCREF(type);  // and with it the descriptor, so that both addresses stay theirs
      Py_XDECREF(type_);
      type_ = type;
      accessors_ = reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset;
    }
    PyErr_Clear();
    Py_XDECREF(found);
  }

  PyObject* get(PyObject* param) const {
    if (Py_IS_TYPE(param, type_)) return accessors_->get(param, accessors_->closure);
    return PyObject_GetAttr(param, name_);
  }

  // 0, or -1 with an error set.
  int set(PyObject* param, PyObject* value) const {
    if (Py_IS_TYPE(param, type_)) return accessors_->set(param, value, accessors_->closure);
    return PyObject_SetAttr(param, name_, value);
  }

 private:
  PyObject* name_ = nullptr;  // interned
  PyTypeObject* type_ = nullptr;
  const PyGetSetDef* accessors_ = nullptr;
};

}  // namespace gpucomm
