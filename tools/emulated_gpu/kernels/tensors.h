// The tensors that a call's kernel gets: CPU tensors over the same bytes, and Meta tensors of the same shapes.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/ivalue.h>

#include <unordered_map>
#include <vector>

#include "../faces/control.h"

namespace emulated_gpu {

// Every tensor in a value is replaced by what `map` makes of it.
template <typename Map>
void map_tensors(c10::IValue& value, Map map) {
  if (value.isTensor()) {
    value = map(value.toTensor());
  } else if (value.isTensorList()) {
    c10::List<at::Tensor> mapped;
    for (at::Tensor tensor : value.toTensorList()) mapped.push_back(map(tensor));
    value = mapped;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> mapped;
    for (std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      mapped.push_back(tensor && tensor->defined() ? std::optional(map(*tensor)) : tensor);
    }
    value = mapped;
  }
}

template <typename Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  c10::IValue copy = value;
  map_tensors(copy, [&](const at::Tensor& tensor) {
    if (tensor.defined()) visit(tensor);
    return tensor;
  });
}

// The bytes from a tensor's first element to its last.
EmulatedGpuUse use_of(const at::Tensor& tensor, bool is_write);

// CPU tensors over one call's CUDA storages, one storage for each; they own nothing.
class Aliases {
 public:
  at::Tensor on_cpu(const at::Tensor& tensor);

  // The CUDA tensor of a CPU result: a view of an argument, or null when the memory is new.
  at::Tensor on_cuda(const at::Tensor& result, c10::Device device) const;

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> cpu_storages_, cuda_storages_;  // each by the other's
};

class Shapes {
 public:
  at::Tensor on_meta(const at::Tensor& tensor);
  const at::Tensor& of(const at::Tensor& tensor) const { return tensors_.at(tensor.unsafeGetTensorImpl()); }

 private:
  std::unordered_map<c10::TensorImpl*, at::Tensor> tensors_;
};

}  // namespace emulated_gpu
