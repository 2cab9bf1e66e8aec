#include "lmswap/heap/heap.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "lmswap/clock.h"
#include "lmswap/error.h"

namespace {

std::atomic<int> g_mremap_error{0};
std::atomic<bool> g_mremap_unmaps{true};
std::atomic<int> g_mmap_error{0};

}  // namespace

/// In the place of the C library's: the kernel's, or a failure.
extern "C" void* mmap(void* at, size_t nbytes, int protection, int flags, int descriptor, off_t offset) noexcept {
  static const auto kNext = reinterpret_cast<decltype(&mmap)>(dlsym(RTLD_NEXT, "mmap"));
  if (g_mmap_error == 0) return kNext(at, nbytes, protection, flags, descriptor, offset);
  errno = g_mmap_error;
  return MAP_FAILED;
}

/// In the place of the C library's: the kernel's, or a failure that has unmapped the destination, as the kernel's may.
extern "C" void* mremap(void* from, size_t old_bytes, size_t new_bytes, int flags, ...) noexcept {
  va_list rest;
  va_start(rest, flags);
  void* const to = va_arg(rest, void*);
  va_end(rest);
  if (g_mremap_error == 0) {
    return reinterpret_cast<void*>(syscall(SYS_mremap, from, old_bytes, new_bytes, flags, to));
  }
  if (g_mremap_unmaps) munmap(to, new_bytes);
  errno = g_mremap_error;
  return MAP_FAILED;
}

namespace lmswap::heap::heap_test {
namespace {

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kHuge = 2 * kMiB;
const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

/// A block filled with its own byte from end to end, so an overlap or a lost page shows.
struct Block {
  char* data;
  size_t nbytes;
  char fill;

  [[nodiscard]] bool is_intact() const { return data[0] == fill && std::memcmp(data, data + 1, nbytes - 1) == 0; }
};

Block allocate_filled(PageHeap& heap, size_t nbytes, char fill) {
  auto* const data = static_cast<char*>(heap.allocate(nbytes));
  if (data != nullptr) std::memset(data, fill, nbytes);
  return {data, nbytes, fill};
}

/// What of [start, start + nbytes) whole huge pages hold.
size_t huge_bytes(uintptr_t start, size_t nbytes) {
  return (start + nbytes) / kHuge * kHuge - (start + kHuge - 1) / kHuge * kHuge;
}

size_t huge_bytes(const Block& block) { return huge_bytes(reinterpret_cast<uintptr_t>(block.data), block.nbytes); }

/// What the kernel holds in memory of [start, end).
size_t resident_bytes(uintptr_t start, uintptr_t end) {
  std::vector<unsigned char> pages((end - start) / kPage);
  if (mincore(reinterpret_cast<void*>(start), end - start, pages.data()) != 0) ADD_FAILURE() << "mincore failed";
  return kPage * static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](auto page) { return page & 1; }));
}

TEST(RangeSet, JoinsNeighboursAndSplitsWhatItLoses) {
  RangeSet set;
  set.insert({100, 10});
  set.insert({120, 10});
  EXPECT_EQ(set.bytes_from(100), 10u);
  set.insert({110, 10});
  EXPECT_EQ(set.bytes_from(100), 30u);
  EXPECT_EQ(set.bytes_from(110), 0u) << "no range begins there any more";
  set.remove({105, 10});
  EXPECT_EQ(set.total_bytes(), 20u);
  EXPECT_EQ(set.bytes_from(100), 5u);
  EXPECT_EQ(set.bytes_from(115), 15u);
}

TEST(RangeSet, FindsTheSmallestThatFits) {
  RangeSet set;
  set.insert({300, 20});
  set.insert({100, 40});
  set.insert({200, 20});
  EXPECT_EQ(set.best_fit(15).start, 200u) << "the lowest of equals";
  EXPECT_EQ(set.best_fit(21).start, 100u);
  EXPECT_EQ(set.best_fit(41).nbytes, 0u);
}

TEST(PageHeap, RoundsToPagesAndCountsThem) {
  PageHeap heap(64 * kMiB);
  void* const block = heap.allocate(2 * kPage + 1);
  ASSERT_NE(block, nullptr);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % kPage, 0u);
  EXPECT_TRUE(heap.owns(block));
  EXPECT_FALSE(heap.owns(&heap));
  EXPECT_EQ(heap.stats().live_bytes, 3 * kPage);
  EXPECT_EQ(heap.stats().num_fresh_pages, 3 * kPage / 4096);
  heap.free(block);
  EXPECT_EQ(heap.stats().live_bytes, 0u);
  EXPECT_EQ(heap.stats().retained_bytes, 3 * kPage);
}

TEST(PageHeap, ServesARepeatedLoopWithoutFreshPages) {
  PageHeap heap(64 * kMiB);
  const auto step = [&heap] {
    void* const a = heap.allocate(3 * kMiB);
    void* const b = heap.allocate(kMiB);
    heap.free(a);
    void* const c = heap.allocate(2 * kMiB);
    heap.free(b);
    heap.free(c);
  };
  step();
  const size_t after_first = heap.stats().num_fresh_pages;
  for (int i = 0; i < 10; ++i) step();
  EXPECT_EQ(heap.stats().num_fresh_pages, after_first);
  EXPECT_EQ(after_first, 4 * kMiB / 4096);
}

TEST(PageHeap, ReusesFreedNeighboursAsOneBlock) {
  PageHeap heap(64 * kMiB);
  void* const a = heap.allocate(kMiB);
  void* const b = heap.allocate(kMiB);
  heap.free(a);
  heap.free(b);
  const size_t fresh = heap.stats().num_fresh_pages;
  void* const both = heap.allocate(2 * kMiB);
  EXPECT_EQ(heap.stats().num_fresh_pages, fresh);
  heap.free(both);
}

TEST(PageHeap, ExtendsARetainedRangeByTheMissingPages) {
  PageHeap heap(64 * kMiB);
  heap.free(heap.allocate(3 * kMiB));
  const size_t fresh = heap.stats().num_fresh_pages;
  void* const larger = heap.allocate(4 * kMiB);
  EXPECT_EQ(heap.stats().num_fresh_pages - fresh, kMiB / 4096);
  EXPECT_EQ(heap.stats().peak_resident_bytes, 4 * kMiB);
  heap.free(larger);
}

TEST(PageHeap, FragmentationCostsFreshPagesButNoMemory) {
  PageHeap heap(64 * kMiB);
  std::vector<void*> blocks(8);
  for (void*& block : blocks) block = heap.allocate(kMiB);
  for (size_t i = 0; i < blocks.size(); i += 2) heap.free(blocks[i]);  // 4 MiB free, in pieces of 1
  const size_t fresh = heap.stats().num_fresh_pages;
  ASSERT_NE(heap.allocate(4 * kMiB), nullptr);
  EXPECT_EQ(heap.stats().num_fresh_pages - fresh, 4 * kMiB / 4096);
  EXPECT_EQ(heap.stats().peak_resident_bytes, 8 * kMiB);
}

TEST(PageHeap, ALimitDropsRetainedPagesAndNeverLiveOnes) {
  PageHeap heap(64 * kMiB);
  const Block keep = allocate_filled(heap, 2 * kMiB, 'k');
  const Block drop = allocate_filled(heap, 6 * kMiB, 'd');
  heap.free(drop.data);
  const auto start = reinterpret_cast<uintptr_t>(keep.data);
  EXPECT_EQ(resident_bytes(start, start + 8 * kMiB), 8 * kMiB);
  heap.set_limit(5 * kMiB);
  EXPECT_EQ(heap.stats().retained_bytes, 3 * kMiB);
  EXPECT_EQ(resident_bytes(start, start + 8 * kMiB), 5 * kMiB);
  heap.set_limit(1);
  EXPECT_EQ(resident_bytes(start, start + 8 * kMiB), 2 * kMiB);
  EXPECT_TRUE(keep.is_intact());
}

/// Bytes of [start, end) that the kernel may fill with huge pages.
size_t may_be_huge_bytes(uintptr_t start, uintptr_t end) {
  std::ifstream smaps("/proc/self/smaps");
  size_t nbytes = 0;
  uintptr_t first = 0, last = 0;
  for (std::string line; std::getline(smaps, line);) {
    uintptr_t from = 0, to = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &from, &to) == 2) std::tie(first, last) = std::tie(from, to);
    if (line.rfind("VmFlags:", 0) != 0 || line.find(" hg") == std::string::npos) continue;
    if (first < end && start < last) nbytes += std::min(last, end) - std::max(first, start);
  }
  return nbytes;
}

TEST(PageHeap, PagesMayBeHugeWhereTheyLieWhollyInsideABlock) {
  PageHeap heap(64 * kMiB);
  const auto first = reinterpret_cast<uintptr_t>(heap.allocate(5 * kMiB + kPage));
  const auto second = reinterpret_cast<uintptr_t>(heap.allocate(kMiB));
  const auto third = reinterpret_cast<uintptr_t>(heap.allocate(8 * kMiB));
  const size_t asked = may_be_huge_bytes(first, first + 5 * kMiB + kPage);
  if (asked == 0) GTEST_SKIP() << "this kernel has no huge pages";
  EXPECT_EQ(asked, huge_bytes(first, 5 * kMiB + kPage));
  EXPECT_EQ(may_be_huge_bytes(second, second + kMiB), 0u);
  EXPECT_EQ(may_be_huge_bytes(third, third + 8 * kMiB), huge_bytes(third, 8 * kMiB));
  heap.free(reinterpret_cast<void*>(third));
  heap.trim();
  EXPECT_EQ(may_be_huge_bytes(third, third + 8 * kMiB), 0u) << "nothing of it is in a block";
}

/// Takes what lies before an address `offset` bytes into a huge page, so that the next block begins there.
size_t take_up_to(PageHeap& heap, size_t offset) {
  const auto start = reinterpret_cast<uintptr_t>(heap.allocate(kPage));
  const size_t rest = (kHuge + offset - (start + kPage) % kHuge) % kHuge;
  EXPECT_TRUE(rest == 0 || heap.allocate(rest) != nullptr);
  return kPage + rest;
}

/// A heap that retains 1 MiB and 9 MiB of neighbours, between which a block lives. They begin so many pages into a huge
/// one, for which addresses a heap gets is the kernel's choice.
struct RetainingHeap : testing::TestWithParam<size_t> {
  PageHeap heap{64 * kMiB};
  size_t before = take_up_to(heap, GetParam() * kPage);
  Block small = allocate_filled(heap, kMiB, 's');
  Block keep = allocate_filled(heap, kMiB, 'k');
  Block large = allocate_filled(heap, 9 * kMiB, 'l');
  uintptr_t small_start = reinterpret_cast<uintptr_t>(small.data);
  uintptr_t first = reinterpret_cast<uintptr_t>(large.data), end = first + 9 * kMiB;

  RetainingHeap() {
    heap.free(small.data);
    heap.free(large.data);
  }
};

INSTANTIATE_TEST_SUITE_P(Placed, RetainingHeap, testing::Values(0, 1, 255, 256, 257, 511));

TEST_P(RetainingHeap, DropsWholeHugePagesAndTheRestWhereNoneIsWhole) {
  heap.set_limit(before + 11 * kMiB - kHuge - kPage);
  const size_t resident = resident_bytes(small_start, small_start + kMiB) + resident_bytes(first, end);
  EXPECT_EQ(resident, 10 * kMiB - kHuge - kPage);
  size_t resident_huge = 0;
  for (uintptr_t page = (first + kHuge - 1) / kHuge * kHuge; page + kHuge <= end; page += kHuge) {
    resident_huge += resident_bytes(page, page + kHuge) == kHuge ? kHuge : 0;
  }
  EXPECT_EQ(resident_huge, huge_bytes(large) - kHuge) << "one is gone, and no other has lost a part";
  EXPECT_TRUE(keep.is_intact());
}

TEST_P(RetainingHeap, LendsPagesOfWhatItRetainsAndPlacesBlocksAsBefore) {
  const size_t fresh = heap.stats().num_fresh_pages;
  for (int again = 0; again < 2; ++again) {
    heap.decommit(3 * kMiB);
    EXPECT_EQ(resident_bytes(first, end), 9 * kMiB - 2 * kHuge) << "whole huge pages, and lent twice is lent once";
  }
  EXPECT_EQ(heap.stats().retained_bytes, 10 * kMiB);
  EXPECT_EQ(heap.reusable_bytes(), 10 * kMiB - 2 * kHuge) << "what is lent is not there";
  EXPECT_EQ(heap.stats().num_fresh_pages - fresh, 2 * 2 * kHuge / 4096);
  const Block again = allocate_filled(heap, 9 * kMiB, 'a');
  EXPECT_EQ(again.data, large.data);
  EXPECT_TRUE(again.is_intact());
  heap.decommit(64 * kMiB);
  EXPECT_EQ(resident_bytes(small_start, small_start + kMiB), 0u) << "all that is retained";
  EXPECT_TRUE(keep.is_intact());
  EXPECT_TRUE(again.is_intact());
}

/// A heap whose 12 MiB of retained pages lie on both sides of a block, and a block of 12 MiB that is about to come.
struct FragmentedHeap : testing::Test {
  PageHeap heap{64 * kMiB};
  Block left = allocate_filled(heap, 6 * kMiB, 'l');
  Block keep = allocate_filled(heap, kMiB, 'k');
  Block right = allocate_filled(heap, 6 * kMiB, 'r');
  Block last = allocate_filled(heap, kMiB, 'm');

  FragmentedHeap() {
    heap.free(left.data);
    heap.free(right.data);
  }

  /// Allocates and frees it: `movable` bytes of it, or all that its huge pages hold, are resident at once.
  void expect_to_find(size_t movable) {
    const size_t fresh = heap.stats().num_fresh_pages;
    auto* const data = static_cast<char*>(heap.allocate(12 * kMiB));
    const auto start = reinterpret_cast<uintptr_t>(data);
    const size_t resident = resident_bytes(start, start + 12 * kMiB);
    EXPECT_EQ(resident, std::min(movable, huge_bytes(start, 12 * kMiB)));
    EXPECT_EQ(heap.stats().num_fresh_pages - fresh, (12 * kMiB - resident) / 4096);
    EXPECT_EQ(heap.stats().peak_resident_bytes, 14 * kMiB);
    std::memset(data, 'a', 12 * kMiB);
    EXPECT_TRUE((Block{data, 12 * kMiB, 'a'}.is_intact()));
    EXPECT_EQ(resident_bytes(start, start + 12 * kMiB), 12 * kMiB);
    EXPECT_EQ(resident_bytes(reinterpret_cast<uintptr_t>(left.data), reinterpret_cast<uintptr_t>(keep.data)), 0u);
    EXPECT_TRUE(keep.is_intact());
    EXPECT_TRUE(last.is_intact());
    heap.free(data);
  }
};

TEST_F(FragmentedHeap, RetainedHugePagesMoveToWhereTheyAreNeeded) {
  expect_to_find(huge_bytes(left) + huge_bytes(right));
  for (char fill : {'x', 'y', 'z'}) {  // the addresses that were left serve again
    const Block again = allocate_filled(heap, 6 * kMiB, fill);
    EXPECT_TRUE(again.is_intact());
    EXPECT_TRUE(keep.is_intact());
  }
}

TEST_F(FragmentedHeap, AHugePageThatLostAPartIsNotMovedButDropped) {
  heap.set_limit(14 * kMiB - kPage);
  heap.set_limit(0);
  void* const first = heap.allocate(6 * kMiB);
  void* const second = heap.allocate(6 * kMiB);
  EXPECT_EQ(std::min(first, second), left.data) << "with another page in the place of the one that was dropped";
  EXPECT_EQ(std::max(first, second), right.data);
  std::memset(first, 'f', 6 * kMiB);
  std::memset(second, 's', 6 * kMiB);
  heap.free(first);
  heap.free(second);
  const bool has_lost =
      (reinterpret_cast<uintptr_t>(left.data) + left.nbytes) % kHuge == 0;  // else none was whole there
  expect_to_find(huge_bytes(left) + huge_bytes(right) - (has_lost ? kHuge : 0));
}

TEST_F(FragmentedHeap, WhereTheKernelMovesNothingPagesComeAnew) {
  g_mremap_error = ENOMEM;
  expect_to_find(0);
  g_mremap_error = 0;
  const Block again = allocate_filled(heap, 12 * kMiB, 'b');
  EXPECT_TRUE(again.is_intact());
  EXPECT_TRUE(keep.is_intact());
}

/// By a kernel that finds that before it has unmapped anything.
struct UnmovableHeap : FragmentedHeap, testing::WithParamInterface<int> {};

INSTANTIATE_TEST_SUITE_P(Errors, UnmovableHeap, testing::Values(EINVAL, ENOMEM));  // Linux 5.6; at vm.max_map_count

TEST_P(UnmovableHeap, MapsNothingAnewAndGetsFreshPages) {
  g_mremap_unmaps = false;
  g_mremap_error = GetParam();
  g_mmap_error = ENOMEM;  // as where no mapping may be split
  expect_to_find(0);
  g_mremap_error = g_mmap_error = 0;
  g_mremap_unmaps = true;
  for (size_t at = 0; at < 40 * kMiB; at += kMiB) EXPECT_TRUE(heap.owns(left.data + at)) << at;
}

TEST_F(FragmentedHeap, AddressesThatTheKernelTakesAwayAreNobodysAndABlockLiesElsewhere) {
  g_mremap_error = g_mmap_error = ENOMEM;
  expect_to_find(0);
  g_mremap_error = g_mmap_error = 0;
  std::vector<uintptr_t> lost;
  const auto begin = reinterpret_cast<uintptr_t>(left.data);
  for (uintptr_t at = begin; at < begin + 50 * kMiB; at += kMiB) {
    if (!heap.owns(reinterpret_cast<void*>(at))) lost.push_back(at / kHuge * kHuge);
  }
  ASSERT_EQ(lost.size(), 2u) << "a huge page";
  ASSERT_EQ(lost[0], lost[1]);
  const auto of_others = reinterpret_cast<void*>(lost[0]);
  constexpr int kThere = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE;
  ASSERT_EQ(mmap(of_others, kHuge, PROT_READ | PROT_WRITE, kThere, -1, 0), of_others) << "they are free";
  std::memset(of_others, 'o', kHuge);
  for (size_t nbytes = 12 * kMiB; nbytes > kMiB; nbytes /= 2) {
    const Block again = allocate_filled(heap, nbytes, 'b');
    EXPECT_TRUE(again.is_intact());
  }
  EXPECT_TRUE((Block{static_cast<char*>(of_others), kHuge, 'o'}.is_intact()));
  EXPECT_TRUE(keep.is_intact());
  munmap(of_others, kHuge);
}

TEST(PageHeap, OnlyWhatWasWrittenToIsThereForReuse) {
  PageHeap heap(64 * kMiB);
  const Block written = allocate_filled(heap, kMiB, 'w');
  void* const unwritten = heap.allocate(kMiB);
  heap.free(written.data);
  heap.free(unwritten);
  EXPECT_EQ(heap.stats().retained_bytes, 2 * kMiB);
  EXPECT_EQ(heap.reusable_bytes(), kMiB);
}

TEST(PageHeap, TrimGivesBackAndForgetsTheHighestLive) {
  PageHeap heap(64 * kMiB);
  const Block block = allocate_filled(heap, 8 * kMiB, 'x');
  heap.free(block.data);
  const auto start = reinterpret_cast<uintptr_t>(block.data);
  EXPECT_EQ(resident_bytes(start, start + 8 * kMiB), 8 * kMiB);
  heap.trim();
  EXPECT_EQ(heap.stats().retained_bytes, 0u);
  EXPECT_EQ(resident_bytes(start, start + 8 * kMiB), 0u);
  void* const freed = heap.allocate(kMiB);
  void* const between = heap.allocate(kMiB);
  heap.free(freed);
  void* const larger = heap.allocate(2 * kMiB);  // does not fit into what was freed
  EXPECT_EQ(heap.stats().retained_bytes, 0u) << "3 MiB live is the highest since";
  heap.free(between);
  heap.free(larger);
}

TEST(PageHeap, PeaksCountFromTheirReset) {
  PageHeap heap(64 * kMiB);
  heap.free(heap.allocate(4 * kMiB));
  EXPECT_EQ(heap.stats().peak_live_bytes, 4 * kMiB);
  heap.reset_peak();
  EXPECT_EQ(heap.stats().peak_live_bytes, 0u);
  EXPECT_EQ(heap.stats().peak_resident_bytes, 4 * kMiB) << "still retained";
  heap.free(heap.allocate(kMiB));
  EXPECT_EQ(heap.stats().peak_live_bytes, kMiB);
}

TEST(PageHeap, KeepsTheLastChanges) {
  PageHeap heap(64 * kMiB);
  constexpr int kPairs = 40'000;
  for (int pair = 0; pair < kPairs; ++pair) heap.free(heap.allocate(kPage));
  const std::vector<Change> changes = heap.changes(0, monotonic_seconds());
  EXPECT_EQ(changes.size(), 65'536u);
  EXPECT_EQ(changes.back().live_bytes, 0u);
  EXPECT_EQ(changes[changes.size() - 2].live_bytes, kPage);
}

TEST(PageHeap, RefusesWhatItsAddressesDoNotHoldAndGoesOn) {
  PageHeap heap(64 * kMiB);
  EXPECT_EQ(heap.allocate(0), nullptr);
  EXPECT_EQ(heap.allocate(65 * kMiB), nullptr);
  EXPECT_EQ(heap.allocate(SIZE_MAX), nullptr);
  void* const most = heap.allocate(60 * kMiB);
  ASSERT_NE(most, nullptr);
  EXPECT_EQ(heap.allocate(5 * kMiB), nullptr);
  heap.free(most);
  EXPECT_NE(heap.allocate(64 * kMiB), nullptr) << "freed addresses are one range again";
}

TEST(PageHeapDeathTest, AbortsOnAPointerThatIsNoLiveBlock) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  PageHeap heap(64 * kMiB);
  auto* const block = static_cast<char*>(heap.allocate(kMiB));
  EXPECT_DEATH(heap.free(block + kPage), "not the start of a live block");
  heap.free(block);
  EXPECT_DEATH(heap.free(block), "not the start of a live block");
}

/// Lets the process map only `nbytes` more than it has.
void limit_addresses(size_t nbytes) {
  size_t mapped_pages = 0;
  std::ifstream("/proc/self/statm") >> mapped_pages;
  const rlimit limit{mapped_pages * kPage + nbytes, RLIM_INFINITY};
  if (setrlimit(RLIMIT_AS, &limit) != 0) std::_Exit(1);
}

TEST(PageHeapDeathTest, MakesDoWithFewerAddressesUnderALimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto serve_under_limit = [] {
    limit_addresses(1024 * kMiB);
    PageHeap heap(size_t{1} << 40);
    const bool is_served = heap.allocate(100 * kMiB) != nullptr && heap.allocate(1024 * kMiB) == nullptr;
    std::_Exit(is_served ? 0 : 2);
  };
  EXPECT_EXIT(serve_under_limit(), testing::ExitedWithCode(0), "");
}

TEST(PageHeapDeathTest, LeavesHalfOfTheAddressesToOthersUnderALimit) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto map_under_limit = [] {
    limit_addresses(8192 * kMiB);
    const PageHeap heap(size_t{1} << 40);
    const void* const others = mmap(nullptr, 3900 * kMiB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    std::_Exit(others == MAP_FAILED ? 2 : 0);
  };
  EXPECT_EXIT(map_under_limit(), testing::ExitedWithCode(0), "");
}

TEST(PageHeapDeathTest, SaysSoWhenThereAreNoAddresses) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto make_under_limit = [] {
    limit_addresses(32 * kMiB);
    try {
      PageHeap heap(size_t{1} << 40);
    } catch (const Error& error) {
      std::fputs(error.what(), stderr);
      std::_Exit(dynamic_cast<const OptionError*>(&error) != nullptr ? 0 : 2);
    }
    std::_Exit(3);
  };
  EXPECT_EXIT(make_under_limit(), testing::ExitedWithCode(0), "may not reserve even 64.0 MiB.*ulimit -v");
}

/// A random walk of allocations and frees, checked after every move against what a heap must hold to.
class RandomWalk : public testing::TestWithParam<std::pair<unsigned, size_t>> {};

TEST_P(RandomWalk, KeepsContentsAndStaysWithinTheLimit) {
  const auto [seed, limit] = GetParam();
  std::mt19937 random(seed);
  PageHeap heap(256 * kMiB);
  heap.set_limit(limit);
  std::vector<Block> blocks;
  size_t live = 0;
  size_t highest_live = 0;
  uintptr_t lowest = UINTPTR_MAX;
  uintptr_t highest = 0;
  for (int move = 0; move < 600; ++move) {
    if (blocks.empty() || (random() % 100 < 55 && live < 24 * kMiB)) {
      const size_t nbytes = 1 + random() % (random() % 4 == 0 ? 4 * kMiB : 64 * 1024);
      const Block block = allocate_filled(heap, nbytes, static_cast<char>(move));
      ASSERT_NE(block.data, nullptr);
      const auto start = reinterpret_cast<uintptr_t>(block.data);
      const size_t rounded = (nbytes + kPage - 1) / kPage * kPage;
      for (const Block& other : blocks)
        ASSERT_TRUE(block.data + rounded <= other.data || other.data + other.nbytes <= block.data) << "overlap";
      lowest = std::min(lowest, start);
      highest = std::max(highest, start + rounded);
      live += rounded;
      blocks.push_back(block);
    } else {
      const size_t victim = random() % blocks.size();
      ASSERT_TRUE(blocks[victim].is_intact());
      heap.free(blocks[victim].data);
      live -= (blocks[victim].nbytes + kPage - 1) / kPage * kPage;
      blocks[victim] = blocks.back();
      blocks.pop_back();
    }
    highest_live = std::max(highest_live, live);
    const Stats stats = heap.stats();
    ASSERT_EQ(stats.live_bytes, live);
    ASSERT_EQ(resident_bytes(lowest, highest), live + stats.retained_bytes);
    ASSERT_EQ(heap.reusable_bytes(), stats.retained_bytes) << "every block was written to";
    ASSERT_LE(live + stats.retained_bytes, limit > 0 ? std::max(limit, live) : highest_live);
  }
  for (const Block& block : blocks) ASSERT_TRUE(block.is_intact());
  EXPECT_EQ(heap.stats().peak_live_bytes, highest_live);
}

INSTANTIATE_TEST_SUITE_P(PageHeap, RandomWalk,
                         testing::Values(std::pair{1u, size_t{0}}, std::pair{2u, size_t{0}}, std::pair{3u, 8 * kMiB},
                                         std::pair{4u, 40 * kMiB}, std::pair{5u, size_t{1}}));

TEST(PageHeap, ServesThreadsAtOnce) {
  PageHeap heap(256 * kMiB);
  const auto work = [&heap](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<Block> blocks;
    for (int move = 0; move < 300; ++move) {
      blocks.push_back(allocate_filled(heap, 1 + random() % (256 * 1024), static_cast<char>(random())));
      if (blocks.size() < 8) continue;
      const size_t victim = random() % blocks.size();
      EXPECT_TRUE(blocks[victim].is_intact());
      heap.free(blocks[victim].data);
      blocks[victim] = blocks.back();
      blocks.pop_back();
      if (move % 50 == 0) heap.trim();
    }
    for (const Block& block : blocks) heap.free(block.data);
  };
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) threads.emplace_back(work, seed);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(heap.stats().live_bytes, 0u);
}

}  // namespace
}  // namespace lmswap::heap::heap_test
