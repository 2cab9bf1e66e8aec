// The emulated link by a clock of the test's own, alone and shared between processes.
#include "lmswap/lanes/bandwidth_limiter.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "lmswap/lanes/shared_link.h"
#include "test_device.h"

namespace lmswap::test::bandwidth_limiter_test {
namespace {

constexpr int64_t kSecond = 1'000'000'000, kMillisecond = kSecond / 1000;
constexpr uint64_t kMega = 1'000'000;  // 1 ms at 1 GB/s

TEST(BandwidthLimiter, chunks_follow_each_other_without_a_pause_however_late_the_thread_is) {
  BandwidthLimiter limiter(1e9);
  int64_t now = 100 * kSecond;
  const int64_t ready = now;
  for (int64_t i = 1; i <= 1000; ++i) {
    const int64_t end = limiter.take(kMega, ready, now);
    ASSERT_EQ(end, ready + i * kMillisecond);
    now = end + i % 7 * kMillisecond;  // woke up late, now and then by several chunks
  }
}

TEST(BandwidthLimiter, nothing_arrives_before_the_link_could_have_moved_it) {
  BandwidthLimiter limiter(1e9);
  EXPECT_EQ(limiter.take(kMega, 5 * kSecond, 5 * kSecond), 5 * kSecond + kMillisecond);
  // The link was idle for a second, and the thread needed a while to notice the bytes: that time is gone.
  EXPECT_EQ(limiter.take(kMega, 6 * kSecond, 6 * kSecond + 5), 6 * kSecond + 5 + kMillisecond);
  // The bytes have been there for long, but what the link really did in that time is not known: some ms are made up
  // for.
  EXPECT_EQ(limiter.take(kMega, 6 * kSecond, 7 * kSecond), 7 * kSecond - 20 * kMillisecond + kMillisecond);
}

TEST(BandwidthLimiter, copies_of_a_limiter_take_turns_on_one_link) {
  BandwidthLimiter first(1e9), second = first;
  const int64_t now = kSecond;
  for (int64_t i = 0; i < 100; i += 2) {
    EXPECT_EQ(first.take(kMega, now, now), now + (i + 1) * kMillisecond);
    EXPECT_EQ(second.take(kMega, now, now), now + (i + 2) * kMillisecond);
  }
}

TEST(BandwidthLimiter, a_time_that_no_queue_explains_is_ignored) {
  const auto free_at = std::make_shared<FreeAt>(10000 * kSecond);  // of a boot that lasted longer
  BandwidthLimiter limiter(1e9, free_at);
  EXPECT_EQ(limiter.take(kMega, kSecond, kSecond), kSecond + kMillisecond);
  free_at->store(INT64_MIN);
  EXPECT_EQ(limiter.take(kMega, kSecond, kSecond), kSecond + kMillisecond);
}

TEST(BandwidthLimiter, chunks_grow_with_the_rate) {
  EXPECT_EQ(BandwidthLimiter(1e6).chunk_bytes(), 1u << 20);
  for (const double rate : {12e9, 64e9, 450e9}) {
    EXPECT_GT(static_cast<double>(BandwidthLimiter(rate).chunk_bytes()) / rate, 0.25e-3);
    EXPECT_LT(static_cast<double>(BandwidthLimiter(rate).chunk_bytes()) / rate, 0.35e-3);
  }
}

class SharedLinkTest : public testing::Test {
 protected:
  TestDirectory directory_;
  const std::string path_ = directory_.path() + "/link";
};

// Each chunk's end is taken by exactly one process: together they move what one of them could.
TEST_F(SharedLinkTest, processes_share_one_rate) {
  constexpr int kNumProcesses = 3, kNumChunks = 2000;
  constexpr int64_t kNow = kSecond;
  for (int i = 0; i < kNumProcesses; ++i) {
    if (fork() != 0) continue;
    BandwidthLimiters limiters =
        open_shared_link(path_, 1e12, 1e12);  // one chunk is 1 us: none of these times looks stale
    bool is_right = true;
    for (int chunk = 0; chunk < kNumChunks; ++chunk) {
      const int64_t soonest = kNow + chunk * (kMillisecond / 1000);
      is_right &= limiters.out.take(kMega, kNow, soonest) > soonest;
    }
    _exit(is_right ? 0 : 1);
  }
  for (int i = 0; i < kNumProcesses; ++i) {
    int status = 0;
    ASSERT_GT(wait(&status), 0);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  BandwidthLimiters limiters = open_shared_link(path_, 1e12, 1e12);
  const int64_t all = kNumProcesses * kNumChunks * (kMillisecond / 1000);
  EXPECT_EQ(limiters.out.take(kMega, kNow, kNow + all), kNow + all + kMillisecond / 1000);
  EXPECT_EQ(limiters.in.take(kMega, kNow, kNow), kNow + kMillisecond / 1000) << "the ways are apart";
}

TEST_F(SharedLinkTest, the_file_is_ours_alone) {
  const mode_t before = umask(0);
  open_shared_link(path_, 1e9, 1e9);
  umask(before);
  struct stat status;
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777u, 0600u);
}

TEST_F(SharedLinkTest, refuses_what_is_not_its_file) {
  std::filesystem::create_symlink(path_, path_ + "-symbolic");
  EXPECT_ERROR(open_shared_link(path_ + "-symbolic", 1e9, 1e9), OptionError, "symbolic link");
  EXPECT_FALSE(std::filesystem::exists(path_));
  EXPECT_ERROR(open_shared_link(directory_.path(), 1e9, 1e9), OptionError, "directory");
  EXPECT_ERROR(open_shared_link(directory_.path() + "/missing/link", 1e9, 1e9), OptionError, "No such file");
  std::ofstream(path_) << "a file of 40 bytes that is something else";
  EXPECT_ERROR(open_shared_link(path_, 1e9, 1e9), OptionError, "no file of ours");
  std::filesystem::resize_file(path_, 40);
  EXPECT_ERROR(open_shared_link(path_, 1e9, 1e9), OptionError, "no file of ours");
  EXPECT_ERROR(open_shared_link("/dev/null", 1e9, 1e9), OptionError, "no file of ours");
}

TEST_F(SharedLinkTest, refuses_another_rate) {
  const BandwidthLimiters first = open_shared_link(path_, 2e9, 1e9), second = open_shared_link(path_, 2e9, 1e9);
  EXPECT_ERROR(open_shared_link(path_, 2e9, 3e9), OptionError, "2.000000 GB/s out, 1.000000 GB/s in");
}

TEST_F(SharedLinkTest, a_lock_of_another_process_is_an_error_and_not_a_hang) {
  const BandwidthLimiters first = open_shared_link(path_, 1e9, 1e9);
  const int descriptor = open(path_.c_str(), O_RDWR);
  ASSERT_EQ(flock(descriptor, LOCK_EX | LOCK_NB), 0) << "an open link keeps the lock";
  EXPECT_ERROR(open_shared_link(path_, 1e9, 1e9), OptionError, "locked by another");
  close(descriptor);
}

}  // namespace
}  // namespace lmswap::test::bandwidth_limiter_test
