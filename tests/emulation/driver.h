// The main function of an emulated kernel: included behind the source that the library renders, which has kConfig and
// the kernel. Runs launches of one rank one after the other, all blocks of a launch at once, each in a process of its own.
//
//   KERNEL MEMORY_FD NUM_BYTES SHARED_FILE SEED FIELDS_FILE...
//
// MEMORY_FD: the memory of all ranks, mapped at kGlobalBase. SHARED_FILE: a list of __shared__ variables, see emulator.cc. A
// FIELDS_FILE for each launch: "name value" lines: the kernel's arguments, with addresses as numbers, and what the host copies
// when the kernel has ended: copyN_to, copyN_from, copyN_bytes.
#pragma once

#include <new>

#include "fields.h"
#include "weft/config/kernel.h"
#include "weft/config/small_dispatch_kernel.h"
#include "weft/config/small_kernel.h"
#include "weft/kernels/combine/args.h"
#include "weft/kernels/dispatch/args.h"
#include "weft/kernels/gradients_arguments.h"
#include "weft/kernels/place_rows_arguments.h"
#include "weft/kernels/small/combine_args.h"
#include "weft/kernels/small/dispatch_args.h"
#include "weft/kernels/stage_rows_arguments.h"
#include "weft/kernels/unload_arguments.h"

namespace emulation {

using weft::u16;

inline weft::GpuWindowShape take_shape(Fields& fields) {
  weft::GpuWindowShape shape;
  fields.take("num_ranks", shape.num_ranks);
  fields.take("num_experts", shape.num_experts);
  fields.take("top_k", shape.top_k);
  fields.take("window_blocks", shape.num_blocks);
  fields.take("window_tokens", shape.max_tokens);
  fields.take("landing_row_bytes", shape.landing_row_bytes);
  fields.take("small_tokens", shape.small_tokens);
  return shape;
}

inline void take_view(Fields& fields, weft::transport::WindowView& view) {
  const weft::GpuWindowShape shape = take_shape(fields);
  view.layout = weft::GpuWindowLayout::make(shape);
  if (!view.layout.ok) fail("no such window");
  view.num_ranks = shape.num_ranks;
  fields.take("rank", view.rank);
  fields.take("host", view.host);
  for (i32 rank = 0; rank < shape.num_ranks; ++rank) {
    fields.take("control", rank, view.control[rank]);
    fields.take("heap", rank, view.heap[rank]);
    fields.take("heap_bytes", rank, view.heap_bytes[rank]);
  }
}

inline void take(Fields& fields, weft::kernels::DispatchKernelArgs& args) {
  take_view(fields, args.view);
  fields.take("print", args.print);
  fields.take("object", args.object);
  fields.take("fits_landing", args.fits_landing);
  fields.take("ticket", args.ticket);
  fields.take("x", args.x);
  fields.take("scales", args.scales);
  fields.take("scale_stride", args.scale_stride);
  fields.take("topk_idx", args.topk_idx);
  fields.take("topk_weights", args.topk_weights);
  fields.take("num_tokens", args.num_tokens);
  fields.take("max_tokens", args.max_tokens);
  fields.take("alignment", args.alignment);
  fields.take("zeroes_holes", args.zeroes_holes);
  fields.take("capacity", args.capacity);
  fields.take("place_x", args.placement.x);
  fields.take("place_scales", args.placement.scales);
  fields.take("place_ids", args.placement.ids);
  fields.take("place_weights", args.placement.weights);
  fields.take("place_table", args.placement.table);
  fields.take("place_rows", args.placement.num_rows);
  fields.take("place_id_bytes", args.placement.id_bytes);
  fields.take("send_plan", args.send_plan);
  fields.take("recv_plan", args.recv_plan);
  fields.take("counts", args.counts);
  fields.take("offsets", args.offsets);
  fields.take("num_rows", args.num_rows);
  fields.take("overflow", args.overflow);
  fields.take("rail", args.rail);
  fields.take("num_straight", args.num_straight);
  fields.take_if("forward_plan", args.forward_plan);
}

inline void take(Fields& fields, weft::kernels::SmallDispatchKernelArgs& args) {
  take_view(fields, args.view);
  fields.take("rail", args.rail);
  fields.take_if("forward_plan", args.forward_plan);
  fields.take("print", args.print);
  fields.take("object", args.object);
  fields.take("ticket", args.ticket);
  fields.take("max_tokens", args.max_tokens);
  fields.take("num_parts", args.num_parts);
  fields.take("alignment", args.alignment);
  fields.take("zeroes_holes", args.zeroes_holes);
  fields.take("capacity", args.capacity);
  fields.take("num_tokens", args.num_tokens);
  fields.take("x", args.x);
  fields.take("scales", args.scales);
  fields.take("scale_stride", args.scale_stride);
  fields.take("topk_idx", args.topk_idx);
  fields.take("topk_weights", args.topk_weights);
  fields.take("send_plan", args.send_plan);
  fields.take("room", args.room);
  fields.take("out_x", args.out_x);
  fields.take("out_scales", args.out_scales);
  fields.take("out_ids", args.out_ids);
  fields.take("out_weights", args.out_weights);
  fields.take("recv_plan", args.recv_plan);
  fields.take("counts", args.counts);
  fields.take("offsets", args.offsets);
  fields.take("num_rows", args.num_rows);
  fields.take("overflow", args.overflow);
}

inline void take(Fields& fields, weft::kernels::CombineKernelArgs& args) {
  take_view(fields, args.view);
  fields.take("print", args.print);
  fields.take("object", args.object);
  fields.take("rows", args.rows);
  fields.take("rows_offset", args.rows_offset);
  fields.take("num_rows", args.num_rows);
  fields.take("weights", args.weights);
  fields.take("side", args.side);
  fields.take("send_plan", args.send_plan);
  fields.take("send_plan_tokens", args.send_plan_tokens);
  fields.take("recv_plan", args.recv_plan);
  fields.take("recv_plan_tokens", args.recv_plan_tokens);
  fields.take("first_token", args.first_token);
  fields.take("end_token", args.end_token);
  fields.take("num_tokens", args.num_tokens);
  fields.take("bias", args.bias);
  fields.take("bias_row_bytes", args.bias_row_bytes);
  fields.take("bias_is_fp32", args.bias_is_fp32);
  fields.take("out", args.out);
  fields.take("side_out", args.side_out);
  fields.take("rail", args.rail);
  fields.take("owner_weights", args.owner_weights);
  fields.take("owner_ids", args.owner_ids);
  fields.take("owner_id_words", args.owner_id_words);
  fields.take_if("forward_plan", args.forward_plan);
}

inline void take(Fields& fields, weft::kernels::SmallCombineKernelArgs& args) {
  take_view(fields, args.view);
  fields.take("rail", args.rail);
  fields.take_if("forward_plan", args.forward_plan);
  fields.take("print", args.print);
  fields.take("object", args.object);
  fields.take("num_tokens", args.num_tokens);
  fields.take("max_tokens", args.max_tokens);
  fields.take("rows", args.rows);
  fields.take("num_rows", args.num_rows);
  fields.take("weights", args.weights);
  fields.take("side", args.side);
  fields.take("send_plan", args.send_plan);
  fields.take("recv_plan", args.recv_plan);
  fields.take("recv_plan_tokens", args.recv_plan_tokens);
  fields.take("bias", args.bias);
  fields.take("bias_row_bytes", args.bias_row_bytes);
  fields.take("bias_is_fp32", args.bias_is_fp32);
  fields.take("out", args.out);
  fields.take("side_out", args.side_out);
  fields.take("owner_weights", args.owner_weights);
  fields.take("owner_ids", args.owner_ids);
  fields.take("owner_id_words", args.owner_id_words);
}

inline void take(Fields& fields, weft::kernels::UnloadKernelArgs& args) {
  fields.take("rows", args.rows);
  fields.take("row_stride", args.row_stride);
  fields.take("scales", args.scales);
  fields.take("scale_stride", args.scale_stride);
  fields.take("weights", args.weights);
  fields.take("table", args.table);
  fields.take("max_tokens", args.max_tokens);
  fields.take("num_sources", args.num_sources);
  fields.take("top_k", args.top_k);
  fields.take("num_rows", args.num_rows);
  fields.take("x", args.x);
  fields.take("x_scales", args.x_scales);
  fields.take("x_weights", args.x_weights);
  fields.take("row_bytes", args.row_bytes);
  fields.take("scale_row_bytes", args.scale_row_bytes);
}

inline void take(Fields& fields, weft::kernels::GradientKernelArgs& args) {
  fields.take("rows", args.rows);
  fields.take("y", args.y);
  fields.take("weights", args.weights);
  fields.take("out", args.out);
  fields.take("grad_weights", args.grad_weights);
  fields.take("num_rows", args.num_rows);
  fields.take("hidden", args.hidden);
  fields.take("dtype", args.dtype);
}

inline void take(Fields& fields, weft::kernels::PlaceKernelArgs& args) {
  fields.take("broken", args.broken);
  fields.take("table", args.table);
  fields.take("table_tokens", args.table_tokens);
  fields.take("max_tokens", args.max_tokens);
  fields.take("num_sources", args.num_sources);
  fields.take("top_k", args.top_k);
  fields.take("rank", args.rank);
  fields.take("num_straight", args.num_straight);
  fields.take("num_rows", args.num_rows);
  fields.take("x", args.x);
  fields.take("scales", args.scales);
  fields.take("row_bytes", args.row_bytes);
  fields.take("scale_row_bytes", args.scale_row_bytes);
  fields.take("landed_weights", args.landed_weights);
  fields.take("weights", args.weights);
  fields.take("counts", args.counts);
  fields.take("offsets", args.offsets);
  fields.take("num_groups", args.num_groups);
  fields.take("is_masked", args.is_masked);
  fields.take("capacity", args.capacity);
  fields.take("zeroes_rows", args.zeroes_rows);
}

inline void take(Fields& fields, weft::kernels::StageKernelArgs& args) {
  fields.take("table", args.table);
  fields.take("table_tokens", args.table_tokens);
  fields.take("max_tokens", args.max_tokens);
  fields.take("num_sources", args.num_sources);
  fields.take("rank", args.rank);
  fields.take("rows", args.rows);
  fields.take("landing", args.landing);
  fields.take("num_rows", args.num_rows);
  fields.take("row_bytes", args.row_bytes);
}

template <class Args>
struct Kernel : AnyKernel {
  void (*function)(const Args);
  u64 (*complete_args)(Args&);
  Args args;

  Kernel(void (*function)(const Args), u64 (*complete_args)(Args&))
      : AnyKernel{take_args, complete_kernel, run}, function(function), complete_args(complete_args) {}
  static void take_args(Fields& fields, void* kernel) {
    Args* args = new (&static_cast<Kernel*>(kernel)->args) Args;
    emulation::take(fields, *args);
  }
  static u64 complete_kernel(void* kernel) {
    auto* self = static_cast<Kernel*>(kernel);
    return self->complete_args(self->args);
  }
  static void run(void* kernel) {
    auto* self = static_cast<Kernel*>(kernel);
    self->function(self->args);
  }
};

template <class Args>
int run_launches(void (*function)(const Args), u32 num_threads, u64 (*complete)(Args&), char** arguments) {
  Kernel<Args> kernel(function, complete);
  return run_launches(kernel, &kernel, num_threads, arguments);
}

// ---- what depends on the configuration too: dynamic shared memory, and arguments that the host computes from it

template <class Config, class Args>
u64 complete(const Config& config, Args&) {
  return static_cast<u64>(config.shared_bytes());
}

inline u64 complete(const weft::SmallCombineKernelConfig& config, weft::kernels::SmallCombineKernelArgs& args) {
  const i32 num_blocks = static_cast<i32>(gridDim.x) - config.num_network_blocks();
  args.split = weft::SmallSplit::make(config, args.max_tokens, num_blocks);
  return 0;
}

// Places of a block's rows; as src/engine/nvlink/small_dispatch.cc.
inline u64 complete(const weft::SmallDispatchKernelConfig& config, weft::kernels::SmallDispatchKernelArgs& args) {
  const i64 blocks = config.num_blocks;
  const i64 units = max(args.view.layout.small_tokens, blocks);
  const i64 places = config.num_ranks * ((units + blocks - 1) / blocks) * config.width();
  return static_cast<u64>(config.shared_bytes(static_cast<i32>(places)));
}

}  // namespace emulation
