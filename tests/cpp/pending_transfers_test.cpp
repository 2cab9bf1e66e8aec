#include "lmswap/tiers/pending_transfers.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "lmswap/tiers/storage.h"
#include "test_device.h"

namespace lmswap::pending_transfers_test {
namespace {

using Numbers = std::set<int64_t>;

Numbers numbers(const std::vector<TransferPointer>& users) {
  Numbers found;
  for (const TransferPointer& user : users) found.insert(user->number);
  EXPECT_EQ(found.size(), users.size());
  return found;
}

// The same by a look at each, the slow and obvious way.
class Reference {
 public:
  void add(const TransferPointer& user) { users_.push_back(user); }
  Numbers take_within(const Block& block) {
    return take([&](const Block& other) {
      return other.offset >= block.offset && other.offset + other.nbytes <= block.offset + block.nbytes;
    });
  }
  void remove(const TransferPointer& user) { std::erase(users_, user); }
  Numbers take_all() {
    return take([](const Block&) { return true; });
  }
  Numbers overlapping(const Block& block) const {
    Numbers found;
    for (const TransferPointer& user : users_) {
      const Block& other = user->block;
      if (other.offset < block.offset + block.nbytes && block.offset < other.offset + other.nbytes) {
        found.insert(user->number);
      }
    }
    return found;
  }
  size_t size() const { return users_.size(); }

 private:
  template <typename Predicate>
  Numbers take(Predicate is_taken) {
    Numbers taken;
    std::erase_if(users_, [&](const TransferPointer& user) {
      if (!is_taken(user->block)) return false;
      taken.insert(user->number);
      return true;
    });
    return taken;
  }
  std::vector<TransferPointer> users_;
};

TEST(PendingTransfers, agree_with_a_look_at_each_on_random_blocks) {
  const auto device = test::make_test_device("host");
  const auto storage = std::make_shared<PinnedMemory>(device->driver, 4096);
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](uint64_t most) { return std::uniform_int_distribution<uint64_t>(0, most)(random); };
    const auto make_block = [&] { return Block{storage, draw(40), 1 + draw(draw(3) == 0 ? 30 : 3)}; };
    PendingTransfers users;
    Reference reference;
    for (int64_t number = 1; number <= 300; ++number) {
      const Block block = make_block();
      switch (draw(8)) {
        case 0:
        case 1:
          ASSERT_EQ(numbers(users.take_within(block)), reference.take_within(block));
          break;
        case 2:
          if (const auto found = users.overlapping(block); !found.empty()) {
            users.remove(found.back());
            reference.remove(found.back());
          }
          break;
        case 3:
          if (draw(9) == 0) {
            ASSERT_EQ(numbers(users.take_all()), reference.take_all());
          }
          break;
        default: {
          const auto user = std::make_shared<Transfer>(device->driver, Direction::kIn, number, 1, 1, block);
          users.add(user);
          reference.add(user);
        }
      }
      const Block other = make_block();
      ASSERT_EQ(numbers(users.overlapping(other)), reference.overlapping(other));
      ASSERT_EQ(users.size(), reference.size());
    }
  }
}

TEST(PendingTransfers, finished_ones_are_removed_in_order_once_they_are_many) {
  const auto device = test::make_test_device("host");
  const auto storage = std::make_shared<PinnedMemory>(device->driver, 4096);
  PendingTransfers users;
  const auto add = [&](int64_t number, bool ends) {
    const Block block{storage, 8 * static_cast<uint64_t>(number % 99), 8};
    const auto user = std::make_shared<Transfer>(device->driver, Direction::kIn, number, 1, 1, block);
    if (ends) {
      user->state.fail("ended by the test");
      user->state.settle();
    }
    users.add(user);
  };
  for (int64_t number = 1; number <= 64; ++number) add(number, number != 50);
  EXPECT_TRUE(users.take_finished_if_many().empty());
  add(65, true);
  const Numbers taken = numbers(users.take_finished_if_many());
  EXPECT_EQ(taken.size(), 49U);
  EXPECT_EQ(*taken.rbegin(), 49);
  EXPECT_EQ(users.size(), 16U);
  for (int64_t number = 66; number <= 200; ++number) add(number, true);
  EXPECT_TRUE(users.take_finished_if_many().empty());  // number 50 has not ended
  EXPECT_EQ(users.size(), 151U);
  EXPECT_EQ(numbers(users.overlapping(Block{storage, 8 * 50, 8})), (Numbers{50, 149}));
}

}  // namespace
}  // namespace lmswap::pending_transfers_test
