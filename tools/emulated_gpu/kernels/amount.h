// The work of one call: its least operations, and the bytes of its arguments and results.
#pragma once

#include <ATen/core/stack.h>

#include "../device/settings.h"
#include "operators.h"

namespace emulated_gpu {

// Operations of products and convolutions, by formula; of all else none: what it moves takes longer. Attention is the
// products that it is made of.
Amount amount_of(const Operator& op, const torch::jit::Stack& arguments, const torch::jit::Stack& results);

}  // namespace emulated_gpu
