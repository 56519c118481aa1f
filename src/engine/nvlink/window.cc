#include "engine/nvlink/window.h"

#include <cstring>
#include <new>

#include "base/clock.h"
#include "engine/cpu/rows.h"
#include "weft/ptx/memory.h"
#include "weft/sync/wait.h"

namespace weft::nvlink {
namespace {

constexpr u64 kWindowTag = u64{1} << 59;
constexpr cuda::Result kNotReady = 600;  // CUDA_ERROR_NOT_READY

struct MemoryOffer {
  WindowShape shape;
  u64 control_bytes;
  u64 heap_bytes;
};

WindowLayout checked_layout(const WindowShape& shape) {
  const WindowLayout layout = WindowLayout::make(shape);
  if (!layout.ok || shape.num_ranks > kMaxGpuRanks) throw_invalid_argument("no window between GPUs has this shape");
  return layout;
}

}  // namespace

Gpu::Gpu(int gpu_index, const jit::CompilerPaths& paths) : index(gpu_index) {
  cuda::check(cuda::driver().device_get(&device, index), "cuDeviceGet");
  cuda::check(cuda::driver().primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
  const cuda::ContextScope scope(context);
  kernels.emplace(device, paths);
}

Gpu::~Gpu() {
  {
    const cuda::ContextScope scope(context);
    kernels.reset();
  }
  cuda::driver().primary_context_release(device);
}

Window::Window(std::shared_ptr<Communicator> comm, std::shared_ptr<Gpu> gpu, const WindowShape& shape, u64 heap_bytes,
               u64 deadline_ns, const Poll& poll)
    : comm_(std::move(comm)),
      gpu_(std::move(gpu)),
      shape_(shape),
      layout_(checked_layout(shape)),
      heap_bytes_(heap_bytes),
      id_(comm_->next_window_id()),
      peers_(static_cast<size_t>(shape.num_ranks)) {
  hash_ = hash_bytes(&shape_, sizeof(shape_), hash_bytes(&id_, sizeof(id_)));
  const cuda::ContextScope scope(gpu_->context);
  void* host = nullptr;
  cuda::check(cuda::driver().host_alloc(&host, sizeof(transport::HostWords), cuda::kHostAllocMapped), "cuMemHostAlloc");
  host_ = new (host) transport::HostWords();
  connect(nullptr, comm_->active_ranks(), kWindowTag | id_, allocate(), deadline_ns, poll);
  comm_->add_window(this);
}

Window::~Window() {
  close();
  const cuda::ContextScope scope(gpu_->context);
  if (host_ != nullptr) cuda::driver().host_free(host_);
}

void Window::close() {
  if (std::exchange(closed_, true)) return;
  comm_->remove_window(this);
  const cuda::ContextScope scope(gpu_->context);
  peers_.clear();
}

u32* Window::num_ended() const {
  return reinterpret_cast<u32*>(control_.data() + align_up(layout_.total_bytes, kCacheLine));
}

Window::Memory Window::allocate() const {
  Memory memory;
  memory.control = DeviceMemory::create(gpu_->device, layout_.total_bytes + 2 * kCacheLine, &memory.control_fd);
  memory.heap = std::make_shared<ReceiveHeap>(gpu_->device, heap_bytes_, &memory.heap_fd);
  // New memory is zeroed: no word of another life is ever read.
  cuda::check(cuda::driver().memset_async(memory.control.address(), 0, memory.control.bytes(), nullptr),
              "cuMemsetD8Async");
  cuda::check(cuda::driver().stream_synchronize(nullptr), "cuStreamSynchronize");
  return memory;
}

void Window::connect(ControlPlane* plane, const std::vector<int>& ranks, u64 tag, Memory memory, u64 deadline_ns,
                     const Poll& poll) {
  const MemoryOffer mine{shape_, memory.control.bytes(), memory.heap->memory.bytes()};
  std::vector<std::byte> bytes(sizeof(mine));
  std::memcpy(bytes.data(), &mine, sizeof(mine));
  const std::vector<int> fds = {memory.control_fd.get(), memory.heap_fd.get()};
  const std::vector<Parcel> parcels = plane == nullptr ? comm_->exchange(tag, bytes, fds, deadline_ns, poll)
                                                       : plane->exchange(ranks, tag, bytes, fds, deadline_ns, poll);
  std::vector<Peer> peers(static_cast<size_t>(shape_.num_ranks));
  transport::WindowView view;
  view.layout = layout_;
  view.rank = comm_->rank();
  view.num_ranks = shape_.num_ranks;
  view.host = host_;
  for (int rank : ranks) {
    view.active_mask |= 1u << rank;
    MemoryOffer offer{};
    if (parcels[rank].bytes.size() != sizeof(offer) || parcels[rank].fds.size() != 2)
      throw_internal("a malformed window");
    std::memcpy(&offer, parcels[rank].bytes.data(), sizeof(offer));
    if (std::memcmp(&offer.shape, &shape_, sizeof(shape_)) != 0) {
      throw_invalid_argument("the window of rank " + std::to_string(rank) + " has another shape; shapes must be equal");
    }
    view.heap_bytes[rank] = offer.heap_bytes;
    if (rank == comm_->rank()) continue;
    peers[rank].control = DeviceMemory::attach(gpu_->device, parcels[rank].fds[0], offer.control_bytes);
    peers[rank].heap = DeviceMemory::attach(gpu_->device, parcels[rank].fds[1], offer.heap_bytes);
    view.control[rank] = peers[rank].control.data();
    view.heap[rank] = peers[rank].heap.data();
  }
  view.control[comm_->rank()] = memory.control.data();
  view.heap[comm_->rank()] = memory.heap->memory.data();
  control_ = std::move(memory.control);
  heap_ = std::move(memory.heap);
  peers_ = std::move(peers);
  view_ = view;
  sequence_ = 0;
}

void Window::renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u64 deadline_ns, const Poll& poll) {
  const cuda::ContextScope scope(gpu_->context);
  connect(&plane, ranks, tag, allocate(), deadline_ns, poll);
  *host_ = transport::HostWords();
}

std::optional<Block> Window::reserve(u64 num_bytes) {
  const std::optional<u64> offset = heap_->heap.reserve(num_bytes);
  if (!offset) return std::nullopt;
  Block block;
  block.data = heap_->memory.data() + *offset;
  block.num_bytes = num_bytes;
  block.in_heap = true;
  block.offset = *offset;
  block.owner =
      std::shared_ptr<void>(block.data, [heap = heap_, start = *offset](void*) { heap->heap.release(start); });
  return block;
}

void Window::begin(const OperationConfig& config, u64 timeout_ns) {
  if (closed_) throw_invalid_state("the window is closed");
  comm_->raise_if_unusable();
  check();
  view_.epoch = comm_->epoch();
  view_.print = fingerprint(config);
  ptx::st_relaxed_sys(&host_->timeout_ns, timeout_ns);
}

void Window::launch(const Kernel& kernel, i32 num_blocks, u64 stream, void* args) {
  void* params[] = {args};
  cuda::check(cuda::driver().launch(kernel.function, static_cast<unsigned>(num_blocks), 1, 1, kernel.num_threads, 1, 1,
                                    kernel.shared_bytes, reinterpret_cast<cuda::Stream>(stream), params, nullptr),
              "cuLaunchKernel");
  ++sequence_;
}

// NOLINTNEXTLINE(readability-function-size): half of it names, field by field, what the kernel is given
DispatchResult Window::dispatch(const DispatchArgs& args, const Poll& poll) {
  const cuda::ContextScope scope(gpu_->context);
  DispatchKernelConfig config;
  config.num_ranks = shape_.num_ranks;
  config.num_experts = shape_.num_experts;
  config.top_k = shape_.top_k;
  config.num_blocks = args.num_blocks;
  config.row_bytes = static_cast<i32>(args.row_bytes);
  config.scale_row_bytes = static_cast<i32>(args.scale_row_bytes);
  config.topk_is_int64 = args.topk_is_int64;
  config.num_groups = static_cast<i32>((shape_.max_tokens + 31) / 32);
  const Kernel& kernel = gpu_->kernels->prepare(with_stages(config, gpu_->kernels->shared_bytes()));

  OperationConfig operation;
  operation.kind = OpKind::kDispatch;
  operation.dtype = args.dtype;
  operation.row_bytes = args.row_bytes;
  operation.scale_row_bytes = args.scale_row_bytes;
  operation.max_tokens = args.max_tokens;
  operation.capacity = args.capacity;
  operation.hidden = static_cast<u32>(args.num_blocks);
  operation.window_hash = hash_;
  begin(operation, args.timeout_ns);

  const i64 max_rows = args.capacity >= 0 ? args.capacity : shape_.num_ranks * args.max_tokens;
  const auto reserve_rows = [&](i64 row_bytes) {
    std::optional<Block> block = reserve(static_cast<u64>(max_rows * row_bytes));
    if (!block)
      throw Error(ErrorCode::kCapacityExceeded, "heap_bytes: no room for " + std::to_string(max_rows) + " rows");
    return std::move(*block);
  };
  const i64 id_bytes = shape_.top_k * (args.topk_is_int64 ? 8 : 4);
  Block x = reserve_rows(args.row_bytes), ids = reserve_rows(id_bytes), weights = reserve_rows(shape_.top_k * 4);
  Block scales;
  if (args.scale_row_bytes > 0) scales = reserve_rows(args.scale_row_bytes);

  kernels::DispatchKernelArgs kernel_args;
  kernel_args.view = view_;
  kernel_args.x = reinterpret_cast<const u8*>(args.x);
  kernel_args.scales = reinterpret_cast<const u8*>(args.scales);
  kernel_args.topk_idx = reinterpret_cast<const void*>(args.topk_idx);
  kernel_args.topk_weights = reinterpret_cast<const float*>(args.topk_weights);
  kernel_args.num_tokens = static_cast<i32>(args.num_tokens);
  kernel_args.placement.in_heap = 1;
  kernel_args.placement.x = x.offset;
  kernel_args.placement.scales = scales.offset;
  kernel_args.placement.meta_idx = ids.offset;
  kernel_args.placement.meta_weights = weights.offset;
  kernel_args.placement.num_rows = max_rows;
  kernel_args.slot = reinterpret_cast<i32*>(args.slot);
  kernel_args.row_start = reinterpret_cast<i32*>(args.row_start);
  kernel_args.num_rows_to = reinterpret_cast<i32*>(args.num_rows_to);
  kernel_args.source_offset = reinterpret_cast<i32*>(args.source_offset);
  kernel_args.counts = reinterpret_cast<i32*>(args.counts);
  kernel_args.offsets = reinterpret_cast<i32*>(args.offsets);
  kernel_args.num_rows = reinterpret_cast<i32*>(args.num_rows);
  kernel_args.num_ended = num_ended();
  launch(kernel, args.num_blocks, args.stream, &kernel_args);

  DispatchResult result;
  i64 num_rows = max_rows;
  result.num_rows = -1;
  if (args.capacity < 0) {
    wait_for_counts(args.stream, poll);
    num_rows = result.num_rows = host_->num_rows;
    heap_->heap.split(x.offset, static_cast<u64>(num_rows * args.row_bytes));
    heap_->heap.split(ids.offset, static_cast<u64>(num_rows * id_bytes));
    heap_->heap.split(weights.offset, static_cast<u64>(num_rows * shape_.top_k * 4));
    if (scales.data != nullptr) heap_->heap.split(scales.offset, static_cast<u64>(num_rows * args.scale_row_bytes));
  }
  const auto array = [&](Block block, Dtype dtype, i64 row_bytes) {
    Array made;
    made.block = std::move(block);
    made.dtype = dtype;
    made.gpu = gpu_->index;
    made.shape = {num_rows, row_bytes / dtype_bytes(dtype)};
    return made;
  };
  result.x = array(std::move(x), args.dtype, args.row_bytes);
  result.topk_weights = array(std::move(weights), Dtype::kFp32, shape_.top_k * 4);
  result.topk_idx = array(std::move(ids), Dtype::kBytes, shape_.top_k);
  result.topk_idx.is_integer = true;
  result.topk_idx.is_int64 = args.topk_is_int64;
  if (scales.data != nullptr) result.scales = array(std::move(scales), Dtype::kBytes, args.scale_row_bytes);
  return result;
}

void Window::combine(const CombineArgs& args, const Poll&) {
  const cuda::ContextScope scope(gpu_->context);
  CombineKernelConfig config;
  config.num_ranks = shape_.num_ranks;
  config.num_blocks = args.num_blocks;
  config.hidden = static_cast<i32>(args.hidden);
  config.dtype = args.dtype;
  // Small enough chunks for several tokens in flight, large enough for the wire (docs/protocols/nvlink-combine.md).
  constexpr i32 kChunkBytes = 7168;
  const i32 vector = 16 / dtype_bytes(args.dtype);
  config.chunk = std::min(config.hidden, kChunkBytes / dtype_bytes(args.dtype) / vector * vector);
  const Kernel& kernel = gpu_->kernels->prepare(with_stages(config, gpu_->kernels->shared_bytes()));

  OperationConfig operation;
  operation.kind = OpKind::kCombine;
  operation.dtype = args.dtype;
  operation.row_bytes = args.hidden * dtype_bytes(args.dtype);
  operation.hidden = static_cast<u32>(args.num_blocks);
  operation.window_hash = hash_;
  begin(operation, args.timeout_ns);

  const u64 heap_begin = heap_->memory.address();
  u64 rows = args.y;
  Block copy;
  const u64 num_bytes = static_cast<u64>(args.num_rows * operation.row_bytes);
  if (args.num_rows > 0 && (rows < heap_begin || rows >= heap_begin + heap_bytes_)) {
    std::optional<Block> block = reserve(num_bytes);
    if (!block) throw Error(ErrorCode::kCapacityExceeded, "heap_bytes: no room for the rows of an ordinary tensor");
    copy = std::move(*block);
    rows = reinterpret_cast<u64>(copy.data);
    cuda::check(cuda::driver().copy_async(rows, args.y, num_bytes, reinterpret_cast<cuda::Stream>(args.stream)),
                "cuMemcpyDtoDAsync");
  }
  kernels::CombineKernelArgs kernel_args;
  kernel_args.view = view_;
  kernel_args.rows_offset = args.num_rows > 0 ? rows - heap_begin : 0;
  kernel_args.num_rows = args.num_rows;
  kernel_args.slot = reinterpret_cast<const i32*>(args.slot);
  kernel_args.row_start = reinterpret_cast<const i32*>(args.row_start);
  kernel_args.num_tokens = static_cast<i32>(args.num_tokens);
  kernel_args.bias = reinterpret_cast<const u8*>(args.bias);
  kernel_args.bias_is_fp32 = args.bias_is_fp32;
  kernel_args.bias_row_bytes = args.bias_is_2d ? args.hidden * (args.bias_is_fp32 ? 4 : dtype_bytes(args.dtype)) : 0;
  kernel_args.out = reinterpret_cast<u8*>(args.out);
  kernel_args.num_ended = num_ended();
  launch(kernel, args.num_blocks, args.stream, &kernel_args);
}

// ---- failure

namespace {

// The host's wait for a kernel: the kernel has the deadline, the host looks for Ctrl-C and for a GPU that has failed.
class StreamPause {
 public:
  StreamPause(u64 stream, const Poll& poll) : stream_(stream), poll_(poll) {}

  sync::PauseResult turn() {
    constexpr u64 kLookNs = 20'000'000;
    const u64 now = now_ns();
    if (next_look_ns_ == 0) next_look_ns_ = now + kLookNs;
    if (now < next_look_ns_) return sync::PauseResult::kLookAgain;
    next_look_ns_ = now + kLookNs;
    if (poll_) poll_();
    const cuda::Result state = cuda::driver().stream_query(reinterpret_cast<cuda::Stream>(stream_));
    if (state == kNotReady) return sync::PauseResult::kLookAgain;
    cuda::check(state, "a kernel before or in dispatch");
    return sync::PauseResult::kAbort;  // the stream has run dry
  }

 private:
  u64 stream_;
  const Poll& poll_;
  u64 next_look_ns_ = 0;
};

}  // namespace

void Window::wait_for_counts(u64 stream, const Poll& poll) {
  StreamPause pause(stream, poll);
  const auto is_told = [&] {
    return ptx::ld_acquire_sys(&host_->counted_sequence) >= sequence_ ||
           __atomic_load_n(&host_->error.code, __ATOMIC_ACQUIRE) != 0;
  };
  const sync::WaitResult result = sync::wait_until(is_told, pause);
  check();
  if (result != sync::WaitResult::kReady) throw_internal("dispatch ended without counts");
}

void Window::check() {
  if (__atomic_load_n(&host_->error.code, __ATOMIC_ACQUIRE) != 0) raise_error();
}

void Window::raise_error() {
  cuda::driver().stream_synchronize(nullptr);
  const ErrorRecord record = host_->error;
  AbortReason reason;
  reason.rank = record.culprit;
  reason.reporter = comm_->rank();
  reason.epoch = comm_->epoch();
  reason.sequence = record.sequence;
  reason.phase = record.phase;
  reason.peers = record.culprit >= 0 ? u64{1} << record.culprit : 0;
  switch (static_cast<transport::ErrorCause>(record.code)) {
    case transport::ErrorCause::kMismatch:
      host_->error = ErrorRecord{};
      throw Error(ErrorCode::kInvalidArgument,
                  "ranks called different things: rank " + std::to_string(record.culprit) + " has fingerprint " +
                      std::to_string(record.seen & 0xffff) + ", rank " + std::to_string(comm_->rank()) + " " +
                      std::to_string(record.expected & 0xffff) + "; the call was given up on every rank",
                  "", record.sequence, {record.culprit});
    case transport::ErrorCause::kAborted: comm_->leave_broken();
    case transport::ErrorCause::kDeadline: reason.code = AbortCode::kPeerTimeout; break;
    default: reason.code = AbortCode::kInternal; break;
  }
  comm_->fail(reason);
}

void Window::leave_waits() { ptx::st_release_sys(&host_->abort, 1); }

void Window::record_error(const AbortReason&) { heap_->heap.quarantine(); }

bool Window::is_busy() const {
  return ptx::ld_acquire_sys(&host_->finished_sequence) < sequence_ && host_->error.code == 0;
}

}  // namespace weft::nvlink
