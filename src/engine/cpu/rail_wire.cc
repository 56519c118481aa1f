// The network of rails in process: the sender itself.
#include <cstring>

#include "engine/cpu/pause.h"
#include "engine/cpu/rail_host.h"

namespace weft::cpu {

void RailHost::send(const Put& put) {
  const Target to = target(put.peer);
  const auto copy = [&] {
    if (put.num_bytes > 0) std::memcpy(to.rails + put.to, memory_ + put.from, put.num_bytes);
  };
  sync::settle_put(copy, reinterpret_cast<u64*>(to.rails + put.signal));
  ring_doorbell(to.words);
}

void RailHost::settle_some() {}

RailHost::~RailHost() = default;

}  // namespace weft::cpu
