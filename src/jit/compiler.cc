#include "jit/compiler.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/log.h"
#include "base/status.h"

namespace weft::jit {
namespace {

namespace fs = std::filesystem;

std::string key_of_headers(const std::string& include) {
  std::vector<fs::path> files;
  std::error_code error;
  for (const auto& entry : fs::recursive_directory_iterator(fs::path(include) / "weft", error)) {
    if (entry.is_regular_file()) files.push_back(entry.path());
  }
  if (files.empty()) throw_internal("the kernel headers are missing under " + include);
  std::sort(files.begin(), files.end());
  std::string all;
  for (const fs::path& file : files) {
    std::ifstream stream(file, std::ios::binary);
    std::ostringstream text;
    text << stream.rdbuf();
    all += fs::relative(file, include).string() + "\n" + text.str();
  }
  return content_key(all);
}

}  // namespace

Compiler::Compiler(const CompilerPaths& paths, const std::string& arch)
    : nvrtc_(paths.nvrtc),
      cache_(paths.cache),
      // No fused multiply-add: the bits are those of the CPU. Machine code only: no PTX that a driver would compile again.
      options_{"--gpu-architecture=" + arch, "--include-path=" + paths.include, "--std=c++20", "--fmad=false",
               "-default-device"},
      headers_key_(key_of_headers(paths.include)) {}

std::string Compiler::cubin(const std::string& source, const std::vector<std::string>& folders) const {
  std::string content = nvrtc_.version() + "\n" + headers_key_ + "\n" + source;
  for (const std::string& option : options_) {
    if (option.find("include-path") == std::string::npos) content += "\n" + option;
  }
  const std::string key = content_key(content);
  if (std::optional<std::string> found = cache_.read(key)) return *found;
  std::vector<std::string> options = options_;
  for (const std::string& folder : folders) options.push_back("--include-path=" + folder);
  Compiled compiled = nvrtc_.compile(source, options);
  log_line(kLogDebug, "compiled kernel " + key);
  cache_.describe(key, source);
  cache_.write(key, compiled.cubin);
  return std::move(compiled.cubin);
}

}  // namespace weft::jit
