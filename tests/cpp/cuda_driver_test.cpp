// What only the CUDA driver does: opening the library, contexts, and the driver's own words in errors.
#include <gtest/gtest.h>

#include <thread>

#include "../emulated_gpu/device/system.h"
#include "lmswap/arena.h"
#include "lmswap/event.h"
#include "lmswap/storage.h"
#include "lmswap/stream.h"
#include "test_device.h"

namespace lmswap {
namespace {

using test::make_test_device;

class CudaDriverTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(gpu_.violations.take(), std::vector<std::string>{}); }

  static std::shared_ptr<Driver> open(int device = 0) { return open_cuda_driver(LMSWAP_EMULATED_GPU, device); }
  void fail(const char* symbol, int code) { gpu_.faults.plan(symbol, 1, code); }

  emulated_gpu::System& gpu_ = test::calm_emulated_gpu();
};

TEST_F(CudaDriverTest, a_missing_library_is_an_error_with_its_name) {
  EXPECT_ERROR(open_cuda_driver("libmissing.so.1", 0), ErrorKind::kDriver, "libmissing.so.1");
}

TEST_F(CudaDriverTest, another_library_is_an_error_with_the_missing_function) {
  EXPECT_ERROR(open_cuda_driver("libm.so.6", 0), ErrorKind::kDriver, "cuGetErrorName");
}

TEST_F(CudaDriverTest, an_old_driver_is_an_error_with_both_versions) {
  EXPECT_ERROR(open_cuda_driver(LMSWAP_OLD_DRIVER, 0), ErrorKind::kDriver, "10.2");
}

TEST_F(CudaDriverTest, a_machine_without_a_device_is_an_error_in_the_drivers_words) {
  fail("cuInit", 100);
  EXPECT_ERROR(open(), ErrorKind::kDriver, "CUDA_ERROR_NO_DEVICE (100)");
  EXPECT_ERROR(open(9), ErrorKind::kDriver, "cuDeviceGet");
}

TEST_F(CudaDriverTest, a_failing_call_names_itself_the_bytes_and_the_drivers_words) {
  const auto driver = open();
  fail("cuMemHostRegister_v2", 2);
  EXPECT_ERROR(PinnedMemory(driver, 5 << 20), ErrorKind::kDriver,
               "cuMemHostRegister_v2 of 5.0 MiB (5242880 bytes) failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
  fail("cuMemAlloc_v2", 2);
  EXPECT_ERROR(DeviceMemory(driver, 5 << 20), ErrorKind::kDriver, "cuMemAlloc_v2 of 5.0 MiB (5242880 bytes) failed");
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
    EXPECT_ERROR(memory.grow(4 * kPageBytes), ErrorKind::kDriver, "cuMemHostRegister_v2 of 0.0 MiB (12288 bytes)");
    EXPECT_EQ(gpu_.held().pinned_bytes, kPageBytes);
    EXPECT_EQ(memory.nbytes(), kPageBytes);
    EXPECT_ERROR(memory.grow(5 * kPageBytes), ErrorKind::kDriver, "cannot be extended");
    memory.grow(4 * kPageBytes);
    EXPECT_EQ(gpu_.held().pinned_bytes, 4 * kPageBytes);
    EXPECT_EQ(memory.data()[0], std::byte{7});
  }
  EXPECT_EQ(gpu_.held().pinned_bytes, 0u);
}

TEST_F(CudaDriverTest, retains_the_primary_context_and_gives_all_back) {
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

TEST_F(CudaDriverTest, gives_its_context_back_when_opening_fails_half_way) {
  fail("cuStreamCreate", 2);
  EXPECT_ERROR(open(), ErrorKind::kDriver, "cuStreamCreate");
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

TEST_F(CudaDriverTest, serves_threads_that_never_had_a_context) {
  const auto driver = open();
  std::thread([&] {
    const Stream stream(driver);
    Event event(driver);
    event.record(stream.handle());
    event.synchronize();
  }).join();
}

}  // namespace
}  // namespace lmswap
