// The CUDA driver's own parts: opening the library, contexts, and the driver's messages in errors.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <string>
#include <thread>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/clock.h"
#include "lmswap/driver/event.h"
#include "lmswap/driver/stream.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/storage.h"
#include "test_device.h"

namespace lmswap::test::cuda_driver_test {
namespace {

class CudaDriverTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(gpu_.violations.take(), std::vector<std::string>{}); }

  static std::shared_ptr<Driver> open(int device = 0) { return open_cuda_driver(LMSWAP_EMULATED_GPU, device); }
  void fail(const char* symbol, int code) { gpu_.faults.plan(symbol, 1, code); }

  emulated_gpu::System& gpu_ = test::calm_emulated_gpu();
};

TEST_F(CudaDriverTest, a_missing_library_is_an_error_with_its_name) {
  EXPECT_ERROR(open_cuda_driver("libmissing.so.1", 0), DriverError, "libmissing.so.1");
}

TEST_F(CudaDriverTest, another_library_is_an_error_with_the_missing_function) {
  EXPECT_ERROR(open_cuda_driver("libm.so.6", 0), DriverError, "cuGetErrorName");
}

TEST_F(CudaDriverTest, an_old_driver_is_an_error_with_both_versions) {
  EXPECT_ERROR(open_cuda_driver(LMSWAP_OLD_DRIVER, 0), DriverError, "10.2");
}

TEST_F(CudaDriverTest, a_machine_without_a_device_is_an_error_in_the_drivers_words) {
  fail("cuInit", 100);
  EXPECT_ERROR(open(), DriverError, "CUDA_ERROR_NO_DEVICE (100)");
  EXPECT_ERROR(open(9), DriverError, "cuDeviceGet");
}

TEST_F(CudaDriverTest, a_failing_call_names_itself_the_bytes_and_the_drivers_words) {
  const auto driver = open();
  fail("cuMemHostRegister_v2", 2);
  EXPECT_ERROR(PinnedMemory(driver, 5 << 20), DriverError,
               "cuMemHostRegister_v2 of 5.0 MiB (5242880 bytes) failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
  fail("cuMemAlloc_v2", 2);
  EXPECT_ERROR(DeviceMemory(driver, 5 << 20), DriverError, "cuMemAlloc_v2 of 5.0 MiB (5242880 bytes) failed");
}

TEST_F(CudaDriverTest, host_memory_that_has_grown_is_copied_to_and_from_across_the_border) {
  constexpr uint64_t kPages = 5, kBytes = kPages * kPageBytes - 3;
  const auto device = make_test_device("emulated");
  PinnedMemory memory(device->driver, 2 * kPageBytes, kPages * kPageBytes);
  const std::byte* const data = memory.data();
  memory.grow(3 * kPageBytes);
  memory.grow(kPages * kPageBytes);
  EXPECT_EQ(memory.data(), data);
  const uint64_t source = device->allocate(kBytes), target = device->allocate(kBytes);
  device->upload(source, test::make_bytes(kBytes, 1));
  device->driver->copy_out(memory.data() + 1, source, kBytes, device->stream);
  device->driver->copy_in(target, memory.data() + 1, kBytes, device->stream);
  EXPECT_EQ(device->download(target, kBytes), test::make_bytes(kBytes, 1));
  for (const uint64_t pointer : {source, target}) device->free(pointer);
}

TEST_F(CudaDriverTest, host_memory_that_cannot_grow_is_as_before) {
  const auto driver = open();
  {
    PinnedMemory memory(driver, kPageBytes, 4 * kPageBytes);
    memory.data()[0] = std::byte{7};
    fail("cuMemHostRegister_v2", 2);
    EXPECT_ERROR(memory.grow(4 * kPageBytes), DriverError, "cuMemHostRegister_v2 of 0.0 MiB (12288 bytes)");
    EXPECT_EQ(gpu_.held().pinned_bytes, kPageBytes);
    EXPECT_EQ(memory.nbytes(), kPageBytes);
    EXPECT_ERROR(memory.grow(5 * kPageBytes), DriverError, "cannot be extended");
    memory.grow(4 * kPageBytes);
    EXPECT_EQ(gpu_.held().pinned_bytes, 4 * kPageBytes);
    EXPECT_EQ(memory.data()[0], std::byte{7});
  }
  EXPECT_EQ(gpu_.held().pinned_bytes, 0u);
}

TEST_F(CudaDriverTest, memory_of_tensors_is_one_registration_and_other_memory_many) {
  constexpr uint64_t kBytes = 5 * kPageBytes;
  const auto driver = open_cuda_driver(LMSWAP_EMULATED_GPU, 0, 2 * kPageBytes);
  for (const bool is_for_tensors : {false, true}) {
    gpu_.calls.start();
    void* const memory = is_for_tensors ? driver->allocate_addressable(kBytes) : driver->allocate_host(kBytes, kBytes);
    EXPECT_EQ(gpu_.calls.stop().at("cuMemHostRegister_v2"), is_for_tensors ? 1U : 3U);
    EXPECT_EQ(gpu_.held().pinned_bytes, kBytes);
    driver->free_host(memory);
    EXPECT_EQ(gpu_.held().pinned_bytes, 0U);
  }
  EXPECT_EQ(driver->registration_bytes(), 2 * kPageBytes);
  EXPECT_EQ(open()->registration_bytes(), kRegistrationBytes);
}

TEST_F(CudaDriverTest, waits_for_every_stream_of_its_device_from_any_thread) {
  const auto device = make_test_device("emulated");
  std::atomic<int> num_ended = 0;
  for (const StreamHandle stream : {device->stream, device->make_stream()}) {
    gpu_.run_on_host(reinterpret_cast<void*>(stream), [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++num_ended;
    });
  }
  std::thread([&] { device->driver->synchronize_device(); }).join();
  EXPECT_EQ(num_ended, 2);
}

TEST_F(CudaDriverTest, a_device_that_has_failed_is_not_waited_for) {
  constexpr int kAssert = 710;
  const auto driver = open();
  fail("cuCtxSynchronize", kAssert);
  driver->synchronize_device();
  gpu_.faults.break_context(kAssert);
  driver->synchronize_device();
  gpu_.faults.mend();
}

TEST_F(CudaDriverTest, retains_the_primary_context_and_releases_it) {
  ASSERT_EQ(gpu_.held().contexts, 0u);
  {
    const auto driver = open();
    EXPECT_EQ(gpu_.held().contexts, 1u);
    const PinnedMemory memory(driver, 4096);
    const DeviceMemory spare(driver, 4096);
    const Stream stream(driver);
    Event event(driver);
    event.record(stream.handle());
    EXPECT_GT(gpu_.held().events, 0u);
  }
  EXPECT_EQ(gpu_.held(), emulated_gpu::Held{});
}

TEST_F(CudaDriverTest, releases_its_context_if_opening_fails_half_way) {
  fail("cuStreamCreate", 2);
  EXPECT_ERROR(open(), DriverError, "cuStreamCreate");
  EXPECT_EQ(gpu_.held().contexts, 0u);
}

TEST_F(CudaDriverTest, leaves_the_callers_context_current) {
  const auto other = open(1);
  emulated_gpu::push_current_device(1);
  {
    const PinnedMemory memory(open(), 4096);
  }
  int popped = -1;
  ASSERT_TRUE(emulated_gpu::pop_current_device(&popped));
  EXPECT_EQ(popped, 1);
}

TEST_F(CudaDriverTest, takes_its_own_devices_default_stream_in_a_thread_that_goes_from_one_device_to_the_other) {
  const auto driver = open();
  const Stream stream(driver);
  Event first(driver), second(driver), arrival(driver);
  const auto other = open(1);
  for (const int device : {0, 1}) {
    emulated_gpu::push_current_device(device);
    first.record(stream.handle());
    second.record(0);
    second.make_wait(stream.handle());
    first.make_wait(0, arrival);
    first.make_wait(0);
    arrival.synchronize();
    EXPECT_TRUE(second.is_finished());
    EXPECT_GE(arrival.seconds(), 0);
  }
  for (const int device : {1, 0}) {
    int popped = -1;
    ASSERT_TRUE(emulated_gpu::pop_current_device(&popped));
    EXPECT_EQ(popped, device);
  }
  second.record(0);  // no context is current any more
  second.synchronize();
}

// Bytes go from one device to the other and back, by the calls whose numbers are returned. `refusal`: what the driver
// returns when peer access is requested.
std::map<std::string, uint64_t> swap_to_peer(uint64_t nbytes, int refusal = 0) {
  const auto device = make_test_device("emulated");
  if (refusal != 0) emulated_gpu::System::instance().faults.plan("cuCtxEnablePeerAccess", 1, refusal);
  const auto peer = device->driver->open_peer(1);
  const DeviceMemory spare(peer, nbytes);
  const uint64_t pointer = device->allocate(nbytes);
  const DeviceAddress own{device->driver->device(), pointer};
  device->upload(pointer, test::make_bytes(nbytes, 1));
  emulated_gpu::System::instance().calls.start();
  device->driver->copy_between(spare.at(0), own, nbytes, device->stream);
  device->fill(pointer, nbytes, std::byte{0});
  device->driver->copy_between(own, spare.at(0), nbytes, device->stream);
  const auto calls = emulated_gpu::System::instance().calls.stop();
  EXPECT_EQ(device->download(pointer, nbytes), test::make_bytes(nbytes, 1));
  device->free(pointer);
  return calls;
}

TEST_F(CudaDriverTest, copies_to_a_peer_and_back_whether_the_two_reach_each_other_or_not) {
  for (const bool have_access : {true, false}) {
    gpu_.configure(emulated_gpu::Peers{.have_access = have_access});
    EXPECT_EQ(swap_to_peer(5 * kPageBytes + 3).at("cuMemcpyPeerAsync"), 2u);
    EXPECT_EQ(gpu_.held(), emulated_gpu::Held{});
  }
}

TEST_F(CudaDriverTest, peer_access_that_torch_or_another_engine_has_enabled_is_as_good) {
  const auto device = open(), again = open();
  const auto peer = device->open_peer(1), other = again->open_peer(1);
  fail("cuCtxEnablePeerAccess", 2);
  EXPECT_ERROR(device->open_peer(1), DriverError, "cuCtxEnablePeerAccess failed: CUDA_ERROR_OUT_OF_MEMORY");
}

TEST_F(CudaDriverTest, a_peer_too_many_is_copied_to_by_way_of_the_host) {
  constexpr int kTooManyPeers = 711;
  EXPECT_EQ(swap_to_peer(kPageBytes, kTooManyPeers).at("cuMemcpyPeerAsync"), 2u);
  EXPECT_EQ(gpu_.faults.num_planned(), 0u);
}

TEST_F(CudaDriverTest, a_peer_is_another_device_that_there_is) {
  const auto driver = open();
  EXPECT_ERROR(driver->open_peer(0), OptionError, "GPU 0 is the one that computes");
  EXPECT_ERROR(driver->open_peer(9), DriverError, "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE");
  EXPECT_EQ(gpu_.held().contexts, 1u);
}

TEST_F(CudaDriverTest, returns_the_free_bytes_of_its_own_device) {
  const auto driver = open(), other = open(1);
  const DeviceMemory spare(other, 64 << 20);
  const auto [free_bytes, total_bytes] = other->device_bytes();
  EXPECT_EQ(total_bytes - free_bytes, 64u << 20);
  EXPECT_EQ(driver->device_bytes().free, total_bytes);
}

TEST_F(CudaDriverTest, serves_threads_that_never_had_a_context) {
  const auto driver = open();
  std::thread([&] {
    const Stream stream(driver);
    Event event(driver);
    event.record(stream.handle());
    event.synchronize();
  }).join();
}

// Where all streams share a queue, the clock's waits there for whatever holds up another one.
TEST_F(CudaDriverTest, times_are_right_where_the_clock_was_held_up_one_queue_slow) {
  const auto device = make_test_device("emulated_one_queue");
  Event before(device->driver), after(device->driver);
  before.record(device->stream);
  before.synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(10'100));  // now the clock is reset
  gpu_.configure(emulated_gpu::Queues{true, 0});
  std::atomic<bool> is_over = false;
  std::thread holder([&] {  // more than the device can run, so that there is never none
    for (int i = 0; i < 15 && !is_over; ++i) {
      gpu_.run_on_host(reinterpret_cast<void*>(device->stream),
                       [] { std::this_thread::sleep_for(std::chrono::milliseconds(200)); });
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  after.record(device->stream);
  is_over = true;
  after.synchronize();
  EXPECT_NEAR(after.seconds(), monotonic_seconds(), 0.05);
  holder.join();
  device->driver->synchronize_stream(device->stream);
}

}  // namespace
}  // namespace lmswap::test::cuda_driver_test
