// A window on GPUs that reach each other by load and store: control memory and heap in GPU memory, one kernel a call.
// docs/protocols/nvlink-window.md says what lies where; nvlink-dispatch.md and nvlink-combine.md what the kernels do with it.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "engine/cpu/communicator.h"
#include "engine/nvlink/device_memory.h"
#include "engine/nvlink/kernels.h"
#include "engine/nvlink/types.h"
#include "memory/heap.h"
#include "weft/kernels/arguments.h"

namespace weft::nvlink {

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

class Window : public cpu::MemberWindow {
 public:
  // Collective among the active ranks. Errors: as cpu::Window, and kCudaError.
  Window(std::shared_ptr<Communicator> comm, std::shared_ptr<Gpu> gpu, const GpuWindowShape& shape, u64 heap_bytes,
         u64 deadline_ns, const Poll& poll);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // On the caller's stream. Without a capacity the host waits for the counts while the rows are on their way (dispatch.cc).
  DispatchResult dispatch(const DispatchArgs& args, const Poll& poll);
  void unload(const UnloadArgs& args);
  // On the caller's stream (combine.cc).
  void combine(const CombineArgs& args, const Poll& poll);

  // A block of the heap that kernels on `stream` may use from now on, or nothing if there is no room.
  std::optional<Block> reserve(u64 num_bytes, u64 stream);
  // The largest block there is, at most `num_bytes`.
  std::optional<Block> reserve_up_to(u64 num_bytes, u64 stream);
  // Raises what a kernel has found since.
  void check();
  void close();

  void notice_closed(u64) override { leave_waits(); }
  void leave_waits() override;
  void record_error(const AbortReason& reason) override;
  u64 id() const override { return id_; }
  void retire() override { close(); }
  bool is_busy() const override;
  void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll) override;

 private:
  friend class DispatchCall;
  friend class CombineCall;
};

}  // namespace weft::nvlink
