// The kernels of one GPU: rendered from their configuration, compiled once, kept loaded.
#pragma once

#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/cuda_driver.h"
#include "jit/compiler.h"
#include "weft/config/kernel.h"
#include "weft/config/small_kernel.h"

namespace weft::nvlink {

struct SmallDispatchKernel;  // small_dispatch.h

struct Kernel {
  cuda::Function function = nullptr;
  unsigned num_threads = 0;
  unsigned shared_bytes = 0;  // dynamic
};

// Of others, that a kernel includes (gin_network.h).
struct KernelHeaders {
  std::string prologue;              // in front of the source; names the headers by their content
  std::vector<std::string> folders;  // where they lie
};

std::string render(const DispatchKernelConfig& config);
std::string render(const CombineKernelConfig& config);
std::string render(const SmallDispatchKernel& kernel);
std::string render(const SmallCombineKernelConfig& config);

// The name in its cubin of the kernel that a source has, weft::NAME(weft::kernels::ARGS) as the Itanium C++ ABI mangles it.
std::string symbol_of(const std::string& source);

// What tells configurations apart without rendering: the bytes of all fields.
std::string key_of(const DispatchKernelConfig& config);
std::string key_of(const CombineKernelConfig& config);
std::string key_of(const SmallDispatchKernel& kernel);
std::string key_of(const SmallCombineKernelConfig& config);

// As many stages as shared memory holds.
DispatchKernelConfig with_stages(DispatchKernelConfig config, int shared_bytes);

class Kernels {
 public:
  Kernels(cuda::Device device, const jit::CompilerPaths& paths);
  ~Kernels();
  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;

  // Compiles or loads at the first call of a configuration. Errors: kCompileError, kCudaError.
  const Kernel& prepare(const DispatchKernelConfig& config, const KernelHeaders& headers = {});
  const Kernel& prepare(const CombineKernelConfig& config, const KernelHeaders& headers = {});
  const Kernel& prepare(const SmallDispatchKernel& kernel, const KernelHeaders& headers = {});
  const Kernel& prepare(const SmallCombineKernelConfig& config, const KernelHeaders& headers = {});
  // `shared_bytes`: dynamic. Any thread.
  const Kernel& prepare(const std::string& source, unsigned num_threads, unsigned shared_bytes,
                        const std::vector<std::string>& folders = {});
  int shared_bytes() const { return shared_bytes_; }  // a block may have
  int num_multiprocessors() const { return num_multiprocessors_; }

 private:
  int shared_bytes_ = 0;
  int num_multiprocessors_ = 0;
  jit::Compiler compiler_;
  std::mutex mutex_;
  std::map<std::pair<std::string, unsigned>, Kernel> loaded_;  // by source and shared memory
  std::vector<cuda::Module> modules_;
};

}  // namespace weft::nvlink
