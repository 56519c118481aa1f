// Making and closing a window, its heap and what it counts.
#include "engine/nvlink/window.h"

#include <cstddef>
#include <cstring>
#include <new>

#include "base/log.h"
#include "weft/ptx/memory.h"

namespace weft::nvlink {
namespace {

constexpr u64 kWindowTag = u64{1} << 59;
constexpr u64 kGraceNs = 1'000'000'000;   // close(): for calls that are about to end
constexpr u64 kLeaveNs = 10'000'000'000;  // close(): for kernels that were told to leave

GpuWindowLayout checked_layout(const GpuWindowShape& shape) {
  const GpuWindowLayout layout = GpuWindowLayout::make(shape);
  if (layout.ok) return layout;
  throw_invalid_argument("window shape: " + std::to_string(shape.num_ranks) + " ranks, " +
                         std::to_string(shape.num_experts) + " experts, top_k " + std::to_string(shape.top_k) + ", " +
                         std::to_string(shape.max_tokens) + " tokens a rank of " +
                         std::to_string(shape.landing_row_bytes) + " bytes, " + std::to_string(shape.num_blocks) +
                         " blocks; allowed between GPUs: up to " + std::to_string(kMaxGpuRanks) +
                         " ranks, experts divisible by the ranks, top_k up to " + std::to_string(kMaxTopk) +
                         ", up to " + std::to_string(kMaxRowsPerPair) + " tokens, sizes within 64 bits");
}

}  // namespace

// What a closed window leaves; graphs with calls of it hold it until they and their replays are gone.
struct Window::Remains {
  explicit Remains(std::shared_ptr<Gpu> of) : gpu(std::move(of)) {}
  ~Remains() {
    if (rest != nullptr) gpu->clean_up(std::move(rest));
  }
  Remains(const Remains&) = delete;
  Remains& operator=(const Remains&) = delete;

  std::shared_ptr<Gpu> gpu;
  std::shared_ptr<void> rest;
};

Window::Window(std::shared_ptr<Communicator> comm, std::shared_ptr<Gpu> gpu, const GpuWindowShape& shape,
               const WindowMemory& memory, u64 deadline_ns, const Poll& poll)
    : comm_(std::move(comm)),
      gpu_(std::move(gpu)),
      shape_(shape),
      layout_(checked_layout(shape)),
      heap_bytes_(align_up(memory.heap_bytes, Heap::kAlignment)),
      id_(comm_->next_window_id()),
      nccl_paths_(memory.nccl),
      traffic_class_(memory.traffic_class),
      nccl_(has_gin(shape) ? std::make_shared<nccl::Library>(memory.nccl.library) : nullptr),
      peers_(static_cast<size_t>(shape.num_ranks)) {
  comm_->check_one_machine("a window");
  hash_ = hash_bytes(&shape_, sizeof(shape_), hash_bytes(&id_, sizeof(id_)));
  const cuda::ContextScope scope(gpu_->context);
  // Threads on one GPU: what follows may wait for kernels, so all that was launched must be able to end.
  if (comm_->is_local()) gpu_->has_thread_ranks = true;
  if (comm_->is_local()) meet(deadline_ns, poll);
  host_ = new (std::memset(gpu_->take_host_page(), 0, transport::kHostPageBytes)) transport::HostWords();
  try {
    connect(nullptr, comm_->active_ranks(), comm_->epoch(), kWindowTag | id_, deadline_ns, poll);
    prepare_unload();
    prepare_gradients();
    prepare_place_rows();
    prepare_stage_rows();
    if (comm_->is_local()) meet(deadline_ns, poll);
  } catch (...) {
    if (network_ != nullptr && !network_->close()) static_cast<void>(new DeviceMemory(std::move(rail_)));
    gpu_->give_back_host_page(host_);
    throw;
  }
  comm_->add_window(this);
}

Window::~Window() { close(); }

// R18: nothing here waits for a peer. This rank's own kernels are given the time to end, for nothing that they use may be
// unmapped under them; if they don't, the memory is left to the end of the process.
void Window::close() {
  if (std::exchange(closed_, true)) return;
  comm_->remove_window(this);  // from here on no other thread knows it
  const cuda::QuietContextScope scope(gpu_->context);
  if (scope.ok() && !has_left()) {
    log_line(kLogWarning, "rank " + std::to_string(comm_->rank()) +
                              ": a kernel did not end when its window was closed; its memory is not given back");
    static_cast<void>(new std::vector<Peer>(std::move(peers_)));
    static_cast<void>(new DeviceMemory(std::move(control_)));
    static_cast<void>(new DeviceMemory(std::move(rail_)));
    static_cast<void>(new std::unique_ptr<GinNetwork>(std::move(network_)));
    static_cast<void>(new std::shared_ptr<ReceiveHeap>(std::move(heap_)));
    static_cast<void>(new std::vector<std::shared_ptr<ReceiveHeap>>(std::move(old_heaps_)));
    static_cast<void>(new std::shared_ptr<Event>(std::move(last_captured_)));
    return;
  }
  last_event_.reset();
  if (scope.ok()) heap_->close();  // else nothing is asked of the GPU
  for (const std::shared_ptr<ReceiveHeap>& heap : old_heaps_) {
    if (scope.ok()) heap->close();
  }
  // Results that are still held keep the heap. The page comes first: it goes last, and with it what holds the GPU, to which the
  // event goes back.
  struct Rest {
    // Where NCCL has not ended, what NICs may still write stays as it is.
    ~Rest() {
      if (network != nullptr && !network->close()) static_cast<void>(new DeviceMemory(std::move(rail)));
    }
    std::shared_ptr<void> page;
    std::shared_ptr<Event> captured;
    std::vector<Peer> peers;
    DeviceMemory control;
    DeviceMemory rail;
    std::unique_ptr<GinNetwork> network;
    std::shared_ptr<ReceiveHeap> heap;
    std::vector<std::shared_ptr<ReceiveHeap>> old_heaps;
  };
  std::shared_ptr<void> page(std::exchange(host_, nullptr),
                             [gpu = gpu_](void* host) { gpu->give_back_host_page(host); });
  auto rest = std::make_shared<Rest>();
  rest->page = std::move(page);
  rest->captured = std::move(last_captured_);
  rest->peers = std::move(peers_);
  rest->control = std::move(control_);
  rest->rail = std::move(rail_);
  rest->network = std::move(network_);
  rest->heap = std::move(heap_);
  rest->old_heaps = std::move(old_heaps_);
  if (remains_ == nullptr) return gpu_->clean_up(std::move(rest));
  remains_->rest = std::move(rest);
  remains_.reset();
}

void Window::keep_for_graph(const Capture& capture) {
  if (capture.graph == nullptr || capture.id == kept_for_id_) return;
  if (remains_ == nullptr) remains_ = std::make_shared<Remains>(gpu_);
  gpu_->keep_for(capture.graph, remains_);
  kept_for_id_ = capture.id;
}

bool Window::has_left() noexcept try {
  if (!wait_for_kernels(now_ns() + kGraceNs, {})) leave_waits();
  return wait_for_kernels(now_ns() + kLeaveNs, {});
} catch (const std::exception&) {
  return true;  // a GPU that has failed runs no kernel any more
}

// ---- the heap

// R20: after a broken operation peers may still write where they were told to; until the rebuild nothing is handed out.
bool Window::is_broken() const { return ptx::ld_acquire_sys(&host_->abort) == ~u64{0}; }

bool Window::hands_out() const {
  if (closed_) throw_invalid_state("the window is closed");
  return !is_broken();
}

std::optional<Block> Window::reserve(u64 num_bytes, u64 stream, OnCapture on_capture) {
  if (!hands_out()) return std::nullopt;
  const cuda::ContextScope scope(gpu_->context);
  const Capture capture = capture_of(stream);
  if (capture.is_active && on_capture == OnCapture::kNothing) return std::nullopt;
  if (capture.is_active) keep_for_graph(capture);
  return heap_->reserve(num_bytes, stream, capture.is_active);
}

std::vector<u64> Window::waited_ns() const {
  std::vector<u64> waited(static_cast<size_t>(shape_.num_ranks));
  if (!control_.is_mapped()) return waited;
  const cuda::ContextScope scope(gpu_->context);
  const cuda::RelaxedCaptureScope relaxed;
  cuda::check(
      cuda::driver().copy_to_host_async(waited.data(), control_.address() + offsetof(GpuControlWords, waited_ns),
                                        waited.size() * sizeof(u64), gpu_->house_keeping),
      "cuMemcpyDtoHAsync");
  gpu_->settle();
  return waited;
}

void Window::copy_waited_ns(u64 to, u64 stream) const {
  if (closed_ || !control_.is_mapped()) throw_invalid_state("the window is closed");
  const cuda::ContextScope scope(gpu_->context);
  cuda::check(cuda::driver().copy_async(to, control_.address() + offsetof(GpuControlWords, waited_ns),
                                        static_cast<size_t>(shape_.num_ranks) * sizeof(u64),
                                        reinterpret_cast<cuda::Stream>(stream)),
              "cuMemcpyDtoDAsync");
}

std::vector<Count> Window::counts() const {
  return {{"num_dispatches", stats_.num_dispatches},
          {"num_combines", stats_.num_combines},
          {"num_staged", stats_.num_staged},
          {"wait_us", microseconds(waited_ns())},
          {"heap_bytes", heap_bytes()},
          {"heap_used", heap_used()},
          {"heap_peak", heap_peak()},
          {"control_bytes", layout_.control_bytes},
          {"landing_bytes", layout_.landing_bytes}};
}

bool Window::owns(u64 address) const { return !closed_ && heap_->owns(address); }

}  // namespace weft::nvlink
