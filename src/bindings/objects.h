// What is asked of Python objects and done to them, by the C API: truth, attributes, fields, methods.
#pragma once

#include <nanobind/nanobind.h>

#include <initializer_list>
#include <utility>

#include "base/status.h"

namespace weft::bindings {

// Borrowed; null: there is none.
inline PyObject* field(nanobind::handle fields, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(fields.ptr(), name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw nanobind::python_error();
  return found;
}

inline nanobind::object attribute(nanobind::handle of, PyObject* name) {
  nanobind::object found = nanobind::steal(PyObject_GetAttr(of.ptr(), name));
  if (!found.is_valid()) throw nanobind::python_error();
  return found;
}

inline bool is_none(PyObject* value) { return value == nullptr || value == Py_None; }

inline bool is_true(PyObject* value) {
  if (is_none(value) || value == Py_False) return false;
  const int found = PyObject_IsTrue(value);
  if (found < 0) throw nanobind::python_error();
  return found != 0;
}

// The dict of an object.
inline nanobind::object fields_of_object(nanobind::handle object) {
  nanobind::object found = nanobind::steal(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (!found.is_valid()) throw nanobind::python_error();
  return found;
}

inline void set_fields(nanobind::handle fields, std::initializer_list<std::pair<PyObject*, nanobind::handle>> values) {
  for (const auto& [name, value] : values) {
    if (PyDict_SetItem(fields.ptr(), name, value.ptr()) != 0) throw nanobind::python_error();
  }
}

inline void add_to(nanobind::handle fields, PyObject* name, const nanobind::object& value) {
  PyObject* before = field(fields, name);
  if (before == nullptr) throw_internal("a count is missing");
  const nanobind::object after = nanobind::steal(PyNumber_Add(before, value.ptr()));
  if (!after.is_valid() || PyDict_SetItem(fields.ptr(), name, after.ptr()) != 0) throw nanobind::python_error();
}

// A method without a bound object of its own.
template <class... Args>
nanobind::object call_method(nanobind::handle object, PyObject* name, const Args&... args) {
  nanobind::object found = nanobind::steal(PyObject_CallMethodObjArgs(object.ptr(), name, args.ptr()..., nullptr));
  if (!found.is_valid()) throw nanobind::python_error();
  return found;
}

}  // namespace weft::bindings
