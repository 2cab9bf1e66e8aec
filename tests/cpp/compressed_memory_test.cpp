#include "lmswap/tiers/compressed_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <thread>

#include "failing_system.h"
#include "lmswap/tiers/float_codec.h"
#include "test_device.h"

namespace lmswap::test::compressed_memory_test {
namespace {

constexpr uint64_t kBytes = 4 << 20;

class CompressedMemoryTest : public testing::Test {
 protected:
  std::unique_ptr<CompressedMemory> open(const std::string& faults = "") {
    return std::make_unique<CompressedMemory>(kBytes, std::make_shared<Faults>(faults), residency_);
  }

  // Words that keep their exponent, so that they take 28 of 32 bits.
  static Bytes make_floats(uint64_t nbytes, uint64_t seed) {
    Bytes bytes = make_bytes(nbytes, seed);
    for (uint64_t i = 3; i < nbytes; i += 4) bytes[i] = std::byte{0x3f};
    return bytes;
  }

  // From and to memory that begins `shift` bytes after a page.
  static void expect_round_trip(CompressedMemory& memory, uint64_t offset, const Bytes& bytes, uint64_t shift = 0) {
    Bytes own(shift + bytes.size() + kPageBytes), scratch(kCodecBytes);
    std::memcpy(own.data() + shift, bytes.data(), bytes.size());
    memory.write(offset, own.data() + shift, bytes.size(), scratch);
    std::fill(own.begin(), own.end(), std::byte{0x5a});
    memory.read(offset, own.data() + shift, bytes.size(), scratch);
    EXPECT_EQ(std::memcmp(own.data() + shift, bytes.data(), bytes.size()), 0) << bytes.size() << " at " << offset;
    EXPECT_TRUE(std::all_of(own.end() - kPageBytes, own.end(), [](std::byte b) { return b == std::byte{0x5a}; }));
    Bytes read_back(round_to_pages(bytes.size()));
    memory.read_back(offset, read_back.data(), bytes.size());
    EXPECT_EQ(std::memcmp(read_back.data(), bytes.data(), bytes.size()), 0);
  }

  // What lies in the pages of ours, from behind its back.
  static Bytes look() {
    for (int i = 3; i < 256; ++i) {
      char target[PATH_MAX] = {};
      if (readlink(("/proc/self/fd/" + std::to_string(i)).c_str(), target, sizeof target - 1) < 0) continue;
      if (std::strncmp(target, "/memfd:lmswap", 13) != 0) continue;
      Bytes bytes(kBytes);
      EXPECT_EQ(pread(i, bytes.data(), kBytes, 0), static_cast<ssize_t>(kBytes));
      return bytes;
    }
    ADD_FAILURE() << "there is none";
    return {};
  }

  std::shared_ptr<Residency> residency_ = std::make_shared<Residency>();
};

TEST_F(CompressedMemoryTest, restores_written_bytes_at_any_size_and_alignment) {
  const auto memory = open();
  for (const uint64_t nbytes : {1, 4095, 4096, 4097, 16385, 262143, 262144, 262145, 1000000}) {
    for (const uint64_t shift : {0, 1, 64}) {
      expect_round_trip(*memory, 8 * kPageBytes, make_floats(nbytes, nbytes + shift), shift);
      expect_round_trip(*memory, 8 * kPageBytes, make_bytes(nbytes, nbytes + shift), shift);
    }
  }
  expect_round_trip(*memory, kBytes - kPageBytes, make_bytes(kPageBytes, 1));
}

TEST_F(CompressedMemoryTest, takes_the_pages_of_what_is_encoded_and_no_more_than_the_bytes_themselves) {
  const auto memory = open();
  EXPECT_EQ(residency_->now_bytes(), 0u);
  expect_round_trip(*memory, 0, make_bytes(kBytes, 1));
  EXPECT_EQ(residency_->now_bytes(), kBytes);
  expect_round_trip(*memory, 0, make_floats(kBytes, 1));
  EXPECT_NEAR(static_cast<double>(residency_->now_bytes()), 57.0 / 64 * kBytes, kBytes / 100);
  expect_round_trip(*memory, 0, Bytes(kBytes));
  EXPECT_LT(residency_->now_bytes(), kBytes / 16);
  // Chunks that begin elsewhere than those before.
  expect_round_trip(*memory, 3 * kPageBytes, Bytes(kBytes - 3 * kPageBytes));
  EXPECT_LT(residency_->now_bytes(), kBytes / 16);
  EXPECT_EQ(residency_->peak_bytes(), kBytes);
}

TEST_F(CompressedMemoryTest, counts_all_memories_of_a_tier_until_they_are_released) {
  auto one = open(), other = open();
  expect_round_trip(*one, 0, make_bytes(kBytes, 1));
  expect_round_trip(*other, 0, make_bytes(kBytes / 2, 2));
  EXPECT_EQ(residency_->now_bytes(), kBytes + kBytes / 2);
  one.reset();
  EXPECT_EQ(residency_->now_bytes(), kBytes / 2);
  other.reset();
  EXPECT_EQ(residency_->now_bytes(), 0u);
  EXPECT_EQ(residency_->peak_bytes(), kBytes + kBytes / 2);
}

TEST_F(CompressedMemoryTest, serves_requests_from_several_threads_at_once) {
  const auto memory = open();
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      for (uint64_t round = 0; round < 3; ++round) {
        const uint64_t nbytes = kBytes / 4 - round * 5000;
        expect_round_trip(*memory, i * kBytes / 4, (i + round) % 2 ? make_floats(nbytes, i) : make_bytes(nbytes, i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST_F(CompressedMemoryTest, overwrites_every_page_and_reads_as_what_it_was_filled_with) {
  const auto memory = open();
  Bytes scratch(kCodecBytes), back(kBytes);
  memory->read(0, back.data(), kBytes, scratch);
  EXPECT_EQ(back, Bytes(kBytes)) << "before anything was written";
  for (const std::byte value : {std::byte{0}, std::byte{0xff}}) {
    const Bytes floats = make_floats(kBytes / 2, 1), noise = make_bytes(kBytes / 4, 2);
    memory->write(0, floats.data(), floats.size(), scratch);
    memory->write(kBytes / 2 + kPageBytes, noise.data(), noise.size(), scratch);
    memory->fill(0, kBytes, value);
    const Bytes pages = look();
    EXPECT_TRUE(
        std::all_of(pages.begin(), pages.end(), [&](std::byte byte) { return byte == value || byte == std::byte{0}; }));
    memory->read(kPageBytes, back.data(), kBytes - kPageBytes, scratch);
    EXPECT_TRUE(std::all_of(back.begin(), back.end() - kPageBytes, [&](std::byte byte) { return byte == value; }));
  }
}

TEST_F(CompressedMemoryTest, fills_a_part_and_leaves_the_rest) {
  const auto memory = open();
  const Bytes bytes = make_floats(kBytes / 2, 1);
  Bytes scratch(kCodecBytes), back(bytes.size());
  memory->write(0, bytes.data(), bytes.size(), scratch);
  memory->write(kBytes / 2, bytes.data(), bytes.size(), scratch);
  memory->fill(0, kBytes / 2, std::byte{1});
  memory->read(kBytes / 2, back.data(), back.size(), scratch);
  EXPECT_EQ(back, bytes);
  memory->read(0, back.data(), back.size(), scratch);
  EXPECT_EQ(back, Bytes(kBytes / 2, std::byte{1}));
}

TEST_F(CompressedMemoryTest, continues_short_reads_and_writes) {
  expect_round_trip(*open("write@*=short,read@*=short"), 0, make_floats(1000000, 1));
}

TEST_F(CompressedMemoryTest, is_allocated_with_and_without_the_noexec_flag) {
  constexpr unsigned kNoExecution = 8;
  test::needed_memory_flags = kNoExecution;  // vm.memfd_noexec=2
  expect_round_trip(*open(), 0, make_floats(1000000, 1));
  test::needed_memory_flags = 0;
  test::unknown_memory_flags = kNoExecution;  // before Linux 6.3
  expect_round_trip(*open(), 0, make_floats(1000000, 1));
  test::unknown_memory_flags = 0;
  test::needed_memory_flags = 1 << 20;
  EXPECT_ERROR(open(), TierError, "This system allows no files in memory");
  test::needed_memory_flags = 0;
}

TEST_F(CompressedMemoryTest, reports_failures) {
  Bytes scratch(kCodecBytes), bytes = make_floats(kBytes, 1);
  EXPECT_ERROR(open("reserve@1=fail"), TierError, "Cannot allocate memory");
  const auto memory = open("write@1=fail,read@1=fail,read@2=flip");
  EXPECT_ERROR(memory->write(0, bytes.data(), kBytes, scratch), TransferError, "errno 5");
  memory->write(0, bytes.data(), kBytes, scratch);
  EXPECT_ERROR(memory->read(0, bytes.data(), kBytes, scratch), TransferError, "errno 5");
  EXPECT_ERROR(memory->read(0, bytes.data(), kBytes, scratch), TransferError, "not what was written");
}

}  // namespace
}  // namespace lmswap::test::compressed_memory_test
