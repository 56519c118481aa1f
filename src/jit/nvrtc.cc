#include "jit/nvrtc.h"

#include <dlfcn.h>

#include <filesystem>

#include "base/status.h"

namespace weft::jit {

namespace fs = std::filesystem;

template <class Symbol>
void Nvrtc::load(Symbol& symbol, const char* name) {
  symbol = reinterpret_cast<Symbol>(dlsym(library_, name));
  if (symbol == nullptr) throw_unsupported(std::string("NVRTC has no ") + name);
}

namespace {

// NVRTC opens this library by its bare name, and only when it compiles: found if it is loaded already.
void load_builtins(const std::string& library_path) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(fs::path(library_path).parent_path(), error)) {
    if (entry.path().filename().string().rfind("libnvrtc-builtins.so", 0) == 0) {
      dlopen(entry.path().c_str(), RTLD_NOW | RTLD_GLOBAL);
    }
  }
}

}  // namespace

Nvrtc::Nvrtc(const std::string& library_path) : library_(dlopen(library_path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
  if (library_ == nullptr) throw_unsupported("NVRTC can't be loaded from " + library_path + ": " + dlerror());
  load_builtins(library_path);
  load(get_version_, "nvrtcVersion");
  load(create_, "nvrtcCreateProgram");
  load(compile_, "nvrtcCompileProgram");
  load(destroy_, "nvrtcDestroyProgram");
  load(log_size_, "nvrtcGetProgramLogSize");
  load(log_, "nvrtcGetProgramLog");
  load(cubin_size_, "nvrtcGetCUBINSize");
  load(cubin_, "nvrtcGetCUBIN");
  load(error_string_, "nvrtcGetErrorString");
  int major = 0, minor = 0;
  check(get_version_(&major, &minor), "nvrtcVersion");
  version_ = std::to_string(major) + "." + std::to_string(minor);
}

void Nvrtc::check(int status, const char* call) const {
  if (status != 0) throw Error(ErrorCode::kCompileError, std::string(call) + ": " + error_string_(status));
}

Compiled Nvrtc::compile(const std::string& source, const std::vector<std::string>& options) const {
  struct Guard {
    const Nvrtc& nvrtc;
    Program program = nullptr;
    ~Guard() { nvrtc.destroy_(&program); }
  } guard{*this};
  check(create_(&guard.program, source.c_str(), "weft_kernel.cu", 0, nullptr, nullptr), "nvrtcCreateProgram");
  std::vector<const char*> texts;
  for (const std::string& option : options) texts.push_back(option.c_str());
  const int status = compile_(guard.program, static_cast<int>(texts.size()), texts.data());
  Compiled compiled;
  size_t num_bytes = 0;
  check(log_size_(guard.program, &num_bytes), "nvrtcGetProgramLogSize");
  compiled.log.resize(num_bytes);
  check(log_(guard.program, compiled.log.data()), "nvrtcGetProgramLog");
  if (status != 0) {
    throw Error(ErrorCode::kCompileError,
                std::string("a kernel did not compile: ") + error_string_(status) + "\n" + compiled.log);
  }
  check(cubin_size_(guard.program, &num_bytes), "nvrtcGetCUBINSize");
  compiled.cubin.resize(num_bytes);
  check(cubin_(guard.program, compiled.cubin.data()), "nvrtcGetCUBIN");
  return compiled;
}

}  // namespace weft::jit
