// libcudart: the calls of CUDA's runtime that torch makes.
#include "runtime.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "face.h"

using namespace emulated_gpu;

namespace {

thread_local cudaError_t last_error = cudaSuccess;

// The first call of a thread makes a device current.
template <typename Call>
cudaError_t call(const char* symbol, Call run) {
  if (current_device() < 0) System::instance().use_by_runtime(0);
  return keep(enter(symbol, run));
}

constexpr size_t kBytesOfName = sizeof(cudaDeviceProp::name);

}  // namespace

namespace emulated_gpu {

cudaError_t keep(int code) {
  if (code != kSuccess && code != kNotReady) last_error = static_cast<cudaError_t>(code);
  return static_cast<cudaError_t>(code);
}

}  // namespace emulated_gpu

#define RUNTIME EXPORTED cudaError_t

RUNTIME cudaGetDeviceCount(int* count) {
  System::instance().is_initialized = true;  // as the runtime does with its first call
  return *count = System::instance().num_devices(), cudaSuccess;
}

RUNTIME cudaGetDevice(int* device) { return *device = std::max(current_device(), 0), cudaSuccess; }

RUNTIME cudaSetDevice(int device) {
  if (device < 0 || device >= System::instance().num_devices()) return keep(kInvalidDevice);
  System::instance().use_by_runtime(device);
  return keep(System::instance().enter("cudaSetDevice"));
}

RUNTIME cudaDriverGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }
RUNTIME cudaRuntimeGetVersion(int* version) { return *version = CUDART_VERSION, cudaSuccess; }

RUNTIME cudaPeekAtLastError() {
  const int broken = System::instance().faults.broken();
  return broken != kSuccess ? static_cast<cudaError_t>(broken) : last_error;
}

RUNTIME cudaGetLastError() {
  const cudaError_t error = cudaPeekAtLastError();
  last_error = cudaSuccess;
  return error;
}

EXPORTED const char* cudaGetErrorName(cudaError_t error) { return text_of(error).name; }

EXPORTED const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorNoKernelImageForDevice ? text_of_missing_kernel() : text_of(error).text;
}

RUNTIME cudaGetDeviceProperties(cudaDeviceProp* found, int device) {
  memset(found, 0, sizeof *found);
  snprintf(found->name, kBytesOfName, "Emulated GPU");
  found->totalGlobalMem = System::instance().free_and_total_bytes(device).second;
  found->major = attribute_of(cudaDevAttrComputeCapabilityMajor);
  found->multiProcessorCount = attribute_of(cudaDevAttrMultiProcessorCount);
  found->warpSize = attribute_of(cudaDevAttrWarpSize);
  found->maxThreadsPerBlock = attribute_of(cudaDevAttrMaxThreadsPerBlock);
  found->maxThreadsPerMultiProcessor = attribute_of(cudaDevAttrMaxThreadsPerMultiProcessor);
  found->sharedMemPerBlock = attribute_of(cudaDevAttrMaxSharedMemoryPerBlock);
  found->sharedMemPerBlockOptin = attribute_of(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  found->sharedMemPerMultiprocessor = 233472;
  found->regsPerBlock = found->regsPerMultiprocessor = 65536;
  found->maxGridSize[0] = 2147483647, found->maxGridSize[1] = found->maxGridSize[2] = 65535;
  found->maxThreadsDim[0] = found->maxThreadsDim[1] = 1024, found->maxThreadsDim[2] = 64;
  found->l2CacheSize = attribute_of(cudaDevAttrL2CacheSize);
  found->unifiedAddressing = found->canMapHostMemory = 1;
  found->asyncEngineCount = attribute_of(cudaDevAttrAsyncEngineCount);
  found->uuid.bytes[0] = static_cast<char>(device + 1);
  return cudaSuccess;
}

RUNTIME cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  return *value = attribute_of(attribute), cudaSuccess;
}
RUNTIME cudaDeviceGetStreamPriorityRange(int* least, int* most) { return *least = 0, *most = -5, cudaSuccess; }
RUNTIME cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  return call(__func__, [=](System& system) { return *can = system.can_access_peer(device, peer), kSuccess; });
}
RUNTIME cudaDeviceEnablePeerAccess(int peer, unsigned) {
  return call(__func__, [=](System& system) { return system.enable_peer_access(current_device(), peer); });
}
RUNTIME cudaDeviceGetPCIBusId(char* text, int nbytes, int device) {
  return snprintf(text, nbytes, "0000:%02x:00.0", device + 1), cudaSuccess;
}

RUNTIME cudaDeviceSynchronize() {
  return call(__func__, [](System& system) { return system.wait_device(current_device()); });
}

// Memory.
RUNTIME cudaMalloc(void** address, size_t nbytes) {
  return call(__func__, [=](System& system) { return system.allocate_device(current_device(), address, nbytes); });
}
RUNTIME cudaFree(void* address) {
  return call(__func__, [=](System& system) { return system.free_device(address, InUse::kWaitedFor); });
}
RUNTIME cudaMemGetInfo(size_t* free_bytes, size_t* total_bytes) {
  return call(__func__, [=](System& system) {
    std::tie(*free_bytes, *total_bytes) = system.free_and_total_bytes(current_device());
    return kSuccess;
  });
}
RUNTIME cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  return call(__func__, [=](System& system) { return system.allocate_pinned(address, nbytes); });
}
RUNTIME cudaFreeHost(void* address) {
  return call(__func__, [=](System& system) { return system.free_pinned(address); });
}
RUNTIME cudaHostRegister(void* address, size_t nbytes, unsigned flags) {
  const bool is_mapped = (flags & cudaHostRegisterMapped) != 0;
  return call(__func__, [=](System& system) { return system.register_pinned(address, nbytes, is_mapped); });
}
RUNTIME cudaHostUnregister(void* address) {
  return call(__func__, [=](System& system) { return system.unregister_pinned(address, InUse::kWaitedFor); });
}
RUNTIME cudaPointerGetAttributes(cudaPointerAttributes* found, const void* address) {
  memset(found, 0, sizeof *found);
  System& system = System::instance();
  const int device = system.owner(address);
  found->device = device;
  if (device >= 0) {
    found->type = cudaMemoryTypeDevice;
    found->devicePointer = const_cast<void*>(address);
    return cudaSuccess;
  }
  const bool is_pinned = system.is_pinned(address);
  found->type = is_pinned ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  found->device = is_pinned ? 0 : cudaInvalidDeviceId;
  found->hostPointer = const_cast<void*>(address);
  found->devicePointer = system.device_address(found->hostPointer);
  return cudaSuccess;
}
RUNTIME cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  return call(__func__, [=](System& system) { return system.copy(to, from, nbytes, stream, true, Pageable::kStaged); });
}
RUNTIME cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  return call(__func__,
              [=](System& system) { return system.copy(to, from, nbytes, nullptr, false, Pageable::kStaged); });
}
RUNTIME cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, nbytes, cudaMemcpyDefault, stream);
}
RUNTIME cudaMemsetAsync(void* to, int value, size_t nbytes, cudaStream_t stream) {
  return call(__func__, [=](System& system) { return system.fill(to, value, nbytes, stream); });
}
RUNTIME cudaMemset(void* to, int value, size_t nbytes) { return cudaMemsetAsync(to, value, nbytes, nullptr); }

// Streams: those that wait for the default one, and it for them, are not emulated.
RUNTIME cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  return call(__func__, [=](System& system) {
    if ((flags & cudaStreamNonBlocking) == 0) return system.report("a blocking stream is not emulated", kNotSupported);
    return system.create_stream(current_device(), reinterpret_cast<void**>(stream));
  });
}
RUNTIME cudaStreamDestroy(cudaStream_t stream) {
  return call(__func__, [=](System& system) { return system.destroy_stream(stream); });
}
RUNTIME cudaStreamQuery(cudaStream_t stream) {
  return call(__func__, [=](System& system) { return system.query_stream(stream); });
}
RUNTIME cudaStreamSynchronize(cudaStream_t stream) {
  return call(__func__, [=](System& system) { return system.wait_stream(stream); });
}
RUNTIME cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  return call(__func__, [=](System& system) { return system.wait(stream, event); });
}
RUNTIME cudaStreamGetPriority(cudaStream_t, int* priority) { return *priority = 0, cudaSuccess; }
RUNTIME cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return call(__func__, [=](System& system) { return system.run_on_host(stream, [=] { function(argument); }); });
}

// Nothing is ever captured into a CUDA graph.
RUNTIME cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
RUNTIME cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id, cudaGraph_t*,
                                 const cudaGraphNode_t**, const cudaGraphEdgeData**, size_t*) {
  if (id != nullptr) *id = 0;
  return *status = cudaStreamCaptureStatusNone, cudaSuccess;
}
RUNTIME cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }

// Events.
RUNTIME cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  return call(__func__, [=](System& system) {
    return system.create_event(reinterpret_cast<void**>(event), (flags & cudaEventDisableTiming) == 0);
  });
}
RUNTIME cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
RUNTIME cudaEventDestroy(cudaEvent_t event) {
  return call(__func__, [=](System& system) { return system.destroy_event(event); });
}
RUNTIME cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return call(__func__, [=](System& system) { return system.record(event, stream); });
}
RUNTIME cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { return cudaEventRecordWithFlags(event, stream, 0); }
RUNTIME cudaEventQuery(cudaEvent_t event) {
  return call(__func__, [=](System& system) { return system.query_event(event); });
}
RUNTIME cudaEventSynchronize(cudaEvent_t event) {
  return call(__func__, [=](System& system) { return system.wait_event(event); });
}
RUNTIME cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return call(__func__, [=](System& system) { return system.elapsed(milliseconds, from, to); });
}

RUNTIME cudaProfilerStart() { return cudaSuccess; }
RUNTIME cudaProfilerStop() { return cudaSuccess; }

// Torch gets the driver's functions by this call.
RUNTIME cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned, unsigned long long,
                                         cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  for (const char* suffix : {"_v2", ""}) {
    if (*function == nullptr) *function = dlsym(RTLD_DEFAULT, (std::string(name) + suffix).c_str());
  }
  if (result != nullptr) {
    *result = *function != nullptr ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  }
  return cudaSuccess;
}
