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
      return other.storage == block.storage && other.offset >= block.offset &&
             other.offset + other.nbytes <= block.offset + block.nbytes;
    });
  }
  Numbers take_until(size_t number) {
    size_t taken = 0;
    return take([&](const Block&) { return taken++ < number; });
  }
  Numbers overlapping(const Block& block) const {
    Numbers found;
    for (const TransferPointer& user : users_) {
      const Block& other = user->block;
      if (other.storage == block.storage && other.offset < block.offset + block.nbytes &&
          block.offset < other.offset + other.nbytes) {
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
  const std::vector<std::shared_ptr<Storage>> storages = {std::make_shared<PinnedMemory>(device->driver, 4096),
                                                          std::make_shared<PinnedMemory>(device->driver, 4096)};
  for (unsigned seed = 0; seed < 20; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](uint64_t most) { return std::uniform_int_distribution<uint64_t>(0, most)(random); };
    const auto make_block = [&] { return Block{storages[draw(1)], draw(40), 1 + draw(draw(3) == 0 ? 30 : 3)}; };
    PendingTransfers users;
    Reference reference;
    for (int64_t number = 1; number <= 300; ++number) {
      const Block block = make_block();
      switch (draw(5)) {
        case 0:
          ASSERT_EQ(numbers(users.take_within(block)), reference.take_within(block));
          break;
        case 1: {
          const size_t most = draw(4);
          size_t taken = 0;
          const auto first = users.take_until([&](const TransferPointer&) { return taken++ == most; });
          ASSERT_EQ(numbers(first), reference.take_until(most));
          break;
        }
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

}  // namespace
}  // namespace lmswap::pending_transfers_test
