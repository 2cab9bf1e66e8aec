// The fake reports what real CUDA lets pass: without this, the tests that find no violation would say nothing.
#include "fake_cuda/fake_cuda.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "../../csrc/driver/cuda_abi.h"

using namespace lmswap::cuda;

extern "C" {
#define LMSWAP_DECLARE(member, symbol, parameters) Result symbol parameters;
LMSWAP_CUDA_FUNCTIONS(LMSWAP_DECLARE)
#undef LMSWAP_DECLARE
}

namespace {

class FakeCuda : public testing::Test {
 protected:
  void SetUp() override {
    fake_cuda_reset();
    ASSERT_EQ(cuInit(0), kSuccess);
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), kSuccess);
    ASSERT_EQ(cuCtxPushCurrent_v2(context_), kSuccess);
    for (Stream* stream : {&first_, &second_}) ASSERT_EQ(cuStreamCreate(stream, kStreamNonBlocking), kSuccess);
    ASSERT_EQ(cuEventCreate(&event_, 0), kSuccess);
    ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, 0), kSuccess);
    fake_cuda_register(device_bytes_.data(), kBytes);
    device_ = reinterpret_cast<DevicePointer>(device_bytes_.data());
  }

  void TearDown() override {
    fake_cuda_set_delay(0);
    for (Stream stream : {first_, second_}) {
      cuStreamSynchronize(stream);
      cuStreamDestroy_v2(stream);
    }
    cuEventDestroy_v2(event_);
    if (is_pinned_) cuMemHostUnregister(host_);
    fake_cuda_unregister(device_bytes_.data());
    Context popped;
    cuCtxPopCurrent_v2(&popped);
    cuDevicePrimaryCtxRelease_v2(0);
    fake_cuda_reset();
  }

  // Expects exactly one violation, with this part in its text.
  void expect_violation(const std::string& part) {
    ASSERT_EQ(fake_cuda_num_violations(), 1u) << part;
    EXPECT_NE(std::string(fake_cuda_violation(0)).find(part), std::string::npos) << fake_cuda_violation(0);
    fake_cuda_reset();
  }

  static constexpr size_t kBytes = 8192;
  Context context_ = nullptr;
  Stream first_ = nullptr, second_ = nullptr;
  Event event_ = nullptr;
  alignas(4096) char host_[kBytes] = {};
  bool is_pinned_ = true;
  std::vector<char> device_bytes_ = std::vector<char>(kBytes);
  DevicePointer device_ = 0;
};

TEST_F(FakeCuda, reports_unrecorded_events) {
  cuStreamWaitEvent(first_, event_, 0);
  expect_violation("never recorded");
  cuEventSynchronize(event_);
  expect_violation("never recorded");
  cuEventQuery(event_);
  expect_violation("never recorded");
  float milliseconds;
  cuEventElapsedTime(&milliseconds, event_, event_);
  expect_violation("never recorded");
}

TEST_F(FakeCuda, reports_destroyed_handles) {
  Event gone;
  cuEventCreate(&gone, 0);
  cuEventDestroy_v2(gone);
  EXPECT_NE(cuEventRecord(gone, first_), kSuccess);
  expect_violation("destroyed");
  Stream gone_stream;
  cuStreamCreate(&gone_stream, 0);
  cuStreamDestroy_v2(gone_stream);
  EXPECT_NE(cuEventRecord(event_, gone_stream), kSuccess);
  expect_violation("destroyed");
}

TEST_F(FakeCuda, reports_a_missing_or_wrong_context) {
  Context popped;
  cuCtxPopCurrent_v2(&popped);
  EXPECT_EQ(cuEventRecord(event_, first_), kInvalidContext);  // by which a caller may see it: no violation
  EXPECT_NE(cuStreamWaitEvent(first_, event_, 0), kSuccess);
  expect_violation("no context");
  Context other;
  cuDevicePrimaryCtxRetain(&other, 1);
  cuCtxPushCurrent_v2(other);
  EXPECT_EQ(cuEventRecord(event_, nullptr), kInvalidHandle);  // so is this
  EXPECT_NE(cuStreamWaitEvent(first_, event_, 0), kSuccess);
  expect_violation("another device");
  cuCtxPopCurrent_v2(&popped);
  cuDevicePrimaryCtxRelease_v2(1);
  EXPECT_NE(cuCtxPopCurrent_v2(&popped), kSuccess);
  expect_violation("no context");
  cuCtxPushCurrent_v2(context_);
}

TEST_F(FakeCuda, reports_memory_that_is_not_of_its_kind) {
  std::vector<char> pageable(kBytes);
  EXPECT_NE(cuMemcpyDtoHAsync_v2(pageable.data(), device_, kBytes, first_), kSuccess);
  expect_violation("not pinned");
  EXPECT_NE(cuMemcpyDtoHAsync_v2(host_, device_ + 1, kBytes, first_), kSuccess);
  expect_violation("not the device's");
}

TEST_F(FakeCuda, reports_memory_unpinned_under_a_copy_and_unpinned_twice) {
  fake_cuda_set_delay(0.2);
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuMemHostUnregister(host_);
  cuStreamSynchronize(first_);
  expect_violation("freed before the copy ran");
  EXPECT_NE(cuMemHostUnregister(host_), kSuccess);
  expect_violation("not registered");
  is_pinned_ = false;
}

TEST_F(FakeCuda, reports_memory_freed_twice) {
  DevicePointer pointer;
  cuMemAlloc_v2(&pointer, kBytes);
  cuMemFree_v2(pointer);
  EXPECT_NE(cuMemFree_v2(pointer), kSuccess);
  expect_violation("freed already");
}

TEST_F(FakeCuda, reports_memory_pinned_twice_and_copies_across_two_registrations) {
  EXPECT_NE(cuMemHostRegister_v2(host_ + kBytes / 2, kBytes / 2, 0), kSuccess);
  expect_violation("registered already");
  cuMemHostUnregister(host_);
  for (char* half : {host_, host_ + kBytes / 2}) {
    ASSERT_EQ(cuMemHostRegister_v2(half, kBytes / 2, 0), kSuccess);
    EXPECT_EQ(cuMemcpyDtoHAsync_v2(half, device_, kBytes / 2, first_), kSuccess);
  }
  EXPECT_NE(cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_), kSuccess);
  expect_violation("not pinned");
  cuStreamSynchronize(first_);
  cuMemHostUnregister(host_ + kBytes / 2);
}

TEST_F(FakeCuda, reports_uses_without_an_order) {
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  fake_cuda_use(second_, device_, 1, 1);
  expect_violation("not ordered after");
  const char other_byte = 0;
  fake_cuda_use(second_, reinterpret_cast<uint64_t>(&other_byte), 1, 1);
  EXPECT_EQ(fake_cuda_num_violations(), 0u);
}

TEST_F(FakeCuda, accepts_uses_that_an_event_or_the_host_orders) {
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuEventRecord(event_, first_);
  cuStreamWaitEvent(second_, event_, 0);
  cuMemcpyHtoDAsync_v2(device_, host_, kBytes, second_);
  cuStreamSynchronize(second_);
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  EXPECT_EQ(fake_cuda_num_violations(), 0u);
}

TEST_F(FakeCuda, reports_an_event_recorded_too_early_to_protect_the_bytes) {
  cuEventRecord(event_, first_);
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuStreamWaitEvent(second_, event_, 0);
  fake_cuda_use(second_, device_, 1, 1);
  expect_violation("not ordered after");
}

TEST_F(FakeCuda, allows_reads_beside_each_other) {
  fake_cuda_use(first_, device_, kBytes, 0);
  fake_cuda_use(second_, device_, kBytes, 0);
  EXPECT_EQ(fake_cuda_num_violations(), 0u);
  fake_cuda_use(second_, device_, kBytes, 1);
  EXPECT_EQ(fake_cuda_num_violations(), 1u);
}

}  // namespace
