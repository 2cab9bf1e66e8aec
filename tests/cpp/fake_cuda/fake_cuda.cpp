#include "fake_cuda.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "../../../csrc/driver/cuda_abi.h"

namespace {

using lmswap::cuda::Context;
using lmswap::cuda::Device;
using lmswap::cuda::DevicePointer;
using lmswap::cuda::Event;
using lmswap::cuda::Result;
using lmswap::cuda::Stream;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kNoDevice = 100,
                 kInvalidDevice = 101, kInvalidContext = 201, kInvalidHandle = 400, kNotReady = 600,
                 kIllegalAddress = 700, kAlreadyRegistered = 712, kNotRegistered = 713;
constexpr int kNumDevices = 2;
constexpr size_t kPage = 4096;

// How much of each stream's work is known to be over at some point: stream -> number of its last operation.
using Clock = std::map<uint64_t, uint64_t>;

void join(Clock& into, const Clock& other) {
  for (const auto& [stream, last] : other) into[stream] = std::max(into[stream], last);
}

struct EventState {
  int device;
  bool is_timed;
  Clock clock;                // of its last recording, from the calls
  uint64_t num_recorded = 0;  // from the calls
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t num_happened = 0;  // as the streams run
  std::chrono::steady_clock::time_point time;
};

class StreamState {
 public:
  StreamState(int device_, uint64_t number_) : device(device_), number(number_), thread_([this] { run(); }) {}

  ~StreamState() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
      changed_.notify_all();
    }
    thread_.join();
  }

  void submit(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++num_submitted_;
    changed_.notify_all();
  }

  void synchronize() {
    std::unique_lock lock(mutex_);
    const uint64_t last = num_submitted_;
    changed_.wait(lock, [&] { return num_finished_ >= last; });
  }

  const int device;
  const uint64_t number;
  Clock clock;  // from the calls

 private:
  void run() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return is_closing_ || !queue_.empty(); });
      if (queue_.empty()) return;
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
      lock.lock();
      ++num_finished_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t num_submitted_ = 0, num_finished_ = 0;
  bool is_closing_ = false;
  std::thread thread_;
};

enum class Kind { kDevice, kHost };

struct Memory {
  size_t nbytes;
  Kind kind;
  bool is_owned;  // not made known by a test
};

// One use of bytes by an operation of a stream.
struct Use {
  uintptr_t begin, end;
  uint64_t stream, operation;
  bool is_write;
  std::string what;
};

struct Failure {
  std::string symbol;
  uint64_t calls_left;
  int code;
};

// Never destroyed: threads and late calls may outlive main.
struct World {
  std::mutex mutex;
  bool is_initialized = false;
  int version = 13000;
  uint64_t last_number = 0;
  std::map<uint64_t, std::shared_ptr<StreamState>> streams;
  std::map<uint64_t, std::shared_ptr<EventState>> events;
  std::shared_ptr<StreamState> default_streams[kNumDevices];
  int num_retained[kNumDevices] = {};
  std::map<uintptr_t, Memory> memories;
  uint64_t num_registrations = 0;
  std::list<Use> uses;
  Clock host;  // what the host has synchronized with
  std::vector<std::unique_ptr<std::string>> violations;
  std::vector<Failure> failures;
  double most_delay_seconds = 0;
  bool ignores_waits = false;
  std::mt19937 random{7};
};

World& world() {
  static World* const kWorld = new World();
  return *kWorld;
}

thread_local std::vector<Context> context_stack;

Context context_of(int device) { return reinterpret_cast<Context>(static_cast<uintptr_t>(0x1000 + device)); }

// All of the following expect the world's mutex to be held.

Result violate(Result code, const std::string& text) {
  world().violations.push_back(std::make_unique<std::string>(text));
  return code;
}

// Also what the calls that give back begin with: making the context current.
bool gives_back(const std::string& symbol) {
  return symbol.find("Destroy") != std::string::npos || symbol.find("Free") != std::string::npos ||
         symbol.find("Unregister") != std::string::npos || symbol == "cuCtxPushCurrent_v2" ||
         symbol == "cuCtxGetCurrent";
}

Result planned_failure(const char* symbol) {
  for (auto failure = world().failures.begin(); failure != world().failures.end(); ++failure) {
    const bool is_meant = failure->symbol == symbol || (failure->symbol == "*" && !gives_back(symbol));
    if (!is_meant || --failure->calls_left > 0) continue;
    const int code = failure->code;
    world().failures.erase(failure);
    return code;
  }
  return kSuccess;
}

int current_device() {
  if (context_stack.empty()) return -1;
  for (int device = 0; device < kNumDevices; ++device) {
    if (context_stack.back() == context_of(device) && world().num_retained[device] > 0) return device;
  }
  return -1;
}

double draw_delay() {
  const double most = world().most_delay_seconds;
  return most > 0 ? std::uniform_real_distribution<double>(0, most)(world().random) : 0;
}

std::shared_ptr<StreamState> find_stream(Stream handle, int device) {
  if (handle == nullptr) {
    auto& stream = world().default_streams[device];
    if (!stream) stream = std::make_shared<StreamState>(device, ++world().last_number);
    return stream;
  }
  const auto found = world().streams.find(reinterpret_cast<uintptr_t>(handle));
  return found == world().streams.end() ? nullptr : found->second;
}

std::shared_ptr<EventState> find_event(Event handle) {
  const auto found = world().events.find(reinterpret_cast<uintptr_t>(handle));
  return found == world().events.end() ? nullptr : found->second;
}

bool holds(uintptr_t begin, size_t nbytes, Kind kind) {
  auto memory = world().memories.upper_bound(begin);
  if (memory == world().memories.begin()) return false;
  --memory;
  return memory->second.kind == kind && begin + nbytes <= memory->first + memory->second.nbytes;
}

// A new operation of the stream; what the host knows to be over is over for it too.
uint64_t next_operation(StreamState& stream) {
  join(stream.clock, world().host);
  return ++stream.clock[stream.number];
}

void note_use(StreamState& stream, uint64_t operation, uintptr_t begin, size_t nbytes, bool is_write,
              const std::string& what) {
  const uintptr_t end = begin + nbytes;
  const auto is_over_in = [](const Use& use, const Clock& clock) {
    const auto last = clock.find(use.stream);
    return last != clock.end() && last->second >= use.operation;
  };
  world().uses.remove_if([&](const Use& use) { return is_over_in(use, world().host); });
  for (const Use& use : world().uses) {
    const bool conflicts = use.begin < end && begin < use.end && (use.is_write || is_write);
    if (!conflicts || is_over_in(use, stream.clock)) continue;
    violate(kIllegalAddress, what + " on stream " + std::to_string(stream.number) + " is not ordered after " +
                                 use.what + " on stream " + std::to_string(use.stream) + ", which uses the same bytes");
  }
  world().uses.push_back({begin, end, stream.number, operation, is_write, what});
}

void submit(StreamState& stream, std::function<void()> work) {
  stream.submit([work = std::move(work), delay = draw_delay()] {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay));
    work();
  });
}

// The checks that every call begins with.
#define FAKE_BEGIN(symbol)                                                                 \
  const std::unique_lock world_lock(world().mutex);                                        \
  if (!world().is_initialized) return violate(kNotInitialized, #symbol ": before cuInit"); \
  if (const Result planned = planned_failure(#symbol); planned != kSuccess) return planned

#define FAKE_BEGIN_IN_CONTEXT(symbol)  \
  FAKE_BEGIN(symbol);                  \
  const int device = current_device(); \
  if (device < 0) return violate(kInvalidContext, #symbol ": no context of a device is current")

// Of a call that names an event one may count on the error, as CUDA documents it: it is no violation.
#define FAKE_BEGIN_OF_EVENT(symbol, handle)                                                            \
  FAKE_BEGIN(symbol);                                                                                  \
  const int device = current_device();                                                                 \
  if (device < 0) return kInvalidContext;                                                              \
  const std::shared_ptr<EventState> event_state = find_event(handle);                                  \
  if (!event_state) return violate(kInvalidHandle, #symbol ": the event was destroyed or never made"); \
  if (event_state->device != device) return kInvalidHandle

#define FAKE_STREAM(symbol, handle)                                                                      \
  const std::shared_ptr<StreamState> stream_state = find_stream(handle, device);                         \
  if (!stream_state) return violate(kInvalidHandle, #symbol ": the stream was destroyed or never made"); \
  if (stream_state->device != device) return violate(kInvalidContext, #symbol ": a stream of another device")

#define FAKE_EVENT(symbol, handle)                                                                     \
  const std::shared_ptr<EventState> event_state = find_event(handle);                                  \
  if (!event_state) return violate(kInvalidHandle, #symbol ": the event was destroyed or never made"); \
  if (event_state->device != device) return violate(kInvalidContext, #symbol ": an event of another device")

Result copy_async(const char* symbol, void* host, uintptr_t device_pointer, size_t nbytes, StreamState& stream,
                  bool is_out) {
  const std::string what = std::string(symbol) + " of " + std::to_string(nbytes) + " bytes";
  if (!holds(device_pointer, nbytes, Kind::kDevice)) {
    return violate(kInvalidValue, what + ": not the device's memory");
  }
  const auto host_address = reinterpret_cast<uintptr_t>(host);
  if (!holds(host_address, nbytes, Kind::kHost)) return violate(kInvalidValue, what + ": not pinned host memory");
  const uint64_t operation = next_operation(stream);
  note_use(stream, operation, host_address, nbytes, is_out, what);
  note_use(stream, operation, device_pointer, nbytes, !is_out, what);
  submit(stream, [=] {
    {
      const std::lock_guard lock(world().mutex);
      if (!holds(device_pointer, nbytes, Kind::kDevice) || !holds(host_address, nbytes, Kind::kHost)) {
        violate(kIllegalAddress, what + ": the memory was freed before the copy ran");
        return;
      }
    }
    auto* device_bytes = reinterpret_cast<void*>(device_pointer);
    std::memcpy(is_out ? host : device_bytes, is_out ? device_bytes : host, nbytes);
  });
  return kSuccess;
}

Result allocate(void** pointer, size_t nbytes) {
  *pointer = std::aligned_alloc(kPage, (nbytes + kPage - 1) / kPage * kPage);
  if (*pointer == nullptr) return kOutOfMemory;
  world().memories[reinterpret_cast<uintptr_t>(*pointer)] = {nbytes, Kind::kDevice, true};
  return kSuccess;
}

void forget_uses(uintptr_t begin, size_t nbytes) {
  world().uses.remove_if([&](const Use& use) { return use.begin < begin + nbytes && begin < use.end; });
}

// A destroyed stream's thread ends its work first; clocks must not grow with every stream there ever was.
void forget_stream(uint64_t number) {
  world().uses.remove_if([&](const Use& use) { return use.stream == number; });
  world().host.erase(number);
  for (const auto& [handle, stream] : world().streams) stream->clock.erase(number);
  for (const auto& stream : world().default_streams) {
    if (stream) stream->clock.erase(number);
  }
  for (const auto& [handle, event] : world().events) event->clock.erase(number);
}

Result release(void* pointer) {
  const auto memory = world().memories.find(reinterpret_cast<uintptr_t>(pointer));
  if (memory == world().memories.end() || memory->second.kind != Kind::kDevice || !memory->second.is_owned) {
    return violate(kInvalidValue, "cuMemFree_v2: not allocated, or freed already");
  }
  forget_uses(memory->first, memory->second.nbytes);
  world().memories.erase(memory);
  std::free(pointer);
  return kSuccess;
}

uint64_t count_bytes(Kind kind) {
  uint64_t nbytes = 0;
  for (const auto& [pointer, memory] : world().memories) {
    if (memory.kind == kind && memory.is_owned) nbytes += memory.nbytes;
  }
  return nbytes;
}

}  // namespace

extern "C" {

void fake_cuda_reset() {
  const std::lock_guard lock(world().mutex);
  world().violations.clear();
  world().failures.clear();
  world().most_delay_seconds = 0;
  world().ignores_waits = false;
  world().version = 13000;
}

size_t fake_cuda_num_violations() {
  const std::lock_guard lock(world().mutex);
  return world().violations.size();
}

const char* fake_cuda_violation(size_t index) {
  const std::lock_guard lock(world().mutex);
  return world().violations.at(index)->c_str();
}

uint64_t fake_cuda_count(const char* what) {
  const std::lock_guard lock(world().mutex);
  const std::string name = what;
  if (name == "streams") return world().streams.size();
  if (name == "events") return world().events.size();
  if (name == "failures") return world().failures.size();
  if (name == "registrations") return world().num_registrations;
  if (name == "host_bytes") return count_bytes(Kind::kHost);
  if (name == "device_bytes") return count_bytes(Kind::kDevice);
  if (name != "contexts") std::abort();
  uint64_t num_contexts = 0;
  for (const int retained : world().num_retained) num_contexts += static_cast<uint64_t>(retained);
  return num_contexts;
}

void fake_cuda_register(void* pointer, size_t nbytes) {
  const std::lock_guard lock(world().mutex);
  world().memories[reinterpret_cast<uintptr_t>(pointer)] = {nbytes, Kind::kDevice, false};
}

void fake_cuda_unregister(void* pointer) {
  const std::lock_guard lock(world().mutex);
  const auto memory = world().memories.find(reinterpret_cast<uintptr_t>(pointer));
  if (memory == world().memories.end()) return;
  forget_uses(memory->first, memory->second.nbytes);
  world().memories.erase(memory);
}

void fake_cuda_use(void* stream, uint64_t pointer, size_t nbytes, int is_write) {
  const std::lock_guard lock(world().mutex);
  const auto found = find_stream(static_cast<Stream>(stream), std::max(0, current_device()));
  if (!found) {
    violate(kInvalidHandle, "fake_cuda_use: the stream was destroyed or never made");
    return;
  }
  note_use(*found, next_operation(*found), pointer, nbytes, is_write != 0, "a kernel");
}

void fake_cuda_set_delay(double most_seconds) {
  const std::lock_guard lock(world().mutex);
  world().most_delay_seconds = most_seconds;
}

void fake_cuda_fail(const char* symbol, uint64_t nth, int code) {
  const std::lock_guard lock(world().mutex);
  world().failures.push_back({symbol, nth, code});
}

void fake_cuda_forget_failures() {
  const std::lock_guard lock(world().mutex);
  world().failures.clear();
}

void fake_cuda_ignore_waits(int is_on) {
  const std::lock_guard lock(world().mutex);
  world().ignores_waits = is_on != 0;
}

void fake_cuda_set_version(int version) {
  const std::lock_guard lock(world().mutex);
  world().version = version;
}

Result cuGetErrorName(Result code, const char** name) {
  *name = code == kOutOfMemory      ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == kNoDevice       ? "CUDA_ERROR_NO_DEVICE"
                                    : "CUDA_ERROR_OF_THE_FAKE";
  return kSuccess;
}

Result cuGetErrorString(Result code, const char** text) {
  *text = code == kOutOfMemory ? "out of memory" : "an error of the fake driver";
  return kSuccess;
}

Result cuInit(unsigned) {
  const std::lock_guard lock(world().mutex);
  if (const Result planned = planned_failure("cuInit"); planned != kSuccess) return planned;
  world().is_initialized = true;
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  const std::lock_guard lock(world().mutex);
  *version = world().version;
  return kSuccess;
}

Result cuDeviceGet(Device* found, int ordinal) {
  FAKE_BEGIN(cuDeviceGet);
  if (ordinal < 0 || ordinal >= kNumDevices) return kInvalidDevice;
  *found = ordinal;
  return kSuccess;
}

Result cuDeviceGetPCIBusId(char* address, int size, Device device) {
  FAKE_BEGIN(cuDeviceGetPCIBusId);
  std::snprintf(address, static_cast<size_t>(size), "FFFF:%02X:00.0", static_cast<unsigned>(device));
  return kSuccess;
}

Result cuDevicePrimaryCtxRetain(Context* context, Device device) {
  FAKE_BEGIN(cuDevicePrimaryCtxRetain);
  ++world().num_retained[device];
  *context = context_of(device);
  return kSuccess;
}

Result cuDevicePrimaryCtxRelease_v2(Device device) {
  FAKE_BEGIN(cuDevicePrimaryCtxRelease_v2);
  if (world().num_retained[device] == 0) {
    return violate(kInvalidContext, "cuDevicePrimaryCtxRelease_v2: released more often than retained");
  }
  --world().num_retained[device];
  return kSuccess;
}

Result cuCtxGetCurrent(Context* context) {
  FAKE_BEGIN(cuCtxGetCurrent);
  *context = context_stack.empty() ? nullptr : context_stack.back();
  return kSuccess;
}

Result cuCtxPushCurrent_v2(Context context) {
  FAKE_BEGIN(cuCtxPushCurrent_v2);
  context_stack.push_back(context);
  return kSuccess;
}

Result cuCtxPopCurrent_v2(Context* context) {
  FAKE_BEGIN(cuCtxPopCurrent_v2);
  if (context_stack.empty()) return violate(kInvalidContext, "cuCtxPopCurrent_v2: no context is current");
  *context = context_stack.back();
  context_stack.pop_back();
  return kSuccess;
}

Result cuMemHostRegister_v2(void* pointer, size_t nbytes, unsigned) {
  FAKE_BEGIN_IN_CONTEXT(cuMemHostRegister_v2);
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  const auto after = world().memories.lower_bound(begin + nbytes);
  const bool is_free =
      after == world().memories.begin() || std::prev(after)->first + std::prev(after)->second.nbytes <= begin;
  if (!is_free) return violate(kAlreadyRegistered, "cuMemHostRegister_v2: some of it is registered already");
  world().memories[begin] = {nbytes, Kind::kHost, true};
  ++world().num_registrations;
  return kSuccess;
}

Result cuMemHostUnregister(void* pointer) {
  FAKE_BEGIN_IN_CONTEXT(cuMemHostUnregister);
  const auto memory = world().memories.find(reinterpret_cast<uintptr_t>(pointer));
  if (memory == world().memories.end() || memory->second.kind != Kind::kHost) {
    return violate(kNotRegistered, "cuMemHostUnregister: not registered, or no more");
  }
  forget_uses(memory->first, memory->second.nbytes);
  world().memories.erase(memory);
  return kSuccess;
}

Result cuMemAlloc_v2(DevicePointer* pointer, size_t nbytes) {
  FAKE_BEGIN_IN_CONTEXT(cuMemAlloc_v2);
  void* allocated = nullptr;
  const Result result = allocate(&allocated, nbytes);
  *pointer = reinterpret_cast<DevicePointer>(allocated);
  return result;
}

Result cuMemFree_v2(DevicePointer pointer) {
  FAKE_BEGIN_IN_CONTEXT(cuMemFree_v2);
  return release(reinterpret_cast<void*>(pointer));
}

Result cuMemcpyDtoH_v2(void* host, DevicePointer pointer, size_t nbytes) {
  FAKE_BEGIN_IN_CONTEXT(cuMemcpyDtoH_v2);
  if (!holds(pointer, nbytes, Kind::kDevice)) return violate(kInvalidValue, "cuMemcpyDtoH_v2: not the device's memory");
  std::memcpy(host, reinterpret_cast<const void*>(pointer), nbytes);
  return kSuccess;
}

Result cuMemcpyHtoD_v2(DevicePointer pointer, const void* host, size_t nbytes) {
  FAKE_BEGIN_IN_CONTEXT(cuMemcpyHtoD_v2);
  if (!holds(pointer, nbytes, Kind::kDevice)) return violate(kInvalidValue, "cuMemcpyHtoD_v2: not the device's memory");
  std::memcpy(reinterpret_cast<void*>(pointer), host, nbytes);
  return kSuccess;
}

Result cuMemsetD8Async(DevicePointer pointer, unsigned char value, size_t nbytes, Stream handle) {
  FAKE_BEGIN_IN_CONTEXT(cuMemsetD8Async);
  FAKE_STREAM(cuMemsetD8Async, handle);
  if (!holds(pointer, nbytes, Kind::kDevice)) return violate(kInvalidValue, "cuMemsetD8Async: not the device's memory");
  note_use(*stream_state, next_operation(*stream_state), pointer, nbytes, true, "cuMemsetD8Async");
  submit(*stream_state, [=] { std::memset(reinterpret_cast<void*>(pointer), value, nbytes); });
  return kSuccess;
}

Result cuMemcpyDtoDAsync_v2(DevicePointer to, DevicePointer from, size_t nbytes, Stream handle) {
  FAKE_BEGIN_IN_CONTEXT(cuMemcpyDtoDAsync_v2);
  FAKE_STREAM(cuMemcpyDtoDAsync_v2, handle);
  if (!holds(to, nbytes, Kind::kDevice) || !holds(from, nbytes, Kind::kDevice)) {
    return violate(kInvalidValue, "cuMemcpyDtoDAsync_v2: not the device's memory");
  }
  const uint64_t operation = next_operation(*stream_state);
  note_use(*stream_state, operation, from, nbytes, false, "cuMemcpyDtoDAsync_v2");
  note_use(*stream_state, operation, to, nbytes, true, "cuMemcpyDtoDAsync_v2");
  submit(*stream_state, [=] { std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), nbytes); });
  return kSuccess;
}

Result cuStreamCreate(Stream* stream, unsigned) {
  FAKE_BEGIN_IN_CONTEXT(cuStreamCreate);
  const uint64_t number = ++world().last_number;
  world().streams[number] = std::make_shared<StreamState>(device, number);
  *stream = reinterpret_cast<Stream>(number);
  return kSuccess;
}

Result cuStreamDestroy_v2(Stream handle) {
  std::shared_ptr<StreamState> destroyed;  // after the lock is given back: its thread may need it to end
  FAKE_BEGIN_IN_CONTEXT(cuStreamDestroy_v2);
  if (handle == nullptr) return violate(kInvalidHandle, "cuStreamDestroy_v2: the default stream");
  FAKE_STREAM(cuStreamDestroy_v2, handle);
  destroyed = stream_state;
  world().streams.erase(reinterpret_cast<uintptr_t>(handle));
  forget_stream(destroyed->number);
  return kSuccess;
}

Result cuStreamSynchronize(Stream handle) {
  std::shared_ptr<StreamState> synchronized;
  Clock clock;
  {
    FAKE_BEGIN_IN_CONTEXT(cuStreamSynchronize);
    FAKE_STREAM(cuStreamSynchronize, handle);
    synchronized = stream_state;
    clock = synchronized->clock;
  }
  synchronized->synchronize();
  const std::lock_guard lock(world().mutex);
  join(world().host, clock);
  return kSuccess;
}

Result cuStreamWaitEvent(Stream handle, Event event, unsigned) {
  FAKE_BEGIN_IN_CONTEXT(cuStreamWaitEvent);
  FAKE_STREAM(cuStreamWaitEvent, handle);
  FAKE_EVENT(cuStreamWaitEvent, event);
  const uint64_t recording = event_state->num_recorded;
  if (recording == 0) return violate(kInvalidHandle, "cuStreamWaitEvent: the event was never recorded");
  if (world().ignores_waits) return kSuccess;
  join(stream_state->clock, event_state->clock);
  submit(*stream_state, [event_state, recording] {
    std::unique_lock lock(event_state->mutex);
    event_state->changed.wait(lock, [&] { return event_state->num_happened >= recording; });
  });
  return kSuccess;
}

Result cuLaunchHostFunc(Stream handle, void (*function)(void*), void* argument) {
  FAKE_BEGIN_IN_CONTEXT(cuLaunchHostFunc);
  FAKE_STREAM(cuLaunchHostFunc, handle);
  next_operation(*stream_state);
  submit(*stream_state, [=] { function(argument); });
  return kSuccess;
}

Result cuEventCreate(Event* event, unsigned flags) {
  constexpr unsigned kDisableTiming = 2;
  FAKE_BEGIN_IN_CONTEXT(cuEventCreate);
  auto made = std::make_shared<EventState>();
  made->device = device;
  made->is_timed = (flags & kDisableTiming) == 0;
  const uint64_t number = ++world().last_number;
  world().events[number] = std::move(made);
  *event = reinterpret_cast<Event>(number);
  return kSuccess;
}

Result cuEventDestroy_v2(Event event) {
  FAKE_BEGIN_IN_CONTEXT(cuEventDestroy_v2);
  FAKE_EVENT(cuEventDestroy_v2, event);
  world().events.erase(reinterpret_cast<uintptr_t>(event));
  return kSuccess;
}

Result cuEventRecord(Event event, Stream handle) {
  FAKE_BEGIN_OF_EVENT(cuEventRecord, event);
  FAKE_STREAM(cuEventRecord, handle);
  next_operation(*stream_state);
  event_state->clock = stream_state->clock;
  const uint64_t recording = ++event_state->num_recorded;
  submit(*stream_state, [event_state, recording] {
    const std::lock_guard lock(event_state->mutex);
    event_state->num_happened = std::max(event_state->num_happened, recording);
    event_state->time = std::chrono::steady_clock::now();
    event_state->changed.notify_all();
  });
  return kSuccess;
}

Result cuEventQuery(Event event) {
  FAKE_BEGIN_OF_EVENT(cuEventQuery, event);
  if (event_state->num_recorded == 0) return violate(kSuccess, "cuEventQuery: the event was never recorded");
  {
    const std::lock_guard lock(event_state->mutex);
    if (event_state->num_happened < event_state->num_recorded) return kNotReady;
  }
  join(world().host, event_state->clock);
  return kSuccess;
}

Result cuEventSynchronize(Event event) {
  std::shared_ptr<EventState> synchronized;
  Clock clock;
  uint64_t recording = 0;
  {
    FAKE_BEGIN_OF_EVENT(cuEventSynchronize, event);
    if (event_state->num_recorded == 0) return violate(kSuccess, "cuEventSynchronize: the event was never recorded");
    synchronized = event_state;
    clock = event_state->clock;
    recording = event_state->num_recorded;
  }
  {
    std::unique_lock lock(synchronized->mutex);
    synchronized->changed.wait(lock, [&] { return synchronized->num_happened >= recording; });
  }
  const std::lock_guard lock(world().mutex);
  join(world().host, clock);
  return kSuccess;
}

Result cuEventElapsedTime(float* milliseconds, Event start, Event end) {
  FAKE_BEGIN_IN_CONTEXT(cuEventElapsedTime);
  std::chrono::steady_clock::time_point times[2];
  for (const auto& [handle, time] : {std::pair(start, &times[0]), std::pair(end, &times[1])}) {
    FAKE_EVENT(cuEventElapsedTime, handle);
    if (!event_state->is_timed) return violate(kInvalidHandle, "cuEventElapsedTime: an event without timing");
    if (event_state->num_recorded == 0) {
      return violate(kInvalidHandle, "cuEventElapsedTime: the event was never recorded");
    }
    const std::lock_guard lock(event_state->mutex);
    if (event_state->num_happened < event_state->num_recorded) return kNotReady;
    *time = event_state->time;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(times[1] - times[0]).count();
  return kSuccess;
}

Result cuMemcpyDtoHAsync_v2(void* host, DevicePointer pointer, size_t nbytes, Stream handle) {
  FAKE_BEGIN_IN_CONTEXT(cuMemcpyDtoHAsync_v2);
  FAKE_STREAM(cuMemcpyDtoHAsync_v2, handle);
  return copy_async("cuMemcpyDtoHAsync_v2", host, pointer, nbytes, *stream_state, true);
}

Result cuMemcpyHtoDAsync_v2(DevicePointer pointer, const void* host, size_t nbytes, Stream handle) {
  FAKE_BEGIN_IN_CONTEXT(cuMemcpyHtoDAsync_v2);
  FAKE_STREAM(cuMemcpyHtoDAsync_v2, handle);
  return copy_async("cuMemcpyHtoDAsync_v2", const_cast<void*>(host), pointer, nbytes, *stream_state, false);
}

}  // extern "C"

// The fake and the engine agree on every signature.
#define FAKE_CHECK(member, symbol, parameters) \
  static_assert(std::is_same_v<decltype(lmswap::cuda::Functions::member), decltype(&symbol)>);
LMSWAP_CUDA_FUNCTIONS(FAKE_CHECK)
