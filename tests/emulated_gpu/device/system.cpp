#include "system.h"

#include <pthread.h>

#include <cstdlib>

namespace emulated_gpu {
namespace {

std::atomic<int> process_state{kSuccess};  // of a forked child, and of a process that is ending

thread_local std::vector<int> current_devices;

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
  jitter_seconds_ = settings.jitter_seconds;
  random_.seed(settings.seed);
  pthread_atfork(nullptr, nullptr, [] { process_state = kNotInitialized; });
  atexit([] {
    if (process_state == kNotInitialized) return;  // the threads of the parent are not here
    instance().wait_all();
    process_state = kDeinitialized;
  });
}

int System::enter(const char* symbol) {
  calls.add(symbol);
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

void System::know(const VectorClock& clock) {
  const std::lock_guard lock(mutex_);
  host_.join(clock);
}

double System::draw_jitter() {
  return jitter_seconds_ > 0 ? std::uniform_real_distribution<double>(0, jitter_seconds_)(random_) : 0;
}

int current_device() { return current_devices.empty() ? -1 : current_devices.back(); }

void set_current_device(int device) {
  if (current_devices.empty()) current_devices.push_back(device);
  current_devices.back() = device;
}

void push_current_device(int device) { current_devices.push_back(device); }

bool pop_current_device(int* device) {
  if (current_devices.empty()) return false;
  *device = current_devices.back();
  current_devices.pop_back();
  return true;
}

}  // namespace emulated_gpu
