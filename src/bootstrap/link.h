// One connection to a peer: what waits to be sent (any thread) and the message that is being received (monitor thread).
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "bootstrap/control_plane.h"
#include "bootstrap/socket.h"
#include "bootstrap/wire.h"

namespace weft {

// A message to one or several peers; shared by their queues.
struct OutgoingMessage {
  uint64_t tag;
  std::vector<std::byte> bytes;
  std::vector<OwnedFd> fds;
};

class Link {
 public:
  explicit Link(Wire wire) : wire_(std::move(wire)) {}

  int fd() const noexcept { return wire_.fd(); }
  bool is_stream() const noexcept { return wire_.is_stream(); }
  bool is_accepted() const noexcept { return wire_.is_accepted(); }

  // --- sending: any thread, never blocks -----------------------------------------------------------------------------
  void queue(std::shared_ptr<const OutgoingMessage> message);
  void send_abort(const AbortReason& reason) noexcept;  // overtakes messages; one may wait for room, more are dropped
  void send_note(const Note& note) noexcept;            // the same, but a later one takes the place of one that waits
  void send_decision(std::shared_ptr<const std::vector<std::byte>> decision) noexcept;  // as a note
  void flush() noexcept;                                                                // sends what there is room for
  bool waits_for_room() const noexcept;
  bool unsent() const noexcept;  // a message is not sent in full, and the peer is not known to be gone

  // The end of the connection, with or without a goodbye, best effort; also for processes that inherited the socket by fork.
  void shut() noexcept;                             // without a word
  void say_goodbye(std::string_view why) noexcept;  // and shut
  void close() noexcept;                            // after shut(), when no thread receives any more

  // --- receiving: monitor thread only --------------------------------------------------------------------------------
  // What a packet may turn into.
  struct Events {
    std::function<void(uint64_t tag, Parcel&&)> message;
    std::function<void(const AbortReason&)> abort;
    std::function<void(const Note&)> note;
    std::function<void(const std::string& why)> goodbye;
    std::function<void(const std::string& why)> refused;
    std::function<std::string(std::span<const std::byte>)> decision;  // what is wrong with it, empty if nothing
  };

  // Reads what there is, at most so many packets: a peer that sends without end must not keep others from being heard.
  // True when the connection has ended (refused ones included).
  bool receive(PacketReader& reader, const Events& events, int most_packets);
  bool is_unreachable() const noexcept {
    return is_unreachable_;
  }  // it has ended since the other machine did not answer

 private:
  struct Outgoing {
    std::shared_ptr<const OutgoingMessage> message;
    size_t offset;
  };

  bool flush_small() noexcept;
  bool flush_packet(Outgoing& outgoing) noexcept;
  void drop_outgoing() noexcept;
  std::string take(PacketReader& reader, const Events& events);  // what is wrong, empty if nothing
  void shut_locked() noexcept;
  std::string take_message(PacketReader& reader, const Events& events);

  Wire wire_;  // closed only when broken_

  mutable std::mutex mutex_;  // of the five below
  std::deque<Outgoing> outgoing_;
  std::optional<AbortReason> waiting_abort_;
  std::optional<Note> waiting_note_;
  std::shared_ptr<const std::vector<std::byte>> waiting_decision_;
  bool broken_ = false;  // nothing can be sent any more

  bool is_unreachable_ = false;
  bool in_message_ = false;
  uint64_t incoming_tag_ = 0;
  size_t incoming_bytes_ = 0;
  Parcel incoming_;
};

}  // namespace weft
