#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "engine/window.h"

namespace weft::bindings {

const Poll& signal_poll();  // raises what Python's signal handlers raise (Ctrl-C)

// Without memory. `dtype`: a number of Python's side, of Dtype or an integer.
Array array_of(const CallWindow& window, const std::vector<i64>& shape, int dtype);
u64 bytes_of(const Array& array);

// What a dispatch makes beside its rows: later calls take addresses, and what nobody asks for need not become a tensor.
struct Routing {
  Array sizes, send_plan, recv_plan, topk_weights, topk_idx;
  i64 num_bad_ids = 0, first_bad_id = 0, first_bad_at = 0;  // cpu, as in DispatchResult
  i64 rows_sent = 0, bytes_sent = 0;
};

u64 address_of(const Array& array);
DispatchResult dispatch_unlocked(CallWindow& window, const DispatchArgs& args);  // without the GIL

// The arguments and results of calls, and the class that windows of both engines are.
void bind_calls(nanobind::module_& m);

}  // namespace weft::bindings
