// Guards against packets that crash the monitor, grow without bound, or become a message that was not sent.
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "bootstrap/link.h"

namespace {

// One packet: its kind and length come from two bytes, its header is right unless the kind says otherwise.
size_t send_one(int socket, const uint8_t* data, size_t size) {
  if (size < 4) return size;
  const size_t length = std::min<size_t>(data[0] | (data[1] & 3u) << 8, size - 4);
  const uint8_t kind = data[2];
  std::vector<uint8_t> bytes(sizeof(weft::PacketHeader) + length);
  weft::PacketHeader header;
  header.type = static_cast<weft::PacketType>(kind % 8);
  header.tag = data[3];
  header.message_bytes = static_cast<uint32_t>(length + (kind & 8 ? data[3] : 0));
  header.payload_bytes = static_cast<uint32_t>(length);
  header.offset = kind & 16 ? data[3] : 0;
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), data + 4, length);
  if (kind & 32) std::memcpy(bytes.data(), data + 4, std::min(length, sizeof(header)));  // a header of its own
  send(socket, bytes.data(), kind & 64 ? bytes.size() / 2 : bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return 4 + length;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) abort();
  weft::Link link{weft::Wire(weft::OwnedFd(ends[0]))};
  const weft::OwnedFd peer(ends[1]);
  for (size_t at = 0; at < size;) at += send_one(peer.get(), data + at, size - at);
  size_t num_bytes = 0;
  bool is_refused = false;
  const weft::Link::Events events{
      [&](uint64_t, weft::Parcel&& parcel) { num_bytes += parcel.bytes.size(); },
      [](const weft::AbortReason& reason) {
        if (weft::text_of(reason).find('\n') != std::string::npos) abort();
      },
      [](const weft::Note& note) { static_cast<void>(weft::text_of(note)); },
      [](const std::string&) {},
      [&](const std::string&) { is_refused = true; },
      [](std::span<const std::byte> bytes) { return bytes.empty() ? std::string() : std::string("a decision"); },
  };
  weft::PacketReader reader;
  const bool has_ended = link.receive(reader, events, 1 << 10);
  if (is_refused != has_ended || num_bytes > size) abort();
  return 0;
}
