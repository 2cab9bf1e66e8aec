#include "draws.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>

namespace emulated_gpu {
namespace {

constexpr uint64_t kDrawsOfACall = 4;  // what Philox moves on by at least
constexpr uint64_t kPrime = 1000003;   // seeds that differ by little must not meet after a few calls

}  // namespace

Draw draw_next(const at::Generator& generator) {
  auto* cuda = at::check_generator<at::CUDAGeneratorImpl>(generator);
  const std::lock_guard<std::mutex> lock(cuda->mutex_);
  const uint64_t offset = cuda->get_offset();
  cuda->set_offset(offset + kDrawsOfACall);
  return {cuda->current_seed(), offset};
}

at::Generator draw_from(const c10::IValue& given, c10::Device device) {
  at::Generator generator = at::cuda::detail::getDefaultCUDAGenerator(device.index());
  if (given.isGenerator() && given.toGenerator().device().is_cuda()) generator = given.toGenerator();
  const auto [seed, offset] = draw_next(generator);
  return at::detail::createCPUGenerator(seed * kPrime + offset);
}

DrawsFromDefault::DrawsFromDefault(c10::Device device) {
  const at::Generator drawn = draw_from({}, device);
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  state_ = cpu.get_state();
  cpu.set_current_seed(drawn.current_seed());
}

DrawsFromDefault::~DrawsFromDefault() {
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  cpu.set_state(state_);
}

}  // namespace emulated_gpu
