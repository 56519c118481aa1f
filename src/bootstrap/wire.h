// One end of a connection that carries packets: a unix socket, which keeps them whole, or a TCP stream, which does not.
#pragma once

#include <atomic>
#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"
#include "bootstrap/socket.h"

namespace weft {

// One thread sends at a time and one receives; they may be two.
class Wire {
 public:
  enum class Kind { kPackets, kStream, kAcceptedStream };

  Wire() = default;
  Wire(OwnedFd socket, Kind kind = Kind::kPackets) : socket_(std::move(socket)), kind_(kind) {}  // NOLINT: as it is

  int fd() const noexcept { return socket_.get(); }
  bool valid() const noexcept { return socket_.valid(); }
  bool is_stream() const noexcept { return kind_ != Kind::kPackets; }
  bool is_accepted() const noexcept { return kind_ == Kind::kAcceptedStream; }
  void reset() noexcept;

  // As send_packet() of socket.h. Of a stream a packet that has begun counts as sent: the rest leaves with flush(). Descriptors
  // can't be sent along a stream; kGone if there are any.
  SendResult send(const PacketHeader& header, std::span<const std::byte> payload,
                  std::span<const OwnedFd> fds) noexcept;
  SendResult flush() noexcept;  // kSent: nothing waits
  bool has_unsent() const noexcept { return !unsent_.empty(); }

  // As PacketReader::receive(). Of a stream no byte behind the packet is taken.
  ReceiveResult receive(PacketReader& reader);

 private:
  SendResult send_stream(const PacketHeader& header, std::span<const std::byte> payload) noexcept;
  SendResult unsent_result(int error_number) noexcept;
  size_t wanted() const noexcept;

  OwnedFd socket_;
  Kind kind_ = Kind::kPackets;
  alignas(std::atomic_ref<int>::required_alignment) int send_error_ = 0;  // why nothing leaves any more
  std::vector<std::byte> unsent_;                                         // of the packet that has begun
  std::vector<std::byte> incoming_;                                       // likewise
};

}  // namespace weft
