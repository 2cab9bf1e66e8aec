// The order of queued work, and what the host knows of it: streams, events, launches.
#include <algorithm>
#include <ctime>

#include "system.h"

namespace emulated_gpu {
namespace {

// Of this thread: what it waits for while a core has others to serve is not the device's.
double core_seconds() {
  timespec used{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) + 1e-9 * static_cast<double>(used.tv_nsec);
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

int System::device_of_stream(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto stream = find_stream(handle);
  return stream ? stream->device : -1;
}

int System::device_of_event(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto event = find_event(handle);
  return event ? event->device : -1;
}

// Everything that is queued may run late. Under the lock, also while there is no room: CUDA, too, holds up other
// threads' calls then.
void System::submit(Stream& stream, Work work) {
  if (jitter_seconds_ > 0) {
    const double late = std::uniform_real_distribution<double>(0, jitter_seconds_)(random_);
    work = [work = std::move(work), late](double begin) {
      sleep_until(begin + late);
      return work(begin + late);
    };
  }
  if (queues_.is_one) {
    work = [this, work = std::move(work), turn = turns_.take()](double begin) {
      const double end = work(std::max(begin, turns_.wait(turn)));
      turns_.end(end);
      return end;
    };
  }
  stream.submit(std::move(work));
  if (queues_.max_queued > 0) stream.wait_for_room(queues_.max_queued);
}

int System::create_stream(int device, void** handle) {
  const std::lock_guard lock(mutex_);
  *handle = new_handle();
  streams_[*handle] = std::make_shared<Stream>(num_streams_++, device);
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

// Waits for all that is queued on a device now; what is over by that.
VectorClock System::run_dry(int device) {
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
  return clock;
}

int System::wait_device(int device) {
  know(run_dry(device));
  return faults.broken();
}

int System::create_event(void** handle, bool has_time) {
  const std::lock_guard lock(mutex_);
  *handle = new_handle();
  events_[*handle] = std::make_shared<Event>(has_time, std::max(current_device(), 0));
  return kSuccess;
}

int System::destroy_event(void* handle) {
  const std::lock_guard lock(mutex_);
  return events_.erase(handle) > 0 ? kSuccess : refuse("destroying an event", "it was destroyed or never made");
}

int System::record(void* event_handle, void* stream_handle) {
  const std::lock_guard lock(mutex_);
  const auto event = find_event(event_handle);
  const auto stream = find_stream(stream_handle);
  if (!event || !stream) return refuse("recording an event", "it or its stream was destroyed or never made");
  if (event->device != stream->device) return kInvalidHandle;  // as documented: programs may rely on it
  hear();
  stream->clock.join(host_);
  event->clock = stream->clock;
  submit(*stream, [event, recording = ++event->num_recorded](double begin) {
    event->happen(recording, begin);
    return begin;
  });
  return kSuccess;
}

int System::wait(void* stream_handle, void* event_handle) {
  const std::lock_guard lock(mutex_);
  const auto event = find_event(event_handle);
  const auto stream = find_stream(stream_handle);
  if (!event || !stream) return refuse("a stream's wait", "it or its event was destroyed or never made");
  if (event->num_recorded == 0) return refuse("a stream's wait", "the event was never recorded");
  stream->clock.join(event->clock);
  submit(*stream,
         [event, recording = event->num_recorded](double begin) { return std::max(begin, event->wait(recording)); });
  return kSuccess;
}

int System::query_event(void* handle) {
  const std::lock_guard lock(mutex_);
  const auto event = find_event(handle);
  if (!event) return refuse("asking for an event", "it was destroyed or never made");
  if (event->num_recorded == 0) return report("asking for an event: it was never recorded", kSuccess);
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
    if (event->num_recorded == 0) return report("waiting for an event: it was never recorded", kSuccess);
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
    if (!event) return refuse("the time between events", "one was destroyed or never made");
    if (event->num_recorded == 0) return refuse("the time between events", "one was never recorded");
    if (!event->has_time) return refuse("the time between events", "one was made without timing");
    if (!event->has_happened(event->num_recorded)) return kNotReady;
    seconds[i] = event->seconds();
  }
  *milliseconds = static_cast<float>((seconds[1] - seconds[0]) * 1e3);
  return kSuccess;
}

int System::wait_value(void* handle, void* word, uint64_t value) {
  const std::lock_guard lock(mutex_);
  const auto stream = find_stream(handle);
  if (!stream) return refuse("a stream's wait for a value", "the stream was destroyed or never made");
  if (reinterpret_cast<uintptr_t>(word) % sizeof value != 0 || !pinned_.contains(word, sizeof value)) {
    return report("a stream's wait for a value that is not a word of pinned memory", kInvalidValue);
  }
  submit(*stream, [this, word, value](double begin) {
    const std::atomic_ref<uint64_t> found(*static_cast<uint64_t*>(word));
    while (static_cast<int64_t>(found.load() - value) < 0 && faults.broken() == kSuccess) sleep_until(now() + 20e-6);
    return std::max(begin, now());
  });
  return kSuccess;
}

constexpr double kLongestCall = 0.5;  // seconds: long for a thread that others keep from running

int System::call_back(void* handle, std::function<void(int code)> call) {
  const std::lock_guard lock(mutex_);
  const auto stream = find_stream(handle);
  if (!stream) return refuse("a callback", "its stream was destroyed or never made");
  hear();
  stream->clock.join(host_);
  submit(*stream, [this, clock = stream->clock, call = std::move(call)](double begin) {
    tell(clock);
    const double called = now();
    is_calling_back = true;
    call(faults.broken());
    is_calling_back = false;
    // A real driver's lock is held meanwhile.
    if (now() - called > kLongestCall) report("a callback that lasts: nobody can call the driver meanwhile", kSuccess);
    return std::max(begin, now());
  });
  return kSuccess;
}

void System::note(const Stream& stream, const Operation& operation, std::span<const Use> uses) {
  for (const Use& use : uses) {
    if (const auto violation = order_.note(operation, stream.clock, use)) report(*violation, kSuccess);
  }
}

int System::launch(void* handle, const char* name, std::span<const Use> uses, const Amount& amount,
                   std::function<void()> work) {
  double seconds;
  {
    const std::lock_guard lock(mutex_);
    if (!std::ranges::all_of(uses, [&](const Use& use) { return is_addressable(use); })) {
      faults.break_context(kIllegalAddress);
      return report(std::string(name) + " uses host memory that the device cannot address", kIllegalAddress);
    }
    seconds = amount.seconds(compute_, seconds_over_link(uses));
  }
  return queue(handle, name, uses, [this, seconds, work = std::move(work)](double begin) {
    const double before = core_seconds();
    work();
    if (seconds == 0) return now();
    const double late = std::max(0.0, core_seconds() - before - seconds);
    late_seconds += late;
    const double end = begin + seconds + late;
    sleep_until(end);
    return end;
  });
}

// Reads and writes cross the link at the same time.
double System::seconds_over_link(std::span<const Use> uses) {
  double in_seconds = 0, out_seconds = 0;
  for (const Use& use : uses) {
    if (owner(reinterpret_cast<const void*>(use.begin)) >= 0) continue;
    const double rate = use.is_write ? link_.out_bytes_per_second : link_.in_bytes_per_second;
    if (rate > 0) (use.is_write ? out_seconds : in_seconds) += static_cast<double>(use.nbytes) / rate;
  }
  return std::max(in_seconds, out_seconds);
}

int System::queue(void* handle, const char* name, std::span<const Use> uses, Work work) {
  const std::lock_guard lock(mutex_);
  if (const int code = faults.broken(); code != kSuccess) return code;
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse(name, "its stream was destroyed or never made");
  for (const Use& use : uses) {
    if (is_allocated(use)) continue;
    faults.break_context(kIllegalAddress);
    return report(std::string(name) + " uses device memory that is not allocated", kIllegalAddress);
  }
  hear();
  stream->clock.join(host_);
  note(*stream, {name, stream->number, stream->clock.advance(stream->number)}, uses);
  submit(*stream, std::move(work));
  return kSuccess;
}

int System::run_on_host(void* handle, std::function<void()> work) {
  const std::lock_guard lock(mutex_);
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (!stream) return refuse("a function of the host", "its stream was destroyed or never made");
  submit(*stream, [work = std::move(work)](double begin) {
    work();
    return std::max(begin, now());
  });
  return kSuccess;
}

}  // namespace emulated_gpu
