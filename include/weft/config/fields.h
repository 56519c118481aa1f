// The fields of kernel configurations, each named once: whatever has to do with all of them walks along this list. A field that
// it lacks does not compile, since two configurations that differ in it alone would share a kernel.
// Host only: names and types come from what the compiler says of them.
#pragma once

#include "weft/config/kernel.h"
#include "weft/config/small_dispatch_kernel.h"
#include "weft/config/small_kernel.h"

namespace weft {
namespace fields {

struct Name {
  const char* data = nullptr;
  u64 length = 0;
};

// From `first` to a bracket or a semicolon, behind the last `from` if there is one.
template <u64 kLength>
constexpr Name up_to_end(const char (&text)[kLength], u64 first, char from) {
  u64 begin = first, at = first;
  for (; text[at] != ']' && text[at] != ';'; ++at) {
    if (text[at] == from) begin = at + 1;
  }
  return {text + begin, at - begin};
}

// "top_k" of &Config::top_k: the compiler's text has "= &weft::Config::top_k" and an end.
template <auto kMember>
constexpr Name member_name() {
  constexpr u64 kLength = sizeof(__PRETTY_FUNCTION__);
  constexpr const char (&kText)[kLength] = __PRETTY_FUNCTION__;
  u64 first = 0;
  while (kText[first] != '&') ++first;
  return up_to_end(kText, first, ':');
}

// "weft::Layout" of Layout.
template <class Type>
constexpr Name type_name() {
  constexpr u64 kLength = sizeof(__PRETTY_FUNCTION__);
  constexpr const char (&kText)[kLength] = __PRETTY_FUNCTION__;
  u64 first = 0;
  while (kText[first] != '=') ++first;
  return up_to_end(kText, first + 2, '=');
}

// Converts to the type of any field.
struct AnyValue {
  template <class Type>
  constexpr operator Type() const;  // NOLINT(google-explicit-constructor): that is what it is for
};

// Fields of a plain struct: as many values as it can be made of.
template <class Config, class... Values>
constexpr u64 count() {
  if constexpr (requires { Config{Values{}..., AnyValue{}}; }) {
    return count<Config, Values..., AnyValue>();
  } else {
    return sizeof...(Values);
  }
}

template <auto... kMembers>
struct List {
  static constexpr u64 kCount = sizeof...(kMembers);

  // `visit.operator()<member>()` for each, in the order of declaration.
  template <class Visit>
  static constexpr void each(Visit visit) {
    (visit.template operator()<kMembers>(), ...);
  }

  // `visit(name, value)` for each.
  template <class Config, class Visit>
  static constexpr void walk(const Config& config, Visit visit) {
    (visit(member_name<kMembers>(), config.*kMembers), ...);
  }
};

template <class Config>
struct Of;

template <>
struct Of<DispatchKernelConfig> {
  using C = DispatchKernelConfig;
  using All =
      List<&C::num_ranks, &C::num_experts, &C::top_k, &C::num_blocks, &C::row_bytes, &C::scale_row_bytes, &C::hidden,
           &C::num_stages, &C::num_fan_stages, &C::num_groups, &C::num_quantize_warps, &C::dtype, &C::quantize,
           &C::layout, &C::topk_is_int64, &C::is_cached, &C::is_spread, &C::tells_counts, &C::route, &C::node_ranks>;
};

template <>
struct Of<CombineKernelConfig> {
  using C = CombineKernelConfig;
  using All = List<&C::num_ranks, &C::num_blocks, &C::top_k, &C::hidden, &C::chunk, &C::slot_chunks, &C::reduce_slots,
                   &C::reduce_rings, &C::push_slots, &C::sum_warps, &C::dtype, &C::layout, &C::wire_is_fp8,
                   &C::has_side, &C::adds_side, &C::route, &C::order, &C::node_ranks>;
};

template <>
struct Of<SmallDispatchKernelConfig> {
  using C = SmallDispatchKernelConfig;
  using All = List<&C::num_ranks, &C::num_experts, &C::top_k, &C::num_blocks, &C::row_bytes, &C::scale_row_bytes,
                   &C::scale_word_bytes, &C::hidden, &C::dtype, &C::quantize, &C::layout, &C::topk_is_int64,
                   &C::is_cached, &C::sends, &C::receives, &C::tells_counts, &C::route, &C::node_ranks>;
};

template <>
struct Of<SmallCombineKernelConfig> {
  using C = SmallCombineKernelConfig;
  using All = List<&C::num_ranks, &C::top_k, &C::hidden, &C::dtype, &C::layout, &C::wire_is_fp8, &C::has_side,
                   &C::adds_side, &C::sends, &C::receives, &C::order, &C::route, &C::node_ranks>;
};

template <>
struct Of<Order> {
  using C = Order;
  using All = List<&C::contribution, &C::within, &C::bias, &C::reduction, &C::sum_domain, &C::sum_is_fp8>;
};

// A field that is a struct of fields itself: whoever walks goes on in it.
template <class Value>
concept IsStruct = requires { typename Of<Value>::All; };

}  // namespace fields

// `visit(name, value)` for each field of a configuration.
template <class Config, class Visit>
constexpr void walk_fields(const Config& config, Visit visit) {
  static_assert(fields::count<Config>() == fields::Of<Config>::All::kCount,
                "a field of this configuration is missing in config/fields.h");
  fields::Of<Config>::All::walk(config, visit);
}

}  // namespace weft
