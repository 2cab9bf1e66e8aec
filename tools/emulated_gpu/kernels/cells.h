// Cells of LSTM and GRU, whose fused kernels exist for CUDA only, by the operators that they fuse.
#pragma once

#include <ATen/ATen.h>

#include <optional>
#include <tuple>

namespace emulated_gpu {

using MaybeTensor = std::optional<at::Tensor>;

// (hidden state, cell state, workspace)
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell, const MaybeTensor& input_bias,
                                                         const MaybeTensor& hidden_bias);

// Gradients of (gates, cell, bias)
std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const MaybeTensor& grad_hidden,
                                                                  const MaybeTensor& grad_cell, const at::Tensor& cell,
                                                                  const at::Tensor& new_cell,
                                                                  const at::Tensor& workspace, bool has_bias);

// (hidden state, workspace)
std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const MaybeTensor& input_bias,
                                            const MaybeTensor& hidden_bias);

// Gradients of (input gates, hidden gates, hidden state, input bias, hidden bias)
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hidden,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias);

}  // namespace emulated_gpu
