// Calls whose arguments were found to be right, by the looks of these: a later call that looks the same needs no other check. Python
// looks at a tensor attribute by attribute, which takes longer than a launch; here torch fills in a DLTensor, in one C call.
#include "bindings/known_calls.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <algorithm>
#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/call_maker.h"
#include "bindings/exchange_api.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

constexpr size_t kMostCalls = 16;  // kept; the oldest makes room
constexpr u32 kExchangeMajor = 1;  // of DLPack

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
  std::shared_ptr<const Way> way;  // null: Python's side makes it
};

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
    std::array<nb::handle, kMostTensors> each{};
    if (tensors.size() > each.size()) return nb::none();
    std::copy(tensors.begin(), tensors.end(), each.begin());
    const KnownCall* call = look_for(values, kind, origin, lead, std::span(each).first(tensors.size()), sight);
    return call == nullptr ? nb::none() : as_found(call->plan, sight);
  }

  // From now on dispatch() and combine() find calls of this Runner, and make them where nothing unusual is in the way.
  void serve(nb::handle calls, const nb::dict& of) {
    if (api_ != nullptr) maker_ = std::make_unique<CallMaker>(calls, api_, of);
  }

  // -> what the caller gets, made; what find() gives, if Python's side has to make it; None: not known.
  nb::object dispatch(const nb::tuple& values, nb::handle x, nb::handle topk_idx, nb::handle topk_weights,
                      nb::handle handle) const {
    if (maker_ == nullptr || !maker_->stands_alone()) return nb::none();
    const bool is_quantized = maker_->is_quantized(x);
    const nb::object data = is_quantized ? nb::object(x.attr("data")) : nb::borrow(x);
    const nb::object scales = is_quantized ? nb::object(x.attr("scales")) : nb::object(nb::none());
    nb::object origin = nb::none(), lead = nb::none();
    Given given;
    if (!handle.is_none()) {
      given.handle = handle;
      given.fields = topk_idx.is_none() && topk_weights.is_none() ? maker_->fields_of(handle) : nullptr;
      if (!given.fields.is_valid()) return nb::none();
      const CallMaker::Handled handled = CallMaker::handled(given.fields);
      origin = handled.call;
      lead = nb::make_tuple(handled.num_tokens);
    }
    Sight sight;
    const std::array<nb::handle, kMostTensors> tensors = {data, scales, topk_idx, topk_weights};
    const KnownCall* call = look_for(values, x.type(), origin, lead, tensors, sight);
    return call == nullptr ? nb::none() : made(*call, sight, given);
  }

  // The same, without side and bias. `weights` and `ids`: of the owner. What find() gives, it gives without `out` alone.
  nb::object combine(const nb::tuple& values, nb::handle y, nb::handle handle, nb::handle weights, nb::handle ids,
                     nb::handle out) const {
    if (maker_ == nullptr || !maker_->stands_alone()) return nb::none();
    Given given;
    given.handle = handle;
    given.fields = maker_->fields_of(handle);
    if (!given.fields.is_valid()) return nb::none();
    if (weights.is_none() && !ids.is_none()) return nb::none();
    for (const nb::handle each : {weights, ids, out}) {
      if (!each.is_none() && !(maker_->is_tensor(each) && is_plain(each))) return nb::none();
    }
    const auto [origin, lead, num_tokens] = CallMaker::handled(given.fields);
    if (lead.is_none()) return nb::none();
    given.num_tokens = nb::cast<i64>(num_tokens);
    Sight sight;
    const std::array<nb::handle, kMostTensors> tensors = {y, nb::none(), nb::none(), nb::none()};
    const KnownCall* call = look_for(values, maker_->kind_of_combine(!weights.is_none()), origin, lead, tensors, sight);
    if (call == nullptr || sight.types[0] == nullptr) return nb::none();
    const nb::dlpack::device& device = sight.tensors[0].device;
    if (!weights.is_none() && !are_weights(weights, device, given)) return nb::none();
    if (!ids.is_none() && !are_ids(ids, device, given)) return nb::none();
    given.y = y;
    given.num_values = 1;
    for (i32 dim = 0; dim < sight.tensors[0].ndim; ++dim) given.num_values *= sight.tensors[0].shape[dim];
    if (out.is_none()) return made(*call, sight, given);
    if (!can_fill(out, sight.tensors[0], given)) return nb::none();
    nb::object result = made(*call, sight, given);
    return PyTuple_Check(result.ptr()) != 0 ? nb::object(nb::none()) : result;
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
    if (maker_ != nullptr) call.way = maker_->way_of(plan);
    Sight sight;
    std::array<nb::handle, kMostTensors> each_tensor{};
    if (tensors.size() > each_tensor.size()) return;
    std::copy(tensors.begin(), tensors.end(), each_tensor.begin());
    if (!see(std::span(each_tensor).first(tensors.size()), sight) ||
        known(values, kind, origin, lead, sight) != nullptr)
      return;
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

  // Null: not known. Without a call of these options nothing is looked at, so what is never learnt costs little.
  const KnownCall* look_for(const nb::tuple& values, nb::handle kind, nb::handle origin, nb::handle lead,
                            std::span<const nb::handle> tensors, Sight& sight) const {
    const bool may_be = std::any_of(calls_.begin(), calls_.end(),
                                    [&](const KnownCall& call) { return has_options(call, values, kind, origin); });
    return may_be && see(tensors, sight) ? known(values, kind, origin, lead, sight) : nullptr;
  }

  nb::object made(const KnownCall& call, const Sight& sight, Given& given) const {
    const std::shared_ptr<const Way> way = call.way;  // another thread may forget the call meanwhile
    const nb::object plan = call.plan;
    if (way != nullptr && sight.types[0] != nullptr) {
      if (!given.y.is_valid()) given.num_tokens = sight.tensors[0].shape[0];
      for (size_t idx = 0; idx < sight.num; ++idx) {
        given.places[idx] = sight.types[idx] == nullptr ? 0 : place_of(sight.tensors[idx]);
      }
      const i64 rows = sight.tensors[0].shape[0];
      nb::object result = maker_->make(*way, given);
      if (result.is_valid()) return result;
      return found(plan, rows, given.places, sight.num);
    }
    return as_found(plan, sight);
  }

  // Weights that a combine reads as they are given: fp32 [T, K] beside its rows. That they are plain was seen before: to ask
  // lets other threads in.
  bool are_weights(nb::handle weights, const nb::dlpack::device& device, Given& given) const {
    nb::dlpack::dltensor seen{};
    if (!is_of_picks(weights, device, given, seen)) return false;
    given.owner_weights = place_of(seen);
    return seen.dtype.code == static_cast<u8>(nb::dlpack::dtype_code::Float) && seen.dtype.bits == 32;
  }

  // Likewise of ids, int32 or int64.
  bool are_ids(nb::handle ids, const nb::dlpack::device& device, Given& given) const {
    nb::dlpack::dltensor seen{};
    if (!is_of_picks(ids, device, given, seen)) return false;
    given.owner_ids = place_of(seen);
    given.owner_ids_are_int64 = seen.dtype.bits == 64;
    return seen.dtype.code == static_cast<u8>(nb::dlpack::dtype_code::Int) &&
           (seen.dtype.bits == 32 || seen.dtype.bits == 64);
  }

  bool is_of_picks(nb::handle tensor, const nb::dlpack::device& device, const Given& given,
                   nb::dlpack::dltensor& seen) const {
    if (api_->look_at(tensor.ptr(), &seen) != 0) return PyErr_Clear(), false;
    const bool is_there = is_on(seen, device) && (seen.data != nullptr || given.num_tokens == 0);
    return is_there && seen.ndim == 2 && seen.shape[0] == given.num_tokens && seen.shape[1] == maker_->top_k() &&
           is_dense(seen);
  }

  // Whether a combine of `y` can write to `out` while it is read, and the weights are. That it is plain was seen before.
  bool can_fill(nb::handle out, const nb::dlpack::dltensor& y, Given& given) const {
    nb::dlpack::dltensor seen{};
    if (api_->look_at(out.ptr(), &seen) != 0) return PyErr_Clear(), false;
    const i64 hidden = y.shape[y.ndim - 1];
    const bool is_kind =
        seen.dtype.code == y.dtype.code && seen.dtype.bits == y.dtype.bits && seen.dtype.lanes == y.dtype.lanes;
    const bool has_shape = seen.ndim == 2 && seen.shape[0] == given.num_tokens && seen.shape[1] == hidden;
    if (!is_kind || !is_on(seen, y.device) || !has_shape || !is_dense(seen)) return false;
    const u64 at = place_of(seen), element_bytes = seen.dtype.bits / 8;
    const u64 end = at + static_cast<u64>(given.num_tokens * hidden) * element_bytes;
    const auto is_apart = [&](u64 begin, i64 num_bytes) {
      return end <= begin || begin + static_cast<u64>(num_bytes) <= at;
    };
    given.out = out;
    given.out_at = at;
    return at != 0 && at % alignment_ == 0 &&
           is_apart(place_of(y), given.num_values * static_cast<i64>(element_bytes)) &&
           is_apart(given.owner_weights, given.num_tokens * maker_->top_k() * static_cast<i64>(sizeof(float))) &&
           is_apart(given.owner_ids,
                    given.num_tokens * maker_->top_k() * static_cast<i64>(given.owner_ids_are_int64 ? 8 : 4));
  }

  static bool has_options(const KnownCall& call, const nb::tuple& values, nb::handle kind, nb::handle origin) {
    return call.kind.ptr() == kind.ptr() && call.origin.ptr() == origin.ptr() && are_same(values, call.values);
  }

  // False: one of them is not plain, or can't be read as it lies.
  bool see(std::span<const nb::handle> tensors, Sight& sight) const {
    if (api_ == nullptr) return false;
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
      return has_options(call, values, kind, origin) && looks_like(call, lead, sight);
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
    if (!is_kind || !is_on(tensor, look.device) || static_cast<size_t>(tensor.ndim) != num_lead + look.columns.size())
      return false;
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

  static nb::object as_found(nb::object plan, const Sight& sight) {
    const i64 rows = sight.types[0] == nullptr ? -1 : sight.tensors[0].shape[0];
    std::array<u64, kMostTensors> places{};
    for (size_t idx = 0; idx < sight.num; ++idx) {
      if (sight.types[idx] != nullptr) places[idx] = place_of(sight.tensors[idx]);
    }
    return found(std::move(plan), rows, places, sight.num);
  }

  static nb::object found(nb::object plan, i64 rows, const std::array<u64, kMostTensors>& places, size_t num) {
    nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(num)));
    if (!made.is_valid()) throw nb::python_error();
    for (size_t idx = 0; idx < num; ++idx) {
      PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(idx), PyLong_FromUnsignedLongLong(places[idx]));
    }
    return nb::make_tuple(std::move(plan), rows, made);
  }

  const ExchangeApi* api_;  // null: this torch has none, and no call is known
  u64 alignment_;
  nb::object requires_grad_, is_neg_;
  std::vector<KnownCall> calls_;
  std::unique_ptr<const CallMaker> maker_;
  std::vector<nb::object> types_;  // of tensors that were learnt: no other object is looked at
};

}  // namespace

void bind_known_calls(nb::module_& m) {
  nb::class_<KnownCalls>(m, "KnownCalls")
      .def(nb::init<nb::handle, u64>(), "exchange_api"_a.none(), "alignment"_a)
      .def("find", &KnownCalls::find, "values"_a, "kind"_a.none(), "origin"_a.none(), "lead"_a.none(), "tensors"_a)
      .def("serve", &KnownCalls::serve, "calls"_a, "of"_a)
      .def("dispatch", &KnownCalls::dispatch, "values"_a, "x"_a.none(), "topk_idx"_a.none(), "topk_weights"_a.none(),
           "handle"_a.none())
      .def("combine", &KnownCalls::combine, "values"_a, "y"_a.none(), "handle"_a.none(), "weights"_a.none(),
           "ids"_a.none(), "out"_a.none())
      .def("learn", &KnownCalls::learn, "values"_a, "kind"_a.none(), "origin"_a.none(), "lead"_a.none(),
           "most_rows"_a.none(), "tensors"_a, "plan"_a);
}

}  // namespace weft::bindings
