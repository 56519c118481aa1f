// A compiled kernel in the primary context of a GPU, ready to be launched.
#pragma once

#include <string>

#include "base/cuda_driver.h"

namespace weft::jit {

class LoadedKernel {
 public:
  // The function `weft_kernel` of `cubin`, with `shared_bytes` of dynamic shared memory. Error kCudaError.
  LoadedKernel(int gpu_index, const std::string& cubin, unsigned num_threads, unsigned shared_bytes);
  ~LoadedKernel();
  LoadedKernel(const LoadedKernel&) = delete;
  LoadedKernel& operator=(const LoadedKernel&) = delete;

  // `args` is copied before this returns. Error kCudaError.
  void launch(unsigned num_blocks, cuda::Stream stream, void* args) const;

 private:
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::Module module_ = nullptr;
  cuda::Function function_ = nullptr;
  unsigned num_threads_;
  unsigned shared_bytes_;
};

}  // namespace weft::jit
