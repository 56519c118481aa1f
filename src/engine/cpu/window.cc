// check: allow-in-file file-size: the memory of one class: made together, grown, renewed, and shared with newcomers
#include "engine/cpu/window.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "base/clock.h"
#include "engine/cpu/pause.h"
#include "engine/rail_memory.h"
#include "weft/sync/operation.h"

namespace weft::cpu {
namespace {

constexpr u64 kWindowTag = u64{1} << 61;
constexpr u64 kAttachedTag = kWindowTag | u64{1} << 60;
constexpr u64 kPieceTag = kWindowTag | u64{1} << 59;  // of resize()
constexpr u64 kGrownTag = kPieceTag | u64{1} << 60;

// Followed by the text of the refusal, if there is one; in an offer to a newcomer, or of one, by the bytes of each piece by which the
// heap has grown, whose descriptors follow those of control memory and heap.
struct MemoryOffer {
  WindowShape shape;
  u64 heap_bytes;  // may differ from rank to rank, and the next, too
  u64 most_heap_bytes;
  u64 refusal_code;  // 0: the memory is there
};

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

// What the system refused this rank or a peer, as every rank raises it.
Error no_memory(int rank, u64 code, const std::string& text) {
  const bool is_known = code >= 1 && code <= static_cast<u64>(ErrorCode::kInternalError);
  return Error(is_known ? static_cast<ErrorCode>(code) : ErrorCode::kInternalError,
               "rank " + std::to_string(rank) + " could not make or map the memory of the window " + text);
}

Error named(const std::string& name, const Error& error) { return Error(error.code, "(" + name + "): " + error.text); }

// The refusals of `work` say which memory it is.
template <class Work>
void with_name(const std::string& name, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    throw named(name, error);
  }
}

std::string heap_text(u64 heap_bytes) { return "heap_bytes: " + std::to_string(heap_bytes); }

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* first = reinterpret_cast<const std::byte*>(text.data());
  return {first, first + text.size()};
}

std::string text_of(const std::vector<std::byte>& bytes, size_t from) {
  return {reinterpret_cast<const char*>(bytes.data()) + from, bytes.size() - from};
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

Parcel Window::offer() const {
  if (shape_.has_nodes()) throw_unsupported("a window with nodes takes no newcomers in");
  const std::lock_guard lock(peers_mutex_);
  const size_t num_fds = 2 + heap_->pieces.size();
  if (num_fds > kMaxMessageFds) {
    throw_unsupported("rank " + std::to_string(comm_->rank()) + ": the heap of the window has grown " +
                      std::to_string(heap_->pieces.size()) + " times, so newcomers can't map it (at most " +
                      std::to_string(kMaxMessageFds - 2) + "); after a recovery they can");
  }
  const MemoryOffer mine{shape_, heap_bytes_, most_heap_bytes_, 0};
  Parcel parcel;
  parcel.bytes.resize(sizeof(mine) + heap_->pieces.size() * sizeof(u64));
  std::memcpy(parcel.bytes.data(), &mine, sizeof(mine));
  parcel.fds.push_back(OwnedFd::duplicate(control_.fd()));
  parcel.fds.push_back(OwnedFd::duplicate(heap_->memory.fd()));
  size_t at = sizeof(mine);
  for (const ReceiveHeap::Piece& piece : heap_->pieces) {
    std::memcpy(parcel.bytes.data() + at, &piece.bytes, sizeof(piece.bytes));
    at += sizeof(piece.bytes);
    parcel.fds.push_back(OwnedFd::duplicate(piece.fd.get()));
  }
  return parcel;
}

Window::Peer Window::map(int rank, Parcel&& parcel) const {
  check_offer(rank, parcel);
  MemoryOffer offer;
  std::memcpy(&offer, parcel.bytes.data(), sizeof(offer));
  std::vector<u64> pieces((parcel.bytes.size() - sizeof(offer)) / sizeof(u64));
  if (!pieces.empty()) std::memcpy(pieces.data(), parcel.bytes.data() + sizeof(offer), pieces.size() * sizeof(u64));
  parcel.check_fds(2 + pieces.size(), "rank " + std::to_string(rank));
  const u64 bytes_of_pieces = std::accumulate(pieces.begin(), pieces.end(), u64{0});
  const u64 first_bytes =
      pieces.empty() ? offer.heap_bytes : SharedMemory::piece_bytes(bytes_of_pieces, offer.heap_bytes);
  Peer peer;
  peer.heap_bytes = offer.heap_bytes;
  peer.control = SharedMemory::attach(std::move(parcel.fds[0]), control_bytes_);
  peer.heap = SharedMemory::attach(std::move(parcel.fds[1]), first_bytes, offer.most_heap_bytes);
  for (size_t idx = 0; idx < pieces.size(); ++idx) peer.heap.append(parcel.fds[2 + idx], pieces[idx]);
  peer.control.drop_fd();
  peer.heap.drop_fd();
  return peer;
}

void Window::take_in(int slot, Parcel&& offer) {
  Peer peer = map(slot, std::move(offer));
  const std::lock_guard lock(peers_mutex_);
  peers_.at(static_cast<size_t>(slot)) = std::move(peer);
}

// As resize(), of a rank that works alone: nobody waits for it.
bool Window::match_heaps(const RankSet& members) {
  u64 wanted = 0;
  {
    const std::lock_guard lock(peers_mutex_);
    for (const int rank : members.ranks()) wanted = std::max(wanted, peers_.at(static_cast<size_t>(rank)).heap_bytes);
  }
  wanted = std::min(wanted, most_heap_bytes_);
  if (wanted <= heap_bytes_) return false;
  const u64 piece_bytes = SharedMemory::piece_bytes(heap_bytes_, wanted);
  OwnedFd piece = piece_bytes == 0 ? OwnedFd() : SharedMemory::make_piece(piece_bytes);
  {
    const std::lock_guard lock(peers_mutex_);
    if (piece_bytes != 0) {
      heap_->memory.append(piece, piece_bytes);
      heap_->pieces.push_back({std::move(piece), piece_bytes});
    }
    heap_bytes_ = wanted;
  }
  heap_->heap.grow(wanted);
  return true;
}

bool Window::has_taken_in(int slot) const {
  const std::lock_guard lock(peers_mutex_);
  return is_retired_ || (slot < static_cast<int>(peers_.size()) && peers_[static_cast<size_t>(slot)].control.valid());
}

void Window::unmap(int rank) {
  const std::lock_guard lock(peers_mutex_);
  peers_[static_cast<size_t>(rank)] = Peer();
}

// R14: who has left has ended its operations, and so has this rank, so nothing of it is used here any more.
void Window::change(const Step& step) {
  const std::lock_guard lock(peers_mutex_);
  for (const int rank : step.removed.ranks()) peers_[static_cast<size_t>(rank)] = Peer();
  if (shape_.has_nodes()) retire();  // chunks of rings have numbers that a newcomer does not know
  if (is_retired_) return;
  for (const int rank : step.added.ranks()) {
    if (rank == comm_->rank()) continue;
    if (!peers_[static_cast<size_t>(rank)].control.valid()) {
      if (step.gone.contains(rank)) continue;  // the operation behind this will break
      return retire();
    }
    if (step.is_new) continue;  // both are: neither knows where to begin
    auto* cell = reinterpret_cast<StartCell*>(control_of(rank) + layout_.start(comm_->rank()));
    ptx::st_relaxed_sys(&cell->sequence, words()->sequence);
    ptx::st_release_sys(&cell->epoch, step.epoch);  // pairs with the acquire in begin()
  }
  if (step.is_new) begin(step);
}

// Pages are kept, so sequence and parity go on (R21).
void Window::begin(const Step& step) {
  std::optional<u64> sequence;
  int first = -1;
  for (const int rank : step.members.ranks()) {
    const auto* cell = reinterpret_cast<const StartCell*>(control_of(comm_->rank()) + layout_.start(rank));
    const u64 epoch = ptx::ld_acquire_sys(&cell->epoch);
    const u64 theirs = ptx::ld_relaxed_sys(&cell->sequence);
    if (epoch != step.epoch) return retire();  // that rank has closed it
    if (sequence && *sequence != theirs) {
      throw_invalid_state(
          "the ranks came to one boundary after different numbers of calls: " + std::to_string(*sequence) +
          " on rank " + std::to_string(first) + ", " + std::to_string(theirs) + " on rank " + std::to_string(rank));
    }
    sequence = theirs;
    first = rank;
  }
  if (sequence) words()->sequence = *sequence;
}

std::string Window::control_text() const {
  const std::string control = "control memory: " + std::to_string(layout_.total_bytes) + " bytes";
  return shape_.has_nodes() ? rail_memory_text(rail_layout_.total_bytes) + "; " + control : control;
}

// What the system refuses is kept, and the exchange tells every rank.
Window::Memory Window::allocate() const {
  Memory memory;
  try {
    with_name(heap_text(heap_bytes_),
              [&] { memory.heap = std::make_shared<ReceiveHeap>(heap_bytes_, most_heap_bytes_); });
    with_name(control_text(), [&] { memory.control = SharedMemory::create(control_bytes_); });
    new (memory.control.data()) ControlWords();
  } catch (const Error& error) {
    memory.refusal = error;
  }
  return memory;
}

// Maps what the peers offer. Until everyone has mapped everything, nobody sends: who can't tells all.
void Window::attach(std::vector<Parcel>& parcels, u64 deadline_ns, const Poll& poll) {
  std::string refusal;
  for (int rank : comm_->active_ranks()) {
    if (rank == comm_->rank() || !refusal.empty()) continue;
    MemoryOffer offer;
    std::memcpy(&offer, parcels[rank].bytes.data(), sizeof(offer));
    try {
      with_name(heap_text(offer.heap_bytes), [&] { parcels[rank].check_fds(2, "rank " + std::to_string(rank)); });
      with_name(control_text(),
                [&] { peers_[rank].control = SharedMemory::attach(std::move(parcels[rank].fds[0]), control_bytes_); });
      with_name(heap_text(offer.heap_bytes), [&] {
        peers_[rank].heap =
            SharedMemory::attach(std::move(parcels[rank].fds[1]), offer.heap_bytes, offer.most_heap_bytes);
      });
      peers_[rank].control.drop_fd();
      peers_[rank].heap.drop_fd();
    } catch (const Error& error) {
      refusal = static_cast<char>(error.code) + error.text;
    }
  }
  raise_refusals(kAttachedTag, refusal, deadline_ns, poll);
}

// A rank's refusal, empty if it has none, is raised on all ranks.
void Window::raise_refusals(u64 tag, const std::string& mine, u64 deadline_ns, const Poll& poll) {
  const std::vector<Parcel> verdicts = comm_->exchange(tag | id_, bytes_of(mine), {}, deadline_ns, poll);
  for (int rank : comm_->active_ranks()) {
    const std::vector<std::byte>& verdict = verdicts[rank].bytes;
    if (verdict.empty()) continue;
    throw no_memory(rank, static_cast<u64>(verdict[0]), text_of(verdict, 1));
  }
}

// docs/protocols/heap.md: a piece of each rank, mapped by all; when everyone has told so, the allocators learn of them.
void Window::resize(u64 heap_bytes, u64 deadline_ns, const Poll& poll) {
  if (closed_) throw_invalid_state("the window is closed");
  if (heap_bytes < heap_bytes_ || heap_bytes > most_heap_bytes_) {
    throw_invalid_argument("heap_bytes: " + std::to_string(heap_bytes) + "; allowed: " + std::to_string(heap_bytes_) +
                           " to " + std::to_string(most_heap_bytes_));
  }
  const u64 piece_bytes = SharedMemory::piece_bytes(heap_bytes_, heap_bytes);
  std::vector<std::pair<int, u64>> before;  // of the heaps to which pieces were added: newcomers' may come meanwhile
  const auto append = [&](int rank, const OwnedFd& fd, u64 bytes) {
    const std::lock_guard lock(peers_mutex_);
    SharedMemory& heap = rank == comm_->rank() ? heap_->memory : peers_[static_cast<size_t>(rank)].heap;
    const u64 mapped = heap.bytes();
    heap.append(fd, bytes);
    before.emplace_back(rank, mapped);
  };
  std::string refusal;
  const auto try_to = [&](const auto& work) {
    try {
      if (refusal.empty()) with_name(heap_text(heap_bytes), work);
    } catch (const Error& error) {
      refusal = static_cast<char>(error.code) + error.text;
    }
  };
  OwnedFd piece;
  const std::unique_ptr<Communicator, void (*)(Communicator*)> held(
      comm_.get(), [](Communicator* comm) { comm->hold_newcomers(false); });
  try_to([&] {
    comm_->hold_newcomers(true);
    if (piece_bytes == 0) return;
    piece = SharedMemory::make_piece(piece_bytes);
    append(comm_->rank(), piece, piece_bytes);
  });
  std::vector<std::byte> told(sizeof(piece_bytes));
  std::memcpy(told.data(), &piece_bytes, sizeof(piece_bytes));
  const auto tell = [&](const std::vector<int>& fds) {
    return comm_->exchange(kPieceTag | id_, told, fds, deadline_ns, poll);
  };
  std::vector<Parcel> parcels;
  try {
    parcels = tell(piece.valid() && refusal.empty() ? std::vector<int>{piece.get()} : std::vector<int>{});
  } catch (const Error& error) {
    if (error.code != ErrorCode::kCapacityExceeded) throw;  // no descriptor to send: nothing has been sent
    refusal = static_cast<char>(error.code) + named(heap_text(heap_bytes), error).text;
    parcels = tell({});
  }
  for (int rank : comm_->active_ranks()) {
    if (rank == comm_->rank() || (parcels[rank].fds.empty() && !parcels[rank].has_lost_fds)) continue;
    try_to([&] {
      parcels[rank].check_fds(1, "rank " + std::to_string(rank));
      u64 its_bytes = 0;
      if (parcels[rank].bytes.size() != sizeof(its_bytes)) throw_internal("a piece of a heap of no size");
      std::memcpy(&its_bytes, parcels[rank].bytes.data(), sizeof(its_bytes));
      append(rank, parcels[rank].fds[0], its_bytes);
    });
  }
  try {
    raise_refusals(kGrownTag, refusal, deadline_ns, poll);
  } catch (...) {
    cut(before);
    throw;
  }
  {
    const std::lock_guard lock(peers_mutex_);
    heap_bytes_ = heap_bytes;
    if (piece.valid() && comm_->is_open()) heap_->pieces.push_back({std::move(piece), piece_bytes});
  }
  heap_->heap.grow(heap_bytes);
  comm_->note_changed_window();
}

void Window::cut(const std::vector<std::pair<int, u64>>& mapped) {
  const std::lock_guard lock(peers_mutex_);
  for (const auto& [rank, bytes] : mapped)
    (rank == comm_->rank() ? heap_->memory : peers_[static_cast<size_t>(rank)].heap).cut(bytes);
}

// Headers and words stay: the sequence goes on.
void Window::release_memory() {
  if (closed_) return;
  if (heap_->heap.used() > 0) {
    throw_invalid_state(std::to_string(heap_->heap.used()) + " bytes of the heap are in use by results of calls");
  }
  heap_->memory.release(0);
  if (!shape_.has_nodes()) control_.release(layout_.staging);  // behind it lie the words of rings
}

Window::~Window() { close(); }

void Window::close() {
  if (std::exchange(closed_, true)) return;
  comm_->remove_window(this);  // from here on no other thread knows it
  peers_.clear();
  control_ = SharedMemory();
  heap_.reset();  // results that are still held keep it
}

std::vector<Parcel> Window::exchange_memory(ControlPlane* plane, const std::vector<int>& ranks, u64 tag,
                                            const Memory& memory, u64 deadline_ns, const Poll& poll) {
  const auto offer_all = [&](const std::optional<Error>& refusal, const std::vector<int>& fds) {
    const MemoryOffer mine{shape_, heap_bytes_, most_heap_bytes_, refusal ? static_cast<u64>(refusal->code) : 0};
    std::vector<std::byte> bytes = bytes_of(std::string(sizeof(mine), '\0') + (refusal ? refusal->text : ""));
    std::memcpy(bytes.data(), &mine, sizeof(mine));
    return plane == nullptr ? comm_->exchange(tag, bytes, fds, deadline_ns, poll)
                            : plane->exchange(ranks, tag, bytes, fds, deadline_ns, poll);
  };
  std::vector<Parcel> parcels;
  if (memory.refusal) {
    parcels = offer_all(memory.refusal, {});
  } else {
    try {
      parcels = offer_all({}, {memory.control.fd(), memory.heap->memory.fd()});
    } catch (const Error& error) {
      if (error.code != ErrorCode::kCapacityExceeded) throw;  // no descriptor to send: nothing has been sent
      parcels = offer_all(named(heap_text(heap_bytes_), error), {});
    }
  }
  for (int rank : ranks) check_offer(rank, parcels[rank]);
  return parcels;
}

void Window::check_offer(int rank, const Parcel& parcel) const {
  const std::string name = "rank " + std::to_string(rank);
  MemoryOffer offer{};
  if (parcel.bytes.size() < sizeof(offer)) throw_internal(name + " sent a malformed window");
  std::memcpy(&offer, parcel.bytes.data(), sizeof(offer));
  if (offer.refusal_code != 0) {
    throw no_memory(rank, offer.refusal_code, text_of(parcel.bytes, sizeof(offer)));
  }
  if (std::memcmp(&offer.shape, &shape_, sizeof(shape_)) != 0) {
    throw_invalid_argument("the window of " + name + " has another shape (" + std::to_string(offer.shape.num_experts) +
                           " experts, top_k " + std::to_string(offer.shape.top_k) + ", " +
                           std::to_string(offer.shape.max_tokens) + " tokens, rows of " +
                           std::to_string(offer.shape.max_row_bytes) + " bytes); shapes must be equal");
  }
}

// R13: the control memory keeps its addresses and gets fresh pages; the heap is new, and the old one lives as long as a
// tensor holds it. R14: what is mapped of the ranks that left is let go.
void Window::renew(ControlPlane& plane, const std::vector<int>& ranks, u64 tag, u32, u64 deadline_ns,
                   const Poll& poll) {
  Memory memory = allocate();
  std::vector<Parcel> parcels = exchange_memory(&plane, ranks, tag, memory, deadline_ns, poll);
  std::vector<Peer> peers(static_cast<size_t>(shape_.num_ranks));
  for (int rank : ranks) {
    if (rank == comm_->rank()) continue;
    MemoryOffer offer;
    std::memcpy(&offer, parcels[rank].bytes.data(), sizeof(offer));
    parcels[rank].check_fds(2, "rank " + std::to_string(rank));
    SharedMemory fresh = SharedMemory::attach(std::move(parcels[rank].fds[0]), control_bytes_);
    peers[rank].heap = SharedMemory::attach(std::move(parcels[rank].fds[1]), offer.heap_bytes, offer.most_heap_bytes);
    peers[rank].heap.drop_fd();
    peers[rank].control = std::move(peers_[rank].control);
    if (peers[rank].control.valid()) {
      peers[rank].control.replace(std::move(fresh));
    } else {
      peers[rank].control = std::move(fresh);
    }
    peers[rank].control.drop_fd();
  }
  const std::lock_guard lock(peers_mutex_);
  control_.replace(std::move(memory.control));
  if (!comm_->is_open()) {
    control_.drop_fd();
    memory.heap->memory.drop_fd();
  }
  heap_ = std::move(memory.heap);
  peers_ = std::move(peers);
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
