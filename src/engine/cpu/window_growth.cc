// How the heap of a window grows, and how its memory is given back while it sleeps: docs/protocols/heap.md.
#include <algorithm>
#include <cstring>
#include <memory>
#include <utility>

#include "engine/cpu/memory_offer.h"
#include "engine/cpu/window.h"

namespace weft::cpu {

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

// Headers and words stay: the sequence goes on.
void Window::release_memory() {
  if (closed_) return;
  if (heap_->heap.used() > 0) {
    throw_invalid_state(std::to_string(heap_->heap.used()) + " bytes of the heap are in use by results of calls");
  }
  heap_->memory.release(0);
  if (!shape_.has_nodes()) control_.release(layout_.staging);  // behind it lie the words of rings
}

}  // namespace weft::cpu
