// Makes calls that are known: what weft/call/runner.py does around a native call, where nothing unusual is in the way.
#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <memory>

#include "bindings/call_parts.h"
#include "bindings/exchange_api.h"

namespace weft::bindings {

// Of a plan: how its calls are made, read once. Plans do not change after they were learnt.
struct Way {
  enum class Kind { kFirst, kSmall, kAgain, kSum };  // in the order of `works`
  Kind kind = Kind::kFirst;
  nanobind::object plan, window, call, lead, strides, shapes, memory, data_dtype, scale_dtype, spec;
  const DispatchSpec* dispatch = nullptr;  // `spec`, of a dispatch
  const CombineSpec* combine = nullptr;    // of a combine
  u64 overflow = 0;
  i64 room = 0, hidden = 0, capacity = 0;
  bool waits = false, is_small = false, weighted = false, tells_counts = false, no_scale_columns = false;
};

// What differs from call to call.
struct Given {
  i64 num_tokens = 0;
  std::array<u64, 4> places{};      // of its tensors, as plans have them
  nanobind::handle handle, fields;  // of a call with a handle: that, and its fields
  nanobind::handle y;               // of a combine
  i64 num_values = 0;               // of a combine: of y
  u64 owner_weights = 0;            // of a combine: their address
  u64 owner_ids = 0;                // likewise
  bool owner_ids_are_int64 = false;
  nanobind::handle out;  // of a combine: where its sum goes; null: to a tensor that is made
  u64 out_at = 0;
};

class CallMaker {
 public:
  // `calls`: the Runner; `of`: what else is taken from Python (weft/call/eager.py).
  CallMaker(nanobind::handle calls, const ExchangeApi* api, const nanobind::dict& of);

  // Neither a dispatch mode nor a transform of torch.func is active, and nobody records routing.
  bool stands_alone() const;
  // Null: Runner.run makes the calls of this plan.
  std::shared_ptr<const Way> way_of(nanobind::handle plan) const;
  // The result for the caller; null: Runner.run has to make the call, nothing was done.
  nanobind::object make(const Way& way, const Given& given) const;

  // Borrowed. Null: it is no handle, or none of this object and its present token.
  PyObject* fields_of(nanobind::handle handle) const;
  // What calls with a handle go by; None for what it has not.
  struct Handled {
    nanobind::object call, lead, num_tokens;
  };
  static Handled handled(nanobind::handle fields);
  bool is_quantized(nanobind::handle x) const { return x.type().ptr() == quantized_type_.ptr(); }
  bool is_tensor(nanobind::handle value) const { return value.type().ptr() == tensor_type_.ptr(); }
  nanobind::handle kind_of_combine(bool has_weights) const { return has_weights ? weighted_type_ : handle_type_; }
  i64 top_k() const;

 private:
  struct Made {  // by a dispatch
    nanobind::object rows = nanobind::none(), scales = nanobind::none(), handle = nanobind::none();
    u64 rows_at = 0, scales_at = 0;
  };

  bool is_ready(const Way& way) const;
  bool is_this_epoch() const;
  u64 stream_of(const Way& way, nanobind::object& event) const;
  void count_sent(const CallWindow& window, const DispatchResult& found) const;
  nanobind::object counts_of(const CallWindow& window, const DispatchResult& found) const;
  Made make_first(const Way& way, const Given& given, CallWindow& window, u64 stream) const;
  Made make_small(const Way& way, const Given& given, CallWindow& window, u64 stream) const;
  Made make_again(const Way& way, const Given& given, CallWindow& window, const Routing& routing, u64 stream) const;
  nanobind::object make_sum(const Way& way, const Given& given, CallWindow& window, const Routing& routing,
                            u64 stream) const;
  static Made made_by(const nanobind::object& found);
  nanobind::object new_handle(const Way& way, const Given& given, i64 num_rows, const nanobind::object& made) const;
  nanobind::object quantized(const Way& way, const nanobind::object& rows, const nanobind::object& scales) const;
  void fill_ordinary(const Way& way, const nanobind::object& lead, Made& made) const;
  static void set_plan(const Way& way, const Given& given);
  u64 address(const nanobind::object& tensor) const;

  const ExchangeApi* api_;
  nanobind::object calls_, calls_fields_, comm_fields_, handle_type_, weighted_type_, dispatched_type_, quantized_type_,
      event_type_, process_type_, tensor_type_, plan_type_, torch_c_, new_object_, num_modes_, transforms_,
      is_profiled_, recorders_, quantized_of_;
  nanobind::tuple works_;
};

}  // namespace weft::bindings
