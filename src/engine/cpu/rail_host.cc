#include "engine/cpu/rail_host.h"

#include <cstring>

#include "engine/cpu/pause.h"
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

void RailHost::settle(const Put& put) const {
  u8* control = window_.control_of(put.peer);
  u8* memory = control + window_.layout_.total_bytes;
  const auto copy = [&] {
    if (put.num_bytes > 0) std::memcpy(memory + put.to, memory_ + put.from, put.num_bytes);
  };
  sync::settle_put(copy, reinterpret_cast<u64*>(memory + put.signal));
  ring_doorbell(reinterpret_cast<ControlWords*>(control));
}

#if defined(WEFT_FAIL_POINTS)
namespace {
u64 random_below(u64 limit) {
  thread_local u64 state = 0x9e3779b97f4a7c15ull;
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state % limit;
}
}  // namespace

void RailHost::send(const Put& put) { held_.push_back(put); }

void RailHost::settle_any() {
  const auto any = held_.begin() + static_cast<i64>(random_below(held_.size()));
  const Put put = *any;
  held_.erase(any);
  settle(put);
}

void RailHost::settle_some() {
  if (held_.empty()) return;
  if (random_below(2) == 0) settle_any();
  ring_doorbell(window_.words());  // the wait does not sleep over what is left
}

RailHost::~RailHost() {
  while (!held_.empty()) settle_any();
}
#else
void RailHost::send(const Put& put) { settle(put); }
void RailHost::settle_some() {}
RailHost::~RailHost() = default;
#endif

}  // namespace weft::cpu
