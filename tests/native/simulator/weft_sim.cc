// Runs the membership in a simulated world (world.h): `weft-sim` many seeds, `weft-sim --seed N` one with its trace.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "simulator/world.h"

namespace {

int usage() {
  std::fprintf(stderr, "weft-sim [--seed N] | [--first N] [--seeds COUNT]\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t first = 1, num_seeds = WEFT_SIM_SEEDS;
  bool prints_trace = false;
  for (int idx = 1; idx < argc; ++idx) {
    const std::string name = argv[idx];
    if (idx + 1 == argc) return usage();
    char* rest = nullptr;
    const uint64_t value = std::strtoull(argv[++idx], &rest, 10);
    if (*rest != '\0') return usage();
    if (name == "--seed") {
      first = value;
      num_seeds = 1;
      prints_trace = true;
    } else if (name == "--first") {
      first = value;
    } else if (name == "--seeds") {
      num_seeds = value;
    } else {
      return usage();
    }
  }
  uint64_t num_steps = 0, num_epochs = 0, num_installed = 0;
  for (uint64_t seed = first; seed < first + num_seeds; ++seed) {
    try {
      weft::test::World world(seed, prints_trace);
      world.run();
      num_steps += world.num_steps();
      num_epochs += world.num_epochs();
      num_installed += world.num_installed();
    } catch (const weft::test::Found& found) {
      std::printf("found: %s\nweft-sim --seed %llu shows how\n", found.text.c_str(),
                  static_cast<unsigned long long>(seed));
      return 1;
    }
  }
  std::printf("%llu seeds, %llu steps, %llu epochs, %llu planned changes of a rank: nothing found\n",
              static_cast<unsigned long long>(num_seeds), static_cast<unsigned long long>(num_steps),
              static_cast<unsigned long long>(num_epochs), static_cast<unsigned long long>(num_installed));
  return 0;
}
