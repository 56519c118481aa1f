#include "engine/nvlink/nccl_library.h"

#include <dlfcn.h>

#include <algorithm>

#include "base/status.h"

namespace weft::nccl {

std::string version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

template <class Symbol>
void Library::load(void* library, Symbol& symbol, const char* name) {
  symbol = reinterpret_cast<Symbol>(dlsym(library, name));
  if (symbol == nullptr) throw_unsupported("NCCL in " + path_ + " has no " + name);
}

Library::Library(const std::string& path) : path_(path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND | RTLD_NODELETE);
  if (library == nullptr) throw_unsupported("NCCL can't be loaded from " + path + ": " + dlerror());
  int (*get_version)(int*) = nullptr;
  load(library, get_version, "ncclGetVersion");
  if (get_version(&version_) != kSuccess || version_ < kMinVersion) {
    throw_unsupported("NCCL " + version_text() + " in " + path + "; need: " + nccl::version_text(kMinVersion) +
                      " or newer");
  }
  load(library, get_unique_id, "ncclGetUniqueId");
  load(library, init, "ncclCommInitRank");
  load(library, abort, "ncclCommAbort");
  load(library, query_properties, "ncclCommQueryProperties");
  load(library, register_window, "ncclCommWindowRegister");
  load(library, deregister_window, "ncclCommWindowDeregister");
  load(library, create_device_comm, "ncclDevCommCreate");
  load(library, destroy_device_comm, "ncclDevCommDestroy");
  load(library, last_error_, "ncclGetLastError");
}

int Library::told_version() const { return std::min(version_, kVersion); }

void Library::check(int status, const char* call) const {
  if (status == kSuccess) return;
  const char* said = last_error_(nullptr);
  throw Error(ErrorCode::kInternalError, std::string(call) + " of NCCL " + version_text() + " failed with " +
                                             std::to_string(status) + ": " + (said == nullptr ? "" : said));
}

}  // namespace weft::nccl
