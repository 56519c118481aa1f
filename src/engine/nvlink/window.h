// A window on GPUs that reach each other by load and store: control memory and heap in GPU memory, one kernel a call.
// docs/protocols/nvlink-dispatch.md and nvlink-combine.md describe what the kernels do with it.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "engine/cpu/communicator.h"
#include "engine/cpu/types.h"
#include "engine/nvlink/device_memory.h"
#include "engine/nvlink/kernels.h"
#include "memory/heap.h"
#include "weft/kernels/arguments.h"

namespace weft::nvlink {

using cpu::Array;
using cpu::Block;
using cpu::Communicator;
using cpu::Poll;

// One GPU of this process.
class Gpu {
 public:
  Gpu(int index, const jit::CompilerPaths& paths);
  ~Gpu();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const int index;
  cuda::Device device = 0;
  cuda::Context context = nullptr;
  std::optional<Kernels> kernels;
};

struct ReceiveHeap {
  ReceiveHeap(cuda::Device device, u64 bytes, OwnedFd* fd)
      : memory(DeviceMemory::create(device, bytes, fd)), heap(bytes) {}
  DeviceMemory memory;
  Heap heap;
};

struct DispatchArgs {
  u64 x = 0, scales = 0, topk_idx = 0, topk_weights = 0;  // device addresses
  bool topk_is_int64 = true;
  i64 num_tokens = 0;
  i64 row_bytes = 0, scale_row_bytes = 0;
  Dtype dtype = Dtype::kBytes;
  i64 max_tokens = 0;
  i64 capacity = kNoCapacity;
  i32 num_blocks = 16;
  u64 timeout_ns = 0;
  u64 stream = 0;
  u64 slot = 0, row_start = 0, num_rows_to = 0, source_offset = 0, counts = 0, offsets = 0, num_rows = 0;  // written
};

struct DispatchResult {
  Array x, scales, topk_idx, topk_weights;
  i64 num_rows = 0;  // -1 with a capacity: only the device knows
};

struct CombineArgs {
  u64 y = 0;  // device address of heap rows
  i64 num_rows = 0;
  Dtype dtype = Dtype::kBf16;
  i64 hidden = 0;
  i64 num_tokens = 0;
  u64 slot = 0, row_start = 0, out = 0, bias = 0;
  bool bias_is_2d = false, bias_is_fp32 = false;
  i32 num_blocks = 16;
  u64 timeout_ns = 0;
  u64 stream = 0;
};

class Window : public cpu::MemberWindow {
 public:
  // Collective among the active ranks. Errors: as cpu::Window, and kCudaError.
  Window(std::shared_ptr<Communicator> comm, std::shared_ptr<Gpu> gpu, const WindowShape& shape, u64 heap_bytes,
         u64 deadline_ns, const Poll& poll);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // On the caller's stream. Without a capacity the host waits for the counts while the rows are on their way.
  DispatchResult dispatch(const DispatchArgs& args, const Poll& poll);
  // On the caller's stream; rows that do not lie in the heap are copied there first.
  void combine(const CombineArgs& args, const Poll& poll);
  std::optional<Block> reserve(u64 num_bytes);
  // Raises what a kernel has found since.
  void check();
  void close();

  void notice_closed(u64) override { leave_waits(); }  // a kernel that needs nothing more looks at the word no more
  void leave_waits() override;
  void record_error(const AbortReason& reason) override;
  u64 id() const override { return id_; }
  void retire() override { close(); }
  bool is_busy() const override;
  void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll) override;

 private:
  struct Peer {
    DeviceMemory control;
    DeviceMemory heap;
  };
  struct Memory {
    DeviceMemory control;
    std::shared_ptr<ReceiveHeap> heap;
    OwnedFd control_fd, heap_fd;
  };

  Memory allocate() const;
  void connect(ControlPlane* plane, const std::vector<int>& ranks, u64 tag, Memory memory, u64 deadline_ns,
               const Poll& poll);
  void begin(const OperationConfig& config, u64 timeout_ns);
  void launch(const Kernel& kernel, i32 num_blocks, u64 stream, void* args);
  void wait_for_counts(u64 stream, const Poll& poll);
  [[noreturn]] void raise_error();
  u32* num_ended() const;

  std::shared_ptr<Communicator> comm_;
  std::shared_ptr<Gpu> gpu_;
  const WindowShape shape_;
  const WindowLayout layout_;
  const u64 heap_bytes_;
  const u64 id_;
  u64 hash_ = 0;
  DeviceMemory control_;
  std::shared_ptr<ReceiveHeap> heap_;
  std::vector<Peer> peers_;
  transport::HostWords* host_ = nullptr;
  transport::WindowView view_;
  u64 sequence_ = 0;  // of the last launch
  bool closed_ = false;
};

}  // namespace weft::nvlink
