#include "cells.h"

namespace emulated_gpu {
namespace {

at::Tensor with_bias(const at::Tensor& gates, const MaybeTensor& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor or_zeros(const MaybeTensor& gradient, const at::Tensor& like) {
  return gradient && gradient->defined() ? *gradient : at::zeros_like(like);
}

at::Tensor sigmoid_backward(const at::Tensor& y) { return y * (1 - y); }
at::Tensor tanh_backward(const at::Tensor& y) { return 1 - y * y; }

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell, const MaybeTensor& input_bias,
                                                         const MaybeTensor& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid(), forget = gates[1].sigmoid(), made = gates[2].tanh();
  const at::Tensor out = gates[3].sigmoid(), new_cell = forget * cell + in * made;
  return {out * new_cell.tanh(), new_cell, at::cat({in, forget, made, out}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const MaybeTensor& grad_hidden,
                                                                  const MaybeTensor& grad_cell, const at::Tensor& cell,
                                                                  const at::Tensor& new_cell,
                                                                  const at::Tensor& workspace, bool has_bias) {
  const auto gates = workspace.chunk(4, 1);
  const at::Tensor &in = gates[0], &forget = gates[1], &made = gates[2], &out = gates[3];
  const at::Tensor seen = new_cell.tanh(), of_hidden = or_zeros(grad_hidden, seen);
  const at::Tensor of_cell = or_zeros(grad_cell, seen) + of_hidden * out * tanh_backward(seen);
  const at::Tensor of_gates = at::cat({of_cell * made * sigmoid_backward(in), of_cell * cell * sigmoid_backward(forget),
                                       of_cell * in * tanh_backward(made), of_hidden * seen * sigmoid_backward(out)},
                                      1);
  return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : at::Tensor()};
}

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const MaybeTensor& input_bias,
                                            const MaybeTensor& hidden_bias) {
  const auto input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto own = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (input[0] + own[0]).sigmoid(), update = (input[1] + own[1]).sigmoid();
  const at::Tensor made = (input[2] + reset * own[2]).tanh();
  return {made + update * (hidden - made), at::cat({reset, update, made, hidden, own[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& grad_hidden,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto kept = workspace.chunk(5, 1);
  const at::Tensor &reset = kept[0], &update = kept[1], &made = kept[2], &hidden = kept[3], &own = kept[4];
  const at::Tensor of_update = grad_hidden * (hidden - made) * sigmoid_backward(update);
  const at::Tensor of_made = grad_hidden * (1 - update) * tanh_backward(made);
  const at::Tensor of_reset = of_made * own * sigmoid_backward(reset);
  const at::Tensor of_input = at::cat({of_reset, of_update, of_made}, 1);
  const at::Tensor of_own = at::cat({of_reset, of_update, of_made * reset}, 1);
  const at::Tensor of_input_bias = has_bias ? of_input.sum(0) : at::Tensor();
  return {of_input, of_own, grad_hidden * update, of_input_bias, has_bias ? of_own.sum(0) : at::Tensor()};
}

}  // namespace emulated_gpu
