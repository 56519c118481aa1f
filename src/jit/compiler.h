// From the text of a kernel to its machine code, through the cache.
#pragma once

#include <string>

#include "jit/cache.h"
#include "jit/nvrtc.h"

namespace weft::jit {

struct CompilerPaths {
  std::string nvrtc;    // libnvrtc
  std::string include;  // the folder that holds weft/
  std::string cache;    // empty: no cache
};

class Compiler {
 public:
  // Reads all headers once: they are part of every key. Error kUnsupported (no NVRTC), kInternalError (no headers).
  Compiler(const CompilerPaths& paths, const std::string& arch);  // arch: "sm_90"

  // Machine code of `source`. `folders`: of further headers, which the source must name by their content, for they are no part of
  // the key. Error kCompileError with the log.
  std::string cubin(const std::string& source, const std::vector<std::string>& folders = {}) const;

 private:
  Nvrtc nvrtc_;
  Cache cache_;
  std::vector<std::string> options_;
  std::string headers_key_;
};

}  // namespace weft::jit
