// A window from its making to its end, where its memory lies, and what it says of itself. Its memory is made in window_memory.cc,
// grows in window_growth.cc, and is shared with newcomers in window_members.cc.
#include "engine/cpu/window.h"

#include <algorithm>
#include <new>
#include <utility>

#include "engine/cpu/memory_offer.h"
#include "engine/cpu/pause.h"
#include "engine/rail_memory.h"
#include "weft/sync/operation.h"

namespace weft::cpu {
namespace {

WindowLayout checked_layout(const WindowShape& shape) {
  const WindowLayout layout = WindowLayout::make(shape);
  if (!layout.ok) {
    throw_invalid_argument("window shape: " + std::to_string(shape.num_ranks) + " ranks, " +
                           std::to_string(shape.num_experts) + " experts, top_k " + std::to_string(shape.top_k) + ", " +
                           std::to_string(shape.max_tokens) + " tokens a rank of " +
                           std::to_string(shape.max_row_bytes) + " bytes; allowed: up to " + std::to_string(kMaxRanks) +
                           " ranks, experts divisible by the ranks, " + "top_k up to " + std::to_string(kMaxTopk) +
                           ", up to " + std::to_string(kMaxRowsPerPair) + " tokens, sizes within 64 bits");
  }
  return layout;
}

// Rows at offset 0 would make "no offset" ambiguous in messages, and a heap of no bytes cannot be mapped.
constexpr u64 kSmallestHeap = 4096;

RailLayout rail_layout(const WindowShape& shape) {
  return shape.has_nodes() ? make_rail_layout(rail_shape(shape, 1, shape.max_row_bytes)) : RailLayout();
}

}  // namespace

Window::Window(std::shared_ptr<Communicator> comm, const WindowShape& shape, u64 heap_bytes, u64 deadline_ns,
               const Poll& poll, u64 most_heap_bytes)
    : comm_(std::move(comm)),
      shape_(shape),
      layout_(checked_layout(shape)),
      rail_layout_(rail_layout(shape)),
      control_bytes_(layout_.total_bytes + rail_layout_.total_bytes),
      heap_bytes_(std::max(heap_bytes, kSmallestHeap)),
      most_heap_bytes_(std::max(most_heap_bytes, heap_bytes_)),
      id_(comm_->next_window_id()),
      peers_(static_cast<size_t>(shape.num_ranks)) {
  comm_->check_one_machine("a window");
  hash_ = hash_bytes(&shape_, sizeof(shape_), hash_bytes(&id_, sizeof(id_)));
  stats_.waited_ns.resize(static_cast<size_t>(shape.num_ranks));
  Memory memory = allocate();
  std::vector<Parcel> parcels =
      exchange_memory(nullptr, comm_->active_ranks(), kWindowTag | id_, memory, deadline_ns, poll);
  attach(parcels, deadline_ns, poll);
  control_ = std::move(memory.control);
  heap_ = std::move(memory.heap);
  if (!comm_->is_open()) {  // else newcomers are to have them, too
    control_.drop_fd();
    heap_->memory.drop_fd();
  }
  comm_->add_window(this);
}

// NOLINTNEXTLINE(readability-function-size): what its memory depends on, and how long it may take
Window::Window(std::shared_ptr<Communicator> comm, const WindowShape& shape, u64 heap_bytes, u64 id, u64 deadline_ns,
               const Poll& poll, u64 most_heap_bytes)
    : comm_(std::move(comm)),
      shape_(shape),
      layout_(checked_layout(shape)),
      rail_layout_(rail_layout(shape)),
      control_bytes_(layout_.total_bytes + rail_layout_.total_bytes),
      heap_bytes_(std::max(heap_bytes, kSmallestHeap)),
      most_heap_bytes_(std::max(most_heap_bytes, heap_bytes_)),
      id_(id),
      peers_(static_cast<size_t>(shape.num_ranks)) {
  hash_ = hash_bytes(&shape_, sizeof(shape_), hash_bytes(&id_, sizeof(id_)));
  stats_.waited_ns.resize(static_cast<size_t>(shape.num_ranks));
  Memory memory = allocate();
  if (memory.refusal) throw no_memory(comm_->rank(), static_cast<u64>(memory.refusal->code), memory.refusal->text);
  control_ = std::move(memory.control);
  heap_ = std::move(memory.heap);
  comm_->add_window(this);
  try {
    comm_->share_window(*this, deadline_ns, poll);
  } catch (...) {
    comm_->remove_window(this);
    throw;
  }
}

Window::~Window() { close(); }

void Window::close() {
  if (std::exchange(closed_, true)) return;
  comm_->remove_window(this);  // from here on no other thread knows it
  peers_.clear();
  control_ = SharedMemory();
  heap_.reset();  // results that are still held keep it
}

u8* Window::control_of(int rank) const {
  return reinterpret_cast<u8*>(rank == comm_->rank() ? control_.data() : peers_[rank].control.data());
}

RailMap Window::rail_map() const {
  RailMap map{shape_.num_ranks, static_cast<i32>(shape_.node_ranks), 0};
  for (int rank : comm_->active_ranks()) map.active |= u64{1} << rank;
  return map;
}

u8* Window::heap_of(int rank) const {
  return reinterpret_cast<u8*>(rank == comm_->rank() ? heap_->memory.data() : peers_[rank].heap.data());
}

std::optional<u64> Window::heap_offset(const void* pointer) const {
  if (closed_) return std::nullopt;
  const u8* base = reinterpret_cast<const u8*>(heap_->memory.data());
  const u8* place = static_cast<const u8*>(pointer);
  if (place < base || place >= base + heap_bytes_) return std::nullopt;
  return static_cast<u64>(place - base);
}

std::vector<Count> Window::counts() const {
  const auto seconds = [](u64 nanoseconds) { return static_cast<double>(nanoseconds) * 1e-9; };
  return {{"num_dispatches", stats_.num_dispatches},
          {"num_combines", stats_.num_combines},
          {"rows_sent", stats_.rows_sent},
          {"bytes_sent", stats_.bytes_sent},
          {"rows_received", stats_.rows_received},
          {"num_staged", stats_.num_staged},
          {"dispatch_s", seconds(stats_.dispatch_ns)},
          {"combine_s", seconds(stats_.combine_ns)},
          {"wait_us", microseconds(stats_.waited_ns)},
          {"heap_bytes", heap_bytes()},
          {"heap_used", heap_used()},
          {"heap_peak", heap_peak()},
          {"control_bytes", control_bytes_}};
}

std::optional<Block> Window::reserve(u64 num_bytes, u64 /*stream*/, OnCapture /*on_capture*/) {
  if (closed_) throw_invalid_state("the window is closed");
  const std::optional<u64> offset = heap_->heap.reserve(num_bytes);
  if (!offset) return std::nullopt;
  Block block;
  block.data = reinterpret_cast<u8*>(heap_->memory.data()) + *offset;
  block.num_bytes = num_bytes;
  block.in_heap = true;
  block.offset = *offset;
  block.owner =
      std::shared_ptr<void>(block.data, [heap = heap_, start = *offset](void*) { heap->heap.release(start); });
  return block;
}

Block Window::reserve_or_allocate(u64 num_bytes) {
  if (std::optional<Block> block = reserve(num_bytes, 0)) return std::move(*block);
  return allocate_block(num_bytes);
}

Block allocate_block(u64 num_bytes) {
  constexpr std::align_val_t kAlignment{64};
  Block block;
  block.num_bytes = num_bytes;
  block.data = static_cast<u8*>(::operator new(std::max<u64>(num_bytes, 1), kAlignment));
  block.owner = std::shared_ptr<void>(block.data, [](void* data) { ::operator delete(data, kAlignment); });
  return block;
}

void Window::notice_closed(u64 ranks) {
  ptx::st_release_sys(&words()->closed_peers, ranks);
  ring_doorbell(words());
}

void Window::leave_waits() {
  ptx::st_release_sys(&words()->abort, 1);
  ring_doorbell(words());
}

void Window::record_error(const AbortReason& reason) {
  ErrorRecord record = words()->error;  // expected and seen are there already if a wait of this window broke
  record.code = static_cast<u32>(reason.code);
  record.phase = reason.phase;
  record.op_kind = reason.op_kind;
  record.culprit = reason.rank;
  record.reporter = reason.reporter;
  record.epoch = reason.epoch;
  record.sequence = reason.sequence;
  record.late_peers = reason.peers.mask();
  sync::record_error(words(), record);
  heap_->heap.quarantine();
}

bool Window::is_busy() const { return ptx::ld_acquire_sys(&words()->owner) != 0; }

}  // namespace weft::cpu
