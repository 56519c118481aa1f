// What a rank or a whole test may leave behind: descriptors, threads, mappings, named shared memory, children.
#pragma once

#include <dirent.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"

namespace weft::test {

inline std::vector<std::string> names_in(const char* folder) {
  std::vector<std::string> names;
  DIR* open = opendir(folder);
  if (open == nullptr) return names;
  while (const dirent* entry = readdir(open)) names.emplace_back(entry->d_name);
  closedir(open);
  std::sort(names.begin(), names.end());
  return names;
}

inline int num_shared_mappings() {
  std::ifstream file("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(file, line);) count += line.find("memfd:") != std::string::npos ? 1 : 0;
  return count;
}

// Taken by a rank before it connects; checked after it closed everything, with peers dead or alive.
class RankLeftovers {
 public:
  RankLeftovers() : num_fds_(names_in("/proc/self/fd").size()), num_mappings_(num_shared_mappings()) {}
  void check() const {
    // Threads that watched peers end on their own within their next look.
    for (int waited_ms = 0; waited_ms < 20'000 && !is_clean(); ++waited_ms) usleep(1000);
    CHECK(names_in("/proc/self/fd").size() <= num_fds_);
    CHECK_EQ(num_shared_mappings(), num_mappings_);
    CHECK_EQ(names_in("/proc/self/task").size(), kMainThreadAlone);
  }

 private:
  static constexpr size_t kMainThreadAlone = 3;  // with "." and ".."

  bool is_clean() const {
    return num_shared_mappings() == num_mappings_ && names_in("/proc/self/task").size() == kMainThreadAlone;
  }

  size_t num_fds_;
  int num_mappings_;
};

// Taken by the parent before it forks ranks; checked when all have ended. Other programs use /tmp at the same time, so
// only names that could be ours count there.
class TestLeftovers {
 public:
  TestLeftovers()
      : shared_memory_(names_in("/dev/shm")), temporary_(ours_in_tmp()), num_fds_(names_in("/proc/self/fd").size()) {}
  void check() const {
    CHECK(names_in("/dev/shm") == shared_memory_);
    CHECK(ours_in_tmp() == temporary_);
    CHECK_EQ(names_in("/proc/self/fd").size(), num_fds_);
    CHECK_EQ(waitpid(-1, nullptr, WNOHANG), -1);
    CHECK_EQ(errno, ECHILD);
  }

 private:
  static std::vector<std::string> ours_in_tmp() {
    std::vector<std::string> names = names_in("/tmp");
    std::erase_if(names, [](const std::string& name) { return name.find("weft") == std::string::npos; });
    return names;
  }
  std::vector<std::string> shared_memory_, temporary_;
  size_t num_fds_;
};

}  // namespace weft::test
