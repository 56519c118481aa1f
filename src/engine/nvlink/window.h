// A window on GPUs that reach each other by load and store: control memory and heap in GPU memory, one kernel a call.
// docs/protocols/nvlink-window.md says what lies where; nvlink-dispatch.md and nvlink-combine.md what the kernels do with it.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "engine/communicator.h"
#include "engine/nvlink/gin_network.h"
#include "engine/nvlink/gpu.h"
#include "engine/nvlink/gradients.h"
#include "engine/nvlink/need_room.h"
#include "engine/nvlink/node_rail.h"
#include "engine/nvlink/receive_heap.h"
#include "engine/nvlink/unload.h"
#include "weft/kernels/dispatch/args.h"
#include "weft/layout/gpu_window.h"

namespace weft::nvlink {

struct WindowStats {
  u64 num_dispatches = 0;
  u64 num_combines = 0;
  u64 num_staged = 0;  // results that found no room in the heap
};

struct BadIds {
  i64 count = 0;
  i64 first_id = 0;
  i64 first_at = 0;  // flat position in topk_idx
};

// What a rank's window is made of; the shape is that of all ranks.
struct WindowMemory {
  u64 heap_bytes = 0;  // without the landing
  NcclPaths nccl;      // where the shape wants it
  int traffic_class = nccl::kUndefined;
};

class Window : public CallWindow {
 public:
  // Collective among the active ranks. Errors: as cpu::Window, and kCudaError.
  Window(std::shared_ptr<Communicator> comm, std::shared_ptr<Gpu> gpu, const GpuWindowShape& shape,
         const WindowMemory& memory, u64 deadline_ns, const Poll& poll);
  ~Window() override;
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  // On the caller's stream. Without a capacity the host waits for the counts while the rows are on their way (dispatch.cc).
  DispatchResult dispatch(const DispatchArgs& args, const Poll& poll) override;
  // Out of the landing into `to`: out_x, out_scales, and of a first dispatch out_ids, out_weights and recv_plan, of
  // gpu_recv_plan_len, in the sizes of DispatchResult. On the stream of the dispatch before; no other call may come between
  // (unload.cc).
  void unload(const DispatchBuffers& to);
  // On the caller's stream (combine.cc).
  void combine(const CombineArgs& args, const Poll& poll) override;
  // The other half of the staged call that has sent, on a stream. Error kInvalidState: there is none.
  void receive(u64 stream, const Poll& poll);

  // On the stream that is given (gradients.cc).
  void gradients(const GradientArgs& args) override;
  void barrier(u64 timeout_ns, const Poll& poll) override;

  using CallWindow::reserve;
  std::optional<Block> reserve(u64 num_bytes, u64 stream, OnCapture on_capture) override;
  // Whether an address lies in the heap of the present epoch.
  bool owns(u64 address) const;

  // Raises what a kernel has found since, or that the GPU has failed. Never waits for a peer.
  void check();
  // Ids out of range that kernels have seen since the last call.
  std::optional<BadIds> take_bad_ids();
  // Local. Waits, bounded, for this rank's own kernels; nothing of the window may be used any more, graphs included. What the
  // graphs with its calls use is given back when the last of them and its replays are gone, for which nobody waits.
  void close() override;

  const WindowStats& stats() const { return stats_; }
  std::vector<Count> counts() const override;
  // By peer, since this window was made: for how long this rank's kernels have waited for its headers. Zeros once closed.
  std::vector<u64> waited_ns() const;
  // The same as u64 [R] to `to` in memory of the GPU, in the order of `stream`; a graph may record it.
  void copy_waited_ns(u64 to, u64 stream) const;
  u64 heap_bytes() const { return heap_bytes_; }
  u64 heap_used() const { return closed_ ? 0 : heap_->used(); }
  u64 heap_peak() const { return closed_ ? 0 : heap_->peak(); }
  const GpuWindowLayout& layout() const { return layout_; }
  // int32 that a send plan has behind it: with nodes.
  i64 forward_plan_len() const { return nvlink::forward_plan_len(shape_); }
  int gpu_index() const override { return gpu_->index; }
  // Of nodes, what leads between them: "PROXY over RAIL connections of NCCL 2.32.3"; "": a block of each grid, or nothing.
  std::string network_text() const { return network_ == nullptr ? "" : network_->text(); }

  void notice_closed(u64 ranks) override;
  void leave_waits() override;
  void record_error(const AbortReason& reason) override;
  u64 id() const override { return id_; }
  bool is_retired() const override { return is_retired_; }
  void retire() override { is_retired_ = true; }
  bool is_busy() const override;
  void renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32 epoch, u64 deadline_ns,
             const Poll& poll) override;

 private:
  friend class DispatchCall;
  friend class SmallDispatchCall;
  friend class CombineCall;
  friend class SmallCombineCall;

  struct Peer {
    DeviceMemory control;
    DeviceMemory heap;
    DeviceMemory rail;   // with nodes
    u64 heap_bytes = 0;  // of any rank, this one too: with the landing
  };
  struct Memory;  // of a new epoch, not in use yet

  // ---- A call is: prepare, begin, reserve what it needs, launch; without a capacity also wait_for_counts, shrink
  // (window_calls.cc). The context of gpu_ must be current.

  struct Turn {
    u16 print = 0;   // fingerprint of the config, for the kernel's arguments
    u64 ticket = 0;  // name of the call, more than 0, for the kernel's arguments and wait_for_counts
  };
  // Refuses the call if the window is closed, broken, or a kernel has found something; then makes `stream` wait for the
  // calls before. `config.window_hash` is filled in here. Nothing is sent yet, an exception leaves the window as it was.
  Turn begin(OperationConfig config, u64 timeout_ns, u64 stream);

  // The kernel of a configuration, compiled and loaded at its first use. Where ranks are threads of one process they meet
  // at the first use: loading may wait for a kernel that waits for a rank that loads.
  template <class Config>
  const Kernel& prepare(const Config& config, u64 timeout_ns, const Poll& poll) {
    // Rendering takes longer than a launch, so the last ones are found by their fields.
    std::string key = key_of(config);
    const auto known = prepared_.find(key);
    if (known != prepared_.end()) return *known->second;
    const auto compiled = [&]() -> const Kernel& { return gpu_->kernels->prepare(config, kernel_headers()); };
    const Kernel& kernel = load(render(config), compiled, timeout_ns, poll);
    if (prepared_.size() >= kMostPrepared) prepared_.clear();
    prepared_.emplace(std::move(key), &kernel);
    return kernel;
  }

  // A staged call's half that receives follows the half that sends, with no other call in between (R5). Before anything else of
  // a call; note_half() after launch(). Error: kInvalidState.
  using Half = std::variant<std::monostate, DispatchArgs, CombineArgs>;
  void check_half(const CallSpec& spec);
  template <class Args>
  void note_half(const Args& args) {
    half_ = args.receives ? Half() : Half(args);
  }
  bool has_half() const { return half_.index() != 0; }

  // Once for each begin(). Errors: kInvalidArgument (more blocks than there is room for), kCudaError.
  void launch(const Kernel& kernel, i32 num_blocks, u64 stream, void* args);
  // The same for a kernel that waits for no peer.
  void start(const Kernel& kernel, i32 num_blocks, u64 stream, void* args);
  // The next call, on whatever stream, comes behind what this one has by now.
  void note_work(u64 stream);
  // launch() of a dispatch, or where needs_room(), of a refusal; the call ends on every rank with NeedOfRoom (need_room.cc).
  void launch_dispatch(const Kernel& kernel, const DispatchArgs& call, const Turn& turn, void* args, const Poll& poll);
  const Kernel& need_room_kernel(u64 timeout_ns, const Poll& poll);
  bool has_need() const;          // what a kernel has found is that a rank needs room ...
  bool has_need_at_work() const;  // ... and it still waits for others
  i64 need_of(u64 sequence) const;
  void raise_own_need();
  // Returns the number of rows of the result. Errors: what the kernel found, kPeerLost, kPeerTimeout, kCudaError.
  // How many rows; with tells_counts also what each local expert gets.
  std::pair<i64, std::vector<i32>> wait_for_counts(const DispatchSpec& spec, u64 ticket, const Poll& poll);
  // After launch(): gives back what follows the first bytes of a block.
  void shrink(Block& block, u64 keep_bytes);
  // With nodes: the kernels' argument; else null.
  const void* rail() const { return has_nodes(shape_) ? rail_.data() + rail_argument(shape_) : nullptr; }
  // Peers' rails are mapped: a block of each grid is the network.
  bool shares_rails() const { return has_nodes(shape_) && !has_gin(shape_); }
  // Blocks of a launch that are the network.
  i32 num_network_blocks() const { return shares_rails() ? 1 : 0; }
  // What kernels include besides, with NCCL's network.
  KernelHeaders kernel_headers() const;
  // Offset from the start of the heap memory, as placements have it.
  u64 heap_offset(u64 address) const { return address - heap_->memory().address(); }

  static constexpr size_t kMostPrepared = 64;
  const Kernel& load(const std::string& source, const std::function<const Kernel&()>& prepare, u64 timeout_ns,
                     const Poll& poll);
  void meet(u64 deadline_ns, const Poll& poll);
  void check_num_blocks(i32 num_blocks) const;
  void order_after_calls(u64 stream, const Capture& capture);

  // ---- Failure (window_failure.cc)

  u64* error_word() const;
  void raise_found();
  // A driver's call that failed may be the first to see a failed GPU: then the others are told. To ask before each call would
  // take as long as a launch.
  template <class Call>
  auto watched(const Call& call) {
    try {
      return call();
    } catch (const Error& error) {
      if (error.code == ErrorCode::kCudaError) check();
      throw;
    }
  }
  bool is_broken() const;
  bool hands_out() const;  // memory of the heap; error kInvalidState: the window is closed
  void empty_record();
  [[noreturn]] void raise_error();
  [[noreturn]] void raise_given_up(const ErrorRecord& record, OpKind kind);
  [[noreturn]] void throw_gpu_failure(const std::string& what);
  const OperationConfig* call_of(u64 header, u64 caller) const;
  std::vector<u64> sequences_seen(const ErrorRecord& record) noexcept;
  u64 report_left(const ErrorRecord& record, OpKind kind);
  // Waits for this rank's own kernels, those of graphs aside; false: still at work at `deadline_ns`.
  bool wait_for_kernels(u64 deadline_ns, const Poll& poll);

  // ---- Memory (window_memory.cc)

  Memory allocate() const;
  void connect(ControlPlane* plane, const std::vector<int>& ranks, u32 epoch, u64 tag, u64 deadline_ns,
               const Poll& poll);
  std::string attach(const std::vector<int>& ranks, const std::vector<Parcel>& parcels, std::vector<Peer>& peers);
  void install_rail();
  void open_network(const std::vector<int>& ranks, const nccl::UniqueId& id, u64 deadline_ns, const Poll& poll);
  void make_network_id(nccl::UniqueId& id);
  void agree_on_network(ControlPlane* plane, const std::vector<int>& ranks, const nccl::UniqueId& id, u64 tag,
                        u64 deadline_ns, const Poll& poll);
  void end_network();
  void leave_rail();
  void install(const std::vector<int>& ranks, u32 epoch, Memory memory, std::vector<Peer> peers);

  // ---- What it has ready from the beginning, and its end (window.cc)

  bool has_left() noexcept;
  void prepare_unload();
  void prepare_gradients();
  void prepare_place_rows();
  void prepare_stage_rows();
  struct Remains;
  void keep_for_graph(const Capture& capture);

  const std::shared_ptr<Communicator> comm_;
  const std::shared_ptr<Gpu> gpu_;
  const GpuWindowShape shape_;
  const GpuWindowLayout layout_;
  const u64 heap_bytes_;  // without the landing
  const u64 id_;
  u64 hash_ = 0;
  transport::HostWords* host_ = nullptr;
  transport::WindowView view_;  // for the kernel's arguments
  DeviceMemory control_;
  const NcclPaths nccl_paths_;
  const int traffic_class_;
  std::shared_ptr<const nccl::Library> nccl_;  // null: not the network
  DeviceMemory rail_;                          // with nodes
  std::unique_ptr<GinNetwork> network_;        // of this epoch; ends before its memory
  bool is_rail_left_ = false;                  // to NICs that NCCL has not stopped
  u64 active_ = 0;                             // ranks of this epoch
  std::shared_ptr<ReceiveHeap> heap_;
  std::vector<std::shared_ptr<ReceiveHeap>> old_heaps_;  // that captured graphs point to
  std::vector<Peer> peers_;
  i32 num_sharing_ = 0;           // ranks of this process on this GPU, if ranks are threads
  std::set<std::string> loaded_;  // sources of kernels that all of them have loaded
  std::map<std::string, const Kernel*> prepared_;
  const Kernel* need_room_kernel_ = nullptr;
  WindowStats stats_;

  u64 ticket_ = 0;
  u64 num_launches_ = 0;
  u64 timeout_ns_ = 0;
  u64 error_caller_ = 0;  // of the record that is being raised
  std::map<u16, OperationConfig>
      calls_;  // by fingerprint without object and handle, to tell in words what a header says
  u64 last_stream_ = 0;
  std::shared_ptr<Event> last_event_;  // behind the last call outside of captures
  Capture capture_;                    // of the call that began last
  u64 last_capture_id_ = 0;
  u64 last_captured_stream_ = 0;
  // Behind the last call of that capture. One for all captures, which one thread at a time makes: an event that went back to
  // the GPU would be recorded by other threads, which crashes the driver while the capture ends that it was recorded in.
  std::shared_ptr<Event> last_captured_;
  u64 kept_for_id_ = 0;               // of the capture whose graph was last made to hold remains_
  std::shared_ptr<Remains> remains_;  // null: nothing was captured
  StagedRows staged_;                 // what unload() has to do; dispatch.cc sets it after launch()
  Half half_;                         // a staged call that has sent and not received
  bool is_retired_ = false;
  bool closed_ = false;
};

}  // namespace weft::nvlink
