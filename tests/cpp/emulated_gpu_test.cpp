// The emulated GPU reports what real CUDA lets pass: without this, the tests that find no violation would say nothing.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "../../csrc/driver/cuda_abi.h"
#include "../../tools/emulated_gpu/device/system.h"
#include "test_device.h"

using namespace lmswap::cuda;

extern "C" {
#define LMSWAP_DECLARE(member, symbol, parameters) Result symbol parameters;
LMSWAP_CUDA_FUNCTIONS(LMSWAP_DECLARE)
#undef LMSWAP_DECLARE
}

namespace lmswap::emulated_gpu_test {
namespace {

using cuda::Event;
using cuda::Stream;

class EmulatedGpu : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(cuInit(0), kSuccess);
    ASSERT_EQ(cuDevicePrimaryCtxRetain(&context_, 0), kSuccess);
    ASSERT_EQ(cuCtxPushCurrent_v2(context_), kSuccess);
    for (Stream* stream : {&first_, &second_}) ASSERT_EQ(cuStreamCreate(stream, kStreamNonBlocking), kSuccess);
    ASSERT_EQ(cuEventCreate(&event_, 0), kSuccess);
    ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, kMemHostRegisterDeviceMap), kSuccess);
    ASSERT_EQ(cuMemAlloc_v2(&device_, kBytes), kSuccess);
  }

  void TearDown() override {
    for (Stream stream : {first_, second_}) {
      cuStreamSynchronize(stream);
      cuStreamDestroy_v2(stream);
    }
    cuEventDestroy_v2(event_);
    if (is_pinned_) cuMemHostUnregister(host_);
    cuMemFree_v2(device_);
    Context popped;
    cuCtxPopCurrent_v2(&popped);
    cuDevicePrimaryCtxRelease_v2(0);
    EXPECT_EQ(gpu_.violations.take(), std::vector<std::string>{});
  }

  // Expects exactly one violation, with this part in its text; what it may have broken is whole again.
  void expect_violation(const std::string& part) {
    const std::vector<std::string> violations = gpu_.violations.take();
    ASSERT_EQ(violations.size(), 1u) << part;
    EXPECT_NE(violations[0].find(part), std::string::npos) << violations[0];
    gpu_.faults.mend();
  }

  // A kernel that uses bytes, for the check of order; it does nothing.
  void use(Stream stream, uintptr_t begin, size_t nbytes, bool is_write) {
    const emulated_gpu::Use use{begin, nbytes, is_write};
    gpu_.launch(stream, "a kernel", {&use, 1}, {}, [] {});
  }

  static constexpr size_t kBytes = 8192;
  emulated_gpu::System& gpu_ = test::calm_emulated_gpu();
  Context context_ = nullptr;
  Stream first_ = nullptr, second_ = nullptr;
  Event event_ = nullptr;
  alignas(4096) char host_[kBytes] = {};
  bool is_pinned_ = true;
  DevicePointer device_ = 0;
};

TEST_F(EmulatedGpu, reports_kernels_that_use_host_memory_without_an_address_for_the_device) {
  ASSERT_EQ(cuMemHostUnregister(host_), kSuccess);
  ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, 0), kSuccess);
  use(first_, reinterpret_cast<uintptr_t>(host_), kBytes, false);
  expect_violation("host memory that the device cannot address");
}

TEST_F(EmulatedGpu, reports_calls_that_break_the_capture_of_a_graph) {
  cuEventRecord(event_, first_);
  gpu_.is_capturing = true;
  EXPECT_EQ(cuEventQuery(event_), 900);
  expect_violation("cuEventQuery: while a graph is captured");
  CaptureMode mode = kCaptureModeRelaxed;
  cuThreadExchangeStreamCaptureMode(&mode);
  EXPECT_EQ(mode, 0);
  EXPECT_EQ(cuEventSynchronize(event_), kSuccess);
  cuThreadExchangeStreamCaptureMode(&mode);
  cuStreamSynchronize(first_);
  expect_violation("cuStreamSynchronize");
  cuThreadExchangeStreamCaptureMode(&mode);
  EXPECT_EQ(cuCtxSynchronize(), 900);  // in any mode: the context contains the capturing stream
  expect_violation("cuCtxSynchronize: while a graph is captured");
  cuThreadExchangeStreamCaptureMode(&mode);
  gpu_.is_capturing = false;
}

TEST_F(EmulatedGpu, reports_unrecorded_events) {
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

TEST_F(EmulatedGpu, reports_destroyed_handles) {
  Event gone;
  cuEventCreate(&gone, 0);
  cuEventDestroy_v2(gone);
  EXPECT_NE(cuEventRecord(gone, first_), kSuccess);
  expect_violation("destroyed");
  Stream gone_stream;
  cuStreamCreate(&gone_stream, kStreamNonBlocking);
  cuStreamDestroy_v2(gone_stream);
  Event next;  // has another handle, though it may lie at the same place
  cuEventCreate(&next, 0);
  EXPECT_NE(cuEventRecord(event_, gone_stream), kSuccess);
  expect_violation("destroyed");
  EXPECT_NE(cuEventRecord(gone, first_), kSuccess);
  expect_violation("destroyed");
  cuEventDestroy_v2(next);
  EXPECT_NE(cuStreamDestroy_v2(nullptr), kSuccess);
  expect_violation("never made");
}

TEST_F(EmulatedGpu, reports_a_missing_or_wrong_context) {
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
  EXPECT_NE(cuStreamSynchronize(first_), kSuccess);
  expect_violation("another device");
  cuCtxPopCurrent_v2(&popped);
  cuDevicePrimaryCtxRelease_v2(1);
  EXPECT_NE(cuCtxPopCurrent_v2(&popped), kSuccess);
  expect_violation("no context");
  EXPECT_NE(cuCtxPushCurrent_v2(nullptr), kSuccess);
  expect_violation("not a context");
  cuCtxPushCurrent_v2(context_);
}

TEST_F(EmulatedGpu, reports_a_context_that_was_released) {
  cuDevicePrimaryCtxRelease_v2(0);
  EXPECT_NE(cuStreamSynchronize(first_), kSuccess);
  expect_violation("no context");
  EXPECT_NE(cuDevicePrimaryCtxRelease_v2(0), kSuccess);
  expect_violation("released more often");
  cuDevicePrimaryCtxRetain(&context_, 0);
}

TEST_F(EmulatedGpu, reports_memory_that_is_not_of_its_kind) {
  std::vector<char> pageable(kBytes);
  EXPECT_NE(cuMemcpyDtoHAsync_v2(pageable.data(), device_, kBytes, first_), kSuccess);
  expect_violation("pageable memory");
  EXPECT_NE(cuMemcpyDtoHAsync_v2(host_, reinterpret_cast<DevicePointer>(pageable.data()), kBytes, first_), kSuccess);
  expect_violation("not the device's");
  EXPECT_NE(cuMemcpyHtoDAsync_v2(device_, reinterpret_cast<void*>(device_), kBytes, first_), kSuccess);
  expect_violation("where host memory is wanted");
  EXPECT_NE(cuMemHostRegister_v2(reinterpret_cast<void*>(device_), kBytes, 0), kSuccess);
  expect_violation("device memory is pinned");
}

TEST_F(EmulatedGpu, reports_a_use_of_one_byte_more_than_was_allocated) {
  EXPECT_NE(cuMemcpyDtoHAsync_v2(host_, device_ + 1, kBytes, first_), kSuccess);
  expect_violation("not allocated");
  EXPECT_NE(cuMemsetD8Async(device_, 0, kBytes + 1, first_), kSuccess);
  expect_violation("not allocated");
}

TEST_F(EmulatedGpu, reports_memory_unpinned_under_a_copy_and_unpinned_twice) {
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuMemHostUnregister(host_);
  expect_violation("given back before the host knows that a copy out");
  cuStreamSynchronize(first_);
  EXPECT_NE(cuMemHostUnregister(host_), kSuccess);
  expect_violation("not pinned");
  is_pinned_ = false;
}

TEST_F(EmulatedGpu, accepts_memory_given_back_when_the_context_has_run_dry) {
  use(first_, reinterpret_cast<uintptr_t>(host_), kBytes, false);
  use(second_, reinterpret_cast<uintptr_t>(host_), kBytes, false);
  EXPECT_EQ(cuCtxSynchronize(), kSuccess);
  EXPECT_EQ(cuMemHostUnregister(host_), kSuccess);
  is_pinned_ = false;
}

TEST_F(EmulatedGpu, does_not_take_one_context_that_has_run_dry_for_another) {
  use(first_, reinterpret_cast<uintptr_t>(host_), kBytes, false);
  Context other = nullptr, popped = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), kSuccess);
  ASSERT_EQ(cuCtxPushCurrent_v2(other), kSuccess);
  EXPECT_EQ(cuCtxSynchronize(), kSuccess);
  EXPECT_EQ(cuCtxPopCurrent_v2(&popped), kSuccess);
  cuDevicePrimaryCtxRelease_v2(1);
  cuMemHostUnregister(host_);
  expect_violation("given back before the host knows that a kernel");
  is_pinned_ = false;
}

TEST_F(EmulatedGpu, reports_memory_freed_under_a_fill_and_freed_twice) {
  DevicePointer pointer;
  cuMemAlloc_v2(&pointer, kBytes);
  cuMemsetD8Async(pointer, 0, kBytes, first_);
  cuMemFree_v2(pointer);
  expect_violation("given back before the host knows that a fill");
  EXPECT_NE(cuMemFree_v2(pointer), kSuccess);
  expect_violation("not allocated");
  EXPECT_NE(cuMemsetD8Async(pointer, 0, kBytes, first_), kSuccess);
  expect_violation("not allocated");
}

TEST_F(EmulatedGpu, reports_the_time_of_an_event_without_one) {
  constexpr unsigned kDisableTiming = 2;
  Event untimed;
  cuEventCreate(&untimed, kDisableTiming);
  for (Event event : {event_, untimed}) cuEventRecord(event, first_);
  cuStreamSynchronize(first_);
  float milliseconds;
  EXPECT_EQ(cuEventElapsedTime(&milliseconds, event_, event_), kSuccess);
  EXPECT_NE(cuEventElapsedTime(&milliseconds, event_, untimed), kSuccess);
  expect_violation("without timing");
  cuEventDestroy_v2(untimed);
}

TEST_F(EmulatedGpu, reports_memory_pinned_twice_and_copies_across_two_registrations) {
  EXPECT_NE(cuMemHostRegister_v2(host_ + kBytes / 2, kBytes / 2, 0), kSuccess);
  expect_violation("pinned already");
  cuMemHostUnregister(host_);
  for (char* half : {host_, host_ + kBytes / 2}) {
    ASSERT_EQ(cuMemHostRegister_v2(half, kBytes / 2, 0), kSuccess);
    EXPECT_EQ(cuMemcpyDtoHAsync_v2(half, device_, kBytes / 2, first_), kSuccess);
  }
  EXPECT_NE(cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_), kSuccess);
  expect_violation("several registrations");
  auto* const device = reinterpret_cast<void*>(device_);
  std::vector<char> pageable(kBytes);
  for (const auto& [to, from] : {std::pair<void*, void*>{host_, device}, {device, host_}, {pageable.data(), host_}}) {
    EXPECT_NE(gpu_.copy(to, from, kBytes, first_, true, emulated_gpu::Pageable::kStaged), kSuccess);  // the runtime's
    expect_violation("several registrations");
  }
  cuStreamSynchronize(first_);
  cuMemHostUnregister(host_ + kBytes / 2);
}

TEST_F(EmulatedGpu, reports_a_device_address_of_memory_that_was_not_registered_to_have_one) {
  DevicePointer found = 0;
  cuMemHostUnregister(host_);
  ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, 0), kSuccess);
  EXPECT_NE(cuMemHostGetDevicePointer_v2(&found, host_, 0), kSuccess);
  expect_violation("unmapped memory");
  cuMemHostUnregister(host_);
  ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, kMemHostRegisterDeviceMap), kSuccess);
  EXPECT_EQ(cuMemHostGetDevicePointer_v2(&found, host_ + 8, 0), kSuccess);
  EXPECT_EQ(found, reinterpret_cast<DevicePointer>(host_ + 8));
}

TEST_F(EmulatedGpu, can_have_other_addresses_of_registered_memory_than_the_host) {
  DevicePointer found = 0;
  cuMemHostUnregister(host_);
  gpu_.has_host_addresses = false;
  ASSERT_EQ(cuMemHostRegister_v2(host_, kBytes, kMemHostRegisterDeviceMap), kSuccess);
  EXPECT_EQ(cuMemHostGetDevicePointer_v2(&found, host_ + 8, 0), kSuccess);
  EXPECT_NE(found, reinterpret_cast<DevicePointer>(host_ + 8));
  EXPECT_EQ(cuStreamWaitValue64_v2(first_, found, 0, kWaitUntilAtLeast), kSuccess);
  EXPECT_EQ(cuMemcpyHtoDAsync_v2(device_, host_, kBytes, first_), kSuccess);
  EXPECT_EQ(cuStreamSynchronize(first_), kSuccess);
  EXPECT_EQ(gpu_.violations.take(), std::vector<std::string>{});
  use(first_, reinterpret_cast<uintptr_t>(host_), kBytes, false);
  expect_violation("host memory that the device cannot address");
}

TEST_F(EmulatedGpu, reports_uses_without_an_order) {
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  use(second_, device_, 1, true);
  expect_violation("no order between them");
  DevicePointer others;
  ASSERT_EQ(cuMemAlloc_v2(&others, 1), kSuccess);
  use(second_, others, 1, true);
  use(second_, reinterpret_cast<uintptr_t>(host_), 1, false);
  expect_violation("no order between them");
  cuStreamSynchronize(second_);
  cuMemFree_v2(others);
}

TEST_F(EmulatedGpu, accepts_uses_that_an_event_or_the_host_orders) {
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuEventRecord(event_, first_);
  cuStreamWaitEvent(second_, event_, 0);
  cuMemcpyHtoDAsync_v2(device_, host_, kBytes, second_);
  cuStreamSynchronize(second_);
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
}

TEST_F(EmulatedGpu, reports_an_event_recorded_too_early_to_protect_the_bytes) {
  cuEventRecord(event_, first_);
  cuMemcpyDtoHAsync_v2(host_, device_, kBytes, first_);
  cuStreamWaitEvent(second_, event_, 0);
  use(second_, device_, 1, true);
  expect_violation("no order between them");
}

TEST_F(EmulatedGpu, reports_copies_between_devices_that_do_not_name_their_contexts) {
  Context other = nullptr, popped = nullptr;
  DevicePointer there = 0;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&other, 1), kSuccess);
  ASSERT_EQ(cuCtxPushCurrent_v2(other), kSuccess);
  ASSERT_EQ(cuMemAlloc_v2(&there, kBytes), kSuccess);
  ASSERT_EQ(cuCtxPopCurrent_v2(&popped), kSuccess);
  cuMemcpyDtoDAsync_v2(there, device_, kBytes, first_);
  expect_violation("between devices");
  cuMemcpyPeerAsync(there, context_, device_, context_, kBytes, first_);
  expect_violation("not of the context");
  cuMemcpyPeerAsync(there, other, device_, context_, kBytes, first_);
  use(second_, there, 1, true);
  expect_violation("no order between them");
  cuStreamSynchronize(first_);
  cuStreamSynchronize(second_);
  cuMemFree_v2(there);
  cuDevicePrimaryCtxRelease_v2(1);
}

TEST_F(EmulatedGpu, allows_reads_beside_each_other) {
  use(first_, device_, kBytes, false);
  use(second_, device_, kBytes, false);
  EXPECT_EQ(gpu_.violations.take().size(), 0u);
  use(second_, device_, kBytes, true);
  expect_violation("no order between them");
}

}  // namespace
}  // namespace lmswap::emulated_gpu_test
