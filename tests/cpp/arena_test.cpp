#include "lmswap/tiers/arena.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <vector>

namespace lmswap::arena_test {
namespace {

// The same, page by page, the slow and obvious way.
class PageMap {
 public:
  explicit PageMap(size_t num_pages) : held_(num_pages) {}

  bool is_free(size_t first, size_t num) const {
    if (first + num > held_.size()) return false;
    for (size_t i = first; i < first + num; ++i) {
      if (held_[i]) return false;
    }
    return true;
  }

  void set(size_t first, size_t num, bool is_held) {
    for (size_t i = first; i < first + num; ++i) held_[i] = is_held;
  }

  // Where the smallest free run of at least num pages begins, the first of equals; the number of pages when none does.
  size_t best_fit(size_t num) const {
    size_t best = held_.size(), best_length = held_.size() + 1;
    for (size_t i = 0; i < held_.size();) {
      size_t length = 0;
      while (i + length < held_.size() && !held_[i + length]) ++length;
      if (length >= num && length < best_length) best = i, best_length = length;
      i += length + 1;
    }
    return best;
  }

 private:
  std::vector<bool> held_;
};

TEST(Arena, agrees_with_a_page_map_on_random_requests) {
  constexpr size_t kNumPages = 64;
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](size_t most) { return std::uniform_int_distribution<size_t>(0, most)(random); };
    Arena arena(kNumPages * kPageBytes);
    PageMap pages(kNumPages);
    std::map<size_t, size_t> held;  // first page -> pages
    size_t used = 0;
    for (int step = 0; step < 400; ++step) {
      const size_t num = 1 + draw(11), nbytes = num * kPageBytes - draw(kPageBytes - 1);
      size_t first = draw(kNumPages);
      switch (draw(2)) {
        case 0: {
          const bool is_free = pages.is_free(first, num);
          ASSERT_EQ(arena.take(first * kPageBytes, nbytes), is_free) << "seed " << seed << " step " << step;
          if (!is_free) continue;
          break;
        }
        case 1: {
          first = pages.best_fit(num);
          const auto offset = arena.take_any(nbytes);
          ASSERT_EQ(offset.has_value(), first < kNumPages) << "seed " << seed << " step " << step;
          if (!offset) continue;
          ASSERT_EQ(*offset, first * kPageBytes) << "seed " << seed << " step " << step;
          break;
        }
        default: {
          if (held.empty()) continue;
          const auto released = std::next(held.begin(), static_cast<std::ptrdiff_t>(draw(held.size() - 1)));
          arena.release(released->first * kPageBytes);
          pages.set(released->first, released->second, false);
          used -= released->second;
          held.erase(released);
          ASSERT_EQ(arena.used_bytes(), used * kPageBytes);
          continue;
        }
      }
      pages.set(first, num, true);
      held[first] = num;
      used += num;
      ASSERT_EQ(arena.used_bytes(), used * kPageBytes);
    }
  }
}

TEST(Arena, is_whole_again_when_all_is_released) {
  Arena arena(8 * kPageBytes);
  for (const uint64_t page : {3, 1, 7, 5}) ASSERT_TRUE(arena.take(page * kPageBytes, 1));
  for (const uint64_t page : {5, 1, 7, 3}) arena.release(page * kPageBytes);
  EXPECT_EQ(arena.take_any(8 * kPageBytes), 0u);
}

TEST(Arena, refuses_what_is_not_a_range_of_its_pages) {
  Arena arena(4 * kPageBytes);
  EXPECT_FALSE(arena.take(1, kPageBytes));
  EXPECT_FALSE(arena.take(0, 0));
  EXPECT_FALSE(arena.take(4 * kPageBytes, 1));
  EXPECT_FALSE(arena.take(0, 4 * kPageBytes + 1));
  EXPECT_FALSE(arena.take(kPageBytes, ~uint64_t{0} - kPageBytes));
  EXPECT_FALSE(arena.take_any(0));
  EXPECT_FALSE(Arena(0).take_any(1));
}

TEST(Arena, grows_by_what_merges_with_the_free_end) {
  Arena arena(4 * kPageBytes);
  ASSERT_TRUE(arena.take(0, 3 * kPageBytes));
  EXPECT_EQ(arena.free_bytes_at_end(), kPageBytes);
  arena.grow(6 * kPageBytes);
  EXPECT_EQ(arena.capacity_bytes(), 6 * kPageBytes);
  EXPECT_EQ(arena.used_bytes(), 3 * kPageBytes);
  EXPECT_EQ(arena.free_bytes_at_end(), 3 * kPageBytes);
  EXPECT_TRUE(arena.take(3 * kPageBytes, 3 * kPageBytes));
  EXPECT_EQ(arena.free_bytes_at_end(), 0u);
  arena.release(0);
  EXPECT_EQ(arena.free_bytes_at_end(), 0u);
}

}  // namespace
}  // namespace lmswap::arena_test
