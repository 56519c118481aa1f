// What a known call hands back: its tensors, the handle, counts.
#include <iterator>

#include "bindings/call_maker.h"
#include "bindings/names.h"
#include "bindings/objects.h"

namespace nb = nanobind;

namespace weft::bindings {

// Of rows and bytes to other ranks the cpu engine tells, and a GPU does not.
void CallMaker::count_sent(const CallWindow& window, const DispatchResult& found) const {
  if (window.gpu_index() >= 0) return;
  const nb::object counters = fields_of_object(field(calls_fields_, names().counters));
  add_to(counters, names().rows_sent, nb::int_(found.rows_sent));
  add_to(counters, names().bytes_sent, nb::int_(found.bytes_sent));
}

// Picks of each local expert, a tuple; null: the host does not know them yet.
nb::object CallMaker::counts_of(const CallWindow& window, const DispatchResult& found) const {
  const i64 num_experts = PyLong_AsLongLong(field(calls_fields_, names().num_local_experts));
  const i32* counts = found.counts.data();
  if (found.counts.empty()) {
    if (window.gpu_index() >= 0) return {};
    counts = reinterpret_cast<const i32*>(found.sizes.block.data);
  }
  nb::object made = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(num_experts)));
  if (!made.is_valid()) throw nb::python_error();
  for (i64 idx = 0; idx < num_experts; ++idx) {
    PyTuple_SetItem(made.ptr(), static_cast<Py_ssize_t>(idx), PyLong_FromLong(counts[idx]));
  }
  return made;
}

// As Handle._lazily. `made`: the routing.
nb::object CallMaker::new_handle(const Way& way, const Given& given, i64 num_rows, const nb::object& made) const {
  const Names& n = names();
  const nb::object token =
      is_this_epoch() ? nb::borrow(field(calls_fields_, n.token)) : nb::object(calls_.attr("tie")());
  const nb::object lead = nb::len(way.lead) > 0 ? way.lead : nb::object(nb::make_tuple(num_rows));
  nb::object handle = new_object_(handle_type_);
  const nb::object fields = fields_of_object(handle);
  set_fields(fields, {{n.made, made},
                      {n.lead, lead},
                      {n.num_local_experts, field(calls_fields_, n.num_local_experts)},
                      {n.tie, token},
                      {n.num_tokens, nb::int_(given.num_tokens)},
                      {n.call, way.call},
                      {n.sent, nb::none()}});
  if (nb::cast<const Routing&>(made).is_captured) set_fields(fields, {{n.is_captured, nb::bool_(true)}});
  return handle;
}

// As _quantized of weft/call/eager.py, which has the cases in which tensors are viewed.
nb::object CallMaker::quantized(const Way& way, const nb::object& rows, const nb::object& scales) const {
  const Names& n = names();
  const bool are_scales_given =
      scales.is_none() || way.scale_dtype.is_none() || attribute(scales, n.dtype).is(way.scale_dtype);
  if (way.no_scale_columns || !are_scales_given || !attribute(rows, n.dtype).is(way.data_dtype)) {
    return quantized_of_(way.plan, way.data_dtype, rows, scales);
  }
  nb::object made = new_object_(quantized_type_);
  set_fields(fields_of_object(made), {{n.data, rows}, {n.scales, scales}});
  return made;
}

// Ordinary tensors for rows and scales. As Runner._ordinary, which has the cases that are left out.
void CallMaker::fill_ordinary(const Way& way, const nb::object& lead, Made& made) const {
  PyObject* found = PyDict_GetItem(way.shapes.ptr(), lead.ptr());
  const nb::object shapes = found == nullptr ? nb::object(nb::none()) : nb::borrow(found);
  nb::object* const tensors[] = {&made.rows, &made.scales};
  bool is_usual = !shapes.is_none() && nb::len(shapes) <= std::size(tensors);
  for (size_t idx = 0; is_usual && idx < nb::len(shapes); ++idx) {
    const nb::object shape = shapes[idx];  // a tensor like it, lengths, strides
    const nb::object like = shape[0], lengths = shape[1], strides = shape[2];
    is_usual = is_true(strides.ptr());
    if (is_usual) *tensors[idx] = call_method(like, names().new_empty_strided, lengths, strides);
  }
  if (!is_usual) {
    const nb::object both = calls_.attr("_ordinary")(way.plan, lead);
    made.rows = both[0];
    made.scales = both[1];
  }
  made.rows_at = address(made.rows);
  made.scales_at = address(made.scales);
}

// Of a tensor that was made for the call; no mode that would replace it is active.
u64 CallMaker::address(const nb::object& tensor) const {
  nb::dlpack::dltensor seen{};
  if (tensor.is_none()) return 0;
  if (api_->look_at(tensor.ptr(), &seen) != 0) throw nb::python_error();
  return reinterpret_cast<u64>(seen.data) + seen.byte_offset;
}

}  // namespace weft::bindings
