/// @file
/// @brief The part of the CUDA driver's ABI that the engine calls, declared by hand so that no toolkit is needed to
/// build.
///
/// tests/cpp/cuda_abi_test.cpp checks every line against cuda.h where a toolkit is present.
#pragma once

#include <cstddef>
#include <cstdint>

namespace lmswap::cuda {

using Result = int;
using CaptureMode = int;
using Device = int;
using DevicePointer = unsigned long long;
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Callback = void (*)(Stream, Result, void*);

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kInvalidHandle = 400;
inline constexpr Result kNotReady = 600;
inline constexpr Result kPeerAccessAlreadyEnabled = 704;
inline constexpr Result kTooManyPeers = 711;
inline constexpr unsigned kMemHostRegisterPortable = 1;
inline constexpr unsigned kMemHostRegisterDeviceMap = 2;
inline constexpr unsigned kStreamNonBlocking = 1;
inline constexpr unsigned kEventBlockingSync = 1;
inline constexpr unsigned kWaitUntilAtLeast = 0;
inline constexpr CaptureMode kCaptureModeRelaxed = 2;
inline constexpr int kCanWaitForValues = 122;  // device attribute, for 64 bits

/// X(member, symbol, parameters): full symbol names, since the plain names of some are an older ABI.
#define LMSWAP_CUDA_FUNCTIONS(X)                                                                      \
  X(get_error_name, cuGetErrorName, (Result, const char**))                                           \
  X(get_error_string, cuGetErrorString, (Result, const char**))                                       \
  X(init, cuInit, (unsigned))                                                                         \
  X(driver_get_version, cuDriverGetVersion, (int*))                                                   \
  X(device_get, cuDeviceGet, (Device*, int))                                                          \
  X(device_get_attribute, cuDeviceGetAttribute, (int*, int, Device))                                  \
  X(device_get_pci_bus_id, cuDeviceGetPCIBusId, (char*, int, Device))                                 \
  X(primary_context_retain, cuDevicePrimaryCtxRetain, (Context*, Device))                             \
  X(primary_context_release, cuDevicePrimaryCtxRelease_v2, (Device))                                  \
  X(device_can_access_peer, cuDeviceCanAccessPeer, (int*, Device, Device))                            \
  X(context_enable_peer_access, cuCtxEnablePeerAccess, (Context, unsigned))                           \
  X(context_get_current, cuCtxGetCurrent, (Context*))                                                 \
  X(context_push, cuCtxPushCurrent_v2, (Context))                                                     \
  X(context_pop, cuCtxPopCurrent_v2, (Context*))                                                      \
  X(context_synchronize, cuCtxSynchronize, ())                                                        \
  X(mem_get_info, cuMemGetInfo_v2, (size_t*, size_t*))                                                \
  X(mem_host_register, cuMemHostRegister_v2, (void*, size_t, unsigned))                               \
  X(mem_host_unregister, cuMemHostUnregister, (void*))                                                \
  X(mem_host_get_device_pointer, cuMemHostGetDevicePointer_v2, (DevicePointer*, void*, unsigned))     \
  X(mem_alloc, cuMemAlloc_v2, (DevicePointer*, size_t))                                               \
  X(mem_free, cuMemFree_v2, (DevicePointer))                                                          \
  X(stream_create, cuStreamCreate, (Stream*, unsigned))                                               \
  X(stream_destroy, cuStreamDestroy_v2, (Stream))                                                     \
  X(stream_synchronize, cuStreamSynchronize, (Stream))                                                \
  X(stream_get_id, cuStreamGetId, (Stream, unsigned long long*))                                      \
  X(thread_exchange_capture_mode, cuThreadExchangeStreamCaptureMode, (CaptureMode*))                  \
  X(stream_wait_event, cuStreamWaitEvent, (Stream, Event, unsigned))                                  \
  X(stream_wait_value, cuStreamWaitValue64_v2, (Stream, DevicePointer, uint64_t, unsigned))           \
  X(stream_add_callback, cuStreamAddCallback, (Stream, Callback, void*, unsigned))                    \
  X(event_create, cuEventCreate, (Event*, unsigned))                                                  \
  X(event_destroy, cuEventDestroy_v2, (Event))                                                        \
  X(event_record, cuEventRecord, (Event, Stream))                                                     \
  X(event_query, cuEventQuery, (Event))                                                               \
  X(event_synchronize, cuEventSynchronize, (Event))                                                   \
  X(event_elapsed_time, cuEventElapsedTime, (float*, Event, Event))                                   \
  X(memcpy_device_to_host, cuMemcpyDtoHAsync_v2, (void*, DevicePointer, size_t, Stream))              \
  X(memcpy_host_to_device, cuMemcpyHtoDAsync_v2, (DevicePointer, const void*, size_t, Stream))        \
  X(memcpy_device_to_device, cuMemcpyDtoDAsync_v2, (DevicePointer, DevicePointer, size_t, Stream))    \
  X(memcpy_peer, cuMemcpyPeerAsync, (DevicePointer, Context, DevicePointer, Context, size_t, Stream)) \
  X(memset_device, cuMemsetD8Async, (DevicePointer, unsigned char, size_t, Stream))

/// @brief The functions, loaded from libcuda.
struct Functions {
#define LMSWAP_DECLARE(member, symbol, parameters) Result(*member) parameters = nullptr;
  LMSWAP_CUDA_FUNCTIONS(LMSWAP_DECLARE)
#undef LMSWAP_DECLARE
};

}  // namespace lmswap::cuda
