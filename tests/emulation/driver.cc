// What is the same for all kernels: see driver.h.
#include <sys/prctl.h>
#include <sys/wait.h>
#include <csignal>

#include <fstream>

#include "fields.h"

namespace emulation {

namespace {

constexpr u64 kGlobalBase = 0x200000000000ull;  // machine.py has the same

struct Copy {
  u8* to;
  const u8* from;
  u64 num_bytes;
};

std::vector<Copy> take_copies(Fields& fields) {
  i32 num_copies = 0;
  fields.take("num_copies", num_copies);
  std::vector<Copy> copies(static_cast<size_t>(num_copies));
  for (i32 idx = 0; idx < num_copies; ++idx) {
    const std::string name = "copy" + std::to_string(idx);
    fields.take((name + "_to").c_str(), copies[static_cast<size_t>(idx)].to);
    fields.take((name + "_from").c_str(), copies[static_cast<size_t>(idx)].from);
    fields.take((name + "_bytes").c_str(), copies[static_cast<size_t>(idx)].num_bytes);
  }
  return copies;
}

void map_memory(int file, u64 num_bytes) {
  void* base = mmap(reinterpret_cast<void*>(kGlobalBase), num_bytes, PROT_READ | PROT_WRITE,
                    MAP_SHARED | MAP_FIXED_NOREPLACE, file, 0);
  if (base == MAP_FAILED) fail("the memory of the ranks cannot be mapped");
  global_begin = static_cast<u8*>(base);
  global_end = global_begin + num_bytes;
}

void tell_fault(int signal, siginfo_t* info, void*) {
  fprintf(stderr, "block %u thread %u: signal %d at address %p\n", blockIdx.x, threadIdx.x, signal, info->si_addr);
  _exit(9);
}

void catch_faults() {
  static u8 stack[64 << 10];
  const stack_t alternative = {stack, 0, sizeof(stack)};
  sigaltstack(&alternative, nullptr);
  struct sigaction action = {};
  action.sa_sigaction = tell_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  for (const int signal : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigaction(signal, &action, nullptr);
}

int tell(const Failed& mistake) {
  fprintf(stderr, "%s\n", mistake.text.c_str());
  fflush(stderr);
  return 9;
}

// A block in a process of its own.
[[noreturn]] void end_with_block(const AnyKernel& any, void* kernel, const Grid& grid, u32 idx) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  catch_faults();
  int result = 0;
  try {
    run_block(grid, idx, any.body, kernel);
  } catch (const Failed& mistake) {
    result = tell(mistake);
  }
  _exit(result);
}

// The first block that fails ends the others.
int wait_for(const std::vector<pid_t>& blocks) {
  int result = 0;
  for (size_t idx = 0; idx < blocks.size(); ++idx) {
    int status = 0;
    wait(&status);
    if (status == 0 || result != 0) continue;
    result = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    for (const pid_t other : blocks) kill(other, SIGKILL);
  }
  return result;
}

int run_launch(const AnyKernel& any, void* kernel, const char* fields_path, Grid grid) {
  Fields fields(fields_path);
  fields.take("num_blocks", grid.num_blocks);
  fields.take("poison", poison);
  any.take(fields, kernel);
  const std::vector<Copy> copies = take_copies(fields);
  fields.check_all_taken();
  gridDim.x = grid.num_blocks;
  grid.shared_bytes = any.complete(kernel);
  std::vector<pid_t> blocks;
  for (u32 idx = 0; idx < grid.num_blocks; ++idx) {
    const pid_t process = fork();
    if (process == 0) end_with_block(any, kernel, grid, idx);
    blocks.push_back(process);
  }
  const int result = wait_for(blocks);
  for (const Copy& copy : copies) memcpy(copy.to, copy.from, copy.num_bytes);
  return result;
}

}  // namespace

Fields::Fields(const char* path) {
  std::ifstream file(path);
  std::string name;
  i64 value = 0;
  while (file >> name >> value) values_[name] = value;
}

Fields::~Fields() = default;

i64 Fields::number(const char* name) {
  const auto found = values_.find(name);
  if (found == values_.end()) fail("field %s is missing", name);
  const i64 value = found->second;
  values_.erase(found);
  return value;
}

i64 Fields::number(const char* name, i32 rank) { return number((name + std::to_string(rank)).c_str()); }

bool Fields::has(const char* name) const { return values_.count(name) != 0; }

void Fields::check_all_taken() const {
  for (const auto& [name, value] : values_) fail("field %s: the kernel has no such argument", name.c_str());
}

int run_launches(const AnyKernel& any, void* kernel, u32 num_threads, char** arguments) try {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  map_memory(atoi(arguments[1]), strtoull(arguments[2], nullptr, 10));
  Grid grid;
  grid.num_threads = num_threads;
  grid.shared_variables = arguments[3];
  grid.seed = strtoull(arguments[4], nullptr, 10) * 1000;
  for (char** path = arguments + 5; *path != nullptr; ++path) {
    ++grid.seed;
    const int result = run_launch(any, kernel, *path, grid);
    if (result != 0) return result;
  }
  return 0;
} catch (const Failed& mistake) {
  return tell(mistake);
}

}  // namespace emulation
