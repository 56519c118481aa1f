// The main function of an emulated kernel: included behind the source that the library renders, which has kConfig and
// the kernel. Runs launches of one rank one after the other, all blocks of a launch at once, each in a process of its own.
//
//   KERNEL MEMORY_FD NUM_BYTES SHARED_FILE SEED FIELDS_FILE...
//
// MEMORY_FD: the memory of all ranks, mapped at kGlobalBase. SHARED_FILE: a list of __shared__ variables, see run_block.h. A
// FIELDS_FILE for each launch: "name value" lines: the kernel's arguments, with addresses as numbers, and what the host copies
// when the kernel has ended: copyN_to, copyN_from, copyN_bytes.
#pragma once

#include <sys/prctl.h>
#include <sys/wait.h>
#include <csignal>

#include <fstream>
#include <map>
#include <string>

#include "run_block.h"
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

constexpr u64 kGlobalBase = 0x200000000000ull;  // machine.py has the same

class Fields {
 public:
  explicit Fields(const char* path) {
    std::ifstream file(path);
    std::string name;
    i64 value = 0;
    while (file >> name >> value) values_[name] = value;
  }

  i64 number(const std::string& name) {
    const auto found = values_.find(name);
    if (found == values_.end()) fail("field %s is missing", name.c_str());
    const i64 value = found->second;
    values_.erase(found);
    return value;
  }
  template <class T>
  void take(const char* name, T& field) {
    if constexpr (std::is_pointer_v<T>) {
      field = reinterpret_cast<T>(number(name));
    } else {
      field = static_cast<T>(number(name));
    }
  }
  // What only some calls have.
  template <class T>
  void take_if(const char* name, T& field) {
    if (values_.count(name) != 0) take(name, field);
  }
  void check_all_taken() const {
    for (const auto& [name, value] : values_) fail("field %s: the kernel has no such argument", name.c_str());
  }

 private:
  std::map<std::string, i64> values_;
};

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
    const std::string number = std::to_string(rank);
    fields.take(("control" + number).c_str(), view.control[rank]);
    fields.take(("heap" + number).c_str(), view.heap[rank]);
    fields.take(("heap_bytes" + number).c_str(), view.heap_bytes[rank]);
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
  fields.number("rail");  // it has but one route
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
  fields.take_if("forward_plan", args.forward_plan);
}

inline void take(Fields& fields, weft::kernels::SmallCombineKernelArgs& args) {
  take_view(fields, args.view);
  fields.number("rail");  // it has but one route
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

struct Copy {
  u8* to;
  const u8* from;
  u64 num_bytes;
};

inline std::vector<Copy> take_copies(Fields& fields) {
  i32 num_copies = 0;
  fields.take("num_copies", num_copies);
  std::vector<Copy> copies(static_cast<size_t>(num_copies));
  for (i32 idx = 0; idx < num_copies; ++idx) {
    const std::string name = "copy" + std::to_string(idx);
    fields.take((name + "_to").c_str(), copies[static_cast<size_t>(idx)].to);
    fields.take((name + "_from").c_str(), copies[static_cast<size_t>(idx)].from);
    fields.take((name + "_bytes").c_str(), copies[static_cast<size_t>(idx)].num_bytes);
  }
  return copies;
}

inline void map_memory(int file, u64 num_bytes) {
  void* base = mmap(reinterpret_cast<void*>(kGlobalBase), num_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  if (base == MAP_FAILED) fail("the memory of the ranks cannot be mapped");
  global_begin = static_cast<u8*>(base);
  global_end = global_begin + num_bytes;
}

inline void tell_fault(int signal, siginfo_t* info, void*) {
  fprintf(stderr, "block %u thread %u: signal %d at address %p\n", blockIdx.x, threadIdx.x, signal, info->si_addr);
  _exit(9);
}

inline void catch_faults() {
  static u8 stack[64 << 10];
  const stack_t alternative = {stack, 0, sizeof(stack)};
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = tell_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

inline int tell(const Failed& mistake) {
  fprintf(stderr, "%s\n", mistake.text.c_str());
  fflush(stderr);
  return 9;
}

// A block in a process of its own.
template <class Args>
[[noreturn]] void end_with_block(void (*kernel)(const Args), const Args& args, const Grid& grid, u32 idx) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  catch_faults();
  int result = 0;
  try {
    run_block(kernel, args, grid, idx);
  } catch (const Failed& mistake) {
    result = tell(mistake);
  }
  _exit(result);
}

// The first block that fails ends the others.
inline int wait_for(const std::vector<pid_t>& blocks) {
  int result = 0;
  for (size_t idx = 0; idx < blocks.size(); ++idx) {
    int status = 0;
    wait(&status);
    if (status == 0 || result != 0) continue;
    result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    for (const pid_t other : blocks) kill(other, SIGKILL);
  }
  return result;
}

template <class Args>
int run_launch(void (*kernel)(const Args), const char* fields_path, Grid grid, u64 (*complete)(Args&)) {
  Fields fields(fields_path);
  Args args;
  fields.take("num_blocks", grid.num_blocks);
  fields.take("poison", poison);
  take(fields, args);
  const std::vector<Copy> copies = take_copies(fields);
  fields.check_all_taken();
  gridDim.x = grid.num_blocks;
  grid.shared_bytes = complete(args);
  std::vector<pid_t> blocks;
  for (u32 idx = 0; idx < grid.num_blocks; ++idx) {
    const pid_t process = fork();
    if (process == 0) end_with_block(kernel, args, grid, idx);
    blocks.push_back(process);
  }
  const int result = wait_for(blocks);
  for (const Copy& copy : copies) memcpy(copy.to, copy.from, copy.num_bytes);
  return result;
}

template <class Args>
int run_launches(void (*kernel)(const Args), u32 num_threads, u64 (*complete)(Args&), char** arguments) try {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  map_memory(atoi(arguments[1]), strtoull(arguments[2], nullptr, 10));
  Grid grid;
  grid.num_threads = num_threads;
  grid.shared_variables = arguments[3];
  grid.seed = strtoull(arguments[4], nullptr, 10) * 1000;
  for (char** path = arguments + 5; *path != nullptr; ++path) {
    ++grid.seed;
    const int result = run_launch<Args>(kernel, *path, grid, complete);
    if (result != 0) return result;
  }
  return 0;
} catch (const Failed& mistake) {
  return tell(mistake);
}

// ---- what depends on the configuration too: dynamic shared memory, and arguments that the host computes from it

template <class Config, class Args>
u64 complete(const Config& config, Args&) {
  return static_cast<u64>(config.shared_bytes());
}

inline u64 complete(const weft::SmallCombineKernelConfig& config, weft::kernels::SmallCombineKernelArgs& args) {
  args.split = weft::SmallSplit::make(config, args.max_tokens, static_cast<i32>(gridDim.x));
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
