// libcuda: the calls of CUDA's driver that lmswap and torch make.
#include <cuda.h>

#include <cstdio>

#include "face.h"

#undef cuEventElapsedTime

using namespace emulated_gpu;

namespace {

// A context is its device's primary one; its handle is the device's number and this.
constexpr uintptr_t kFirstContext = 0x1000;

CUcontext context_of(int device) {
  return device < 0 ? nullptr : reinterpret_cast<CUcontext>(kFirstContext + static_cast<uintptr_t>(device));
}

int device_of(CUcontext context) {
  const uintptr_t device = reinterpret_cast<uintptr_t>(context) - kFirstContext;
  return device < static_cast<uintptr_t>(System::instance().num_devices()) ? static_cast<int>(device) : -1;
}

template <typename Call>
CUresult call(const char* symbol, Call run) {
  return static_cast<CUresult>(enter(symbol, run));
}

// Of a call that needs a context.
template <typename Call>
CUresult call_in_context(const char* symbol, Call run) {
  return call(symbol, [&](System& system) {
    if (current_device() >= 0) return static_cast<int>(run(system));
    return system.report(std::string(symbol) + ": no context is current in this thread", kInvalidContext);
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
  return call(__func__, [](System&) { return kSuccess; });
}
DRIVER cuDriverGetVersion(int* version) { return *version = CUDA_VERSION, CUDA_SUCCESS; }
DRIVER cuDeviceGetCount(int* count) { return *count = System::instance().num_devices(), CUDA_SUCCESS; }
DRIVER cuDeviceGet(CUdevice* device, int index) {
  *device = index;
  return index >= 0 && index < System::instance().num_devices() ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
DRIVER cuDeviceGetPCIBusId(char* address, int size, CUdevice device) {
  return snprintf(address, static_cast<size_t>(size), "FFFF:%02X:00.0", device), CUDA_SUCCESS;
}
DRIVER cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  return *value = attribute_of(attribute), CUDA_SUCCESS;
}
DRIVER cuGetErrorString(CUresult code, const char** text) { return *text = text_of(code).text, CUDA_SUCCESS; }
DRIVER cuGetErrorName(CUresult code, const char** name) { return *name = text_of(code).name, CUDA_SUCCESS; }

// Contexts.
DRIVER cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return call(__func__, [=](System&) { return *context = context_of(device), kSuccess; });
}
DRIVER cuDevicePrimaryCtxRelease_v2(CUdevice) { return CUDA_SUCCESS; }
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
  System::instance().calls.add(__func__);
  int device = -1;
  if (!pop_current_device(&device)) {
    return static_cast<CUresult>(
        System::instance().report("cuCtxPopCurrent: no context is current in this thread", kInvalidContext));
  }
  return *context = context_of(device), CUDA_SUCCESS;
}

// Memory.
DRIVER cuMemHostRegister_v2(void* address, size_t nbytes, unsigned) {
  return call_in_context(__func__, [=](System& system) { return system.register_pinned(address, nbytes); });
}
DRIVER cuMemHostUnregister(void* address) {
  return call_in_context(__func__, [=](System& system) { return system.unregister_pinned(address); });
}
DRIVER cuMemAlloc_v2(CUdeviceptr* address, size_t nbytes) {
  return call_in_context(__func__, [=](System& system) {
    return system.allocate_device(current_device(), reinterpret_cast<void**>(address), nbytes);
  });
}
DRIVER cuMemFree_v2(CUdeviceptr address) {
  return call_in_context(__func__, [=](System& system) { return system.free_device(at(address)); });
}
DRIVER cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return call_in_context(__func__, [=](System& system) {
    return copy("cuMemcpyDtoHAsync", system, to, at(from), nbytes, stream, at(from), to);
  });
}
DRIVER cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t nbytes, CUstream stream) {
  return call_in_context(__func__, [=](System& system) {
    return copy("cuMemcpyHtoDAsync", system, at(to), from, nbytes, stream, at(to), from);
  });
}
DRIVER cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t nbytes, CUstream stream) {
  return call_in_context(__func__, [=](System& system) {
    const void* other = system.owner(at(from)) < 0 ? at(from) : at(to);
    return copy("cuMemcpyDtoDAsync", system, at(to), at(from), nbytes, stream, other, nullptr);
  });
}
DRIVER cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t nbytes, CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.fill(at(to), value, nbytes, stream); });
}

// Streams: those that wait for the default one, and it for them, are not emulated.
DRIVER cuStreamCreate(CUstream* stream, unsigned flags) {
  return call_in_context(__func__, [=](System& system) {
    if ((flags & CU_STREAM_NON_BLOCKING) == 0) return system.report("a blocking stream is not emulated", kNotSupported);
    return system.create_stream(current_device(), reinterpret_cast<void**>(stream));
  });
}
DRIVER cuStreamDestroy_v2(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.destroy_stream(stream); });
}
DRIVER cuStreamSynchronize(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.wait_stream(stream); });
}
DRIVER cuStreamQuery(CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.query_stream(stream); });
}
DRIVER cuStreamWaitEvent(CUstream stream, CUevent event, unsigned) {
  return call_in_context(__func__, [=](System& system) -> int {
    return system.ignores_waits_of_the_driver ? kSuccess : system.wait(stream, event);
  });
}

// Events.
DRIVER cuEventCreate(CUevent* event, unsigned flags) {
  return call_in_context(__func__, [=](System& system) {
    return system.create_event(reinterpret_cast<void**>(event), (flags & CU_EVENT_DISABLE_TIMING) == 0);
  });
}
DRIVER cuEventDestroy_v2(CUevent event) {
  return call_in_context(__func__, [=](System& system) { return system.destroy_event(event); });
}
DRIVER cuEventRecord(CUevent event, CUstream stream) {
  return call_in_context(__func__, [=](System& system) { return system.record(event, stream); });
}
DRIVER cuEventQuery(CUevent event) {
  return call_in_context(__func__, [=](System& system) { return system.query_event(event); });
}
DRIVER cuEventSynchronize(CUevent event) {
  return call_in_context(__func__, [=](System& system) { return system.wait_event(event); });
}
DRIVER cuEventElapsedTime(float* milliseconds, CUevent from, CUevent to) {
  return call_in_context(__func__, [=](System& system) { return system.elapsed(milliseconds, from, to); });
}
DRIVER cuEventElapsedTime_v2(float* milliseconds, CUevent from, CUevent to) {
  return cuEventElapsedTime(milliseconds, from, to);
}
