// One operation in flight: its turn, its headers to and from every active peer, and every way it can end.
#pragma once

#include <array>
#include <cstring>
#include <optional>
#include <span>
#include <string>

#include "engine/apart.h"
#include "engine/cpu/pause.h"
#include "engine/cpu/rail_host.h"
#include "engine/cpu/window.h"
#include "engine/describe.h"
#include "weft/config/fail_point.h"
#include "weft/sync/header.h"
#include "weft/sync/operation.h"

namespace weft::cpu {

class Operation {
 public:
  // Takes the window. Errors: kInvalidState (closed, busy), or what the communicator broke with. Nothing is sent yet.
  Operation(Window& window, const OperationConfig& config, u64 timeout_ns, const Poll& poll);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;

  sync::Turn turn() const { return turn_; }
  int rank() const { return rank_; }
  const OperationConfig& config() const { return config_; }
  // Active peers of this node, whose memory this rank stores to, beginning with the next higher rank, so that not everyone aims at
  // the same one.
  std::span<const int> peers() const { return {peers_.data(), num_peers_}; }
  // All active ranks but this one, in the same order.
  std::span<const int> others() const { return {others_.data(), num_others_}; }
  RailHost& rails() { return rails_; }
  const RailHost& rails() const { return rails_; }
  const RailMap& map() const { return rails_.map(); }
  bool has_rails() const { return map().has_rails(); }
  // Who sends what is of `owner` in this node: the owner itself, or its forwarder here.
  int forwarder(int owner) const { return map().forwarder(owner, map().node(rank_)); }

  template <class Payload>
  Payload* payload_to(Phase phase, int peer) const {
    return reinterpret_cast<Payload*>(window_.control_of(peer) + window_.layout_.payload(phase, turn_.sequence, rank_));
  }
  template <class Payload>
  const Payload* payload_from(Phase phase, int peer) const {
    return reinterpret_cast<const Payload*>(window_.control_of(rank_) +
                                            window_.layout_.payload(phase, turn_.sequence, peer));
  }
  // `owner`: whose rows they are, in a window with nodes.
  u64* progress_at(int peer, Channel channel, int owner) const {  // written by this rank, waited for by the peer
    return reinterpret_cast<u64*>(window_.control_of(peer) + window_.layout_.progress_word(channel, rank_, owner));
  }
  u64* progress_from(int peer, Channel channel, int owner) const {  // written by the peer
    return reinterpret_cast<u64*>(window_.control_of(rank_) + window_.layout_.progress_word(channel, peer, owner));
  }

  // The header of `phase` to one peer, after its payload.
  template <class WritePayload>
  void send(Phase phase, int peer, const WritePayload& write_payload) {
    send_header(phase, peer, fingerprint_, write_payload);
  }
  void post(int peer, Channel channel, int owner, u32 n);
  // To the forwarders of all other nodes, who tell their ranks in this one's stead: the payload of `count`, and what write_more(node,
  // message) stores behind it; that returns the bytes of the whole.
  template <class WriteMore>
  void send_messages(const CountPayload& payload, const WriteMore& write_more) {
    put_messages(fingerprint_, &payload, sizeof(payload), write_more);
  }
  void send_messages(const CountPayload& payload) {
    send_messages(payload, [](int, RailMessage*) { return sizeof(RailMessage); });
  }
  // Of a source that this rank forwards for, after the headers of `count`.
  const RailMessage* message_of(int source) const { return messages_[static_cast<size_t>(source)]; }

  // The headers of `phase` from every active peer, those of `count` from every active rank. Errors: kInvalidArgument on every rank alike if fingerprints differ,
  // the reason of a refusal (both advance the sequence and leave the communicator whole); kPeerLost, kPeerTimeout.
  void wait_all(Phase phase);
  bool has_header(Phase phase, int peer) const;

  // Waits until ready(); late(peer) tells who is to blame if the deadline comes first, or that peer has closed.
  template <class Ready, class Late>
  void wait(Phase phase, const Ready& ready, const Late& late) {
    struct Watch {
      const Operation& op;
      const Late& late;
      WaitLog log;
      WaitNote note;
      void look() {
        if (op.poll_) op.poll_();
        u64 late_ranks = 0;
        for (int peer : op.others()) late_ranks |= late(peer) ? u64{1} << peer : 0;
        log.look(RankSet::of_mask(late_ranks));
        if (op.has_rails()) note.look(RankSet::of_mask(late_ranks));
        for (int peer : op.peers()) {
          if ((late_ranks >> peer & 1) != 0) op.raise_if_gone_on(phase, peer, late);
        }
      }
      const Phase phase;
    } watch{*this, late, WaitLog(*window_.comm_), WaitNote(*window_.comm_), phase};
    const Poll look = [&watch] { watch.look(); };  // one reference: no memory is allocated for it
    SleepingPause pause(window_.words(), deadline_ns_, look);
    const auto ready_or_hopeless = [&] {
      relay_messages();
      return ready() || late_and_closed(late) >= 0;
    };
    sync::WaitResult result;  // NOLINT(cppcoreguidelines-init-variables): the wait returns one or throws
    try {
      result = sync::wait_until(ready_or_hopeless, pause);
    } catch (...) {
      give_up(phase);
      throw;
    }
    if (result == sync::WaitResult::kReady) {
      const int closed = ready() ? -1 : late_and_closed(late);
      if (closed < 0) return;
      raise_if_gone_on(phase, closed, late);
      window_.comm_->fail(reason(AbortCode::kPeerClosed, phase, closed));
    }
    u64 late_peers = 0;
    for (int peer : others()) late_peers |= late(peer) ? u64{1} << peer : 0;
    break_off(result, phase, late_peers);
  }

  // Says to everyone that this rank cannot take part, and leaves as they do (R3). Every rank raises the error.
  [[noreturn]] void refuse(Phase phase, ErrorCode code, const std::string& text);
  // After the headers of `count`, or in place of them if `mine` is not 0: the largest number of tokens for which a rank needs
  // room; 0: none does. Else the operation has ended on every rank alike, and the communicator is whole. Raises as wait_all.
  i64 wait_for_need(i64 mine);
  // A peer's words make no sense (R19): everyone leaves, the communicator is broken.
  [[noreturn]] void fail_internal(Phase phase, int culprit);

  void finish();  // ended well: the sequence advances

 private:
  template <class WritePayload>
  void send_header(Phase phase, int peer, u16 print, const WritePayload& write_payload) {
    u8* control = window_.control_of(peer);
    auto* cell = reinterpret_cast<u64*>(control + window_.layout_.header(phase, turn_.sequence, rank_));
    sync::send_header(cell, sync::pack_header(turn_, print), write_payload);
    ring_doorbell(reinterpret_cast<ControlWords*>(control));
  }
  // A peer that owes something and will not send it. The word is read first: what the peer had sent is visible then, to this rank or
  // to the one that forwards for it here, and then it is for that one to say.
  template <class Late>
  int late_and_closed(const Late& late) {
    const u64 closed = ptx::ld_acquire_sys(&window_.words()->closed_peers);
    if (closed == 0) return -1;
    relay_messages();
    for (int peer : others()) {
      if (!map().are_mates(rank_, peer) && forwarder(peer) != rank_) continue;
      if ((closed >> peer & 1) != 0 && late(peer)) return peer;
    }
    return -1;
  }
  // Of a peer of this node: what it stores comes from itself.
  template <class Late>
  void raise_if_gone_on(Phase phase, int peer, const Late& late) const {
    const std::optional<std::string> text = gone_on_text(*window_.comm_, peer);
    if (!text || !late(peer)) return;
    AbortReason apart = reason(AbortCode::kAborted, phase, peer);
    apart.peers = RankSet::of({rank_, peer});
    set_text(apart, *text);
    window_.comm_->fail(apart);
  }
  template <class WriteMore>
  void put_messages(u16 print, const void* payload, size_t payload_bytes, const WriteMore& write_more) {
    for (int node = 0; has_rails() && node < map().num_nodes(); ++node) {
      const int peer = node == map().node(rank_) ? -1 : map().forwarder(rank_, node);
      if (peer < 0) continue;
      RailMessage* message = rails_.message_to(peer);
      *message = RailMessage{};
      message->header = sync::pack_header(turn_, print);
      std::memcpy(message->payload, payload, payload_bytes);
      rails_.put_message(peer, write_more(node, message));
    }
  }
  void put_refusals(const void* payload, size_t payload_bytes) {
    put_messages(kRefusalFingerprint, payload, payload_bytes, [](int, RailMessage*) { return sizeof(RailMessage); });
  }
  // As a forwarder: what has come of the messages goes to the ranks of this node. Called in every wait.
  void relay_messages();
  void relay(int source, const RailMessage& message);
  std::span<const int> senders(Phase phase) const { return phase == Phase::kCount ? others() : peers(); }
  u64 header_from(Phase phase, int peer) const;
  sync::HeaderState state_of(Phase phase, int peer) const;
  bool needs_room(Phase phase, int peer) const;  // its header stands for a need, not for a call without one
  OperationConfig config_from(int peer) const;
  bool is_of_other_call(Phase phase, int peer) const;
  // Where a peer refuses, or makes another call; `allows_needs`: not where one needs room for this call.
  void raise_disagreement(Phase phase, bool allows_needs);
  void wait_headers(Phase phase);
  [[noreturn]] void raise_refusal(Phase phase, int peer);
  [[noreturn]] void raise_mismatch(int peer);
  [[noreturn]] void break_off(sync::WaitResult result, Phase phase, u64 late_peers);
  std::string rails_text(const RankSet& late) const;
  void give_up(Phase phase);
  AbortReason reason(AbortCode code, Phase phase, int culprit) const;

  Window& window_;
  const OperationConfig config_;
  const u16 fingerprint_;
  const Poll& poll_;
  const int rank_;
  u64 deadline_ns_ = 0;
  sync::Turn turn_;
  RailHost rails_;
  std::array<int, kMaxRanks> others_{}, peers_{};
  size_t num_others_ = 0, num_peers_ = 0;
  std::array<const RailMessage*, kMaxRanks> messages_{};
  u64 to_relay_ = 0;  // sources whose message has not come
  bool ended_ = false;
};

}  // namespace weft::cpu
