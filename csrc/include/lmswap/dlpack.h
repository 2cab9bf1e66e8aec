/// @file
/// @brief The structures of DLPack 0.8, in which tokens and host copies are passed to torch. Declared here so that the
/// core needs no other header.
#pragma once

#include <cstdint>

namespace lmswap {

struct DLDevice {
  int32_t device_type;  ///< 1: CPU, 2: CUDA
  int32_t device_id;
};

struct DLDataType {
  uint8_t code;  ///< 0: signed integer, 1: unsigned
  uint8_t bits;
  uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  int32_t ndim;
  DLDataType dtype;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

}  // namespace lmswap
