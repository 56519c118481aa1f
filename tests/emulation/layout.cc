// Tells Python where things lie in a window: a JSON object on standard output.
//   layout FIELDS_FILE
#include "emulator.h"
// The order matters: driver.h needs the emulator.
#include <cstddef>

#include "driver.h"

int main(int, char** arguments) {
  emulation::Fields fields(arguments[1]);
  const weft::GpuWindowLayout layout = weft::GpuWindowLayout::make(emulation::take_shape(fields));
  if (!layout.ok) return 1;
  const std::pair<const char*, size_t> values[] = {
      {"control_bytes", layout.control_bytes},
      {"landing_rows", layout.landing_rows},
      {"landing_ids", layout.landing_ids},
      {"landing_weights", layout.landing_weights},
      {"landing_table", layout.landing_table},
      {"landing_bytes", layout.landing_bytes},
      {"plan_header", weft::kGpuPlanHeader},
      {"control.sequence", offsetof(weft::GpuControlWords, sequence)},
      {"control.membership", offsetof(weft::GpuControlWords, membership)},
      {"control.owner", offsetof(weft::GpuControlWords, owner)},
      {"control.broken", offsetof(weft::GpuControlWords, broken)},
      {"control.num_ended", offsetof(weft::GpuControlWords, num_ended)},
      {"control.heap_generation", offsetof(weft::GpuControlWords, heap_generation)},
      {"control.next_chunk", offsetof(weft::GpuControlWords, next_chunk)},
      {"control.queues", layout.queues},
      {"control.progress", layout.progress},
      {"control.waited_ns", offsetof(weft::GpuControlWords, waited_ns)},
      {"host_bytes", sizeof(weft::transport::HostWords)},
      {"host.timeout_ns", offsetof(weft::transport::HostWords, timeout_ns)},
      {"host.finished_sequence", offsetof(weft::transport::HostWords, finished_sequence)},
      {"host.counted_ticket", offsetof(weft::transport::HostWords, counted_ticket)},
      {"host.num_rows", offsetof(weft::transport::HostWords, num_rows)},
      {"host.bad_ids", offsetof(weft::transport::HostWords, bad_ids)},
      {"host.first_bad_id", offsetof(weft::transport::HostWords, first_bad_id)},
      {"host.num_errors_read", offsetof(weft::transport::HostWords, num_errors_read)},
      {"host.error", offsetof(weft::transport::HostWords, error)},
      {"host.error.phase", offsetof(weft::transport::HostWords, error.phase)},
      {"host.error_caller", offsetof(weft::transport::HostWords, error_caller)},
      {"host.seen_caller", offsetof(weft::transport::HostWords, seen_caller)},
      {"host.error.culprit", offsetof(weft::transport::HostWords, error.culprit)},
  };
  const char* separator = "{";
  for (const auto& [name, value] : values) {
    printf("%s\"%s\": %zu", separator, name, value);
    separator = ", ";
  }
  puts("}");
  return 0;
}
