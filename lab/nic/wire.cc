#include "nic/wire.h"

namespace weft::nic {

Egress::Egress(int num_peers, const Model& model)
    : model_(model),
      random_(model.seed),
      ports_(static_cast<size_t>(model.num_ports)),
      num_puts_(static_cast<size_t>(num_peers)) {}

u64 Egress::post(const Put& put, u64 now_ns) {
  const u64 ticket = ++num_tickets_;
  const u64 num_frames = std::max<u64>(1, (put.num_bytes + model_.frame_bytes - 1) / model_.frame_bytes);
  open_[ticket] = static_cast<u32>(num_frames);
  Frame frame;
  frame.ticket = ticket;
  frame.put_idx = num_puts_[static_cast<size_t>(put.peer)]++;
  frame.num_frames = static_cast<u32>(num_frames);
  frame.signal = put.signal;
  frame.add = put.add;
  for (u64 offset = 0; frame.idx < num_frames; ++frame.idx, offset += frame.num_bytes) {
    frame.num_bytes = static_cast<u32>(std::min<u64>(put.num_bytes - offset, model_.frame_bytes));
    frame.from = {put.from.region, put.from.offset + offset};
    frame.to = {put.to.region, put.to.offset + offset};
    schedule({put.peer, 0, false, frame}, now_ns);
  }
  return ticket;
}

void Egress::schedule(Flight flight, u64 now_ns) {
  if ((dropped_peers_ >> flight.peer & 1) != 0) return;
  const auto starts_ns = [&](const Port& port) { return std::max(port.free_ns, now_ns); };
  Port* chosen = nullptr;
  for (Port& port : ports_) {
    if (port.is_lost) continue;
    const bool is_better = chosen == nullptr || starts_ns(port) < starts_ns(*chosen) ||
                           (starts_ns(port) == starts_ns(*chosen) && port.num_bytes < chosen->num_bytes);
    if (is_better) chosen = &port;
  }
  if (chosen == nullptr) return;
  const u64 num_bytes = flight.frame.num_bytes;
  const double takes_ns =
      model_.port_bytes_per_s > 0 ? static_cast<double>(num_bytes) * 1e9 / model_.port_bytes_per_s : 0;
  chosen->free_ns = starts_ns(*chosen) + static_cast<u64>(takes_ns);
  chosen->num_bytes += num_bytes;
  flight.port = static_cast<size_t>(chosen - ports_.data());
  const u64 longer_ns = model_.spread_ns > 0 ? random_() % (model_.spread_ns + 1) : 0;
  flights_.emplace(chosen->free_ns + model_.latency_ns + longer_ns, flight);
}

void Egress::acknowledge(u64 ticket) {
  const auto found = open_.find(ticket);
  if (found != open_.end() && --found->second == 0) open_.erase(found);
}

void Egress::lose_port(int port, u64 now_ns) {
  const auto lost = static_cast<size_t>(port);
  ports_[lost].is_lost = true;
  std::vector<Flight> again;
  for (auto at = flights_.begin(); at != flights_.end();) {
    Flight& flight = at->second;
    if (flight.port != lost || flight.is_mute) {
      ++at;
      continue;
    }
    again.push_back(flight);
    flight.is_mute = random_() % 2 == 0;  // it arrives, and nobody here hears of it
    at = flight.is_mute ? std::next(at) : flights_.erase(at);
  }
  for (const Flight& flight : again) schedule(flight, now_ns);
}

void Egress::drop_peer(int peer) {
  dropped_peers_ |= u64{1} << peer;
  std::erase_if(flights_, [&](const auto& entry) { return entry.second.peer == peer; });
}

}  // namespace weft::nic
