#include "amount.h"

#include <algorithm>

#include "tensors.h"

namespace emulated_gpu {
namespace {

using torch::jit::Stack;

double count(const at::Tensor& tensor) { return static_cast<double>(tensor.numel()); }

// Of an expanded tensor what it really has.
double bytes_of(const at::Tensor& tensor) {
  return std::min(static_cast<double>(tensor.nbytes()), static_cast<double>(use_of(tensor, false).nbytes));
}

double bytes_of(const Stack& values) {
  double nbytes = 0;
  for (const c10::IValue& value : values) each_tensor(value, [&](const at::Tensor& it) { nbytes += bytes_of(it); });
  return nbytes;
}

// Each element of a product is a sum over the last dimension of its left factor.
double product_flops(const at::Tensor& left, const c10::IValue& product) {
  return left.dim() == 0 ? 0 : 2 * count(product.toTensor()) * static_cast<double>(left.size(-1));
}

// Each element of the dense side, which is the output unless it is transposed, meets the kernel of one output channel.
double convolution_flops(const at::Tensor& dense, const at::Tensor& weight) {
  return weight.size(0) == 0 ? 0 : 2 * count(dense) * count(weight) / static_cast<double>(weight.size(0));
}

double convolution_backward_flops(const Stack& arguments) {
  const at::Tensor &gradient = arguments[0].toTensor(), &input = arguments[1].toTensor();
  const bool is_transposed = arguments[7].toBool();
  const std::vector<bool> wanted = arguments[10].toBoolList().vec();
  return (wanted[0] + wanted[1]) * convolution_flops(is_transposed ? input : gradient, arguments[2].toTensor());
}

double flops_of(const Operator& op, const Stack& arguments, const Stack& results) {
  const std::string& name = op.handle.schema().name();
  if (name == "aten::convolution") {
    return convolution_flops((arguments[6].toBool() ? arguments[0] : results[0]).toTensor(), arguments[1].toTensor());
  }
  if (name == "aten::convolution_backward") return convolution_backward_flops(arguments);
  if (op.library != Library::kCublas) return 0;
  const bool adds =
      name.starts_with("aten::addm") || name.starts_with("aten::badd") || name.starts_with("aten::_addmm");
  return product_flops(arguments[adds ? 1 : 0].toTensor(), results[0]);
}

}  // namespace

Amount amount_of(const Operator& op, const Stack& arguments, const Stack& results) {
  return {flops_of(op, arguments, results), bytes_of(arguments) + bytes_of(results)};
}

}  // namespace emulated_gpu
