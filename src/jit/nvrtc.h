// NVRTC, loaded at run time from where Python's cuda-pathfinder finds it: no compiler, no toolkit.
#pragma once

#include <string>
#include <vector>

namespace weft::jit {

struct Compiled {
  std::string cubin;
  std::string log;  // with ptxas's figures
};

class Nvrtc {
 public:
  // Error kUnsupported if the library can't be loaded or lacks a function.
  explicit Nvrtc(const std::string& library_path);

  // Error kCompileError with the compiler's log.
  Compiled compile(const std::string& source, const std::vector<std::string>& options) const;
  const std::string& version() const { return version_; }

 private:
  using Program = void*;
  template <class Symbol>
  void load(Symbol& symbol, const char* name);
  void check(int status, const char* call) const;

  void* library_;
  std::string version_;
  int (*get_version_)(int*, int*);
  int (*create_)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile_)(Program, int, const char* const*);
  int (*destroy_)(Program*);
  int (*log_size_)(Program, size_t*);
  int (*log_)(Program, char*);
  int (*cubin_size_)(Program, size_t*);
  int (*cubin_)(Program, char*);
  const char* (*error_string_)(int);
};

}  // namespace weft::jit
