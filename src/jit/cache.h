// Compiled kernels on disk, keyed by content: the same source, headers, compiler and options give the same file.
#pragma once

#include <optional>
#include <string>

namespace weft::jit {

class Cache {
 public:
  // `folder` is made with mode 0700 if it is missing. Nothing is cached (and nothing is said) if it is not a folder of
  // this user that others cannot write, or a symbolic link.
  explicit Cache(std::string folder);

  std::optional<std::string> read(const std::string& key) const;
  void write(const std::string& key, const std::string& cubin) const noexcept;  // aside, then renamed
  // Keeps the text beside the kernel, so that `weft cache list` can say what it is. Never read here.
  void describe(const std::string& key, const std::string& source) const noexcept;
  bool usable() const { return usable_; }

 private:
  std::string path_of(const std::string& key) const { return folder_ + "/" + key + ".cubin"; }
  void put(const std::string& path, const std::string& content) const;
  std::string folder_;
  bool usable_ = false;
};

// 128 bits of content hash, as hex.
std::string content_key(const std::string& content);

}  // namespace weft::jit
