// Calls whose arguments were found to be right, by the looks of these: a later call that looks the same needs no other check. Python
// looks at a tensor attribute by attribute, which takes longer than a launch; here torch fills in a DLTensor, in one C call.
#include "bindings/known_calls.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>
#include <vector>

#include "weft/config/base.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

constexpr size_t kMostCalls = 16;  // kept; the oldest makes room
constexpr u32 kExchangeMajor = 1;  // of DLPack

// DLPackExchangeAPI of DLPack 1.3, up to what is used of it.
struct ExchangeApi {
  u32 major = 0, minor = 0;
  ExchangeApi* older = nullptr;
  void (*unused[3])() = {};
  int (*look_at)(void* tensor, nb::dlpack::dltensor* out) = nullptr;  // -1: a Python error is set
};

const ExchangeApi* exchange_api(nb::handle capsule) {
  if (PyCapsule_CheckExact(capsule.ptr()) == 0) return nullptr;
  const auto* api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (api == nullptr) PyErr_Clear();
  return api == nullptr || api->major != kExchangeMajor || api->look_at == nullptr ? nullptr : api;
}

// What is looked at of a tensor. Its memory may lie elsewhere in the next call, and there may be more or fewer rows.
struct Look {
  nb::object type;  // null: there was None
  nb::dlpack::dtype dtype{};
  nb::dlpack::device device{};
  std::vector<i64> columns;  // lengths behind the leading ones
};

struct KnownCall {
  nb::tuple values;
  nb::object kind, origin;
  std::optional<i64> most_rows;
  size_t num_lead = 1;
  std::vector<Look> looks;
  nb::object plan;
};

bool is_dense(const nb::dlpack::dltensor& tensor) {
  i64 stride = 1;
  for (i32 dim = tensor.ndim - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides != nullptr && tensor.strides[dim] != stride) return false;
    stride *= tensor.shape[dim];
  }
  return true;
}

// Option values are None, bool, int, float or str, which compare without running Python code. 1, 1.0 and True differ.
bool is_same(PyObject* value, PyObject* other) {
  if (value == other) return true;
  if (Py_TYPE(value) != Py_TYPE(other)) return false;
  if (!PyLong_CheckExact(value) && !PyFloat_CheckExact(value) && !PyUnicode_CheckExact(value)) return false;
  const int equal = PyObject_RichCompareBool(value, other, Py_EQ);
  if (equal < 0) PyErr_Clear();
  return equal == 1;
}

bool are_same(const nb::tuple& values, const nb::tuple& others) {
  if (values.size() != others.size()) return false;
  for (size_t idx = 0; idx < values.size(); ++idx) {
    if (!is_same(values[idx].ptr(), others[idx].ptr())) return false;
  }
  return true;
}

class KnownCalls {
 public:
  KnownCalls(nb::handle exchange, u64 alignment)
      : api_(exchange_api(exchange)),
        alignment_(alignment),
        requires_grad_(nb::steal(PyUnicode_InternFromString("requires_grad"))),
        is_neg_(nb::steal(PyUnicode_InternFromString("is_neg"))) {}

  // `lead`: the leading lengths of all tensors; None: any one number, at most `most_rows` of the call. -> plan, rows of the first
  // tensor, tuple of addresses (0 for None); None: no call that is known, or tensors that the engine can't read as they lie.
  nb::object find(const nb::tuple& values, nb::handle kind, nb::handle origin, nb::handle lead,
                  const nb::tuple& tensors) const {
    for (auto call = calls_.rbegin(); call != calls_.rend(); ++call) {
      if (call->kind.ptr() != kind.ptr() || call->origin.ptr() != origin.ptr() || !are_same(values, call->values))
        continue;
      nb::object found = seen(*call, lead, tensors);
      if (!found.is_none()) return found;
    }
    return nb::none();
  }

  // Nothing happens for tensors that find() would not take.
  void learn(const nb::tuple& values, nb::handle kind, nb::handle origin, nb::handle lead, std::optional<i64> most_rows,
             const nb::tuple& tensors, nb::handle plan) {
    if (api_ == nullptr || !find(values, kind, origin, lead, tensors).is_none()) return;
    KnownCall call;
    call.values = values;
    call.kind = nb::borrow(kind);
    call.origin = nb::borrow(origin);
    call.most_rows = most_rows;
    call.num_lead = lead.is_none() ? 1 : nb::len(lead);
    call.plan = nb::borrow(plan);
    for (const nb::handle each : tensors) {
      Look look;
      if (!each.is_none()) {
        nb::dlpack::dltensor tensor{};
        if (!look_at(each, tensor) || static_cast<size_t>(tensor.ndim) < call.num_lead) return;
        look.type = nb::borrow(each.type());
        look.dtype = tensor.dtype;
        look.device = tensor.device;
        look.columns.assign(tensor.shape + call.num_lead, tensor.shape + tensor.ndim);
      }
      call.looks.push_back(std::move(look));
    }
    if (seen(call, lead, tensors).is_none()) return;
    if (calls_.size() >= kMostCalls) calls_.erase(calls_.begin());
    calls_.push_back(std::move(call));
  }

 private:
  static constexpr size_t kMostTensors = 4;

  bool look_at(nb::handle tensor, nb::dlpack::dltensor& out) const {
    if (api_->look_at(tensor.ptr(), &out) == 0) return true;
    PyErr_Clear();  // it has no plain memory
    return false;
  }

  nb::object seen(const KnownCall& call, nb::handle lead, const nb::tuple& tensors) const {
    if (tensors.size() != call.looks.size() || tensors.size() > kMostTensors) return nb::none();
    if (lead.is_none() != call.most_rows.has_value()) return nb::none();
    std::array<u64, kMostTensors> places{};
    i64 rows = -1;
    for (size_t idx = 0; idx < tensors.size(); ++idx) {
      const nb::handle each = tensors[idx];
      const Look& look = call.looks[idx];
      if (!look.type.is_valid() || each.is_none()) {
        if (look.type.is_valid() || !each.is_none()) return nb::none();
        continue;
      }
      nb::dlpack::dltensor tensor{};
      if (each.type().ptr() != look.type.ptr() || !look_at(each, tensor) || !fits(look, call.num_lead, tensor)) {
        return nb::none();
      }
      if (idx == 0) rows = tensor.shape[0];
      if (lead.is_none() ? tensor.shape[0] != rows || rows > *call.most_rows : !has_lead(call, tensor, lead))
        return nb::none();
      if (!is_plain(each)) return nb::none();
      places[idx] = reinterpret_cast<u64>(tensor.data) + tensor.byte_offset;
      if (places[idx] == 0 || places[idx] % alignment_ != 0) return nb::none();
    }
    return as_found(call.plan, rows, places, tensors.size());
  }

  static bool fits(const Look& look, size_t num_lead, const nb::dlpack::dltensor& tensor) {
    const nb::dlpack::dtype dtype = tensor.dtype;
    const bool is_kind =
        dtype.code == look.dtype.code && dtype.bits == look.dtype.bits && dtype.lanes == look.dtype.lanes;
    const bool is_there =
        tensor.device.device_type == look.device.device_type && tensor.device.device_id == look.device.device_id;
    if (!is_kind || !is_there || static_cast<size_t>(tensor.ndim) != num_lead + look.columns.size()) return false;
    return std::equal(look.columns.begin(), look.columns.end(), tensor.shape + num_lead) && is_dense(tensor);
  }

  static bool has_lead(const KnownCall& call, const nb::dlpack::dltensor& tensor, nb::handle lead) {
    if (!PyTuple_Check(lead.ptr()) || static_cast<size_t>(PyTuple_Size(lead.ptr())) != call.num_lead) return false;
    for (size_t dim = 0; dim < call.num_lead; ++dim) {
      PyObject* length = PyTuple_GetItem(lead.ptr(), static_cast<Py_ssize_t>(dim));
      if (!PyLong_CheckExact(length)) return false;
      if (PyLong_AsLongLong(length) != tensor.shape[dim]) return PyErr_Clear(), false;
    }
    return true;
  }

  // Neither tracked nor a view with other signs, which a DLTensor does not tell.
  bool is_plain(nb::handle tensor) const {
    const auto is_false = [](PyObject* made) {
      if (made == nullptr) PyErr_Clear();
      Py_XDECREF(made);
      return made == Py_False;
    };
    return is_false(PyObject_GetAttr(tensor.ptr(), requires_grad_.ptr())) &&
           is_false(PyObject_CallMethodObjArgs(tensor.ptr(), is_neg_.ptr(), nullptr));
  }

  static nb::object as_found(const nb::object& plan, i64 rows, const std::array<u64, kMostTensors>& places,
                             size_t num) {
    nb::object all = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(num)));
    if (!all.is_valid()) throw nb::python_error();
    for (size_t idx = 0; idx < num; ++idx) {
      PyTuple_SetItem(all.ptr(), static_cast<Py_ssize_t>(idx), PyLong_FromUnsignedLongLong(places[idx]));
    }
    return nb::make_tuple(plan, rows, all);
  }

  const ExchangeApi* api_;  // null: this torch has none, and no call is known
  u64 alignment_;
  nb::object requires_grad_, is_neg_;
  std::vector<KnownCall> calls_;
};

}  // namespace

void bind_known_calls(nb::module_& m) {
  nb::class_<KnownCalls>(m, "KnownCalls")
      .def(nb::init<nb::handle, u64>(), "exchange_api"_a.none(), "alignment"_a)
      .def("find", &KnownCalls::find, "values"_a, "kind"_a.none(), "origin"_a.none(), "lead"_a.none(), "tensors"_a)
      .def("learn", &KnownCalls::learn, "values"_a, "kind"_a.none(), "origin"_a.none(), "lead"_a.none(),
           "most_rows"_a.none(), "tensors"_a, "plan"_a);
}

}  // namespace weft::bindings
