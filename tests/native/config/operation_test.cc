// Guards against two ranks that call different things and do not notice, because a field is missing in the fingerprint (R1).
#include "weft/config/operation.h"

#include <cstring>
#include <set>
#include <vector>

#include "check.h"

using namespace weft;

namespace {

TEST(every_byte_of_the_config_counts) {
  OperationConfig base;
  base.kind = OpKind::kDispatch;
  base.hidden = 2048;
  const u16 print = fingerprint(base);
  int num_equal = 0;
  for (std::size_t byte = 0; byte < sizeof(base) - sizeof(base.object); ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      OperationConfig other;
      unsigned char bytes[sizeof(base)];
      std::memcpy(bytes, &base, sizeof(base));
      bytes[byte] = static_cast<unsigned char>(bytes[byte] ^ (1u << bit));
      std::memcpy(static_cast<void*>(&other), bytes, sizeof(base));
      if (fingerprint(other) == print) ++num_equal;
    }
  }
  // 512 single-bit changes, each with a chance of 1 in 65534 to collide: one at most, and the payload tells it then.
  CHECK(num_equal <= 1);
}

TEST(every_named_field_counts) {
  std::vector<OperationConfig> variants(18);
  variants[1].kind = OpKind::kCombine;
  variants[2].layout = Layout::kMasked;
  variants[3].quantize = Quantize::kFp8;
  variants[4].dtype = Dtype::kFp32;
  variants[5].has_side = 1;
  variants[6].is_cached = 1;
  variants[7].mode = 1;
  variants[8].alignment = 128;
  variants[9].hidden = 7168;
  variants[10].capacity = 4096;
  variants[11].max_tokens = 128;
  variants[12].row_bytes = 4096;
  variants[13].scale_row_bytes = 64;
  variants[14].window_hash = 1;
  variants[15].handle = 1;
  variants[16].is_small = 1;
  variants[17].object = 1;
  std::set<u16> prints;
  for (const OperationConfig& config : variants) prints.insert(fingerprint(config));
  CHECK_EQ(prints.size(), variants.size());
}

TEST(no_padding_between_fields) {
  // Padding would be hashed with whatever was on the stack.
  CHECK_EQ(sizeof(OperationConfig), 8 * sizeof(u8) + 2 * sizeof(u32) + 7 * sizeof(u64));
}

// Layers of a model, with the handles that their dispatches have made one after the other (transport::caller_bits).
TEST(near_objects_with_near_handles_have_prints_of_their_own) {
  constexpr int kLayers = 128;
  for (const u32 first : {0u, 1000u, 0xff00u}) {
    std::set<u16> seen;
    for (u32 object = 0; object < kLayers; ++object) {
      seen.insert(print_with(0x1234, static_cast<u16>(object_bits(object) ^ (first + object))));
    }
    CHECK_EQ(seen.size(), std::size_t{kLayers});
  }
  // Any object with any handle of a step of 61 layers: none passes for another.
  std::set<u16> seen;
  for (u32 object = 0; object < 61; ++object) {
    for (u32 handle = 1; handle <= 256; ++handle) seen.insert(static_cast<u16>(object_bits(object) ^ handle));
  }
  CHECK_EQ(seen.size(), std::size_t{61 * 256});
}

TEST(reserved_values_never_appear) {
  // 0 means "nothing written yet", 0xffff is a refusal.
  std::vector<int> seen(65536, 0);
  OperationConfig config;
  for (u32 hidden = 0; hidden < 2'000'000; ++hidden) {
    config.hidden = hidden;
    ++seen[fingerprint(config)];
  }
  CHECK_EQ(seen[0], 0);
  CHECK_EQ(seen[kRefusalFingerprint], 0);
  int num_unused = 0;
  for (int print = 1; print < 0xffff; ++print) num_unused += seen[static_cast<std::size_t>(print)] == 0;
  CHECK(num_unused < 100);  // the hash spreads over all 65534 values
}

TEST(hash_is_fnv_1a) {
  // Vectors of the authors: http://www.isthe.com/chongo/src/fnv/test_fnv.c
  CHECK_EQ(hash_bytes("", 0), 0xcbf29ce484222325ull);
  CHECK_EQ(hash_bytes("a", 1), 0xaf63dc4c8601ec8cull);
  CHECK_EQ(hash_bytes("foobar", 6), 0x85944171f73967e8ull);
  CHECK_EQ(hash_bytes("bar", 3, hash_bytes("foo", 3)), hash_bytes("foobar", 6));
}

TEST(sizes_of_dtypes) {
  CHECK_EQ(dtype_bytes(Dtype::kBytes), 1);
  CHECK_EQ(dtype_bytes(Dtype::kBf16), 2);
  CHECK_EQ(dtype_bytes(Dtype::kFp16), 2);
  CHECK_EQ(dtype_bytes(Dtype::kFp32), 4);
}

}  // namespace

int main(int argc, char** argv) { return weft::test::run_tests(argc, argv); }
