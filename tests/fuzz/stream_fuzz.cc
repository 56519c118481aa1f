// Guards against bytes of a TCP stream, cut anywhere, that crash who reads them, are waited for without end though they can't
// belong to a packet, or become another packet than the same bytes in one piece.
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>

#include "bootstrap/wire.h"

namespace {

struct Seen {
  std::vector<std::vector<std::byte>> payloads;
  bool is_bad = false;
};

// `part`: so many bytes are sent at a time.
Seen read_all(const std::vector<uint8_t>& bytes, size_t part) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) != 0) abort();
  weft::Wire wire{weft::OwnedFd(ends[0]), weft::Wire::Kind::kStream};
  const weft::OwnedFd peer(ends[1]);
  weft::PacketReader reader;
  Seen seen;
  for (size_t at = 0; at < bytes.size() && !seen.is_bad; at += part) {
    const size_t length = std::min(part, bytes.size() - at);
    if (send(peer.get(), bytes.data() + at, length, MSG_NOSIGNAL) != static_cast<ssize_t>(length)) abort();
    for (;;) {
      const weft::ReceiveResult result = wire.receive(reader);
      if (result == weft::ReceiveResult::kNothing) break;
      if (result == weft::ReceiveResult::kPacket) {
        if (reader.payload.size() > weft::kMaxPayloadBytes || reader.header.num_fds != 0) abort();
        seen.payloads.emplace_back(reader.payload.begin(), reader.payload.end());
        continue;
      }
      if (result != weft::ReceiveResult::kBad || reader.problem.empty()) abort();
      seen.is_bad = true;
      break;
    }
  }
  return seen;
}

}  // namespace

// The input is a row of packets: two bytes of length, one that says what is wrong with the header, the payload.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return 0;
  std::vector<uint8_t> bytes;
  for (size_t at = 1; at + 3 < size;) {
    const size_t length = std::min<size_t>(data[at] | (data[at + 1] & 3u) << 8, size - at - 3);
    weft::PacketHeader header = weft::small_header(static_cast<weft::PacketType>(data[at + 2] % 8), length);
    if (data[at + 2] & 8) std::memcpy(&header, data + at + 3, std::min(length, sizeof(header)));
    const auto* head = reinterpret_cast<const uint8_t*>(&header);
    bytes.insert(bytes.end(), head, head + sizeof(header));
    bytes.insert(bytes.end(), data + at + 3, data + at + 3 + length);
    at += 3 + length;
  }
  const Seen whole = read_all(bytes, bytes.size() + 1);
  const Seen pieces = read_all(bytes, data[0] % 61 + 1u);
  if (whole.is_bad != pieces.is_bad || whole.payloads != pieces.payloads) abort();
  return 0;
}
