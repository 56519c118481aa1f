// A CUDA driver without a GPU, for tests of the host side: libcuda.so.1 and NVRTC in one library. Memory is host memory
// that can really be mapped, shared and unmapped. Streams run at once, unless a test holds one; kernels are what a test says,
// or the real ones, compiled for the CPU: tests/emulation/emulated_gpu.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

namespace fake_cuda {

// Called in place of a kernel, in the launching thread, with the launch's parameter.
using KernelBody = std::function<void(void* args)>;

void set_kernel(KernelBody body);  // empty: kernels do nothing

// From the source of a kernel to the path of a library that runs it (tests/emulation/library.h), "" for one that does nothing, or
// to why there is none. 0, or it did not compile. From then on kernels are run, and graphs record.
using Compile = int (*)(const char* source, char* path, size_t num_bytes);
void compile_with(Compile compile);
int replay(uint64_t id);  // the graph of a capture; 0, or what the first call that failed has answered

void hold(uint64_t stream);    // work of this stream does not end ...
void let_go(uint64_t stream);  // ... until here
void begin_capture(uint64_t stream, uint64_t id);
void end_capture(uint64_t stream);
// What the graph of a capture holds is let go in another thread, which may not call the driver.
void destroy_graph(uint64_t id);
int num_held_by(uint64_t id);      // user objects, by the graph of a capture
void offer_fabric(bool is_there);  // handles for other machines
void fail_gpu(int result);         // event queries and launches answer this; 0: the GPU works
void fail_next(const char* symbol, int result,
               int after = 0);  // one call of a driver function, after so many good ones

std::vector<std::pair<uint64_t, uint64_t>> waits();  // (stream that waits, stream of the event), since the last call
// Whether all that `stream` is given from now on runs after what `other` had been given when its counter was `mark`.
bool runs_after(uint64_t stream, uint64_t other, uint64_t mark);
uint64_t give_work(uint64_t stream);  // returns the counter after it
int num_mapped();                     // mappings of physical memory
int64_t physical_bytes();             // that someone holds
// Waits until so many are held, which is the last step of a clean-up in another thread; what is held after some seconds.
int64_t physical_bytes_at_last(int64_t expected);
int num_host_pages();  // of the host that the GPU can read
int num_launches();
int num_device_copies();       // from GPU to GPU
unsigned last_shared_bytes();  // of the last launch, dynamic

}  // namespace fake_cuda
