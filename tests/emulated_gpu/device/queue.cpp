// In what order does queued work run, and what does the host know of it? Streams, events, launches.
#include <chrono>
#include <thread>

#include "system.h"

namespace emulated_gpu {
namespace {

void sleep(double seconds) {
  if (seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

}  // namespace

// Handles 0 and 1 are the default stream of the current device; that of the thread (2) is not emulated.
std::shared_ptr<Stream> System::find_stream(void* handle) {
  if (reinterpret_cast<uintptr_t>(handle) <= 1) return devices_[std::max(current_device(), 0)]->default_stream;
  const auto found = streams_.find(handle);
  return found == streams_.end() ? nullptr : found->second;
}

std::shared_ptr<Event> System::find_event(void* handle) {
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second;
}

int System::create_stream(int device, void** handle) {
  const std::lock_guard lock(mutex_);
  auto made = std::make_shared<Stream>(num_streams_++, device);
  *handle = made.get();
  streams_[*handle] = std::move(made);
  return kSuccess;
}

int System::destroy_stream(void* handle) {  // what is queued still runs
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(handle);
  if (found == streams_.end()) return refuse("destroying a stream", "it was destroyed or never made");
  found->second->close();
  streams_.erase(found);
  return kSuccess;
}

int System::query_stream(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto stream = find_stream(handle);
  if (!stream) return refuse("asking for a stream", "it was destroyed or never made");
  if (!stream->is_idle()) return kNotReady;
  host_.join(stream->clock);
  return faults.broken();
}

int System::wait_stream(void* handle) {
  std::shared_ptr<Stream> stream;
  VectorClock clock;
  {
    const std::lock_guard lock(mutex_);
    stream = find_stream(handle);
    if (!stream) return refuse("waiting for a stream", "it was destroyed or never made");
    clock = stream->clock;
  }
  stream->wait();
  know(clock);
  return faults.broken();
}

int System::wait_device(int device) {
  std::vector<std::shared_ptr<Stream>> all{devices_[device]->default_stream};
  VectorClock clock;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& [handle, stream] : streams_) {
      if (stream->device == device) all.push_back(stream);
    }
    for (const auto& stream : all) clock.join(stream->clock);
  }
  for (const auto& stream : all) stream->wait();
  know(clock);
  return faults.broken();
}

int System::wait_all() {
  for (int device = 0; device < num_devices(); ++device) wait_device(device);
  return faults.broken();
}

int System::create_event(void** handle, bool has_time) {
  auto made = std::make_shared<Event>(has_time, std::max(current_device(), 0));
  const std::lock_guard lock(mutex_);
  *handle = made.get();
  events_[*handle] = std::move(made);
  return kSuccess;
}

int System::destroy_event(void* handle) {
  const std::lock_guard lock(mutex_);
  return events_.erase(handle) > 0 ? kSuccess : refuse("destroying an event", "it was destroyed or never made");
}

int System::record(void* event_handle, void* stream_handle) {
  std::shared_ptr<Event> event;
  uint64_t recording;
  {
    const std::lock_guard lock(mutex_);
    event = find_event(event_handle);
    const auto stream = find_stream(stream_handle);
    if (!event || !stream) return refuse("recording an event", "it or its stream was destroyed or never made");
    if (event->device != stream->device) return kInvalidHandle;  // as documented: whoever counts on it does no wrong
    recording = ++event->num_recorded;
    stream->clock.join(host_);
    event->clock = stream->clock;
  }
  return mark(stream_handle, [event, recording] { event->happen(recording); });
}

int System::wait(void* stream_handle, void* event_handle) {
  std::shared_ptr<Event> event;
  uint64_t recording;
  {
    const std::lock_guard lock(mutex_);
    event = find_event(event_handle);
    const auto stream = find_stream(stream_handle);
    if (!event || !stream) return refuse("a stream's wait", "it or its event was destroyed or never made");
    recording = event->num_recorded;
    if (recording == 0) return kSuccess;
    stream->clock.join(event->clock);
  }
  return mark(stream_handle, [event, recording] { event->wait(recording); });
}

int System::query_event(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto event = find_event(handle);
  if (!event) return refuse("asking for an event", "it was destroyed or never made");
  if (!event->has_happened(event->num_recorded)) return kNotReady;
  host_.join(event->clock);
  return faults.broken();
}

int System::wait_event(void* handle) {
  std::shared_ptr<Event> event;
  VectorClock clock;
  uint64_t recording;
  {
    const std::lock_guard lock(mutex_);
    event = find_event(handle);
    if (!event) return refuse("waiting for an event", "it was destroyed or never made");
    clock = event->clock;
    recording = event->num_recorded;
  }
  event->wait(recording);
  know(clock);
  return faults.broken();
}

int System::elapsed(float* milliseconds, void* from, void* to) {
  std::array<double, 2> seconds;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < 2; ++i) {
    const auto event = find_event(i == 0 ? from : to);
    if (!event || event->num_recorded == 0) return refuse("the time between events", "one was never recorded");
    if (!event->has_time) return refuse("the time between events", "one was made without timing");
    if (!event->has_happened(event->num_recorded)) return kNotReady;
    seconds[i] = event->seconds();
  }
  *milliseconds = static_cast<float>((seconds[1] - seconds[0]) * 1e3);
  return kSuccess;
}

void System::note(const Stream& stream, const Operation& operation, std::span<const Use> uses) {
  for (const Use& use : uses) {
    if (const auto violation = order_.note(operation, stream.clock, use)) report(*violation, kSuccess);
  }
}

int System::launch(void* handle, const char* name, std::span<const Use> uses, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  if (const int code = faults.broken(); code != kSuccess) return code;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(name, "its stream was destroyed or never made");
  for (const Use& use : uses) {
    if (is_allocated(use)) continue;
    faults.break_context(kIllegalAddress);
    return report(std::string(name) + " uses device memory that is not allocated", kIllegalAddress);
  }
  stream->clock.join(host_);
  note(*stream, {name, stream->number, stream->clock.advance(stream->number)}, uses);
  stream->submit([work = std::move(work), delay_seconds = draw_jitter()] {
    sleep(delay_seconds);
    work();
  });
  return kSuccess;
}

int System::mark(void* handle, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse("queueing", "the stream was destroyed or never made");
  stream->submit(std::move(work));
  return kSuccess;
}

}  // namespace emulated_gpu
