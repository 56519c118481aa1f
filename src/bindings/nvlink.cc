// The part of weft._native for GPUs. Addresses and streams are plain numbers.
#include "bindings/nvlink.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "base/clock.h"
#include "bindings/arrays.h"
#include "engine/nvlink/window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace weft::bindings {
namespace {

std::shared_ptr<nvlink::Window> make_window(std::shared_ptr<cpu::Communicator> comm, std::shared_ptr<nvlink::Gpu> gpu,
                                            i32 num_experts, i32 top_k, i64 max_tokens, i64 max_row_bytes,
                                            i32 num_blocks, u64 heap_bytes, double timeout_s) {
  WindowShape shape;
  shape.num_ranks = comm->num_ranks();
  shape.num_experts = num_experts;
  shape.top_k = top_k;
  shape.num_blocks = num_blocks;
  shape.max_tokens = max_tokens;
  shape.max_row_bytes = max_row_bytes;
  const nb::gil_scoped_release release;
  return std::make_shared<nvlink::Window>(std::move(comm), std::move(gpu), shape, heap_bytes,
                                          deadline_after_s(timeout_s), signal_poll());
}

nb::object empty(nvlink::Window& window, const nvlink::Gpu& gpu, i64 num_rows, i64 columns, int dtype) {
  cpu::Array array;
  array.dtype = static_cast<Dtype>(dtype);
  array.shape = {num_rows, columns};
  array.gpu = gpu.index;
  std::optional<cpu::Block> block = window.reserve(static_cast<u64>(num_rows * columns * dtype_bytes(array.dtype)));
  if (!block) return nb::none();
  array.block = std::move(*block);
  return to_ndarray(array);
}

template <class Args>
void bind_dispatch_args(Args& args) {
  using nvlink::DispatchArgs;
  args.def(nb::init<>())
      .def_rw("x", &DispatchArgs::x)
      .def_rw("scales", &DispatchArgs::scales)
      .def_rw("topk_idx", &DispatchArgs::topk_idx)
      .def_rw("topk_weights", &DispatchArgs::topk_weights)
      .def_rw("topk_is_int64", &DispatchArgs::topk_is_int64)
      .def_rw("num_tokens", &DispatchArgs::num_tokens)
      .def_rw("row_bytes", &DispatchArgs::row_bytes)
      .def_rw("scale_row_bytes", &DispatchArgs::scale_row_bytes)
      .def_prop_rw(
          "dtype", [](const DispatchArgs& self) { return static_cast<int>(self.dtype); },
          [](DispatchArgs& self, int dtype) { self.dtype = static_cast<Dtype>(dtype); })
      .def_rw("max_tokens", &DispatchArgs::max_tokens)
      .def_rw("capacity", &DispatchArgs::capacity)
      .def_rw("num_blocks", &DispatchArgs::num_blocks)
      .def_rw("timeout_ns", &DispatchArgs::timeout_ns)
      .def_rw("stream", &DispatchArgs::stream)
      .def_rw("slot", &DispatchArgs::slot)
      .def_rw("row_start", &DispatchArgs::row_start)
      .def_rw("num_rows_to", &DispatchArgs::num_rows_to)
      .def_rw("source_offset", &DispatchArgs::source_offset)
      .def_rw("counts", &DispatchArgs::counts)
      .def_rw("offsets", &DispatchArgs::offsets)
      .def_rw("num_rows", &DispatchArgs::num_rows);
}

template <class Args>
void bind_combine_args(Args& args) {
  using nvlink::CombineArgs;
  args.def(nb::init<>())
      .def_rw("y", &CombineArgs::y)
      .def_rw("num_rows", &CombineArgs::num_rows)
      .def_prop_rw(
          "dtype", [](const CombineArgs& self) { return static_cast<int>(self.dtype); },
          [](CombineArgs& self, int dtype) { self.dtype = static_cast<Dtype>(dtype); })
      .def_rw("hidden", &CombineArgs::hidden)
      .def_rw("num_tokens", &CombineArgs::num_tokens)
      .def_rw("slot", &CombineArgs::slot)
      .def_rw("row_start", &CombineArgs::row_start)
      .def_rw("out", &CombineArgs::out)
      .def_rw("bias", &CombineArgs::bias)
      .def_rw("bias_is_2d", &CombineArgs::bias_is_2d)
      .def_rw("bias_is_fp32", &CombineArgs::bias_is_fp32)
      .def_rw("num_blocks", &CombineArgs::num_blocks)
      .def_rw("timeout_ns", &CombineArgs::timeout_ns)
      .def_rw("stream", &CombineArgs::stream);
}

}  // namespace

void bind_nvlink(nb::module_& m) {
  using Guard = nb::call_guard<nb::gil_scoped_release>;
  using nvlink::DispatchResult;
  nb::class_<nvlink::Gpu>(m, "Gpu").def(
      nb::new_([](int index, std::string nvrtc, std::string include, std::string cache) {
        const nb::gil_scoped_release release;
        return std::make_shared<nvlink::Gpu>(index, jit::CompilerPaths{nvrtc, include, cache});
      }),
      "index"_a, nb::kw_only(), "nvrtc"_a, "include"_a, "cache"_a);
  nb::class_<nvlink::DispatchArgs> dispatch_args(m, "GpuDispatchArgs");
  bind_dispatch_args(dispatch_args);
  nb::class_<nvlink::CombineArgs> combine_args(m, "GpuCombineArgs");
  bind_combine_args(combine_args);
  nb::class_<DispatchResult>(m, "GpuDispatchResult")
      .def_prop_ro("x", [](const DispatchResult& result) { return to_ndarray(result.x); })
      .def_prop_ro("scales", [](const DispatchResult& result) { return to_ndarray(result.scales); })
      .def_prop_ro("topk_idx", [](const DispatchResult& result) { return to_ndarray(result.topk_idx); })
      .def_prop_ro("topk_weights", [](const DispatchResult& result) { return to_ndarray(result.topk_weights); })
      .def_ro("num_rows", &DispatchResult::num_rows);
  nb::class_<nvlink::Window>(m, "GpuWindow")
      .def(nb::new_(&make_window), "comm"_a, "gpu"_a, nb::kw_only(), "num_experts"_a, "top_k"_a, "max_tokens"_a,
           "max_row_bytes"_a, "num_blocks"_a, "heap_bytes"_a, "timeout_s"_a = 100.0)
      .def(
          "dispatch",
          [](nvlink::Window& window, const nvlink::DispatchArgs& args) { return window.dispatch(args, signal_poll()); },
          "args"_a, Guard())
      .def(
          "combine",
          [](nvlink::Window& window, const nvlink::CombineArgs& args) { window.combine(args, signal_poll()); },
          "args"_a, Guard())
      .def("empty", &empty, "gpu"_a, "num_rows"_a, "cols"_a, "dtype"_a)
      .def("check", &nvlink::Window::check, Guard())
      .def("close", &nvlink::Window::close, Guard());
}

}  // namespace weft::bindings
