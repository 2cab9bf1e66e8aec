// Replaces torch's CUDA kernels: all of aten's, except those that only handle memory and shapes.
#include <ATen/ATen.h>
#include <ATen/NativeFunctions.h>
#include <ATen/ops/copy_native.h>
#include <torch/library.h>

#include <set>

#include "attention.h"
#include "call.h"
#include "cells.h"
#include "norms.h"

namespace emulated_gpu {
namespace {

const std::set<std::string> kKept = {
    "empty.memory_format",
    "empty_strided",
    "as_strided",
    "view",
    "_reshape_alias",
    "unfold",
    "resize_",
    "set_",
    "set_.source_Tensor",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "is_set_to",
    "record_stream",
    "_local_scalar_dense",
    "view_as_real",
    "view_as_complex",
    "_efficientzerotensor",
    "_fused_sdp_choice",
};

// Those of our own: see install.
const std::set<std::string> kOwn = {
    "copy_",
    "native_dropout",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_lstm_cell_backward_impl",
    "_thnn_fused_gru_cell",
    "_thnn_fused_gru_cell_backward",
    "_fused_rms_norm_backward",
};

// Plain copies are torch's own code, down to cudaMemcpyAsync; what needs a kernel is queued as one.
at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const bool is_within = self.is_cuda() && source.device() == self.device();
  const bool is_dense = (self.is_contiguous() && source.is_contiguous()) ||
                        (self.is_non_overlapping_and_dense() && self.strides() == source.strides());
  const bool is_plain = self.dtype() == source.dtype() && self.sizes() == source.sizes() && is_dense &&
                        self.is_conj() == source.is_conj() && self.is_neg() == source.is_neg();
  if (!is_within || is_plain) return at::native::copy_(self, source, non_blocking);
  static const auto kHandle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
  torch::jit::Stack stack{self, source, non_blocking};
  run(kHandle, {}, &stack);
  return self;
}

// The CPU has no kernel that keeps the mask.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const at::TensorOptions of_mask = input.options().dtype(at::kBool);
  if (input.numel() == 0 || !train.value_or(true)) return {input.clone(), at::ones_like(input, of_mask)};
  const double kept = 1 - p;
  at::Tensor mask = at::empty_like(input, of_mask);
  mask.bernoulli_(kept);
  return {input.mul(mask).mul_(kept == 0 ? 0 : 1 / kept), mask};
}

void install() {
  static auto* const library =
      new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__, __LINE__);
  auto names = c10::Dispatcher::singleton().getRegistrationsForDispatchKey(c10::DispatchKey::CUDA);
  names.push_back({"aten::convolution", ""});  // would ask cuDNN
  names.push_back({"aten::convolution_backward", ""});
  for (const c10::OperatorName& name : names) {
    if (name.getNamespace() != "aten") continue;
    const std::string short_name = toString(name).substr(sizeof("aten::") - 1);
    if (kKept.count(short_name) > 0 || kOwn.count(short_name) > 0) continue;
    library->impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
  }
  library->impl("copy_", TORCH_FN(copy_));
  library->impl("native_dropout", TORCH_FN(native_dropout));
  library->impl("_scaled_dot_product_efficient_attention", TORCH_FN(efficient_attention));
  library->impl("_scaled_dot_product_efficient_attention_backward", TORCH_FN(efficient_attention_backward));
  library->impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  library->impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  library->impl("_thnn_fused_gru_cell", TORCH_FN(gru_cell));
  library->impl("_thnn_fused_gru_cell_backward", TORCH_FN(gru_cell_backward));
  library->impl("_fused_rms_norm_backward", TORCH_FN(rms_norm_backward));
}

}  // namespace
}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void emulated_gpu_install_kernels() { emulated_gpu::install(); }
