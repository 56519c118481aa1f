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

// A small batch -> number of rows (exact sizes; else -1), Routing. `wanted`: what a Routing has, in its order, which is made
// here, of the most rows; rows and scales are the caller's. None: no room for it, or a graph is recorded; nothing has begun.
std::optional<std::pair<i64, Routing>> dispatch_small(Window& window, DispatchArgs& args, const Together& wanted,
                                                      u64 stream, i64 num_tokens, u64 x, u64 scales, u64 topk_idx,
                                                      u64 topk_weights, u64 out_x, u64 out_scales) {
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
  return std::pair{num_rows, Routing{.sizes = std::move(made[0]),
                                     .send_plan = std::move(made[1]),
                                     .recv_plan = std::move(made[2]),
                                     .topk_weights = std::move(made[3]),
                                     .topk_idx = std::move(made[4])}};
}

}  // namespace

void bind_nvlink_calls(nb::module_& m, nb::class_<Window, CallWindow>& window) {
  const nb::class_<Together> opaque(m, "GpuTogether");  // Python hands it back as it is
  window.def("together", &together, "wanted"_a)
      .def("dispatch_small", &dispatch_small, "args"_a, "wanted"_a, "stream"_a, "num_tokens"_a, "x"_a, "scales"_a,
           "topk_idx"_a, "topk_weights"_a, "out_x"_a, "out_scales"_a);
}

}  // namespace weft::bindings
