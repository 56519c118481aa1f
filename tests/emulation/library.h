// A kernel as a library for the emulated GPU: included behind the source that the library renders, which has the kernel.
#pragma once

#include "launch_request.h"
#include "run_block.h"

namespace emulation {

// All blocks at once. The list of __shared__ variables lies beside the library that has `symbol`.
int launch(const LaunchRequest& request, const void* symbol, Block::Body body, void* kernel);

template <class Args>
int launch(void (*function)(const Args), const LaunchRequest& request, const void* symbol) {
  struct Kernel {
    void (*function)(const Args);
    Args args;
  } kernel{function, {}};
  memcpy(&kernel.args, request.args, sizeof(Args));
  const auto run = [](void* given) {
    const auto* of = static_cast<const Kernel*>(given);
    of->function(of->args);
  };
  return launch(request, symbol, run, &kernel);
}

}  // namespace emulation
