// How the memory of a window is made: each rank its own, which all the others map. Made anew by a rebuild.
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "engine/cpu/memory_offer.h"
#include "engine/cpu/window.h"
#include "engine/rail_memory.h"

namespace weft::cpu {

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

}  // namespace weft::cpu
