// A window: the control memory and the heap of this rank, the mappings of those of its peers, and what one operation
// after the other needs. docs/protocols/headers.md says who writes which word.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/call.h"
#include "engine/communicator.h"
#include "engine/cpu/gradients.h"
#include "memory/heap.h"
#include "memory/shared_memory.h"
#include "weft/layout/payload.h"
#include "weft/layout/rail.h"
#include "weft/layout/routing.h"
#include "weft/layout/window.h"

namespace weft::cpu {

// Receive memory of one epoch. Tensors hold it, so it outlives a rebuild and the window itself (R13).
struct ReceiveHeap {
  ReceiveHeap(u64 bytes, u64 most_bytes) : memory(SharedMemory::create(bytes, most_bytes)), heap(bytes) {}
  SharedMemory memory;
  Heap heap;
  // By which it has grown, for newcomers; without those of a group that nobody joins.
  struct Piece {
    OwnedFd fd;
    u64 bytes;
  };
  std::vector<Piece> pieces;
};

struct WindowStats {
  u64 num_dispatches = 0;
  u64 num_combines = 0;
  u64 rows_sent = 0;   // to other ranks
  u64 bytes_sent = 0;  // to other ranks: rows, scales, ids and weights
  u64 rows_received = 0;
  u64 num_staged = 0;  // results that found no room in the heap
  u64 dispatch_ns = 0;
  u64 combine_ns = 0;
  std::vector<u64> waited_ns;  // for the headers of each peer
};

Block allocate_block(u64 num_bytes);  // of ordinary memory; throws std::bad_alloc

class Window : public CallWindow {
 public:
  // Collective among the active ranks. Errors: kInvalidArgument (sizes beyond 64 bits, shapes that differ),
  // kUnsupported and kCapacityExceeded (what the system refused on a rank; raised on all), kPeerLost, kPeerTimeout.
  // `most_heap_bytes`: up to which resize() may go; at most `heap_bytes`: it may not.
  Window(std::shared_ptr<Communicator> comm, const WindowShape& shape, u64 heap_bytes, u64 deadline_ns,
         const Poll& poll, u64 most_heap_bytes = 0);
  // Of a rank that is not taken in yet: the window of that number of the group in `members`, one of which each must have. Not
  // collective. Errors besides: kInvalidState (a member has closed it).
  Window(std::shared_ptr<Communicator> comm, const WindowShape& shape, u64 heap_bytes, u64 id, u64 deadline_ns,
         const Poll& poll, u64 most_heap_bytes);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  DispatchResult dispatch(const DispatchArgs& given, const Poll& poll) override;
  void combine(const CombineArgs& args, const Poll& poll) override;
  void gradients(const GradientArgs& args) override { cpu::gradients(args); }
  void barrier(u64 timeout_ns, const Poll& poll) override;

  // A heap of `heap_bytes`, no less than it has: collective among the active ranks, between two operations. Errors as the
  // constructor; what a rank could not make or map is raised on all, and nobody's heap has grown.
  void resize(u64 heap_bytes, u64 deadline_ns, const Poll& poll);
  // Gives the physical memory of heap and staging back, until it is used again. Local, while no rank is in an operation or begins
  // one. Error kInvalidState: blocks of the heap are in use.
  void release_memory();

  using CallWindow::reserve;
  std::optional<Block> reserve(u64 num_bytes, u64 stream, OnCapture on_capture) override;
  int gpu_index() const override { return -1; }
  bool owns(const void* pointer) const { return heap_offset(pointer).has_value(); }

  void close() override;
  const WindowStats& stats() const { return stats_; }
  std::vector<Count> counts() const override;
  u64 heap_used() const { return closed_ ? 0 : heap_->heap.used(); }
  u64 heap_peak() const { return closed_ ? 0 : heap_->heap.peak(); }
  u64 heap_bytes() const { return heap_bytes_; }
  const WindowLayout& layout() const { return layout_; }
  const WindowShape& shape() const { return shape_; }

  void notice_closed(u64 ranks) override;
  void leave_waits() override;
  void record_error(const AbortReason& reason) override;
  u64 id() const override { return id_; }
  bool is_retired() const override { return is_retired_; }
  void unmap(int rank) override;
  void retire() override { is_retired_ = true; }
  bool is_busy() const override;
  Parcel offer() const override;
  void take_in(int slot, Parcel&& offer) override;
  bool has_taken_in(int slot) const override;
  bool match_heaps(const RankSet& members) override;
  void change(const Step& step) override;
  void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32 epoch, u64 deadline_ns,
             const Poll& poll) override;

 private:
  friend class Operation;
  friend class RailHost;
  friend class DispatchCall;
  friend class CombineCall;

  struct Peer {
    SharedMemory control;
    SharedMemory heap;
    u64 heap_bytes = 0;  // as it said when it was taken in
  };

  ControlWords* words() const { return reinterpret_cast<ControlWords*>(control_.data()); }
  u8* control_of(int rank) const;
  u8* heap_of(int rank) const;
  RailMap rail_map() const;  // of the members now
  std::optional<u64> heap_offset(const void* pointer) const;
  // A block of the heap, or of ordinary memory if there is no room. Throws std::bad_alloc.
  Block reserve_or_allocate(u64 num_bytes);
  // Fresh and zeroed, or why not.
  struct Memory {
    SharedMemory control;
    std::shared_ptr<ReceiveHeap> heap;
    std::optional<Error> refusal;
  };
  Memory allocate() const;
  std::string control_text() const;  // for errors
  void attach(std::vector<Parcel>& parcels, u64 deadline_ns, const Poll& poll);
  // What every rank says of its memory, and its descriptors (control, heap), by rank.
  std::vector<Parcel> exchange_memory(ControlPlane* plane, const std::vector<int>& ranks, u64 tag, const Memory& memory,
                                      u64 deadline_ns, const Poll& poll);
  void raise_refusals(u64 tag, const std::string& mine, u64 deadline_ns, const Poll& poll);
  void cut(const std::vector<std::pair<int, u64>>& mapped);  // rank, bytes before
  void check_offer(int rank, const Parcel& parcel) const;
  Peer map(int rank, Parcel&& parcel) const;
  void begin(const Step& step);

  std::shared_ptr<Communicator> comm_;
  const WindowShape shape_;
  const WindowLayout layout_;
  const RailLayout rail_layout_;  // behind it
  const u64 control_bytes_;       // of both
  u64 heap_bytes_;
  const u64 most_heap_bytes_;
  const u64 id_;
  u64 hash_ = 0;
  SharedMemory control_;
  std::shared_ptr<ReceiveHeap> heap_;
  mutable std::mutex
      peers_mutex_;  // of the list and of those that are no members; of the others in a call none is needed
  std::vector<Peer> peers_;
  WindowStats stats_;
  bool closed_ = false;
  std::atomic<bool> is_retired_ = false;

  // Kept between calls so that a call allocates nothing but its result.
  struct Scratch {
    std::vector<i32> counts_to, counts_from;
    std::vector<i64> starts, next_row, offsets, rows_from;
    std::vector<u8> row, scales, domains;
    std::vector<float> sum;
  } scratch_;
};

}  // namespace weft::cpu
