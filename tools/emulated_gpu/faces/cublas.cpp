// libcublas: handles, as torch keeps them for each thread and stream with a workspace of its own. Nothing is computed.
#include <cstddef>

#include "face.h"

namespace {

constexpr int kSuccess = 0;

}  // namespace

#define CUBLAS EXPORTED int

CUBLAS cublasCreate_v2(void** handle) { return *handle = new char, kSuccess; }
CUBLAS cublasDestroy_v2(void* handle) { return delete static_cast<char*>(handle), kSuccess; }
CUBLAS cublasSetStream_v2(void*, void*) { return kSuccess; }
CUBLAS cublasSetWorkspace_v2(void*, void*, size_t) { return kSuccess; }
CUBLAS cublasSetMathMode(void*, int) { return kSuccess; }
CUBLAS cublasGetMathMode(void*, int* mode) { return *mode = 0, kSuccess; }
CUBLAS cublasSetSmCountTarget(void*, int) { return kSuccess; }
