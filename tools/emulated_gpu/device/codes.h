// Return codes of calls, those that mean the same in CUDA's runtime and in its driver.
#pragma once

namespace emulated_gpu {

enum Code : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,  // of a forked child
  kDeinitialized = 4,   // of a process that is ending
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kNoKernelImage = 209,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kPeerAccessAlreadyEnabled = 704,
  kAssert = 710,
  kAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
};

struct CodeText {
  const char* name;  // in the driver's spelling
  const char* text;
};

CodeText text_of(int code);

}  // namespace emulated_gpu
