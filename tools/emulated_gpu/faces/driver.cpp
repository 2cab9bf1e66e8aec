// libcuda: the calls of CUDA's driver that lmswap and torch make.
//
// Stricter than CUDA: a call names only streams and events of the device whose context is current.
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "../../../csrc/driver/cuda_abi.h"
#include "face.h"

using namespace emulated_gpu;

namespace {

// As cuda.h names them, of which the tests in tests/cpp have none.
using CUresult = lmswap::cuda::Result;
using CUdevice = lmswap::cuda::Device;
using CUdeviceptr = lmswap::cuda::DevicePointer;
using CUcontext = lmswap::cuda::Context;
using CUstream = lmswap::cuda::Stream;
using CUevent = lmswap::cuda::Event;
constexpr CUresult CUDA_SUCCESS = kSuccess;
constexpr int CUDA_VERSION = 13000;
constexpr unsigned CU_EVENT_DISABLE_TIMING = 2;

// A context is its device's primary one; its handle is the device's number and this.
constexpr uintptr_t kFirstContext = 0x1000;

CUcontext context_of(int device) {
  return device < 0 ? nullptr : reinterpret_cast<CUcontext>(kFirstContext + static_cast<uintptr_t>(device));
}

int device_of(CUcontext context) {
  const uintptr_t device = reinterpret_cast<uintptr_t>(context) - kFirstContext;
  return device < static_cast<uintptr_t>(System::instance().num_devices()) ? static_cast<int>(device) : -1;
}

thread_local lmswap::cuda::CaptureMode capture_mode = 0;  // of all threads' captures, as CUDA's threads begin

// What CUDA calls unsafe while a thread captures a graph in the mode of torch's: it fails, and so does the capture. A
// context that contains a capturing stream cannot be waited for in any mode.
bool breaks_capture(const char* symbol) {
  if (symbol == std::string_view("cuCtxSynchronize")) return true;
  constexpr std::string_view kUnsafe[] = {"cuEventQuery",         "cuEventSynchronize",  "cuStreamQuery",
                                          "cuStreamSynchronize",  "cuMemAlloc_v2",       "cuMemFree_v2",
                                          "cuMemHostRegister_v2", "cuMemHostUnregister", "cuEventElapsedTime"};
  return capture_mode != lmswap::cuda::kCaptureModeRelaxed &&
         std::find(std::begin(kUnsafe), std::end(kUnsafe), symbol) != std::end(kUnsafe);
}

template <typename Call>
CUresult call(const char* symbol, Call run) {
  return enter(symbol, [&](System& system) -> int {
    if (system.is_capturing && breaks_capture(symbol)) {
      return system.report(std::string(symbol) + ": while a graph is captured", kStreamCaptureUnsupported);
    }
    if (system.is_initialized) return run(system);
    return system.report(std::string(symbol) + ": before cuInit", kNotInitialized);
  });
}

bool is_elsewhere(int device) { return device >= 0 && device != current_device(); }
bool is_elsewhere(System& system, CUstream stream) { return is_elsewhere(system.device_of_stream(stream)); }
bool is_elsewhere(System& system, CUevent event) { return is_elsewhere(system.device_of_event(event)); }

// Of a call that needs a context, and names these streams and events.
template <typename Call, typename... Handles>
CUresult call_in_context(const char* symbol, Call run, Handles... handles) {
  return call(symbol, [&](System& system) -> int {
    if (!system.has_context(current_device())) {
      return system.report(std::string(symbol) + ": no context is current in this thread", kInvalidContext);
    }
    if ((is_elsewhere(system, handles) || ...)) {
      return system.report(std::string(symbol) + ": a stream or an event of another device", kInvalidContext);
    }
    return run(system);
  });
}

// Of a call by whose error one may see that the event is not of the current context, as CUDA documents it.
template <typename Call>
CUresult call_with_event(const char* symbol, CUevent event, Call run) {
  return call(symbol, [&](System& system) -> int {
    if (!system.has_context(current_device())) return kInvalidContext;
    return is_elsewhere(system, event) ? kInvalidHandle : run(system);
  });
}

void* at(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

int copy(const char* symbol, System& system, void* to, const void* from, size_t nbytes, CUstream stream,
         const void* device, const void* host) {
  if (system.owner(device) < 0) return system.report(std::string(symbol) + ": not the device's memory", kInvalidValue);
  if (host != nullptr && system.owner(host) >= 0) {
    return system.report(std::string(symbol) + ": device memory where host memory is wanted", kInvalidValue);
  }
  return system.copy(to, from, nbytes, stream, true, Pageable::kForbidden);
}

}  // namespace

#define DRIVER EXPORTED CUresult

DRIVER cuInit(unsigned) {
  return enter(__func__, [](System& system) { return system.is_initialized = true, kSuccess; });
}
DRIVER cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
DRIVER cuDeviceGetCount(int* count) { return *count = System::instance().num_devices(), CUDA_SUCCESS; }
DRIVER cuDeviceGet(CUdevice* device, int index) {
  return call(__func__, [=](System& system) {
    return index < 0 || index >= system.num_devices() ? kInvalidDevice : (*device = index, kSuccess);
  });
}
DRIVER cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  return call(__func__, [=](System&) { return *value = attribute_of(attribute), kSuccess; });
}
DRIVER cuDeviceCanAccessPeer(int* can, CUdevice device, CUdevice peer) {
  return call(__func__, [=](System& system) { return *can = system.can_access_peer(device, peer), kSuccess; });
}
DRIVER cuDeviceGetPCIBusId(char* address, int size, CUdevice device) {
  return call(__func__, [=](System&) {
    return snprintf(address, static_cast<size_t>(size), "FFFF:%02X:00.0", static_cast<unsigned>(device)), kSuccess;
  });
}
DRIVER cuGetErrorString(CUresult code, const char** text) { return *text = text_of(code).text, CUDA_SUCCESS; }
DRIVER cuGetErrorName(CUresult code, const char** name) { return *name = text_of(code).name, CUDA_SUCCESS; }

// Contexts.
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return call(__func__,
              [=](System& system) { return system.retain_context(device), *context = context_of(device), kSuccess; });
}
DRIVER cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return call(__func__, [=](System& system) { return system.release_context(device); });
}
DRIVER cuDevicePrimaryCtxGetState(CUdevice, unsigned* flags, int* is_active) {
  return *flags = 0, *is_active = 1, CUDA_SUCCESS;
}
DRIVER cuCtxGetCurrent(CUcontext* context) {
  System::instance().calls.add(__func__);
  return *context = context_of(current_device()), CUDA_SUCCESS;
}
DRIVER cuCtxSetCurrent(CUcontext context) {
  return call(__func__, [=](System& system) -> int {
    if (device_of(context) < 0) return system.report("cuCtxSetCurrent: not a context", kInvalidContext);
    return set_current_device(device_of(context)), kSuccess;
  });
}
DRIVER cuCtxPushCurrent_v2(CUcontext context) {
  return call(__func__, [=](System& system) -> int {
    if (device_of(context) < 0) return system.report("cuCtxPushCurrent: not a context", kInvalidContext);
    return push_current_device(device_of(context)), kSuccess;
  });
}
DRIVER cuCtxPopCurrent_v2(CUcontext* context) {
  int device = -1;
  if (!pop_current_device(&device)) {
    return System::instance().report("cuCtxPopCurrent: no context is current in this thread", kInvalidContext);
  }
  *context = context_of(device);
  return call(__func__, [](System&) { return kSuccess; });  // its result is of earlier calls
}

DRIVER cuCtxSynchronize() {
  return call_in_context(__func__, [](System& system) { return system.wait_device(current_device()); });
}

DRIVER cuCtxEnablePeerAccess(CUcontext peer, unsigned) {
  return call_in_context(__func__, [=](System& system) -> int {
    if (!system.has_context(device_of(peer)))
      return system.report("cuCtxEnablePeerAccess: not a context", kInvalidContext);
    return system.enable_peer_access(current_device(), device_of(peer));
  });
}

// Memory.
DRIVER cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  return call_in_context(__func__, [=](System& system) {
    std::tie(*free_bytes, *total_bytes) = system.free_and_total_bytes(current_device());
    return kSuccess;
  });
}
DRIVER cuMemHostRegister_v2(void* address, size_t nbytes, unsigned flags) {
  const bool is_mapped = (flags & lmswap::cuda::kMemHostRegisterDeviceMap) != 0;
  return call_in_context(__func__, [=](System& system) { return system.register_pinned(address, nbytes, is_mapped); });
}
DRIVER cuMemHostUnregister(void* address) {
  return call_in_context(__func__,
                         [=](System& system) { return system.unregister_pinned(address, InUse::kForbidden); });
}
DRIVER cuMemHostGetDevicePointer_v2(CUdeviceptr* found, void* address, unsigned) {
  return call_in_context(__func__, [=](System& system) -> int {
    if (!system.is_pinned(address)) return system.report("the device's address of pageable memory", kInvalidValue);
    void* const device = system.device_address(address);
    if (device == nullptr) return system.report("the device's address of unmapped memory", kInvalidValue);
    return *found = reinterpret_cast<CUdeviceptr>(device), kSuccess;
  });
}
DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t nbytes) {
  return call_in_context(__func__, [=](System& system) {
    return system.allocate_device(current_device(), reinterpret_cast<void**>(address), nbytes);
  });
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  return call_in_context(__func__, [=](System& system) { return system.free_device(at(address), InUse::kForbidden); });
}
DRIVER cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  const auto run = [=](System& system) {
    return copy("cuMemcpyDtoHAsync", system, to, at(from), nbytes, stream, at(from), to);
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  const auto run = [=](System& system) {
    return copy("cuMemcpyHtoDAsync", system, at(to), from, nbytes, stream, at(to), from);
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  const auto run = [=](System& system) {
    if (system.owner(at(from)) != system.owner(at(to))) {
      return system.report("cuMemcpyDtoDAsync: between devices, whose contexts it is not told", kInvalidValue);
    }
    const void* other = system.owner(at(from)) < 0 ? at(from) : at(to);
    return copy("cuMemcpyDtoDAsync", system, at(to), at(from), nbytes, stream, other, nullptr);
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context, size_t nbytes,
                         CUstream stream) {
  const auto run = [=](System& system) -> int {
    for (const auto& [address, context] : {std::pair{to, to_context}, std::pair{from, from_context}}) {
      const int device = system.owner(at(address));
      if (device < 0 || device != device_of(context) || !system.has_context(device)) {
        return system.report("cuMemcpyPeerAsync: memory that is not of the context", kInvalidValue);
      }
    }
    return system.copy(at(to), at(from), nbytes, stream, true, Pageable::kForbidden);
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t nbytes) {
  return call_in_context(
      __func__, [=](System& system) { return system.copy(to, at(from), nbytes, nullptr, false, Pageable::kStaged); });
}
DRIVER cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t nbytes) {
  return call_in_context(
      __func__, [=](System& system) { return system.copy(at(to), from, nbytes, nullptr, false, Pageable::kStaged); });
}
DRIVER cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.fill(at(to), value, nbytes, stream); }, stream);
}

// Streams: those that wait for the default one, and it for them, are not emulated.
DRIVER cuStreamCreate(CUstream* stream, unsigned flags) {
  return call_in_context(__func__, [=](System& system) {
    if ((flags & lmswap::cuda::kStreamNonBlocking) == 0)
      return system.report("a blocking stream is not emulated", kNotSupported);
    return system.create_stream(current_device(), reinterpret_cast<void**>(stream));
  });
}
DRIVER cuStreamDestroy_v2(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.destroy_stream(stream); }, stream);
}
DRIVER cuStreamSynchronize(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.wait_stream(stream); }, stream);
}
DRIVER cuStreamGetId(CUstream stream, unsigned long long* id) {
  const auto run = [=](System& system) -> int {
    const int device = stream == nullptr ? current_device() : system.device_of_stream(stream);
    if (device < 0) return system.report("cuStreamGetId: not a stream", kInvalidHandle);
    // Handles are never given out again here; those of default streams, which are all 0, are distinguished by the
    // device.
    return *id = stream == nullptr ? static_cast<unsigned>(device) : reinterpret_cast<uintptr_t>(stream), kSuccess;
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuThreadExchangeStreamCaptureMode(lmswap::cuda::CaptureMode* mode) {
  System::instance().calls.add(__func__);
  return std::swap(*mode, capture_mode), CUDA_SUCCESS;
}
DRIVER cuStreamQuery(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.query_stream(stream); }, stream);
}
DRIVER cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  const auto run = [=](System& system) -> int {
    return system.ignores_waits_of_the_driver ? kSuccess : system.wait(stream, event);
  };
  return call_in_context(__func__, run, stream, event);
}
DRIVER cuLaunchHostFunc(CUstream stream, void (*function)(void*), void* argument) {
  const auto run = [=](System& system) { return system.run_on_host(stream, [=] { function(argument); }); };
  return call_in_context(__func__, run, stream);
}
DRIVER cuStreamWaitValue64_v2(CUstream stream, CUdeviceptr address, uint64_t value, unsigned flags) {
  const auto run = [=](System& system) -> int {
    if (flags != lmswap::cuda::kWaitUntilAtLeast) return system.report("another wait for a value", kNotSupported);
    return system.ignores_waits_of_the_driver ? kSuccess
                                              : system.wait_value(stream, system.host_address(at(address)), value);
  };
  return call_in_context(__func__, run, stream);
}
DRIVER cuStreamAddCallback(CUstream stream, lmswap::cuda::Callback callback, void* data, unsigned) {
  const auto run = [=](System& system) {
    return system.call_back(stream, [=](int code) { callback(stream, code, data); });
  };
  return call_in_context(__func__, run, stream);
}

// Events.
DRIVER cuEventCreate(CUevent* event, unsigned flags) {
  return call_in_context(__func__, [=](System& system) {
    return system.create_event(reinterpret_cast<void**>(event), (flags & CU_EVENT_DISABLE_TIMING) == 0);
  });
}
DRIVER cuEventDestroy_v2(CUevent event) {
  return call_in_context(__func__, [=](System& system) { return system.destroy_event(event); }, event);
}
DRIVER cuEventRecord(CUevent event, CUstream stream) {
  const auto run = [=](System& system) -> int {
    if (!is_elsewhere(system, stream)) return system.record(event, stream);
    return system.report("cuEventRecord: a stream of another device", kInvalidContext);
  };
  return call_with_event(__func__, event, run);
}
DRIVER cuEventQuery(CUevent event) {
  return call_with_event(__func__, event, [=](System& system) { return system.query_event(event); });
}
DRIVER cuEventSynchronize(CUevent event) {
  return call_with_event(__func__, event, [=](System& system) { return system.wait_event(event); });
}
DRIVER cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  const auto run = [=](System& system) { return system.elapsed(milliseconds, from, to); };
  return call_in_context(__func__, run, from, to);
}
DRIVER cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) {
  return cuEventElapsedTime(milliseconds, from, to);
}

// What lmswap calls is what is here.
#define EMULATED_CHECK(member, symbol, parameters) \
  static_assert(std::is_same_v<decltype(lmswap::cuda::Functions::member), decltype(&symbol)>);
LMSWAP_CUDA_FUNCTIONS(EMULATED_CHECK)
