// What only the CUDA driver does: opening the library, contexts, and the driver's own words in errors.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <thread>

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
  void SetUp() override { library_ = dlopen(LMSWAP_FAKE_CUDA, RTLD_NOW); }
  void TearDown() override { call<void (*)()>("fake_cuda_reset")(); }

  template <typename Function>
  Function call(const char* symbol) const {
    return reinterpret_cast<Function>(dlsym(library_, symbol));
  }
  uint64_t count(const char* what) const { return call<uint64_t (*)(const char*)>("fake_cuda_count")(what); }
  void fail(const char* symbol, int code) const {
    call<void (*)(const char*, uint64_t, int)>("fake_cuda_fail")(symbol, 1, code);
  }
  size_t num_violations() const { return call<size_t (*)()>("fake_cuda_num_violations")(); }

  void* library_ = nullptr;
};

TEST_F(CudaDriverTest, a_missing_library_is_an_error_with_its_name) {
  EXPECT_ERROR(open_cuda_driver("libmissing.so.1", 0), ErrorKind::kDriver, "libmissing.so.1");
}

TEST_F(CudaDriverTest, another_library_is_an_error_with_the_missing_function) {
  EXPECT_ERROR(open_cuda_driver("libm.so.6", 0), ErrorKind::kDriver, "cuGetErrorName");
}

TEST_F(CudaDriverTest, an_old_driver_is_an_error_with_both_versions) {
  call<void (*)(int)>("fake_cuda_set_version")(10020);
  EXPECT_ERROR(open_cuda_driver(LMSWAP_FAKE_CUDA, 0), ErrorKind::kDriver, "10.2");
}

TEST_F(CudaDriverTest, a_machine_without_a_device_is_an_error_in_the_drivers_words) {
  fail("cuInit", 100);
  EXPECT_ERROR(open_cuda_driver(LMSWAP_FAKE_CUDA, 0), ErrorKind::kDriver, "CUDA_ERROR_NO_DEVICE (100)");
  EXPECT_ERROR(open_cuda_driver(LMSWAP_FAKE_CUDA, 9), ErrorKind::kDriver, "cuDeviceGet");
}

TEST_F(CudaDriverTest, a_failing_call_names_itself_the_bytes_and_the_drivers_words) {
  const auto driver = open_cuda_driver(LMSWAP_FAKE_CUDA, 0);
  fail("cuMemHostRegister_v2", 2);
  EXPECT_ERROR(PinnedMemory(driver, 5 << 20), ErrorKind::kDriver,
               "cuMemHostRegister_v2 of 5.0 MiB (5242880 bytes) failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
  fail("cuMemAlloc_v2", 2);
  EXPECT_ERROR(DeviceMemory(driver, 5 << 20), ErrorKind::kDriver, "cuMemAlloc_v2 of 5.0 MiB (5242880 bytes) failed");
}

TEST_F(CudaDriverTest, host_memory_that_has_grown_is_copied_to_and_from_across_the_border) {
  constexpr uint64_t kPages = 5, kBytes = kPages * kPageBytes - 3;
  const auto device = make_test_device("fake");
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
  EXPECT_EQ(device->violations(), std::vector<std::string>{});
}

TEST_F(CudaDriverTest, host_memory_that_cannot_grow_is_as_before) {
  const auto driver = open_cuda_driver(LMSWAP_FAKE_CUDA, 0);
  {
    PinnedMemory memory(driver, kPageBytes, 4 * kPageBytes);
    memory.data()[0] = std::byte{7};
    fail("cuMemHostRegister_v2", 2);
    EXPECT_ERROR(memory.grow(4 * kPageBytes), ErrorKind::kDriver, "cuMemHostRegister_v2 of 0.0 MiB (12288 bytes)");
    EXPECT_EQ(count("host_bytes"), kPageBytes);
    EXPECT_EQ(memory.nbytes(), kPageBytes);
    EXPECT_ERROR(memory.grow(5 * kPageBytes), ErrorKind::kDriver, "cannot be extended");
    memory.grow(4 * kPageBytes);
    EXPECT_EQ(count("host_bytes"), 4 * kPageBytes);
    EXPECT_EQ(memory.data()[0], std::byte{7});
  }
  EXPECT_EQ(count("host_bytes"), 0u);
  EXPECT_EQ(num_violations(), 0u);
}

TEST_F(CudaDriverTest, retains_the_primary_context_and_gives_all_back) {
  ASSERT_EQ(count("contexts"), 0u);
  {
    const auto driver = open_cuda_driver(LMSWAP_FAKE_CUDA, 0);
    EXPECT_EQ(count("contexts"), 1u);
    const PinnedMemory memory(driver, 4096);
    const DeviceMemory spare(driver, 4096);
    const Stream stream(driver);
    Event event(driver);
    event.record(stream.handle());
    EXPECT_GT(count("events"), 0u);
  }
  for (const char* what : {"contexts", "events", "streams", "host_bytes", "device_bytes"})
    EXPECT_EQ(count(what), 0u) << what;
  EXPECT_EQ(num_violations(), 0u);
}

TEST_F(CudaDriverTest, gives_its_context_back_when_opening_fails_half_way) {
  fail("cuStreamCreate", 2);
  EXPECT_ERROR(open_cuda_driver(LMSWAP_FAKE_CUDA, 0), ErrorKind::kDriver, "cuStreamCreate");
  EXPECT_EQ(count("contexts"), 0u);
}

TEST_F(CudaDriverTest, leaves_the_callers_context_current) {
  const auto other = open_cuda_driver(LMSWAP_FAKE_CUDA, 1);
  void* context = nullptr;
  call<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 1);
  call<int (*)(void*)>("cuCtxPushCurrent_v2")(context);
  {
    const PinnedMemory memory(open_cuda_driver(LMSWAP_FAKE_CUDA, 0), 4096);
  }
  void* popped = nullptr;
  ASSERT_EQ(call<int (*)(void**)>("cuCtxPopCurrent_v2")(&popped), 0);
  EXPECT_EQ(popped, context);
  call<int (*)(int)>("cuDevicePrimaryCtxRelease_v2")(1);
  EXPECT_EQ(num_violations(), 0u);
}

TEST_F(CudaDriverTest, takes_its_own_devices_default_stream_in_a_thread_that_goes_from_one_device_to_the_other) {
  const auto driver = open_cuda_driver(LMSWAP_FAKE_CUDA, 0);
  const Stream stream(driver);
  Event first(driver), second(driver), arrival(driver);
  void* contexts[2] = {};
  for (const int device : {0, 1}) {
    call<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&contexts[device], device);
    call<int (*)(void*)>("cuCtxPushCurrent_v2")(contexts[device]);
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
    void* popped = nullptr;
    ASSERT_EQ(call<int (*)(void**)>("cuCtxPopCurrent_v2")(&popped), 0);
    EXPECT_EQ(popped, contexts[device]);
    call<int (*)(int)>("cuDevicePrimaryCtxRelease_v2")(device);
  }
  second.record(0);  // no context is current any more
  second.synchronize();
  EXPECT_EQ(num_violations(), 0u);
}

TEST_F(CudaDriverTest, serves_threads_that_never_had_a_context) {
  const auto driver = open_cuda_driver(LMSWAP_FAKE_CUDA, 0);
  std::thread([&] {
    const Stream stream(driver);
    Event event(driver);
    event.record(stream.handle());
    event.synchronize();
  }).join();
  EXPECT_EQ(num_violations(), 0u);
}

}  // namespace
}  // namespace lmswap
