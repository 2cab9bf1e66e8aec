#include "norms.h"

#include <numeric>
#include <vector>

namespace emulated_gpu {

std::tuple<at::Tensor, at::Tensor> rms_norm_backward(const at::Tensor& grad, const at::Tensor& input,
                                                     at::IntArrayRef shape, const at::Tensor& rstd,
                                                     const std::optional<at::Tensor>& weight,
                                                     std::array<bool, 2> output_mask) {
  std::vector<int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), input.dim() - static_cast<int64_t>(shape.size()));
  const at::Tensor normed = input * rstd, of_normed = weight && weight->defined() ? grad * *weight : grad;
  const at::Tensor of_input = rstd * (of_normed - normed * (of_normed * normed).mean(dims, true));
  const at::Tensor of_weight = output_mask[1] ? (grad * normed).sum_to_size(shape) : at::Tensor();
  return {output_mask[0] ? of_input.to(input.scalar_type()) : at::Tensor(),
          output_mask[1] ? of_weight.to(input.scalar_type()) : at::Tensor()};
}

}  // namespace emulated_gpu
