#include "engine/nvlink/place_rows.h"

#include <algorithm>
#include <cmath>

#include "engine/nvlink/node_rail.h"
#include "engine/nvlink/window.h"
#include "weft/kernels/place_rows_arguments.h"

namespace weft::nvlink {
namespace {

const char* const kPlaceSource =
    "#include \"weft/kernels/place_rows.cuh\"\n"
    "namespace weft {\n"
    "__global__ void __launch_bounds__(weft::kernels::kPlaceThreads, 1)\n"
    "    place_rows_kernel(const __grid_constant__ weft::kernels::PlaceKernelArgs args) {\n"
    "  weft::ptx::wait_for_kernel_before();\n"
    "  weft::kernels::place_rows(args);\n"
    "}\n"
    "}  // namespace weft\n";

// Bytes in a microsecond: the wire, and bulk stores of an SM.
constexpr double kWire = 345e3, kStore = 50e3;
// Where two launches were measured to be faster (docs/decisions/0036).
constexpr i32 kMostSpreadRanks = 2, kMostSpreadBlocks = 32;

}  // namespace

bool is_spread(const GpuWindowShape& shape, const DispatchSpec& spec) {
  if (spec.layout == Layout::kRankMajor || spec.is_small) return false;
  if (has_nodes(shape)) return true;
  if (spec.spread_blocks == 0) return false;
  if (spec.spread_blocks > 0) return true;
  return shape.num_ranks <= kMostSpreadRanks && spec.num_blocks <= kMostSpreadBlocks &&
         spec.quantize == Quantize::kNone;
}

// Of uniform routing, in rows for each of a rank's tokens.
i32 num_straight(const GpuWindowShape& shape, const DispatchSpec& spec) {
  const double ranks = shape.num_ranks, own = 1 - std::pow(1 - 1 / ranks, shape.top_k), wire = (ranks - 1) * own;
  const double more = shape.top_k / ranks - own;
  if (more <= 0) return 0;
  const double spare = wire / kWire * kStore * spec.num_blocks - wire - own;
  return static_cast<i32>(kernels::kStraightOf * std::clamp(spare / more, 0.0, 1.0));
}

const Kernel& place_rows_kernel(Gpu& gpu) {
  const cuda::RelaxedCaptureScope relaxed;
  return gpu.kernels->prepare(kPlaceSource, kernels::kPlaceThreads, 0);
}

std::string render_place_rows() { return kPlaceSource; }

// Ranks on one GPU must not load a kernel while others wait.
void Window::prepare_place_rows() {
  if (comm_->is_local()) place_rows_kernel(*gpu_);
}

}  // namespace weft::nvlink
