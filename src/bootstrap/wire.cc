#include "bootstrap/wire.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace weft {
namespace {

bool must_wait(int error_number) { return error_number == EAGAIN || error_number == EWOULDBLOCK; }

bool is_unreachable(int error_number) {
  return error_number == ETIMEDOUT || error_number == EHOSTUNREACH || error_number == ENETUNREACH ||
         error_number == EHOSTDOWN;
}

// How many bytes left; -1: none could, or ever will, as errno says.
ssize_t send_some(int socket, std::span<iovec> parts) noexcept {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent;
}

}  // namespace

void Wire::reset() noexcept {
  socket_.reset();
  unsent_ = {};
  incoming_ = {};
}

SendResult Wire::send(const PacketHeader& header, std::span<const std::byte> payload,
                      std::span<const OwnedFd> fds) noexcept {
  if (!is_stream()) return send_packet(socket_.get(), header, payload, fds);
  if (!fds.empty()) return SendResult::kGone;
  const SendResult before = flush();
  return before == SendResult::kSent ? send_stream(header, payload) : before;
}

SendResult Wire::send_stream(const PacketHeader& header, std::span<const std::byte> payload) noexcept {
  PacketHeader sent_header = header;
  std::array<iovec, 2> parts{
      {{&sent_header, sizeof(sent_header)},
       {const_cast<std::byte*>(payload.data()), payload.size()}}};  // sendmsg does not write there
  const ssize_t sent = send_some(socket_.get(), parts);
  if (sent < 0) return unsent_result(errno);
  const auto bytes = std::as_bytes(std::span<const PacketHeader, 1>(&header, 1));
  size_t done = static_cast<size_t>(sent);
  if (done < bytes.size()) unsent_.assign(bytes.begin() + sent, bytes.end());
  done = done < bytes.size() ? 0 : done - bytes.size();
  unsent_.insert(unsent_.end(), payload.begin() + static_cast<ptrdiff_t>(done), payload.end());
  return SendResult::kSent;
}

SendResult Wire::flush() noexcept {
  while (!unsent_.empty()) {
    std::array<iovec, 1> parts{{{unsent_.data(), unsent_.size()}}};
    const ssize_t sent = send_some(socket_.get(), parts);
    if (sent < 0) return unsent_result(errno);
    unsent_.erase(unsent_.begin(), unsent_.begin() + sent);
  }
  return SendResult::kSent;
}

// The kernel tells the end of a connection once, to whoever asks first: a sender keeps it for the receiver.
SendResult Wire::unsent_result(int error_number) noexcept {
  if (must_wait(error_number)) return SendResult::kFull;
  std::atomic_ref(send_error_).store(error_number, std::memory_order_relaxed);
  return SendResult::kGone;
}

size_t Wire::wanted() const noexcept {
  if (incoming_.size() < sizeof(PacketHeader)) return sizeof(PacketHeader);
  PacketHeader header;
  std::memcpy(&header, incoming_.data(), sizeof(header));
  return sizeof(header) + header.payload_bytes;
}

ReceiveResult Wire::receive(PacketReader& reader) {
  if (!is_stream()) return reader.receive(socket_.get());
  reader.clear();
  // check: allow spin-loop: each turn takes bytes that are there, and a packet has few
  for (;;) {
    const size_t before = incoming_.size();
    if (before == sizeof(PacketHeader) && !reader.check_header(incoming_)) return ReceiveResult::kBad;
    const size_t end = wanted();
    if (before == end) {
      const bool is_good = reader.take(incoming_);
      incoming_.clear();
      return is_good ? ReceiveResult::kPacket : ReceiveResult::kBad;
    }
    incoming_.resize(end);
    ssize_t num_bytes = -1;
    do {
      num_bytes = recv(socket_.get(), incoming_.data() + before, end - before, MSG_DONTWAIT);
    } while (num_bytes < 0 && errno == EINTR);
    const int error = errno;
    incoming_.resize(before + static_cast<size_t>(std::max<ssize_t>(num_bytes, 0)));
    if (num_bytes < 0 && must_wait(error)) return ReceiveResult::kNothing;
    if (num_bytes > 0) continue;
    const int told = std::atomic_ref(send_error_).load(std::memory_order_relaxed);
    const bool is_lost = is_unreachable(told) || (num_bytes < 0 && is_unreachable(error));
    return is_lost ? ReceiveResult::kUnreachable : ReceiveResult::kEnd;
  }
}

}  // namespace weft
