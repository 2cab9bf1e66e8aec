// Conformance suite of tiers, run on each tier and driver.
#include "lmswap/tiers/tier.h"

#include <gtest/gtest.h>

#include <mutex>
#include <optional>
#include <set>
#include <vector>

#include "../../tools/emulated_gpu/device/system.h"
#include "lmswap/tiers/compressed_tier.h"
#include "lmswap/tiers/disk_tier.h"
#include "lmswap/tiers/memory_tier.h"
#include "test_device.h"

namespace lmswap::test::tier_test {
namespace {

constexpr uint64_t kPage = kPageBytes, kLimit = 64 * kPage;

class TierConformance : public testing::TestWithParam<TierSetup> {
 protected:
  std::unique_ptr<Tier> make_tier(const std::string& faults = "") {
    device_ = make_test_device(GetParam().device, faults);
    if (GetParam().tier == "disk") {
      return std::make_unique<DiskTier>(device_->driver, device_->faults, directory_.path(), kLimit, 2,
                                        BandwidthLimiters{});
    }
    const auto& driver = device_->driver;
    if (GetParam().tier == "compressed") {
      return std::make_unique<CompressedTier>(driver, device_->faults, kLimit, 2, BandwidthLimiters{});
    }
    if (GetParam().tier == "peer") {
      return std::make_unique<MemoryTier>(driver, MemoryKind::kPeer, driver->open_peer(1), kLimit, BandwidthLimiters{});
    }
    const MemoryKind kind = GetParam().tier == "host" ? MemoryKind::kHost : MemoryKind::kDevice;
    return std::make_unique<MemoryTier>(driver, kind, driver, kLimit, BandwidthLimiters{});
  }
  // A copy that has not ended, and one that has.
  TransferPointer make_user(const Block& block) {
    return std::make_shared<Transfer>(device_->driver, Direction::kIn, 1, 1, 1, block);
  }
  void finish(const TransferPointer& user) {
    user->state.fail("ended by the test");
    user->state.settle();
  }

  bool is_extended() const { return GetParam().tier == "host" && device_->driver->host_memory_grows(); }

  std::mutex mutex_;
  std::unique_lock<std::mutex> lock_{mutex_};
  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
};

TEST_P(TierConformance, a_reserved_slab_holds_blocks_at_planned_offsets) {
  const auto tier = make_tier();
  tier->reserve(16 * kPage - 5, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
  const Block first = tier->take(4 * kPage, kPage + 1, lock_), second = tier->take(0, 4 * kPage, lock_);
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

TEST_P(TierConformance, an_occupied_offset_is_replaced_by_another) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage, false, lock_);
  const Block first = tier->take(0, 2 * kPage, lock_), second = tier->take(0, 2 * kPage, lock_);
  EXPECT_EQ(second.storage, first.storage);
  EXPECT_EQ(second.offset, 2 * kPage);
}

TEST_P(TierConformance, a_block_that_fits_nowhere_gets_a_slab_released_with_it) {
  const auto tier = make_tier();
  if (is_extended()) GTEST_SKIP() << "it stays: see PinnedTier";
  tier->reserve(4 * kPage, false, lock_);
  const Block first = tier->take(0, 3 * kPage, lock_), second = tier->take(0, 2 * kPage, lock_);
  EXPECT_NE(second.storage, first.storage);
  EXPECT_GE(tier->stats().capacity_bytes, 6 * kPage);
  tier->release(second, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  tier->release(first, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
}

// Each slab of the disk is an open file, of which a process has a thousand.
TEST_P(TierConformance, blocks_without_a_plan_share_slabs) {
  const auto tier = make_tier();
  if (GetParam().tier == "device" || GetParam().tier == "peer") GTEST_SKIP() << "no more is taken than is needed";
  std::set<const Storage*> slabs;
  std::vector<Block> blocks;
  for (uint64_t i = 0; i < kLimit / kPage; ++i) {
    blocks.push_back(tier->take(0, kPage, lock_));
    slabs.insert(blocks.back().storage.get());
  }
  EXPECT_EQ(slabs.size(), 1u);
  EXPECT_EQ(tier->stats().capacity_bytes, kLimit);
  for (const Block& block : blocks) tier->release(block, {});
  EXPECT_EQ(tier->stats().capacity_bytes, is_extended() ? kLimit : 0);
}

TEST_P(TierConformance, a_larger_slab_replaces_a_smaller_one_when_that_is_empty) {
  const auto tier = make_tier();
  if (is_extended()) GTEST_SKIP() << "the slab grows: see PinnedTier";
  tier->reserve(4 * kPage, false, lock_);
  const Block old = tier->take(0, kPage, lock_);
  tier->reserve(2 * kPage, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  tier->reserve(8 * kPage, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 12 * kPage);
  const Block block = tier->take(7 * kPage, kPage, lock_);
  EXPECT_NE(block.storage, old.storage);
  tier->release(old, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
  tier->release(block, {});
  tier->reserve(16 * kPage, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
}

TEST_P(TierConformance, never_exceeds_its_limit_and_reports_the_numbers) {
  const auto tier = make_tier();
  EXPECT_ERROR(tier->reserve(kLimit + 1, false, lock_), TierError, std::to_string(kLimit));
  tier->reserve(kLimit - kPage, false, lock_);
  const Block first = tier->take(0, kLimit - kPage, lock_);
  EXPECT_ERROR(tier->take(0, kPage + 1, lock_), TierError, std::to_string(2 * kPage));
  const Block second = tier->take(0, kPage, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, kLimit);
  tier->release(first, {});
  tier->release(second, {});
  EXPECT_EQ(tier->stats().used_bytes, 0u);
}

TEST_P(TierConformance, reports_an_unavailable_allocation_and_continues) {
  if (GetParam().device == "cuda" && !test::is_io(GetParam().tier)) GTEST_SKIP() << "real CUDA does not fail on demand";
  const std::string& name = GetParam().tier;
  const auto tier = make_tier(test::is_io(name) ? "reserve@1=fail"
                              : name == "host"  ? "allocate_host@1=fail"
                                                : "allocate_device@1=fail");
  EXPECT_ERROR(tier->reserve(8 * kPage, false, lock_), TierError, std::to_string(8 * kPage));
  EXPECT_EQ(tier->stats().capacity_bytes, 0u);
  tier->reserve(8 * kPage, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
}

TEST_P(TierConformance, copies_still_running_protect_the_bytes_they_use) {
  const auto tier = make_tier();
  tier->reserve(8 * kPage, false, lock_);
  const Block block = tier->take(2 * kPage, 2 * kPage, lock_);
  const TransferPointer running = make_user(block), ended = make_user(block);
  finish(ended);
  tier->release(block, {running, ended});

  const Block before = tier->take(0, 2 * kPage, lock_), behind = tier->take(4 * kPage, kPage, lock_),
              over = tier->take(3 * kPage, 1, lock_);
  EXPECT_TRUE(tier->dependencies(before, 0).empty());
  EXPECT_TRUE(tier->dependencies(behind, 0).empty());
  EXPECT_EQ(tier->dependencies(over, 0), std::vector<TransferPointer>{running});
  finish(running);
  EXPECT_TRUE(tier->dependencies(over, 0).empty());
}

TEST_P(TierConformance, records_of_past_copies_keep_no_memory) {
  const auto tier = make_tier();
  Block block = tier->take(0, kPage, lock_);
  const std::weak_ptr<Storage> storage = block.storage;
  const TransferPointer ended = make_user(block);
  finish(ended);
  tier->release(block, {ended});
  block = {};
  EXPECT_EQ(storage.use_count(), is_extended() ? 1 : 0);  // the tier keeps what can be extended
}

TEST_P(TierConformance, records_of_copies_that_ended_later_keep_no_slab_that_is_replaced) {
  const auto tier = make_tier();
  if (is_extended()) GTEST_SKIP() << "the slab grows";
  for (const bool is_noticed_by_a_release : {false, true}) {
    tier->reserve(8 * kPage, true, lock_);
    std::optional<Block> block = tier->take(0, kPage, lock_), other = tier->take(kPage, kPage, lock_);
    const std::weak_ptr<Storage> storage = block->storage;
    const TransferPointer user = make_user(*block);
    if (!is_noticed_by_a_release) tier->release(*other, {});
    tier->release(*block, {user});
    finish(user);
    if (is_noticed_by_a_release) tier->release(*other, {});
    block.reset();
    other.reset();
    tier->reserve(16 * kPage, true, lock_);
    EXPECT_TRUE(storage.expired());
  }
}

TEST_P(TierConformance, a_refused_reservation_changes_nothing) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage, false, lock_);
  EXPECT_ERROR(tier->reserve(kLimit + 1, false, lock_), TierError, "limit");
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  if (is_extended()) return;
  const Block held = tier->take(0, kPage, lock_);
  EXPECT_ERROR(tier->reserve(kLimit - 3 * kPage, false, lock_), TierError, "limit");
  tier->release(held, {});
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
}

// Of the slab that is replaced nothing is left when the new one is allocated: both may not fit at the same time.
TEST_P(TierConformance, a_failed_replacement_of_its_slab_leaves_the_tier_as_it_was) {
  if (GetParam().device == "cuda" && !test::is_io(GetParam().tier)) GTEST_SKIP() << "real CUDA does not fail on demand";
  const std::string& name = GetParam().tier;
  const std::string call = test::is_io(name) ? "reserve" : name == "host" ? "allocate_host" : "allocate_device";
  for (const bool is_held : {false, true}) {
    const auto tier = make_tier(call + "@2=fail");
    tier->reserve(4 * kPage, false, lock_);
    std::optional<Block> held;
    if (is_held) held = tier->take(0, kPage, lock_);
    EXPECT_ERROR(tier->reserve(8 * kPage, true, lock_), TierError, std::to_string(8 * kPage));
    EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
    if (held) tier->release(*held, {});
    EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
    const Block block = tier->take(3 * kPage, kPage, lock_);
    EXPECT_EQ(block.offset, 3 * kPage);
    tier->release(block, {});
    tier->reserve(8 * kPage, true, lock_);
    EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
  }
}

TEST_P(TierConformance, a_slab_that_cannot_be_reserved_again_is_reported) {
  if (!test::is_io(GetParam().tier)) GTEST_SKIP() << "one failure at most can be planned for memory";
  const auto tier = make_tier("reserve@2=fail,reserve@3=fail");
  tier->reserve(4 * kPage, false, lock_);
  EXPECT_ERROR(tier->reserve(8 * kPage, true, lock_), TierError, "reserved again");
  EXPECT_EQ(tier->stats().capacity_bytes, 0u);
}

TEST_P(TierConformance, storage_outlives_its_tier_for_as_long_as_a_block_is_used) {
  auto tier = make_tier();
  tier->reserve(kPage, false, lock_);
  std::optional<Block> block = tier->take(0, kPage, lock_);
  tier.reset();
  EXPECT_EQ(block->storage.use_count(), 1);
  block.reset();
  EXPECT_EQ(device_->violations(), std::vector<std::string>{});
}

// What can be extended is, in place.
class PinnedTier : public testing::Test {
 protected:
  std::unique_ptr<Tier> make_tier(uint64_t limit_bytes = kLimit, const std::string& faults = "") {
    device_ = make_test_device("emulated", faults);
    gpu_.calls.start();
    return std::make_unique<MemoryTier>(device_->driver, MemoryKind::kHost, device_->driver, limit_bytes,
                                        BandwidthLimiters{});
  }
  void TearDown() override {
    gpu_.calls.stop();
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }
  uint64_t num_registrations() { return gpu_.calls.numbers()["cuMemHostRegister_v2"]; }
  static std::byte* data(const Block& block) {
    return static_cast<const PinnedMemory&>(*block.storage).data() + block.offset;
  }

  std::mutex mutex_;
  std::unique_lock<std::mutex> lock_{mutex_};
  emulated_gpu::System& gpu_ = emulated_gpu::System::instance();
  std::unique_ptr<TestDevice> device_;
};

TEST_F(PinnedTier, a_plan_that_needs_more_pins_only_what_is_missing_and_moves_nothing) {
  const auto tier = make_tier();
  tier->reserve(4 * kPage, false, lock_);
  const Block old = tier->take(kPage, kPage, lock_);
  *data(old) = std::byte{7};
  tier->reserve(16 * kPage, false, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 16 * kPage);
  EXPECT_EQ(gpu_.held().pinned_bytes, 16 * kPage);
  EXPECT_EQ(num_registrations(), 2u);
  const Block block = tier->take(2 * kPage, 14 * kPage, lock_);  // from before the border to the end
  EXPECT_EQ(block.storage, old.storage);
  EXPECT_EQ(block.offset, 2 * kPage);
  EXPECT_EQ(data(block), data(old) + kPage);
  EXPECT_EQ(*data(old), std::byte{7});
}

TEST_F(PinnedTier, blocks_without_a_plan_share_room_that_is_pinned_once_and_kept) {
  constexpr uint64_t kMiB = 1 << 20, kManyBytes = 300 * kMiB;
  const auto tier = make_tier(kManyBytes);
  for (int step = 0; step < 3; ++step) {
    std::vector<Block> blocks;
    for (int i = 0; i < 20; ++i) blocks.push_back(tier->take(0, kMiB + 1, lock_));
    for (const Block& block : blocks) tier->release(block, {});
  }
  EXPECT_EQ(num_registrations(), 1u);
  EXPECT_EQ(tier->stats().capacity_bytes, 256 * kMiB);
  const Block large = tier->take(0, 257 * kMiB, lock_);  // what is left is less than the usual step
  EXPECT_EQ(num_registrations(), 2u);
  EXPECT_EQ(tier->stats().capacity_bytes, kManyBytes);
  EXPECT_ERROR(tier->take(0, 44 * kMiB, lock_), TierError, "limit");
}

TEST_F(PinnedTier, a_failed_pinning_keeps_existing_memory_and_suggests_a_remedy) {
  const auto tier = make_tier(kLimit, "allocate_host@2=fail");
  tier->reserve(4 * kPage, false, lock_);
  const Block held = tier->take(0, kPage, lock_);
  try {
    tier->reserve(8 * kPage, false, lock_);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    for (const char* part : {"(32768 bytes) of pinned memory", "cuMemHostRegister_v2", "host_budget"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(std::string(error.what()).find("locked memory"), std::string::npos);
  }
  EXPECT_EQ(tier->stats().capacity_bytes, 4 * kPage);
  EXPECT_EQ(gpu_.held().pinned_bytes, 4 * kPage);
  *data(held) = std::byte{7};
  tier->reserve(8 * kPage, false, lock_);
  EXPECT_EQ(*data(held), std::byte{7});
  EXPECT_EQ(*data(tier->take(7 * kPage, kPage, lock_)), std::byte{0});
}

TEST_F(PinnedTier, room_without_a_plan_is_as_much_as_can_be_pinned_and_at_least_what_is_missing) {
  constexpr int kOutOfMemory = 2;
  const auto tier = make_tier();
  const auto refuse = [&](int num_times) {
    for (int i = 0; i < num_times; ++i) gpu_.faults.plan("cuMemHostRegister_v2", 1, kOutOfMemory);
  };
  refuse(7);  // 64 pages, 32, ... 1
  EXPECT_ERROR(tier->take(0, kPage, lock_), TierError, std::to_string(kPage) + " bytes) of pinned memory");
  EXPECT_EQ(tier->stats().capacity_bytes, 0u);
  refuse(3);
  const Block first = tier->take(0, kPage, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 8 * kPage);
  const Block rest = tier->take(0, 7 * kPage, lock_);
  refuse(4);
  const Block more = tier->take(0, 5 * kPage, lock_);
  EXPECT_EQ(tier->stats().capacity_bytes, 13 * kPage) << "not 8 + 56 / 16, which is too little";
  EXPECT_EQ(gpu_.held().pinned_bytes, 13 * kPage);
}

TEST(PeerTier, a_full_peer_reports_its_free_bytes_and_a_remedy) {
  constexpr uint64_t kBytes = uint64_t{3} << 30;
  const auto device = make_test_device("emulated");
  const auto peer = device->driver->open_peer(1);
  MemoryTier tier(device->driver, MemoryKind::kPeer, peer, 4 * kBytes, BandwidthLimiters{});
  const DeviceMemory of_another_process(peer, 2 * kBytes);
  std::mutex mutex;
  std::unique_lock lock(mutex);
  try {
    tier.reserve(kBytes, false, lock);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const Error& error) {
    EXPECT_NE(dynamic_cast<const TierError*>(&error), nullptr);
    for (const char* part : {"peer tier: 3072.0 MiB", "the other GPU's memory", "cuMemAlloc_v2", "out of memory",
                             "2048.0 MiB", "of its 8192.0 MiB", "tier='peer:1'"}) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
  }
  tier.reserve(kBytes / 2, false, lock);
  EXPECT_EQ(tier.stats().capacity_bytes, kBytes / 2);
}

TEST_F(PinnedTier, reports_the_time_of_its_reservation) {
  const auto tier = make_tier();
  EXPECT_EQ(tier->stats().reserve_seconds, 0);
  tier->reserve(kPage, false, lock_);
  EXPECT_GT(tier->stats().reserve_seconds, 0);
}

INSTANTIATE_TEST_SUITE_P(Tiers, TierConformance, testing::ValuesIn(test::tier_setups()),
                         [](const auto& info) { return info.param.tier + "_on_" + info.param.device; });

}  // namespace
}  // namespace lmswap::test::tier_test
