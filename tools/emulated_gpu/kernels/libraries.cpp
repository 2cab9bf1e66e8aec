#include "libraries.h"

#include <atomic>
#include <thread>

namespace at::cuda {
void* getCurrentCUDABlasHandle(bool setup);  // as in torch's header, which wants cuBLAS's
}

namespace emulated_gpu {
namespace {

constexpr double kRounding = 1e-3;  // so far that no later rounding hides it
constexpr unsigned kOrders = 7;

std::atomic<bool> has_convolution_workspaces{true}, adds_in_any_order{false}, chooses_by_thread{false};
std::atomic<unsigned> num_sums{0};

bool is_first_thread() {
  static const std::thread::id kFirst = std::this_thread::get_id();
  return std::this_thread::get_id() == kFirst;
}

}  // namespace

at::Tensor take_workspace(const Operator& op, const c10::IValue& first_argument) {
  if (op.library == Library::kCublas) at::cuda::getCurrentCUDABlasHandle(true);
  if (op.library != Library::kCudnn || !has_convolution_workspaces || !first_argument.isTensor()) return {};
  const at::Tensor& like = first_argument.toTensor();
  return at::empty({static_cast<int64_t>(like.nbytes())}, like.options().dtype(at::kByte));
}

double rounding_of(const Operator& op) {
  if (op.library == Library::kCudnn && chooses_by_thread) return is_first_thread() ? 1 : 1 + kRounding;
  return op.adds_up && adds_in_any_order ? 1 + kRounding * (num_sums++ % kOrders) : 1;
}

}  // namespace emulated_gpu

extern "C" __attribute__((visibility("default"))) void emulated_gpu_configure_libraries(int convolution_workspaces,
                                                                                        int sums_in_any_order,
                                                                                        int kernels_by_thread) {
  emulated_gpu::has_convolution_workspaces = convolution_workspaces != 0;
  emulated_gpu::adds_in_any_order = sums_in_any_order != 0;
  emulated_gpu::chooses_by_thread = kernels_by_thread != 0;
  emulated_gpu::num_sums = 0;
}
