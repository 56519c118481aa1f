// Guards against races between ranks that use the signals of include/weft: stale, early, lost or unordered ones.
//
// The same source is built with each mistake of config/mutants.h; those builds must fail (docs/protocols/mutants.md).
// Arguments: --threads, --ranks N, --operations N, --first-sequence N, --deadline-ms N, --seed N.
#include "protocol/protocol.h"

#include <sys/prctl.h>
#include <sys/wait.h>

#include <csignal>
#include <cstring>
#include <thread>

using namespace weft;
using namespace weft::test;

namespace {

bool parse(int argc, char** argv, Options& options) {
  for (int idx = 1; idx < argc; ++idx) {
    const std::string name = argv[idx];
    if (name == "--threads") {
      options.threads = true;
      continue;
    }
    if (idx + 1 == argc) return false;
    const u64 value = std::strtoull(argv[++idx], nullptr, 0);
    if (name == "--ranks") {
      options.num_ranks = static_cast<i32>(value);
    } else if (name == "--operations") {
      options.num_operations = value;
    } else if (name == "--first-sequence") {
      options.first_sequence = value;
    } else if (name == "--deadline-ms") {
      options.deadline_ms = value;
    } else if (name == "--seed") {
      options.seed = value;
    } else {
      return false;
    }
  }
  return true;
}

void run_threads(World& world) {
  std::vector<std::thread> threads;
  for (i32 rank = 0; rank < world.options().num_ranks; ++rank) {
    threads.emplace_back([&world, rank] { Rank(world, rank).run(); });
  }
  for (std::thread& thread : threads) thread.join();
}

void run_processes(World& world) {
  std::vector<pid_t> children;
  for (i32 rank = 0; rank < world.options().num_ranks; ++rank) {
    const pid_t child = fork();
    if (child == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      _exit(Rank(world, rank).run() ? 0 : 1);
    }
    children.push_back(child);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0 && world.num_failures() == 0) world.fail("a rank ended badly");
  }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  if (!parse(argc, argv, options)) {
    std::fprintf(stderr, "unknown argument\n");
    return 2;
  }
  World world(options);
  const u64 start = ptx::globaltimer_ns();
  options.threads ? run_threads(world) : run_processes(world);
  const double seconds = static_cast<double>(ptx::globaltimer_ns() - start) * 1e-9;
  std::printf("%d ranks as %s, %llu operations each, %.2f s: %s\n", options.num_ranks,
              options.threads ? "threads" : "processes", static_cast<unsigned long long>(options.num_operations),
              seconds, world.num_failures() == 0 ? "ok" : "FAILED");
  return world.num_failures() == 0 ? 0 : 1;
}
