#include "lmswap/tiers/float_codec.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>

#include "lmswap/tiers/arena.h"

namespace lmswap {
namespace {

constexpr uint8_t kOutlier = 15;  // the code of an exponent that is not among the common ones
constexpr uint64_t kGroup = 64;   // words per word of the bitmap

struct Header {
  uint32_t num_kept = 0, num_outliers = 0;
  uint8_t word_bytes = 0;
  uint8_t exponent = 0;    // the largest of the common ones
  uint8_t has_bitmap = 0;  // else all words are kept
  uint8_t has_codes = 0;   // else the kept words are stored as they are
};

template <typename Word>
Word load(const std::byte* bytes) {
  Word word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

template <typename Word>
void store(std::byte* bytes, Word word) {
  std::memcpy(bytes, &word, sizeof word);
}

// A word rotated left by one bit begins with the exponent, of fp32 and of bf16, and ends with the sign.
template <typename Word>
constexpr int kExponentShift = 8 * (sizeof(Word) - 1);

// The parts of an encoded chunk, consecutive, and behind their largest extent the scratch memory.
template <typename Word>
struct Parts {
  Parts(CodecMemory memory, uint64_t num_words, const Header& header)
      : bitmap(memory.data() + sizeof(Header)),
        codes(bitmap + (header.has_bitmap ? (num_words + kGroup - 1) / kGroup * sizeof(uint64_t) : 0)),
        lows(codes + (header.num_kept + 1) / 2),
        middles(lows + header.num_kept),
        outliers(middles + header.num_kept * (sizeof(Word) - 2)),
        exponents(reinterpret_cast<uint8_t*>(memory.data() + 2 * kChunkBytes)),
        kept(header.has_codes ? memory.data() + 3 * kChunkBytes - kChunkBytes / 4 : codes),
        rest(header.has_codes ? outliers + header.num_outliers : kept + header.num_kept * sizeof(Word)) {}

  std::byte *bitmap, *codes, *lows, *middles, *outliers;
  uint8_t* exponents;  // of the kept words
  std::byte* kept;     // the kept words
  std::byte* rest;     // a partial word at the end
};

// The expected result of encoding by words of one width, from a sample.
struct Estimate {
  Header header;
  double share = 1;  // of the bytes that remain
};

template <typename Word>
Estimate estimate(const std::byte* chunk, uint64_t num_words) {
  constexpr uint64_t kSamples = 512;  // an error of at most 2 % of the share
  constexpr double kWordBytes = sizeof(Word), kBitmapBytes = 1.0 / 8;
  constexpr double kMaxOutliers = 1.0 / 8;  // of fp16, four in five are outliers: 0.4 GB/s for nothing, instead of 2
  std::array<uint32_t, 256> counts = {};
  uint32_t num_kept = 0;
  for (uint64_t i = 0; i < kSamples; ++i) {
    // Pseudo-random, since channels and the halves of wider elements recur at a regular distance.
    const uint64_t sample = (uint64_t{static_cast<uint32_t>(i) * 0x9e3779b1} * num_words) >> 32;
    const Word word = load<Word>(chunk + sample * sizeof(Word));
    num_kept += word != 0;
    counts[std::rotl(word, 1) >> kExponentShift<Word>] += word != 0;
  }
  // The common exponents are those of the window, as long as there are codes, with the most values.
  uint32_t num_common = 0, most_common = 0;
  uint64_t last = 0;
  for (uint64_t end = 1; end <= counts.size(); ++end) {
    num_common += counts[end - 1];
    if (end > kOutlier) num_common -= counts[end - 1 - kOutlier];
    if (num_common > most_common) most_common = num_common, last = end - 1;
  }
  const double kept = num_kept / double{kSamples}, outliers = (num_kept - most_common) / double{kSamples};
  const bool has_codes = outliers < kMaxOutliers * kept;
  const double kept_bytes = has_codes ? kWordBytes - 0.5 : kWordBytes;
  const double with_bitmap = kept * kept_bytes + kBitmapBytes, without = kept_bytes;
  Estimate found;
  found.header.word_bytes = sizeof(Word);
  found.header.exponent = static_cast<uint8_t>(last);
  found.header.has_bitmap = with_bitmap < without;
  found.header.has_codes = has_codes;
  found.share = (std::min(with_bitmap, without) + (has_codes ? outliers : 0)) / kWordBytes;
  return found;
}

// Copies the words that are not zero to `kept`; returns their number.
template <typename Word>
uint64_t compact_nonzero(const std::byte* words, uint64_t num_words, std::byte* bitmap, std::byte* kept) {
  uint64_t num_kept = 0;
  for (uint64_t begin = 0; begin < num_words; begin += kGroup) {
    const uint64_t end = std::min(begin + kGroup, num_words);
    uint64_t bits = 0;
    for (uint64_t i = begin; i < end; ++i) {
      const Word word = load<Word>(words + i * sizeof(Word));
      store(kept + num_kept * sizeof(Word), word);
      bits |= uint64_t{word != 0} << (i - begin);
      num_kept += word != 0;
    }
    store(bitmap + begin / 8, bits);
  }
  return num_kept;
}

template <typename Word>
void expand_nonzero(std::byte* words, uint64_t num_words, const std::byte* bitmap, const std::byte* kept) {
  for (uint64_t begin = 0; begin < num_words; begin += kGroup) {
    const uint64_t end = std::min(begin + kGroup, num_words);
    uint64_t bits = load<uint64_t>(bitmap + begin / 8);
    for (uint64_t i = begin; i < end; ++i, bits >>= 1) {
      const Word word = load<Word>(kept);
      store(words + i * sizeof(Word), static_cast<Word>(word & -static_cast<Word>(bits & 1)));
      kept += (bits & 1) * sizeof(Word);
    }
  }
}

// Calls `take(i)` for each outlier; there are few.
template <typename Take>
void for_outliers(const uint8_t* exponents, uint64_t count, uint8_t largest, Take take) {
  for (uint64_t begin = 0; begin < count; begin += kGroup) {
    const uint64_t end = std::min(begin + kGroup, count);
    uint8_t most = 0;
    for (uint64_t i = begin; i < end; ++i) most = std::max(most, static_cast<uint8_t>(largest - exponents[i]));
    if (most < kOutlier) continue;
    for (uint64_t i = begin; i < end; ++i) {
      if (static_cast<uint8_t>(largest - exponents[i]) >= kOutlier) take(i);
    }
  }
}

// Exponents i and i + half share a byte: neighbours would have to be shuffled.
void write_codes(const uint8_t* exponents, uint64_t count, uint8_t largest, std::byte* codes) {
  const auto code = [&](uint64_t i) { return std::min(static_cast<uint8_t>(largest - exponents[i]), kOutlier); };
  const uint64_t half = (count + 1) / 2;
  for (uint64_t i = 0; i < half; ++i) codes[i] = static_cast<std::byte>(code(i) | code(i + half) << 4);
}

void read_codes(const std::byte* codes, uint64_t count, uint8_t largest, uint8_t* exponents) {
  const uint64_t half = (count + 1) / 2;
  for (uint64_t i = 0; i < half; ++i) {
    exponents[i] = static_cast<uint8_t>(largest - (static_cast<uint8_t>(codes[i]) & 15));
    exponents[i + half] = static_cast<uint8_t>(largest - (static_cast<uint8_t>(codes[i]) >> 4));
  }
}

// Encodes the kept words; returns the number of outliers.
template <typename Word>
uint32_t write_kept(const std::byte* words, const Header& header, const Parts<Word>& parts) {
  for (uint64_t i = 0; i < header.num_kept; ++i) {
    const Word turned = std::rotl(load<Word>(words + i * sizeof(Word)), 1);
    parts.exponents[i] = static_cast<uint8_t>(turned >> kExponentShift<Word>);
    store(parts.lows + i, static_cast<uint8_t>(turned));
    if constexpr (sizeof(Word) == 4) store(parts.middles + 2 * i, static_cast<uint16_t>(turned >> 8));
  }
  parts.exponents[header.num_kept] = header.exponent;  // where the count is odd, the last one has a neighbour
  write_codes(parts.exponents, header.num_kept, header.exponent, parts.codes);
  std::byte* end = parts.outliers;
  for_outliers(parts.exponents, header.num_kept, header.exponent,
               [&](uint64_t i) { *end++ = static_cast<std::byte>(parts.exponents[i]); });
  return static_cast<uint32_t>(end - parts.outliers);
}

template <typename Word>
void read_kept(std::byte* words, const Header& header, const Parts<Word>& parts) {
  read_codes(parts.codes, header.num_kept, header.exponent, parts.exponents);
  const std::byte* outliers = parts.outliers;
  for_outliers(parts.exponents, header.num_kept, header.exponent, [&](uint64_t i) {
    if (outliers < parts.rest) parts.exponents[i] = static_cast<uint8_t>(*outliers++);
  });
  for (uint64_t i = 0; i < header.num_kept; ++i) {
    Word turned = load<uint8_t>(parts.lows + i);
    if constexpr (sizeof(Word) == 4) turned |= Word{load<uint16_t>(parts.middles + 2 * i)} << 8;
    turned = static_cast<Word>(turned | Word{parts.exponents[i]} << kExponentShift<Word>);
    store(words + i * sizeof(Word), std::rotr(turned, 1));
  }
}

template <typename Word>
uint64_t encode_words(const std::byte* chunk, uint64_t nbytes, CodecMemory memory, Header header) {
  const uint64_t num_words = nbytes / sizeof(Word), rest_bytes = nbytes % sizeof(Word);
  const std::byte* words = chunk;
  header.num_kept = static_cast<uint32_t>(num_words);
  if (header.has_bitmap) {
    const Parts<Word> parts(memory, num_words, header);
    header.num_kept = static_cast<uint32_t>(compact_nonzero<Word>(chunk, num_words, parts.bitmap, parts.kept));
    words = parts.kept;
  }
  if (header.has_codes) header.num_outliers = write_kept(words, header, Parts<Word>(memory, num_words, header));
  std::byte* const rest = Parts<Word>(memory, num_words, header).rest;
  std::memcpy(rest, chunk + num_words * sizeof(Word), rest_bytes);
  store(memory.data(), header);
  return static_cast<uint64_t>(rest - memory.data()) + rest_bytes;
}

template <typename Word>
bool decode_words(std::byte* chunk, uint64_t nbytes, CodecMemory memory, uint64_t encoded_bytes, Header header) {
  const uint64_t num_words = nbytes / sizeof(Word), rest_bytes = nbytes % sizeof(Word);
  if (header.num_kept > num_words || header.num_outliers > header.num_kept) return false;
  if (!header.has_bitmap && (header.num_kept != num_words || !header.has_codes)) return false;
  const Parts<Word> parts(memory, num_words, header);
  if (static_cast<uint64_t>(parts.rest - memory.data()) + rest_bytes != encoded_bytes) return false;
  if (header.has_codes) read_kept(header.has_bitmap ? parts.kept : chunk, header, parts);
  if (header.has_bitmap) expand_nonzero<Word>(chunk, num_words, parts.bitmap, parts.kept);
  std::memcpy(chunk + num_words * sizeof(Word), parts.rest, rest_bytes);
  return true;
}

}  // namespace

std::optional<uint64_t> encode(const std::byte* chunk, uint64_t nbytes, CodecMemory memory) {
  constexpr double kMaxShare = 15.0 / 16;  // less is not worth its time
  if (nbytes <= kPageBytes) return std::nullopt;
  const Estimate wide = estimate<uint32_t>(chunk, nbytes / 4), narrow = estimate<uint16_t>(chunk, nbytes / 2);
  if (std::min(wide.share, narrow.share) > kMaxShare) return std::nullopt;
  const uint64_t encoded_bytes = wide.share <= narrow.share
                                     ? encode_words<uint32_t>(chunk, nbytes, memory, wide.header)
                                     : encode_words<uint16_t>(chunk, nbytes, memory, narrow.header);
  if (round_to_pages(encoded_bytes) >= nbytes) return std::nullopt;
  return encoded_bytes;
}

bool decode(std::byte* chunk, uint64_t nbytes, CodecMemory memory, uint64_t encoded_bytes) {
  if (encoded_bytes < sizeof(Header)) return false;
  const auto header = load<Header>(memory.data());
  if (header.word_bytes == 4) return decode_words<uint32_t>(chunk, nbytes, memory, encoded_bytes, header);
  return decode_words<uint16_t>(chunk, nbytes, memory, encoded_bytes, header);
}

}  // namespace lmswap
