// A device for tests: a driver, memory of that device, and slow kernels on a stream that stands for torch's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lmswap/dlpack.h"
#include "lmswap/driver/driver.h"
#include "lmswap/error.h"
#include "lmswap/faults.h"

namespace emulated_gpu {
class System;
}

namespace lmswap {
class Engine;
}

namespace lmswap::test {

// Compared in one call: std::equal takes std::byte by itself, which under ThreadSanitizer took most of many tests.
class Bytes : public std::vector<std::byte> {
 public:
  using std::vector<std::byte>::vector;
  friend bool operator==(const Bytes& a, const Bytes& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
  }
};

class TestDevice {
 public:
  virtual ~TestDevice() = default;

  std::shared_ptr<Driver> driver;
  std::shared_ptr<Faults> faults;  // of the disk, and of the host driver
  StreamHandle stream = 0;         // the caller's

  virtual uint64_t allocate(uint64_t nbytes) = 0;
  virtual void free(uint64_t pointer) = 0;
  virtual void upload(uint64_t pointer, const Bytes& bytes) = 0;  // blocks
  virtual Bytes download(uint64_t pointer, uint64_t nbytes) = 0;  // after all work of the stream

  // Kernels on the caller's stream that take their time before they touch the memory. On the host there is no stream,
  // and the caller does the work at once.
  virtual void fill(uint64_t pointer, uint64_t nbytes, std::byte value) = 0;
  virtual void copy(uint64_t to, uint64_t from, uint64_t nbytes) = 0;

  // Another stream of the caller's kind, for tests with several threads; the default one where there are no streams.
  virtual StreamHandle make_stream() = 0;

  // Misuse of the driver noticed so far; always none where it is not checked.
  virtual std::vector<std::string> violations() = 0;
};

// "host", "emulated" (tools/emulated_gpu), "emulated_one_queue", which cannot wait for the host, or "cuda" (the
// machine's). `faults` as in faults.h; on the emulated GPU, the driver's calls can be made to fail by number.
// `max_delay_seconds`: everything queued is late by up to this, where the device can do so.
std::unique_ptr<TestDevice> make_test_device(const std::string& kind, const std::string& faults = "",
                                             double max_delay_seconds = 0);

// The emulated GPU, without delays, planned faults and violations. Everything made before stays valid.
emulated_gpu::System& calm_emulated_gpu();

// The kinds that this machine has.
std::vector<std::string> test_device_kinds();

// The tiers that a device of this kind has on this machine: a real one has peers only where it is not alone.
std::vector<std::string> tiers_of(const std::string& kind);

// Whether the CPU moves its bytes, on I/O threads, with the faults of "reserve", "write" and "read".
bool is_io(const std::string& tier);

// Opens one of them, with three I/O threads if it has some; the disk's file lies in `directory`.
void open_tier(Engine& engine, const std::string& tier, uint64_t limit_bytes, const std::string& directory);

// A tier of a device, and all that this machine has.
struct TierSetup {
  std::string device, tier;
};
std::vector<TierSetup> tier_setups();

// Owner of a token, as a tensor of torch is.
class Token {
 public:
  explicit Token(DLManagedTensor* tensor) : tensor_(tensor, [](DLManagedTensor* self) { self->deleter(self); }) {}
  int64_t handle() const { return *static_cast<const int64_t*>(tensor_->dl_tensor.data); }
  void reset() { tensor_.reset(); }
  const DLManagedTensor& tensor() const { return *tensor_; }

 private:
  std::unique_ptr<DLManagedTensor, void (*)(DLManagedTensor*)> tensor_;
};

// What in_start has begun and in_done waits for.
struct Arrival {
  int64_t handle, transfer;
};

// Hands every call on to another driver, for tests that look at some of them.
class ForwardingDriver : public Driver {
 public:
  explicit ForwardingDriver(std::shared_ptr<Driver> driver) : driver_(std::move(driver)) {}

  bool device_is_host() const override { return driver_->device_is_host(); }
  DeviceHandle device() const override { return driver_->device(); }
  int number() const override { return driver_->number(); }
  std::shared_ptr<Driver> open_peer(int number) override { return driver_->open_peer(number); }
  void* allocate_host(uint64_t nbytes, uint64_t max_bytes) override {
    return driver_->allocate_host(nbytes, max_bytes);
  }
  bool host_memory_grows() const override { return driver_->host_memory_grows(); }
  void grow_host(void* pointer, uint64_t nbytes) override { driver_->grow_host(pointer, nbytes); }
  void* allocate_addressable(uint64_t nbytes) override { return driver_->allocate_addressable(nbytes); }
  uint64_t registration_bytes() const override { return driver_->registration_bytes(); }
  uint64_t device_address(const void* host) override { return driver_->device_address(host); }
  void free_host(void* pointer) noexcept override { driver_->free_host(pointer); }
  uint64_t allocate_device(uint64_t nbytes) override { return driver_->allocate_device(nbytes); }
  void free_device(uint64_t device) noexcept override { driver_->free_device(device); }
  DeviceBytes device_bytes() override { return driver_->device_bytes(); }
  StreamHandle create_stream() override { return driver_->create_stream(); }
  void destroy_stream(StreamHandle stream) noexcept override { driver_->destroy_stream(stream); }
  void synchronize_stream(StreamHandle stream) override { driver_->synchronize_stream(stream); }
  void synchronize_device() noexcept override { driver_->synchronize_device(); }
  StreamId stream_id(StreamHandle stream) override { return driver_->stream_id(stream); }
  EventHandle create_event() override { return driver_->create_event(); }
  void destroy_event(EventHandle event) noexcept override { driver_->destroy_event(event); }
  void record_event(EventHandle event, StreamHandle stream) override { driver_->record_event(event, stream); }
  void wait_event(StreamHandle stream, EventHandle event, EventHandle arrival) override {
    driver_->wait_event(stream, event, arrival);
  }
  bool query_event(EventHandle event) override { return driver_->query_event(event); }
  void synchronize_event(EventHandle event) override { driver_->synchronize_event(event); }
  double event_seconds(EventHandle event) override { return driver_->event_seconds(event); }
  bool can_wait_for_host() const override { return driver_->can_wait_for_host(); }
  void wait_value(StreamHandle stream, const uint64_t* value, uint64_t least) override {
    driver_->wait_value(stream, value, least);
  }
  void call_back(StreamHandle stream, std::function<void(int)> call) override {
    driver_->call_back(stream, std::move(call));
  }
  void copy_out(void* host, uint64_t device, uint64_t nbytes, StreamHandle stream) override {
    driver_->copy_out(host, device, nbytes, stream);
  }
  void copy_in(uint64_t device, const void* host, uint64_t nbytes, StreamHandle stream) override {
    driver_->copy_in(device, host, nbytes, stream);
  }
  void copy_between(DeviceAddress to, DeviceAddress from, uint64_t nbytes, StreamHandle stream) override {
    driver_->copy_between(to, from, nbytes, stream);
  }
  void fill(uint64_t device, std::byte value, uint64_t nbytes, StreamHandle stream) override {
    driver_->fill(device, value, nbytes, stream);
  }

 private:
  std::shared_ptr<Driver> driver_;
};

// Bytes that depend on the seed, and differ from page to page.
Bytes make_bytes(uint64_t nbytes, uint64_t seed);

// A fresh directory on a disk for the tests' files, removed with its owner.
class TestDirectory {
 public:
  TestDirectory();
  ~TestDirectory();
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Expects `statement` to throw an error of the class, with a text that contains the part.
#define EXPECT_ERROR(statement, error_class, part)                                                    \
  try {                                                                                               \
    statement;                                                                                        \
    ADD_FAILURE() << "nothing was thrown";                                                            \
  } catch (const ::lmswap::error_class& thrown_error) {                                               \
    EXPECT_NE(std::string(thrown_error.what()).find(part), std::string::npos) << thrown_error.what(); \
  } catch (const ::lmswap::Error& thrown_error) {                                                     \
    ADD_FAILURE() << "not of class " #error_class ": " << thrown_error.what();                        \
  }

}  // namespace lmswap::test
