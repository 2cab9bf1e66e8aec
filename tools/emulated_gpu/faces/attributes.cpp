// Device attributes: those of a small H100, as far as torch and lmswap query them.
#include "face.h"

namespace emulated_gpu {
namespace {

// CUDA's numbers, whose names the tests in tests/cpp have no header for.
enum Attribute : int {
  kMaxThreadsPerBlock = 1,
  kMaxSharedMemoryPerBlock = 8,
  kWarpSize = 10,
  kNumMultiprocessors = 16,
  kL2CacheBytes = 38,
  kMaxThreadsPerMultiprocessor = 39,
  kNumCopyEngines = 40,
  kHasUnifiedAddresses = 41,
  kMajorCapability = 75,
  kMinorCapability = 76,
  kMaxSharedMemoryPerBlockOptIn = 97,
  kCanWaitForValuesOf64Bits = 122,
};

}  // namespace

int attribute_of(int attribute) {
  switch (attribute) {
    case kMaxThreadsPerBlock:
      return 1024;
    case kMaxSharedMemoryPerBlock:
      return 49152;
    case kWarpSize:
      return 32;
    case kNumMultiprocessors:
      return 4;
    case kL2CacheBytes:
      return 1 << 20;
    case kMaxThreadsPerMultiprocessor:
      return 2048;
    case kNumCopyEngines:
      return 2;
    case kHasUnifiedAddresses:
      return 1;
    case kMajorCapability:
      return 9;
    case kMinorCapability:
      return 0;
    case kMaxSharedMemoryPerBlockOptIn:
      return 232448;
    case kCanWaitForValuesOf64Bits:
      return 1;
    default:
      return 0;
  }
}

}  // namespace emulated_gpu
