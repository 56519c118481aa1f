// The fields of specs and buffers, each named once, as those of kernel configurations are (weft/config/fields.h): Python's side has
// what this list has. A field that it lacks does not compile.
#pragma once

#include "engine/call.h"
#include "weft/config/fields.h"

namespace weft {
namespace fields {

template <>
struct Of<CallSpec> {
  using C = CallSpec;
  using All = List<&C::layout, &C::alignment, &C::capacity, &C::max_tokens, &C::hidden, &C::dtype, &C::num_blocks,
                   &C::object, &C::timeout_ns, &C::is_small, &C::sends, &C::receives>;
};

template <>
struct Of<DispatchSpec> {
  using C = DispatchSpec;
  using Base = CallSpec;
  using All = List<&C::row_bytes, &C::quantize, &C::scale_row_bytes, &C::topk_is_int64, &C::cached, &C::zeroes_holes,
                   &C::tells_need, &C::scale_stride, &C::scales_are_fp32, &C::scale_word_bytes, &C::tells_counts,
                   &C::spread_blocks>;
};

template <>
struct Of<CombineSpec> {
  using C = CombineSpec;
  using Base = CallSpec;
  using All = List<&C::has_side, &C::adds_side, &C::bias_is_2d, &C::bias_is_fp32, &C::order, &C::sum_domain,
                   &C::wire_is_fp8, &C::stage_blocks>;
};

template <>
struct Of<Buffers> {
  using C = Buffers;
  using All = List<&C::stream, &C::num_tokens, &C::send_plan, &C::recv_plan, &C::recv_plan_len>;
};

template <>
struct Of<DispatchBuffers> {
  using C = DispatchBuffers;
  using Base = Buffers;
  using All = List<&C::x, &C::scales, &C::topk_idx, &C::topk_weights, &C::experts, &C::sizes, &C::overflow,
                   &C::num_rows, &C::out_x, &C::out_scales, &C::out_ids, &C::out_weights>;
};

template <>
struct Of<CombineBuffers> {
  using C = CombineBuffers;
  using Base = Buffers;
  using All = List<&C::y, &C::num_rows, &C::weights, &C::owner_weights, &C::owner_ids, &C::side, &C::bias, &C::out,
                   &C::side_out, &C::owner_ids_are_int64>;
};

template <class Type>
concept HasBase = requires { typename Of<Type>::Base; };

}  // namespace fields

// `visit.operator()<member>()` for each field, those of the base first.
template <class Type, class Visit>
void visit_members(Visit visit) {
  static_assert(fields::count<Type>() == fields::Of<Type>::All::kCount + (fields::HasBase<Type> ? 1 : 0),
                "a field of this struct is missing in engine/call_fields.h");
  if constexpr (fields::HasBase<Type>) visit_members<typename fields::Of<Type>::Base>(visit);
  fields::Of<Type>::All::each(visit);
}

}  // namespace weft
