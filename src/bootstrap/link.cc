#include "bootstrap/link.h"

#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/status.h"

namespace weft {
namespace {

std::span<const std::byte> bytes_of(const std::vector<std::byte>& bytes) { return bytes; }

template <class Plain>
std::span<const std::byte> bytes_of(const Plain& plain) {
  return std::as_bytes(std::span<const Plain, 1>(&plain, 1));
}

}  // namespace

void Link::queue(std::shared_ptr<const OutgoingMessage> message) {
  const std::lock_guard lock(mutex_);
  if (!broken_) outgoing_.push_back({std::move(message), 0});
}

void Link::send_abort(const AbortReason& reason) noexcept {
  const std::lock_guard lock(mutex_);
  if (broken_ || waiting_abort_) return;
  waiting_abort_ = reason;
  flush_small();
}

void Link::send_note(const Note& note) noexcept {
  const std::lock_guard lock(mutex_);
  if (broken_) return;
  waiting_note_ = note;
  flush_small();
}

void Link::send_decision(std::shared_ptr<const std::vector<std::byte>> decision) noexcept {
  const std::lock_guard lock(mutex_);
  if (broken_) return;
  waiting_decision_ = std::move(decision);
  flush_small();
}

void Link::flush() noexcept {
  const std::lock_guard lock(mutex_);
  if (!flush_small()) return;
  while (!outgoing_.empty()) {
    Outgoing& first = outgoing_.front();
    if (!flush_packet(first)) return;
    if (first.offset == first.message->bytes.size()) outgoing_.pop_front();
  }
}

bool Link::waits_for_room() const noexcept {
  const std::lock_guard lock(mutex_);
  return !outgoing_.empty() || waiting_abort_.has_value() || waiting_note_.has_value() || waiting_decision_ ||
         wire_.has_unsent();
}

bool Link::unsent() const noexcept {
  const std::lock_guard lock(mutex_);
  return !outgoing_.empty() || wire_.has_unsent();
}

// False: there is no room for what follows, or nobody who would read it.
bool Link::flush_small() noexcept {
  if (broken_) return false;
  const SendResult rest = wire_.flush();
  if (rest == SendResult::kGone) drop_outgoing();
  if (rest != SendResult::kSent) return false;
  const auto send = [this](auto& waiting, PacketType type) {
    if (!waiting) return true;
    const SendResult result = wire_.send(small_header(type, bytes_of(*waiting).size()), bytes_of(*waiting), {});
    if (result == SendResult::kGone) drop_outgoing();
    if (result == SendResult::kSent) waiting.reset();
    return result == SendResult::kSent;
  };
  return send(waiting_abort_, PacketType::kAbort) && send(waiting_decision_, PacketType::kDecision) &&
         send(waiting_note_, PacketType::kNote);
}

bool Link::flush_packet(Outgoing& outgoing) noexcept {
  const OutgoingMessage& message = *outgoing.message;
  const auto payload = std::span(message.bytes).subspan(outgoing.offset);
  const auto part = payload.first(std::min(payload.size(), kMaxPayloadBytes));
  const auto fds = outgoing.offset == 0 ? std::span(message.fds) : std::span<const OwnedFd>();
  PacketHeader header;
  header.type = PacketType::kMessage;
  header.tag = message.tag;
  header.message_bytes = static_cast<uint32_t>(message.bytes.size());
  header.offset = static_cast<uint32_t>(outgoing.offset);
  header.payload_bytes = static_cast<uint32_t>(part.size());
  header.num_fds = static_cast<uint32_t>(fds.size());
  const SendResult result = wire_.send(header, part, fds);
  if (result == SendResult::kSent) outgoing.offset += part.size();
  if (result == SendResult::kGone) drop_outgoing();
  return result == SendResult::kSent;
}

void Link::drop_outgoing() noexcept {
  broken_ = true;
  outgoing_.clear();
  waiting_abort_.reset();
  waiting_note_.reset();
  waiting_decision_.reset();
}

void Link::shut() noexcept {
  flush();
  const std::lock_guard lock(mutex_);
  shut_locked();
}

void Link::say_goodbye(std::string_view why) noexcept {
  flush();
  const std::lock_guard lock(mutex_);
  const auto text = std::as_bytes(std::span(why.data(), why.size()));
  if (!broken_) wire_.send(small_header(PacketType::kGoodbye, text.size()), text, {});
  shut_locked();
}

void Link::shut_locked() noexcept {
  drop_outgoing();
  if (wire_.valid()) ::shutdown(wire_.fd(), SHUT_RDWR);
}

void Link::close() noexcept {
  const std::lock_guard lock(mutex_);
  wire_.reset();
  incoming_ = {};
}

bool Link::receive(PacketReader& reader, const Events& events, int most_packets) {
  for (int number = 0; number < most_packets; ++number) {
    std::string problem;
    switch (wire_.receive(reader)) {
      case ReceiveResult::kNothing: return false;
      case ReceiveResult::kUnreachable: is_unreachable_ = true; return true;
      case ReceiveResult::kEnd: return true;
      case ReceiveResult::kBad: problem = reader.problem; break;
      case ReceiveResult::kPacket: problem = take(reader, events); break;
    }
    if (!problem.empty()) {
      reader.fds.clear();
      events.refused("sent " + problem + " and was cut off");
      shut();
      return true;
    }
  }
  return false;
}

std::string Link::take(PacketReader& reader, const Events& events) {
  const std::span<const std::byte> payload = reader.payload;
  switch (reader.header.type) {
    case PacketType::kMessage: return take_message(reader, events);
    case PacketType::kAbort: {
      AbortReason reason;
      if (payload.size() != sizeof(reason)) return "an abort reason of " + std::to_string(payload.size()) + " bytes";
      std::memcpy(&reason, payload.data(), sizeof(reason));
      if (reason.code == AbortCode::kNone || reason.code > AbortCode::kDecided) return "an unknown abort code";
      events.abort(reason);
      return {};
    }
    case PacketType::kNote: {
      Note note;
      if (payload.size() != sizeof(note)) return "a note of " + std::to_string(payload.size()) + " bytes";
      std::memcpy(&note, payload.data(), sizeof(note));
      events.note(note);
      return {};
    }
    case PacketType::kGoodbye: {
      if (payload.size() > AbortReason::kTextBytes) return "a goodbye of " + std::to_string(payload.size()) + " bytes";
      events.goodbye({reinterpret_cast<const char*>(payload.data()), payload.size()});
      return {};
    }
    case PacketType::kRefusal: events.goodbye({}); return {};  // it gave up while it connected to others
    case PacketType::kHello:
    case PacketType::kChallenge: return "a second greeting";
    case PacketType::kDecision: return events.decision ? events.decision(payload) : "a decision";
  }
  return "a packet of unknown type";
}

std::string Link::take_message(PacketReader& reader, const Events& events) {
  const PacketHeader& header = reader.header;
  const bool fits = in_message_ ? header.tag == incoming_tag_ && header.message_bytes == incoming_bytes_ &&
                                      header.offset == incoming_.bytes.size()
                                : header.offset == 0;
  if (!fits) return "a packet that does not continue its message";
  if (!in_message_) {
    in_message_ = true;
    incoming_tag_ = header.tag;
    incoming_bytes_ = header.message_bytes;
    incoming_.bytes.reserve(incoming_bytes_);
    incoming_.fds = std::move(reader.fds);
    incoming_.has_lost_fds = reader.has_lost_fds;
  }
  incoming_.bytes.insert(incoming_.bytes.end(), reader.payload.begin(), reader.payload.end());
  if (incoming_.bytes.size() < incoming_bytes_) return {};
  in_message_ = false;
  events.message(incoming_tag_, std::exchange(incoming_, {}));
  return {};
}

}  // namespace weft
