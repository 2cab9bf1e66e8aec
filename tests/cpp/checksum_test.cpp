// No byte changes unseen between a tensor and its way back from a file, whichever backend carries it.
#include "lmswap/checksum.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <thread>

#include "lmswap/engine.h"
#include "test_device.h"

namespace lmswap::test::checksum_test {
namespace {

constexpr uint64_t kMiB = 1 << 20, kSlabBytes = 16 * kMiB, kStretchBytes = 64 << 10;

uint64_t sum_of(const test::Bytes& bytes) {
  Checksums sums(bytes.size());
  sums.update(0, bytes.data(), bytes.size());
  return sums.sums().front();
}

TEST(Checksums, are_of_words_times_odd_numbers) {
  auto bytes = make_bytes(1003, 1);
  bytes.resize(1004);
  uint64_t expected = 0;
  for (uint32_t i = 0; i < 251; ++i) {
    uint32_t word = 0;
    std::memcpy(&word, &bytes[4 * i], sizeof word);
    expected += uint64_t{word} * ((2 * i + 1) * 0x9e3779b1u);
  }
  bytes.resize(1003);
  EXPECT_EQ(sum_of(bytes), expected);
}

TEST(Checksums, see_every_bit_and_pairs_of_signs_and_words_that_change_places) {
  auto bytes = make_bytes(2 * kPageBytes + 13, 2);
  const uint64_t sum = sum_of(bytes);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      bytes[i] ^= std::byte(1 << bit);
      ASSERT_NE(sum_of(bytes), sum) << "byte " << i << ", bit " << bit;
      bytes[i] ^= std::byte(1 << bit);
    }
  }
  const auto exchange = [&](size_t word) { std::swap_ranges(&bytes[0], &bytes[4], &bytes[word]); };
  for (size_t word = 4; word + 4 <= bytes.size(); word += 4) {
    for (const size_t sign : {size_t{3}, word + 3}) bytes[sign] ^= std::byte{0x80};
    ASSERT_NE(sum_of(bytes), sum) << "the signs of the first number and of that at byte " << word;
    for (const size_t sign : {size_t{3}, word + 3}) bytes[sign] ^= std::byte{0x80};
    exchange(word);
    ASSERT_NE(sum_of(bytes), sum) << "the first number and that at byte " << word;
    exchange(word);
  }
}

TEST(Checksums, say_in_which_mib_the_bytes_first_differ) {
  auto bytes = make_bytes(3 * kMiB + 5, 3);
  Checksums sums(bytes.size());
  sums.update(0, bytes.data(), 2 * kMiB);
  sums.update(2 * kMiB, &bytes[2 * kMiB], kMiB + 5);
  EXPECT_EQ(sums.first_change(0, bytes.data(), bytes.size()), std::nullopt);
  bytes.back() ^= std::byte{1};
  EXPECT_EQ(sums.first_change(0, bytes.data(), bytes.size()), 3 * kMiB);
  bytes[2 * kMiB - 1] ^= std::byte{1};
  EXPECT_EQ(sums.first_change(kMiB, &bytes[kMiB], kMiB), kMiB);
  EXPECT_EQ(sums.first_change(0, bytes.data(), kMiB), std::nullopt);
}

TEST(Checksums, of_a_part_see_one_stretch_in_four_each_of_them_in_turn) {
  const auto bytes = make_bytes(kMiB, 4);
  for (uint64_t first = 0; first < 4; ++first) {
    Checksums sums(kMiB, 4, first);
    sums.update(0, bytes.data(), kMiB);
    for (uint64_t stretch = 0; stretch < 16; ++stretch) {
      auto changed = bytes;
      changed[stretch * kStretchBytes + 77] ^= std::byte{1};
      EXPECT_EQ(sums.first_change(0, changed.data(), kMiB).has_value(), stretch % 4 == first) << stretch;
    }
  }
}

TEST(ChecksumBudget, is_a_share_of_the_time_of_which_ten_seconds_are_kept) {
  ChecksumBudget budget(0.01, 100);
  EXPECT_TRUE(budget.is_left(100));
  budget.spend(0.15);
  EXPECT_FALSE(budget.is_left(100));
  EXPECT_FALSE(budget.is_left(104.9));
  EXPECT_TRUE(budget.is_left(105.1));
  budget.spend(0.001);
  EXPECT_FALSE(budget.is_left(105.1));
  EXPECT_TRUE(budget.is_left(1e6));
  budget.spend(0.101);
  EXPECT_FALSE(budget.is_left(1e6)) << "idle hours count as ten seconds";
}

TEST(ChecksumBudget, is_spent_by_sums) {
  const auto budget = std::make_shared<ChecksumBudget>(1e-9, 0);
  EXPECT_TRUE(budget->is_left(0));
  const auto bytes = make_bytes(kMiB, 5);
  Checksums(kMiB, 1, 0, budget).update(0, bytes.data(), kMiB);
  EXPECT_FALSE(budget->is_left(0));
}

// From and to a page's first byte, straight between tensor and file; from elsewhere, through a scratch; on a device
// that is not the host, through bounce buffers.
struct Way {
  std::string device;
  uint64_t shift;
};

class ChecksummedCopies : public testing::TestWithParam<Way> {
 protected:
  void open(uint64_t nbytes, const std::string& faults = "", SafetyOptions options = {},
            BandwidthLimiters limiters = {}) {
    nbytes_ = nbytes;
    device_ = make_test_device(GetParam().device, faults);
    engine_ = Engine::open(device_->driver, device_->faults, std::move(limiters), options);
    engine_->open_disk_tier(directory_.path(), 64 * kMiB, 3);
    engine_->reserve("disk", kSlabBytes);
    a_ = device_->allocate(nbytes + kPageBytes);
    b_ = device_->allocate(nbytes + kPageBytes);
    bytes_ = make_bytes(nbytes, nbytes);
    upload(a_, bytes_);
  }
  void TearDown() override {
    engine_->close();
    engine_.reset();
    for (const uint64_t pointer : {a_, b_}) device_->free(pointer);
    EXPECT_EQ(device_->violations(), std::vector<std::string>{});
  }

  void upload(uint64_t pointer, const test::Bytes& bytes) { device_->upload(pointer + GetParam().shift, bytes); }
  Token out(uint64_t offset = 0) {
    Token token(engine_->out_start(1, "disk", offset, a_ + GetParam().shift, nbytes_, device_->stream));
    engine_->out_done(token.handle(), device_->stream);
    return token;
  }
  Arrival in(const Token& token) {
    const uint64_t pointer = b_ + GetParam().shift;
    return {token.handle(), engine_->in_start(1, token.handle(), pointer, nbytes_, device_->stream)};
  }
  void in_done(const Arrival& arrival) {
    engine_->in_done(arrival.handle, arrival.transfer, device_->stream);
    engine_->confirm();
  }
  test::Bytes arrived() { return device_->download(b_ + GetParam().shift, nbytes_); }

  // Where the bytes of one more copy in are found to differ.
  std::optional<uint64_t> first_change(const Token& token) {
    try {
      in_done(in(token));
    } catch (const BytesDiffer& error) {
      return error.offset_bytes;
    }
    EXPECT_EQ(arrived(), bytes_);
    return std::nullopt;
  }

  // The tier's unnamed file, from behind the engine's back.
  static int open_file() {
    for (int i = 3; i < 256; ++i) {
      if (lseek(i, 0, SEEK_END) != kSlabBytes || !(fcntl(i, F_GETFL) & O_DIRECT)) continue;
      return ::open(("/proc/self/fd/" + std::to_string(i)).c_str(), O_RDWR | O_CLOEXEC);
    }
    return -1;
  }
  static test::Bytes read_file(uint64_t offset, uint64_t nbytes) {
    test::Bytes bytes(nbytes);
    const int file = open_file();
    EXPECT_EQ(pread(file, bytes.data(), nbytes, static_cast<off_t>(offset)), static_cast<ssize_t>(nbytes));
    close(file);
    return bytes;
  }
  static void write_file(uint64_t offset, const test::Bytes& bytes) {
    const int file = open_file();
    EXPECT_EQ(pwrite(file, bytes.data(), bytes.size(), static_cast<off_t>(offset)), static_cast<ssize_t>(bytes.size()));
    close(file);
  }
  static void flip(uint64_t offset, std::byte bits) {
    auto byte = read_file(offset, 1);
    byte.front() ^= bits;
    write_file(offset, byte);
  }

  // A byte in each of four stretches that follow each other.
  static void flip_stretches(uint64_t offset) {
    for (uint64_t i = 0; i < 4; ++i) flip(offset + i * kStretchBytes + 9, std::byte{1});
  }

  // Once the bytes of the copy out are in the file, which for staged ones is later than out_done.
  void wait_until_written(const Token& token) { EXPECT_EQ(first_change(token), std::nullopt); }

  TestDirectory directory_;
  std::unique_ptr<TestDevice> device_;
  std::shared_ptr<Engine> engine_;
  uint64_t nbytes_ = 0, a_ = 0, b_ = 0;
  test::Bytes bytes_;
};

TEST_P(ChecksummedCopies, no_byte_changes_in_the_file_unseen) {
  open(kPageBytes + 77);
  const Token token = out(kPageBytes);
  wait_until_written(token);
  for (uint64_t i = 0; i < nbytes_; i += i % 997 == 0 || i > kPageBytes - 8 ? 1 : 31) {
    flip(kPageBytes + i, std::byte{0x10});
    ASSERT_EQ(first_change(token), 0u) << i;
    flip(kPageBytes + i, std::byte{0x10});
  }
  EXPECT_EQ(first_change(token), std::nullopt) << "the same token after copies that failed";
  flip(kPageBytes + nbytes_, std::byte{0x10});
  EXPECT_EQ(first_change(token), std::nullopt) << "what fills the last page is nobody's";
}

TEST_P(ChecksummedCopies, say_within_which_mib_of_many_requests_a_quarter_of_one_changed) {
  open(9 * kMiB);
  const Token token = out();
  wait_until_written(token);
  const uint64_t last = nbytes_ - 4 * kStretchBytes;
  for (const uint64_t place : {uint64_t{0}, kMiB - 4 * kStretchBytes, kMiB, 4 * kMiB, 5 * kMiB + kStretchBytes, last}) {
    for (const uint64_t changed : std::set{place, last}) flip_stretches(changed);
    EXPECT_EQ(first_change(token), place / kMiB * kMiB);
    for (const uint64_t changed : std::set{place, last}) flip_stretches(changed);
  }
  EXPECT_EQ(first_change(token), std::nullopt);
}

TEST_P(ChecksummedCopies, see_each_byte_of_a_large_copy) {
  open(kMiB + 1);
  for (const uint64_t at : {uint64_t{0}, 5 * kPageBytes + 3, kMiB - kStretchBytes + 1, kMiB}) {
    const Token token = out();
    wait_until_written(token);
    flip(at, std::byte{1});
    EXPECT_EQ(first_change(token), at / kMiB * kMiB) << at;
    flip(at, std::byte{1});
  }
}

TEST_P(ChecksummedCopies, see_another_blocks_bytes_stale_pages_and_lost_writes) {
  open(3 * kMiB);
  const Token stale = out();
  wait_until_written(stale);
  const auto before = read_file(0, 3 * kMiB);
  bytes_ = make_bytes(nbytes_, 7);
  upload(a_, bytes_);
  const Token token = out(4 * kMiB);
  wait_until_written(token);
  const auto right = read_file(4 * kMiB, 3 * kMiB);
  write_file(4 * kMiB, before);
  EXPECT_EQ(first_change(token), 0u);
  write_file(4 * kMiB, right);
  write_file(5 * kMiB, {&before[kMiB], &before[kMiB + 4 * kStretchBytes]});
  EXPECT_EQ(first_change(token), kMiB);
  write_file(5 * kMiB, test::Bytes(4 * kStretchBytes));
  EXPECT_EQ(first_change(token), kMiB);
  write_file(4 * kMiB, right);
  EXPECT_EQ(first_change(token), std::nullopt);
}

TEST_P(ChecksummedCopies, detect_a_bit_changed_in_memory_after_the_read_at_every_wait) {
  open(kMiB, "read@2=flip");
  const Token token = out();
  EXPECT_EQ(first_change(token), std::nullopt);
  const Arrival arrival = in(token);
  EXPECT_ERROR(in_done(arrival), TransferError, "what came back is not what left");
  EXPECT_ERROR(in_done(arrival), TransferError, "within the MiB at byte 0");
  while (!engine_->is_finished(arrival.transfer)) std::this_thread::yield();
  EXPECT_EQ(first_change(token), std::nullopt);
}

TEST_P(ChecksummedCopies, pass_for_unchanged_bytes_of_any_size_and_disk_access) {
  for (const uint64_t nbytes : {uint64_t{1}, uint64_t{3}, kPageBytes, kMiB - 1, kMiB, kMiB + 1, 4 * kMiB + 5}) {
    for (const bool is_paced : {false, true}) {
      SCOPED_TRACE(nbytes);
      const double rate = is_paced ? 1e9 : 0;
      open(nbytes, "write@*=short,read@*=short", {.wipes = is_paced}, {BandwidthLimiter(rate), BandwidthLimiter(rate)});
      {
        const Token token = out();
        for (int i = 0; i < 3; ++i) EXPECT_EQ(first_change(token), std::nullopt);
      }
      TearDown();
    }
  }
  open(1);
}

TEST_P(ChecksummedCopies, are_left_to_audits_where_there_are_any) {
  open(kMiB + 1, "read@1=flip", {.audits = true});
  const Token token = out();
  engine_->take_checksums(engine_->out_transfer(token.handle()));  // that was the first read
  flip(0, std::byte{1});
  const Arrival arrival = in(token);
  in_done(arrival);
  EXPECT_EQ(arrived()[0], bytes_[0] ^ std::byte{1});
  flip(0, std::byte{1});
}

INSTANTIATE_TEST_SUITE_P(Ways, ChecksummedCopies,
                         testing::Values(Way{"host", 0}, Way{"host", 64}, Way{"emulated", 0}, Way{"emulated", 64}),
                         [](const auto& info) {
                           return info.param.device + (info.param.shift == 0 ? "_aligned" : "_shifted");
                         });

}  // namespace
}  // namespace lmswap::test::checksum_test
