#include "call.h"

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <memory>
#include <optional>

#include "amount.h"
#include "draws.h"
#include "libraries.h"
#include "tensors.h"

namespace emulated_gpu {
namespace {

using c10::IValue;
using torch::jit::Stack;

void check(int code) { C10_CUDA_CHECK(static_cast<cudaError_t>(code)); }

// A queued kernel: it owns nothing of the device, so that memory given back too early is seen.
struct Work {
  const Operator* op;
  Stack arguments;
  std::vector<at::Tensor> results;  // over what was allocated for them; undefined: not made
  double rounding = 1;              // see libraries.h
};

void compute(Work& work) {
  work.op->handle.callBoxed(&work.arguments);
  if (work.rounding == 1) return;
  for (c10::IValue& result : work.arguments) {
    map_tensors(result, [&](const at::Tensor& tensor) {
      return tensor.defined() && tensor.is_floating_point() ? tensor.mul_(work.rounding) : tensor;
    });
  }
}

// As tensor cores and cuDNN's norms do: a CPU without instructions for numbers of 16 bits takes minutes for theirs, and
// its norms want all tensors of one type.
void compute_wide(Work& work) {
  std::vector<std::pair<at::Tensor, at::Tensor>> statistics;
  for (c10::IValue& argument : work.arguments) {
    map_tensors(argument, [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !at::isReducedFloatingType(tensor.scalar_type())) return tensor;
      const at::Tensor wide = tensor.to(at::kFloat);
      if (tensor.dim() == 1) statistics.emplace_back(tensor, wide);  // norms write running ones, and no schema says so
      return wide;
    });
  }
  compute(work);
  for (const auto& [given, wide] : statistics) given.copy_(wide);
}

void store(Work& work) {
  std::vector<at::Tensor> computed;
  for (size_t i = 0; i < work.op->argument_of.size(); ++i) {
    if (work.op->argument_of[i] >= 0) continue;
    map_tensors(work.arguments[i], [&](const at::Tensor& tensor) { return computed.emplace_back(tensor); });
  }
  for (size_t i = 0; i < work.results.size(); ++i) {
    const at::Tensor& result = work.results[i];
    if (!result.defined() || computed[i].numel() == 0) continue;  // the CPU's norms have no statistics in eval mode
    TORCH_CHECK(computed[i].sizes() == result.sizes(), "the CPU's kernel gives ", computed[i].sizes(),
                " where Meta says ", result.sizes());
    result.copy_(computed[i]);
  }
}

// Of a call that was waited for: what was computed is written in the stream's order, behind whatever fills the memory.
void store_queued(void* argument) {
  const std::unique_ptr<Work> work(static_cast<Work*>(argument));
  store(*work);
}

void run_queued(void* argument) {
  const std::unique_ptr<Work> work(static_cast<Work*>(argument));
  try {
    const c10::InferenceMode no_autograd;
    work->op->is_wide ? compute_wide(*work) : compute(*work);
    store(*work);
  } catch (const c10::Error& error) {
    emulated_gpu_break((work->op->name + ": " + error.what_without_backtrace()).c_str());
  } catch (const std::exception& error) {
    emulated_gpu_break((work->op->name + ": " + error.what()).c_str());
  }
}

class Call {
 public:
  Call(Operator& op, Stack* stack)
      : op_(op), stack_(stack), arguments_(stack->end() - static_cast<long>(op.writes.size()), stack->end()) {
    find_device();
    find_uses();
  }

  c10::Device device() const { return device_; }
  std::optional<Stack> find_results();
  void queue(const Stack& results);
  void compute_now();

 private:
  void find_device();
  void find_uses();
  void grow_outputs();
  at::Tensor take_workspace();
  IValue on_cpu(size_t argument);
  IValue result_on_cuda(size_t result, IValue computed, Work& work);
  void give(std::vector<IValue> results);
  void launch(const Amount& amount, void (*run)(void*), void* argument);

  Operator& op_;
  Stack* stack_;
  const std::vector<IValue> arguments_;
  c10::Device device_{at::kCUDA};
  std::vector<EmulatedGpuUse> uses_;
  Aliases aliases_;
  Shapes shapes_;
};

void Call::find_device() {
  std::optional<c10::Device> found;
  bool has_host_tensor = false;
  for (const IValue& value : arguments_) {
    if (value.isDevice() && !found) found = value.toDevice();
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) {
        has_host_tensor |= tensor.dim() > 0;
        return;
      }
      TORCH_CHECK(op_.mixes_devices || !found || *found == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                  tensor.device(), "! (", op_.name, ")");
      if (!found) found = tensor.device();
    });
  }
  TORCH_CHECK(op_.mixes_devices || !found || !has_host_tensor,
              "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and cpu! (",
              op_.name, ")");
  device_ = found && found->has_index() ? *found : c10::Device(at::kCUDA, c10::cuda::current_device());
}

void Call::find_uses() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      if (tensor.is_cuda()) uses_.push_back(use_of(tensor, op_.writes[i]));
    });
  }
}

std::optional<Stack> Call::find_results() {
  if (op_.waits) return std::nullopt;
  Stack results;
  for (size_t i = 0; i < arguments_.size(); ++i) {
    IValue value = static_cast<int>(i) == op_.generator ? IValue() : arguments_[i];
    if (value.isDevice()) value = c10::Device(at::kMeta);
    map_tensors(value, [&](const at::Tensor& tensor) { return shapes_.on_meta(tensor); });
    results.push_back(std::move(value));
  }
  try {
    op_.handle.callBoxed(&results);
    return results;
  } catch (const c10::NotImplementedError&) {
    op_.waits = true;
    return std::nullopt;
  } catch (const c10::Error&) {
    return std::nullopt;  // wrong arguments: the CPU's kernel refuses them too, and its error is the caller's
  }
}

// Outputs that were given may have to grow.
void Call::grow_outputs() {
  for (size_t i = 0; i < arguments_.size(); ++i) {
    if (!op_.writes[i]) continue;
    each_tensor(arguments_[i], [&](const at::Tensor& tensor) {
      if (!tensor.is_cuda()) return;
      const at::Tensor& wanted = shapes_.of(tensor);
      if (wanted.sizes() == tensor.sizes()) return;
      tensor.resize_(wanted.sizes());
      if (tensor.strides() != wanted.strides()) tensor.as_strided_(wanted.sizes(), wanted.strides());
      uses_.push_back(use_of(tensor, true));
    });
  }
}

at::Tensor Call::take_workspace() {
  at::Tensor workspace = emulated_gpu::take_workspace(op_, arguments_.empty() ? IValue() : arguments_[0]);
  if (workspace.defined()) uses_.push_back(use_of(workspace, true));
  return workspace;
}

IValue Call::on_cpu(size_t argument) {
  IValue value = arguments_[argument];
  if (value.isDevice()) return c10::Device(at::kCPU);
  if (static_cast<int>(argument) == op_.generator) return draw_from(value, device_);
  map_tensors(value, [&](const at::Tensor& tensor) {
    return tensor.defined() && tensor.is_cpu() ? tensor.clone() : aliases_.on_cpu(tensor);  // the host may write it
  });
  return value;
}

void Call::give(std::vector<IValue> results) {
  torch::jit::drop(*stack_, arguments_.size());
  for (IValue& result : results) stack_->push_back(std::move(result));
}

void Call::launch(const Amount& amount, void (*run)(void*), void* argument) {
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream().stream();
  check(emulated_gpu_launch(stream, op_.name.c_str(), uses_.data(), uses_.size(), amount.flops, amount.nbytes, run,
                            argument));
}

void Call::queue(const Stack& metas) {
  grow_outputs();
  const at::Tensor workspace = take_workspace();
  auto work = std::make_unique<Work>();
  work->op = &op_;
  work->rounding = rounding_of(op_);
  for (size_t i = 0; i < arguments_.size(); ++i) work->arguments.push_back(on_cpu(i));
  std::vector<IValue> results;
  for (size_t i = 0; i < op_.argument_of.size(); ++i) {
    if (op_.argument_of[i] >= 0) {
      results.push_back(arguments_[op_.argument_of[i]]);
      continue;
    }
    IValue value = metas[i];
    map_tensors(value, [&](const at::Tensor& meta) {
      if (!meta.defined()) return work->results.emplace_back();
      const at::Tensor made = at::empty_strided(meta.sizes(), meta.strides(), meta.options().device(device_));
      uses_.push_back(use_of(made, true));
      work->results.push_back(aliases_.on_cpu(made));
      return made;
    });
    results.push_back(std::move(value));
  }
  const Amount amount = amount_of(op_, arguments_, results);
  give(std::move(results));
  launch(amount, &run_queued, work.get());
  work.release();
}

IValue Call::result_on_cuda(size_t result, IValue computed, Work& work) {
  const int argument = op_.argument_of[result];
  if (argument >= 0 && op_.writes[argument]) return arguments_[argument];
  map_tensors(computed, [&](const at::Tensor& tensor) {
    at::Tensor found = tensor.defined() && tensor.is_cpu() ? aliases_.on_cuda(tensor, device_) : tensor;
    if (argument >= 0) return found;
    at::Tensor& stored = work.results.emplace_back();
    if (found.defined() || !tensor.defined()) return found;
    found = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device_));
    uses_.push_back(use_of(found, true));
    stored = aliases_.on_cpu(found);
    return found;
  });
  return computed;
}

void Call::compute_now() {
  const at::Tensor workspace = take_workspace();
  const auto nothing = [](void*) {};
  launch({}, nothing, nullptr);
  check(emulated_gpu_wait(c10::cuda::getCurrentCUDAStream().stream()));
  auto work = std::make_unique<Work>();
  work->op = &op_;
  work->rounding = rounding_of(op_);
  Stack& computed = work->arguments;
  for (size_t i = 0; i < arguments_.size(); ++i) computed.push_back(on_cpu(i));
  {
    std::optional<DrawsFromDefault> draws;
    if (op_.draws_unasked) draws.emplace(device_);
    compute(*work);
  }
  uses_.clear();
  std::vector<IValue> results;
  for (size_t i = 0; i < op_.argument_of.size(); ++i) results.push_back(result_on_cuda(i, computed[i], *work));
  const Amount amount = amount_of(op_, arguments_, results);
  give(std::move(results));
  launch(amount, &store_queued, work.get());
  work.release();
}

}  // namespace

void run(const c10::OperatorHandle& handle, c10::DispatchKeySet, Stack* stack) {
  Operator& op = operator_of(handle);
  TORCH_CHECK_NOT_IMPLEMENTED(op.has_kernel, "the emulated GPU has no stand-in for the kernels of ", op.name,
                              ": torch has none for the CPU");
  const at::AutoDispatchBelowADInplaceOrView guard;
  Call call(op, stack);
  const c10::cuda::CUDAGuard on_device(call.device());
  if (const std::optional<Stack> results = call.find_results()) {
    call.queue(*results);
  } else {
    call.compute_now();
  }
}

}  // namespace emulated_gpu
