// What the engine needs of a device: the table of functions that every driver fills in. No CUDA header, no torch.
//
// Rules, kept by the conformance suite in tests/cpp:
// - Work queued on a stream runs in order; streams run beside each other. `record` marks the end of what the stream
//   holds now; an event is recorded before anyone waits for it (to the device an unrecorded event is a finished one).
// - Any thread may call anything. Only `synchronize*` and, on the host driver, waits of the caller's stream block.
// - Failing calls throw Error(kDriver) with the call's name, the driver's own words and the bytes concerned.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "lmswap/faults.h"

namespace lmswap {

using StreamHandle = uintptr_t;  // 0: the device's default stream; on the host driver the calling thread itself
using EventHandle = uintptr_t;

class Driver {
 public:
  virtual ~Driver() = default;

  // Whether device memory is ordinary memory, which files can be read into and written from directly.
  virtual bool device_is_host() const = 0;

  // Page-aligned host memory that the device copies to and from without staging (pinned). Where it grows it does so in
  // place, up to `most_bytes`; if that fails it is as before.
  virtual void* allocate_host(uint64_t nbytes, uint64_t most_bytes) = 0;
  virtual bool host_memory_grows() const { return false; }
  virtual void grow_host(void*, uint64_t) {}
  virtual void free_host(void* pointer) noexcept = 0;

  // Memory of the device beside that of torch's allocator.
  virtual uint64_t allocate_device(uint64_t nbytes) = 0;
  virtual void free_device(uint64_t device) noexcept = 0;

  virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;
  virtual void synchronize_stream(StreamHandle stream) = 0;

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

  virtual void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) = 0;
  virtual void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) = 0;
  virtual void copy_within(uint64_t to, uint64_t from, uint64_t nbytes, StreamHandle stream) = 0;  // the device
  virtual void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) = 0;
};

// libcuda, opened by dlopen under the name `library`; uses the primary context of `device`, which torch uses too.
std::shared_ptr<Driver> open_cuda_driver(const std::string& library, int device);

// Threads as streams over ordinary memory; `faults` may make its calls fail or late.
std::shared_ptr<Driver> open_host_driver(std::shared_ptr<Faults> faults);

}  // namespace lmswap
