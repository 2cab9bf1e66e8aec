// Execution of one operator call on the emulated GPU: queued as a kernel, or synchronous where that is impossible.
//
// The shapes of the results are found by the operator's Meta kernel; they are allocated by torch's CUDA allocator, the
// CPU's kernel is queued on the current stream, and the caller goes on at once, as with a real GPU. A result that is no
// tensor, a shape that depends on data, or an operator without a Meta kernel: the call waits for the stream first.
#pragma once

#include <ATen/core/stack.h>

#include "operators.h"

namespace emulated_gpu {

// A boxed kernel for every operator.
void run(const c10::OperatorHandle& handle, c10::DispatchKeySet keys, torch::jit::Stack* stack);

}  // namespace emulated_gpu
