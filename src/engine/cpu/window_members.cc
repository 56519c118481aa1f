// How a window is shared with newcomers, and what a change of the members does to it: docs/protocols/joining.md.
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>

#include "engine/cpu/memory_offer.h"
#include "engine/cpu/window.h"
#include "weft/sync/operation.h"

namespace weft::cpu {

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

}  // namespace weft::cpu
