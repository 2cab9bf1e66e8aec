// Memory-efficient attention, whose kernels exist for CUDA only, by the operators that they fuse.
//
// As in the real ones, the seed and the offset of what is dropped lie on the host, and the backward reads them there.
#pragma once

#include <ATen/ATen.h>

#include <array>
#include <optional>
#include <tuple>

namespace emulated_gpu {

// (output, log of the sums of exponentials, seed, offset)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    bool keeps_sums, double dropped, bool is_causal, std::optional<double> scale);

// Gradients of (query, key, value, bias)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& output, const at::Tensor& sums, const at::Tensor& seed,
    const at::Tensor& offset, double dropped, std::array<bool, 4> wanted, bool is_causal, std::optional<double> scale);

}  // namespace emulated_gpu
