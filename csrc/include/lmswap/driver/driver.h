/// @file
/// @brief The device interface of the engine, implemented by each driver. No CUDA header, no torch.
///
/// Rules, which the conformance suite in tests/cpp checks:
/// - Work queued on a stream runs in order; streams run concurrently. `record_event` marks the end of what the stream
///   holds now. An event must be recorded before anything waits for it: to the device, an unrecorded event is a
///   finished one.
/// - All functions are thread-safe. Only `synchronize*` and, on the host driver, waits of the caller's stream block;
/// but
///   a device whose queue is full blocks the thread that queues more, and every other caller meanwhile. What queued
///   work waits for (`wait_value`) must therefore happen without any driver call.
/// - Failing calls throw DriverError with the call's name, the driver's message and the number of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>

#include "lmswap/faults.h"

namespace lmswap {

using StreamHandle = uintptr_t;  ///< 0: the device's default stream; on the host driver, the calling thread itself
using StreamId = uint64_t;       ///< unique for the life of the process, unlike a handle, which may be reused
using EventHandle = uintptr_t;
using DeviceHandle = uintptr_t;  ///< on CUDA the context; on the host driver always 0

/// @brief An address in the memory of a device.
struct DeviceAddress {
  DeviceHandle device;
  uint64_t address;
};

/// @brief In pieces of this size the CUDA driver registers host memory: it fails on single ones of some hundred GiB.
inline constexpr uint64_t kRegistrationBytes = 1 << 30;

struct DeviceBytes {
  uint64_t free, total;
};

/// @brief Memory, streams, events and copies of one device. Thread-safe.
class Driver {
 public:
  virtual ~Driver() = default;

  /// @return whether device memory is ordinary memory, which files can be read into and written from directly
  [[nodiscard]] virtual bool device_is_host() const = 0;

  /// @return the handle of this device, for `DeviceAddress`
  [[nodiscard]] virtual DeviceHandle device() const = 0;

  /// @return the number of this device in the program, as torch counts them; on the host driver 0
  [[nodiscard]] virtual int number() const = 0;

  /// @brief Opens another device of the same kind, and enables copies between its memory and this one's: directly where
  /// the devices have peer access, else through host memory.
  /// @throws OptionError for the device of this driver
  virtual std::shared_ptr<Driver> open_peer(int number) = 0;

  /// @brief Allocates page-aligned host memory that the device copies to and from without staging (pinned memory).
  /// @param nbytes size
  /// @param max_bytes largest size that `grow_host` may request
  virtual void* allocate_host(uint64_t nbytes, uint64_t max_bytes) = 0;

  /// @return whether `grow_host` is supported
  [[nodiscard]] virtual bool host_memory_grows() const { return false; }

  /// @brief Grows memory of `allocate_host` in place, to `nbytes`; on failure it is unchanged.
  virtual void grow_host(void*, uint64_t) {}

  /// @brief Allocates host memory as `allocate_host` does, of a fixed size, for tensors of the device: in one
  /// registration, since a copy may be of all of a tensor, and CUDA refuses one that begins in one registration and
  /// ends in another.
  virtual void* allocate_addressable(uint64_t nbytes) { return allocate_host(nbytes, nbytes); }

  /// @return the most bytes that tensors should share in memory of `allocate_addressable`
  [[nodiscard]] virtual uint64_t registration_bytes() const { return std::numeric_limits<uint64_t>::max(); }

  /// @return the address at which the device accesses a byte of host memory
  virtual uint64_t device_address(const void* host) { return reinterpret_cast<uint64_t>(host); }

  virtual void free_host(void* pointer) noexcept = 0;

  /// @brief Allocates device memory, outside torch's allocator.
  virtual uint64_t allocate_device(uint64_t nbytes) = 0;
  virtual void free_device(uint64_t device) noexcept = 0;

  /// @return free and total device memory; some of the free bytes may be unusable, because of fragmentation
  virtual DeviceBytes device_bytes() = 0;

  virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;

  /// @brief Blocks until all work queued on the stream has finished.
  virtual void synchronize_stream(StreamHandle stream) = 0;

  /// @brief Blocks until all work that is queued on any stream of the device, the caller's too, has finished or failed.
  /// On the host driver callers queue nothing. Errors are ignored: a device that has failed, or was shut down, runs
  /// nothing more.
  virtual void synchronize_device() noexcept {}

  virtual StreamId stream_id(StreamHandle stream) = 0;

  virtual EventHandle create_event() = 0;

  /// @return the number of destroyed events that are cached for reuse
  virtual uint64_t num_idle_events() { return 0; }
  virtual void destroy_event(EventHandle event) noexcept = 0;
  virtual void record_event(EventHandle event, StreamHandle stream) = 0;

  /// @brief Makes `stream`, not the caller, wait for `event`.
  /// @param arrival unless 0, an event to record before the wait: when the stream reached it
  virtual void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) = 0;

  /// @return whether the event has happened
  virtual bool query_event(EventHandle event) = 0;

  /// @brief Blocks until the event has happened.
  virtual void synchronize_event(EventHandle event) = 0;

  /// @return when a finished event happened, seconds of CLOCK_MONOTONIC
  virtual double event_seconds(EventHandle event) = 0;

  /// @return whether a stream can wait for the host without blocking other streams: `wait_value` and `call_back`
  [[nodiscard]] virtual bool can_wait_for_host() const { return false; }

  /// @brief Makes `stream` wait until *value >= least.
  ///
  /// Everything that the host waits for before it stores that value must have been queued before this call.
  /// @param value a word in memory of `allocate_host`
  virtual void wait_value(StreamHandle, const uint64_t* /*value*/, uint64_t /*least*/) {}

  /// @brief Calls `call` once, on a thread of the driver, when `stream` reaches it. The stream waits for its return.
  /// @param call must not call the driver; `code` is 0, or the driver's error code when the device has failed
  virtual void call_back(StreamHandle, std::function<void(int code)> /*call*/) {}

  /// @brief Queues a copy from device memory to memory of `allocate_host`.
  virtual void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) = 0;

  /// @brief Queues a copy from memory of `allocate_host` to device memory.
  virtual void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) = 0;

  /// @brief Queues a copy within this device, or between it and a peer that was opened.
  virtual void copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) = 0;

  /// @brief Queues setting all bytes to `value`.
  virtual void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) = 0;
};

/// @brief Opens the CUDA driver; it uses the primary context of the device, as torch does.
/// @param library name of libcuda for dlopen
/// @param device number of the device
/// @param registration_bytes size of the pieces in which host memory is registered; smaller for tests
/// @throws DriverError if the library is missing or too old, or the device cannot be used
std::shared_ptr<Driver> open_cuda_driver(const std::string& library, int device,
                                         uint64_t registration_bytes = kRegistrationBytes);

/// @brief Opens the driver over ordinary memory, whose streams are threads.
/// @param faults faults of its allocations and copies
std::shared_ptr<Driver> open_host_driver(std::shared_ptr<Faults> faults);

}  // namespace lmswap
