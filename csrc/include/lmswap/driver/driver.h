// What the engine needs of a device: the table of functions that every driver fills in. No CUDA header, no torch.
//
// Rules, kept by the conformance suite in tests/cpp:
// - Work queued on a stream runs in order; streams run beside each other. `record` marks the end of what the stream
//   holds now; an event is recorded before anyone waits for it (to the device an unrecorded event is a finished one).
// - Any thread may call anything. Only `synchronize*` and, on the host driver, waits of the caller's stream block; but
//   a device whose queue is full holds up whoever gives it more, and whoever calls meanwhile. What queued work waits
//   for (`wait_value`) must therefore come about without any call of the driver.
// - Failing calls throw Error(kDriver) with the call's name, the driver's own words and the bytes concerned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lmswap/faults.h"

namespace lmswap {

using StreamHandle = uintptr_t;  // 0: the device's default stream; on the host driver the calling thread itself
using StreamId = uint64_t;       // a handle may be given out again, an id is not
using EventHandle = uintptr_t;
using DeviceHandle = uintptr_t;  // on CUDA its context; on the host driver always 0

// Memory of a device.
struct DeviceAddress {
  DeviceHandle device;
  uint64_t address;
};

struct DeviceBytes {
  uint64_t free, total;
};

class Driver {
 public:
  virtual ~Driver() = default;

  // Whether device memory is ordinary memory, which files can be read into and written from directly.
  virtual bool device_is_host() const = 0;
  virtual DeviceHandle device() const = 0;

  // The driver of another device of this kind, by its number. From then on this one copies to and from that one's
  // memory: by itself where the two reach each other, else by way of the host.
  virtual std::shared_ptr<Driver> open_peer(int number) = 0;

  // Page-aligned host memory that the device copies to and from without staging (pinned). Where it grows it does so in
  // place, up to `most_bytes`; if that fails it is as before.
  virtual void* allocate_host(uint64_t nbytes, uint64_t most_bytes) = 0;
  virtual bool host_memory_grows() const { return false; }
  virtual void grow_host(void*, uint64_t) {}
  virtual void free_host(void* pointer) noexcept = 0;

  // Memory of the device beside that of torch's allocator.
  virtual uint64_t allocate_device(uint64_t nbytes) = 0;
  virtual void free_device(uint64_t device) noexcept = 0;
  virtual DeviceBytes device_bytes() = 0;  // of which some may be free for nobody, in pieces

  virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual void synchronize_stream(StreamHandle stream) = 0;
  // Of a stream for as long as the process lives.
  virtual StreamId stream_id(StreamHandle stream) = 0;

  virtual EventHandle create_event() = 0;
  // Those that nobody holds and that are kept for the next ones.
  virtual uint64_t num_idle_events() { return 0; }
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual void record_event(EventHandle event, StreamHandle stream) = 0;
  // `stream` waits, not the caller. `arrival`, if it is not 0, is recorded first: when the stream came to the wait.
  virtual void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) = 0;
  virtual bool query_event(EventHandle event) = 0;
  virtual void synchronize_event(EventHandle event) = 0;
  virtual double event_seconds(EventHandle event) = 0;  // when a finished event happened, CLOCK_MONOTONIC

  // Whether a stream can wait for the host, and does so without holding up other streams. If so:
  virtual bool can_wait_for_host() const { return false; }
  // `stream` waits until the host has made *value, in memory of `allocate_host`, at least `least`. What the host waits
  // for before it does must have been queued before this.
  virtual void wait_value(StreamHandle, const uint64_t*, uint64_t) {}
  // Calls back on a thread of the driver's when `stream` comes to it, once, with 0; or with the driver's code when the
  // device has failed. The stream waits for the call to return, which must not call the driver.
  virtual void call_back(StreamHandle, std::function<void(int code)>) {}

  virtual void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) = 0;
  virtual void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) = 0;
  // Within this device, or between it and a peer that was opened.
  virtual void copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) = 0;
  virtual void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) = 0;
};

// libcuda, opened by dlopen under the name `library`; uses the primary context of `device`, which torch uses too.
std::shared_ptr<Driver> open_cuda_driver(const std::string& library, int device);

// Threads as streams over ordinary memory; `faults` may make its calls fail or late.
std::shared_ptr<Driver> open_host_driver(std::shared_ptr<Faults> faults);

}  // namespace lmswap
