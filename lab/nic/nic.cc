#include "nic/nic.h"

#include <atomic>
#include <cstring>

#include "base/status.h"
#include "weft/ptx/memory.h"

namespace weft::nic {

namespace {
constexpr u64 kRingFrames = 16;
constexpr u64 kPage = 4096;
}  // namespace

struct Nic::Slot {
  Frame frame;
  const u8* address = nullptr;  // of the bytes, if the two are threads of one process
  Space space = Space::kHost;
  bool is_applied = false;  // by the receiver
};

// Words as the page says. Zeroes are an empty ring.
struct Nic::Ring {
  alignas(64) std::atomic<u64> num_sent;
  alignas(64) std::atomic<u64> num_taken;
  alignas(64) Slot slots[kRingFrames];
};

bool Copier::copy(u8* to, Space to_space, const u8* from, Space from_space, u64 num_bytes) {
  if (to_space != Space::kHost || from_space != Space::kHost) return false;
  std::memcpy(to, from, num_bytes);
  return true;
}

bool Copier::add(u8* word, Space space, u64 value) {
  if (space != Space::kHost) return false;
  ptx::add_release_sys(reinterpret_cast<u64*>(word), value);
  return true;
}

u64 Nic::segment_bytes(int num_ranks, const Model& model) {
  const u64 ring = (sizeof(Ring) + kPage - 1) / kPage * kPage;
  return static_cast<u64>(num_ranks) * (ring + kRingFrames * model.frame_bytes);
}

Nic::Nic(int rank, const Model& model, std::vector<Segment> segments, Copier& copier)
    : model_(model), copier_(copier), peers_(segments.size()), egress_(static_cast<int>(segments.size()), model) {
  const u64 ring_bytes = segment_bytes(1, model);
  for (size_t idx = 0; idx < peers_.size(); ++idx) {
    peers_[idx].in = reinterpret_cast<Ring*>(segments[static_cast<size_t>(rank)].data + idx * ring_bytes);
    peers_[idx].out = reinterpret_cast<Ring*>(segments[idx].data + static_cast<u64>(rank) * ring_bytes);
    peers_[idx].is_thread = segments[idx].is_thread;
  }
}

u8* Nic::payload(Ring* ring, u64 n) const {
  return reinterpret_cast<u8*>(ring) + segment_bytes(1, model_) - (kRingFrames - n % kRingFrames) * model_.frame_bytes;
}

u32 Nic::add_region(const Region& region) {
  regions_.push_back(region);
  return static_cast<u32>(regions_.size() - 1);
}

void Nic::remove_region(u32 region) { regions_[region] = {}; }

u8* Nic::find(const Place& place, u64 num_bytes, Space* space) {
  if (place.region >= regions_.size()) return nullptr;
  const Region& region = regions_[place.region];
  if (region.data == nullptr || num_bytes > region.num_bytes || place.offset > region.num_bytes - num_bytes)
    return nullptr;
  *space = region.space;
  return region.data + place.offset;
}

bool Nic::fail(const std::string& text) {
  if (error_.empty()) error_ = text;
  return false;
}

u64 Nic::post(const Put& put, u64 now_ns) {
  if (put.peer < 0 || static_cast<size_t>(put.peer) >= peers_.size())
    throw_invalid_argument("a put to no rank of the group");
  Space space{};
  if (put.num_bytes > 0 && find(put.from, put.num_bytes, &space) == nullptr)
    throw_invalid_argument("a put of memory that is not registered");
  return egress_.post(put, now_ns);
}

void Nic::progress(u64 now_ns) {
  if (is_dark_) return;
  for (Peer& peer : peers_) take(peer);
  for (Peer& peer : peers_) collect(peer);
  egress_.progress(now_ns, [&](int peer, const Frame& frame, bool is_mute) { return deliver(peer, frame, is_mute); });
}

void Nic::drop_peer(int peer) {
  egress_.drop_peer(peer);
  peers_[static_cast<size_t>(peer)].is_dropped = true;
}

u64 Nic::num_again() const {
  u64 sum = 0;
  for (const Peer& peer : peers_) sum += peer.ingress.num_again();
  return sum;
}

// ---- the sender's end of a ring

Arrival Nic::deliver(int peer_idx, const Frame& frame, bool is_mute) {
  Peer& peer = peers_[static_cast<size_t>(peer_idx)];
  if (peer.tickets.size() >= kRingFrames) return Arrival::kNoRoom;
  Slot& slot = peer.out->slots[peer.num_sent % kRingFrames];
  slot = {frame, nullptr, Space::kHost, false};
  if (frame.num_bytes > 0) {
    const u8* bytes = find(frame.from, frame.num_bytes, &slot.space);
    const bool is_sent =
        bytes != nullptr && (peer.is_thread || copier_.copy(payload(peer.out, peer.num_sent), Space::kHost, bytes,
                                                            slot.space, frame.num_bytes));
    if (!is_sent) {
      if (!is_mute) fail("memory of a put could not be read");  // a mute frame may come when its put is done
      return Arrival::kOnItsWay;                                // for ever
    }
    if (peer.is_thread) slot.address = bytes;
  }
  // Pairs with the acquire in take().
  peer.out->num_sent.store(++peer.num_sent, std::memory_order_release);
  peer.tickets.push_back(is_mute ? 0 : frame.ticket);
  return Arrival::kOnItsWay;
}

void Nic::collect(Peer& peer) {
  // Pairs with the release in take().
  const u64 num_taken = peer.out->num_taken.load(std::memory_order_acquire);
  while (!peer.tickets.empty() && peer.num_sent - peer.tickets.size() < num_taken) {
    const Slot& slot = peer.out->slots[(peer.num_sent - peer.tickets.size()) % kRingFrames];
    if (slot.is_applied) egress_.acknowledge(peer.tickets.front());
    peer.tickets.pop_front();
  }
}

// ---- the receiver's

void Nic::take(Peer& peer) {
  const u64 num_sent = peer.in->num_sent.load(std::memory_order_acquire);
  for (u64 n = peer.in->num_taken.load(std::memory_order_relaxed); n < num_sent; ++n) {
    Slot& slot = peer.in->slots[n % kRingFrames];
    slot.is_applied = !peer.is_dropped && apply(peer, slot, payload(peer.in, n));
    peer.in->num_taken.store(n + 1, std::memory_order_release);
  }
}

bool Nic::apply(Peer& peer, const Slot& slot, const u8* bytes) {
  const Frame& frame = slot.frame;
  const auto copy = [&] {
    if (frame.num_bytes == 0) return true;
    Space space{};
    u8* to = frame.num_bytes <= model_.frame_bytes ? find(frame.to, frame.num_bytes, &space) : nullptr;
    if (to == nullptr) return fail("a put into memory that is not registered");
    const bool is_direct = slot.address != nullptr;
    return copier_.copy(to, space, is_direct ? slot.address : bytes, is_direct ? slot.space : Space::kHost,
                        frame.num_bytes) ||
           fail("memory of a put could not be written");
  };
  const auto signal = [&] {
    if (frame.add == 0) return true;
    Space space{};
    u8* word = frame.signal.offset % sizeof(u64) == 0 ? find(frame.signal, sizeof(u64), &space) : nullptr;
    if (word == nullptr) return fail("a signal in memory that is not registered");
    return copier_.add(word, space, frame.add) || fail("a signal could not be added to");
  };
  return peer.ingress.take(frame, copy, signal);
}

}  // namespace weft::nic
