// The calls of a window of either engine: their arguments, their results, and the class that all windows are.
#include "bindings/calls.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "base/status.h"
#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "weft/layout/checked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

// An enum as the plain number that Python's side has.
template <class Args, class Base, class Enum>
void def_number(nb::class_<Args>& args, const char* name, Enum Base::* field) {
  args.def_prop_rw(
      name, [field](const Args& self) { return static_cast<int>(self.*field); },
      [field](Args& self, int value) { self.*field = static_cast<Enum>(value); });
}

template <class Args>
void bind_call_args(nb::class_<Args>& args) {
  def_number<Args, CallArgs>(args, "layout", &CallArgs::layout);
  args.def(nb::init<>())
      .def_rw("alignment", &Args::alignment)
      .def_rw("capacity", &Args::capacity)
      .def_rw("max_tokens", &Args::max_tokens)
      .def_rw("hidden", &Args::hidden)
      .def_rw("num_tokens", &Args::num_tokens)
      .def_rw("num_blocks", &Args::num_blocks)
      .def_rw("object", &Args::object)
      .def_rw("timeout_ns", &Args::timeout_ns)
      .def_rw("stream", &Args::stream)
      .def_rw("is_small", &Args::is_small)
      .def_rw("sends", &Args::sends)
      .def_rw("receives", &Args::receives);
}

CallArgs call_args(int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden, i64 num_tokens, i32 num_blocks,
                   u64 timeout_ns, u64 stream, bool is_small) {
  return {.layout = static_cast<Layout>(layout),
          .alignment = alignment,
          .capacity = capacity,
          .max_tokens = max_tokens,
          .hidden = hidden,
          .num_tokens = num_tokens,
          .num_blocks = num_blocks,
          .timeout_ns = timeout_ns,
          .stream = stream,
          .is_small = is_small};
}

// What every call has comes in one go: to set a field from Python takes as long as to pass ten numbers.
void bind_dispatch_args(nb::module_& m) {
  using Args = DispatchArgs;
  nb::class_<Args> args(m, "DispatchArgs");
  bind_call_args(args);
  args.def("__init__", [](Args* args, int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden,
                          i64 num_tokens, i32 num_blocks, u64 timeout_ns, u64 stream, bool is_small, u64 x,
                          i64 row_bytes, int dtype, int quantize) {
    new (args) Args();
    static_cast<CallArgs&>(*args) = call_args(layout, alignment, capacity, max_tokens, hidden, num_tokens, num_blocks,
                                              timeout_ns, stream, is_small);
    args->x = x;
    args->row_bytes = row_bytes;
    args->dtype = static_cast<Dtype>(dtype);
    args->quantize = static_cast<Quantize>(quantize);
  });
  def_number<Args, Args>(args, "dtype", &Args::dtype);
  def_number<Args, Args>(args, "quantize", &Args::quantize);
  args.def_rw("x", &Args::x)
      .def_rw("row_bytes", &Args::row_bytes)
      .def_rw("scales", &Args::scales)
      .def_rw("scale_row_bytes", &Args::scale_row_bytes)
      .def_rw("scale_stride", &Args::scale_stride)
      .def_rw("scales_are_fp32", &Args::scales_are_fp32)
      .def_rw("topk_idx", &Args::topk_idx)
      .def_rw("topk_is_int64", &Args::topk_is_int64)
      .def_rw("topk_weights", &Args::topk_weights)
      .def_rw("cached", &Args::cached)
      .def_rw("send_plan", &Args::send_plan)
      .def_rw("recv_plan", &Args::recv_plan)
      .def_rw("recv_plan_len", &Args::recv_plan_len)
      .def_rw("num_rows", &Args::num_rows)
      .def_rw("counts", &Args::counts)
      .def_rw("offsets", &Args::offsets)
      .def_rw("num_rows_out", &Args::num_rows_out)
      .def_rw("overflow", &Args::overflow)
      .def_rw("zeroes_holes", &Args::zeroes_holes)
      .def_rw("spread_blocks", &Args::spread_blocks)
      .def_rw("makes_send_plan", &Args::makes_send_plan)
      .def_rw("room", &Args::room)
      .def_rw("scale_word_bytes", &Args::scale_word_bytes)
      .def_rw("out_x", &Args::out_x)
      .def_rw("out_scales", &Args::out_scales)
      .def_rw("out_ids", &Args::out_ids)
      .def_rw("out_weights", &Args::out_weights);
}

void bind_combine_args(nb::module_& m) {
  using Args = CombineArgs;
  nb::class_<Args> args(m, "CombineArgs");
  bind_call_args(args);
  args.def("__init__",
           [](Args* args, int layout, i64 alignment, i64 capacity, i64 max_tokens, i64 hidden, i64 num_tokens,
              i32 num_blocks, u64 timeout_ns, u64 stream, bool is_small, u64 y, i64 num_rows, int dtype, u64 weights,
              u64 send_plan, u64 recv_plan, u64 out, bool wire_is_fp8) {
             new (args) Args();
             static_cast<CallArgs&>(*args) = call_args(layout, alignment, capacity, max_tokens, hidden, num_tokens,
                                                       num_blocks, timeout_ns, stream, is_small);
             args->y = y;
             args->num_rows = num_rows;
             args->dtype = static_cast<Dtype>(dtype);
             args->weights = weights;
             args->send_plan = send_plan;
             args->recv_plan = recv_plan;
             args->out = out;
             args->wire_is_fp8 = wire_is_fp8;
           });
  def_number<Args, Args>(args, "dtype", &Args::dtype);
  def_number<Args, Args>(args, "order", &Args::order);
  args.def_rw("y", &Args::y)
      .def_rw("owner_weights", &Args::owner_weights)
      .def_rw("num_rows", &Args::num_rows)
      .def_rw("weights", &Args::weights)
      .def_rw("side", &Args::side)
      .def_rw("has_side", &Args::has_side)
      .def_rw("bias", &Args::bias)
      .def_rw("bias_is_2d", &Args::bias_is_2d)
      .def_rw("bias_is_fp32", &Args::bias_is_fp32)
      .def_rw("out", &Args::out)
      .def_rw("side_out", &Args::side_out)
      .def_rw("send_plan", &Args::send_plan)
      .def_rw("recv_plan", &Args::recv_plan)
      .def_rw("recv_plan_len", &Args::recv_plan_len)
      .def_rw("wire_is_fp8", &Args::wire_is_fp8)
      .def_rw("stage_blocks", &Args::stage_blocks);
}

void bind_result(nb::module_& m) {
  nb::class_<DispatchResult>(m, "DispatchResult")
      .def_prop_ro("x", [](const DispatchResult& result) { return to_ndarray(result.x); })
      .def_prop_ro("scales", [](const DispatchResult& result) { return to_ndarray(result.scales); })
      .def_prop_ro("topk_idx", [](const DispatchResult& result) { return to_ndarray(result.topk_idx); })
      .def_prop_ro("topk_weights", [](const DispatchResult& result) { return to_ndarray(result.topk_weights); })
      .def_prop_ro("recv_plan", [](const DispatchResult& result) { return to_ndarray(result.recv_plan); })
      .def_ro("num_rows", &DispatchResult::num_rows)
      .def_ro("num_bad_ids", &DispatchResult::num_bad_ids)
      .def_ro("first_bad_id", &DispatchResult::first_bad_id)
      .def_ro("first_bad_at", &DispatchResult::first_bad_at)
      .def_ro("has_begun", &DispatchResult::has_begun)
      .def_ro("in_heap", &DispatchResult::in_heap)
      .def_ro("result_rows", &DispatchResult::result_rows)
      .def_ro("rows_sent", &DispatchResult::rows_sent)
      .def_ro("bytes_sent", &DispatchResult::bytes_sent);
}

// The calls that are made most often, in one go: `args` says what is equal in all calls of a kind, the rest differs from call to
// call. To make the arguments anew, or to set one field from Python, takes a good part of a launch's time.

// Without room in the heap rows of GPUs wait for the caller's memory; the cpu engine finds other memory itself.
bool is_made(const CallWindow& window, const DispatchResult& result) {
  return result.in_heap || window.gpu_index() < 0;
}

nb::object dispatch_first(CallWindow& window, DispatchArgs& args, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 topk_idx, u64 topk_weights, nb::handle from_dlpack) {
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.x = x;
  args.scales = scales;
  args.topk_idx = topk_idx;
  args.topk_weights = topk_weights;
  DispatchResult made = dispatch_unlocked(window, args);
  if (!made.has_begun) return nb::none();
  const auto tensor = [&](const Array& array) { return to_tensor(array, from_dlpack); };
  Routing routing{.sizes = std::move(made.sizes),
                  .send_plan = std::move(made.send_plan),
                  .recv_plan = std::move(made.recv_plan),
                  .topk_weights = std::move(made.topk_weights),
                  .topk_idx = std::move(made.topk_idx),
                  .num_bad_ids = made.num_bad_ids,
                  .first_bad_id = made.first_bad_id,
                  .first_bad_at = made.first_bad_at,
                  .rows_sent = made.rows_sent,
                  .bytes_sent = made.bytes_sent};
  return nb::make_tuple(is_made(window, made), made.result_rows, tensor(made.x), tensor(made.scales),
                        std::move(routing));
}

nb::object dispatch_again(CallWindow& window, DispatchArgs& args, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 counts, u64 send_plan, u64 recv_plan, i64 recv_plan_len, i64 num_rows, u64 out_x,
                          u64 out_scales, nb::handle from_dlpack) {
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.num_rows = num_rows;
  args.x = x;
  args.scales = scales;
  args.offsets += counts - args.counts;  // the sizes lie together
  args.num_rows_out += counts - args.counts;
  args.counts = counts;
  args.send_plan = send_plan;
  args.recv_plan = recv_plan;
  args.recv_plan_len = recv_plan_len;
  args.room = num_rows;
  args.out_x = out_x;
  args.out_scales = out_scales;
  const DispatchResult result = dispatch_unlocked(window, args);
  return nb::make_tuple(is_made(window, result), to_tensor(result.x, from_dlpack),
                        to_tensor(result.scales, from_dlpack), result.rows_sent, result.bytes_sent);
}

void combine_rows(CallWindow& window, CombineArgs& args, u64 stream, i64 num_tokens, u64 y, i64 num_rows, u64 weights,
                  u64 send_plan, u64 recv_plan, i64 recv_plan_len, u64 out, u64 bias, u64 side, u64 side_out) {
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.y = y;
  args.num_rows = num_rows;
  args.weights = weights;
  args.send_plan = send_plan;
  args.recv_plan = recv_plan;
  args.recv_plan_len = recv_plan_len;
  args.out = out;
  args.bias = bias;
  args.side = side;
  args.side_out = side_out;
  const ReleasedGil release;
  window.combine(args, signal_poll());
}

void bind_routing(nb::module_& m) {
  nb::class_<Routing>(m, "Routing")
      .def("tensor",
           [](const Routing& routing, const std::string& name, nb::handle from_dlpack) {
             const std::pair<const char*, const Array&> arrays[] = {{"sizes", routing.sizes},
                                                                    {"send_plan", routing.send_plan},
                                                                    {"recv_plan", routing.recv_plan},
                                                                    {"topk_weights", routing.topk_weights},
                                                                    {"topk_idx", routing.topk_idx}};
             for (const auto& [known, array] : arrays) {
               if (name == known) return to_tensor(array, from_dlpack);
             }
             throw_internal("a routing has no " + name);
           })
      .def_prop_ro("places",
                   [](const Routing& routing) {
                     const std::vector<i64>& plan = routing.recv_plan.shape;
                     return nb::make_tuple(address_of(routing.sizes), address_of(routing.send_plan),
                                           address_of(routing.recv_plan), plan.empty() ? i64{0} : plan[0],
                                           address_of(routing.topk_weights));
                   })
      .def_ro("num_bad_ids", &Routing::num_bad_ids)
      .def_ro("first_bad_id", &Routing::first_bad_id)
      .def_ro("first_bad_at", &Routing::first_bad_at)
      .def_ro("rows_sent", &Routing::rows_sent)
      .def_ro("bytes_sent", &Routing::bytes_sent);
}

nb::object empty(CallWindow& window, const std::vector<i64>& shape, int dtype, u64 stream) {
  Array array = array_of(window, shape, dtype);
  std::optional<Block> block = window.reserve(bytes_of(array), stream);
  if (!block) return nb::none();
  array.block = std::move(*block);
  return to_ndarray(array);
}

}  // namespace

// Numbers of Python's side beyond those of Dtype.
constexpr int kInt32 = 4, kInt64 = 5;

Array array_of(const CallWindow& window, const std::vector<i64>& shape, int dtype) {
  Array array;
  array.is_integer = dtype >= kInt32;
  array.is_int64 = dtype == kInt64;
  if (!array.is_integer) array.dtype = static_cast<Dtype>(dtype);
  array.shape = shape;
  array.gpu = window.gpu_index();
  return array;
}

u64 bytes_of(const Array& array) {
  const i64 item_bytes = array.is_integer ? (array.is_int64 ? 8 : 4) : dtype_bytes(array.dtype);
  CheckedSize num_bytes(static_cast<u64>(item_bytes));
  bool is_sound = true;
  for (i64 length : array.shape) {
    is_sound = is_sound && length >= 0;
    num_bytes = num_bytes * static_cast<u64>(length);
  }
  if (!is_sound || !num_bytes.ok)
    throw_invalid_argument("shape: lengths must be 0 or more, their product within 64 bits");
  return num_bytes.value;
}

u64 address_of(const Array& array) { return reinterpret_cast<u64>(array.block.data); }

DispatchResult dispatch_unlocked(CallWindow& window, const DispatchArgs& args) {
  const ReleasedGil release;
  return window.dispatch(args, signal_poll());
}

void bind_calls(nb::module_& m) {
  using Guard = nb::call_guard<ReleasedGil>;
  bind_dispatch_args(m);
  bind_combine_args(m);
  bind_result(m);
  bind_routing(m);
  nb::class_<CallWindow>(m, "Window")
      .def(
          "dispatch", [](CallWindow& window, const DispatchArgs& args) { return window.dispatch(args, signal_poll()); },
          "args"_a, Guard())
      .def(
          "combine", [](CallWindow& window, const CombineArgs& args) { window.combine(args, signal_poll()); }, "args"_a,
          Guard())
      .def("dispatch_first", &dispatch_first, "args"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "topk_idx"_a,
           "topk_weights"_a, "from_dlpack"_a)
      .def("dispatch_again", &dispatch_again, "args"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "counts"_a,
           "send_plan"_a, "recv_plan"_a, "recv_plan_len"_a, "num_rows"_a, "out_x"_a, "out_scales"_a, "from_dlpack"_a)
      .def("combine_rows", &combine_rows, "args"_a, "stream"_a, "num_tokens"_a, "y"_a, "num_rows"_a, "weights"_a,
           "send_plan"_a, "recv_plan"_a, "recv_plan_len"_a, "out"_a, "bias"_a, "side"_a, "side_out"_a)
      .def("empty", &empty, "shape"_a, "dtype"_a, "stream"_a = 0)
      .def_prop_ro("id", &CallWindow::id)
      .def("close", &CallWindow::close, Guard());
}

}  // namespace weft::bindings
