// The combine kernels kPush and kPull on ranks that are processes, one a block. Calls and tensors come in a file, which the
// results are written to. Behind the include: main().
#pragma once

// clang-format off
#include "cuda.h"
#include "weft/config/kernel.h"
namespace weft::kernels { alignas(128) u8 dynamic[240 << 10]; }
#include "weft/kernels/combine.cuh"
// clang-format on

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include <new>
#include <string>

namespace weft::emulated {

using kernels::CombineKernelArgs;

// As in test_combine_on_threads.py. Places in the file; 0: there is none.
struct Call {
  i32 num_ranks, num_experts, top_k, num_blocks;
  i64 max_tokens, landing_row_bytes;  // of the window
  i64 call_tokens;                    // most that a rank has
  u64 timeout_ns;
};
struct RankCall {
  u64 rows, weights, side, send_plan, recv_plan, bias, out, side_out;
  i64 num_rows, row_bytes, num_tokens, bias_row_bytes, claimed_rows;  // claimed_rows > 0: told to the peers
  i32 bias_is_fp32, is_in_heap, print, is_absent;  // is_absent 1: the rank is dead, 2: its last block is
  // Written.
  u64 finished_sequence;
  u32 error, culprit;
};

template <class Kernel>
struct Thread {
  u32 idx;
  const CombineKernelArgs* args;
  Kernel kernel;
};

template <class Kernel>
void* run_thread(void* given) {
  auto* thread = static_cast<Thread<Kernel>*>(given);
  threadIdx.x = thread->idx;
  thread->kernel(*thread->args);
  if (!ptx::stores.empty()) _exit(11);  // a block must not end before its own bulk operations
  return nullptr;
}

template <class Kernel>
int run_block(const CombineKernelArgs& args, const CombineKernelConfig& config, u32 block, Kernel kernel) {
  blockIdx.x = block;
  gridDim.x = static_cast<u32>(config.num_blocks);
  blockDim.x = static_cast<u32>(config.num_threads());
  warps = new Warp[config.num_warps()];
  std::memset(kernels::dynamic, 0xff, sizeof(kernels::dynamic));
  ptx::shared_begin = kernels::dynamic;
  ptx::shared_end = kernels::dynamic + config.shared_bytes();
  pthread_attr_t small;
  pthread_attr_init(&small);
  pthread_attr_setstacksize(&small, 256 << 10);
  std::vector<Thread<Kernel>> threads(blockDim.x);
  std::vector<pthread_t> handles(blockDim.x);
  pthread_t copies;
  if (pthread_create(&copies, &small, ptx::run_loads, nullptr) != 0) return 12;
  for (u32 idx = 0; idx < blockDim.x; ++idx) {
    threads[idx] = {idx, &args, kernel};
    if (pthread_create(&handles[idx], &small, run_thread<Kernel>, &threads[idx]) != 0) _exit(12);
  }
  for (pthread_t handle : handles) pthread_join(handle, nullptr);
  const int result = ptx::loads.empty() ? 0 : 13;
  ptx::has_ended = true;
  pthread_join(copies, nullptr);
  return result;
}

u8* shared_pages(u64 num_bytes) {
  void* pages = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) _exit(14);
  return static_cast<u8*>(pages);
}

std::vector<CombineKernelArgs> make_args(const Call& call, RankCall* ranks, u8* file) {
  GpuWindowShape shape;
  shape.num_ranks = call.num_ranks;
  shape.num_experts = call.num_experts;
  shape.top_k = call.top_k;
  shape.num_blocks = call.num_blocks;
  shape.max_tokens = call.max_tokens;
  shape.landing_row_bytes = call.landing_row_bytes;
  transport::WindowView view;
  view.layout = GpuWindowLayout::make(shape);
  view.num_ranks = call.num_ranks;
  for (i32 rank = 0; rank < call.num_ranks; ++rank) {
    const RankCall& own = ranks[rank];
    view.heap_bytes[rank] = view.layout.landing_bytes + static_cast<u64>(own.num_rows * own.row_bytes) + 4096;
    view.control[rank] = shared_pages(view.layout.control_bytes);
    view.heap[rank] = shared_pages(view.heap_bytes[rank]);
    std::memset(view.heap[rank], 0xff, view.heap_bytes[rank]);
    reinterpret_cast<GpuControlWords*>(view.control[rank])->membership =
        u64{1} << 32 | ((u64{1} << call.num_ranks) - 1);
  }
  const auto at = [&](u64 place) { return place == 0 ? nullptr : file + place; };
  std::vector<CombineKernelArgs> all;
  for (i32 rank = 0; rank < call.num_ranks; ++rank) {
    const RankCall& own = ranks[rank];
    CombineKernelArgs args;
    args.view = view;
    args.view.rank = rank;
    args.view.host = new (shared_pages(sizeof(transport::HostWords))) transport::HostWords();
    args.view.host->timeout_ns = call.timeout_ns;
    args.print = static_cast<u16>(own.print);
    args.rows = at(own.rows);
    args.num_rows = own.claimed_rows > 0 ? own.claimed_rows : own.num_rows;
    if (own.is_in_heap != 0) {
      args.rows_offset = view.layout.landing_bytes + 256;
      args.rows = view.heap[rank] + args.rows_offset;
      std::memcpy(view.heap[rank] + args.rows_offset, at(own.rows), static_cast<u64>(own.num_rows * own.row_bytes));
    }
    args.weights = reinterpret_cast<const float*>(at(own.weights));
    args.side = reinterpret_cast<const float*>(at(own.side));
    args.send_plan = reinterpret_cast<const i32*>(at(own.send_plan));
    args.send_plan_tokens = own.num_tokens;
    args.recv_plan = reinterpret_cast<const i32*>(at(own.recv_plan));
    args.recv_plan_tokens = call.max_tokens;
    args.num_tokens = static_cast<i32>(own.num_tokens);
    args.bias = at(own.bias);
    args.bias_row_bytes = own.bias_row_bytes;
    args.bias_is_fp32 = own.bias_is_fp32 != 0;
    args.out = at(own.out);
    args.side_out = reinterpret_cast<float*>(at(own.side_out));
    all.push_back(args);
  }
  return all;
}

// One operation: a process for each block of each rank.
int run_operation(const std::vector<CombineKernelArgs>& all, const RankCall* ranks, i32 num_blocks) {
  int num_started = 0, result = 0;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    for (i32 block = 0; block < num_blocks; ++block) {
      if (ranks[rank].is_absent == 1 || (ranks[rank].is_absent == 2 && block == num_blocks - 1)) continue;
      ++num_started;
      if (fork() != 0) continue;
      const bool is_pulled = ranks[rank].is_in_heap != 0 || ranks[rank].num_rows == 0;
      const bool has_push = kPush.has_partials() || !is_pulled;
      _exit(has_push ? run_block(all[rank], kPush, static_cast<u32>(block), kernels::combine<kPush>)
                     : run_block(all[rank], kPull, static_cast<u32>(block), kernels::combine<kPull>));
    }
  }
  for (; num_started > 0; --num_started) {
    int status = 0;
    wait(&status);
    if (status != 0) result = status;
  }
  return result;
}

int run(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR);
  const i64 num_bytes = lseek(fd, 0, SEEK_END);
  void* pages = mmap(nullptr, static_cast<size_t>(num_bytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (pages == MAP_FAILED) return 14;
  u8* file = static_cast<u8*>(pages);
  const Call& call = *reinterpret_cast<const Call*>(file);
  auto* ranks = reinterpret_cast<RankCall*>(file + sizeof(Call));
  std::vector<CombineKernelArgs> all = make_args(call, ranks, file);
  const GpuWindowLayout& layout = all[0].view.layout;
  const i64 room = static_cast<i64>(layout.landing_ids / static_cast<u64>(call.num_ranks * kPush.wire_row_bytes()));
  int result = room > 0 ? 0 : 15;
  for (i64 first = 0; result == 0 && (first == 0 || first < call.call_tokens); first += room) {
    for (CombineKernelArgs& args : all) {
      args.first_token = static_cast<i32>(first);
      args.end_token = static_cast<i32>(min(first + room, call.call_tokens));
    }
    result = run_operation(all, ranks, kPush.num_blocks);
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    ranks[rank].finished_sequence = all[rank].view.host->finished_sequence;
    ranks[rank].error = all[rank].view.host->error.code;
    ranks[rank].culprit = static_cast<u32>(all[rank].view.host->error.culprit);
  }
  return result;
}

}  // namespace weft::emulated

int main(int, char** arguments) { return weft::emulated::run(arguments[1]); }
