// Tells Python of the memory of a rail over NCCL (transport/rail_gin.h), whose network is the stand-in in include/nccl_device.h: bytes of
// a rank's window, of its signals, of the network, and of a lane and the words of a ring; then a kernel's argument in hexadecimal digits.
//   gin_memory FIELDS_FILE
#include "emulator.h"
// The order matters: driver.h needs the emulator.
#include "driver.h"
#include "weft/transport/rail_gin.cuh"

int main(int, char** arguments) {
  emulation::Fields fields(arguments[1]);
  weft::RailShape shape;
  fields.take("num_lanes", shape.num_lanes);
  fields.take("num_blocks", shape.num_blocks);
  fields.take("node_ranks", shape.node_ranks);
  fields.take("num_local_experts", shape.num_local_experts);
  fields.take("top_k", shape.top_k);
  fields.take("max_tokens", shape.max_tokens);
  fields.take("max_row_bytes", shape.max_row_bytes);
  weft::transport::GinRail rail;
  rail.layout = weft::RailLayout::make(shape);
  // Fewer than fit.
  fields.take("chunk_rows", rail.layout.chunk_rows);
  fields.take("num_slots", rail.layout.num_slots);
  fields.take("num_contexts", rail.num_contexts);
  fields.take("is_rail_team", rail.is_rail_team);
  if (!rail.layout.ok) return 1;

  const weft::transport::GinSignals signals(rail.layout.num_blocks, rail.layout.num_slots);
  ncclDevComm comm = {};
  fields.take("rank", comm.rank);
  comm.num_ranks = shape.num_lanes;
  comm.node_ranks = rail.is_rail_team != 0 ? shape.node_ranks : 0;
  comm.num_contexts = rail.num_contexts;
  comm.num_signals = signals.count(shape.num_lanes);
  comm.num_counters = signals.num_counters(shape.num_lanes);
  const int num_rings = (rail.layout.num_blocks + rail.num_contexts - 1) / rail.num_contexts;
  comm.most_unanswered = static_cast<weft::u64>(num_rings * 2 * rail.layout.num_slots + weft::RailLayout::kNumMessages);
  comm.window_bytes = rail.layout.total_bytes;
  fields.take("network", comm.network);
  for (int rank = 0; rank < shape.num_lanes; ++rank) {
    fields.take("memory", rank, comm.memory[rank]);
    fields.take("signals", rank, comm.signals[rank]);
    const int stride = rail.is_rail_team != 0 ? shape.node_ranks : 1;
    rail.team_rank[rank] = rank / stride;
  }
  memcpy(rail.comm, &comm, sizeof(comm));
  rail.memory = reinterpret_cast<weft::u8*>(comm.memory[comm.rank]);
  rail.window = rail.memory;
  printf("%zu %zu %zu %zu %zu ", static_cast<size_t>(rail.num_bytes(shape.num_lanes)),
         static_cast<size_t>((comm.num_signals + comm.num_counters) * static_cast<weft::u64>(rail.num_contexts) * 8),
         sizeof(EmulatedSwitch), static_cast<size_t>(rail.layout.lane_bytes),
         static_cast<size_t>(rail.layout.words_bytes));
  const auto* bytes = reinterpret_cast<const unsigned char*>(&rail);
  for (size_t idx = 0; idx < sizeof(rail); ++idx) printf("%02x", bytes[idx]);
  puts("");
  return 0;
}
