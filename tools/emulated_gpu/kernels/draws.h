// Random numbers of kernels: from a CPU generator, seeded by the state of the CUDA generator.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/ivalue.h>

#include <cstdint>

namespace emulated_gpu {

struct Draw {
  uint64_t seed, offset;
};

// Where a CUDA generator stands; it moves on, as Philox's does when a call is made.
Draw draw_next(const at::Generator& generator);

// A generator for one call's numbers. None: those of the device's default one.
at::Generator draw_from(const c10::IValue& generator, c10::Device device);

// While it lives, the CPU's default generator is one drawn from the device's default one.
class DrawsFromDefault {
 public:
  explicit DrawsFromDefault(c10::Device device);
  ~DrawsFromDefault();
  DrawsFromDefault(const DrawsFromDefault&) = delete;
  DrawsFromDefault& operator=(const DrawsFromDefault&) = delete;

 private:
  at::Tensor state_;
};

}  // namespace emulated_gpu
