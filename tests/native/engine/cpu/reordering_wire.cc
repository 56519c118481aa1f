// In place of src/engine/cpu/rail_wire.cc: the wire of the software NIC between nodes. Frames of chunks, messages and credits overtake
// each other, and now and then a port is lost. Its clock counts the looks of waits.
#include <cstring>

#include "engine/cpu/pause.h"
#include "engine/cpu/rail_host.h"
#include "engine/cpu/window.h"
#include "nic/wire.h"

namespace weft::cpu {

class RailHost::Wire {
 public:
  static constexpr u64 kSpread = 8;  // looks

  Wire(const RailHost& rails, u64 number)
      : rails_(rails), egress_(kMaxRanks, model(rails, number)), ingress_(kMaxRanks), loses_port_at_(number % 32) {
    if ((number + static_cast<u64>(rails.rank_)) % 4 != 0) loses_port_at_ = ~u64{0};
  }

  void post(const Put& put) {
    egress_.post({put.peer, {0, put.from}, {0, put.to}, put.num_bytes, {0, put.signal}, 1}, now_);
  }
  bool has_flights() const { return egress_.has_flights(); }

  void progress(u64 num_looks) {
    now_ += num_looks;
    if (now_ >= loses_port_at_) {
      egress_.lose_port(static_cast<int>(loses_port_at_ % 2), now_);
      loses_port_at_ = ~u64{0};
    }
    egress_.progress(now_, [&](int peer, const nic::Frame& frame, bool) {
      const Target to = rails_.target(peer);
      const auto copy = [&] {
        std::memcpy(to.rails + frame.to.offset, rails_.memory_ + frame.from.offset, frame.num_bytes);
        return true;
      };
      const auto signal = [&] {
        sync::settle_put([] {}, reinterpret_cast<u64*>(to.rails + frame.signal.offset));
        ring_doorbell(to.words);
        return true;
      };
      ingress_[static_cast<size_t>(peer)].take(frame, copy, signal);
      return nic::Arrival::kApplied;
    });
  }

 private:
  static nic::Model model(const RailHost& rails, u64 number) {
    nic::Model model;
    model.seed = number * kMaxRanks + static_cast<u64>(rails.rank_);
    model.spread_ns = kSpread;
    model.frame_bytes = 512;
    return model;
  }

  const RailHost& rails_;
  nic::Egress egress_;
  std::vector<nic::Ingress> ingress_;  // of each peer, for what this rank sends
  u64 now_ = 0;
  u64 loses_port_at_;
};

void RailHost::send(const Put& put) {
  thread_local u64 num_wires = 0;
  if (wire_ == nullptr) wire_ = std::make_shared<Wire>(*this, num_wires++);
  wire_->post(put);
}

void RailHost::settle_some() {
  if (wire_ == nullptr || !wire_->has_flights()) return;
  wire_->progress(1);
  ring_doorbell(window_.words());  // the wait does not sleep over what is left
}

RailHost::~RailHost() {
  while (wire_ != nullptr && wire_->has_flights()) wire_->progress(Wire::kSpread);
}

}  // namespace weft::cpu
