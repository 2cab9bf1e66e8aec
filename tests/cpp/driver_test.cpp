// Conformance suite of drivers, run on each that this machine has.
#include "lmswap/driver/driver.h"

#include <gtest/gtest.h>

#include <cstring>
#include <set>

#include "lmswap/clock.h"
#include "lmswap/driver/event.h"
#include "lmswap/driver/stream.h"
#include "lmswap/tiers/arena.h"
#include "lmswap/tiers/storage.h"
#include "test_device.h"

namespace lmswap::test::driver_test {
namespace {

constexpr uint64_t kBytes = 3 * kPageBytes + 17;

class DriverConformance : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    device_ = make_test_device(GetParam());
    driver_ = device_->driver;
    pointer_ = device_->allocate(kBytes);
  }
  void TearDown() override {
    device_->free(pointer_);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }

  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<Driver> driver_;
  uint64_t pointer_ = 0;
};

TEST_P(DriverConformance, copies_out_and_in_exactly) {
  const auto bytes = make_bytes(kBytes, 1), other = make_bytes(kBytes, 2);
  const PinnedMemory memory(driver_, kBytes);
  const Stream stream(driver_);
  device_->upload(pointer_, bytes);
  driver_->copy_out(memory.data(), pointer_, kBytes, stream.handle());
  stream.synchronize();
  EXPECT_EQ(std::memcmp(memory.data(), bytes.data(), kBytes), 0);
  std::memcpy(memory.data(), other.data(), kBytes);
  driver_->copy_in(pointer_, memory.data(), kBytes, stream.handle());
  stream.synchronize();
  EXPECT_EQ(device_->download(pointer_, kBytes), other);
}

TEST_P(DriverConformance, ids_distinguish_streams_even_if_a_handle_is_reused) {
  std::set<StreamId> ids{driver_->stream_id(0)};
  const Stream kept(driver_);
  ids.insert(driver_->stream_id(kept.handle()));
  for (int i = 0; i < 8; ++i) ids.insert(driver_->stream_id(Stream(driver_).handle()));
  EXPECT_EQ(ids.size(), 10u);
  EXPECT_TRUE(ids.contains(driver_->stream_id(kept.handle())));
  EXPECT_TRUE(ids.contains(driver_->stream_id(0)));
}

TEST_P(DriverConformance, copies_within_the_device_exactly) {
  const auto bytes = make_bytes(kBytes, 1);
  const DeviceMemory spare(driver_, kBytes);
  const DeviceAddress own{driver_->device(), pointer_};
  const Stream stream(driver_);
  device_->upload(pointer_, bytes);
  driver_->copy_between(spare.at(0), own, kBytes, stream.handle());
  stream.synchronize();
  device_->upload(pointer_, make_bytes(kBytes, 2));
  driver_->copy_between(own, spare.at(0), kBytes, stream.handle());
  stream.synchronize();
  EXPECT_EQ(device_->download(pointer_, kBytes), bytes);
}

TEST_P(DriverConformance, fills_device_memory_in_the_order_of_its_stream) {
  const auto bytes = make_bytes(kBytes, 1);
  const Stream stream(driver_);
  Event uploaded(driver_);
  device_->upload(pointer_, bytes);
  device_->fill(pointer_, kBytes, std::byte{1});  // takes its time
  uploaded.record(device_->stream);
  uploaded.make_wait(stream.handle());
  driver_->fill(pointer_ + 5, std::byte{0xff}, kBytes - 7, stream.handle());
  stream.synchronize();
  const auto filled = device_->download(pointer_, kBytes);
  for (uint64_t i = 0; i < kBytes; ++i) {
    ASSERT_EQ(filled[i], i >= 5 && i < kBytes - 2 ? std::byte{0xff} : std::byte{1}) << i;
  }
}

TEST_P(DriverConformance, host_memory_begins_at_a_page) {
  for (const uint64_t nbytes : {uint64_t{1}, kPageBytes, kBytes}) {
    const PinnedMemory memory(driver_, nbytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory.data()) % kPageBytes, 0u);
  }
}

TEST_P(DriverConformance, an_event_happens_after_what_was_queued_before_it) {
  const PinnedMemory memory(driver_, kBytes);
  Event event(driver_);
  device_->fill(pointer_, kBytes, std::byte{7});
  driver_->copy_out(memory.data(), pointer_, kBytes, device_->stream);
  event.record(device_->stream);
  event.synchronize();
  EXPECT_TRUE(event.is_finished());
  EXPECT_EQ(memory.data()[kBytes - 1], std::byte{7});
}

TEST_P(DriverConformance, a_stream_waits_for_an_event_of_another) {
  const PinnedMemory memory(driver_, kBytes);
  const Stream stream(driver_);
  Event filled(driver_);
  device_->upload(pointer_, make_bytes(kBytes, 3));
  device_->fill(pointer_, kBytes, std::byte{9});  // takes its time
  filled.record(device_->stream);
  filled.make_wait(stream.handle());
  driver_->copy_out(memory.data(), pointer_, kBytes, stream.handle());
  stream.synchronize();
  for (uint64_t i = 0; i < kBytes; ++i) ASSERT_EQ(memory.data()[i], std::byte{9});
}

TEST_P(DriverConformance, a_wait_is_for_the_recording_made_before_it) {
  const PinnedMemory memory(driver_, kBytes);
  const Stream stream(driver_);
  Event event(driver_);
  event.record(stream.handle());
  event.make_wait(device_->stream);
  event.record(stream.handle());
  event.synchronize();
  EXPECT_TRUE(event.is_finished());
}

TEST_P(DriverConformance, events_have_the_time_of_the_monotonic_clock) {
  // Far apart on purpose: this is about the clock and its unit, not about speed.
  constexpr double kSlackSeconds = 0.5;
  Event first(driver_), second(driver_);
  const double before = monotonic_seconds();
  first.record(device_->stream);
  device_->fill(pointer_, kBytes, std::byte{1});
  second.record(device_->stream);
  second.synchronize();
  EXPECT_LE(first.seconds(), second.seconds());
  EXPECT_GT(first.seconds(), before - kSlackSeconds);
  EXPECT_LT(second.seconds(), monotonic_seconds() + kSlackSeconds);
}

TEST_P(DriverConformance, an_event_may_go_while_a_stream_waits_for_it) {
  const Stream stream(driver_);
  {
    Event event(driver_);
    device_->fill(pointer_, kBytes, std::byte{1});
    event.record(device_->stream);
    event.make_wait(stream.handle());
  }
  stream.synchronize();
}

INSTANTIATE_TEST_SUITE_P(Drivers, DriverConformance, testing::ValuesIn(test::test_device_kinds()),
                         [](const auto& info) { return info.param; });

TEST(HostDriver, fails_on_demand_with_the_call_and_the_bytes) {
  const auto driver = open_host_driver(std::make_shared<Faults>("allocate_host@1=fail,copy_in@1=fail"));
  EXPECT_ERROR(PinnedMemory(driver, 3 << 20), DriverError, "3.0 MiB");
  std::byte byte{1};
  const Stream stream(driver);
  EXPECT_ERROR(driver->copy_in(reinterpret_cast<uint64_t>(&byte), &byte, 1, stream.handle()), DriverError, "copy_in");
}

}  // namespace
}  // namespace lmswap::test::driver_test
