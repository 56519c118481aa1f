#include "nic/settings.h"

#include <charconv>
#include <cmath>
#include <fstream>
#include <sstream>

#include "base/status.h"

namespace weft::nic {

namespace {

double number_of(const std::string& key, const std::string& text) {
  double value = 0;
  const auto [end, problem] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (problem != std::errc{} || end != text.data() + text.size() || std::isnan(value) || value < 0 || value > 1e6)
    throw_invalid_argument("the software NIC's " + key + " is no number from 0 to a million: " + text);
  return value;
}

}  // namespace

Settings parse_settings(const std::string& text) {
  Settings settings;
  Model& model = settings.model;
  std::istringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const size_t middle = part.find('=');
    const std::string key = part.substr(0, middle);
    const std::string value = middle == std::string::npos ? "" : part.substr(middle + 1);
    if (key == "faults") {
      settings.faults_path = value;
    } else if (key == "report") {
      settings.report_path = value;
    } else if (key == "ports") {
      model.num_ports = static_cast<int>(number_of(key, value));
      if (model.num_ports < 1 || model.num_ports > 8) throw_invalid_argument("a software NIC has 1 to 8 ports");
    } else if (key == "gb_s") {
      model.port_bytes_per_s = number_of(key, value) * 1e9;
    } else if (key == "latency_us") {
      model.latency_ns = static_cast<u64>(number_of(key, value) * 1e3);
    } else if (key == "spread_us") {
      model.spread_ns = static_cast<u64>(number_of(key, value) * 1e3);
    } else if (key == "seed") {
      model.seed = static_cast<u64>(number_of(key, value));
    } else {
      throw_invalid_argument("a software NIC has no setting " + key);
    }
  }
  return settings;
}

std::vector<FaultLine> read_faults(const std::string& path, int rank) {
  std::vector<FaultLine> faults;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    int who = -1, value = 0;
    std::string kind;
    if (!(words >> who >> kind) || who != rank) continue;
    if (kind == "dark") faults.push_back({FaultLine::kDark, 0});
    if (!(words >> value) || value < 0) continue;
    if (kind == "port") faults.push_back({FaultLine::kPort, value});
    if (kind == "drop") faults.push_back({FaultLine::kDrop, value});
  }
  return faults;
}

}  // namespace weft::nic
