#include "engine/cpu/rail_host.h"

#include "engine/cpu/window.h"

namespace weft::cpu {

RailHost::RailHost(const Window& window)
    : window_(window),
      map_(window.rail_map()),
      layout_(window.rail_layout_),
      rank_(window.comm_->rank()),
      memory_(window.control_of(rank_) + window.layout_.total_bytes) {}

sync::RailSource RailHost::source(int peer) const {
  return {word(layout_.num_put(peer, 0)), word(layout_.credits(peer, 0)), static_cast<u32>(layout_.num_slots)};
}

sync::RailSink RailHost::sink(int peer) const {
  return {word(layout_.num_taken(peer, 0)), word(layout_.signals(peer, 0)), static_cast<u32>(layout_.num_slots)};
}

void RailHost::put(int peer, u64 num_bytes) {
  source(peer).post([&](u64 n) {
    send({peer, layout_.send_slot(peer, n), layout_.receive_slot(rank_, n), num_bytes, layout_.signal(rank_, 0, n)});
  });
}

void RailHost::give_credit(int peer) { send({peer, 0, 0, 0, layout_.credits(rank_, 0)}); }

RailMessage* RailHost::message_to(int peer) const {
  const u64 n = *word(layout_.num_put(peer, layout_.num_blocks));
  return reinterpret_cast<RailMessage*>(memory_ + layout_.message_out(peer, n));
}

void RailHost::put_message(int peer, u64 num_bytes) {
  u64* num_put = word(layout_.num_put(peer, layout_.num_blocks));
  send({peer, layout_.message_out(peer, *num_put), layout_.message_in(rank_, *num_put), num_bytes,
        layout_.message_signal(rank_, *num_put)});
  ++*num_put;
}

const RailMessage* RailHost::take_message(int peer) const {
  const sync::RailSink sink(word(layout_.num_taken(peer, layout_.num_blocks)),
                            word(layout_.signals(peer, layout_.num_blocks)), RailLayout::kNumMessages);
  const RailMessage* message = nullptr;
  if (!sink.has_arrived()) return message;
  const auto find = [&](u64 n) {
    message = reinterpret_cast<const RailMessage*>(memory_ + layout_.message_in(peer, n));
    return true;
  };
  sink.take(find, [] {});
  return message;
}

RailHost::Target RailHost::target(int peer) const {
  u8* control = window_.control_of(peer);
  return {control + window_.layout_.total_bytes, reinterpret_cast<ControlWords*>(control)};
}

}  // namespace weft::cpu
