// Gradients of norms whose fused kernels exist for CUDA only, by the operators that they fuse.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

namespace emulated_gpu {

// Gradients of (input, weight)
std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                                     at::IntArrayRef shape, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> output_mask);

}  // namespace emulated_gpu
