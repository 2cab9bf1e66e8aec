// Launches of kernels that nvcc compiled, which cannot run here: the launch fails and names the kernel.
#include <cuda_runtime_api.h>
#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "face.h"
#include "runtime.h"

using namespace emulated_gpu;

namespace {

constexpr size_t kLongestName = 300;

thread_local std::string missing_kernel;

struct Names {
  std::mutex mutex;
  std::map<const void*, std::string> of_function;
};

Names& names() {
  static auto* const kNames = new Names();
  return *kNames;
}

std::string name_of(const void* function) {
  const std::lock_guard lock(names().mutex);
  const auto found = names().of_function.find(function);
  if (found == names().of_function.end()) return "of an unknown name";
  char* readable = abi::__cxa_demangle(found->second.c_str(), nullptr, nullptr, nullptr);
  const std::string name = readable != nullptr ? readable : found->second;
  free(readable);
  return name.substr(0, kLongestName);
}

cudaError_t refuse(const void* function) {
  missing_kernel = "the emulated GPU has no stand-in for the kernel " + name_of(function);
  return keep(System::instance().report(missing_kernel, kNoKernelImage));
}

}  // namespace

namespace emulated_gpu {

const char* text_of_missing_kernel() { return missing_kernel.c_str(); }

}  // namespace emulated_gpu

// Called when a library of nvcc's is loaded.
EXPORTED void** __cudaRegisterFatBinary(void*) {
  static void* handle[1];
  return handle;
}
EXPORTED void __cudaRegisterFatBinaryEnd(void**) {}
EXPORTED void __cudaUnregisterFatBinary(void**) {}
EXPORTED char __cudaInitModule(void**) { return 1; }
EXPORTED void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, uint3*, uint3*, dim3*,
                                     dim3*, int*) {
  const std::lock_guard lock(names().mutex);
  names().of_function[function] = name;
}
EXPORTED void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

// Called at each launch.
EXPORTED unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, void*) { return 0; }
EXPORTED cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { return cudaSuccess; }
EXPORTED cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  return *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function)), cudaSuccess;
}
EXPORTED cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(function);
}
EXPORTED cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3, dim3, void**, size_t, cudaStream_t) {
  return refuse(kernel);
}
EXPORTED cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  return refuse(function);
}
EXPORTED cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}
EXPORTED cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
EXPORTED cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* count, const void*, int, size_t) {
  return *count = 1, cudaSuccess;
}
