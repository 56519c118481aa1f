// Memory of a window and of its peers: made, handed on and mapped when the window is made and at each rebuild.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "base/log.h"
#include "engine/nvlink/host_wait.h"
#include "engine/nvlink/window.h"
#include "engine/rail_memory.h"

namespace weft::nvlink {
namespace {

// Beside the tag of a new window: the exchange whether all was mapped, and whether all have the network.
constexpr u64 kAttachedBit = u64{1} << 58;
constexpr u64 kNetworkBit = u64{1} << 57;

// What a rank says of its memory. Plain bytes.
struct MemoryOffer {
  GpuWindowShape shape;
  u64 control_bytes = 0;  // 0: it could not be made
  u64 heap_bytes = 0;
  u64 rail_bytes = 0;
  i32 gpu_index = 0;
  u32 is_rail_missing = 0;  // of what could not be made
  nccl::UniqueId network;   // with NCCL's network, of the first rank
  i32 nccl_version = 0;
  i32 unused = 0;
};

template <class Plain>
std::vector<std::byte> to_bytes(const Plain& plain) {
  std::vector<std::byte> bytes(sizeof(plain));
  std::memcpy(bytes.data(), &plain, sizeof(plain));
  return bytes;
}

template <class Plain>
Plain from_bytes(const std::vector<std::byte>& bytes, int rank) {
  Plain plain;
  if (bytes.size() != sizeof(plain)) throw_internal("rank " + std::to_string(rank) + " sent a malformed window");
  std::memcpy(&plain, bytes.data(), sizeof(plain));
  return plain;
}

std::string shape_text(const GpuWindowShape& shape) {
  return std::to_string(shape.num_experts) + " experts, top_k " + std::to_string(shape.top_k) + ", " +
         std::to_string(shape.max_tokens) + " tokens, landing rows of " + std::to_string(shape.landing_row_bytes) +
         " bytes, " + std::to_string(shape.num_blocks) + " blocks" + (has_gin(shape) ? ", NCCL between nodes" : "");
}

}  // namespace

struct Window::Memory {
  DeviceMemory control;
  DeviceMemory heap;
  DeviceMemory rail;
  bool is_rail_missing = false;  // the others could be made
};

// Not zeroed memory of another life is ever read: control words and heap are zero before anyone else can see them. Left
// empty if there is too little: the exchange tells every rank.
Window::Memory Window::allocate() const {
  Memory memory;
  try {
    memory.control = DeviceMemory::create(gpu_->device, layout_.control_bytes);
    memory.heap = DeviceMemory::create(gpu_->device, layout_.landing_bytes + heap_bytes_);
    if (has_nodes(shape_)) memory.rail = DeviceMemory::create(gpu_->device, rail_bytes(shape_));
  } catch (const Error& error) {
    log_line(kLogWarning, "rank " + std::to_string(comm_->rank()) + ": " + error.text);
    Memory none;
    none.is_rail_missing = memory.heap.is_mapped();
    return none;
  }
  for (const DeviceMemory* each : {&memory.control, &memory.heap, &memory.rail}) {
    if (!each->is_mapped()) continue;
    cuda::check(cuda::driver().memset_async(each->address(), 0, each->bytes(), gpu_->house_keeping), "cuMemsetD8Async");
  }
  gpu_->settle();
  return memory;
}

void Window::connect(ControlPlane* plane, const std::vector<int>& ranks, u32 epoch, u64 tag, u64 deadline_ns,
                     const Poll& poll) {
  Memory memory = allocate();
  const bool has_memory = memory.heap.is_mapped();
  MemoryOffer mine{shape_,
                   has_memory ? memory.control.bytes() : 0,
                   has_memory ? memory.heap.bytes() : layout_.landing_bytes + heap_bytes_,
                   has_memory ? memory.rail.bytes() : rail_bytes(shape_),
                   gpu_->index,
                   memory.is_rail_missing ? 1u : 0u,
                   {},
                   nccl_ != nullptr ? nccl_->version() : 0};
  if (nccl_ != nullptr && ranks.front() == comm_->rank()) make_network_id(mine.network);
  const auto exchange = [&](u64 step_tag, const std::vector<std::byte>& bytes, const std::vector<int>& fds) {
    return plane == nullptr ? comm_->exchange(step_tag, bytes, fds, deadline_ns, poll)
                            : plane->exchange(ranks, step_tag, bytes, fds, deadline_ns, poll);
  };
  std::vector<Parcel> parcels;
  if (has_memory) {
    const OwnedFd control_fd = memory.control.share(), heap_fd = memory.heap.share();
    std::vector<int> fds = {control_fd.get(), heap_fd.get()};
    OwnedFd rail_fd;
    if (shares_rails()) fds.push_back((rail_fd = memory.rail.share()).get());
    parcels = exchange(tag, to_bytes(mine), fds);
  } else {
    parcels = exchange(tag, to_bytes(mine), {});
  }
  std::vector<Peer> peers(static_cast<size_t>(shape_.num_ranks));
  std::string failure = attach(ranks, parcels, peers);
  // Until everyone has attached everything, nobody sends.
  const std::vector<std::byte> verdict(1, std::byte{failure.empty() ? u8{0} : u8{1}});
  const std::vector<Parcel> verdicts = exchange(plane == nullptr ? tag | kAttachedBit : tag + 1, verdict, {});
  for (int rank : ranks) {
    if (failure.empty() && verdicts[rank].bytes != std::vector<std::byte>(1)) {
      failure = "rank " + std::to_string(rank) + " could not make or map the memory of the window; its log says why";
    }
  }
  if (!failure.empty()) throw_invalid_argument(failure);
  install(ranks, epoch, std::move(memory), std::move(peers));
  if (nccl_ == nullptr) return;
  const nccl::UniqueId id = from_bytes<MemoryOffer>(parcels[ranks.front()].bytes, ranks.front()).network;
  const u64 step_tag = plane == nullptr ? tag | kNetworkBit : tag + 2;
  agree_on_network(plane, ranks, id, step_tag, deadline_ns, poll);
}

// All ranks have it, or all raise.
void Window::agree_on_network(ControlPlane* plane, const std::vector<int>& ranks, const nccl::UniqueId& id, u64 tag,
                              u64 deadline_ns, const Poll& poll) {
  std::string failure;
  ErrorCode code = ErrorCode::kUnsupported;
  try {
    if (id == nccl::UniqueId()) throw_unsupported("NCCL makes no network; the log of the first rank says why");
    open_network(ranks, id, deadline_ns, poll);
  } catch (const Error& error) {
    failure = error.text;
    code = error.code;
  }
  const std::vector<std::byte> said(1, std::byte{failure.empty() ? u8{0} : u8{1}});
  // Who has waited for NCCL until the deadline says so behind it.
  constexpr u64 kGraceNs = 2'000'000'000;
  deadline_ns = std::max(deadline_ns, now_ns() + kGraceNs);
  std::vector<Parcel> all;
  try {
    all = plane == nullptr ? comm_->exchange(tag, said, {}, deadline_ns, poll)
                           : plane->exchange(ranks, tag, said, {}, deadline_ns, poll);
  } catch (const Error&) {
    if (!failure.empty()) throw Error(code, failure, "connect");
    throw;
  }
  for (int rank : ranks) {
    if (failure.empty() && all[rank].bytes != std::vector<std::byte>(1)) {
      failure = "rank " + std::to_string(rank) + " has no network of NCCL; its error says why";
    }
  }
  if (failure.empty()) return;
  try {
    end_network();
  } catch (const Error& error) {
    log_line(kLogWarning, "rank " + std::to_string(comm_->rank()) + ": " + error.text);
  }
  throw Error(code, failure, "connect");
}

// Zeros where NCCL makes none, which all ranks see.
void Window::make_network_id(nccl::UniqueId& id) {
  try {
    nccl_->check(nccl_->get_unique_id(&id), "ncclGetUniqueId");
  } catch (const Error& error) {
    log_line(kLogWarning, "rank " + std::to_string(comm_->rank()) + ": " + error.text);
    id = {};
  }
}

// Maps what the peers offer. Returns why not, or nothing.
std::string Window::attach(const std::vector<int>& ranks, const std::vector<Parcel>& parcels,
                           std::vector<Peer>& peers) {
  num_sharing_ = 0;
  const size_t num_fds = shares_rails() ? 3 : 2;
  const RailMap map = rail_map(shape_, ~u64{0});
  for (int rank : ranks) {
    const auto offer = from_bytes<MemoryOffer>(parcels[rank].bytes, rank);
    const std::string name = "rank " + std::to_string(rank);
    if (std::memcmp(&offer.shape, &shape_, sizeof(shape_)) != 0) {
      return "the window of " + name + " has another shape (" + shape_text(offer.shape) + "), this rank's has " +
             shape_text(shape_) + "; shapes must be equal";
    }
    if (nccl_ != nullptr && offer.nccl_version != nccl_->version()) {
      return name + " has NCCL " + nccl::version_text(offer.nccl_version) + ", this rank " + nccl_->version_text() +
             "; between nodes all ranks need the same";
    }
    if (offer.is_rail_missing != 0) {
      return name + " has no room left on its GPU (" + rail_memory_text(offer.rail_bytes) +
             "); a smaller heap_bytes leaves more";
    }
    if (offer.control_bytes == 0 || (parcels[rank].fds.size() != num_fds && !parcels[rank].has_lost_fds)) {
      return "heap_bytes: " + name + " has no room for " + std::to_string(offer.heap_bytes) + " bytes (" +
             std::to_string(layout_.landing_bytes) + " of them the landing) on its GPU; allowed: what is free there";
    }
    if (parcels[rank].has_lost_fds) return "file descriptors of " + name + " were lost: raise ulimit -n on this rank";
    num_sharing_ += comm_->is_local() && offer.gpu_index == gpu_->index ? 1 : 0;
    peers[rank].heap_bytes = offer.heap_bytes;
    if (rank == comm_->rank()) continue;
    bool is_rail = shares_rails();
    try {
      if (is_rail) peers[rank].rail = DeviceMemory::attach(gpu_->device, parcels[rank].fds[2], offer.rail_bytes);
      is_rail = false;
      if (!map.are_mates(rank, comm_->rank())) continue;
      peers[rank].control = DeviceMemory::attach(gpu_->device, parcels[rank].fds[0], offer.control_bytes);
      peers[rank].heap = DeviceMemory::attach(gpu_->device, parcels[rank].fds[1], offer.heap_bytes);
    } catch (const Error& error) {
      log_line(kLogWarning, "rank " + std::to_string(comm_->rank()) + ": memory of " + name + ": " + error.text);
      return "the GPU memory of " + name + " can't be mapped here (" + error.text +
             "): are these GPUs joined by NVLink, and is " +
             (is_rail ? "rail memory (" + rail_memory_text(offer.rail_bytes) + ")"
                      : "heap_bytes (" + std::to_string(offer.heap_bytes) + " with the landing)") +
             " within what can be mapped?";
    }
  }
  return {};
}

// R13, R16: fresh physical memory behind the same addresses. R14: that of ranks that left is let go; our own kernels have
// ended. The own heap alone gets other addresses, if tensors of the old epoch are alive in it.
void Window::install(const std::vector<int>& ranks, u32 epoch, Memory memory, std::vector<Peer> peers) {
  const int me = comm_->rank();
  GpuControlWords words;
  GpuRankMask active = GpuRankMask::none();
  for (const int rank : ranks) active |= GpuRankMask::only(rank);
  words.membership = membership_word(static_cast<u16>(epoch), active);
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    if (rank == me) continue;
    if (peers[rank].control.is_mapped()) {
      peers_[rank].control.replace(std::move(peers[rank].control));
      peers_[rank].heap.replace(std::move(peers[rank].heap));
    } else {
      peers_[rank].control.drop();
      peers_[rank].heap.drop();
    }
    if (peers[rank].rail.is_mapped()) {
      peers_[rank].rail.replace(std::move(peers[rank].rail));
    } else {
      peers_[rank].rail.drop();
    }
    view_.control[rank] = peers_[rank].control.data();
    view_.heap[rank] = peers_[rank].heap.data();
    view_.heap_bytes[rank] = peers[rank].heap_bytes;
  }
  std::ranges::copy(waited_ns(), words.waited_ns);
  control_.replace(std::move(memory.control));
  if (has_nodes(shape_)) rail_.replace(std::move(memory.rail));
  active_ = active.word;
  half_ = Half();
  if (heap_ == nullptr || !heap_->renew(memory.heap)) {
    if (heap_ != nullptr) heap_->close();
    if (heap_ != nullptr && heap_->has_captured()) old_heaps_.push_back(heap_);
    if (heap_ != nullptr) ++view_.heap_generation;
    heap_ = std::make_shared<ReceiveHeap>(gpu_, std::move(memory.heap), layout_.landing_bytes, heap_bytes_);
  }
  words.heap_generation = view_.heap_generation;
  view_.layout = layout_;
  view_.rank = me;
  view_.num_ranks = shape_.num_ranks;
  view_.host = host_;
  view_.control[me] = control_.data();
  view_.heap[me] = heap_->memory().data();
  view_.heap_bytes[me] = heap_->memory().bytes();
  cuda::check(cuda::driver().copy_from_host_async(control_.address(), &words, sizeof(words), gpu_->house_keeping),
              "cuMemcpyHtoDAsync");
  if (shares_rails()) install_rail();
  gpu_->settle();
}

// R13: of each epoch another, whose first operation is that of the window.
void Window::install_rail() {
  transport::BlockRail rail;
  for (int rank = 0; rank < shape_.num_ranks; ++rank) {
    rail.memory[rank] = rank == comm_->rank() ? rail_.data() : peers_[rank].rail.data();
  }
  rail.layout = rail_layout(shape_);
  cuda::check(cuda::driver().copy_from_host_async(rail_.address() + rail_argument(shape_), &rail, sizeof(rail),
                                                  gpu_->house_keeping),
              "cuMemcpyHtoDAsync");
  gpu_->settle();
}

// R13: a communicator of NCCL's for each epoch, on the memory that is in its place by now.
void Window::open_network(const std::vector<int>& ranks, const nccl::UniqueId& id, u64 deadline_ns, const Poll& poll) {
  GinOpening opening;
  opening.context = gpu_->context;
  opening.ranks = ranks;
  opening.rank = comm_->rank();
  opening.map = rail_map(shape_, active_);
  opening.layout = rail_layout(shape_);
  opening.id = id;
  opening.memory = rail_.data();
  opening.num_bytes = rail_.bytes();
  opening.traffic_class = traffic_class_;
  network_ = GinNetwork::open(nccl_, opening, deadline_ns, poll, [this] { leave_rail(); });
  log_line(kLogInfo, "rank " + std::to_string(comm_->rank()) + ": between nodes " + network_->text());
  const transport::GinRail argument = network_->argument();
  cuda::check(cuda::driver().copy_from_host_async(rail_.address() + rail_argument(shape_), &argument, sizeof(argument),
                                                  gpu_->house_keeping),
              "cuMemcpyHtoDAsync");
  gpu_->settle();
}

// Before its memory is replaced.
void Window::end_network() {
  const std::unique_ptr<GinNetwork> network = std::move(network_);
  if (network == nullptr || network->close()) return;
  leave_rail();
  throw_invalid_state("NCCL has not ended the network of the old epoch after 10 s; nothing goes on in this window");
}

// To NICs that may still write there, for good. Graphs have its address, so no other memory can take its place (R16).
void Window::leave_rail() {
  static_cast<void>(new DeviceMemory(std::move(rail_)));
  is_rail_left_ = true;
}

KernelHeaders Window::kernel_headers() const {
  if (network_ == nullptr) return {};
  return {network_->macros() + nccl_paths_.prologue, nccl_paths_.includes};
}

void Window::renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32 epoch, u64 deadline_ns,
                   const Poll& poll) {
  if (is_rail_left_)
    throw_invalid_state("NCCL has not ended an earlier network of this window: close it, make another");
  const cuda::ContextScope scope(gpu_->context);
  const bool has_graphs = remains_.use_count() > 1;
  if (!wait_for_kernels(deadline_ns, poll) || (has_graphs && !gpu_->wait_until_idle(deadline_ns, poll))) {
    throw Error(ErrorCode::kCudaError,
                "rebuild: a kernel of the old epoch has not ended; its memory can't be replaced under it", "rebuild");
  }
  // Work that still reads tensors which were let go: as long as there is time, wait, so that the heap can keep its place.
  constexpr u64 kPatienceNs = 200'000'000;
  wait_on_host([&] { return heap_->is_settled(); }, std::min(deadline_ns, now_ns() + kPatienceNs), poll);
  end_network();
  connect(&plane, ranks, epoch, tag, deadline_ns, poll);
  prepared_.clear();  // the network's backend may be another one
  *host_ = transport::HostWords();
  host_->timeout_ns = timeout_ns_;  // a graph may be the first to run
  last_event_.reset();
  staged_ = StagedRows();
}

}  // namespace weft::nvlink
