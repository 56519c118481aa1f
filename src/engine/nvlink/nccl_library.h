// NCCL, found when it is needed: the functions that the network of node kernels calls.
#pragma once

#include <string>

#include "engine/nvlink/nccl_abi.h"

namespace weft::nccl {

std::string version_text(int version);  // 23203: "2.32.3"

class Library {
 public:
  // Loaded with its symbols to itself, beside another NCCL if there is one; it stays loaded. Error kUnsupported: it can't be loaded,
  // lacks a function, or is older than kMinVersion.
  explicit Library(const std::string& path);

  int version() const { return version_; }
  std::string version_text() const { return nccl::version_text(version_); }
  int told_version() const;  // of structs that are handed over: the library's, or the newest known here
  void check(int status, const char* call) const;  // error kInternalError with NCCL's text

  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*init)(Comm*, int num_ranks, UniqueId, int rank) = nullptr;
  int (*abort)(Comm) = nullptr;
  int (*query_properties)(Comm, Properties*) = nullptr;
  int (*register_window)(Comm, void*, size_t, Window*, int flags) = nullptr;
  int (*deregister_window)(Comm, Window) = nullptr;
  int (*create_device_comm)(Comm, const Requirements*, void* device_comm) = nullptr;
  int (*destroy_device_comm)(Comm, const void* device_comm) = nullptr;

 private:
  template <class Symbol>
  void load(void* library, Symbol& symbol, const char* name);

  std::string path_;
  int version_ = 0;
  const char* (*last_error_)(Comm) = nullptr;
};

}  // namespace weft::nccl
