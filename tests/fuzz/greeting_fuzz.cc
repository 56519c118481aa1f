// Guards against a greeting, a challenge or a refusal that crashes its reader, is taken for another rank's, or names no rank of the group.
#include <cstdlib>
#include <cstring>

#include "bootstrap/greeting.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int kRank = 1, kRanks = 4;
  if (size < sizeof(weft::PacketHeader)) return 0;
  weft::PacketHeader header;
  std::memcpy(&header, data, sizeof(header));
  const auto payload = std::as_bytes(std::span(data, size)).subspan(sizeof(header));
  weft::Hello expected;
  expected.source = 2;
  expected.target = kRank;
  expected.num_ranks = kRanks;
  if (weft::hello_problem(header, payload, expected).empty()) {
    if (weft::source_of(header, payload) != 2 || std::memcmp(payload.data(), &expected, sizeof(expected)) != 0) abort();
  }
  weft::Nonce drawn{};
  if (weft::challenge_problem(header, payload, &drawn).empty()) {
    const weft::Challenge accepted{.drawn = drawn};
    if (std::memcmp(payload.data(), &accepted, sizeof(accepted)) != 0) abort();
  } else if (drawn != weft::Nonce{}) {
    abort();
  }
  const weft::Nonce challenge = weft::challenge_of(header, payload);
  if (challenge != weft::Nonce{} && weft::source_of(header, payload) == -1 && payload.size() != sizeof(weft::Hello))
    abort();
  const weft::Error error = weft::read_refusal(payload, "rank 2", kRank, kRanks);
  for (const int peer : error.peers) {
    if (peer < 0 || peer >= kRanks || peer == kRank) abort();
  }
  if (error.text.find('\n') != std::string::npos) abort();
  return 0;
}
