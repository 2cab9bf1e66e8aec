#include "codes.h"

namespace emulated_gpu {

CodeText text_of(int code) {
  switch (code) {
    case kSuccess:
      return {"CUDA_SUCCESS", "no error"};
    case kInvalidValue:
      return {"CUDA_ERROR_INVALID_VALUE", "invalid argument"};
    case kOutOfMemory:
      return {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"};
    case kNotInitialized:
      return {"CUDA_ERROR_NOT_INITIALIZED", "initialization error"};
    case kDeinitialized:
      return {"CUDA_ERROR_DEINITIALIZED", "driver shutting down"};
    case kNoDevice:
      return {"CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"};
    case kInvalidDevice:
      return {"CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"};
    case kInvalidContext:
      return {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"};
    case kNoKernelImage:
      return {"CUDA_ERROR_NO_BINARY_FOR_GPU", "the emulated GPU has no stand-in for this kernel"};
    case kPeerAccessUnsupported:
      return {"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "peer access is not supported between these two devices"};
    case kInvalidHandle:
      return {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"};
    case kNotReady:
      return {"CUDA_ERROR_NOT_READY", "device not ready"};
    case kIllegalAddress:
      return {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"};
    case kPeerAccessAlreadyEnabled:
      return {"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"};
    case kAssert:
      return {"CUDA_ERROR_ASSERT", "device-side assert triggered"};
    case kAlreadyRegistered:
      return {"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of the memory is registered already"};
    case kHostMemoryNotRegistered:
      return {"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "memory was not registered"};
    case kStreamCaptureUnsupported:
      return {"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "operation not permitted when stream is capturing"};
    case kNotSupported:
      return {"CUDA_ERROR_NOT_SUPPORTED", "operation not supported by the emulated GPU"};
    default:
      return {"CUDA_ERROR_UNKNOWN", "unknown error"};
  }
}

}  // namespace emulated_gpu
