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
    Sight sight;
    if (!see(tensors, sight)) return nb::none();
    const KnownCall* call = known(values, kind, origin, lead, sight);
    return call == nullptr ? nb::none() : as_found(call->plan, sight);
  }

  // Nothing happens for tensors that find() would not take. Their types are torch's own.
  void learn(const nb::tuple& values, nb::handle kind, nb::handle origin, nb::handle lead, std::optional<i64> most_rows,
             const nb::tuple& tensors, nb::handle plan) {
    if (api_ == nullptr) return;
    for (const nb::handle each : tensors) {
      if (!each.is_none() && !has_type(each)) types_.push_back(nb::borrow(each.type()));
    }
    KnownCall call;
    call.values = values;
    call.kind = nb::borrow(kind);
    call.origin = nb::borrow(origin);
    call.most_rows = most_rows;
    call.num_lead = lead.is_none() ? 1 : nb::len(lead);
    call.plan = nb::borrow(plan);
    Sight sight;
    if (!see(tensors, sight) || known(values, kind, origin, lead, sight) != nullptr) return;
    for (size_t idx = 0; idx < sight.num; ++idx) {
      Look look;
      if (const PyObject* type = sight.types[idx]; type != nullptr) {
        const nb::dlpack::dltensor& tensor = sight.tensors[idx];
        if (static_cast<size_t>(tensor.ndim) < call.num_lead) return;
        look.type = nb::borrow(nb::handle(type));
        look.dtype = tensor.dtype;
        look.device = tensor.device;
        look.columns.assign(tensor.shape + call.num_lead, tensor.shape + tensor.ndim);
      }
      call.looks.push_back(std::move(look));
    }
    if (!looks_like(call, lead, sight)) return;
    KnownCall oldest;  // goes when the list is whole again: what ends with it may run Python code
    if (calls_.size() >= kMostCalls) {
      oldest = std::move(calls_.front());
      calls_.erase(calls_.begin());
    }
    calls_.push_back(std::move(call));
  }

 private:
  static constexpr size_t kMostTensors = 4;

  // What is seen of the tensors of a call. Python code that runs may change them, so nothing runs while it is in use.
  struct Sight {
    std::array<const PyObject*, kMostTensors> types{};  // null: there was None
    std::array<nb::dlpack::dltensor, kMostTensors> tensors{};
    size_t num = 0;
  };

  bool has_type(nb::handle tensor) const {
    return std::any_of(types_.begin(), types_.end(),
                       [&](const auto& each) { return each.ptr() == tensor.type().ptr(); });
  }

  // False: one of them is not plain, or can't be read as it lies.
  bool see(const nb::tuple& tensors, Sight& sight) const {
    if (api_ == nullptr || tensors.size() > kMostTensors) return false;
    for (const nb::handle each : tensors) {
      if (!each.is_none() && !(has_type(each) && is_plain(each))) return false;
    }
    for (const nb::handle each : tensors) {
      const size_t idx = sight.num++;
      if (each.is_none()) continue;
      nb::dlpack::dltensor& tensor = sight.tensors[idx];
      if (api_->look_at(each.ptr(), &tensor) != 0) return PyErr_Clear(), false;  // it has no plain memory
      sight.types[idx] = each.type().ptr();
      if (place_of(tensor) == 0 || place_of(tensor) % alignment_ != 0 || !is_dense(tensor)) return false;
    }
    return true;
  }

  const KnownCall* known(const nb::tuple& values, nb::handle kind, nb::handle origin, nb::handle lead,
                         const Sight& sight) const {
    const auto found = std::find_if(calls_.rbegin(), calls_.rend(), [&](const KnownCall& call) {
      return call.kind.ptr() == kind.ptr() && call.origin.ptr() == origin.ptr() && are_same(values, call.values) &&
             looks_like(call, lead, sight);
    });
    return found == calls_.rend() ? nullptr : &*found;
  }

  static bool looks_like(const KnownCall& call, nb::handle lead, const Sight& sight) {
    if (sight.num != call.looks.size() || lead.is_none() != call.most_rows.has_value()) return false;
    for (size_t idx = 0; idx < sight.num; ++idx) {
      const Look& look = call.looks[idx];
      if (sight.types[idx] != look.type.ptr()) return false;
      if (sight.types[idx] == nullptr) continue;
      const nb::dlpack::dltensor& tensor = sight.tensors[idx];
      if (!fits(look, call.num_lead, tensor)) return false;
      const bool has_rows = sight.types[0] != nullptr && tensor.shape[0] == sight.tensors[0].shape[0] &&
                            tensor.shape[0] <= call.most_rows.value_or(0);
      if (lead.is_none() ? !has_rows : !has_lead(call, tensor, lead)) return false;
    }
    return true;
  }

  static bool fits(const Look& look, size_t num_lead, const nb::dlpack::dltensor& tensor) {
    const nb::dlpack::dtype dtype = tensor.dtype;
    const bool is_kind =
        dtype.code == look.dtype.code && dtype.bits == look.dtype.bits && dtype.lanes == look.dtype.lanes;
    const bool is_there =
        tensor.device.device_type == look.device.device_type && tensor.device.device_id == look.device.device_id;
    if (!is_kind || !is_there || static_cast<size_t>(tensor.ndim) != num_lead + look.columns.size()) return false;
    return std::equal(look.columns.begin(), look.columns.end(), tensor.shape + num_lead);
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

  static u64 place_of(const nb::dlpack::dltensor& tensor) {
    return reinterpret_cast<u64>(tensor.data) + tensor.byte_offset;
  }

  static nb::object as_found(nb::object plan, const Sight& sight) {
    const i64 rows = sight.types[0] == nullptr ? -1 : sight.tensors[0].shape[0];
    std::array<u64, kMostTensors> places{};
    for (size_t idx = 0; idx < sight.num; ++idx) {
      if (sight.types[idx] != nullptr) places[idx] = place_of(sight.tensors[idx]);
    }
    nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(sight.num)));
    if (!made.is_valid()) throw nb::python_error();
    for (size_t idx = 0; idx < sight.num; ++idx) {
      PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(idx), PyLong_FromUnsignedLongLong(places[idx]));
    }
    return nb::make_tuple(std::move(plan), rows, made);
  }

  const ExchangeApi* api_;  // null: this torch has none, and no call is known
  u64 alignment_;
  nb::object requires_grad_, is_neg_;
  std::vector<KnownCall> calls_;
  std::vector<nb::object> types_;  // of tensors that were learnt: no other object is looked at
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
