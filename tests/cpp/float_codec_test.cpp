#include "lmswap/tiers/float_codec.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdlib>
#include <cstring>
#include <random>

#include "lmswap/tiers/arena.h"
#include "test_device.h"

namespace lmswap::test::float_codec_test {
namespace {

class FloatCodecTest : public testing::Test {
 protected:
  FloatCodecTest() : bytes_(kCodecBytes) {}
  CodecMemory memory() { return CodecMemory(bytes_.data(), kCodecBytes); }

  // How many bytes it takes; as many as there are where it is not encoded.
  uint64_t round_trip(const Bytes& chunk) {
    const auto encoded_bytes = encode(chunk.data(), chunk.size(), memory());
    if (!encoded_bytes) return chunk.size();
    Bytes back(chunk.size() + kPageBytes, std::byte{0x5a});
    EXPECT_TRUE(decode(back.data(), chunk.size(), memory(), *encoded_bytes));
    EXPECT_EQ(Bytes(back.begin() + static_cast<std::ptrdiff_t>(chunk.size()), back.end()),
              Bytes(kPageBytes, std::byte{0x5a}))
        << "behind the chunk";
    back.resize(chunk.size());
    EXPECT_EQ(back, chunk) << chunk.size() << " bytes";
    return *encoded_bytes;
  }

  // Of normally distributed values, of which those below `least` are zeros.
  template <typename Word>
  Bytes values(uint64_t nbytes, float least) {
    Bytes chunk(nbytes);
    std::normal_distribution<float> normal;
    for (uint64_t i = 0; i + sizeof(Word) <= nbytes; i += sizeof(Word)) {
      const float value = normal(random_);
      const uint32_t bits = value < least ? 0 : std::bit_cast<uint32_t>(value);
      const auto word = static_cast<Word>(bits >> (32 - 8 * sizeof(Word)));
      std::memcpy(chunk.data() + i, &word, sizeof word);
    }
    return chunk;
  }

  std::mt19937 random_{1};
  Bytes bytes_;
};

TEST_F(FloatCodecTest, takes_fewer_bytes_for_what_tensors_hold) {
  constexpr double kChunk = kChunkBytes, kAll = -100;
  EXPECT_NEAR(static_cast<double>(round_trip(values<uint32_t>(kChunkBytes, kAll))) / kChunk, 0.875, 0.01);
  EXPECT_NEAR(static_cast<double>(round_trip(values<uint32_t>(kChunkBytes, 0))) / kChunk, 0.469, 0.01);
  EXPECT_NEAR(static_cast<double>(round_trip(values<uint16_t>(kChunkBytes, kAll))) / kChunk, 0.75, 0.01);
  EXPECT_NEAR(static_cast<double>(round_trip(values<uint16_t>(kChunkBytes, 0))) / kChunk, 0.4375, 0.01);
  Bytes halves = test::make_bytes(kChunkBytes, 1);  // whose exponents are all over the place
  for (uint64_t i = 0; i < kChunkBytes; i += 4) halves[i] = halves[i + 1] = std::byte{0};
  EXPECT_NEAR(static_cast<double>(round_trip(halves)) / kChunk, 0.5625, 0.01);
  EXPECT_LT(round_trip(Bytes(kChunkBytes)), kChunkBytes / 20);
}

TEST_F(FloatCodecTest, leaves_noise_alone) {
  EXPECT_FALSE(encode(test::make_bytes(kChunkBytes, 1).data(), kChunkBytes, memory()));
}

TEST_F(FloatCodecTest, restores_chunks_of_any_size) {
  for (const uint64_t nbytes : {1, 3, 4096, 4097, 8191, 8192, 8193, 8194, 8195, 65537, 262143}) {
    round_trip(values<uint32_t>(nbytes, 0));
    round_trip(values<uint16_t>(nbytes, -100));
    round_trip(Bytes(nbytes, std::byte{0xff}));
  }
}

// Each chunk is of stretches of different kinds, so that the samples represent little of it.
TEST_F(FloatCodecTest, restores_any_bytes) {
  for (int round = 0; round < 200; ++round) {
    Bytes chunk = test::make_bytes(kPageBytes + random_() % (kChunkBytes - kPageBytes), random_());
    for (int stretch = 0; stretch < 8; ++stretch) {
      const uint64_t begin = random_() % chunk.size(), nbytes = random_() % (chunk.size() - begin);
      const float least = static_cast<float>(random_() % 5) - 3;
      const Bytes other = stretch % 3 == 0   ? Bytes(nbytes, static_cast<std::byte>(random_() % 3 * 0x7f))
                          : stretch % 3 == 1 ? values<uint16_t>(nbytes, least)
                                             : values<uint32_t>(nbytes, least);
      std::memcpy(chunk.data() + begin, other.data(), nbytes);
    }
    round_trip(chunk);
  }
}

TEST_F(FloatCodecTest, keeps_every_bit_of_special_values) {
  Bytes chunk = values<uint32_t>(kChunkBytes, 0);
  const uint32_t specials[] = {0x80000000, 0x7f800000, 0xff800000, 0x7fc00000, 0xffffffff, 0x7f800001, 1, 0x807fffff};
  for (int i = 0; i < 1000; ++i) {
    std::memcpy(chunk.data() + random_() % (kChunkBytes / 4) * 4, specials + random_() % std::size(specials), 4);
  }
  EXPECT_LT(round_trip(chunk), kChunkBytes);
}

TEST_F(FloatCodecTest, touches_nothing_else_for_encodings_that_are_damaged) {
  const Bytes chunk = values<uint32_t>(kChunkBytes, 0);
  const uint64_t encoded_bytes = *encode(chunk.data(), chunk.size(), memory());
  const Bytes encoded = bytes_;
  int num_refused = 0;
  Bytes back(chunk.size());
  for (uint64_t i = 0; i < encoded_bytes; i += i < 64 ? 1 : 997) {
    bytes_ = encoded;
    bytes_[i] ^= static_cast<std::byte>(1 << random_() % 8);
    num_refused += !decode(back.data(), back.size(), memory(), encoded_bytes);
  }
  EXPECT_GT(num_refused, 4);
  bytes_ = encoded;
  EXPECT_FALSE(decode(back.data(), back.size(), memory(), encoded_bytes - 1));
  EXPECT_FALSE(decode(back.data(), back.size(), memory(), 3));
}

}  // namespace
}  // namespace lmswap::test::float_codec_test
