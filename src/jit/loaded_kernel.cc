#include "jit/loaded_kernel.h"

namespace weft::jit {

LoadedKernel::LoadedKernel(int gpu_index, const std::string& cubin, unsigned num_threads, unsigned shared_bytes)
    : num_threads_(num_threads), shared_bytes_(shared_bytes) {
  const cuda::Driver& driver = cuda::driver();
  cuda::check(driver.device_get(&device_, gpu_index), "cuDeviceGet");
  cuda::check(driver.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const cuda::ContextScope scope(context_);
    cuda::check(driver.module_load(&module_, cubin.data()), "cuModuleLoadData");
    cuda::check(driver.module_get_function(&function_, module_, "weft_kernel"), "cuModuleGetFunction");
    cuda::check(driver.function_set_attribute(function_, cuda::kMaxDynamicShared, static_cast<int>(shared_bytes)),
                "cuFuncSetAttribute");
  } catch (...) {
    driver.primary_context_release(device_);
    throw;
  }
}

LoadedKernel::~LoadedKernel() {
  {
    const cuda::ContextScope scope(context_);
    cuda::driver().module_unload(module_);
  }
  cuda::driver().primary_context_release(device_);
}

void LoadedKernel::launch(unsigned num_blocks, cuda::Stream stream, void* args) const {
  const cuda::ContextScope scope(context_);
  void* params[] = {args};
  const cuda::LaunchConfig config{{num_blocks, 1, 1}, {num_threads_, 1, 1}, shared_bytes_, stream, nullptr, 0};
  cuda::check(cuda::driver().launch(&config, function_, params, nullptr), "cuLaunchKernelEx");
}

}  // namespace weft::jit
