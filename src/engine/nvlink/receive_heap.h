// The heap of a window: where receive tensors lie, and when a place that was let go may be used again.
//
// A block belongs to the stream that it was reserved on. The next block in its place may be used on that stream at once; on
// another one only behind events: one on the block's stream, recorded behind the next call there or when it is asked for, and
// one on each stream that record_stream() named, recorded when the block was let go. A stream that records a graph gets only
// places nobody waits for, and keeps them for good.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "engine/call.h"
#include "engine/nvlink/device_memory.h"
#include "engine/nvlink/gpu.h"
#include "memory/heap.h"

namespace weft::nvlink {

// Blocks hold it, so it outlives a rebuild and its window (R13). Thread-safe.
class ReceiveHeap : public std::enable_shared_from_this<ReceiveHeap> {
 public:
  // `first`: bytes at the start that are no heap (the landing), followed by `num_bytes` of heap.
  ReceiveHeap(std::shared_ptr<Gpu> gpu, DeviceMemory memory, u64 first, u64 num_bytes);
  ~ReceiveHeap();
  ReceiveHeap(const ReceiveHeap&) = delete;
  ReceiveHeap& operator=(const ReceiveHeap&) = delete;

  // For kernels on `stream` from now on; nothing if there is no room. Offsets count from the start of the memory.
  std::optional<Block> reserve(u64 num_bytes, u64 stream, bool is_capturing);
  // The largest block there is, at most `num_bytes`; nothing if there is none.
  std::optional<Block> reserve_up_to(u64 num_bytes, u64 stream, bool is_capturing);
  // Keeps the first bytes of a block. What is let go may be used elsewhere after `event`, recorded on the block's stream.
  void shrink(Block& block, u64 keep_bytes, const std::shared_ptr<Event>& event);
  // Lets go of a block that no work was given for: also if its stream records a graph, which would keep it.
  void cancel(Block block);
  // The block that holds `address`, of any heap in this process, also of a closed window or from before a rebuild, is in use on
  // this stream, too. False: no heap has such a block.
  static bool record_stream(u64 address, u64 stream);
  // An event on `stream`, behind the use of all that was let go there. Never for a stream that records a graph.
  std::shared_ptr<Event> record(u64 stream);

  // No more reservations: the window is closed or has another heap. Events are recorded now for what was let go, and for what
  // will be by whoever lets go; the thread that cleans up may not ask streams, which may record graphs by then.
  void close();

  void quarantine() { heap_.quarantine(); }
  // Fresh physical memory at the same addresses (R13), if nobody holds a block but graphs and nothing is under way in
  // blocks that were let go: else false, and everything stays.
  bool renew(DeviceMemory& fresh);
  // What was let go is not used by the GPU any more.
  bool is_settled();

  bool owns(u64 address) const { return address - memory_.address() < memory_.bytes(); }
  const DeviceMemory& memory() const { return memory_; }
  bool has_captured() const;  // graphs hold blocks
  u64 used() const { return heap_.used(); }
  u64 peak() const { return heap_.peak(); }
  u64 bytes() const { return heap_.bytes(); }

 private:
  struct Live {
    u64 num_bytes = 0;
    u64 stream = 0;
    std::set<u64> other_streams;
    bool is_captured = false;
  };
  // A place that was let go, but may be in use on `stream` until `event`. No event: not recorded yet.
  struct Pending {
    u64 begin, end, stream;
    std::shared_ptr<Event> event;
  };

  struct Remains;

  bool record_stream_here(u64 address, u64 stream);
  std::optional<u64> take(u64 num_bytes, u64 stream, bool is_capturing);
  void wait_for_place(u64 begin, u64 end, u64 stream);
  void record_pending();
  void forget_done();
  std::shared_ptr<Event> event_on(u64 stream) noexcept;
  Block block_at(u64 offset, u64 num_bytes);
  void release(u64 offset) noexcept;

  std::shared_ptr<Gpu> gpu_;
  DeviceMemory memory_;
  const u64 first_;
  Heap heap_;
  mutable std::mutex mutex_;
  std::map<u64, Live> live_;  // by offset in heap_
  std::vector<Pending> pending_;
  bool is_closed_ = false;
};

}  // namespace weft::nvlink
