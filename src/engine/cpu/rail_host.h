// The rails of a window on the host: rings and messages to and from the ranks that this one forwards for, and its own forwarders. The
// protocol is docs/protocols/rail.md. Everything but send() looks at this rank's own memory, so a network between machines is
// another send(), and whoever applies there what it sends.
#pragma once

#include <memory>

#include "weft/layout/rail.h"
#include "weft/sync/header.h"
#include "weft/sync/rail.h"

namespace weft::cpu {

class Window;

class RailHost {
 public:
  explicit RailHost(const Window& window);
  ~RailHost();  // what was sent has settled
  RailHost(const RailHost&) = delete;
  RailHost& operator=(const RailHost&) = delete;

  const RailMap& map() const { return map_; }
  const RailLayout& layout() const { return layout_; }

  // ---- chunks; put() and give_credit() never wait
  sync::RailSource source(int peer) const;
  sync::RailSink sink(int peer) const;
  u8* send_slot(int peer, u64 n) const { return memory_ + layout_.send_slot(peer, n); }
  const u8* receive_slot(int peer, u64 n) const { return memory_ + layout_.receive_slot(peer, n); }
  void put(int peer, u64 num_bytes);  // the slot that is next
  void give_credit(int peer);

  // ---- messages: one an operation, so there is always a place
  RailMessage* message_to(int peer) const;
  void put_message(int peer, u64 num_bytes);
  const RailMessage* take_message(int peer) const;  // null: it has not come

  // In every look of a wait.
  void settle_some();

 private:
  u64* word(u64 offset) const { return reinterpret_cast<u64*>(memory_ + offset); }
  // Bytes of this rank's memory into the peer's, then its signal there.
  struct Put {
    int peer;
    u64 from, to, num_bytes, signal;
  };
  struct Target {  // memory of a peer, and what its waits look at
    u8* rails;
    ControlWords* words;
  };
  Target target(int peer) const;

  // rail_wire.cc: what is sent has settled on return. Native tests link tests/native/engine/cpu/reordering_wire.cc in its place.
  class Wire;
  void send(const Put& put);

  const Window& window_;
  const RailMap map_;
  const RailLayout& layout_;
  const int rank_;
  u8* const memory_;
  std::shared_ptr<Wire> wire_;
};

}  // namespace weft::cpu
