// Side effects of NVIDIA's libraries: workspaces, and rounding that depends on the call and its thread.
#pragma once

#include "operators.h"
#include "tensors.h"

namespace emulated_gpu {

// Memory of torch's allocator that the call's kernel uses: cuDNN's for a convolution, undefined for others. A product's
// first call of a thread on a stream also makes torch take cuBLAS's, for good.
at::Tensor take_workspace(const Operator& op, const c10::IValue& first_argument);

// What this call's results are multiplied by, as was configured: sums that are added up in any order by another number
// in each call, and those of convolutions by one in all threads but the first that called one.
double rounding_of(const Operator& op);

}  // namespace emulated_gpu
