#include "system.h"

#include <pthread.h>

#include <array>
#include <cstdlib>

namespace emulated_gpu {
namespace {

std::atomic<int> process_state{kSuccess};  // of a forked child, and of a process that is ending

// Of a thread, the current one last. Needs no destructor: objects of torch still call when the thread's have ended.
struct CurrentDevices {
  std::array<int, 64> devices;
  size_t count;
};
thread_local CurrentDevices current_devices{};

}  // namespace

System& System::instance() {
  static auto* const kSystem = new System();  // never destroyed: streams' threads use it to the end
  return *kSystem;
}

System::System() {
  const Settings settings = read_settings();
  for (int index = 0; index < settings.num_devices; ++index) {
    devices_.push_back(std::make_unique<Device>(index, num_streams_++, settings));
  }
  link_ = settings.link;
  compute_ = settings.compute;
  peers_ = settings.peers;
  has_host_addresses = settings.has_host_addresses;
  jitter_seconds_ = settings.jitter_seconds;
  random_.seed(settings.seed);
  pthread_atfork(nullptr, nullptr, [] { process_state = kNotInitialized; });
  atexit([] {
    if (process_state == kNotInitialized) return;  // the threads of the parent are not here
    for (int device = 0; device < instance().num_devices(); ++device) instance().wait_device(device);
    process_state = kDeinitialized;
  });
}

int System::enter(const char* symbol) {
  calls.add(symbol);
  if (is_calling_back) report(std::string(symbol) + " is called while CUDA calls back", kSuccess);
  const int state = process_state;
  return state != kSuccess ? state : faults.take(symbol);
}

int System::report(const std::string& violation, int code) {
  violations.add(violation);
  return code;
}

void System::configure(const Link& link, double jitter_seconds) {
  const std::lock_guard lock(mutex_);
  link_ = link;
  jitter_seconds_ = jitter_seconds;
}

void System::configure(const Compute& compute) {
  const std::lock_guard lock(mutex_);
  compute_ = compute;
}

void System::configure(const Peers& peers) {
  const std::lock_guard lock(mutex_);
  peers_ = peers;
  if (!peers.have_access) reached_.clear();
}

Link System::link() {
  const std::lock_guard lock(mutex_);
  return link_;
}

void System::configure(const Queues& queues) {
  const std::lock_guard lock(mutex_);
  queues_ = queues;
}

void System::mend() {
  const std::lock_guard lock(mutex_);
  faults.mend();
  pinned_.forget_unmapped();
  mapped_.forget_unmapped();
  elsewhere_.forget_unmapped();
}

void System::tell(const VectorClock& clock) {
  const std::lock_guard lock(told_mutex_);
  told_.join(clock);
}

void System::hear() {
  const std::lock_guard lock(told_mutex_);
  host_.join(told_);
}

void System::know(const VectorClock& clock) {
  const std::lock_guard lock(mutex_);
  host_.join(clock);
}

Held System::held() {
  const std::lock_guard lock(mutex_);
  Held all{.streams = streams_.size(), .events = events_.size(), .pinned_bytes = pinned_.nbytes()};
  for (const auto& device : devices_) {
    all.contexts += device->num_retained;
    all.device_bytes += device->memory.allocated_bytes();
  }
  return all;
}

void System::retain_context(int device) {
  const std::lock_guard lock(mutex_);
  ++devices_[device]->num_retained;
}

int System::release_context(int device) {
  const std::lock_guard lock(mutex_);
  size_t& num_retained = devices_[device]->num_retained;
  if (num_retained == 0) return report("a context is released more often than it was retained", kInvalidContext);
  if (--num_retained == 0 && !devices_[device]->is_used_by_runtime) {
    std::erase_if(reached_, [=](const auto& pair) { return pair.first == device || pair.second == device; });
  }
  return kSuccess;
}

void System::use_by_runtime(int device) {
  set_current_device(device);
  is_initialized = true;
  const std::lock_guard lock(mutex_);
  devices_[device]->is_used_by_runtime = true;
}

bool System::has_context(int device) {
  const std::lock_guard lock(mutex_);
  return device >= 0 && (devices_[device]->num_retained > 0 || devices_[device]->is_used_by_runtime);
}

bool System::can_access_peer(int device, int peer) {
  const std::lock_guard lock(mutex_);
  return device != peer && peers_.have_access;
}

int System::enable_peer_access(int device, int peer) {
  if (!can_access_peer(device, peer)) return kPeerAccessUnsupported;
  const std::lock_guard lock(mutex_);
  return reached_.emplace(device, peer).second ? kSuccess : kPeerAccessAlreadyEnabled;
}

int current_device() {
  const auto& [devices, count] = current_devices;
  return count == 0 ? -1 : devices.at(count - 1);
}

void set_current_device(int device) {
  int replaced = 0;
  pop_current_device(&replaced);
  push_current_device(device);
}

void push_current_device(int device) {
  auto& [devices, count] = current_devices;
  devices.at(count) = device;
  ++count;
}

bool pop_current_device(int* device) {
  auto& [devices, count] = current_devices;
  if (count == 0) return false;
  *device = devices.at(--count);
  return true;
}

}  // namespace emulated_gpu
