// The driver over libcuda, opened at run time. Every call runs with the device's primary context current, which is the
// one torch uses; it is retained, and the caller's own context is restored afterwards.
#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "cuda_abi.h"
#include "lmswap/clock.h"
#include "lmswap/driver/driver.h"
#include "lmswap/error.h"
#include "lmswap/tiers/host_range.h"

namespace lmswap {
namespace {

constexpr int kOldestVersion = 12000;  // the first with all the symbols

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

cuda::Functions load_functions(const std::string& library) {
  // Never closed: the driver library does not survive being unloaded.
  void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    throw DriverError("the CUDA driver cannot be opened: " + std::string(dlerror()) +
                      ". Install the NVIDIA driver, or train on the CPU");
  }
  cuda::Functions functions;
  if (void* symbol = dlsym(opened, "cuDriverGetVersion")) {
    int version = 0;
    reinterpret_cast<decltype(functions.driver_get_version)>(symbol)(&version);
    if (version < kOldestVersion) {
      throw DriverError("the CUDA driver '" + library + "' is of CUDA " + version_text(version) + "; lmswap needs " +
                        version_text(kOldestVersion) + " or newer");
    }
  }
#define LMSWAP_LOAD(member, symbol, parameters)                                            \
  functions.member = reinterpret_cast<decltype(functions.member)>(dlsym(opened, #symbol)); \
  if (functions.member == nullptr) {                                                       \
    throw DriverError("the CUDA driver '" + library +                                      \
                      "' has no function " #symbol                                         \
                      "; lmswap needs "                                                    \
                      "that of CUDA " +                                                    \
                      version_text(kOldestVersion) + " or newer");                         \
  }
  LMSWAP_CUDA_FUNCTIONS(LMSWAP_LOAD)
#undef LMSWAP_LOAD
  return functions;
}

class CudaDriver final : public Driver {
 public:
  CudaDriver(const std::string& library, int device, uint64_t registration_bytes);
  ~CudaDriver() override;

  bool device_is_host() const override { return false; }
  DeviceHandle device() const override { return reinterpret_cast<DeviceHandle>(context_); }
  int number() const override { return number_; }
  std::shared_ptr<Driver> open_peer(int number) override;
  void* allocate_host(uint64_t nbytes, uint64_t max_bytes) override;
  bool host_memory_grows() const override { return true; }
  void grow_host(void* pointer, uint64_t nbytes) override;
  void* allocate_addressable(uint64_t nbytes) override;
  uint64_t registration_bytes() const override { return registration_bytes_; }
  uint64_t device_address(const void* host) override;
  void free_host(void* pointer) noexcept override;
  uint64_t allocate_device(uint64_t nbytes) override;
  void free_device(uint64_t device) noexcept override;
  DeviceBytes device_bytes() override;
  StreamHandle create_stream() override;
  StreamId stream_id(StreamHandle stream) override;
  void destroy_stream(StreamHandle stream) noexcept override;
  void synchronize_stream(StreamHandle stream) override;
  void synchronize_device() noexcept override;
  EventHandle create_event() override;
  uint64_t num_idle_events() override;
  void destroy_event(EventHandle event) noexcept override;
  void record_event(EventHandle event, StreamHandle stream) override;
  void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) override;
  bool query_event(EventHandle event) override;
  void synchronize_event(EventHandle event) override;
  double event_seconds(EventHandle event) override;
  bool can_wait_for_host() const override { return can_wait_for_host_; }
  void wait_value(StreamHandle stream, const uint64_t* value, uint64_t least) override;
  void call_back(StreamHandle stream, std::function<void(int code)> call) override;
  void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) override;
  void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) override;
  void copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) override;
  void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) override;

 private:
  // An event whose time is known; the device measures the times of other events relative to it.
  struct Base {
    const CudaDriver* driver;
    cuda::Event event = nullptr;
    double seconds = 0;
    ~Base();
  };
  struct TimedEvent {
    cuda::Event event;
    bool is_recorded = false;  // since it was created, or reused
    std::shared_ptr<Base> base;
  };
  // During its lifetime, this thread's calls do not invalidate the capture of a CUDA graph on another thread: in
  // torch's default mode any thread's query, wait or allocation would, although it is not part of the graph.
  class Uncaptured {
   public:
    explicit Uncaptured(const CudaDriver& driver) : driver_(driver) { exchange(); }
    ~Uncaptured() { exchange(); }
    Uncaptured(const Uncaptured&) = delete;
    Uncaptured& operator=(const Uncaptured&) = delete;

   private:
    void exchange() { driver_.call_.thread_exchange_capture_mode(&mode_); }  // fails only if the other calls fail, too

    const CudaDriver& driver_;
    cuda::CaptureMode mode_ = cuda::kCaptureModeRelaxed;
  };
  // Makes the primary context current during its lifetime.
  class Current {
   public:
    explicit Current(const CudaDriver& driver) : driver_(driver), uncaptured_(driver) {
      cuda::Context current = nullptr;
      driver.check(driver.call_.context_get_current(&current), "cuCtxGetCurrent");
      if (current == driver.context_) return;
      driver.check(driver.call_.context_push(driver.context_), "cuCtxPushCurrent_v2");
      is_pushed_ = true;
    }
    bool is_pushed() const { return is_pushed_; }
    ~Current() {
      cuda::Context popped;
      if (is_pushed_) driver_.call_.context_pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

   private:
    const CudaDriver& driver_;
    const Uncaptured uncaptured_;
    bool is_pushed_ = false;
  };

  void check(cuda::Result result, const char* call, uint64_t nbytes = 0) const;
  std::string pci_address() const;
  void* keep(std::unique_ptr<HostRange> range);
  void extend(HostRange& range, uint64_t nbytes, uint64_t registration_bytes);
  void unpin(std::byte* begin, std::byte* end) noexcept;
  uint64_t bytes_in_registration(const std::byte* host, uint64_t nbytes);
  cuda::DevicePointer find_device_pointer(const void* host) const;
  template <typename Call>
  cuda::Result run_on_own(Call call) const;
  template <typename Call>
  cuda::Result run_on(StreamHandle stream, Call call) const;
  std::shared_ptr<Base> current_base();
  std::shared_ptr<Base> measure_base();
  template <typename Call>
  void call_ignoring_errors(Call call) const noexcept;
  static cuda::Context context_of(DeviceHandle device) { return reinterpret_cast<cuda::Context>(device); }
  static cuda::Stream stream_of(StreamHandle stream) { return reinterpret_cast<cuda::Stream>(stream); }
  static TimedEvent& timed(EventHandle event) { return *reinterpret_cast<TimedEvent*>(event); }
  static TimedEvent& recorded(EventHandle event, const char* call);
  void set_recorded(EventHandle event);
  bool has_own_queues() const;

  static thread_local const CudaDriver* seen_;  // whose context was current when this thread last checked

  const std::string library_;
  const cuda::Functions call_;
  const int number_;
  const uint64_t registration_bytes_;
  cuda::Device device_ = 0;
  cuda::Context context_ = nullptr;
  cuda::Stream clock_stream_ = nullptr;  // always idle, so that a base happens when it is recorded
  unsigned long long default_stream_id_ = 0;
  int node_ = -1;
  bool can_wait_for_host_ = false;
  std::mutex host_mutex_;
  std::map<void*, std::unique_ptr<HostRange>> host_ranges_;
  std::set<std::byte*> registrations_;  // the begins of the registered ranges
  std::mutex base_mutex_;
  std::shared_ptr<Base> base_;
  double next_base_seconds_ = 0;  // when it must be measured again
  // Events are reused, since each step needs as many as the last: creating or destroying one takes a microsecond or
  // two.
  std::mutex idle_mutex_;
  std::vector<std::unique_ptr<TimedEvent>> idle_events_;
};

CudaDriver::CudaDriver(const std::string& library, int device, uint64_t registration_bytes)
    : library_(library), call_(load_functions(library)), number_(device), registration_bytes_(registration_bytes) {
  check(call_.init(0), "cuInit");
  check(call_.device_get(&device_, device), "cuDeviceGet");
  check(call_.primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
  try {
    const Current current(*this);
    check(call_.stream_create(&clock_stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
    check(call_.stream_get_id(nullptr, &default_stream_id_), "cuStreamGetId");
    node_ = numa_node_of(pci_address());
    can_wait_for_host_ = has_own_queues();
  } catch (const Error&) {
    if (clock_stream_ != nullptr) call_ignoring_errors([&] { call_.stream_destroy(clock_stream_); });
    call_.primary_context_release(device_);
    throw;
  }
}

CudaDriver::~CudaDriver() {
  base_.reset();
  for (const auto& idle : idle_events_) call_ignoring_errors([&] { call_.event_destroy(idle->event); });
  idle_events_.clear();  // with the bases of their last times
  call_ignoring_errors([&] { call_.stream_destroy(clock_stream_); });
  call_.primary_context_release(device_);
}

CudaDriver::Base::~Base() {
  if (event != nullptr) driver->call_ignoring_errors([&] { driver->call_.event_destroy(event); });
}

void CudaDriver::check(cuda::Result result, const char* call, uint64_t nbytes) const {
  if (result == cuda::kSuccess) return;
  const char *name = nullptr, *text = nullptr;
  call_.get_error_name(result, &name);
  call_.get_error_string(result, &text);
  throw DriverError(std::string(call) + (nbytes > 0 ? " of " + format_bytes(nbytes) : "") +
                    " failed: " + (name ? name : "unknown error") + " (" + std::to_string(result) + "), " +
                    (text ? text : "the driver has no text for it"));
}

// For releases: they fail when the process is exiting, and the driver with it, where nothing is left to release.
template <typename Call>
void CudaDriver::call_ignoring_errors(Call call) const noexcept {
  try {
    const Current current(*this);
    call();
  } catch (const Error&) {
    return;
  }
}

thread_local const CudaDriver* CudaDriver::seen_ = nullptr;

// Runs a call that names an event or a stream of our context: it has the same effect whatever context is current, or
// reports that it has not. In torch's threads the right one is current, so not every call has to check.
template <typename Call>
cuda::Result CudaDriver::run_on_own(Call call) const {
  if (seen_ == this) {
    const cuda::Result result = call();
    if (result != cuda::kInvalidContext && result != cuda::kInvalidHandle) return result;
  }
  const Current current(*this);
  seen_ = current.is_pushed() ? nullptr : this;
  return call();
}

// The default stream has the same handle in all contexts.
template <typename Call>
cuda::Result CudaDriver::run_on(StreamHandle stream, Call call) const {
  if (stream != 0) return run_on_own(call);
  const Current current(*this);
  return call();
}

std::string CudaDriver::pci_address() const {
  char address[32] = {};
  return call_.device_get_pci_bus_id(address, sizeof address, device_) == cuda::kSuccess ? address : "";
}

// With one queue for all streams (as Megatron requires) a stream that waits for the host would block the others.
bool CudaDriver::has_own_queues() const {
  int can_wait = 0;
  check(call_.device_get_attribute(&can_wait, cuda::kCanWaitForValues, device_), "cuDeviceGetAttribute");
  const char* num_queues = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  return can_wait != 0 && (num_queues == nullptr || std::string(num_queues) != "1");
}

// Peer access is never disabled again: torch may have found it enabled, and relies on it from then on. A GPU that
// already has as many peers as it may (8 without NVSwitch) copies to this one through the host.
std::shared_ptr<Driver> CudaDriver::open_peer(int number) {
  auto peer = std::make_shared<CudaDriver>(library_, number, registration_bytes_);
  if (peer->device_ == device_) {
    throw OptionError("GPU " + std::to_string(number) + " is the one that computes, not another");
  }
  int can_access = 0;
  check(call_.device_can_access_peer(&can_access, device_, peer->device_), "cuDeviceCanAccessPeer");
  if (can_access == 0) return peer;
  const Current current(*this);
  const cuda::Result result = call_.context_enable_peer_access(peer->context_, 0);
  const bool is_usable = result == cuda::kPeerAccessAlreadyEnabled || result == cuda::kTooManyPeers;
  if (!is_usable) check(result, "cuCtxEnablePeerAccess");
  return peer;
}

void* CudaDriver::allocate_host(uint64_t nbytes, uint64_t max_bytes) {
  auto range = std::make_unique<HostRange>(max_bytes, node_);
  extend(*range, nbytes, registration_bytes_);
  return keep(std::move(range));
}

void* CudaDriver::allocate_addressable(uint64_t nbytes) {
  auto range = std::make_unique<HostRange>(nbytes, node_);
  extend(*range, nbytes, std::numeric_limits<uint64_t>::max());
  return keep(std::move(range));
}

void* CudaDriver::keep(std::unique_ptr<HostRange> range) {
  void* const begin = range->data();
  const std::lock_guard lock(host_mutex_);
  host_ranges_.emplace(begin, std::move(range));
  return begin;
}

void CudaDriver::grow_host(void* pointer, uint64_t nbytes) {
  HostRange* range = nullptr;
  {
    const std::lock_guard lock(host_mutex_);
    range = host_ranges_.at(pointer).get();
  }
  extend(*range, nbytes, registration_bytes_);
}

uint64_t CudaDriver::device_address(const void* host) {
  const Current current(*this);
  return find_device_pointer(host);
}

cuda::DevicePointer CudaDriver::find_device_pointer(const void* host) const {
  cuda::DevicePointer pointer = 0;
  check(call_.mem_host_get_device_pointer(&pointer, const_cast<void*>(host), 0), "cuMemHostGetDevicePointer_v2");
  return pointer;
}

void CudaDriver::free_host(void* pointer) noexcept {
  std::unique_ptr<HostRange> range;
  {
    const std::lock_guard lock(host_mutex_);
    const auto found = host_ranges_.find(pointer);
    range = std::move(found->second);
    host_ranges_.erase(found);
  }
  unpin(range->data(), range->data() + range->nbytes());
}

// Mapped, since the device waits for words in the memory, and kernels access tensors there.
void CudaDriver::extend(HostRange& range, uint64_t nbytes, uint64_t registration_bytes) {
  constexpr unsigned kFlags = cuda::kMemHostRegisterPortable | cuda::kMemHostRegisterDeviceMap;
  const Current current(*this);
  const uint64_t kept_bytes = range.nbytes();
  range.extend(nbytes);
  std::byte *const begin = range.data() + kept_bytes, *const end = range.data() + range.nbytes();
  try {
    uint64_t registered_bytes = 0;
    for (std::byte* registration = begin; registration < end; registration += registered_bytes) {
      registered_bytes = std::min(registration_bytes, static_cast<uint64_t>(end - registration));
      check(call_.mem_host_register(registration, registered_bytes, kFlags), "cuMemHostRegister_v2", registered_bytes);
      const std::lock_guard lock(host_mutex_);
      registrations_.insert(registration);
    }
  } catch (const Error&) {
    unpin(begin, end);
    range.shrink(kept_bytes);
    throw;
  }
}

void CudaDriver::unpin(std::byte* begin, std::byte* end) noexcept {
  std::vector<std::byte*> registrations;
  {
    const std::lock_guard lock(host_mutex_);
    const auto first = registrations_.lower_bound(begin), last = registrations_.lower_bound(end);
    registrations.assign(first, last);
    registrations_.erase(first, last);
  }
  for (std::byte* registration : registrations) {
    call_ignoring_errors([&] { call_.mem_host_unregister(registration); });
  }
}

// The most bytes that one copy may have: the driver refuses one that begins in one registration and ends in another.
uint64_t CudaDriver::bytes_in_registration(const std::byte* host, uint64_t nbytes) {
  const std::lock_guard lock(host_mutex_);
  const auto next = registrations_.upper_bound(const_cast<std::byte*>(host));
  return next == registrations_.end() ? nbytes : std::min(nbytes, static_cast<uint64_t>(*next - host));
}

uint64_t CudaDriver::allocate_device(uint64_t nbytes) {
  const Current current(*this);
  cuda::DevicePointer pointer = 0;
  check(call_.mem_alloc(&pointer, nbytes), "cuMemAlloc_v2", nbytes);
  return pointer;
}

void CudaDriver::free_device(uint64_t device) noexcept {
  call_ignoring_errors([&] { call_.mem_free(device); });
}

DeviceBytes CudaDriver::device_bytes() {
  const Current current(*this);
  size_t free_bytes = 0, total_bytes = 0;
  check(call_.mem_get_info(&free_bytes, &total_bytes), "cuMemGetInfo_v2");
  return {free_bytes, total_bytes};
}

StreamHandle CudaDriver::create_stream() {
  const Current current(*this);
  cuda::Stream stream = nullptr;
  check(call_.stream_create(&stream, cuda::kStreamNonBlocking), "cuStreamCreate");
  return reinterpret_cast<StreamHandle>(stream);
}

void CudaDriver::destroy_stream(StreamHandle stream) noexcept {
  call_ignoring_errors([&] { call_.stream_destroy(stream_of(stream)); });
}

// Cached for the default stream, on which most models compute: it is always the same.
StreamId CudaDriver::stream_id(StreamHandle stream) {
  if (stream == 0) return default_stream_id_;
  unsigned long long id = 0;
  check(run_on_own([&] { return call_.stream_get_id(stream_of(stream), &id); }), "cuStreamGetId");
  return id;
}

void CudaDriver::synchronize_stream(StreamHandle stream) {
  const Current current(*this);
  check(call_.stream_synchronize(stream_of(stream)), "cuStreamSynchronize");
}

void CudaDriver::synchronize_device() noexcept {
  call_ignoring_errors([&] { call_.context_synchronize(); });
}

EventHandle CudaDriver::create_event() {
  {
    const std::lock_guard lock(idle_mutex_);
    if (!idle_events_.empty()) {
      auto event = std::move(idle_events_.back());
      idle_events_.pop_back();
      return reinterpret_cast<EventHandle>(event.release());
    }
  }
  const Current current(*this);
  auto event = std::make_unique<TimedEvent>();
  check(call_.event_create(&event->event, cuda::kEventBlockingSync), "cuEventCreate");
  return reinterpret_cast<EventHandle>(event.release());
}

uint64_t CudaDriver::num_idle_events() {
  const std::lock_guard lock(idle_mutex_);
  return idle_events_.size();
}

// Makes no driver calls, which threads that open gates must not: the base is released when the event is reused.
void CudaDriver::destroy_event(EventHandle event) noexcept {
  std::unique_ptr<TimedEvent> owned(&timed(event));
  owned->is_recorded = false;
  const std::lock_guard lock(idle_mutex_);
  idle_events_.push_back(std::move(owned));
}

// To CUDA an event that was never recorded has happened; a reused one would have happened long ago. Waiting for either
// would be an error.
CudaDriver::TimedEvent& CudaDriver::recorded(EventHandle event, const char* call) {
  if (timed(event).is_recorded) return timed(event);
  throw DriverError(std::string(call) + " of an event that was not recorded");
}

void CudaDriver::set_recorded(EventHandle event) {
  timed(event).base = current_base();
  timed(event).is_recorded = true;
}

void CudaDriver::record_event(EventHandle event, StreamHandle stream) {
  set_recorded(event);
  // `run_on_own` even for the default stream: an event of one context cannot be recorded on a stream of another.
  check(run_on_own([&] { return call_.event_record(timed(event).event, stream_of(stream)); }), "cuEventRecord");
}

void CudaDriver::wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) {
  const cuda::Event own = recorded(event, "cuStreamWaitEvent").event;
  const auto wait = [&] { return call_.stream_wait_event(stream_of(stream), own, 0); };
  if (arrival == 0) return check(run_on(stream, wait), "cuStreamWaitEvent");
  set_recorded(arrival);
  const char* called = "cuEventRecord";
  const auto record_and_wait = [&] {
    const cuda::Result result = call_.event_record(timed(arrival).event, stream_of(stream));
    if (result != cuda::kSuccess) return result;
    called = "cuStreamWaitEvent";  // the record has succeeded, so a default stream is that of our context
    return wait();
  };
  const cuda::Result result = run_on_own(record_and_wait);
  check(result, called);
}

bool CudaDriver::query_event(EventHandle event) {
  const cuda::Event own = recorded(event, "cuEventQuery").event;
  const Uncaptured uncaptured(*this);
  const cuda::Result result = run_on_own([&] { return call_.event_query(own); });
  if (result == cuda::kNotReady) return false;
  check(result, "cuEventQuery");
  return true;
}

void CudaDriver::synchronize_event(EventHandle event) {
  const cuda::Event own = recorded(event, "cuEventSynchronize").event;
  const Uncaptured uncaptured(*this);
  check(run_on_own([&] { return call_.event_synchronize(own); }), "cuEventSynchronize");
}

double CudaDriver::event_seconds(EventHandle event) {
  const TimedEvent& timed_event = recorded(event, "cuEventElapsedTime");
  const Uncaptured uncaptured(*this);
  float milliseconds = 0;
  check(run_on_own([&] { return call_.event_elapsed_time(&milliseconds, timed_event.base->event, timed_event.event); }),
        "cuEventElapsedTime");
  return timed_event.base->seconds + static_cast<double>(milliseconds) * 1e-3;
}

void CudaDriver::wait_value(StreamHandle stream, const uint64_t* value, uint64_t least) {
  const Current current(*this);
  const cuda::DevicePointer pointer = find_device_pointer(value);
  check(call_.stream_wait_value(stream_of(stream), pointer, least, cuda::kWaitUntilAtLeast), "cuStreamWaitValue64_v2");
}

// These callbacks are called even when the device has failed; host functions, which are newer, are not.
void CudaDriver::call_back(StreamHandle stream, std::function<void(int code)> call) {
  using Call = std::function<void(int code)>;
  auto owned = std::make_unique<Call>(std::move(call));
  const auto run = [](cuda::Stream, cuda::Result code, void* data) {
    (*std::unique_ptr<Call>(static_cast<Call*>(data)))(code);
  };
  check(run_on(stream, [&] { return call_.stream_add_callback(stream_of(stream), run, owned.get(), 0); }),
        "cuStreamAddCallback");
  static_cast<void>(owned.release());  // the callback may have deleted it already
}

// Elapsed times are float milliseconds: at 10 s they are exact to a microsecond, at an hour to half a millisecond.
std::shared_ptr<CudaDriver::Base> CudaDriver::current_base() {
  constexpr double kOldestSeconds = 10;
  const std::lock_guard lock(base_mutex_);
  const double now = monotonic_seconds();
  if (base_ && now < next_base_seconds_) return base_;
  next_base_seconds_ = now + kOldestSeconds;
  base_ = measure_base();
  return base_;
}

// The event happens between two readings of the clock; of several tries the one where they are closest is used. If the
// clock's stream shares a hardware queue, it may wait there for the disk: then the previous base is better.
std::shared_ptr<CudaDriver::Base> CudaDriver::measure_base() {
  constexpr int kNumTries = 4;
  constexpr double kMaxSeconds = 1e-3;
  const Current current(*this);
  std::shared_ptr<Base> best;
  double best_width = std::numeric_limits<double>::infinity();
  for (int i = 0; i < kNumTries; ++i) {
    auto base = std::make_shared<Base>();
    base->driver = this;
    check(call_.event_create(&base->event, 0), "cuEventCreate");
    const double before = monotonic_seconds();
    check(call_.event_record(base->event, clock_stream_), "cuEventRecord");
    check(call_.event_synchronize(base->event), "cuEventSynchronize");
    const double width = monotonic_seconds() - before;
    if (base_ && width > kMaxSeconds) return base_;
    base->seconds = before + width / 2;
    if (width < best_width) best_width = width, best = base;
  }
  return best;
}

void CudaDriver::copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) {
  auto* const target = static_cast<std::byte*>(host);
  for (uint64_t begin = 0, part; begin < nbytes; begin += part) {
    part = bytes_in_registration(target + begin, nbytes - begin);
    check(run_on(stream,
                 [&] { return call_.memcpy_device_to_host(target + begin, device + begin, part, stream_of(stream)); }),
          "cuMemcpyDtoHAsync_v2", part);
  }
}

void CudaDriver::copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) {
  const auto* const source = static_cast<const std::byte*>(host);
  for (uint64_t begin = 0, part; begin < nbytes; begin += part) {
    part = bytes_in_registration(source + begin, nbytes - begin);
    check(run_on(stream,
                 [&] { return call_.memcpy_host_to_device(device + begin, source + begin, part, stream_of(stream)); }),
          "cuMemcpyHtoDAsync_v2", part);
  }
}

// Between two devices by the call that names both: without peer access, the other one accepts only memory of
// cuMemAlloc, which torch's expandable segments are not.
void CudaDriver::copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) {
  if (to.device == from.device) {
    const auto copy = [&] {
      return call_.memcpy_device_to_device(to.address, from.address, nbytes, stream_of(stream));
    };
    return check(run_on(stream, copy), "cuMemcpyDtoDAsync_v2", nbytes);
  }
  const auto copy = [&] {
    return call_.memcpy_peer(to.address, context_of(to.device), from.address, context_of(from.device), nbytes,
                             stream_of(stream));
  };
  check(run_on(stream, copy), "cuMemcpyPeerAsync", nbytes);
}

void CudaDriver::fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) {
  const Current current(*this);
  check(call_.memset_device(device, std::to_integer<unsigned char>(value), nbytes, stream_of(stream)),
        "cuMemsetD8Async", nbytes);
}

}  // namespace

std::shared_ptr<Driver> open_cuda_driver(const std::string& library, int device, uint64_t registration_bytes) {
  return std::make_shared<CudaDriver>(library, device, registration_bytes);
}

}  // namespace lmswap
