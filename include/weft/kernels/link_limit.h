// What the kernels that measure a link are made of: configuration and arguments, for host and device.
#pragma once

#include "weft/config/base.h"

namespace weft::kernels {

constexpr i32 kMaxLinkPeers = 15;
constexpr i32 kLinkLimitThreads = 32;

struct LinkLimitConfig {
  i32 row_bytes = 16;
  i32 num_stages = 2;    // rows of shared memory: as many copies are in flight
  bool is_pull = false;  // loads from the peers; else stores to them
};

struct LinkLimitArgs {
  u8* peer[kMaxLinkPeers] = {};  // this rank's rows in the memory of each peer
  i32 num_peers = 0;
  i64 num_rows = 0;  // in all, as many at each peer
};

}  // namespace weft::kernels
