// An emulated link where the device waits for the host: the host need not wait, and the link is as slow as configured.
#include "lmswap/lanes/gated_link.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "gated_swaps.h"

namespace lmswap::test::gated_link_test {
namespace {

constexpr uint64_t kBytes = (5 << 20) + 17;  // more than a chunk
constexpr double kBytesPerSecond = 1e9;
constexpr double kLeastSeconds = static_cast<double>(kBytes) / kBytesPerSecond;

class GatedLinkTest : public test::GatedSwaps, public testing::WithParamInterface<std::string> {
 protected:
  GatedLinkTest() : GatedSwaps(GetParam(), kBytes) {}
  void open(double max_delay_seconds = 0,
            BandwidthLimiters limiters = {BandwidthLimiter(kBytesPerSecond), BandwidthLimiter(kBytesPerSecond)}) {
    GatedSwaps::open(make_test_device("emulated", "", max_delay_seconds), std::move(limiters));
    test::open_tier(*engine_, tier_, 64 << 20, directory_.path());
    engine_->reserve(tier_, 4 * kBytes);
  }
  std::vector<TransferRecord> records(size_t count) {
    std::vector<TransferRecord> records;
    while (records.size() < count) {
      for (const TransferRecord& record : engine_->take_records()) records.push_back(record);
    }
    return records;
  }
};

TEST_P(GatedLinkTest, the_host_goes_on_while_the_device_has_not_begun) {
  open();
  there_and_back_while_held(3);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
  for (const TransferRecord& record : records(6)) {
    EXPECT_GE(record.end_seconds - record.start_seconds, (1 - 1e-6) * kLeastSeconds);
  }
}

TEST_P(GatedLinkTest, a_link_of_one_way_leaves_the_other_as_it_is) {
  open(0, {BandwidthLimiter(), BandwidthLimiter(kBytesPerSecond)});
  there_and_back_while_held(2);
  engine_->confirm();
  EXPECT_EQ(arrived(), sent());
  for (const TransferRecord& record : records(4)) {
    EXPECT_GE(record.end_seconds - record.start_seconds, record.is_in ? (1 - 1e-6) * kLeastSeconds : 0);
  }
}

TEST_P(GatedLinkTest, late_copies_change_no_byte) {
  open(0.005);
  for (int i = 0; i < 3; ++i) {
    there_and_back(2);
    engine_->confirm();
    EXPECT_EQ(arrived(), sent());
    forget_arrived();
  }
}

// A thread that sleeps too long, by more than is made up for, restarts the link: on a busy machine some do.
TEST_P(GatedLinkTest, a_busy_link_continues_with_new_bytes_without_a_pause) {
  open();
  const Token token = out();
  records(1);
  bool goes_on = false;
  for (int i = 0; i < 50 && !goes_on; ++i) {
    std::vector<int64_t> transfers;
    for (int copy = 0; copy < 2; ++copy) {
      transfers.push_back(engine_->in_start(1, token.handle(), target_, kBytes, device_->stream));
    }
    for (const int64_t transfer : transfers) engine_->in_done(token.handle(), transfer, device_->stream);
    const std::vector<TransferRecord> both = records(2);
    goes_on = std::abs(both[1].start_seconds - both[0].start_seconds - kLeastSeconds) < 1e-6;
  }
  EXPECT_TRUE(goes_on);
  engine_->confirm();
}

TEST_P(GatedLinkTest, full_and_shared_queues_do_not_deadlock) {
  open();
  there_and_back_whatever_the_queues();
}

// Each call of a copy, by its number: what was queued before it runs, and the next copy is as good as any.
TEST_P(GatedLinkTest, a_failing_call_is_reported_and_blocks_nothing) {
  open();
  emulated_gpu::Faults& faults = emulated_gpu::System::instance().faults;
  const Token token = out();
  for (const char* call : {"cuStreamWaitEvent", "cuStreamAddCallback", "cuStreamWaitValue64_v2"}) {
    for (const uint64_t nth : {1, 2}) {
      faults.plan(call, nth, 999);
      try {
        in(token);
        engine_->confirm();
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("999"), std::string::npos) << error.what();
      }
      faults.mend();
      in(token);
      engine_->confirm();
      EXPECT_EQ(arrived(), sent()) << call << " " << nth;
      forget_arrived();
    }
  }
}

TEST_P(GatedLinkTest, an_engine_that_closes_ends_what_was_queued) {
  open();
  close_while_held(2);
}

INSTANTIATE_TEST_SUITE_P(Tiers, GatedLinkTest, testing::Values("host", "device", "peer", "disk", "compressed"),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace lmswap::test::gated_link_test
