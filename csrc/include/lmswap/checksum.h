// Are these still the same bytes? Sums that tell, one for each begun MiB.
//
// A sum is that of the 32-bit words, each times an odd number of its own, modulo 2^64; what is missing at the end
// counts as zeros. Words and factors are below 2^32, so that none of these goes unseen: one word that changed, two
// bits, two words that changed places. Anything else, such as another block's bytes, has one chance in some 2^60.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace lmswap {

inline constexpr uint64_t kChecksumBytes = 1 << 20;  // of one sum

class Checksums {
 public:
  explicit Checksums(uint64_t nbytes) : sums_((nbytes + kChecksumBytes - 1) / kChecksumBytes) {}

  // Of the bytes from `begin` on, which begin a MiB and end one, or the whole. Threads may note different parts at
  // once.
  void note(uint64_t begin, const std::byte* bytes, uint64_t nbytes);

  // Where the first MiB begins that was noted otherwise; nothing if all bytes are as they were.
  std::optional<uint64_t> first_change(uint64_t begin, const std::byte* bytes, uint64_t nbytes) const;

  const std::vector<uint64_t>& sums() const { return sums_; }

 private:
  std::vector<uint64_t> sums_;
};

}  // namespace lmswap
