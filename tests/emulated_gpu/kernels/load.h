// How much does one call have to do? What it computes at least, and the bytes of its arguments and results.
#pragma once

#include <ATen/core/stack.h>

#include "operators.h"

namespace emulated_gpu {

struct Load {
  double flops = 0;  // of products and convolutions, by formula; of all else 0: what it moves takes longer
  double nbytes = 0;
};

// Attention is the products that it is made of.
Load load_of(const Operator& op, const torch::jit::Stack& arguments, const torch::jit::Stack& results);

}  // namespace emulated_gpu
