#include "jit/cache.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "base/fd.h"
#include "weft/config/operation.h"

namespace weft::jit {

Cache::Cache(std::string folder) : folder_(std::move(folder)) {
  if (folder_.empty()) return;
  std::error_code error;  // of the parents: a folder that can't be made is not usable below
  std::filesystem::create_directories(std::filesystem::path(folder_).parent_path(), error);
  mkdir(folder_.c_str(), 0700);
  struct stat status{};
  if (lstat(folder_.c_str(), &status) != 0) return;
  usable_ = S_ISDIR(status.st_mode) && status.st_uid == geteuid() && (status.st_mode & 022) == 0;
}

std::optional<std::string> Cache::read(const std::string& key) const {
  if (!usable_) return std::nullopt;
  const OwnedFd fd(open(path_of(key).c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  struct stat status{};
  if (!fd.valid() || fstat(fd.get(), &status) != 0 || !S_ISREG(status.st_mode) || status.st_uid != geteuid())
    return std::nullopt;
  std::string cubin(static_cast<size_t>(status.st_size), '\0');
  if (::read(fd.get(), cubin.data(), cubin.size()) != static_cast<ssize_t>(cubin.size())) return std::nullopt;
  return cubin;
}

void Cache::write(const std::string& key, const std::string& cubin) const noexcept { put(path_of(key), cubin); }

void Cache::describe(const std::string& key, const std::string& source) const noexcept {
  put(folder_ + "/" + key + ".cu", source);
}

void Cache::put(const std::string& path, const std::string& content) const {
  if (!usable_) return;
  std::string aside = folder_ + "/.new-XXXXXX";
  const OwnedFd fd(mkostemp(aside.data(), O_CLOEXEC));
  if (!fd.valid()) return;
  const bool whole = ::write(fd.get(), content.data(), content.size()) == static_cast<ssize_t>(content.size());
  if (!whole || rename(aside.c_str(), path.c_str()) != 0) unlink(aside.c_str());
}

std::string content_key(const std::string& content) {
  const u64 first = hash_bytes(content.data(), content.size());
  const u64 second = hash_bytes(content.data(), content.size(), first ^ 0x9e3779b97f4a7c15ull);
  char text[33];
  std::snprintf(text, sizeof(text), "%016llx%016llx", static_cast<unsigned long long>(first),
                static_cast<unsigned long long>(second));
  return text;
}

}  // namespace weft::jit
