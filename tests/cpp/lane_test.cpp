#include "lmswap/lanes/lane.h"

#include <gtest/gtest.h>

#include <atomic>

#include "lmswap/lanes/request_limiter.h"
#include "test_device.h"

namespace lmswap::test::lane_test {
namespace {

// Notes the order in which transfers begin.
class RecordingBackend final : public TransferBackend {
 public:
  explicit RecordingBackend(std::vector<int64_t>& order, std::string error = "")
      : order_(order), error_(std::move(error)) {}
  void move(const TransferPointer& transfer) override {
    order_.push_back(transfer->number);
    if (!error_.empty()) throw DriverError(error_);
    transfer->record_start(0);
    transfer->state.done->record(0);
  }
  void complete(const TransferPointer& transfer) noexcept override { transfer->state.settle(); }
  void drain() noexcept override {}

 private:
  std::vector<int64_t>& order_;
  std::string error_;
};

class LaneTest : public testing::TestWithParam<bool> {
 protected:
  TransferPointer make(int64_t number, Direction direction = Direction::kOut) {
    return std::make_shared<Transfer>(driver_, direction, number, 0, 0, Block{});
  }
  std::shared_ptr<Driver> driver_ = open_host_driver(std::make_shared<Faults>(""));
  Event arrival_{driver_};
};

TEST_P(LaneTest, begins_in_the_order_of_queueing) {
  std::vector<int64_t> order, expected;
  {
    Lane lane(std::make_unique<RecordingBackend>(order), GetParam());
    for (int64_t i = 1; i <= 100; ++i) {
      expected.push_back(i);
      lane.submit(make(i));
    }
  }
  EXPECT_EQ(order, expected);
}

TEST_P(LaneTest, a_failing_transfer_reports_the_reason_and_the_next_one_runs) {
  std::vector<int64_t> order;
  const TransferPointer first = make(1), second = make(2);
  {
    Lane failing(std::make_unique<RecordingBackend>(order, "it broke"), GetParam());
    failing.submit(first);
    failing.submit(second);
  }
  EXPECT_EQ(order.size(), 2u);
  EXPECT_ERROR(first->state.make_wait(0, arrival_), TransferError, "it broke");
  EXPECT_TRUE(first->state.is_device_free());
  EXPECT_TRUE(second->state.has_failed());
}

TEST_P(LaneTest, bytes_that_never_arrived_are_not_read) {
  std::vector<int64_t> order, order_in;
  const TransferPointer out = make(1), in = make(2, Direction::kIn);
  in->source = out;
  {
    Lane out_lane(std::make_unique<RecordingBackend>(order, "it broke"), GetParam());
    Lane in_lane(std::make_unique<RecordingBackend>(order_in), GetParam());
    out_lane.submit(out);
    in_lane.submit(in);
  }
  EXPECT_TRUE(order_in.empty());
  EXPECT_ERROR(in->state.make_wait(0, arrival_), TransferError, "never reached the tier: it broke");
}

INSTANTIATE_TEST_SUITE_P(Lanes, LaneTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "with_thread" : "without_thread"; });

// A copy out that waits for nothing but the test.
class HeldBackend final : public TransferBackend {
 public:
  explicit HeldBackend(RequestLimiter& limiter) : limiter_(limiter) {}
  void move(const TransferPointer& transfer) override {
    limiter_.acquire();
    transfer->record_start(0);
    transfer->state.done->record(0);
    limiter_.release();
  }
  void complete(const TransferPointer& transfer) noexcept override { transfer->state.settle(); }
  void drain() noexcept override {}

 private:
  RequestLimiter& limiter_;
};

TEST(Lane, begins_only_when_source_and_dependencies_have_landed) {
  const auto driver = open_host_driver(std::make_shared<Faults>(""));
  const auto make = [&](int64_t number) {
    return std::make_shared<Transfer>(driver, Direction::kIn, number, 0, 0, Block{});
  };
  for (const bool is_dependency : {false, true}) {
    RequestLimiter limiter(1);
    limiter.acquire();
    std::vector<int64_t> order;
    const TransferPointer first = make(1), second = make(2);
    {
      Lane held(std::make_unique<HeldBackend>(limiter), true), lane(std::make_unique<RecordingBackend>(order), true);
      if (is_dependency) {
        second->dependencies = {first};
      } else {
        second->source = first;
      }
      held.submit(first);
      lane.submit(second);
      EXPECT_FALSE(second->state.is_device_free());
      EXPECT_TRUE(order.empty());
      limiter.release();
      EXPECT_TRUE(second->state.wait_landed());
    }
    EXPECT_FALSE(second->source || !second->dependencies.empty()) << "a chain of past transfers is kept alive";
  }
}

}  // namespace
}  // namespace lmswap::test::lane_test
