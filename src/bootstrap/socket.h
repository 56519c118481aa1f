// Packets between ranks: SOCK_SEQPACKET unix sockets keep packets whole and file descriptors with their packet.
// A message is one packet or several in a row; nothing here ever blocks.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace weft {

inline constexpr uint32_t kPacketMagic = 0x4b504657;  // "WFPK"
inline constexpr uint16_t kPacketVersion = 5;
inline constexpr size_t kMaxPayloadBytes = 32 << 10;  // of one packet: several fit into a socket's default buffer

enum class PacketType : uint16_t { kHello = 1, kRefusal, kMessage, kAbort, kGoodbye, kNote, kDecision, kChallenge };

struct PacketHeader {
  uint32_t magic = kPacketMagic;
  uint16_t version = kPacketVersion;
  PacketType type{};
  uint64_t tag = 0;            // kMessage only
  uint32_t message_bytes = 0;  // of the whole message
  uint32_t offset = 0;         // of this packet's payload in the message; fds come with offset 0
  uint32_t payload_bytes = 0;  // in this packet
  uint32_t num_fds = 0;        // in this packet
};
static_assert(sizeof(PacketHeader) == 32);

// An abstract unix address (no file).
class SocketAddress {
 public:
  explicit SocketAddress(std::string_view name);
  const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&address_); }
  socklen_t bytes() const noexcept { return bytes_; }

 private:
  sockaddr_un address_{};
  socklen_t bytes_;
};

OwnedFd make_socket();  // non-blocking, close-on-exec

enum class SendResult { kSent, kFull, kGone };

// kGone also stands for what should not happen (logged): the receiver then waits until its deadline.
SendResult send_packet(int socket, const PacketHeader& header, std::span<const std::byte> payload,
                       std::span<const OwnedFd> fds) noexcept;

PacketHeader small_header(PacketType type, size_t num_bytes) noexcept;

// The bytes of plain data.
template <class Plain>
std::span<const std::byte> payload_of(const Plain& plain) noexcept {
  return std::as_bytes(std::span<const Plain, 1>(&plain, 1));
}

// A message that fits into one packet.
SendResult send_small(int socket, PacketType type, std::span<const std::byte> payload) noexcept;

enum class ReceiveResult { kPacket, kNothing, kEnd, kUnreachable, kBad };  // kUnreachable: of streams alone

class PacketReader {
 public:
  PacketReader() : buffer_(sizeof(PacketHeader) + kMaxPayloadBytes) {}

  // kPacket: header, payload and fds hold it until the next call; has_lost_fds: fewer fds came than were sent, since this
  // process has no room for more. kBad: `problem` says what is wrong with it.
  ReceiveResult receive(int socket);

  // The same of a stream, from bytes that have come: clear() first; check_header() as soon as a header is there, so that nothing is
  // waited for that it should not announce; then take() a whole packet, which stays valid until clear(). False: `problem`.
  void clear() noexcept;
  bool check_header(std::span<const std::byte> bytes);
  bool take(std::span<const std::byte> bytes);

  PacketHeader header;
  std::span<const std::byte> payload;
  std::vector<OwnedFd> fds;
  bool has_lost_fds = false;
  std::string problem;
  bool is_other_version = false;  // kBad: the sender is another Weft

 private:
  bool well_formed(size_t num_bytes, int flags);
  bool refuse(std::string text);

  std::vector<std::byte> buffer_;
};

}  // namespace weft
