// Guards against a proof that another implementation of SHA-256 or HMAC would not make: test vectors of FIPS 180 and RFC 4231.
#include "base/sha256.h"

#include <string>
#include <string_view>

#include "check.h"

using namespace weft;        // NOLINT(google-build-using-namespace)
using namespace weft::test;  // NOLINT(google-build-using-namespace)

namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

std::string hex(const Digest& digest) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string text;
  for (const uint8_t byte : digest) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

std::string hash(std::string_view text, size_t part = 1000) {
  Sha256 hash;
  for (size_t at = 0; at < text.size(); at += part) hash.add(bytes_of(text.substr(at, part)));
  return hex(hash.finish());
}

}  // namespace

TEST(hashes_are_those_of_the_standard) {
  CHECK_EQ(hash(""), std::string("e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"));
  CHECK_EQ(hash("abc"), std::string("ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"));
  CHECK_EQ(hash("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
           std::string("248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1"));
  const std::string million(1'000'000, 'a');
  for (const size_t part : {1u, 63u, 64u, 65u, 1000u}) {
    CHECK_EQ(hash(million, part), std::string("cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"));
  }
}

TEST(proofs_are_those_of_the_standard) {
  CHECK_EQ(hex(hmac_sha256(bytes_of(std::string(20, '\x0b')), bytes_of("Hi There"))),
           std::string("b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"));
  CHECK_EQ(hex(hmac_sha256(bytes_of("Jefe"), bytes_of("what do ya want for nothing?"))),
           std::string("5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"));
  CHECK_EQ(hex(hmac_sha256(bytes_of(std::string(131, '\xaa')),
                           bytes_of("Test Using Larger Than Block-Size Key - Hash Key First"))),
           std::string("60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"));
}

TEST(digests_that_differ_anywhere_are_not_equal) {
  const Digest digest = hmac_sha256({}, {});
  CHECK(equal_digests(digest, digest));
  for (size_t at = 0; at < digest.size(); ++at) {
    Digest other = digest;
    other[at] = static_cast<uint8_t>(other[at] ^ 0x10);
    CHECK(!equal_digests(digest, other));
  }
}

int main(int argc, char** argv) { return run_tests(argc, argv); }
