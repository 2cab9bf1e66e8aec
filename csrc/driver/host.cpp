// The driver over ordinary memory: a stream is a thread that runs what was queued on it, in order. Stream 0 is the
// calling thread, whose earlier work is always done, and which waits by blocking.
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "lmswap/clock.h"
#include "lmswap/driver/driver.h"
#include "lmswap/error.h"
#include "lmswap/limits.h"
#include "lmswap/tiers/arena.h"

namespace lmswap {
namespace {

class HostStream {
 public:
  HostStream() : thread_(start_thread<DriverError>("a thread that stands for a stream", [this] { run(); })) {}

  ~HostStream() {
    {
      const std::lock_guard lock(mutex_);
      is_closing_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }

  void submit(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    queue_.push_back(std::move(work));
    ++num_submitted_;
    changed_.notify_all();
  }

  StreamId id() const { return id_; }

  void synchronize() {
    std::unique_lock lock(mutex_);
    const uint64_t last = num_submitted_;
    changed_.wait(lock, [&] { return num_finished_ >= last; });
  }

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

  inline static std::atomic<StreamId> num_made_ = 0;

  const StreamId id_ = ++num_made_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  uint64_t num_submitted_ = 0, num_finished_ = 0;
  bool is_closing_ = false;
  std::thread thread_;
};

// Counts its recordings: a wait is for the last one before the wait was queued.
class HostEvent {
 public:
  uint64_t begin_recording() {
    const std::lock_guard lock(mutex_);
    return ++num_recorded_;
  }

  void finish_recording(uint64_t recording) {
    const std::lock_guard lock(mutex_);
    if (recording > num_happened_) num_happened_ = recording, seconds_ = monotonic_seconds();
    changed_.notify_all();
  }

  uint64_t last_recording() const {
    const std::lock_guard lock(mutex_);
    return num_recorded_;
  }

  void wait(uint64_t recording) const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return num_happened_ >= recording; });
  }

  bool has_happened() const {
    const std::lock_guard lock(mutex_);
    return num_happened_ >= num_recorded_;
  }

  double seconds() const {
    const std::lock_guard lock(mutex_);
    return seconds_;
  }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  uint64_t num_recorded_ = 0, num_happened_ = 0;
  double seconds_ = 0;
};

class HostDriver final : public Driver {
 public:
  explicit HostDriver(std::shared_ptr<Faults> faults) : faults_(std::move(faults)) {}

  bool device_is_host() const override { return true; }

  DeviceHandle device() const override { return 0; }

  int number() const override { return 0; }

  std::shared_ptr<Driver> open_peer(int) override { return std::make_shared<HostDriver>(faults_); }

  void* allocate_host(uint64_t nbytes, uint64_t) override { return allocate("allocate_host", nbytes); }

  void free_host(void* pointer) noexcept override { std::free(pointer); }

  uint64_t allocate_device(uint64_t nbytes) override {
    return reinterpret_cast<uint64_t>(allocate("allocate_device", nbytes));
  }

  void free_device(uint64_t device) noexcept override { std::free(reinterpret_cast<void*>(device)); }

  DeviceBytes device_bytes() override {
    const auto page_bytes = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    return {page_bytes * static_cast<uint64_t>(sysconf(_SC_AVPHYS_PAGES)),
            page_bytes * static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES))};
  }

  StreamHandle create_stream() override { return reinterpret_cast<StreamHandle>(new HostStream()); }

  void destroy_stream(StreamHandle stream) noexcept override { delete &stream_of(stream); }

  void synchronize_stream(StreamHandle stream) override {
    if (stream != 0) stream_of(stream).synchronize();
  }

  StreamId stream_id(StreamHandle stream) override { return stream == 0 ? 0 : stream_of(stream).id(); }

  EventHandle create_event() override {
    return reinterpret_cast<EventHandle>(new std::shared_ptr<HostEvent>(std::make_shared<HostEvent>()));
  }

  void destroy_event(EventHandle event) noexcept override {
    delete reinterpret_cast<std::shared_ptr<HostEvent>*>(event);
  }

  void record_event(EventHandle event, StreamHandle stream) override {
    const std::shared_ptr<HostEvent> recorded = event_of(event);
    const uint64_t recording = recorded->begin_recording();
    submit(stream, [recorded, recording] { recorded->finish_recording(recording); });
  }

  void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) override {
    if (arrival != 0) record_event(arrival, stream);
    const std::shared_ptr<HostEvent> awaited = event_of(event);
    const uint64_t recording = awaited->last_recording();
    submit(stream, [awaited, recording] { awaited->wait(recording); });
  }

  bool query_event(EventHandle event) override { return event_of(event)->has_happened(); }

  void synchronize_event(EventHandle event) override { event_of(event)->wait(event_of(event)->last_recording()); }

  double event_seconds(EventHandle event) override { return event_of(event)->seconds(); }

  void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) override {
    copy("copy_out", host, reinterpret_cast<void*>(device), nbytes, stream);
  }

  void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) override {
    // Not const, since Fault::flips modifies the source.
    copy("copy_in", reinterpret_cast<void*>(device), const_cast<void*>(host), nbytes, stream);
  }

  void copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) override {
    copy("copy_between", reinterpret_cast<void*>(to.address), reinterpret_cast<void*>(from.address), nbytes, stream);
  }

  void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) override {
    submit(stream, [=] { std::memset(reinterpret_cast<void*>(device), std::to_integer<int>(value), nbytes); });
  }

 private:
  static HostStream& stream_of(StreamHandle stream) { return *reinterpret_cast<HostStream*>(stream); }

  static const std::shared_ptr<HostEvent>& event_of(EventHandle event) {
    return *reinterpret_cast<std::shared_ptr<HostEvent>*>(event);
  }

  static void submit(StreamHandle stream, std::function<void()> work) {
    if (stream == 0) {
      work();
    } else {
      stream_of(stream).submit(std::move(work));
    }
  }

  void* allocate(const char* call, uint64_t nbytes) {
    void* pointer = nullptr;
    if (!faults_->next_after_delay(call).fail) pointer = std::aligned_alloc(kPageBytes, round_to_pages(nbytes));
    if (pointer == nullptr) throw DriverError("aligned_alloc of " + format_bytes(nbytes) + " failed");
    return pointer;
  }

  void copy(const char* call, void* to, void* from, uint64_t nbytes, StreamHandle stream) {
    const Fault fault = faults_->next(call);
    if (fault.fail) {
      throw DriverError(std::string(call) + " of " + format_bytes(nbytes) + " failed: a fault on demand");
    }
    submit(stream, [=] {
      if (fault.late_seconds > 0) std::this_thread::sleep_for(std::chrono::duration<double>(fault.late_seconds));
      if (fault.flips) static_cast<unsigned char*>(from)[nbytes - 1] ^= 0x80;  // the sign of the last number
      std::memcpy(to, from, nbytes);
    });
  }

  std::shared_ptr<Faults> faults_;
};

}  // namespace

std::shared_ptr<Driver> open_host_driver(std::shared_ptr<Faults> faults) {
  return std::make_shared<HostDriver>(std::move(faults));
}

}  // namespace lmswap
