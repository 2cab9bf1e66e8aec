// State of the runtime: the last error of each thread, until it is read.
#pragma once

#include <cuda_runtime_api.h>

namespace emulated_gpu {

// Keeps a code for cudaGetLastError, and returns it.
cudaError_t keep(int code);

// The text for a kernel of nvcc's that was launched last in this thread: there is nothing to run it.
const char* text_of_missing_kernel();

}  // namespace emulated_gpu
