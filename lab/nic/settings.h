// What the lab asks of the card, and which faults it has by now.
#pragma once

#include <string>
#include <vector>

#include "nic/wire.h"

namespace weft::nic {

struct Settings {
  Model model;
  std::string faults_path;  // empty: none
  std::string report_path;  // empty: none
};

// "ports=2,gb_s=5,latency_us=8.4,spread_us=20,seed=1,faults=/path,report=/path", each if wanted; gb_s of a port, 0: no limit.
// Error kInvalidArgument: names what is wrong.
Settings parse_settings(const std::string& text);

struct FaultLine {
  enum Kind { kPort, kDrop, kDark } kind = kDark;
  int value = 0;  // port or peer
};

// Of a file with lines "RANK port PORT", "RANK drop PEER", "RANK dark": those of `rank`. Lines that aren't such are passed over, and so
// is a file that isn't there.
std::vector<FaultLine> read_faults(const std::string& path, int rank);

}  // namespace weft::nic
