// Tells Python of the memory of a rail (transport/rail_block.h): bytes of a rank's, of a lane, of the words of a ring, and the kernels'
// argument without addresses, in hexadecimal digits.
//   rail_memory FIELDS_FILE
#include "emulator.h"
// The order matters: driver.h needs the emulator.
#include "driver.h"
#include "weft/transport/rail_block.h"

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
  weft::transport::BlockRail rail;
  rail.layout = weft::RailLayout::make(shape);
  // Fewer than fit.
  fields.take("chunk_rows", rail.layout.chunk_rows);
  fields.take("num_slots", rail.layout.num_slots);
  if (!rail.layout.ok) return 1;
  printf("%zu %zu %zu ", static_cast<size_t>(rail.num_bytes(shape.num_lanes)),
         static_cast<size_t>(rail.layout.lane_bytes), static_cast<size_t>(rail.layout.words_bytes));
  const auto* bytes = reinterpret_cast<const unsigned char*>(&rail);
  for (size_t idx = 0; idx < sizeof(rail); ++idx) printf("%02x", bytes[idx]);
  puts("");
  return 0;
}
