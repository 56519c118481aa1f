// Memory for a call's results, and the calls that are made most often in one go each.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/arrays.h"
#include "bindings/gil.h"
#include "bindings/nvlink.h"
#include "engine/nvlink/window.h"
#include "weft/layout/checked.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

using nvlink::Window;

// Numbers of Python's side beyond those of Dtype.
constexpr int kInt32 = 4, kInt64 = 5;

Array array_of(const Window& window, const std::vector<i64>& shape, int dtype) {
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

nb::object empty(Window& window, const std::vector<i64>& shape, int dtype, u64 stream) {
  Array array = array_of(window, shape, dtype);
  std::optional<Block> block = window.reserve(bytes_of(array), stream);
  if (!block) return nb::none();
  array.block = std::move(*block);
  return to_ndarray(array);
}

// Small tensors (shape, dtype) in one block: torch's own take longer to make.
struct Together {
  std::vector<Array> arrays;  // without memory
  std::vector<u64> begins;
  u64 num_bytes = 0;
};

Together together(const Window& window, const std::vector<std::pair<std::vector<i64>, int>>& wanted) {
  Together all;
  CheckedSize end;
  for (const auto& [shape, dtype] : wanted) {
    all.arrays.push_back(array_of(window, shape, dtype));
    all.begins.push_back(align_up(end.value, Heap::kAlignment));
    end = CheckedSize(all.begins.back()) + CheckedSize(bytes_of(all.arrays.back()));
    if (!end.ok) throw_invalid_argument("shapes: their bytes must be within 64 bits");
  }
  all.num_bytes = end.value;
  return all;
}

// The arrays in memory of the heap; none without room, or while `stream` records a graph, whose blocks would be taken for good.
std::vector<Array> reserve_together(Window& window, const Together& wanted, u64 stream) {
  const std::optional<Block> block = window.reserve(wanted.num_bytes, stream, Window::OnCapture::kNothing);
  if (!block) return {};
  std::vector<Array> arrays = wanted.arrays;
  for (size_t idx = 0; idx < arrays.size(); ++idx) {
    arrays[idx].block = *block;
    arrays[idx].block.data += wanted.begins[idx];
  }
  return arrays;
}

nb::object empty_together(Window& window, const std::vector<std::pair<std::vector<i64>, int>>& wanted, u64 stream,
                          nb::handle from_dlpack) {
  nb::list made;
  for (const Array& array : reserve_together(window, together(window, wanted), stream)) {
    made.append(to_tensor(array, from_dlpack));
  }
  return nb::len(made) > 0 ? nb::object(made) : nb::none();
}

// The calls that are made most often, in one go: `args` says what is equal in all calls of a kind, the rest differs from call to
// call. To make the arguments anew, or to set one field from Python, takes a good part of a launch's time.

// What a dispatch makes beside its rows: later calls take addresses, and what nobody asks for need not become a tensor.
struct Routing {
  Array sizes, send_plan, recv_plan, topk_weights, topk_idx;
};

u64 address_of(const Array& array) { return reinterpret_cast<u64>(array.block.data); }

nvlink::DispatchResult dispatch_unlocked(Window& window, const nvlink::DispatchArgs& args) {
  const ReleasedGil release;
  return window.dispatch(args, signal_poll());
}

nb::object dispatch_first(Window& window, nvlink::DispatchArgs& args, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 topk_idx, u64 topk_weights, nb::handle from_dlpack) {
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.x = x;
  args.scales = scales;
  args.topk_idx = topk_idx;
  args.topk_weights = topk_weights;
  nvlink::DispatchResult made = dispatch_unlocked(window, args);
  if (!made.has_begun) return nb::none();
  const auto tensor = [&](const Array& array) { return to_tensor(array, from_dlpack); };
  return nb::make_tuple(made.in_heap, made.result_rows, tensor(made.x), tensor(made.scales),
                        Routing{std::move(made.sizes), std::move(made.send_plan), std::move(made.recv_plan),
                                std::move(made.topk_weights), std::move(made.topk_idx)});
}

nb::object dispatch_again(Window& window, nvlink::DispatchArgs& args, u64 stream, i64 num_tokens, u64 x, u64 scales,
                          u64 counts, u64 send_plan, u64 recv_plan, i64 num_rows, nb::handle from_dlpack) {
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
  const nvlink::DispatchResult result = dispatch_unlocked(window, args);
  return nb::make_tuple(result.in_heap, to_tensor(result.x, from_dlpack), to_tensor(result.scales, from_dlpack));
}

// A small batch -> number of rows (exact sizes; else -1), Routing. `wanted`: what a Routing has, in its order, which is made
// here, of the most rows; rows and scales are the caller's. None: no room for it, or a graph is recorded; nothing has begun.
std::optional<std::pair<i64, Routing>> dispatch_small(Window& window, nvlink::DispatchArgs& args,
                                                      const Together& wanted, u64 stream, i64 num_tokens, u64 x,
                                                      u64 scales, u64 topk_idx, u64 topk_weights, u64 out_x,
                                                      u64 out_scales) {
  std::vector<Array> made = reserve_together(window, wanted, stream);
  if (made.size() != 5) return std::nullopt;
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.x = x;
  args.scales = scales;
  args.topk_idx = topk_idx;
  args.topk_weights = topk_weights;
  args.out_x = out_x;
  args.out_scales = out_scales;
  const u64 counts = address_of(made[0]);
  args.offsets += counts - args.counts;  // the sizes lie together
  args.num_rows_out += counts - args.counts;
  args.counts = counts;
  args.send_plan = address_of(made[1]);
  args.recv_plan = address_of(made[2]);
  args.out_weights = address_of(made[3]);
  args.out_ids = address_of(made[4]);
  const i64 num_rows = dispatch_unlocked(window, args).result_rows;
  if (num_rows >= 0) {
    made[3].shape[0] = num_rows;
    if (args.layout == Layout::kRankMajor) made[4].shape[0] = num_rows;
  }
  return std::pair{num_rows, Routing{std::move(made[0]), std::move(made[1]), std::move(made[2]), std::move(made[3]),
                                     std::move(made[4])}};
}

void combine_rows(Window& window, nvlink::CombineArgs& args, u64 stream, i64 num_tokens, u64 y, i64 num_rows,
                  u64 weights, u64 send_plan, u64 recv_plan, u64 out) {
  args.stream = stream;
  args.num_tokens = num_tokens;
  args.y = y;
  args.num_rows = num_rows;
  args.weights = weights;
  args.send_plan = send_plan;
  args.recv_plan = recv_plan;
  args.out = out;
  const ReleasedGil release;
  window.combine(args, signal_poll());
}

}  // namespace

void bind_nvlink_calls(nb::module_& m, nb::class_<Window>& window) {
  const nb::class_<Together> opaque(m, "GpuTogether");  // Python hands it back as it is
  nb::class_<Routing>(m, "GpuRouting")
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
      .def_prop_ro("send_plan", [](const Routing& routing) { return address_of(routing.send_plan); })
      .def_prop_ro("recv_plan", [](const Routing& routing) { return address_of(routing.recv_plan); })
      .def_prop_ro("topk_weights", [](const Routing& routing) { return address_of(routing.topk_weights); });
  window.def("empty", &empty, "shape"_a, "dtype"_a, "stream"_a)
      .def("empty_together", &empty_together, "wanted"_a, "stream"_a, "from_dlpack"_a)
      .def("dispatch_first", &dispatch_first, "args"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "topk_idx"_a,
           "topk_weights"_a, "from_dlpack"_a)
      .def("dispatch_again", &dispatch_again, "args"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a, "counts"_a,
           "send_plan"_a, "recv_plan"_a, "num_rows"_a, "from_dlpack"_a)
      .def("together", &together, "wanted"_a)
      .def("dispatch_small", &dispatch_small, "args"_a, "wanted"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a,
           "topk_idx"_a, "topk_weights"_a, "out_x"_a, "out_scales"_a)
      .def("combine_rows", &combine_rows, "args"_a, "stream"_a, "num_tokens"_a, "y"_a, "num_rows"_a, "weights"_a,
           "send_plan"_a, "recv_plan"_a, "out"_a);
}

}  // namespace weft::bindings
