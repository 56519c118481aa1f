// The part of NCCL's interface that the network of node kernels needs, laid out as NCCL lays it out: Weft is built without its headers.
// Structs grow at their end from release to release; a test compares all of this with the headers of three.
#pragma once

#include <climits>
#include <cstddef>

#include "weft/config/base.h"

namespace weft::nccl {

constexpr int kSuccess = 0;
constexpr u32 kMagic = 0xcafebeef;
constexpr int kUndefined = INT_MIN;
constexpr int kVersion = 23203;      // newest release whose structs are known here
constexpr int kMinVersion = 23007;   // with weak signals
constexpr int kWindowSymmetric = 1;  // of all ranks alike
constexpr int kMostGinTypes = 64;

enum class GinType : int { kNone = 0, kProxy = 2, kGdaki = 3, kGpi = 4, kEfaGda = 5 };
enum class Connection : int { kNone = 0, kFull = 1, kRail = 2 };

struct UniqueId {
  char bytes[128] = {};
  bool operator==(const UniqueId&) const = default;
};

struct Properties {
  size_t size = 0;
  u32 magic = kMagic;
  u32 version = 0;
  int rank = 0, num_ranks = 0, cuda_device = 0, nvml_device = 0;
  bool has_device_api = false, has_multimem = false;
  GinType gin_type = GinType::kNone;
  int num_lsa_teams = 0;
  bool has_host_rma = false;
  GinType railed_gin_type = GinType::kNone;
  // From 2.31 on.
  u64 comm_hash = 0;
  int gin_min_stride = 0;
  Connection gin_connection = Connection::kNone;
  bool has_gin[kMostGinTypes] = {};
  size_t comm_bytes = 0;  // of a device communicator, of code that is compiled for the library's own release
  // From 2.32 on.
  bool has_cft = false, has_cft_multicast = false, has_cft_counted = false;
};

struct Requirements {
  size_t size = 0;
  u32 magic = kMagic;
  u32 version = 0;
  void* resources = nullptr;
  void* teams = nullptr;
  bool wants_multimem = false;
  int num_barriers = 0, num_lsa_barriers = 0, num_rail_barriers = 0, num_lla2a_blocks = 0, num_lla2a_slots = 0;
  bool forces_gin = false;
  int num_contexts = 4, num_signals = 0, num_counters = 0;
  Connection connection = Connection::kNone;
  bool wants_own_contexts = false;
  int queue_depth = 0;
  int traffic_class = kUndefined;
  int num_world_barriers = 0;
  bool needs_strong_signals = true, needs_address_signals = true;
  // From 2.31 on.
  int stride = 1;
  GinType gin_type = GinType::kNone;
  bool is_for_own_release = false;  // device code is compiled with headers of the library's release
  int cft_caps = 0, num_cft_barriers = 0;
};

// Sizes of the structs above in a release.
constexpr size_t properties_bytes(int version) {
  return version < 23100   ? offsetof(Properties, comm_hash)
         : version < 23200 ? offsetof(Properties, has_cft)
                           : sizeof(Properties);
}
constexpr size_t requirements_bytes(int version) {
  // Behind the last two of 2.30 the struct ends, aligned.
  return version < 23100 ? (offsetof(Requirements, stride) + 7) / 8 * 8 : sizeof(Requirements);
}

struct CommStruct;
struct WindowStruct;
using Comm = CommStruct*;
using Window = WindowStruct*;

}  // namespace weft::nccl
