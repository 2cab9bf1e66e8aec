#include "attention.h"

#include <ATen/cuda/CUDAGeneratorImpl.h>

#include <cmath>

#include "draws.h"

namespace emulated_gpu {
namespace {

constexpr int64_t kRowsOfATile = 32;  // sums are kept for whole tiles

double scale_of(const at::Tensor& query, std::optional<double> scale) {
  return scale ? *scale : 1 / std::sqrt(static_cast<double>(query.size(-1)));
}

at::Tensor scores_of(const at::Tensor& query, const at::Tensor& key, const at::Tensor& bias, bool is_causal,
                     double scale) {
  at::Tensor scores = query.matmul(key.transpose(-1, -2)) * scale;
  if (bias.defined()) scores = scores + bias;
  if (!is_causal) return scores;
  const at::Tensor hidden = at::ones(scores.sizes().slice(scores.dim() - 2), scores.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill(hidden, -std::numeric_limits<double>::infinity());
}

// What each weight is multiplied by, where some are dropped.
at::Tensor kept(const at::Tensor& weights, int64_t seed, int64_t offset, double dropped) {
  at::Generator generator = at::cuda::detail::createCUDAGenerator(weights.device().index());
  auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
  cuda->set_current_seed(static_cast<uint64_t>(seed));
  cuda->set_offset(static_cast<uint64_t>(offset));
  return at::empty_like(weights).bernoulli_(1 - dropped, generator).div_(1 - dropped);
}

at::Tensor on_host(uint64_t number) { return at::scalar_tensor(static_cast<int64_t>(number), at::dtype(at::kLong)); }

std::tuple<at::Tensor, at::Tensor> draw_seed(c10::Device device) {
  const auto [seed, offset] = draw_next(at::cuda::detail::getDefaultCUDAGenerator(device.index()));
  return {on_host(seed), on_host(offset)};
}

}  // namespace

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias,
    bool keeps_sums, double dropped, bool is_causal, std::optional<double> scale) {
  const at::Tensor scores = scores_of(query, key, bias.value_or(at::Tensor()), is_causal, scale_of(query, scale));
  at::Tensor weights = scores.softmax(-1);
  at::Tensor seed = at::empty({}, at::dtype(at::kLong)), offset = at::empty({}, at::dtype(at::kLong));
  if (dropped > 0) {
    std::tie(seed, offset) = draw_seed(query.device());
    weights = weights * kept(weights, seed.item<int64_t>(), offset.item<int64_t>(), dropped);
  }
  const at::Tensor output = weights.matmul(value).transpose(1, 2).contiguous().transpose(1, 2);
  const int64_t num_rows = query.size(2), num_kept = (num_rows + kRowsOfATile - 1) / kRowsOfATile * kRowsOfATile;
  at::Tensor sums =
      at::empty({query.size(0), query.size(1), keeps_sums ? num_kept : 0}, query.options().dtype(at::kFloat));
  if (keeps_sums) at::constant_pad_nd_out(sums, scores.to(at::kFloat).logsumexp(-1), {0, num_kept - num_rows}, 0);
  return {output, sums, seed, offset};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_attention_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& bias, const at::Tensor& output, const at::Tensor& sums, const at::Tensor& seed,
    const at::Tensor& offset, double dropped, std::array<bool, 4> wanted, bool is_causal, std::optional<double> scale) {
  const double by = scale_of(query, scale);
  const at::Tensor sum = sums.narrow(-1, 0, query.size(2)).unsqueeze(-1);
  const at::Tensor weights = (scores_of(query, key, bias, is_causal, by) - sum).exp().to(query.scalar_type());
  at::Tensor of_weights = gradient.matmul(value.transpose(-1, -2)), used = weights;
  if (dropped > 0) {  // the host follows these addresses
    const at::Tensor factor =
        kept(weights, *seed.const_data_ptr<int64_t>(), *offset.const_data_ptr<int64_t>(), dropped);
    of_weights = of_weights * factor;
    used = weights * factor;
  }
  const at::Tensor of_scores = weights * (of_weights - (gradient * output).sum(-1, true));
  const at::Tensor none;
  return {wanted[0] ? of_scores.matmul(key) * by : none,
          wanted[1] ? of_scores.transpose(-1, -2).matmul(query) * by : none,
          wanted[2] ? used.transpose(-1, -2).matmul(gradient) : none,
          wanted[3] && bias.defined() ? of_scores.sum_to_size(bias.sizes()) : none};
}

}  // namespace emulated_gpu
