// Facts from an operator's schema about its calls, read once for each operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <atomic>
#include <string>
#include <vector>

namespace emulated_gpu {

enum class Library { kNone, kCublas, kCudnn };

struct Operator {
  c10::OperatorHandle handle;
  std::string name;
  std::vector<bool> writes{};      // of every argument
  std::vector<int> argument_of{};  // of every result: the argument that it is, or -1
  int generator = -1;              // the argument that is one, or -1
  bool has_kernel = true;          // for the CPU
  bool draws_unasked = false;      // random numbers, without a generator among its arguments
  bool mixes_devices = false;      // takes tensors of the host beside the device's
  Library library = Library::kNone;
  bool is_wide = false;            // computes numbers of 16 bits in 32, and rounds what it makes
  bool adds_up = false;            // what comes in any order on a GPU, where threads add atomically
  std::atomic<bool> waits{false};  // its results are known only when it has run
};

Operator& operator_of(const c10::OperatorHandle& handle);

}  // namespace emulated_gpu
