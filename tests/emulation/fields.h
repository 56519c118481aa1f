// What driver.h and driver.cc know of a launch: its plain numbers, and the kernel apart from the type of its arguments.
#pragma once

#include <map>
#include <string>
#include <type_traits>

#include "run_block.h"

namespace emulation {

class Fields {
 public:
  explicit Fields(const char* path);
  ~Fields();

  i64 number(const char* name);
  i64 number(const char* name, i32 rank);
  template <class T>
  void take(const char* name, T& field) {
    field = as<T>(number(name));
  }
  // The name ends with the rank.
  template <class T>
  void take(const char* name, i32 rank, T& field) {
    field = as<T>(number(name, rank));
  }
  // What only some calls have.
  template <class T>
  void take_if(const char* name, T& field) {
    if (has(name)) take(name, field);
  }
  bool has(const char* name) const;
  void check_all_taken() const;

 private:
  template <class T>
  static T as(i64 value) {
    if constexpr (std::is_pointer_v<T>) {
      return reinterpret_cast<T>(value);
    } else {
      return static_cast<T>(value);
    }
  }

  std::map<std::string, i64> values_;
};

struct AnyKernel {
  void (*take)(Fields& fields, void* kernel);
  u64 (*complete)(void* kernel);  // bytes of dynamic shared memory
  Block::Body body;               // of a thread
};

// Runs the launches that main's `arguments` name. `kernel` is what the functions of `any` are given.
int run_launches(const AnyKernel& any, void* kernel, u32 num_threads, char** arguments);

}  // namespace emulation
