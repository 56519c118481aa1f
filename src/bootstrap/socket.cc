#include "bootstrap/socket.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/log.h"
#include "base/status.h"
#include "bootstrap/control_plane.h"

namespace weft {
namespace {

struct alignas(cmsghdr) ControlBuffer {
  std::array<std::byte, CMSG_SPACE(kMaxMessageFds * sizeof(int))> bytes;
};

void append_fds(msghdr& message, std::vector<OwnedFd>& fds) {
  for (cmsghdr* control = CMSG_FIRSTHDR(&message); control != nullptr; control = CMSG_NXTHDR(&message, control)) {
    if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
    const size_t num_fds = (control->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t idx = 0; idx < num_fds; ++idx) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(control) + idx * sizeof(int), sizeof(int));
      fds.emplace_back(fd);
    }
  }
}

void attach_fds(msghdr& message, ControlBuffer& buffer, std::span<const OwnedFd> fds) noexcept {
  if (fds.empty()) return;
  message.msg_control = buffer.bytes.data();
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* control = CMSG_FIRSTHDR(&message);
  control->cmsg_level = SOL_SOCKET;
  control->cmsg_type = SCM_RIGHTS;
  control->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  for (size_t idx = 0; idx < fds.size(); ++idx) {
    const int fd = fds[idx].get();
    std::memcpy(CMSG_DATA(control) + idx * sizeof(int), &fd, sizeof(int));
  }
}

}  // namespace

SocketAddress::SocketAddress(std::string_view name) {
  address_.sun_family = AF_UNIX;
  const size_t name_bytes = std::min(name.size(), sizeof(address_.sun_path) - 1);
  std::memcpy(address_.sun_path + 1, name.data(), name_bytes);
  bytes_ = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_bytes);
}

OwnedFd make_socket() {
  OwnedFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.valid()) throw_system_error("making a unix socket", errno);
  return fd;
}

SendResult send_packet(int socket, const PacketHeader& header, std::span<const std::byte> payload,
                       std::span<const OwnedFd> fds) noexcept {
  PacketHeader sent_header = header;
  iovec parts[2] = {{&sent_header, sizeof(sent_header)},
                    {const_cast<std::byte*>(payload.data()), payload.size()}};  // sendmsg does not write there
  ControlBuffer control{};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = payload.empty() ? 1 : 2;
  attach_fds(message, control, fds);
  // check: allow spin-loop: repeats only when a signal interrupted it
  for (;;) {
    if (sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL) >= 0) return SendResult::kSent;
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return SendResult::kFull;
    if (errno != EPIPE && errno != ECONNRESET && errno != ENOTCONN) {
      log_line(kLogError, "sending to a rank failed: " + std::system_category().message(errno));
    }
    return SendResult::kGone;
  }
}

PacketHeader small_header(PacketType type, size_t num_bytes) noexcept {
  PacketHeader header;
  header.type = type;
  header.message_bytes = header.payload_bytes = static_cast<uint32_t>(num_bytes);
  return header;
}

SendResult send_small(int socket, PacketType type, std::span<const std::byte> payload) noexcept {
  return send_packet(socket, small_header(type, payload.size()), payload, {});
}

ReceiveResult PacketReader::receive(int socket) {
  clear();
  iovec part{buffer_.data(), buffer_.size()};
  ControlBuffer control;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.bytes.data();
  message.msg_controllen = control.bytes.size();
  ssize_t num_bytes = -1;
  do {
    // ECONNRESET is told once, before the packets that the peer sent until then: read on.
    num_bytes = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (num_bytes < 0 && (errno == EINTR || errno == ECONNRESET));
  if (num_bytes < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? ReceiveResult::kNothing : ReceiveResult::kEnd;
  append_fds(message, fds);  // first of all, so that nothing that follows can leak them
  if (num_bytes == 0) return ReceiveResult::kEnd;
  if (well_formed(static_cast<size_t>(num_bytes), message.msg_flags)) return ReceiveResult::kPacket;
  fds.clear();
  return ReceiveResult::kBad;
}

void PacketReader::clear() noexcept {
  fds.clear();
  has_lost_fds = is_other_version = false;
  problem.clear();
}

bool PacketReader::refuse(std::string text) {
  problem = std::move(text);
  return false;
}

bool PacketReader::take(std::span<const std::byte> bytes) {
  std::memcpy(buffer_.data(), bytes.data(), std::min(bytes.size(), buffer_.size()));
  return well_formed(bytes.size(), 0);
}

bool PacketReader::check_header(std::span<const std::byte> bytes) {
  if (bytes.size() < sizeof(PacketHeader)) return refuse("a packet of " + std::to_string(bytes.size()) + " bytes");
  std::memcpy(&header, bytes.data(), sizeof(PacketHeader));
  if (header.magic != kPacketMagic) return refuse("a packet with a wrong magic number");
  if (header.version != kPacketVersion) {
    is_other_version = true;
    return refuse("a packet of version " + std::to_string(header.version) + "; this Weft speaks version " +
                  std::to_string(kPacketVersion));
  }
  if (header.type < PacketType::kHello || header.type > PacketType::kChallenge) {
    return refuse("a packet of unknown type " + std::to_string(static_cast<int>(header.type)));
  }
  if (header.payload_bytes > kMaxPayloadBytes) {
    return refuse("a packet of " + std::to_string(header.payload_bytes) + " bytes");
  }
  return true;
}

bool PacketReader::well_formed(size_t num_bytes, int flags) {
  if (!check_header({buffer_.data(), num_bytes})) return false;
  const bool whole = header.type == PacketType::kMessage || header.message_bytes == header.payload_bytes;
  const uint64_t end = uint64_t{header.offset} + header.payload_bytes;
  if ((flags & MSG_TRUNC) != 0 || header.payload_bytes != num_bytes - sizeof(PacketHeader) || !whole ||
      header.message_bytes > kMaxMessageBytes || end > header.message_bytes ||
      (header.payload_bytes == 0 && header.message_bytes > 0)) {
    return refuse("a packet whose lengths do not fit (message of " + std::to_string(header.message_bytes) +
                  " bytes, offset " + std::to_string(header.offset) + ", payload " +
                  std::to_string(header.payload_bytes) + ", received " + std::to_string(num_bytes) + ")");
  }
  const bool may_hold_fds =
      header.offset == 0 && (header.type == PacketType::kMessage || header.type == PacketType::kHello);
  if (header.num_fds > 0 && !may_hold_fds) return refuse("file descriptors with a packet that should have none");
  // The kernel drops what the process has no room for, and says so.
  has_lost_fds = (flags & MSG_CTRUNC) != 0 && fds.size() < header.num_fds && header.num_fds <= kMaxMessageFds;
  if (!has_lost_fds && ((flags & MSG_CTRUNC) != 0 || header.num_fds != fds.size())) {
    return refuse("a packet with " + std::to_string(header.num_fds) + " file descriptors of which " +
                  std::to_string(fds.size()) + " came");
  }
  payload = {buffer_.data() + sizeof(PacketHeader), header.payload_bytes};
  return true;
}

}  // namespace weft
