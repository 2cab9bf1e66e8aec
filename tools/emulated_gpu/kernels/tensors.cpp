#include "tensors.h"

namespace emulated_gpu {

EmulatedGpuUse use_of(const at::Tensor& tensor, bool is_write) {
  if (tensor.numel() == 0) return {0, 0, is_write};
  const size_t nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  return {reinterpret_cast<uintptr_t>(tensor.const_data_ptr()), nbytes, is_write};
}

at::Tensor Aliases::on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  at::Tensor& alias = tensors_[tensor.unsafeGetTensorImpl()];
  if (alias.defined()) return alias;
  auto* cuda = tensor.storage().unsafeGetStorageImpl();
  auto storage = cpu_storages_.find(cuda);
  if (storage == cpu_storages_.end()) {
    const void* address = tensor.storage().data();
    void* bytes = address == nullptr ? nullptr : emulated_gpu_bytes_of(address);
    c10::Storage made(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(bytes, at::kCPU),
                      /*allocator=*/nullptr, /*resizable=*/false);
    cuda_storages_.emplace(made.unsafeGetStorageImpl(), tensor.storage());
    storage = cpu_storages_.emplace(cuda, std::move(made)).first;
  }
  alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage->second),
                                                   c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) alias.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor Aliases::on_cuda(const at::Tensor& result, c10::Device device) const {
  const auto storage = cuda_storages_.find(result.storage().unsafeGetStorageImpl());
  if (storage == cuda_storages_.end()) return {};
  at::Tensor view = at::empty({0}, result.options().device(device));
  return view.set_(storage->second, result.storage_offset(), result.sizes(), result.strides());
}

at::Tensor Shapes::on_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.is_meta() || (!tensor.is_cuda() && tensor.dim() == 0)) return tensor;
  at::Tensor& meta = tensors_[tensor.unsafeGetTensorImpl()];
  if (meta.defined()) return meta;
  meta = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) meta._set_conj(true);
  if (tensor.is_neg()) meta._set_neg(true);
  return meta;
}

}  // namespace emulated_gpu
