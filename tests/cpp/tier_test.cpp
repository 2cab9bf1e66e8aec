// What every tier must do, run on each tier and driver.
#include "lmswap/tier.h"

#include <gtest/gtest.h>

#include <optional>

#include "lmswap/disk_tier.h"
#include "lmswap/memory_tier.h"
#include "test_device.h"

namespace lmswap {
namespace {

using test::make_test_device;
using test::TestDevice;
using test::TestDirectory;
using test::TierSetup;

constexpr uint64_t kPage = kPageBytes, kLimit = 64 * kPage;

class TierConformance : public testing::TestWithParam<TierSetup> {
 protected:
  std::unique_ptr<Tier> make_tier(const std::string& faults = "") {
    device_ = make_test_device(GetParam().device, faults);
    if (GetParam().tier == "disk") {
      return std::make_unique<DiskTier>(device_->driver, device_->faults, directory_.path(), kLimit, 2, Pacers{});
    }
    const Place place = GetParam().tier == "host" ? Place::kHost : Place::kDevice;
    return std::make_unique<MemoryTier>(device_->driver, place, kLimit, Pacers{});
  }
  // A copy that has not ended, and one that has.
  TransferPointer make_user(const Block& block) {
    return std::make_shared<Transfer>(device_->driver, Direction::kIn, 1, 1, 1, block);
  }
  void finish(const TransferPointer& user) {
    user->fail("ended by the test");
    user->settle();
  }

  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
};

TEST_P(TierConformance, a_reserved_slab_holds_blocks_where_the_plan_says) {
  const auto tier = make_tier();
  tier->reserve(16 * kPage - 5);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
  const Block first = tier->take(4 * kPage, kPage + 1), second = tier->take(0, 4 * kPage);
  EXPECT_EQ(first.offset, 4 * kPage);
  EXPECT_EQ(second.offset, 0u);
  EXPECT_EQ(first.storage, second.storage);
  EXPECT_EQ(tier->stats().used_bytes, 6 * kPage);
  tier->release(first, {});
  tier->release(second, {});
  EXPECT_EQ(tier->stats().used_bytes, 0u);
  EXPECT_EQ(tier->stats().peak_used_bytes, 6 * kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
}

TEST_P(TierConformance, a_held_place_gives_another_one) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage);
  const Block first = tier->take(0, 2 * kPage), second = tier->take(0, 2 * kPage);
  EXPECT_EQ(second.storage, first.storage);
  EXPECT_EQ(second.offset, 2 * kPage);
}

TEST_P(TierConformance, what_fits_nowhere_gets_room_that_goes_with_it) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage);
  const Block first = tier->take(0, 3 * kPage), second = tier->take(0, 2 * kPage);
  EXPECT_NE(second.storage, first.storage);
  EXPECT_EQ(tier->stats().capacity_bytes, 6 * kPage);
  tier->release(second, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  tier->release(first, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
}

TEST_P(TierConformance, a_larger_slab_replaces_a_smaller_one_when_that_is_empty) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage);
  const Block old = tier->take(0, kPage);
  tier->reserve(2 * kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  tier->reserve(8 * kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, 12 * kPage);
  const Block block = tier->take(7 * kPage, kPage);
  EXPECT_NE(block.storage, old.storage);
  tier->release(old, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
  tier->release(block, {});
  tier->reserve(16 * kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
}

TEST_P(TierConformance, never_exceeds_its_limit_and_says_the_numbers) {
  const auto tier = make_tier();
  EXPECT_ERROR(tier->reserve(kLimit + 1), ErrorKind::kTier, std::to_string(kLimit));
  tier->reserve(kLimit - kPage);
  const Block first = tier->take(0, kLimit - kPage);
  EXPECT_ERROR(tier->take(0, kPage + 1), ErrorKind::kTier, std::to_string(2 * kPage));
  const Block second = tier->take(0, kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, kLimit);
  tier->release(first, {});
  tier->release(second, {});
  EXPECT_EQ(tier->stats().used_bytes, 0u);
}

TEST_P(TierConformance, says_what_cannot_be_had_and_goes_on) {
  if (GetParam().device == "cuda" && GetParam().tier != "disk") GTEST_SKIP() << "real CUDA does not fail on demand";
  const auto tier = make_tier(GetParam().tier == "disk" ? "reserve@1=fail" : "allocate_" + GetParam().tier + "@1=fail");
  EXPECT_ERROR(tier->reserve(8 * kPage), ErrorKind::kTier, std::to_string(8 * kPage));
  EXPECT_EQ(tier->stats().capacity_bytes, 0u);
  tier->reserve(8 * kPage);
  EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
}

TEST_P(TierConformance, copies_still_under_way_fence_the_bytes_they_use) {
  const auto tier = make_tier();
  tier->reserve(8 * kPage);
  const Block block = tier->take(2 * kPage, 2 * kPage);
  const TransferPointer running = make_user(block), ended = make_user(block);
  finish(ended);
  tier->release(block, {running, ended});

  const Block before = tier->take(0, 2 * kPage), behind = tier->take(4 * kPage, kPage), over = tier->take(3 * kPage, 1);
  EXPECT_TRUE(tier->fences(before).empty());
  EXPECT_TRUE(tier->fences(behind).empty());
  EXPECT_EQ(tier->fences(over), std::vector<TransferPointer>{running});
  finish(running);
  EXPECT_TRUE(tier->fences(over).empty());
}

TEST_P(TierConformance, records_of_past_copies_keep_no_memory) {
  const auto tier = make_tier();
  Block block = tier->take(0, kPage);
  const std::weak_ptr<Storage> storage = block.storage;
  const TransferPointer ended = make_user(block);
  finish(ended);
  tier->release(block, {ended});
  block = {};
  EXPECT_TRUE(storage.expired());
}

TEST_P(TierConformance, a_refused_reservation_changes_nothing) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage);
  EXPECT_ERROR(tier->reserve(kLimit + 1), ErrorKind::kTier, "limit");
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  const Block held = tier->take(0, kPage);
  EXPECT_ERROR(tier->reserve(kLimit - 3 * kPage), ErrorKind::kTier, "limit");
  tier->release(held, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
}

TEST_P(TierConformance, storage_outlives_its_tier_for_as_long_as_a_block_is_used) {
  auto tier = make_tier();
  tier->reserve(kPage);
  std::optional<Block> block = tier->take(0, kPage);
  tier.reset();
  EXPECT_EQ(block->storage.use_count(), 1);
  block.reset();
  EXPECT_EQ(device_->violations(), std::vector<std::string>{});
}

INSTANTIATE_TEST_SUITE_P(Tiers, TierConformance, testing::ValuesIn(test::tier_setups()),
                         [](const auto& info) { return info.param.tier + "_on_" + info.param.device; });

}  // namespace
}  // namespace lmswap
